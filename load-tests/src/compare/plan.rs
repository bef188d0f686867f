//! What is compared, how long and how often: `load-tests/compare.toml` or a file like it.

use std::collections::BTreeSet;
use std::num::NonZero;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::recipe::Recipe;
use crate::drive::scenario::time;
use crate::drive::target::{Protocol, Target};

const USUAL: &str = include_str!("../../compare.toml");
const MOST: usize = 1000;

/// A comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Plan {
    /// Requests under way at once.
    pub(crate) concurrency: Vec<usize>,
    /// Of each measurement, after its warm-up.
    #[serde(with = "time")]
    pub(crate) duration: Duration,
    #[serde(with = "time")]
    pub(crate) warmup: Duration,
    /// Rounds over all servers.
    pub(crate) repetitions: usize,
    pub(crate) batching: Vec<Batching>,
    /// Requests that may be joined where batching is on.
    pub(crate) max_batch: usize,
    /// How long a request may wait for others, in servers that wait at all.
    #[serde(with = "time")]
    pub(crate) batch_delay: Duration,
    /// Of an operator; 0 for as many as there are cores.
    pub(crate) threads: usize,
    pub(crate) servers: Vec<ServerPlan>,
    pub(crate) workloads: Vec<Workload>,
    #[serde(default)]
    pub(crate) cold: Option<ColdPlan>,
}

/// Whether servers join requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Batching {
    #[default]
    Off,
    On,
}

/// A server that takes part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ServerPlan {
    pub(crate) name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) recipe: Option<String>,
    /// A server that runs already, as `grpc://HOST:PORT`; it must have the models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) address: Option<String>,
    pub(crate) protocol: Protocol,
    /// Further words of its command line.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) flags: Vec<String>,
    /// Lines for each model's `config.pbtxt`, of servers that have one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) config: String,
    #[serde(default = "ServerPlan::usual_tables")]
    pub(crate) tables: BTreeSet<Table>,
}

/// A part of a comparison.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Table {
    /// Throughput, latency and processor time per request
    Load,
    /// Cold starts and memory
    Cold,
}

/// A model and the request it is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Workload {
    pub(crate) name: String,
    pub(crate) model: String,
    /// Length of the sequence, of models that take one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tokens: Option<usize>,
}

/// Cold starts and memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ColdPlan {
    /// Models whose first answer is timed, from the start of the process and from a load.
    pub(crate) models: Vec<String>,
    /// Starts of each server with each model, and with each number of copies.
    pub(crate) repetitions: usize,
    /// Loads in each of them.
    pub(crate) loads: usize,
    /// How many copies of a model memory is told for.
    pub(crate) copies: Vec<usize>,
    pub(crate) copied: String,
}

impl ServerPlan {
    fn usual_tables() -> BTreeSet<Table> {
        BTreeSet::from([Table::Load, Table::Cold])
    }
}

impl Plan {
    /// The plan of a file, or the usual one.
    pub(crate) fn open(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else {
            return Self::parse(USUAL).context("the usual comparison");
        };
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("cannot use {}", path.display()))
    }

    /// Reads and checks a plan.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let plan: Self = toml::from_str(text)?;
        plan.check()?;
        Ok(plan)
    }

    /// Whether it can be carried out at all; to be asked again after anything was changed.
    pub(crate) fn check(&self) -> Result<()> {
        ensure!(
            (1..=64).contains(&self.concurrency.len())
                && self.concurrency.iter().all(|n| (1..=MOST).contains(n)),
            "concurrency: 1 to 64 numbers from 1 to {MOST}"
        );
        let hour = Duration::from_secs(3600);
        ensure!(
            self.duration >= Duration::from_millis(50) && self.duration <= hour,
            "duration: from 50ms to 1h"
        );
        ensure!(self.warmup <= hour, "warmup: at most 1h");
        ensure!(
            (1..=100).contains(&self.repetitions),
            "repetitions: from 1 to 100"
        );
        ensure!(
            !self.batching.is_empty(),
            "batching: \"off\", \"on\" or both"
        );
        ensure!((2..=MOST).contains(&self.max_batch), "max_batch: from 2");
        ensure!(
            self.batch_delay <= Duration::from_secs(1),
            "batch_delay: at most 1s"
        );
        ensure!(self.threads <= MOST, "threads: at most {MOST}");
        ensure!(!self.servers.is_empty(), "servers: at least one");
        ensure!(!self.workloads.is_empty(), "workloads: at least one");
        let mut names = BTreeSet::new();
        for server in &self.servers {
            server
                .check()
                .with_context(|| format!("server '{}'", server.name))?;
            ensure!(
                names.insert(&server.name),
                "servers: two are called '{}'",
                server.name
            );
        }
        let mut names = BTreeSet::new();
        for workload in &self.workloads {
            ensure!(
                !workload.name.is_empty() && names.insert(&workload.name),
                "workloads: '{}' must be a name of its own",
                workload.name
            );
            ensure!(
                workload.tokens.is_none_or(|n| (1..=512).contains(&n)),
                "workload '{}': tokens from 1 to 512",
                workload.name
            );
        }
        if let Some(cold) = &self.cold {
            ensure!(
                (1..=100).contains(&cold.repetitions)
                    && cold.loads <= 100
                    && cold.copies.iter().all(|n| (1..=64).contains(n)),
                "cold: 1 to 100 repetitions, at most 100 loads, 1 to 64 copies"
            );
        }
        Ok(())
    }

    /// Short enough to see whether everything works.
    pub(crate) fn shorten(&mut self) {
        self.duration = self.duration.min(Duration::from_millis(300));
        self.warmup = self.warmup.min(Duration::from_millis(100));
        self.repetitions = 1;
        if let Some(cold) = &mut self.cold {
            cold.repetitions = 1;
            cold.loads = cold.loads.min(1);
        }
    }

    /// Threads of an operator in every server.
    pub(crate) fn thread_count(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, NonZero::get),
            threads => threads,
        }
    }

    /// The servers of a table.
    pub(crate) fn servers_of(&self, table: Table) -> impl Iterator<Item = &ServerPlan> {
        self.servers
            .iter()
            .filter(move |server| server.tables.contains(&table))
    }

    /// What a server is compared with: the first of its protocol in the table.
    pub(crate) fn baseline(&self, server: &str, table: Table) -> Option<&str> {
        let protocol = self.servers.iter().find(|one| one.name == server)?.protocol;
        let mut servers = self.servers_of(table);
        let first = servers.find(|one| one.protocol == protocol)?;
        Some(&first.name)
    }
}

impl ServerPlan {
    fn check(&self) -> Result<()> {
        ensure!(
            !self.name.is_empty()
                && self
                    .name
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)),
            "name: letters, digits, '-', '_' and '.'"
        );
        match (&self.recipe, &self.address) {
            (Some(recipe), None) => {
                let recipe = Recipe::named(recipe)?;
                ensure!(
                    recipe.protocols.contains(&self.protocol),
                    "protocol: it does not speak {:?}",
                    self.protocol
                );
            }
            (None, Some(address)) => {
                let target = Target::at(address.clone());
                target.authority()?;
                ensure!(
                    self.flags.is_empty() && self.config.is_empty(),
                    "flags, config: it runs already"
                );
            }
            _ => anyhow::bail!("either a recipe or an address"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_comparison_is_complete() {
        let plan = Plan::open(None).unwrap();
        assert_eq!(plan.concurrency, [1, 8, 32, 64]);
        assert_eq!(plan.baseline("kserve", Table::Load), Some("dormouse"));
        assert_eq!(plan.baseline("bentoml", Table::Load), Some("dormouse-http"));
        assert!(plan.thread_count() > 0);
        let loaded: Vec<_> = plan.servers_of(Table::Load).map(|s| &*s.name).collect();
        assert!(!loaded.contains(&"dormouse-unprepared"), "{loaded:?}");
        let mut quick = plan.clone();
        quick.shorten();
        quick.check().unwrap();
        assert!(quick.duration < plan.duration);
    }

    #[test]
    fn faulty_plans_are_refused_with_the_key() {
        let check = |change: fn(&mut Plan), words: &str| {
            let mut plan = Plan::open(None).unwrap();
            change(&mut plan);
            let error = format!("{:#}", plan.check().unwrap_err());
            assert!(error.contains(words), "{error}");
        };
        check(|plan| plan.concurrency = vec![0], "concurrency");
        check(|plan| plan.repetitions = 0, "repetitions");
        check(
            |plan| plan.servers[1].name = "dormouse".into(),
            "two are called",
        );
        check(|plan| plan.servers[0].recipe = None, "recipe or an address");
        check(
            |plan| plan.servers[0].recipe = Some("x".into()),
            "no recipe 'x'",
        );
        check(
            |plan| {
                plan.servers[0].recipe = Some("litserve".into());
            },
            "does not speak Grpc",
        );
        check(|plan| plan.workloads[0].tokens = Some(0), "tokens");
        check(
            |plan| plan.workloads[1].name = "identity".into(),
            "of its own",
        );
        check(
            |plan| {
                plan.servers[0].recipe = None;
                plan.servers[0].address = Some("grpc://localhost".into());
            },
            "host and a port",
        );
    }
}

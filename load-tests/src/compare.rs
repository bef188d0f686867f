//! `dormouse-load compare`: servers side by side on the same models with the same load.

pub(crate) mod ask;
mod cold;
pub(crate) mod figures;
mod group;
mod install;
mod load;
pub(crate) mod plan;
mod recipe;
pub(crate) mod report;
mod server;
#[cfg(test)]
mod tests;
mod workload;

use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use self::cold::Starts;
use self::figures::{Comparison, Part, SCHEMA, ServerFacts};
use self::load::Rounds;
use self::plan::{Plan, Table};
use self::server::{Contestant, Kind};
use self::workload::Workloads;
use crate::drive::outcome::{Machine, Tool};
use crate::models;

/// Compares servers on the same models with the same load, in rounds.
///
/// Servers are installed from PyPI into environments of their own below the build's folder when they
/// are needed for the first time. Each round starts every server, sees that its answers are right,
/// drives it and ends it with everything it started. Ratios are those within a round; the spread is
/// that of the rounds. The usual comparison takes about 45 minutes.
#[derive(Args, Debug)]
pub(crate) struct CompareArgs {
    /// What is compared [default: load-tests/compare.toml, as the program was built with it]
    #[arg(value_name = "FILE.toml")]
    file: Option<PathBuf>,
    /// Only these servers of the file
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    servers: Vec<String>,
    /// Only these workloads of the file
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    workloads: Vec<String>,
    /// Only these tables
    #[arg(long, value_name = "TABLE,...", value_delimiter = ',')]
    tables: Vec<Table>,
    /// Rounds, instead of the file's
    #[arg(long, value_name = "N")]
    repetitions: Option<usize>,
    /// Start all servers at once and measure them in turns
    #[arg(long)]
    side_by_side: bool,
    /// One short round: whether everything works, not how fast it is
    #[arg(long)]
    quick: bool,
    /// Install what the comparison needs, and end
    #[arg(long)]
    install_only: bool,
    /// Write everything as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl CompareArgs {
    fn plan(&self) -> Result<Plan> {
        let mut plan = Plan::open(self.file.as_deref())?;
        if self.quick {
            plan.shorten();
        }
        if let Some(repetitions) = self.repetitions {
            plan.repetitions = repetitions;
            if let Some(cold) = &mut plan.cold {
                cold.repetitions = repetitions;
            }
        }
        let known: Vec<String> = plan.servers.iter().map(|s| s.name.clone()).collect();
        choose(&self.servers, &known, "server")?;
        let known: Vec<String> = plan.workloads.iter().map(|w| w.name.clone()).collect();
        choose(&self.workloads, &known, "workload")?;
        if !self.servers.is_empty() {
            plan.servers.retain(|one| self.servers.contains(&one.name));
        }
        if !self.workloads.is_empty() {
            plan.workloads
                .retain(|one| self.workloads.contains(&one.name));
        }
        if !self.tables.is_empty() {
            for server in &mut plan.servers {
                server.tables.retain(|table| self.tables.contains(table));
            }
            if !self.tables.contains(&Table::Cold) {
                plan.cold = None;
            }
        }
        plan.check()?;
        Ok(plan)
    }
}

fn choose(wanted: &[String], known: &[String], what: &str) -> Result<()> {
    match wanted.iter().find(|name| !known.contains(name)) {
        Some(name) => bail!(
            "there is no {what} '{name}'; there are {}",
            known.join(", ")
        ),
        None => Ok(()),
    }
}

pub(crate) async fn run(args: CompareArgs) -> Result<()> {
    let plan = args.plan()?;
    let mut terminated = signal(SignalKind::terminate())?;
    // Dropping what is under way ends its servers.
    let found = tokio::select! {
        found = compare(plan, args.side_by_side, args.install_only) => found?,
        _ = tokio::signal::ctrl_c() => bail!("interrupted; the servers were ended"),
        _ = terminated.recv() => bail!("terminated; the servers were ended"),
    };
    if args.install_only {
        return Ok(());
    }
    if let Some(path) = &args.json {
        let document = serde_json::to_string_pretty(&found)? + "\n";
        std::fs::write(path, document)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    report::print(&found)
}

/// Carries out a plan.
async fn compare(plan: Plan, side_by_side: bool, install_only: bool) -> Result<Comparison> {
    let mut found = Comparison {
        schema: SCHEMA,
        tool: Tool::this(),
        machine: Machine::here(),
        started_unix: SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |time| time.as_secs()),
        seconds: 0.0,
        side_by_side,
        plan,
        servers: Vec::new(),
        absent: Vec::new(),
        load: Vec::new(),
        starts: Vec::new(),
        memory: Vec::new(),
    };
    let mut contestants = Vec::new();
    for server in found.plan.servers.clone() {
        match Contestant::prepare(&server, &found.plan).await {
            Ok(contestant) => {
                found.servers.push(facts(&contestant));
                contestants.push(contestant);
            }
            Err(error) => found.drop_out(&server.name, Part::Installation, &error),
        }
    }
    if install_only {
        return Ok(found);
    }
    ensure!(!contestants.is_empty(), "no server can take part");
    let scratch = models::scratch()?;
    let (plan, folder) = (found.plan.clone(), scratch.path().to_owned());
    let workloads =
        tokio::task::spawn_blocking(move || Workloads::prepare(&plan, &folder)).await??;
    let started = Instant::now();
    let rounds = Rounds {
        workloads: &workloads,
        contestants: &contestants,
        scratch: scratch.path(),
    };
    if found.plan.servers_of(Table::Load).next().is_some() {
        match side_by_side {
            true => rounds.side_by_side(&mut found).await?,
            false => rounds.one_after_the_other(&mut found).await?,
        }
    }
    if let Some(cold) = found.plan.cold.clone() {
        let starts = Starts {
            workloads: &workloads,
            contestants: &contestants,
            scratch: scratch.path(),
        };
        starts.measure(&cold, &mut found).await?;
    }
    found.seconds = started.elapsed().as_secs_f64();
    Ok(found)
}

fn facts(contestant: &Contestant) -> ServerFacts {
    let (title, versions, notes) = match &contestant.kind {
        Kind::Started { recipe, .. } => {
            let versions = match recipe.name.as_str() {
                "dormouse" => vec![format!("dormouse {}", env!("CARGO_PKG_VERSION"))],
                _ => recipe.packages.clone(),
            };
            (
                recipe.title.clone(),
                versions,
                recipe.notes.trim().to_owned(),
            )
        }
        Kind::Running(target) => (
            format!("at {}", target.url),
            Vec::new(),
            "Started by somebody else.".to_owned(),
        ),
    };
    let mut notes = notes.replace('\n', " ");
    if !contestant.plan.flags.is_empty() {
        notes = format!("{notes} Flags: {}.", contestant.plan.flags.join(" "));
    }
    ServerFacts {
        name: contestant.plan.name.clone(),
        title,
        versions,
        notes,
    }
}

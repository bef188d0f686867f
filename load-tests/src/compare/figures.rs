//! What a comparison found, as `--json` writes it and the results page reads it.

use serde::{Deserialize, Serialize};

use super::plan::{Batching, Plan, Table};
use crate::drive::outcome::{Machine, Tool};
use crate::samples::Samples;

/// The version of this document.
pub(crate) const SCHEMA: u32 = 1;

/// Everything about one comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Comparison {
    pub(crate) schema: u32,
    pub(crate) tool: Tool,
    pub(crate) machine: Machine,
    /// Seconds since 1970.
    pub(crate) started_unix: u64,
    pub(crate) seconds: f64,
    pub(crate) side_by_side: bool,
    pub(crate) plan: Plan,
    pub(crate) servers: Vec<ServerFacts>,
    /// Servers that could not take part, or fell out.
    pub(crate) absent: Vec<Absent>,
    pub(crate) load: Vec<LoadCell>,
    pub(crate) starts: Vec<StartCell>,
    pub(crate) memory: Vec<MemoryCell>,
}

/// What took part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ServerFacts {
    pub(crate) name: String,
    pub(crate) title: String,
    /// Packages with their versions; for others what the server calls itself.
    pub(crate) versions: Vec<String>,
    pub(crate) notes: String,
}

/// What did not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Absent {
    pub(crate) server: String,
    pub(crate) part: Part,
    pub(crate) reason: String,
}

/// Parts of a comparison that a server can fall out of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Part {
    /// All of it.
    Installation,
    Load,
    Starts,
    Memory,
}

/// One server under one load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct LoadCell {
    pub(crate) server: String,
    pub(crate) workload: String,
    pub(crate) batching: Batching,
    pub(crate) concurrency: usize,
    /// Answers per second.
    pub(crate) throughput: Samples,
    /// Answers whose latencies the percentiles are of.
    #[serde(default)]
    pub(crate) answers: Samples,
    /// Milliseconds.
    pub(crate) p50: Samples,
    pub(crate) p99: Samples,
    /// User and system time of all its processes per request, in microseconds.
    pub(crate) cpu_micros: Samples,
    /// Of all its processes.
    pub(crate) resident_mib: Samples,
    /// Requests without an answer, of all repetitions.
    pub(crate) failed: u64,
    /// The words of one of them.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) failure: String,
}

/// One server's first answers of one model; milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct StartCell {
    pub(crate) server: String,
    pub(crate) model: String,
    /// From the start of the process.
    pub(crate) from_start: Samples,
    /// From a load through the repository's API, or from the request where that is enough.
    pub(crate) from_load: Samples,
}

/// One server's memory with some models loaded.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct MemoryCell {
    pub(crate) server: String,
    /// Empty for a server without models.
    pub(crate) model: String,
    pub(crate) copies: usize,
    pub(crate) processes: usize,
    pub(crate) resident_mib: Samples,
    /// Pages that its processes share counted once.
    pub(crate) proportional_mib: Samples,
}

impl Comparison {
    /// The cell of a server and a load, made when it is not there yet.
    pub(crate) fn load_cell(&mut self, key: &LoadCell) -> &mut LoadCell {
        let same = |cell: &LoadCell| {
            cell.server == key.server
                && cell.workload == key.workload
                && cell.batching == key.batching
                && cell.concurrency == key.concurrency
        };
        let place = self.load.iter().position(same).unwrap_or_else(|| {
            self.load.push(key.clone());
            self.load.len() - 1
        });
        &mut self.load[place]
    }

    /// The cell of a server's starts, made when it is not there yet.
    pub(crate) fn start_cell(&mut self, server: &str, model: &str) -> &mut StartCell {
        let same = |cell: &StartCell| cell.server == server && cell.model == model;
        let place = self.starts.iter().position(same).unwrap_or_else(|| {
            self.starts.push(StartCell {
                server: server.to_owned(),
                model: model.to_owned(),
                ..StartCell::default()
            });
            self.starts.len() - 1
        });
        &mut self.starts[place]
    }

    /// The cell of a server's memory, made when it is not there yet.
    pub(crate) fn memory_cell(
        &mut self,
        server: &str,
        model: &str,
        copies: usize,
    ) -> &mut MemoryCell {
        let same = |cell: &MemoryCell| {
            cell.server == server && cell.model == model && cell.copies == copies
        };
        let place = self.memory.iter().position(same).unwrap_or_else(|| {
            self.memory.push(MemoryCell {
                server: server.to_owned(),
                model: model.to_owned(),
                copies,
                ..MemoryCell::default()
            });
            self.memory.len() - 1
        });
        &mut self.memory[place]
    }

    /// What a cell is compared with; none for what others are compared with.
    pub(crate) fn baseline_of(&self, cell: &LoadCell) -> Option<&LoadCell> {
        let baseline = self.plan.baseline(&cell.server, Table::Load)?;
        if baseline == cell.server {
            return None;
        }
        self.load.iter().find(|other| {
            other.server == baseline
                && other.workload == cell.workload
                && other.batching == cell.batching
                && other.concurrency == cell.concurrency
        })
    }

    /// Notes that a server does not take part any more, and says so.
    pub(crate) fn drop_out(&mut self, server: &str, part: Part, reason: &anyhow::Error) {
        if !self.is_absent(server, part) {
            eprintln!("{server} drops out: {reason:#}");
            self.absent.push(Absent {
                server: server.to_owned(),
                part,
                reason: format!("{reason:#}"),
            });
        }
    }

    /// Whether a server has dropped out of a part.
    pub(crate) fn is_absent(&self, server: &str, part: Part) -> bool {
        self.absent.iter().any(|absent| {
            absent.server == server && [part, Part::Installation].contains(&absent.part)
        })
    }
}

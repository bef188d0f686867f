//! What a run found, as `--json` writes it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::scenario::Scenario;
use super::target::Target;

/// The version of this document; a field that changes its meaning raises it.
pub(crate) const SCHEMA: u32 = 1;

/// Everything about one run. Times are milliseconds unless their names say otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) schema: u32,
    pub(crate) tool: Tool,
    pub(crate) machine: Machine,
    pub(crate) server: ServerIdentity,
    pub(crate) target: Target,
    /// After flags had their say.
    pub(crate) scenario: Scenario,
    /// Seconds since 1970.
    pub(crate) started_unix: u64,
    /// Somebody ended it before its time.
    pub(crate) ended_early: bool,
    /// In the order they were run.
    pub(crate) steps: Vec<Step>,
    /// What the HdrHistogram log is written from.
    #[serde(skip)]
    pub(crate) intervals: Vec<Interval>,
}

/// What measured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tool {
    pub(crate) name: String,
    pub(crate) version: String,
    /// Whether it was built with optimisations.
    pub(crate) optimised: bool,
    pub(crate) command_line: Vec<String>,
    /// Of the repository that it was built in, with a mark when files differ from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) commit: Option<String>,
    /// Version of the ONNX Runtime that Dormouse and plain sessions use here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) onnxruntime: Option<String>,
}

/// Where it was measured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Machine {
    pub(crate) cpu: String,
    pub(crate) cores: usize,
    pub(crate) memory_bytes: u64,
    pub(crate) kernel: String,
}

/// What the server calls itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ServerIdentity {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) extensions: Vec<String>,
    /// How tensors travelled: `binary` or `json`.
    pub(crate) data: String,
}

/// One concurrency or rate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Step {
    /// For people: `8 at once`, `100/s poisson`, `cold`.
    pub(crate) label: String,
    #[serde(default)]
    pub(crate) concurrency: Option<usize>,
    #[serde(default)]
    pub(crate) rate: Option<f64>,
    /// What was measured, without the warm-up.
    pub(crate) seconds: f64,
    /// Requests of the warm-up, answered or not.
    pub(crate) warmup_requests: u64,
    /// All models together.
    pub(crate) all: Figures,
    pub(crate) models: BTreeMap<String, Figures>,
    pub(crate) windows: Vec<Window>,
    /// Answers that found their model cold, the first thousand.
    pub(crate) cold: Vec<ColdStartSeen>,
    /// Answers that were wrong, the first ten in words.
    pub(crate) mismatches: Vec<String>,
    /// The first words of each kind of error.
    pub(crate) error_examples: BTreeMap<String, String>,
    /// Of the server process and its descendants, where their id was given.
    #[serde(default)]
    pub(crate) process: Option<ProcessUse>,
}

/// What became of requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Figures {
    pub(crate) sent: u64,
    /// With an answer that is not known to be wrong.
    pub(crate) answered: u64,
    /// With an answer that differs from the expected one.
    pub(crate) wrong: u64,
    /// Given up by the client on purpose.
    pub(crate) cancelled: u64,
    /// Due while too many others were under way.
    pub(crate) not_sent: u64,
    /// By status: `UNAVAILABLE`, `503`, `connection`, `timeout`.
    pub(crate) errors: BTreeMap<String, u64>,
    /// Answers that found their model cold.
    pub(crate) cold: u64,
    /// Answers per second.
    pub(crate) throughput: f64,
    /// From when the request was due, answers only.
    pub(crate) latency: Latencies,
    /// From when it was really sent.
    pub(crate) service: Latencies,
    /// From when it was due to when it was sent: the generator's own lateness.
    pub(crate) late: Latencies,
    /// From when it was due to its error.
    pub(crate) error_latency: Latencies,
}

impl Figures {
    /// Requests that ended with an error of any kind.
    pub(crate) fn failed(&self) -> u64 {
        self.errors.values().sum()
    }
}

/// A distribution of times in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Latencies {
    pub(crate) count: u64,
    pub(crate) min: f64,
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) max: f64,
}

/// What ended within one window.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Window {
    /// From the start of the step's measured time.
    pub(crate) start_seconds: f64,
    pub(crate) seconds: f64,
    pub(crate) sent: u64,
    pub(crate) answered: u64,
    pub(crate) wrong: u64,
    pub(crate) cancelled: u64,
    pub(crate) not_sent: u64,
    pub(crate) errors: BTreeMap<String, u64>,
    pub(crate) cold: u64,
    pub(crate) latency: Latencies,
    #[serde(default)]
    pub(crate) process: Option<ProcessUse>,
}

/// What a server process and its descendants used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct ProcessUse {
    pub(crate) user_seconds: f64,
    pub(crate) system_seconds: f64,
    /// User and system time divided by requests that ended, in microseconds.
    pub(crate) micros_per_request: f64,
    /// At the end.
    pub(crate) resident_bytes: u64,
    /// The most that was seen at the end of a window.
    pub(crate) largest_resident_bytes: u64,
}

/// A request that found its model cold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct ColdStartSeen {
    pub(crate) model: String,
    /// When it was answered, from the start of the step's measured time.
    pub(crate) at_seconds: f64,
    /// From when the request was due to its answer, loading included.
    pub(crate) latency: f64,
    /// What loading through the repository's API took, where that was needed.
    #[serde(default)]
    pub(crate) load: Option<f64>,
    /// What the server says that waking the model took; only Dormouse tells.
    #[serde(default)]
    pub(crate) woke: Option<f64>,
    /// What the server says that it woke from.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) kind: String,
}

/// Latencies of one model within one window, as HdrHistogram serialises them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Interval {
    pub(crate) model: String,
    /// From the start of the run.
    pub(crate) start: std::time::Duration,
    pub(crate) length: std::time::Duration,
    /// Microseconds, V2 format.
    pub(crate) histogram: Vec<u8>,
}

impl Outcome {
    /// Whether any answer differed from the expected one.
    pub(crate) fn any_wrong(&self) -> bool {
        self.steps.iter().any(|step| step.all.wrong > 0)
    }

    /// Whether any request ended with an error or was not sent.
    pub(crate) fn any_failed(&self) -> bool {
        self.steps
            .iter()
            .any(|step| step.all.failed() > 0 || step.all.not_sent > 0)
    }
}

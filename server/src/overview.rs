//! What the server is doing at this moment, in one document: what the page shows, for anybody who
//! would rather ask than scrape. Wakes and reads nothing, and does not count as a call.

use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use dormouse_core::id::ModelId;
use serde::Serialize;

use crate::config::ControlMode;
use crate::memory;
use crate::service::{IndexEntry, Service};
use crate::stats::{DurationCount, VersionCounters};

/// Models listed when nobody says how many.
const DEFAULT_LIMIT: usize = 200;
/// Models listed at most.
const MAX_LIMIT: usize = 2_000;
/// Linux tells CPU time in this unit, whatever the kernel's own tick is.
const TICKS_PER_SECOND: f64 = 100.0;

/// Which models are to be told of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverviewQuery {
    /// Part of their name, in small letters; empty for all.
    pub search: String,
    pub limit: usize,
}

impl Default for OverviewQuery {
    fn default() -> Self {
        Self {
            search: String::new(),
            limit: DEFAULT_LIMIT,
        }
    }
}

impl OverviewQuery {
    /// From `search` and `limit` as somebody wrote them.
    pub fn new(search: &str, limit: Option<usize>) -> Self {
        Self {
            search: search.to_lowercase(),
            limit: limit.unwrap_or(DEFAULT_LIMIT).clamp(1, MAX_LIMIT),
        }
    }

    pub(crate) fn wants(&self, name: &str) -> bool {
        self.search.is_empty() || name.to_lowercase().contains(&self.search)
    }
}

/// The server at one moment.
#[derive(Clone, Debug, Serialize)]
pub struct Overview {
    pub server: ServerOverview,
    pub devices: Vec<DeviceOverview>,
    pub memory: MemoryOverview,
    pub load: LoadOverview,
    pub counts: Counts,
    /// All models together.
    pub totals: CountersOverview,
    /// Those that do something first, then those that did, then by name.
    pub models: Vec<VersionOverview>,
}

/// The server itself.
#[derive(Clone, Debug, Serialize)]
pub struct ServerOverview {
    pub name: String,
    pub version: &'static str,
    pub ready: bool,
    /// `on_demand`, `explicit` or `poll`: whether models can be loaded by hand.
    pub control_mode: &'static str,
    pub now_unix_ms: u64,
    pub uptime_ms: u64,
    /// CPU time the process has used.
    pub cpu_seconds: Option<f64>,
}

/// Something models run on.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceOverview {
    pub kind: &'static str,
    pub name: String,
    /// Threads that run at once.
    pub cores: usize,
    pub engine: String,
}

/// Who holds how much.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryOverview {
    /// Absent when models may use any amount.
    pub budget_bytes: Option<u64>,
    pub held_bytes: u64,
    pub busy_bytes: u64,
    pub idle_bytes: u64,
    pub parked_bytes: u64,
    pub leaving_bytes: u64,
    /// Of the whole process, as the kernel counts it.
    pub resident_bytes: Option<u64>,
}

/// What all models are doing together.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LoadOverview {
    /// Requests that wait to be run.
    pub queued: u64,
    /// Requests that were taken up and have no answer yet, those that wait included.
    pub in_flight: u64,
}

/// How many models there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    pub models: usize,
    /// Of them, those that fit the query.
    pub matching: usize,
    /// Of all, those with a version that has a session.
    pub awake: usize,
}

/// One version of a model.
#[derive(Clone, Debug, Serialize)]
pub struct VersionOverview {
    pub name: String,
    /// Empty when no version of the model can be told.
    pub version: String,
    /// Triton's state, as in the repository index.
    pub state: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    pub stage: &'static str,
    /// What it holds of the memory budget.
    pub memory_bytes: u64,
    pub queued: u64,
    pub in_flight: u64,
    /// Absent for a model nobody has asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counters: Option<CountersOverview>,
}

/// What a version has done since the server started.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct CountersOverview {
    pub last_inference_unix_ms: u64,
    pub inferences: u64,
    pub executions: u64,
    /// Since the server started.
    pub cold_starts: u64,
    pub success: Summed,
    pub fail: Summed,
    pub queue: Summed,
    pub compute: Summed,
}

/// How often, and how long together.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Summed {
    pub count: u64,
    pub ns: u64,
}

impl From<DurationCount> for Summed {
    fn from(DurationCount { count, nanos }: DurationCount) -> Self {
        Self { count, ns: nanos }
    }
}

impl Summed {
    fn add(&mut self, other: Self) {
        self.count += other.count;
        self.ns = self.ns.saturating_add(other.ns);
    }
}

impl CountersOverview {
    pub(crate) fn of(counters: &VersionCounters, id: &ModelId) -> Self {
        let counts = counters.snapshot(id);
        let inference = &counts.inference;
        Self {
            last_inference_unix_ms: counts.last_inference_ms,
            inferences: counts.inference_count,
            executions: counts.execution_count,
            cold_starts: counters.cold_start_count(),
            success: inference.success.into(),
            fail: inference.fail.into(),
            queue: inference.queue.into(),
            compute: inference.compute_infer.into(),
        }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.last_inference_unix_ms = self
            .last_inference_unix_ms
            .max(other.last_inference_unix_ms);
        self.inferences += other.inferences;
        self.executions += other.executions;
        self.cold_starts += other.cold_starts;
        self.success.add(other.success);
        self.fail.add(other.fail);
        self.queue.add(other.queue);
        self.compute.add(other.compute);
    }
}

impl VersionOverview {
    /// A version of which nothing is known but its line in the index.
    pub(crate) fn of(entry: IndexEntry, stage: &'static str) -> Self {
        Self {
            name: entry.name.to_string(),
            version: entry.version,
            state: entry.state.name(),
            reason: entry.reason,
            stage,
            memory_bytes: 0,
            queued: 0,
            in_flight: 0,
            counters: None,
        }
    }
}

impl Service {
    /// What the server is doing now.
    pub fn overview(&self, query: &OverviewQuery) -> Overview {
        let host = self.host();
        let info = self.info();
        let usage = host.wake.residency.usage();
        let (counts, totals, models) = self.registry().overview(query);
        let activity = host.activity.load(Duration::ZERO);
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        Overview {
            server: ServerOverview {
                name: info.name,
                version: info.version,
                ready: self.is_ready(),
                control_mode: match self.registry().control() {
                    ControlMode::OnDemand => "on_demand",
                    ControlMode::Explicit => "explicit",
                    ControlMode::Poll { .. } => "poll",
                },
                now_unix_ms: millis(since_epoch.unwrap_or_default()),
                uptime_ms: millis(self.now() - dormouse_core::time::Timestamp::ZERO),
                cpu_seconds: cpu_seconds(),
            },
            devices: vec![DeviceOverview {
                kind: "CPU",
                name: cpu_name(),
                cores: std::thread::available_parallelism().map_or(1, usize::from),
                engine: host.engine.describe(),
            }],
            memory: MemoryOverview {
                budget_bytes: (usage.limit < u64::MAX).then_some(usage.limit),
                held_bytes: usage.held,
                busy_bytes: usage.busy,
                idle_bytes: usage.idle,
                parked_bytes: usage.parked,
                leaving_bytes: usage.leaving,
                resident_bytes: memory::resident_bytes(),
            },
            load: LoadOverview {
                queued: self.registry().queued(),
                in_flight: activity.in_flight,
            },
            counts,
            totals,
            models,
        }
    }
}

/// The processor's own name for itself.
fn cpu_name() -> String {
    static NAME: OnceLock<String> = OnceLock::new();
    let name = NAME.get_or_init(|| {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let line = info.lines().find(|line| line.starts_with("model name"));
        let name = line.and_then(|line| line.split_once(':'));
        name.map_or("CPU", |(_, name)| name.trim()).to_owned()
    });
    name.clone()
}

/// CPU time of the process, from the kernel.
fn cpu_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    cpu_seconds_of(&stat)
}

fn cpu_seconds_of(stat: &str) -> Option<f64> {
    // The program's name stands in brackets and may have any character in it.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ').skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user.saturating_add(system) as f64 / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_read_whatever_the_program_is_called() {
        let stat = "7 (a ) b) R 1 7 7 0 -1 4194560 5 0 0 0 150 50 0 0 20 0 1 0 9 1 1";
        assert_eq!(cpu_seconds_of(stat), Some(2.0));
        assert_eq!(cpu_seconds_of("7 (a"), None);
        assert!(cpu_seconds().is_some());
    }

    #[test]
    fn queries_are_bounded() {
        assert_eq!(OverviewQuery::new("", None), OverviewQuery::default());
        assert_eq!(OverviewQuery::new("", Some(0)).limit, 1);
        assert_eq!(OverviewQuery::new("", Some(usize::MAX)).limit, MAX_LIMIT);
        assert!(OverviewQuery::new("BeRt", None).wants("my-BERT-base"));
        assert!(!OverviewQuery::new("x", None).wants("bert"));
    }
}

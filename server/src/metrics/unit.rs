//! What one model version does. Every request adds to a dozen of these: they are counted here, and
//! the exporter is told when somebody asks.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use dormouse_core::id::ModelId;
use metrics::{Counter, Gauge, Key, Label, Recorder};
use metrics_exporter_prometheus::PrometheusRecorder;
use parking_lot::Mutex;

use super::histogram::Histogram;
use super::{METADATA, NANOS, SECONDS};

/// Rows of a run.
const ROWS: &[u64] = &[1, 2, 4, 8, 16, 32, 64, 128, 256];

/// Why a request failed, in Triton's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureReason {
    Rejected,
    Canceled,
    Backend,
    Other,
}

impl FailureReason {
    const ALL: [Self; 4] = [Self::Rejected, Self::Canceled, Self::Backend, Self::Other];

    const fn label(self) -> &'static str {
        match self {
            Self::Rejected => "REJECTED",
            Self::Canceled => "CANCELED",
            Self::Backend => "BACKEND",
            Self::Other => "OTHER",
        }
    }
}

/// The phases of a request that have a latency histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Request,
    Queue,
    ComputeInput,
    ComputeInfer,
    ComputeOutput,
}

impl Phase {
    const ALL: [Self; 5] = [
        Self::Request,
        Self::Queue,
        Self::ComputeInput,
        Self::ComputeInfer,
        Self::ComputeOutput,
    ];

    const fn label(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Queue => "queue",
            Self::ComputeInput => "compute_input",
            Self::ComputeInfer => "compute_infer",
            Self::ComputeOutput => "compute_output",
        }
    }

    /// Triton's sum of the same times.
    const fn total(self) -> &'static str {
        match self {
            Self::Request => "nv_inference_request_duration_us",
            Self::Queue => "nv_inference_queue_duration_us",
            Self::ComputeInput => "nv_inference_compute_input_duration_us",
            Self::ComputeInfer => "nv_inference_compute_infer_duration_us",
            Self::ComputeOutput => "nv_inference_compute_output_duration_us",
        }
    }
}

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    pub fn increment(&self, by: u64) {
        self.0.fetch_add(by, Ordering::Relaxed);
    }

    fn tell(&self, counter: &Counter) {
        counter.absolute(self.0.load(Ordering::Relaxed));
    }
}

/// A number that goes up and down.
#[derive(Debug, Default)]
pub struct Level(AtomicI64);

impl Level {
    pub fn increment(&self, by: usize) {
        self.0.fetch_add(by as i64, Ordering::Relaxed);
    }

    pub fn decrement(&self, by: usize) {
        self.0.fetch_sub(by as i64, Ordering::Relaxed);
    }

    fn tell(&self, gauge: &Gauge) {
        gauge.set(self.0.load(Ordering::Relaxed) as f64);
    }
}

/// One model version's metrics.
#[derive(Debug)]
pub struct UnitMetrics {
    pub success: Count,
    failures: [Count; 4],
    pub inferences: Count,
    pub executions: Count,
    pub pending: Level,
    latency: [Histogram; 5],
    pub batch_rows: Histogram,
    pub load_seconds: Gauge,
    pub runs_at_once: Gauge,
    pub loads: Counter,
    pub load_failures: Counter,
    pub closes: Counter,
    pub parks: Counter,
    /// Loads ahead of a call, and those that ended before anybody called.
    pub prewarms: Counter,
    pub wasted_prewarms: Counter,
    pub upgrades: Counter,
    pub cold_requests: Counter,
    told: Told,
}

/// The exporter's counterparts of what is counted here.
#[derive(Debug)]
struct Told {
    success: Counter,
    failures: [Counter; 4],
    inferences: Counter,
    executions: Counter,
    pending: Gauge,
    duration_us: [Counter; 5],
}

impl UnitMetrics {
    fn register(recorder: &PrometheusRecorder, id: &ModelId) -> Self {
        let labels = [
            Label::new("model", id.name.to_string()),
            Label::new("version", id.version.to_string()),
        ];
        let key = |name: &'static str, extra: Option<Label>| {
            Key::from_parts(
                name,
                labels.iter().cloned().chain(extra).collect::<Vec<_>>(),
            )
        };
        let counter = |name| recorder.register_counter(&key(name, None), &METADATA);
        let gauge = |name| recorder.register_gauge(&key(name, None), &METADATA);
        Self {
            success: Count::default(),
            failures: Default::default(),
            inferences: Count::default(),
            executions: Count::default(),
            pending: Level::default(),
            latency: Phase::ALL.map(|_| Histogram::new(NANOS)),
            batch_rows: Histogram::new(ROWS),
            load_seconds: gauge("nv_model_load_duration_secs"),
            runs_at_once: gauge("dormouse_runs_at_once"),
            loads: counter("dormouse_loads_total"),
            load_failures: counter("dormouse_load_failures_total"),
            closes: counter("dormouse_sleeps_total"),
            parks: counter("dormouse_parks_total"),
            prewarms: counter("dormouse_prewarms_total"),
            wasted_prewarms: counter("dormouse_wasted_prewarms_total"),
            upgrades: counter("dormouse_packed_sessions_total"),
            cold_requests: counter("dormouse_cold_requests_total"),
            told: Told {
                success: counter("nv_inference_request_success"),
                failures: FailureReason::ALL.map(|reason| {
                    let label = Label::new("reason", reason.label());
                    let key = key("nv_inference_request_failure", Some(label));
                    recorder.register_counter(&key, &METADATA)
                }),
                inferences: counter("nv_inference_count"),
                executions: counter("nv_inference_exec_count"),
                pending: gauge("nv_inference_pending_request_count"),
                duration_us: Phase::ALL.map(|phase| counter(phase.total())),
            },
        }
    }

    pub fn failed(&self, reason: FailureReason) {
        self.failures[reason as usize].increment(1);
    }

    /// Counts what a phase of a request took.
    pub fn phase(&self, phase: Phase, took: Duration) {
        self.latency[phase as usize].record(took.as_nanos() as u64);
    }

    /// Brings the exporter up to date.
    fn tell(&self) {
        let told = &self.told;
        self.success.tell(&told.success);
        for (count, counter) in self.failures.iter().zip(&told.failures) {
            count.tell(counter);
        }
        self.inferences.tell(&told.inferences);
        self.executions.tell(&told.executions);
        self.pending.tell(&told.pending);
        for (latency, counter) in self.latency.iter().zip(&told.duration_us) {
            counter.absolute(latency.sum() / 1000);
        }
    }
}

/// The metrics of every model version that was asked for, each once: whoever serves it after a
/// reload counts on.
#[derive(Debug, Default)]
pub(super) struct Units {
    known: Mutex<BTreeMap<ModelId, Arc<UnitMetrics>>>,
}

impl Units {
    pub(super) fn of(&self, id: &ModelId, recorder: &PrometheusRecorder) -> Arc<UnitMetrics> {
        let mut known = self.known.lock();
        let metrics = known
            .entry(id.clone())
            .or_insert_with(|| Arc::new(UnitMetrics::register(recorder, id)));
        Arc::clone(metrics)
    }

    /// Brings the exporter up to date.
    pub(super) fn tell(&self) {
        for unit in self.known.lock().values() {
            unit.tell();
        }
    }

    /// Writes the histograms, which the exporter does not have.
    pub(super) fn write_histograms(&self, text: &mut String) {
        let known = self.known.lock();
        if known.is_empty() {
            return;
        }
        let labels: Vec<(String, &Arc<UnitMetrics>)> = known
            .iter()
            .map(|(id, unit)| {
                let name = id.name.replace('\\', "\\\\").replace('"', "\\\"");
                let name = name.replace('\n', "\\n");
                (format!("model=\"{name}\",version=\"{}\"", id.version), unit)
            })
            .collect();
        let name = "dormouse_latency_seconds";
        begin(text, name, "Latency of a request's phases");
        for (labels, unit) in &labels {
            for (phase, latency) in Phase::ALL.iter().zip(&unit.latency) {
                let labels = format!("{labels},phase=\"{}\"", phase.label());
                latency.write(text, name, &labels, SECONDS);
            }
        }
        let name = "dormouse_batch_rows";
        begin(text, name, "Rows per run");
        for (labels, unit) in &labels {
            unit.batch_rows.write(text, name, labels, 1.0);
        }
    }
}

fn begin(text: &mut String, name: &str, help: &str) {
    let written = write!(text, "# HELP {name} {help}\n# TYPE {name} histogram\n");
    written.expect("writing to a string cannot fail");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;

    #[test]
    fn what_was_counted_is_told_to_whoever_asks() {
        let metrics = Metrics::new().unwrap();
        let id = ModelId::new("m", 2);
        let unit = metrics.unit(&id);
        unit.success.increment(2);
        unit.pending.increment(3);
        unit.pending.decrement(1);
        unit.failed(FailureReason::Backend);
        unit.batch_rows.record(3);
        for micros in [300, 2700] {
            unit.phase(Phase::Queue, Duration::from_micros(micros));
        }
        let text = metrics.render();
        let has = |line: &str| assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        has(r#"nv_inference_request_success{model="m",version="2"} 2"#);
        has(r#"nv_inference_pending_request_count{model="m",version="2"} 2"#);
        has(r#"nv_inference_request_failure{model="m",version="2",reason="BACKEND"} 1"#);
        has(r#"nv_inference_request_failure{model="m",version="2",reason="OTHER"} 0"#);
        has(r#"nv_inference_queue_duration_us{model="m",version="2"} 3000"#);
        has("# TYPE dormouse_latency_seconds histogram");
        has(
            r#"dormouse_latency_seconds_bucket{model="m",version="2",phase="queue",le="0.0005"} 1"#,
        );
        has(r#"dormouse_latency_seconds_sum{model="m",version="2",phase="queue"} 0.003"#);
        has(r#"dormouse_latency_seconds_count{model="m",version="2",phase="request"} 0"#);
        has(r#"dormouse_batch_rows_bucket{model="m",version="2",le="4"} 1"#);
    }

    #[test]
    fn a_version_has_one_set_of_series_whoever_serves_it() {
        let metrics = Metrics::new().unwrap();
        let id = ModelId::new("m", 1);
        metrics.unit(&id).success.increment(1);
        metrics.unit(&id).success.increment(1);
        let line = r#"nv_inference_request_success{model="m",version="1"} 2"#;
        assert!(metrics.render().contains(line));
        let other = metrics.unit(&ModelId::new("m", 2));
        assert!(!Arc::ptr_eq(&other, &metrics.unit(&id)));
    }
}

//! Every metric the server exports, each declared once with its help text.
//!
//! Triton's names (`nv_*`) stand beside Dormouse's own (`dormouse_*`). A model's series come into
//! being with its first request or load: ten thousand sleeping models export nothing.

mod repository;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::budget::Usage;
use dormouse_core::id::ModelId;
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder, Unit};
use metrics_exporter_prometheus::{
    BuildError, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};

use crate::engine::onnx::allocator;
use crate::isolation::Cause;
use crate::memory;
use crate::residency::Evictions;

const METADATA: Metadata<'static> = Metadata::new("dormouse", Level::INFO, None);

/// From a tenth of a millisecond to a minute, for latencies and load stages.
const SECONDS_BUCKETS: &[f64] = &[
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0, 30.0, 60.0,
];

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

/// How the delivery of a webhook's message ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WebhookResult {
    Delivered,
    /// The receiver does not want it.
    Refused,
    /// Every attempt failed.
    GivenUp,
    /// Too many were waiting.
    Dropped,
}

impl WebhookResult {
    const ALL: [Self; 4] = [Self::Delivered, Self::Refused, Self::GivenUp, Self::Dropped];

    const fn label(self) -> &'static str {
        match self {
            Self::Delivered => "delivered",
            Self::Refused => "refused",
            Self::GivenUp => "given_up",
            Self::Dropped => "dropped",
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
}

/// The server's registry of metrics. Cheap to clone.
#[derive(Clone)]
pub struct Metrics {
    recorder: Arc<PrometheusRecorder>,
    handle: PrometheusHandle,
    server: ServerMetrics,
}

/// Metrics of the whole process.
#[derive(Clone, Debug)]
pub struct ServerMetrics {
    pub models_warm: Gauge,
    pub loads_running: Gauge,
    pub bytes_in_flight: Gauge,
    pub returned_bytes: Counter,
    pub preparations: Counter,
    /// Prepared models that were damaged or of no use.
    pub prepared_dropped: Counter,
    pub preparation_failures: Counter,
    evictions: [Counter; 2],
    memory_held: [Gauge; 4],
    memory_budget: Gauge,
    /// What the response cache holds.
    pub response_cache_bytes: Gauge,
    pub events_lost: Counter,
    pub spans_sent: Counter,
    pub spans_dropped: Counter,
    pub workers: WorkerMetrics,
    webhooks: [Counter; 4],
    resident_bytes: Gauge,
    engine_live_bytes: Gauge,
    engine_cached_bytes: Gauge,
    engine_peak_bytes: Gauge,
    cpu_memory_total: Gauge,
    cpu_memory_used: Gauge,
    cpu_utilization: Gauge,
}

/// Metrics of processes that models run in.
#[derive(Clone, Debug)]
pub struct WorkerMetrics {
    /// Processes there are.
    pub running: Gauge,
    /// In the order of [`Cause::LABELS`].
    deaths: [Counter; 10],
    /// Models that serve again after a death.
    pub restarts: Counter,
    /// Models that are not started any more.
    pub quarantined: Gauge,
}

impl WorkerMetrics {
    /// Counts a death by its cause.
    pub fn died(&self, cause: Cause) {
        let labels = Cause::LABELS.iter().zip(&self.deaths);
        for (_, deaths) in labels.filter(|(label, _)| **label == cause.label()) {
            deaths.increment(1);
        }
    }
}

/// One model version's metrics.
#[derive(Debug)]
pub struct UnitMetrics {
    pub success: Counter,
    failures: [Counter; 4],
    pub inferences: Counter,
    pub executions: Counter,
    pub pending: Gauge,
    duration_us: [Counter; 5],
    latency: [Histogram; 5],
    pub batch_rows: Histogram,
    pub load_seconds: Gauge,
    pub loads: Counter,
    pub load_failures: Counter,
    pub closes: Counter,
    pub parks: Counter,
    pub upgrades: Counter,
    pub cold_requests: Counter,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    pub fn new() -> Result<Self, BuildError> {
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(
                metrics_exporter_prometheus::Matcher::Full("dormouse_batch_rows".into()),
                &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0],
            )?
            .set_buckets(SECONDS_BUCKETS)?
            .build_recorder();
        describe(&recorder);
        repository::describe(&recorder);
        let handle = recorder.handle();
        let gauge =
            |name: &'static str| recorder.register_gauge(&Key::from_static_name(name), &METADATA);
        let counter =
            |name: &'static str| recorder.register_counter(&Key::from_static_name(name), &METADATA);
        let server = ServerMetrics {
            models_warm: gauge("dormouse_models_warm"),
            loads_running: gauge("dormouse_loads_running"),
            bytes_in_flight: gauge("dormouse_request_bytes_in_flight"),
            returned_bytes: counter("dormouse_memory_returned_bytes_total"),
            preparations: counter("dormouse_preparations_total"),
            prepared_dropped: counter("dormouse_prepared_dropped_total"),
            preparation_failures: counter("dormouse_preparation_failures_total"),
            evictions: ["park", "close"].map(|how| {
                let label = vec![Label::new("how", how)];
                let key = Key::from_parts("dormouse_evictions_total", label);
                recorder.register_counter(&key, &METADATA)
            }),
            memory_held: ["busy", "idle", "parked", "leaving"].map(|state| {
                let label = vec![Label::new("state", state)];
                let key = Key::from_parts("dormouse_models_memory_bytes", label);
                recorder.register_gauge(&key, &METADATA)
            }),
            memory_budget: gauge("dormouse_memory_budget_bytes"),
            response_cache_bytes: gauge("dormouse_response_cache_bytes"),
            events_lost: recorder.register_counter(
                &Key::from_static_name("dormouse_events_lost_total"),
                &METADATA,
            ),
            spans_sent: counter("dormouse_spans_sent_total"),
            spans_dropped: counter("dormouse_spans_dropped_total"),
            workers: WorkerMetrics {
                running: gauge("dormouse_workers"),
                deaths: Cause::LABELS.map(|cause| {
                    let label = vec![Label::new("cause", cause)];
                    let key = Key::from_parts("dormouse_worker_deaths_total", label);
                    recorder.register_counter(&key, &METADATA)
                }),
                restarts: counter("dormouse_worker_restarts_total"),
                quarantined: gauge("dormouse_models_quarantined"),
            },
            webhooks: WebhookResult::ALL.map(|result| {
                let label = Label::new("result", result.label());
                let key = Key::from_parts("dormouse_webhook_deliveries_total", vec![label]);
                recorder.register_counter(&key, &METADATA)
            }),
            resident_bytes: gauge("dormouse_process_resident_bytes"),
            engine_live_bytes: gauge("dormouse_engine_memory_live_bytes"),
            engine_cached_bytes: gauge("dormouse_engine_memory_cached_bytes"),
            engine_peak_bytes: gauge("dormouse_engine_memory_peak_bytes"),
            cpu_memory_total: gauge("nv_cpu_memory_total_bytes"),
            cpu_memory_used: gauge("nv_cpu_memory_used_bytes"),
            cpu_utilization: gauge("nv_cpu_utilization"),
        };
        Ok(Self {
            recorder: Arc::new(recorder),
            handle,
            server,
        })
    }

    pub fn server(&self) -> &ServerMetrics {
        &self.server
    }

    /// Where parts with series of their own register them.
    pub(crate) fn recorder(&self) -> &PrometheusRecorder {
        &self.recorder
    }

    /// The series of one model version.
    pub fn unit(&self, id: &ModelId) -> UnitMetrics {
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
        let counter = |name, extra| self.recorder.register_counter(&key(name, extra), &METADATA);
        let gauge = |name| self.recorder.register_gauge(&key(name, None), &METADATA);
        let histogram = |name, extra| {
            self.recorder
                .register_histogram(&key(name, extra), &METADATA)
        };
        UnitMetrics {
            success: counter("nv_inference_request_success", None),
            failures: FailureReason::ALL.map(|reason| {
                counter(
                    "nv_inference_request_failure",
                    Some(Label::new("reason", reason.label())),
                )
            }),
            inferences: counter("nv_inference_count", None),
            executions: counter("nv_inference_exec_count", None),
            pending: gauge("nv_inference_pending_request_count"),
            duration_us: [
                counter("nv_inference_request_duration_us", None),
                counter("nv_inference_queue_duration_us", None),
                counter("nv_inference_compute_input_duration_us", None),
                counter("nv_inference_compute_infer_duration_us", None),
                counter("nv_inference_compute_output_duration_us", None),
            ],
            latency: Phase::ALL.map(|phase| {
                histogram(
                    "dormouse_latency_seconds",
                    Some(Label::new("phase", phase.label())),
                )
            }),
            batch_rows: histogram("dormouse_batch_rows", None),
            load_seconds: gauge("nv_model_load_duration_secs"),
            loads: counter("dormouse_loads_total", None),
            load_failures: counter("dormouse_load_failures_total", None),
            closes: counter("dormouse_sleeps_total", None),
            parks: counter("dormouse_parks_total", None),
            upgrades: counter("dormouse_packed_sessions_total", None),
            cold_requests: counter("dormouse_cold_requests_total", None),
        }
    }

    /// Tells of the memory budget and of who had to go for others.
    pub fn memory(&self, usage: &Usage, evictions: Evictions) {
        let server = &self.server;
        server.memory_budget.set(usage.limit as f64);
        let held = [usage.busy, usage.idle, usage.parked, usage.leaving];
        for (gauge, bytes) in server.memory_held.iter().zip(held) {
            gauge.set(bytes as f64);
        }
        let went = [evictions.parked, evictions.closed];
        for (counter, count) in server.evictions.iter().zip(went) {
            counter.absolute(count);
        }
    }

    /// Records one stage of a load and what it moved.
    pub fn load_stage(&self, stage: &'static str, took: Duration, bytes: u64) {
        self.record(
            "dormouse_load_stage_seconds",
            Label::new("stage", stage),
            took,
        );
        if bytes > 0 {
            let key = Key::from_parts(
                "dormouse_loaded_bytes_total",
                vec![Label::new("stage", stage)],
            );
            let counter = self.recorder.register_counter(&key, &METADATA);
            counter.increment(bytes);
        }
    }

    /// Records the time that a load saved by doing stages side by side.
    pub fn load_overlap(&self, saved: Duration) {
        let key = Key::from_static_name("dormouse_load_overlap_seconds");
        let histogram = self.recorder.register_histogram(&key, &METADATA);
        histogram.record(saved.as_secs_f64());
    }

    /// Records what a request that found its model asleep took, from its arrival to its answer.
    pub fn cold_start(&self, kind: &'static str, took: Duration) {
        self.record(
            "dormouse_cold_start_seconds",
            Label::new("kind", kind),
            took,
        );
    }

    /// Counts a request that the response cache answered.
    pub fn cache_hit(&self, id: &ModelId, took: Duration) {
        self.count_cached(
            id,
            [
                "nv_cache_num_hits_per_model",
                "nv_cache_hit_duration_per_model",
            ],
            took,
        );
    }

    /// Counts a request whose answer the response cache did not have.
    pub fn cache_miss(&self, id: &ModelId, took: Duration) {
        self.count_cached(
            id,
            [
                "nv_cache_num_misses_per_model",
                "nv_cache_miss_duration_per_model",
            ],
            took,
        );
    }

    fn count_cached(&self, id: &ModelId, [count, duration_us]: [&'static str; 2], took: Duration) {
        let counter = |name| {
            let labels = vec![
                Label::new("model", id.name.to_string()),
                Label::new("version", id.version.to_string()),
            ];
            let key = Key::from_parts(name, labels);
            self.recorder.register_counter(&key, &METADATA)
        };
        counter(count).increment(1);
        counter(duration_us).increment(took.as_micros() as u64);
    }

    fn record(&self, name: &'static str, label: Label, took: Duration) {
        let key = Key::from_parts(name, vec![label]);
        let histogram = self.recorder.register_histogram(&key, &METADATA);
        histogram.record(took.as_secs_f64());
    }

    /// Counts a webhook's message that is done with.
    pub fn webhook(&self, result: WebhookResult) {
        self.server.webhooks[result as usize].increment(1);
    }

    /// Moves recorded samples into their buckets; without it they pile up between scrapes.
    pub fn upkeep(&self) {
        self.handle.run_upkeep();
    }

    /// The exposition text.
    pub fn render(&self) -> String {
        if let Some(bytes) = memory::resident_bytes() {
            self.server.resident_bytes.set(bytes as f64);
        }
        let engine = allocator::stats();
        self.server.engine_live_bytes.set(engine.live_bytes as f64);
        self.server
            .engine_cached_bytes
            .set(engine.cached_bytes as f64);
        self.server.engine_peak_bytes.set(engine.peak_bytes as f64);
        if let Some(host) = HostSample::read() {
            self.server.cpu_memory_total.set(host.memory_total as f64);
            self.server.cpu_memory_used.set(host.memory_used as f64);
            self.server.cpu_utilization.set(host.utilization);
        }
        self.handle.render()
    }
}

impl UnitMetrics {
    pub fn failed(&self, reason: FailureReason) {
        self.failures[reason as usize].increment(1);
    }

    /// Adds a phase's duration to Triton's counter and to the histogram.
    pub fn phase(&self, phase: Phase, took: Duration) {
        self.duration_us[phase as usize].increment(took.as_micros() as u64);
        self.latency[phase as usize].record(took.as_secs_f64());
    }
}

fn describe(recorder: &PrometheusRecorder) {
    let counter = |name: &'static str, help: &'static str| {
        recorder.describe_counter(KeyName::from_const_str(name), None, help.into());
    };
    let gauge = |name: &'static str, help: &'static str| {
        recorder.describe_gauge(KeyName::from_const_str(name), None, help.into());
    };
    let histogram = |name: &'static str, help: &'static str| {
        recorder.describe_histogram(
            KeyName::from_const_str(name),
            Some(Unit::Count),
            help.into(),
        );
    };
    gauge("dormouse_workers", "Processes that isolated models run in");
    counter(
        "dormouse_worker_deaths_total",
        "Processes of isolated models that ended though nobody closed them, by cause",
    );
    counter(
        "dormouse_worker_restarts_total",
        "Isolated models that serve again after their process died",
    );
    gauge(
        "dormouse_models_quarantined",
        "Isolated models that are not started any more because they keep killing their process",
    );
    counter("nv_inference_request_success", "Requests answered");
    counter(
        "nv_inference_request_failure",
        "Requests that got an error, by reason",
    );
    counter("nv_inference_count", "Rows inferred; a batch of n counts n");
    counter(
        "nv_inference_exec_count",
        "Runs of the model, each of one batch",
    );
    gauge(
        "nv_inference_pending_request_count",
        "Requests that wait to be run",
    );
    counter(
        "nv_inference_request_duration_us",
        "Time from receiving requests to answering them, summed",
    );
    counter(
        "nv_inference_queue_duration_us",
        "Time requests waited to be run, summed",
    );
    counter(
        "nv_inference_compute_input_duration_us",
        "Time spent gathering inputs, summed over requests",
    );
    counter(
        "nv_inference_compute_infer_duration_us",
        "Time spent in the engine, summed over requests",
    );
    counter(
        "nv_inference_compute_output_duration_us",
        "Time spent splitting outputs, summed over requests",
    );
    counter(
        "nv_cache_num_hits_per_model",
        "Requests answered by the response cache",
    );
    counter(
        "nv_cache_num_misses_per_model",
        "Requests whose answer the response cache did not have",
    );
    counter(
        "nv_cache_hit_duration_per_model",
        "Microseconds spent finding answers in the response cache, summed",
    );
    counter(
        "nv_cache_miss_duration_per_model",
        "Microseconds spent looking for and keeping answers, summed over misses",
    );
    gauge(
        "nv_model_load_duration_secs",
        "How long the model's last load took",
    );
    gauge(
        "nv_cpu_utilization",
        "CPU use of the host since the last scrape, from 0 to 1",
    );
    gauge("nv_cpu_memory_total_bytes", "Memory of the host");
    gauge(
        "nv_cpu_memory_used_bytes",
        "Memory of the host that is in use",
    );
    histogram("dormouse_latency_seconds", "Latency of a request's phases");
    histogram("dormouse_batch_rows", "Rows per run");
    histogram(
        "dormouse_load_stage_seconds",
        "Time the stages of loads took",
    );
    histogram(
        "dormouse_load_overlap_seconds",
        "Time that loads saved by doing stages side by side",
    );
    histogram(
        "dormouse_cold_start_seconds",
        "Latency of requests that found their model asleep, by what it was woken from",
    );
    counter(
        "dormouse_loaded_bytes_total",
        "Bytes that loads moved, by stage",
    );
    counter("dormouse_loads_total", "Loads that succeeded");
    counter("dormouse_load_failures_total", "Loads that failed");
    counter("dormouse_sleeps_total", "Times the model went back to zero");
    counter(
        "dormouse_parks_total",
        "Times the model gave up its weights' memory and kept its session",
    );
    counter(
        "dormouse_packed_sessions_total",
        "Times a packed session took the place of the one the model woke with",
    );
    counter(
        "dormouse_preparations_total",
        "Models put into the prepared store",
    );
    counter(
        "dormouse_prepared_dropped_total",
        "Prepared models that were damaged or of no use and were dropped",
    );
    counter(
        "dormouse_preparation_failures_total",
        "Models that could not be put into the prepared store",
    );
    counter(
        "dormouse_evictions_total",
        "Idle models that gave up memory because others needed it",
    );
    gauge(
        "dormouse_models_memory_bytes",
        "Memory that models hold of the budget, by what they are doing",
    );
    gauge(
        "dormouse_memory_budget_bytes",
        "Memory that models may hold together",
    );
    gauge(
        "dormouse_response_cache_bytes",
        "Memory that kept answers take",
    );
    counter(
        "dormouse_cold_requests_total",
        "Requests that had to wait for a load",
    );
    gauge("dormouse_models_warm", "Model versions that have a session");
    gauge("dormouse_loads_running", "Loads under way");
    gauge(
        "dormouse_request_bytes_in_flight",
        "Bytes of requests that are queued or running",
    );
    counter(
        "dormouse_memory_returned_bytes_total",
        "Memory given back to the system after closing sessions",
    );
    counter(
        "dormouse_webhook_deliveries_total",
        "Messages of webhooks that are done with, by result",
    );
    counter(
        "dormouse_events_lost_total",
        "Lifecycle events that slow subscribers never saw",
    );
    counter("dormouse_spans_sent_total", "Spans that a collector took");
    counter(
        "dormouse_spans_dropped_total",
        "Spans that were recorded and could not be sent",
    );
    gauge(
        "dormouse_process_resident_bytes",
        "Resident memory of the server",
    );
    gauge(
        "dormouse_engine_memory_live_bytes",
        "Memory that sessions, runs and unsent outputs hold in the engine's shared allocator",
    );
    gauge(
        "dormouse_engine_memory_cached_bytes",
        "Free memory that the engine's shared allocator keeps for the next run",
    );
    gauge(
        "dormouse_engine_memory_peak_bytes",
        "The most that was held in the engine's shared allocator",
    );
}

struct HostSample {
    memory_total: u64,
    memory_used: u64,
    utilization: f64,
}

impl HostSample {
    fn read() -> Option<Self> {
        let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
        let field = |name: &str| -> Option<u64> {
            let line = meminfo.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace()
                .nth(1)?
                .parse::<u64>()
                .ok()?
                .checked_mul(1024)
        };
        let memory_total = field("MemTotal:")?;
        let memory_used = memory_total.saturating_sub(field("MemAvailable:")?);
        Some(Self {
            memory_total,
            memory_used,
            utilization: cpu_utilization()?,
        })
    }
}

/// Busy share of the host's CPU time since the last call.
fn cpu_utilization() -> Option<f64> {
    static LAST: parking_lot::Mutex<(u64, u64)> = parking_lot::Mutex::new((0, 0));
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    let ticks: Vec<u64> = stat
        .lines()
        .next()?
        .split_whitespace()
        .skip(1)
        .take(8)
        .filter_map(|tick| tick.parse().ok())
        .collect();
    let total: u64 = ticks.iter().sum();
    // Columns four and five are idle and waiting for IO.
    let busy = total.checked_sub(ticks.get(3)? + ticks.get(4)?)?;
    let mut last = LAST.lock();
    let (last_total, last_busy) = std::mem::replace(&mut *last, (total, busy));
    let passed = total.saturating_sub(last_total);
    Some(if passed == 0 {
        0.0
    } else {
        busy.saturating_sub(last_busy) as f64 / passed as f64
    })
}

//! Every metric the server exports; what each of them means is in `help`.
//!
//! Triton's names (`nv_*`) stand beside Dormouse's own (`dormouse_*`). A model's series come into
//! being with its first request or load: ten thousand sleeping models export nothing.

mod help;
mod histogram;
mod host;
mod limits;
mod repository;
mod sequences;
mod unit;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::budget::Usage;
use dormouse_core::id::ModelId;
use metrics::{Counter, Gauge, Key, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::{
    BuildError, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};

use self::host::HostSample;
use self::unit::Units;
pub use self::unit::{FailureReason, Phase, UnitMetrics};
use crate::engine::onnx::allocator;
use crate::isolation::Cause;
use crate::memory;
use crate::priority::ahead;
use crate::residency::Evictions;

pub use self::sequences::SequenceMeter;

const METADATA: Metadata<'static> = Metadata::new("dormouse", Level::INFO, None);

/// From a tenth of a millisecond to a minute, for latencies and load stages.
const NANOS: &[u64] = &[
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
    30_000_000_000,
    60_000_000_000,
];

/// Nanoseconds in one.
const SECONDS: f64 = 1e9;

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

/// The server's registry of metrics. Cheap to clone.
#[derive(Clone)]
pub struct Metrics {
    recorder: Arc<PrometheusRecorder>,
    handle: PrometheusHandle,
    server: ServerMetrics,
    limits: limits::Refusals,
    units: Arc<Units>,
}

/// Metrics of the whole process.
#[derive(Clone, Debug)]
pub struct ServerMetrics {
    pub models_warm: Gauge,
    pub loads_running: Gauge,
    pub bytes_in_flight: Gauge,
    pub returned_bytes: Counter,
    pub unreturned_bytes: Counter,
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
    request_threads_put_back: Counter,
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

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    pub fn new() -> Result<Self, BuildError> {
        let buckets: Vec<f64> = NANOS.iter().map(|&nanos| nanos as f64 / SECONDS).collect();
        let recorder = PrometheusBuilder::new()
            .set_buckets(&buckets)?
            .build_recorder();
        help::describe(&recorder);
        repository::describe(&recorder);
        sequences::describe(&recorder);
        let limits = limits::register(&recorder);
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
            unreturned_bytes: counter("dormouse_memory_unreturned_bytes_total"),
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
            request_threads_put_back: counter("dormouse_request_threads_put_back_total"),
        };
        Ok(Self {
            recorder: Arc::new(recorder),
            handle,
            server,
            limits,
            units: Arc::default(),
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
    pub fn unit(&self, id: &ModelId) -> Arc<UnitMetrics> {
        self.units.of(id, &self.recorder)
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
        limits::tell(&self.limits);
        let put_back = ahead::put_back();
        self.server.request_threads_put_back.absolute(put_back);
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
        self.units.tell();
        let mut text = self.handle.render();
        self.units.write_histograms(&mut text);
        text
    }
}

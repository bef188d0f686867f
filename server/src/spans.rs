//! Spans of requests and loads for an OpenTelemetry collector.
//!
//! Off unless an endpoint is configured; then nothing of this is ever called. What is recorded goes
//! through a bounded queue that nobody waits for: a span that finds it full is counted and gone.

mod context;
mod export;
mod otlp;
mod request;
mod sampler;

use std::borrow::Cow;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use dormouse_core::id::ModelId;
use dormouse_core::time::Timestamp;
use tokio::sync::mpsc;

pub use self::context::{SpanContext, SpanId, TraceId};
pub use self::export::{Exporter, ExporterError};
pub use self::request::{Protocol, Ran, RequestSpan};
pub use self::sampler::{InvalidSampler, Sampler};
use crate::clock::Clock;
use crate::metrics::Metrics;

/// Spans that wait to be sent, as OpenTelemetry's batch processors have it.
const MAX_WAITING: usize = 2048;

/// A value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Text(String),
    Word(&'static str),
    Int(i64),
    Float(f64),
    Bool(bool),
}

/// What kind of work a span was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Somebody else's call.
    Server,
    Internal,
}

/// A span that has ended.
#[derive(Clone, Debug)]
pub(crate) struct SpanRecord {
    pub context: SpanContext,
    pub parent: Option<SpanId>,
    /// What the caller's `tracestate` said.
    pub state: String,
    pub name: Cow<'static, str>,
    pub kind: Kind,
    pub start: Timestamp,
    pub end: Timestamp,
    pub attributes: Vec<(&'static str, Value)>,
    pub links: Vec<SpanContext>,
    /// Why it failed, if it did.
    pub error: Option<String>,
}

/// Makes spans and has them sent. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Tracer {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    clock: Clock,
    /// What the system's clock said when ours was at zero.
    epoch: Duration,
    sampler: Sampler,
    queue: mpsc::Sender<SpanRecord>,
    ids: Ids,
    metrics: Metrics,
}

impl Tracer {
    /// A tracer, and what is to be sent.
    pub(crate) fn new(
        clock: Clock,
        sampler: Sampler,
        metrics: &Metrics,
    ) -> (Self, mpsc::Receiver<SpanRecord>) {
        let (queue, recorded) = mpsc::channel(MAX_WAITING);
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let running = clock.now() - Timestamp::ZERO;
        let shared = Shared {
            clock,
            epoch: since_epoch.unwrap_or_default().saturating_sub(running),
            sampler,
            queue,
            ids: Ids::default(),
            metrics: metrics.clone(),
        };
        let tracer = Self {
            shared: Arc::new(shared),
        };
        (tracer, recorded)
    }

    /// A load of a model, as part of the request that it is for, if that is recorded; on its own
    /// otherwise, if the sampler wants it.
    pub fn load(&self, model: &ModelId, request: Option<SpanContext>) -> Option<LoadSpan> {
        let (trace, parent) = match request {
            Some(request) => (request.trace, Some(request.span)),
            None => {
                let trace = self.shared.ids.trace();
                self.shared.sampler.wants(trace, None).then_some(())?;
                (trace, None)
            }
        };
        Some(LoadSpan {
            tracer: self.clone(),
            context: SpanContext {
                trace,
                span: self.shared.ids.span(),
                sampled: true,
            },
            parent,
            model: model.clone(),
        })
    }

    fn now(&self) -> Timestamp {
        self.shared.clock.now()
    }

    fn unix_nanos(&self, at: Timestamp) -> u64 {
        let at = self.shared.epoch.saturating_add(at - Timestamp::ZERO);
        u64::try_from(at.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Hands a span over, or counts it as lost. Never waits.
    fn record(&self, span: SpanRecord) {
        if self.shared.queue.try_send(span).is_err() {
            self.shared.metrics.server().spans_dropped.increment(1);
        }
    }
}

/// A load under way, whose stages become its children.
#[derive(Debug)]
pub struct LoadSpan {
    tracer: Tracer,
    context: SpanContext,
    parent: Option<SpanId>,
    model: ModelId,
}

impl LoadSpan {
    pub fn context(&self) -> SpanContext {
        self.context
    }

    /// The load itself; `error` says why it failed.
    pub fn ended(
        &self,
        (start, end): (Timestamp, Timestamp),
        kind: &'static str,
        error: Option<String>,
    ) {
        let mut attributes = self.attributes();
        attributes.push(("dormouse.cold_start", Value::Word(kind)));
        self.tracer.record(SpanRecord {
            context: self.context,
            parent: self.parent,
            state: String::new(),
            name: format!("load {}", self.model.name).into(),
            kind: Kind::Internal,
            start,
            end,
            attributes,
            links: Vec::new(),
            error,
        });
    }

    /// A stage of it.
    pub fn stage(&self, stage: &'static str, (start, end): (Timestamp, Timestamp), bytes: u64) {
        let mut attributes = self.attributes();
        attributes.push(("dormouse.stage", Value::Word(stage)));
        if bytes > 0 {
            let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
            attributes.push(("dormouse.bytes", Value::Int(bytes)));
        }
        self.tracer.record(SpanRecord {
            context: SpanContext {
                span: self.tracer.shared.ids.span(),
                ..self.context
            },
            parent: Some(self.context.span),
            state: String::new(),
            name: stage.into(),
            kind: Kind::Internal,
            start,
            end,
            attributes,
            links: Vec::new(),
            error: None,
        });
    }

    fn attributes(&self) -> Vec<(&'static str, Value)> {
        let version = i64::try_from(self.model.version.0).unwrap_or(i64::MAX);
        vec![
            ("dormouse.model", Value::Text(self.model.name.to_string())),
            ("dormouse.version", Value::Int(version)),
        ]
    }
}

/// Numbers that no two spans share: two counters in steps of an odd constant, mixed (SplitMix64),
/// from seeds that the system's randomness gave.
#[derive(Debug)]
struct Ids {
    high: AtomicU64,
    low: AtomicU64,
}

impl Default for Ids {
    fn default() -> Self {
        let seed = || AtomicU64::new(RandomState::new().hash_one(std::process::id()));
        Self {
            high: seed(),
            low: seed(),
        }
    }
}

impl Ids {
    fn trace(&self) -> TraceId {
        let high = u128::from(draw(&self.high));
        let low = u128::from(draw(&self.low));
        // Zero is not an id.
        TraceId((high << 64 | low).max(1))
    }

    fn span(&self) -> SpanId {
        SpanId(draw(&self.low).max(1))
    }
}

fn draw(counter: &AtomicU64) -> u64 {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut mixed = counter.fetch_add(STEP, Ordering::Relaxed);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracer(sampler: &str) -> (Tracer, mpsc::Receiver<SpanRecord>, Metrics) {
        let metrics = Metrics::new().unwrap();
        let sampler = Sampler::parse(sampler, None).unwrap();
        let (tracer, recorded) = Tracer::new(Clock::start(), sampler, &metrics);
        (tracer, recorded, metrics)
    }

    #[tokio::test]
    async fn what_finds_the_queue_full_is_counted_and_gone() {
        let (tracer, mut recorded, metrics) = tracer("always_on");
        let load = tracer.load(&ModelId::new("m", 1), None).unwrap();
        let now = Timestamp::ZERO;
        for _ in 0..MAX_WAITING + 3 {
            load.stage("read", (now, now), 0);
        }
        assert!(
            metrics
                .render()
                .contains("dormouse_spans_dropped_total 3\n")
        );
        let first = recorded.recv().await.unwrap();
        assert_eq!(first.parent, Some(load.context().span));
        assert_eq!(first.context.trace, load.context().trace);
        assert_ne!(first.context.span, load.context().span);
    }

    #[tokio::test]
    async fn a_load_is_part_of_the_request_it_is_for() {
        let (tracer, _recorded, _) = tracer("always_off");
        let model = ModelId::new("m", 1);
        assert!(tracer.load(&model, None).is_none());
        let request = SpanContext {
            trace: TraceId(7),
            span: SpanId(8),
            sampled: true,
        };
        let load = tracer.load(&model, Some(request)).unwrap();
        assert_eq!(
            (load.context.trace, load.parent),
            (TraceId(7), Some(SpanId(8)))
        );
    }

    #[test]
    fn ids_do_not_repeat() {
        let ids = Ids::default();
        let drawn: std::collections::HashSet<_> = (0..10_000).map(|_| ids.span().0).collect();
        assert_eq!(drawn.len(), 10_000);
    }
}

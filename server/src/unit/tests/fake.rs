//! An engine whose loads, runs and closes wait until they are let through. Its model answers the
//! number it is asked.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use dormouse_core::datatype::DataType;
use dormouse_core::dispatch::RunSlots;
use dormouse_core::id::{ByteSize, ModelId};
use dormouse_core::lifecycle::Stage;
use dormouse_core::shape::Shape;
use dormouse_model_store::graph::OperatorFacts;
use dormouse_model_store::repository::FileIdentity;
use dormouse_model_store::spec::{
    DynamicBatchingSpec, KeepAliveSpec, ModelSpec, QueuePolicySpec, SessionSpec,
};
use dormouse_model_store::store::DigestCache;
use parking_lot::{Condvar, Mutex};
use tokio::task::JoinHandle;

use crate::activity::Activity;
use crate::alarm::Alarm;
use crate::clock::Clock;
use crate::config::IsolationConfig;
use crate::engine::onnx::OnnxOptions;
use crate::engine::{
    Effort, Engine, EngineError, LostWorker, ModelBytes, Session, SessionTensor, Stop, StopHandle,
};
use crate::error::ServeError;
use crate::events::Events;
use crate::host::{Host, InFlight, UnitDefaults};
use crate::isolation::Isolation;
use crate::metrics::Metrics;
use crate::preparation::SourceDigests;
use crate::priority::Background;
use crate::request::{InferRequest, Tensor};
use crate::residency::Residency;
use crate::signature::{model, tensor};
use crate::unit::{NotAnswered, Source, SourceModel, Unit, UnitParts};
use crate::wake::{Switches, Wake};

/// A run with this number waits for [`FakeEngine::runs`].
pub(super) const HELD: i32 = 1000;
/// A run with this number fails.
pub(super) const POISON: i32 = -1;
/// A run with this number gives fewer tensors than it was asked for.
pub(super) const PANIC: i32 = -2;
/// Runs at once over all units of a bench.
pub(super) const SLOTS: usize = 3;

/// Something that can be passed while it is open.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    closed: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    pub(crate) fn close(&self) {
        *self.closed.lock() = true;
    }

    pub(crate) fn open(&self) {
        *self.closed.lock() = false;
        self.changed.notify_all();
    }

    fn pass(&self, stopped: impl Fn() -> bool) {
        let mut closed = self.closed.lock();
        while *closed && !stopped() {
            self.changed.wait(&mut closed);
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct FakeEngine {
    pub(super) loads: Gate,
    pub(super) runs: Gate,
    pub(crate) closes: Gate,
    fails: AtomicBool,
    /// Sessions of the first so many loads are gone.
    dead: AtomicUsize,
    begun: AtomicUsize,
    sessions: AtomicUsize,
    ended: AtomicUsize,
}

impl FakeEngine {
    pub(super) fn fail_loads(&self, fails: bool) {
        self.fails.store(fails, Ordering::SeqCst);
    }

    /// Has the process die that has, or will have, the session of this load, counted from one.
    pub(super) fn lose_session(&self, load: usize) -> LostWorker {
        self.dead.store(load, Ordering::SeqCst);
        LostWorker {
            worker: load as u64,
            reason: "its worker process was told to die".into(),
            by_itself: true,
        }
    }

    pub(super) fn loads_begun(&self) -> usize {
        self.begun.load(Ordering::SeqCst)
    }

    pub(crate) fn open_sessions(&self) -> usize {
        self.sessions.load(Ordering::SeqCst)
    }

    pub(super) fn runs_ended(&self) -> usize {
        self.ended.load(Ordering::SeqCst)
    }
}

/// The engine as units know it.
#[derive(Debug)]
struct Handle(Arc<FakeEngine>);

impl Engine for Handle {
    fn prepare(&self) -> Result<Duration, EngineError> {
        Ok(Duration::ZERO)
    }

    fn open(
        &self,
        _: ModelBytes,
        _: &SessionSpec,
        _: Effort,
    ) -> Result<Arc<dyn Session>, EngineError> {
        let load = self.0.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let fails = self.0.fails.load(Ordering::SeqCst);
        self.0.loads.pass(|| false);
        if fails {
            return Err(EngineError::Failed("told to".into()));
        }
        self.0.sessions.fetch_add(1, Ordering::SeqCst);
        let tensor = |name: &str| SessionTensor {
            name: name.into(),
            datatype: Some(DataType::Int32),
            dims: None,
        };
        Ok(Arc::new(FakeSession {
            engine: Arc::clone(&self.0),
            inputs: [tensor("INPUT")],
            outputs: [tensor("OUTPUT")],
            load,
        }))
    }

    fn describe(&self) -> String {
        "fake".into()
    }
}

#[derive(Debug)]
struct FakeSession {
    engine: Arc<FakeEngine>,
    inputs: [SessionTensor; 1],
    outputs: [SessionTensor; 1],
    load: usize,
}

impl Drop for FakeSession {
    fn drop(&mut self) {
        self.engine.closes.pass(|| false);
        self.engine.sessions.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Session for FakeSession {
    fn inputs(&self) -> &[SessionTensor] {
        &self.inputs
    }

    fn outputs(&self) -> &[SessionTensor] {
        &self.outputs
    }

    fn run(
        &self,
        inputs: &[(usize, Tensor)],
        _: &[usize],
        stop: &StopHandle,
    ) -> Result<Vec<Tensor>, EngineError> {
        let stop = stop.as_any().downcast_ref::<FakeStop>().unwrap();
        let stopped = || stop.stopped.load(Ordering::SeqCst);
        let tensor = &inputs[0].1;
        let has = |number: i32| {
            let mut numbers = tensor.data.chunks_exact(4);
            numbers.any(|bytes| bytes == number.to_le_bytes())
        };
        if has(HELD) {
            self.engine.runs.pass(stopped);
        }
        if let Some(lost) = self.lost() {
            return Err(EngineError::Lost(lost));
        }
        if stopped() {
            return Err(EngineError::Terminated);
        }
        if has(POISON) {
            return Err(EngineError::Failed("poisoned".into()));
        }
        self.engine.ended.fetch_add(1, Ordering::SeqCst);
        if has(PANIC) {
            return Ok(Vec::new());
        }
        Ok(vec![tensor.clone()])
    }

    fn lost(&self) -> Option<LostWorker> {
        let dead = self.engine.dead.load(Ordering::SeqCst);
        (self.load <= dead).then(|| LostWorker {
            worker: self.load as u64,
            ..self.engine.lose_session(dead)
        })
    }

    fn stop_handle(&self) -> Result<StopHandle, EngineError> {
        Ok(Arc::new(FakeStop {
            engine: Arc::clone(&self.engine),
            stopped: AtomicBool::new(false),
        }))
    }
}

#[derive(Debug)]
struct FakeStop {
    engine: Arc<FakeEngine>,
    stopped: AtomicBool,
}

impl Stop for FakeStop {
    fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        // Under its lock, so that a run between its look and its wait is not missed.
        drop(self.engine.runs.closed.lock());
        self.engine.runs.changed.notify_all();
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Files that are not there, as large and as new as a test says.
#[derive(Clone, Debug, Default)]
pub(super) struct FakeFiles {
    pub(super) size: u64,
    pub(super) changed: Arc<AtomicBool>,
}

impl Source for FakeFiles {
    fn read(&self) -> Result<SourceModel, ServeError> {
        Ok(SourceModel {
            bytes: ModelBytes::in_memory(Vec::new(), Vec::new()),
            size: 0,
            operators: OperatorFacts::default(),
            file: None,
            files: Vec::new(),
            is_current: self.is_current(),
        })
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn known_digests(&self, _: &DigestCache) -> Result<Option<SourceDigests>, ServeError> {
        Ok(None)
    }

    fn digests(
        &self,
        _: &DigestCache,
        _: Option<&[FileIdentity]>,
    ) -> Result<SourceDigests, ServeError> {
        Ok(Vec::new())
    }

    fn is_current(&self) -> bool {
        !self.changed.load(Ordering::SeqCst)
    }

    fn warmup_file(&self, _: &str) -> Result<Vec<u8>, ServeError> {
        Ok(Vec::new())
    }
}

/// What units need around them.
pub(crate) struct Bench {
    pub(crate) host: Arc<Host>,
    pub(crate) engine: Arc<FakeEngine>,
}

impl Bench {
    pub(crate) fn new() -> Self {
        Self::with(|_| {})
    }

    pub(crate) fn with(change: impl FnOnce(&mut UnitDefaults)) -> Self {
        Self::bounded(u64::MAX, 4, change)
    }

    /// With a memory budget, and so many loads at a time.
    pub(super) fn bounded(
        budget: u64,
        loads: usize,
        change: impl FnOnce(&mut UnitDefaults),
    ) -> Self {
        let engine = Arc::new(FakeEngine::default());
        let clock = Clock::start();
        let mut defaults = UnitDefaults {
            keep_alive: KeepAliveSpec::For(Duration::from_secs(3600)),
            park_after: None,
            max_queue: 1000,
            retry_backoff: Duration::from_secs(3600),
            retry_backoff_max: Duration::from_secs(3600),
            load_retries: 0,
        };
        change(&mut defaults);
        let handle: Arc<dyn Engine> = Arc::new(Handle(Arc::clone(&engine)));
        let metrics = Metrics::new().unwrap();
        let host = Arc::new(Host {
            clock,
            isolation: Isolation::new(
                IsolationConfig::default(),
                OnnxOptions::new(""),
                Arc::clone(&handle),
                metrics.clone(),
            ),
            engine: handle,
            alarm: Alarm::spawn(clock).unwrap(),
            metrics,
            slots: Mutex::new(RunSlots::new(SLOTS)),
            loads: Arc::new(tokio::sync::Semaphore::new(loads)),
            in_flight: InFlight::new(ByteSize::mib(1)),
            activity: Activity::new(clock),
            tracer: None,
            events: Events::default(),
            wake: Wake {
                preparation: None,
                residency: Arc::new(Residency::new(budget, clock)),
                switches: Switches {
                    prepare: true,
                    overlap: true,
                    sharing: true,
                    staging: true,
                },
                moves: Arc::default(),
                loaders: Background::new("load", 4),
                quick_loaders: Background::with_niceness("load", 1, 0),
                populators: Background::new("populate", 1),
                preparers: Background::new("prepare", 1),
            },
            runtime: tokio::runtime::Handle::current(),
            defaults,
        });
        Self { host, engine }
    }

    /// A unit that takes eight rows of one number each, alone unless `change` gives it batching.
    pub(super) fn unit(&self, change: impl FnOnce(&mut ModelSpec)) -> Arc<Unit> {
        self.unit_of(FakeFiles::default(), change)
    }

    /// As [`Bench::unit`], of these files.
    pub(super) fn unit_of(
        &self,
        files: FakeFiles,
        change: impl FnOnce(&mut ModelSpec),
    ) -> Arc<Unit> {
        let number = |name| vec![tensor(name, DataType::Int32, &[1])];
        let mut spec = model("echo", 8, number("INPUT"), number("OUTPUT"));
        change(&mut spec);
        spec.runs_rows_together = spec.batching.is_some() || spec.sequence.is_some();
        Unit::new(UnitParts {
            id: ModelId::new("echo", 1),
            spec: Arc::new(spec),
            source: Box::new(files),
            counters: Arc::default(),
            host: Arc::clone(&self.host),
        })
    }

    /// Waits until nothing is under way, and checks that nothing is kept, that the unit can be
    /// retired and that its session goes with it.
    pub(super) async fn assert_idle(&self, unit: &Arc<Unit>) {
        until(|| {
            let state = unit.state.lock();
            state.runs.is_empty() && state.batcher.queued() == 0
        })
        .await;
        until(|| self.host.slots.lock().used() == 0).await;
        assert_eq!(self.host.slots.lock().waiting(), 0);
        let left = unit.state.lock().order.as_ref().map(|o| o.outstanding());
        assert_eq!(left.unwrap_or(0), 0);
        until(|| self.host.in_flight.used() == 0).await;
        unit.retire().await;
        assert_eq!(unit.stage(), Stage::Retired);
        until(|| self.engine.open_sessions() == self.models_warm()).await;
    }

    /// The gauge of sessions.
    fn models_warm(&self) -> usize {
        let text = self.host.metrics.render();
        let mut lines = text.lines();
        let count = lines.find_map(|line| line.strip_prefix("dormouse_models_warm "));
        count.map_or(0, |count| count.parse().unwrap())
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // A test that fails must not leave a thread waiting.
        for gate in [&self.engine.loads, &self.engine.runs, &self.engine.closes] {
            gate.open();
        }
    }
}

pub(super) fn batching() -> DynamicBatchingSpec {
    DynamicBatchingSpec {
        preferred_rows: Vec::new(),
        max_delay: Duration::ZERO,
        preserve_ordering: false,
        priority_levels: 0,
        default_priority_level: 0,
        default_queue_policy: QueuePolicySpec {
            delay_on_timeout: false,
            default_timeout: None,
            allow_timeout_override: false,
            max_queue_size: None,
        },
        priority_queue_policy: Default::default(),
    }
}

pub(super) fn request(number: i32) -> InferRequest {
    let tensor = Tensor {
        datatype: DataType::Int32,
        shape: Shape::from_slice(&[1, 1]),
        data: number.to_le_bytes().to_vec().into(),
    };
    InferRequest {
        id: String::new(),
        inputs: vec![Some(tensor)],
        outputs: vec![0],
        rows: 1,
        priority: 0,
        deadline: None,
        received: Default::default(),
        sequence: None,
        span: None,
        held: None,
    }
}

/// Asks in a task of its own.
pub(super) fn ask(unit: &Arc<Unit>, number: i32) -> JoinHandle<Result<i32, ServeError>> {
    ask_with(unit, request(number))
}

pub(super) fn ask_with(
    unit: &Arc<Unit>,
    request: InferRequest,
) -> JoinHandle<Result<i32, ServeError>> {
    let unit = Arc::clone(unit);
    tokio::spawn(async move {
        match unit.infer(request).await {
            Ok(response) => {
                let data = &response.outputs[0].1.data;
                Ok(i32::from_le_bytes(data.as_ref().try_into().unwrap()))
            }
            Err(NotAnswered::Failed(error)) => Err(error),
            Err(NotAnswered::Retired(_)) => Err(ServeError::not_found("retired")),
        }
    })
}

/// Successes and failures counted.
pub(super) fn counts(unit: &Unit) -> (u64, u64) {
    let counted = unit.counters().snapshot(unit.id()).inference;
    (counted.success.count, counted.fail.count)
}

/// Waits for something that must come.
pub(crate) async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

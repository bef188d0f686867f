//! One version of one model at run time: drives its lifecycle and its batcher.
//!
//! The decisions are `dormouse_core`'s; this file feeds them events under one short lock and
//! carries out what they decide after the lock is released. A request touches no task or channel
//! on its way to an idle model: the thread that received it queues it, takes the batch and runs it.

mod cached;
mod dispatch;
mod effects;
mod exit;
mod footprint;
mod isolated;
mod load;
mod made;
mod open;
mod policy;
mod prepare;
mod queue;
mod rows;
mod run;
mod source;
mod submit;
#[cfg(test)]
pub(crate) mod tests;
mod warmup;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use dormouse_core::batch::{BatchItem, EntryId};
use dormouse_core::code::ErrorCode;
use dormouse_core::id::ModelId;
use dormouse_core::keep_alive::{KeepAlive, KeepAlivePolicy};
use dormouse_core::lifecycle::{Demand, Lifecycle, LifecyclePolicy, PrewarmCount, Stage};
use dormouse_core::order::Sequencer;
use dormouse_core::profile::ServiceProfile;
use dormouse_core::shape::Shape;
use dormouse_core::side_by_side::SideBySide;
use dormouse_core::time::Timestamp;
use dormouse_core::upgrade::{Upgrade, UpgradePolicy};
use dormouse_model_store::spec::{ModelSpec, RaggedSpec};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::sync::oneshot::{self, error::TryRecvError};

use crate::alarm::Ring;
use crate::engine::{RunBuffers, StopHandle};
use crate::error::ServeError;
use crate::host::Host;
use crate::isolation::IsolatedEngine;
use crate::metrics::{FailureReason, UnitMetrics};
use crate::request::{InferRequest, InferResponse, Tensor};
use crate::residency::Held;
use crate::spans::SpanContext;
use crate::stats::VersionCounters;
use crate::timeline::{LoadTimeline, TimelineRecorder};

pub use self::footprint::{loading_footprint, prepared_footprint};
pub use self::prepare::PreparationReport;
#[doc(hidden)]
pub use self::rows::{gather_inputs, split_outputs};
pub(crate) use self::source::still_the_same;
pub use self::source::{Source, SourceModel};
use effects::{Answer, Effects, LoadWaiter, Place};
use open::OpenSession;
use queue::Queue;

/// The next unit's number.
static SERIAL: AtomicU64 = AtomicU64::new(0);

/// A run shorter than this may happen on the thread that received the request: handing it to
/// another thread would cost more than it takes. Only what is sure to be short again is run
/// there, because that thread has other connections to serve.
const SHORT_RUN: Duration = Duration::from_micros(150);

/// What a unit is made of.
#[derive(Debug)]
pub struct UnitParts {
    pub id: ModelId,
    pub spec: Arc<ModelSpec>,
    pub source: Box<dyn Source>,
    pub counters: Arc<VersionCounters>,
    pub host: Arc<Host>,
}

/// One version of one model: asleep, loading, warm, or on its way.
#[derive(Debug)]
pub struct Unit {
    id: ModelId,
    spec: Arc<ModelSpec>,
    source: Box<dyn Source>,
    counters: Arc<VersionCounters>,
    host: Arc<Host>,
    metrics: OnceLock<Arc<UnitMetrics>>,
    state: Mutex<State>,
    /// What the first request of a sequence is given.
    initial_states: Mutex<Arc<[Tensor]>>,
    /// Tells units apart.
    serial: u64,
    /// What opens its sessions in a process of their own, if it is to run there.
    isolated: Option<Arc<IsolatedEngine>>,
    this: Weak<Self>,
}

/// What becomes of a request in the queue.
type Reply = Result<InferResponse, NotAnswered>;

/// A request that no unit will answer, and why.
#[derive(Debug)]
pub enum NotAnswered {
    /// The unit, or the files it would have been loaded from, were replaced while the request was
    /// on its way; ask its successor.
    Retired(Box<InferRequest>),
    Failed(ServeError),
}

#[derive(Debug)]
struct State {
    lifecycle: Lifecycle,
    batcher: Queue,
    profile: ServiceProfile,
    /// What runs use.
    session: Option<Arc<OpenSession>>,
    /// The unpacked session, while a packed one is used.
    base: Option<Arc<OpenSession>>,
    keep_alive: KeepAlive,
    /// The keep-alive policy follows the calls.
    learns: bool,
    upgrade: Upgrade,
    /// The loads ahead of a call that are in the metrics.
    noted_prewarms: PrewarmCount,
    /// The prepared store has the model.
    prepared: bool,
    /// The model is being put there.
    preparing: bool,
    /// It is to be put there when a run has ended: the first answer has the machine to itself.
    prepare_next: bool,
    /// The last preparation came to nothing, for want of memory perhaps, or it could not be loaded in
    /// haste.
    missed_preparation: bool,
    /// It cannot be put there, however often that is tried.
    unpreparable: bool,
    /// What a session that is being closed held.
    leaving: Option<Held>,
    runs: Vec<RunInfo>,
    runs_issued: u64,
    at_once: SideBySide,
    /// What runs of the latest shapes take, for a graph of which that can be said.
    latest: Option<KnownRun>,
    /// What the first run after the last wake had: the next one's will be ready.
    first_buffers: Option<Arc<RunBuffers>>,
    /// Present when answers must leave in the order the requests came.
    order: Option<Sequencer<Answer>>,
    load_started: Option<Timestamp>,
    /// When its last load or unparking began, until the first run after it has ended.
    waking_since: Option<Timestamp>,
    /// The inputs of the request that the load is for, until it looked at them.
    load_asked: Vec<Tensor>,
    /// The request that the load is for, if it is recorded.
    load_for: Option<SpanContext>,
    load_error: Option<ServeError>,
    timeline: Option<TimelineRecorder>,
    load_waiters: Vec<LoadWaiter>,
    retire_waiters: Vec<oneshot::Sender<()>>,
    /// Alarms that were set and have not rung yet, the next one last: one that an earlier one
    /// overtook still rings, and then need not be set again.
    alarms: SmallVec<[Timestamp; 2]>,
    /// A due batch could not get a run slot; one will be handed over.
    waits_for_slot: bool,
    crashes: isolated::Crashes,
}

/// The shapes of a run's inputs without their rows, absent where an optional one was left out.
type RunShapes = SmallVec<[Option<Shape>; 2]>;

/// Runs of a steady graph on inputs of these shapes.
#[derive(Debug)]
struct KnownRun {
    shapes: RunShapes,
    /// The shortest run of each size class (1, 2, 4, … rows): a longer one was held up by
    /// something else.
    took: [Duration; 32],
}

/// A run under way, as cancellation sees it.
#[derive(Debug)]
struct RunInfo {
    id: u64,
    started: Timestamp,
    /// Requests of the run that somebody still waits for.
    members: SmallVec<[EntryId; 4]>,
    stop: Option<StopHandle>,
    /// Nothing else of this unit runs beside it.
    alone: bool,
}

/// A request in the queue or in a run.
#[derive(Debug)]
struct Pending {
    request: InferRequest,
    reply: oneshot::Sender<Reply>,
    enqueued: Timestamp,
    /// Place in the order of arrival, when order is preserved.
    sequence: Option<u64>,
    /// The model takes several requests in one run.
    batchable: bool,
    /// Inputs whose shapes may differ from those of others in the run.
    ragged: Option<Arc<RaggedSpec>>,
    cold: bool,
}

impl BatchItem for Pending {
    fn rows(&self) -> u32 {
        self.request.rows
    }

    fn can_join(&self, first: &Self) -> bool {
        if let Some(ragged) = &self.ragged {
            return self.batchable && self.joins_ragged(first, ragged);
        }
        self.batchable
            && self
                .request
                .inputs
                .iter()
                .zip(&first.request.inputs)
                .all(|pair| match pair {
                    (Some(mine), Some(theirs)) => mine.shape.get(1..) == theirs.shape.get(1..),
                    (None, None) => true,
                    _ => false,
                })
    }
}

impl Unit {
    pub fn new(parts: UnitParts) -> Arc<Self> {
        let UnitParts {
            id,
            spec,
            source,
            counters,
            host,
        } = parts;
        let defaults = &host.defaults;
        let policy = exit::keep_alive_policy(&spec.lifecycle, defaults, host.wake.switches.staging);
        let keep_alive = KeepAlive::new(policy);
        let lifecycle = Lifecycle::new(LifecyclePolicy {
            plan: keep_alive.plan(),
            retry_backoff: defaults.retry_backoff,
            retry_backoff_max: defaults.retry_backoff_max,
        });
        let preserves_order = queue::preserves_order(&spec);
        let state = State {
            lifecycle,
            batcher: Queue::new(&id, &spec, &host),
            profile: ServiceProfile::default(),
            session: None,
            base: None,
            keep_alive,
            learns: matches!(policy, KeepAlivePolicy::Adaptive(_)),
            upgrade: Upgrade::new(UpgradePolicy::default()),
            prepared: false,
            preparing: false,
            prepare_next: false,
            missed_preparation: false,
            noted_prewarms: PrewarmCount::default(),
            unpreparable: false,
            leaving: None,
            runs: Vec::new(),
            runs_issued: 0,
            at_once: match spec.concurrency_is_default {
                true => SideBySide::learning(spec.concurrency as usize),
                false => SideBySide::fixed(spec.concurrency as usize),
            },
            latest: None,
            first_buffers: None,
            order: preserves_order.then(Sequencer::default),
            load_started: None,
            waking_since: None,
            load_asked: Vec::new(),
            load_for: None,
            load_error: None,
            timeline: None,
            load_waiters: Vec::new(),
            retire_waiters: Vec::new(),
            alarms: SmallVec::new(),
            waits_for_slot: false,
            crashes: isolated::Crashes::new(host.isolation.settings().deaths),
        };
        Arc::new_cyclic(|this: &Weak<Self>| Self {
            isolated: host.isolation.engine_for(&id, &spec, {
                let this = this.clone();
                move |lost| {
                    if let Some(unit) = this.upgrade() {
                        unit.worker_died(lost);
                    }
                }
            }),
            id,
            spec,
            source,
            counters,
            host,
            metrics: OnceLock::new(),
            state: Mutex::new(state),
            initial_states: Mutex::default(),
            serial: SERIAL.fetch_add(1, Ordering::Relaxed),
            this: this.clone(),
        })
    }

    /// Tells this unit from every other.
    pub fn serial(&self) -> u64 {
        self.serial
    }

    fn arc(&self) -> Arc<Self> {
        self.this
            .upgrade()
            .expect("a unit is only called through its Arc")
    }

    pub fn id(&self) -> &ModelId {
        &self.id
    }

    pub fn spec(&self) -> &Arc<ModelSpec> {
        &self.spec
    }

    pub fn counters(&self) -> &Arc<VersionCounters> {
        &self.counters
    }

    pub fn stage(&self) -> Stage {
        self.state.lock().lifecycle.stage()
    }

    /// Requests that wait to be run.
    pub fn queued(&self) -> usize {
        self.state.lock().batcher.queued()
    }

    /// Why the last load failed, while that stands.
    pub fn load_error(&self) -> Option<ServeError> {
        self.state.lock().load_error.clone()
    }

    /// What the last load spent its time on.
    pub fn timeline(&self) -> Option<LoadTimeline> {
        let recorder = self.state.lock().timeline.clone();
        recorder.map(|recorder| recorder.timeline())
    }

    fn metrics(&self) -> &UnitMetrics {
        self.metrics
            .get_or_init(|| self.host.metrics.unit(&self.id))
    }

    /// Answers a request, waking the model if it sleeps. Dropping the future cancels the request.
    pub fn infer(
        &self,
        request: InferRequest,
    ) -> impl Future<Output = Result<InferResponse, NotAnswered>> + Send {
        let deadline = request.deadline;
        // Here and not in the future, which would have to carry the request.
        let submitted = self.submit(request);
        async move {
            let mut ticket = submitted?;
            // A short run has happened already; then there is nothing to wait for.
            let answer = match ticket.receiver.try_recv() {
                Ok(answer) => Some(answer),
                Err(TryRecvError::Closed) => None,
                Err(TryRecvError::Empty) => match deadline {
                    None => (&mut ticket.receiver).await.ok(),
                    Some(deadline) => {
                        let at = self.host.clock.instant(deadline);
                        match tokio::time::timeout_at(at, &mut ticket.receiver).await {
                            Ok(answer) => answer.ok(),
                            Err(_) => return Err(NotAnswered::Failed(self.deadline_exceeded())),
                        }
                    }
                },
            };
            ticket.answered = true;
            // Every pending request is answered before it is dropped, except when its thread dies.
            answer.unwrap_or_else(|| {
                Err(NotAnswered::Failed(ServeError::internal(format!(
                    "the run of model {} ended without an answer",
                    self.id
                ))))
            })
        }
    }

    /// Loads the model now; resolves when it is warm or has failed.
    pub async fn ensure_loaded(&self) -> Result<(), ServeError> {
        let receiver = {
            let now = self.host.clock.now();
            let mut state = self.state.lock();
            let mut effects = Effects::default();
            let was_parked = state.lifecycle.stage() == Stage::Parked;
            match state.lifecycle.demand(now) {
                Demand::Run => {
                    if was_parked {
                        self.note_holding(&state);
                        self.set_alarm(&mut state, &mut effects);
                        drop(state);
                        self.perform(effects, Place::Elsewhere);
                    }
                    return Ok(());
                }
                Demand::Retired => return Err(self.gone()),
                Demand::Refuse { retry_at } => return Err(self.load_refusal(&state, retry_at, now)),
                Demand::Wait => {}
                Demand::StartLoad => self.begin_load(&mut state, &mut effects, now),
            }
            let (sender, receiver) = oneshot::channel();
            state.load_waiters.push(sender);
            drop(state);
            self.perform(effects, Place::Elsewhere);
            receiver
        };
        receiver.await.unwrap_or_else(|_| Err(self.gone()))
    }

    /// Accepts no more requests, finishes what is queued and running, then closes the session.
    /// Resolves when that is done.
    pub async fn retire(&self) {
        let receiver = {
            let now = self.host.clock.now();
            let mut state = self.state.lock();
            let mut effects = Effects::default();
            state.batcher.retire();
            let queued = state.batcher.held();
            let action = state.lifecycle.retire(now, queued);
            let (sender, receiver) = oneshot::channel();
            state.retire_waiters.push(sender);
            self.act(&mut state, action, &mut effects, now);
            drop(state);
            self.perform(effects, Place::Elsewhere);
            receiver
        };
        // The sender lives in this unit's state; a lost one means that the unit is gone as well.
        let _ = receiver.await;
    }

    fn deadline_exceeded(&self) -> ServeError {
        ServeError::new(
            ErrorCode::DeadlineExceeded,
            format!("the deadline passed before model {} answered", self.id),
        )
    }

    fn gone(&self) -> ServeError {
        ServeError::unavailable(format!("model {} is being unloaded", self.id))
    }

    fn load_refusal(&self, state: &State, retry_at: Timestamp, now: Timestamp) -> ServeError {
        let error = state.load_error.clone().unwrap_or_else(|| self.gone());
        if state.crashes.is_quarantined() {
            return error;
        }
        load::may_retry(error, retry_at - now)
    }

    /// Counts a request that does not fit the model's signature.
    pub fn count_invalid(&self, received: Timestamp) {
        self.counters.failed(self.host.clock.now() - received);
        self.metrics().failed(FailureReason::Other);
    }

    /// Counts a request that was given back as retired and found no other unit.
    pub fn count_unserved(&self, received: Timestamp) {
        self.counters.failed(self.host.clock.now() - received);
        self.metrics().failed(FailureReason::Rejected);
    }

    /// Counts a request that never entered the queue.
    fn refused(
        &self,
        error: ServeError,
        received: Timestamp,
        reason: FailureReason,
    ) -> NotAnswered {
        self.counters.failed(self.host.clock.now() - received);
        self.metrics().failed(reason);
        NotAnswered::Failed(error)
    }
}

impl Ring for Unit {
    fn ring(self: Arc<Self>) {
        let now = self.host.clock.now();
        let mut effects = Effects::default();
        let mut state = self.state.lock();
        while state.alarms.last().is_some_and(|&at| at <= now) {
            state.alarms.pop();
        }
        self.pump(&mut state, &mut effects, now);
        let queued = state.batcher.held();
        let action = state.lifecycle.poll(now, queued);
        self.act(&mut state, action, &mut effects, now);
        drop(state);
        self.perform(effects, Place::Elsewhere);
    }
}

/// The caller's hold on its request: dropped before the answer came, the request is cancelled.
struct Ticket<'a> {
    unit: &'a Unit,
    entry: EntryId,
    receiver: oneshot::Receiver<Reply>,
    answered: bool,
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.receiver.close();
            self.unit.abandon(self.entry);
        }
    }
}

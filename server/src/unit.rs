//! One version of one model at run time: drives its lifecycle and its batcher.
//!
//! The decisions are `dormouse_core`'s; this file feeds them events under one short lock and
//! carries out what they decide after the lock is released. A request touches no task or channel
//! on its way to an idle model: the thread that received it queues it, takes the batch and runs it.

mod cached;
mod effects;
mod exit;
mod footprint;
mod isolated;
mod load;
mod made;
mod policy;
mod prepare;
mod queue;
mod run;
mod submit;
#[cfg(test)]
pub(crate) mod tests;
mod warmup;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use dormouse_core::batch::{BatchItem, EntryId, ExpiryCause};
use dormouse_core::code::ErrorCode;
use dormouse_core::id::ModelId;
use dormouse_core::keep_alive::{KeepAlive, KeepAlivePolicy};
use dormouse_core::lifecycle::{Demand, Lifecycle, LifecyclePolicy, Stage};
use dormouse_core::order::Sequencer;
use dormouse_core::profile::ServiceProfile;
use dormouse_core::shape::Shape;
use dormouse_core::time::Timestamp;
use dormouse_core::upgrade::{Upgrade, UpgradePolicy};
use dormouse_model_store::repository::{FileIdentity, GraphFile};
use dormouse_model_store::spec::{ModelSpec, RaggedSpec};
use dormouse_model_store::store::DigestCache;
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::sync::oneshot;

use crate::alarm::Ring;
use crate::engine::{ModelBytes, StopHandle};
use crate::error::ServeError;
use crate::host::{Host, InFlightBytes, UnitKey};
use crate::isolation::IsolatedEngine;
use crate::metrics::{FailureReason, UnitMetrics};
use crate::preparation::SourceDigests;
use crate::request::{InferRequest, InferResponse, Tensor};
use crate::residency::Held;
use crate::spans::SpanContext;
use crate::stats::VersionCounters;
use crate::timeline::{LoadTimeline, TimelineRecorder};

pub use self::footprint::{loading_footprint, prepared_footprint};
pub use self::prepare::PreparationReport;
#[doc(hidden)]
pub use self::run::{gather_inputs, split_outputs};
use effects::{Answer, Effects, Failure, LoadWaiter, Place};
use load::OpenSession;
use queue::Queue;

/// A run shorter than this may happen on the thread that received the request: handing it to
/// another thread would cost more than it takes. Only what is sure to be short again is run
/// there, because that thread has other connections to serve.
/// The next unit's number.
static SERIAL: AtomicU64 = AtomicU64::new(0);

const SHORT_RUN: Duration = Duration::from_micros(150);

/// Where a unit's bytes come from.
pub trait Source: Send + Sync + std::fmt::Debug {
    /// Whether the files may have to be fetched first.
    fn is_remote(&self) -> bool {
        false
    }
    /// Fetches what `read` reads, as far as it is not here.
    fn fetch(&self, recorder: &TimelineRecorder) -> Result<(), ServeError> {
        let _ = recorder;
        Ok(())
    }
    /// Reads graph and weights, or opens the file that holds them.
    fn read(&self) -> Result<SourceModel, ServeError>;
    /// The size of everything that `read` reads, or about that.
    fn size(&self) -> u64;
    /// Whether the files are those that the unit was made for.
    fn is_current(&self) -> bool;
    /// The digests of the files that `read` reads, if they are known without reading them.
    fn known_digests(&self, known: &DigestCache) -> Result<Option<SourceDigests>, ServeError>;
    /// The digests of the files that `read` reads; fails when these are not the ones in `read`.
    fn digests(
        &self,
        known: &DigestCache,
        read: Option<&[FileIdentity]>,
    ) -> Result<SourceDigests, ServeError>;
    /// How long until the files count as unchanged since they were last written.
    fn settles_in(&self) -> Duration {
        Duration::ZERO
    }
    /// Reads a file of the model's `initial_state` folder.
    fn initial_state_file(&self, name: &str) -> Result<Vec<u8>, ServeError> {
        Err(ServeError::unavailable(format!(
            "initial state file '{name}' cannot be read: the model has no folder"
        )))
    }
    /// Reads a file of the model's `warmup` folder.
    fn warmup_file(&self, name: &str) -> Result<Vec<u8>, ServeError>;
}

/// What a source read.
#[derive(Debug)]
pub struct SourceModel {
    pub bytes: ModelBytes,
    /// Its size.
    pub size: u64,
    /// The graph's run time follows from the shapes of its inputs, not from their values.
    pub is_steady: bool,
    /// The file that the engine reads itself.
    pub file: Option<GraphFile>,
    /// Which files these are.
    pub files: Vec<FileIdentity>,
    /// They are those that the unit was made for.
    pub is_current: bool,
}

/// Fails when a file was changed while the engine read it: what it built is then of neither state.
pub(crate) fn still_the_same(file: Option<&GraphFile>) -> Result<(), ServeError> {
    match file.map(GraphFile::unchanged) {
        Some(Err(error)) => Err(ServeError::unavailable(error.to_string())),
        Some(Ok(())) | None => Ok(()),
    }
}

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
    metrics: OnceLock<UnitMetrics>,
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
    /// The prepared store has the model.
    prepared: bool,
    /// The model is being put there.
    preparing: bool,
    /// It cannot be put there, however often that is tried.
    unpreparable: bool,
    /// What a session that is being closed held.
    leaving: Option<Held>,
    runs: Vec<RunInfo>,
    runs_issued: u64,
    /// What runs of the latest shapes take, for a graph of which that can be said.
    latest: Option<KnownRun>,
    /// Present when answers must leave in the order the requests came.
    order: Option<Sequencer<Answer>>,
    load_started: Option<Timestamp>,
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
    _bytes: InFlightBytes,
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
            batcher: Queue::new(&spec, defaults.max_queue),
            profile: ServiceProfile::default(),
            session: None,
            base: None,
            keep_alive,
            learns: matches!(policy, KeepAlivePolicy::Adaptive(_)),
            upgrade: Upgrade::new(UpgradePolicy::default()),
            prepared: false,
            preparing: false,
            unpreparable: false,
            leaving: None,
            runs: Vec::new(),
            runs_issued: 0,
            latest: None,
            order: preserves_order.then(Sequencer::default),
            load_started: None,
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
    pub async fn infer(&self, request: InferRequest) -> Result<InferResponse, NotAnswered> {
        let deadline = request.deadline;
        let mut ticket = self.submit(request)?;
        let answer = match deadline {
            None => (&mut ticket.receiver).await,
            Some(deadline) => {
                let at = self.host.clock.instant(deadline);
                match tokio::time::timeout_at(at, &mut ticket.receiver).await {
                    Ok(answer) => answer,
                    Err(_) => {
                        return Err(NotAnswered::Failed(self.deadline_exceeded()));
                    }
                }
            }
        };
        ticket.answered = true;
        match answer {
            Ok(answer) => answer,
            // Every pending request is answered before it is dropped, except when its thread dies.
            Err(_) => Err(NotAnswered::Failed(ServeError::internal(format!(
                "the run of model {} ended without an answer",
                self.id
            )))),
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

    /// Takes every batch that is due and may run now.
    fn pump(&self, state: &mut State, effects: &mut Effects, now: Timestamp) {
        self.expire(state, effects, now);
        while self.can_run(state) {
            let State {
                batcher, profile, ..
            } = state;
            // Asked before a slot is: a batch that still waits for company must not queue for
            // one, or two such models would hand it to each other until one of them is due.
            let due = batcher.wake_at(|rows| profile.cautious_run(rows));
            if due.is_none_or(|due| due > now) {
                break;
            }
            if !self.acquire_slot() {
                state.waits_for_slot = true;
                break;
            }
            let Some(batch) = batcher.take_batch(now, |rows| profile.cautious_run(rows)) else {
                self.release_slot();
                break;
            };
            let run = self.prepare_run(state, batch, now);
            effects.runs.push(run);
        }
        // Taking batches may have given up requests that could not be answered in time.
        self.expire(state, effects, now);
    }

    fn can_run(&self, state: &State) -> bool {
        let alone = matches!(state.runs[..], [RunInfo { alone: true, .. }]);
        state.session.is_some() && state.runs.len() < self.spec.concurrency as usize && !alone
    }

    fn acquire_slot(&self) -> bool {
        let unit = self.arc();
        self.host.slots.lock().try_acquire(&UnitKey(unit))
    }

    /// Gives a run slot back; the model that has waited longest for one gets it.
    fn release_slot(&self) {
        let next = self.host.slots.lock().release();
        if let Some(UnitKey(unit)) = next {
            // Not on this stack: the lock of this unit may be held.
            let host = Arc::clone(&self.host);
            host.runtime.spawn(async move { unit.use_slot() });
        }
    }

    /// Uses a run slot that was handed to this unit.
    fn use_slot(&self) {
        let now = self.host.clock.now();
        let mut effects = Effects::default();
        let mut state = self.state.lock();
        state.waits_for_slot = false;
        self.expire(&mut state, &mut effects, now);
        let can_run = self.can_run(&state);
        let State {
            batcher, profile, ..
        } = &mut *state;
        let batch = match batcher.queued() {
            1.. if can_run => batcher.take_batch(now, |rows| profile.cautious_run(rows)),
            _ => None,
        };
        match batch {
            Some(batch) => {
                let run = self.prepare_run(&mut state, batch, now);
                effects.runs.push(run);
            }
            None => self.release_slot(),
        }
        self.pump(&mut state, &mut effects, now);
        // What expired here may have been the last that the session was kept for.
        let queued = state.batcher.held();
        let action = state.lifecycle.poll(now, queued);
        self.act(&mut state, action, &mut effects, now);
        drop(state);
        self.perform(effects, Place::Elsewhere);
    }

    /// Answers what has waited too long.
    fn expire(&self, state: &mut State, effects: &mut Effects, now: Timestamp) {
        for expired in state.batcher.expire(now) {
            self.metrics().pending.decrement(1.0);
            let error = match expired.cause {
                ExpiryCause::Deadline => self.deadline_exceeded(),
                ExpiryCause::QueueTimeout => ServeError::new(
                    ErrorCode::DeadlineExceeded,
                    format!(
                        "the request waited {:?} in the queue of model {}, longer than its queue policy allows",
                        expired.waited, self.id
                    ),
                ),
                ExpiryCause::SequenceOver => ServeError::unavailable(
                    "timeout of the corresponding sequence has been expired",
                ),
            };
            self.fail(
                state,
                effects,
                expired.item,
                Failure {
                    error,
                    reason: FailureReason::Rejected,
                },
            );
        }
    }

    /// Removes a request nobody waits for any more; stops its run when it was the last one in it.
    fn abandon(&self, entry: EntryId) {
        let now = self.host.clock.now();
        let mut effects = Effects::default();
        let mut state = self.state.lock();
        if let Some(pending) = state.batcher.cancel(entry, now) {
            self.metrics().pending.decrement(1.0);
            let expired = pending
                .request
                .deadline
                .is_some_and(|deadline| deadline <= now);
            let reason = if expired {
                FailureReason::Rejected
            } else {
                FailureReason::Canceled
            };
            let error = ServeError::new(ErrorCode::Cancelled, "the request was cancelled");
            self.fail(&mut state, &mut effects, pending, Failure { error, reason });
            let queued = state.batcher.held();
            let action = state.lifecycle.poll(now, queued);
            self.act(&mut state, action, &mut effects, now);
        } else if let Some(run) = state
            .runs
            .iter_mut()
            .find(|run| run.members.contains(&entry))
        {
            run.members.retain(|member| *member != entry);
            if run.members.is_empty()
                && let Some(stop) = run.stop.take()
            {
                stop.stop();
            }
        }
        drop(state);
        self.perform(effects, Place::Elsewhere);
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
struct Ticket {
    unit: Arc<Unit>,
    entry: EntryId,
    receiver: oneshot::Receiver<Reply>,
    answered: bool,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.answered {
            self.receiver.close();
            self.unit.abandon(self.entry);
        }
    }
}

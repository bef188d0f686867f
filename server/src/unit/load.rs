//! Brings a session up: from the prepared store if it has the model, else from its files.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::code::ErrorCode;
use dormouse_core::lifecycle::Stage;
use dormouse_model_store::spec::{ModelSpec, TensorSpec};
use dormouse_model_store::store::PreparedModel;
use tokio::sync::OwnedSemaphorePermit;

use super::effects::{Effects, Failure, Place};
use super::footprint::loading_footprint;
use super::made::MadePlaces;
use super::{Unit, still_the_same};
use crate::engine::instances::Instances;
use crate::engine::{Effort, EngineError, Packing, Session, SessionTensor};
use crate::error::ServeError;
use crate::events::EventKind;
use crate::metrics::FailureReason;
use crate::timeline::{ColdStart, LoadStage, LoadTimeline, TimelineRecorder};

/// A load that is known to take less than this does not give way: it is over before anybody would
/// notice, and under a storm of requests those who wait for it would wait for all to be taken in.
pub(super) const QUICK: Duration = Duration::from_millis(20);

/// A session with the places of the model's tensors in it.
#[derive(Debug)]
pub(super) struct OpenSession {
    pub(super) session: Arc<dyn Session>,
    /// The session's index of each input of the model's signature.
    pub(super) inputs: Vec<usize>,
    pub(super) outputs: Vec<usize>,
    /// Runs of equal shapes take about equally long.
    pub(super) is_steady: bool,
    pub(super) weights: Weights,
    /// Tensors that the server makes and keeps, where the model has such.
    pub(super) made: Option<Box<MadePlaces>>,
}

/// Where a session has its weights.
#[derive(Clone, Debug)]
pub(super) enum Weights {
    /// In memory of its own, read from the model's files of so many bytes.
    Private { bytes: u64, effort: Effort },
    /// In the prepared store's files, read where they are mapped.
    Mapped(Arc<PreparedModel>),
    /// There, and packed in memory of its own.
    Packed(Arc<PreparedModel>),
}

impl Unit {
    pub(super) fn spawn_load(&self, ahead: bool) {
        let recorder = TimelineRecorder::start(self.host.clock, &self.host.metrics, &self.id);
        if let Some(tracer) = &self.host.tracer {
            let request = self.state.lock().load_for.take();
            recorder.trace(tracer.load(&self.id, request));
        }
        let mut course = Course {
            ahead,
            ..Course::default()
        };
        let spawned = self.starts_at_once().and_then(|permit| {
            let (unit, recorder) = (self.arc(), recorder.clone());
            let hold = self.host.activity.hold();
            // Under a storm of requests a task would wait for its turn behind all of them, at the
            // start of the load and at its end.
            let work = move || {
                let _hold = hold;
                let load = AssertUnwindSafe(|| unit.load_with_retries(&recorder, &mut course));
                let loaded = catch_unwind(load).unwrap_or_else(|_| Err(panicked().into()));
                drop(permit);
                match loaded {
                    Ok(session) => unit.load_ended(recorder, Ok(session)),
                    Err(Stopped::For(why)) => unit.load_ended(recorder, Err(why)),
                    Err(Stopped::NeedsMemory(bytes)) => {
                        unit.spawn_load_in_turn(recorder, course, Some(bytes));
                    }
                }
            };
            self.host.wake.quick_loaders.spawn(work).ok()
        });
        if spawned.is_none() {
            self.spawn_load_in_turn(recorder, course, None);
        }
    }

    /// A turn to load without waiting for anything or stepping back, where that is to be had.
    fn starts_at_once(&self) -> Option<OwnedSemaphorePermit> {
        let expected = self.state.lock().profile.expected_load();
        let is_quick = expected.is_some_and(|load| load < QUICK);
        if !is_quick || self.source.is_remote() || self.brings_threads() {
            return None;
        }
        Arc::clone(&self.host.loads).try_acquire_owned().ok()
    }

    /// Loads in the background, once there are `needed` bytes of memory.
    fn spawn_load_in_turn(
        &self,
        recorder: TimelineRecorder,
        mut course: Course,
        needed: Option<u64>,
    ) {
        let unit = self.arc();
        let hold = self.host.activity.hold();
        self.host.runtime.spawn(async move {
            let _hold = hold;
            let reserved = match needed {
                None => Ok(()),
                Some(bytes) => unit.wait_for_memory(&recorder, &mut course, bytes).await,
            };
            let loaded = match reserved {
                Ok(()) => unit.load_in_turn(&recorder, course).await,
                Err(why) => Err(why),
            };
            unit.load_ended(recorder, loaded);
        });
    }

    /// Loads when it is this model's turn and the memory is there.
    async fn load_in_turn(
        &self,
        recorder: &TimelineRecorder,
        mut course: Course,
    ) -> Result<Arc<OpenSession>, NotLoaded> {
        // First: others load meanwhile.
        self.fetch(recorder).await?;
        loop {
            let queue = recorder.stage(LoadStage::Queue);
            let permit = Arc::clone(&self.host.loads).acquire_owned().await;
            drop(queue);
            let work = {
                let (unit, recorder) = (self.arc(), recorder.clone());
                move || {
                    let _permit = permit;
                    let loaded = unit.load_with_retries(&recorder, &mut course);
                    (course, loaded)
                }
            };
            let bytes = match self.on_loading_thread(work).await {
                Some((_, Ok(session))) => return Ok(session),
                Some((_, Err(Stopped::For(why)))) => return Err(why),
                Some((so_far, Err(Stopped::NeedsMemory(bytes)))) => {
                    course = so_far;
                    bytes
                }
                None => return Err(panicked().into()),
            };
            // Its turn is somebody else's meanwhile, whose memory is there.
            self.wait_for_memory(recorder, &mut course, bytes).await?;
        }
    }

    async fn wait_for_memory(
        &self,
        recorder: &TimelineRecorder,
        course: &mut Course,
        bytes: u64,
    ) -> Result<(), NotLoaded> {
        let _queue = recorder.stage(LoadStage::Queue);
        let residency = &self.host.wake.residency;
        residency.reserve(&self.arc(), bytes).await?;
        course.reserved = bytes;
        Ok(())
    }

    /// A session with threads of its own starts them where it is built, and they would give way
    /// for ever on a thread that does.
    fn brings_threads(&self) -> bool {
        self.spec.session.intra_op_threads.is_some() || self.spec.session.parallel_execution
    }

    /// Brings the files here if they are elsewhere.
    async fn fetch(&self, recorder: &TimelineRecorder) -> Result<(), NotLoaded> {
        if !self.source.is_remote() {
            return Ok(());
        }
        let (unit, recorder) = (self.arc(), recorder.clone());
        let fetched = tokio::task::spawn_blocking(move || unit.source.fetch(&recorder)).await;
        match fetched {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) if !self.source.is_current() => Err(NotLoaded::Outdated),
            Ok(Err(error)) => Err(self.cannot_load(&error).into()),
            Err(_) => Err(ServeError::internal("fetching the model panicked").into()),
        }
    }

    /// Runs what builds a session, unless that is known to be quick on a thread that gives way to
    /// those that serve. None when it panicked.
    async fn on_loading_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        if self.brings_threads() {
            return tokio::task::spawn_blocking(work).await.ok();
        }
        let wake = &self.host.wake;
        let expected = self.state.lock().profile.expected_load();
        let loaders = match expected.is_some_and(|load| load < QUICK) {
            true => &wake.quick_loaders,
            false => &wake.loaders,
        };
        match loaders.spawn(work) {
            Ok(job) => job.await.ok(),
            Err(error) => {
                tracing::error!(%error, "a load could not be started");
                None
            }
        }
    }

    fn load_with_retries(
        &self,
        recorder: &TimelineRecorder,
        course: &mut Course,
    ) -> Result<Arc<OpenSession>, Stopped> {
        let gauge = &self.host.metrics.server().loads_running;
        gauge.increment(1.0);
        let _move = self.host.wake.moves.begin();
        let result = loop {
            let result = catch_unwind(AssertUnwindSafe(|| self.load(recorder, course)))
                .unwrap_or_else(|_| {
                    Err(ServeError::internal("the engine panicked while loading").into())
                });
            match result {
                Err(Stopped::For(NotLoaded::Failed(error)))
                    if course.failed < self.host.defaults.load_retries =>
                {
                    course.failed += 1;
                    course.reserved = 0;
                    recorder.attempt_failed();
                    self.host.wake.residency.release(self.serial);
                    tracing::warn!(model = %self.id.name, version = self.id.version.0, %error, attempt = course.failed, "load failed, trying again");
                }
                result => break result,
            }
        };
        gauge.decrement(1.0);
        result
    }

    fn load(
        &self,
        recorder: &TimelineRecorder,
        course: &mut Course,
    ) -> Result<Arc<OpenSession>, Stopped> {
        let prepared = match course.from_source {
            true => None,
            false => recorder.during(LoadStage::LookUp, || self.find_prepared()),
        };
        let bytes = match &prepared {
            Some(prepared) => self.mapped_footprint(prepared),
            None => loading_footprint(self.source.size()),
        };
        if course.ahead && !self.source.is_current() {
            return Err(NotLoaded::NotNow.into());
        }
        self.reserve_for_load(course, bytes)?;
        tracing::info!(model = %self.id.name, version = self.id.version.0, stage = "loading", "load started");
        recorder
            .during(LoadStage::Environment, || self.engine().prepare())
            .map_err(|error| self.cannot_load(&error))?;
        self.read_initial_states()?;
        if prepared.is_none() {
            self.load_on_trial(recorder)?;
        }
        let opened = match prepared {
            None => None,
            Some(prepared) => match self.open_mapped_twice(&prepared, recorder) {
                Ok(open) => Some(open),
                Err(NotOpened { error, by_accident }) => {
                    // The source is still there.
                    tracing::warn!(model = %self.id.name, version = self.id.version.0, %error, "the prepared model cannot be used; loading from its files");
                    if !by_accident {
                        self.discard_prepared(&prepared, &error);
                    }
                    course.from_source = true;
                    self.reserve_for_load(course, loading_footprint(self.source.size()))?;
                    None
                }
            },
        };
        let open = match opened {
            Some(open) => open,
            None => self.open_source(recorder)?,
        };
        if !self.spec.warmups.is_empty() {
            let _stage = recorder.stage(LoadStage::Warmup);
            for warmup in &self.spec.warmups {
                self.warm_up(&open, warmup)?;
            }
        }
        Ok(Arc::new(open))
    }

    /// Has `bytes` reserved for this load, or says that they must be waited for.
    fn reserve_for_load(&self, course: &mut Course, bytes: u64) -> Result<(), Stopped> {
        if course.reserved >= bytes {
            return Ok(());
        }
        let residency = &self.host.wake.residency;
        if course.reserved > 0 {
            residency.release(self.serial);
            course.reserved = 0;
        }
        if residency.try_reserve(&self.arc(), bytes) {
            course.reserved = bytes;
            return Ok(());
        }
        Err(match course.ahead {
            true => NotLoaded::NotNow.into(),
            false => Stopped::NeedsMemory(bytes),
        })
    }

    /// As [`Unit::open_mapped`], once more if the process that was at it was killed.
    fn open_mapped_twice(
        &self,
        prepared: &Arc<PreparedModel>,
        recorder: &TimelineRecorder,
    ) -> Result<OpenSession, NotOpened> {
        match self.open_mapped(prepared, recorder) {
            Err(failed) if failed.by_accident => self.open_mapped(prepared, recorder),
            opened => opened,
        }
    }

    /// Builds a session over the prepared store's map while its pages come in.
    fn open_mapped(
        &self,
        prepared: &Arc<PreparedModel>,
        recorder: &TimelineRecorder,
    ) -> Result<OpenSession, NotOpened> {
        recorder.set_kind(ColdStart::Prepared);
        let wake = &self.host.wake;
        if self.isolated.is_some() {
            // The process that reads them brings them in.
        } else if wake.switches.overlap {
            let (buffers, asked) = {
                let mut state = self.state.lock();
                let asked = std::mem::take(&mut state.load_asked);
                (state.first_buffers.clone(), asked)
            };
            // Of all that can be done beside building the session this is what a run waits for
            // if it is not there; what is not read of the weights yet it waits for as well, but
            // only when it comes to it.
            if let Some(buffers) = buffers {
                wake.start_buffers(&self.host.engine, buffers, recorder);
            }
            // Nobody waits for these: the first run reads what is there by then.
            drop(wake.start_populating(prepared, &asked, recorder));
        } else {
            wake.populate(prepared, recorder);
        }
        let _stage = recorder.stage(LoadStage::Session);
        self.open_prepared(prepared, Packing::Off)
    }

    /// Reads the model's files and builds a session with weights of its own. If the model is about to
    /// be prepared its first caller does not wait for what a better session takes.
    fn open_source(&self, recorder: &TimelineRecorder) -> Result<OpenSession, Stopped> {
        self.open_files(Some(recorder), self.effort())
            .map_err(|stopped| {
                // Whatever went wrong, it is of files that the model was not described from.
                match self.source.is_current() {
                    true => stopped,
                    false => NotLoaded::Outdated.into(),
                }
            })
    }

    pub(super) fn open_files(
        &self,
        recorder: Option<&TimelineRecorder>,
        effort: Effort,
    ) -> Result<OpenSession, Stopped> {
        let instances = match self.host.wake.switches.sharing {
            true => 1,
            false => self.spec.concurrency.max(1) as usize,
        };
        let mut sessions = Vec::new();
        let mut is_steady = false;
        for _ in 0..instances {
            let stage = recorder.map(|recorder| recorder.stage(LoadStage::Read));
            let source = self.source.read()?;
            if !source.is_current {
                return Err(NotLoaded::Outdated.into());
            }
            // A file that the engine reads is only opened here.
            let (read, parsed) = match source.file {
                None => (source.size, 0),
                Some(_) => (0, source.size),
            };
            if let Some(stage) = stage {
                stage.bytes(read);
            }
            is_steady = source.is_steady;
            let stage = recorder.map(|recorder| recorder.stage(LoadStage::Session));
            if let Some(stage) = &stage {
                stage.bytes(parsed);
            }
            let session = self.engine().open(source.bytes, &self.spec.session, effort);
            // First: what the engine says of a file that changed under it says nothing.
            still_the_same(source.file.as_ref())?;
            let session = session.map_err(|error| match &source.file {
                None => self.cannot_load(&error),
                // It knows the file by a number.
                Some(file) => self.cannot_load(&format!("{}: {error}", file.path())),
            })?;
            sessions.push(session);
        }
        let session = match sessions.pop() {
            Some(only) if sessions.is_empty() => only,
            Some(first) => Arc::new(Instances::new(first, sessions)),
            None => return Err(ServeError::internal("no session was opened").into()),
        };
        let bytes = self.source.size().saturating_mul(instances as u64);
        let weights = Weights::Private { bytes, effort };
        Ok(OpenSession::new(&self.spec, session, is_steady, weights)?)
    }

    pub(super) fn open_prepared(
        &self,
        prepared: &Arc<PreparedModel>,
        packing: Packing,
    ) -> Result<OpenSession, NotOpened> {
        let session = self
            .engine()
            .open_stored(prepared, &self.spec.session, packing)
            .map_err(|error| NotOpened {
                error: self.cannot_load(&error),
                by_accident: matches!(error, EngineError::Lost(lost) if !lost.by_itself),
            })?;
        let weights = match packing {
            Packing::Off => Weights::Mapped(Arc::clone(prepared)),
            Packing::On => Weights::Packed(Arc::clone(prepared)),
        };
        let is_steady = prepared.facts.is_steady;
        OpenSession::new(&self.spec, session, is_steady, weights).map_err(|error| NotOpened {
            error,
            by_accident: false,
        })
    }

    pub(super) fn cannot_load(&self, cause: &dyn std::fmt::Display) -> ServeError {
        ServeError::unavailable(format!("model {} could not be loaded: {cause}", self.id))
    }

    fn load_ended(&self, recorder: TimelineRecorder, loaded: Result<Arc<OpenSession>, NotLoaded>) {
        let now = self.host.clock.now();
        let mut effects = Effects::default();
        let mut state = self.state.lock();
        state.load_started = None;
        state.load_asked.clear();
        if loaded.is_err() {
            state.waking_since = None;
        }
        match loaded {
            Err(NotLoaded::NotNow) => {
                tracing::debug!(model = %self.id.name, version = self.id.version.0, "not loaded ahead of its next call: no memory is free, or its files have changed");
                let queued = state.batcher.held();
                let action = state.lifecycle.load_abandoned(queued);
                self.act(&mut state, action, &mut effects, now);
            }
            Ok(session) => {
                let timeline = recorder.finish(state.batcher.queued() == 0);
                self.report_loaded(&timeline);
                state.at_once.restart();
                let at_once = state.at_once.limit();
                self.metrics().runs_at_once.set(at_once as f64);
                state.profile.record_load(timeline.loading());
                self.took_up(&mut state, &session);
                let from_source = matches!(session.weights, Weights::Private { .. });
                state.prepared = !from_source;
                state.session = Some(session);
                self.replan(&mut state);
                self.counters.woke(recorder.clone());
                state.timeline = Some(recorder);
                state.load_error = None;
                let action = state.lifecycle.loaded(now);
                self.note_holding(&state);
                let lost = state.session.as_ref().and_then(|open| open.session.lost());
                if lost.is_none() && state.crashes.recovered() {
                    self.host.metrics.server().workers.restarts.increment(1);
                }
                if let Some(lost) = lost.filter(|_| state.lifecycle.stage() == Stage::Warm) {
                    // Its process died before there was a session to take out of service. Who
                    // waits goes on waiting, for the next one.
                    self.session_lost(&mut state, &mut effects, &lost, now);
                } else {
                    let waiters = state.load_waiters.drain(..);
                    effects
                        .loaded
                        .extend(waiters.map(|waiter| (waiter, Ok(()))));
                }
                state.batcher.start_alone(now);
                self.pump(&mut state, &mut effects, now);
                state.prepare_next = from_source && !state.runs.is_empty();
                effects.prepare = from_source && !state.prepare_next;
                self.act(&mut state, action, &mut effects, now);
                let queued = state.batcher.held();
                let action = state.lifecycle.poll(now, queued);
                self.act(&mut state, action, &mut effects, now);
            }
            Err(NotLoaded::Outdated) => {
                self.host.wake.residency.release(self.serial);
                tracing::info!(model = %self.id.name, version = self.id.version.0, stage = "asleep", "files were changed before they were loaded: who waits gets what is there now");
                state.lifecycle.load_outdated();
                let error = self.cannot_load(&"its files were changed while it was being loaded");
                let waiters = state.load_waiters.drain(..);
                effects
                    .loaded
                    .extend(waiters.map(|waiter| (waiter, Err(error.clone()))));
                for pending in state.batcher.flush(now) {
                    self.metrics().pending.decrement(1);
                    // A later step could come to the successor before the first one.
                    if pending.continues_sequence() {
                        let failure = Failure {
                            error: error.clone(),
                            reason: FailureReason::Backend,
                        };
                        self.fail(&mut state, &mut effects, pending, failure);
                        continue;
                    }
                    self.send_on(&mut state, &mut effects, pending);
                }
                self.act(&mut state, None, &mut effects, now);
            }
            Err(NotLoaded::Failed(error)) => {
                self.host.wake.residency.release(self.serial);
                let retry_at = state.lifecycle.load_failed(now);
                self.metrics().load_failures.increment(1);
                recorder.failed(&error);
                tracing::error!(model = %self.id.name, version = self.id.version.0, stage = "failed", %error, retry_in = ?(retry_at - now), "load failed");
                self.host.events.publish(&self.id, || EventKind::Failed {
                    error: error.to_string(),
                    retry_in: retry_at - now,
                });
                let error = may_retry(error, retry_at - now);
                state.load_error = Some(error.clone());
                self.bar_if_quarantined(&mut state);
                effects.loaded.extend(
                    state
                        .load_waiters
                        .drain(..)
                        .map(|waiter| (waiter, Err(error.clone()))),
                );
                for pending in state.batcher.flush(now) {
                    self.metrics().pending.decrement(1);
                    self.fail(
                        &mut state,
                        &mut effects,
                        pending,
                        Failure {
                            error: error.clone(),
                            reason: FailureReason::Backend,
                        },
                    );
                }
                if state.lifecycle.stage() == Stage::Retired {
                    effects.retired.append(&mut state.retire_waiters);
                }
                self.set_alarm(&mut state, &mut effects);
            }
        }
        drop(state);
        self.perform(effects, Place::Elsewhere);
    }

    fn report_loaded(&self, timeline: &LoadTimeline) {
        let metrics = self.metrics();
        metrics.loads.increment(1);
        metrics.load_seconds.set(timeline.loading().as_secs_f64());
        self.host.metrics.server().models_warm.increment(1.0);
        tracing::info!(model = %self.id.name, version = self.id.version.0, stage = "warm", took = ?timeline.total, timeline = %timeline.server_timing(), "loaded");
        self.host.events.publish(&self.id, || EventKind::Woke {
            took: timeline.total,
            bytes: timeline.stages.iter().map(|stage| stage.bytes).sum(),
        });
    }
}

fn panicked() -> ServeError {
    ServeError::internal("the loading thread panicked")
}

/// Why a load brought no session.
#[derive(Debug)]
pub(super) enum NotLoaded {
    Failed(ServeError),
    /// It was to be loaded ahead of a call, and others hold the memory, or its files are others:
    /// the call that comes gets a unit for them.
    NotNow,
    /// Its files are not those that it was described from.
    Outdated,
}

/// Why there is no session over what the store has.
#[derive(Debug)]
pub(super) struct NotOpened {
    pub(super) error: ServeError,
    /// Its process was killed, which says nothing of what it was opening.
    by_accident: bool,
}

/// Why a load did not run to its end.
#[derive(Debug)]
pub(super) enum Stopped {
    For(NotLoaded),
    /// So many bytes are to be waited for.
    NeedsMemory(u64),
}

impl<E: Into<NotLoaded>> From<E> for Stopped {
    fn from(why: E) -> Self {
        Self::For(why.into())
    }
}

/// What a load keeps while it waits for memory and tries again.
#[derive(Clone, Copy, Debug, Default)]
struct Course {
    /// Nobody has called yet.
    ahead: bool,
    /// Attempts that failed.
    failed: u32,
    /// Bytes that the budget has granted.
    reserved: u64,
    /// What the prepared store has is of no use.
    from_source: bool,
}

/// Tells when a load is tried again, unless it would end like this one for as long as the server
/// is set up as it is.
pub(super) fn may_retry(error: ServeError, wait: Duration) -> ServeError {
    match error.code() {
        ErrorCode::NeverFits => error,
        _ => error.retry_after(wait),
    }
}

impl From<ServeError> for NotLoaded {
    fn from(error: ServeError) -> Self {
        Self::Failed(error)
    }
}

impl OpenSession {
    /// Whether it was built in haste, to be replaced.
    pub(super) fn is_hasty(&self) -> bool {
        matches!(
            self.weights,
            Weights::Private {
                effort: Effort::Least,
                ..
            }
        )
    }

    /// Finds the model's tensors in the session.
    fn new(
        spec: &ModelSpec,
        session: Arc<dyn Session>,
        is_steady: bool,
        weights: Weights,
    ) -> Result<Self, ServeError> {
        let find = |what: &str, tensor: &TensorSpec, among: &[&SessionTensor]| {
            let place = among
                .iter()
                .position(|candidate| *candidate.name == *tensor.name);
            place.ok_or_else(|| {
                let known: Vec<&str> = among.iter().map(|known| known.name.as_str()).collect();
                ServeError::unavailable(format!(
                    "the configuration of model '{}' names {what} '{}', but the graph has only {known:?}",
                    spec.name, tensor.name
                ))
            })
        };
        // The session counts inputs that may be left out after those that may not.
        let known: Vec<&SessionTensor> = session
            .inputs()
            .iter()
            .chain(session.optional_inputs())
            .collect();
        let inputs = spec.inputs.iter();
        let inputs = inputs.map(|input| find("input", input, &known));
        let inputs = inputs.collect::<Result<_, _>>()?;
        let known: Vec<&SessionTensor> = session.outputs().iter().collect();
        let outputs = spec.outputs.iter();
        let outputs = outputs.map(|output| find("output", output, &known));
        let outputs = outputs.collect::<Result<_, _>>()?;
        let made = MadePlaces::find(spec, &*session)?;
        // However short its runs are: one that hangs must not hold up a thread that serves.
        let is_steady = is_steady && !session.is_remote();
        Ok(Self {
            session,
            inputs,
            outputs,
            is_steady,
            weights,
            made,
        })
    }
}

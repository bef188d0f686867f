//! Brings a session up: when and where that is done, and what its end means for who waits.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::code::ErrorCode;
use dormouse_core::lifecycle::Stage;
use dormouse_core::time::Timestamp;
use tokio::sync::OwnedSemaphorePermit;

use super::effects::{Effects, Failure, Place};
use super::open::{NotOpened, OpenSession, Weights};
use super::{State, Unit};
use crate::error::ServeError;
use crate::events::EventKind;
use crate::metrics::FailureReason;
use crate::timeline::{LoadStage, LoadTimeline, TimelineRecorder};

/// A load that is known to take less than this does not give way: it is over before anybody would
/// notice, and under a storm of requests those who wait for it would wait for all to be taken in.
pub(super) const QUICK: Duration = Duration::from_millis(20);

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
            None => self.needed_from_files(),
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
                    self.reserve_for_load(course, self.needed_from_files())?;
                    None
                }
            },
        };
        let open = match opened {
            Some(open) => open,
            None => {
                let effort = self.effort_after_trial(recorder)?;
                self.open_source(effort, recorder)?
            }
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
            Ok(session) => self.load_succeeded(&mut state, &mut effects, (session, recorder), now),
            Err(NotLoaded::NotNow) => {
                tracing::debug!(model = %self.id.name, version = self.id.version.0, "not loaded ahead of its next call: no memory is free, or its files have changed");
                let queued = state.batcher.held();
                let action = state.lifecycle.load_abandoned(queued);
                self.act(&mut state, action, &mut effects, now);
            }
            Err(NotLoaded::Outdated) => self.load_outdated(&mut state, &mut effects, now),
            Err(NotLoaded::Failed(error)) => {
                recorder.failed(&error);
                self.load_failed(&mut state, &mut effects, error, now);
            }
        }
        drop(state);
        self.perform(effects, Place::Elsewhere);
    }

    fn load_succeeded(
        &self,
        state: &mut State,
        effects: &mut Effects,
        (session, recorder): (Arc<OpenSession>, TimelineRecorder),
        now: Timestamp,
    ) {
        let timeline = recorder.finish(state.batcher.queued() == 0);
        self.report_loaded(&timeline);
        state.at_once.restart();
        let at_once = state.at_once.limit();
        self.metrics().runs_at_once.set(at_once as f64);
        state.profile.record_load(timeline.loading());
        self.took_up(state, &session);
        let from_source = matches!(session.weights, Weights::Private { .. });
        state.prepared = !from_source;
        state.session = Some(session);
        self.replan(state);
        self.counters.woke(recorder.clone());
        state.timeline = Some(recorder);
        state.load_error = None;
        let action = state.lifecycle.loaded(now);
        self.note_prewarms(state);
        self.note_holding(state);
        let lost = state.session.as_ref().and_then(|open| open.session.lost());
        if lost.is_none() && state.crashes.recovered() {
            self.host.metrics.server().workers.restarts.increment(1);
        }
        if let Some(lost) = lost.filter(|_| state.lifecycle.stage() == Stage::Warm) {
            // Its process died before there was a session to take out of service. Who
            // waits goes on waiting, for the next one.
            self.session_lost(state, effects, &lost, now);
        } else {
            let waiters = state.load_waiters.drain(..);
            effects
                .loaded
                .extend(waiters.map(|waiter| (waiter, Ok(()))));
        }
        state.batcher.start_alone(now);
        self.pump(state, effects, now);
        state.prepare_next = from_source && !state.runs.is_empty();
        effects.prepare = from_source && !state.prepare_next;
        self.act(state, action, effects, now);
        let queued = state.batcher.held();
        let action = state.lifecycle.poll(now, queued);
        self.act(state, action, effects, now);
    }

    /// Who waits is sent on to the unit that is made of the files as they are now.
    fn load_outdated(&self, state: &mut State, effects: &mut Effects, now: Timestamp) {
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
                self.fail(state, effects, pending, failure);
                continue;
            }
            self.send_on(state, effects, pending);
        }
        self.act(state, None, effects, now);
    }

    fn load_failed(
        &self,
        state: &mut State,
        effects: &mut Effects,
        error: ServeError,
        now: Timestamp,
    ) {
        self.host.wake.residency.release(self.serial);
        let retry_at = state.lifecycle.load_failed(now);
        // It may have been for the haste, in warming up for example.
        state.missed_preparation = true;
        self.metrics().load_failures.increment(1);
        tracing::error!(model = %self.id.name, version = self.id.version.0, stage = "failed", %error, retry_in = ?(retry_at - now), "load failed");
        self.host.events.publish(&self.id, || EventKind::Failed {
            error: error.to_string(),
            retry_in: retry_at - now,
        });
        let error = may_retry(error, retry_at - now);
        state.load_error = Some(error.clone());
        self.bar_if_quarantined(state);
        effects.loaded.extend(
            state
                .load_waiters
                .drain(..)
                .map(|waiter| (waiter, Err(error.clone()))),
        );
        for pending in state.batcher.flush(now) {
            self.metrics().pending.decrement(1);
            let failure = Failure {
                error: error.clone(),
                reason: FailureReason::Backend,
            };
            self.fail(state, effects, pending, failure);
        }
        if state.lifecycle.stage() == Stage::Retired {
            effects.retired.append(&mut state.retire_waiters);
        }
        self.set_alarm(state, effects);
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

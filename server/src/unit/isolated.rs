//! A unit whose sessions live in a process of their own: what happens when that dies, and the
//! trial before the first load.

use std::path::PathBuf;
use std::sync::Arc;

use dormouse_core::code::ErrorCode;
use dormouse_core::deaths::{DeathPolicy, Deaths, Verdict};
use dormouse_core::lifecycle::Stage;
use dormouse_core::time::Timestamp;
use metrics::Gauge;

use super::effects::{Effects, Failure, Place};
use super::footprint::loading_footprint;
use super::{State, Unit, still_the_same};
use crate::engine::{Effort, Engine, LostWorker};
use crate::error::ServeError;
use crate::events::EventKind;
use crate::isolation::TrialError;
use crate::metrics::FailureReason;
use crate::timeline::{LoadStage, TimelineRecorder};

/// What is known against a model that runs in a process of its own.
#[derive(Debug)]
pub(super) struct Crashes {
    deaths: Deaths,
    /// The last worker whose death was noted: several threads hear of each.
    noted: u64,
    verdict: Option<Verdict>,
    /// Why the model does not serve, from the death of its worker until it is loaded again.
    lost: Option<ServeError>,
    quarantine: Option<Quarantine>,
    /// Somebody wants it tried whatever is known.
    pardoned: bool,
}

/// Counts a model as quarantined as long as it lives.
#[derive(Debug)]
struct Quarantine(Gauge);

impl Quarantine {
    fn new(gauge: Gauge) -> Self {
        gauge.increment(1.0);
        Self(gauge)
    }
}

impl Drop for Quarantine {
    fn drop(&mut self) {
        self.0.decrement(1.0);
    }
}

impl Crashes {
    pub(super) fn new(policy: DeathPolicy) -> Self {
        Self {
            deaths: Deaths::new(policy),
            noted: 0,
            verdict: None,
            lost: None,
            quarantine: None,
            pardoned: false,
        }
    }

    /// Notes a death once, whoever tells of it.
    fn note(&mut self, worker: u64, now: Timestamp) -> Verdict {
        if worker > self.noted || self.verdict.is_none() {
            self.noted = self.noted.max(worker);
            self.verdict = Some(self.deaths.died(now));
        }
        self.verdict.unwrap_or(Verdict::RestartAt(now))
    }

    pub(super) fn is_quarantined(&self) -> bool {
        self.quarantine.is_some()
    }

    /// The model serves; true when it had been lost.
    pub(super) fn recovered(&mut self) -> bool {
        self.pardoned = false;
        self.lost.take().is_some()
    }
}

impl Unit {
    /// What opens its sessions.
    pub(super) fn engine(&self) -> &dyn Engine {
        match &self.isolated {
            Some(isolated) => &**isolated,
            None => &*self.host.engine,
        }
    }

    /// What prepares it: of an isolated model, a process beside the one that serves.
    pub(super) fn preparing_engine(&self) -> Arc<dyn Engine> {
        match &self.isolated {
            Some(_) => self.host.isolation.engine_aside(&self.id),
            None => Arc::clone(&self.host.engine),
        }
    }

    /// The process that its sessions live in, if that is one of its own.
    pub fn worker_pid(&self) -> Option<u32> {
        self.isolated.as_ref()?.pid()
    }

    /// Whether it can answer: warm, or asleep and able to wake.
    pub fn is_ready(&self) -> bool {
        let state = self.state.lock();
        let stage = state.lifecycle.stage();
        !matches!(stage, Stage::Failed { .. } | Stage::Retired) && state.crashes.lost.is_none()
    }

    /// Why it does not serve since its process died, until it does again.
    pub fn lost(&self) -> Option<ServeError> {
        self.state.lock().crashes.lost.clone()
    }

    /// Forgets what is known against it, if it has killed a process: somebody asks for it
    /// explicitly.
    pub fn pardon(&self) {
        if !self.host.isolation.tries_models(self.isolated.is_some()) && self.isolated.is_none() {
            return;
        }
        let mut state = self.state.lock();
        let crashes = &mut state.crashes;
        crashes.deaths.pardon();
        crashes.verdict = None;
        crashes.quarantine = None;
        crashes.lost = None;
        crashes.pardoned = true;
        state.lifecycle.pardoned();
        state.load_error = None;
    }

    /// Its process ended though nobody closed it.
    pub(super) fn worker_died(&self, lost: &LostWorker) {
        let now = self.host.clock.now();
        let mut effects = Effects::default();
        let mut state = self.state.lock();
        self.session_lost(&mut state, &mut effects, lost, now);
        drop(state);
        self.perform(effects, Place::Elsewhere);
    }

    /// Notes a death, and takes the session that went with it out of service.
    pub(super) fn session_lost(
        &self,
        state: &mut State,
        effects: &mut Effects,
        lost: &LostWorker,
        now: Timestamp,
    ) {
        let verdict = state.crashes.note(lost.worker, now);
        let gone = |open: &Arc<super::open::OpenSession>| open.session.lost().is_some();
        if !state.session.as_ref().is_some_and(gone) {
            // It died while it was loading: whoever loads reports that as any other failure.
            self.bar_if_quarantined(state);
            return;
        }
        let sessions = (state.session.take(), state.base.take());
        self.away(move || drop(sessions));
        state.upgrade.dropped();
        state.latest = None;
        self.host.wake.residency.release(self.serial);
        self.host.metrics.server().models_warm.decrement(1.0);
        let restart_at = match verdict {
            Verdict::RestartAt(at) => Some(at),
            Verdict::Quarantine { .. } => None,
        };
        let error = ServeError::unavailable(match verdict {
            Verdict::RestartAt(_) => {
                format!("model {} is being restarted: {}", self.id, lost.reason)
            }
            Verdict::Quarantine { deaths } => self.quarantine_reason(deaths, &lost.reason),
        });
        let action = state.lifecycle.lost(now, restart_at);
        state.crashes.lost = Some(error.clone());
        tracing::error!(model = %self.id.name, version = self.id.version.0, stage = "failed", %error, "the model's process died");
        self.host.events.publish(&self.id, || EventKind::Failed {
            error: error.to_string(),
            retry_in: restart_at.map_or(std::time::Duration::MAX, |at| at - now),
        });
        if action.is_none() {
            // Nobody loads it now, so nobody can go on waiting.
            state.load_error = Some(error.clone());
            let error = match restart_at {
                Some(at) => error.retry_after(at - now),
                None => error,
            };
            let waiters = state.load_waiters.drain(..);
            effects
                .loaded
                .extend(waiters.map(|waiter| (waiter, Err(error.clone()))));
            let has_successor = state.lifecycle.stage() == Stage::Retired;
            for pending in state.batcher.flush(now) {
                self.metrics().pending.decrement(1);
                if has_successor && !pending.continues_sequence() {
                    // It was on its way out anyway, and these were to be answered before.
                    self.send_on(state, effects, pending);
                    continue;
                }
                let failure = Failure {
                    error: error.clone(),
                    reason: FailureReason::Backend,
                };
                self.fail(state, effects, pending, failure);
            }
        }
        self.bar_if_quarantined(state);
        self.act(state, action, effects, now);
    }

    /// Has nothing start a model again that has killed too many processes.
    pub(super) fn bar_if_quarantined(&self, state: &mut State) {
        let Some(Verdict::Quarantine { deaths }) = state.crashes.verdict else {
            return;
        };
        if !matches!(state.lifecycle.stage(), Stage::Failed { .. }) {
            return;
        }
        state.lifecycle.barred();
        if state.crashes.quarantine.is_none() {
            let gauge = self.host.metrics.server().workers.quarantined.clone();
            state.crashes.quarantine = Some(Quarantine::new(gauge));
            let last = state.load_error.take();
            let last = last.map_or_else(String::new, |error| error.to_string());
            let reason = match last.contains(QUARANTINED) {
                true => last,
                false => self.quarantine_reason(deaths, &last),
            };
            tracing::error!(model = %self.id.name, version = self.id.version.0, deaths, "quarantined");
            state.load_error = Some(ServeError::unavailable(reason));
        }
    }

    fn quarantine_reason(&self, deaths: u32, last: &str) -> String {
        format!(
            "model {} {QUARANTINED}: it has killed its worker process {deaths} times within {:?}; it is tried again when its files change or somebody loads it explicitly. Last: {last}",
            self.id,
            self.host.isolation.settings().deaths.window
        )
    }

    /// The error of a request whose run died with its process.
    pub(super) fn died_under(&self, lost: &LostWorker) -> ServeError {
        let message = format!("model {} failed: {}", self.id, lost.reason);
        ServeError::new(ErrorCode::Unavailable, message)
            .retry_after(std::time::Duration::from_secs(1))
    }

    /// How the model is to be built from its files. In a way that it was never loaded in before it is
    /// loaded in a process that is thrown away first, if the server is to do that.
    pub(super) fn effort_after_trial(
        &self,
        recorder: &TimelineRecorder,
    ) -> Result<Effort, ServeError> {
        let effort = self.effort();
        if !self.is_tried() {
            return Ok(effort);
        }
        let stage = recorder.stage(LoadStage::Trial);
        stage.bytes(self.source.size());
        let verdict = self.verdict(effort)?;
        if let Err(error) = &verdict
            && effort == Effort::Least
            && !error.is_by_accident()
            && self.fits_in_full()
        {
            self.never_in_haste(error);
            return self.tried(Effort::Full).map(|()| Effort::Full);
        }
        verdict
            .map(|()| effort)
            .map_err(|error| self.cannot_load(&error))
    }

    fn is_tried(&self) -> bool {
        self.host.isolation.tries_models(self.isolated.is_some())
    }

    /// Fails if the model cannot be loaded in this way.
    pub(super) fn tried(&self, effort: Effort) -> Result<(), ServeError> {
        self.verdict(effort)?
            .map_err(|error| self.cannot_load(&error))
    }

    fn verdict(&self, effort: Effort) -> Result<Result<(), TrialError>, ServeError> {
        if !self.is_tried() {
            return Ok(Ok(()));
        }
        let trials = self.host.isolation.trials();
        let (key, folder) = self.trial_key();
        let key = match effort {
            Effort::Full => key,
            Effort::Least => format!("{key}hasty"),
        };
        let pardoned = self.state.lock().crashes.pardoned;
        match trials.known(folder.as_deref(), &key) {
            Some(verdict) if verdict.is_ok() || !pardoned => Ok(verdict),
            _ => {
                let verdict = self.try_out_with(effort)?;
                trials.note(folder.as_deref(), &key, &verdict);
                Ok(verdict)
            }
        }
    }

    fn try_out_with(&self, effort: Effort) -> Result<Result<(), TrialError>, ServeError> {
        let source = self.source.read()?;
        let needed = loading_footprint(source.size, Effort::Full);
        let spec = self.session_from_files(effort, source.operators);
        let session = (&*spec, effort, needed);
        let isolation = &self.host.isolation;
        let verdict = isolation.try_out(&self.id, source.bytes, session);
        still_the_same(source.file.as_ref())?;
        Ok(verdict)
    }

    /// What a verdict on the model is kept under, and where: by its files' content if that can be
    /// told, and then for as long as the store is there.
    fn trial_key(&self) -> (String, Option<PathBuf>) {
        let known = self.host.wake.preparation.as_ref().and_then(|preparation| {
            let label = self.label();
            let key = preparation
                .key_of(&self.subject(self.engine(), &label))
                .ok()?;
            let store = preparation.store();
            let folder = (!store.is_read_only()).then(|| store.config().dir.join("trials"));
            Some((key.to_string(), folder))
        });
        known.unwrap_or_else(|| (format!("unit{}", self.serial), None))
    }
}

const QUARANTINED: &str = "is quarantined";

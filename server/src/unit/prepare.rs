//! A unit and the prepared store: what is looked up there, what is put there, and the packed
//! session that follows an unpacked one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::lifecycle::Stage;
use dormouse_core::upgrade::{BuildId, Packing as PackingGain};
use dormouse_model_store::store::PreparedModel;
use tokio::time::Instant;

use super::footprint::{loading_footprint, packed_bytes};
use super::load::{NotLoaded, Stopped};
use super::open::{NotOpened, OpenSession, Weights};
use super::{State, Unit};
use crate::engine::{Effort, Engine, EngineError, Packing, Session};
use crate::error::ServeError;
use crate::memory;
use crate::preparation::{Outcome, PrepareError, Subject};
use crate::request::Tensor;
use crate::residency::Borrowed;
use crate::sample;
use crate::timeline::LoadStage;

/// Bytes that are packed in a second, for models of which it was not measured.
const PACKING_RATE: u64 = 1 << 30;

/// What preparing a model brought.
#[derive(Clone, Copy, Debug)]
pub struct PreparationReport {
    pub outcome: Outcome,
    pub source_bytes: u64,
    pub stored_bytes: u64,
    /// From the model's files to the end of a first run.
    pub cold_before: Duration,
    /// The same from the prepared store.
    pub cold_after: Duration,
    /// False when nothing could be made up to run the model on: then both are without the run.
    pub with_run: bool,
    /// None when nothing could be made up to run the model on.
    pub packing_pays: Option<bool>,
}

impl Unit {
    /// What the store calls it.
    pub(super) fn label(&self) -> String {
        format!("{}/{}", self.id.name, self.id.version)
    }

    pub(super) fn subject<'a>(&'a self, engine: &'a dyn Engine, label: &'a str) -> Subject<'a> {
        Subject {
            source: &*self.source,
            engine,
            session: &self.spec.session,
            label,
        }
    }

    /// What the prepared store has of the model.
    pub(super) fn find_prepared(&self) -> Option<Arc<PreparedModel>> {
        // Instances that share nothing have nothing in the store either.
        if !self.host.wake.switches.sharing {
            return None;
        }
        let preparation = self.host.wake.preparation.as_ref()?;
        preparation.find(&self.subject(self.engine(), &self.label()))
    }

    /// Has a prepared model that no session can be built over prepared again.
    pub(super) fn discard_prepared(&self, prepared: &PreparedModel, reason: &ServeError) {
        if let Some(preparation) = &self.host.wake.preparation {
            preparation.store().discard(prepared, reason);
        }
    }

    /// How long until the model's files count as unchanged: until then they are read again
    /// whenever it is looked for in the store.
    pub fn settles_in(&self) -> Duration {
        self.source.settles_in()
    }

    /// A session is about to serve: what follows from where its weights are.
    pub(super) fn took_up(&self, state: &mut State, session: &Arc<OpenSession>) {
        state.upgrade.set_packing(match &session.weights {
            Weights::Mapped(prepared) => packing_gain(prepared),
            Weights::Private { .. } | Weights::Packed(_) => None,
        });
    }

    /// Whether a model that was loaded from its files is put into the prepared store.
    pub(super) fn will_be_prepared(&self) -> bool {
        let wake = &self.host.wake;
        let is_wanted = wake.switches.prepare && wake.switches.sharing;
        let preparation = wake.preparation.as_ref().filter(|_| is_wanted);
        preparation.is_some_and(|preparation| !preparation.store().is_read_only())
            && !self.state.lock().unpreparable
    }

    /// How a session is built from the model's files: in haste if it is soon replaced, or never fits
    /// otherwise.
    pub(super) fn effort(&self) -> Effort {
        if !self.fits_in_full() {
            return Effort::Least;
        }
        let is_soon_replaced = self.will_be_prepared()
            && !self.state.lock().missed_preparation
            && self
                .host
                .wake
                .residency
                .could_lend(self.needed_to_prepare());
        match is_soon_replaced {
            true => Effort::Least,
            false => Effort::Full,
        }
    }

    /// Until it is prepared it is built in full.
    pub(super) fn never_in_haste(&self, error: &dyn std::fmt::Display) {
        tracing::warn!(model = %self.id.name, version = self.id.version.0, %error, "cannot be loaded in haste; loading in full");
        self.state.lock().missed_preparation = true;
    }

    /// Whether the memory budget has room for all that building a session in full takes.
    pub(super) fn fits_in_full(&self) -> bool {
        let residency = &self.host.wake.residency;
        residency.could_ever_hold(self.needed_to_prepare())
    }

    /// What a load from the model's files is to have before it begins: that for one in full, as it may
    /// come to that.
    pub(super) fn needed_from_files(&self) -> u64 {
        let effort = match self.fits_in_full() {
            true => Effort::Full,
            false => Effort::Least,
        };
        loading_footprint(self.source.size(), effort)
    }

    /// As much as another load of the model takes.
    fn needed_to_prepare(&self) -> u64 {
        loading_footprint(self.source.size(), Effort::Full)
    }

    /// Memory that is none of the model's own.
    fn borrow_to_prepare(&self) -> Option<Borrowed> {
        self.host.wake.residency.borrow(self.needed_to_prepare())
    }

    /// Puts the model into the prepared store, in the background and once, and has it read its weights
    /// from there.
    pub(super) fn spawn_prepare(&self) {
        let hasty = self.private_session().filter(|open| open.is_hasty());
        let is_wanted = self.will_be_prepared() || hasty.is_some();
        // Not held: its weights go as soon as it is replaced.
        let hasty = hasty.as_ref().map(Arc::downgrade);
        if !is_wanted || std::mem::replace(&mut self.state.lock().preparing, true) {
            return;
        }
        let unit = self.arc();
        let spawned = self.host.wake.preparers.spawn(move || {
            let moving = unit.host.wake.moves.begin();
            let (prepared, room) = unit.prepare_and_replace();
            drop(moving);
            let mut state = unit.state.lock();
            state.preparing = false;
            state.prepared = prepared;
            state.missed_preparation = !prepared;
            unit.note_holding(&state);
            unit.replan(&mut state);
            let mut effects = super::effects::Effects::default();
            // It may hold more than before.
            drop(room);
            effects.relieve = true;
            // One that was built in haste meanwhile found that its preparation was under way.
            let present = state.private_session().filter(|open| open.is_hasty());
            effects.prepare = present.is_some_and(|present| {
                let present = Arc::downgrade(&present);
                !hasty.is_some_and(|hasty| hasty.ptr_eq(&present))
            });
            unit.set_alarm(&mut state, &mut effects);
            drop(state);
            unit.perform(effects, super::effects::Place::Elsewhere);
        });
        if let Err(error) = spawned {
            let mut state = self.state.lock();
            state.preparing = false;
            state.missed_preparation = true;
            drop(state);
            tracing::warn!(model = %self.id.name, version = self.id.version.0, %error, "not prepared");
        }
    }

    /// Prepares the model and replaces the session that was built before. Tells whether the store has
    /// the model, and what is still borrowed of the memory budget.
    fn prepare_and_replace(&self) -> (bool, Option<Borrowed>) {
        let work = || {
            let prepared = self.prepare_now();
            let left = prepared
                .as_ref()
                .is_some_and(|prepared| self.leave_private_weights_for(prepared));
            let room = if left { None } else { self.finish_private() };
            (prepared.is_some(), room)
        };
        // Whoever waits for a preparation must see its end, whatever that is.
        catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
            self.state.lock().unpreparable = true;
            tracing::error!(model = %self.id.name, version = self.id.version.0, "not prepared: a bug in the server");
            (false, None)
        })
    }

    /// What the store has of the model afterwards.
    fn prepare_now(&self) -> Option<Arc<PreparedModel>> {
        let preparation = self.host.wake.preparation.as_ref();
        let preparation = preparation.filter(|_| self.will_be_prepared())?;
        let Some(_room) = self.borrow_to_prepare() else {
            tracing::info!(model = %self.id.name, version = self.id.version.0, "not prepared: no memory is free for it");
            return None;
        };
        let label = self.label();
        let engine = self.preparing_engine();
        match preparation.prepare(&self.subject(&*engine, &label)) {
            Ok((outcome, prepared)) => {
                if outcome == Outcome::Prepared {
                    self.host.metrics.server().preparations.increment(1);
                    tracing::info!(model = %self.id.name, version = self.id.version.0, source_bytes = prepared.facts.source_bytes, weight_bytes = prepared.weight_bytes(), "prepared: wakes from the store from now on");
                }
                Some(prepared)
            }
            Err(
                error @ (PrepareError::NotPreparable(_)
                | PrepareError::Busy
                | PrepareError::Stopped),
            ) => {
                let mut state = self.state.lock();
                state.unpreparable = matches!(error, PrepareError::NotPreparable(_));
                drop(state);
                tracing::info!(model = %self.id.name, version = self.id.version.0, %error, "not prepared");
                None
            }
            Err(error) => {
                // What kills the process that prepares it would do so again.
                let kills = matches!(
                    &error,
                    PrepareError::Engine(EngineError::Lost(lost)) if lost.by_itself
                );
                self.state.lock().unpreparable |= kills;
                self.host.metrics.server().preparation_failures.increment(1);
                tracing::warn!(model = %self.id.name, version = self.id.version.0, %error, "not prepared; the model goes on being loaded from its files");
                None
            }
        }
    }

    /// Replaces a session that has weights of its own by one over the prepared store, if the model is
    /// there.
    pub(super) fn leave_private_weights(&self) {
        if self.private_session().is_some()
            && let Some(prepared) = self.find_prepared()
        {
            self.leave_private_weights_for(&prepared);
        }
    }

    /// Replaces a session that has weights of its own; false when none can be built over the prepared
    /// ones.
    fn leave_private_weights_for(&self, prepared: &Arc<PreparedModel>) -> bool {
        let Some(private) = self.private_session() else {
            return true;
        };
        match self.open_prepared(prepared, Packing::Off) {
            Ok(open) => {
                if self.replace(private, open) {
                    tracing::info!(model = %self.id.name, version = self.id.version.0, "weights are read from the prepared store");
                }
                true
            }
            Err(NotOpened { error, .. }) => {
                tracing::warn!(model = %self.id.name, version = self.id.version.0, %error, "the prepared model cannot be used; the model stays as it is");
                false
            }
        }
    }

    /// Builds the session in full of a model that was to be in the store by now and is not. Returns
    /// what it has borrowed of the memory budget.
    fn finish_private(&self) -> Option<Borrowed> {
        let hasty = self.private_session().filter(|open| open.is_hasty())?;
        let Some(room) = self.borrow_to_prepare() else {
            tracing::info!(model = %self.id.name, version = self.id.version.0, "it goes on as it was loaded in haste: no memory is free for a better session");
            return None;
        };
        let opened = self.tried(Effort::Full).map_err(Stopped::from);
        match opened.and_then(|()| self.open_files(None, Effort::Full)) {
            Ok(open) => {
                if self.replace(hasty, open) {
                    tracing::info!(model = %self.id.name, version = self.id.version.0, "a session with all optimisations is in use");
                }
            }
            Err(Stopped::For(NotLoaded::Failed(error))) => {
                tracing::warn!(model = %self.id.name, version = self.id.version.0, %error, "no better session could be built; it goes on as it was loaded in haste");
            }
            Err(_) => {
                tracing::info!(model = %self.id.name, version = self.id.version.0, "it goes on as it was loaded in haste: its files have changed");
            }
        }
        Some(room)
    }

    fn private_session(&self) -> Option<Arc<OpenSession>> {
        self.state.lock().private_session()
    }

    /// Puts a session in the place of `present`, if that still is there.
    fn replace(&self, present: Arc<OpenSession>, open: OpenSession) -> bool {
        let mut state = self.state.lock();
        let may_be_replaced = matches!(state.lifecycle.stage(), Stage::Warm | Stage::Parked)
            && matches!(&state.session, Some(session) if Arc::ptr_eq(session, &present));
        if !may_be_replaced || open.session.lost().is_some() {
            return false;
        }
        let open = Arc::new(open);
        self.took_up(&mut state, &open);
        let replaced = state.session.replace(open);
        // Runs take another time from here on.
        state.latest = None;
        state.at_once.restart();
        drop(state);
        drop((replaced, present));
        memory::release_memory();
        true
    }

    /// Puts the model into the prepared store and times a cold start from its files and one from
    /// there. Blocks.
    pub fn prepare_and_measure(&self) -> Result<PreparationReport, PrepareError> {
        let Some(preparation) = &self.host.wake.preparation else {
            return Err(PrepareError::NoStore);
        };
        let engine = self.preparing_engine();
        engine.prepare()?;
        let label = self.label();
        let (outcome, prepared) = preparation.prepare(&self.subject(&*engine, &label))?;
        let open_prepared = || {
            let session = engine.open_stored(&prepared, &self.spec.session, Packing::Off)?;
            Ok::<_, PrepareError>(session)
        };
        let inputs = {
            let session = open_prepared()?;
            let stop = session.stop_handle()?;
            sample::inputs(&*session, &stop)
        };
        let cold_before = cold_start(inputs.as_deref(), || {
            let source = self.source.read().map_err(PrepareError::Source)?;
            Ok(engine.open(source.bytes, &self.spec.session, Effort::Full)?)
        })?;
        let cold_after = cold_start(inputs.as_deref(), open_prepared)?;
        preparation.store().update_facts(&prepared.key, |facts| {
            facts.source_load_us = u64::try_from(cold_before.as_micros()).ok();
            facts.prepared_load_us = u64::try_from(cold_after.as_micros()).ok();
        })?;
        Ok(PreparationReport {
            outcome,
            source_bytes: self.source.size(),
            stored_bytes: prepared.weight_bytes() + prepared.graph.len() as u64,
            cold_before,
            cold_after,
            with_run: inputs.is_some(),
            packing_pays: prepared.facts.packing.map(|verdict| verdict.pays),
        })
    }

    /// Builds the packed session in the background and swaps it in.
    pub(super) fn spawn_upgrade(&self, build: BuildId) {
        let unit = self.arc();
        let spawned = self.host.wake.preparers.spawn(move || {
            let _move = unit.host.wake.moves.begin();
            let packed = unit.build_packed(build);
            let mut state = unit.state.lock();
            let unwanted = match packed {
                None => {
                    state.upgrade.build_failed(build);
                    None
                }
                Some(packed) => unit.take_up_packed(&mut state, build, packed),
            };
            unit.note_holding(&state);
            let packed = state.session.clone().filter(|_| unwanted.is_none());
            drop(state);
            drop(unwanted);
            if let Some(Weights::Packed(prepared)) = packed.as_ref().map(|open| &open.weights) {
                // What was packed is not read any more; the rest comes back by itself. Held by the
                // model and its two sessions.
                drop_pages(prepared, 3);
            }
            memory::release_memory();
        });
        if let Err(error) = spawned {
            self.state.lock().upgrade.build_failed(build);
            tracing::warn!(model = %self.id.name, version = self.id.version.0, %error, "weights are not packed");
        }
    }

    fn build_packed(&self, build: BuildId) -> Option<OpenSession> {
        let (prepared, recorder) = {
            let state = self.state.lock();
            // It may have waited long: the model may be parked, or called and woken again.
            if state.lifecycle.stage() != Stage::Warm || !state.upgrade.wants(build) {
                return None;
            }
            let Weights::Mapped(prepared) = &state.session.as_ref()?.weights else {
                return None;
            };
            let residency = &self.host.wake.residency;
            // While it has its session: its closing gives this back with all the rest.
            if !residency.try_reserve(&self.arc(), packed_bytes(prepared)) {
                tracing::info!(model = %self.id.name, version = self.id.version.0, "weights are not packed: no memory is free for it");
                return None;
            }
            (Arc::clone(prepared), state.timeline.clone())
        };
        let _stage = recorder
            .as_ref()
            .map(|recorder| recorder.stage(LoadStage::Pack));
        match self.open_prepared(&prepared, Packing::On) {
            Ok(packed) => Some(packed),
            Err(NotOpened { error, .. }) => {
                tracing::warn!(model = %self.id.name, version = self.id.version.0, %error, "weights could not be packed; the model runs on unpacked");
                None
            }
        }
    }

    /// Puts the packed session in the place of the unpacked one, which stays at hand. Returns the
    /// packed one when nobody wants it any more.
    fn take_up_packed(
        &self,
        state: &mut State,
        build: BuildId,
        packed: OpenSession,
    ) -> Option<OpenSession> {
        if !state.upgrade.built(build) || state.lifecycle.stage() != Stage::Warm {
            return Some(packed);
        }
        state.base = state.session.replace(Arc::new(packed));
        // Runs are shorter from here on.
        state.latest = None;
        state.at_once.restart();
        self.metrics().upgrades.increment(1);
        tracing::info!(model = %self.id.name, version = self.id.version.0, "packed session in use");
        None
    }
}

impl State {
    /// The session, if it has weights of its own.
    fn private_session(&self) -> Option<Arc<OpenSession>> {
        let session = self.session.as_ref();
        let private = session.filter(|open| matches!(open.weights, Weights::Private { .. }));
        private.cloned()
    }
}

/// What building a session and running it once take.
fn cold_start(
    inputs: Option<&[(usize, Tensor)]>,
    open: impl FnOnce() -> Result<Arc<dyn Session>, PrepareError>,
) -> Result<Duration, PrepareError> {
    let started = Instant::now();
    let session = open()?;
    if let Some(inputs) = inputs {
        let outputs: Vec<usize> = (0..session.outputs().len()).collect();
        session.run(inputs, &outputs, &session.stop_handle()?)?;
    }
    let took = started.elapsed();
    drop(session);
    memory::release_memory();
    Ok(took)
}

/// Drops the pages of packs that only this model reads: it holds each of them `own` times.
pub(super) fn drop_pages(prepared: &PreparedModel, own: usize) {
    for pack in &prepared.packs {
        if Arc::strong_count(pack) <= own {
            pack.drop_pages();
        }
    }
}

/// What packing brings and costs, none when it does not pay. A model on which nothing could be
/// measured is packed, as it is everywhere.
fn packing_gain(prepared: &PreparedModel) -> Option<PackingGain> {
    let build = Duration::from_millis(prepared.weight_bytes() * 1000 / PACKING_RATE);
    match prepared.facts.packing {
        None => Some(PackingGain {
            gain_per_run: build / 20,
            build,
        }),
        Some(verdict) => verdict.pays.then(|| PackingGain {
            gain_per_run: Duration::from_micros(
                verdict
                    .unpacked_run_us
                    .saturating_sub(verdict.packed_run_us),
            ),
            build,
        }),
    }
}

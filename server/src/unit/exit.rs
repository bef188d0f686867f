//! The way down: parking, closing, and giving memory back to whoever needs it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use dormouse_core::keep_alive::{AdaptivePolicy, KeepAlivePolicy, ParkWindow};
use dormouse_core::lifecycle::{How, IdlePlan, Stage};
use dormouse_core::time::Timestamp;
use dormouse_model_store::spec::KeepAliveSpec;

use super::effects::{Effects, Place};
use super::open::{OpenSession, Weights};
use super::prepare::drop_pages;
use super::{State, Unit};
use crate::engine::onnx::allocator;
use crate::events::EventKind;
use crate::host::UnitDefaults;
use crate::memory::{self, Balance, Move, Unreturned};
use crate::timeline::{ColdStart, TimelineRecorder};

/// What leaves with a park: sessions that are closed, and weights whose pages are dropped.
#[derive(Debug)]
pub(super) struct Parking {
    /// The packed session, when one was in use.
    packed: Option<Arc<OpenSession>>,
}

/// What a closing takes down.
#[derive(Debug)]
pub(super) struct Closing {
    session: Option<Arc<OpenSession>>,
    base: Option<Arc<OpenSession>>,
    /// Its weights' pages leave the page cache as well.
    evicts_cache: bool,
}

/// How long a model is kept, from its own settings and the server's.
pub(super) fn keep_alive_policy(
    own: &dormouse_model_store::spec::LifecycleSpec,
    defaults: &UnitDefaults,
    staging: bool,
) -> KeepAlivePolicy {
    let park_after = own.park_after.unwrap_or(defaults.park_after);
    let park_after = park_after.filter(|_| staging);
    match own.keep_alive.unwrap_or(defaults.keep_alive) {
        KeepAliveSpec::For(keep_alive) => KeepAlivePolicy::Fixed {
            park_after: park_after.filter(|&after| after < keep_alive),
            close_after: Some(keep_alive),
        },
        KeepAliveSpec::Forever => KeepAlivePolicy::Fixed {
            park_after,
            close_after: None,
        },
        KeepAliveSpec::Off => KeepAlivePolicy::Off,
        KeepAliveSpec::Adaptive => KeepAlivePolicy::Adaptive(match park_after {
            None => AdaptivePolicy::without_parking(),
            Some(park_after) => {
                let usual = AdaptivePolicy::default();
                AdaptivePolicy {
                    park: usual.park.map(|window| ParkWindow {
                        floor: window.floor.min(park_after),
                        ceiling: park_after,
                    }),
                    ..usual
                }
            }
        }),
    }
}

impl Unit {
    /// Whether parking would free anything: the weights are in the prepared store.
    pub(super) fn can_park(&self, state: &State) -> bool {
        self.host.wake.switches.staging
            && match state.session.as_ref().map(|open| &open.weights) {
                Some(Weights::Mapped(_) | Weights::Packed(_)) => true,
                Some(Weights::Private { .. }) => state.prepared,
                None => false,
            }
    }

    /// The plan for the time nobody calls, as far as it applies to the present session.
    pub(super) fn replan(&self, state: &mut State) {
        let plan = state.keep_alive.plan();
        let park_after = plan.park_after.filter(|_| self.can_park(state));
        state.lifecycle.set_plan(IdlePlan { park_after, ..plan });
    }

    /// Counts the loads ahead of a call that came since it was done last.
    pub(super) fn note_prewarms(&self, state: &mut State) {
        let count = state.lifecycle.prewarms();
        let noted = std::mem::replace(&mut state.noted_prewarms, count);
        let more = |count: u32, noted| u64::from(count.saturating_sub(noted));
        let metrics = self.metrics();
        metrics
            .prewarms
            .increment(more(count.started, noted.started));
        metrics
            .wasted_prewarms
            .increment(more(count.wasted, noted.wasted));
    }

    /// Sends the model down because its memory is needed; false when it is in use.
    /// With `scarce`, its weights leave the page cache as well.
    pub fn evict(&self, how: How, scarce: bool) -> bool {
        let now = self.host.clock.now();
        let mut effects = Effects::default();
        let mut state = self.state.lock();
        if how == How::Park && !self.can_park(&state) {
            return false;
        }
        let queued = state.batcher.held();
        let action = state.lifecycle.evict(now, queued, how);
        let went = action.is_some();
        self.act(&mut state, action, &mut effects, now);
        if let Some(closing) = &mut effects.close {
            closing.evicts_cache = scarce;
        }
        drop(state);
        self.perform(effects, Place::Elsewhere);
        went
    }

    /// A parked model was called: its weights come back as its runs read them. Bringing them in
    /// ahead of the run would only compete with it.
    pub(super) fn unpark(&self, state: &mut State, effects: &mut Effects) {
        let recorder = TimelineRecorder::start(self.host.clock, &self.host.metrics, &self.id);
        if let Some(tracer) = &self.host.tracer {
            recorder.trace(tracer.load(&self.id, state.load_for.take()));
        }
        recorder.set_kind(ColdStart::Parked);
        recorder.finish(false);
        self.counters.woke(recorder.clone());
        state.timeline = Some(recorder);
        state.waking_since = Some(self.host.clock.now());
        self.note_holding(state);
        // It holds more again, which nobody was asked for.
        effects.relieve = true;
    }

    /// Takes what a park drops out of the state. The session that stays may be given runs at once.
    pub(super) fn begin_parking(&self, state: &mut State) -> Parking {
        state.upgrade.dropped();
        // Its next run brings pages in: not one to have on a thread that serves connections.
        state.latest = None;
        let packed = match state.base.take() {
            Some(base) => state.session.replace(base),
            None => None,
        };
        Parking { packed }
    }

    /// Takes everything out of the state.
    pub(super) fn begin_closing(&self, state: &mut State) -> Closing {
        state.leaving = self.holding_of(state);
        state.upgrade.dropped();
        // A packed session was built behind another one's back and never saw a first run of its
        // own on fresh pages; the other did.
        let woken = state.base.as_ref().or(state.session.as_ref());
        if let Some(buffers) = woken.and_then(|open| open.session.first_buffers()) {
            state.first_buffers = Some(Arc::new(buffers));
        }
        Closing {
            session: state.session.take(),
            base: state.base.take(),
            evicts_cache: false,
        }
    }

    pub(super) fn spawn_park(&self, parking: Parking) {
        let unit = self.arc();
        self.away(move || {
            let _move = unit.host.wake.moves.begin();
            let before = memory::resident_bytes();
            guarded(&unit, || {
                drop(parking.packed);
                unit.leave_private_weights();
                let session = unit.state.lock().session.clone();
                // Not of a model that was called meanwhile: its run would read them in again.
                if let Some(open) = session.filter(|_| unit.stage() == Stage::Parked) {
                    open.session.release_memory();
                    if let Weights::Mapped(prepared) = &open.weights {
                        // Held by the model and its session.
                        drop_pages(prepared, 2);
                    }
                }
                memory::release_memory();
            });
            let mut effects = Effects::default();
            let returned = returned_since(before);
            unit.host.metrics.server().returned_bytes.increment(returned);
            unit.metrics().parks.increment(1);
            tracing::info!(model = %unit.id.name, version = unit.id.version.0, stage = "parked", returned_bytes = returned, "weights dropped");
            unit.host.events.publish(&unit.id, || EventKind::Parked {
                returned_bytes: returned,
            });
            let now = unit.host.clock.now();
            let mut state = unit.state.lock();
            state.lifecycle.parked();
            if matches!(state.session.as_deref(), Some(open) if matches!(open.weights, Weights::Private { .. })) {
                // The store did not have it after all: parking it again would free nothing either.
                state.prepared = false;
                unit.replan(&mut state);
            }
            unit.note_holding(&state);
            let queued = state.batcher.held();
            let action = state.lifecycle.poll(now, queued);
            unit.act(&mut state, action, &mut effects, now);
            drop(state);
            unit.perform(effects, Place::Elsewhere);
        });
    }

    pub(super) fn spawn_close(&self, closing: Closing) {
        let unit = self.arc();
        self.away(move || {
            let Closing {
                session,
                base,
                evicts_cache,
            } = closing;
            let giving_back = GivingBack::begin(&unit);
            let before = memory::resident_bytes();
            guarded(&unit, || {
                let weights = session.as_ref().map(|open| open.weights.clone());
                drop((session, base));
                if let Some(Weights::Mapped(prepared) | Weights::Packed(prepared)) = weights {
                    // Not what another model reads.
                    let unused = prepared.packs.iter().filter(|pack| Arc::strong_count(pack) == 1);
                    for pack in unused.filter(|_| evicts_cache) {
                        pack.evict_cache();
                    }
                }
                memory::release_memory();
            });
            let returned = returned_since(before);
            let server = unit.host.metrics.server();
            if let Some(unreturned) = giving_back.unreturned() {
                server.unreturned_bytes.increment(unreturned.bytes);
                if unreturned.is_remarkable() {
                    tracing::warn!(model = %unit.id.name, version = unit.id.version.0, freed_bytes = unreturned.freed_bytes, unreturned_bytes = unreturned.bytes, "memory of a closed session did not come back");
                }
            }
            drop(giving_back);
            server.models_warm.decrement(1.0);
            server.returned_bytes.increment(returned);
            unit.metrics().closes.increment(1);
            tracing::info!(model = %unit.id.name, version = unit.id.version.0, stage = "asleep", returned_bytes = returned, "session closed");
            unit.host.events.publish(&unit.id, || EventKind::Slept { returned_bytes: returned });
            let now = unit.host.clock.now();
            let mut effects = Effects::default();
            let mut state = unit.state.lock();
            unit.host.wake.residency.release(unit.serial);
            let queued = state.batcher.held();
            let action = state.lifecycle.closed(now, queued);
            unit.note_prewarms(&mut state);
            unit.act(&mut state, action, &mut effects, now);
            drop(state);
            unit.perform(effects, Place::Elsewhere);
        });
    }

    /// Does blocking work on a thread that is started from the runtime. Whoever asks for memory
    /// may stand back behind those that serve, and threads that it started would do so for ever.
    pub(super) fn away(&self, work: impl FnOnce() + Send + 'static) {
        self.host.runtime.spawn(async move {
            // What may panic is guarded: the unit must hear of the end.
            let _ = tokio::task::spawn_blocking(work).await;
        });
    }

    /// Tells the budget what the model holds now. Under the lock, as everything that changes it,
    /// so that the budget hears of it in the order it happened.
    pub(super) fn note_holding(&self, state: &State) {
        if let Some(held) = self.holding_of(state) {
            self.host.wake.residency.update(&self.arc(), held);
        }
    }

    /// Notes a call, for a policy that learns from them.
    pub(super) fn note_arrival(&self, state: &mut State, now: Timestamp) {
        if state.learns {
            state.keep_alive.arrived(now);
            self.replan(state);
        }
    }
}

/// A closing, and what the process had when it began.
struct GivingBack {
    unit: Arc<Unit>,
    alone: Move,
    before: Option<(Balance, u64)>,
}

impl GivingBack {
    fn begin(unit: &Arc<Unit>) -> Self {
        Self {
            alone: unit.host.wake.moves.begin(),
            // Of a process of its own the kernel takes everything back.
            before: balance(unit).filter(|_| unit.isolated.is_none()),
            unit: Arc::clone(unit),
        }
    }

    /// What did not come back; none where something else went on meanwhile, whose memory nobody
    /// could tell from this.
    fn unreturned(&self) -> Option<Unreturned> {
        let (before, runs_before) = self.before?;
        let (after, runs) = balance(&self.unit)?;
        let is_told = runs == runs_before && self.alone.is_alone();
        is_told.then(|| Unreturned::between(before, after))
    }
}

/// What the process has, and how many runs there were; none while one is under way.
fn balance(unit: &Unit) -> Option<(Balance, u64)> {
    let balance = Balance {
        anonymous_bytes: memory::anonymous_bytes()?,
        live_bytes: allocator::stats().live_bytes,
    };
    let slots = unit.host.slots.lock();
    (slots.used() == 0).then(|| (balance, slots.taken()))
}

/// Does what calls into engine and store. The unit goes on even if it panics: whoever waits for it
/// would wait for ever.
fn guarded(unit: &Unit, work: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        tracing::error!(model = %unit.id.name, version = unit.id.version.0, "giving memory back panicked");
    }
}

fn returned_since(before: Option<u64>) -> u64 {
    let resident = before.zip(memory::resident_bytes());
    resident.map_or(0, |(before, after)| before.saturating_sub(after))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use dormouse_model_store::spec::LifecycleSpec;

    use super::*;

    #[test]
    fn what_is_never_parked_learns_as_if_it_could_not_be() {
        let defaults = UnitDefaults {
            keep_alive: KeepAliveSpec::Adaptive,
            park_after: Some(Duration::from_secs(20)),
            max_queue: 1,
            retry_backoff: Duration::ZERO,
            retry_backoff_max: Duration::ZERO,
            load_retries: 0,
        };
        let own = LifecycleSpec::default();
        let never = LifecycleSpec {
            park_after: Some(None),
            ..LifecycleSpec::default()
        };
        let without = KeepAlivePolicy::Adaptive(AdaptivePolicy::without_parking());
        assert_eq!(keep_alive_policy(&own, &defaults, false), without);
        assert_eq!(keep_alive_policy(&never, &defaults, true), without);
        let window = ParkWindow {
            floor: Duration::from_secs(10),
            ceiling: Duration::from_secs(20),
        };
        let with = KeepAlivePolicy::Adaptive(AdaptivePolicy {
            park: Some(window),
            ..AdaptivePolicy::default()
        });
        assert_eq!(keep_alive_policy(&own, &defaults, true), with);
    }
}

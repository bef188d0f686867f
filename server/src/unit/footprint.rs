//! What a model holds of the memory budget, stage by stage. Estimates: the kernel counts pages,
//! not models. They err on the large side.

use dormouse_core::budget::{Holding, HoldingState, SharedUse};
use dormouse_core::lifecycle::Stage;
use dormouse_model_store::store::{Digest, PreparedModel};
use std::time::Duration;

use super::open::Weights;
use super::{State, Unit};
use crate::engine::Effort;
use crate::isolation::WORKER_BYTES;
use crate::residency::Held;

/// A session without its weights: the graph, its kernels and plans. Measured between 5 and 17 MB.
const CONTEXT: u64 = 16 << 20;

/// What a call waits longer for a model that is parked, until that was measured.
const RESUME_FROM_PARKED: Duration = Duration::from_millis(10);
/// What a call waits longer for a model that is closed, until that was measured.
const RESUME_FROM_COLD: Duration = Duration::from_millis(500);

/// A load from the model's files holds what was read, what was made of it and, in full, what was packed
/// of that at the same time.
pub fn loading_footprint(source: u64, effort: Effort) -> u64 {
    let times = match effort {
        Effort::Full => 3,
        Effort::Least => 2,
    };
    source.saturating_mul(times).saturating_add(CONTEXT)
}

/// A session over weights in the prepared store that nobody else reads.
pub fn prepared_footprint(weights: u64) -> u64 {
    weights.saturating_add(CONTEXT)
}

/// What of the prepared store's packs a session over them reads.
pub(super) fn pack_uses(prepared: &PreparedModel) -> Vec<SharedUse<Digest>> {
    let packs = prepared.packs.iter();
    let mut uses: Vec<_> = packs
        .map(|pack| SharedUse {
            part: pack.digest(),
            size: pack.len(),
            used: 0,
        })
        .collect();
    for weight in &prepared.weights {
        uses[weight.pack].used += weight.len;
    }
    uses
}

/// What packing adds to that.
pub(super) fn packed_bytes(prepared: &PreparedModel) -> u64 {
    let measured = prepared
        .facts
        .packing
        .map(|verdict| verdict.packed_private_bytes);
    // Nothing is packed twice, so it cannot be more than there is.
    let weights = prepared.weight_bytes();
    measured
        .filter(|&bytes| bytes > 0)
        .unwrap_or(weights)
        .min(weights)
}

impl Unit {
    /// Tells the budget what the model holds.
    pub fn tell_holding(&self) {
        let state = self.state.lock();
        self.note_holding(&state);
    }

    /// What a session over the prepared store's map adds to what is resident already.
    pub(super) fn mapped_footprint(&self, prepared: &PreparedModel) -> u64 {
        let residency = &self.host.wake.residency;
        let process = self.isolated.as_ref().map_or(0, |_| WORKER_BYTES);
        prepared_footprint(residency.needed(&pack_uses(prepared))).saturating_add(process)
    }

    /// What the model holds and whether it could be given up; none while it holds nothing, or
    /// loads: then what it reserved stands.
    pub(super) fn holding_of(&self, state: &State) -> Option<Held> {
        let stage = state.lifecycle.stage();
        let holding_state = match stage {
            Stage::Warm if state.lifecycle.is_idle() => HoldingState::Idle,
            Stage::Parked if state.lifecycle.is_idle() => HoldingState::Parked,
            Stage::Warm | Stage::Parked => HoldingState::Busy,
            Stage::Closing => HoldingState::Leaving,
            Stage::Loading | Stage::Cold | Stage::Failed { .. } | Stage::Retired => return None,
        };
        let Some(open) = &state.session else {
            // While it is closed, what it held is still held.
            return state.leaving.clone();
        };
        let (private, prepared) = match &open.weights {
            // Parsed, and packed for the greater part; in haste what was read, and what was made of it
            // where the graph was optimised.
            Weights::Private { bytes, .. } => (bytes.saturating_mul(2), None),
            // What is being dropped is still there.
            Weights::Mapped(_) if state.lifecycle.has_dropped() => (0, None),
            Weights::Mapped(prepared) if state.upgrade.is_building() => {
                (packed_bytes(prepared), Some(prepared))
            }
            Weights::Mapped(prepared) => (0, Some(prepared)),
            Weights::Packed(prepared) => (packed_bytes(prepared), Some(prepared)),
        };
        // A process of its own is asked; what it has not yet touched is estimated.
        let (context, measured) = match &self.isolated {
            None => (CONTEXT, 0),
            Some(isolated) => (CONTEXT + WORKER_BYTES, isolated.held_bytes()),
        };
        let can_park = holding_state == HoldingState::Idle && self.can_park(state);
        Some(Held {
            own: Holding {
                bytes: private.saturating_add(context).max(measured),
                parkable_bytes: if can_park { private } else { 0 },
                resume_from_parked: state
                    .profile
                    .expected_resume()
                    .unwrap_or(RESUME_FROM_PARKED),
                resume_from_cold: state.profile.expected_load().unwrap_or(RESUME_FROM_COLD),
                state: holding_state,
                last_used: state.lifecycle.last_use(),
            },
            shared: prepared.map_or_else(Vec::new, |prepared| pack_uses(prepared)),
            shared_is_parkable: can_park,
        })
    }
}

//! What a model holds of the memory budget, stage by stage. Estimates: the kernel counts pages,
//! not models. They err on the large side.

use dormouse_core::budget::{Holding, HoldingState};
use dormouse_core::lifecycle::Stage;
use dormouse_model_store::store::PreparedModel;
use std::time::Duration;

use super::load::Weights;
use super::{State, Unit};

/// A session without its weights: the graph, its kernels and plans. Measured between 5 and 17 MB.
const CONTEXT: u64 = 16 << 20;

/// What a call waits longer for a model that is parked, until that was measured.
const RESUME_FROM_PARKED: Duration = Duration::from_millis(10);
/// What a call waits longer for a model that is closed, until that was measured.
const RESUME_FROM_COLD: Duration = Duration::from_millis(500);

/// A load from the model's files holds what was read, what was parsed of it and what was packed
/// of that at the same time.
pub(super) fn loading_footprint(source: u64) -> u64 {
    source.saturating_mul(3).saturating_add(CONTEXT)
}

/// A session over the prepared store's map.
pub(super) fn mapped_footprint(prepared: &PreparedModel) -> u64 {
    prepared.weight_bytes().saturating_add(CONTEXT)
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

    /// What the model holds and whether it could be given up; none while it holds nothing, or
    /// loads: then what it reserved stands.
    pub(super) fn holding_of(&self, state: &State) -> Option<Holding> {
        let stage = state.lifecycle.stage();
        let holding_state = match stage {
            Stage::Warm if state.lifecycle.is_idle() => HoldingState::Idle,
            Stage::Parked if state.lifecycle.is_idle() => HoldingState::Parked,
            Stage::Warm | Stage::Parked => HoldingState::Busy,
            Stage::Closing => HoldingState::Leaving,
            Stage::Loading | Stage::Cold | Stage::Failed { .. } | Stage::Retired => return None,
        };
        let (bytes, parkable) = match state.session.as_ref().map(|open| &open.weights) {
            // While it is closed, what it held is still held.
            None => (state.leaving_bytes, 0),
            // Parsed, and packed for the greater part.
            Some(Weights::Private(source)) => {
                let weights = source.saturating_mul(2);
                (
                    weights.saturating_add(CONTEXT),
                    self.parkable(state, weights),
                )
            }
            Some(Weights::Mapped(prepared)) => (
                mapped_footprint(prepared),
                self.parkable(state, prepared.weight_bytes()),
            ),
            Some(Weights::Packed(prepared)) => {
                let weights = prepared
                    .weight_bytes()
                    .saturating_add(packed_bytes(prepared));
                (
                    weights.saturating_add(CONTEXT),
                    self.parkable(state, weights),
                )
            }
        };
        let bytes = match &state.session {
            // What is being dropped is still there.
            Some(open) if stage == Stage::Parked && !state.lifecycle.is_parking() => {
                match open.weights {
                    Weights::Mapped(_) => CONTEXT,
                    Weights::Private(_) | Weights::Packed(_) => bytes,
                }
            }
            Some(open) if state.upgrade.is_building() => match &open.weights {
                Weights::Mapped(prepared) => bytes.saturating_add(packed_bytes(prepared)),
                Weights::Private(_) | Weights::Packed(_) => bytes,
            },
            _ => bytes,
        };
        Some(Holding {
            bytes,
            parkable_bytes: match holding_state {
                HoldingState::Idle => parkable.min(bytes),
                _ => 0,
            },
            resume_from_parked: RESUME_FROM_PARKED,
            resume_from_cold: state.profile.expected_load().unwrap_or(RESUME_FROM_COLD),
            state: holding_state,
            last_used: state.lifecycle.last_use(),
        })
    }

    fn parkable(&self, state: &State, weights: u64) -> u64 {
        match self.can_park(state) {
            true => weights,
            false => 0,
        }
    }
}

//! Takes due batches from a unit's queue, and from it what nobody waits for any more.

use std::sync::Arc;

use dormouse_core::batch::{EntryId, ExpiryCause};
use dormouse_core::code::ErrorCode;
use dormouse_core::time::Timestamp;

use super::effects::{Effects, Failure, Place};
use super::{RunInfo, State, Unit};
use crate::error::ServeError;
use crate::host::UnitKey;
use crate::metrics::FailureReason;

impl Unit {
    /// Takes every batch that is due and may run now.
    pub(super) fn pump(&self, state: &mut State, effects: &mut Effects, now: Timestamp) {
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

    pub(super) fn can_run(&self, state: &State) -> bool {
        let alone = matches!(state.runs[..], [RunInfo { alone: true, .. }]);
        state.session.is_some() && state.runs.len() < state.at_once.limit() && !alone
    }

    fn acquire_slot(&self) -> bool {
        let mut slots = self.host.slots.lock();
        slots.try_acquire_free() || slots.try_acquire(&UnitKey(self.arc()))
    }

    /// Gives a run slot back; the model that has waited longest for one gets it.
    pub(super) fn release_slot(&self) {
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
            self.metrics().pending.decrement(1);
            // A load takes as long as it takes, whatever is ahead in the queue.
            if expired.cause == ExpiryCause::Deadline && !expired.item.cold {
                state.profile.waited_in_vain();
            }
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
    pub(super) fn abandon(&self, entry: EntryId) {
        let now = self.host.clock.now();
        let mut effects = Effects::default();
        let mut state = self.state.lock();
        if let Some(pending) = state.batcher.cancel(entry, now) {
            self.metrics().pending.decrement(1);
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
}

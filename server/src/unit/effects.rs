//! What a unit decides under its lock and carries out after it: answers, runs, loads, closes,
//! calls at a time.

use std::sync::Weak;

use dormouse_core::lifecycle::{Action, Stage};
use dormouse_core::time::Timestamp;
use dormouse_core::upgrade::BuildId;
use smallvec::SmallVec;
use tokio::sync::oneshot;

use super::exit::{Closing, Parking};
use super::run::Run;
use super::{NotAnswered, Pending, Reply, State, Unit};
use crate::alarm::Ring;
use crate::error::ServeError;
use crate::metrics::FailureReason;
use crate::priority::courtesy;
use crate::request::InferResponse;

/// An answer on its way to whoever asked.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) reply: oneshot::Sender<Reply>,
    pub(super) result: Result<InferResponse, ServeError>,
}

/// Somebody who waits for a load to end.
pub(super) type LoadWaiter = oneshot::Sender<Result<(), ServeError>>;

/// What is to be done once the lock is released.
#[derive(Default)]
pub(super) struct Effects {
    pub(super) answers: SmallVec<[Answer; 1]>,
    /// Requests for another unit to answer.
    pub(super) sent_on: Vec<Pending>,
    pub(super) runs: SmallVec<[Run; 1]>,
    /// Whether it is ahead of a call.
    pub(super) start_load: Option<bool>,
    pub(super) park: Option<Parking>,
    pub(super) close: Option<Closing>,
    /// The model is to be put into the prepared store.
    pub(super) prepare: bool,
    pub(super) upgrade: Option<BuildId>,
    /// Others may have to go for what this model holds.
    pub(super) relieve: bool,
    pub(super) loaded: Vec<(LoadWaiter, Result<(), ServeError>)>,
    pub(super) retired: Vec<oneshot::Sender<()>>,
    pub(super) alarm_at: Option<Timestamp>,
}

/// Where a run that became possible may happen.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// On this thread if it is short.
    HereIfShort,
    Elsewhere,
}

/// Why a request left without a result, for its caller and for the counters.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: ServeError,
    pub(super) reason: FailureReason,
}

impl Unit {
    /// Translates a decision of the lifecycle into effects.
    pub(super) fn act(
        &self,
        state: &mut State,
        action: Option<Action>,
        effects: &mut Effects,
        now: Timestamp,
    ) {
        match action {
            None => {}
            Some(Action::StartLoad) => self.begin_load(state, effects, now),
            Some(Action::Park) => effects.park = Some(self.begin_parking(state)),
            Some(Action::CloseSession) => effects.close = Some(self.begin_closing(state)),
        }
        if state.lifecycle.stage() == Stage::Retired {
            effects.retired.append(&mut state.retire_waiters);
            // No load will come for those who asked for one while the last session was closed.
            let waiters = state.load_waiters.drain(..);
            effects
                .loaded
                .extend(waiters.map(|waiter| (waiter, Err(self.gone()))));
        }
        self.set_alarm(state, effects);
    }

    pub(super) fn begin_load(&self, state: &mut State, effects: &mut Effects, now: Timestamp) {
        state.load_started = Some(now);
        state.waking_since = Some(now);
        effects.start_load = Some(state.lifecycle.is_anticipating());
    }

    /// Asks for a call when the next decision is due, unless an earlier one is set already.
    pub(super) fn set_alarm(&self, state: &mut State, effects: &mut Effects) {
        // A batch that cannot run yet is looked at again when a run ends; until then only the
        // expiry of what waits needs a call.
        let can_run = self.can_run(state) && !state.waits_for_slot;
        let State {
            batcher,
            profile,
            lifecycle,
            alarms,
            ..
        } = state;
        let batch_at = match can_run {
            true => batcher.wake_at(|rows| profile.cautious_run(rows)),
            false => batcher.expires_at(),
        };
        let at = [batch_at, lifecycle.wake_at()].into_iter().flatten().min();
        if let Some(at) = at
            && alarms.last().is_none_or(|&set| at < set)
        {
            alarms.push(at);
            effects.alarm_at = Some(at);
        }
    }

    /// Carries out what was decided. The lock is not held.
    pub(super) fn perform(&self, effects: Effects, place: Place) {
        let Effects {
            answers,
            sent_on,
            runs,
            start_load,
            park,
            close,
            prepare,
            upgrade,
            relieve,
            loaded,
            retired,
            alarm_at,
        } = effects;
        let has_answers = !answers.is_empty();
        for answer in answers {
            // A closed channel is a caller that left; it was counted when it left.
            let _ = answer
                .reply
                .send(answer.result.map_err(NotAnswered::Failed));
        }
        if has_answers {
            courtesy::end();
        }
        for pending in sent_on {
            let _ = pending
                .reply
                .send(Err(NotAnswered::Retired(Box::new(pending.request))));
        }
        for (waiter, result) in loaded {
            let _ = waiter.send(result);
        }
        for waiter in retired {
            let _ = waiter.send(());
        }
        if let Some(at) = alarm_at {
            self.host.alarm.set(at, self.this.clone() as Weak<dyn Ring>);
        }
        if let Some(ahead) = start_load {
            self.spawn_load(ahead);
        }
        if let Some(parking) = park {
            self.spawn_park(parking);
        }
        if let Some(closing) = close {
            self.spawn_close(closing);
        }
        if prepare {
            self.spawn_prepare();
        }
        if let Some(build) = upgrade {
            self.spawn_upgrade(build);
        }
        for run in runs {
            self.start_run(run, place);
        }
        if relieve {
            self.host.wake.residency.relieve();
        }
    }

    /// Counts and answers a request that left the queue or a run without a result.
    pub(super) fn fail(
        &self,
        state: &mut State,
        effects: &mut Effects,
        pending: Pending,
        failure: Failure,
    ) {
        self.counters
            .failed(self.host.clock.now() - pending.request.received);
        self.metrics().failed(failure.reason);
        let answer = Answer {
            reply: pending.reply,
            result: Err(failure.error),
        };
        release_in_order(state, effects, pending.sequence, answer);
    }

    /// Has a request that left the queue answered by the unit that comes after this one.
    pub(super) fn send_on(&self, state: &mut State, effects: &mut Effects, pending: Pending) {
        if let (Some(order), Some(sequence)) = (&mut state.order, pending.sequence) {
            effects.answers.extend(order.skip(sequence));
        }
        effects.sent_on.push(pending);
    }

    /// Lets later answers pass a request that was refused after it got its place.
    pub(super) fn skip_in_order(&self, state: &mut State, sequence: Option<u64>) {
        if let (Some(order), Some(sequence)) = (&mut state.order, sequence) {
            // It was issued last, so nothing can be waiting behind it.
            let released = order.skip(sequence);
            debug_assert!(released.is_empty());
        }
    }
}

/// Sends an answer, or keeps it until the answers before it have left.
pub(super) fn release_in_order(
    state: &mut State,
    effects: &mut Effects,
    sequence: Option<u64>,
    answer: Answer,
) {
    match (&mut state.order, sequence) {
        (Some(order), Some(sequence)) => effects.answers.extend(order.complete(sequence, answer)),
        _ => effects.answers.push(answer),
    }
}

//! The life of one model version: cold, loading, warm, closing, and for good: retired.
//!
//! The driver reports what happened, performs the returned [`Action`] and reports its end. It
//! calls [`Lifecycle::poll`] after every event that may have emptied the queue or ended a run,
//! and at [`Lifecycle::wake_at`]. How a model is loaded, and who waits for it, is not known here.
//!
//! A model is asked for ([`Lifecycle::demand`]) before its request is queued. When a load fails
//! the driver answers everything that waits: a failed model has no queue.

use std::time::Duration;

use crate::time::Timestamp;

/// How long a model stays warm without use, and how soon a failed load is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LifecyclePolicy {
    /// Time without use after which the session is closed; `None` keeps it for ever.
    pub keep_alive: Option<Duration>,
    /// Pause after the first failed load; doubles with every further one.
    pub retry_backoff: Duration,
    /// The longest pause between two attempts to load.
    pub retry_backoff_max: Duration,
}

/// Where a model version stands.
///
/// Stages of a gradual exit (session kept but weights dropped, weights kept but device left)
/// belong between `Warm` and `Closing`: each is entered by `poll` when its own timer has passed,
/// is left upwards by `demand`, and answers `Demand::Wait` while its resources come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Holds nothing; the next demand starts a load.
    Cold,
    /// A load is under way.
    Loading,
    /// Has a session and may run.
    Warm,
    /// The session is being closed.
    Closing,
    /// The last load failed; demand is refused until `retry_at`.
    Failed { retry_at: Timestamp },
    /// Holds nothing and never will again.
    Retired,
}

/// The answer to somebody who wants the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand {
    /// The model is warm.
    Run,
    /// The model is on its way; wait for it.
    Wait,
    /// Start a load, then wait for it.
    StartLoad,
    /// The last load failed and it is too early to try again.
    Refuse { retry_at: Timestamp },
    /// The model version has been taken out of service.
    Retired,
}

/// What the driver has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Load the model, then report `loaded` or `load_failed`.
    StartLoad,
    /// Close the session, then report `closed`.
    CloseSession,
}

/// The state machine of one model version.
#[derive(Clone, Debug)]
pub struct Lifecycle {
    policy: LifecyclePolicy,
    stage: Stage,
    retiring: bool,
    running: usize,
    /// The queue was not empty when last heard of.
    occupied: bool,
    /// Somebody asked for the model while its session was being closed.
    wanted: bool,
    /// Last demand, load, start or end of a run: the keep-alive counts from here.
    last_activity: Timestamp,
    /// Loads failed since the last success.
    failures: u32,
}

impl Lifecycle {
    /// A cold model version.
    pub fn new(policy: LifecyclePolicy) -> Self {
        Self {
            policy,
            stage: Stage::Cold,
            retiring: false,
            running: 0,
            occupied: false,
            wanted: false,
            last_activity: Timestamp::ZERO,
            failures: 0,
        }
    }

    /// Where the model stands.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Whether the model is leaving service or has left it.
    pub fn is_retiring(&self) -> bool {
        self.retiring
    }

    /// A request, a warm-up or an eager load wants the model.
    pub fn demand(&mut self, now: Timestamp) -> Demand {
        if self.retiring {
            return Demand::Retired;
        }
        self.last_activity = now;
        match self.stage {
            Stage::Cold => {
                self.stage = Stage::Loading;
                Demand::StartLoad
            }
            Stage::Loading => Demand::Wait,
            Stage::Warm => Demand::Run,
            Stage::Closing => {
                self.wanted = true;
                Demand::Wait
            }
            Stage::Failed { retry_at } if now < retry_at => Demand::Refuse { retry_at },
            Stage::Failed { .. } => {
                self.stage = Stage::Loading;
                Demand::StartLoad
            }
            Stage::Retired => Demand::Retired,
        }
    }

    /// The load succeeded; closes again when the model was retired meanwhile and nothing waits.
    pub fn loaded(&mut self, now: Timestamp) -> Option<Action> {
        debug_assert_eq!(
            self.stage,
            Stage::Loading,
            "a load ended that nobody started"
        );
        self.failures = 0;
        self.last_activity = now;
        if self.retiring && !self.occupied {
            return Some(self.close());
        }
        self.stage = Stage::Warm;
        None
    }

    /// The load failed; returns when it may be tried again.
    pub fn load_failed(&mut self, now: Timestamp) -> Timestamp {
        debug_assert_eq!(
            self.stage,
            Stage::Loading,
            "a load failed that nobody started"
        );
        let doublings = self.failures.min(31);
        self.failures = self.failures.saturating_add(1);
        let backoff = self
            .policy
            .retry_backoff
            .saturating_mul(1 << doublings)
            .min(self.policy.retry_backoff_max);
        let retry_at = now + backoff;
        self.occupied = false;
        self.stage = if self.retiring {
            Stage::Retired
        } else {
            Stage::Failed { retry_at }
        };
        retry_at
    }

    /// A batch went to the session.
    pub fn run_started(&mut self, now: Timestamp) {
        debug_assert_eq!(self.stage, Stage::Warm, "only a warm model runs");
        self.running += 1;
        self.last_activity = now;
    }

    /// A batch came back from the session, whatever its outcome.
    pub fn run_finished(&mut self, now: Timestamp) {
        debug_assert!(self.running > 0, "a run ended that nobody started");
        self.running = self.running.saturating_sub(1);
        self.last_activity = now;
        // The queue has moved since it was last heard of: ask again.
        self.occupied = false;
    }

    /// Closes a session that has been idle for its keep-alive, or is drained while retiring.
    pub fn poll(&mut self, now: Timestamp, queued: usize) -> Option<Action> {
        self.occupied = queued > 0;
        if self.stage != Stage::Warm || self.running > 0 || self.occupied {
            return None;
        }
        let expired = self.idle_until().is_some_and(|until| now >= until);
        (self.retiring || expired).then(|| self.close())
    }

    /// The session is closed; loads again when somebody came meanwhile.
    pub fn closed(&mut self, now: Timestamp, queued: usize) -> Option<Action> {
        debug_assert_eq!(
            self.stage,
            Stage::Closing,
            "a session closed that nobody closed"
        );
        let wanted = std::mem::take(&mut self.wanted) && !self.retiring;
        self.occupied = queued > 0;
        self.stage = if wanted || self.occupied {
            self.last_activity = now;
            Stage::Loading
        } else if self.retiring {
            Stage::Retired
        } else {
            Stage::Cold
        };
        (self.stage == Stage::Loading).then_some(Action::StartLoad)
    }

    /// Takes the model out of service once what is queued and running has finished.
    ///
    /// A load under way is not interrupted; its session is closed when nothing waits for it.
    pub fn retire(&mut self, now: Timestamp, queued: usize) -> Option<Action> {
        self.retiring = true;
        self.occupied = queued > 0;
        match self.stage {
            Stage::Cold if self.occupied => {
                self.stage = Stage::Loading;
                Some(Action::StartLoad)
            }
            Stage::Cold | Stage::Failed { .. } => {
                self.stage = Stage::Retired;
                None
            }
            Stage::Warm => self.poll(now, queued),
            Stage::Loading | Stage::Closing | Stage::Retired => None,
        }
    }

    /// When `poll` next matters, if no event comes before.
    pub fn wake_at(&self) -> Option<Timestamp> {
        // What runs or waits produces an event of its own; a timer in the past would only spin.
        if self.stage != Stage::Warm || self.running > 0 || self.occupied {
            return None;
        }
        if self.retiring {
            return Some(self.last_activity);
        }
        self.idle_until()
    }

    fn idle_until(&self) -> Option<Timestamp> {
        Some(self.last_activity + self.policy.keep_alive?)
    }

    fn close(&mut self) -> Action {
        self.stage = Stage::Closing;
        self.wanted = false;
        Action::CloseSession
    }
}

#[cfg(test)]
mod tests;

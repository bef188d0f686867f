//! The life of one model version: cold, loading, warm, parked, closing, and for good: retired.
//!
//! The driver reports what happened, performs the returned [`Action`] and reports its end. It
//! calls [`Lifecycle::poll`] after every event that may have emptied the queue or ended a run,
//! and at [`Lifecycle::wake_at`]. How a model is loaded, and who waits for it, is not known here.
//!
//! A model is asked for ([`Lifecycle::demand`]) before its request is queued. When a load fails
//! the driver answers everything that waits: a failed model has no queue.
//!
//! How far and how soon an idle model goes down, and whether it comes back ahead of its next
//! call, is its [`IdlePlan`]; [`crate::keep_alive`] makes one from what was observed.

use std::time::Duration;

use crate::time::Timestamp;

/// How a model goes down, and how soon a failed load is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LifecyclePolicy {
    /// The plan until [`Lifecycle::set_plan`] gives another.
    pub plan: IdlePlan,
    /// Pause after the first failed load; doubles with every further one.
    pub retry_backoff: Duration,
    /// The longest pause between two attempts to load.
    pub retry_backoff_max: Duration,
}

/// What becomes of a model that nobody uses; the default keeps it warm for ever.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IdlePlan {
    /// Time without use after which the model is parked; `None` leaves it warm.
    pub park_after: Option<Duration>,
    /// Time without use after which the session is closed; `None` keeps it for ever.
    pub close_after: Option<Duration>,
    /// The call that is expected next: a closed model is loaded ahead of it.
    pub prewarm: Option<Prewarm>,
}

/// When a closed model is loaded before anybody asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prewarm {
    /// Time after the last use at which the load starts; without effect on a model that is not
    /// cold then.
    pub at: Duration,
    /// How long the loaded model is held for the call it was loaded for, in place of
    /// `close_after`.
    pub hold: Duration,
}

impl IdlePlan {
    /// Keeps the model warm for `keep_alive` without use, then closes it.
    pub const fn close_after(keep_alive: Option<Duration>) -> Self {
        Self {
            park_after: None,
            close_after: keep_alive,
            prewarm: None,
        }
    }
}

/// Where a model version stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Holds nothing; the next demand starts a load.
    Cold,
    /// A load is under way.
    Loading,
    /// Has a session and may run.
    Warm,
    /// Has a session but gave up what comes back by itself; the next demand makes it warm.
    Parked,
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
    /// Load the model, then report `loaded`, `load_failed`, `load_abandoned` or `load_outdated`.
    StartLoad,
    /// Drop the packed session and the weights' pages, then report `parked`. The session that
    /// stays may be given runs at any moment meanwhile.
    Park,
    /// Close the session, then report `closed`.
    CloseSession,
}

/// How far an idle model is to go down when its memory is needed elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum How {
    /// Keeps the session, gives up packed copies and the weights' pages.
    Park,
    /// Gives up everything.
    Close,
}

/// Loads that were started ahead of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrewarmCount {
    /// Started ahead of an expected call.
    pub started: u32,
    /// Of these, ended before anybody called.
    pub wasted: u32,
}

/// What is known about the load ahead of the next call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Anticipation {
    /// No call is expected: there was none yet, or the last expectation was wrong.
    Idle,
    /// The plan's pre-warming applies to the next time the model is cold.
    Armed,
    /// The model is being loaded, or is held, for a call that has not come.
    Holding,
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
    /// The driver has not yet reported the end of parking.
    parking: bool,
    /// What parking drops is dropped, and nobody has called since.
    dropped: bool,
    anticipation: Anticipation,
    prewarms: PrewarmCount,
    /// Last demand, or start or end of a run: pre-warming counts from here.
    last_use: Timestamp,
    /// Last use, or end of a load: the timers of an idle model count from here.
    last_activity: Timestamp,
    /// Loads failed since the last success.
    failures: u32,
    /// The session was lost, and the model is loaded again at its time without being asked for.
    restarts: bool,
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
            parking: false,
            dropped: false,
            anticipation: Anticipation::Idle,
            prewarms: PrewarmCount::default(),
            last_use: Timestamp::ZERO,
            last_activity: Timestamp::ZERO,
            failures: 0,
            restarts: false,
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

    /// Whether the model has a session that nothing uses, so that it could be evicted.
    pub fn is_idle(&self) -> bool {
        matches!(self.stage, Stage::Warm | Stage::Parked)
            && self.running == 0
            && !self.occupied
            && !self.parking
    }

    /// Whether the model holds no more than parking leaves it, also on its way out.
    pub fn has_dropped(&self) -> bool {
        self.dropped
    }

    /// Whether the model is being loaded, or held, for a call that has not come yet.
    pub fn is_anticipating(&self) -> bool {
        self.anticipation == Anticipation::Holding
    }

    /// The loads that were started ahead of a call.
    pub fn prewarms(&self) -> PrewarmCount {
        self.prewarms
    }

    /// The last time somebody used the model.
    pub fn last_use(&self) -> Timestamp {
        self.last_use
    }

    /// What becomes of the model when nobody uses it.
    pub fn plan(&self) -> IdlePlan {
        self.policy.plan
    }

    /// Changes what becomes of the model when nobody uses it; `wake_at` changes with it.
    pub fn set_plan(&mut self, plan: IdlePlan) {
        self.policy.plan = plan;
    }

    /// A request, a warm-up or an eager load wants the model.
    pub fn demand(&mut self, now: Timestamp) -> Demand {
        if self.retiring {
            return Demand::Retired;
        }
        self.used(now);
        self.anticipation = Anticipation::Armed;
        match self.stage {
            Stage::Cold => {
                self.stage = Stage::Loading;
                Demand::StartLoad
            }
            Stage::Loading => Demand::Wait,
            Stage::Warm => Demand::Run,
            Stage::Parked => {
                self.stage = Stage::Warm;
                self.dropped = false;
                Demand::Run
            }
            Stage::Closing => {
                self.wanted = true;
                Demand::Wait
            }
            Stage::Failed { retry_at } if now < retry_at => Demand::Refuse { retry_at },
            Stage::Failed { .. } => {
                self.restarts = false;
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
        self.dropped = false;
        self.last_activity = now;
        if self.retiring && !self.occupied {
            return Some(self.close(now));
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
        self.give_up_expectation();
        self.stage = if self.retiring {
            Stage::Retired
        } else {
            Stage::Failed { retry_at }
        };
        retry_at
    }

    /// The driver did not carry out a load that was only started ahead of a call, for instance
    /// because no memory is free for it; starts it after all when somebody came meanwhile.
    pub fn load_abandoned(&mut self, queued: usize) -> Option<Action> {
        debug_assert_eq!(
            self.stage,
            Stage::Loading,
            "a load was abandoned that nobody started"
        );
        self.occupied = queued > 0;
        let unwanted = self.anticipation == Anticipation::Holding || self.retiring;
        if self.occupied || !unwanted {
            return Some(Action::StartLoad);
        }
        if self.anticipation == Anticipation::Holding {
            // It was never carried out, so it was not in vain either.
            self.anticipation = Anticipation::Idle;
            self.prewarms.started = self.prewarms.started.saturating_sub(1);
        }
        self.stage = if self.retiring {
            Stage::Retired
        } else {
            Stage::Cold
        };
        None
    }

    /// What the load was to read is no longer what the model was described from: nothing was
    /// loaded, and the driver has sent everybody who waited to the model's successor.
    pub fn load_outdated(&mut self) {
        debug_assert_eq!(
            self.stage,
            Stage::Loading,
            "a load was outdated that nobody started"
        );
        self.occupied = false;
        self.give_up_expectation();
        self.stage = if self.retiring {
            Stage::Retired
        } else {
            Stage::Cold
        };
    }

    /// The session is gone though nobody closed it. Without `restart_at` the model is not loaded
    /// again until it is [`Lifecycle::pardoned`]; with a time that has come it is loaded at once,
    /// and what waits goes on waiting; otherwise the driver answers everything that waits.
    ///
    /// Has no effect on a model that has no session, or whose session is being closed.
    pub fn lost(&mut self, now: Timestamp, restart_at: Option<Timestamp>) -> Option<Action> {
        if !matches!(self.stage, Stage::Warm | Stage::Parked) {
            return None;
        }
        self.dropped = false;
        self.last_activity = now;
        self.give_up_expectation();
        if self.retiring {
            self.occupied = false;
            self.stage = Stage::Retired;
            return None;
        }
        match restart_at {
            Some(at) if at <= now => {
                self.stage = Stage::Loading;
                Some(Action::StartLoad)
            }
            at => {
                self.fail_until(at);
                None
            }
        }
    }

    /// A load that failed must not be tried again until the model is pardoned.
    pub fn barred(&mut self) {
        if matches!(self.stage, Stage::Failed { .. }) {
            self.fail_until(None);
        }
    }

    /// Somebody who knows better wants a failed model tried again now.
    pub fn pardoned(&mut self) {
        if matches!(self.stage, Stage::Failed { .. }) {
            self.stage = Stage::Cold;
            self.failures = 0;
            self.restarts = false;
        }
    }

    fn fail_until(&mut self, at: Option<Timestamp>) {
        self.occupied = false;
        self.restarts = at.is_some();
        let retry_at = at.unwrap_or(Timestamp::from_nanos(u64::MAX));
        self.stage = Stage::Failed { retry_at };
    }

    /// A batch went to the session.
    pub fn run_started(&mut self, now: Timestamp) {
        debug_assert_eq!(self.stage, Stage::Warm, "only a warm model runs");
        self.running += 1;
        self.used(now);
    }

    /// A batch came back from the session, whatever its outcome.
    pub fn run_finished(&mut self, now: Timestamp) {
        debug_assert!(self.running > 0, "a run ended that nobody started");
        self.running = self.running.saturating_sub(1);
        self.used(now);
        // The queue has moved since it was last heard of: ask again.
        self.occupied = false;
    }

    /// Takes the next step of the plan that is due: park, close, or load ahead of a call; closes
    /// a drained session that retires.
    pub fn poll(&mut self, now: Timestamp, queued: usize) -> Option<Action> {
        self.occupied = queued > 0;
        if self.stage == Stage::Cold {
            return self.prewarm(now);
        }
        if let Stage::Failed { retry_at } = self.stage {
            let due = self.restarts && now >= retry_at;
            return due.then(|| {
                self.restarts = false;
                self.stage = Stage::Loading;
                Action::StartLoad
            });
        }
        if !self.is_idle() {
            return None;
        }
        let due = |at: Option<Timestamp>| at.is_some_and(|at| now >= at);
        if self.retiring || due(self.close_at()) {
            Some(self.close(now))
        } else if due(self.park_at()) {
            Some(self.park())
        } else {
            None
        }
    }

    /// Sends an idle model down because its memory is needed elsewhere; `None` when it is in use
    /// or holds no more than asked.
    pub fn evict(&mut self, now: Timestamp, queued: usize, how: How) -> Option<Action> {
        self.occupied = queued > 0;
        if !self.is_idle() {
            return None;
        }
        match (how, self.stage) {
            (How::Close, _) => Some(self.close(now)),
            (How::Park, Stage::Warm) => Some(self.park()),
            (How::Park, _) => None,
        }
    }

    /// Parking has ended, whether or not somebody came meanwhile; to be followed by `poll`.
    pub fn parked(&mut self) {
        debug_assert!(self.parking, "parking ended that nobody started");
        self.parking = false;
        self.dropped = self.stage == Stage::Parked;
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
            Stage::Warm | Stage::Parked => self.poll(now, queued),
            Stage::Loading | Stage::Closing | Stage::Retired => None,
        }
    }

    /// When `poll` next matters, if no event comes before.
    pub fn wake_at(&self) -> Option<Timestamp> {
        if self.stage == Stage::Cold {
            return self.prewarm_at();
        }
        if let Stage::Failed { retry_at } = self.stage {
            return self.restarts.then_some(retry_at);
        }
        // What runs, waits or parks produces an event of its own; a timer in the past would only
        // spin.
        if !self.is_idle() {
            return None;
        }
        if self.retiring {
            return Some(self.last_activity);
        }
        [self.park_at(), self.close_at()]
            .into_iter()
            .flatten()
            .min()
    }

    fn used(&mut self, now: Timestamp) {
        self.last_use = now;
        self.last_activity = now;
    }

    fn park_at(&self) -> Option<Timestamp> {
        match self.stage {
            Stage::Warm => Some(self.last_activity + self.policy.plan.park_after?),
            _ => None,
        }
    }

    fn close_at(&self) -> Option<Timestamp> {
        let plan = &self.policy.plan;
        let after = match (self.anticipation, plan.prewarm) {
            (Anticipation::Holding, Some(prewarm)) => Some(prewarm.hold),
            _ => plan.close_after,
        };
        Some(self.last_activity + after?)
    }

    fn prewarm_at(&self) -> Option<Timestamp> {
        if self.retiring || self.anticipation != Anticipation::Armed {
            return None;
        }
        Some(self.last_use + self.policy.plan.prewarm?.at)
    }

    fn prewarm(&mut self, now: Timestamp) -> Option<Action> {
        if self.prewarm_at().is_none_or(|at| now < at) {
            return None;
        }
        self.stage = Stage::Loading;
        self.anticipation = Anticipation::Holding;
        self.prewarms.started = self.prewarms.started.saturating_add(1);
        Some(Action::StartLoad)
    }

    fn park(&mut self) -> Action {
        self.stage = Stage::Parked;
        self.parking = true;
        Action::Park
    }

    fn close(&mut self, now: Timestamp) -> Action {
        // A model that is closed after the time for its pre-warming would come straight back.
        if self.prewarm_at().is_some_and(|at| now >= at) {
            self.anticipation = Anticipation::Idle;
        }
        self.give_up_expectation();
        self.stage = Stage::Closing;
        self.wanted = false;
        Action::CloseSession
    }

    /// Nobody came: the same expectation is not acted on a second time.
    fn give_up_expectation(&mut self) {
        if self.anticipation == Anticipation::Holding {
            self.anticipation = Anticipation::Idle;
            self.prewarms.wasted = self.prewarms.wasted.saturating_add(1);
        }
    }
}

#[cfg(test)]
mod tests;

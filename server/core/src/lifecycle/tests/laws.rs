//! Random events against a driver that knows the truth.

use proptest::prelude::*;

use super::*;

/// What the driver knows: the truth the lifecycle's answers are held against.
struct World {
    lifecycle: Lifecycle,
    now: Timestamp,
    loading: bool,
    session: bool,
    closing: bool,
    parking: bool,
    parked: bool,
    /// A load that nobody asked for is under way or has ended.
    ahead: bool,
    wanted: bool,
    queued: usize,
    running: usize,
    retired: bool,
    last_activity: Timestamp,
    plan: IdlePlan,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Demand { request: bool },
    LoadEnds { well: bool },
    TakeBatch,
    Finish,
    Cancel,
    Closed,
    Poll,
    Parked,
    Evict(How),
    Abandon,
    Retire,
    Pass(u64),
}

impl World {
    fn new(plan: IdlePlan) -> Self {
        Self {
            lifecycle: Lifecycle::new(LifecyclePolicy { plan, ..policy() }),
            now: at(1),
            loading: false,
            session: false,
            closing: false,
            parking: false,
            parked: false,
            ahead: false,
            wanted: false,
            queued: 0,
            running: 0,
            retired: false,
            last_activity: Timestamp::ZERO,
            plan,
        }
    }

    fn step(&mut self, step: Step) {
        let now = self.now;
        match step {
            Step::Demand { request } => self.demand(request),
            Step::LoadEnds { well } if self.loading => {
                self.loading = false;
                if well {
                    self.session = true;
                    self.last_activity = now;
                    let action = self.lifecycle.loaded(now);
                    assert!(action.is_none() || self.retired);
                    self.perform(action);
                } else {
                    let retry_at = self.lifecycle.load_failed(now);
                    assert!(retry_at > now && retry_at <= now + policy().retry_backoff_max);
                    self.queued = 0;
                    self.ahead = false;
                }
            }
            Step::TakeBatch if self.can_run() && self.queued > 0 => {
                self.queued -= 1;
                self.running += 1;
                self.last_activity = now;
                self.lifecycle.run_started(now);
            }
            Step::Finish if self.running > 0 => {
                self.running -= 1;
                self.last_activity = now;
                self.lifecycle.run_finished(now);
            }
            Step::Cancel => self.queued = self.queued.saturating_sub(1),
            Step::Closed if self.closing => {
                self.closing = false;
                self.session = false;
                let expects_load = self.queued > 0 || (self.wanted && !self.retired);
                self.wanted = false;
                let action = self.lifecycle.closed(now, self.queued);
                assert_eq!(action == Some(Action::StartLoad), expects_load);
                self.perform(action);
            }
            Step::Poll => {
                let action = self.lifecycle.poll(now, self.queued);
                let since = |after: Option<Duration>| {
                    after.is_some_and(|after| now >= self.last_activity + after)
                };
                let close_after = match (self.ahead, self.plan.prewarm) {
                    (true, Some(prewarm)) => Some(prewarm.hold),
                    _ => self.plan.close_after,
                };
                let close = since(close_after) || self.retired;
                let park = since(self.plan.park_after) && !self.parked;
                match action {
                    Some(Action::CloseSession) => assert!(self.is_free() && close),
                    Some(Action::Park) => assert!(self.is_free() && park && !close),
                    Some(Action::StartLoad) => {
                        assert!(self.plan.prewarm.is_some() && !self.retired);
                        assert!(!self.ahead);
                        self.ahead = true;
                    }
                    None => assert!(!self.is_free() || !(park || close)),
                }
                self.perform(action);
            }
            Step::Parked if self.parking => {
                self.parking = false;
                self.lifecycle.parked();
            }
            Step::Evict(how) => {
                let action = self.lifecycle.evict(now, self.queued, how);
                let deeper = how == How::Close || !self.parked;
                assert_eq!(action.is_some(), self.is_free() && deeper);
                self.perform(action);
            }
            Step::Abandon if self.loading && self.ahead => {
                self.loading = false;
                self.ahead = false;
                let action = self.lifecycle.load_abandoned(self.queued);
                assert_eq!(action, None);
            }
            Step::Retire => {
                self.retired = true;
                let action = self.lifecycle.retire(now, self.queued);
                self.perform(action);
            }
            Step::Pass(millis) => self.now = now + Duration::from_millis(millis),
            _ => {}
        }
        self.check();
    }

    fn demand(&mut self, request: bool) {
        let answer = self.lifecycle.demand(self.now);
        assert_eq!(answer == Demand::Retired, self.retired);
        match answer {
            Demand::Run => {
                assert!(self.can_run());
                self.parked = false;
            }
            Demand::Wait => {
                assert!(self.loading || self.closing);
                self.wanted |= self.closing;
            }
            Demand::StartLoad => self.perform(Some(Action::StartLoad)),
            Demand::Refuse { retry_at } => {
                assert!(self.now < retry_at);
                return;
            }
            Demand::Retired => return,
        }
        self.ahead = false;
        self.last_activity = self.now;
        self.queued += usize::from(request);
    }

    fn perform(&mut self, action: Option<Action>) {
        match action {
            Some(Action::StartLoad) => {
                assert!(!self.loading && !self.session && !self.closing);
                self.loading = true;
            }
            Some(Action::CloseSession) => {
                assert!(self.session && !self.closing);
                assert_eq!((self.running, self.queued), (0, 0));
                assert!(!self.parking, "parking needs the session");
                self.closing = true;
                self.parked = false;
                self.ahead = false;
            }
            Some(Action::Park) => {
                assert!(self.can_run() && !self.parking);
                assert_eq!((self.running, self.queued), (0, 0));
                self.parking = true;
                self.parked = true;
            }
            None => {}
        }
    }

    fn can_run(&self) -> bool {
        self.session && !self.closing
    }

    fn is_free(&self) -> bool {
        self.can_run() && self.queued == 0 && self.running == 0 && !self.parking
    }

    fn check(&self) {
        let stage = self.lifecycle.stage();
        assert_eq!(stage == Stage::Loading, self.loading);
        assert_eq!(stage == Stage::Closing, self.closing);
        assert_eq!(stage == Stage::Warm, self.can_run() && !self.parked);
        assert_eq!(stage == Stage::Parked, self.can_run() && self.parked);
        assert_eq!(self.lifecycle.is_anticipating(), self.ahead);
        assert_eq!(self.lifecycle.is_retiring(), self.retired);
    }

    /// Everything under way ends, and the driver sleeps until it is woken.
    fn settle(&mut self) {
        for _ in 0..100 {
            self.step(Step::LoadEnds { well: true });
            while self.can_run() && self.queued > 0 {
                self.step(Step::TakeBatch);
            }
            while self.running > 0 {
                self.step(Step::Finish);
            }
            self.step(Step::Poll);
            self.step(Step::Parked);
            self.step(Step::Poll);
            self.step(Step::Closed);
            if let Some(at) = self.lifecycle.wake_at() {
                self.now = self.now.max(at);
            }
        }
    }
}

fn plans() -> impl Strategy<Value = IdlePlan> {
    let times = || prop_oneof![Just(None), Just(Some(0)), Just(Some(60)), Just(Some(100))];
    let prewarm = prop_oneof![Just(None), Just(Some((30, 40))), Just(Some((120, 80)))];
    (times(), times(), prewarm).prop_map(|(park, close, prewarm)| IdlePlan {
        park_after: park.map(millis),
        close_after: close.map(millis),
        prewarm: prewarm.map(|(at, hold)| Prewarm {
            at: millis(at),
            hold: millis(hold),
        }),
    })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => any::<bool>().prop_map(|request| Step::Demand { request }),
        3 => any::<bool>().prop_map(|well| Step::LoadEnds { well }),
        3 => Just(Step::TakeBatch),
        3 => Just(Step::Finish),
        1 => Just(Step::Cancel),
        2 => Just(Step::Closed),
        2 => Just(Step::Parked),
        1 => Just(Step::Abandon),
        1 => prop_oneof![Just(How::Park), Just(How::Close)].prop_map(Step::Evict),
        4 => Just(Step::Poll),
        1 => prop::bool::weighted(0.2).prop_map(|retire| match retire {
            true => Step::Retire,
            false => Step::Poll,
        }),
        4 => (0u64..150).prop_map(Step::Pass),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    #[test]
    fn no_sequence_of_events_breaks_a_law_or_strands_the_model(
        plan in plans(),
        steps in steps(),
        retire in any::<bool>(),
    ) {
        let mut world = World::new(plan);
        for step in steps {
            world.step(step);
        }
        if retire {
            world.step(Step::Retire);
        }
        world.settle();
        assert_eq!((world.queued, world.running), (0, 0));
        match world.lifecycle.stage() {
            Stage::Retired => assert!(world.retired),
            Stage::Cold | Stage::Failed { .. } => assert!(!world.retired),
            Stage::Warm => assert!(!world.retired && plan == IdlePlan {
                prewarm: plan.prewarm,
                ..IdlePlan::default()
            }),
            Stage::Parked => assert!(!world.retired && plan.close_after.is_none()),
            stage => panic!("left {stage:?}"),
        }
    }
}

use std::fmt::Write;

use expect_test::{Expect, expect};
use proptest::prelude::*;

use super::*;

fn at(millis: u64) -> Timestamp {
    Timestamp::from_nanos(millis * 1_000_000)
}

fn policy() -> LifecyclePolicy {
    LifecyclePolicy {
        keep_alive: Some(Duration::from_millis(100)),
        retry_backoff: Duration::from_millis(10),
        retry_backoff_max: Duration::from_millis(50),
    }
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Demand,
    Loaded,
    Failed,
    Start,
    Finish,
    Poll(usize),
    Closed(usize),
    Retire(usize),
}

/// Runs a timeline of `(milliseconds, event)` and shows each answer and the stage after it.
fn check(timeline: &[(u64, Event)], expected: Expect) {
    let mut lifecycle = Lifecycle::new(policy());
    let mut shown = String::new();
    for &(millis, event) in timeline {
        let now = at(millis);
        let action = |action: Option<Action>| action.map_or("-".into(), |it| format!("{it:?}"));
        let answer = match event {
            Event::Demand => match lifecycle.demand(now) {
                Demand::Refuse { retry_at } => format!("Refuse until {}", show(retry_at)),
                demand => format!("{demand:?}"),
            },
            Event::Loaded => action(lifecycle.loaded(now)),
            Event::Failed => format!("retry at {}", show(lifecycle.load_failed(now))),
            Event::Start => {
                lifecycle.run_started(now);
                "-".into()
            }
            Event::Finish => {
                lifecycle.run_finished(now);
                "-".into()
            }
            Event::Poll(queued) => action(lifecycle.poll(now, queued)),
            Event::Closed(queued) => action(lifecycle.closed(now, queued)),
            Event::Retire(queued) => action(lifecycle.retire(now, queued)),
        };
        let stage = match lifecycle.stage() {
            Stage::Failed { .. } => "Failed".into(),
            stage => format!("{stage:?}"),
        };
        let wake = lifecycle
            .wake_at()
            .map_or(String::new(), |at| format!(", wakes at {}", show(at)));
        writeln!(shown, "{millis} {event:?}: {answer} → {stage}{wake}").unwrap();
    }
    expected.assert_eq(&shown);
}

fn show(at: Timestamp) -> u64 {
    at.as_nanos() / 1_000_000
}

#[test]
fn idle_model_is_closed_after_its_keep_alive() {
    use Event::*;
    check(
        &[
            (0, Demand),
            (1, Demand),
            (20, Loaded),
            (20, Start),
            (30, Poll(0)),
            (40, Finish),
            (139, Poll(0)),
            (140, Poll(0)),
            (150, Closed(0)),
        ],
        expect![[r#"
            0 Demand: StartLoad → Loading
            1 Demand: Wait → Loading
            20 Loaded: - → Warm, wakes at 120
            20 Start: - → Warm
            30 Poll(0): - → Warm
            40 Finish: - → Warm, wakes at 140
            139 Poll(0): - → Warm, wakes at 140
            140 Poll(0): CloseSession → Closing
            150 Closed(0): - → Cold
        "#]],
    );
}

#[test]
fn keep_alive_counts_from_the_last_demand_and_spares_a_queue() {
    use Event::*;
    check(
        &[
            (0, Demand),
            (10, Loaded),
            (50, Demand),
            (110, Poll(0)),
            (150, Poll(1)),
            (160, Poll(0)),
        ],
        expect![[r#"
            0 Demand: StartLoad → Loading
            10 Loaded: - → Warm, wakes at 110
            50 Demand: Run → Warm, wakes at 150
            110 Poll(0): - → Warm, wakes at 150
            150 Poll(1): - → Warm
            160 Poll(0): CloseSession → Closing
        "#]],
    );
}

#[test]
fn demand_turns_a_closing_model_around() {
    use Event::*;
    check(
        &[
            (0, Demand),
            (10, Loaded),
            (110, Poll(0)),
            (111, Demand),
            (120, Closed(1)),
            (130, Loaded),
        ],
        expect![[r#"
            0 Demand: StartLoad → Loading
            10 Loaded: - → Warm, wakes at 110
            110 Poll(0): CloseSession → Closing
            111 Demand: Wait → Closing
            120 Closed(1): StartLoad → Loading
            130 Loaded: - → Warm
        "#]],
    );
}

#[test]
fn failed_loads_are_retried_ever_more_slowly_until_one_succeeds() {
    use Event::*;
    check(
        &[
            (0, Demand),
            (1, Failed),
            (5, Demand),
            (11, Demand),
            (12, Failed),
            (32, Demand),
            (33, Failed),
            (73, Demand),
            (74, Failed),
            (124, Demand),
            (130, Loaded),
            (230, Poll(0)),
            (231, Closed(0)),
            (240, Demand),
            (241, Failed),
        ],
        expect![[r#"
            0 Demand: StartLoad → Loading
            1 Failed: retry at 11 → Failed
            5 Demand: Refuse until 11 → Failed
            11 Demand: StartLoad → Loading
            12 Failed: retry at 32 → Failed
            32 Demand: StartLoad → Loading
            33 Failed: retry at 73 → Failed
            73 Demand: StartLoad → Loading
            74 Failed: retry at 124 → Failed
            124 Demand: StartLoad → Loading
            130 Loaded: - → Warm, wakes at 230
            230 Poll(0): CloseSession → Closing
            231 Closed(0): - → Cold
            240 Demand: StartLoad → Loading
            241 Failed: retry at 251 → Failed
        "#]],
    );
}

#[test]
fn retired_model_finishes_what_is_queued_and_running() {
    use Event::*;
    check(
        &[
            (0, Demand),
            (10, Loaded),
            (11, Start),
            (12, Retire(1)),
            (13, Demand),
            (20, Finish),
            (20, Poll(1)),
            (21, Start),
            (21, Poll(0)),
            (30, Finish),
            (30, Poll(0)),
            (31, Closed(0)),
        ],
        expect![[r#"
            0 Demand: StartLoad → Loading
            10 Loaded: - → Warm, wakes at 110
            11 Start: - → Warm
            12 Retire(1): - → Warm
            13 Demand: Retired → Warm
            20 Finish: - → Warm, wakes at 20
            20 Poll(1): - → Warm
            21 Start: - → Warm
            21 Poll(0): - → Warm
            30 Finish: - → Warm, wakes at 30
            30 Poll(0): CloseSession → Closing
            31 Closed(0): - → Retired
        "#]],
    );
}

#[test]
fn load_under_way_is_closed_when_the_model_was_retired_and_nobody_waits() {
    use Event::*;
    check(
        &[(0, Demand), (1, Retire(0)), (10, Loaded), (11, Closed(0))],
        expect![[r#"
            0 Demand: StartLoad → Loading
            1 Retire(0): - → Loading
            10 Loaded: CloseSession → Closing
            11 Closed(0): - → Retired
        "#]],
    );
    check(
        &[(0, Demand), (1, Retire(1)), (10, Failed)],
        expect![[r#"
            0 Demand: StartLoad → Loading
            1 Retire(1): - → Loading
            10 Failed: retry at 20 → Retired
        "#]],
    );
}

#[test]
fn request_that_met_a_closing_model_is_answered_even_when_it_is_retired() {
    use Event::*;
    check(
        &[
            (0, Demand),
            (10, Loaded),
            (110, Poll(0)),
            (111, Demand),
            (112, Retire(1)),
            (120, Closed(1)),
            (130, Loaded),
            (130, Start),
            (140, Finish),
            (140, Poll(0)),
            (141, Closed(0)),
        ],
        expect![[r#"
            0 Demand: StartLoad → Loading
            10 Loaded: - → Warm, wakes at 110
            110 Poll(0): CloseSession → Closing
            111 Demand: Wait → Closing
            112 Retire(1): - → Closing
            120 Closed(1): StartLoad → Loading
            130 Loaded: - → Warm
            130 Start: - → Warm
            140 Finish: - → Warm, wakes at 140
            140 Poll(0): CloseSession → Closing
            141 Closed(0): - → Retired
        "#]],
    );
}

#[test]
fn back_off_survives_extreme_policies() {
    let mut lifecycle = Lifecycle::new(LifecyclePolicy {
        keep_alive: None,
        retry_backoff: Duration::MAX,
        retry_backoff_max: Duration::MAX,
    });
    for _ in 0..40 {
        assert_eq!(
            lifecycle.demand(Timestamp::from_nanos(u64::MAX)),
            Demand::StartLoad
        );
        lifecycle.load_failed(Timestamp::ZERO);
        lifecycle.policy.retry_backoff = Duration::ZERO;
    }
}

/// What the driver knows: the truth the lifecycle's answers are held against.
struct World {
    lifecycle: Lifecycle,
    now: Timestamp,
    loading: bool,
    session: bool,
    closing: bool,
    wanted: bool,
    queued: usize,
    running: usize,
    retired: bool,
    last_activity: Timestamp,
    keep_alive: Option<Duration>,
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
    Retire,
    Pass(u64),
}

impl World {
    fn new(keep_alive: Option<u64>) -> Self {
        let keep_alive = keep_alive.map(Duration::from_millis);
        Self {
            lifecycle: Lifecycle::new(LifecyclePolicy {
                keep_alive,
                ..policy()
            }),
            now: at(1),
            loading: false,
            session: false,
            closing: false,
            wanted: false,
            queued: 0,
            running: 0,
            retired: false,
            last_activity: Timestamp::ZERO,
            keep_alive,
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
                let idle = self
                    .keep_alive
                    .is_some_and(|keep| now >= self.last_activity + keep);
                let free = self.can_run() && self.queued == 0 && self.running == 0;
                assert_eq!(action.is_some(), free && (idle || self.retired));
                self.perform(action);
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
            Demand::Run => assert!(self.can_run()),
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
                self.closing = true;
            }
            None => {}
        }
    }

    fn can_run(&self) -> bool {
        self.session && !self.closing
    }

    fn check(&self) {
        let stage = self.lifecycle.stage();
        assert_eq!(stage == Stage::Loading, self.loading);
        assert_eq!(stage == Stage::Closing, self.closing);
        assert_eq!(stage == Stage::Warm, self.can_run());
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
            self.step(Step::Closed);
            if let Some(at) = self.lifecycle.wake_at() {
                self.now = self.now.max(at);
            }
        }
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => any::<bool>().prop_map(|request| Step::Demand { request }),
        3 => any::<bool>().prop_map(|well| Step::LoadEnds { well }),
        3 => Just(Step::TakeBatch),
        3 => Just(Step::Finish),
        1 => Just(Step::Cancel),
        2 => Just(Step::Closed),
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
        keep_alive in prop_oneof![Just(None), Just(Some(0)), Just(Some(100))],
        steps in steps(),
        retire in any::<bool>(),
    ) {
        let mut world = World::new(keep_alive);
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
            Stage::Warm => assert!(!world.retired && keep_alive.is_none()),
            stage => panic!("left {stage:?}"),
        }
    }
}

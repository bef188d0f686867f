mod laws;
mod loss;
mod race;

use std::fmt::Write;

use expect_test::{Expect, expect};

use super::*;

fn at(millis: u64) -> Timestamp {
    Timestamp::from_nanos(millis * 1_000_000)
}

fn policy() -> LifecyclePolicy {
    LifecyclePolicy {
        plan: IdlePlan::close_after(Some(Duration::from_millis(100))),
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
    Parked,
    Evict(How),
    Abandon,
    Plan(IdlePlan),
}

fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// Parks after 20 ms, closes after 50, comes back after 200 for 70.
const STAGED: IdlePlan = IdlePlan {
    park_after: Some(Duration::from_millis(20)),
    close_after: Some(Duration::from_millis(50)),
    prewarm: Some(Prewarm {
        at: Duration::from_millis(200),
        hold: Duration::from_millis(70),
    }),
};

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
            Event::Parked => {
                lifecycle.parked();
                "-".into()
            }
            Event::Evict(how) => action(lifecycle.evict(now, 0, how)),
            Event::Abandon => action(lifecycle.load_abandoned(0)),
            Event::Plan(plan) => {
                lifecycle.set_plan(plan);
                "-".into()
            }
        };
        let stage = match lifecycle.stage() {
            Stage::Failed { .. } => "Failed".into(),
            stage => format!("{stage:?}"),
        };
        let wake = lifecycle
            .wake_at()
            .map_or(String::new(), |at| format!(", wakes at {}", show(at)));
        let event = match event {
            Event::Plan(_) => "Plan".into(),
            event => format!("{event:?}"),
        };
        writeln!(shown, "{millis} {event}: {answer} → {stage}{wake}").unwrap();
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
        plan: IdlePlan::default(),
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

#[test]
fn idle_model_parks_then_closes_and_a_call_turns_it_around() {
    use Event::*;
    check(
        &[
            (0, Plan(STAGED)),
            (0, Demand),
            (10, Loaded),
            (30, Poll(0)),
            (31, Parked),
            (40, Demand),
            (60, Poll(0)),
            (61, Demand),
            (62, Start),
            (63, Parked),
            (64, Finish),
            (84, Poll(0)),
            (85, Poll(0)),
            (86, Parked),
            (113, Poll(0)),
            (114, Poll(0)),
            (115, Closed(0)),
        ],
        expect![[r#"
            0 Plan: - → Cold
            0 Demand: StartLoad → Loading
            10 Loaded: - → Warm, wakes at 30
            30 Poll(0): Park → Parked
            31 Parked: - → Parked, wakes at 60
            40 Demand: Run → Warm, wakes at 60
            60 Poll(0): Park → Parked
            61 Demand: Run → Warm
            62 Start: - → Warm
            63 Parked: - → Warm
            64 Finish: - → Warm, wakes at 84
            84 Poll(0): Park → Parked
            85 Poll(0): - → Parked
            86 Parked: - → Parked, wakes at 114
            113 Poll(0): - → Parked, wakes at 114
            114 Poll(0): CloseSession → Closing
            115 Closed(0): - → Cold, wakes at 264
        "#]],
    );
}

#[test]
fn closed_model_is_loaded_ahead_of_the_expected_call() {
    use Event::*;
    check(
        &[
            (0, Plan(STAGED)),
            (0, Demand),
            (10, Loaded),
            (60, Poll(0)),
            (61, Closed(0)),
            (199, Poll(0)),
            (200, Poll(0)),
            (210, Loaded),
            (230, Poll(0)),
            (230, Parked),
            (240, Demand),
        ],
        expect![[r#"
            0 Plan: - → Cold
            0 Demand: StartLoad → Loading
            10 Loaded: - → Warm, wakes at 30
            60 Poll(0): CloseSession → Closing
            61 Closed(0): - → Cold, wakes at 200
            199 Poll(0): - → Cold, wakes at 200
            200 Poll(0): StartLoad → Loading
            210 Loaded: - → Warm, wakes at 230
            230 Poll(0): Park → Parked
            230 Parked: - → Parked, wakes at 280
            240 Demand: Run → Warm, wakes at 260
        "#]],
    );
}

#[test]
fn model_loaded_ahead_in_vain_goes_back_and_waits_for_a_call() {
    use Event::*;
    check(
        &[
            (0, Plan(STAGED)),
            (0, Demand),
            (10, Loaded),
            (60, Poll(0)),
            (61, Closed(0)),
            (200, Poll(0)),
            (210, Loaded),
            (279, Poll(0)),
            (279, Parked),
            (280, Poll(0)),
            (281, Closed(0)),
            (9000, Poll(0)),
            (9000, Demand),
        ],
        expect![[r#"
            0 Plan: - → Cold
            0 Demand: StartLoad → Loading
            10 Loaded: - → Warm, wakes at 30
            60 Poll(0): CloseSession → Closing
            61 Closed(0): - → Cold, wakes at 200
            200 Poll(0): StartLoad → Loading
            210 Loaded: - → Warm, wakes at 230
            279 Poll(0): Park → Parked
            279 Parked: - → Parked, wakes at 280
            280 Poll(0): CloseSession → Closing
            281 Closed(0): - → Cold
            9000 Poll(0): - → Cold
            9000 Demand: StartLoad → Loading
        "#]],
    );
}

#[test]
fn load_ahead_that_finds_no_memory_is_dropped_unless_somebody_came() {
    use Event::*;
    check(
        &[
            (0, Plan(STAGED)),
            (0, Demand),
            (10, Loaded),
            (60, Poll(0)),
            (61, Closed(0)),
            (200, Poll(0)),
            (201, Abandon),
            (300, Demand),
            (310, Loaded),
            (360, Poll(0)),
            (361, Closed(0)),
            (500, Poll(0)),
            (501, Demand),
            (502, Abandon),
            (503, Loaded),
        ],
        expect![[r#"
            0 Plan: - → Cold
            0 Demand: StartLoad → Loading
            10 Loaded: - → Warm, wakes at 30
            60 Poll(0): CloseSession → Closing
            61 Closed(0): - → Cold, wakes at 200
            200 Poll(0): StartLoad → Loading
            201 Abandon: - → Cold
            300 Demand: StartLoad → Loading
            310 Loaded: - → Warm, wakes at 330
            360 Poll(0): CloseSession → Closing
            361 Closed(0): - → Cold, wakes at 500
            500 Poll(0): StartLoad → Loading
            501 Demand: Wait → Loading
            502 Abandon: StartLoad → Loading
            503 Loaded: - → Warm, wakes at 523
        "#]],
    );
}

#[test]
fn pressure_takes_only_what_is_idle() {
    use Event::*;
    check(
        &[
            (0, Evict(How::Close)),
            (0, Demand),
            (1, Evict(How::Close)),
            (10, Loaded),
            (11, Start),
            (12, Evict(How::Park)),
            (13, Finish),
            (14, Evict(How::Park)),
            (15, Evict(How::Close)),
            (16, Parked),
            (17, Evict(How::Park)),
            (18, Evict(How::Close)),
            (19, Demand),
            (20, Closed(0)),
        ],
        expect![[r#"
            0 Evict(Close): - → Cold
            0 Demand: StartLoad → Loading
            1 Evict(Close): - → Loading
            10 Loaded: - → Warm, wakes at 110
            11 Start: - → Warm
            12 Evict(Park): - → Warm
            13 Finish: - → Warm, wakes at 113
            14 Evict(Park): Park → Parked
            15 Evict(Close): - → Parked
            16 Parked: - → Parked, wakes at 113
            17 Evict(Park): - → Parked, wakes at 113
            18 Evict(Close): CloseSession → Closing
            19 Demand: Wait → Closing
            20 Closed(0): StartLoad → Loading
        "#]],
    );
}

fn parking(park_after: u64, close_after: u64) -> Lifecycle {
    Lifecycle::new(LifecyclePolicy {
        plan: IdlePlan {
            park_after: Some(millis(park_after)),
            close_after: Some(millis(close_after)),
            prewarm: None,
        },
        ..policy()
    })
}

#[test]
fn what_parking_dropped_stays_dropped_until_somebody_calls() {
    let mut life = parking(10, 60);
    assert_eq!(life.demand(at(0)), Demand::StartLoad);
    life.loaded(at(0));
    assert_eq!(life.poll(at(10), 0), Some(Action::Park));
    assert!(!life.has_dropped(), "it is still being dropped");
    life.parked();
    assert!(life.has_dropped());
    assert_eq!(life.demand(at(20)), Demand::Run);
    assert!(!life.has_dropped());
    assert_eq!(life.poll(at(30), 0), Some(Action::Park));
    // Called before the end: its runs bring back what goes.
    assert_eq!(life.demand(at(30)), Demand::Run);
    life.parked();
    assert!(!life.has_dropped());
    assert_eq!(life.poll(at(40), 0), Some(Action::Park));
    life.parked();
    assert_eq!(life.poll(at(90), 0), Some(Action::CloseSession));
    assert!(life.has_dropped(), "what leaves is what was parked");
    assert_eq!(life.closed(at(90), 1), Some(Action::StartLoad));
    life.loaded(at(91));
    assert!(!life.has_dropped());
}

#[test]
fn outdated_load_leaves_a_cold_model_without_a_pause() {
    let mut life = parking(10, 60);
    assert_eq!(life.demand(at(0)), Demand::StartLoad);
    life.load_outdated();
    assert_eq!(life.stage(), Stage::Cold);
    assert_eq!(life.demand(at(0)), Demand::StartLoad);
    assert_eq!(life.retire(at(0), 0), None);
    life.load_outdated();
    assert_eq!(life.stage(), Stage::Retired);
}

#[test]
fn parked_model_retires_like_a_warm_one() {
    use Event::*;
    check(
        &[
            (0, Plan(STAGED)),
            (0, Demand),
            (10, Loaded),
            (30, Poll(0)),
            (31, Retire(0)),
            (32, Parked),
            (32, Poll(0)),
            (33, Closed(0)),
            (500, Poll(0)),
        ],
        expect![[r#"
            0 Plan: - → Cold
            0 Demand: StartLoad → Loading
            10 Loaded: - → Warm, wakes at 30
            30 Poll(0): Park → Parked
            31 Retire(0): - → Parked
            32 Parked: - → Parked, wakes at 10
            32 Poll(0): CloseSession → Closing
            33 Closed(0): - → Retired
            500 Poll(0): - → Retired
        "#]],
    );
}

#[test]
fn pressure_after_the_expected_call_was_due_does_not_bring_the_model_straight_back() {
    let mut lifecycle = Lifecycle::new(LifecyclePolicy {
        plan: IdlePlan {
            close_after: None,
            ..STAGED
        },
        ..policy()
    });
    lifecycle.demand(at(0));
    lifecycle.loaded(at(10));
    assert_eq!(
        lifecycle.evict(at(300), 0, How::Close),
        Some(Action::CloseSession)
    );
    lifecycle.closed(at(301), 0);
    assert_eq!(lifecycle.wake_at(), None);
    assert_eq!(lifecycle.poll(at(302), 0), None);
}

#[test]
fn loads_ahead_of_calls_are_counted_with_those_in_vain() {
    let mut lifecycle = Lifecycle::new(LifecyclePolicy {
        plan: STAGED,
        ..policy()
    });
    for round in 0..4 {
        let start = round * 10_000;
        lifecycle.demand(at(start));
        if lifecycle.stage() == Stage::Loading {
            lifecycle.loaded(at(start));
        }
        lifecycle.poll(at(start + 50), 0);
        lifecycle.closed(at(start + 50), 0);
        lifecycle.poll(at(start + 200), 0);
        assert!(lifecycle.is_anticipating());
        lifecycle.loaded(at(start + 200));
        if round % 2 == 0 {
            lifecycle.demand(at(start + 210));
            assert!(!lifecycle.is_anticipating());
        }
        lifecycle.poll(at(start + 290), 0);
        lifecycle.closed(at(start + 290), 0);
    }
    let counted = PrewarmCount {
        started: 4,
        wasted: 2,
    };
    assert_eq!(lifecycle.prewarms(), counted);
}

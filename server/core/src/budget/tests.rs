use proptest::prelude::*;

use super::*;

const MB: u64 = 1 << 20;

fn at(seconds: u64) -> Timestamp {
    Timestamp::ZERO + Duration::from_secs(seconds)
}

fn idle(bytes: u64, parkable_bytes: u64, last_used: u64) -> Holding {
    Holding {
        bytes,
        parkable_bytes,
        resume_from_parked: Duration::from_millis(5),
        resume_from_cold: Duration::from_millis(150),
        state: HoldingState::Idle,
        last_used: at(last_used),
    }
}

fn busy(bytes: u64) -> Holding {
    Holding {
        state: HoldingState::Busy,
        ..idle(bytes, 0, 0)
    }
}

fn budget(holdings: &[(&'static str, Holding)]) -> MemoryBudget<&'static str> {
    let mut budget = MemoryBudget::new(1000 * MB);
    for &(key, holding) in holdings {
        budget.update(key, holding);
    }
    budget
}

#[test]
fn what_is_free_is_granted_and_held() {
    let mut budget = budget(&[]);
    assert_eq!(budget.reserve(&"a", 600 * MB, at(0)), Reservation::Granted);
    assert_eq!(budget.reserve(&"b", 400 * MB, at(0)), Reservation::Granted);
    assert_eq!(budget.held(), 1000 * MB);
    assert_eq!(budget.reserve(&"c", MB, at(0)), Reservation::Wait);
    budget.release(&"a");
    assert!(budget.has_free(600 * MB) && !budget.has_free(601 * MB));
    assert_eq!(budget.reserve(&"c", MB, at(0)), Reservation::Granted);
}

#[test]
fn what_others_make_smaller_stays_asked_to_go() {
    let mut budget = budget(&[("a", idle(900 * MB, 0, 1))]);
    let answer = budget.reserve(&"b", 400 * MB, at(2));
    assert_eq!(answer, Reservation::Evict(vec![("a", How::Close)]));
    budget.resize(&"a", 700 * MB, 0);
    assert_eq!(budget.held(), 700 * MB);
    assert_eq!(budget.reserve(&"b", 400 * MB, at(2)), Reservation::Wait);
    budget.resize(&"gone", MB, MB);
    assert_eq!(budget.entries.len(), 1);
}

#[test]
fn parking_comes_before_closing_when_it_suffices() {
    let mut budget = budget(&[
        ("a", idle(500 * MB, 480 * MB, 1)),
        ("b", idle(500 * MB, 0, 0)),
    ]);
    let answer = budget.reserve(&"c", 400 * MB, at(2));
    assert_eq!(answer, Reservation::Evict(vec![("a", How::Park)]));
}

#[test]
fn closing_follows_when_parking_does_not_suffice() {
    let mut budget = budget(&[
        ("a", idle(500 * MB, 480 * MB, 1)),
        ("b", idle(500 * MB, 480 * MB, 0)),
    ]);
    let answer = budget.reserve(&"c", 970 * MB, at(2));
    let plan = vec![("b", How::Close), ("a", How::Park)];
    assert_eq!(answer, Reservation::Evict(plan));
}

#[test]
fn most_bytes_per_millisecond_go_first_and_then_the_least_recently_used() {
    let dear = Holding {
        resume_from_cold: Duration::from_secs(2),
        ..idle(400 * MB, 0, 0)
    };
    let mut first = budget(&[
        ("dear", dear),
        ("recent", idle(300 * MB, 0, 9)),
        ("old", idle(300 * MB, 0, 3)),
    ]);
    let answer = first.reserve(&"new", 200 * MB, at(10));
    assert_eq!(answer, Reservation::Evict(vec![("old", How::Close)]));
    first.release(&"old");
    assert_eq!(
        first.reserve(&"new", 200 * MB, at(10)),
        Reservation::Granted
    );
    let answer = first.reserve(&"newer", 700 * MB, at(10));
    let plan = vec![("recent", How::Close), ("dear", How::Close)];
    assert_eq!(answer, Reservation::Evict(plan));
}

#[test]
fn eviction_that_a_later_one_makes_needless_is_left_out() {
    let small_and_cheap = Holding {
        resume_from_cold: Duration::from_millis(1),
        ..idle(100 * MB, 0, 0)
    };
    let mut budget = budget(&[("small", small_and_cheap), ("large", idle(900 * MB, 0, 0))]);
    let answer = budget.reserve(&"new", 850 * MB, at(10));
    assert_eq!(answer, Reservation::Evict(vec![("large", How::Close)]));
}

#[test]
fn model_that_frees_more_per_millisecond_when_closed_is_not_parked_first() {
    let odd = Holding {
        resume_from_parked: Duration::from_millis(100),
        ..idle(500 * MB, 10 * MB, 0)
    };
    let mut budget = budget(&[("odd", odd), ("busy", busy(500 * MB))]);
    let answer = budget.reserve(&"new", 5 * MB, at(1));
    assert_eq!(answer, Reservation::Evict(vec![("odd", How::Close)]));
}

#[test]
fn what_runs_is_waited_for_and_what_never_fits_is_refused_with_figures() {
    let parked = Holding {
        state: HoldingState::Parked,
        ..idle(20 * MB, 0, 0)
    };
    let mut budget = budget(&[
        ("busy", busy(600 * MB)),
        ("idle", idle(300 * MB, 0, 0)),
        ("parked", parked),
    ]);
    assert_eq!(budget.reserve(&"new", 401 * MB, at(1)), Reservation::Wait);
    let usage = Usage {
        limit: 1000 * MB,
        held: 920 * MB,
        busy: 600 * MB,
        idle: 300 * MB,
        parked: 20 * MB,
        leaving: 0,
    };
    let refused = Reservation::Refused {
        needed: 1001 * MB,
        usage,
    };
    assert_eq!(budget.reserve(&"new", 1001 * MB, at(1)), refused);
    let needed = u64::MAX;
    let refused = Reservation::Refused { needed, usage };
    assert_eq!(budget.reserve(&"busy", u64::MAX, at(1)), refused);
}

#[test]
fn eviction_under_way_is_waited_for_instead_of_evicting_more() {
    let mut budget = budget(&[("a", idle(500 * MB, 0, 0)), ("b", idle(500 * MB, 0, 1))]);
    let plan = Reservation::Evict(vec![("a", How::Close)]);
    assert_eq!(budget.reserve(&"new", 500 * MB, at(2)), plan);
    assert_eq!(budget.reserve(&"new", 500 * MB, at(2)), Reservation::Wait);
    let leaving = Holding {
        state: HoldingState::Leaving,
        ..idle(500 * MB, 0, 0)
    };
    budget.update("a", leaving);
    assert_eq!(budget.reserve(&"new", 500 * MB, at(2)), Reservation::Wait);
    budget.release(&"a");
    assert_eq!(
        budget.reserve(&"new", 500 * MB, at(2)),
        Reservation::Granted
    );
}

#[test]
fn victim_that_was_called_meanwhile_is_replaced_by_another() {
    let mut budget = budget(&[("a", idle(500 * MB, 0, 0)), ("b", idle(500 * MB, 0, 1))]);
    budget.reserve(&"new", 500 * MB, at(2));
    budget.update("a", busy(500 * MB));
    let answer = budget.reserve(&"new", 500 * MB, at(2));
    assert_eq!(answer, Reservation::Evict(vec![("b", How::Close)]));
}

#[test]
fn memory_freed_for_one_is_not_taken_by_another_unless_it_gives_up() {
    let mut budget = budget(&[("a", idle(1000 * MB, 0, 0))]);
    let plan = Reservation::Evict(vec![("a", How::Close)]);
    assert_eq!(budget.reserve(&"first", 900 * MB, at(2)), plan);
    budget.release(&"a");
    assert_eq!(budget.reserve(&"thief", 200 * MB, at(2)), Reservation::Wait);
    assert!(!budget.try_reserve(&"thief", 200 * MB, at(2)));
    assert_eq!(
        budget.reserve(&"small", 100 * MB, at(2)),
        Reservation::Granted
    );
    budget.withdraw(&"first");
    assert_eq!(
        budget.reserve(&"thief", 200 * MB, at(2)),
        Reservation::Granted
    );
}

#[test]
fn load_ahead_of_a_call_disturbs_nobody() {
    let mut budget = budget(&[("a", idle(900 * MB, 800 * MB, 0))]);
    assert!(!budget.try_reserve(&"b", 200 * MB, at(1)));
    assert!(budget.try_reserve(&"b", 100 * MB, at(1)));
    assert_eq!(budget.relief(), []);
}

#[test]
fn model_that_needs_more_is_not_evicted_for_itself() {
    let mut budget = budget(&[
        ("a", idle(600 * MB, 500 * MB, 0)),
        ("b", idle(300 * MB, 0, 0)),
    ]);
    let plan = Reservation::Evict(vec![("b", How::Close)]);
    assert_eq!(budget.reserve(&"a", 400 * MB, at(1)), plan);
    budget.release(&"b");
    assert_eq!(budget.reserve(&"a", 400 * MB, at(1)), Reservation::Granted);
    assert_eq!(budget.holding(&"a").unwrap().bytes, 1000 * MB);
}

#[test]
fn models_that_grew_beyond_the_limit_are_relieved() {
    let mut budget = budget(&[
        ("a", idle(700 * MB, 690 * MB, 0)),
        ("b", idle(100 * MB, 0, 0)),
        ("c", busy(400 * MB)),
    ]);
    assert!(!budget.try_reserve(&"d", 0, at(0)));
    assert_eq!(budget.relief(), [("a", How::Park)]);
    assert_eq!(budget.relief(), []);
    budget.update("a", busy(900 * MB));
    assert_eq!(budget.relief(), [("b", How::Close)]);
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Reserve {
        key: u8,
        bytes: u64,
    },
    TryReserve {
        key: u8,
        bytes: u64,
    },
    /// Reports the state of a model that holds something.
    Settle {
        key: u8,
        state: u8,
        parkable: u64,
    },
    Release {
        key: u8,
    },
    Withdraw {
        key: u8,
    },
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let key = || 0u8..6;
    let operation = prop_oneof![
        4 => (key(), 0u64..130).prop_map(|(key, bytes)| Operation::Reserve { key, bytes }),
        1 => (key(), 0u64..60).prop_map(|(key, bytes)| Operation::TryReserve { key, bytes }),
        4 => (key(), 0u8..4, 0u64..60)
            .prop_map(|(key, state, parkable)| Operation::Settle { key, state, parkable }),
        2 => key().prop_map(|key| Operation::Release { key }),
        1 => key().prop_map(|key| Operation::Withdraw { key }),
    ];
    prop::collection::vec(operation, 0..80)
}

const LIMIT: u64 = 100;

/// Checks that a plan takes only what is idle, frees enough, and nothing needlessly.
fn check_plan(budget: &MemoryBudget<u8>, key: u8, bytes: u64, plan: &[(u8, How)]) {
    assert!(!plan.is_empty());
    let stays = budget.held() - budget.departing();
    let wanted = stays + budget.claimed_before(&key) + bytes;
    assert!(wanted <= LIMIT, "{plan:?} does not free enough");
    for (place, (victim, how)) in plan.iter().enumerate() {
        assert!(plan[..place].iter().all(|(other, _)| other != victim));
        assert_ne!(*victim, key, "a model makes room for itself");
        let holding = budget.holding(victim).unwrap();
        let frees = match (holding.state, how) {
            (HoldingState::Idle | HoldingState::Parked, How::Close) => holding.bytes,
            (HoldingState::Idle, How::Park) => holding.parkable_bytes.min(holding.bytes),
            (state, how) => panic!("{how:?} of {state:?}"),
        };
        assert!(wanted + frees > LIMIT, "{victim} goes needlessly");
    }
}

proptest! {
    #[test]
    fn grants_never_exceed_the_limit_and_plans_free_what_they_promise(operations in operations()) {
        let mut budget = MemoryBudget::new(LIMIT);
        for operation in operations {
            let before = budget.held();
            match operation {
                Operation::Reserve { key, bytes } => match budget.reserve(&key, bytes, at(0)) {
                    Reservation::Granted => prop_assert_eq!(budget.held(), before + bytes),
                    Reservation::Evict(plan) => check_plan(&budget, key, bytes, &plan),
                    Reservation::Wait => prop_assert_eq!(budget.held(), before),
                    Reservation::Refused { needed, .. } => prop_assert!(needed > LIMIT),
                },
                Operation::TryReserve { key, bytes } => {
                    let granted = budget.try_reserve(&key, bytes, at(0));
                    let expected = before + if granted { bytes } else { 0 };
                    prop_assert_eq!(budget.held(), expected);
                }
                Operation::Settle { key, state, parkable } => {
                    let Some(holding) = budget.holding(&key).copied() else { continue };
                    let state = [
                        HoldingState::Busy,
                        HoldingState::Idle,
                        HoldingState::Parked,
                        HoldingState::Leaving,
                    ][usize::from(state)];
                    let parkable_bytes = parkable.min(holding.bytes);
                    budget.update(key, Holding {
                        bytes: match state {
                            HoldingState::Parked => holding.bytes - parkable_bytes,
                            _ => holding.bytes,
                        },
                        parkable_bytes,
                        resume_from_parked: Duration::from_millis(u64::from(key)),
                        resume_from_cold: Duration::from_millis(10 * u64::from(key)),
                        state,
                        last_used: at(parkable),
                    });
                }
                Operation::Release { key } => budget.release(&key),
                Operation::Withdraw { key } => budget.withdraw(&key),
            }
            let sum: u64 = budget.entries.values().map(|entry| entry.holding.bytes).sum();
            prop_assert_eq!(budget.held(), sum);
            prop_assert!(sum <= LIMIT);
            let usage = budget.usage();
            prop_assert_eq!(usage.busy + usage.idle + usage.parked + usage.leaving, sum);
        }
    }

    #[test]
    fn a_request_that_fits_is_granted_once_everything_idle_has_gone(
        holdings in prop::collection::vec((1u64..40, 0u64..40, any::<bool>()), 0..8),
        bytes in 0u64..=LIMIT,
    ) {
        let mut budget = MemoryBudget::new(LIMIT);
        for (key, &(bytes, parkable, is_busy)) in holdings.iter().enumerate() {
            if budget.held() + bytes <= LIMIT {
                let holding = Holding {
                    state: if is_busy { HoldingState::Busy } else { HoldingState::Idle },
                    ..idle(bytes, parkable, key as u64)
                };
                budget.update(key, holding);
            }
        }
        let new = holdings.len();
        for _ in 0..=2 * holdings.len() {
            match budget.reserve(&new, bytes, at(0)) {
                Reservation::Granted => return Ok(()),
                Reservation::Evict(plan) => for (victim, how) in plan {
                    let holding = *budget.holding(&victim).unwrap();
                    match how {
                        How::Close => budget.release(&victim),
                        How::Park => budget.update(victim, Holding {
                            bytes: holding.bytes - holding.parkable_bytes.min(holding.bytes),
                            parkable_bytes: 0,
                            state: HoldingState::Parked,
                            ..holding
                        }),
                    }
                },
                Reservation::Wait => {
                    prop_assert!(budget.usage().busy + bytes > LIMIT);
                    return Ok(());
                }
                Reservation::Refused { .. } => prop_assert!(false, "refused"),
            }
        }
        prop_assert!(false, "neither granted nor told to wait");
    }
}

use proptest::prelude::*;

use super::*;

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

fn minutes(count: u64) -> Duration {
    seconds(60 * count)
}

fn adaptive() -> KeepAlive {
    KeepAlive::new(KeepAlivePolicy::Adaptive(AdaptivePolicy {
        park: Some(ParkWindow {
            floor: seconds(10),
            ceiling: minutes(1),
        }),
        min_keep: minutes(1),
        fallback: minutes(20),
        prewarm_from: Some(minutes(10)),
    }))
}

/// Calls after these pauses.
fn called(mut keep_alive: KeepAlive, pauses: impl IntoIterator<Item = Duration>) -> KeepAlive {
    let mut now = Timestamp::from_nanos(1);
    keep_alive.arrived(now);
    for pause in pauses {
        now = now + pause;
        keep_alive.arrived(now);
    }
    keep_alive
}

#[test]
fn fixed_times_do_not_depend_on_calls() {
    let policy = KeepAlivePolicy::Fixed {
        park_after: Some(seconds(5)),
        close_after: None,
    };
    let keep_alive = called(KeepAlive::new(policy), [seconds(1), minutes(7)]);
    let plan = IdlePlan {
        park_after: Some(seconds(5)),
        close_after: None,
        prewarm: None,
    };
    assert_eq!(keep_alive.plan(), plan);
    assert!(keep_alive.learnt.is_none());
}

#[test]
fn off_closes_at_once() {
    let plan = KeepAlive::new(KeepAlivePolicy::Off).plan();
    assert_eq!(plan, IdlePlan::close_after(Some(Duration::ZERO)));
}

#[test]
fn model_of_which_little_is_known_is_kept_for_the_fallback() {
    for pauses in [vec![], vec![minutes(3); 4]] {
        let plan = called(adaptive(), pauses).plan();
        assert_eq!(plan.close_after, Some(minutes(20)));
        assert_eq!(plan.park_after, Some(seconds(10)));
        assert_eq!(plan.prewarm, None);
    }
}

#[test]
fn model_with_short_habits_is_kept_for_little_more_than_its_longest_pause() {
    let pauses = (0..100).map(|call| seconds(100 + call % 50));
    let plan = called(adaptive(), pauses).plan();
    // 149 s lie in the bin up to 160 s, and a tenth is added.
    assert_eq!(plan.close_after, Some(seconds(176)));
    assert_eq!(plan.prewarm, None);
}

#[test]
fn model_called_every_hour_is_closed_soon_and_loaded_ahead_of_the_call() {
    let pauses = (0..20).map(|call| minutes(60) + seconds(call));
    let plan = called(adaptive(), pauses).plan();
    assert_eq!(plan.close_after, Some(minutes(1)));
    let prewarm = plan.prewarm.unwrap();
    assert!(prewarm.at < minutes(60) && prewarm.at > minutes(50));
    assert!(prewarm.at + prewarm.hold > minutes(61));
    assert!(prewarm.at + prewarm.hold < minutes(75));
}

#[test]
fn pauses_without_a_habit_get_the_fallback() {
    // Evenly spread over all scales from a minute to four hours.
    let pauses = (0..256)
        .map(|call| Duration::from_secs_f64(60.0 * 2f64.powf(7.9 * f64::from(call % 64) / 64.0)));
    let policy = AdaptivePolicy {
        fallback: minutes(17),
        ..AdaptivePolicy::default()
    };
    let spread = called(KeepAlive::new(KeepAlivePolicy::Adaptive(policy)), pauses);
    assert_eq!(spread.plan().close_after, Some(minutes(17)));
    assert_eq!(spread.plan().prewarm, None);
}

#[test]
fn model_called_less_than_every_four_hours_gets_the_fallback() {
    let pauses = [minutes(5); 10].into_iter().chain([minutes(300); 11]);
    let plan = called(adaptive(), pauses).plan();
    assert_eq!(plan.close_after, Some(minutes(20)));
}

#[test]
fn busy_model_stays_warm_over_its_usual_pauses_and_its_long_ones_still_count() {
    let burst = [seconds(10); 500];
    let pauses = (0..10).flat_map(|_| burst.into_iter().chain([minutes(5)]));
    let keep_alive = called(adaptive(), pauses.chain([seconds(10); 100]));
    let plan = keep_alive.plan();
    let park_after = plan.park_after.unwrap();
    assert!(
        park_after > seconds(39) && park_after < seconds(41),
        "{park_after:?}"
    );
    let close_after = plan.close_after.unwrap();
    assert!(close_after > minutes(5) && close_after < minutes(7));
}

#[test]
fn model_with_long_pauses_is_parked_after_the_floor() {
    let plan = called(adaptive(), [minutes(3); 50]).plan();
    assert_eq!(plan.park_after, Some(seconds(10)));
}

#[test]
fn model_that_cannot_be_parked_is_not() {
    let policy = AdaptivePolicy::without_parking();
    let keep_alive = called(
        KeepAlive::new(KeepAlivePolicy::Adaptive(policy)),
        [minutes(3); 50],
    );
    assert_eq!(keep_alive.plan().park_after, None);
}

#[test]
fn idle_time_counts_from_the_end_of_a_run() {
    let mut keep_alive = adaptive();
    let mut now = Timestamp::ZERO;
    for _ in 0..20 {
        keep_alive.arrived(now);
        keep_alive.finished(now + minutes(3));
        now = now + minutes(5);
    }
    let close_after = keep_alive.plan().close_after.unwrap();
    assert!(close_after > minutes(2) && close_after < minutes(3));
}

#[test]
fn changed_habit_replaces_the_old_one() {
    let pauses = [minutes(5); 2000].into_iter().chain([minutes(60); 12_000]);
    let plan = called(adaptive(), pauses).plan();
    assert!(plan.prewarm.is_some(), "{plan:?}");
}

#[test]
fn uncalled_model_allocates_nothing_and_a_called_one_little() {
    assert!(adaptive().learnt.is_none());
    assert!(size_of::<KeepAlive>() <= 128);
    assert!(size_of::<KeepAlive>() + size_of::<Learnt>() <= 1024);
}

proptest! {
    #[test]
    fn learnt_times_stay_within_their_bounds(
        pauses in prop::collection::vec(prop_oneof![0u64..100, 60u64..4000, 0u64..100_000], 0..200),
    ) {
        let keep_alive = called(adaptive(), pauses.into_iter().map(seconds));
        let plan = keep_alive.plan();
        let close = plan.close_after.unwrap();
        prop_assert!(close >= minutes(1) && close <= RANGE);
        if let Some(park) = plan.park_after {
            prop_assert!(park >= seconds(10) && park <= minutes(1) && park < close);
        }
        if let Some(prewarm) = plan.prewarm {
            prop_assert!(prewarm.at > close && prewarm.at >= minutes(10));
            prop_assert!(prewarm.at + prewarm.hold <= RANGE);
        }
    }
}

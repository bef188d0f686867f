//! A session that is gone though nobody closed it.

use super::*;

fn warm() -> Lifecycle {
    let mut lifecycle = Lifecycle::new(policy());
    assert_eq!(lifecycle.demand(at(0)), Demand::StartLoad);
    assert_eq!(lifecycle.loaded(at(1)), None);
    lifecycle
}

#[test]
fn a_lost_session_is_loaded_again_at_once_when_its_time_has_come() {
    let mut lifecycle = warm();
    lifecycle.run_started(at(2));
    assert_eq!(lifecycle.lost(at(3), Some(at(3))), Some(Action::StartLoad));
    assert_eq!(lifecycle.stage(), Stage::Loading);
    // Heard of by two threads.
    assert_eq!(lifecycle.lost(at(3), Some(at(3))), None);
    lifecycle.run_finished(at(4));
    assert_eq!(lifecycle.demand(at(4)), Demand::Wait);
    assert_eq!(lifecycle.loaded(at(5)), None);
    assert_eq!(lifecycle.stage(), Stage::Warm);
}

#[test]
fn a_lost_session_is_loaded_again_after_its_pause_without_being_asked_for() {
    let mut lifecycle = warm();
    assert_eq!(lifecycle.lost(at(3), Some(at(50))), None);
    assert_eq!(lifecycle.wake_at(), Some(at(50)));
    assert_eq!(
        lifecycle.demand(at(10)),
        Demand::Refuse { retry_at: at(50) }
    );
    assert_eq!(lifecycle.poll(at(49), 0), None);
    assert_eq!(lifecycle.poll(at(50), 0), Some(Action::StartLoad));
    // An ordinary failure of that load is tried again on demand only.
    lifecycle.load_failed(at(60));
    assert_eq!(lifecycle.wake_at(), None);
    assert_eq!(lifecycle.poll(at(1000), 0), None);
    assert_eq!(lifecycle.demand(at(1000)), Demand::StartLoad);
}

#[test]
fn a_barred_model_is_loaded_by_nothing_but_a_pardon() {
    let mut lifecycle = warm();
    assert_eq!(lifecycle.lost(at(3), None), None);
    assert_eq!(lifecycle.wake_at(), None);
    assert_eq!(lifecycle.poll(at(1 << 40), 0), None);
    assert!(matches!(
        lifecycle.demand(at(1 << 40)),
        Demand::Refuse { .. }
    ));
    lifecycle.pardoned();
    assert_eq!(lifecycle.demand(at(1 << 40)), Demand::StartLoad);
    lifecycle.load_failed(at(1 << 40));
    lifecycle.barred();
    assert!(matches!(
        lifecycle.demand(at(1 << 41)),
        Demand::Refuse { .. }
    ));
}

#[test]
fn a_loss_on_the_way_out_is_the_end() {
    let mut lifecycle = warm();
    lifecycle.run_started(at(2));
    assert_eq!(lifecycle.retire(at(3), 0), None);
    assert_eq!(lifecycle.lost(at(4), Some(at(4))), None);
    assert_eq!(lifecycle.stage(), Stage::Retired);
    lifecycle.run_finished(at(5));
}

#[test]
fn a_parked_model_can_be_lost_while_it_is_being_parked() {
    let mut lifecycle = Lifecycle::new(policy());
    lifecycle.set_plan(STAGED);
    lifecycle.demand(at(0));
    lifecycle.loaded(at(1));
    assert_eq!(lifecycle.poll(at(30), 0), Some(Action::Park));
    assert_eq!(
        lifecycle.lost(at(31), Some(at(31))),
        Some(Action::StartLoad)
    );
    lifecycle.parked();
    assert!(!lifecycle.has_dropped());
    assert_eq!(lifecycle.loaded(at(40)), None);
    assert!(lifecycle.is_idle());
}

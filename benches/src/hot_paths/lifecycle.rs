//! What a request does to its model's state machine.

use std::hint::black_box;
use std::time::Duration;

use dormouse_core::lifecycle::{Action, Demand, IdlePlan, Lifecycle, LifecyclePolicy};
use dormouse_core::time::Timestamp;

use super::{Step, Workload};

pub const WORKLOADS: &[Workload] = &[
    Workload {
        name: "lifecycle: a request of a warm model",
        prepare: warm,
    },
    Workload {
        name: "lifecycle: from cold to cold",
        prepare: whole,
    },
];

const PARK_AFTER: Duration = Duration::from_secs(60);
const CLOSE_AFTER: Duration = Duration::from_secs(300);

fn cold() -> Lifecycle {
    Lifecycle::new(LifecyclePolicy {
        plan: IdlePlan {
            park_after: Some(PARK_AFTER),
            close_after: Some(CLOSE_AFTER),
            prewarm: None,
        },
        retry_backoff: Duration::from_secs(1),
        retry_backoff_max: Duration::from_secs(60),
    })
}

fn request(lifecycle: &mut Lifecycle, now: Timestamp) {
    assert_eq!(lifecycle.demand(black_box(now)), Demand::Run);
    lifecycle.run_started(now);
    lifecycle.run_finished(now);
    assert_eq!(lifecycle.poll(now, 0), None);
    black_box(lifecycle.wake_at());
}

fn warm() -> Step {
    let mut lifecycle = cold();
    let mut now = Timestamp::from_nanos(1);
    assert_eq!(lifecycle.demand(now), Demand::StartLoad);
    assert_eq!(lifecycle.loaded(now), None);
    Box::new(move || {
        now = now + Duration::from_millis(1);
        request(&mut lifecycle, now);
    })
}

fn whole() -> Step {
    let mut lifecycle = cold();
    let mut now = Timestamp::from_nanos(1);
    Box::new(move || {
        assert_eq!(lifecycle.demand(black_box(now)), Demand::StartLoad);
        assert_eq!(lifecycle.loaded(now), None);
        request(&mut lifecycle, now);
        now = now + PARK_AFTER;
        assert_eq!(lifecycle.poll(now, 0), Some(Action::Park));
        lifecycle.parked();
        now = now + CLOSE_AFTER;
        assert_eq!(lifecycle.poll(now, 0), Some(Action::CloseSession));
        assert_eq!(lifecycle.closed(now, 0), None);
    })
}

//! Whether a request can be answered in time.

use std::hint::black_box;
use std::time::Duration;

use dormouse_core::admission::{Outlook, admit};
use dormouse_core::profile::ServiceProfile;
use dormouse_core::time::Timestamp;

use super::{Step, Workload};

pub const WORKLOADS: &[Workload] = &[
    Workload {
        name: "admission: admitted",
        prepare: || decide(Duration::from_secs(10), true),
    },
    Workload {
        name: "admission: refused",
        prepare: || decide(Duration::from_millis(1), false),
    },
    Workload {
        name: "admission: a run is learnt from",
        prepare: learn,
    },
];

/// What eight sizes of runs took.
fn profile() -> ServiceProfile {
    let mut profile = ServiceProfile::new();
    for size in 0..8 {
        for run in 0..10 {
            let took = Duration::from_micros(500 * (size + 1) + 20 * run);
            profile.record_run(1 << size, took);
        }
    }
    profile
}

fn decide(within: Duration, admitted: bool) -> Step {
    let now = Timestamp::from_nanos(1_000_000_000);
    let profile = profile();
    let outlook = Outlook {
        queued_rows: 1000,
        running: 2,
        concurrency: 2,
        max_rows: 64,
        running_since: Some(Timestamp::from_nanos(999_000_000)),
        load_remaining: None,
    };
    Box::new(move || {
        let decision = admit(black_box(&outlook), &profile, 1, Some(now + within), now);
        assert_eq!(black_box(decision).is_ok(), admitted);
    })
}

fn learn() -> Step {
    let mut profile = profile();
    Box::new(move || profile.record_run(black_box(8), black_box(Duration::from_micros(2010))))
}

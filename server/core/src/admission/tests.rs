use super::*;

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn at(moment: u64) -> Timestamp {
    Timestamp::ZERO + millis(moment)
}

/// A model whose runs of `rows` rows have always taken 100 ms.
fn steady(rows: u32) -> ServiceProfile {
    let mut profile = ServiceProfile::new();
    for _ in 0..1000 {
        profile.record_run(rows, millis(100));
    }
    profile
}

fn warm() -> Outlook {
    Outlook {
        concurrency: 1,
        max_rows: 1,
        ..Outlook::default()
    }
}

/// The least time to the deadline, in milliseconds, with which a request is admitted.
fn least_patience(outlook: &Outlook, profile: &ServiceProfile) -> u64 {
    let now = at(1_000);
    (1..100_000)
        .find(|&left| admit(outlook, profile, 1, Some(now + millis(left)), now).is_ok())
        .expect("somebody is patient enough")
}

#[test]
fn request_waits_for_the_runs_and_batches_ahead_of_it() {
    let since = |elapsed: u64| Some(at(1_000 - elapsed));
    let busy = Outlook {
        running: 1,
        running_since: since(60),
        ..warm()
    };
    // A run takes 100 ms; a quarter is added to whatever is waited for but a load.
    let cases = [
        ("idle", warm(), 1),
        ("behind a run", busy, 150),
        (
            "behind an overdue run",
            Outlook {
                running_since: since(130),
                ..busy
            },
            137,
        ),
        (
            "behind a run of unknown age",
            Outlook {
                running_since: None,
                ..busy
            },
            225,
        ),
        (
            "behind a run and three requests",
            Outlook {
                queued_rows: 3,
                ..busy
            },
            525,
        ),
        (
            "the same on two slots, one of them free",
            Outlook {
                queued_rows: 3,
                concurrency: 2,
                ..busy
            },
            275,
        ),
        (
            "the same on two slots",
            Outlook {
                queued_rows: 3,
                concurrency: 2,
                running: 2,
                ..busy
            },
            337,
        ),
        (
            "behind a load and a request",
            Outlook {
                queued_rows: 1,
                load_remaining: Some(millis(500)),
                ..warm()
            },
            725,
        ),
        (
            "the one that wakes the model",
            Outlook {
                load_remaining: Some(millis(500)),
                ..warm()
            },
            1,
        ),
    ];
    for (case, outlook, expected) in cases {
        let found = least_patience(&outlook, &steady(1));
        assert!(found.abs_diff(expected) <= 1, "{case}: {found}");
    }
}

#[test]
fn request_shares_the_batch_of_those_ahead_of_it() {
    let outlook = |queued_rows| Outlook {
        queued_rows,
        running: 1,
        running_since: Some(at(1_000)),
        max_rows: 8,
        ..warm()
    };
    let profile = steady(8);
    for (queued_rows, expected) in [(0, 225), (7, 225), (8, 350), (15, 350), (16, 475)] {
        let found = least_patience(&outlook(queued_rows), &profile);
        assert!(found.abs_diff(expected) <= 1, "{queued_rows}: {found}");
    }
}

#[test]
fn refusal_says_how_long_the_wait_is_and_when_to_come_again() {
    let outlook = Outlook {
        queued_rows: 10,
        running: 1,
        running_since: Some(at(0)),
        ..warm()
    };
    let refusal = admit(&outlook, &steady(1), 1, Some(at(500)), at(0)).unwrap_err();
    let near = |found: Duration, expected| found.abs_diff(millis(expected)) <= millis(1);
    assert!(near(refusal.expected_wait, 1100), "{refusal:?}");
    assert!(near(refusal.retry_after, 975), "{refusal:?}");
}

#[test]
fn without_knowledge_only_a_passed_deadline_is_refused() {
    let outlook = Outlook {
        queued_rows: 1_000_000,
        running: 1,
        ..warm()
    };
    let unknown = ServiceProfile::new();
    assert!(admit(&outlook, &unknown, 1, Some(at(11)), at(10)).is_ok());
    assert!(admit(&outlook, &unknown, 1, Some(at(10)), at(10)).is_err());
    assert!(admit(&outlook, &steady(1), 1, None, at(10)).is_ok());
}

#[test]
fn idle_model_tries_whatever_the_estimate_says() {
    let mut slow = ServiceProfile::new();
    slow.record_run(1, Duration::from_secs(3600));
    assert!(admit(&warm(), &slow, 1, Some(at(11)), at(10)).is_ok());
    let busy = Outlook {
        running: 1,
        ..warm()
    };
    assert!(admit(&busy, &slow, 1, Some(at(11)), at(10)).is_err());
}

#[test]
fn numbers_without_sense_are_survived() {
    let outlook = Outlook {
        queued_rows: u64::MAX,
        running: usize::MAX,
        concurrency: 0,
        max_rows: 0,
        running_since: Some(at(500)),
        load_remaining: Some(Duration::MAX),
    };
    let mut profile = ServiceProfile::new();
    profile.record_run(0, Duration::MAX);
    profile.record_run(u32::MAX, Duration::ZERO);
    assert!(admit(&outlook, &profile, u32::MAX, Some(at(11)), at(10)).is_err());
}

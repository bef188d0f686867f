use super::*;

const INSTANT: Machine = Machine {
    load: Duration::ZERO,
    run: Duration::ZERO,
    unpark: Duration::ZERO,
    model_bytes: 440 * MB,
    parked_bytes: 17 * MB,
    limit: None,
};

fn fixed(minutes: u64) -> KeepAlivePolicy {
    KeepAlivePolicy::Fixed {
        park_after: None,
        close_after: Some(Duration::from_secs(60 * minutes)),
    }
}

#[test]
fn fixed_keep_alive_gives_the_cold_starts_that_the_minute_buckets_imply() {
    let mut trace = Trace::bundled().unwrap();
    let calls: u64 = trace
        .functions
        .iter()
        .flatten()
        .map(|&n| u64::from(n))
        .sum();
    assert_eq!((trace.functions.len(), trace.minutes), (500, 480));
    assert_eq!(calls, 3_037_902);
    // Calls of one minute all come at its start: one stands for all.
    for count in trace.functions.iter_mut().flatten() {
        *count = (*count).min(1);
    }
    let calls = trace.calls(Arrivals::Start, 0);
    for (minutes, expected) in [(1, 19_668), (5, 4_077), (10, 2_488), (20, 1_388)] {
        let outcome = replay(&trace, &calls, fixed(minutes), INSTANT);
        assert_eq!(outcome.cold_starts, expected, "{minutes} minutes");
    }
}

fn args(budget_models: Option<u64>) -> SimulateArgs {
    SimulateArgs {
        trace: None,
        seeds: 1,
        arrivals: Arrivals::Spread,
        functions: 40,
        minutes: 90,
        budget_models,
        load_ms: 150,
        run_ms: 20,
        model_mb: 440,
        parked_mb: 17,
        adaptive: AdaptiveArgs {
            park_floor: None,
            park_ceiling: None,
            min_keep: None,
            fallback: None,
            prewarm_from: None,
        },
        report: ReportArgs::default(),
    }
}

/// Replays a cut of the trace under every policy and shows the table's cells.
fn check(budget_models: Option<u64>, expected: expect_test::Expect) {
    let args = args(budget_models);
    let mut trace = Trace::bundled().unwrap();
    trace.cut(args.functions, args.minutes);
    let machine = Machine {
        limit: budget_models.map(|models| models * 440 * MB),
        load: Duration::from_millis(args.load_ms),
        run: Duration::from_millis(args.run_ms),
        unpark: Duration::from_millis(5),
        ..INSTANT
    };
    let report = simulate(&trace, &args, machine);
    let mut shown = String::new();
    for row in &report.rows {
        let outcome = row.outcomes[0];
        assert_eq!(outcome.calls as usize, report.calls);
        assert!(outcome.prewarms_wasted <= outcome.prewarms);
        shown += &cells(&report, row).join(" | ");
        shown += "\n";
    }
    expected.assert_eq(&shown);
}

#[test]
fn an_hour_and_a_half_of_forty_functions_under_every_policy() {
    check(
        None,
        expect_test::expect![[r#"
            off | 19737 | 42.783 | 0 | 0.0 | 0.0 | 0.0 | 0 | 0
            fixed 1 min | 415 | 0.900 | 0 | 11.1 | 0.0 | 4.9 | 0 | 0
            fixed 5 min | 133 | 0.288 | 0 | 27.0 | 0.0 | 11.9 | 0 | 0
            fixed 10 min | 68 | 0.147 | 0 | 32.7 | 0.0 | 14.4 | 0 | 0
            fixed 20 min | 41 | 0.089 | 0 | 36.7 | 0.0 | 16.1 | 0 | 0
            fixed 20 min, parked after 10 s | 41 | 0.089 | 761 | 3.9 | 32.8 | 2.3 | 0 | 0
            adaptive, without parking | 43 | 0.093 | 0 | 31.7 | 0.0 | 13.9 | 91 | 0
            adaptive | 36 | 0.078 | 520 | 4.6 | 36.6 | 2.7 | 0 | 0
        "#]],
    );
}

#[test]
fn the_same_with_memory_for_five_models() {
    check(
        Some(5),
        expect_test::expect![[r#"
            off | 19737 | 42.783 | 0 | 0.0 | 0.0 | 0.0 | 0 | 0 | 0 | 0 | 0 | 1.3
            fixed 1 min | 524 | 1.136 | 0 | 7.1 | 0.0 | 3.1 | 0 | 0 | 0 | 488 | 0 | 2.2
            fixed 5 min | 518 | 1.123 | 0 | 7.2 | 0.0 | 3.2 | 0 | 0 | 0 | 513 | 0 | 2.2
            fixed 10 min | 518 | 1.123 | 0 | 7.2 | 0.0 | 3.2 | 0 | 0 | 0 | 513 | 0 | 2.2
            fixed 20 min | 518 | 1.123 | 0 | 7.2 | 0.0 | 3.2 | 0 | 0 | 0 | 513 | 0 | 2.2
            fixed 20 min, parked after 10 s | 41 | 0.089 | 769 | 3.8 | 33.0 | 2.2 | 0 | 0 | 184 | 0 | 0 | 2.2
            adaptive, without parking | 517 | 1.121 | 0 | 7.2 | 0.0 | 3.2 | 1 | 0 | 0 | 505 | 0 | 2.2
            adaptive | 36 | 0.078 | 624 | 4.0 | 37.2 | 2.4 | 0 | 0 | 301 | 0 | 0 | 2.2
        "#]],
    );
}

#[test]
fn calls_are_the_same_for_the_same_seed_and_stay_in_their_minutes() {
    let mut trace = Trace::bundled().unwrap();
    trace.cut(20, 30);
    let calls = trace.calls(Arrivals::Spread, 7);
    assert_eq!(calls, trace.calls(Arrivals::Spread, 7));
    assert_ne!(calls, trace.calls(Arrivals::Spread, 8));
    let mut counted = vec![vec![0; 30]; 20];
    for call in &calls {
        let minute = call.at.as_nanos() / 60_000_000_000;
        counted[call.function as usize][minute as usize] += 1;
    }
    assert_eq!(counted, trace.functions);
    assert!(calls.is_sorted());
}

#[test]
fn broken_traces_are_refused_with_their_line() {
    let refuse = |text: &str| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        format!("{:#}", Trace::open(file.path()).unwrap_err())
    };
    assert!(refuse("").ends_with("it is empty"));
    assert!(refuse("a,b,c,d\n").ends_with("the header names no minutes"));
    assert!(refuse("a,b,c,d,1,2\no,a,f,t,1,2\no,a,f,t,1\n").contains("line 3 has 1 counts"));
    assert!(refuse("a,b,c,d,1\no,a,f,t,x\n").contains("line 2 has a count that is no number"));
    assert!(refuse("a,b,c,d,1\no,a,f,t,4000000000\n").contains("calls"));
}

use hdrhistogram::serialization::Deserializer;

use super::*;

/// A step of ten seconds after one of warm-up, on two models.
struct Watch {
    start: Instant,
    recorder: Recorder,
}

impl Watch {
    fn new() -> Self {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let names = vec!["a".to_owned(), "b".to_owned()];
        Self {
            start,
            recorder: Recorder::new(names, start, after(1), after(11)),
        }
    }

    fn at(&self, millis: u64) -> Instant {
        self.start + Duration::from_millis(millis)
    }

    fn see(&mut self, model: usize, (due, sent, ended): (u64, u64, u64), end: End) {
        let seen = Seen {
            model,
            due: self.at(due),
            sent: self.at(sent),
            ended: self.at(ended),
            end,
        };
        self.recorder.record(seen);
    }
}

fn near(found: f64, wanted: f64) {
    assert!((found - wanted).abs() <= wanted * 0.001, "{found} {wanted}");
}

#[test]
fn latency_counts_from_when_a_request_was_due() {
    let mut watch = Watch::new();
    watch.see(0, (2000, 2300, 2400), End::Answered { cold: None });
    let end = watch.at(11_000);
    let (step, _) = watch.recorder.finish(end, None).unwrap();
    near(step.all.latency.p50, 400.0);
    near(step.all.service.p50, 100.0);
    near(step.all.late.p50, 300.0);
    assert_eq!(step.models["a"], step.all);
    assert_eq!(step.models["b"].sent, 0);
}

#[test]
fn warm_up_is_left_out_but_for_what_it_adds_to_the_throughput() {
    let mut watch = Watch::new();
    watch.see(0, (0, 0, 500), End::Answered { cold: None });
    watch.see(0, (900, 900, 1500), End::Answered { cold: None });
    watch.see(0, (1100, 1100, 1500), End::Answered { cold: None });
    // Answered when the measured time was over.
    watch.see(0, (10_900, 10_900, 11_500), End::Answered { cold: None });
    let end = watch.at(12_000);
    let (step, _) = watch.recorder.finish(end, None).unwrap();
    assert_eq!(step.warmup_requests, 2);
    assert_eq!(step.all.sent, 2);
    near(step.all.throughput, 0.2);
    assert_eq!(step.windows.len(), 1);
}

#[test]
fn every_end_is_counted_once_in_its_window() {
    let mut watch = Watch::new();
    let cold = ColdStartSeen {
        woke: Some(7.0),
        ..ColdStartSeen::default()
    };
    let cold = Some(Box::new(cold));
    watch.see(1, (1000, 1000, 1100), End::Answered { cold });
    watch.see(
        0,
        (1000, 1000, 1200),
        End::Wrong("7 instead of 8".to_owned()),
    );
    let failure = Failure::new("UNAVAILABLE", "too many");
    watch.see(0, (1000, 1000, 1300), End::Failed(failure));
    watch.see(0, (1000, 1000, 1400), End::Cancelled);
    watch.recorder.not_sent(0, watch.at(1500));
    watch.recorder.not_sent(0, watch.at(500));
    let second = watch.at(2000);
    let glance = watch.recorder.close_window(second, None).unwrap();
    assert_eq!((glance.errors, glance.cold), (2, 1));
    let failure = Failure::new("UNAVAILABLE", "still too many");
    watch.see(0, (2000, 2000, 2300), End::Failed(failure));
    let end = watch.at(11_000);
    let (step, intervals) = watch.recorder.finish(end, None).unwrap();
    let all = &step.all;
    let ends = [
        all.sent,
        all.answered,
        all.wrong,
        all.cancelled,
        all.not_sent,
    ];
    assert_eq!(ends, [5, 1, 1, 1, 1]);
    assert_eq!(all.failed(), 2);
    assert_eq!(step.error_examples["UNAVAILABLE"], "too many");
    assert_eq!(step.mismatches, ["model 'a': 7 instead of 8"]);
    assert_eq!(step.cold[0].model, "b");
    near(step.cold[0].latency, 100.0);
    let windows: u64 = step.windows.iter().map(|window| window.sent).sum();
    assert_eq!(windows, 5);
    let [interval] = &intervals[..] else {
        panic!("only model b was answered");
    };
    assert_eq!(interval.start, Duration::from_secs(1));
    let times: Histogram<u64> = Deserializer::new()
        .deserialize(&mut &interval.histogram[..])
        .unwrap();
    near(times.max() as f64, 100e6);
}

#[test]
fn processor_time_is_divided_by_what_ended_meanwhile() {
    let sample = |user: f64, resident_bytes| {
        Some(ProcessSample {
            user_seconds: user,
            system_seconds: 1.0,
            resident_bytes,
        })
    };
    let mut watch = Watch::new();
    watch.recorder.begin(sample(3.0, 100));
    for _ in 0..4 {
        watch.see(0, (1000, 1000, 1100), End::Answered { cold: None });
    }
    let second = watch.at(2000);
    watch
        .recorder
        .close_window(second, sample(3.5, 900))
        .unwrap();
    let end = watch.at(11_000);
    let (step, _) = watch.recorder.finish(end, sample(4.0, 300)).unwrap();
    let process = step.process.unwrap();
    near(process.user_seconds, 1.0);
    near(process.micros_per_request, 250_000.0);
    assert_eq!(process.resident_bytes, 300);
    assert_eq!(process.largest_resident_bytes, 900);
    near(
        step.windows[0].process.unwrap().micros_per_request,
        125_000.0,
    );
}

#[test]
fn a_server_cannot_invent_kinds_of_errors_for_ever() {
    let mut watch = Watch::new();
    for kind in 0..200 {
        let failure = Failure::new(format!("kind {kind}"), "");
        watch.see(0, (1000, 1000, 1100), End::Failed(failure));
    }
    let end = watch.at(11_000);
    let (step, _) = watch.recorder.finish(end, None).unwrap();
    assert_eq!(step.all.errors.len(), MOST_KINDS + 1);
    assert_eq!(step.all.failed(), 200);
}

//! Overlap arithmetic, recording, and the header's grammar.

use dormouse_core::id::ModelId;
use dormouse_core::time::Timestamp;
use parking_lot::Mutex;
use proptest::prelude::*;
use tokio::time::advance;
use tracing::Subscriber;
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use super::*;
use crate::clock::Clock;
use crate::metrics::Metrics;

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn span(stage: LoadStage, start: u64, duration: u64) -> StageSpan {
    StageSpan {
        stage,
        lane: 0,
        start: ms(start),
        duration: ms(duration),
        bytes: 0,
        running: false,
    }
}

fn timeline(stages: Vec<StageSpan>) -> LoadTimeline {
    LoadTimeline {
        stages,
        ..LoadTimeline::default()
    }
}

fn recorder() -> (TimelineRecorder, Metrics) {
    let metrics = Metrics::new().unwrap();
    let recorder = TimelineRecorder::start(Clock::start(), &metrics, &ModelId::new("bert", 1));
    (recorder, metrics)
}

#[test]
fn overlap_is_what_was_done_at_the_same_time() {
    use LoadStage::{LookUp, Populate, Session};
    let table = [
        (vec![], 0),
        (vec![span(LookUp, 0, 5), span(Session, 5, 5)], 0),
        (vec![span(LookUp, 0, 5), span(Session, 9, 5)], 0),
        (vec![span(Populate, 0, 10), span(Session, 2, 5)], 5),
        (vec![span(Populate, 0, 10), span(Session, 8, 12)], 2),
        // Two lanes of one stage take no longer than one.
        (
            vec![
                span(Populate, 0, 10),
                span(Populate, 0, 10),
                span(Session, 0, 10),
            ],
            10,
        ),
        (vec![span(Session, 0, 10), span(LoadStage::Pack, 5, 10)], 0),
    ];
    for (stages, expected) in table {
        assert_eq!(
            timeline(stages.clone()).overlap(),
            ms(expected),
            "{stages:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn stages_that_run_side_by_side_are_on_lanes_of_their_own() {
    let (recorder, metrics) = recorder();
    let queue = recorder.stage(LoadStage::Queue);
    advance(ms(1)).await;
    drop(queue);
    let populate = recorder.stage(LoadStage::Populate);
    let other = recorder.stage(LoadStage::Populate);
    let session = recorder.stage(LoadStage::Session);
    advance(ms(10)).await;
    populate.bytes(4096);
    populate.bytes(4096);
    drop(populate);
    let environment = recorder.stage(LoadStage::Environment);
    advance(ms(10)).await;
    drop((session, environment));
    let timeline = recorder.finish(true);

    let lanes: Vec<_> = timeline
        .stages
        .iter()
        .map(|s| (s.stage.label(), s.lane))
        .collect();
    let expected = [
        ("queue", 0),
        ("populate", 0),
        ("populate", 1),
        ("session", 2),
        ("environment", 0),
    ];
    assert_eq!(lanes, expected);
    assert_eq!(timeline.total, ms(21));
    assert_eq!(timeline.loading(), ms(20));
    assert_eq!(timeline.overlap(), ms(30));
    assert_eq!(timeline.bytes(), 8192);
    assert!(timeline.ahead);
    assert!(timeline.stages[2].running);
    let text = metrics.render();
    assert!(
        text.contains("dormouse_load_overlap_seconds_sum 0.03"),
        "{text}"
    );
    assert!(
        text.contains("dormouse_loaded_bytes_total{stage=\"populate\"} 8192"),
        "{text}"
    );
    assert!(
        text.contains("dormouse_load_stage_seconds_count{stage=\"populate\"} 1"),
        "{text}"
    );

    // What goes on in the background is told of when it has ended.
    advance(ms(100)).await;
    other.bytes(10_000);
    drop(other);
    let now = Timestamp::ZERO + ms(150);
    recorder.first_run(now, now + ms(7));
    recorder.first_run(now, now + ms(700));
    let timeline = recorder.timeline();
    assert_eq!(timeline.total, ms(21));
    assert_eq!(timeline.stages[2].duration, ms(120));
    assert!(!timeline.stages[2].running);
    assert_eq!(timeline.stages[5], span(LoadStage::FirstRun, 150, 7));
    let text = metrics.render();
    assert!(
        text.contains("dormouse_loaded_bytes_total{stage=\"populate\"} 18192"),
        "{text}"
    );
    assert!(
        text.contains("dormouse_load_stage_seconds_count{stage=\"populate\"} 2"),
        "{text}"
    );
}

/// Notes spans as `parent > name{fields}` when they close.
#[derive(Clone, Debug, Default)]
struct Closed(Arc<Mutex<Vec<String>>>);

#[derive(Debug, Default)]
struct Fields(String);

impl tracing::field::Visit for Fields {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        self.0 += &format!(" {field}={value:?}");
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Closed {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        context.span(id).unwrap().extensions_mut().insert(fields);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let span = context.span(id).unwrap();
        values.record(span.extensions_mut().get_mut::<Fields>().unwrap());
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let span = context.span(&id).unwrap();
        let parent = span.parent().map_or("", |parent| parent.name());
        let fields = span.extensions();
        let fields = &fields.get::<Fields>().unwrap().0;
        self.0
            .lock()
            .push(format!("{parent} > {}{fields}", span.name()));
    }
}

#[test]
fn each_load_is_a_span_with_its_stages_below() {
    let closed = Closed::default();
    let subscriber = tracing_subscriber::registry().with(closed.clone());
    tracing::subscriber::with_default(subscriber, || {
        let (recorder, _) = recorder();
        let late = recorder.stage(LoadStage::Populate);
        recorder.during(LoadStage::Session, || ());
        recorder.stage(LoadStage::Read).bytes(7);
        recorder.set_kind(ColdStart::Prepared);
        recorder.finish(false);
        drop(late);
    });
    let closed = closed.0.lock();
    let [session, read, populate, load] = &closed[..] else {
        panic!("{closed:?}");
    };
    assert_eq!(
        session,
        "load > stage otel.name=\"session\" stage=\"session\""
    );
    assert_eq!(
        read,
        "load > stage otel.name=\"read\" stage=\"read\" bytes=7"
    );
    assert!(populate.starts_with("load > stage otel.name=\"populate\""));
    // Closed when its last stage is, with what was known when the model could run.
    assert!(
        load.starts_with(" > load model=bert version=1 kind=\"prepared\" bytes=7 overlap_seconds="),
        "{load}"
    );
}

#[tokio::test(start_paused = true)]
async fn failed_attempts_become_one_stage_each() {
    let (recorder, _) = recorder();
    let queue = recorder.stage(LoadStage::Queue);
    advance(ms(3)).await;
    drop(queue);
    for _ in 0..2 {
        let read = recorder.stage(LoadStage::Read);
        advance(ms(1)).await;
        drop(read);
        let session = recorder.stage(LoadStage::Session);
        advance(ms(1)).await;
        drop(session);
        recorder.attempt_failed();
    }
    let read = recorder.stage(LoadStage::Read);
    advance(ms(1)).await;
    drop(read);
    let stages = recorder.finish(false).stages;
    let expected = [
        span(LoadStage::Queue, 0, 3),
        span(LoadStage::FailedAttempt, 3, 2),
        span(LoadStage::FailedAttempt, 5, 2),
        span(LoadStage::Read, 7, 1),
    ];
    assert_eq!(stages, expected);
}

#[test]
fn many_threads_record_into_one_bounded_timeline() {
    let (recorder, _) = recorder();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..100 {
                    recorder.stage(LoadStage::Populate).bytes(10);
                }
            });
        }
    });
    let timeline = recorder.finish(false);
    assert_eq!(timeline.bytes(), 8000);
    assert!(timeline.stages.len() <= 64, "{}", timeline.stages.len());
    assert!(timeline.stages.iter().all(|span| !span.running));
    for (index, span) in timeline.stages.iter().enumerate() {
        let later = &timeline.stages[index + 1..];
        let clash = later.iter().find(|other| {
            other.lane == span.lane && other.start < span.end() && span.start < other.end()
        });
        // The last one stands for all that came after the bound was reached.
        assert!(
            clash.is_none() || timeline.stages.len() == 64,
            "{span:?} {clash:?}"
        );
    }
}

#[test]
fn labels_are_tokens_and_differ() {
    let labels: std::collections::BTreeSet<_> = LoadStage::ALL.map(LoadStage::label).into();
    assert_eq!(labels.len(), LoadStage::ALL.len());
    assert!(labels.into_iter().all(is_token));
}

#[test]
fn the_header_tells_of_the_load_and_of_the_request() {
    let mut stages = vec![
        span(LoadStage::Queue, 0, 1),
        span(LoadStage::Populate, 1, 10),
        span(LoadStage::Session, 1, 8),
        span(LoadStage::Populate, 2, 12),
        span(LoadStage::FirstRun, 14, 5),
    ];
    stages[1].bytes = 5;
    stages[3].bytes = 6;
    let cold = ColdRequest {
        load: Arc::new(LoadTimeline {
            kind: ColdStart::Prepared,
            total: ms(14),
            ..timeline(stages)
        }),
        waited: ms(15),
        run: ms(5),
        total: ms(20),
    };
    expect_test::expect!["load;dur=14.000;desc=prepared;overlap=8.000, queue;dur=1.000;start=0.000, populate;dur=13.000;start=1.000;bytes=11, session;dur=8.000;start=1.000, wait;dur=15.000, run;dur=5.000, total;dur=20.000"]
        .assert_eq(&cold.server_timing());
}

fn is_token(text: &str) -> bool {
    let is_tchar = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.bytes().all(is_tchar)
}

/// `#( metric-name *( OWS ";" OWS param-name OWS "=" OWS ( token / quoted-string ) ) )`, of which
/// quoted strings are not used.
fn follows_the_grammar(header: &str) -> bool {
    header.split(',').all(|metric| {
        let mut parts = metric.split(';').map(|part| part.trim_matches([' ', '\t']));
        let name = parts.next().is_some_and(is_token);
        let params: Vec<_> = parts.map(|part| part.split_once('=')).collect();
        let is_param = |param: &Option<(&str, &str)>| {
            param.is_some_and(|(name, value)| is_token(name.trim()) && is_token(value.trim()))
        };
        let durations = params.iter().flatten().filter(|(name, _)| *name == "dur");
        let is_number = |(_, value): &(&str, &str)| value.parse().is_ok_and(f64::is_finite);
        name && params.iter().all(is_param)
            && durations.clone().count() == 1
            && durations.clone().all(is_number)
    })
}

proptest! {
    #[test]
    fn any_timeline_makes_a_header_by_the_grammar_that_the_client_reads(
        spans in proptest::collection::vec((0..LoadStage::ALL.len(), 0_u64..=1 << 62, 0_u64..=1 << 62, any::<u64>()), 0..80),
        total in any::<u64>(),
    ) {
        let stages = spans.into_iter().map(|(stage, start, duration, bytes)| StageSpan {
            start: Duration::from_nanos(start),
            duration: Duration::from_nanos(duration),
            bytes,
            ..span(LoadStage::ALL[stage], 0, 0)
        });
        let total = Duration::from_nanos(total);
        let load = LoadTimeline { total, ..timeline(stages.collect()) };
        prop_assert!(load.overlap() <= load.stages.iter().map(|span| span.duration).sum::<Duration>());
        let cold = ColdRequest { load: Arc::new(load), waited: total, run: total, total };
        let header = cold.server_timing();
        prop_assert!(follows_the_grammar(&header), "{header}");
        prop_assert!(header.len() < 2048, "{}", header.len());
        let read = dormouse_client::ColdStart::parse(&header);
        prop_assert!(read.is_some(), "{header}");
    }
}

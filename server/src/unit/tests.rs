//! Units on an engine that does what a test tells it.

pub(crate) mod fake;
mod mix;
mod waiting;

use dormouse_model_store::spec::KeepAliveSpec;
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::code::ErrorCode;
use dormouse_core::lifecycle::{IdlePlan, Prewarm, Stage};

use super::{NotAnswered, Unit};
use crate::alarm::Ring;
use fake::{Bench, HELD, PANIC, POISON, ask, ask_with, batching, counts, request, until};

#[tokio::test(flavor = "multi_thread")]
async fn storm_on_a_sleeping_unit_is_one_load() {
    let bench = Bench::new();
    let unit = bench.unit(|spec| spec.batching = Some(batching()));
    bench.engine.loads.close();
    let asked: Vec<_> = (0..200).map(|value| ask(&unit, value)).collect();
    until(|| unit.state.lock().batcher.queued() == 200).await;
    bench.engine.loads.open();
    for (value, asked) in (0..).zip(asked) {
        assert_eq!(asked.await.unwrap().unwrap(), value);
    }
    assert_eq!(bench.engine.loads_begun(), 1);
    assert_eq!(counts(&unit), (200, 0));
    bench.assert_idle(&unit).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn loads_ahead_of_a_call_are_told_and_whether_it_came() {
    let bench = Bench::new();
    let unit = bench.unit(|_| {});
    let expects = |at, hold| {
        unit.state.lock().lifecycle.set_plan(IdlePlan {
            park_after: None,
            close_after: Some(Duration::ZERO),
            prewarm: Some(Prewarm { at, hold }),
        });
        Arc::clone(&unit).ring();
    };
    let told = |name: &str| {
        let metrics = bench.host.metrics.render();
        let line = metrics.lines().find(|line| line.starts_with(name));
        let count = line.and_then(|line| line.rsplit(' ').next()?.parse::<u32>().ok());
        count.expect("it is told")
    };
    assert_eq!(ask(&unit, 1).await.unwrap().unwrap(), 1);
    expects(Duration::from_millis(50), Duration::ZERO);
    until(|| told("dormouse_prewarms_total") == 1).await;
    assert_eq!(bench.engine.loads_begun(), 2);
    assert_eq!(ask(&unit, 2).await.unwrap().unwrap(), 2);
    assert_eq!(bench.engine.loads_begun(), 2, "it was awake");
    expects(Duration::from_millis(50), Duration::ZERO);
    until(|| told("dormouse_prewarms_total") == 2).await;
    // Nobody comes.
    expects(Duration::from_secs(3600), Duration::ZERO);
    until(|| told("dormouse_wasted_prewarms_total") == 1).await;
    assert_eq!(bench.engine.loads_begun(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_dies_before_it_is_in_use_costs_nobody_an_answer() {
    let bench = Bench::new();
    let unit = bench.unit(|spec| spec.batching = Some(batching()));
    bench.engine.lose_session(1);
    bench.engine.loads.close();
    let asked: Vec<_> = (0..20).map(|value| ask(&unit, value)).collect();
    until(|| unit.state.lock().batcher.queued() == 20).await;
    bench.engine.loads.open();
    for (value, asked) in (0..).zip(asked) {
        assert_eq!(asked.await.unwrap().unwrap(), value);
    }
    assert_eq!(bench.engine.loads_begun(), 2);
    assert_eq!(counts(&unit), (20, 0));
    bench.assert_idle(&unit).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_whose_process_dies_too_is_neither_loaded_nor_recovered() {
    let bench = Bench::new();
    let unit = bench.unit(|_| {});
    bench.engine.lose_session(2);
    let error = unit.ensure_loaded().await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable, "{error}");
    assert!(error.retry_hint().is_some(), "{error}");
    assert_eq!(bench.engine.loads_begun(), 2);
    let metrics = bench.host.metrics.render();
    assert!(
        metrics.contains("\ndormouse_worker_restarts_total 0\n"),
        "{metrics}"
    );
    unit.retire().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_behind_a_process_that_dies_while_its_model_leaves_is_sent_on() {
    let bench = Bench::new();
    let unit = bench.unit(|_| {});
    bench.engine.runs.close();
    let doomed = ask(&unit, HELD);
    until(|| unit.state.lock().runs.len() == 1).await;
    let waiting = ask(&unit, 1);
    until(|| unit.state.lock().batcher.queued() == 1).await;
    let retired = tokio::spawn({
        let unit = Arc::clone(&unit);
        async move { unit.retire().await }
    });
    until(|| !unit.state.lock().retire_waiters.is_empty()).await;
    let lost = bench.engine.lose_session(1);
    unit.worker_died(&lost);
    retired.await.unwrap();
    // The successor is asked, as with any request that comes too late.
    let error = waiting.await.unwrap().unwrap_err();
    assert_eq!(error.code(), ErrorCode::NotFound, "{error}");
    bench.engine.runs.open();
    let error = doomed.await.unwrap().unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable, "{error}");
    assert_eq!(counts(&unit), (0, 1));
    until(|| bench.engine.open_sessions() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_load_answers_everybody_and_refuses_until_its_retry() {
    let bench = Bench::new();
    let unit = bench.unit(|_| {});
    bench.engine.fail_loads(true);
    bench.engine.loads.close();
    let asked: Vec<_> = (0..20).map(|value| ask(&unit, value)).collect();
    until(|| unit.state.lock().batcher.queued() == 20).await;
    let waiting = tokio::spawn({
        let unit = Arc::clone(&unit);
        async move { unit.ensure_loaded().await }
    });
    until(|| unit.state.lock().load_waiters.len() == 1).await;
    bench.engine.loads.open();
    for asked in asked {
        let error = asked.await.unwrap().unwrap_err();
        assert_eq!(error.code(), ErrorCode::Unavailable, "{error}");
    }
    assert!(waiting.await.unwrap().is_err());
    bench.engine.fail_loads(false);
    let error = ask(&unit, 1).await.unwrap().unwrap_err();
    assert!(error.retry_hint().is_some(), "{error}");
    assert!(unit.ensure_loaded().await.is_err());
    assert_eq!(bench.engine.loads_begun(), 1);
    assert_eq!(counts(&unit), (0, 21));
    unit.retire().await;
    assert_eq!(unit.stage(), Stage::Retired);
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_load_is_tried_again_after_its_pause() {
    let bench = Bench::with(|defaults| defaults.retry_backoff = Duration::ZERO);
    let unit = bench.unit(|_| {});
    bench.engine.fail_loads(true);
    assert!(ask(&unit, 1).await.unwrap().is_err());
    bench.engine.fail_loads(false);
    assert_eq!(ask(&unit, 2).await.unwrap().unwrap(), 2);
    assert!(unit.load_error().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn request_cancelled_in_the_queue_is_never_run() {
    let bench = Bench::new();
    let unit = bench.unit(|_| {});
    bench.engine.loads.close();
    let asked = ask(&unit, 1);
    until(|| unit.state.lock().batcher.queued() == 1).await;
    asked.abort();
    assert!(asked.await.unwrap_err().is_cancelled());
    assert_eq!(unit.state.lock().batcher.queued(), 0);
    bench.engine.loads.open();
    until(|| unit.stage() == Stage::Warm).await;
    assert_eq!((bench.engine.runs_ended(), counts(&unit)), (0, (0, 1)));
    bench.assert_idle(&unit).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn run_that_nobody_waits_for_is_stopped() {
    let bench = Bench::new();
    let unit = bench.unit(|_| {});
    bench.engine.runs.close();
    let asked = ask(&unit, HELD);
    until(|| unit.state.lock().runs.len() == 1).await;
    asked.abort();
    until(|| unit.state.lock().runs.is_empty()).await;
    assert_eq!(counts(&unit), (0, 1));
    assert_eq!(ask(&unit, 2).await.unwrap().unwrap(), 2);
    bench.assert_idle(&unit).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deadline_in_a_run_stops_it_and_is_told() {
    let bench = Bench::new();
    let unit = bench.unit(|_| {});
    bench.engine.runs.close();
    let mut held = request(HELD);
    held.deadline = Some(bench.host.clock.now() + Duration::from_millis(20));
    let error = ask_with(&unit, held).await.unwrap().unwrap_err();
    assert_eq!(error.code(), ErrorCode::DeadlineExceeded);
    until(|| unit.state.lock().runs.is_empty()).await;
    assert_eq!(counts(&unit), (0, 1));
    bench.assert_idle(&unit).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn retired_unit_finishes_what_is_queued_and_running_and_takes_nothing_new() {
    let bench = Bench::new();
    let unit = bench.unit(|_| {});
    bench.engine.runs.close();
    let running = ask(&unit, HELD);
    until(|| unit.state.lock().runs.len() == 1).await;
    let queued = ask(&unit, 2);
    until(|| unit.state.lock().batcher.queued() == 1).await;
    let retiring = retire(&unit);
    until(|| unit.state.lock().lifecycle.is_retiring()).await;
    let refused = unit.infer(request(3)).await;
    assert!(matches!(refused, Err(NotAnswered::Retired(request)) if request.rows == 1));
    bench.engine.runs.open();
    assert_eq!(running.await.unwrap().unwrap(), HELD);
    assert_eq!(queued.await.unwrap().unwrap(), 2);
    retiring.await.unwrap();
    assert_eq!((unit.stage(), counts(&unit)), (Stage::Retired, (2, 0)));
    assert_eq!(bench.engine.open_sessions(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn unit_retired_while_it_loads_answers_those_who_wait_first() {
    for waiting in [0, 3] {
        let bench = Bench::new();
        let unit = bench.unit(|_| {});
        bench.engine.loads.close();
        let loading = ensure_loaded(&unit);
        until(|| unit.state.lock().load_waiters.len() == 1).await;
        let asked: Vec<_> = (0..waiting).map(|value| ask(&unit, value)).collect();
        until(|| unit.state.lock().batcher.queued() == asked.len()).await;
        let retiring = retire(&unit);
        until(|| unit.state.lock().lifecycle.is_retiring()).await;
        bench.engine.loads.open();
        for (value, asked) in (0..).zip(asked) {
            assert_eq!(asked.await.unwrap().unwrap(), value);
        }
        loading.await.unwrap().unwrap();
        retiring.await.unwrap();
        assert_eq!(unit.stage(), Stage::Retired);
        assert_eq!(bench.engine.open_sessions(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unit_retired_while_its_load_fails_is_retired() {
    let bench = Bench::new();
    let unit = bench.unit(|_| {});
    bench.engine.fail_loads(true);
    bench.engine.loads.close();
    let asked = ask(&unit, 1);
    until(|| unit.state.lock().batcher.queued() == 1).await;
    let retiring = retire(&unit);
    until(|| unit.state.lock().lifecycle.is_retiring()).await;
    bench.engine.loads.open();
    assert!(asked.await.unwrap().is_err());
    retiring.await.unwrap();
    assert_eq!(unit.stage(), Stage::Retired);
}

#[tokio::test(flavor = "multi_thread")]
async fn retiring_a_unit_that_sleeps_or_is_retired_ends_at_once() {
    let bench = Bench::new();
    let unit = bench.unit(|_| {});
    unit.retire().await;
    unit.retire().await;
    assert_eq!(unit.stage(), Stage::Retired);
    assert_eq!(bench.engine.loads_begun(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn unit_retired_while_it_closes_leaves_no_one_waiting_for_a_load() {
    let bench = Bench::with(|defaults| defaults.keep_alive = KeepAliveSpec::For(Duration::ZERO));
    let unit = bench.unit(|_| {});
    bench.engine.closes.close();
    assert_eq!(ask(&unit, 1).await.unwrap().unwrap(), 1);
    until(|| unit.stage() == Stage::Closing).await;
    let loading = ensure_loaded(&unit);
    until(|| unit.state.lock().load_waiters.len() == 1).await;
    let retiring = retire(&unit);
    until(|| unit.state.lock().lifecycle.is_retiring()).await;
    bench.engine.closes.open();
    assert!(loading.await.unwrap().is_err());
    retiring.await.unwrap();
    assert_eq!(bench.engine.loads_begun(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_unit_closes_and_wakes_when_it_is_called_even_while_closing() {
    let bench =
        Bench::with(|defaults| defaults.keep_alive = KeepAliveSpec::For(Duration::from_millis(1)));
    let unit = bench.unit(|_| {});
    assert_eq!(ask(&unit, 1).await.unwrap().unwrap(), 1);
    until(|| unit.stage() == Stage::Cold).await;
    assert_eq!(bench.engine.open_sessions(), 0);
    bench.engine.closes.close();
    assert_eq!(ask(&unit, 2).await.unwrap().unwrap(), 2);
    until(|| unit.stage() == Stage::Closing).await;
    let asked = ask(&unit, 3);
    until(|| unit.state.lock().batcher.queued() == 1).await;
    bench.engine.closes.open();
    assert_eq!(asked.await.unwrap().unwrap(), 3);
    assert_eq!(bench.engine.loads_begun(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn session_is_gone_when_its_unit_says_that_it_is_retired() {
    let bench = Bench::new();
    for value in 0..100 {
        let unit = bench.unit(|_| {});
        assert_eq!(ask(&unit, value).await.unwrap().unwrap(), value);
        unit.retire().await;
        assert_eq!(bench.engine.open_sessions(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn poisoned_request_in_a_batch_fails_alone() {
    for bad in [POISON, PANIC] {
        let bench = Bench::new();
        let unit = bench.unit(|spec| spec.batching = Some(batching()));
        bench.engine.loads.close();
        // It runs alone, the others together.
        let first = ask(&unit, 0);
        until(|| unit.state.lock().batcher.queued() == 1).await;
        let asked: Vec<_> = [1, bad, 3].map(|value| ask(&unit, value)).into();
        until(|| unit.state.lock().batcher.queued() == 4).await;
        bench.engine.loads.open();
        assert_eq!(first.await.unwrap().unwrap(), 0);
        let mut answers = Vec::new();
        for asked in asked {
            answers.push(asked.await.unwrap().ok());
        }
        assert_eq!(answers, [Some(1), None, Some(3)]);
        assert_eq!(counts(&unit), (3, 1));
        bench.assert_idle(&unit).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn request_that_left_a_batch_does_not_stop_the_others() {
    let bench = Bench::new();
    let unit = bench.unit(|spec| spec.batching = Some(batching()));
    bench.engine.loads.close();
    bench.engine.runs.close();
    // It runs alone, the others together.
    let first = ask(&unit, 0);
    until(|| unit.state.lock().batcher.queued() == 1).await;
    let stays = ask(&unit, HELD);
    let leaves = ask(&unit, 2);
    until(|| unit.state.lock().batcher.queued() == 3).await;
    bench.engine.loads.open();
    assert_eq!(first.await.unwrap().unwrap(), 0);
    until(|| unit.state.lock().runs.len() == 1).await;
    leaves.abort();
    until(|| unit.state.lock().runs[0].members.len() == 1).await;
    bench.engine.runs.open();
    assert_eq!(stays.await.unwrap().unwrap(), HELD);
    assert_eq!(counts(&unit), (2, 1));
    bench.assert_idle(&unit).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_keep_the_order_of_their_requests_past_one_that_was_cancelled() {
    for cancel in [false, true] {
        let bench = Bench::new();
        let unit = bench.unit(|spec| {
            let mut batching = batching();
            batching.preserve_ordering = true;
            spec.batching = Some(batching);
            spec.max_batch_size = 1;
            spec.concurrency = 2;
        });
        bench.engine.runs.close();
        let first = ask(&unit, HELD);
        until(|| unit.state.lock().runs.len() == 1).await;
        let second = ask(&unit, 2);
        until(|| bench.engine.runs_ended() == 1 && unit.state.lock().runs.len() == 1).await;
        assert!(!second.is_finished());
        if cancel {
            first.abort();
        } else {
            bench.engine.runs.open();
            assert_eq!(first.await.unwrap().unwrap(), HELD);
        }
        assert_eq!(second.await.unwrap().unwrap(), 2);
        bench.assert_idle(&unit).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn alarms_do_not_pile_up() {
    let bench = Bench::new();
    let unit = bench.unit(|spec| {
        let mut batching = batching();
        batching.max_delay = Duration::from_micros(100);
        spec.batching = Some(batching);
    });
    for value in 0..100 {
        let mut request = request(value);
        request.deadline = Some(bench.host.clock.now() + Duration::from_secs(3600));
        assert_eq!(ask_with(&unit, request).await.unwrap().unwrap(), value);
    }
    assert!(bench.host.alarm.pending() <= 3, "{:?}", bench.host.alarm);
    bench.assert_idle(&unit).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn batch_that_waits_for_company_does_not_queue_for_a_run_slot() {
    let bench = Bench::new();
    let busy = bench.unit(|_| {});
    bench.engine.runs.close();
    let running: Vec<_> = (0..fake::SLOTS).map(|_| bench.unit(|_| {})).collect();
    let running: Vec<_> = running.iter().map(|unit| ask(unit, HELD)).collect();
    until(|| bench.host.slots.lock().used() == fake::SLOTS).await;
    let patient = bench.unit(|spec| {
        let mut batching = batching();
        batching.max_delay = Duration::from_secs(3600);
        spec.batching = Some(batching);
    });
    patient.ensure_loaded().await.unwrap();
    busy.ensure_loaded().await.unwrap();
    let delayed: Vec<_> = (0..4).map(|value| ask(&patient, value)).collect();
    until(|| patient.state.lock().batcher.queued() == 4).await;
    assert_eq!(bench.host.slots.lock().waiting(), 0);
    let due = ask(&busy, 5);
    until(|| bench.host.slots.lock().waiting() == 1).await;
    bench.engine.runs.open();
    assert_eq!(due.await.unwrap().unwrap(), 5);
    for running in running {
        assert_eq!(running.await.unwrap().unwrap(), HELD);
    }
    // The batch is full now.
    let rest: Vec<_> = (4..8).map(|value| ask(&patient, value)).collect();
    for (value, asked) in (0..).zip(delayed.into_iter().chain(rest)) {
        assert_eq!(asked.await.unwrap().unwrap(), value);
    }
    bench.assert_idle(&patient).await;
}

fn retire(unit: &Arc<Unit>) -> tokio::task::JoinHandle<()> {
    let unit = Arc::clone(unit);
    tokio::spawn(async move { unit.retire().await })
}

fn ensure_loaded(
    unit: &Arc<Unit>,
) -> tokio::task::JoinHandle<Result<(), crate::error::ServeError>> {
    let unit = Arc::clone(unit);
    tokio::spawn(async move { unit.ensure_loaded().await })
}

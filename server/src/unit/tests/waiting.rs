//! Loads that wait: for their turn, for memory, and while their files change.

use std::sync::atomic::Ordering;

use dormouse_core::code::ErrorCode;
use dormouse_core::lifecycle::Stage;

use super::fake::{Bench, FakeFiles, HELD, ask, batching, counts, until};
use crate::unit::{NotAnswered, Unit};

const MIB: u64 = 1 << 20;

/// A unit whose load takes 16 MiB and three times its files.
fn unit_of(bench: &Bench, size: u64) -> std::sync::Arc<Unit> {
    let files = FakeFiles {
        size,
        ..FakeFiles::default()
    };
    bench.unit_of(files, |_| {})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_that_waits_for_memory_lets_others_have_its_turn() {
    let bench = Bench::bounded(60 * MIB, 1, |_| {});
    let busy = unit_of(&bench, 0);
    bench.engine.runs.close();
    let running = ask(&busy, HELD);
    until(|| busy.stage() == Stage::Warm).await;
    // 16 MiB are in use: 46 have to wait for them, another 16 need not.
    let large = unit_of(&bench, 10 * MIB);
    let waiting = ask(&large, 1);
    until(|| large.stage() == Stage::Loading).await;
    for value in 2..12 {
        let small = unit_of(&bench, 0);
        assert_eq!(ask(&small, value).await.unwrap().unwrap(), value);
        assert_eq!(large.stage(), Stage::Loading);
        small.retire().await;
    }
    bench.engine.runs.open();
    assert_eq!(running.await.unwrap().unwrap(), HELD);
    assert_eq!(waiting.await.unwrap().unwrap(), 1);
    assert_eq!(counts(&large), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_never_fits_is_told_so_without_a_time_to_try_again() {
    let bench = Bench::bounded(60 * MIB, 1, |_| {});
    let unit = unit_of(&bench, 30 * MIB);
    // The first is told by the load, the second while its failure stands.
    for _ in 0..2 {
        let error = ask(&unit, 1).await.unwrap().unwrap_err();
        assert_eq!(error.code(), ErrorCode::NeverFits);
        assert_eq!(error.retry_hint(), None);
        assert_eq!(
            error.message(),
            "model 'echo' version 1 needs 76.0 MiB of memory, more than the memory budget of 60.0 MiB (--memory-budget)"
        );
    }
    assert_eq!(bench.engine.loads_begun(), 0);
    assert_eq!(bench.host.wake.residency.usage().held, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_a_load_whose_files_changed_are_sent_on() {
    let bench = Bench::bounded(60 * MIB, 1, |_| {});
    let blocking = bench.unit(|_| {});
    bench.engine.loads.close();
    let first = ask(&blocking, 0);
    until(|| bench.engine.loads_begun() == 1).await;
    // Its load waits for its turn.
    let files = FakeFiles::default();
    let unit = bench.unit_of(files.clone(), |spec| {
        spec.batching = Some(batching());
        if let Some(batching) = &mut spec.batching {
            batching.preserve_ordering = true;
        }
    });
    let asked: Vec<_> = (0..20)
        .map(|value| {
            let unit = std::sync::Arc::clone(&unit);
            let request = super::fake::request(value);
            tokio::spawn(async move { unit.infer(request).await })
        })
        .collect();
    until(|| unit.queued() == 20).await;
    let eager = tokio::spawn({
        let unit = std::sync::Arc::clone(&unit);
        async move { unit.ensure_loaded().await }
    });
    until(|| unit.state.lock().load_waiters.len() == 1).await;
    files.changed.store(true, Ordering::SeqCst);
    bench.engine.loads.open();
    assert_eq!(first.await.unwrap().unwrap(), 0);
    for asked in asked {
        let answer = asked.await.unwrap();
        assert!(matches!(answer, Err(NotAnswered::Retired(_))), "{answer:?}");
    }
    let told = eager.await.unwrap().unwrap_err();
    assert!(told.message().contains("files were changed"), "{told}");
    assert_eq!(unit.stage(), Stage::Cold);
    assert_eq!(counts(&unit), (0, 0));
    assert_eq!(bench.engine.loads_begun(), 1);
    // They are what they were: nothing stands against it.
    files.changed.store(false, Ordering::SeqCst);
    assert_eq!(ask(&unit, 7).await.unwrap().unwrap(), 7);
    bench.assert_idle(&unit).await;
}

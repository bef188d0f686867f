//! The server's count of what happened is the clients' count, to the unit.

use std::cell::Cell;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dormouse_proto::inference as pb;
use futures_util::future::join_all;

use crate::deadlines::{CANCELED, occupy, pending, start_slow, waiting, with_timeout};
use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, eventually};
use crate::wire::{self, Request, slow};

fn counts(statistics: &pb::ModelStatistics) -> Result<(u64, u64)> {
    let inference = statistics.inference_stats.as_ref();
    let inference = inference.context("no inference statistics")?;
    let count = |duration: &Option<pb::StatisticDuration>| {
        duration.as_ref().map_or(0, |duration| duration.count)
    };
    Ok((count(&inference.success), count(&inference.fail)))
}

#[tokio::test]
async fn successes_and_engine_failures_add_up() -> Result<()> {
    const CALLS: i32 = 300;
    let repository = TestRepository::new()?;
    let config = "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 500 }";
    repository.add("poison", Model::new("poison").config(config))?;
    let mut server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    let calls = (0..CALLS).map(|i| {
        let value = if i % 7 == 3 { 1000 } else { i % 16 };
        wire::infer(
            &client,
            Request::new("poison").input("X", &[1, 1], &[value]),
        )
    });
    let answers = join_all(calls).await;
    let good = answers.iter().filter(|answer| answer.is_ok()).count() as u64;
    let bad = answers.len() as u64 - good;
    ensure!(bad == (0..CALLS).filter(|i| i % 7 == 3).count() as u64);

    let statistics = wire::statistics(&client, "poison").await?;
    ensure!(counts(&statistics)? == (good, bad), "{statistics:?}");
    ensure!(statistics.inference_count == good, "{statistics:?}");
    let model = r#"model="poison""#;
    let metric = |name, labels: &'static [&'static str]| server.metric(name, labels);
    ensure!(
        server
            .metric("nv_inference_request_success", &[model])
            .await?
            == good as f64
    );
    ensure!(
        server
            .metric("nv_inference_request_failure", &[model])
            .await?
            == bad as f64
    );
    let backend = metric("nv_inference_request_failure", &[r#"reason="BACKEND""#]).await?;
    ensure!(backend == bad as f64, "{backend} of {bad}");
    ensure!(server.metric("nv_inference_count", &[model]).await? == good as f64);
    let runs = server.metric("nv_inference_exec_count", &[model]).await?;
    ensure!(runs == statistics.execution_count as f64, "{runs}");
    ensure!(metric("nv_inference_pending_request_count", &[]).await? == 0.0);
    server.assert_healthy().await
}

#[tokio::test]
async fn cancelled_and_expired_requests_add_up_too() -> Result<()> {
    const CANCELLED: usize = 7;
    const EXPIRED: usize = 5;
    const ANSWERED: usize = 9;
    let (_repository, mut server, client) = start_slow().await?;
    let failures = |reason: &'static str| {
        let server = &server;
        async move {
            let labels = [r#"model="slow""#, reason];
            server.metric("nv_inference_request_failure", &labels).await
        }
    };
    let endless = occupy(&server, &client).await?;
    let spawn = |request: Request| {
        let client = client.clone();
        tokio::spawn(async move { wire::infer(&client, request).await })
    };
    let expired: Vec<_> = (0..EXPIRED)
        .map(|_| spawn(with_timeout(slow("slow", 1), Duration::from_millis(300))))
        .collect();
    for call in expired {
        ensure!(call.await?.is_err(), "ran behind an endless run");
    }
    let cancelled: Vec<_> = (0..CANCELLED).map(|_| spawn(slow("slow", 1))).collect();
    let answered: Vec<_> = (0..ANSWERED).map(|_| spawn(slow("slow", 1))).collect();
    pending(&server, CANCELLED + ANSWERED).await?;
    for call in &cancelled {
        call.abort();
    }
    // The slot is freed only after the queue has lost them, or some would still run.
    eventually("the cancelled requests leave the queue", || async {
        Ok(waiting(&server).await? == ANSWERED as f64)
    })
    .await?;
    endless.run.abort();
    for call in answered {
        call.await??;
    }
    // The endless run is the one more.
    let cancellations = endless.cancelled + (CANCELLED + 1) as f64;
    let expected = (cancellations, cancellations + EXPIRED as f64);
    let seen = Cell::new((0.0, 0.0));
    eventually("every failure is counted", || async {
        seen.set((failures(CANCELED).await?, failures("reason=").await?));
        Ok(seen.get() == expected)
    })
    .await
    .with_context(|| {
        format!(
            "(cancelled, all): found {:?}, expected {expected:?}",
            seen.get()
        )
    })?;
    let (success, fail) = counts(&wire::statistics(&client, "slow").await?)?;
    ensure!(success as f64 == endless.successes + ANSWERED as f64);
    ensure!(fail as f64 == expected.1, "{fail}");
    server.assert_healthy().await
}

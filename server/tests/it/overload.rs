//! Far more than fits: some is served, the rest is refused, and nobody else notices. How near to
//! capacity that is, `dormouse-load overload` measures.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::task::JoinSet;
use tonic::Code;

use crate::deadlines::{ONE_AT_A_TIME, start_slow, with_timeout};
use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, patiently};
use crate::wire::{self, add_sub, slow};

/// About twenty milliseconds.
const WORK: i64 = 5_000;
const DEADLINE: Duration = Duration::from_secs(1);

#[tokio::test]
async fn of_more_than_fits_some_is_served_and_the_rest_refused() -> Result<()> {
    const AT_ONCE: usize = 1000;
    const CONNECTIONS: usize = 8;
    let (_repository, mut server, client) = start_slow().await?;
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        clients.push(server.grpc().await?);
    }
    for _ in 0..20 {
        wire::infer(&client, slow("slow", WORK)).await?;
    }
    let (mut good, mut refused) = (0, 0);
    // Twenty seconds of work for one. A machine that stands still for all of it serves none; such
    // a moment passes.
    patiently("some are served and some refused", async {
        while good == 0 || refused == 0 {
            let mut calls = JoinSet::new();
            for index in 0..AT_ONCE {
                let client = clients[index % CONNECTIONS].clone();
                calls.spawn(async move {
                    let request = with_timeout(slow("slow", WORK), DEADLINE);
                    wire::infer(&client, request).await
                });
            }
            while let Some(call) = calls.join_next().await {
                let Err(status) = call? else {
                    good += 1;
                    continue;
                };
                let expected = [
                    Code::Unavailable,
                    Code::DeadlineExceeded,
                    Code::ResourceExhausted,
                ];
                ensure!(expected.contains(&status.code()), "{status:?}");
                refused += 1;
            }
        }
        anyhow::Ok(())
    })
    .await??;
    // The queue is empty now.
    wire::infer(&client, slow("slow", 1)).await?;
    server.assert_healthy().await
}

#[tokio::test]
async fn a_flooded_model_leaves_its_neighbour_alone() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("slow", Model::new("slow").config(ONE_AT_A_TIME))?;
    repository.add("simple", Model::new("add_sub"))?;
    let mut server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    wire::infer(&client, slow("slow", 1)).await?;
    let mut flood = JoinSet::new();
    for _ in 0..300 {
        let client = client.clone();
        flood.spawn(async move {
            let request = with_timeout(slow("slow", WORK), DEADLINE);
            let _ = wire::infer(&client, request).await;
        });
    }
    let neighbour = server.grpc().await?;
    for i in 0..100 {
        wire::infer(&neighbour, add_sub("simple", i, 1)).await?;
    }
    while flood.join_next().await.is_some() {}
    server.assert_healthy().await
}

#[tokio::test]
async fn a_full_queue_refuses_and_says_so() -> Result<()> {
    const QUEUE: usize = 4;
    const CALLS: usize = 50;
    let repository = TestRepository::new()?;
    // No batch is ever full, so that the queue is what the requests meet.
    let config = format!(
        "max_batch_size: 8
        dynamic_batching {{
            preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 600000000
            default_queue_policy {{ max_queue_size: {QUEUE} }}
        }}"
    );
    repository.add("simple", Model::new("add_sub").config(&config))?;
    let mut server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    let mut calls = JoinSet::new();
    for _ in 0..CALLS {
        let client = client.clone();
        calls.spawn(async move { wire::infer(&client, add_sub("simple", 1, 1)).await });
    }
    for _ in 0..CALLS - QUEUE {
        let answer = patiently("a request is refused", calls.join_next()).await?;
        let status = answer.context("every call has ended")??.err();
        let status = status.context("a request ran in a batch that was not full")?;
        ensure!(status.code() == Code::Unavailable, "{status:?}");
        ensure!(status.message().contains("simple"), "{status:?}");
    }
    let metric = |name, labels: &'static [&'static str]| server.metric(name, labels);
    let refused = metric("nv_inference_request_failure", &[r#"reason="REJECTED""#]).await?;
    ensure!(refused == (CALLS - QUEUE) as f64, "{refused} are counted");
    let waiting = metric("nv_inference_pending_request_count", &[]).await?;
    ensure!(waiting == QUEUE as f64, "{waiting} wait");
    calls.shutdown().await;
    server.assert_healthy().await
}

//! Nothing runs for a caller who has given up or whose time is over.

use std::cell::Cell;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dormouse_proto::inference as pb;
use futures_util::future::join_all;
use pb::infer_parameter::ParameterChoice;
use tokio::task::JoinHandle;
use tonic::Code;

use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, eventually, patiently};
use crate::wire::{self, GrpcClient, Request, output, slow};

/// Labels of the metrics.
const SLOW: &str = r#"model="slow""#;
pub(crate) const CANCELED: &str = r#"reason="CANCELED""#;

/// More iterations than any test waits for: minutes.
pub(crate) const ENDLESS: i64 = 100_000_000;

/// One run at a time, so that whatever waits behind a run shows it.
pub(crate) const ONE_AT_A_TIME: &str = "instance_group [ { kind: KIND_CPU count: 1 } ]";

pub(crate) async fn start_slow() -> Result<(TestRepository, TestServer, GrpcClient)> {
    let repository = TestRepository::new()?;
    repository.add("slow", Model::new("slow").config(ONE_AT_A_TIME))?;
    let server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    wire::infer(&client, slow("slow", 1)).await?;
    Ok((repository, server, client))
}

/// Gives the request the v2 `timeout` parameter, in microseconds.
pub(crate) fn with_timeout(mut request: Request, timeout: Duration) -> Request {
    let micros = i64::try_from(timeout.as_micros()).expect("a short time");
    request.0.parameters.insert(
        "timeout".into(),
        pb::InferParameter {
            parameter_choice: Some(ParameterChoice::Int64Param(micros)),
        },
    );
    request
}

/// An endless run that holds the one slot, and what was counted before it ends.
pub(crate) struct Occupied {
    pub(crate) run: JoinHandle<()>,
    pub(crate) successes: f64,
    pub(crate) cancelled: f64,
}

/// Starts an endless run in the background and waits until the one slot is taken by it.
pub(crate) async fn occupy(server: &TestServer, client: &GrpcClient) -> Result<Occupied> {
    let settled = || async {
        let successes = server
            .metric("nv_inference_request_success", &[SLOW])
            .await?;
        let cancelled = server
            .metric("nv_inference_request_failure", &[SLOW, CANCELED])
            .await?;
        anyhow::Ok((successes, cancelled))
    };
    let (successes, cancelled) = settled().await?;
    let before = successes + cancelled;
    let spawn = |iterations| {
        let client = client.clone();
        tokio::spawn(async move {
            let _ = wire::infer(&client, slow("slow", iterations)).await;
        })
    };
    let run = spawn(ENDLESS);
    // Requests may overtake each other on their way: probes are sent until one has to wait.
    let mut probes = 0.0;
    let probe = patiently("a request waits behind the endless one", async {
        loop {
            let probe = spawn(1);
            probes += 1.0;
            while !probe.is_finished() {
                if waiting(server).await? >= 1.0 {
                    return anyhow::Ok(probe);
                }
            }
        }
    })
    .await??;
    probe.abort();
    // What waited may have been the endless run itself: either way every probe is settled now
    // and the queue is empty, so the endless one runs.
    let last = Cell::new((0.0, 0.0));
    eventually("the probes are settled", || async {
        last.set(settled().await?);
        Ok(last.get().0 + last.get().1 == before + probes && waiting(server).await? == 0.0)
    })
    .await?;
    ensure!(!run.is_finished(), "the endless run is over");
    let (successes, cancelled) = last.get();
    Ok(Occupied {
        run,
        successes,
        cancelled,
    })
}

/// How many requests wait for their turn.
pub(crate) async fn waiting(server: &TestServer) -> Result<f64> {
    server
        .metric("nv_inference_pending_request_count", &[SLOW])
        .await
}

/// Waits until at least this many requests wait for their turn.
pub(crate) async fn pending(server: &TestServer, at_least: usize) -> Result<()> {
    eventually(&format!("{at_least} requests wait"), || async {
        Ok(waiting(server).await? >= at_least as f64)
    })
    .await
}

async fn pending_is_zero(server: &TestServer) -> Result<()> {
    eventually("no request waits", || async {
        Ok(waiting(server).await? == 0.0)
    })
    .await
}

#[tokio::test]
async fn a_running_graph_is_stopped_at_its_deadline() -> Result<()> {
    let (_repository, mut server, client) = start_slow().await?;
    let request = with_timeout(slow("slow", ENDLESS), Duration::from_millis(200));
    let status = wire::infer(&client, request).await.err();
    let status = status.context("an endless run ended")?;
    ensure!(status.code() == Code::DeadlineExceeded, "{status:?}");

    let mut request = tonic::Request::new(slow("slow", ENDLESS).0);
    request.set_timeout(Duration::from_millis(200));
    let status = client.clone().model_infer(request).await.err();
    let status = status.context("an endless run ended")?;
    ensure!(
        matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled),
        "{status:?}"
    );
    // There is one slot: an answer means that both runs were stopped.
    let answer = wire::infer(&client, slow("slow", 10)).await?;
    ensure!(output::<i64>(&answer, "COUNT", &[1])? == [10]);
    let records = server.log.records();
    let error = records.iter().find(|record| record["level"] == "ERROR");
    ensure!(error.is_none(), "a stopped run is no error: {error:?}");
    server.assert_healthy().await
}

#[tokio::test]
async fn a_running_graph_is_stopped_when_its_caller_goes_away() -> Result<()> {
    let (_repository, mut server, client) = start_slow().await?;
    let endless = occupy(&server, &client).await?;
    endless.run.abort();
    let answer = wire::infer(&client, slow("slow", 10)).await?;
    ensure!(output::<i64>(&answer, "COUNT", &[1])? == [10]);
    server.assert_healthy().await
}

#[tokio::test]
async fn cancelled_requests_in_the_queue_never_run() -> Result<()> {
    const QUEUED: usize = 10;
    let (_repository, mut server, client) = start_slow().await?;
    let endless = occupy(&server, &client).await?;
    let before = wire::statistics(&client, "slow").await?;
    let queued: Vec<_> = (0..QUEUED)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                let _ = wire::infer(&client, slow("slow", 5)).await;
            })
        })
        .collect();
    pending(&server, QUEUED).await?;
    for call in &queued {
        call.abort();
    }
    pending_is_zero(&server).await?;
    endless.run.abort();
    wire::infer(&client, slow("slow", 1)).await?;
    let after = wire::statistics(&client, "slow").await?;
    let runs = after.execution_count - before.execution_count;
    ensure!(
        runs <= 2,
        "{runs} runs: at most the endless one and the last should be counted"
    );
    // The queued ones and the endless one.
    let expected = endless.cancelled + (QUEUED + 1) as f64;
    eventually("every cancelled request is counted", || async {
        let cancelled = server
            .metric("nv_inference_request_failure", &[SLOW, CANCELED])
            .await?;
        Ok(cancelled == expected)
    })
    .await?;
    server.assert_healthy().await
}

#[tokio::test]
async fn expired_requests_in_the_queue_are_answered_at_once_and_never_run() -> Result<()> {
    let (_repository, mut server, client) = start_slow().await?;
    let endless = occupy(&server, &client).await?;
    let before = wire::statistics(&client, "slow").await?;
    let calls = (0..10).map(|i| {
        let timeout = Duration::from_millis(50 + 10 * i);
        wire::infer(&client, with_timeout(slow("slow", 5), timeout))
    });
    for answer in join_all(calls).await {
        let status = answer
            .err()
            .context("a request ran behind an endless one")?;
        ensure!(
            matches!(status.code(), Code::DeadlineExceeded | Code::Unavailable),
            "{status:?}"
        );
    }
    ensure!(!endless.run.is_finished(), "the endless run is over");
    endless.run.abort();
    wire::infer(&client, slow("slow", 1)).await?;
    let after = wire::statistics(&client, "slow").await?;
    let runs = after.execution_count - before.execution_count;
    ensure!(runs <= 2, "{runs} runs");
    server.assert_healthy().await
}

#[tokio::test]
async fn an_http_clients_disconnect_stops_its_run() -> Result<()> {
    use tokio::io::AsyncWriteExt;
    let (_repository, mut server, client) = start_slow().await?;
    let body = format!(
        r#"{{"inputs":[{{"name":"ITERATIONS","datatype":"INT64","shape":[1],"data":[{ENDLESS}]}}]}}"#
    );
    let head = format!(
        "POST /v2/models/slow/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = tokio::net::TcpStream::connect(server.http).await?;
    stream.write_all(head.as_bytes()).await?;
    patiently("a request waits behind the endless one", async {
        loop {
            let client = client.clone();
            let probe = tokio::spawn(async move { wire::infer(&client, slow("slow", 10)).await });
            while !probe.is_finished() {
                if waiting(&server).await? >= 1.0 {
                    drop(stream);
                    // Answered once the slot is free.
                    let answer = probe.await??;
                    ensure!(output::<i64>(&answer, "COUNT", &[1])? == [10]);
                    return Ok(());
                }
            }
        }
    })
    .await??;
    server.assert_healthy().await
}

#[tokio::test]
async fn an_http_request_past_its_timeout_says_so() -> Result<()> {
    let (_repository, mut server, client) = start_slow().await?;
    let body = format!(
        r#"{{"parameters":{{"timeout":200000}},
            "inputs":[{{"name":"ITERATIONS","datatype":"INT64","shape":[1],"data":[{ENDLESS}]}}]}}"#
    );
    let answer = server
        .post("/v2/models/slow/infer", body.as_bytes())
        .await?;
    ensure!(answer.status >= 400, "{}", answer.status);
    ensure!(!answer.error()?.is_empty());
    let code = answer.header("dormouse-error-code");
    ensure!(code == Some("DEADLINE_EXCEEDED"), "{code:?}");
    wire::infer(&client, slow("slow", 10)).await?;
    server.assert_healthy().await
}

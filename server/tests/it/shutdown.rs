//! Leaving: what was accepted is answered, what comes later is refused, the exit is clean.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tonic::Code;

use crate::deadlines::{ENDLESS, ONE_AT_A_TIME, occupy, pending, start_slow};
use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, eventually, patiently};
use crate::wire::{self, add_sub, output, slow};

#[tokio::test]
async fn requests_in_flight_are_answered_before_the_exit() -> Result<()> {
    const IN_FLIGHT: i64 = 20;
    let (_repository, mut server, client) = start_slow().await?;
    // An idle keep-alive connection must not hold the exit up.
    let mut idle = TcpStream::connect(server.http).await?;
    idle.write_all(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        .await?;
    let endless = occupy(&server, &client).await?;
    let calls: Vec<_> = (0..IN_FLIGHT)
        .map(|i| {
            let client = client.clone();
            let count = 1_000 + i;
            tokio::spawn(async move { (count, wire::infer(&client, slow("slow", count)).await) })
        })
        .collect();
    pending(&server, calls.len()).await?;
    server.terminate()?;
    endless.run.abort();
    for call in calls {
        let (count, answer) = call.await?;
        let answer = answer.context("a request in flight was lost")?;
        ensure!(output::<i64>(&answer, "COUNT", &[1])? == [count]);
    }
    let late = match server.grpc().await {
        Ok(client) => wire::infer(&client, slow("slow", 1)).await.is_ok(),
        Err(_) => false,
    };
    ensure!(!late, "a request after the end was answered");
    let status = server.exited().await?;
    ensure!(status.success(), "{status}\n{}", server.log.tail());
    drop(idle);
    Ok(())
}

/// Layout of a model whose load takes minutes: its warm-up counts that far.
fn endless_load(repository: &TestRepository, parameters: &str) -> Result<()> {
    let config = format!(
        r#"{parameters}
        model_warmup [ {{
            name: "endless" batch_size: 1
            inputs {{ key: "ITERATIONS"
                      value {{ data_type: TYPE_INT64 dims: [ 1 ] input_data_file: "count" }} }}
        }} ]"#
    );
    repository.add("endless", Model::new("slow").config(&config))?;
    let folder = repository.model_dir("endless").join("warmup");
    std::fs::create_dir(&folder)?;
    std::fs::write(folder.join("count"), ENDLESS.to_le_bytes())?;
    Ok(())
}

/// Ends a server while twenty requests are in flight and a model loads: all are answered, and the
/// load is not waited for.
async fn exit_during_a_load(repository: &TestRepository, mut server: TestServer) -> Result<()> {
    const IN_FLIGHT: i64 = 20;
    let client = server.grpc().await?;
    wire::infer(&client, slow("slow", 1)).await?;
    eventually("the load is under way", || async {
        Ok(server
            .log
            .records()
            .iter()
            .any(|record| record["message"] == "load started" && record["model"] == "endless"))
    })
    .await?;
    let mut idle = TcpStream::connect(server.http).await?;
    idle.write_all(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        .await?;
    let endless = occupy(&server, &client).await?;
    let calls: Vec<_> = (0..IN_FLIGHT)
        .map(|i| {
            let client = client.clone();
            let count = 1_000 + i;
            tokio::spawn(async move { (count, wire::infer(&client, slow("slow", count)).await) })
        })
        .collect();
    pending(&server, calls.len()).await?;
    server.terminate()?;
    eventually("the server takes its leave", || async {
        let records = server.log.records();
        Ok(records
            .iter()
            .any(|record| record["message"] == "shutting down"))
    })
    .await?;
    endless.run.abort();
    for call in calls {
        let (count, answer) = call.await?;
        let answer = answer.context("a request in flight was lost")?;
        ensure!(output::<i64>(&answer, "COUNT", &[1])? == [count]);
    }
    let status = server.exited().await?;
    ensure!(status.success(), "{status}\n{}", server.log.tail());
    let loaded = server
        .log
        .records()
        .iter()
        .any(|record| record["message"] == "loaded" && record["model"] == "endless");
    ensure!(!loaded, "the load was not endless");
    drop(idle);
    ensure!(repository.path().exists());
    Ok(())
}

#[tokio::test]
async fn an_exit_waits_for_requests_and_not_for_a_load() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("slow", Model::new("slow").config(ONE_AT_A_TIME))?;
    let eager = r#"parameters { key: "dormouse.load" value { string_value: "eager" } }"#;
    endless_load(&repository, eager)?;
    let server = TestServer::over(&repository)
        // Longer than the test's patience.
        .arg("--exit-timeout-secs=600")
        .spawn()
        .await?;
    exit_during_a_load(&repository, server).await
}

#[tokio::test]
async fn an_exit_while_start_up_models_load_answers_what_was_asked() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("slow", Model::new("slow").config(ONE_AT_A_TIME))?;
    endless_load(&repository, "")?;
    let server = TestServer::over(&repository)
        .arg("--model-control-mode=explicit")
        .arg("--load-model=slow")
        .arg("--load-model=endless")
        .arg("--exit-timeout-secs=600")
        .spawn()
        .await?;
    eventually("the other start-up model serves", || async {
        let client = server.grpc().await?;
        Ok(wire::infer(&client, slow("slow", 1)).await.is_ok())
    })
    .await?;
    exit_during_a_load(&repository, server).await
}

#[tokio::test]
async fn a_draining_server_is_not_ready() -> Result<()> {
    let (_repository, mut server, client) = start_slow().await?;
    let endless = occupy(&server, &client).await?;
    server.terminate()?;
    crate::server::eventually("readiness is taken back", || async {
        Ok(server
            .get("/v2/health/ready")
            .await
            .map_or(true, |answer| answer.status != 200))
    })
    .await?;
    endless.run.abort();
    let status = server.exited().await?;
    ensure!(status.success(), "{status}\n{}", server.log.tail());
    Ok(())
}

#[tokio::test]
async fn a_signal_that_comes_twice_at_once_is_one_request_to_leave() -> Result<()> {
    let (_repository, mut server, client) = start_slow().await?;
    let endless = occupy(&server, &client).await?;
    // As `timeout` does: to the process, and to its group.
    server.terminate()?;
    server.terminate()?;
    let record = |records: &[serde_json::Value]| {
        let mut messages = records
            .iter()
            .filter_map(|record| record["message"].as_str());
        messages
            .any(|message| message == "shutting down")
            .then_some(())
    };
    patiently("the server begins to leave", server.log.wait_for(record)).await??;
    endless.run.abort();
    let status = server.exited().await?;
    ensure!(status.success(), "{status}\n{}", server.log.tail());
    Ok(())
}

#[tokio::test]
async fn work_that_outlasts_the_exit_timeout_is_cut_off() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("slow", Model::new("slow"))?;
    let mut server = TestServer::over(&repository)
        .arg("--exit-timeout-secs=1")
        .start()
        .await?;
    let client = server.grpc().await?;
    wire::infer(&client, slow("slow", 1)).await?;
    let endless = {
        let client = client.clone();
        tokio::spawn(async move { wire::infer(&client, slow("slow", 100_000_000)).await })
    };
    let labels = [r#"model="slow""#];
    // Give the request time to be on its way: an answered call on the same connection follows it.
    wire::infer(&client, slow("slow", 1)).await?;
    ensure!(server.metric("nv_inference_count", &labels).await? >= 2.0);
    server.terminate()?;
    let status = server.exited().await?;
    ensure!(
        status.code().is_some(),
        "the server died of a signal: {status}"
    );
    let answer = endless.await?.err().context("an endless run ended")?;
    ensure!(
        matches!(
            answer.code(),
            Code::Unavailable | Code::Cancelled | Code::Unknown | Code::Internal
        ),
        "{answer:?}"
    );
    Ok(())
}

#[tokio::test]
async fn an_idle_server_stops_at_once() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let mut server = TestServer::over(&repository)
        // Longer than the test's patience: only a server that does not wait for it passes.
        .arg("--exit-timeout-secs=600")
        .start()
        .await?;
    let client = server.grpc().await?;
    wire::infer(&client, add_sub("simple", 1, 1)).await?;
    let idle = TcpStream::connect(server.http).await?;
    tokio::time::sleep(Duration::from_millis(20)).await;
    server.terminate()?;
    let status = server.exited().await?;
    ensure!(status.success(), "{status}\n{}", server.log.tail());
    drop(idle);
    Ok(())
}

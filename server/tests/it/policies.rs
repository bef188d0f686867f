//! What a configuration says about waiting: priorities, order, sizes, warm-ups.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dormouse_proto::inference as pb;
use futures_util::StreamExt;
use futures_util::future::try_join_all;
use futures_util::stream::FuturesUnordered;
use pb::infer_parameter::ParameterChoice;

use crate::deadlines::{ENDLESS, ONE_AT_A_TIME, occupy, pending};
use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, patiently};
use crate::wire::{self, Request, add_sub, output, slow};

fn with_priority(mut request: Request, level: u64) -> Request {
    let parameter = pb::InferParameter {
        parameter_choice: Some(ParameterChoice::Uint64Param(level)),
    };
    request.0.parameters.insert("priority".into(), parameter);
    request
}

#[tokio::test]
async fn an_important_request_overtakes_those_that_wait() -> Result<()> {
    let repository = TestRepository::new()?;
    let config = format!(
        "{ONE_AT_A_TIME} dynamic_batching {{ priority_levels: 3 default_priority_level: 2 }}"
    );
    repository.add("slow", Model::new("slow").config(&config))?;
    let mut server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    wire::infer(&client, slow("slow", 1)).await?;
    let endless = occupy(&server, &client).await?;
    // In the order in which they arrive: a task of their own polls those that were woken only.
    let mut calls = FuturesUnordered::new();
    for level in [3, 2, 3, 2, 1] {
        let client = client.clone();
        calls.push(tokio::spawn(async move {
            wire::infer(&client, with_priority(slow("slow", 20_000), level)).await?;
            anyhow::Ok(level)
        }));
    }
    pending(&server, calls.len()).await?;
    endless.run.abort();
    let mut finished = Vec::new();
    while let Some(level) = calls.next().await {
        finished.push(level??);
    }
    ensure!(finished == [1, 2, 2, 3, 3], "{finished:?}");
    server.assert_healthy().await
}

#[tokio::test]
async fn answers_leave_in_the_order_of_their_requests_when_that_is_asked_for() -> Result<()> {
    let repository = TestRepository::new()?;
    let config = "instance_group [ { kind: KIND_CPU count: 2 } ]
        dynamic_batching { preserve_ordering: true }";
    repository.add("slow", Model::new("slow").config(config))?;
    let mut server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    wire::infer(&client, slow("slow", 1)).await?;
    let spawn = |iterations| {
        let client = client.clone();
        tokio::spawn(async move { wire::infer(&client, slow("slow", iterations)).await })
    };
    let endless = spawn(ENDLESS);
    // There is room for two runs: a request that is not answered is one whose answer is kept back
    // behind the endless one. Requests may overtake each other on their way, hence the loop.
    let kept = patiently("an answer is kept back", async {
        loop {
            let mut call = spawn(1);
            match tokio::time::timeout(Duration::from_secs(1), &mut call).await {
                Ok(answer) => answer??,
                Err(_) => return anyhow::Ok(call),
            };
        }
    })
    .await??;
    ensure!(!endless.is_finished() && !kept.is_finished());
    endless.abort();
    let answer = patiently("the kept answer leaves", kept).await???;
    ensure!(output::<i64>(&answer, "COUNT", &[1])? == [1]);
    server.assert_healthy().await
}

#[tokio::test]
async fn a_preferred_size_runs_at_once_and_fewer_wait_for_the_delay() -> Result<()> {
    let repository = TestRepository::new()?;
    let config = |delay: u64| {
        format!(
            "max_batch_size: 8 dynamic_batching {{
                preferred_batch_size: [ 4 ] max_queue_delay_microseconds: {delay} }}"
        )
    };
    // Longer than the test's patience, and long enough to send three requests in.
    for (name, delay) in [("patient", 600_000_000), ("brief", 8_000_000)] {
        repository.add(name, Model::new("add_sub").config(&config(delay)))?;
    }
    let mut server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    for (name, calls, runs) in [("patient", 4, 1), ("brief", 3, 1)] {
        let calls = (0..calls).map(|i| wire::infer(&client, add_sub(name, i, 1)));
        patiently("the batch runs", try_join_all(calls)).await??;
        let statistics = wire::statistics(&client, name).await?;
        ensure!(statistics.execution_count == runs, "{name}: {statistics:?}");
    }
    server.assert_healthy().await
}

#[tokio::test]
async fn a_model_whose_warm_up_fails_stays_away_and_says_why() -> Result<()> {
    let repository = TestRepository::new()?;
    let config = r#"max_batch_size: 8
        model_warmup [ {
            name: "out of range" batch_size: 2
            inputs { key: "X" value { data_type: TYPE_INT32 dims: [ 1 ] input_data_file: "x" } }
        } ]"#;
    for (name, value) in [("bad", 99i32), ("good", 3)] {
        repository.add(name, Model::new("poison").config(config))?;
        let folder = repository.model_dir(name).join("warmup");
        std::fs::create_dir(&folder)?;
        std::fs::write(folder.join("x"), value.to_le_bytes())?;
    }
    let mut server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    let request = |model: &str| Request::new(model).input("X", &[1, 1], &[3]);
    let answer = wire::infer(&client, request("good")).await?;
    ensure!(output::<i32>(&answer, "Y", &[1, 1])? == [30]);
    let status = wire::infer(&client, request("bad")).await.err();
    let status = status.context("a model answered whose warm-up fails")?;
    ensure!(status.code() == tonic::Code::Unavailable, "{status:?}");
    ensure!(status.message().contains("out of range"), "{status:?}");
    let (state, reason) = wire::index_state(&client, "bad", "1").await?;
    ensure!(state == "UNAVAILABLE", "{state}");
    ensure!(reason.contains("warm-up 'out of range'"), "{reason}");
    // Warm-ups are nobody's requests.
    let statistics = wire::statistics(&client, "good").await?;
    ensure!(statistics.inference_count == 1, "{statistics:?}");
    server.assert_healthy().await
}

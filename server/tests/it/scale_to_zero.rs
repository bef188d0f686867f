//! Idle models return to zero, busy ones do not, and nobody is turned away in between.

use std::fs::File;
use std::time::Duration;

use anyhow::{Result, ensure};
use dormouse_proto::inference as pb;

use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, patiently};
use crate::wire::{self, GrpcClient, Request, add_sub, output, slow};

fn keep_alive(text: &str) -> String {
    format!(r#"parameters {{ key: "dormouse.keep_alive" value {{ string_value: "{text}" }} }}"#)
}

/// Whether this call had to wait for a load.
async fn was_asleep(client: &GrpcClient, request: Request) -> Result<bool> {
    let answer = client.clone().model_infer(request.0).await?;
    Ok(answer.metadata().get("server-timing").is_some())
}

/// Leaves the model alone for longer and longer until a call finds it asleep.
async fn falls_asleep(client: &GrpcClient, request: impl Fn() -> Request) -> Result<()> {
    patiently("the model falls asleep", async {
        let mut rest = Duration::from_millis(50);
        loop {
            tokio::time::sleep(rest).await;
            if was_asleep(client, request()).await? {
                return Ok(());
            }
            rest *= 2;
        }
    })
    .await?
}

#[tokio::test]
async fn an_idle_model_returns_to_zero_and_wakes_again() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("brief", Model::new("add_sub").config(&keep_alive("20ms")))?;
    repository.add("long", Model::new("add_sub"))?;
    let mut server = TestServer::over(&repository)
        .arg("--keep-alive")
        .arg("1h")
        .start()
        .await?;
    let client = server.grpc().await?;
    ensure!(was_asleep(&client, add_sub("brief", 1, 1)).await?);
    ensure!(was_asleep(&client, add_sub("long", 1, 1)).await?);
    for _ in 0..3 {
        falls_asleep(&client, || add_sub("brief", 1, 1)).await?;
    }
    let slept = was_asleep(&client, add_sub("long", 1, 1)).await?;
    ensure!(
        !slept,
        "a model slept in spite of its keep-alive of an hour"
    );
    server.assert_healthy().await
}

#[tokio::test]
async fn the_servers_keep_alive_applies_to_models_without_their_own() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("default", Model::new("add_sub"))?;
    repository.add("own", Model::new("add_sub").config(&keep_alive("1h")))?;
    let server = TestServer::over(&repository)
        .arg("--keep-alive")
        .arg("20ms")
        .start()
        .await?;
    let client = server.grpc().await?;
    ensure!(was_asleep(&client, add_sub("own", 1, 1)).await?);
    falls_asleep(&client, || add_sub("default", 1, 1)).await?;
    ensure!(!was_asleep(&client, add_sub("own", 1, 1)).await?);
    Ok(())
}

#[tokio::test]
async fn a_model_is_not_put_to_sleep_under_a_running_request() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("slow", Model::new("slow").config(&keep_alive("1ms")))?;
    let mut server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    let count = 100_000;
    let answer = wire::infer(&client, slow("slow", count)).await?;
    ensure!(output::<i64>(&answer, "COUNT", &[1])? == [count]);
    server.assert_healthy().await
}

#[tokio::test]
async fn requests_that_meet_a_model_on_its_way_down_are_all_answered() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub").config(&keep_alive("1ms")))?;
    let mut server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    let mut slept = 0;
    for i in 0..400 {
        // Gaps around the keep-alive itself, so that both sides win the race many times.
        tokio::time::sleep(Duration::from_micros(250 * (i % 13))).await;
        let value = i32::try_from(i)?;
        let answer = client
            .clone()
            .model_infer(add_sub("simple", value, 1).0)
            .await?;
        slept += usize::from(answer.metadata().get("server-timing").is_some());
        let sums = output::<i32>(&answer.into_inner(), "OUTPUT0", &[1, 16])?;
        ensure!(sums == [value + 1; 16]);
    }
    ensure!(slept > 1, "the model never slept: the race was not run");
    server.assert_healthy().await
}

#[tokio::test]
async fn memory_goes_back_to_the_system_after_every_sleep() -> Result<()> {
    const WEIGHTS: u64 = 64 << 20;
    const SLACK: u64 = 32 << 20;
    let repository = TestRepository::new()?;
    let config = keep_alive("10ms");
    repository.add("large", Model::new("external_large").config(&config))?;
    let weights = repository.model_dir("large").join("1/weights.bin");
    File::create(weights)?.set_len(WEIGHTS)?;
    repository.add("small", Model::new("add_sub").config(&config))?;
    let mut server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    // The engine's own memory is there from now on and not counted against the large model.
    wire::infer(&client, add_sub("small", 1, 1)).await?;
    let base = server.rss()?;
    let row = vec![1f32; 4096];
    let request = || Request::new("large").input("X", &[1, 4096], &row);
    for _ in 0..10 {
        falls_asleep(&client, request).await?;
    }
    let mut held = 0;
    patiently("the memory is given back", async {
        loop {
            tokio::time::sleep(Duration::from_millis(100)).await;
            held = server.rss()?.saturating_sub(base);
            if held <= SLACK {
                return anyhow::Ok(());
            }
        }
    })
    .await??;
    server.assert_healthy().await
}

#[tokio::test]
async fn an_unloaded_model_is_refused_until_it_is_loaded_again() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let server = TestServer::over(&repository)
        .arg("--model-control-mode=explicit")
        .arg("--load-model=simple")
        .start()
        .await?;
    let mut client = server.grpc().await?;
    wire::infer(&client, add_sub("simple", 1, 1)).await?;
    client
        .repository_model_unload(pb::RepositoryModelUnloadRequest {
            model_name: "simple".into(),
            ..Default::default()
        })
        .await?;
    crate::server::eventually("the model is unloaded", || async {
        Ok(wire::index_state(&client, "simple", "").await?.0 == "UNAVAILABLE")
    })
    .await?;
    let answer = wire::infer(&client, add_sub("simple", 1, 1)).await;
    ensure!(answer.is_err(), "an unloaded model answered");
    client
        .repository_model_load(pb::RepositoryModelLoadRequest {
            model_name: "simple".into(),
            ..Default::default()
        })
        .await?;
    wire::infer(&client, add_sub("simple", 1, 1)).await?;
    Ok(())
}

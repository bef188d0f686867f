//! Models share a memory budget: what idles makes room, what never fits is told so.

use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use tonic::Code;

use crate::generated::{Generated, TestStore, parameters, preparations, settled};
use crate::repository::TestRepository;
use crate::server::{TestServer, eventually};
use crate::wake::wakes_from;
use crate::wire;

/// 4 MiB of weights; awake it is counted with 24, loading with 28.
const MODEL: Generated = Generated::new(1024, 1);
/// 32 MiB of weights, and more than the budget while it loads.
const LARGE: Generated = Generated::new(2048, 2);

#[tokio::test]
async fn idle_models_make_room_and_what_never_fits_is_told_so() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let names = ["a", "b", "c"];
    for (index, name) in names.iter().enumerate() {
        MODEL.weights(index).add(&repository, name, "")?;
    }
    LARGE.add(&repository, "large", "")?;
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .arg("--background-preparation=false")
        .arg("--memory-budget=60MiB")
        .start()
        .await?;
    let client = server.grpc().await?;
    let sleeps = async |name: &str| {
        let label = format!(r#"model="{name}""#);
        server.metric("dormouse_sleeps_total", &[&label]).await
    };
    MODEL.weights(0).ask(&client, "a").await?;
    MODEL.weights(1).ask(&client, "b").await?;
    ensure!(sleeps("a").await? + sleeps("b").await? == 0.0, "both fit");
    MODEL.weights(2).ask(&client, "c").await?;
    eventually("one had to go", || async {
        Ok(sleeps("a").await? + sleeps("b").await? == 1.0)
    })
    .await?;
    ensure!(sleeps("c").await? == 0.0);
    eventually("the eviction is counted", || async {
        let how = r#"how="close""#;
        Ok(server.metric("dormouse_evictions_total", &[how]).await? == 1.0)
    })
    .await?;

    let refused = LARGE.ask(&client, "large").await.err();
    let refused = refused.context("a model larger than the budget answered")?;
    let status = refused.downcast_ref::<tonic::Status>();
    let status = status.context("not a status")?;
    ensure!(status.code() == Code::FailedPrecondition, "{status:?}");
    ensure!(status.details().is_empty(), "a time to try again");
    for part in ["large", "80.0 MiB", "60.0 MiB", "--memory-budget"] {
        let message = status.message().replace("80 MiB", "80.0 MiB");
        let message = message.replace("60 MiB", "60.0 MiB");
        ensure!(message.contains(part), "{message}");
    }
    ensure!(
        sleeps("a").await? + sleeps("b").await? + sleeps("c").await? == 1.0,
        "others had to go for what never fits"
    );
    // All at once: they take turns, and each is answered.
    for _ in 0..5 {
        let calls = names.iter().enumerate().map(|(index, name)| {
            let client = &client;
            async move { MODEL.weights(index).ask(client, name).await }
        });
        try_join_all(calls).await?;
    }
    for name in names {
        let statistics = wire::statistics(&client, name).await?;
        let fail = statistics.inference_stats.and_then(|stats| stats.fail);
        ensure!(fail.is_none_or(|fail| fail.count == 0), "{name} failed");
    }
    let held = server.metric("dormouse_models_memory_bytes", &[]).await?;
    ensure!(held <= f64::from(60 << 20), "{held} bytes");
    server.assert_healthy().await
}

#[tokio::test]
async fn a_model_that_only_fits_in_haste_is_loaded_that_way() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    LARGE.add(&repository, "large", &parameters(&[("keep_alive", "30ms")]))?;
    settled().await;
    // Between what it takes in haste and in full.
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .arg("--memory-budget=90MiB")
        .start()
        .await?;
    let client = server.grpc().await?;
    for _ in 0..2 {
        wakes_from(&client, "large", LARGE, "source").await?;
    }
    ensure!(preparations(&server).await? == 0.0, "there was no room");
    server.assert_healthy().await
}

#[tokio::test]
async fn weights_that_models_share_count_once() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let kept = parameters(&[("keep_alive", "1h"), ("park_after", "never")]);
    // The same 16 MiB in each, and something of its own.
    let model = |bias: usize| Generated::new(2048, 1).bias(bias);
    let names = ["a", "b", "c"];
    for (bias, name) in names.iter().enumerate() {
        model(bias).add(&repository, name, &kept)?;
    }
    settled().await;
    let server = TestServer::over(&repository)
        .arg(store.flag())
        .start()
        .await?;
    let client = server.grpc().await?;
    for (bias, name) in names.iter().enumerate() {
        model(bias).ask(&client, name).await?;
    }
    eventually("all are prepared", || async {
        Ok(preparations(&server).await? == names.len() as f64)
    })
    .await?;
    server.kill().await?;
    // 16 MiB for each session and 16 for the weights; counted for each they would be 96.
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .arg("--memory-budget=68MiB")
        .start()
        .await?;
    let client = server.grpc().await?;
    for (bias, name) in names.iter().enumerate() {
        let kind = model(bias).ask(&client, name).await?;
        ensure!(kind.as_deref() == Some("prepared"), "{name}: {kind:?}");
    }
    let held = [r#"state="idle""#];
    eventually("all are counted", || async {
        let held = server.metric("dormouse_models_memory_bytes", &held).await?;
        Ok((f64::from(64 << 20)..f64::from(66 << 20)).contains(&held))
    })
    .await?;
    ensure!(server.metric("dormouse_evictions_total", &[]).await? == 0.0);
    server.assert_healthy().await
}

#[tokio::test]
async fn prepared_models_are_parked_for_others_and_come_back() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let names = ["a", "b", "c", "d"];
    let kept = parameters(&[("keep_alive", "1h")]);
    for (index, name) in names.iter().enumerate() {
        MODEL.weights(index).add(&repository, name, &kept)?;
    }
    settled().await;
    let server = TestServer::over(&repository)
        .arg(store.flag())
        .start()
        .await?;
    let client = server.grpc().await?;
    for (index, name) in names.iter().enumerate() {
        MODEL.weights(index).ask(&client, name).await?;
    }
    eventually("all are prepared", || async {
        Ok(preparations(&server).await? == names.len() as f64)
    })
    .await?;
    server.kill().await?;
    // Awake they are counted with 20 MiB each, parked with 16: all four do not fit.
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .arg("--memory-budget=64MiB")
        .start()
        .await?;
    let client = server.grpc().await?;
    for _ in 0..8 {
        for (index, name) in names.iter().enumerate() {
            MODEL.weights(index).ask(&client, name).await?;
        }
    }
    eventually("models had to go", || async {
        Ok(server.metric("dormouse_evictions_total", &[]).await? > 0.0)
    })
    .await?;
    let budget = f64::from(64 << 20);
    eventually("what is held fits the budget", || async {
        Ok(server.metric("dormouse_models_memory_bytes", &[]).await? <= budget)
    })
    .await?;
    ensure!(server.metric("dormouse_load_failures_total", &[]).await? == 0.0);
    server.assert_healthy().await
}

//! Models sleep until they are called; the first call wakes them and is answered.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use dormouse_proto::inference as pb;
use futures_util::future::try_join_all;
use tonic::Code;

use crate::http;
use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, eventually};
use crate::wire::{self, GrpcClient, Request, add_sub, output};

/// What a call's load took, if the call waited for one.
async fn load_timing(client: &GrpcClient, request: Request) -> Result<Option<String>> {
    let answer = client.clone().model_infer(request.0).await?;
    let timing = answer.metadata().get("server-timing");
    Ok(timing
        .map(|value| value.to_str().map(str::to_owned))
        .transpose()?)
}

#[tokio::test]
async fn first_request_wakes_a_model_and_carries_the_timeline_of_its_load() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("one", Model::new("add_sub"))?;
    repository.add("two", Model::new("add_sub"))?;
    let mut server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;

    let timing = load_timing(&client, add_sub("one", 3, 1)).await?;
    let timing = timing.context("the first answer carries no server-timing")?;
    ensure!(timing.starts_with("load;dur="), "server-timing: {timing}");
    let again = load_timing(&client, add_sub("one", 3, 1)).await?;
    ensure!(again.is_none(), "a warm model's answer carries {again:?}");

    let body = br#"{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[1,16],"data":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]},
        {"name":"INPUT1","datatype":"INT32","shape":[1,16],"data":[2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2]}]}"#;
    let first = server.post("/v2/models/two/infer", body).await?;
    ensure!(first.status == 200, "{}", first.text());
    ensure!(first.header("server-timing").is_some(), "no server-timing");
    let second = server.post("/v2/models/two/infer", body).await?;
    ensure!(second.header("server-timing").is_none(), "two loads");
    ensure!(second.json()?["outputs"][0]["data"][0] == 3);
    server.assert_healthy().await
}

#[tokio::test]
async fn cold_starts_are_told_in_answers_statistics_metrics_and_a_waterfall() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let mut server = TestServer::over(&repository)
        .arg("--keep-alive=50ms")
        .start()
        .await?;
    let client = server.grpc().await?;
    let none = wire::statistics(&client, "simple").await?;
    ensure!(none.cold_starts.is_empty(), "{none:?}");

    let timing = load_timing(&client, add_sub("simple", 3, 1)).await?;
    let timing = timing.context("the first answer carries no server-timing")?;
    let told = dormouse_client::ColdStart::parse(&timing).context("not a cold start")?;
    let request = told.request.context("nothing about the request")?;
    // The header rounds each to whole microseconds.
    let rounding = Duration::from_micros(2);
    ensure!(
        request.total + rounding >= request.waited + request.run,
        "{timing}"
    );
    ensure!(request.waited + rounding >= told.total, "{timing}");
    let names: BTreeSet<_> = told.stages.iter().map(|stage| &*stage.name).collect();
    ensure!(names.is_superset(&["queue", "session"].into()), "{timing}");
    ensure!(told.bytes() > 0, "no stage tells of bytes: {timing}");

    let statistics = wire::statistics(&client, "simple").await?;
    let [cold] = &statistics.cold_starts[..] else {
        anyhow::bail!("{} cold starts", statistics.cold_starts.len());
    };
    let difference = cold.total_ns.abs_diff(told.total.as_nanos() as u64);
    ensure!(difference <= 1_000, "{cold:?} {timing}");
    ensure!(
        !cold.ahead && cold.kind == told.kind && cold.bytes == told.bytes(),
        "{cold:?}"
    );
    let started = UNIX_EPOCH + Duration::from_nanos(cold.started_unix_ns);
    ensure!(started <= SystemTime::now(), "{cold:?}");
    let run = cold.stages.iter().find(|stage| stage.name == "first-run");
    ensure!(
        run.context("no first run")?.start_ns >= cold.total_ns,
        "{cold:?}"
    );

    let document = server
        .get("/v2/models/simple/versions/1/stats")
        .await?
        .json()?;
    let http = &document["model_stats"][0]["cold_starts"][0];
    ensure!(http["total_ns"] == cold.total_ns, "{document}");
    ensure!(
        http["stages"].as_array().map(Vec::len) == Some(cold.stages.len()),
        "{document}"
    );
    // All models at once are told of without it: that may be thousands.
    let all = server.get("/v2/models/stats").await?.json()?;
    ensure!(all["model_stats"][0].get("cold_starts").is_none(), "{all}");

    for (name, labels) in [
        (
            "dormouse_cold_start_seconds_count",
            &["kind=\"source\""][..],
        ),
        ("dormouse_load_stage_seconds_count", &["stage=\"session\""]),
        (
            "dormouse_load_stage_seconds_count",
            &["stage=\"first-run\""],
        ),
        ("dormouse_load_overlap_seconds_count", &[]),
    ] {
        ensure!(
            server.metric(name, labels).await? == 1.0,
            "{name} {labels:?}"
        );
    }
    let moved = server.metric("dormouse_loaded_bytes_total", &[]).await?;
    ensure!(moved as u64 == cold.bytes, "{moved} bytes");

    // Each time it wakes adds one, the latest last.
    eventually("the model woke again", || async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        Ok(load_timing(&client, add_sub("simple", 3, 1))
            .await?
            .is_some())
    })
    .await?;
    let statistics = wire::statistics(&client, "simple").await?;
    let starts: Vec<_> = statistics
        .cold_starts
        .iter()
        .map(|cold| cold.started_unix_ns)
        .collect();
    ensure!(starts.len() == 2 && starts.is_sorted(), "{starts:?}");

    let mut shown = crate::server::dormouse();
    shown.args(["models", "--timeline=simple", "--last=2", "--format=table"]);
    shown.arg(format!("--url=http://{}", server.grpc));
    let shown = tokio::task::spawn_blocking(move || shown.output()).await??;
    let text = String::from_utf8(shown.stdout)?;
    ensure!(
        shown.status.success(),
        "{}",
        String::from_utf8_lossy(&shown.stderr)
    );
    ensure!(
        text.matches("simple version 1 woke from").count() == 2,
        "{text}"
    );
    ensure!(text.contains("\n  first-run "), "{text}");
    server.assert_healthy().await
}

#[tokio::test]
async fn a_sleeping_model_is_ready_and_described_without_being_woken() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;

    let ready = client
        .clone()
        .model_ready(pb::ModelReadyRequest {
            name: "simple".into(),
            version: String::new(),
        })
        .await?;
    ensure!(ready.into_inner().ready, "a sleeping model is not ready");
    let metadata = client
        .clone()
        .model_metadata(pb::ModelMetadataRequest {
            name: "simple".into(),
            version: String::new(),
        })
        .await?
        .into_inner();
    ensure!(metadata.versions == ["1"], "{metadata:?}");
    ensure!(metadata.inputs.len() == 2 && metadata.inputs[0].shape == [-1, 16]);
    ensure!(metadata.inputs[0].datatype == "INT32");
    let config = client
        .clone()
        .model_config(pb::ModelConfigRequest {
            name: "simple".into(),
            version: String::new(),
        })
        .await?
        .into_inner()
        .config
        .context("no configuration")?;
    ensure!(config.max_batch_size == 4, "{}", config.max_batch_size);
    ensure!(config.backend == "onnxruntime", "{}", config.backend);
    let (state, _) = wire::index_state(&client, "simple", "1").await?;
    ensure!(state == "READY", "{state}");

    let timing = load_timing(&client, add_sub("simple", 1, 1)).await?;
    ensure!(timing.is_some(), "describing the model woke it");
    Ok(())
}

#[tokio::test]
async fn requests_that_arrive_during_a_wake_share_one_load() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let mut server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;

    let calls = (0..200).map(|i| {
        let client = client.clone();
        async move {
            let answer = client
                .clone()
                .model_infer(add_sub("simple", i, 1).0)
                .await?;
            let timing = answer.metadata().get("server-timing").cloned();
            let response = answer.into_inner();
            ensure!(output::<i32>(&response, "OUTPUT0", &[1, 16])? == [i + 1; 16]);
            ensure!(output::<i32>(&response, "OUTPUT1", &[1, 16])? == [i - 1; 16]);
            let timing = timing.map(|value| value.to_str().map(str::to_owned));
            // Its first entry is the load; what the request itself waited is its own.
            let load = timing.transpose()?.map(|timing| {
                let load = timing.split(',').next().unwrap_or_default();
                load.to_owned()
            });
            Ok(load)
        }
    });
    let timings: BTreeSet<_> = try_join_all(calls).await?.into_iter().flatten().collect();
    ensure!(
        timings.len() == 1,
        "{} different loads: {timings:?}",
        timings.len()
    );
    let statistics = wire::statistics(&client, "simple").await?;
    ensure!(statistics.inference_count == 200, "{statistics:?}");
    server.assert_healthy().await
}

#[tokio::test]
async fn a_model_that_cannot_load_fails_its_callers_alone_and_says_why() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("good", Model::new("add_sub"))?;
    repository.add("custom", Model::new("custom_op"))?;
    repository.add("corrupt", Model::new("corrupt"))?;
    repository.add("empty", Model::new("empty"))?;
    let mut server = TestServer::over(&repository)
        .arg("--strict-readiness=false")
        .start()
        .await?;
    let client = server.grpc().await?;

    let calls = (0..20).map(|_| {
        let request = Request::new("custom").input("X", &[1, 4], &[0f32; 4]);
        wire::infer(&client, request)
    });
    for answer in futures_util::future::join_all(calls).await {
        let status = answer.err().context("a custom operator ran")?;
        ensure!(status.code() == Code::Unavailable, "{status:?}");
        ensure!(status.message().contains("custom"), "{status:?}");
    }
    for broken in ["corrupt", "empty"] {
        let status = wire::infer(&client, add_sub(broken, 1, 1)).await;
        let status = status.err().context("a broken model answered")?;
        ensure!(status.code() == Code::Unavailable, "{status:?}");
        let (state, reason) = wire::index_state(&client, broken, "").await?;
        ensure!(
            state == "UNAVAILABLE" && !reason.is_empty(),
            "{broken}: {state} {reason:?}"
        );
        let answer = server.get(&format!("/v2/models/{broken}/ready")).await?;
        ensure!((400..600).contains(&answer.status), "{broken} is ready");
    }
    wire::infer(&client, add_sub("good", 1, 1)).await?;
    server.assert_healthy().await
}

#[tokio::test]
async fn an_unknown_model_or_version_is_not_found() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    let status = wire::infer(&client, add_sub("nobody", 1, 1)).await;
    let status = status.err().context("an unknown model answered")?;
    ensure!(status.code() == Code::NotFound, "{status:?}");
    ensure!(status.message().contains("nobody"), "{status:?}");
    let request = add_sub("simple", 1, 1).version("9");
    let status = wire::infer(&client, request).await.err();
    let status = status.context("an unknown version answered")?;
    ensure!(status.code() == Code::NotFound, "{status:?}");
    let answer = http::call(
        server.http,
        "POST",
        "/v2/models/nobody/infer",
        &[],
        br#"{"inputs":[]}"#,
    )
    .await?;
    ensure!(answer.status == 404, "{}", answer.status);
    ensure!(answer.error()?.contains("nobody"));
    Ok(())
}

#[tokio::test]
async fn an_eager_model_is_awake_before_it_is_called() -> Result<()> {
    let repository = TestRepository::new()?;
    let config = r#"parameters { key: "dormouse.load" value { string_value: "eager" } }"#;
    repository.add("eager", Model::new("add_sub").config(config))?;
    let server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    // The load was started by the server itself, at the latest when it said it was ready.
    eventually("the eager model is awake", || async {
        let statistics = wire::statistics(&client, "eager").await?;
        Ok(statistics.cold_starts.iter().any(|cold| cold.ahead))
    })
    .await?;
    let timing = load_timing(&client, add_sub("eager", 1, 1)).await?;
    ensure!(timing.is_none(), "{timing:?}");
    let statistics = wire::statistics(&client, "eager").await?;
    let run = |cold: &pb::ColdStart| cold.stages.iter().any(|stage| stage.name == "first-run");
    // The run was not what anybody waited for a load for.
    ensure!(statistics.cold_starts.len() == 1 && !run(&statistics.cold_starts[0]));
    Ok(())
}

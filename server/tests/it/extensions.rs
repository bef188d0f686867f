//! What the protocol's extensions do to a whole server: answers that are kept, files that load
//! requests bring, log and trace settings, streams that are cancelled.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use dormouse_proto::inference as pb;
use pb::model_repository_parameter::ParameterChoice;
use serde_json::{Value, json};

use crate::authority::Files;
use crate::deadlines::{ENDLESS, occupy, start_slow, waiting};
use crate::http;
use crate::repository::{Model, TestRepository, model_bytes};
use crate::server::{TestServer, eventually, patiently};
use crate::wire::{self, GrpcClient, add_sub, output, slow};

const CACHED: &str = "max_batch_size: 4 response_cache { enable: true }";
const LOADS: &str = "dormouse_loads_total";
const CACHE: &str = "--cache-config=local,size=1048576";

async fn first_sum(client: &GrpcClient, model: &str) -> Result<i32> {
    let answer = wire::infer(client, add_sub(model, 5, 3)).await?;
    Ok(output::<i32>(&answer, "OUTPUT0", &[1, 16])?[0])
}

async fn asleep(client: &GrpcClient, model: &str) -> Result<()> {
    eventually("the model sleeps", || async {
        Ok(wire::index_state(client, model, "").await?.1 == "asleep")
    })
    .await
}

#[tokio::test]
async fn a_kept_answer_is_given_without_waking_the_model() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("cached", Model::new("add_sub").config(CACHED))?;
    let mut server = TestServer::over(&repository)
        .arg(CACHE)
        .arg("--keep-alive=off")
        .start()
        .await?;
    let client = server.grpc().await?;
    ensure!(first_sum(&client, "cached").await? == 8);
    asleep(&client, "cached").await?;
    let loads = server.metric(LOADS, &[]).await?;
    for _ in 0..5 {
        ensure!(first_sum(&client, "cached").await? == 8);
    }
    ensure!(server.metric(LOADS, &[]).await? == loads, "a hit woke it");
    let counts = wire::statistics(&client, "cached").await?;
    let inference = counts.inference_stats.context("statistics")?;
    let count = |counted: Option<pb::StatisticDuration>| counted.map_or(0, |counted| counted.count);
    ensure!(count(inference.cache_hit) == 5 && count(inference.cache_miss) == 1);
    ensure!(count(inference.success) == 6 && count(inference.queue) == 6);
    ensure!((counts.inference_count, counts.execution_count) == (1, 1));
    ensure!(server.metric("nv_cache_num_hits_per_model", &[]).await? == 5.0);
    let held = server.metric("dormouse_response_cache_bytes", &[]).await?;
    ensure!((128.0..2048.0).contains(&held), "{held}");
    ensure!(server.metric("nv_inference_request_success", &[]).await? == 6.0);
    // Other files are another model, though its name is the same.
    repository.add_version("cached", 2, "add_sub_swapped")?;
    ensure!(first_sum(&client, "cached").await? == 2);
    ensure!(first_sum(&client, "cached").await? == 2);
    server.assert_healthy().await
}

#[tokio::test]
async fn kept_answers_go_with_what_gave_them() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("cached", Model::new("add_sub").config(CACHED))?;
    let mut server = TestServer::over(&repository)
        .arg(CACHE)
        .arg("--model-control-mode=explicit")
        .arg("--load-model=cached")
        .start()
        .await?;
    let client = server.grpc().await?;
    ensure!(first_sum(&client, "cached").await? == 8);
    ensure!(first_sum(&client, "cached").await? == 8);
    let swapped = model_bytes("add_sub_swapped")?;
    std::fs::write(
        repository.model_dir("cached").join("1/model.onnx"),
        &swapped,
    )?;
    load(&client, "cached", HashMap::new()).await?;
    ensure!(first_sum(&client, "cached").await? == 2, "an old answer");
    let unload = pb::RepositoryModelUnloadRequest {
        model_name: "cached".into(),
        ..Default::default()
    };
    client.clone().repository_model_unload(unload).await?;
    let gone = wire::infer(&client, add_sub("cached", 5, 3)).await;
    ensure!(gone.is_err(), "a model that is unloaded has answered");
    server.assert_healthy().await
}

#[tokio::test]
async fn a_model_that_asks_for_a_cache_where_there_is_none_is_warned_about() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("cached", Model::new("add_sub").config(CACHED))?;
    let server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    ensure!(first_sum(&client, "cached").await? == 8);
    ensure!(first_sum(&client, "cached").await? == 8);
    let counts = wire::statistics(&client, "cached").await?;
    ensure!(counts.execution_count == 2);
    let warned = server.log.wait_for(|records| {
        let mut warnings = records.iter().filter(|record| record["level"] == "WARN");
        warnings
            .any(|record| record["message"].to_string().contains("--cache-config"))
            .then_some(())
    });
    patiently("a warning", warned).await?
}

type Parameters = HashMap<String, pb::ModelRepositoryParameter>;

async fn load(client: &GrpcClient, model: &str, parameters: Parameters) -> Result<()> {
    let request = pb::RepositoryModelLoadRequest {
        model_name: model.into(),
        parameters,
        ..Default::default()
    };
    client.clone().repository_model_load(request).await?;
    Ok(())
}

fn brought(file: &str) -> Result<Parameters> {
    let parameter = |choice| pb::ModelRepositoryParameter {
        parameter_choice: Some(choice),
    };
    let config = r#"{"backend":"onnxruntime","max_batch_size":4}"#;
    let content = Bytes::from(model_bytes(file)?);
    Ok(HashMap::from([
        (
            "config".to_owned(),
            parameter(ParameterChoice::StringParam(config.to_owned())),
        ),
        (
            "file:1/model.onnx".to_owned(),
            parameter(ParameterChoice::BytesParam(content)),
        ),
    ]))
}

#[tokio::test]
async fn a_model_made_of_a_requests_files_sleeps_and_wakes_from_memory() -> Result<()> {
    let repository = TestRepository::new()?;
    let config = repository.path().join("server.toml");
    std::fs::write(&config, "[limits]\nmax_override_bytes = \"400\"\n")?;
    let mut server = TestServer::over(&repository)
        .arg("--model-control-mode=explicit")
        .arg("--keep-alive=off")
        .arg(format!("--config={}", config.display()))
        .start()
        .await?;
    let client = server.grpc().await?;
    load(&client, "guest", brought("add_sub_swapped")?).await?;
    for _ in 0..3 {
        ensure!(first_sum(&client, "guest").await? == 2);
        asleep(&client, "guest").await?;
    }
    ensure!(server.metric(LOADS, &[]).await? >= 3.0);
    // What is kept is bounded, and given back by an unload.
    let second = load(&client, "second", brought("add_sub")?).await;
    let refusal = second.err().context("more was kept than is allowed")?;
    ensure!(
        refusal.to_string().contains("limits.max_override_bytes"),
        "{refusal}"
    );
    let unload = pb::RepositoryModelUnloadRequest {
        model_name: "guest".into(),
        ..Default::default()
    };
    client.clone().repository_model_unload(unload).await?;
    load(&client, "second", brought("add_sub")?).await?;
    ensure!(first_sum(&client, "second").await? == 8);
    server.assert_healthy().await
}

#[tokio::test]
async fn files_are_brought_in_explicit_mode_only() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    let refusal = load(&client, "simple", brought("add_sub_swapped")?).await;
    let refusal = refusal.err().context("files were taken")?;
    ensure!(refusal.to_string().contains("explicit"), "{refusal}");
    ensure!(first_sum(&client, "simple").await? == 8);
    Ok(())
}

/// The records of a level so far.
fn count(server: &TestServer, of: impl Fn(&Value) -> bool) -> usize {
    let records = server.log.records();
    records.iter().filter(|record| of(record)).count()
}

async fn log_settings(server: &TestServer, settings: Value) -> Result<()> {
    let body = settings.to_string();
    let answer = server.post("/v2/logging", body.as_bytes()).await?;
    ensure!(answer.status == 200, "{}", answer.text());
    Ok(())
}

#[tokio::test]
async fn log_settings_change_the_log_that_is_being_written() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let server = TestServer::over(&repository)
        .arg("--keep-alive=off")
        .start()
        .await?;
    let client = server.grpc().await?;
    let loads = |server: &TestServer| count(server, |record| record["message"] == "loaded");
    first_sum(&client, "simple").await?;
    asleep(&client, "simple").await?;
    let seen = patiently(
        "a load is logged",
        server
            .log
            .wait_for(|_| (loads(&server) > 0).then(|| loads(&server))),
    )
    .await??;
    log_settings(&server, json!({"log_info": false})).await?;
    first_sum(&client, "simple").await?;
    asleep(&client, "simple").await?;
    log_settings(&server, json!({"log_info": true, "log_verbose_level": 1})).await?;
    first_sum(&client, "simple").await?;
    asleep(&client, "simple").await?;
    patiently(
        "the last load is logged",
        server
            .log
            .wait_for(|_| (loads(&server) > seen).then_some(())),
    )
    .await??;
    ensure!(loads(&server) == seen + 1, "a load was logged in silence");
    Ok(())
}

#[tokio::test]
async fn traced_requests_are_events_of_the_log() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    repository.add("other", Model::new("add_sub"))?;
    let server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    let body = json!({"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "2"}).to_string();
    let path = "/v2/models/simple/trace/setting";
    let answer = server.post(path, body.as_bytes()).await?;
    ensure!(answer.status == 200, "{}", answer.text());
    for id in 0..4 {
        for model in ["simple", "other"] {
            let request = add_sub(model, 5, 3).id(format!("{id}\n"));
            wire::infer(&client, request).await?;
        }
    }
    let traces = server.log.wait_for(|records| {
        let traces = records.iter().filter(|record| record["message"] == "trace");
        let traces: Vec<Value> = traces.cloned().collect();
        (traces.len() >= 2).then_some(traces)
    });
    let traces = patiently("traces are logged", traces).await??;
    let ids: Vec<&str> = traces
        .iter()
        .filter_map(|trace| trace["id"].as_str())
        .collect();
    ensure!(ids == ["\"0\\n\"", "\"2\\n\""], "{traces:?}");
    for trace in &traces {
        ensure!(trace["model"] == "\"simple\"", "{trace}");
        ensure!(
            trace["took_us"].as_u64().is_some_and(|took| took > 0),
            "{trace}"
        );
        let inputs = trace["inputs"].as_str().context("inputs")?;
        ensure!(inputs.contains("\"INPUT0\" INT32 [1,16]"), "{inputs}");
    }
    Ok(())
}

#[tokio::test]
async fn a_stream_that_is_dropped_stops_its_run() -> Result<()> {
    let (_repository, mut server, client) = start_slow().await?;
    let (requests, receiver) = tokio::sync::mpsc::channel(1);
    let stream = tokio_stream::wrappers::ReceiverStream::new(receiver);
    requests.send(slow("slow", ENDLESS).0).await?;
    let answers = client.clone().model_stream_infer(stream).await?;
    // Sent until one has to wait behind the endless one.
    let probe = patiently("a request waits behind the endless one", async {
        loop {
            let client = client.clone();
            let probe = tokio::spawn(async move { wire::infer(&client, slow("slow", 10)).await });
            while !probe.is_finished() {
                if waiting(&server).await? >= 1.0 {
                    return anyhow::Ok(probe);
                }
            }
        }
    })
    .await??;
    drop((answers, requests));
    let answer = patiently("the slot is free", probe).await???;
    ensure!(output::<i64>(&answer, "COUNT", &[1])? == [10]);
    let endless = occupy(&server, &client).await?;
    endless.run.abort();
    server.assert_healthy().await
}

const TWO_TOKENS: &str = r#"
[[token]]
name = "one"
token = "one-0123456789abcdef"
scopes = ["inference"]

[[token]]
name = "two"
token = "two-0123456789abcdef"
scopes = ["inference"]

[[token]]
name = "operator"
token = "operator-0123456789"
scopes = ["inference", "management"]
"#;

/// An object of shared memory that goes away with the test.
struct Shared(String);

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(format!("/dev/shm/{}", self.0));
    }
}

#[tokio::test]
async fn a_region_is_used_and_forgotten_only_by_who_registered_it() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("add_sub", Model::new("add_sub"))?;
    let files = Files::new()?;
    files.put("tokens.toml", TWO_TOKENS)?;
    files.put(
        "server.toml",
        "[shared_memory]\nallowed = true\nkey_prefixes = [\"/owned-\"]\n",
    )?;
    let mut server = TestServer::over(&repository)
        .arg(files.flag("auth-tokens", "tokens.toml"))
        .arg(files.flag("config", "server.toml"))
        .start()
        .await?;
    let shared = Shared(format!("owned-{}", server.pid()));
    let ones: Vec<u8> = [1i32; 16]
        .iter()
        .flat_map(|one| one.to_le_bytes())
        .collect();
    std::fs::write(format!("/dev/shm/{}", shared.0), ones)?;
    let call = async |token: &str, method: &str, path: &str, body: Value| {
        let body = body.to_string();
        http::call_as(server.http, method, path, token, body.as_bytes()).await
    };
    let region = |verb: &str| format!("/v2/systemsharedmemory/region/r/{verb}");
    let (one, two) = ("one-0123456789abcdef", "two-0123456789abcdef");
    let register = |key: &str| json!({"key": key, "offset": 0, "byte_size": 64});
    let refused = call(one, "POST", &region("register"), register("/other")).await?;
    ensure!(refused.error()?.contains("shared_memory.key_prefixes"));
    let key = format!("/{}", shared.0);
    let registered = call(one, "POST", &region("register"), register(&key)).await?;
    ensure!(registered.status == 200, "{}", registered.text());
    let input = |name: &str| {
        json!({"name": name, "datatype": "INT32", "shape": [1, 16], "parameters":
            {"shared_memory_region": "r", "shared_memory_byte_size": 64}})
    };
    let request = || json!({"inputs": [input("INPUT0"), input("INPUT1")]});
    let infer = "/v2/models/add_sub/infer";
    // For another client it is not there, and stays whatever that one says.
    let error = call(two, "POST", infer, request()).await?.error()?;
    ensure!(error.contains("unable to find system shared memory region: 'r'"));
    for path in [
        region("unregister"),
        "/v2/systemsharedmemory/unregister".into(),
    ] {
        ensure!(call(two, "POST", &path, json!({})).await?.status == 200);
    }
    for token in [one, "operator-0123456789"] {
        let answer = call(token, "POST", infer, request()).await?;
        ensure!(
            answer.json()?["outputs"][0]["data"][0] == 2,
            "{}",
            answer.text()
        );
    }
    // The same over gRPC, one by one and on a stream.
    for (token, expected) in [(one, true), (two, false)] {
        let mut client = server.grpc().await?;
        let mut message = pb::ModelInferRequest {
            model_name: "add_sub".into(),
            ..Default::default()
        };
        for name in ["INPUT0", "INPUT1"] {
            let parameter = |choice| pb::InferParameter {
                parameter_choice: Some(choice),
            };
            use pb::infer_parameter::ParameterChoice::{Int64Param, StringParam};
            message
                .inputs
                .push(pb::model_infer_request::InferInputTensor {
                    name: name.into(),
                    datatype: "INT32".into(),
                    shape: vec![1, 16],
                    parameters: HashMap::from([
                        (
                            "shared_memory_region".into(),
                            parameter(StringParam("r".into())),
                        ),
                        ("shared_memory_byte_size".into(), parameter(Int64Param(64))),
                    ]),
                    contents: None,
                });
        }
        let mut unary = tonic::Request::new(message.clone());
        let mut stream = tonic::Request::new(futures_util::stream::iter([message]));
        for metadata in [unary.metadata_mut(), stream.metadata_mut()] {
            metadata.insert("authorization", http::bearer(token).parse()?);
        }
        ensure!(
            client.model_infer(unary).await.is_ok() == expected,
            "{token}"
        );
        let mut answers = client.model_stream_infer(stream).await?.into_inner();
        let answer = answers.message().await?.context("no answer")?;
        ensure!(
            answer.error_message.is_empty() == expected,
            "{token}: {answer:?}"
        );
    }
    let forgotten = call(one, "POST", &region("unregister"), json!({})).await?;
    ensure!(forgotten.status == 200);
    ensure!(call(one, "GET", &region("status"), json!({})).await?.status != 200);
    server.assert_healthy().await
}

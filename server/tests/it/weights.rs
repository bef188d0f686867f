//! Weights in every form that users have: the answers are the same.

use std::fs;
use std::process::Output;

use anyhow::{Context, Result, ensure};
use dormouse_proto::inference as pb;
use serde_json::Value;

use crate::repository::{Model, TestRepository, models_dir};
use crate::server::{TestServer, dormouse};
use crate::wire::{self, GrpcClient, Request, output};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const SHARDS: [&str; 2] = [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
];

/// A file of the weights that lie beside the graph.
fn weights(name: &str) -> Result<Vec<u8>> {
    let path = models_dir().join("beside").join(name);
    fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// The same tensors, their data moved by `count` bytes.
fn moved(mut bytes: Vec<u8>, count: usize) -> Vec<u8> {
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    let end = 8 + length as usize;
    bytes.splice(end..end, std::iter::repeat_n(b' ', count));
    bytes[..8].copy_from_slice(&(length + count as u64).to_le_bytes());
    bytes
}

fn put(repository: &TestRepository, model: &str, name: &str, bytes: &[u8]) -> Result<()> {
    let path = repository.model_dir(model).join("1").join(name);
    fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

async fn answer(client: &GrpcClient, model: &str) -> Result<pb::ModelInferResponse> {
    let x: Vec<f32> = (0..2 * 48).map(|at| at as f32 * 0.25 - 11.0).collect();
    let request = Request::new(model)
        .input("X", &[2, 48], &x)
        .input("SCALE", &[1], &[0.5f32])
        .input("STEP", &[1], &[-3i64]);
    let answer = wire::infer(client, request).await;
    answer.with_context(|| format!("{model} does not answer"))
}

/// What a model with these weights answers.
#[derive(Debug, PartialEq)]
struct Values {
    y: Vec<f32>,
    half: Vec<f32>,
    brain: Vec<f32>,
    numbers: Vec<i64>,
}

fn values(answer: &pb::ModelInferResponse) -> Result<Values> {
    Ok(Values {
        y: output(answer, "Y", &[2, 32])?,
        half: output(answer, "HALF", &[52, 40])?,
        brain: output(answer, "BRAIN", &[52, 40])?,
        numbers: output(answer, "NUMBERS", &[520])?,
    })
}

/// Every way to give the same model the same weights.
fn every_form(repository: &TestRepository) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let mut add = |name: &str, graph: &str, config: Option<&str>, files: &[(&str, Vec<u8>)]| {
        let model = Model::new(graph);
        let model = match config {
            Some(file) => model.config(&format!(
                r#"parameters {{ key: "dormouse.weights" value: {{ string_value: "{file}" }} }}"#
            )),
            None => model,
        };
        repository.add(name, model)?;
        for (file, bytes) in files {
            put(repository, name, file, bytes)?;
        }
        names.push(name.to_owned());
        anyhow::Ok(())
    };
    let single = weights(SINGLE)?;
    add(
        "by_input",
        "beside_inputs",
        None,
        &[(SINGLE, single.clone())],
    )?;
    add(
        "by_reference",
        "beside_references",
        None,
        &[(SINGLE, single.clone())],
    )?;
    add(
        "by_config",
        "beside_inputs",
        Some("trained.safetensors"),
        &[("trained.safetensors", single.clone())],
    )?;
    let shards = [
        (SHARDS[0], weights(SHARDS[0])?),
        (SHARDS[1], weights(SHARDS[1])?),
        (INDEX, weights(INDEX)?),
    ];
    add("by_index", "beside_inputs", Some(INDEX), &shards)?;
    add("by_usual_index", "beside_inputs", None, &shards)?;
    for count in [1, 2, 3, 4, 6] {
        let bytes = moved(single.clone(), count);
        let name = format!("moved_by_{count}");
        add(&name, "beside_inputs", None, &[(SINGLE, bytes)])?;
    }
    Ok(names)
}

#[tokio::test]
async fn safetensors_beside_a_graph_answer_like_weights_inside_it() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("inside", Model::new("beside_inside"))?;
    let names = every_form(&repository)?;
    let mut server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    let expected = values(&answer(&client, "inside").await?)?;
    ensure!(
        expected.half.iter().any(|&value| value != 0.0),
        "weights are there"
    );
    let signature = server.get("/v2/models/inside").await?.json()?;
    for name in names {
        let found = values(&answer(&client, &name).await?)?;
        ensure!(found == expected, "{name} answers something else");
        let metadata = server.get(&format!("/v2/models/{name}")).await?.json()?;
        ensure!(
            metadata["inputs"] == signature["inputs"],
            "{name}: {metadata}"
        );
    }
    server.assert_healthy().await
}

#[tokio::test]
async fn weights_that_do_not_fit_are_refused_with_the_tensor_and_the_file() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("good", Model::new("beside_inside"))?;
    for (name, from, to) in [
        ("type", r#""dtype":"F16""#, r#""dtype":"I16""#),
        ("shape", "[52,40]", "[40,52]"),
        ("missing", r#""N":"#, r#""M":"#),
    ] {
        repository.add(name, Model::new("beside_references"))?;
        let mut bytes = weights(SINGLE)?;
        let at = bytes
            .windows(from.len())
            .position(|window| window == from.as_bytes());
        let at = at.with_context(|| format!("no {from} in the header"))?;
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        put(&repository, name, SINGLE, &bytes)?;
    }
    repository.add("absent", Model::new("beside_references"))?;
    repository.add("cut", Model::new("beside_references"))?;
    put(&repository, "cut", SINGLE, &weights(SINGLE)?[..18_000])?;
    let mut server = TestServer::over(&repository)
        .arg("--strict-readiness=false")
        .start()
        .await?;
    let client = server.grpc().await?;
    for (name, parts) in [
        ("type", ["'H' is float16 in the graph and I16", SINGLE]),
        ("shape", ["[52, 40] in the graph and [40, 52]", SINGLE]),
        ("missing", ["tensor 'N' is not in", SINGLE]),
        ("absent", ["does not exist", SINGLE]),
        ("cut", ["bytes of data", SINGLE]),
    ] {
        let error = format!("{:#}", answer(&client, name).await.unwrap_err());
        for part in parts {
            ensure!(error.contains(part), "{name}: {error}");
        }
    }
    values(&answer(&client, "good").await?)?;
    server.assert_healthy().await
}

async fn inspect(arguments: &[&str]) -> Result<Output> {
    let mut command = tokio::process::Command::from(dormouse());
    let command = command.arg("inspect").args(arguments);
    command.output().await.context("cannot start dormouse")
}

#[tokio::test]
async fn inspect_finds_the_same_tensors_in_every_form() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("inside", Model::new("beside_inside"))?;
    let mut names = every_form(&repository)?;
    names.push("inside".to_owned());
    let mut lists = Vec::new();
    for name in &names {
        let path = repository.model_dir(name);
        let path = path.to_str().context("a path that is text")?;
        let output = inspect(&[path, "--json", "--tensors"]).await?;
        ensure!(output.status.success(), "{name}: {output:?}");
        let report: Value = serde_json::from_slice(&output.stdout)?;
        ensure!(
            report["manifest"]["files"][0]["digest"].is_string(),
            "{report}"
        );
        ensure!(report["plan"]["bytes_read_only"] == 18_624, "{report}");
        let tensors = report["manifest"]["tensors"]
            .as_array()
            .context("tensors")?;
        let mut list: Vec<[String; 4]> = tensors
            .iter()
            .map(|tensor| ["name", "element", "dims", "digest"].map(|key| tensor[key].to_string()))
            .collect();
        list.sort();
        lists.push(list);
        let output = inspect(&[path, "--format", "table"]).await?;
        let text = String::from_utf8(output.stdout)?;
        ensure!(
            text.contains("bfloat16") && text.contains("a load reads"),
            "{text}"
        );
    }
    ensure!(
        lists[0].len() == 4 && lists.iter().all(|list| *list == lists[0]),
        "{lists:?}"
    );
    let output = inspect(&["/nowhere/model"]).await?;
    ensure!(!output.status.success(), "{output:?}");
    Ok(())
}

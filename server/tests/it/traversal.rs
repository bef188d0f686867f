//! No name and no model reads or writes outside its place.

use std::fs;
use std::os::unix::fs::symlink;

use anyhow::{Context, Result, ensure};
use dormouse_proto::inference as pb;
use pb::model_repository_parameter::ParameterChoice;

use crate::http;
use crate::repository::{Model, TestRepository, model_bytes, models_dir};
use crate::server::TestServer;
use crate::wire::{self, Request, add_sub};

const NAMES: [&str; 11] = [
    "..",
    ".",
    "../outside",
    "../../etc",
    "simple/../../outside",
    "/etc/passwd",
    "simple/1",
    "..\\outside",
    "%2e%2e%2foutside",
    "simple\u{0}",
    "simple\r\nx: y",
];

/// A repository whose neighbour `outside` is a model that must never be served.
fn beside_an_outsider() -> Result<(tempfile::TempDir, TestRepository)> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let outside = tempfile::tempdir()?;
    fs::create_dir_all(outside.path().join("1"))?;
    fs::write(outside.path().join("1/model.onnx"), model_bytes("add_sub")?)?;
    fs::copy(
        models_dir().join("weights.bin"),
        outside.path().join("weights.bin"),
    )?;
    Ok((outside, repository))
}

#[tokio::test]
async fn names_that_are_paths_are_refused() -> Result<()> {
    let (outside, repository) = beside_an_outsider()?;
    let mut server = TestServer::over(&repository)
        .arg("--model-control-mode=explicit")
        .arg("--load-model=simple")
        .start()
        .await?;
    let mut client = server.grpc().await?;
    let neighbour = format!(
        "../{}",
        outside.path().file_name().context("a name")?.display()
    );
    for name in NAMES.into_iter().chain([neighbour.as_str()]) {
        let load = client
            .repository_model_load(pb::RepositoryModelLoadRequest {
                model_name: name.into(),
                ..Default::default()
            })
            .await;
        ensure!(load.is_err(), "{name:?} loaded");
        let infer = wire::infer(&client, add_sub(name, 1, 1)).await;
        ensure!(infer.is_err(), "{name:?} answered");
        let metadata = client
            .model_metadata(pb::ModelMetadataRequest {
                name: name.into(),
                version: String::new(),
            })
            .await;
        ensure!(metadata.is_err(), "{name:?} was described");
        let version = wire::infer(&client, add_sub("simple", 1, 1).version(name)).await;
        ensure!(version.is_err(), "version {name:?} answered");
        if name.bytes().all(|byte| byte.is_ascii_graphic()) {
            for path in [
                format!("/v2/models/{name}/config"),
                format!("/v2/models/{}/config", name.replace('/', "%2F")),
                format!("/v2/models/simple/versions/{name}/config"),
            ] {
                let answer = server.get(&path).await?;
                ensure!(
                    (400..500).contains(&answer.status),
                    "GET {path}: {}",
                    answer.status
                );
            }
            let path = format!(
                "/v2/repository/models/{}/load",
                name.replace('/', "%2F").replace("%2e", "%252e")
            );
            let answer = server.post(&path, b"{}").await?;
            ensure!(answer.status >= 400, "POST {path}: {}", answer.status);
        }
    }
    wire::infer(&client, add_sub("simple", 1, 1)).await?;
    server.assert_healthy().await
}

#[tokio::test]
async fn files_in_a_load_request_stay_inside_it() -> Result<()> {
    let (outside, repository) = beside_an_outsider()?;
    let mut server = TestServer::over(&repository)
        .arg("--model-control-mode=explicit")
        .start()
        .await?;
    let mut client = server.grpc().await?;
    let planted = outside.path().join("planted");
    let long = "x".repeat(256);
    let paths = [
        "../planted".to_owned(),
        "1/../../../planted".to_owned(),
        planted.display().to_string(),
        "1/../../planted".to_owned(),
        "..".to_owned(),
        String::new(),
        "1/model.onnx\u{0}".to_owned(),
        long.clone(),
        format!("1/{long}"),
    ];
    let before: Vec<_> = list(outside.path())?;
    for path in paths {
        let mut request = pb::RepositoryModelLoadRequest {
            model_name: "simple".into(),
            ..Default::default()
        };
        let parameter = |choice| pb::ModelRepositoryParameter {
            parameter_choice: Some(choice),
        };
        request.parameters.insert(
            "config".into(),
            parameter(ParameterChoice::StringParam(
                r#"{"backend":"onnxruntime"}"#.into(),
            )),
        );
        request.parameters.insert(
            format!("file:{path}"),
            parameter(ParameterChoice::BytesParam(model_bytes("add_sub")?.into())),
        );
        let answer = client.repository_model_load(request).await;
        ensure!(answer.is_err(), "file {path:?} was taken");
    }
    ensure!(
        list(outside.path())? == before,
        "a file was written outside"
    );
    ensure!(!planted.exists());
    server.assert_healthy().await
}

fn list(folder: &std::path::Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

#[tokio::test]
async fn external_data_is_read_only_from_the_models_own_folder() -> Result<()> {
    let (outside, repository) = beside_an_outsider()?;
    let refused = [
        "external_parent",
        "external_parent_nested",
        "external_absolute",
        "external_proc",
        "external_memory",
        "external_offset",
        "external_length",
        "external_negative",
    ];
    for file in refused {
        repository.add(file, Model::new(file))?;
        let folder = repository.model_dir(file);
        fs::create_dir_all(folder.join("1/a"))?;
        for place in [folder.join("weights.bin"), folder.join("1/weights.bin")] {
            fs::copy(models_dir().join("weights.bin"), place)?;
        }
    }
    let secret = outside.path().join("weights.bin");
    for name in ["linked", "hard_linked", "folder"] {
        repository.add(name, Model::new("external"))?;
        let weights = repository.model_dir(name).join("1/weights.bin");
        fs::remove_file(&weights)?;
        match name {
            "linked" => symlink(&secret, &weights)?,
            "hard_linked" => fs::hard_link(&secret, &weights)?,
            _ => fs::create_dir(&weights)?,
        }
    }
    repository.add("missing", Model::new("external"))?;
    fs::remove_file(repository.model_dir("missing").join("1/weights.bin"))?;
    repository.add("good", Model::new("external"))?;

    let mut server = TestServer::over(&repository)
        .arg("--strict-readiness=false")
        .start()
        .await?;
    let client = server.grpc().await?;
    let request = |model: &str| Request::new(model).input("X", &[1, 4], &[1f32; 4]);
    for model in refused
        .into_iter()
        .chain(["linked", "hard_linked", "folder", "missing"])
    {
        let status = wire::infer(&client, request(model)).await.err();
        let status = status.with_context(|| format!("{model} was served"))?;
        let root = outside.path().display().to_string();
        ensure!(!status.message().contains(&root), "{status:?}");
    }
    let answer = wire::infer(&client, request("good")).await?;
    ensure!(wire::output::<f32>(&answer, "Y", &[1, 4])? == [8.0; 4]);
    server.assert_healthy().await
}

#[tokio::test]
async fn weights_changed_under_a_running_model_do_not_change_its_answers() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("good", Model::new("external"))?;
    let mut server = TestServer::over(&repository)
        .arg("--keep-alive")
        .arg("1h")
        .start()
        .await?;
    let client = server.grpc().await?;
    let weights = repository.model_dir("good").join("1/weights.bin");
    let request = || Request::new("good").input("X", &[1, 4], &[1f32; 4]);
    wire::infer(&client, request()).await?;
    // In place, then cut to nothing: either kills or corrupts a process that mapped the file.
    fs::write(&weights, [0x41; 64])?;
    let answer = wire::infer(&client, request()).await?;
    ensure!(wire::output::<f32>(&answer, "Y", &[1, 4])? == [8.0; 4]);
    fs::write(&weights, [])?;
    let answer = wire::infer(&client, request()).await?;
    ensure!(wire::output::<f32>(&answer, "Y", &[1, 4])? == [8.0; 4]);
    server.assert_healthy().await
}

#[tokio::test]
async fn settings_that_name_files_cannot_be_changed_over_the_api() -> Result<()> {
    let repository = TestRepository::new()?;
    let mut server = TestServer::over(&repository).start().await?;
    let target = repository.path().join("planted.log");
    for (path, body) in [
        (
            "/v2/logging",
            format!(r#"{{"log_file":"{}"}}"#, target.display()),
        ),
        (
            "/v2/trace/setting",
            format!(r#"{{"trace_file":"{}"}}"#, target.display()),
        ),
    ] {
        let answer = http::call(server.http, "POST", path, &[], body.as_bytes()).await?;
        ensure!(answer.status >= 400, "POST {path}: {}", answer.status);
    }
    server.get("/v2/health/live").await?;
    ensure!(
        !target.exists(),
        "the API wrote a file of the caller's choice"
    );
    server.assert_healthy().await
}

//! New versions come in while the old one serves; bad ones stay out.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dormouse_proto::inference as pb;
use pb::model_repository_parameter::ParameterChoice;
use tonic::Code;

use crate::repository::{Model, TestRepository, model_bytes};
use crate::server::{TestServer, eventually};
use crate::wire::{self, GrpcClient, add_sub, output};

/// Calls `simple` without a pause, checks every answer against the version that gave it, and
/// returns how many there were.
fn traffic(client: GrpcClient, stop: Arc<AtomicBool>) -> tokio::task::JoinHandle<Result<u32>> {
    tokio::spawn(async move {
        let mut calls = 0;
        while !stop.load(Ordering::Relaxed) {
            let answer = wire::infer(&client, add_sub("simple", 5, 3))
                .await
                .with_context(|| format!("after {calls} good calls"))?;
            let first = output::<i32>(&answer, "OUTPUT0", &[1, 16])?;
            let expected = match answer.model_version.as_str() {
                "1" | "2" => 8,
                "3" => 2,
                other => anyhow::bail!("answered by version {other}"),
            };
            ensure!(first == [expected; 16], "{first:?}");
            calls += 1;
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(calls)
    })
}

async fn load(client: &GrpcClient, model: &str) -> Result<(), tonic::Status> {
    let request = pb::RepositoryModelLoadRequest {
        model_name: model.into(),
        ..Default::default()
    };
    let answer = client.clone().repository_model_load(request).await;
    answer.map(|_| ())
}

#[tokio::test]
async fn a_bad_new_version_under_traffic_leaves_the_old_one_serving() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let mut server = TestServer::over(&repository)
        .arg("--model-control-mode=explicit")
        .arg("--load-model=simple")
        .start()
        .await?;
    let client = server.grpc().await?;
    let stop = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (0..4)
        .map(|_| traffic(client.clone(), Arc::clone(&stop)))
        .collect();

    repository.add_version("simple", 2, "corrupt")?;
    for _ in 0..5 {
        let status = load(&client, "simple").await.err();
        let status = status.context("a corrupt version loaded")?;
        ensure!(status.message().contains("simple"), "{status:?}");
    }
    let index = client
        .clone()
        .repository_index(pb::RepositoryIndexRequest::default())
        .await?
        .into_inner();
    let told = index.models.iter().any(|entry| {
        entry.name == "simple" && (entry.version == "2" || entry.reason.contains("reload failed"))
    });
    ensure!(told, "the index says nothing of version 2: {index:?}");
    let answer = wire::infer(&client, add_sub("simple", 5, 3)).await?;
    ensure!(answer.model_version == "1", "{}", answer.model_version);

    repository.add_version("simple", 3, "add_sub_swapped")?;
    load(&client, "simple").await?;
    let answer = wire::infer(&client, add_sub("simple", 5, 3)).await?;
    ensure!(answer.model_version == "3", "{}", answer.model_version);

    stop.store(true, Ordering::Relaxed);
    for caller in callers {
        let calls = caller.await??;
        ensure!(calls > 0, "no traffic");
    }
    server.assert_healthy().await
}

#[tokio::test]
async fn a_new_version_is_picked_up_by_polling() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let mut server = TestServer::over(&repository)
        .arg("--model-control-mode=poll")
        .arg("--repository-poll-secs=1")
        .start()
        .await?;
    let client = server.grpc().await?;
    let stop = Arc::new(AtomicBool::new(false));
    let caller = traffic(client.clone(), Arc::clone(&stop));
    repository.add_version("simple", 3, "add_sub_swapped")?;
    eventually("version 3 serves", || async {
        let answer = wire::infer(&client, add_sub("simple", 5, 3)).await?;
        Ok(answer.model_version == "3")
    })
    .await?;
    repository.add("later", Model::new("add_sub"))?;
    eventually("a new model serves", || async {
        Ok(wire::infer(&client, add_sub("later", 5, 3)).await.is_ok())
    })
    .await?;
    stop.store(true, Ordering::Relaxed);
    caller.await??;
    server.assert_healthy().await
}

#[tokio::test]
async fn a_changed_file_and_a_removed_model_are_noticed_by_polling() -> Result<()> {
    let repository = TestRepository::new()?;
    for name in ["changed", "removed"] {
        repository.add(name, Model::new("add_sub"))?;
    }
    let mut server = TestServer::over(&repository)
        .arg("--model-control-mode=poll")
        .arg("--repository-poll-secs=1")
        .start()
        .await?;
    let client = server.grpc().await?;
    let first = async |name: &str| {
        let answer = wire::infer(&client, add_sub(name, 5, 3)).await?;
        anyhow::Ok(output::<i32>(&answer, "OUTPUT0", &[1, 16])?[0])
    };
    ensure!(first("changed").await? == 8 && first("removed").await? == 8);
    let folder = repository.model_dir("changed").join("1");
    std::fs::write(folder.join("next"), model_bytes("add_sub_swapped")?)?;
    std::fs::rename(folder.join("next"), folder.join("model.onnx"))?;
    eventually("the new file serves", || async {
        Ok(first("changed").await? == 2)
    })
    .await?;
    std::fs::remove_dir_all(repository.model_dir("removed"))?;
    eventually("the removed model is gone", || async {
        Ok(wire::infer(&client, add_sub("removed", 5, 3))
            .await
            .is_err_and(|status| matches!(status.code(), Code::NotFound | Code::Unavailable)))
    })
    .await?;
    server.assert_healthy().await
}

#[tokio::test]
async fn the_version_policy_decides_who_answers() -> Result<()> {
    let repository = TestRepository::new()?;
    let versions = |policy: &str| {
        Model::new("add_sub")
            .version(3, "add_sub_swapped")
            .config(&format!("max_batch_size: 8 version_policy: {policy}"))
    };
    repository.add("latest", versions("{ latest { num_versions: 1 } }"))?;
    repository.add("all", versions("{ all { } }"))?;
    repository.add("specific", versions("{ specific { versions: [ 1 ] } }"))?;
    let server = TestServer::over(&repository).start().await?;
    let client = server.grpc().await?;
    let cases = [
        ("latest", "", Some(2)),
        ("latest", "3", Some(2)),
        ("latest", "1", None),
        ("all", "", Some(2)),
        ("all", "3", Some(2)),
        ("all", "1", Some(8)),
        ("specific", "", Some(8)),
        ("specific", "3", None),
    ];
    for (model, version, expected) in cases {
        let answer = wire::infer(&client, add_sub(model, 5, 3).version(version)).await;
        match (answer, expected) {
            (Ok(answer), Some(expected)) => {
                let found = output::<i32>(&answer, "OUTPUT0", &[1, 16])?;
                ensure!(found == [expected; 16], "{model} {version}: {found:?}");
            }
            (Err(_), None) => {}
            (answer, _) => anyhow::bail!("{model} version {version:?}: {answer:?}"),
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_load_may_bring_its_own_configuration_and_files() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let server = TestServer::over(&repository)
        .arg("--model-control-mode=explicit")
        .start()
        .await?;
    let mut client = server.grpc().await?;
    let config = r#"{"backend":"onnxruntime","max_batch_size":2}"#;
    let mut request = pb::RepositoryModelLoadRequest {
        model_name: "simple".into(),
        ..Default::default()
    };
    let text = |text: &str| pb::ModelRepositoryParameter {
        parameter_choice: Some(ParameterChoice::StringParam(text.into())),
    };
    request.parameters.insert("config".into(), text(config));
    client.repository_model_load(request.clone()).await?;
    let found = client
        .model_config(pb::ModelConfigRequest {
            name: "simple".into(),
            version: String::new(),
        })
        .await?
        .into_inner()
        .config
        .context("no configuration")?;
    ensure!(found.max_batch_size == 2, "{}", found.max_batch_size);

    request.parameters.insert(
        "file:7/model.onnx".into(),
        pb::ModelRepositoryParameter {
            parameter_choice: Some(ParameterChoice::BytesParam(
                model_bytes("add_sub_swapped")?.into(),
            )),
        },
    );
    client.repository_model_load(request.clone()).await?;
    let answer = wire::infer(&client, add_sub("simple", 5, 3)).await?;
    ensure!(answer.model_version == "7", "{}", answer.model_version);
    ensure!(output::<i32>(&answer, "OUTPUT0", &[1, 16])? == [2; 16]);
    // Files without a configuration are refused, and what serves goes on.
    request.parameters.remove("config");
    let refused = client.repository_model_load(request).await.err();
    let refused = refused.context("a file without a configuration was taken")?;
    ensure!(refused.code() == Code::InvalidArgument, "{refused:?}");
    ensure!(refused.message().contains("'config'"), "{refused:?}");
    let answer = wire::infer(&client, add_sub("simple", 5, 3)).await?;
    ensure!(answer.model_version == "7", "{}", answer.model_version);
    Ok(())
}

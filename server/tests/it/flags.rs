//! The command line: Triton's flags as they are, and clear words about the others.

use anyhow::{Context, Result, ensure};

use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, dormouse, eventually, patiently};
use crate::wire::{self, add_sub};

/// Runs a command line that must fail, and returns what it said.
async fn refused(arguments: &[&str]) -> Result<String> {
    let mut command = tokio::process::Command::from(dormouse());
    command.args(arguments).kill_on_drop(true);
    let output = patiently("the command ends", command.output()).await??;
    ensure!(!output.status.success(), "{arguments:?} was accepted");
    ensure!(
        output.status.code().is_some(),
        "{arguments:?} ended with {}",
        output.status
    );
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[tokio::test]
async fn an_unknown_flag_is_refused_with_a_suggestion() -> Result<()> {
    let said = refused(&["serve", "--model-repository", "/tmp", "--http-prot=1"]).await?;
    ensure!(said.contains("--http-prot"), "{said}");
    ensure!(said.contains("--http-port"), "no suggestion in: {said}");
    Ok(())
}

#[tokio::test]
async fn a_bad_value_is_refused_with_the_flags_name() -> Result<()> {
    let repository = TestRepository::new()?;
    let path = repository.path().to_str().context("a readable path")?;
    for (flag, value) in [
        ("--http-port", "eight"),
        ("--model-control-mode", "sometimes"),
        ("--strict-readiness", "perhaps"),
        ("--repository-poll-secs", "-1"),
        ("--keep-alive", "soon"),
    ] {
        let argument = format!("{flag}={value}");
        let said = refused(&["serve", "--model-repository", path, &argument]).await?;
        ensure!(said.contains(flag), "{argument}: {said}");
    }
    Ok(())
}

#[tokio::test]
async fn a_missing_repository_is_refused_with_its_path() -> Result<()> {
    let said = refused(&["serve", "--model-repository", "/no/such/folder"]).await?;
    ensure!(said.contains("/no/such/folder"), "{said}");
    Ok(())
}

#[tokio::test]
async fn flags_without_effect_are_accepted_and_warned_about_once() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let ignored = [
        "--pinned-memory-pool-byte-size=1048576",
        "--cuda-memory-pool-byte-size=0:1048576",
        "--min-supported-compute-capability=6.0",
    ];
    let mut builder = TestServer::over(&repository)
        .arg("--allow-http=true")
        .arg("--allow-grpc=1")
        .arg("--strict-readiness=true");
    for flag in ignored {
        builder = builder.arg(flag);
    }
    let mut server = builder.start().await?;
    wire::infer(&server.grpc().await?, add_sub("simple", 1, 1)).await?;
    let records = server.log.records();
    for flag in ignored {
        let name = flag.split('=').next().context("a name")?;
        let warnings = records
            .iter()
            .filter(|record| record["level"] == "WARN" && record.to_string().contains(name))
            .count();
        ensure!(warnings == 1, "{warnings} warnings about {name}");
    }
    server.assert_healthy().await
}

#[tokio::test]
async fn every_spelling_of_tritons_flags_is_understood() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    repository.add("other", Model::new("add_sub"))?;
    let mut server = TestServer::over(&repository)
        .arg("--model-control-mode")
        .arg("explicit")
        .arg("--load-model=simple")
        .arg("--strict-model-config=false")
        .arg("--allow-sagemaker=false")
        .arg("--log-verbose=0")
        .arg("--exit-on-error=true")
        .arg("--backend-config=onnxruntime,default-max-batch-size=16")
        .start()
        .await?;
    let client = server.grpc().await?;
    wire::infer(&client, add_sub("simple", 1, 1)).await?;
    let other = wire::infer(&client, add_sub("other", 1, 1)).await;
    ensure!(other.is_err(), "a model nobody loaded answered");
    let config = server.get("/v2/models/simple/config").await?.json()?;
    ensure!(config["max_batch_size"] == 16, "{config}");
    server.assert_healthy().await
}

#[tokio::test]
async fn without_completion_a_model_needs_its_whole_configuration() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("bare", Model::new("add_sub"))?;
    let config = r#"backend: "onnxruntime" max_batch_size: 2
        input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] },
                { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
        output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] },
                 { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]"#;
    repository.add("whole", Model::new("add_sub").config(config))?;
    let server = TestServer::over(&repository)
        .arg("--disable-auto-complete-config")
        .arg("--strict-readiness=false")
        .arg("--exit-on-error=false")
        .start()
        .await?;
    let client = server.grpc().await?;
    wire::infer(&client, add_sub("whole", 1, 1)).await?;
    let bare = wire::infer(&client, add_sub("bare", 1, 1)).await;
    ensure!(bare.is_err(), "a model without a configuration answered");
    Ok(())
}

#[tokio::test]
async fn a_start_up_model_that_cannot_load_ends_the_server_with_its_name() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("corrupt", Model::new("corrupt"))?;
    // Only to be sure that the engine's library is there.
    TestServer::over(&repository)
        .arg("--model-control-mode=explicit")
        .start()
        .await?;
    let path = repository.path().to_str().context("a readable path")?;
    let mut arguments = vec!["serve", "--model-repository", path];
    arguments.extend(["--http-port=0", "--grpc-port=0", "--metrics-port=0"]);
    arguments.extend(["--model-control-mode=explicit", "--load-model=corrupt"]);
    let said = refused(&arguments).await?;
    ensure!(said.contains("corrupt"), "{said}");
    Ok(())
}

#[tokio::test]
async fn a_star_loads_every_model_at_the_start() -> Result<()> {
    let repository = TestRepository::new()?;
    for name in ["one", "two"] {
        repository.add(name, Model::new("add_sub"))?;
    }
    let mut server = TestServer::over(&repository)
        .arg("--model-control-mode=explicit")
        .arg("--load-model=*")
        .start()
        .await?;
    let loads = server.metric("dormouse_loads_total", &[]).await?;
    ensure!(loads == 2.0, "{loads} loads");
    let client = server.grpc().await?;
    for name in ["one", "two"] {
        let (state, reason) = wire::index_state(&client, name, "1").await?;
        ensure!(state == "READY", "{name}: {state} {reason}");
    }
    server.assert_healthy().await
}

#[tokio::test]
async fn a_named_configuration_takes_the_place_of_the_usual_one() -> Result<()> {
    let repository = TestRepository::new()?;
    for name in ["both", "usual"] {
        repository.add(name, Model::new("add_sub").config("max_batch_size: 5"))?;
    }
    let folder = repository.model_dir("both").join("configs");
    std::fs::create_dir(&folder)?;
    std::fs::write(folder.join("small.pbtxt"), "max_batch_size: 3")?;
    let mut server = TestServer::over(&repository)
        .arg("--model-config-name=small")
        .start()
        .await?;
    for (name, rows) in [("both", 3), ("usual", 5)] {
        let path = format!("/v2/models/{name}/config");
        let config = server.get(&path).await?.json()?;
        ensure!(config["max_batch_size"] == rows, "{name}: {config}");
    }
    server.assert_healthy().await
}

#[tokio::test]
async fn a_log_file_gets_the_log_instead_of_standard_error() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    TestServer::over(&repository).start().await?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("dormouse.log");
    let mut command = tokio::process::Command::from(dormouse());
    command
        .arg("serve")
        .arg("--model-repository")
        .arg(repository.path())
        .args(["--http-port=0", "--grpc-port=0", "--metrics-port=0"])
        .arg("--log-file")
        .arg(&file)
        .stderr(std::process::Stdio::piped())
        .kill_on_drop(true);
    let mut child = command.spawn()?;
    eventually("the log file tells of the start", || async {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        Ok(text.contains("server started"))
    })
    .await?;
    child.start_kill()?;
    let output = patiently("the server ends", child.wait_with_output()).await??;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(!said.contains("server started"), "{said}");
    Ok(())
}

#[tokio::test]
async fn a_model_in_two_repositories_is_served_by_neither() -> Result<()> {
    let (one, other) = (TestRepository::new()?, TestRepository::new()?);
    one.add("simple", Model::new("add_sub"))?;
    other.add("simple", Model::new("add_sub_swapped"))?;
    other.add("alone", Model::new("add_sub"))?;
    let second = other.path().to_str().context("a readable path")?;
    let mut server = TestServer::over(&one)
        .arg(format!("--model-repository={second}"))
        .arg("--strict-readiness=false")
        .start()
        .await?;
    let client = server.grpc().await?;
    wire::infer(&client, add_sub("alone", 1, 1)).await?;
    let status = wire::infer(&client, add_sub("simple", 1, 1)).await.err();
    let status = status.context("one of two models of the same name answered")?;
    ensure!(status.message().contains("more than one"), "{status:?}");
    let (state, reason) = wire::index_state(&client, "simple", "").await?;
    ensure!(state == "UNAVAILABLE", "{state}");
    ensure!(reason.contains("more than one"), "{reason}");
    server.assert_healthy().await
}

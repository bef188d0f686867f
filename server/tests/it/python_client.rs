//! Our own Python client: its tests against a live server, its types, its style, and its wheel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use prost_reflect::prost::Message;
use prost_reflect::prost_types::FileDescriptorSet;

use crate::foreign::{every_model, prepare, script};
use crate::python::{Environment, succeed};
use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, engine_installed, target_dir};

/// tritonclient is there to be mixed with, the rest to test, type and judge.
pub(crate) const PACKAGES: (&str, &[&str]) = (
    "dormouse-client",
    &[
        "tritonclient[grpc,http]==2.73.0",
        "grpcio==1.85.1",
        "ml_dtypes==0.5.4",
        "numpy==2.4.6",
        "pytest==9.2.0",
        "trustme==1.2.1",
        "mypy==2.4.1",
        "ruff==0.17.4",
        "types-grpcio==1.85.0.20261028",
        "types-protobuf==7.35.1.20260906",
    ],
);

/// What the client depends on, and nothing else.
const WHEEL: (&str, &[&str]) = (
    "dormouse-wheel",
    &["grpcio==1.85.1", "numpy==2.4.6", "protobuf==6.33.6"],
);

pub(crate) fn client_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../clients/python")
}

fn python(environment: &Environment) -> Command {
    let mut command = Command::new(environment.python());
    command
        .current_dir(client_folder())
        // The checkout stays as it is.
        .env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

async fn run(mut command: Command, otherwise: &'static str) -> Result<String> {
    let output = tokio::task::spawn_blocking(move || succeed(&mut command, otherwise)).await??;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[tokio::test]
async fn the_python_client_against_a_live_server() -> Result<()> {
    let repository = every_model()?;
    let mut server = TestServer::over(&repository)
        .arg("--model-control-mode=explicit")
        .arg("--load-model=*")
        .arg("--exit-on-error=false")
        .arg("--strict-readiness=false")
        .start()
        .await?;
    let environment = prepare(PACKAGES).await?;
    let mut command = python(&environment);
    command
        .args(["-m", "pytest", "-q"])
        .env("PYTHONPATH", "src")
        .env("DORMOUSE_TEST_GRPC", server.grpc.to_string())
        .env("DORMOUSE_TEST_HTTP", format!("http://{}", server.http));
    let said = run(command, "a test of the Python client failed")
        .await
        .with_context(|| format!("the server's log:\n{}", server.log.tail()))?;
    ensure!(!said.contains("skipped"), "tests were left out: {said}");
    eprint!("{said}");
    server.assert_healthy().await
}

#[tokio::test]
async fn the_python_client_is_typed_and_tidy() -> Result<()> {
    let environment = prepare(PACKAGES).await?;
    let mut mypy = python(&environment);
    mypy.args(["-m", "mypy", "--cache-dir"])
        .arg(target_dir().join("python/mypy"));
    run(mypy, "mypy --strict finds fault").await?;
    for arguments in [&["check"][..], &["format", "--check"]] {
        let mut ruff = python(&environment);
        ruff.args(["-m", "ruff"]).args(arguments).arg("--no-cache");
        run(ruff, "ruff finds fault").await?;
    }
    Ok(())
}

/// Built as a user builds it, but for the profile, and installed by pip beside what it depends on.
#[tokio::test]
async fn the_wheel_carries_the_server_and_the_client() -> Result<()> {
    engine_installed().await?;
    let environment = prepare(WHEEL).await?;
    let folder = tempfile::tempdir()?;
    let mut build = python(&environment);
    build
        .args([
            "wheel_backend.py",
            "--fast",
            "--server",
            env!("CARGO_BIN_EXE_dormouse"),
        ])
        .arg("--out")
        .arg(folder.path());
    let built = run(build, "the wheel could not be built").await?;
    let wheel = PathBuf::from(built.trim());
    let name = wheel.file_name().context("a file")?.to_string_lossy();
    let start = concat!(
        "dormouse-",
        env!("CARGO_PKG_VERSION"),
        "-py3-none-manylinux_2_"
    );
    ensure!(
        name.starts_with(start),
        "{name} does not begin with {start}"
    );
    let mut install = python(&environment);
    install
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ])
        .args(["--no-deps", "--no-index", "--force-reinstall"])
        .arg(&wheel);
    run(install, "pip could not install the wheel").await?;
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let mut call = python(&environment);
    call.arg(script("wheel.py"))
        .arg(repository.path())
        .current_dir(folder.path())
        .env("DORMOUSE_CACHE_DIR", target_dir().join("dormouse-cache"));
    let said = run(call, "what the wheel installed does not work").await?;
    ensure!(said.contains("cold start from "), "no timeline: {said}");
    Ok(())
}

/// `UPDATE_EXPECT=1` writes the file anew.
#[test]
fn the_python_clients_messages_are_those_of_the_proto_files() -> Result<()> {
    let mut descriptors = FileDescriptorSet::decode(dormouse_proto::FILE_DESCRIPTOR_SET)?;
    descriptors
        .file
        .retain(|file| file.package() == "inference");
    for file in &mut descriptors.file {
        file.source_code_info = None;
    }
    let path = client_folder().join("src/dormouse/inference.binpb");
    let wanted = descriptors.encode_to_vec();
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        fs::write(&path, &wanted)?;
    }
    ensure!(
        fs::read(&path)? == wanted,
        "{} is not what the .proto files say: run this test with UPDATE_EXPECT=1",
        path.display()
    );
    Ok(())
}

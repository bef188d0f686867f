//! Other people's clients, each in a process and a Python environment of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::limits::FLEETING;
use crate::python::{Environment, succeed};
use crate::repository::{Model, TestRepository};
use crate::server::{ServerBuilder, TestServer};

pub(crate) const TRITON: (&str, &[&str]) = (
    "tritonclient",
    &[
        "tritonclient[grpc,http]==2.73.0",
        "grpcio==1.85.1",
        "grpcio-health-checking==1.81.1",
        "grpcio-reflection==1.81.1",
        "ml_dtypes==0.5.4",
        "numpy==2.4.6",
    ],
);
const KSERVE: (&str, &[&str]) = ("kserve", &["kserve==0.21.0"]);
const KEDA: (&str, &[&str]) = ("keda", &["grpcio-tools==1.81.1"]);
const ONNX: (&str, &[&str]) = (
    "onnx",
    &[
        "onnx==1.22.0",
        "onnxruntime==1.31.1",
        "tritonclient[grpc,http]==2.73.0",
        "ml_dtypes==0.5.4",
        "numpy==2.4.6",
    ],
);
const PERF_ANALYZER: (&str, &[&str]) = (
    "perf_analyzer",
    &["tritonclient==2.51.0", "nvidia-cuda-runtime-cu12==12.9.79"],
);

const DTYPES: [(&str, &str); 14] = [
    ("bool", "TYPE_BOOL"),
    ("uint8", "TYPE_UINT8"),
    ("uint16", "TYPE_UINT16"),
    ("uint32", "TYPE_UINT32"),
    ("uint64", "TYPE_UINT64"),
    ("int8", "TYPE_INT8"),
    ("int16", "TYPE_INT16"),
    ("int32", "TYPE_INT32"),
    ("int64", "TYPE_INT64"),
    ("fp16", "TYPE_FP16"),
    ("bf16", "TYPE_BF16"),
    ("fp32", "TYPE_FP32"),
    ("fp64", "TYPE_FP64"),
    ("bytes", "TYPE_STRING"),
];

/// One model of every kind: `identity_*` with a batch dimension, `flat_*` without.
pub(crate) fn every_model() -> Result<TestRepository> {
    let repository = TestRepository::new()?;
    for (name, kind) in DTYPES {
        let file = format!("identity_{name}");
        repository.add(&file, Model::new(&file))?;
        let config = format!(
            r#"backend: "onnxruntime"
            input [ {{ name: "INPUT" data_type: {kind} dims: [ -1, -1 ] }} ]
            output [ {{ name: "OUTPUT" data_type: {kind} dims: [ -1, -1 ] }} ]"#
        );
        repository.add(&format!("flat_{name}"), Model::new(&file).config(&config))?;
    }
    repository.add("simple", Model::new("add_sub"))?;
    repository.add(
        "versions",
        Model::new("add_sub")
            .version(2, "add_sub_swapped")
            .config("max_batch_size: 8 version_policy: { all { } }"),
    )?;
    let optional = r#"backend: "onnxruntime"
        input [ { name: "X" data_type: TYPE_FP32 dims: [ -1, 4 ] },
                { name: "BIAS" data_type: TYPE_FP32 dims: [ 1, 4 ] optional: true } ]
        output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1, 4 ] } ]"#;
    repository.add(
        "optional_input",
        Model::new("optional_input").config(optional),
    )?;
    let labels = r#"max_batch_size: 4
        output [ { name: "OUTPUT" data_type: TYPE_FP32 dims: [ -1 ] label_filename: "labels.txt" } ]"#;
    repository.add("labelled", Model::new("identity_fp32").config(labels))?;
    let path = repository.model_dir("labelled").join("labels.txt");
    fs::write(path, "cat\ndog\nfox\n")?;
    let cached = "max_batch_size: 4 response_cache { enable: true }";
    repository.add("cached", Model::new("add_sub").config(cached))?;
    for file in ["scalar", "no_input", "external", "poison"] {
        repository.add(file, Model::new(file))?;
    }
    let one = "instance_group [ { kind: KIND_CPU count: 1 } ]";
    repository.add("slow", Model::new("slow").config(one))?;
    repository.add("corrupt", Model::new("corrupt"))?;
    Ok(repository)
}

pub(crate) fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/foreign")
        .join(name)
}

/// A script's command line: the environment's Python, the script, the server's addresses.
fn command(environment: &Environment, name: &str, server: &TestServer) -> Command {
    let mut command = Command::new(environment.python());
    command
        .arg(script(name))
        .arg(format!("--http={}", server.http))
        .arg(format!("--grpc={}", server.grpc))
        .arg(format!("--metrics={}", server.metrics))
        .arg(format!("--pid={}", server.pid()))
        // The checkout stays as it is.
        .env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Runs a script against a server over every kind of model.
async fn run(packages: (&'static str, &'static [&'static str]), name: &str) -> Result<()> {
    run_on(packages, name, |builder| builder).await
}

async fn run_on(
    packages: (&'static str, &'static [&'static str]),
    name: &str,
    options: impl FnOnce(ServerBuilder) -> ServerBuilder,
) -> Result<()> {
    run_with(&every_model()?, packages, name, options).await
}

/// Runs a script of tritonclient's against a server over a repository of its own.
pub(crate) async fn run_over(repository: &TestRepository, name: &str) -> Result<()> {
    run_with(repository, TRITON, name, |builder| builder).await
}

async fn run_with(
    repository: &TestRepository,
    packages: (&'static str, &'static [&'static str]),
    name: &str,
    options: impl FnOnce(ServerBuilder) -> ServerBuilder,
) -> Result<()> {
    let builder = TestServer::over(repository).arg("--strict-readiness=false");
    let mut server = options(builder).start().await?;
    let environment = prepare(packages).await?;
    let mut command = command(&environment, name, &server);
    let output =
        tokio::task::spawn_blocking(move || succeed(&mut command, "a check of the script failed"))
            .await?
            .with_context(|| format!("the server's log:\n{}", server.log.tail()))?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(said.contains("ok "), "{name} checked nothing: {said}");
    eprint!("{said}");
    server.assert_healthy().await
}

pub(crate) async fn prepare(
    packages: (&'static str, &'static [&'static str]),
) -> Result<Environment> {
    tokio::task::spawn_blocking(move || Environment::prepare(packages.0, packages.1)).await?
}

#[tokio::test]
async fn tritonclient_over_grpc() -> Result<()> {
    run(TRITON, "triton_grpc.py").await
}

#[tokio::test]
async fn tritonclient_over_http() -> Result<()> {
    run(TRITON, "triton_http.py").await
}

#[tokio::test]
async fn tritonclient_with_asyncio() -> Result<()> {
    run(TRITON, "triton_aio.py").await
}

#[tokio::test]
async fn tritonclient_streams() -> Result<()> {
    run(TRITON, "triton_stream.py").await
}

#[tokio::test]
async fn tritonclient_manages_the_repository() -> Result<()> {
    run_on(TRITON, "triton_repository.py", |builder| {
        builder
            .arg("--model-control-mode=explicit")
            .arg("--load-model=simple")
    })
    .await
}

#[tokio::test]
async fn tritonclient_with_extensions() -> Result<()> {
    run_on(TRITON, "triton_extensions.py", |builder| {
        builder
            .arg("--allow-client-shm=true")
            .arg("--cache-config=local,size=1048576")
            .arg("--keep-alive=off")
    })
    .await
}

#[tokio::test]
async fn tritonclient_does_not_notice_that_idle_and_old_connections_are_closed() -> Result<()> {
    let files = tempfile::tempdir()?;
    let config = files.path().join("fleeting.toml");
    fs::write(&config, FLEETING)?;
    run_on(TRITON, "triton_reconnect.py", |builder| {
        builder.arg(format!("--config={}", config.display()))
    })
    .await
}

#[tokio::test]
async fn grpc_health_and_reflection() -> Result<()> {
    run(TRITON, "grpc_services.py").await
}

#[tokio::test]
async fn keda_scales_by_load() -> Result<()> {
    run(KEDA, "keda.py").await
}

#[tokio::test]
async fn kserve_clients() -> Result<()> {
    run(KSERVE, "kserve_clients.py").await
}

#[tokio::test]
async fn http_without_a_client_library() -> Result<()> {
    run(TRITON, "plain_http.py").await
}

#[tokio::test]
async fn requests_meant_to_kill() -> Result<()> {
    run_on(TRITON, "hostile_http.py", |builder| {
        builder
            .arg("--model-control-mode=explicit")
            .arg("--load-model=*")
            .arg("--exit-on-error=false")
    })
    .await
}

#[tokio::test]
async fn bodies_of_exactly_the_limit_and_one_byte_more() -> Result<()> {
    run_on(TRITON, "size_limit.py", |builder| {
        builder.arg("--http-max-input-size=1048576")
    })
    .await
}

/// The ONNX project's own operator tests, through every protocol.
#[tokio::test]
async fn onnx_operator_tests() -> Result<()> {
    let environment = prepare(ONNX).await?;
    let repository = TestRepository::new()?;
    let mut build = Command::new(environment.python());
    build
        .arg(script("onnx_nodes.py"))
        .arg("build")
        .arg(repository.path())
        .env("PYTHONDONTWRITEBYTECODE", "1");
    tokio::task::spawn_blocking(move || succeed(&mut build, "the cases could not be laid out"))
        .await??;
    let mut server = TestServer::over(&repository)
        // A leading dimension of an operator's test is seldom a batch.
        .arg("--backend-config=onnxruntime,default-max-batch-size=0")
        .arg("--strict-readiness=false")
        .arg("--keep-alive=1s")
        .start()
        .await?;
    let mut run = command(&environment, "onnx_nodes.py", &server);
    run.arg("run");
    let output = tokio::task::spawn_blocking(move || succeed(&mut run, "operator tests differ"))
        .await?
        .with_context(|| format!("the server's log:\n{}", server.log.tail()))?;
    eprint!("{}", String::from_utf8_lossy(&output.stdout));
    server.assert_healthy().await
}

/// NVIDIA's load generator, which lives inside an old wheel of its client.
#[tokio::test]
async fn perf_analyzer_over_both_protocols() -> Result<()> {
    let environment = prepare(PERF_ANALYZER).await?;
    let found = tokio::task::spawn_blocking(move || perf_analyzer(environment.root())).await??;
    let Some((program, libraries)) = found else {
        ensure!(std::env::var_os("CI").is_none(), "{NO_LIBB64}");
        eprintln!("skipped: perf_analyzer_over_both_protocols: {NO_LIBB64}");
        return Ok(());
    };
    let repository = TestRepository::new()?;
    let batching = "max_batch_size: 8 dynamic_batching { }";
    repository.add("simple", Model::new("add_sub").config(batching))?;
    let mut server = TestServer::over(&repository)
        .arg("--allow-client-shm")
        .start()
        .await?;
    for (protocol, address, memory) in [
        ("grpc", server.grpc, "none"),
        ("http", server.http, "none"),
        ("grpc", server.grpc, "system"),
        ("http", server.http, "system"),
    ] {
        let mut command = Command::new(&program);
        command
            .env("LD_LIBRARY_PATH", &libraries)
            .args(["-m", "simple", "-i", protocol])
            .args(["-u", &address.to_string()])
            .args(["--shared-memory", memory])
            .args(["--concurrency-range", "1"])
            .args(["--measurement-interval", "500"])
            // Answers' latency need not be stable on a busy machine, only measured.
            .args(["--stability-percentage", "999", "--max-trials", "3"]);
        let output = tokio::task::spawn_blocking(move || {
            succeed(&mut command, "perf_analyzer was not satisfied")
        })
        .await??;
        let said = String::from_utf8_lossy(&output.stdout);
        for part in [
            "Server:",
            "Inference count:",
            "Execution count:",
            "compute infer",
        ] {
            ensure!(said.contains(part), "{protocol}: no {part:?} in\n{said}");
        }
        ensure!(!said.contains("Inference count: 0\n"), "{said}");
    }
    server.assert_healthy().await
}

const NO_LIBB64: &str = "perf_analyzer needs libb64.so.0d, which is not installed and could not \
    be fetched: install the system's package libb64-0d";

/// The program and its library path. Two libraries are not in the wheel: CUDA's runtime has one of
/// its own, libb64 is a package of the system's that is unpacked here when it is not installed.
/// None when it cannot be had.
fn perf_analyzer(root: &Path) -> Result<Option<(PathBuf, String)>> {
    let program = root.join("bin/perf_analyzer");
    ensure!(
        program.exists(),
        "the tritonclient 2.51.0 wheel holds no {}",
        program.display()
    );
    let cuda = find(root, "libcudart.so.12")
        .context("the nvidia-cuda-runtime-cu12 wheel holds no libcudart.so.12")?;
    let mut libraries = cuda.parent().context("a folder")?.display().to_string();
    let starts = |libraries: &str| {
        let output = Command::new(&program)
            .arg("--version")
            .env("LD_LIBRARY_PATH", libraries)
            .output();
        output.is_ok_and(|output| output.status.success())
    };
    if !starts(&libraries) && find(root, "libb64.so.0d").is_none() {
        let mut download = Command::new("apt-get");
        download.args(["download", "libb64-0d"]).current_dir(root);
        if let Err(error) = succeed(&mut download, NO_LIBB64) {
            eprintln!("{error:#}");
            return Ok(None);
        }
        for entry in fs::read_dir(root)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "deb") {
                succeed(
                    Command::new("dpkg").arg("-x").arg(&path).arg(root),
                    NO_LIBB64,
                )?;
            }
        }
    }
    if let Some(base64) = find(root, "libb64.so.0d") {
        let folder = base64.parent().context("a folder")?;
        libraries = format!("{libraries}:{}", folder.display());
    }
    ensure!(starts(&libraries), "perf_analyzer does not start");
    Ok(Some((program, libraries)))
}

/// The first file of this name below a folder.
fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).ok()?.flatten() {
            let path = entry.path();
            if entry.file_name() == name {
                return Some(path);
            }
            if path.is_dir() && !path.is_symlink() {
                folders.push(path);
            }
        }
    }
    None
}

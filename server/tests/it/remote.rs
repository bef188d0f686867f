//! Models in a bucket: an S3-compatible server of others, fetched from, cached, followed.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::foreign::{prepare, script};
use crate::http;
use crate::repository::{Model, TestRepository, model_bytes, models_dir};
use crate::server::{ServerBuilder, TestServer, dormouse, engine_installed, eventually};
use crate::wire::{self, add_sub, output};

const MOTO: (&str, &[&str]) = ("s3", &["moto[s3]==5.2.5", "flask", "flask-cors"]);
const SIGNED: &str = "AWS4-HMAC-SHA256 Credential=me/20260101/us-east-1/s3/aws4_request, \
                      SignedHeaders=host, Signature=0";
const CONFIG: &str = "max_batch_size: 8\n";

/// The bucket's server; killed when dropped.
struct Bucket {
    child: Child,
    address: SocketAddr,
}

impl Bucket {
    async fn start() -> Result<Self> {
        let environment = prepare(MOTO).await?;
        let mut child = Command::new(environment.python())
            .arg(script("s3_server.py"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("a pipe")?).read_line(&mut line)?;
        let port = line.trim().strip_prefix("port ").context("a port")?;
        let address = SocketAddr::from(([127, 0, 0, 1], port.parse()?));
        let bucket = Self { child, address };
        bucket.ask("PUT", "", b"").await?;
        Ok(bucket)
    }

    async fn ask(&self, method: &str, key: &str, body: &[u8]) -> Result<()> {
        let path = format!("/bucket/{key}");
        // The server checks who comes, not their signature.
        let signed = [("authorization", SIGNED)];
        let answer = http::call(self.address, method, &path, &signed, body).await?;
        let status = answer.status;
        ensure!(status < 300, "{method} {key}: {status} {}", answer.text());
        Ok(())
    }

    async fn put(&self, key: &str, body: &[u8]) -> Result<()> {
        self.ask("PUT", &format!("models/{key}"), body).await
    }

    async fn put_model(&self, name: &str, file: &str) -> Result<()> {
        self.put(&format!("{name}/config.pbtxt"), CONFIG.as_bytes())
            .await?;
        self.put(&format!("{name}/1/model.onnx"), &model_bytes(file)?)
            .await
    }

    fn address(&self) -> String {
        format!("s3://http://{}/bucket/models", self.address)
    }
}

impl Drop for Bucket {
    fn drop(&mut self) {
        // Already gone when a test ended it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server over a folder and the bucket.
fn over(local: &TestRepository, bucket: &str, cache: &Path) -> ServerBuilder {
    TestServer::over(local)
        .arg("--model-repository")
        .arg(bucket)
        .arg(format!("--repository-cache={}", cache.display()))
        .arg("--repository-retries=1")
        .under([
            "env",
            "AWS_ACCESS_KEY_ID=not-a-secret",
            "AWS_SECRET_ACCESS_KEY=hunter2hunter2",
            "AWS_DEFAULT_REGION=us-east-1",
        ])
}

async fn ask(server: &TestServer, model: &str) -> Result<i32> {
    let client = server.grpc().await?;
    let answer = wire::infer(&client, add_sub(model, 3, 1)).await?;
    Ok(output::<i32>(&answer, "OUTPUT0", &[1, 16])?[0])
}

async fn reason(server: &TestServer, model: &str) -> Result<String> {
    let index = server.post("/v2/repository/index", b"{}").await?.json()?;
    let entries = index.as_array().context("an array")?.iter();
    let mut entries = entries.filter(|entry| entry["name"] == model);
    let entry = entries
        .next()
        .with_context(|| format!("{model} is not in the index"))?;
    let text = |key: &str| entry[key].as_str().unwrap_or_default().to_owned();
    Ok(format!("{} {}", text("state"), text("reason")))
}

async fn fetched(server: &TestServer) -> Result<u64> {
    let bytes = server
        .metric("dormouse_repository_fetched_bytes_total", &[])
        .await?;
    Ok(bytes as u64)
}

#[tokio::test]
async fn models_of_a_bucket_are_fetched_when_called_and_outlive_its_outage() -> Result<()> {
    let bucket = Bucket::start().await?;
    bucket.put_model("far", "add_sub").await?;
    bucket.put_model("never-called", "add_sub").await?;
    bucket
        .put("weighty/1/model.onnx", &model_bytes("external")?)
        .await?;
    let weights = std::fs::read(models_dir().join("weights.bin"))?;
    bucket.put("weighty/1/weights.bin", &weights).await?;
    bucket.put("weighty/1/unused.bin", &[0; 100_000]).await?;
    let local = TestRepository::new()?;
    local.add("near", Model::new("add_sub"))?;
    let cache = TempDir::new()?;

    let mut server = over(&local, &bucket.address(), cache.path())
        .start()
        .await?;
    eventually("the models are checked", || async {
        let records = server.log.records();
        Ok(records
            .iter()
            .any(|record| record["message"] == "repository checked"))
    })
    .await?;
    // Both configurations, and nothing else.
    ensure!(fetched(&server).await? == 2 * CONFIG.len() as u64);
    ensure!(reason(&server, "never-called").await? == "READY asleep");
    ensure!(ask(&server, "near").await? == 4);
    ensure!(ask(&server, "far").await? == 4);
    let statistics = wire::statistics(&server.grpc().await?, "far").await?;
    let stages = &statistics
        .cold_starts
        .first()
        .context("a cold start")?
        .stages;
    let fetch = stages.iter().find(|stage| stage.name == "fetch");
    let graph = model_bytes("add_sub")?.len() as u64;
    ensure!(
        fetch.context("no stage of fetching")?.bytes == graph,
        "{stages:?}"
    );
    let loaded = server.get("/v2/models/weighty").await?;
    ensure!(loaded.status == 200, "{}", loaded.text());
    let so_far = (2 * CONFIG.len() + model_bytes("external")?.len()) as u64 + graph;
    let now = fetched(&server).await?;
    ensure!(now == so_far, "{now} bytes fetched, expected {so_far}");
    server.assert_healthy().await?;
    server.kill().await?;

    let address = bucket.address();
    drop(bucket);
    let mut server = over(&local, &address, cache.path()).start().await?;
    ensure!(ask(&server, "far").await? == 4);
    ensure!(ask(&server, "near").await? == 4);
    eventually("the index tells why", || async {
        Ok(reason(&server, "never-called")
            .await?
            .contains("cannot be reached"))
    })
    .await?;
    ensure!(reason(&server, "far").await?.starts_with("READY"));
    let failures = server.metric(
        "dormouse_repository_errors_total",
        &[r#"kind="unreachable""#],
    );
    ensure!(failures.await? > 0.0);
    let log = server.log.lines().join("\n");
    ensure!(!log.contains("hunter2"), "a secret is in the log");
    server.assert_healthy().await
}

#[tokio::test]
async fn changes_in_a_bucket_are_followed_and_loaded_by_hand() -> Result<()> {
    let bucket = Bucket::start().await?;
    bucket.put_model("m", "add_sub").await?;
    let local = TestRepository::new()?;
    let cache = TempDir::new()?;
    let mut polling = over(&local, &bucket.address(), cache.path())
        .arg("--model-control-mode=poll")
        .arg("--repository-poll-secs=1")
        .start()
        .await?;
    let explicit = over(&local, &bucket.address(), cache.path())
        .arg("--model-control-mode=explicit")
        .arg("--load-model=m")
        .start()
        .await?;
    ensure!(ask(&polling, "m").await? == 4 && ask(&explicit, "m").await? == 4);
    bucket
        .put("m/1/model.onnx", &model_bytes("add_sub_swapped")?)
        .await?;
    bucket.put_model("new", "add_sub").await?;
    eventually(
        "the new model is served by the server that follows",
        || async { Ok(ask(&polling, "m").await? == 2) },
    )
    .await?;
    ensure!(
        ask(&explicit, "m").await? == 4,
        "changed without being asked"
    );
    for model in ["m", "new"] {
        let path = format!("/v2/repository/models/{model}/load");
        let loaded = explicit.post(&path, b"").await?;
        ensure!(loaded.status == 200, "{}", loaded.text());
    }
    ensure!(ask(&explicit, "m").await? == 2 && ask(&explicit, "new").await? == 4);
    bucket.ask("DELETE", "models/new/1/model.onnx", b"").await?;
    bucket.ask("DELETE", "models/new/config.pbtxt", b"").await?;
    eventually("the model that is gone leaves", || async {
        Ok(reason(&polling, "new").await.is_err())
    })
    .await?;
    polling.assert_healthy().await
}

#[tokio::test]
async fn a_bucket_that_cannot_be_used_ends_the_start_with_a_reason() -> Result<()> {
    let bucket = Bucket::start().await?;
    let cache = TempDir::new()?;
    engine_installed().await?;
    for (repository, told) in [
        (
            bucket.address().replace("/bucket/", "/absent/"),
            "NoSuchBucket",
        ),
        (format!("{}/../x", bucket.address()), "'..'"),
        ("ftp://host/x".to_owned(), "not a kind of repository"),
        ("http://models.example/x".to_owned(), "--allow-repository"),
        ("s3://http://127.0.0.1:1/b".to_owned(), "cannot be reached"),
    ] {
        let mut command = dormouse();
        command
            .args([
                "serve",
                "--http-port=0",
                "--grpc-port=0",
                "--metrics-port=0",
            ])
            .args(["--repository-retries=0", "--model-repository", &repository])
            .arg(format!("--repository-cache={}", cache.path().display()))
            .env("AWS_ACCESS_KEY_ID", "x")
            .env("AWS_SECRET_ACCESS_KEY", "hunter2hunter2");
        let output = tokio::task::spawn_blocking(move || command.output()).await??;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.status.success(), "{repository} was accepted");
        ensure!(said.contains(told), "{repository}: {said}");
        ensure!(!said.contains("hunter2"), "a secret is told: {said}");
    }
    Ok(())
}

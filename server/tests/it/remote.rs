//! Models in a bucket: an S3-compatible server of others, fetched from, cached, followed.

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};
use tempfile::{NamedTempFile, TempDir};

use crate::foreign::{prepare, script};
use crate::generated::Generated;
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
    said: BufReader<ChildStdout>,
    address: SocketAddr,
    /// What it says of requests, one on a line.
    log: NamedTempFile,
}

/// Who may read a bucket.
struct Reader {
    key: String,
    secret: String,
}

impl Bucket {
    async fn start() -> Result<Self> {
        Self::spawn(&[]).await
    }

    /// A bucket whose server compares signatures once it is closed, and who can make them.
    async fn start_signed() -> Result<(Self, Reader)> {
        let mut bucket = Self::spawn(&["--signed"]).await?;
        let line = bucket.line()?;
        let reader = line.strip_prefix("key ").and_then(|it| it.split_once(' '));
        let (key, secret) = reader.with_context(|| format!("a key, not {line}"))?;
        let reader = Reader {
            key: key.to_owned(),
            secret: secret.to_owned(),
        };
        Ok((bucket, reader))
    }

    async fn spawn(arguments: &[&str]) -> Result<Self> {
        let environment = prepare(MOTO).await?;
        let log = NamedTempFile::new()?;
        let mut child = Command::new(environment.python())
            .arg(script("s3_server.py"))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log.reopen()?)
            .spawn()?;
        let said = BufReader::new(child.stdout.take().context("a pipe")?);
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut bucket = Self {
            child,
            said,
            address,
            log,
        };
        let line = bucket.line()?;
        let port = line.strip_prefix("port ").context("a port")?;
        bucket.address.set_port(port.parse()?);
        bucket.ask("PUT", "", b"").await?;
        Ok(bucket)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.said.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    /// From now on only those come in whose signature is right.
    async fn close(&self) -> Result<()> {
        let path = "/moto-api/reset-auth";
        let answer = http::call(self.address, "POST", path, &[], b"0").await?;
        ensure!(answer.status == 200, "{}", answer.text());
        Ok(())
    }

    /// The requests for a file that were answered so.
    fn answered(&self, file: &str, status: u16) -> Result<usize> {
        let log = std::fs::read_to_string(self.log.path())?;
        let status = format!(" {status} -");
        let lines = log.lines().filter(|line| line.contains(file));
        Ok(lines.filter(|line| line.contains(&status)).count())
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
    let reader = Reader {
        key: "not-a-secret".to_owned(),
        secret: "hunter2hunter2".to_owned(),
    };
    over_as(local, bucket, cache, &reader)
}

fn over_as(local: &TestRepository, bucket: &str, cache: &Path, reader: &Reader) -> ServerBuilder {
    TestServer::over(local)
        .arg("--model-repository")
        .arg(bucket)
        .arg(format!("--repository-cache={}", cache.display()))
        .arg("--repository-retries=1")
        .under([
            "env",
            &format!("AWS_ACCESS_KEY_ID={}", reader.key),
            &format!("AWS_SECRET_ACCESS_KEY={}", reader.secret),
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

/// 36 MiB beside the graph: five parts.
const LARGE: Generated = Generated::new(1024, 9).outside();

#[tokio::test]
async fn a_bucket_that_compares_signatures_serves_who_has_the_secret() -> Result<()> {
    let (bucket, reader) = Bucket::start_signed().await?;
    bucket.put("large/1/model.onnx", &LARGE.graph()).await?;
    bucket.put("large/1/weights.bin", &LARGE.data()).await?;
    bucket.close().await?;
    ensure!(
        bucket.put("large/config.pbtxt", b"").await.is_err(),
        "the bucket is open to everybody"
    );
    let local = TestRepository::new()?;
    local.add("near", Model::new("add_sub"))?;
    let cache = TempDir::new()?;
    let mut server = over_as(&local, &bucket.address(), cache.path(), &reader)
        .start()
        .await?;
    // To the bit.
    LARGE.ask(&server.grpc().await?, "large").await?;
    let parts = bucket.answered("large/1/weights.bin", 206)?;
    ensure!(parts == 5, "fetched in {parts} parts");
    let size = (LARGE.graph().len() + LARGE.data().len()) as u64;
    let now = fetched(&server).await?;
    ensure!(now == size, "{now} bytes fetched, expected {size}");
    server.assert_healthy().await?;
    server.kill().await?;

    let wrong = [
        (
            reader.key.as_str(),
            "hunter2hunter2",
            "SignatureDoesNotMatch",
        ),
        ("AKIANOBODY", reader.secret.as_str(), "InvalidAccessKeyId"),
    ];
    for (key, secret, told) in wrong {
        let stranger = Reader {
            key: key.to_owned(),
            secret: secret.to_owned(),
        };
        let log = turned_away(&local, &bucket.address(), &stranger).await?;
        ensure!(log.contains(told), "{told} is not in the log: {log}");
    }
    Ok(())
}

/// Starts a server for whom the bucket does not open, sees that it serves all else, and gives its log.
async fn turned_away(local: &TestRepository, bucket: &str, stranger: &Reader) -> Result<String> {
    let cache = TempDir::new()?;
    let mut server = over_as(local, bucket, cache.path(), stranger)
        .arg("--exit-on-error=false")
        .arg("--strict-readiness=false")
        .start()
        .await?;
    ensure!(ask(&server, "near").await? == 4);
    eventually("the refusal is counted", || async {
        let name = "dormouse_repository_errors_total";
        Ok(server.metric(name, &[r#"kind="denied""#]).await? > 0.0)
    })
    .await?;
    let log = server.log.lines().join("\n");
    ensure!(!log.contains(&stranger.secret), "a secret is in the log");
    ensure!(fetched(&server).await? == 0, "something was fetched");
    server.assert_healthy().await?;
    Ok(log)
}

/// Another S3 server, which keeps a bucket as a folder; killed when dropped.
struct FolderBucket {
    child: Child,
    address: SocketAddr,
    root: TempDir,
}

impl FolderBucket {
    /// None where it is not installed.
    async fn start(reader: &Reader) -> Result<Option<Self>> {
        let root = TempDir::new()?;
        std::fs::create_dir_all(root.path().join("bucket/models"))?;
        // Free a moment ago; the program cannot choose one by itself.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let spawned = Command::new("s3s-fs")
            .args(["--host=127.0.0.1", &format!("--port={}", address.port())])
            .arg(format!("--access-key={}", reader.key))
            .arg(format!("--secret-key={}", reader.secret))
            .arg(root.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let child = match spawned {
            Ok(child) => child,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let bucket = Self {
            child,
            address,
            root,
        };
        eventually("the bucket's server listens", || async {
            Ok(TcpStream::connect(address).is_ok())
        })
        .await?;
        Ok(Some(bucket))
    }
}

impl Drop for FolderBucket {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn another_s3_server_serves_who_has_the_secret() -> Result<()> {
    let reader = Reader {
        key: "AKIAREADER".to_owned(),
        secret: "a secret of the reader".to_owned(),
    };
    let Some(bucket) = FolderBucket::start(&reader).await? else {
        eprintln!("SKIPPED: another S3 server was not tried: s3s-fs is missing");
        return Ok(());
    };
    LARGE.write(&bucket.root.path().join("bucket/models/large/1"))?;
    let address = format!("s3://http://{}/bucket/models", bucket.address);
    let local = TestRepository::new()?;
    local.add("near", Model::new("add_sub"))?;
    let cache = TempDir::new()?;
    let mut server = over_as(&local, &address, cache.path(), &reader)
        .start()
        .await?;
    LARGE.ask(&server.grpc().await?, "large").await?;
    let size = (LARGE.graph().len() + LARGE.data().len()) as u64;
    let now = fetched(&server).await?;
    ensure!(now == size, "{now} bytes fetched, expected {size}");
    server.assert_healthy().await?;
    server.kill().await?;

    let stranger = Reader {
        key: reader.key.clone(),
        secret: "hunter2hunter2".to_owned(),
    };
    turned_away(&local, &address, &stranger).await?;
    Ok(())
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

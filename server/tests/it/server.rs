//! A server process of our own: started on free ports, watched through its log, stopped by its id.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, PipeReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::process::Child;
use tokio::sync::{OnceCell, watch};

use crate::http::{self, Answer};
use crate::repository::TestRepository;
use crate::wire::{self, GrpcClient};

/// How long anything may take before a test gives up on it: a guard against hanging, not a claim.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// How long an observation waits before it is made again.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// The build's own folder, where downloads and Python environments are kept between runs.
pub(crate) fn target_dir() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
        .parent()
        .expect("cargo's temporary folder lies in the target folder")
}

/// The server's program with the environment every test gives it.
pub(crate) fn dormouse() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dormouse"));
    command
        .env("DORMOUSE_CACHE_DIR", target_dir().join("dormouse-cache"))
        .stdin(Stdio::null());
    command
}

/// Fetches the engine's library once for all tests.
pub(crate) async fn engine_installed() -> Result<()> {
    static INSTALLED: OnceCell<()> = OnceCell::const_new();
    INSTALLED
        .get_or_try_init(|| async {
            let mut command = tokio::process::Command::from(dormouse());
            command.args(["runtime", "install"]);
            let output = command.output().await.context("cannot start dormouse")?;
            ensure!(
                output.status.success(),
                "`dormouse runtime install` failed ({}): {}",
                output.status,
                String::from_utf8_lossy(&output.stderr)
            );
            Ok(())
        })
        .await
        .copied()
}

/// Waits for `future`, or says what did not happen.
pub(crate) async fn patiently<T>(what: &str, future: impl Future<Output = T>) -> Result<T> {
    tokio::time::timeout(PATIENCE, future)
        .await
        .with_context(|| format!("waited {PATIENCE:?} in vain: {what}"))
}

/// Asks again until the answer is yes.
pub(crate) async fn eventually<F>(what: &str, mut ask: impl FnMut() -> F) -> Result<()>
where
    F: Future<Output = Result<bool>>,
{
    patiently(what, async {
        while !ask().await? {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Ok(())
    })
    .await?
}

/// What the process wrote to standard error so far.
#[derive(Clone, Debug)]
pub(crate) struct Log {
    lines: Arc<Mutex<Vec<String>>>,
    /// Lines so far; closed when the process closed its end.
    count: watch::Receiver<usize>,
}

impl Log {
    fn follow(reader: PipeReader) -> Self {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (told, count) = watch::channel(0);
        let kept = Arc::clone(&lines);
        std::thread::spawn(move || {
            for line in BufReader::new(reader).lines().map_while(Result::ok) {
                let mut lines = kept.lock().unwrap_or_else(PoisonError::into_inner);
                lines.push(line);
                told.send_replace(lines.len());
            }
        });
        Self { lines, count }
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// The JSON lines so far; anything else in between is left out.
    pub(crate) fn records(&self) -> Vec<Value> {
        self.lines()
            .iter()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    }

    /// The last lines, for an error message.
    pub(crate) fn tail(&self) -> String {
        let lines = self.lines();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }

    /// Waits until `find` finds something in the records; fails when the process has gone quiet
    /// for good.
    pub(crate) async fn wait_for<T>(&self, find: impl Fn(&[Value]) -> Option<T>) -> Result<T> {
        let mut count = self.count.clone();
        loop {
            count.borrow_and_update();
            if let Some(found) = find(&self.records()) {
                return Ok(found);
            }
            if count.changed().await.is_err() {
                match find(&self.records()) {
                    Some(found) => return Ok(found),
                    None => bail!("the server closed its log:\n{}", self.tail()),
                }
            }
        }
    }
}

/// How to start a server.
#[derive(Debug)]
pub(crate) struct ServerBuilder {
    repositories: Vec<PathBuf>,
    arguments: Vec<String>,
    under: Vec<String>,
}

impl ServerBuilder {
    /// Adds an argument as it stands on the command line.
    pub(crate) fn arg(mut self, argument: impl Into<String>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Starts the process by another program, which takes its command line as arguments and
    /// becomes it.
    pub(crate) fn under<'a>(mut self, program: impl IntoIterator<Item = &'a str>) -> Self {
        self.under = program.into_iter().map(str::to_owned).collect();
        self
    }

    /// Starts the process and waits until all its ports listen and it calls itself ready.
    pub(crate) async fn start(self) -> Result<TestServer> {
        let server = self.spawn().await?;
        eventually("the server becomes ready", || async {
            Ok(server.get("/v2/health/ready").await?.status == 200)
        })
        .await
        .with_context(|| format!("the server's log:\n{}", server.log.tail()))?;
        Ok(server)
    }

    /// Starts the process and waits until all its ports listen.
    pub(crate) async fn spawn(self) -> Result<TestServer> {
        engine_installed().await?;
        let mut command = dormouse();
        if let [program, arguments @ ..] = &self.under[..] {
            let plain = command;
            command = Command::new(program);
            command.stdin(Stdio::null());
            command.args(arguments).arg(plain.get_program());
            let environment = plain.get_envs();
            command.envs(environment.filter_map(|(key, value)| Some((key, value?))));
        }
        command.arg("serve");
        for repository in &self.repositories {
            command.arg("--model-repository").arg(repository);
        }
        for protocol in ["http", "grpc", "metrics"] {
            command.arg(format!("--{protocol}-port")).arg("0");
            command.arg(format!("--{protocol}-address"));
            command.arg("127.0.0.1");
        }
        command.args(["--log-format", "json"]);
        command.args(&self.arguments);
        let (reader, writer) = std::io::pipe()?;
        command.stdout(Stdio::null()).stderr(writer);
        let child = {
            let mut command = tokio::process::Command::from(command);
            command.kill_on_drop(true);
            command.spawn().context("cannot start dormouse")?
        };
        let pid = child.id().context("the server exited at once")?;
        let log = Log::follow(reader);
        let listening = patiently("the server listens", log.wait_for(addresses)).await??;
        Ok(TestServer {
            child,
            pid,
            log,
            http: listening["http"],
            grpc: listening["grpc"],
            metrics: listening["metrics"],
        })
    }
}

/// The three listeners' addresses, once all are known.
fn addresses(records: &[Value]) -> Option<HashMap<String, SocketAddr>> {
    let found: HashMap<_, _> = records
        .iter()
        .filter(|record| record["message"] == "listening")
        .filter_map(|record| {
            let protocol = record["protocol"].as_str()?;
            let address = record["address"].as_str()?.parse().ok()?;
            Some((protocol.to_owned(), address))
        })
        .collect();
    ["http", "grpc", "metrics"]
        .iter()
        .all(|protocol| found.contains_key(*protocol))
        .then_some(found)
}

/// A running server; killed when dropped.
#[derive(Debug)]
pub(crate) struct TestServer {
    child: Child,
    pid: u32,
    pub(crate) log: Log,
    pub(crate) http: SocketAddr,
    pub(crate) grpc: SocketAddr,
    pub(crate) metrics: SocketAddr,
}

impl TestServer {
    /// A server over one repository.
    pub(crate) fn over(repository: &TestRepository) -> ServerBuilder {
        Self::at(repository.path())
    }

    /// As over a repository that is made elsewhere.
    pub(crate) fn at(repository: &Path) -> ServerBuilder {
        ServerBuilder {
            repositories: vec![repository.to_owned()],
            arguments: Vec::new(),
            under: Vec::new(),
        }
    }

    /// A new gRPC connection.
    pub(crate) async fn grpc(&self) -> Result<GrpcClient> {
        wire::connect(self.grpc).await
    }

    pub(crate) async fn get(&self, path: &str) -> Result<Answer> {
        http::call(self.http, "GET", path, &[], b"").await
    }

    pub(crate) async fn post(&self, path: &str, body: &[u8]) -> Result<Answer> {
        http::call(self.http, "POST", path, &[], body).await
    }

    /// The metrics page's text.
    pub(crate) async fn metrics_text(&self) -> Result<String> {
        page_of(http::call(self.metrics, "GET", "/metrics", &[], b"").await?)
    }

    /// The same where a token has to be shown for it.
    pub(crate) async fn metrics_text_as(&self, token: &str) -> Result<String> {
        page_of(http::call_as(self.metrics, "GET", "/metrics", token, b"").await?)
    }

    /// The sum of a metric over the lines that carry all of `labels` (written `key="value"`).
    pub(crate) async fn metric(&self, name: &str, labels: &[&str]) -> Result<f64> {
        sum_of(&self.metrics_text().await?, name, labels)
    }

    /// The same where a token has to be shown for it.
    pub(crate) async fn metric_as(&self, token: &str, name: &str, labels: &[&str]) -> Result<f64> {
        sum_of(&self.metrics_text_as(token).await?, name, labels)
    }

    /// Bytes of memory the process holds now.
    pub(crate) fn rss(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .context("no VmRSS in the process's status")?;
        let kib: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
        Ok(kib * 1024)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Asks the process to stop, as an orchestrator does.
    pub(crate) fn terminate(&self) -> Result<()> {
        let pid = Pid::from_raw(self.pid.try_into()?).context("a process id is not zero")?;
        kill_process(pid, Signal::TERM).context("cannot signal the server")
    }

    /// Ends the process where it stands.
    pub(crate) async fn kill(mut self) -> Result<()> {
        self.child.kill().await.context("cannot kill the server")
    }

    /// Waits until the process is gone.
    pub(crate) async fn exited(&mut self) -> Result<ExitStatus> {
        let log = self.log.clone();
        patiently("the server exits", self.child.wait())
            .await
            .with_context(|| format!("the server's log:\n{}", log.tail()))?
            .context("cannot wait for the server")
    }

    /// Fails when the process is gone or its log tells of a panic.
    pub(crate) async fn assert_healthy(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the server exited with {status}:\n{}", self.log.tail());
        }
        let panic = self
            .log
            .lines()
            .into_iter()
            .find(|line| line.contains("panicked at"));
        ensure!(panic.is_none(), "the server panicked: {panic:?}");
        let live = self.get("/v2/health/live").await?;
        ensure!(live.status == 200, "not live: {}", live.text());
        Ok(())
    }
}

fn page_of(answer: Answer) -> Result<String> {
    ensure!(answer.status == 200, "metrics: {}", answer.text());
    Ok(answer.text())
}

fn sum_of(text: &str, name: &str, labels: &[&str]) -> Result<f64> {
    let mut sum = 0.0;
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some(rest) = line.strip_prefix(name) else {
            continue;
        };
        let (found, value) = match rest.strip_prefix('{') {
            Some(rest) => rest.rsplit_once("} ").context("labels without an end")?,
            None => match rest.strip_prefix(' ') {
                Some(value) => ("", value),
                None => continue,
            },
        };
        if labels.iter().all(|label| found.contains(label)) {
            sum += value.trim().parse::<f64>()?;
        }
    }
    Ok(sum)
}

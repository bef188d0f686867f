//! A server process that is there to be mistreated, and what its other clients see meanwhile.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use dormouse_client::Client;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::drive;
use crate::drive::outcome::Outcome;
use crate::drive::progress::{Progress, Stopper};
use crate::drive::scenario::{Arrivals, Mode, Scenario};
use crate::drive::target::Target;
use crate::plain;
use crate::process::{Launch, ServerProcess, metric};
use crate::repository;

/// How long the server may take to become ready.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longer than any attack.
const LONG: Duration = Duration::from_secs(3600);

/// Which server is started.
#[derive(Args, Clone, Debug)]
pub(crate) struct ServerChoice {
    /// Program to start as a server instead of the `dormouse` beside this one
    #[arg(long, value_name = "PROGRAM")]
    server: Option<PathBuf>,
}

impl ServerChoice {
    /// How that server is started.
    pub(crate) fn launch(&self) -> Launch {
        Launch {
            program: self.server.clone(),
            ..Launch::default()
        }
    }
}

/// A server of its own, with the scenarios' models. Ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Victim {
    process: ServerProcess,
    files: tempfile::TempDir,
}

impl Victim {
    /// Starts a server with these flags and at most so many file descriptors, and lets its models
    /// answer once.
    pub(crate) async fn start(
        choice: &ServerChoice,
        flags: &[&str],
        descriptors: Option<u32>,
    ) -> Result<Self> {
        let files = tempfile::tempdir()?;
        let models = files.path().join("models");
        repository::lay_out(&models)?;
        let mut all = vec![
            format!("--onnxruntime-library={}", plain::library()?.display()),
            format!("--store={}", files.path().join("store").display()),
        ];
        all.extend(flags.iter().map(ToString::to_string));
        let launch = Launch {
            program: choice.server.clone(),
            descriptors,
        };
        let process = ServerProcess::launch(&launch, &models, &all)?;
        let victim = Self { process, files };
        let client = Client::connect(victim.process.url()).await?;
        let started = Instant::now();
        while !client.ready().await? {
            anyhow::ensure!(
                started.elapsed() < PATIENCE,
                "the server was not ready after {PATIENCE:?}"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(victim)
    }

    /// A folder that goes away with it.
    pub(crate) fn folder(&self) -> &Path {
        self.files.path()
    }

    /// Its gRPC side, with its process.
    pub(crate) fn grpc(&self) -> Target {
        let mut target = Target::at(self.process.url().replace("http://", "grpc://"));
        target.pid = Some(self.process.pid());
        target
    }

    /// Its HTTP side.
    pub(crate) fn http(&self) -> Result<Target> {
        Ok(Target::at(format!("http://{}", self.http_address()?)))
    }

    pub(crate) fn http_address(&self) -> Result<&str> {
        self.process.http().context("it serves no HTTP")
    }

    pub(crate) fn grpc_address(&self) -> &str {
        self.process.grpc()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Where it serves gRPC, as a URL.
    pub(crate) fn url(&self) -> String {
        self.process.url()
    }

    pub(crate) fn threads(&self) -> Result<usize> {
        self.process.threads()
    }

    pub(crate) fn resident(&self) -> Result<u64> {
        self.process.resident()
    }

    /// The sum of a metric over lines with all of `labels`; zero where it is not exported.
    pub(crate) async fn metric(&self, name: &str, labels: &[&str]) -> Result<f64> {
        let text = self.process.metrics_text().await?;
        Ok(metric(&text, name, labels).unwrap_or(0.0))
    }
}

/// A client that asks one model again and again, and behaves.
#[derive(Clone, Debug)]
pub(crate) struct Guest {
    pub(crate) target: Target,
    pub(crate) model: &'static str,
    /// Requests per second.
    pub(crate) rate: f64,
    /// Requests under way at most; over HTTP each has a connection.
    pub(crate) outstanding: usize,
}

/// A guest who goes on asking while the server is mistreated.
#[derive(Debug)]
pub(crate) struct Stay {
    stopper: Stopper,
    running: JoinHandle<Result<Outcome>>,
}

impl Guest {
    /// One who asks now and then.
    pub(crate) fn new(target: Target, model: &'static str) -> Self {
        Self {
            target,
            model,
            rate: 20.0,
            outstanding: 100,
        }
    }

    /// What it sees while nothing else happens.
    pub(crate) async fn usual(&self) -> Result<Outcome> {
        let mut scenario = self.scenario();
        scenario.warmup = Duration::from_secs(1);
        scenario.duration = Duration::from_secs(2);
        let (progress, _stopper) = Progress::silent();
        drive::run(&scenario, &self.target, &progress).await
    }

    /// Starts asking, on connections that are made now and kept.
    pub(crate) fn stay(&self) -> Stay {
        let mut scenario = self.scenario();
        scenario.duration = LONG;
        let target = self.target.clone();
        let (progress, stopper) = Progress::silent();
        let running = tokio::spawn(async move { drive::run(&scenario, &target, &progress).await });
        Stay { stopper, running }
    }

    fn scenario(&self) -> Scenario {
        let mut scenario = Scenario::closed(self.model, &[1]);
        scenario.name = format!("{}-guest", self.model);
        scenario.mode = Mode::Open;
        scenario.warmup = Duration::ZERO;
        scenario.timeout = Duration::from_secs(30);
        scenario.open.arrivals = Arrivals::Constant;
        scenario.open.rates = vec![self.rate];
        scenario.open.max_outstanding = self.outstanding;
        scenario
    }
}

impl Stay {
    /// What it saw.
    pub(crate) async fn finish(self) -> Result<Outcome> {
        self.stopper.stop();
        self.running.await?
    }
}

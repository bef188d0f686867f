//! A server inside this process, so that it shares library, allocator and page tables with what it
//! is compared with; asked through gRPC over loopback like any other.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;
use dormouse_client::{Client, InferRequest, InferResponse, RetryPolicy};
use dormouse_server::app::Server;
use dormouse_server::cli::serve::ServeArgs;
use dormouse_server::config::Config;
use tokio::time::Instant;

use crate::process::{self, metric};

/// How long a model may take to reach a stage before a measurement gives up on it.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// The command line of a server, without its program.
#[derive(Debug, Parser)]
#[command(no_binary_name = true)]
struct Line {
    #[command(flatten)]
    serve: ServeArgs,
}

/// Where a server finds its files, and what it is told besides.
#[derive(Clone, Debug)]
pub(crate) struct LiveOptions {
    pub(crate) repository: PathBuf,
    pub(crate) library: PathBuf,
    pub(crate) store: PathBuf,
    pub(crate) flags: Vec<String>,
}

impl LiveOptions {
    /// The same with further flags.
    pub(crate) fn with(&self, flags: &[&str]) -> Self {
        let mut options = self.clone();
        options.flags.extend(flags.iter().map(ToString::to_string));
        options
    }

    /// The same over another store.
    pub(crate) fn over_store(&self, store: &Path) -> Self {
        Self {
            store: store.to_owned(),
            ..self.clone()
        }
    }

    fn config(&self) -> Result<Config> {
        let mut line = vec![
            format!("--model-repository={}", self.repository.display()),
            format!("--onnxruntime-library={}", self.library.display()),
            format!("--store={}", self.store.display()),
        ];
        let fixed = [
            "--allow-http=false",
            "--allow-metrics=false",
            "--grpc-address=127.0.0.1",
            "--grpc-port=0",
            "--memory-budget=unlimited",
        ];
        line.extend(fixed.map(str::to_owned));
        line.extend(self.flags.iter().cloned());
        Ok(Config::resolve(&Line::try_parse_from(line)?.serve)?)
    }
}

/// A running server and a connection to it.
#[derive(Debug)]
pub(crate) struct Live {
    server: Server,
    client: Client,
}

impl Live {
    /// Starts a server and connects to it.
    pub(crate) async fn start(options: &LiveOptions) -> Result<Self> {
        let server = Server::start(options.config()?).await?;
        let address = server.grpc_address().context("gRPC was asked for")?;
        let client = connect(address).await?;
        Ok(Self { server, client })
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// One request, timed from its first byte to the last of its answer.
    pub(crate) async fn infer(&self, request: InferRequest) -> Result<(Duration, InferResponse)> {
        let asked = Instant::now();
        let response = self.client.infer(request).await?;
        Ok((asked.elapsed(), response))
    }

    /// A metric of this server, see [`metric`].
    pub(crate) fn metric(&self, name: &str) -> f64 {
        metric(&self.server.service().render_metrics(), name, &[]).unwrap_or(0.0)
    }

    /// Waits until every model that was loaded is closed again.
    pub(crate) async fn asleep(&self) -> Result<()> {
        self.until("models fall asleep", |live| {
            live.metric("dormouse_sleeps_total") >= live.metric("dormouse_loads_total")
        })
        .await
    }

    /// Waits until `reached` holds.
    pub(crate) async fn until(&self, what: &str, reached: impl Fn(&Self) -> bool) -> Result<()> {
        let started = Instant::now();
        while !reached(self) {
            if started.elapsed() > PATIENCE {
                bail!("waited {PATIENCE:?} in vain: {what}");
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Ok(())
    }

    /// Stops the server.
    pub(crate) async fn stop(self) {
        drop(self.client);
        self.server.shutdown().await;
    }
}

/// A connection to a server that answers.
pub(crate) async fn connect(address: SocketAddr) -> Result<Client> {
    let client = Client::builder(format!("http://{address}"))
        // A call that is sent twice would be measured as one.
        .retry(RetryPolicy::NEVER)
        .connect()
        .await?;
    client.live().await?;
    Ok(client)
}

/// Waits until this process has nothing to do, so that what is measured next is measured alone.
pub(crate) async fn quiet() -> Result<()> {
    process::quiet(std::process::id(), PATIENCE).await
}

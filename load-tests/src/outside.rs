//! A server as users run it: a process of its own, over a repository and a store of the
//! measurement's, asked through gRPC.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use dormouse_client::{Client, RetryPolicy};
use tokio::time::Instant;

use crate::models;
use crate::pages::{self, ProcessMemory};
use crate::plain;
use crate::process::{ServerProcess, metric};

/// How long a model may take to reach a stage before a measurement gives up on it.
const PATIENCE: Duration = Duration::from_secs(120);
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Flags for a model that stays warm.
pub(crate) const STAYS_WARM: [&str; 2] = ["--keep-alive=forever", "--park-after=never"];

/// A server process and a connection to it.
#[derive(Debug)]
pub(crate) struct Outside {
    process: ServerProcess,
    pub(crate) client: Client,
}

impl Outside {
    /// Starts a server over `repository` that keeps prepared models in `store`.
    pub(crate) async fn start(repository: &Path, store: &Path, flags: &[&str]) -> Result<Self> {
        let mut all = vec![
            format!("--onnxruntime-library={}", plain::library()?.display()),
            format!("--store={}", store.display()),
        ];
        all.extend(flags.iter().map(ToString::to_string));
        let process = ServerProcess::dormouse_with(repository, &all)?;
        let outside = Self {
            client: connect(&process.url()).await?,
            process,
        };
        outside
            .until("the server becomes ready", async |server| {
                Ok(server.client.ready().await?)
            })
            .await?;
        Ok(outside)
    }

    /// Where it listens.
    pub(crate) fn url(&self) -> String {
        self.process.url()
    }

    /// The same, without a scheme.
    pub(crate) fn address(&self) -> &str {
        self.process.grpc()
    }

    /// Another connection.
    pub(crate) async fn connect(&self) -> Result<Client> {
        connect(&self.process.url()).await
    }

    /// Its memory now.
    pub(crate) fn memory(&self) -> Result<ProcessMemory> {
        self.process.memory()
    }

    /// A metric's sum over the lines with all of `labels`; zero where it is not exported.
    pub(crate) async fn metric(&self, name: &str, labels: &[&str]) -> Result<f64> {
        let text = self.process.metrics_text().await?;
        Ok(metric(&text, name, labels).unwrap_or(0.0))
    }

    /// Waits until a model that was loaded is closed again.
    pub(crate) async fn asleep(&self, model: &str) -> Result<()> {
        let label = format!("model=\"{model}\"");
        self.until("a model falls asleep", async |server| {
            let loads = server.metric("dormouse_loads_total", &[&label]).await?;
            let sleeps = server.metric("dormouse_sleeps_total", &[&label]).await?;
            Ok(sleeps >= loads)
        })
        .await
    }

    /// Waits until the process has nothing to do.
    pub(crate) async fn quiet(&self) -> Result<()> {
        self.process.quiet(PATIENCE).await
    }

    /// Asks until the answer is yes.
    pub(crate) async fn until(
        &self,
        what: &str,
        reached: impl AsyncFn(&Self) -> Result<bool>,
    ) -> Result<()> {
        let started = Instant::now();
        while !reached(self).await? {
            if started.elapsed() > PATIENCE {
                bail!("waited {PATIENCE:?} in vain: {what}");
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Ok(())
    }
}

pub(crate) async fn connect(url: &str) -> Result<Client> {
    let client = Client::builder(url)
        // A refusal has to be seen, not tried again.
        .retry(RetryPolicy::NEVER)
        .connect()
        .await?;
    Ok(client)
}

/// Has every model of a repository prepared, as `dormouse prepare` does it ahead of time. Tells how
/// many entries the store has then.
pub(crate) async fn prepare_store(repository: &Path, store: &Path) -> Result<usize> {
    models::settled().await;
    let output = tokio::process::Command::new(ServerProcess::binary()?)
        .arg("prepare")
        .arg("--model-repository")
        .arg(repository)
        .arg("--store")
        .arg(store)
        .arg("--onnxruntime-library")
        .arg(plain::library()?)
        .arg("--format=json")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await?;
    ensure!(
        output.status.success(),
        "`dormouse prepare` ended with {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let files = pages::files_below(store)?;
    let manifests = files.iter().filter(|file| file.ends_with("manifest.json"));
    Ok(manifests.count())
}

/// What to say about a store that has `entries` of the `wanted` ones.
pub(crate) fn store_note(entries: usize, wanted: usize) -> String {
    match entries {
        0 => "the store stayed empty: models load from their source files".to_owned(),
        _ => format!("model versions: {wanted}, prepared: {entries}"),
    }
}

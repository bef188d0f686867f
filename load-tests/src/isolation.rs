//! What processes of their own cost models, and what they save: the same models inside the server
//! and outside of it in turns, and workers that are killed for real while others serve.

mod cost;
mod recovery;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use dormouse_client::{Client, DataType, InferResponse, RetryPolicy};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tokio::time::Instant;

use self::cost::Cost;
use self::recovery::Recovery;
use crate::models::{self, BenchModel};
use crate::outside::STAYS_WARM;
use crate::plain;
use crate::process::ServerProcess;
use crate::record::{Findings, ReportArgs, Started};
use crate::table::Titled;
use crate::victim::ServerChoice;

/// How long a server or a model may take before a measurement gives up on it.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// Differences between floats that are no mistake: weights may be packed or not.
const TOLERANCE: f32 = 1e-3;

/// A model in a process of its own beside the same model in the server: latency and throughput in
/// turns, and how long it takes to answer again after `kill -9` of that process.
#[derive(Args, Debug)]
pub(crate) struct IsolationArgs {
    /// Models to measure: identity, or larger ones by name, which need Python 3
    #[arg(long, value_delimiter = ',', default_value = "identity,magika")]
    models: Vec<String>,
    /// Requests in flight
    #[arg(long, value_delimiter = ',', default_value = "1,8")]
    concurrency: Vec<usize>,
    /// How long each measurement of the cost lasts
    #[arg(long, default_value = "3s", value_parser = humantime::parse_duration)]
    duration: Duration,
    /// Measurements of each kind, in turns, and kills of each model, idle and busy
    #[arg(long, default_value_t = 5)]
    repetitions: usize,
    #[command(flatten)]
    server: ServerChoice,
    #[command(flatten)]
    report: ReportArgs,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct IsolationFigures {
    cost: Vec<Cost>,
    recovery: Vec<Recovery>,
}

pub(crate) async fn run(args: IsolationArgs) -> Result<()> {
    let in_flight = args.concurrency.iter();
    ensure!(
        !args.models.is_empty() && in_flight.clone().all(|count| (1..=256).contains(count)),
        "a model at least, and concurrency from 1 to 256"
    );
    ensure!(
        (Duration::from_millis(100)..=Duration::from_secs(600)).contains(&args.duration)
            && (1..=100).contains(&args.repetitions),
        "--duration from 100ms to 10m and --repetitions from 1 to 100"
    );
    let started = Started::now();
    let bench = Bench::new(&args)?;
    let cost = cost::measure(&bench, &args).await.context("cost")?;
    let (recovery, bars) = recovery::measure(&bench, &args).await.context("recovery")?;
    let record = started.record(IsolationFigures { cost, recovery });
    record.with_bars(bars).publish(&args.report)
}

impl Findings for IsolationFigures {
    fn about(&self) -> String {
        "Models in processes of their own beside the same models in the server, driven in turns; \
         then these processes are killed. Ratios are those within a round."
            .to_owned()
    }

    fn tables(&self) -> Vec<Titled> {
        let mut tables = cost::tables(&self.cost);
        tables.push(recovery::table(&self.recovery));
        tables
    }
}

/// The models, and a folder that goes away with them.
#[derive(Debug)]
struct Bench {
    folder: TempDir,
    models: Vec<BenchModel>,
    server: ServerChoice,
}

impl Bench {
    fn new(args: &IsolationArgs) -> Result<Self> {
        let folder = models::scratch()?;
        let mut found = Vec::new();
        for name in &args.models {
            found.push(match name.as_str() {
                "identity" => identity(folder.path())?,
                name => models::prepare(&[name])?.remove(0),
            });
        }
        Ok(Self {
            folder,
            models: found,
            server: args.server.clone(),
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts a server over a repository in the bench's folder, with a store of its own.
    async fn start(&self, repository: &str, store: &str, flags: &[String]) -> Result<Running> {
        let mut all = vec![
            format!("--onnxruntime-library={}", plain::library()?.display()),
            format!("--store={}", self.path(store).display()),
        ];
        all.extend(STAYS_WARM.map(str::to_owned));
        all.extend(flags.iter().cloned());
        let launch = self.server.launch();
        let process = ServerProcess::launch(&launch, &self.path(repository), &all)?;
        let client = connect(&process).await?;
        let running = Running { process, client };
        let started = Instant::now();
        while !running.client.ready().await? {
            ensure!(started.elapsed() < PATIENCE, "the server was not ready");
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Ok(running)
    }
}

/// A model that answers with its input, as the overhead of a request is measured with.
fn identity(folder: &Path) -> Result<BenchModel> {
    let model = BenchModel::identity(&folder.join("sources"))?;
    let config = "backend: \"onnxruntime\"\nmax_batch_size: 0\n";
    std::fs::write(folder.join("sources/identity/config.pbtxt"), config)?;
    Ok(model)
}

/// A server and a connection to it.
#[derive(Debug)]
struct Running {
    process: ServerProcess,
    client: Client,
}

impl Running {
    /// The process that a model runs in; none while it runs in none, or in the server.
    async fn worker_of(&self, model: &str) -> Result<Option<u32>> {
        let index = self.client.repository_index(false).await?;
        let entry = index.iter().find(|entry| entry.name == model);
        let reason = entry.context("the model is not in the index")?;
        let pid = reason.reason.split_once("in worker ");
        Ok(pid.and_then(|(_, pid)| pid.parse().ok()))
    }

    /// Lets each model answer once and waits until what follows from a first load is done.
    async fn warm_up(&self, models: &[BenchModel]) -> Result<Vec<InferResponse>> {
        let mut answers = Vec::new();
        for model in models {
            answers.push(self.client.infer(model.request(&model.name)).await?);
        }
        // Preparing has a process of its own where models do. Not every model can be prepared.
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(5) {
            let text = self.process.metrics_text().await?;
            let done = crate::process::metric(&text, "dormouse_preparations_total", &[]);
            if done.unwrap_or(0.0) >= models.len() as f64 {
                break;
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        self.process.quiet(PATIENCE).await?;
        Ok(answers)
    }
}

/// A connection whose failures are seen and not tried again.
async fn connect(process: &ServerProcess) -> Result<Client> {
    let builder = Client::builder(process.url()).retry(RetryPolicy::NEVER);
    Ok(builder.connect().await?)
}

/// Whether two answers say the same.
fn agree(one: &InferResponse, other: &InferResponse) -> bool {
    one.outputs().len() == other.outputs().len()
        && one.outputs().zip(other.outputs()).all(|(one, other)| {
            let ((name, ours), (other_name, theirs)) = (one, other);
            let same_data = match ours.datatype() {
                DataType::Fp32 => match (ours.to_vec::<f32>(), theirs.to_vec::<f32>()) {
                    (Ok(ours), Ok(theirs)) => close(&ours, &theirs),
                    _ => false,
                },
                _ => ours.data() == theirs.data(),
            };
            name == other_name && ours.shape() == theirs.shape() && same_data
        })
}

fn close(ours: &[f32], theirs: &[f32]) -> bool {
    let pairs = ours.iter().zip(theirs);
    ours.len() == theirs.len()
        && pairs.fold(true, |all, (one, other)| {
            all && (one - other).abs() <= TOLERANCE
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_may_differ_a_little_and_numbers_that_are_none_never_agree() {
        assert!(close(&[1.0, 2.0], &[1.0004, 2.0]));
        assert!(!close(&[1.0], &[1.01]));
        assert!(!close(&[1.0], &[1.0, 2.0]));
        assert!(!close(&[f32::NAN], &[f32::NAN]));
    }
}

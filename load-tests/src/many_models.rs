//! A repository with very many models: what it costs while nobody calls them.

use std::time::Duration;

use anyhow::{bail, ensure};
use clap::Args;
use dormouse_client::Client;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::process::ServerProcess;
use crate::record::{Findings, ReportArgs, Started};
use crate::samples::Samples;
use crate::table::Titled;

const MODEL: &[u8] = include_bytes!("../../server/tests/models/identity_fp32.onnx");

/// Starts servers over an empty repository and over one with very many models, in turns.
#[derive(Args, Debug)]
pub(crate) struct ManyModelsArgs {
    /// Models in the repository
    #[arg(long, default_value_t = 10_000)]
    models: usize,
    /// Starts to measure
    #[arg(long, default_value_t = 5)]
    repetitions: usize,
    #[command(flatten)]
    report: ReportArgs,
}

/// Times in milliseconds, memory in MiB.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ManyModelsFigures {
    models: usize,
    ready_empty: Samples,
    ready: Samples,
    resident_empty: Samples,
    resident: Samples,
    index: Samples,
    first: Samples,
    threads: Samples,
}

pub(crate) async fn run(args: ManyModelsArgs) -> anyhow::Result<()> {
    ensure!(
        args.models <= 100_000 && args.repetitions <= 100,
        "at most 100000 models and 100 repetitions"
    );
    let started = Started::now();
    let directory = tempfile::tempdir()?;
    let empty = directory.path().join("empty");
    std::fs::create_dir(&empty)?;
    let full = directory.path().join("full");
    for index in 0..args.models {
        let model = full.join(format!("model_{index:06}"));
        std::fs::create_dir_all(model.join("1"))?;
        std::fs::write(model.join("1/model.onnx"), MODEL)?;
        std::fs::write(
            model.join("config.pbtxt"),
            "backend: \"onnxruntime\"\nmax_batch_size: 8\n",
        )?;
    }
    let mut figures = ManyModelsFigures {
        models: args.models,
        ..ManyModelsFigures::default()
    };
    for _ in 0..args.repetitions {
        let bare = measure(&empty, 0).await?;
        let laden = measure(&full, args.models).await?;
        figures.ready_empty.push(bare.ready);
        figures.ready.push(laden.ready);
        figures.resident_empty.push(bare.resident);
        figures.resident.push(laden.resident);
        figures.index.push(laden.index);
        figures.first.push(laden.first);
        figures.threads.push(laden.threads);
    }
    started.record(figures).publish(&args.report)
}

impl Findings for ManyModelsFigures {
    fn about(&self) -> String {
        format!(
            "A server over {} models that nobody calls, beside one over an empty repository.",
            self.models
        )
    }

    fn tables(&self) -> Vec<Titled> {
        let row = |measure: &str, empty: &Samples, full: &Samples| {
            vec![measure.to_owned(), empty.cell(), full.cell()]
        };
        let none = Samples::default();
        vec![Titled::new(
            "",
            &[
                "measure",
                "empty repository",
                &format!("{} models", self.models),
            ],
            vec![
                row("start to ready, ms", &self.ready_empty, &self.ready),
                row("resident memory, MiB", &self.resident_empty, &self.resident),
                row("RepositoryIndex, ms", &none, &self.index),
                row("first answer of a sleeping model, ms", &none, &self.first),
                row("threads while nobody calls", &none, &self.threads),
            ],
        )]
    }
}

struct Start {
    ready: f64,
    resident: f64,
    index: f64,
    first: f64,
    threads: f64,
}

async fn measure(repository: &std::path::Path, models: usize) -> anyhow::Result<Start> {
    let server = ServerProcess::dormouse(repository)?;
    let client = Client::connect(server.url()).await?;
    while !client.ready().await? {
        if server.started.elapsed() > Duration::from_secs(30) {
            bail!("the server was not ready within 30 s");
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let ready = millis(server.started);
    let asked = Instant::now();
    let index = client.repository_index(false).await?;
    let index_time = millis(asked);
    ensure!(
        index.len() >= models,
        "the index has {} entries",
        index.len()
    );
    // Memory is read when the background check of all models has passed.
    tokio::time::sleep(Duration::from_secs(if models > 0 { 5 } else { 1 })).await;
    let resident = server.resident()? as f64 / (1 << 20) as f64;
    let threads = server.threads()? as f64;
    let asked = Instant::now();
    if models > 0 {
        let tensor = dormouse_client::Tensor::from_slice([1, 4], &[1.0f32, 2.0, 3.0, 4.0])?;
        let request = dormouse_client::InferRequest::new(format!("model_{:06}", models / 2))
            .input("INPUT", tensor);
        client.infer(request).await?;
    }
    Ok(Start {
        ready,
        resident,
        index: index_time,
        first: millis(asked),
        threads,
    })
}

fn millis(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

//! A repository with very many models: what it costs while nobody calls them.

use std::time::Duration;

use anyhow::{bail, ensure};
use clap::Args;
use dormouse_client::Client;
use tokio::time::Instant;

use crate::process::ServerProcess;
use crate::table;

const MODEL: &[u8] = include_bytes!("../../server/tests/models/identity_fp32.onnx");

#[derive(Args, Debug)]
pub(crate) struct ManyModelsArgs {
    /// Models in the repository
    #[arg(long, default_value_t = 10_000)]
    models: usize,
    /// Starts to measure
    #[arg(long, default_value_t = 5)]
    repetitions: usize,
}

pub(crate) async fn run(args: ManyModelsArgs) -> anyhow::Result<()> {
    ensure!(
        args.models <= 100_000 && args.repetitions <= 100,
        "at most 100000 models and 100 repetitions"
    );
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
    let mut columns: [Vec<f64>; 7] = Default::default();
    for _ in 0..args.repetitions {
        let bare = measure(&empty, 0).await?;
        let laden = measure(&full, args.models).await?;
        for (column, value) in columns.iter_mut().zip([
            bare.ready,
            laden.ready,
            bare.resident,
            laden.resident,
            laden.index,
            laden.first,
            laden.threads,
        ]) {
            column.push(value);
        }
    }
    let names = [
        "start to ready, empty repository, ms".to_owned(),
        format!("start to ready, {} models, ms", args.models),
        "resident, empty repository, MiB".to_owned(),
        format!("resident, {} models, MiB", args.models),
        "RepositoryIndex, ms".to_owned(),
        "first answer of a sleeping model, ms".to_owned(),
        "threads while nobody calls".to_owned(),
    ];
    let rows: Vec<Vec<String>> = names
        .into_iter()
        .zip(&columns)
        .map(|(name, column)| vec![name, table::spread(column)])
        .collect();
    table::print(&["measure", "median (min–max)"], &rows)?;
    Ok(())
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

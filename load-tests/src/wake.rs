//! How long a model takes from zero to its first answer, beside ONNX Runtime alone and beside the
//! least that the bytes allow.

mod measure;
mod report;

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::models::{self, BenchModel};
use crate::record::{ReportArgs, Started};
use crate::samples::Samples;
use measure::Bench;

/// Time from the first byte of a request to the last of its answer, through gRPC, for models at
/// zero.
///
/// One process holds the server and, in turns with it, what it is compared with: "plain", ONNX
/// Runtime's default session from the model's file and its first run, and "floor", touching every
/// page of the file once in parallel plus one warm run of the plain session. Takes about 15
/// minutes for all models and 7 repetitions; the first run also writes the models.
#[derive(Args, Debug)]
pub(crate) struct WakeArgs {
    /// Models to measure
    #[arg(long, value_delimiter = ',', default_values = models::NAMES)]
    models: Vec<String>,
    /// Repetitions, each with one measurement of every kind in turns
    #[arg(long, default_value_t = 7)]
    repetitions: usize,
    /// Seconds per repetition of each side of the steady-state comparison
    #[arg(long, default_value_t = 3)]
    steady_seconds: u64,
    /// Leave out the measurements with a cold page cache
    #[arg(long)]
    no_cold: bool,
    /// Measure the wake with each mechanism switched off as well
    #[arg(long)]
    ablation: bool,
    /// A model of a few kilobytes that is built in, and two short repetitions
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    report: ReportArgs,
}

/// Switches off one mechanism each, and what is said of it. Without sharing there is no store
/// either.
const ABLATIONS: [(&str, &str); 3] = [
    ("overlap", "--overlap=false"),
    ("prepared store", "--prepared-store=false"),
    ("sharing and with it the store", "--sharing=false"),
];
/// Shows in the answer after the time to park, and not in a wake from zero.
const STAGED_EXIT: &str = "staged exit";

/// Everything measured of one model; times in milliseconds.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct WakeFigures {
    model: String,
    file_bytes: u64,
    /// Whether the store held the model when it was woken.
    prepared: bool,
    /// Default session from the file, opened and run once.
    plain: Samples,
    plain_open: Samples,
    /// A later run of that session.
    plain_warm: Samples,
    /// Every page of the file touched once, in parallel.
    touch: Samples,
    /// Touching and one warm run.
    floor: Samples,
    /// From zero, prepared, weights in the page cache.
    wake: Samples,
    /// What of it the server spent loading.
    wake_load: Samples,
    /// From parked.
    parked: Samples,
    /// The parked server's next answers.
    parked_warm: Samples,
    /// From zero with an empty store.
    first_ever: Samples,
    /// What of it the server spent loading.
    first_ever_load: Samples,
    plain_cold: Samples,
    wake_cold: Samples,
    /// The store's files read once with nothing of them in the page cache.
    disk: Samples,
    /// Runs per second, one at a time.
    steady_plain: Samples,
    /// Requests per second of the same session behind the least of a gRPC server.
    steady_bare: Samples,
    steady: Samples,
    /// The same with several callers at once.
    throughput_plain: Samples,
    throughput_bare: Samples,
    throughput: Samples,
    /// Whether the server had packed the weights by then.
    packed: bool,
    without: BTreeMap<String, Samples>,
    /// Largest difference from the plain session's outputs.
    largest_difference: f64,
    notes: Vec<String>,
}

pub(crate) async fn run(args: WakeArgs) -> Result<()> {
    let started = Started::now();
    let figures = measure(&args).await?;
    started.record(figures).publish(&args.report)
}

async fn measure(args: &WakeArgs) -> Result<Vec<WakeFigures>> {
    ensure!(
        (1..=100).contains(&args.repetitions) && args.steady_seconds <= 60,
        "1 to 100 repetitions, at most 60 seconds"
    );
    let scratch = models::scratch()?;
    let models = if args.quick {
        vec![BenchModel::tiny(scratch.path())?]
    } else {
        let names: Vec<&str> = args.models.iter().map(String::as_str).collect();
        models::prepare(&names)?
    };
    let mut all = Vec::new();
    for model in &models {
        let folder = scratch.path().join(format!("{}-bench", model.name));
        let bench = Bench::set_up(model, &folder).await?;
        let figures = bench.measure(args).await?;
        eprintln!(
            "{}: plain {} ms, floor {} ms, wake {} ms",
            figures.model,
            figures.plain.cell(),
            figures.floor.cell(),
            figures.wake.cell()
        );
        all.push(figures);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Findings;

    #[tokio::test(flavor = "multi_thread")]
    async fn quick_measurement_of_a_tiny_model_fills_every_column() {
        let args = WakeArgs {
            models: Vec::new(),
            repetitions: 1,
            steady_seconds: 0,
            no_cold: true,
            ablation: true,
            quick: true,
            report: ReportArgs::default(),
        };
        let figures = measure(&args).await.unwrap();
        let [tiny] = &figures[..] else {
            panic!("{figures:?}")
        };
        for samples in [&tiny.plain, &tiny.floor, &tiny.wake, &tiny.first_ever] {
            assert_eq!(samples.0.len(), 1, "{tiny:?}");
        }
        assert_eq!(tiny.without.len(), ABLATIONS.len() + 1);
        assert!(tiny.largest_difference < 1e-4, "{tiny:?}");
        let text = serde_json::to_string(&figures).unwrap();
        let read: Vec<WakeFigures> = serde_json::from_str(&text).unwrap();
        assert_eq!(read.tables(), figures.tables());
        assert_eq!(read.tables().len(), 7);
        assert!(!read.bars().iter().any(|bar| bar.fails(false)));
    }
}

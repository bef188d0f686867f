//! `dormouse prepare`: puts models into the prepared store ahead of time, for an image or a node.

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use dormouse_core::id::ByteSize;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use super::output::{self, FormatArgs, Screen};
use super::serve::ServeArgs;
use crate::app;
use crate::config::Config;
use crate::config::remote::RemoteArgs;
use crate::preparation::{Outcome, PrepareError};
use crate::registry::Registry;
use crate::telemetry;
use crate::unit::{PreparationReport, Unit};

/// Flags of `dormouse prepare`.
#[derive(Args, Clone, Debug)]
pub struct PrepareArgs {
    /// Models to prepare; all of the repository when none is named
    #[arg(value_name = "MODEL")]
    pub models: Vec<String>,
    /// Directory or address (s3://, gs://, as://, https://) with one folder per model; may be given
    /// several times
    #[arg(
        long,
        visible_alias = "model-store",
        value_name = "DIR",
        env = "DORMOUSE_MODEL_REPOSITORY",
        value_delimiter = ',',
        required = true
    )]
    pub model_repository: Vec<PathBuf>,
    /// Where prepared models are kept [default: 'store' in the cache directory]
    #[arg(long, value_name = "DIR", env = "DORMOUSE_STORE")]
    pub store: Option<PathBuf>,
    /// Disk space for prepared models; the longest unused leave first [default: 20GiB]
    #[arg(long, value_name = "BYTES", env = "DORMOUSE_STORE_MAX_SIZE")]
    pub store_max_size: Option<ByteSize>,
    /// ONNX Runtime library to use instead of searching for one
    #[arg(long, value_name = "FILE")]
    pub onnxruntime_library: Option<PathBuf>,
    #[command(flatten)]
    pub remote: RemoteArgs,
    #[command(flatten)]
    pub format: FormatArgs,
}

/// How often files that change are waited for.
const MOST_WAITS: usize = 5;

/// What became of one model version.
struct Row {
    model: String,
    /// Empty when none could be told.
    version: String,
    result: Result<PreparationReport, String>,
    /// It can be served all the same.
    harmless: bool,
}

/// Prepares models one after the other; 1 when one of them cannot be served at all.
pub async fn run(args: PrepareArgs) -> anyhow::Result<u8> {
    let serve = ServeArgs {
        model_repository: args.model_repository,
        remote: args.remote,
        onnxruntime_library: args.onnxruntime_library,
        log_info: Some(false),
        wake: crate::config::wake::WakeArgs {
            store: args.store,
            store_max_size: args.store_max_size,
            ..Default::default()
        },
        ..ServeArgs::default()
    };
    let config = Config::resolve(&serve)?;
    telemetry::init(&config.log)?;
    let registry = app::open_registry(config).await?;
    let names: Vec<Arc<str>> = match args.models.is_empty() {
        true => registry.names(),
        false => args
            .models
            .iter()
            .map(|name| name.as_str().into())
            .collect(),
    };
    if names.is_empty() {
        bail!("there is no model in the repository");
    }
    let bar = ProgressBar::new(names.len() as u64);
    bar.set_style(
        ProgressStyle::with_template("{spinner} {bar:30} {pos}/{len} {wide_msg} {elapsed}")
            .context("the progress bar's form is right")?,
    );
    bar.enable_steady_tick(Duration::from_millis(200));
    let mut rows = Vec::new();
    for name in names {
        bar.set_message(format!("{name}: looking at its files"));
        prepare_model(&registry, &name, &bar, &mut rows).await;
        bar.inc(1);
    }
    bar.finish_and_clear();
    report(&rows, Screen::of_stdout(args.format.chosen()))?;
    let failed = rows.iter().any(|row| row.result.is_err() && !row.harmless);
    Ok(u8::from(failed))
}

async fn prepare_model(
    registry: &Arc<Registry>,
    name: &str,
    bar: &ProgressBar,
    rows: &mut Vec<Row>,
) {
    let generation = match registry.generation(name).await {
        Ok(generation) => generation,
        Err(error) => {
            rows.push(Row {
                model: name.to_owned(),
                version: String::new(),
                result: Err(error.to_string()),
                harmless: false,
            });
            return;
        }
    };
    for unit in generation.units() {
        settle(unit, bar).await;
        bar.set_message(format!("{}: loading, optimising, measuring", unit.id()));
        let row = prepare_unit(Arc::clone(unit)).await;
        if let Err(error) = &row.result {
            say(bar, &format!("{}: {error}", unit.id()));
        }
        rows.push(row);
    }
}

/// Waits until a model's files count as unchanged: prepared before that, the next server would
/// have to read them all to know them again.
async fn settle(unit: &Arc<Unit>, bar: &ProgressBar) {
    for _ in 0..MOST_WAITS {
        let look = {
            let unit = Arc::clone(unit);
            tokio::task::spawn_blocking(move || unit.settles_in())
        };
        let left = look.await.unwrap_or_default();
        if left.is_zero() {
            return;
        }
        say(
            bar,
            &format!(
                "{}: its files were changed just now; waiting {} until they count as settled",
                unit.id(),
                output::duration(left)
            ),
        );
        tokio::time::sleep(left).await;
    }
    say(
        bar,
        &format!(
            "{}: its files go on changing; prepared as they are",
            unit.id()
        ),
    );
}

/// Tells something beside the progress, which is shown on terminals only.
fn say(bar: &ProgressBar, line: &str) {
    bar.suspend(|| {
        // Nobody may be there to read it.
        let _ = writeln!(std::io::stderr(), "{line}");
    });
}

async fn prepare_unit(unit: Arc<Unit>) -> Row {
    let (model, version) = (unit.id().name.to_string(), unit.id().version.to_string());
    let prepared = tokio::task::spawn_blocking(move || unit.prepare_and_measure()).await;
    let (result, harmless) = match prepared {
        Ok(Ok(report)) => (Ok(report), true),
        Ok(Err(error)) => {
            let harmless = matches!(error, PrepareError::NotPreparable(_) | PrepareError::Busy);
            (Err(error.to_string()), harmless)
        }
        Err(_) => (Err("preparing it panicked".to_owned()), false),
    };
    Row {
        model,
        version,
        result,
        harmless,
    }
}

fn report(rows: &[Row], screen: Screen) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if screen.is_json() {
        let rows: Vec<_> = rows.iter().map(as_json).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&rows)?)?;
        return Ok(());
    }
    let mut table = screen.table(&[
        "MODEL",
        "VERSION",
        "RESULT",
        "SIZE BEFORE",
        "AFTER",
        "COLD START BEFORE",
        "AFTER",
        "FASTER",
        "PACKING",
    ]);
    for row in rows {
        let Ok(report) = &row.result else {
            let version = row.version.clone();
            table.add_row(vec![row.model.clone(), version, "not prepared".to_owned()]);
            continue;
        };
        let ratio = report.cold_before.as_secs_f64() / report.cold_after.as_secs_f64().max(1e-9);
        table.add_row(vec![
            row.model.clone(),
            row.version.clone(),
            outcome(report.outcome).to_owned(),
            ByteSize(report.source_bytes).to_string(),
            ByteSize(report.stored_bytes).to_string(),
            output::duration(report.cold_before),
            output::duration(report.cold_after),
            format!("{ratio:.1}x"),
            match report.packing_pays {
                None => "unknown".to_owned(),
                Some(true) => "pays".to_owned(),
                Some(false) => "does not pay".to_owned(),
            },
        ]);
    }
    write!(out, "{}", output::lines(&table))?;
    let measured = rows.iter().filter_map(|row| row.result.as_ref().ok());
    let without_run = measured.filter(|report| !report.with_run).count();
    writeln!(
        out,
        "a cold start is a load and one run, here with the files in the page cache"
    )?;
    if without_run > 0 {
        writeln!(
            out,
            "of {without_run} only the load: nothing could be made up to run them on"
        )?;
    }
    Ok(())
}

fn as_json(row: &Row) -> serde_json::Value {
    match &row.result {
        Err(error) => json!({ "model": row.model, "version": row.version, "error": error }),
        Ok(report) => json!({
            "model": row.model,
            "version": row.version,
            "result": outcome(report.outcome),
            "source_bytes": report.source_bytes,
            "stored_bytes": report.stored_bytes,
            "cold_start_before_ms": report.cold_before.as_secs_f64() * 1e3,
            "cold_start_after_ms": report.cold_after.as_secs_f64() * 1e3,
            "with_run": report.with_run,
            "packing_pays": report.packing_pays,
        }),
    }
}

fn outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Prepared => "prepared",
        Outcome::AlreadyThere => "was there",
    }
}

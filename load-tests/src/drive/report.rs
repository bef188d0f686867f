//! A run's figures for people and for programs.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use hdrhistogram::serialization::interval_log::{IntervalLogWriterBuilder, Tag};
use hdrhistogram::serialization::{Deserializer, V2DeflateSerializer};

use super::outcome::{Figures, Outcome, ProcessUse, Step};
use super::scenario::Mode;
use crate::samples::mib;
use crate::table;

/// Models that are shown one by one.
const MOST_MODELS: usize = 20;

/// Prints tables to standard output.
pub(crate) fn print(outcome: &Outcome) -> Result<()> {
    let server = &outcome.server;
    let mut out = std::io::stdout().lock();
    let name = match server.name.as_str() {
        "" => "an unnamed server",
        name => name,
    };
    writeln!(
        out,
        "{}: {} at {}, tensors in {}{}",
        outcome.scenario.name,
        [name, &server.version].join(" ").trim(),
        outcome.target.url,
        server.data,
        if outcome.ended_early {
            "; ended early"
        } else {
            ""
        }
    )?;
    drop(out);
    let with_process = outcome.steps.iter().any(|step| step.process.is_some());
    let mut header = vec![
        "step",
        "model",
        "sent",
        "answers/s",
        "p50 ms",
        "p90",
        "p99",
        "p99.9",
        "max",
        "service p50",
        "service p99",
        "late p99",
        "errors",
        "not sent",
        "cancelled",
        "wrong",
        "cold",
    ];
    if with_process {
        header.extend(["CPU µs/request", "RSS MiB"]);
    }
    let mut rows = Vec::new();
    for step in &outcome.steps {
        let process = step.process.as_ref();
        rows.push(row(
            (&step.label, "all"),
            &step.all,
            with_process.then_some(process),
        ));
        if step.models.len() < 2 {
            continue;
        }
        let mut models: Vec<_> = step.models.iter().collect();
        models.sort_by_key(|(name, figures)| (std::cmp::Reverse(figures.sent), *name));
        for (name, figures) in models.into_iter().take(MOST_MODELS) {
            rows.push(row(("", name), figures, with_process.then_some(None)));
        }
    }
    table::print(&header, &rows)?;
    if outcome.scenario.mode == Mode::Cold {
        print_cold(outcome)?;
    }
    let mut out = std::io::stdout().lock();
    for step in &outcome.steps {
        notes(step, &mut out)?;
    }
    Ok(())
}

/// What cannot be told in figures.
fn notes(step: &Step, out: &mut impl Write) -> Result<()> {
    for (kind, count) in &step.all.errors {
        let example = step.error_examples.get(kind).map_or("", String::as_str);
        writeln!(out, "{}: {count} × {kind}: {example}", step.label)?;
    }
    for words in &step.mismatches {
        writeln!(out, "{}: wrong answer: {words}", step.label)?;
    }
    if step.models.len() > MOST_MODELS {
        writeln!(
            out,
            "{}: the {MOST_MODELS} most asked of {} models are shown",
            step.label,
            step.models.len()
        )?;
    }
    Ok(())
}

fn row(
    (step, model): (&str, &str),
    figures: &Figures,
    process: Option<Option<&ProcessUse>>,
) -> Vec<String> {
    let latency = &figures.latency;
    let ms = |value: f64| match figures.answered {
        0 => "–".to_owned(),
        _ => format!("{value:.2}"),
    };
    let mut cells = vec![
        step.to_owned(),
        model.to_owned(),
        figures.sent.to_string(),
        format!("{:.1}", figures.throughput),
        ms(latency.p50),
        ms(latency.p90),
        ms(latency.p99),
        ms(latency.p999),
        ms(latency.max),
        ms(figures.service.p50),
        ms(figures.service.p99),
        format!("{:.2}", figures.late.p99),
        figures.failed().to_string(),
        figures.not_sent.to_string(),
        figures.cancelled.to_string(),
        figures.wrong.to_string(),
        figures.cold.to_string(),
    ];
    if let Some(process) = process {
        cells.extend(match process {
            Some(process) => [
                format!("{:.1}", process.micros_per_request),
                format!("{:.1}", mib(process.resident_bytes)),
            ],
            None => ["".to_owned(), "".to_owned()],
        });
    }
    cells
}

fn print_cold(outcome: &Outcome) -> Result<()> {
    let mut rows = Vec::new();
    for step in &outcome.steps {
        for name in step.models.keys() {
            let of_model = || step.cold.iter().filter(|cold| cold.model == *name);
            let spread = |values: Vec<f64>| match values.is_empty() {
                true => "–".to_owned(),
                false => table::spread(&values),
            };
            let mut kinds: Vec<&str> = of_model().map(|cold| &*cold.kind).collect();
            kinds.retain(|kind| !kind.is_empty());
            kinds.sort_unstable();
            kinds.dedup();
            rows.push(vec![
                name.clone(),
                of_model().count().to_string(),
                spread(of_model().map(|cold| cold.latency).collect()),
                spread(of_model().filter_map(|cold| cold.load).collect()),
                spread(of_model().filter_map(|cold| cold.woke).collect()),
                kinds.join(", "),
            ]);
        }
    }
    table::print(
        &[
            "model",
            "cold starts",
            "first answer ms",
            "of it loading",
            "waking as told",
            "from",
        ],
        &rows,
    )?;
    Ok(())
}

/// Writes the outcome as JSON.
pub(crate) fn write_json(outcome: &Outcome, path: &Path) -> Result<()> {
    let mut file = create(path)?;
    serde_json::to_writer_pretty(&mut file, outcome)
        .with_context(|| format!("cannot write {}", path.display()))?;
    writeln!(file)?;
    file.flush()
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Writes an HdrHistogram interval log: one histogram of nanoseconds per window and model, the
/// model as its tag.
pub(crate) fn write_hdr(outcome: &Outcome, path: &Path) -> Result<()> {
    let mut file = create(path)?;
    let mut serializer = V2DeflateSerializer::new();
    let started = SystemTime::UNIX_EPOCH + Duration::from_secs(outcome.started_unix);
    let comment = format!(
        "{} {}: {} at {}; nanoseconds",
        outcome.tool.name, outcome.tool.version, outcome.scenario.name, outcome.target.url
    );
    let mut log = IntervalLogWriterBuilder::new()
        .add_comment(&comment)
        .with_start_time(started)
        .with_base_time(started)
        // The column with the largest value is in milliseconds, as other tools write it.
        .with_max_value_divisor(1e6)
        .begin_log_with(&mut file, &mut serializer)
        .with_context(|| format!("cannot write {}", path.display()))?;
    for interval in &outcome.intervals {
        let times: Histogram<u64> = Deserializer::new()
            .deserialize(&mut &interval.histogram[..])
            .context("a histogram of our own cannot be read")?;
        let name = interval.model.replace([',', ' ', '\r', '\n'], "_");
        log.write_histogram(&times, interval.start, interval.length, Tag::new(&name))
            .map_err(|error| anyhow::anyhow!("cannot write {}: {error:?}", path.display()))?;
    }
    file.flush()
        .with_context(|| format!("cannot write {}", path.display()))
}

pub(crate) fn create(path: &Path) -> Result<BufWriter<File>> {
    let file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    Ok(BufWriter::new(file))
}

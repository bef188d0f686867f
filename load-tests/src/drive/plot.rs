//! Plots of a run as SVG and PNG files: the distribution of latencies, and the course of time.

mod chart;
mod png;
mod svg;

use std::path::Path;

use anyhow::{Context, Result};

use self::chart::{Axis, Chart, Drawing, Series};
use super::outcome::{Latencies, Outcome};

/// Shares of the answers that a distribution is drawn at; the last one is the slowest.
const SHARES: [&str; 6] = ["50 %", "90 %", "95 %", "99 %", "99.9 %", "max"];

/// What plots are written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum PlotFormat {
    /// Text that browsers show at any size
    Svg,
    /// Pixels, for what shows no SVG
    Png,
    Both,
}

/// Writes `latency` and `time`, with the format's ending, into a folder, which is made if need be.
pub(crate) fn write(outcome: &Outcome, folder: &Path, format: PlotFormat) -> Result<()> {
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot create {}", folder.display()))?;
    for (name, drawing) in [("latency", latency(outcome)), ("time", time(outcome))] {
        let write = |ending: &str, bytes: &[u8]| {
            let path = folder.join(name).with_extension(ending);
            std::fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))
        };
        if format != PlotFormat::Png {
            write("svg", svg::document(&drawing).as_bytes())?;
        }
        if format != PlotFormat::Svg {
            write("png", &png::bytes(&drawing)?)?;
        }
    }
    Ok(())
}

/// Percentiles of each step.
fn latency(outcome: &Outcome) -> Drawing {
    let places = |latency: &Latencies| {
        let Latencies {
            p50,
            p90,
            p95,
            p99,
            p999,
            max,
            ..
        } = *latency;
        [p50, p90, p95, p99, p999, max]
    };
    let with_answers = outcome.steps.iter().filter(|step| step.all.answered > 0);
    let series: Vec<Series> = with_answers
        .map(|step| {
            let values = places(&step.all.latency);
            Series::line(&step.label, (0..).map(f64::from).zip(values).collect())
        })
        .collect();
    let values = series.iter().flat_map(|series| &series.points);
    let axis = Axis::logarithmic("latency from the intended time, ms", values.map(|p| p.1));
    let mut chart = Chart::new(
        &title(outcome),
        Axis::named("share of the answers", &SHARES),
    );
    chart.panel(axis, series);
    chart.finish()
}

/// Throughput, errors and latencies over time, cold starts marked.
fn time(outcome: &Outcome) -> Drawing {
    let mut answers = Vec::new();
    let mut failures = Vec::new();
    let (mut p50, mut p99) = (Vec::new(), Vec::new());
    let mut cold = Vec::new();
    let mut starts = Vec::new();
    let mut offset = 0.0;
    for step in &outcome.steps {
        starts.push((offset, step.label.clone()));
        let mut end = step.seconds;
        for window in &step.windows {
            let middle = offset + window.start_seconds + window.seconds / 2.0;
            end = end.max(window.start_seconds + window.seconds);
            let per_second = |count: u64| count as f64 / window.seconds.max(1e-9);
            let failed = window.errors.values().sum::<u64>() + window.not_sent + window.wrong;
            answers.push((middle, per_second(window.answered)));
            failures.push((middle, per_second(failed)));
            if window.answered > 0 {
                p50.push((middle, window.latency.p50));
                p99.push((middle, window.latency.p99));
            }
        }
        let seen = step.cold.iter();
        cold.extend(seen.map(|cold| (offset + cold.at_seconds, cold.latency)));
        offset += end;
    }
    let mut chart = Chart::new(&title(outcome), Axis::linear("seconds", [0.0, offset]));
    chart.marks(starts);
    let rates = answers.iter().chain(&failures).map(|point| point.1);
    let axis = Axis::linear("per second", rates.chain([0.0]));
    let mut series = vec![Series::line("answers", answers)];
    if failures.iter().any(|point| point.1 > 0.0) {
        series.push(Series::line("errors and not sent", failures));
    }
    chart.panel(axis, series);
    let times = p50.iter().chain(&p99).chain(&cold).map(|point| point.1);
    let axis = Axis::logarithmic("latency, ms", times);
    let mut series = vec![Series::line("p50", p50), Series::line("p99", p99)];
    if !cold.is_empty() {
        series.push(Series::dots("cold starts", cold));
    }
    chart.panel(axis, series);
    chart.finish()
}

fn title(outcome: &Outcome) -> String {
    let server = &outcome.server;
    let words = [
        &*outcome.scenario.name,
        "–",
        &*server.name,
        &*server.version,
    ];
    words.join(" ").trim().to_owned()
}

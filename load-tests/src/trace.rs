//! An hour of a production trace against a live server with far less memory than models.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::bars::Bar;
use crate::models::{self, BenchModel};
use crate::outside::{Outside, prepare_store, store_note};
use crate::record::{Findings, ReportArgs, Started};
use crate::samples::mib;
use crate::simulate::trace::{Arrivals, Trace};
use crate::table::{Titled, number};
use crate::undisturbed::{histogram, micros};

/// Connections that the calls are spread over.
const CONNECTIONS: usize = 8;

/// An hour of Azure's trace of 500 functions, compressed in time, on 100 models with memory for 20.
///
/// Function N calls model N mod 100. Keep-alive times are compressed like the trace. Very frequent
/// functions are thinned, since their model is awake anyway. Takes as long as the compressed hour
/// and 2 minutes to prepare.
#[derive(Args, Debug)]
pub(crate) struct TraceArgs {
    /// First minute of the trace to replay
    #[arg(long, default_value_t = 0)]
    start: usize,
    /// Minutes of the trace to replay
    #[arg(long, default_value_t = 60)]
    minutes: usize,
    /// How many times faster than it happened
    #[arg(long, default_value_t = 60.0)]
    speed: f64,
    /// Calls per function and minute at most; the rest is left out
    #[arg(long, default_value_t = 4)]
    at_most: u32,
    /// Models in the repository
    #[arg(long, default_value_t = 100)]
    models: usize,
    /// Models that the memory budget has room for
    #[arg(long, default_value_t = 20)]
    room: usize,
    /// Keep-alive in the trace's time, or a policy's name
    #[arg(long, default_value = "10m")]
    keep_alive: String,
    /// Seed of the calls' moments within their minutes
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    report: ReportArgs,
}

/// Latencies in milliseconds.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct TraceFigures {
    store: String,
    keep_alive: String,
    budget_mib: f64,
    models: usize,
    models_called: usize,
    /// Of the trace that are replayed, and how many times faster than they happened.
    minutes: usize,
    speed: f64,
    /// Calls in these minutes of the trace, before frequent functions were thinned.
    calls_in_trace: u64,
    /// Calls that were sent.
    calls: u64,
    errors: Vec<String>,
    cold_requests: f64,
    loads: f64,
    evictions: f64,
    p50: f64,
    p99: f64,
    p999: f64,
    max: f64,
    cold_p50: f64,
    cold_p99: f64,
    late_p99: f64,
    largest_resident_mib: f64,
}

pub(crate) async fn run(args: TraceArgs) -> Result<()> {
    ensure!(
        args.speed >= 1.0
            && (1..=1000).contains(&args.models)
            && (1..=1000).contains(&args.room)
            && (1..=480).contains(&args.minutes),
        "a speed of at least 1, 1 to 1000 models, 1 to 480 minutes"
    );
    let started = Started::now();
    let (calls_in_trace, calls) = calls(&args, Trace::bundled()?)?;
    let scratch = models::scratch()?;
    let (repository, store) = (
        scratch.path().join("repository"),
        scratch.path().join("store"),
    );
    let models = models::prepare_small(args.models)?;
    for model in &models {
        model.lay_out(&repository, &model.name, "")?;
    }
    let entries = prepare_store(&repository, &store).await?;
    let budget = budget(&repository, &store, &models, args.room).await?;
    let keep_alive = compressed(&args.keep_alive, args.speed)?;
    let flags = [
        format!("--memory-budget={budget}"),
        format!("--keep-alive={keep_alive}"),
        format!("--park-after={}", compressed("1m", args.speed)?),
    ];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let server = Outside::start(&repository, &store, &flags).await?;
    let mut figures = TraceFigures {
        store: store_note(entries, args.models),
        keep_alive,
        budget_mib: mib(budget),
        models: args.models,
        minutes: args.minutes,
        speed: args.speed,
        calls_in_trace,
        ..TraceFigures::default()
    };
    replay(&server, &models, &calls, &mut figures).await?;
    started.record(figures).publish(&args.report)
}

/// A call of the replay.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PlannedCall {
    at: Duration,
    model: usize,
}

/// How many calls the chosen minutes have, and those that are left, thinned and compressed.
fn calls(args: &TraceArgs, mut trace: Trace) -> Result<(u64, Vec<PlannedCall>)> {
    let end = args
        .start
        .checked_add(args.minutes)
        .filter(|&end| end <= trace.minutes)
        .with_context(|| format!("the trace has {} minutes", trace.minutes))?;
    let mut all = 0;
    for counts in &mut trace.functions {
        counts.truncate(end);
        counts.drain(..args.start);
        for count in counts {
            all += u64::from(*count);
            *count = (*count).min(args.at_most);
        }
    }
    trace.minutes = args.minutes;
    let calls = trace.calls(Arrivals::Spread, args.seed).into_iter();
    let planned = calls.map(|call| PlannedCall {
        at: Duration::from_nanos(call.at.as_nanos()).div_f64(args.speed),
        model: call.function as usize % args.models,
    });
    Ok((all, planned.collect()))
}

/// A duration of the trace's time in the replay's; names of policies stay.
fn compressed(keep_alive: &str, speed: f64) -> Result<String> {
    if keep_alive.chars().all(char::is_alphabetic) {
        return Ok(keep_alive.to_owned());
    }
    let (number, scale) = if let Some(number) = keep_alive.strip_suffix('m') {
        (number, 60e3)
    } else if let Some(number) = keep_alive.strip_suffix('h') {
        (number, 3600e3)
    } else {
        let seconds = keep_alive.strip_suffix('s');
        (seconds.context("expected a time such as 10m or 90s")?, 1e3)
    };
    let number: f64 = number.parse().context("expected a time such as 10m")?;
    Ok(format!("{:.0}ms", (number * scale / speed).max(1.0)))
}

/// What `room` warm models hold by the server's own account, without a limit.
async fn budget(
    repository: &std::path::Path,
    store: &std::path::Path,
    models: &[BenchModel],
    room: usize,
) -> Result<u64> {
    let flags = ["--keep-alive=forever", "--memory-budget=unlimited"];
    let server = Outside::start(repository, store, &flags).await?;
    for model in models.iter().take(room) {
        server.client.infer(model.request(&model.name)).await?;
    }
    server.quiet().await?;
    // The server looks at what its models hold once a second.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let used = server.metric("dormouse_models_memory_bytes", &[]).await?;
    ensure!(
        used > 0.0,
        "the server does not tell what {room} models hold"
    );
    Ok(used as u64)
}

struct Answer {
    late: Duration,
    took: Duration,
    is_cold: bool,
}

async fn replay(
    server: &Outside,
    models: &[BenchModel],
    calls: &[PlannedCall],
    figures: &mut TraceFigures,
) -> Result<()> {
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        clients.push(server.connect().await?);
    }
    let requests: Arc<[_]> = models
        .iter()
        .map(|model| model.request(&model.name))
        .collect();
    let mut running = JoinSet::new();
    let mut called = vec![false; models.len()];
    let mut looks = tokio::time::interval(Duration::from_millis(250));
    let started = Instant::now();
    for (index, call) in calls.iter().enumerate() {
        let planned = started + call.at;
        tokio::select! {
            () = tokio::time::sleep_until(planned) => {}
            _ = looks.tick() => {
                let resident = mib(server.memory()?.resident);
                figures.largest_resident_mib = figures.largest_resident_mib.max(resident);
                tokio::time::sleep_until(planned).await;
            }
        }
        called[call.model] = true;
        let client = clients[index % CONNECTIONS].clone();
        let (requests, model) = (Arc::clone(&requests), call.model);
        running.spawn(async move {
            let late = planned.elapsed();
            let answer = client.infer(requests[model].clone()).await?;
            anyhow::Ok(Answer {
                late,
                took: planned.elapsed(),
                is_cold: answer.timing().is_some(),
            })
        });
    }
    let (mut all, mut cold, mut late) = (histogram()?, histogram()?, histogram()?);
    while let Some(answer) = running.join_next().await {
        match answer? {
            Ok(answer) => {
                all.saturating_record(micros(answer.took));
                late.saturating_record(micros(answer.late));
                if answer.is_cold {
                    cold.saturating_record(micros(answer.took));
                }
            }
            Err(error) => figures.errors.push(format!("{error:#}")),
        }
    }
    let millis =
        |histogram: &Histogram<u64>, quantile| histogram.value_at_quantile(quantile) as f64 / 1e3;
    figures.calls = calls.len() as u64;
    figures.models_called = called.iter().filter(|&&called| called).count();
    figures.p50 = millis(&all, 0.5);
    figures.p99 = millis(&all, 0.99);
    figures.p999 = millis(&all, 0.999);
    figures.max = all.max() as f64 / 1e3;
    figures.cold_p50 = millis(&cold, 0.5);
    figures.cold_p99 = millis(&cold, 0.99);
    figures.late_p99 = millis(&late, 0.99);
    figures.cold_requests = server.metric("dormouse_cold_requests_total", &[]).await?;
    figures.loads = server.metric("dormouse_loads_total", &[]).await?;
    figures.evictions = server.metric("dormouse_evictions_total", &[]).await?;
    Ok(())
}

impl Findings for TraceFigures {
    fn about(&self) -> String {
        let of_trace = match self.calls_in_trace {
            0 => String::new(),
            all => format!(
                " ({} of the trace's {all} in these {} minutes, frequent functions thinned; {} times \
                 as fast)",
                self.calls, self.minutes, self.speed
            ),
        };
        format!(
            "{} calls{of_trace} of {} models, {} of them called, with {:.1} MiB for models and a \
             keep-alive of {}; {}.",
            self.calls,
            self.models,
            self.models_called,
            self.budget_mib,
            self.keep_alive,
            self.store
        )
    }

    fn tables(&self) -> Vec<Titled> {
        let share = |count: f64| {
            let percent = 100.0 * count / self.calls.max(1) as f64;
            format!("{count:.0} ({percent:.2} % of the calls)")
        };
        let row = |measure: &str, value: String| vec![measure.to_owned(), value];
        vec![Titled::new(
            "",
            &["measure", "value"],
            vec![
                row("loads", share(self.loads)),
                row(
                    "calls that found their model cold",
                    share(self.cold_requests),
                ),
                row("evictions", format!("{:.0}", self.evictions)),
                row("errors", self.errors.len().to_string()),
                row("p50, ms", number(self.p50)),
                row("p99, ms", number(self.p99)),
                row("p99.9, ms", number(self.p999)),
                row("slowest, ms", number(self.max)),
                row("p50 of cold calls, ms", number(self.cold_p50)),
                row("p99 of cold calls, ms", number(self.cold_p99)),
                row("sent late, p99, ms", number(self.late_p99)),
                row(
                    "largest resident memory, MiB",
                    number(self.largest_resident_mib),
                ),
            ],
        )]
    }

    fn bars(&self) -> Vec<Bar> {
        vec![Bar::no_errors("calls without an answer", &self.errors)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> TraceArgs {
        TraceArgs {
            start: 1,
            minutes: 2,
            speed: 60.0,
            at_most: 2,
            models: 2,
            room: 1,
            keep_alive: "10m".to_owned(),
            seed: 1,
            report: ReportArgs::default(),
        }
    }

    #[test]
    fn replay_is_a_thinned_and_compressed_part_of_the_trace() {
        let trace = || Trace {
            minutes: 3,
            functions: vec![vec![9, 1, 5], vec![9, 0, 0], vec![9, 0, 1]],
        };
        let (all, calls) = calls(&args(), trace()).unwrap();
        assert_eq!(all, 7);
        // Functions 0 and 2 call model 0; the first minute is left out.
        assert_eq!(calls.len(), 4);
        assert!(calls.iter().all(|call| call.model == 0));
        assert!(calls[0].at < Duration::from_secs(1));
        assert!(
            calls[1..]
                .iter()
                .all(|call| (Duration::from_secs(1)..Duration::from_secs(2)).contains(&call.at))
        );
        let late = TraceArgs { start: 2, ..args() };
        let error = super::calls(&late, trace()).unwrap_err();
        assert!(error.to_string().contains("3 minutes"), "{error}");
    }

    #[test]
    fn keep_alive_is_compressed_like_the_trace() {
        assert_eq!(compressed("10m", 60.0).unwrap(), "10000ms");
        assert_eq!(compressed("90s", 60.0).unwrap(), "1500ms");
        assert_eq!(compressed("1h", 36.0).unwrap(), "100000ms");
        assert_eq!(compressed("adaptive", 60.0).unwrap(), "adaptive");
        assert!(compressed("10 minutes", 60.0).is_err());
    }
}

//! What one model's users notice while another model wakes and sleeps.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::bars::Bar;
use crate::models::{self, BenchModel, parameter};
use crate::outside::{Outside, connect, prepare_store, store_note};
use crate::record::{Findings, ReportArgs, Started};
use crate::samples::{Samples, times};
use crate::table::Titled;
use crate::ticks::{Ticks, in_real_time};

/// How many times its p99 alone a model's p99 may be while another one wakes and sleeps.
const MOST_OF_ALONE: f64 = 1.5;

/// Latency of a small model under steady load, alone and while a 1.3 GB model wakes and sleeps.
///
/// Requests are sent at a fixed rate whatever becomes of them, and timed from the moment they were
/// planned for. Who sends them runs in real time where that is allowed, as if it were on a machine of
/// its own. Both situations take turns. Takes about 3 minutes.
#[derive(Args, Debug)]
pub(crate) struct UndisturbedArgs {
    /// Model that wakes and sleeps
    #[arg(long, default_value = "bert-large")]
    large: String,
    /// Requests per second to the small model
    #[arg(long, default_value_t = 100.0)]
    rate: f64,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 15)]
    seconds: u64,
    /// Measurements of each kind, in turns
    #[arg(long, default_value_t = 5)]
    repetitions: usize,
    #[command(flatten)]
    report: ReportArgs,
}

/// One situation: percentiles in milliseconds, each value that of one repetition.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Latency {
    p50: Samples,
    p99: Samples,
    p999: Samples,
    /// How late requests were sent, which is the generator's fault.
    late_p99: Samples,
    requests: u64,
    errors: Vec<String>,
    /// Wakes of the large model.
    wakes: u32,
    /// How long these took.
    wake: Samples,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct UndisturbedFigures {
    large: String,
    rate: f64,
    store: String,
    /// Whether requests were sent in real time.
    in_real_time: bool,
    alone: Latency,
    disturbed: Latency,
}

pub(crate) async fn run(args: UndisturbedArgs) -> Result<()> {
    ensure!(
        (0.1..=10_000.0).contains(&args.rate)
            && (1..=600).contains(&args.seconds)
            && (1..=100).contains(&args.repetitions),
        "0.1 to 10000 requests per second, 1 to 600 seconds, 1 to 100 repetitions"
    );
    let started = Started::now();
    let scratch = models::scratch()?;
    let (repository, store) = (
        scratch.path().join("repository"),
        scratch.path().join("store"),
    );
    let small = models::prepare_small(1)?.remove(0);
    let large = models::prepare(&[&args.large])?.remove(0);
    small.lay_out(
        &repository,
        &small.name,
        &(parameter("keep_alive", "forever") + &parameter("park_after", "never")),
    )?;
    large.lay_out(
        &repository,
        &large.name,
        &(parameter("keep_alive", "100ms") + &parameter("park_after", "never")),
    )?;
    let entries = prepare_store(&repository, &store).await?;
    let server = Outside::start(&repository, &store, &[]).await?;
    let mut figures = UndisturbedFigures {
        large: large.name.clone(),
        rate: args.rate,
        store: store_note(entries, 2),
        in_real_time: std::thread::spawn(in_real_time).join().unwrap_or(false),
        alone: Latency::default(),
        disturbed: Latency::default(),
    };
    let load = Load {
        server: server.url(),
        small,
        period: Duration::from_secs_f64(1.0 / args.rate),
        time: Duration::from_secs(args.seconds),
    };
    // The first round warms up and is not counted.
    load.measure(&mut Latency::default()).await?;
    for _ in 0..args.repetitions {
        server.quiet().await?;
        load.measure(&mut figures.alone).await?;
        let stop = AtomicBool::new(false);
        let measured = async {
            let measured = load.measure(&mut figures.disturbed).await;
            stop.store(true, Ordering::Relaxed);
            measured
        };
        let (measured, wakes) = tokio::join!(measured, wake_and_sleep(&server, &large, &stop));
        measured?;
        let wakes = wakes.context("the large model could not be woken")?;
        figures.disturbed.wakes += u32::try_from(wakes.0.len())?;
        figures.disturbed.wake.0.extend(wakes.0);
    }
    started.record(figures).publish(&args.report)
}

/// Calls the large model whenever it sleeps; the times to its answers.
async fn wake_and_sleep(
    server: &Outside,
    large: &BenchModel,
    stop: &AtomicBool,
) -> Result<Samples> {
    let client = server.connect().await?;
    let mut wakes = Samples::default();
    while !stop.load(Ordering::Relaxed) {
        let asked = Instant::now();
        client.infer(large.request(&large.name)).await?;
        wakes.push_millis(asked.elapsed());
        // Its keep-alive and a moment of sleep; looking at the server would disturb it too.
        tokio::time::sleep(Duration::from_millis(150)).await;
        server.asleep(&large.name).await?;
    }
    Ok(wakes)
}

/// A steady load on the small model.
#[derive(Clone)]
struct Load {
    server: String,
    small: BenchModel,
    period: Duration,
    time: Duration,
}

/// How long answers took and how late requests were sent.
struct Measured {
    took: Histogram<u64>,
    late: Histogram<u64>,
    errors: Vec<String>,
}

impl Load {
    async fn measure(&self, latency: &mut Latency) -> Result<()> {
        // One thread ticks, sends and receives: it is to measure the server's delays, and each of
        // its own threads that has to wake another would add one.
        let load = self.clone();
        let (ended, measuring) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || {
            let measured = load.on_this_thread();
            // Nobody waits any more when the measurement was given up.
            drop(ended.send(measured));
        });
        let measured = measuring.await.context("the generator panicked")??;
        let millis = |histogram: &Histogram<u64>, quantile| {
            histogram.value_at_quantile(quantile) as f64 / 1e3
        };
        let Measured { took, late, errors } = measured;
        latency.requests += took.len();
        latency.p50.push(millis(&took, 0.5));
        latency.p99.push(millis(&took, 0.99));
        latency.p999.push(millis(&took, 0.999));
        latency.late_p99.push(millis(&late, 0.99));
        latency.errors.extend(errors);
        Ok(())
    }

    fn on_this_thread(&self) -> Result<Measured> {
        let _ = in_real_time();
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build()?;
        runtime.block_on(self.send_and_receive())
    }

    async fn send_and_receive(&self) -> Result<Measured> {
        let client = connect(&self.server).await?;
        client.infer(self.small.request(&self.small.name)).await?;
        let mut ticks = Ticks::every(self.period)?;
        let started = Instant::now();
        let mut calls = JoinSet::new();
        loop {
            let planned = ticks.tick().await?;
            if started.elapsed() >= self.time {
                break;
            }
            let (client, request) = (client.clone(), self.small.request(&self.small.name));
            calls.spawn(async move {
                let late = planned.elapsed();
                let answer = client.infer(request).await;
                answer.map(|_| (late, planned.elapsed()))
            });
        }
        let mut measured = Measured {
            took: histogram()?,
            late: histogram()?,
            errors: Vec::new(),
        };
        while let Some(call) = calls.join_next().await {
            match call? {
                Ok((sent_late, time)) => {
                    measured.took.saturating_record(micros(time));
                    measured.late.saturating_record(micros(sent_late));
                }
                Err(error) => measured.errors.push(error.to_string()),
            }
        }
        Ok(measured)
    }
}

/// Microseconds up to a quarter of an hour, three digits.
pub(crate) fn histogram() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, 900_000_000, 3)?)
}

pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(1)
}

impl Findings for UndisturbedFigures {
    fn about(&self) -> String {
        format!(
            "A small model is asked {} times per second, alone and while {} wakes and sleeps, in \
             turns; latency from the moment a request was due, sent {}; {}. Ratios are medians over \
             the repetitions.",
            self.rate,
            self.large,
            match self.in_real_time {
                true => "in real time",
                false => "by a thread of usual priority",
            },
            self.store
        )
    }

    fn tables(&self) -> Vec<Titled> {
        let (alone, disturbed) = (&self.alone, &self.disturbed);
        let pair = |name: &str, one: &Samples, other: &Samples| {
            let ratio = times(other.over(one));
            vec![name.to_owned(), one.cell(), other.cell(), ratio]
        };
        let plain = |name: &str, of: &dyn Fn(&Latency) -> String| {
            let ratio = "–".to_owned();
            vec![name.to_owned(), of(alone), of(disturbed), ratio]
        };
        vec![Titled::new(
            "",
            &["measure", "alone", "disturbed", "disturbed/alone"],
            vec![
                pair("p50, ms", &alone.p50, &disturbed.p50),
                pair("p99, ms", &alone.p99, &disturbed.p99),
                pair("p99.9, ms", &alone.p999, &disturbed.p999),
                pair("sent late, p99, ms", &alone.late_p99, &disturbed.late_p99),
                plain("requests", &|of| of.requests.to_string()),
                plain("errors", &|of| of.errors.len().to_string()),
                plain("wakes of the large model", &|of| of.wakes.to_string()),
                plain("such a wake, ms", &|of| of.wake.cell()),
            ],
        )]
    }

    fn bars(&self) -> Vec<Bar> {
        let (alone, disturbed) = (&self.alone, &self.disturbed);
        let ratio = disturbed.p99.over(&alone.p99);
        vec![
            Bar::most("p99 disturbed/alone", MOST_OF_ALONE, ratio, "×").of_speed(),
            Bar::no_errors("errors alone", &alone.errors),
            Bar::no_errors("errors while disturbed", &disturbed.errors),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_beyond_the_histogram_are_its_largest() {
        let mut histogram = histogram().unwrap();
        histogram.saturating_record(micros(Duration::from_secs(100_000)));
        histogram.saturating_record(micros(Duration::ZERO));
        assert_eq!(histogram.len(), 2);
        assert!(histogram.max() >= 900_000_000);
    }
}

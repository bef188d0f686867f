//! What a server does with many times the load that fits: how much of it is still answered in
//! time, how quickly the rest is refused, and how soon it is itself again.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use bytes::Bytes;
use clap::Args;
use dormouse_proto::inference as pb;
use pb::grpc_inference_service_client::GrpcInferenceServiceClient;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};
use tonic::Code;
use tonic::transport::Channel;

use crate::bars::Bar;
use crate::process::ServerProcess;
use crate::record::{Findings, ReportArgs, Started};
use crate::samples::mib;
use crate::table::{Titled, maybe, number};

/// Adds one after a time that does not depend on what it is given.
const STEADY: &[u8] = include_bytes!("../../server/tests/models/steady.onnx");

const CONNECTIONS: usize = 8;
/// How long after its deadline an answer is still waited for.
const GRACE: Duration = Duration::from_secs(5);
/// The server is itself again when this many answers in a row are as quick as they were before.
const QUICK_IN_A_ROW: usize = 20;
/// Recovery is given up after this long.
const RECOVERY: Duration = Duration::from_secs(60);

/// Percent of what fits that must be answered in time in every window.
const LEAST_GOODPUT: f64 = 95.0;
/// Milliseconds that a refusal may take at p99.
const MOST_REFUSAL: f64 = 20.0;
/// Milliseconds until a server is itself again.
const MOST_RECOVERY: f64 = 2000.0;
/// MiB that a server may hold more under overload.
const MOST_GROWTH: f64 = 64.0;

/// Sends many times the requests that fit, whatever becomes of them.
///
/// Tells how many of those that fit are answered in time, how quickly others are refused, and how
/// soon answers are as quick as before. Takes a minute.
#[derive(Args, Debug)]
pub(crate) struct OverloadArgs {
    /// Seconds of overload
    #[arg(long, default_value_t = 30)]
    seconds: u64,
    /// Seconds of each line of the table
    #[arg(long, default_value_t = 5)]
    window: u64,
    /// Requests sent for each one that fits
    #[arg(long, default_value_t = 10.0)]
    factor: f64,
    /// Milliseconds each request has
    #[arg(long, default_value_t = 1000)]
    deadline: u64,
    /// Requests that may share a run
    #[arg(long, default_value_t = 1)]
    batch: u32,
    #[command(flatten)]
    report: ReportArgs,
}

/// Rates per second, times in milliseconds.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct OverloadFigures {
    factor: f64,
    deadline: u64,
    batch: u32,
    /// What fits, before and after.
    capacity: f64,
    capacity_after: f64,
    /// The slowest of a hundred answers without load.
    usual: f64,
    /// From the end of the load; none when answers never were as quick as before.
    recovered: Option<f64>,
    resident_mib_before: f64,
    resident_mib_at_the_end: f64,
    resident_mib_recovered: f64,
    windows: Vec<WindowFigures>,
    all: WindowFigures,
}

/// What ended within a part of the load.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct WindowFigures {
    start_seconds: u64,
    end_seconds: u64,
    sent: f64,
    late_p99: Option<f64>,
    /// Answers within their deadline.
    goodput: f64,
    answered_p50: Option<f64>,
    answered_p99: Option<f64>,
    refused: f64,
    refused_p50: Option<f64>,
    refused_p99: Option<f64>,
    /// Refused only when their time was nearly over: taken in, and not served.
    expired: u64,
    /// Neither answered nor refused in words that say so.
    broken: u64,
}

type Client = GrpcInferenceServiceClient<Channel>;

#[derive(Clone, Copy, PartialEq)]
enum Outcome {
    Answered,
    Refused,
    /// Neither an answer nor a refusal that says so.
    Broken,
}

/// One request, as its client saw it.
struct Seen {
    /// When it ended, from the start of the load.
    ended: Duration,
    took: Duration,
    /// How much later than planned it was sent.
    late: Duration,
    outcome: Outcome,
}

pub(crate) async fn run(args: OverloadArgs) -> anyhow::Result<()> {
    ensure!(
        (1..=600).contains(&args.seconds) && (1..=args.seconds).contains(&args.window),
        "--seconds from 1 to 600 and --window from 1 to --seconds"
    );
    ensure!(
        (1.0..=100.0).contains(&args.factor) && (1..=60_000).contains(&args.deadline),
        "--factor from 1 to 100 and --deadline from 1 to 60000"
    );
    ensure!((1..=64).contains(&args.batch), "--batch from 1 to 64");
    let begun = Started::now();
    let deadline = Duration::from_millis(args.deadline);
    let repository = tempfile::tempdir()?;
    lay_out(repository.path(), args.batch)?;
    let server = ServerProcess::dormouse(repository.path())?;
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        let channel = Channel::from_shared(server.url())?.connect().await?;
        clients.push(GrpcInferenceServiceClient::new(channel));
    }
    let quick = usual_latency(&clients[0]).await?;
    let capacity = capacity(&clients, args.batch).await?;
    let resident = server.resident()?;
    let seen = overload(&clients, &args, capacity * args.factor).await?;
    let peak = server.resident()?;
    let recovered = recovery(&clients[0], quick).await?;
    let after = server.resident()?;
    let capacity_after = self::capacity(&clients, args.batch).await?;

    let windows = (0..args.seconds / args.window).map(|index| {
        let from = index * args.window;
        WindowFigures::of(&seen, from..from + args.window, deadline)
    });
    let figures = OverloadFigures {
        factor: args.factor,
        deadline: args.deadline,
        batch: args.batch,
        capacity,
        capacity_after,
        usual: millis(quick),
        recovered: recovered.map(millis),
        resident_mib_before: mib(resident),
        resident_mib_at_the_end: mib(peak),
        resident_mib_recovered: mib(after),
        windows: windows.collect(),
        // What ends after the load is nobody's goodput under it.
        all: WindowFigures::of(&seen, 0..args.seconds, deadline),
    };
    begun.record(figures).publish(&args.report)
}

impl WindowFigures {
    fn of(seen: &[Seen], span: Range<u64>, deadline: Duration) -> Self {
        let within = Duration::from_secs(span.start)..Duration::from_secs(span.end);
        let seen: Vec<&Seen> = seen
            .iter()
            .filter(|one| within.contains(&one.ended))
            .collect();
        let seconds = (span.end - span.start) as f64;
        let took = |outcome: Outcome| {
            let those = seen.iter().filter(|one| one.outcome == outcome);
            those.map(|one| one.took).collect::<Vec<_>>()
        };
        let (mut answered, mut refused) = (took(Outcome::Answered), took(Outcome::Refused));
        let mut late: Vec<_> = seen.iter().map(|one| one.late).collect();
        let in_time = answered.iter().filter(|&&took| took <= deadline).count();
        let expired = refused.iter().filter(|&&took| took > deadline / 2).count();
        Self {
            start_seconds: span.start,
            end_seconds: span.end,
            sent: seen.len() as f64 / seconds,
            late_p99: percentile(&mut late, 0.99),
            goodput: in_time as f64 / seconds,
            answered_p50: percentile(&mut answered, 0.5),
            answered_p99: percentile(&mut answered, 0.99),
            refused: refused.len() as f64 / seconds,
            refused_p50: percentile(&mut refused, 0.5),
            refused_p99: percentile(&mut refused, 0.99),
            expired: expired as u64,
            broken: took(Outcome::Broken).len() as u64,
        }
    }
}

impl Findings for OverloadFigures {
    fn about(&self) -> String {
        format!(
            "{} times as many requests as fit, {} of which may share a run, each with a deadline of \
             {} ms. What fits is measured first: {} answers per second. Goodput is answers in time.",
            number(self.factor),
            self.batch,
            self.deadline,
            number(self.capacity)
        )
    }

    fn tables(&self) -> Vec<Titled> {
        let cells = |name: String, window: &WindowFigures| {
            vec![
                name,
                number(window.sent),
                number(window.goodput),
                number(self.percent(window)),
                maybe(window.answered_p50),
                maybe(window.answered_p99),
                number(window.refused),
                maybe(window.refused_p50),
                maybe(window.refused_p99),
                window.expired.to_string(),
                window.broken.to_string(),
                maybe(window.late_p99),
            ]
        };
        let mut rows: Vec<_> = self
            .windows
            .iter()
            .map(|one| cells(format!("{}–{} s", one.start_seconds, one.end_seconds), one))
            .collect();
        rows.push(cells("all".to_owned(), &self.all));
        let row = |measure: &str, value: String| vec![measure.to_owned(), value];
        vec![
            Titled::new(
                "Over time",
                &[
                    "window",
                    "sent/s",
                    "goodput/s",
                    "% of what fits",
                    "answered p50 ms",
                    "p99 ms",
                    "refused/s",
                    "refused p50 ms",
                    "p99 ms",
                    "expired",
                    "broken",
                    "sent late p99 ms",
                ],
                rows,
            ),
            Titled::new(
                "Before and after",
                &["measure", "value"],
                vec![
                    row("what fits before, answers/s", number(self.capacity)),
                    row("what fits after, answers/s", number(self.capacity_after)),
                    row("slowest answer without load, ms", number(self.usual)),
                    row(
                        "until answers are as quick again, ms",
                        self.recovered.map_or_else(|| "never".to_owned(), number),
                    ),
                    row("RSS before, MiB", number(self.resident_mib_before)),
                    row(
                        "RSS at the end of the load, MiB",
                        number(self.resident_mib_at_the_end),
                    ),
                    row(
                        "RSS when recovered, MiB",
                        number(self.resident_mib_recovered),
                    ),
                ],
            ),
        ]
    }

    fn bars(&self) -> Vec<Bar> {
        let goodput = self.windows.iter().map(|window| self.percent(window));
        let goodput = goodput.min_by(f64::total_cmp);
        let name = "goodput of what fits, in the worst window";
        let recovery = match self.recovered {
            Some(took) => Bar::most("recovery", MOST_RECOVERY, Some(took), " ms"),
            None => Bar::new("recovery", "at most 2000 ms", "never", false),
        };
        let grown = self.resident_mib_at_the_end - self.resident_mib_before;
        vec![
            Bar::least(name, LEAST_GOODPUT, goodput, " %").of_speed(),
            Bar::most("p99 of refusals", MOST_REFUSAL, self.all.refused_p99, " ms").of_speed(),
            recovery.of_speed(),
            Bar::most("growth of RSS", MOST_GROWTH, Some(grown), " MiB"),
            Bar::equal("requests neither answered nor refused", 0, self.all.broken),
        ]
    }
}

impl OverloadFigures {
    /// A window's goodput, of what fits.
    fn percent(&self, window: &WindowFigures) -> f64 {
        100.0 * window.goodput / self.capacity.max(f64::MIN_POSITIVE)
    }
}

fn lay_out(repository: &Path, batch: u32) -> anyhow::Result<()> {
    let model = repository.join("steady");
    std::fs::create_dir_all(model.join("1"))?;
    std::fs::write(model.join("1/model.onnx"), STEADY)?;
    // One run at a time, so that what fits is a matter of the model and not of the cores.
    std::fs::write(
        model.join("config.pbtxt"),
        format!(
            "max_batch_size: {batch}
dynamic_batching {{ }}
instance_group {{ kind: KIND_CPU count: 1 }}
parameters {{ key: \"dormouse.keep_alive\" value {{ string_value: \"forever\" }} }}
parameters {{ key: \"dormouse.batching\" value {{ string_value: \"force\" }} }}
"
        ),
    )?;
    Ok(())
}

fn request(deadline: Option<Duration>) -> pb::ModelInferRequest {
    // As a parameter, because the client library would act on `grpc-timeout` itself: it is to be
    // seen when the server answers.
    let timeout = deadline.map(|deadline| {
        let micros = i64::try_from(deadline.as_micros()).unwrap_or(i64::MAX);
        let parameter = pb::InferParameter {
            parameter_choice: Some(pb::infer_parameter::ParameterChoice::Int64Param(micros)),
        };
        ("timeout".to_owned(), parameter)
    });
    pb::ModelInferRequest {
        model_name: "steady".to_owned(),
        inputs: vec![pb::model_infer_request::InferInputTensor {
            name: "X".to_owned(),
            datatype: "FP32".to_owned(),
            shape: vec![1, 4],
            ..Default::default()
        }],
        raw_input_contents: vec![Bytes::from_static(&[0; 16])],
        parameters: timeout.into_iter().collect(),
        ..Default::default()
    }
}

/// The slowest of a hundred answers without any load, one at a time.
async fn usual_latency(client: &Client) -> anyhow::Result<Duration> {
    let mut slowest = Duration::ZERO;
    for call in 0..120 {
        let started = Instant::now();
        client.clone().model_infer(request(None)).await?;
        // The first wake the model and teach the server how long it runs.
        if call >= 20 {
            slowest = slowest.max(started.elapsed());
        }
    }
    Ok(slowest)
}

/// Answers per second while a few requests always wait.
async fn capacity(clients: &[Client], batch: u32) -> anyhow::Result<f64> {
    const TIME: Duration = Duration::from_secs(4);
    let mut tasks = JoinSet::new();
    let started = Instant::now();
    for index in 0..(4 * batch as usize).max(4) {
        let mut client = clients[index % clients.len()].clone();
        tasks.spawn(async move {
            let mut answers = 0u32;
            while started.elapsed() < TIME {
                client.model_infer(request(None)).await?;
                answers += 1;
            }
            anyhow::Ok(answers)
        });
    }
    let mut answers = 0;
    while let Some(task) = tasks.join_next().await {
        answers += task??;
    }
    Ok(f64::from(answers) / started.elapsed().as_secs_f64())
}

/// Sends `rate` requests per second whatever becomes of them.
async fn overload(clients: &[Client], args: &OverloadArgs, rate: f64) -> anyhow::Result<Vec<Seen>> {
    let deadline = Duration::from_millis(args.deadline);
    let period = Duration::from_secs_f64(1.0 / rate);
    let load = Duration::from_secs(args.seconds);
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut calls = JoinSet::new();
    let started = Instant::now();
    let clients: Arc<[Client]> = clients.into();
    let mut sent = 0usize;
    loop {
        let planned = ticks.tick().await;
        if planned.duration_since(started) >= load {
            break;
        }
        let clients = Arc::clone(&clients);
        let request = request(Some(deadline));
        let index = sent % clients.len();
        sent += 1;
        calls.spawn(async move {
            let asked = Instant::now();
            let mut client = clients[index].clone();
            let answer = tokio::time::timeout(deadline + GRACE, client.model_infer(request)).await;
            let outcome = match answer {
                Ok(Ok(_)) => Outcome::Answered,
                Ok(Err(status)) => match status.code() {
                    Code::DeadlineExceeded | Code::Unavailable | Code::ResourceExhausted => {
                        Outcome::Refused
                    }
                    _ => Outcome::Broken,
                },
                Err(_) => Outcome::Broken,
            };
            Seen {
                ended: started.elapsed(),
                took: asked.elapsed(),
                late: asked.duration_since(planned),
                outcome,
            }
        });
    }
    let mut seen = Vec::with_capacity(sent);
    while let Some(call) = calls.join_next().await {
        seen.push(call?);
    }
    Ok(seen)
}

/// How long after the load answers come as quickly as before; none when they never do.
async fn recovery(client: &Client, quick: Duration) -> anyhow::Result<Option<Duration>> {
    let started = Instant::now();
    let mut since = Duration::ZERO;
    let mut in_a_row = 0;
    while started.elapsed() < RECOVERY {
        let asked = Instant::now();
        let answer = client.clone().model_infer(request(None)).await;
        if answer.is_ok() && asked.elapsed() <= quick * 2 {
            in_a_row += 1;
            if in_a_row == QUICK_IN_A_ROW {
                return Ok(Some(since));
            }
        } else {
            in_a_row = 0;
            since = started.elapsed();
        }
    }
    Ok(None)
}

/// In milliseconds; none of no times.
fn percentile(times: &mut [Duration], part: f64) -> Option<f64> {
    times.sort_unstable();
    let rank = (times.len() as f64 * part).ceil() as usize;
    times.get(rank.saturating_sub(1)).copied().map(millis)
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_count_what_ended_in_them() {
        let seen = |ended: u64, took: u64, outcome: Outcome| Seen {
            ended: Duration::from_millis(ended),
            took: Duration::from_millis(took),
            late: Duration::ZERO,
            outcome,
        };
        let all = [
            seen(500, 10, Outcome::Answered),
            seen(900, 150, Outcome::Answered),
            seen(1500, 2, Outcome::Refused),
            seen(1600, 90, Outcome::Refused),
            seen(2500, 1, Outcome::Broken),
        ];
        let window = WindowFigures::of(&all, 0..2, Duration::from_millis(100));
        assert_eq!(
            (window.sent, window.goodput, window.refused),
            (2.0, 0.5, 1.0)
        );
        assert_eq!(window.refused_p99, Some(90.0));
        assert_eq!((window.expired, window.broken), (1, 0));
        let figures = OverloadFigures {
            capacity: 1.0,
            recovered: None,
            windows: vec![window],
            ..OverloadFigures::default()
        };
        let verdicts = figures.bars().into_iter().map(|bar| bar.verdict());
        let verdicts: Vec<&str> = verdicts.collect();
        assert_eq!(verdicts, ["MISSED", "not judged", "MISSED", "met", "met"]);
    }
}

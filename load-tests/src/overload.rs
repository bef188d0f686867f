//! What a server does with many times the load that fits: how much of it is still answered in
//! time, how quickly the rest is refused, and how soon it is itself again.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use bytes::Bytes;
use clap::Args;
use dormouse_proto::inference as pb;
use pb::grpc_inference_service_client::GrpcInferenceServiceClient;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};
use tonic::Code;
use tonic::transport::Channel;

use crate::process::ServerProcess;
use crate::table;

/// Adds one after a time that does not depend on what it is given.
const STEADY: &[u8] = include_bytes!("../../server/tests/models/steady.onnx");

const CONNECTIONS: usize = 8;
/// How long after its deadline an answer is still waited for.
const GRACE: Duration = Duration::from_secs(5);
/// The server is itself again when this many answers in a row are as quick as they were before.
const QUICK_IN_A_ROW: usize = 20;
/// Recovery is given up after this long.
const RECOVERY: Duration = Duration::from_secs(60);

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

    let mut rows: Vec<Vec<String>> = (0..args.seconds / args.window)
        .map(|index| {
            let from = Duration::from_secs(index * args.window);
            let to = from + Duration::from_secs(args.window);
            let within = |one: &&Seen| (from..to).contains(&one.ended);
            let window: Vec<_> = seen.iter().filter(within).collect();
            let name = format!("{}–{} s", from.as_secs(), to.as_secs());
            row(name, &window, args.window as f64, (capacity, deadline))
        })
        .collect();
    // What ends after the load is nobody's goodput under it.
    let load = Duration::from_secs(args.seconds);
    let all: Vec<_> = seen.iter().filter(|one| one.ended < load).collect();
    let seconds = args.seconds as f64;
    rows.push(row("all".to_owned(), &all, seconds, (capacity, deadline)));
    table::print(
        &[
            "window",
            "sent/s",
            "late p99 ms",
            "capacity/s",
            "goodput/s",
            "goodput %",
            "answered p50 ms",
            "p99 ms",
            "refused/s",
            "p50 ms",
            "p99 ms",
            "expired",
            "broken",
        ],
        &rows,
    )?;
    let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
    table::print(
        &[
            "capacity/s before",
            "after",
            "usual p99 ms",
            "recovered after ms",
            "RSS MiB before",
            "at the end",
            "recovered",
        ],
        &[vec![
            format!("{capacity:.1}"),
            format!("{capacity_after:.1}"),
            millis(quick),
            recovered.map_or_else(|| "never".to_owned(), millis),
            mib(resident),
            mib(peak),
            mib(after),
        ]],
    )?;
    Ok(())
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

fn row(
    name: String,
    seen: &[&Seen],
    seconds: f64,
    (capacity, deadline): (f64, Duration),
) -> Vec<String> {
    let took = |outcome: Outcome| {
        let those = seen.iter().filter(|one| one.outcome == outcome);
        those.map(|one| one.took).collect::<Vec<_>>()
    };
    let (mut answered, mut refused) = (took(Outcome::Answered), took(Outcome::Refused));
    let mut late: Vec<_> = seen.iter().map(|one| one.late).collect();
    // Refused only when their time was nearly over: taken in, and not served.
    let expired = refused.iter().filter(|&&took| took > deadline / 2).count();
    let good = answered.iter().filter(|&&took| took <= deadline).count() as f64 / seconds;
    vec![
        name,
        format!("{:.0}", seen.len() as f64 / seconds),
        percentile(&mut late, 0.99),
        format!("{capacity:.1}"),
        format!("{good:.1}"),
        format!("{:.1}", 100.0 * good / capacity),
        percentile(&mut answered, 0.5),
        percentile(&mut answered, 0.99),
        format!("{:.0}", refused.len() as f64 / seconds),
        percentile(&mut refused, 0.5),
        percentile(&mut refused, 0.99),
        expired.to_string(),
        took(Outcome::Broken).len().to_string(),
    ]
}

fn percentile(times: &mut [Duration], part: f64) -> String {
    times.sort_unstable();
    let rank = (times.len() as f64 * part).ceil() as usize;
    match times.get(rank.saturating_sub(1)) {
        Some(&time) => millis(time),
        None => "–".to_owned(),
    }
}

fn millis(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() * 1e3)
}

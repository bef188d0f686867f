//! A mixed load for a long time, with clients that are killed: does memory grow, and does the
//! server's account of what happened agree with its clients' to the unit?

mod slope;

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use self::slope::slope;
use crate::bars::Bar;
use crate::drive;
use crate::drive::outcome::{Figures, Outcome};
use crate::drive::progress::Progress;
use crate::drive::scenario::{Arrivals, Cancel, Dimension, Mode, ModelLoad, Scenario, Tolerance};
use crate::record::{Findings, ReportArgs, Started};
use crate::run::stop_on_interrupt;
use crate::samples::mib;
use crate::table::{Titled, number};
use crate::victim::{ServerChoice, Victim};

/// Asked by clients that are killed, and by nobody else.
const KILLED: &str = "mlp_0";
/// Asked with a deadline that is not always met.
const WITH_DEADLINE: &str = "steady";
const MIB: f64 = (1 << 20) as f64;
/// Milliseconds that killed clients live.
const LIVES: [u64; 4] = [300, 700, 1100, 2300];
/// Shorter runs say nothing about memory.
const SHORTEST: Duration = Duration::from_secs(120);
const MOST_WINDOWS: u32 = 180;
/// Memory that comes and goes with a mixed load anyway.
const USUAL_GROWTH: f64 = (8 << 20) as f64;
/// How long the server may take to notice that its last clients are gone.
const SETTLING: Duration = Duration::from_secs(30);

const REQUEST: &str = include_str!("../scenarios/recorded/add_sub_request.json");
const RESPONSE: &str = include_str!("../scenarios/recorded/add_sub_response.json");

/// A mixed load with killed clients on a server of its own: RSS slope, exact counters.
#[derive(Args, Debug)]
pub(crate) struct SoakArgs {
    /// How long
    #[arg(long, default_value = "30m", value_parser = humantime::parse_duration)]
    duration: Duration,
    /// Requests per second, half of them over gRPC and half over HTTP
    #[arg(long, default_value_t = 200.0)]
    rate: f64,
    /// Seed of inputs, mix and arrivals
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    server: ServerChoice,
    #[command(flatten)]
    report: ReportArgs,
}

/// What the bars were read from.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SoakFigures {
    killed_clients: u64,
    counters: Vec<Account>,
    /// Bytes per hour, over the later four fifths of the run.
    resident_slope_per_hour: f64,
    /// Its windows have the server's memory.
    grpc: Outcome,
    http: Outcome,
}

/// One model's requests, as clients and as the server count them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Account {
    model: String,
    sent: u64,
    answered: u64,
    failed: u64,
    cancelled: u64,
    server_success: u64,
    server_failure: u64,
}

impl Account {
    fn add(&mut self, figures: &Figures) {
        self.sent += figures.sent;
        self.answered += figures.answered + figures.wrong;
        self.failed += figures.failed();
        self.cancelled += figures.cancelled;
    }

    fn bar(&self, has_deadline: bool) -> Bar {
        Bar::new(
            format!("counters of {}", self.model),
            format!(
                "{} answered, {} failed, {} given up",
                self.answered, self.failed, self.cancelled
            ),
            format!(
                "{} successes, {} failures",
                self.server_success, self.server_failure
            ),
            self.agrees(has_deadline),
        )
    }

    /// Whether both sides agree. Requests that a client gave up on, or whose deadline passed at the
    /// client, may have ended either way or never have arrived; all others are counted exactly.
    fn agrees(&self, has_deadline: bool) -> bool {
        let given_up = self.cancelled + if has_deadline { self.failed } else { 0 };
        let failed = if has_deadline { 0 } else { self.failed };
        let within = |found: u64, least: u64| (least..=least + given_up).contains(&found);
        let together = self.server_success + self.server_failure;
        within(self.server_success, self.answered)
            && within(self.server_failure, failed)
            && together <= self.sent
            && together >= self.answered + failed
    }
}

pub(crate) async fn run(args: SoakArgs) -> Result<()> {
    ensure!(
        args.duration >= Duration::from_secs(1) && args.duration <= Duration::from_secs(24 * 3600),
        "--duration from 1s to 24h"
    );
    ensure!(
        (2.0..=100_000.0).contains(&args.rate),
        "--rate from 2 to 100000"
    );
    let started = Started::now();
    // Models that are asked seldom fall asleep and wake all the time.
    let flags = ["--keep-alive=3s", "--park-after=1s"];
    let victim = Victim::start(&args.server, &flags, None).await?;
    let scenario = scenario(&args, &victim)?;
    let (progress, stopper) = Progress::live();
    let interrupts = tokio::spawn(stop_on_interrupt(stopper));
    let killed = Arc::new(AtomicU64::new(0));
    let killer = tokio::spawn(kill_clients(victim.grpc().url, Arc::clone(&killed)));
    let (grpc_target, http_target) = (victim.grpc(), victim.http()?);
    let silent = progress.without_bar();
    let http_scenario = Scenario {
        seed: scenario.seed.wrapping_add(1),
        ..scenario.clone()
    };
    let (grpc, http) = tokio::join!(
        drive::run(&scenario, &grpc_target, &progress),
        drive::run(&http_scenario, &http_target, &silent)
    );
    killer.abort();
    let killer = killer.await;
    interrupts.abort();
    let (grpc, http) = (grpc?, http?);
    if let Ok(ended) = killer {
        ended.context("clients could not be killed")?;
    }
    let mut bars = vec![settle(&victim).await?];
    let ended_early = grpc.ended_early || http.ended_early;
    let mut counters = Vec::new();
    for model in &scenario.models {
        let account = account(&victim, &model.name, [&grpc, &http]).await?;
        let bar = account.bar(model.deadline.is_some());
        bars.push(if ended_early { bar.unjudged() } else { bar });
        counters.push(account);
    }
    for (name, outcome) in [("gRPC", &grpc), ("HTTP", &http)] {
        let errors = errors_without_deadlines(&scenario, outcome);
        let name = format!("errors over {name} without deadlines");
        bars.push(Bar::equal(name, 0, errors));
    }
    let killed_clients = killed.load(Ordering::Relaxed);
    let found = killed_clients.to_string();
    bars.push(Bar::new(
        "clients killed",
        "some",
        found,
        killed_clients > 0,
    ));
    let resident = later_memory(&grpc);
    let slope = slope(&resident);
    bars.push(memory_bar(slope, &resident, args.duration));
    let figures = SoakFigures {
        killed_clients,
        counters,
        resident_slope_per_hour: slope * 3600.0,
        grpc,
        http,
    };
    started
        .record(figures)
        .with_bars(bars)
        .publish(&args.report)
}

impl Findings for SoakFigures {
    fn about(&self) -> String {
        let seconds = self.grpc.steps.iter().map(|step| step.seconds);
        format!(
            "{} minutes of a mixed load over gRPC and HTTP, with deadlines, clients that give up and \
             {} that were killed.",
            number(seconds.sum::<f64>() / 60.0),
            self.killed_clients
        )
    }

    fn tables(&self) -> Vec<Titled> {
        let mut rows = Vec::new();
        for (name, outcome) in [("gRPC", &self.grpc), ("HTTP", &self.http)] {
            for step in &outcome.steps {
                let all = &step.all;
                let most = step
                    .process
                    .map(|process| mib(process.largest_resident_bytes));
                rows.push(vec![
                    name.to_owned(),
                    all.sent.to_string(),
                    number(all.throughput),
                    number(all.latency.p50),
                    number(all.latency.p99),
                    number(all.latency.max),
                    all.failed().to_string(),
                    all.cancelled.to_string(),
                    all.wrong.to_string(),
                    all.cold.to_string(),
                    crate::table::maybe(most),
                ]);
            }
        }
        let header = [
            "over",
            "sent",
            "answers/s",
            "p50 ms",
            "p99 ms",
            "max ms",
            "failed",
            "given up",
            "wrong",
            "cold",
            "largest RSS, MiB",
        ];
        vec![Titled::new("", &header, rows)]
    }

    fn notes(&self) -> Vec<String> {
        let slope = self.resident_slope_per_hour / MIB;
        vec![format!(
            "Slope of the resident memory over the last four fifths: {} MiB per hour. Requests that \
             failed had a deadline unless a bar says otherwise.",
            number(slope)
        )]
    }
}

/// What is asked: models often and seldom, small and large, with deadlines and with clients that
/// give up.
fn scenario(args: &SoakArgs, victim: &Victim) -> Result<Scenario> {
    let recorded = victim.folder().join("request.json");
    let expected = victim.folder().join("response.json");
    std::fs::write(&recorded, REQUEST)?;
    std::fs::write(&expected, RESPONSE)?;
    let model = |name: &str, weight: f64| ModelLoad {
        weight,
        ..ModelLoad::named(name)
    };
    let sizes = vec![Dimension::Choice(vec![1, 8]), Dimension::Range(16, 4096)];
    let mut scenario = Scenario::closed("soak", &[1]);
    scenario.name = "soak".to_owned();
    scenario.mode = Mode::Open;
    scenario.duration = args.duration;
    // Enough for memory's slope, and few enough to be kept.
    scenario.window = scenario.window.max(args.duration / MOST_WINDOWS);
    // The server counts from the first request on, and so must its clients.
    scenario.warmup = Duration::ZERO;
    scenario.seed = args.seed;
    scenario.open.arrivals = Arrivals::Poisson;
    scenario.open.rates = vec![args.rate / 2.0];
    scenario.models = vec![
        model("mlp", 10.0),
        model("conv", 5.0),
        ModelLoad {
            shapes: [("INPUT".to_owned(), sizes)].into(),
            ..model("identity_fp32", 4.0)
        },
        ModelLoad {
            recorded: Some(recorded),
            expected: Some(expected),
            tolerance: Tolerance {
                absolute: 0.0,
                relative: 0.0,
            },
            ..model("add_sub", 4.0)
        },
        ModelLoad {
            deadline: Some(Duration::from_millis(250)),
            ..model(WITH_DEADLINE, 1.0)
        },
        ModelLoad {
            cancel: Some(Cancel {
                fraction: 0.5,
                after: Duration::from_millis(3),
            }),
            ..model("mlp_1", 2.0)
        },
        model("mlp_2", 0.05),
        model("mlp_3", 0.05),
    ];
    Ok(scenario)
}

/// Starts clients in processes of their own and kills them in the middle of their work.
async fn kill_clients(url: String, killed: Arc<AtomicU64>) -> Result<()> {
    let program = std::env::current_exe()?;
    for life in LIVES.into_iter().cycle() {
        let mut client = tokio::process::Command::new(&program)
            .args(["run", "--model", KILLED, "--concurrency", "8"])
            .args(["--duration", "60s", "--warmup", "0s", "--url", &url])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        tokio::time::sleep(Duration::from_millis(life)).await;
        ensure!(
            client.try_wait()?.is_none(),
            "a client ended before it was killed"
        );
        client.kill().await?;
        killed.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Waits until the server holds nothing of anybody any more.
async fn settle(victim: &Victim) -> Result<Bar> {
    let started = Instant::now();
    loop {
        let pending = victim
            .metric("nv_inference_pending_request_count", &[])
            .await?;
        let bytes = victim
            .metric("dormouse_request_bytes_in_flight", &[])
            .await?;
        let empty = pending == 0.0 && bytes == 0.0;
        if empty || started.elapsed() > SETTLING {
            return Ok(Bar::new(
                "requests and bytes held after the last client left",
                "0, 0",
                format!("{pending}, {bytes}"),
                empty,
            ));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn account(victim: &Victim, model: &str, outcomes: [&Outcome; 2]) -> Result<Account> {
    let label = format!("model=\"{model}\"");
    let count = async |name: &str| anyhow::Ok(victim.metric(name, &[&label]).await? as u64);
    let mut account = Account {
        model: model.to_owned(),
        server_success: count("nv_inference_request_success").await?,
        server_failure: count("nv_inference_request_failure").await?,
        ..Account::default()
    };
    for step in outcomes.into_iter().flat_map(|outcome| &outcome.steps) {
        if let Some(figures) = step.models.get(model) {
            account.add(figures);
        }
    }
    Ok(account)
}

fn errors_without_deadlines(scenario: &Scenario, outcome: &Outcome) -> u64 {
    let without = scenario
        .models
        .iter()
        .filter(|model| model.deadline.is_none());
    without
        .flat_map(|model| {
            outcome
                .steps
                .iter()
                .map(|step| step.models.get(&model.name))
        })
        .flatten()
        .map(|figures| figures.failed() + figures.wrong)
        .sum()
}

/// Seconds and resident bytes at the ends of windows, without the first fifth of the run.
fn later_memory(outcome: &Outcome) -> Vec<(f64, f64)> {
    let windows: Vec<_> = outcome
        .steps
        .iter()
        .flat_map(|step| &step.windows)
        .collect();
    let points = windows.iter().skip(windows.len() / 5).filter_map(|window| {
        let process = window.process?;
        let at = window.start_seconds + window.seconds;
        Some((at, process.resident_bytes as f64))
    });
    points.collect()
}

/// What the slope would add over the whole run must be little.
fn memory_bar(slope: f64, resident: &[(f64, f64)], duration: Duration) -> Bar {
    let mean = resident.iter().map(|point| point.1).sum::<f64>() / resident.len().max(1) as f64;
    let grown = slope * duration.as_secs_f64();
    let most = (0.05 * mean).max(USUAL_GROWTH);
    let bar = Bar::at_most(
        "growth of resident memory over the run",
        most / MIB,
        grown / MIB,
        " MiB",
    );
    match duration >= SHORTEST {
        true => bar,
        false => bar.unjudged(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(ends: [u64; 6]) -> Account {
        let [
            sent,
            answered,
            failed,
            cancelled,
            server_success,
            server_failure,
        ] = ends;
        Account {
            model: "m".to_owned(),
            sent,
            answered,
            failed,
            cancelled,
            server_success,
            server_failure,
        }
    }

    #[test]
    fn counts_without_cancellations_must_be_equal() {
        assert!(account([10, 8, 2, 0, 8, 2]).agrees(false));
        for (success, failure) in [(7, 2), (9, 2), (8, 1), (8, 3), (9, 1)] {
            let account = account([10, 8, 2, 0, success, failure]);
            assert!(!account.agrees(false), "{account:?}");
        }
    }

    #[test]
    fn requests_that_were_given_up_may_have_ended_either_way() {
        // Three were given up: some arrived in time, some failed, some never arrived.
        for (success, failure) in [(5, 2), (8, 2), (5, 5), (6, 3)] {
            let account = account([10, 5, 2, 3, success, failure]);
            assert!(account.agrees(false), "{account:?}");
        }
        for (success, failure) in [(4, 3), (9, 2), (5, 6), (8, 3)] {
            let account = account([10, 5, 2, 3, success, failure]);
            assert!(!account.agrees(false), "{account:?}");
        }
        // A deadline that passed at the client may have been met by the server.
        assert!(account([10, 8, 2, 0, 9, 1]).agrees(true));
        assert!(!account([10, 8, 2, 0, 7, 3]).agrees(true));
    }
}

//! Workers that are killed for real: until when their models answer again, and what others notice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dormouse_client::{Client, InferResponse};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::{Bench, IsolationArgs, PATIENCE, Running, agree, connect, identity};
use crate::bars::Bar;
use crate::models::{self, BenchModel, parameter};
use crate::process::metric;
use crate::samples::Samples;
use crate::table::Titled;
use crate::undisturbed::{histogram, micros};

/// What a recovery may take beyond the load itself.
const MOST_SECONDS: f64 = 2.0;
/// How long processes may outlive a server that was killed.
const ORPHANS_PATIENCE: Duration = Duration::from_secs(2);
/// Clients of a model that is killed while it is busy.
const CLIENTS: usize = 4;
/// How long these have asked when it is killed.
const BUSY: Duration = Duration::from_millis(200);
/// The pause between two requests of a neighbour.
const PACE: Duration = Duration::from_millis(5);
/// Models that nobody kills: in a process of its own, and in the server.
const NEIGHBOURS: [(&str, &str); 2] = [("beside", "process"), ("within", "none")];

/// What one model showed, killed idle and killed busy.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Recovery {
    model: String,
    situation: String,
    /// Milliseconds from the kill to the next right answer, and how long the load took of it.
    recovery: Samples,
    load: Samples,
    /// Requests of the model itself that failed, over all kills.
    failed: u64,
}

/// Kills workers one after the other while two neighbours serve.
pub(super) async fn measure(
    bench: &Bench,
    args: &IsolationArgs,
) -> Result<(Vec<Recovery>, Vec<Bar>)> {
    let repository = bench.path("victims");
    for model in &bench.models {
        model.lay_out(&repository, &model.name, &parameter("isolation", "process"))?;
    }
    let neighbour = identity(&bench.path("neighbours"))?;
    for (name, isolation) in NEIGHBOURS {
        neighbour.lay_out(&repository, name, &parameter("isolation", isolation))?;
    }
    // Each death is the first: none has a pause, and none leads to quarantine.
    let config = bench.path("server.toml");
    std::fs::write(&config, "[isolation]\ndeath_window = \"1ms\"\n")?;
    models::settled().await;
    let flags = [format!("--config={}", config.display())];
    let server = bench.start("victims", "store-victims", &flags).await?;
    let expected = server.warm_up(&bench.models).await?;
    let mut neighbours = Vec::new();
    for (name, _) in NEIGHBOURS {
        let client = connect(&server.process).await?;
        neighbours.push(Neighbour::start(name, neighbour.clone(), client).await?);
    }
    let mut shown = Vec::new();
    let (mut kills, mut wrong) = (0, 0);
    for (model, expected) in bench.models.iter().zip(&expected) {
        for situation in ["idle", "busy"] {
            let victim = Victim {
                server: &server,
                model,
                expected,
                is_busy: situation == "busy",
            };
            let mut recovery = Recovery {
                model: model.name.clone(),
                situation: situation.to_owned(),
                recovery: Samples::default(),
                load: Samples::default(),
                failed: 0,
            };
            for _ in 0..args.repetitions {
                wrong += victim.kill(&mut recovery).await?;
                kills += 1;
            }
            shown.push(recovery);
        }
    }
    let mut bars = bars(&shown);
    bars.push(Bar::equal("wrong answers", 0, wrong));
    for neighbour in neighbours {
        bars.extend(neighbour.finish().await?);
    }
    let text = server.process.metrics_text().await?;
    let count = |name, labels: &[&str]| metric(&text, name, labels).unwrap_or(0.0) as u64;
    let killed = count("dormouse_worker_deaths_total", &["cause=\"killed\""]);
    bars.push(Bar::equal("deaths that were counted", kills, killed));
    let back = count("dormouse_worker_restarts_total", &[]);
    bars.push(Bar::equal("models that came back", kills, back));
    bars.push(orphans(server).await?);
    Ok((shown, bars))
}

fn bars(shown: &[Recovery]) -> Vec<Bar> {
    let beyond = |recovery: &Recovery| {
        let pairs = recovery.recovery.0.iter().zip(&recovery.load.0);
        let beyond = pairs.map(|(whole, load)| (whole - load) / 1e3);
        beyond.fold(0.0, f64::max)
    };
    shown
        .iter()
        .map(|recovery| {
            let name = format!(
                "{}, killed {}: longest until it answered again, without its load",
                recovery.model, recovery.situation
            );
            let found = beyond(recovery);
            Bar::new(
                name,
                format!("at most {MOST_SECONDS:.1} s"),
                format!("{found:.3} s"),
                found <= MOST_SECONDS,
            )
        })
        .collect()
}

/// A model whose worker is killed.
struct Victim<'a> {
    server: &'a Running,
    model: &'a BenchModel,
    expected: &'a InferResponse,
    is_busy: bool,
}

impl Victim<'_> {
    /// Kills the worker and waits for the next right answer; returns how many were wrong.
    async fn kill(&self, shown: &mut Recovery) -> Result<u64> {
        let name = &self.model.name;
        let client = &self.server.client;
        client.infer(self.model.request(name)).await?;
        let pid = self.server.worker_of(name).await?;
        let pid = pid.with_context(|| format!("{name} runs in no process of its own"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let mut clients = Vec::new();
        if self.is_busy {
            for _ in 0..CLIENTS {
                let client = connect(&self.server.process).await?;
                clients.push(self.ask_on(client, &stop));
            }
            tokio::time::sleep(BUSY).await;
        }
        let killed = Instant::now();
        let target = i32::try_from(pid).ok().and_then(Pid::from_raw);
        kill_process(target.context("a process has a number")?, Signal::KILL)?;
        let mut wrong = 0;
        loop {
            ensure!(
                killed.elapsed() < PATIENCE,
                "{name} did not answer again within {PATIENCE:?}"
            );
            // What the old one had finished when it was killed is no recovery.
            let was_gone = is_gone(pid);
            match client.infer(self.model.request(name)).await {
                Ok(answer) if !agree(self.expected, &answer) => wrong += 1,
                Ok(_) if was_gone => break,
                Ok(_) => {}
                Err(_) => {
                    shown.failed += 1;
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        }
        shown.recovery.push_millis(killed.elapsed());
        stop.store(true, Ordering::Relaxed);
        for asking in clients {
            let (failed, mistaken) = asking.await?;
            shown.failed += failed;
            wrong += mistaken;
        }
        let versions = client.cold_starts(name, "").await?;
        let last = versions.iter().flat_map(|version| &version.cold_starts);
        let last = last.max_by_key(|cold| cold.started);
        shown
            .load
            .push_millis(last.context("the server tells of no load")?.total);
        Ok(wrong)
    }

    /// Asks again and again; how many requests failed, and how many answers were wrong.
    fn ask_on(&self, client: Client, stop: &Arc<AtomicBool>) -> JoinHandle<(u64, u64)> {
        let request = self.model.request(&self.model.name);
        let (expected, stop) = (self.expected.clone(), Arc::clone(stop));
        tokio::spawn(async move {
            let (mut failed, mut wrong) = (0, 0);
            while !stop.load(Ordering::Relaxed) {
                match client.infer(request.clone()).await {
                    Ok(answer) => wrong += u64::from(!agree(&expected, &answer)),
                    Err(_) => {
                        failed += 1;
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                }
            }
            (failed, wrong)
        })
    }
}

/// Whether a process has ended, reaped or not.
fn is_gone(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next());
    matches!(state, None | Some('Z' | 'X'))
}

/// Somebody who asks a model that nobody kills.
struct Neighbour {
    name: &'static str,
    stop: Arc<AtomicBool>,
    asking: JoinHandle<Result<(Vec<String>, f64, u64)>>,
}

impl Neighbour {
    async fn start(name: &'static str, model: BenchModel, client: Client) -> Result<Self> {
        let expected = client.infer(model.request(name)).await?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let asking = tokio::spawn(async move {
            let mut errors = Vec::new();
            let mut took = histogram()?;
            while !stopped.load(Ordering::Relaxed) {
                let asked = Instant::now();
                match client.infer(model.request(name)).await {
                    Ok(answer) if agree(&expected, &answer) => {
                        took.saturating_record(micros(asked.elapsed()));
                    }
                    Ok(_) => errors.push("a wrong answer".to_owned()),
                    Err(error) => errors.push(error.to_string()),
                }
                tokio::time::sleep(PACE).await;
            }
            let p99 = took.value_at_quantile(0.99) as f64 / 1e3;
            Ok((errors, p99, took.len()))
        });
        Ok(Self { name, stop, asking })
    }

    async fn finish(self) -> Result<Vec<Bar>> {
        self.stop.store(true, Ordering::Relaxed);
        let (errors, p99, answers) = self.asking.await??;
        let first = errors
            .first()
            .map_or_else(String::new, |first| format!(": {first}"));
        let name = self.name;
        Ok(vec![
            Bar::new(
                format!("errors of a model {name} the ones that are killed"),
                "0, some answers",
                format!("{}, {answers} answers{first}", errors.len()),
                errors.is_empty() && answers > 0,
            ),
            Bar::new(
                format!("its p99 ({name})"),
                "-",
                format!("{p99:.1} ms"),
                true,
            )
            .unjudged(),
        ])
    }
}

/// Kills the server itself, and counts the workers that are left.
async fn orphans(server: Running) -> Result<Bar> {
    let index = server.client.repository_index(false).await?;
    let pids = index.iter().filter_map(|entry| {
        let (_, pid) = entry.reason.split_once("in worker ")?;
        pid.parse().ok()
    });
    let pids: Vec<u32> = pids.collect();
    ensure!(!pids.is_empty(), "no model runs in a process of its own");
    drop(server);
    let killed = Instant::now();
    let left = || pids.iter().filter(|pid| !is_gone(**pid)).count() as u64;
    while left() > 0 && killed.elapsed() < ORPHANS_PATIENCE {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let name = format!(
        "of {} workers, those left {ORPHANS_PATIENCE:?} after kill -9 of their server",
        pids.len()
    );
    Ok(Bar::equal(name, 0, left()))
}

pub(super) fn table(shown: &[Recovery]) -> Titled {
    let rows = shown.iter().map(|recovery| {
        let kills = recovery.recovery.0.len();
        vec![
            recovery.model.clone(),
            recovery.situation.clone(),
            kills.to_string(),
            recovery.recovery.cell(),
            recovery.load.cell(),
            recovery.failed.to_string(),
        ]
    });
    Titled::new(
        "After kill -9 of a model's process",
        &[
            "model",
            "killed",
            "kills",
            "until it answered again, ms",
            "its load, ms",
            "requests that failed",
        ],
        rows.collect(),
    )
}

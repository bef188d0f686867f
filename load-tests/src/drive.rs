//! Drives any server of the KServe v2 protocol: a scenario says what is asked, a target where.
//!
//! Knows nothing of servers' processes: whoever starts one passes its address and its id.

mod arrivals;
mod check;
mod closed;
mod cold;
mod connect;
mod dice;
mod inputs;
mod load;
mod machine;
mod open;
pub(crate) mod outcome;
pub(crate) mod plot;
pub(crate) mod progress;
mod recorder;
pub(crate) mod report;
pub(crate) mod scenario;
pub(crate) mod target;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use tokio::time::Instant;

use self::arrivals::Schedule;
use self::connect::Connected;
use self::dice::Dice;
use self::load::{Load, Running};
use self::outcome::{Interval, Machine, Outcome, SCHEMA, Step, Tool};
use self::progress::Progress;
use self::recorder::Recorder;
use self::scenario::{Arrivals, Mode, Scenario};
use self::target::Target;

/// Longer than any run.
const FAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// Runs a scenario against a target. Ends by itself, or when `progress` is told to stop; then the
/// outcome tells what was seen until then.
pub(crate) async fn run(
    scenario: &Scenario,
    target: &Target,
    progress: &Progress,
) -> Result<Outcome> {
    scenario.check()?;
    let server = Connected::open(target, scenario.connections)
        .await
        .with_context(|| format!("cannot drive {}", target.url))?;
    if scenario.mode == Mode::Cold {
        let names: Vec<_> = scenario.models.iter().map(|model| &*model.name).collect();
        cold::make_known(&server, &scenario.cold, &names).await?;
    }
    let mut outcome = Outcome {
        schema: SCHEMA,
        tool: Tool::this(),
        machine: Machine::here(),
        server: server.identity.clone(),
        target: target.clone(),
        scenario: scenario.clone(),
        started_unix: SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |time| time.as_secs()),
        ended_early: false,
        steps: Vec::new(),
        intervals: Vec::new(),
    };
    let run = Run {
        scenario,
        pid: target.pid,
        progress,
        load: Arc::new(Load::prepare(scenario, server).await?),
        started: Instant::now(),
    };
    for kind in Kind::of(scenario) {
        if progress.is_stopped() {
            break;
        }
        let (step, intervals) = run.step(kind).await?;
        outcome.steps.push(step);
        outcome.intervals.extend(intervals);
    }
    progress.end();
    outcome.ended_early = progress.is_stopped();
    Ok(outcome)
}

/// What all steps have in common.
struct Run<'a> {
    scenario: &'a Scenario,
    pid: Option<u32>,
    progress: &'a Progress,
    load: Arc<Load>,
    started: Instant,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Closed { concurrency: usize },
    Open { rate: f64 },
    Cold,
}

impl Kind {
    fn of(scenario: &Scenario) -> Vec<Self> {
        match scenario.mode {
            Mode::Closed => {
                let all = scenario.closed.concurrency.iter();
                all.map(|&concurrency| Self::Closed { concurrency })
                    .collect()
            }
            // A trace has a rate of its own.
            Mode::Open if scenario.open.arrivals == Arrivals::Trace => {
                vec![Self::Open { rate: 0.0 }]
            }
            Mode::Open => {
                let all = scenario.open.rates.iter();
                all.map(|&rate| Self::Open { rate }).collect()
            }
            Mode::Cold => vec![Self::Cold],
        }
    }

    fn label(self, scenario: &Scenario) -> String {
        match self {
            Self::Closed { concurrency } => format!("{concurrency} at once"),
            Self::Open { rate } => match (scenario.open.arrivals, &scenario.open.bursts) {
                (Arrivals::Bursts, Some(bursts)) => format!(
                    "{} every {} + {rate}/s",
                    bursts.size,
                    humantime::format_duration(bursts.every)
                ),
                (Arrivals::Trace, _) => "trace".to_owned(),
                (Arrivals::Constant, _) => format!("{rate}/s constant"),
                _ => format!("{rate}/s poisson"),
            },
            Self::Cold => "cold".to_owned(),
        }
    }
}

impl Run<'_> {
    async fn step(&self, kind: Kind) -> Result<(Step, Vec<Interval>)> {
        let scenario = self.scenario;
        let label = kind.label(scenario);
        let names: Vec<String> = self.load.models.iter().map(|m| m.name.clone()).collect();
        let schedule = match kind {
            Kind::Open { rate } => {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                let dice = Dice::new(scenario.seed, 4 << 32);
                Some(Schedule::new(&scenario.open, rate, &names, dice)?)
            }
            _ => None,
        };
        let start = Instant::now();
        let (warmup, duration) = match kind {
            Kind::Cold => (Duration::ZERO, FAR),
            _ => (scenario.warmup, scenario.duration),
        };
        let from = start + warmup;
        let recorder = Recorder::new(names, self.started, from, from + duration);
        let running = Running::new(Arc::clone(&self.load), recorder);
        self.progress.begin(&label, duration);
        let watching = running.watch(self.pid, scenario.window, self.progress);
        let driving = async {
            match (kind, schedule) {
                (Kind::Closed { concurrency }, _) => {
                    closed::drive(&running, concurrency, self.progress).await;
                    Ok(())
                }
                (Kind::Open { .. }, Some(schedule)) => {
                    let bound = scenario.open.max_outstanding;
                    open::drive(&running, schedule, (start, bound), self.progress).await
                }
                (Kind::Open { .. }, None) => Ok(()),
                (Kind::Cold, _) => cold::drive(&running, &scenario.cold, self.progress).await,
            }
        };
        let (process, driven) = tokio::join!(watching, async {
            let driven = driving.await;
            running.finished.notify_one();
            driven
        });
        driven?;
        let process = process?;
        let recorder = running.into_recorder()?;
        let (mut step, intervals) = recorder.finish(Instant::now(), process)?;
        step.label = label;
        match kind {
            Kind::Closed { concurrency } => step.concurrency = Some(concurrency),
            Kind::Open { rate } if rate > 0.0 => step.rate = Some(rate),
            _ => {}
        }
        Ok((step, intervals))
    }
}

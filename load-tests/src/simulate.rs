//! Keep-alive policies side by side on a recorded day, in virtual time: the server's own
//! lifecycle, keep-alive and memory budget, with loads and runs that only take time.

pub(crate) mod trace;
mod world;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use clap::Args;
use dormouse_core::keep_alive::{AdaptivePolicy, KeepAlivePolicy, ParkWindow};
use serde::{Deserialize, Serialize};

use crate::record::{Findings, ReportArgs, Started};
use crate::table::{self, Titled};
use trace::{Arrivals, Call, Trace};
use world::{Machine, Outcome, World};

const MB: u64 = 1_000_000;

/// Replays a trace under each keep-alive policy; nothing is run and no time passes.
#[derive(Args, Debug)]
pub(crate) struct SimulateArgs {
    /// Trace of calls per minute (CSV, also gzipped); the Azure 2019 trace of 500 functions over
    /// 8 hours if absent
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Draws of the calls within their minutes
    #[arg(long, default_value_t = 5)]
    seeds: u64,
    /// Where in its minute a call comes
    #[arg(long, value_enum, default_value_t = Arrivals::Spread)]
    arrivals: Arrivals,
    /// Only the first functions of the trace
    #[arg(long, default_value_t = usize::MAX, hide_default_value = true)]
    functions: usize,
    /// Only the first minutes of the trace
    #[arg(long, default_value_t = usize::MAX, hide_default_value = true)]
    minutes: usize,
    /// Memory for so many warm models; unbounded if absent
    #[arg(long)]
    budget_models: Option<u64>,
    /// Milliseconds that a load takes
    #[arg(long, default_value_t = 150)]
    load_ms: u64,
    /// Milliseconds that a run takes
    #[arg(long, default_value_t = 20)]
    run_ms: u64,
    /// Megabytes that a warm model holds
    #[arg(long, default_value_t = 440)]
    model_mb: u64,
    /// Megabytes that a parked model holds
    #[arg(long, default_value_t = 17)]
    parked_mb: u64,
    #[command(flatten)]
    adaptive: AdaptiveArgs,
    #[command(flatten)]
    report: ReportArgs,
}

/// The bounds of the adaptive policy with parking, in seconds.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Adaptive policy")]
struct AdaptiveArgs {
    /// Least time without use before a model is parked [default: as the server]
    #[arg(long)]
    park_floor: Option<u64>,
    /// Longest time without use before a model is parked [default: as the server]
    #[arg(long)]
    park_ceiling: Option<u64>,
    /// Least time that a session is kept [default: as the server]
    #[arg(long)]
    min_keep: Option<u64>,
    /// How long a session is kept while too little is known [default: as the server]
    #[arg(long)]
    fallback: Option<u64>,
    /// Shortest wait for which a model is closed and loaded ahead of its next call [default: as
    /// the server]
    #[arg(long)]
    prewarm_from: Option<u64>,
}

impl AdaptiveArgs {
    fn policy(self) -> AdaptivePolicy {
        let default = AdaptivePolicy::default();
        let or = |set: Option<u64>, default| set.map_or(default, Duration::from_secs);
        AdaptivePolicy {
            park: default.park.map(|park| ParkWindow {
                floor: or(self.park_floor, park.floor),
                ceiling: or(self.park_ceiling, park.ceiling),
            }),
            min_keep: or(self.min_keep, default.min_keep),
            fallback: or(self.fallback, default.fallback),
            prewarm_from: self
                .prewarm_from
                .map_or(default.prewarm_from, |from| Some(Duration::from_secs(from))),
        }
    }
}

/// A policy with its outcome for each seed.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    policy: String,
    outcomes: Vec<Outcome>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Always true: nothing here was measured on a machine.
    simulated: bool,
    functions: usize,
    minutes: usize,
    calls: usize,
    model_mb: u64,
    parked_mb: u64,
    budget_models: Option<u64>,
    rows: Vec<Row>,
}

pub(crate) fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    let started = Started::now();
    ensure!((1..=1000).contains(&args.seeds), "between 1 and 1000 seeds");
    ensure!(
        args.model_mb >= args.parked_mb && args.model_mb <= 1_000_000,
        "a model holds at most 1000000 MB, and no less warm than parked"
    );
    ensure!(
        args.budget_models
            .is_none_or(|models| (1..=1_000_000).contains(&models)),
        "memory for 1 to 1000000 models"
    );
    let mut trace = match &args.trace {
        Some(path) => Trace::open(path)?,
        None => Trace::bundled()?,
    };
    trace.cut(args.functions, args.minutes);
    let machine = Machine {
        load: Duration::from_millis(args.load_ms),
        run: Duration::from_millis(args.run_ms),
        unpark: Duration::from_millis(5),
        model_bytes: args.model_mb * MB,
        parked_bytes: args.parked_mb * MB,
        limit: args.budget_models.map(|models| models * args.model_mb * MB),
    };
    let report = simulate(&trace, args, machine);
    started.record(report).publish(&args.report)
}

fn simulate(trace: &Trace, args: &SimulateArgs, machine: Machine) -> Report {
    let policies = policies(args.adaptive.policy());
    let mut rows: Vec<Row> = policies
        .iter()
        .map(|&(policy, _)| Row {
            policy: policy.to_owned(),
            outcomes: Vec::new(),
        })
        .collect();
    let mut count = 0;
    for seed in 0..args.seeds {
        let calls = trace.calls(args.arrivals, seed);
        count = calls.len();
        for (row, &(_, policy)) in rows.iter_mut().zip(&policies) {
            // Where a policy does not park, pressure does not either: it shows what parking is
            // worth.
            let can_park = !matches!(
                policy,
                KeepAlivePolicy::Off
                    | KeepAlivePolicy::Fixed {
                        park_after: None,
                        ..
                    }
                    | KeepAlivePolicy::Adaptive(AdaptivePolicy { park: None, .. })
            );
            let parked_bytes = match can_park {
                true => machine.parked_bytes,
                false => machine.model_bytes,
            };
            let machine = Machine {
                parked_bytes,
                ..machine
            };
            row.outcomes.push(replay(trace, &calls, policy, machine));
        }
    }
    Report {
        simulated: true,
        functions: trace.functions.len(),
        minutes: trace.minutes,
        calls: count,
        model_mb: args.model_mb,
        parked_mb: args.parked_mb,
        budget_models: args.budget_models,
        rows,
    }
}

fn replay(trace: &Trace, calls: &[Call], policy: KeepAlivePolicy, machine: Machine) -> Outcome {
    World::new(trace.functions.len(), policy, machine).replay(calls, trace.end())
}

fn policies(adaptive: AdaptivePolicy) -> Vec<(&'static str, KeepAlivePolicy)> {
    let fixed = |minutes: u64| KeepAlivePolicy::Fixed {
        park_after: None,
        close_after: Some(Duration::from_secs(60 * minutes)),
    };
    vec![
        ("off", KeepAlivePolicy::Off),
        ("fixed 1 min", fixed(1)),
        ("fixed 5 min", fixed(5)),
        ("fixed 10 min", fixed(10)),
        ("fixed 20 min", fixed(20)),
        (
            "fixed 20 min, parked after 10 s",
            KeepAlivePolicy::Fixed {
                park_after: Some(Duration::from_secs(10)),
                close_after: Some(Duration::from_secs(20 * 60)),
            },
        ),
        (
            "adaptive, without parking",
            KeepAlivePolicy::Adaptive(AdaptivePolicy::without_parking()),
        ),
        ("adaptive", KeepAlivePolicy::Adaptive(adaptive)),
    ]
}

impl Findings for Report {
    fn about(&self) -> String {
        let seeds = self.rows.first().map_or(0, |row| row.outcomes.len());
        format!(
            "Simulated: {} functions, {} minutes, {} calls; a model holds {} MB warm and {} MB \
             parked{}. Median (smallest–largest) of {seeds} draws of the calls within their minutes.",
            self.functions,
            self.minutes,
            self.calls,
            self.model_mb,
            self.parked_mb,
            match self.budget_models {
                Some(models) => format!("; memory for {models} warm models"),
                None => String::new(),
            }
        )
    }

    fn tables(&self) -> Vec<Titled> {
        let mut header = vec![
            "policy",
            "cold starts",
            "cold, % of calls",
            "parked wakes",
            "warm idle, model·h",
            "parked, model·h",
            "idle memory, GB·h",
            "pre-warms",
            "wasted",
        ];
        if self.budget_models.is_some() {
            header.extend(["evicted: parked", "closed", "waits for memory", "peak, GB"]);
        }
        let rows = self.rows.iter().map(|row| cells(self, row));
        vec![Titled::new("", &header, rows.collect())]
    }
}

fn cells(report: &Report, row: &Row) -> Vec<String> {
    let column = |places: usize, figure: &dyn Fn(&Outcome) -> f64| {
        let mut values: Vec<f64> = row.outcomes.iter().map(figure).collect();
        let middle = table::median(&mut values);
        match (values.first(), values.last()) {
            (Some(first), Some(last)) if first < last => {
                format!("{middle:.places$} ({first:.places$}–{last:.places$})")
            }
            _ => format!("{middle:.places$}"),
        }
    };
    let gigabytes = |outcome: &Outcome| {
        let held = outcome.idle_model_hours * report.model_mb as f64
            + outcome.parked_model_hours * report.parked_mb as f64;
        held / 1000.0
    };
    let mut cells = vec![
        row.policy.clone(),
        column(0, &|it| it.cold_starts as f64),
        column(3, &|it| {
            100.0 * it.cold_starts as f64 / it.calls.max(1) as f64
        }),
        column(0, &|it| it.parked_wakes as f64),
        column(1, &|it| it.idle_model_hours),
        column(1, &|it| it.parked_model_hours),
        column(1, &gigabytes),
        column(0, &|it| it.prewarms as f64),
        column(0, &|it| it.prewarms_wasted as f64),
    ];
    if report.budget_models.is_some() {
        cells.extend([
            column(0, &|it| it.evicted_parked as f64),
            column(0, &|it| it.evicted_closed as f64),
            column(0, &|it| it.memory_waits as f64),
            column(1, &|it| it.peak_bytes as f64 / 1e9),
        ]);
    }
    cells
}

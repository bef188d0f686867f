//! The figures of a comparison as tables, for a terminal and for the results page.

use std::collections::BTreeSet;
use std::io::Write;

use anyhow::Result;

use super::figures::{Comparison, LoadCell, MemoryCell};
use super::plan::{Batching, Table};
use crate::samples::Samples;
use crate::table::{Titled, maybe};

/// Answers of which a p99 is more than the slowest.
const ENOUGH: f64 = 100.0;

/// Prints all tables.
pub(crate) fn print(found: &Comparison) -> Result<()> {
    for titled in tables(found) {
        titled.print()?;
    }
    let mut out = std::io::stdout().lock();
    for absent in &found.absent {
        writeln!(
            out,
            "\n{} did not take part ({:?}): {}",
            absent.server, absent.part, absent.reason
        )?;
    }
    Ok(())
}

/// Everything that was found: ratios first, then the figures they come from.
pub(crate) fn tables(found: &Comparison) -> Vec<Titled> {
    let mut tables = Vec::new();
    for &batching in &found.plan.batching {
        tables.extend(ratios(found, batching, &THROUGHPUT));
        tables.extend(ratios(found, batching, &CPU));
    }
    tables.extend(behind(found));
    for &batching in &found.plan.batching {
        for workload in &found.plan.workloads {
            tables.extend(loads(found, batching, &workload.name));
        }
    }
    tables.extend(starts(found));
    tables.extend(memory(found));
    tables
}

/// A measure whose ratios make a table of their own.
struct Measure {
    title: &'static str,
    /// Above 1 where the baseline does better.
    ratio: fn(&LoadCell, &LoadCell) -> Samples,
}

const THROUGHPUT: Measure = Measure {
    title: "How many times the throughput of each server the baseline has",
    ratio: |baseline, other| baseline.throughput.ratios(&other.throughput),
};

const CPU: Measure = Measure {
    title: "How many times the processor time per request of the baseline each server takes",
    ratio: |baseline, other| other.cpu_micros.ratios(&baseline.cpu_micros),
};

/// One row per workload and concurrency, one column per server.
fn ratios(found: &Comparison, batching: Batching, measure: &Measure) -> Option<Titled> {
    let servers: Vec<&str> = found
        .plan
        .servers_of(Table::Load)
        .map(|server| &*server.name)
        .filter(|server| found.plan.baseline(server, Table::Load) != Some(*server))
        .filter(|server| {
            let mut cells = found.load.iter();
            cells.any(|cell| cell.server == *server && cell.batching == batching)
        })
        .collect();
    if servers.is_empty() {
        return None;
    }
    let baselines: BTreeSet<&str> = servers
        .iter()
        .filter_map(|server| found.plan.baseline(server, Table::Load))
        .collect();
    let mut header = vec!["workload".to_owned(), "at once".to_owned()];
    header.extend(servers.iter().map(|server| (*server).to_owned()));
    let mut rows = Vec::new();
    for workload in &found.plan.workloads {
        for &concurrency in &found.plan.concurrency {
            let mut row = vec![workload.name.clone(), concurrency.to_string()];
            for server in &servers {
                let cell = found.load.iter().find(|cell| {
                    cell.server == *server
                        && cell.workload == workload.name
                        && cell.batching == batching
                        && cell.concurrency == concurrency
                });
                let ratio = cell.and_then(|cell| {
                    let baseline = found.baseline_of(cell)?;
                    Some((measure.ratio)(baseline, cell))
                });
                row.push(ratio.unwrap_or_default().cell());
            }
            rows.push(row);
        }
    }
    let baselines: Vec<&str> = baselines.into_iter().collect();
    Some(Titled {
        title: format!(
            "{}; batching {}; baseline of the same protocol: {}",
            measure.title,
            word(batching),
            baselines.join(", ")
        ),
        header,
        rows,
    })
}

/// A measure of one server under one load, and whether more of it is better.
struct Measured {
    name: &'static str,
    more_is_better: bool,
    of: fn(&LoadCell) -> &Samples,
}

const MEASURED: [Measured; 4] = [
    Measured {
        name: "requests/s",
        more_is_better: true,
        of: |cell| &cell.throughput,
    },
    Measured {
        name: "p50",
        more_is_better: false,
        of: |cell| &cell.p50,
    },
    Measured {
        name: "p99",
        more_is_better: false,
        of: |cell| &cell.p99,
    },
    Measured {
        name: "CPU/request",
        more_is_better: false,
        of: |cell| &cell.cpu_micros,
    },
];

/// Every cell in which the baseline does worse than another server.
fn behind(found: &Comparison) -> Option<Titled> {
    let compared = found
        .load
        .iter()
        .any(|cell| found.baseline_of(cell).is_some());
    let mut rows = Vec::new();
    for cell in &found.load {
        let Some(baseline) = found.baseline_of(cell) else {
            continue;
        };
        for measured in &MEASURED {
            let ratios = (measured.of)(baseline).ratios((measured.of)(cell));
            let is_behind = ratios
                .median()
                .is_some_and(|ratio| match measured.more_is_better {
                    true => ratio < 1.0,
                    false => ratio > 1.0,
                });
            if is_behind {
                rows.push(vec![
                    cell.workload.clone(),
                    word(cell.batching).to_owned(),
                    cell.concurrency.to_string(),
                    cell.server.clone(),
                    measured.name.to_owned(),
                    ratios.cell(),
                ]);
            }
        }
    }
    if rows.is_empty() {
        rows.push(
            ["nowhere", "–", "–", "–", "–", "–"]
                .map(str::to_owned)
                .to_vec(),
        );
    }
    let header = [
        "workload",
        "batching",
        "at once",
        "server",
        "measure",
        "baseline/server",
    ];
    compared.then(|| Titled::new("Where the baseline is behind", &header, rows))
}

/// Percentiles of few answers say how few.
fn p99(cell: &LoadCell) -> String {
    match cell.answers.min() {
        Some(count) if count < ENOUGH => format!("{} n={count:.0}", cell.p99.cell()),
        _ => cell.p99.cell(),
    }
}

fn loads(found: &Comparison, batching: Batching, workload: &str) -> Option<Titled> {
    let mut rows = Vec::new();
    for &concurrency in &found.plan.concurrency {
        for server in found.plan.servers_of(Table::Load) {
            let cell = found.load.iter().find(|cell| {
                cell.server == server.name
                    && cell.workload == workload
                    && cell.batching == batching
                    && cell.concurrency == concurrency
            });
            let Some(cell) = cell else { continue };
            let baseline = found.baseline_of(cell);
            let ratio = |measured: &Measured| {
                let ratios = baseline.map(|of| (measured.of)(of).ratios((measured.of)(cell)));
                maybe(ratios.and_then(|ratios| ratios.median()))
            };
            let [throughput, p50, p99_ratio, cpu] = MEASURED.each_ref().map(ratio);
            rows.push(vec![
                concurrency.to_string(),
                cell.server.clone(),
                cell.throughput.cell(),
                throughput,
                cell.p50.cell(),
                p50,
                p99(cell),
                p99_ratio,
                cell.cpu_micros.cell(),
                cpu,
                cell.resident_mib.cell(),
                match cell.failed {
                    0 => "–".to_owned(),
                    failed => format!("{failed} ({})", cell.failure),
                },
            ]);
        }
    }
    (!rows.is_empty()).then(|| Titled {
        title: format!(
            "{workload}, batching {}; ÷ is the baseline's value divided by this server's, the \
             median of the rounds; n is the smallest number of answers in a round where it is below \
             {ENOUGH}",
            word(batching)
        ),
        header: [
            "at once",
            "server",
            "requests/s",
            "÷",
            "p50 ms",
            "÷",
            "p99 ms",
            "÷",
            "CPU µs/request",
            "÷",
            "RSS MiB",
            "failed",
        ]
        .map(str::to_owned)
        .to_vec(),
        rows,
    })
}

fn starts(found: &Comparison) -> Option<Titled> {
    let rows: Vec<_> = found
        .starts
        .iter()
        .map(|cell| {
            vec![
                cell.model.clone(),
                cell.server.clone(),
                cell.from_start.cell(),
                cell.from_load.cell(),
            ]
        })
        .collect();
    (!rows.is_empty()).then(|| Titled {
        title: "First answers; ms".to_owned(),
        header: ["model", "server", "from process start", "from a load"]
            .map(str::to_owned)
            .to_vec(),
        rows,
    })
}

fn memory(found: &Comparison) -> Option<Titled> {
    let mut counts: Vec<usize> = found.memory.iter().map(|cell| cell.copies).collect();
    counts.sort_unstable();
    counts.dedup();
    if counts.is_empty() {
        return None;
    }
    let mut servers: Vec<&str> = Vec::new();
    for cell in &found.memory {
        if !servers.contains(&&*cell.server) {
            servers.push(&cell.server);
        }
    }
    let mut header = vec!["server".to_owned()];
    for count in &counts {
        header.push(match count {
            0 => "nothing loaded".to_owned(),
            1 => "1 copy".to_owned(),
            count => format!("{count} copies"),
        });
    }
    header.push("processes".to_owned());
    let cell_of = |server: &str, count: usize| -> Option<&MemoryCell> {
        let mut cells = found.memory.iter();
        cells.find(|cell| cell.server == server && cell.copies == count)
    };
    let rows = servers.iter().map(|server| {
        let mut row = vec![(*server).to_owned()];
        for &count in &counts {
            row.push(cell_of(server, count).map_or_else(
                || "–".to_owned(),
                |cell| {
                    format!(
                        "{} / {}",
                        cell.resident_mib.cell(),
                        cell.proportional_mib.cell()
                    )
                },
            ));
        }
        let most = found.memory.iter().filter(|cell| cell.server == *server);
        let most = most.map(|cell| cell.processes).max().unwrap_or(0);
        row.push(most.to_string());
        row
    });
    let model = found.memory.iter().find(|cell| !cell.model.is_empty());
    let model = model.map_or("", |cell| &cell.model);
    Some(Titled {
        title: format!(
            "Memory with copies of {model} that have answered; MiB, RSS of all processes / pages \
             shared among processes counted by their share"
        ),
        header,
        rows: rows.collect(),
    })
}

fn word(batching: Batching) -> &'static str {
    match batching {
        Batching::Off => "off",
        Batching::On => "on",
    }
}

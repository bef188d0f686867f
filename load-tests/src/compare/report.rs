//! The figures of a comparison as tables, for a terminal and for the results page.

use std::collections::BTreeSet;
use std::io::Write;

use anyhow::Result;

use super::figures::{Comparison, LoadCell, MemoryCell};
use super::plan::{Batching, Table};
use crate::samples::Samples;
use crate::table;

/// A table with its title.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Titled {
    pub(crate) title: String,
    pub(crate) header: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
}

/// Prints all tables.
pub(crate) fn print(found: &Comparison) -> Result<()> {
    for titled in tables(found) {
        writeln!(std::io::stdout(), "\n{}", titled.title)?;
        let header: Vec<&str> = titled.header.iter().map(String::as_str).collect();
        table::print(&header, &titled.rows)?;
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
                row.push(spread(&ratio.unwrap_or_default()));
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
            rows.push(vec![
                concurrency.to_string(),
                cell.server.clone(),
                spread(&cell.throughput),
                spread(&cell.p50),
                spread(&cell.p99),
                spread(&cell.cpu_micros),
                spread(&cell.resident_mib),
                match cell.failed {
                    0 => "–".to_owned(),
                    failed => format!("{failed} ({})", cell.failure),
                },
            ]);
        }
    }
    (!rows.is_empty()).then(|| Titled {
        title: format!("{workload}, batching {}", word(batching)),
        header: [
            "at once",
            "server",
            "requests/s",
            "p50 ms",
            "p99 ms",
            "CPU µs/request",
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
                spread(&cell.from_start),
                spread(&cell.from_load),
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
                        spread(&cell.resident_mib),
                        spread(&cell.proportional_mib)
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

/// `12.3 (11.9–14.0)` with three digits or so; a single value alone, a dash without values.
pub(crate) fn spread(samples: &Samples) -> String {
    match (samples.median(), samples.min(), samples.max()) {
        (Some(median), Some(_), Some(_)) if samples.0.len() == 1 => number(median),
        (Some(median), Some(min), Some(max)) => {
            format!("{} ({}–{})", number(median), number(min), number(max))
        }
        _ => "–".to_owned(),
    }
}

/// A number with three digits or so.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_or_so() {
        assert_eq!(number(1234.4), "1234");
        assert_eq!(number(12.34), "12.3");
        assert_eq!(number(0.126), "0.13");
        assert_eq!(spread(&Samples(vec![2.0, 1.0, 30.0])), "2.00 (1.00–30.0)");
        assert_eq!(spread(&Samples(vec![2.0])), "2.00");
        assert_eq!(spread(&Samples::default()), "–");
    }
}

//! Counts the instructions of the hot paths and compares them with those on record:
//! `cargo counts`, which is an alias in `.cargo/config.toml`.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::Parser;
use dormouse_benches::counts::{self, Compared, Counts, Record, Toolchain};
use dormouse_benches::{hot_paths, valgrind};

/// Counts the instructions of the hot paths under valgrind and compares them with those on record.
#[derive(Debug, Parser)]
#[command(name = "cargo counts")]
struct Cli {
    /// Write the counts to the record instead of comparing them with it
    #[arg(long)]
    record: bool,
    /// Only workloads whose names contain this; nothing is recorded
    #[arg(long, conflicts_with = "record")]
    only: Option<String>,
    /// The record
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/counts.json"))]
    file: PathBuf,
    /// Run one workload here and count nothing: what valgrind is given
    #[arg(long, hide = true)]
    workload: Option<String>,
    /// What `cargo bench` gives to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    if let Some(name) = &cli.workload {
        let found = hot_paths::all().find(|workload| workload.name == name);
        valgrind::run(found.with_context(|| format!("there is no workload '{name}'"))?);
        return Ok(());
    }
    if cli.bench {
        writeln!(
            std::io::stdout(),
            "instructions are counted by: cargo counts"
        )?;
        return Ok(());
    }
    ensure!(
        !cfg!(debug_assertions),
        "a debug build takes other instructions: count them with `cargo counts`"
    );
    let toolchain = Toolchain::current()?;
    let mut instructions = Counts::new();
    for workload in hot_paths::all().filter(|workload| wanted(workload.name, &cli)) {
        instructions.insert(workload.name.to_owned(), valgrind::count(workload)?);
    }
    if cli.record {
        let record = Record {
            toolchain,
            instructions,
        };
        return record.write(&cli.file);
    }
    compare(&cli, &cli.file, instructions, toolchain)
}

fn wanted(name: &str, cli: &Cli) -> bool {
    cli.only.as_ref().is_none_or(|part| name.contains(part))
}

fn compare(cli: &Cli, file: &Path, now: Counts, toolchain: Toolchain) -> anyhow::Result<()> {
    let mut record = Record::read(file)?;
    record.instructions.retain(|name, _| wanted(name, cli));
    let compared = counts::compare(&now, &record.instructions);
    let mut out = std::io::stdout().lock();
    write_table(&mut out, &compared)?;
    if let Some(words) = counts::unjudged(&compared, &toolchain, &record.toolchain) {
        writeln!(out, "\n{words}")?;
    }
    out.flush()?;
    counts::judge(&compared, &toolchain, &record.toolchain)
}

fn write_table(out: &mut impl Write, compared: &[Compared]) -> std::io::Result<()> {
    let width = compared.iter().map(|line| line.name.len()).max();
    let width = width.unwrap_or_default();
    let [now, recorded, difference] = ["instructions", "recorded", "difference"];
    writeln!(
        out,
        "{:width$} {now:>12} {recorded:>12} {difference:>12}",
        ""
    )?;
    for line in compared {
        let number =
            |count: Option<u64>| count.map_or_else(|| "-".to_owned(), |count| count.to_string());
        let difference = match line.difference() {
            Some(percent) => format!("{percent:+.1} %"),
            None => "-".to_owned(),
        };
        writeln!(
            out,
            "{:width$} {:>12} {:>12} {difference:>12}{}",
            line.name,
            number(line.now),
            number(line.recorded),
            if line.is_within() { "" } else { "  !" },
        )?;
    }
    Ok(())
}

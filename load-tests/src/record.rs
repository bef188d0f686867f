//! What a measurement found, with where it comes from: the same for every command, on standard
//! output, as JSON and on the results page.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::bars::{self, Bar};
use crate::drive::outcome::{Machine, Tool};
use crate::drive::report;
use crate::table::Titled;

/// The version of [`Record`].
pub(crate) const SCHEMA: u32 = 1;
/// Instead of a file: standard output.
const STANDARD_OUTPUT: &str = "-";

/// What every measurement does with its figures.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Report")]
pub(crate) struct ReportArgs {
    /// Write bars and figures as JSON to a file beside the tables; without a file, print JSON
    /// instead of tables
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = STANDARD_OUTPUT)]
    json: Option<PathBuf>,
    /// Fail for every bar that was missed, also where the machine's speed has a part in it
    #[arg(long)]
    strict: bool,
}

/// Figures that people can read.
pub(crate) trait Findings: std::fmt::Debug {
    /// In a sentence or two: what was done.
    fn about(&self) -> String;
    fn tables(&self) -> Vec<Titled>;
    /// What is to be said besides.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }
    /// What the figures alone can be held against.
    fn bars(&self) -> Vec<Bar> {
        Vec::new()
    }
}

/// Figures with where they come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record<T> {
    pub(crate) schema: u32,
    pub(crate) tool: Tool,
    pub(crate) machine: Machine,
    /// Seconds since 1970.
    #[serde(default)]
    pub(crate) started_unix: u64,
    #[serde(default)]
    pub(crate) seconds: f64,
    #[serde(default)]
    pub(crate) bars: Vec<Bar>,
    pub(crate) figures: T,
}

/// When a measurement began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Started {
    unix: u64,
    at: Instant,
}

impl Started {
    pub(crate) fn now() -> Self {
        Self {
            unix: SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(0, |time| time.as_secs()),
            at: Instant::now(),
        }
    }

    /// The record of a measurement that has just ended.
    pub(crate) fn record<T: Findings>(self, figures: T) -> Record<T> {
        Record {
            schema: SCHEMA,
            tool: Tool::this(),
            machine: Machine::here(),
            started_unix: self.unix,
            seconds: self.at.elapsed().as_secs_f64(),
            bars: figures.bars(),
            figures,
        }
    }
}

impl<T: Findings + Serialize> Record<T> {
    /// The same with further bars.
    pub(crate) fn with_bars(mut self, bars: Vec<Bar>) -> Self {
        self.bars.extend(bars);
        self
    }

    /// Prints it, writes it, and fails when a bar was missed that must not be.
    pub(crate) fn publish(&self, args: &ReportArgs) -> Result<()> {
        match args.json.as_deref() {
            Some(path) if path == Path::new(STANDARD_OUTPUT) => {
                let mut out = std::io::stdout().lock();
                serde_json::to_writer_pretty(&mut out, self)?;
                writeln!(out)?;
            }
            file => {
                self.print()?;
                if let Some(path) = file {
                    self.write(path)
                        .with_context(|| format!("cannot write {}", path.display()))?;
                }
            }
        }
        let missed = self.bars.iter().filter(|bar| bar.fails(args.strict));
        match missed.count() {
            0 => Ok(()),
            1 => bail!("a bar was missed"),
            missed => bail!("{missed} bars were missed"),
        }
    }

    fn print(&self) -> Result<()> {
        writeln!(std::io::stdout().lock(), "{}", self.figures.about())?;
        for table in self.figures.tables().iter().chain(&bars::table(&self.bars)) {
            table.print()?;
        }
        let mut out = std::io::stdout().lock();
        for note in self.figures.notes() {
            writeln!(out, "{note}")?;
        }
        Ok(())
    }

    fn write(&self, path: &Path) -> Result<()> {
        let mut file = report::create(path)?;
        serde_json::to_writer_pretty(&mut file, self)?;
        writeln!(file)?;
        Ok(file.flush()?)
    }
}

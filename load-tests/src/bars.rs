//! What was promised, and whether it was kept.

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::drive::outcome::{Machine, Tool};
use crate::drive::report;
use crate::table;

/// One promise.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Bar {
    pub(crate) name: String,
    pub(crate) wanted: String,
    pub(crate) found: String,
    /// None when the run was too short to tell.
    pub(crate) met: Option<bool>,
}

/// What a measurement found, for `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct Verdict<T> {
    pub(crate) schema: u32,
    pub(crate) tool: Tool,
    pub(crate) machine: Machine,
    pub(crate) bars: Vec<Bar>,
    /// What the bars were read from.
    pub(crate) figures: T,
}

impl Bar {
    pub(crate) fn new(
        name: impl Into<String>,
        wanted: impl Into<String>,
        found: impl Into<String>,
        met: bool,
    ) -> Self {
        Self {
            name: name.into(),
            wanted: wanted.into(),
            found: found.into(),
            met: Some(met),
        }
    }

    /// A number that may not be exceeded.
    pub(crate) fn at_most(name: impl Into<String>, most: f64, found: f64, unit: &str) -> Self {
        Self::new(
            name,
            format!("at most {most:.1}{unit}"),
            format!("{found:.1}{unit}"),
            found <= most,
        )
    }

    /// A count that must be the same on both sides.
    pub(crate) fn equal(name: impl Into<String>, wanted: u64, found: u64) -> Self {
        Self::new(name, wanted.to_string(), found.to_string(), wanted == found)
    }

    /// The same, but the run was too short to tell.
    pub(crate) fn unjudged(self) -> Self {
        Self { met: None, ..self }
    }
}

impl<T: Serialize> Verdict<T> {
    pub(crate) fn new(bars: Vec<Bar>, figures: T) -> Self {
        Self {
            schema: 1,
            tool: Tool::this(),
            machine: Machine::here(),
            bars,
            figures,
        }
    }

    /// Prints the bars, writes the file, and fails when a bar was missed.
    pub(crate) fn publish(&self, json: Option<&Path>) -> Result<()> {
        let word = |met| match met {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "not judged",
        };
        let rows: Vec<Vec<String>> = self
            .bars
            .iter()
            .map(|bar| {
                let word = word(bar.met).to_owned();
                vec![
                    bar.name.clone(),
                    bar.wanted.clone(),
                    bar.found.clone(),
                    word,
                ]
            })
            .collect();
        table::print(&["bar", "wanted", "found", ""], &rows)?;
        if let Some(path) = json {
            let file = report::create(path)?;
            serde_json::to_writer_pretty(file, self)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        let missed = self.bars.iter().filter(|bar| bar.met == Some(false));
        match missed.count() {
            0 => Ok(()),
            missed => bail!("{missed} bars were missed"),
        }
    }
}

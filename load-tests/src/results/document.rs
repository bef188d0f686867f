//! Files that measurements wrote.

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::compare::figures::{self, Comparison};
use crate::drive::outcome::{self, Machine, Outcome, Tool};

/// The version of [`Record`].
pub(crate) const SCHEMA: u32 = 1;

/// The output of a command that tells nothing of where it was run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    pub(crate) schema: u32,
    pub(crate) tool: Tool,
    pub(crate) machine: Machine,
    pub(crate) started_unix: u64,
    pub(crate) seconds: f64,
    pub(crate) figures: Value,
}

/// A file's content.
#[derive(Clone, Debug)]
pub(crate) enum Document {
    Comparison(Box<Comparison>),
    Run(Box<Outcome>),
    Record(Box<Record>),
}

impl Document {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text)?;
        let has = |key: &str| value.get(key).is_some();
        let schema = value.get("schema").and_then(Value::as_u64);
        let schema = schema.context("it has no schema: write it with `results --record`")?;
        let (known, document) = if has("plan") {
            let comparison = serde_json::from_value(value)?;
            (figures::SCHEMA, Self::Comparison(Box::new(comparison)))
        } else if has("scenario") {
            let run = serde_json::from_value(value)?;
            (outcome::SCHEMA, Self::Run(Box::new(run)))
        } else if has("figures") {
            let record = serde_json::from_value(value)?;
            (SCHEMA, Self::Record(Box::new(record)))
        } else {
            bail!("it is neither a comparison, a run nor a record");
        };
        ensure!(
            schema == u64::from(known),
            "its schema is {schema}, this program knows {known}"
        );
        Ok(document)
    }

    pub(crate) fn tool(&self) -> &Tool {
        match self {
            Self::Comparison(one) => &one.tool,
            Self::Run(one) => &one.tool,
            Self::Record(one) => &one.tool,
        }
    }

    pub(crate) fn machine(&self) -> &Machine {
        match self {
            Self::Comparison(one) => &one.machine,
            Self::Run(one) => &one.machine,
            Self::Record(one) => &one.machine,
        }
    }

    pub(crate) fn started_unix(&self) -> u64 {
        match self {
            Self::Comparison(one) => one.started_unix,
            Self::Run(one) => one.started_unix,
            Self::Record(one) => one.started_unix,
        }
    }

    /// Whether its figures come from virtual time.
    pub(crate) fn is_simulated(&self) -> bool {
        let words = &self.tool().command_line;
        words.get(1).is_some_and(|word| word == "simulate")
    }
}

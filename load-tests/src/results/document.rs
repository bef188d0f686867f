//! Files that measurements wrote.

use anyhow::{Context, Result, bail, ensure};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::bars::Bar;
use crate::compare::figures::{self, Comparison};
use crate::density::DensityFigures;
use crate::drive::outcome::{self, Machine, Outcome, Tool};
use crate::give_back::GiveBackFigures;
use crate::hostile;
use crate::isolation::IsolationFigures;
use crate::many_models::ManyModelsFigures;
use crate::overhead::OverheadFigures;
use crate::overload::OverloadFigures;
use crate::record::{self, Findings, Record};
use crate::simulate;
use crate::soak::SoakFigures;
use crate::storm::StormFigures;
use crate::trace::TraceFigures;
use crate::undisturbed::UndisturbedFigures;
use crate::wake::WakeFigures;

/// A file's content.
#[derive(Debug)]
pub(crate) enum Document {
    Comparison(Box<Comparison>),
    Run(Box<Outcome>),
    Record(Box<Record<Box<dyn Findings>>>),
}

impl Document {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text)?;
        let has = |key: &str| value.get(key).is_some();
        let schema = value.get("schema").and_then(Value::as_u64);
        let schema = schema.context("it has no schema: no measurement wrote it with --json")?;
        let (known, document) = if has("plan") {
            let comparison = serde_json::from_value(value)?;
            (figures::SCHEMA, Self::Comparison(Box::new(comparison)))
        } else if has("scenario") {
            let run = serde_json::from_value(value)?;
            (outcome::SCHEMA, Self::Run(Box::new(run)))
        } else if has("figures") {
            let record: Record<Value> = serde_json::from_value(value)?;
            (record::SCHEMA, Self::Record(Box::new(typed(record)?)))
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

    pub(crate) fn bars(&self) -> &[Bar] {
        match self {
            Self::Record(one) => &one.bars,
            Self::Comparison(_) | Self::Run(_) => &[],
        }
    }

    /// Whether its figures come from virtual time.
    pub(crate) fn is_simulated(&self) -> bool {
        command(self.tool()) == "simulate"
    }
}

/// The word after the program's name.
fn command(tool: &Tool) -> &str {
    tool.command_line.get(1).map_or("", String::as_str)
}

/// Reads figures as what their command writes.
fn typed(record: Record<Value>) -> Result<Record<Box<dyn Findings>>> {
    let figures = record.figures;
    let command = command(&record.tool);
    let figures = match command {
        "density" => read::<DensityFigures>(figures),
        "give-back" => read::<GiveBackFigures>(figures),
        "hostile" => read::<Vec<hostile::Shown>>(figures),
        "isolation" => read::<IsolationFigures>(figures),
        "many-models" => read::<ManyModelsFigures>(figures),
        "overhead" => read::<OverheadFigures>(figures),
        "overload" => read::<OverloadFigures>(figures),
        "simulate" => read::<simulate::Report>(figures),
        "soak" => read::<SoakFigures>(figures),
        "storm" => read::<StormFigures>(figures),
        "trace" => read::<TraceFigures>(figures),
        "undisturbed" => read::<UndisturbedFigures>(figures),
        "wake" => read::<Vec<WakeFigures>>(figures),
        unknown => bail!("'{unknown}' is no command that measures"),
    }
    .with_context(|| format!("these are not the figures of `{command}`"))?;
    Ok(Record {
        schema: record.schema,
        machine: record.machine,
        started_unix: record.started_unix,
        seconds: record.seconds,
        // Older files were not judged when they were written.
        bars: match record.bars.is_empty() {
            true => figures.bars(),
            false => record.bars,
        },
        tool: record.tool,
        figures,
    })
}

fn read<T: Findings + DeserializeOwned + 'static>(figures: Value) -> Result<Box<dyn Findings>> {
    Ok(Box::new(serde_json::from_value::<T>(figures)?))
}

//! What is asked of a server, how often and for how long, as TOML files say it.

pub(crate) mod dimension;
pub(crate) mod time;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

pub(crate) use self::dimension::Dimension;

/// Bounds that keep a run finite and its memory small.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
const MOST_CONCURRENT: usize = 10_000;
const MOST_RATE: f64 = 1e6;
const MOST_STEPS: usize = 64;
const MOST_MODELS: usize = 10_000;
const MOST_WINDOWS: u128 = 100_000;

/// A load: models, arrivals, duration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Scenario {
    pub(crate) name: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) description: String,
    pub(crate) mode: Mode,
    /// Of each step, after its warm-up.
    #[serde(default = "Scenario::usual_duration", with = "time")]
    pub(crate) duration: Duration,
    /// Load that is not measured, before each step.
    #[serde(default = "Scenario::usual_warmup", with = "time")]
    pub(crate) warmup: Duration,
    /// What one line of the course of time covers.
    #[serde(default = "Scenario::usual_window", with = "time")]
    pub(crate) window: Duration,
    /// An answer that takes longer counts as an error, whatever its deadline.
    #[serde(default = "Scenario::usual_timeout", with = "time")]
    pub(crate) timeout: Duration,
    /// The same seed gives the same inputs, mix and arrivals.
    #[serde(default = "Scenario::usual_seed")]
    pub(crate) seed: u64,
    /// gRPC connections that requests are spread over. Over HTTP each request under way has one.
    #[serde(default = "Scenario::usual_connections")]
    pub(crate) connections: usize,
    #[serde(default)]
    pub(crate) closed: Closed,
    #[serde(default)]
    pub(crate) open: Open,
    #[serde(default)]
    pub(crate) cold: Cold,
    pub(crate) models: Vec<ModelLoad>,
}

/// Who decides when the next request is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// The last answer: a fixed number of requests is always under way
    Closed,
    /// The clock: requests come whether or not others were answered
    Open,
    /// Each request finds its model asleep or unloaded
    Cold,
}

/// The closed loop.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Closed {
    /// Requests under way at once, one step each.
    pub(crate) concurrency: Vec<usize>,
}

/// The open loop.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Open {
    pub(crate) arrivals: Arrivals,
    /// Requests per second, one step each; for bursts those that come between them.
    pub(crate) rates: Vec<f64>,
    /// Requests that may wait for an answer; those due beyond it are counted as not sent.
    pub(crate) max_outstanding: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bursts: Option<Bursts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) trace: Option<TraceSource>,
}

/// When requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Arrivals {
    /// Independently of each other
    Poisson,
    /// One every so often
    Constant,
    /// Many at once, every so often
    Bursts,
    /// As a file says
    Trace,
}

/// Many requests at once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Bursts {
    pub(crate) size: usize,
    #[serde(with = "time")]
    pub(crate) every: Duration,
}

/// Recorded arrivals.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TraceSource {
    /// Lines `SECONDS` or `SECONDS,MODEL`, or counts per function and minute as Azure publishes
    /// them; without a file, the hours of Azure's that come with the program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) file: Option<PathBuf>,
    /// How many times faster than it happened.
    #[serde(default = "TraceSource::usual_speed")]
    pub(crate) speed: f64,
    /// Where in the trace to start.
    #[serde(default, with = "time")]
    pub(crate) start: Duration,
    /// Calls per function and minute at most, of counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) at_most: Option<u32>,
}

/// How a model is made cold before each request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Cold {
    pub(crate) how: MadeCold,
    /// Cold starts of each model.
    pub(crate) repetitions: usize,
    /// How long a model may take to become cold.
    #[serde(with = "time")]
    pub(crate) patience: Duration,
}

/// What makes a model cold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum MadeCold {
    /// The repository's API. Where an unloaded model cannot be called, loading it is timed too
    Unload,
    /// Time: it is left alone until the index calls it asleep or not ready
    Wait,
}

/// One model of the mix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelLoad {
    pub(crate) name: String,
    /// Empty for the newest.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) version: String,
    /// Its share of the requests, relative to the others'.
    #[serde(default = "ModelLoad::usual_weight")]
    pub(crate) weight: f64,
    /// What its requests tell the server.
    #[serde(
        default,
        with = "time::optional",
        skip_serializing_if = "Option::is_none"
    )]
    pub(crate) deadline: Option<Duration>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cancel: Option<Cancel>,
    /// Sizes that are drawn once per request, by the name that shapes call them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) dims: BTreeMap<String, Dimension>,
    /// Dimensions of inputs by name, for those that the model leaves open.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) shapes: BTreeMap<String, Vec<Dimension>>,
    /// From and to, by input: of numbers their values, of BYTES their lengths.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) values: BTreeMap<String, [f64; 2]>,
    /// Different random requests that are drawn ahead of time.
    #[serde(default = "ModelLoad::usual_variants")]
    pub(crate) variants: usize,
    /// Recorded requests instead of random ones: a v2 JSON file, a folder with `request.json` and
    /// `request.bin`, or a folder of requests and responses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) recorded: Option<PathBuf>,
    /// What the recorded request is answered with: a v2 JSON file, or a folder with
    /// `response.json` and `response.bin`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) expected: Option<PathBuf>,
    #[serde(default)]
    pub(crate) tolerance: Tolerance,
    /// Which of the recorded or random requests is sent next.
    #[serde(default)]
    pub(crate) order: Order,
    #[serde(default)]
    pub(crate) check: Check,
}

/// Which request comes next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Order {
    /// Any of them.
    #[default]
    Random,
    /// One after the other, by name where they were recorded, then from the first again.
    Sequential,
}

/// What answers are compared with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Check {
    /// What was recorded; nothing where there is none
    #[default]
    Expected,
    /// What was recorded; else the first answer to the same inputs
    Consistent,
}

/// Requests that their client gives up on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Cancel {
    /// Of all requests.
    pub(crate) fraction: f64,
    /// At the latest; each at a random time before.
    #[serde(with = "time")]
    pub(crate) after: Duration,
}

/// How far an output may be from the expected one: `absolute + relative × |expected|`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Tolerance {
    pub(crate) absolute: f64,
    pub(crate) relative: f64,
}

impl Scenario {
    fn usual_duration() -> Duration {
        Duration::from_secs(10)
    }

    fn usual_warmup() -> Duration {
        Duration::from_secs(1)
    }

    fn usual_window() -> Duration {
        Duration::from_secs(1)
    }

    fn usual_timeout() -> Duration {
        Duration::from_secs(30)
    }

    fn usual_seed() -> u64 {
        1
    }

    fn usual_connections() -> usize {
        4
    }

    /// A closed loop on one model with random inputs, all else as usual.
    pub(crate) fn closed(model: &str, concurrency: &[usize]) -> Self {
        Self {
            name: format!("{model}-closed"),
            description: String::new(),
            mode: Mode::Closed,
            duration: Self::usual_duration(),
            warmup: Self::usual_warmup(),
            window: Self::usual_window(),
            timeout: Self::usual_timeout(),
            seed: Self::usual_seed(),
            connections: Self::usual_connections(),
            closed: Closed {
                concurrency: concurrency.to_vec(),
            },
            open: Open::default(),
            cold: Cold::default(),
            models: vec![ModelLoad::named(model)],
        }
    }

    /// Reads a file; paths in it are relative to its folder.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let mut scenario =
            Self::parse(&text).with_context(|| format!("cannot use {}", path.display()))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let files = scenario
            .models
            .iter_mut()
            .flat_map(|model| [&mut model.recorded, &mut model.expected])
            .chain(scenario.open.trace.iter_mut().map(|trace| &mut trace.file));
        for file in files.flatten() {
            *file = folder.join(&file);
        }
        Ok(scenario)
    }

    /// Reads and checks a scenario; an error names the line or the key.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let scenario: Self = toml::from_str(text)?;
        scenario.check()?;
        Ok(scenario)
    }

    /// Whether it can be run at all; to be asked again after anything was changed.
    pub(crate) fn check(&self) -> Result<()> {
        let short = |time: Duration| time <= LONGEST;
        ensure!(
            !self.duration.is_zero() && short(self.duration),
            "duration: more than nothing, at most 24 h"
        );
        ensure!(short(self.warmup), "warmup: at most 24 h");
        ensure!(
            !self.timeout.is_zero() && short(self.timeout),
            "timeout: more than nothing, at most 24 h"
        );
        ensure!(
            self.window >= Duration::from_millis(10)
                && self.duration.as_nanos() / self.window.as_nanos() <= MOST_WINDOWS,
            "window: at least 10ms, and at most {MOST_WINDOWS} of them"
        );
        ensure!(
            (1..=1000).contains(&self.connections),
            "connections: from 1 to 1000"
        );
        match self.mode {
            Mode::Closed => self.closed.check()?,
            Mode::Open => self.open.check()?,
            Mode::Cold => self.cold.check()?,
        }
        ensure!(
            (1..=MOST_MODELS).contains(&self.models.len()),
            "models: from 1 to {MOST_MODELS}"
        );
        for (index, model) in self.models.iter().enumerate() {
            model
                .check()
                .with_context(|| format!("models[{index}] '{}'", model.name))?;
        }
        Ok(())
    }
}

impl Closed {
    fn check(&self) -> Result<()> {
        let all = &self.concurrency;
        ensure!(
            (1..=MOST_STEPS).contains(&all.len())
                && all.iter().all(|one| (1..=MOST_CONCURRENT).contains(one)),
            "closed.concurrency: 1 to {MOST_STEPS} numbers from 1 to {MOST_CONCURRENT}"
        );
        Ok(())
    }
}

impl Default for Closed {
    fn default() -> Self {
        Self {
            concurrency: vec![1, 8, 32],
        }
    }
}

impl Open {
    fn check(&self) -> Result<()> {
        let lowest = match self.arrivals {
            Arrivals::Bursts => 0.0,
            _ => f64::MIN_POSITIVE,
        };
        let has_rates = self.arrivals != Arrivals::Trace;
        ensure!(
            !has_rates
                || (1..=MOST_STEPS).contains(&self.rates.len())
                    && self
                        .rates
                        .iter()
                        .all(|rate| (lowest..=MOST_RATE).contains(rate)),
            "open.rates: 1 to {MOST_STEPS} numbers above 0 (bursts: from 0) up to {MOST_RATE}"
        );
        ensure!(
            (1..=1_000_000).contains(&self.max_outstanding),
            "open.max_outstanding: from 1 to 1000000"
        );
        match (self.arrivals, &self.bursts, &self.trace) {
            (Arrivals::Bursts, None, _) => {
                anyhow::bail!("open.bursts: needed for arrivals = \"bursts\"")
            }
            (Arrivals::Bursts, Some(bursts), _) => ensure!(
                (1..=100_000).contains(&bursts.size) && bursts.every >= Duration::from_millis(1),
                "open.bursts: a size from 1 to 100000, every 1ms or more"
            ),
            (Arrivals::Trace, _, None) => {
                anyhow::bail!("open.trace: needed for arrivals = \"trace\"")
            }
            (Arrivals::Trace, _, Some(trace)) => ensure!(
                (1e-3..=1e6).contains(&trace.speed),
                "open.trace.speed: from 0.001 to 1000000"
            ),
            _ => {}
        }
        Ok(())
    }
}

impl Default for Open {
    fn default() -> Self {
        Self {
            arrivals: Arrivals::Poisson,
            rates: vec![100.0],
            max_outstanding: 1000,
            bursts: None,
            trace: None,
        }
    }
}

impl TraceSource {
    fn usual_speed() -> f64 {
        1.0
    }
}

impl Cold {
    fn check(&self) -> Result<()> {
        ensure!(
            (1..=10_000).contains(&self.repetitions),
            "cold.repetitions: from 1 to 10000"
        );
        ensure!(
            !self.patience.is_zero() && self.patience <= LONGEST,
            "cold.patience: more than nothing, at most 24 h"
        );
        Ok(())
    }
}

impl Default for Cold {
    fn default() -> Self {
        Self {
            how: MadeCold::Unload,
            repetitions: 10,
            patience: Duration::from_secs(600),
        }
    }
}

impl ModelLoad {
    fn usual_weight() -> f64 {
        1.0
    }

    fn usual_variants() -> usize {
        32
    }

    /// A model with random inputs.
    pub(crate) fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            version: String::new(),
            weight: Self::usual_weight(),
            deadline: None,
            cancel: None,
            dims: BTreeMap::new(),
            shapes: BTreeMap::new(),
            values: BTreeMap::new(),
            variants: Self::usual_variants(),
            recorded: None,
            expected: None,
            tolerance: Tolerance::default(),
            order: Order::default(),
            check: Check::default(),
        }
    }

    fn check(&self) -> Result<()> {
        ensure!(!self.name.is_empty(), "name: must not be empty");
        ensure!(
            self.weight > 0.0 && self.weight <= 1e9,
            "weight: above 0, at most 1e9"
        );
        ensure!(
            self.deadline.is_none_or(|deadline| !deadline.is_zero()),
            "deadline: more than nothing"
        );
        ensure!(
            (1..=10_000).contains(&self.variants),
            "variants: from 1 to 10000"
        );
        if let Some(cancel) = &self.cancel {
            ensure!(
                (0.0..=1.0).contains(&cancel.fraction),
                "cancel.fraction: from 0 to 1"
            );
        }
        for (input, [from, to]) in &self.values {
            ensure!(
                from.is_finite() && to.is_finite() && from <= to,
                "values.{input}: two numbers, the smaller one first"
            );
        }
        self.check_dims()?;
        let Tolerance { absolute, relative } = self.tolerance;
        ensure!(absolute >= 0.0 && relative >= 0.0, "tolerance: not below 0");
        ensure!(
            self.recorded.is_none()
                || (self.dims.is_empty() && self.shapes.is_empty() && self.values.is_empty()),
            "dims, shapes and values: a recorded request has its own"
        );
        ensure!(
            self.expected.is_none() || self.recorded.is_some(),
            "expected: only a recorded request has an expected answer"
        );
        Ok(())
    }

    /// Whether the names in shapes are those of dims.
    fn check_dims(&self) -> Result<()> {
        for (name, sizes) in &self.dims {
            ensure!(
                dimension::is_name(name),
                "dims.{name}: a name begins with a letter and has letters, digits, _ and -"
            );
            ensure!(
                !matches!(sizes, Dimension::Named(_)),
                "dims.{name}: sizes, not another name"
            );
            ensure!(self.names_dim(name), "dims.{name}: no shape names it");
        }
        for (input, shape) in &self.shapes {
            for dimension in shape {
                let Dimension::Named(name) = dimension else {
                    continue;
                };
                let known: Vec<&str> = self.dims.keys().map(String::as_str).collect();
                ensure!(
                    self.dims.contains_key(name),
                    "shapes.{input}: '{name}' is not one of dims; {}",
                    match known.is_empty() {
                        true => "there are none".to_owned(),
                        false => format!("they are {}", known.join(", ")),
                    }
                );
            }
        }
        Ok(())
    }

    /// Whether a shape names this one of `dims`.
    pub(crate) fn names_dim(&self, name: &str) -> bool {
        let mut all = self.shapes.values().flatten();
        all.any(|dimension| matches!(dimension, Dimension::Named(named) if named == name))
    }
}

impl Default for Tolerance {
    fn default() -> Self {
        Self {
            absolute: 1e-5,
            relative: 1e-4,
        }
    }
}

#[cfg(test)]
pub(in crate::drive) mod tests;

//! `dormouse-load run`: a scenario from a file or from flags, against a server that runs already.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::drive;
use crate::drive::plot::{self, PlotFormat};
use crate::drive::progress::{Progress, Stopper};
use crate::drive::report;
use crate::drive::scenario::dimension;
use crate::drive::scenario::{
    Arrivals, Bursts, Cancel, Check, Dimension, MadeCold, Mode, ModelLoad, Scenario, TraceSource,
};
use crate::drive::target::{DataForm, Protocol, Target, Token};

/// Drives any server of the KServe v2 protocol, Dormouse or not, over gRPC or HTTP.
///
/// A scenario file says what is asked; flags override it, or stand alone with --model. Ends by
/// itself; an interrupt ends it early with what it has.
#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    /// Scenario (TOML); those that come with the program are in load-tests/scenarios
    #[arg(value_name = "SCENARIO.toml")]
    scenario: Option<PathBuf>,
    /// Server, as grpc://HOST:PORT or http://HOST:PORT; grpcs:// and https:// are over TLS
    #[arg(long, default_value = "grpc://127.0.0.1:8001")]
    url: String,
    /// What the server speaks there, where the URL does not say
    #[arg(long)]
    protocol: Option<Protocol>,
    /// How tensors travel over HTTP
    #[arg(long, value_name = "FORM", default_value = "auto")]
    data: DataForm,
    /// Header or metadata sent with every request; may be given several times
    #[arg(long, value_name = "NAME=VALUE")]
    header: Vec<String>,
    /// Token that the server knows us by; written nowhere
    #[arg(
        long,
        value_name = "TOKEN",
        env = "DORMOUSE_TOKEN",
        hide_env_values = true
    )]
    token: Option<Token>,
    /// Authorities (PEM) to trust instead of the public ones
    #[arg(long, value_name = "FILE", env = "DORMOUSE_TLS_CA")]
    tls_ca: Option<PathBuf>,
    /// Allow servers on other machines
    #[arg(long)]
    allow_remote: bool,
    /// Process of the server: its CPU time and memory are told, with those of its descendants
    #[arg(long)]
    pid: Option<u32>,
    #[command(flatten)]
    load: LoadFlags,
    /// Write everything as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write an HdrHistogram interval log
    #[arg(long, value_name = "FILE")]
    hdr: Option<PathBuf>,
    /// Write plots of the latencies and of the course of time
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    /// What plots are written as
    #[arg(long, value_name = "FORMAT", default_value = "svg", requires = "plot")]
    plot_format: PlotFormat,
    /// Fail when any request ended with an error or was not sent
    #[arg(long)]
    fail_on_error: bool,
}

/// What overrides a scenario.
#[derive(Args, Debug, Default)]
#[command(next_help_heading = "Instead of what the scenario says")]
pub(crate) struct LoadFlags {
    /// Model, as NAME or NAME=WEIGHT; may be given several times
    #[arg(long, value_name = "NAME[=WEIGHT]")]
    model: Vec<String>,
    /// Sizes of an input of every model, as INPUT=1,16..128 or with names of --dim: INPUT=N,L; may
    /// be given several times
    #[arg(long, value_name = "INPUT=SIZE,SIZE,...")]
    shape: Vec<String>,
    /// Size that shapes name, drawn once per request: L=16..128, N=1,2,4, or as in a scenario
    /// N={ 1 = 3, 8 = 1 } and L={ median = 40, sigma = 0.7, to = 512 }; may be given several times
    #[arg(long, value_name = "NAME=SIZES")]
    dim: Vec<String>,
    /// Values of an input of every model, of BYTES their lengths, as INPUT=0..1; may be given several
    /// times
    #[arg(long, value_name = "INPUT=FROM..TO")]
    values: Vec<String>,
    /// Different random requests of each model, drawn ahead
    #[arg(long, value_name = "N")]
    variants: Option<usize>,
    /// What answers are compared with
    #[arg(long, value_name = "WHAT")]
    check: Option<Check>,
    /// Who decides when the next request is sent
    #[arg(long)]
    mode: Option<Mode>,
    /// Closed loop: requests at once, one step each
    #[arg(long, value_name = "N,N,...", value_delimiter = ',')]
    concurrency: Vec<usize>,
    /// Open loop: requests per second, one step each
    #[arg(long, value_name = "R,R,...", value_delimiter = ',')]
    rate: Vec<f64>,
    /// Open loop: when requests come
    #[arg(long)]
    arrivals: Option<Arrivals>,
    /// Open loop: file that says when requests come
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Open loop: how many times faster the trace is played
    #[arg(long, value_name = "FACTOR")]
    speed: Option<f64>,
    /// Open loop: size of bursts and the time between them
    #[arg(long, value_name = "SIZE@EVERY")]
    burst: Option<String>,
    /// Open loop: requests under way at most; further ones count as not sent
    #[arg(long, value_name = "N")]
    max_outstanding: Option<usize>,
    /// Cold starts: how models become cold
    #[arg(long, value_name = "HOW")]
    cold: Option<MadeCold>,
    /// Cold starts of each model
    #[arg(long, value_name = "N")]
    repetitions: Option<usize>,
    /// Measured time of each step, such as 30s
    #[arg(long, value_parser = humantime::parse_duration)]
    duration: Option<Duration>,
    /// Load before each step that is not measured
    #[arg(long, value_parser = humantime::parse_duration)]
    warmup: Option<Duration>,
    /// Time of one line of the course of time
    #[arg(long, value_parser = humantime::parse_duration)]
    window: Option<Duration>,
    /// How long an answer is waited for at most
    #[arg(long, value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
    /// Of inputs, mix and arrivals
    #[arg(long)]
    seed: Option<u64>,
    /// gRPC connections
    #[arg(long, value_name = "N")]
    connections: Option<usize>,
    /// Deadline of every request, such as 200ms
    #[arg(long, value_parser = humantime::parse_duration)]
    deadline: Option<Duration>,
    /// Part of the requests that their client gives up on, from 0 to 1
    #[arg(long, value_name = "PART")]
    cancel_fraction: Option<f64>,
    /// When they are given up at the latest [default: 100ms]
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    cancel_after: Option<Duration>,
}

impl LoadFlags {
    /// The scenario of a file, or the usual one of flags, with what the flags say.
    pub(crate) fn apply(&self, file: Option<&Path>) -> Result<Scenario> {
        let mut scenario = match file {
            Some(path) => Scenario::open(path)?,
            None => {
                ensure!(
                    !self.model.is_empty(),
                    "a scenario or at least one --model is needed"
                );
                let mut scenario = Scenario::closed("flags", &[1, 8, 32]);
                scenario.name = "flags".to_owned();
                if self.rate.is_empty() && self.arrivals.is_none() && self.trace.is_none() {
                    scenario.mode = match self.cold {
                        Some(_) => Mode::Cold,
                        None => Mode::Closed,
                    };
                } else {
                    scenario.mode = Mode::Open;
                }
                scenario
            }
        };
        self.apply_models(&mut scenario)?;
        set(&mut scenario.mode, self.mode);
        set(&mut scenario.duration, self.duration);
        set(&mut scenario.warmup, self.warmup);
        set(&mut scenario.window, self.window);
        set(&mut scenario.timeout, self.timeout);
        set(&mut scenario.seed, self.seed);
        set(&mut scenario.connections, self.connections);
        set(&mut scenario.cold.how, self.cold);
        set(&mut scenario.cold.repetitions, self.repetitions);
        if !self.concurrency.is_empty() {
            scenario.closed.concurrency.clone_from(&self.concurrency);
        }
        self.apply_open(&mut scenario)?;
        scenario.check()?;
        Ok(scenario)
    }

    fn apply_models(&self, scenario: &mut Scenario) -> Result<()> {
        if !self.model.is_empty() {
            let mut models = Vec::with_capacity(self.model.len());
            for text in &self.model {
                let (name, weight) = match text.split_once('=') {
                    None => (&**text, None),
                    Some((name, weight)) => {
                        let weight = weight.parse().with_context(|| {
                            format!("--model {text}: '{weight}' is not a weight")
                        })?;
                        (name, Some(weight))
                    }
                };
                let known = scenario.models.iter().find(|model| model.name == name);
                let mut model = known.cloned().unwrap_or_else(|| ModelLoad::named(name));
                set(&mut model.weight, weight);
                models.push(model);
            }
            scenario.models = models;
        }
        self.apply_shapes(scenario)?;
        for model in &mut scenario.models {
            set(&mut model.variants, self.variants);
            set(&mut model.check, self.check);
            if self.deadline.is_some() {
                model.deadline = self.deadline;
            }
            if let Some(fraction) = self.cancel_fraction {
                let known = model.cancel.as_ref().map(|cancel| cancel.after);
                let after = self.cancel_after.or(known);
                model.cancel = Some(Cancel {
                    fraction,
                    after: after.unwrap_or(Duration::from_millis(100)),
                });
            } else if let Some(after) = self.cancel_after {
                let cancel = model.cancel.as_mut();
                cancel
                    .context("--cancel-after needs --cancel-fraction")?
                    .after = after;
            }
        }
        Ok(())
    }

    fn apply_shapes(&self, scenario: &mut Scenario) -> Result<()> {
        for text in &self.shape {
            let (input, sizes) = text
                .split_once('=')
                .with_context(|| format!("--shape {text}: expected INPUT=SIZE,SIZE,..."))?;
            let shape = dimension::shape(sizes).with_context(|| format!("--shape {text}"))?;
            for model in &mut scenario.models {
                model.shapes.insert(input.to_owned(), shape.clone());
            }
        }
        for text in &self.values {
            let parsed = text.split_once('=').and_then(|(input, ends)| {
                let (from, to) = ends.split_once("..")?;
                Some((input, [from.trim().parse().ok()?, to.trim().parse().ok()?]))
            });
            let (input, ends) =
                parsed.with_context(|| format!("--values {text}: expected INPUT=FROM..TO"))?;
            for model in &mut scenario.models {
                model.values.insert(input.to_owned(), ends);
            }
        }
        for model in &mut scenario.models {
            // What the shape of the file named and that of the flag does not.
            let mut dims = std::mem::take(&mut model.dims);
            dims.retain(|name, _| model.names_dim(name));
            model.dims = dims;
        }
        for text in &self.dim {
            let (name, sizes) = text
                .split_once('=')
                .with_context(|| format!("--dim {text}: expected NAME=SIZES"))?;
            let sizes: Dimension = sizes.parse().with_context(|| format!("--dim {text}"))?;
            let naming = scenario.models.iter_mut();
            let mut naming = naming.filter(|model| model.names_dim(name)).peekable();
            ensure!(
                naming.peek().is_some(),
                "--dim {text}: no shape names '{name}'; --shape INPUT={name} does"
            );
            for model in naming {
                model.dims.insert(name.to_owned(), sizes.clone());
            }
        }
        Ok(())
    }

    fn apply_open(&self, scenario: &mut Scenario) -> Result<()> {
        let open = &mut scenario.open;
        set(&mut open.arrivals, self.arrivals);
        set(&mut open.max_outstanding, self.max_outstanding);
        if !self.rate.is_empty() {
            open.rates.clone_from(&self.rate);
        }
        if let Some(burst) = &self.burst {
            let parsed = burst.split_once('@').and_then(|(size, every)| {
                Some(Bursts {
                    size: size.parse().ok()?,
                    every: humantime::parse_duration(every).ok()?,
                })
            });
            open.bursts = Some(parsed.with_context(|| {
                format!("--burst {burst}: expected a size and a time, such as 50@1s")
            })?);
            open.arrivals = self.arrivals.unwrap_or(Arrivals::Bursts);
        }
        let is_trace = open.arrivals == Arrivals::Trace || self.trace.is_some();
        if is_trace && (open.trace.is_none() || self.trace.is_some()) {
            open.arrivals = self.arrivals.unwrap_or(Arrivals::Trace);
            open.trace = Some(TraceSource {
                file: self.trace.clone(),
                speed: 1.0,
                start: Duration::ZERO,
                at_most: None,
            });
        }
        if let Some(speed) = self.speed {
            let trace = open.trace.as_mut();
            trace.context("--speed: there is no trace")?.speed = speed;
        }
        Ok(())
    }
}

fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

pub(crate) async fn run(args: RunArgs) -> Result<()> {
    let scenario = args.load.apply(args.scenario.as_deref())?;
    let mut target = Target::at(&args.url);
    target.protocol = args.protocol;
    target.data = args.data;
    target.allow_remote = args.allow_remote;
    target.pid = args.pid;
    target.token = args.token;
    target.tls_ca = args.tls_ca;
    for header in &args.header {
        let (name, value) = header
            .split_once('=')
            .with_context(|| format!("--header {header}: expected NAME=VALUE"))?;
        target.headers.insert(name.to_owned(), value.to_owned());
    }
    let (progress, stopper) = Progress::live();
    let interrupts = tokio::spawn(stop_on_interrupt(stopper));
    let outcome = drive::run(&scenario, &target, &progress).await;
    interrupts.abort();
    let outcome = outcome?;
    report::print(&outcome)?;
    if let Some(path) = &args.json {
        report::write_json(&outcome, path)?;
    }
    if let Some(path) = &args.hdr {
        report::write_hdr(&outcome, path)?;
    }
    if let Some(folder) = &args.plot {
        plot::write(&outcome, folder, args.plot_format)?;
    }
    if outcome.any_wrong() {
        bail!("some answers were wrong");
    }
    if args.fail_on_error && outcome.any_failed() {
        bail!("some requests failed");
    }
    Ok(())
}

/// The first interrupt ends the run with what it has, a second one ends the program.
pub(crate) async fn stop_on_interrupt(stopper: Stopper) {
    if tokio::signal::ctrl_c().await.is_err() {
        // Kept alive, because a stopper that is gone cannot stop.
        return std::future::pending().await;
    }
    stopper.stop();
    if tokio::signal::ctrl_c().await.is_ok() {
        std::process::exit(130);
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    #[command(no_binary_name = true)]
    struct Line {
        #[command(flatten)]
        run: RunArgs,
    }

    fn scenario(line: &str) -> Result<Scenario> {
        let line = Line::try_parse_from(line.split_whitespace())?;
        line.run.load.apply(line.run.scenario.as_deref())
    }

    #[test]
    fn flags_alone_make_a_scenario() {
        let made = scenario("--model a --model b=3 --concurrency 1,64 --duration 2s").unwrap();
        assert_eq!(made.mode, Mode::Closed);
        assert_eq!(made.closed.concurrency, [1, 64]);
        assert_eq!(made.models[1].weight, 3.0);
        assert_eq!(made.duration, Duration::from_secs(2));
        let made = scenario("--model a --rate 50 --deadline 5ms --cancel-fraction 0.5").unwrap();
        assert_eq!(made.mode, Mode::Open);
        assert_eq!(made.open.arrivals, Arrivals::Poisson);
        assert_eq!(made.models[0].deadline, Some(Duration::from_millis(5)));
        assert_eq!(made.models[0].cancel.as_ref().unwrap().fraction, 0.5);
        let made = scenario("--model a --mode open --burst 50@2s --rate 0").unwrap();
        assert_eq!(made.open.arrivals, Arrivals::Bursts);
        let made = scenario("--model a --arrivals trace --speed 60").unwrap();
        assert_eq!(made.open.trace.unwrap().speed, 60.0);
        assert_eq!(scenario("--model a --cold wait").unwrap().mode, Mode::Cold);
    }

    #[test]
    fn shapes_and_named_sizes_are_flags_too() {
        let made = "--model a --shape ids=N,L --shape mask=N,L --dim N=1,4 --dim L=16..128 \
                    --values mask=-0.5..1";
        let made = scenario(made).unwrap();
        let model = &made.models[0];
        assert_eq!(model.shapes["ids"], model.shapes["mask"]);
        assert_eq!(model.values["mask"], [-0.5, 1.0]);
        assert_eq!(model.dims["N"], Dimension::Choice(vec![1, 4]));
        assert_eq!(model.dims["L"], Dimension::Range(16, 128));
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios/transformer-lengths.toml");
        let flags = |line: &str| scenario(&format!("{} {line}", file.display())).unwrap();
        let model = &flags("--dim L=32").models[0];
        assert_eq!(model.dims["L"], Dimension::Fixed(32));
        assert!(model.dims.contains_key("N"));
        let all = ["input_ids", "attention_mask", "token_type_ids"];
        let fixed = all.map(|input| format!("--shape {input}=1,8")).join(" ");
        assert!(flags(&fixed).models[0].dims.is_empty());
    }

    #[test]
    fn flags_that_make_no_sense_are_named() {
        for (line, words) in [
            ("", "--model"),
            ("--model a=x", "'x' is not a weight"),
            ("--model a --concurrency 0", "closed.concurrency"),
            ("--model a --burst 5", "50@1s"),
            ("--model a --speed 2", "no trace"),
            ("--model a --cancel-after 1s", "--cancel-fraction"),
            ("--model a --rate=-1", "open.rates"),
            ("--model a --shape X", "expected INPUT=SIZE"),
            ("--model a --values X=1", "expected INPUT=FROM..TO"),
            ("--model a --values X=2..1", "values.X"),
            (
                "--model a --shape X=1,M",
                "shapes.X: 'M' is not one of dims",
            ),
            ("--model a --shape X=M --dim L=4", "no shape names 'L'"),
            ("--model a --shape X=M --dim M=5..2", "not a range"),
            ("--model a --variants 0", "variants"),
        ] {
            let error = format!("{:#}", scenario(line).unwrap_err());
            assert!(error.contains(words), "{line}: {error}");
        }
    }
}

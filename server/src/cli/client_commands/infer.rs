//! `dormouse infer`: one model, some inputs, what came of it.

use std::fmt::Write as _;
use std::time::Duration;

use dormouse_client::{Client, InferRequest, InferResponse, ModelMetadata, Tensor};
use dormouse_core::shape::DisplayShape;
use serde_json::json;
use tokio::time::Instant;

use super::tensors::{self, Random, Source};
use super::{ConnectionArgs, Reply, explain, listing, usage};
use crate::cli::output::{self, Screen};
use crate::cli::waterfall::{PARKED, cold_start_json};

/// How many elements of an output people get to see.
const SHOWN_ELEMENTS: usize = 12;

/// Run a model on given, zero or random inputs.
#[derive(Debug, clap::Args)]
pub struct InferArgs {
    /// The model's name
    pub model: String,
    /// An input: NAME=JSON, NAME=@FILE (.json, else raw little-endian elements), NAME=zeros or
    /// NAME=random
    #[arg(long = "input", short = 'i', value_name = "NAME=VALUE")]
    pub inputs: Vec<String>,
    /// What to put into the inputs that are not given
    #[arg(long, value_name = "zeros|random", value_parser = ["zeros", "random"])]
    pub fill: Option<String>,
    /// The shape of an input whose signature leaves it open
    #[arg(long = "shape", value_name = "NAME=1,3,224,224")]
    pub shapes: Vec<String>,
    /// The version of the model [default: the newest]
    #[arg(long)]
    pub version: Option<String>,
    /// An output to ask for [default: all]
    #[arg(long = "output", short = 'o', value_name = "NAME")]
    pub outputs: Vec<String>,
    /// How often to send the request, one after the other
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub repeat: u32,
    /// Where random numbers start
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

pub(super) async fn infer(
    client: &Client,
    arguments: InferArgs,
    screen: &Screen,
) -> anyhow::Result<Reply> {
    let model = arguments.model.as_str();
    let version = arguments.version.as_deref().unwrap_or_default();
    let metadata = client.model_metadata(model, version).await;
    let metadata =
        metadata.map_err(|error| explain(client, error, &format!("cannot describe {model}")))?;

    let mut request = InferRequest::new(model).version(version);
    for (name, tensor) in build_inputs(&arguments, &metadata)? {
        request = request.input(name, tensor);
    }
    for output in &arguments.outputs {
        if metadata.outputs.iter().all(|known| known.name != *output) {
            return Err(unknown("output", output, &metadata));
        }
        request = request.output(output);
    }

    let mut latencies = Vec::new();
    let mut first: Option<InferResponse> = None;
    for _ in 0..arguments.repeat {
        let started = Instant::now();
        let response = client.infer(request.clone()).await;
        latencies.push(started.elapsed());
        let response =
            response.map_err(|error| explain(client, error, &format!("{model} gave no answer")))?;
        first.get_or_insert(response);
    }
    let response = first.expect("a request is sent at least once");
    Ok(Reply::good(if screen.is_json() {
        response_json(&response, &latencies)?
    } else {
        response_text(&response, &latencies, screen)?
    }))
}

fn unknown(kind: &str, name: &str, metadata: &ModelMetadata) -> anyhow::Error {
    let tensors = match kind {
        "output" => &metadata.outputs,
        _ => &metadata.inputs,
    };
    let names = tensors.iter().map(|tensor| tensor.name.as_str());
    let closest = names
        .map(|known| (strsim::jaro_winkler(known, name), known))
        .filter(|(likeness, _)| *likeness > 0.7)
        .max_by(|left, right| left.0.total_cmp(&right.0));
    let hint = closest.map_or_else(String::new, |(_, known)| {
        format!(" (did you mean {known:?}?)")
    });
    let known = listing::tensor_lines(tensors).replace('\n', ", ");
    let model = &metadata.name;
    usage(format!(
        "{model} has no {kind} {name:?}{hint}; it has {known}"
    ))
}

/// `NAME=VALUE` of a flag.
fn named<'a>(flag: &str, argument: &'a str) -> anyhow::Result<(&'a str, &'a str)> {
    argument
        .split_once('=')
        .filter(|(name, _)| !name.is_empty())
        .ok_or_else(|| usage(format!("--{flag} {argument:?}: expected NAME=VALUE")))
}

fn parse_shape(name: &str, text: &str) -> anyhow::Result<Vec<i64>> {
    let digits = text.trim_matches(['[', ']']);
    if digits.is_empty() {
        return Ok(Vec::new());
    }
    let dim = |part: &str| part.trim().parse().ok().filter(|dim: &i64| *dim >= 0);
    let dims: Option<_> = digits.split([',', 'x']).map(dim).collect();
    dims.ok_or_else(|| {
        usage(format!(
            "--shape {name}={text}: expected dimensions like 1,3,224,224"
        ))
    })
}

fn build_inputs(
    arguments: &InferArgs,
    metadata: &ModelMetadata,
) -> anyhow::Result<Vec<(String, Tensor)>> {
    let known = |name: &str| metadata.inputs.iter().any(|input| input.name == name);
    let mut shapes = Vec::new();
    for argument in &arguments.shapes {
        let (name, text) = named("shape", argument)?;
        if !known(name) {
            return Err(unknown("input", name, metadata));
        }
        shapes.push((name, parse_shape(name, text)?));
    }
    let mut sources: Vec<(&str, Source)> = Vec::new();
    for argument in &arguments.inputs {
        let (name, text) = named("input", argument)?;
        if !known(name) {
            return Err(unknown("input", name, metadata));
        }
        if sources.iter().any(|(taken, _)| *taken == name) {
            return Err(usage(format!("input {name:?} is given twice")));
        }
        sources.push((name, Source::parse(text)));
    }
    let fill = arguments.fill.as_deref().map(Source::parse);
    if sources.is_empty() && fill.is_none() && !metadata.inputs.is_empty() {
        let signature = listing::tensor_lines(&metadata.inputs).replace('\n', ", ");
        return Err(usage(format!(
            "{} takes {signature}; give them with --input NAME=VALUE, or try --fill random",
            metadata.name
        )));
    }
    let mut random = Random(arguments.seed);
    let mut tensors = Vec::new();
    for input in &metadata.inputs {
        let given = sources.iter().find(|(name, _)| *name == input.name);
        // An input that is neither given nor filled may be optional: the server knows.
        let Some(source) = given.map(|(_, source)| source).or(fill.as_ref()) else {
            continue;
        };
        let shape = shapes.iter().find(|(name, _)| *name == input.name);
        let shape = shape.map(|(_, shape)| shape.as_slice());
        let tensor = source.tensor(input, shape, &mut random)?;
        tensors.push((input.name.clone(), tensor));
    }
    Ok(tensors)
}

/// Shortest, middle and longest.
fn spread(latencies: &[Duration]) -> [Duration; 3] {
    let mut sorted = latencies.to_vec();
    sorted.sort_unstable();
    let last = sorted.len() - 1;
    [sorted[0], sorted[last / 2], sorted[last]]
}

fn response_json(response: &InferResponse, latencies: &[Duration]) -> anyhow::Result<String> {
    let mut outputs = Vec::new();
    for (name, tensor) in response.outputs() {
        outputs.push(json!({
            "name": name,
            "datatype": tensor.datatype().name(),
            "shape": tensor.shape(),
            "data": tensors::to_json(tensor, usize::MAX)?,
        }));
    }
    let seconds = |latency: &Duration| latency.as_secs_f64();
    let mut value = json!({
        "model_name": response.model(),
        "model_version": response.model_version(),
        "outputs": outputs,
        "latency_seconds": latencies.iter().map(seconds).collect::<Vec<_>>(),
    });
    if let Some(cold) = response.timing() {
        value["cold_start"] = cold_start_json(cold);
    }
    Ok(output::json(&value))
}

fn response_text(
    response: &InferResponse,
    latencies: &[Duration],
    screen: &Screen,
) -> anyhow::Result<String> {
    let mut table = screen.table(&["output", "type", "shape", "values"]);
    for (name, tensor) in response.outputs() {
        let limit = if screen.terminal {
            SHOWN_ELEMENTS
        } else {
            usize::MAX
        };
        let shown = tensors::to_json(tensor, limit)?;
        let mut values: Vec<_> = shown.iter().map(ToString::to_string).collect();
        let hidden = tensor.element_count() - values.len();
        if hidden > 0 {
            values.push(format!("... {hidden} more"));
        }
        table.add_row([
            name.to_owned(),
            tensor.datatype().to_string(),
            DisplayShape(tensor.shape()).to_string(),
            values.join(" "),
        ]);
    }
    let mut text = output::lines(&table);
    let model = response.model();
    let version = response.model_version();
    let [shortest, middle, longest] = spread(latencies).map(output::duration);
    // Writing to a string cannot fail.
    let _ = match latencies {
        [_] => writeln!(text, "\n{model} version {version} answered in {middle}"),
        [first, ..] => writeln!(
            text,
            "\n{model} version {version} answered {} times: first {}, shortest {shortest}, \
             median {middle}, longest {longest}",
            latencies.len(),
            output::duration(*first),
        ),
        [] => Ok(()),
    };
    if let Some(cold) = response.timing() {
        let was = match cold.kind.as_str() {
            PARKED => "parked: its weights came back with its run",
            _ => "asleep",
        };
        let _ = write!(text, "\nit was {was}\n{}", screen.waterfall(cold));
    }
    Ok(text)
}

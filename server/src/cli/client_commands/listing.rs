//! What a server has, how it is, and what it has done.

use std::time::Duration;

use dormouse_client::{Client, Code, IndexEntry, ModelMetadata, ModelState, TensorMetadata, pb};
use dormouse_core::shape::DisplayShape;
use serde_json::{Value, json};

use super::{ConnectionArgs, Reply, explain, timeline};
use crate::cli::output::{self, Screen};

/// List the models of a server's repository.
#[derive(Debug, clap::Args)]
pub struct ModelsArgs {
    /// Only the models that can answer
    #[arg(long)]
    pub ready: bool,
    /// Show inputs and outputs, too
    #[arg(long, short)]
    pub verbose: bool,
    /// Show instead what waking this model spent its time on
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["ready", "verbose"])]
    pub timeline: Option<String>,
    /// Only this version of the model
    #[arg(long, requires = "timeline")]
    pub version: Option<String>,
    /// How many of its cold starts, the latest last
    #[arg(long, value_name = "N", requires = "timeline", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..))]
    pub last: u16,
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

/// Tell whether a server and its models can answer.
#[derive(Debug, clap::Args)]
pub struct HealthArgs {
    /// Models that must be able to answer, too
    pub models: Vec<String>,
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

/// Show what models have done and how long it took.
#[derive(Debug, clap::Args)]
pub struct StatsArgs {
    /// Only this model
    pub model: Option<String>,
    /// Only this version of the model
    #[arg(long, requires = "model")]
    pub version: Option<String>,
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

pub(super) async fn models(
    client: &Client,
    arguments: ModelsArgs,
    screen: &Screen,
) -> anyhow::Result<Reply> {
    if let Some(model) = &arguments.timeline {
        let version = arguments.version.as_deref().unwrap_or_default();
        let last = usize::from(arguments.last);
        return timeline::timeline(client, (model, version), last, screen).await;
    }
    let index = client.repository_index(arguments.ready).await;
    let index = index.map_err(|error| explain(client, error, "cannot list the models"))?;
    let mut lines = Vec::with_capacity(index.len());
    for entry in index {
        let signature = if arguments.verbose && entry.state == ModelState::Ready {
            let metadata = client.model_metadata(&entry.name, &entry.version).await;
            Some(metadata.map_err(|error| error.to_string()))
        } else {
            None
        };
        lines.push((entry, signature));
    }
    Ok(Reply::good(if screen.is_json() {
        models_json(&lines)
    } else {
        models_table(&lines, arguments.verbose, screen)
    }))
}

type ModelLine = (IndexEntry, Option<Result<ModelMetadata, String>>);

fn models_json(lines: &[ModelLine]) -> String {
    let tensor = |tensor: &TensorMetadata| {
        json!({
            "name": tensor.name,
            "datatype": tensor.datatype.name(),
            "shape": tensor.shape,
        })
    };
    let line = |(entry, signature): &ModelLine| {
        let mut value = json!({
            "name": entry.name,
            "version": entry.version,
            "state": entry.state.to_string(),
            "reason": entry.reason,
        });
        match signature {
            Some(Ok(metadata)) => {
                value["platform"] = metadata.platform.as_str().into();
                value["inputs"] = metadata.inputs.iter().map(tensor).collect();
                value["outputs"] = metadata.outputs.iter().map(tensor).collect();
            }
            Some(Err(error)) => value["error"] = error.as_str().into(),
            None => {}
        }
        value
    };
    output::json(&lines.iter().map(line).collect::<Value>())
}

fn models_table(lines: &[ModelLine], verbose: bool, screen: &Screen) -> String {
    if lines.is_empty() {
        return "no models\n".to_owned();
    }
    let mut headings = vec!["model", "version", "state", "detail"];
    if verbose {
        headings.extend(["inputs", "outputs"]);
    }
    let mut table = screen.table(&headings);
    for (entry, signature) in lines {
        let mut row = vec![
            entry.name.clone(),
            dash(&entry.version),
            dash(&entry.state.to_string()),
            detail(entry),
        ];
        match signature {
            Some(Ok(metadata)) => {
                row.push(tensor_lines(&metadata.inputs));
                row.push(tensor_lines(&metadata.outputs));
            }
            Some(Err(error)) => row.extend([error.clone(), String::new()]),
            None if verbose => row.extend([String::new(), String::new()]),
            None => {}
        }
        table.add_row(row);
    }
    output::lines(&table)
}

/// A model that can answer is awake unless its server says otherwise.
fn detail(entry: &IndexEntry) -> String {
    if entry.state == ModelState::Ready && entry.reason.is_empty() {
        return "awake".to_owned();
    }
    entry.reason.clone()
}

/// `name FP32 [-1,3]`, a line per tensor.
pub(super) fn tensor_lines(tensors: &[TensorMetadata]) -> String {
    let line = |tensor: &TensorMetadata| {
        let shape = DisplayShape(&tensor.shape);
        format!("{} {} {shape}", tensor.name, tensor.datatype)
    };
    tensors.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn dash(text: &str) -> String {
    if text.is_empty() { "-" } else { text }.to_owned()
}

pub(super) async fn health(
    client: &Client,
    arguments: HealthArgs,
    screen: &Screen,
) -> anyhow::Result<Reply> {
    let failed = |error| explain(client, error, "cannot tell the server's health");
    let live = client.live().await.map_err(failed)?;
    let ready = client.ready().await.map_err(failed)?;
    // Its health is open to everybody, its name and version are not.
    let about = match client.server_metadata().await {
        Ok(about) => Some(about),
        Err(error) => match error.code() {
            Some(Code::Unauthenticated | Code::PermissionDenied) => None,
            _ => return Err(failed(error)),
        },
    };
    let mut models = Vec::new();
    for model in arguments.models {
        // An unknown model is one that cannot answer, and the reason is worth telling.
        let state = match client.model_ready(&model, "").await {
            Ok(true) => Ok(()),
            // The answer has no place for a reason; the metadata's error has.
            Ok(false) => Err(match client.model_metadata(&model, "").await {
                Ok(_) => "not ready".to_owned(),
                Err(error) => format!("not ready: {error}"),
            }),
            Err(error) => Err(error.to_string()),
        };
        models.push((model, state));
    }
    let good = live && ready && models.iter().all(|(_, state)| state.is_ok());
    let text = if screen.is_json() {
        let model = |(name, state): &(String, Result<(), String>)| {
            let mut value = json!({ "name": name, "ready": state.is_ok() });
            if let Err(reason) = state {
                value["reason"] = reason.as_str().into();
            }
            value
        };
        output::json(&json!({
            "url": client.url(),
            "name": about.as_ref().map(|about| &about.name),
            "version": about.as_ref().map(|about| &about.version),
            "live": live,
            "ready": ready,
            "models": models.iter().map(model).collect::<Value>(),
        }))
    } else {
        let mut table = screen.table(&["what", "state"]);
        let word = |yes: bool, word: &str| {
            if yes {
                word.to_owned()
            } else {
                format!("not {word}")
            }
        };
        let who = about.map_or_else(
            || "a server".to_owned(),
            |about| format!("{} {}", about.name, about.version),
        );
        table.add_row([
            format!("{who} at {}", client.url()),
            format!("{}, {}", word(live, "live"), word(ready, "ready")),
        ]);
        for (name, state) in models {
            let state = state.err().unwrap_or_else(|| "ready".to_owned());
            table.add_row([format!("model {name}"), state]);
        }
        output::lines(&table)
    };
    Ok(Reply { text, good })
}

pub(super) async fn stats(
    client: &Client,
    arguments: StatsArgs,
    screen: &Screen,
) -> anyhow::Result<Reply> {
    let model = arguments.model.unwrap_or_default();
    let version = arguments.version.unwrap_or_default();
    let stats = client.statistics(&model, &version).await;
    let stats = stats.map_err(|error| explain(client, error, "cannot read the statistics"))?;
    Ok(Reply::good(if screen.is_json() {
        output::json(&stats.iter().map(stats_json).collect::<Value>())
    } else {
        stats_table(&stats, screen)
    }))
}

/// The parts of an inference by name.
fn parts(stats: &pb::ModelStatistics) -> [(&'static str, pb::StatisticDuration); 8] {
    let inference = stats.inference_stats.unwrap_or_default();
    [
        ("success", inference.success),
        ("fail", inference.fail),
        ("queue", inference.queue),
        ("compute_input", inference.compute_input),
        ("compute_infer", inference.compute_infer),
        ("compute_output", inference.compute_output),
        ("cache_hit", inference.cache_hit),
        ("cache_miss", inference.cache_miss),
    ]
    .map(|(name, duration)| (name, duration.unwrap_or_default()))
}

fn average(duration: pb::StatisticDuration) -> Option<Duration> {
    let nanos = duration.ns.checked_div(duration.count)?;
    Some(Duration::from_nanos(nanos))
}

fn stats_json(stats: &pb::ModelStatistics) -> Value {
    let part = |(name, duration): (&'static str, pb::StatisticDuration)| {
        let average = average(duration).map(|average| average.as_secs_f64());
        let value = json!({
            "count": duration.count,
            "nanoseconds": duration.ns,
            "average_seconds": average,
        });
        (name.to_owned(), value)
    };
    json!({
        "name": stats.name,
        "version": stats.version,
        "last_inference_ms": stats.last_inference,
        "inference_count": stats.inference_count,
        "execution_count": stats.execution_count,
        "inference": Value::Object(parts(stats).into_iter().map(part).collect()),
    })
}

fn stats_table(stats: &[pb::ModelStatistics], screen: &Screen) -> String {
    if stats.is_empty() {
        return "no models\n".to_owned();
    }
    let mut table = screen.table(&[
        "model", "version", "requests", "failed", "rows", "runs", "rows/run", "queue", "input",
        "compute", "output", "total",
    ]);
    for one in stats {
        let [success, fail, queue, input, infer, output, ..] = parts(one).map(|(_, part)| part);
        let mean = |part| average(part).map_or_else(|| "-".to_owned(), output::duration);
        let per_run = match one.execution_count {
            0 => "-".to_owned(),
            runs => format!("{:.1}", one.inference_count as f64 / runs as f64),
        };
        table.add_row([
            one.name.clone(),
            dash(&one.version),
            success.count.to_string(),
            fail.count.to_string(),
            one.inference_count.to_string(),
            one.execution_count.to_string(),
            per_run,
            mean(queue),
            mean(input),
            mean(infer),
            mean(output),
            mean(success),
        ]);
    }
    format!("{}times are averages per request\n", output::lines(&table))
}

//! `dormouse inspect`: what a model consists of and what loading it will take, without a server.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use dormouse_core::id::ByteSize;
use dormouse_core::shape::DisplayShape;
use dormouse_model_store::config;
use dormouse_model_store::manifest::{
    FileRole, LoadPlan, Manifest, ManifestTensor, Taxon, TensorPlace,
};
use dormouse_model_store::repository::{GraphFile, ModelDir, Repository};
use indicatif::{ProgressBar, ProgressStyle};

use super::output::{self, FormatArgs, Screen};
use crate::engine::Effort;
use crate::unit::{loading_footprint, prepared_footprint};

/// Reading less than this is done before anybody would look at a bar.
const WORTH_A_BAR: u64 = 128 << 20;
/// How many tensors are shown when not all are asked for.
const LARGEST: usize = 5;

/// Show the files and tensors of a model and what loading it will take.
#[derive(Debug, clap::Args)]
pub struct InspectArgs {
    /// The model's folder in its repository (REPOSITORY/MODEL)
    #[arg(value_name = "MODEL_DIR")]
    pub model: PathBuf,
    /// The version to look at instead of the newest that would be served
    #[arg(long, value_name = "N")]
    pub version: Option<u64>,
    /// List every tensor, with the digest of its bytes
    #[arg(long)]
    pub tensors: bool,
    /// Read the graph only, not the weights
    #[arg(long, conflicts_with = "tensors")]
    pub no_digests: bool,
    #[command(flatten)]
    pub format: FormatArgs,
}

/// A version of a model, looked at.
#[derive(Debug)]
struct Report {
    model: String,
    version: u64,
    manifest: Manifest,
    plan: LoadPlan,
}

/// Looks at the model and prints what was found.
pub fn run(args: &InspectArgs) -> anyhow::Result<()> {
    let report = examine(args)?;
    let screen = Screen::of_stdout(args.format.chosen());
    let text = match screen.is_json() {
        true => json(&report)?,
        false => tables(&report, args.tensors, &screen),
    };
    output::print(&text).context("cannot write the result")
}

fn examine(args: &InspectArgs) -> anyhow::Result<Report> {
    let (repository, name) = split(&args.model)?;
    let dir = Repository::open(&repository)
        .with_context(|| format!("cannot open {}", repository.display()))?
        .model(&name)?;
    let config = match dir.config_text(None)? {
        Some(text) => config::text::parse(&text)
            .with_context(|| format!("the configuration of model '{name}' cannot be used"))?,
        None => Default::default(),
    };
    let version = choose_version(args, &dir, config.version_policy.as_ref())?;
    let filename = match config.default_model_filename.as_str() {
        "" => "model.onnx",
        filename => filename,
    };
    let graph = dir
        .open_graph(version, filename)?
        .with_weights(config::weights_file(&config));
    let mut manifest = graph.examine()?.manifest;
    if !args.no_digests {
        digest(&mut manifest, &graph, args.tensors)?;
    }
    Ok(Report {
        model: name,
        version,
        plan: manifest.plan(),
        manifest,
    })
}

/// The repository and the model's name in it.
fn split(model: &Path) -> anyhow::Result<(PathBuf, String)> {
    // `.` and `models/bert/..` have no name of their own.
    let model = match model.file_name() {
        Some(_) => model.to_owned(),
        None => model
            .canonicalize()
            .with_context(|| format!("cannot find {}", model.display()))?,
    };
    let name = model.file_name().and_then(|name| name.to_str());
    let name = name.with_context(|| format!("{} is not a model's folder", model.display()))?;
    let repository = match model.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    Ok((repository, name.to_owned()))
}

fn choose_version(
    args: &InspectArgs,
    dir: &ModelDir,
    policy: Option<&dormouse_proto::inference::ModelVersionPolicy>,
) -> anyhow::Result<u64> {
    let present = dir.versions()?;
    if let Some(version) = args.version {
        if !present.contains(&version) {
            bail!(
                "model '{}' has no version {version}: its folder has {present:?}",
                dir.name()
            );
        }
        return Ok(version);
    }
    let served = config::select_versions(policy, &present);
    served.last().copied().with_context(|| {
        format!(
            "model '{}' has no version to serve: its folder has {present:?} (a model's folder \
             holds a folder for each version, named 1, 2, …)",
            dir.name()
        )
    })
}

fn digest(manifest: &mut Manifest, graph: &GraphFile, tensors: bool) -> anyhow::Result<()> {
    let mut bytes: u64 = manifest.files.iter().map(|file| file.size).sum();
    if tensors {
        bytes = bytes.saturating_add(manifest.read_only_bytes());
    }
    let bar = match bytes >= WORTH_A_BAR && io::stderr().is_terminal() {
        true => ProgressBar::new(bytes),
        false => ProgressBar::hidden(),
    };
    if let Ok(style) = ProgressStyle::with_template(
        "computing digests [{bar:32}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
    ) {
        bar.set_style(style.progress_chars("=> "));
    }
    let mut progress = |count| bar.inc(count);
    manifest.digest_files(graph, &mut progress)?;
    if tensors {
        manifest.digest_tensors(graph, &mut progress)?;
    }
    bar.finish_and_clear();
    Ok(())
}

fn json(report: &Report) -> anyhow::Result<String> {
    let value = serde_json::json!({
        "model": report.model,
        "version": report.version,
        "manifest": serde_json::to_value(&report.manifest)?,
        "totals": serde_json::to_value(report.manifest.totals())?,
        "plan": serde_json::to_value(&report.plan)?,
        "budget_bytes": {
            "from_files": loading_footprint(report.plan.bytes_read, Effort::Full),
            "prepared": prepared_footprint(report.plan.bytes_read_only),
        },
    });
    Ok(output::json(&value))
}

fn tables(report: &Report, all_tensors: bool, screen: &Screen) -> String {
    let manifest = &report.manifest;
    let mut text = format!("model '{}' version {}\n", report.model, report.version);
    for warning in &manifest.warnings {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "warning: {warning}");
    }
    for table in [
        files(manifest, screen),
        totals(manifest, screen),
        elements(manifest, screen),
        tensors(manifest, all_tensors, screen),
    ] {
        text.push('\n');
        text.push_str(&table);
    }
    let plan = &report.plan;
    let _ = writeln!(
        text,
        "\na load reads {} in {} {}; of the memory budget it takes {} from these files and {} once prepared",
        ByteSize(plan.bytes_read),
        plan.read.len(),
        if plan.read.len() == 1 {
            "file"
        } else {
            "files"
        },
        ByteSize(loading_footprint(plan.bytes_read, Effort::Full)),
        ByteSize(prepared_footprint(plan.bytes_read_only)),
    );
    text
}

fn files(manifest: &Manifest, screen: &Screen) -> String {
    let mut table = screen.table(&["file", "is", "size", "blake3"]);
    for file in &manifest.files {
        let role = match file.role {
            FileRole::Graph => "graph",
            FileRole::ExternalData => "external data",
            FileRole::Safetensors => "safetensors",
            FileRole::SafetensorsIndex => "index",
        };
        let digest = file
            .digest
            .map_or_else(String::new, |digest| digest.to_string());
        table.add_row([
            file.path.clone(),
            role.to_owned(),
            ByteSize(file.size).to_string(),
            digest,
        ]);
    }
    output::lines(&table)
}

fn totals(manifest: &Manifest, screen: &Screen) -> String {
    let mut table = screen.table(&["memory", "tensors", "bytes"]);
    for total in manifest.totals() {
        let (name, unknown) = match total.taxon {
            Taxon::ReadOnly => ("read-only", ""),
            Taxon::Input => ("input", "follows from the request"),
            Taxon::Writable => ("writable", "follows from the request"),
            Taxon::Context => ("context", ""),
        };
        let bytes = total.bytes.map(|bytes| ByteSize(bytes).to_string());
        table.add_row([
            name.to_owned(),
            match total.taxon {
                Taxon::Context => format!("{} operators", manifest.nodes),
                _ => total.tensors.to_string(),
            },
            bytes.unwrap_or_else(|| unknown.to_owned()),
        ]);
    }
    output::lines(&table)
}

fn elements(manifest: &Manifest, screen: &Screen) -> String {
    let mut kinds: BTreeMap<(&str, &str), (usize, u64)> = BTreeMap::new();
    for tensor in &manifest.tensors {
        let kind = (tensor.element.name(), place(tensor));
        let (count, bytes) = kinds.entry(kind).or_default();
        *count += 1;
        *bytes = bytes.saturating_add(tensor.bytes);
    }
    let mut table = screen.table(&["weights of type", "kept", "tensors", "bytes"]);
    for ((element, kept), (count, bytes)) in kinds {
        table.add_row([
            element.to_owned(),
            kept.to_owned(),
            count.to_string(),
            ByteSize(bytes).to_string(),
        ]);
    }
    output::lines(&table)
}

fn tensors(manifest: &Manifest, all: bool, screen: &Screen) -> String {
    let mut shown: Vec<&ManifestTensor> = manifest.tensors.iter().collect();
    let mut headings = vec!["tensor", "type", "shape", "bytes"];
    if all {
        headings.push("blake3");
    } else {
        headings[0] = "largest tensors";
        shown.sort_by_key(|tensor| std::cmp::Reverse(tensor.bytes));
        shown.truncate(LARGEST);
    }
    let mut table = screen.table(&headings);
    for tensor in shown {
        let mut row = vec![
            tensor.name.escape_debug().to_string(),
            tensor.element.to_string(),
            DisplayShape(&tensor.dims).to_string(),
            ByteSize(tensor.bytes).to_string(),
        ];
        if all {
            row.extend(tensor.digest.map(|digest| digest.to_string()));
        }
        table.add_row(row);
    }
    output::lines(&table)
}

fn place(tensor: &ManifestTensor) -> &'static str {
    match tensor.place {
        _ if tensor.in_subgraph => "in a subgraph",
        TensorPlace::Inline { .. } | TensorPlace::Encoded { .. } => "in the graph",
        TensorPlace::External { .. } => "as external data",
        TensorPlace::Safetensors { .. } => "as safetensors",
    }
}

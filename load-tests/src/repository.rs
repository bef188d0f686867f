//! A repository with the models that the scenarios name.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::models;

/// Graphs of a few hundred bytes, by the name they get.
const SMALL: [(&str, &[u8]); 5] = [
    (
        "identity_fp32",
        include_bytes!("../../server/tests/models/identity_fp32.onnx"),
    ),
    ("mlp", include_bytes!("../../server/tests/models/mlp.onnx")),
    (
        "conv",
        include_bytes!("../../server/tests/models/conv.onnx"),
    ),
    (
        "add_sub",
        include_bytes!("../../server/tests/models/add_sub.onnx"),
    ),
    (
        "steady",
        include_bytes!("../../server/tests/models/steady.onnx"),
    ),
];
/// Copies of `mlp` that a trace is spread over.
const COPIES: usize = 10;

/// Writes a model repository with what the scenarios in load-tests/scenarios ask for.
#[derive(Args, Debug)]
pub(crate) struct RepositoryArgs {
    /// Folder to write; models that are there already are left alone
    folder: PathBuf,
    /// Add a larger model by name, such as magika; needs Python 3 and a package index
    #[arg(long, value_name = "NAME", value_parser = models::NAMES)]
    with: Vec<String>,
}

pub(crate) fn run(args: &RepositoryArgs) -> Result<()> {
    lay_out(&args.folder)?;
    let names: Vec<&str> = args.with.iter().map(String::as_str).collect();
    for model in models::prepare(&names)? {
        if !args.folder.join(&model.name).exists() {
            model.copy_to(&args.folder)?;
        }
    }
    let mut entries: Vec<String> = fs::read_dir(&args.folder)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_>>()?;
    entries.sort_unstable();
    writeln!(
        std::io::stdout(),
        "{}: {}",
        args.folder.display(),
        entries.join(", ")
    )?;
    Ok(())
}

/// The models of a few kilobytes.
pub(crate) fn lay_out(folder: &Path) -> Result<()> {
    let mlp = SMALL
        .iter()
        .find(|(name, _)| *name == "mlp")
        .map(|(_, graph)| *graph);
    let mlp = mlp.context("mlp is one of the small models")?;
    let copies = (0..COPIES).map(|index| (format!("mlp_{index}"), mlp));
    let small = SMALL.map(|(name, graph)| (name.to_owned(), graph));
    for (name, graph) in small.into_iter().chain(copies) {
        add(folder, &name, graph)?;
    }
    Ok(())
}

/// One model from its graph.
pub(crate) fn add(folder: &Path, name: &str, graph: &[u8]) -> Result<()> {
    let model = folder.join(name);
    if model.exists() {
        ensure!(model.is_dir(), "{} is not a folder", model.display());
        return Ok(());
    }
    let version = model.join("1");
    fs::create_dir_all(&version).with_context(|| format!("cannot create {}", version.display()))?;
    fs::write(version.join("model.onnx"), graph)?;
    fs::write(
        model.join("config.pbtxt"),
        "backend: \"onnxruntime\"\nmax_batch_size: 8\n",
    )?;
    Ok(())
}

//! The models that are measured: written once by `models/generate.py` and kept beside the build,
//! each a folder of a model repository with a request that it answers.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use dormouse_client::{InferRequest, Tensor};
use serde::Deserialize;

const GENERATE: &str = include_str!("../models/generate.py");
const PACKAGES: [&str; 2] = ["onnx==1.22.0", "numpy==2.4.6"];
const TINY: &[u8] = include_bytes!("../../server/tests/models/mlp.onnx");
const IDENTITY: &[u8] = include_bytes!("../../server/tests/models/identity_fp32.onnx");

/// What `generate.py` calls its models, the largest last.
pub(crate) const NAMES: [&str; 9] = [
    "magika",
    "silero-vad",
    "ocr-cls",
    "ocr-det",
    "ocr-rec",
    "minilm",
    "resnet50",
    "bert-base",
    "bert-large",
];

/// A model on disk with a request for it.
#[derive(Clone, Debug)]
pub(crate) struct BenchModel {
    pub(crate) name: String,
    folder: PathBuf,
    pub(crate) inputs: Vec<(String, Tensor)>,
}

/// `request.json`.
#[derive(Deserialize)]
struct RequestFile {
    inputs: Vec<RequestInput>,
}

#[derive(Deserialize)]
struct RequestInput {
    name: String,
    datatype: String,
    shape: Vec<i64>,
}

impl BenchModel {
    /// Reads a folder that `generate.py` wrote.
    fn open(folder: PathBuf) -> Result<Self> {
        let name = folder.file_name().context("a model's folder has a name")?;
        let document = fs::read(folder.join("request.json"))?;
        let inputs = inputs(&document, fs::read(folder.join("request.bin"))?.into())
            .with_context(|| format!("{}/request.json", folder.display()))?;
        Ok(Self {
            name: name.to_string_lossy().into_owned(),
            folder,
            inputs,
        })
    }

    /// A model of a few kilobytes that needs nothing but this program.
    pub(crate) fn tiny(parent: &Path) -> Result<Self> {
        let folder = parent.join("tiny");
        fs::create_dir_all(folder.join("1"))?;
        fs::write(folder.join("1/model.onnx"), TINY)?;
        fs::write(
            folder.join("config.pbtxt"),
            "backend: \"onnxruntime\"\nmax_batch_size: 8\n",
        )?;
        let tensor = Tensor::from_slice([1, 16], &[0.25f32; 16])?;
        Ok(Self {
            name: "tiny".to_owned(),
            folder,
            inputs: vec![("X".to_owned(), tensor)],
        })
    }

    /// A model that answers with its input.
    pub(crate) fn identity(parent: &Path) -> Result<Self> {
        let folder = parent.join("identity");
        fs::create_dir_all(folder.join("1"))?;
        fs::write(folder.join("1/model.onnx"), IDENTITY)?;
        let tensor = Tensor::from_slice([1, 16], &[0.25f32; 16])?;
        Ok(Self {
            name: "identity".to_owned(),
            folder,
            inputs: vec![("INPUT".to_owned(), tensor)],
        })
    }

    /// The graph with its weights.
    pub(crate) fn file(&self) -> PathBuf {
        self.folder.join("1/model.onnx")
    }

    /// Bytes of [`BenchModel::file`].
    pub(crate) fn size(&self) -> Result<u64> {
        Ok(fs::metadata(self.file())?.len())
    }

    /// The recorded request, for this model under the name `model`.
    pub(crate) fn request(&self, model: &str) -> InferRequest {
        let mut request = InferRequest::new(model);
        for (name, tensor) in &self.inputs {
            request = request.input(name, tensor.clone());
        }
        request
    }

    /// Puts the model into `repository` as `name`, with `extra` lines in its configuration. The
    /// file is linked, so both must lie in one file system.
    pub(crate) fn lay_out(&self, repository: &Path, name: &str, extra: &str) -> Result<()> {
        let model = repository.join(name);
        fs::create_dir_all(model.join("1"))?;
        let target = model.join("1/model.onnx");
        fs::hard_link(self.file(), &target)
            .with_context(|| format!("cannot link {} to it", target.display()))?;
        let config = fs::read_to_string(self.folder.join("config.pbtxt"))?;
        fs::write(model.join("config.pbtxt"), config + extra)?;
        Ok(())
    }

    /// Puts a copy of the model into any `repository`, under its own name.
    pub(crate) fn copy_to(&self, repository: &Path) -> Result<()> {
        let model = repository.join(&self.name);
        fs::create_dir_all(model.join("1"))?;
        fs::copy(self.file(), model.join("1/model.onnx"))?;
        fs::copy(self.folder.join("config.pbtxt"), model.join("config.pbtxt"))?;
        Ok(())
    }

    /// As [`BenchModel::lay_out`] with `versions` copies of the file, each of its own.
    pub(crate) fn lay_out_versions(&self, repository: &Path, versions: usize) -> Result<()> {
        let model = repository.join(&self.name);
        for version in 1..=versions {
            let folder = model.join(version.to_string());
            fs::create_dir_all(&folder)?;
            fs::copy(self.file(), folder.join("model.onnx"))?;
        }
        let config = fs::read_to_string(self.folder.join("config.pbtxt"))?;
        let policy = "version_policy { all { } }\n";
        fs::write(model.join("config.pbtxt"), config + policy)?;
        Ok(())
    }
}

/// A line of `config.pbtxt` that sets one of Dormouse's own parameters.
pub(crate) fn parameter(key: &str, value: &str) -> String {
    format!("parameters {{ key: \"dormouse.{key}\" value {{ string_value: \"{value}\" }} }}\n")
}

/// Joins the description of inputs with their bytes.
fn inputs(document: &[u8], data: Bytes) -> Result<Vec<(String, Tensor)>> {
    let file: RequestFile = serde_json::from_slice(document)?;
    let mut rest = data;
    let mut inputs = Vec::new();
    for input in file.inputs {
        let datatype: dormouse_client::DataType = input.datatype.parse()?;
        let size = datatype
            .element_size()
            .context("strings are not recorded")?;
        let bytes = input
            .shape
            .iter()
            .try_fold(size, |product, &dim| {
                product.checked_mul(usize::try_from(dim).ok()?)
            })
            .filter(|&bytes| bytes <= rest.len())
            .with_context(|| format!("request.bin ends within input '{}'", input.name))?;
        let tensor = Tensor::raw(datatype, input.shape, rest.split_to(bytes))?;
        inputs.push((input.name, tensor));
    }
    ensure!(
        rest.is_empty(),
        "request.bin has {} bytes too many",
        rest.len()
    );
    Ok(inputs)
}

/// The build's folder, where downloads and models are kept between runs.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let found = program
        .ancestors()
        .skip(1)
        .find(|folder| folder.join("CACHEDIR.TAG").exists());
    match found {
        Some(folder) => Ok(folder.to_owned()),
        None => Ok(program
            .parent()
            .context("a program lies in a folder")?
            .to_owned()),
    }
}

/// A folder for one measurement's files, in the file system that holds the models.
pub(crate) fn scratch() -> Result<tempfile::TempDir> {
    let parent = target_dir()?.join("bench-scratch");
    fs::create_dir_all(&parent)?;
    Ok(tempfile::tempdir_in(parent)?)
}

/// Waits until files that were just laid out count as unchanged: a server does not trust what it
/// remembers of a file whose last change is less than two seconds old, and would load the source.
pub(crate) async fn settled() {
    tokio::time::sleep(std::time::Duration::from_millis(2500)).await;
}

/// Finds or makes the named models. Blocks: a first run downloads packages and writes files.
pub(crate) fn prepare(names: &[&str]) -> Result<Vec<BenchModel>> {
    let folder = target_dir()?.join("bench-models");
    generate(&folder, names)?;
    names
        .iter()
        .map(|name| BenchModel::open(folder.join(name)))
        .collect()
}

/// Finds or makes `count` models of a few megabytes, each with weights of its own.
pub(crate) fn prepare_small(count: usize) -> Result<Vec<BenchModel>> {
    let folder = target_dir()?.join("bench-models-small");
    let names: Vec<String> = (0..count)
        .map(|index| format!("small_{index:03}"))
        .collect();
    let there = names.iter().all(|name| folder.join(name).exists());
    if !there {
        generate(&folder, &[&format!("small:{count}")])?;
    }
    names
        .iter()
        .map(|name| BenchModel::open(folder.join(name)))
        .collect()
}

fn generate(folder: &Path, names: &[&str]) -> Result<()> {
    if names.iter().all(|name| folder.join(name).exists()) {
        return Ok(());
    }
    fs::create_dir_all(folder)?;
    let python_folder = target_dir()?.join("python");
    fs::create_dir_all(&python_folder)?;
    // Held until the end of this function; other processes wait for the finished files.
    let lock = File::create(python_folder.join("bench-models.lock"))?;
    lock.lock().context("cannot lock the Python environment")?;
    let python = environment(&python_folder.join("bench-models"))?;
    let script = python_folder.join("bench-models.py");
    fs::write(&script, GENERATE)?;
    succeed(
        Command::new(python).arg(script).arg(folder).args(names),
        "the models could not be written",
    )
}

/// A virtual environment with the packages that `generate.py` needs.
fn environment(root: &Path) -> Result<PathBuf> {
    let wanted = PACKAGES.join("\n");
    let finished = root.join("finished");
    let python = root.join("bin/python");
    if fs::read_to_string(&finished).is_ok_and(|found| found == wanted) {
        return Ok(python);
    }
    if root.exists() {
        fs::remove_dir_all(root)?;
    }
    succeed(
        Command::new("python3").args(["-m", "venv"]).arg(root),
        "a Python 3 with the `venv` module is needed to write the models",
    )?;
    succeed(
        Command::new(&python)
            .args(["-m", "pip", "install", "--quiet"])
            .args(PACKAGES),
        "pip must be able to install the packages that write the models",
    )?;
    fs::write(finished, wanted)?;
    Ok(python)
}

fn succeed(command: &mut Command, otherwise: &str) -> Result<()> {
    let output = command
        .output()
        .with_context(|| format!("cannot start {command:?}: {otherwise}"))?;
    ensure!(
        output.status.success(),
        "{command:?} ended with {}: {otherwise}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &[u8] = br#"{"licence": "MIT", "inputs": [
        {"name": "x", "datatype": "FP32", "shape": [1, 2]},
        {"name": "rate", "datatype": "INT64", "shape": []}]}"#;

    #[test]
    fn recorded_inputs_share_one_file_in_order() {
        let mut data = Vec::new();
        data.extend(1.5f32.to_le_bytes());
        data.extend((-2.0f32).to_le_bytes());
        data.extend(16_000i64.to_le_bytes());
        let inputs = inputs(DOCUMENT, data.into()).unwrap();
        assert_eq!(inputs[0].0, "x");
        assert_eq!(inputs[0].1.to_vec::<f32>().unwrap(), [1.5, -2.0]);
        assert_eq!(inputs[1].1.shape(), [] as [i64; 0]);
        assert_eq!(inputs[1].1.to_vec::<i64>().unwrap(), [16_000]);
    }

    #[test]
    fn recorded_inputs_must_fill_their_file_exactly() {
        for bytes in [0, 8, 15, 17] {
            let error = inputs(DOCUMENT, vec![0; bytes].into()).unwrap_err();
            assert!(error.to_string().contains("request.bin"), "{error}");
        }
    }
}

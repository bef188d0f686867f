//! Model repositories in temporary folders, filled from the checked-in models.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::TempDir;

/// The folder of checked-in models.
pub(crate) fn models_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models")
}

/// The bytes of a checked-in model.
pub(crate) fn model_bytes(file: &str) -> Result<Vec<u8>> {
    let path = models_dir().join(format!("{file}.onnx"));
    fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// One model to lay out: its versions by checked-in file, and its configuration.
#[derive(Debug, Default)]
pub(crate) struct Model {
    versions: Vec<(u64, String)>,
    config: Option<String>,
}

impl Model {
    /// A model with version 1 from `file` and no configuration.
    pub(crate) fn new(file: &str) -> Self {
        Self::default().version(1, file)
    }

    pub(crate) fn version(mut self, version: u64, file: &str) -> Self {
        self.versions.push((version, file.to_owned()));
        self
    }

    pub(crate) fn config(mut self, text: &str) -> Self {
        self.config = Some(text.to_owned());
        self
    }
}

/// A model repository that goes away with its owner.
#[derive(Debug)]
pub(crate) struct TestRepository {
    dir: TempDir,
}

impl TestRepository {
    pub(crate) fn new() -> Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("dormouse-repository-")
            .tempdir()
            .context("cannot create a temporary folder")?;
        Ok(Self { dir })
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn model_dir(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Lays out `model` under `name`.
    pub(crate) fn add(&self, name: &str, model: Model) -> Result<()> {
        let dir = self.model_dir(name);
        fs::create_dir_all(&dir)?;
        for (version, file) in &model.versions {
            self.add_version(name, *version, file)?;
        }
        if let Some(config) = &model.config {
            self.write_config(name, config)?;
        }
        Ok(())
    }

    /// Adds a version that appears in one step, as a careful deployment would do it.
    pub(crate) fn add_version(&self, name: &str, version: u64, file: &str) -> Result<()> {
        let staged = tempfile::tempdir_in(self.dir.path().parent().context("temporary root")?)?;
        fs::write(staged.path().join("model.onnx"), model_bytes(file)?)?;
        if file == "external" {
            fs::copy(
                models_dir().join("weights.bin"),
                staged.path().join("weights.bin"),
            )?;
        }
        let target = self.model_dir(name).join(version.to_string());
        fs::rename(staged.keep(), &target)
            .with_context(|| format!("cannot create {}", target.display()))
    }

    pub(crate) fn write_config(&self, name: &str, text: &str) -> Result<()> {
        let path = self.model_dir(name).join("config.pbtxt");
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

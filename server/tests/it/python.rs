//! Python environments for foreign clients, made once and kept in the build's folder.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};

use crate::server::target_dir;

/// A virtual environment with exactly the packages it was asked for.
#[derive(Debug)]
pub(crate) struct Environment {
    root: PathBuf,
}

impl Environment {
    /// Finds or makes the environment `name`. Blocks: a first run downloads its packages.
    pub(crate) fn prepare(name: &str, packages: &[&str]) -> Result<Self> {
        let folder = target_dir().join("python");
        fs::create_dir_all(&folder)?;
        let root = folder.join(name);
        // Held until the end of this function; other processes wait for the finished environment.
        let lock = File::create(folder.join(format!("{name}.lock")))?;
        lock.lock().context("cannot lock the Python environment")?;
        let wanted = packages.join("\n");
        let finished = root.join("finished");
        if fs::read_to_string(&finished).is_ok_and(|found| found == wanted) {
            return Ok(Self { root });
        }
        if root.exists() {
            fs::remove_dir_all(&root)?;
        }
        succeed(
            Command::new("python3").args(["-m", "venv"]).arg(&root),
            "a Python 3 with the `venv` module is needed for the foreign clients",
        )?;
        let environment = Self { root };
        succeed(
            Command::new(environment.python())
                .args(["-m", "pip", "install", "--quiet"])
                .args(packages),
            &format!("pip must be able to install {}", packages.join(", ")),
        )?;
        fs::write(finished, wanted)?;
        Ok(environment)
    }

    pub(crate) fn python(&self) -> PathBuf {
        self.root.join("bin/python")
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }
}

/// Runs a command that has to succeed; `otherwise` says what is missing if it does not.
pub(crate) fn succeed(command: &mut Command, otherwise: &str) -> Result<Output> {
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
    Ok(output)
}

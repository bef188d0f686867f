//! Environments with the packages of a recipe, made once and kept below the build's folder.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use indicatif::ProgressBar;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use super::recipe::Recipe;
use crate::models;

/// What installing may take; large wheels come over slow lines.
const PATIENCE: Duration = Duration::from_secs(1800);

/// Where a recipe's programs and files are.
#[derive(Clone, Debug)]
pub(crate) struct Installed {
    /// None for recipes without packages.
    environment: Option<PathBuf>,
    /// The recipe's own files.
    pub(crate) recipe: PathBuf,
}

impl Installed {
    /// Folder of the environment's programs.
    pub(crate) fn bin(&self) -> Option<PathBuf> {
        Some(self.environment.as_ref()?.join("bin"))
    }

    /// Folder of the environment's packages.
    pub(crate) fn site(&self) -> Option<PathBuf> {
        let lib = self.environment.as_ref()?.join("lib");
        let folders = fs::read_dir(lib).ok()?.flatten();
        let mut sites = folders.map(|folder| folder.path().join("site-packages"));
        sites.find(|site| site.is_dir())
    }
}

/// Finds or makes what a recipe needs. An error says why the server cannot take part.
pub(crate) async fn install(recipe: &Recipe) -> Result<Installed> {
    if let Some(program) = &recipe.program {
        on_path(program)?;
    }
    let folder = models::target_dir()?.join("peers");
    fs::create_dir_all(&folder)?;
    let lock = File::create(folder.join(format!("{}.lock", recipe.name)))?;
    // Held until the end of this function; other processes wait for the finished environment.
    let lock = tokio::task::spawn_blocking(move || lock.lock().map(|()| lock)).await??;
    let files = folder.join(format!("{}-recipe", recipe.name));
    recipe.write_files(&files)?;
    let environment = match recipe.packages.is_empty() {
        true => None,
        false => {
            let root = folder.join(&recipe.name);
            make(&root, recipe).await?;
            Some(root)
        }
    };
    drop(lock);
    Ok(Installed {
        environment,
        recipe: files,
    })
}

fn on_path(program: &str) -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|folder| folder.join(program).is_file());
    ensure!(found, "{program} is not on the PATH");
    Ok(())
}

async fn make(root: &Path, recipe: &Recipe) -> Result<()> {
    let wanted = recipe.packages.join("\n");
    let finished = root.join("finished");
    if fs::read_to_string(&finished).is_ok_and(|found| found == wanted) {
        return Ok(());
    }
    if root.exists() {
        fs::remove_dir_all(root)?;
    }
    eprintln!(
        "{}: installing {} into {}",
        recipe.name,
        recipe.packages.join(", "),
        root.display()
    );
    let bar = ProgressBar::new_spinner().with_prefix(recipe.name.clone());
    bar.enable_steady_tick(Duration::from_millis(200));
    let mut venv = Command::new("python3");
    venv.args(["-m", "venv"]).arg(root);
    follow(venv, &bar)
        .await
        .context("a Python 3 with the `venv` module is needed")?;
    let mut pip = Command::new(root.join("bin/python"));
    pip.args(["-m", "pip", "install", "--disable-pip-version-check"])
        .args(["--progress-bar", "off"])
        .args(&recipe.packages);
    follow(pip, &bar)
        .await
        .context("pip could not install its packages")?;
    bar.finish_and_clear();
    fs::write(finished, wanted)?;
    Ok(())
}

/// Runs a command to its end and shows its lines as they come.
async fn follow(mut command: Command, bar: &ProgressBar) -> Result<()> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start {:?}", command.as_std()))?;
    let stdout = child.stdout.take().context("its output was asked for")?;
    let showing = async {
        let mut lines = BufReader::new(stdout).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            bar.set_message(line);
        }
    };
    let ending = async { tokio::join!(showing, child.wait_with_output()).1 };
    let output = tokio::time::timeout(PATIENCE, ending)
        .await
        .with_context(|| format!("not finished within {PATIENCE:?}"))??;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("it ended with {}: {}", output.status, said.trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn recipe_without_packages_needs_no_environment() {
        let dormouse = Recipe::named("dormouse").unwrap();
        let installed = install(&dormouse).await.unwrap();
        assert!(installed.bin().is_none() && installed.site().is_none());
        assert!(installed.recipe.is_dir());
    }

    #[test]
    fn absent_program_is_the_reason_why_a_server_cannot_take_part() {
        let error = on_path("no-such-server").unwrap_err().to_string();
        assert_eq!(error, "no-such-server is not on the PATH");
        on_path("sh").unwrap();
    }
}

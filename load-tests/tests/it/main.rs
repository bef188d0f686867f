//! The program as users call it, against server processes of its own.

mod hostile;
mod isolation;
mod results;
mod run;
mod soak;

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_dormouse-load");

/// The program with the engine's library where the build keeps it.
fn dormouse_load() -> Command {
    let mut command = Command::new(PROGRAM);
    command.stdin(Stdio::null());
    command
}

/// Runs a measurement that starts a server, which is this program, too.
fn verdict(arguments: &[&str]) -> Result<Value> {
    let folder = tempfile::tempdir()?;
    let json = folder.path().join("verdict.json");
    let output = dormouse_load()
        .args(arguments)
        .args(["--server", PROGRAM, "--json"])
        .arg(&json)
        .output()?;
    ensure!(json.exists(), "{output:?}");
    Ok(serde_json::from_slice(&std::fs::read(&json)?)?)
}

/// Fails unless every bar was met, but for those that depend on how busy the machine is.
fn all_met(verdict: &Value, but: &[&str]) -> Result<()> {
    let bars = verdict["bars"].as_array().context("no bars")?;
    ensure!(!bars.is_empty(), "no bars");
    for bar in bars {
        let name = bar["name"].as_str().context("a bar without a name")?;
        let busy = but.iter().any(|part| name.contains(part));
        ensure!(busy || bar["met"] != false, "{bar} of {bars:#?}");
    }
    Ok(())
}

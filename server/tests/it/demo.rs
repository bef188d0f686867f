//! `dormouse demo`, as a newcomer runs it.

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::server::{dormouse, patiently};

struct Shown {
    /// The user's cache, of which nothing but pip has a part.
    cache: TempDir,
    good: bool,
    out: String,
    err: String,
}

/// Runs the demonstration from the workspace's folder.
async fn demo(arguments: &[&str]) -> Result<Shown> {
    let cache = tempfile::tempdir()?;
    let mut command = tokio::process::Command::from(dormouse());
    command
        .arg("demo")
        .args(arguments)
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .env("XDG_CACHE_HOME", cache.path())
        .env_remove("ORT_DISABLE_TELEMETRY")
        .kill_on_drop(true);
    let output = patiently("the demonstration ends", command.output()).await??;
    Ok(Shown {
        cache,
        good: output.status.success(),
        out: String::from_utf8_lossy(&output.stdout).into_owned(),
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// The label of a file in the table.
fn label<'a>(shown: &'a Shown, file: &str) -> Result<&'a str> {
    let mut rows = shown.out.lines().map(str::split_whitespace);
    rows.find_map(|mut words| (words.next() == Some(file)).then(|| words.next())?)
        .with_context(|| format!("{file} is not in\n{}", shown.out))
}

#[tokio::test]
async fn the_demonstration_wakes_a_real_model_and_lets_it_sleep() -> Result<()> {
    let files = [
        ("Cargo.toml", "toml"),
        ("server/src/main.rs", "rust"),
        ("ARCHITECTURE.md", "markdown"),
        ("server/tests/models/generate.py", "python"),
        ("server/tests/models/add_sub.onnx", "onnx"),
        ("proto/inference/grpc_service.proto", "proto"),
    ];
    let shown = demo(&files.map(|(file, _)| file)).await?;
    ensure!(shown.good, "{}{}", shown.out, shown.err);
    for (file, expected) in files {
        let found = label(&shown, file)?;
        ensure!(found == expected, "{file} is {found}, expected {expected}");
    }
    let parts = [
        "It is asleep. Files sent to it at once, a request each: 6.",
        "COLD START: all answered after ",
        "  session ",
        "WARM: ",
        "BACK TO ZERO: asleep again ",
        "RESIDENT MEMORY",
        "  before ",
        "  warm ",
        "  after ",
        "dormouse serve --model-repository",
    ];
    let mut rest = shown.out.as_str();
    for part in parts {
        let at = rest.find(part);
        let at = at.with_context(|| format!("no {part:?} in its place in\n{}", shown.out))?;
        rest = &rest[at + part.len()..];
    }
    // Where the engine would keep an identifier of the device to report under.
    ensure!(!shown.cache.path().join("Microsoft").exists());
    Ok(())
}

#[tokio::test]
async fn the_demonstration_finds_files_by_itself() -> Result<()> {
    let shown = demo(&[]).await?;
    ensure!(shown.good, "{}{}", shown.out, shown.err);
    ensure!(shown.out.contains("a request each: 12."), "{}", shown.out);
    let hidden = shown.out.lines().find(|line| line.starts_with('.'));
    ensure!(hidden.is_none(), "a hidden file is shown: {hidden:?}");
    Ok(())
}

#[tokio::test]
async fn a_file_that_is_not_there_is_named() -> Result<()> {
    let shown = demo(&["Cargo.toml", "no/such/file"]).await?;
    ensure!(!shown.good, "{}", shown.out);
    ensure!(
        shown.err.contains("cannot read no/such/file"),
        "{}",
        shown.err
    );
    Ok(())
}

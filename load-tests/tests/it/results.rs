use std::path::Path;
use std::process::Output;

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::{PROGRAM, dormouse_load};

fn record(folder: &Path, command: &[&str]) -> Result<Output> {
    let output = dormouse_load()
        .args(["results", "--record", "kept"])
        .arg("--folder")
        .arg(folder)
        .arg("--page")
        .arg(folder.join("page.md"))
        .arg("--")
        .args(command)
        .output()?;
    Ok(output)
}

#[test]
fn a_measurement_is_recorded_with_its_command_and_shown_on_the_page() -> Result<()> {
    for (command, title) in [
        (
            &["simulate", "--seeds=1", "--functions=9", "--json"][..],
            "## Simulated\n\nBy",
        ),
        (
            &["hostile", "idle", "--server", PROGRAM],
            "What a server's well-behaved clients see",
        ),
    ] {
        let folder = tempfile::tempdir()?;
        // The bar of an idle server's memory depends on how the program was built.
        let output = record(folder.path(), command)?;
        let document = std::fs::read(folder.path().join("kept.json"))?;
        let document: Value = serde_json::from_slice(&document)?;
        ensure!(document["tool"]["command_line"][1] == command[0]);
        ensure!(
            !document["tool"]["command_line"]
                .to_string()
                .contains("json")
        );
        let page = std::fs::read_to_string(folder.path().join("page.md"))?;
        ensure!(page.contains("### kept") && page.contains(title), "{page}");
        ensure!(
            page.contains(&format!("`dormouse-load {}", command[0])),
            "{output:?}"
        );
    }
    Ok(())
}

#[test]
fn what_measures_nothing_is_not_recorded() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let output = record(folder.path(), &["simulate", "--seeds=0"])?;
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(words.contains("wrote nothing"), "{output:?}");
    ensure!(!folder.path().join("kept.json").exists());
    Ok(())
}

#[test]
fn json_without_a_file_is_all_that_is_printed() -> Result<()> {
    let output = dormouse_load()
        .args(["simulate", "--seeds=1", "--functions=9", "--json"])
        .output()?;
    let document: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(document["figures"]["rows"].is_array(), "{document:#}");
    ensure!(document["machine"]["cores"].is_u64(), "{document:#}");
    Ok(())
}

//! The example manifests and units are what their readers understand.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::foreign::{prepare, script};
use crate::python::succeed;

const PACKAGES: (&str, &[&str]) = (
    "manifests",
    &[
        "kubernetes-validate==1.37.0",
        "jsonschema==4.26.0",
        "PyYAML==6.0.3",
    ],
);

fn configs() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs")
}

#[tokio::test]
async fn kubernetes_manifests_are_valid_and_wrong_ones_are_noticed() -> Result<()> {
    let environment = prepare(PACKAGES).await?;
    let mut command = Command::new(environment.python());
    command
        .arg(script("manifests.py"))
        .arg(configs().join("kubernetes"));
    let check = move || succeed(&mut command, "an example manifest is wrong");
    let output = tokio::task::spawn_blocking(check).await??;
    eprint!("{}", String::from_utf8_lossy(&output.stdout));
    Ok(())
}

#[test]
fn systemd_understands_the_units() -> Result<()> {
    let folder = tempfile::tempdir()?;
    for unit in ["dormouse.socket", "dormouse.service"] {
        let text = fs::read_to_string(configs().join("systemd").join(unit))?;
        // Verified on a machine where nothing is installed.
        let text = text.replace("/usr/local/bin/dormouse", env!("CARGO_BIN_EXE_dormouse"));
        fs::write(folder.path().join(unit), text)?;
    }
    let verify = |unit: &str| {
        let path = folder.path().join(unit);
        Command::new("systemd-analyze")
            .arg("verify")
            .arg(path)
            .output()
    };
    if verify("dormouse.socket").is_err() {
        eprintln!("skipped: systemd_understands_the_units: no systemd-analyze here");
        return Ok(());
    }
    for unit in ["dormouse.socket", "dormouse.service"] {
        let output = verify(unit)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let ours: Vec<&str> = said
            .lines()
            .filter(|line| line.contains("dormouse"))
            .collect();
        ensure!(output.status.success() && ours.is_empty(), "{unit}: {said}");
    }
    Ok(())
}

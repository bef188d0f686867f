use anyhow::{Result, ensure};

use crate::dormouse_load;

fn complaint(arguments: &[&str]) -> Result<String> {
    let output = dormouse_load().args(arguments).output()?;
    ensure!(output.status.code() == Some(1), "{output:?}");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn nobody_listening_is_a_failure_that_says_so() -> Result<()> {
    let words = complaint(&["run", "--model", "m", "--url", "grpc://127.0.0.1:1"])?;
    ensure!(words.contains("cannot drive grpc://127.0.0.1:1"), "{words}");
    Ok(())
}

#[test]
fn other_machines_are_refused() -> Result<()> {
    let words = complaint(&["run", "--model", "m", "--url", "http://192.0.2.1:8000"])?;
    ensure!(words.contains("--allow-remote"), "{words}");
    Ok(())
}

#[test]
fn a_repository_for_the_scenarios_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let models = folder.path().join("models");
    for _ in 0..2 {
        let output = dormouse_load().arg("repository").arg(&models).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{output:?}");
        let words = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            words.contains("add_sub, conv, identity_fp32, mlp,"),
            "{words}"
        );
    }
    assert!(models.join("steady/1/model.onnx").exists());
}

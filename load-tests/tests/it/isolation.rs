use anyhow::{Context, Result, ensure};

use crate::{all_met, verdict};

#[test]
fn a_killed_worker_costs_others_nothing_and_its_model_comes_back() -> Result<()> {
    let arguments = [
        "isolation",
        "--models=identity",
        "--concurrency=2",
        "--duration=200ms",
        "--repetitions=1",
    ];
    let verdict = verdict(&arguments)?;
    // How soon depends on what else the machine does.
    all_met(&verdict, &["until it answered again", "after kill -9"])?;
    let kills = verdict["figures"]["recovery"].as_array();
    ensure!(kills.context("no kills")?.len() == 2, "{verdict:#}");
    let ratio = &verdict["figures"]["cost"][0]["p50_ratio"]["median"];
    ensure!(ratio.as_f64().is_some_and(|ratio| ratio > 0.0), "{ratio}");
    Ok(())
}

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{all_met, verdict};

/// What depends on what else the machine does.
const TIMES: [&str; 3] = ["p99 of", "closed within", "served again within"];
/// What depends on how the program was built.
const SIZES: [&str; 2] = ["resident memory", "p99 of"];

/// How many connections the server has hung up on.
fn closed(verdict: &Value) -> Option<usize> {
    let seconds = verdict["figures"][0]["closed_after_seconds"].as_array()?;
    Some(seconds.len())
}

#[test]
fn a_quiet_model_is_served_beside_a_flooded_one() -> Result<()> {
    let verdict = verdict(&["hostile", "flood", "--duration", "1s"])?;
    all_met(&verdict, &TIMES)
}

#[test]
fn slow_clients_are_hung_up_on_and_others_served() -> Result<()> {
    let arguments = ["hostile", "slow", "--connections", "40", "--wait", "24s"];
    let verdict = verdict(&arguments)?;
    all_met(&verdict, &TIMES)?;
    // Bodies have more time.
    ensure!(closed(&verdict) >= Some(4), "{verdict:#}");
    Ok(())
}

#[test]
fn idle_connections_are_closed_and_others_served() -> Result<()> {
    let verdict = verdict(&["hostile", "connections", "--connections", "80"])?;
    all_met(&verdict, &TIMES)?;
    ensure!(closed(&verdict) == Some(80), "{verdict:#}");
    Ok(())
}

#[test]
fn a_server_with_few_file_descriptors_goes_on_and_recovers() -> Result<()> {
    let verdict = verdict(&["hostile", "descriptors", "--descriptors", "128"])?;
    all_met(&verdict, &TIMES)?;
    let bars = verdict["bars"].as_array().context("no bars")?;
    ensure!(bars.iter().all(|bar| bar["found"] != "never"), "{bars:#?}");
    Ok(())
}

#[test]
fn floods_of_frames_end_their_connections() -> Result<()> {
    let verdict = verdict(&["hostile", "frames", "--frames", "2000"])?;
    all_met(&verdict, &TIMES)
}

#[test]
fn a_model_is_loaded_and_unloaded_by_many_at_once() -> Result<()> {
    let verdict = verdict(&["hostile", "churn", "--churn", "3"])?;
    all_met(&verdict, &TIMES)
}

#[test]
fn an_idle_server_has_few_threads() -> Result<()> {
    let verdict = verdict(&["hostile", "idle"])?;
    all_met(&verdict, &SIZES)
}

use anyhow::Result;

use crate::{all_met, verdict};

#[test]
fn counters_are_exact_after_a_mixed_load_with_killed_clients() -> Result<()> {
    let verdict = verdict(&["soak", "--duration", "3s", "--rate", "60"])?;
    all_met(&verdict, &[])
}

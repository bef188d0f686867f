//! What a server takes that nobody asks for anything.

use std::time::Duration;

use anyhow::Result;

use super::{HostileArgs, Shown};
use crate::bars::Bar;
use crate::samples::mib;
use crate::victim::Victim;

/// How long it is left alone before it is looked at.
const REST: Duration = Duration::from_secs(3);
const MOST_MEMORY: f64 = 30.0;
const MOST_THREADS: f64 = 16.0;
/// On more cores there are more threads.
const CORES: usize = 4;

pub(super) async fn run(args: &HostileArgs) -> Result<Shown> {
    let mut shown = Shown::new("idle");
    let victim = Victim::start(&args.server, &[], None).await?;
    tokio::time::sleep(REST).await;
    let bar = Bar::at_most(
        "resident memory",
        MOST_MEMORY,
        mib(victim.resident()?),
        " MiB",
    );
    shown.bar(bar);
    let bar = Bar::at_most("threads", MOST_THREADS, victim.threads()? as f64, "");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    shown.bar(match cores > CORES {
        true => bar.unjudged(),
        false => bar,
    });
    Ok(shown)
}

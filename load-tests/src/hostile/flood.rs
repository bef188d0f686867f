//! One model is flooded, its neighbour is not.

use anyhow::Result;

use super::{HostileArgs, Shown};
use crate::bars::Bar;
use crate::drive;
use crate::drive::progress::Progress;
use crate::drive::scenario::Scenario;
use crate::victim::{Guest, Victim};

/// Requests under way at the flooded model: far more than are run at once.
const FLOOD: usize = 256;
/// How much longer the neighbour's requests may take.
const TIMES: f64 = 1.2;
const QUIET: &str = "mlp";
const FLOODED: &str = "steady";

pub(super) async fn run(args: &HostileArgs) -> Result<Shown> {
    let mut shown = Shown::new("flood");
    let victim = Victim::start(&args.server, &["--keep-alive=forever"], None).await?;
    let guest = Guest {
        rate: 50.0,
        ..Guest::new(victim.grpc(), QUIET)
    };
    let before = guest.usual().await?;
    let mut flood = Scenario::closed(FLOODED, &[FLOOD]);
    flood.duration = args.duration;
    flood.connections = 8;
    let guest = guest.stay();
    let (progress, _stopper) = Progress::silent();
    let flooded = drive::run(&flood, &victim.grpc(), &progress).await?;
    shown.compared("the quiet model", &before, guest.finish().await?, TIMES);
    let answers = flooded
        .steps
        .first()
        .map_or(0.0, |step| step.all.throughput);
    shown.bar(Bar::new(
        "answers per second of the flooded model",
        "some",
        format!("{answers:.1}"),
        answers > 0.0,
    ));
    shown.clients.push(("the flood".to_owned(), flooded));
    Ok(shown)
}

//! More connections than the server has file descriptors: it keeps some for itself, so that it can
//! go on waking models.

use std::time::Duration;

use anyhow::{Context, Result};
use dormouse_client::{Client, InferRequest, Tensor};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::{HostileArgs, Shown, greets};
use crate::bars::Bar;
use crate::drive;
use crate::drive::progress::Progress;
use crate::drive::scenario::Scenario;
use crate::victim::{Guest, Victim};

const MODEL: &str = "mlp";
const SLEEPING: &str = "steady";
/// How long the server is without descriptors: not as long as it takes to close idle connections.
const HOLD: Duration = Duration::from_secs(6);
const RECOVERY: Duration = Duration::from_secs(1);

pub(super) async fn run(args: &HostileArgs) -> Result<Shown> {
    let mut shown = Shown::new("descriptors");
    let limit = args.descriptors;
    let victim = Victim::start(&args.server, &["--keep-alive=forever"], Some(limit)).await?;
    let grpc = Guest::new(victim.grpc(), MODEL);
    let http = Guest {
        // One connection, which is there before.
        outstanding: 1,
        ..Guest::new(victim.http()?, MODEL)
    };
    let (before, http_before) = (grpc.usual().await?, http.usual().await?);
    let client = Client::connect(victim.url()).await?;
    let (grpc, http) = (grpc.stay(), http.stay());
    tokio::time::sleep(Duration::from_millis(300)).await;
    // Those that find no room stay in the system's queue, connected as far as they know.
    let mut sockets = Vec::new();
    for _ in 0..2 * limit {
        for address in [victim.grpc_address(), victim.http_address()?] {
            let connecting = TcpStream::connect(address);
            let connected = tokio::time::timeout(Duration::from_secs(2), connecting).await;
            if let Ok(Ok(socket)) = connected {
                sockets.push(socket);
            }
        }
    }
    let started = Instant::now();
    let mut most = 0;
    // Its files are opened now.
    let numbers = Tensor::from_slice([1, 4], &[1f32; 4])?;
    let woken = client.infer(InferRequest::new(SLEEPING).input("X", numbers));
    let woken = woken.await;
    while started.elapsed() < HOLD {
        most = most.max(open_descriptors(victim.pid())?);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    shown.client(
        "a gRPC client that was there",
        &before,
        grpc.finish().await?,
    );
    shown.client(
        "an HTTP client that was there",
        &http_before,
        http.finish().await?,
    );
    shown.bar(Bar::new(
        "a sleeping model called meanwhile",
        "wakes",
        match &woken {
            Ok(_) => "wakes".to_owned(),
            Err(error) => error.to_string(),
        },
        woken.is_ok(),
    ));
    // Two quarters for connections, a little for all else.
    shown.bar(Bar::at_most(
        "file descriptors in use",
        f64::from(limit) * 0.8,
        most as f64,
        "",
    ));
    shown.counted(&victim, "connections", 1).await?;
    let ended = Instant::now();
    drop(sockets);
    let http_address = victim.http_address()?;
    let recovered = loop {
        if greets(http_address).await && answers_newcomers(&victim).await {
            break Some(ended.elapsed());
        }
        if ended.elapsed() > RECOVERY * 30 {
            break None;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    shown.bar(Bar::new(
        "new clients served again within",
        format!("{RECOVERY:?}"),
        recovered.map_or_else(|| "never".to_owned(), |after| format!("{after:.1?}")),
        recovered.is_some_and(|after| after <= RECOVERY),
    ));
    Ok(shown)
}

/// Whether a new gRPC connection gets answers.
async fn answers_newcomers(victim: &Victim) -> bool {
    let mut scenario = Scenario::closed(MODEL, &[1]);
    scenario.connections = 1;
    scenario.warmup = Duration::ZERO;
    scenario.duration = Duration::from_millis(100);
    scenario.window = Duration::from_millis(100);
    let (progress, _stopper) = Progress::silent();
    let target = victim.grpc();
    let asking = drive::run(&scenario, &target, &progress);
    let outcome = tokio::time::timeout(Duration::from_secs(5), asking).await;
    matches!(outcome, Ok(Ok(outcome)) if !outcome.any_failed())
}

pub(super) fn open_descriptors(pid: u32) -> Result<usize> {
    let folder = format!("/proc/{pid}/fd");
    let entries = std::fs::read_dir(&folder).with_context(|| format!("cannot list {folder}"))?;
    Ok(entries.count())
}

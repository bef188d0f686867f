//! Connections that are opened and left alone, or left in the middle of their first word.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;
use tokio::task::JoinSet;

use super::{HostileArgs, Shown, greets, until_hung_up};
use crate::bars::Bar;
use crate::victim::{Guest, Victim};

const MODEL: &str = "mlp";
/// Until when all of them must be closed.
const WITHIN: Duration = Duration::from_secs(15);

pub(super) async fn run(args: &HostileArgs) -> Result<Shown> {
    let mut shown = Shown::new("connections");
    let victim = Victim::start(&args.server, &["--keep-alive=forever"], None).await?;
    let grpc = Guest::new(victim.grpc(), MODEL);
    let http = Guest::new(victim.http()?, MODEL);
    let (before, http_before) = (grpc.usual().await?, http.usual().await?);
    let (grpc, http) = (grpc.stay(), http.stay());
    // Existing clients are there before the flood.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let (http_address, grpc_address) = (victim.http_address()?, victim.grpc_address());
    let mut flood = JoinSet::new();
    for index in 0..args.connections {
        let (address, words): (&str, &[u8]) = match index % 4 {
            0 => (http_address, b""),
            1 => (grpc_address, b""),
            2 => (http_address, b"POST /v2/mod"),
            _ => (grpc_address, b"PRI * HTTP"),
        };
        let address = address.to_owned();
        flood.spawn(async move { until_hung_up(&address, words, b"", 2 * WITHIN).await });
    }
    let over = AtomicBool::new(false);
    let newcomers = async {
        let (mut served, mut all) = (0u64, 0u64);
        while !over.load(Ordering::Relaxed) {
            all += 1;
            served += u64::from(greets(http_address).await);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        (served, all)
    };
    let flooding = async {
        let mut closed = Vec::with_capacity(args.connections);
        while let Some(one) = flood.join_next().await {
            closed.push(one??);
        }
        over.store(true, Ordering::Relaxed);
        anyhow::Ok(closed)
    };
    let ((served, all), closed) = tokio::join!(newcomers, flooding);
    shown.client("a gRPC client", &before, grpc.finish().await?);
    shown.client("an HTTP client", &http_before, http.finish().await?);
    shown.bar(Bar::equal("new clients served meanwhile", all, served));
    shown.closed("idle connections", &closed?, WITHIN, true);
    shown
        .counted(&victim, "header_time", args.connections as u64)
        .await?;
    Ok(shown)
}

//! Many clients load and unload one model at the same time, without end.

use std::time::Duration;

use anyhow::Result;
use dormouse_client::{Client, InferRequest, Tensor};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::descriptors::open_descriptors;
use super::{HostileArgs, Shown};
use crate::bars::Bar;
use crate::victim::{Guest, Victim};

const CLIENTS: usize = 32;
const CHURNED: &str = "add_sub";
const QUIET: &str = "mlp";
/// After this long no more is begun.
const LONGEST: Duration = Duration::from_secs(120);
/// How long closing sessions, and the connections, may take.
const SETTLING: Duration = Duration::from_secs(10);
/// Files and threads that come and go anyway.
const SPARE: usize = 4;

pub(super) async fn run(args: &HostileArgs) -> Result<Shown> {
    let mut shown = Shown::new("churn");
    let flags = [
        "--model-control-mode=explicit",
        "--load-model=mlp",
        "--keep-alive=forever",
    ];
    let victim = Victim::start(&args.server, &flags, None).await?;
    let guest = Guest::new(victim.grpc(), QUIET);
    let client = Client::connect(victim.url()).await?;
    client.load(CHURNED).await?;
    client.unload(CHURNED).await?;
    let before = guest.usual().await?;
    let (files, threads) = (open_descriptors(victim.pid())?, victim.threads()?);
    let guest = guest.stay();
    let started = Instant::now();
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        let (url, times) = (victim.url(), args.churn);
        clients.spawn(async move {
            let client = Client::connect(url).await?;
            let (mut done, mut failed) = (0u64, 0u64);
            for _ in 0..times {
                if started.elapsed() > LONGEST {
                    break;
                }
                failed += u64::from(client.load(CHURNED).await.is_err());
                failed += u64::from(client.unload(CHURNED).await.is_err());
                done += 1;
            }
            anyhow::Ok((done, failed))
        });
    }
    let (mut done, mut failed) = (0, 0);
    while let Some(one) = clients.join_next().await {
        let (more, more_failed) = one??;
        (done, failed) = (done + more, failed + more_failed);
    }
    shown.client("a client of another model", &before, guest.finish().await?);
    shown.bar(Bar::new(
        format!("errors of {CLIENTS} clients that load and unload"),
        "0",
        format!("{failed} in {done} loads and as many unloads"),
        failed == 0 && done > 0,
    ));
    let all = CLIENTS as u64 * args.churn;
    let bar = Bar::equal("loads and unloads", all, done);
    shown.bar(match done < all {
        true => Bar {
            found: format!("{done} in {LONGEST:?}"),
            ..bar.unjudged()
        },
        false => bar,
    });
    client.load(CHURNED).await?;
    let ones = || Tensor::from_slice([1, 16], &[1i32; 16]);
    let request = InferRequest::new(CHURNED)
        .input("INPUT0", ones()?)
        .input("INPUT1", ones()?);
    let answered = client.infer(request).await.is_ok();
    client.unload(CHURNED).await?;
    let well = client.live().await? && client.ready().await? && answered;
    shown.bar(Bar::new(
        "live, ready and serving the model",
        "yes",
        if well { "yes" } else { "no" },
        well,
    ));
    let settled = Instant::now();
    let (mut files_after, mut threads_after) = (usize::MAX, usize::MAX);
    while settled.elapsed() < SETTLING
        && (files_after > files + SPARE || threads_after > threads + SPARE)
    {
        tokio::time::sleep(Duration::from_millis(250)).await;
        (files_after, threads_after) = (open_descriptors(victim.pid())?, victim.threads()?);
    }
    for (name, before, after) in [
        ("file descriptors", files, files_after),
        ("threads", threads, threads_after),
    ] {
        let most = (before + SPARE) as f64;
        shown.bar(Bar::at_most(
            format!("{name} afterwards"),
            most,
            after as f64,
            "",
        ));
    }
    Ok(shown)
}

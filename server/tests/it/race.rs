//! Models that fall asleep all the time, are parked all the time and push each other out, under
//! callers who come at any moment: every request is answered once and right.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;

use crate::generated::{Generated, TestStore, parameters, settled};
use crate::repository::TestRepository;
use crate::server::TestServer;
use crate::wire;

const CALLERS: usize = 20;
const CALLS: usize = 500;

/// How long each model is kept, and when it is parked.
const MODELS: [(&str, &str); 6] = [
    ("off", "never"),
    ("1ms", "never"),
    ("2ms", "1ms"),
    ("2ms", "0ms"),
    ("1h", "0ms"),
    ("1h", "1ms"),
];

/// Numbers that are as good as random and the same every time.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = self.0.wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

fn model(index: usize) -> Generated {
    // Every other one has matrices that are stored in packs.
    Generated::new([24, 72][index % 2], 2).weights(index)
}

#[tokio::test]
async fn ten_thousand_calls_meet_models_on_every_way_up_and_down() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    for (index, (keep_alive, park_after)) in MODELS.iter().enumerate() {
        let config = parameters(&[("keep_alive", keep_alive), ("park_after", park_after)]);
        let config = format!("max_batch_size: 8 dynamic_batching {{ }}\n{config}");
        model(index).add(&repository, &format!("m{index}"), &config)?;
    }
    settled().await;
    // Room for four of the six, each of which counts with at least 16 MiB.
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .arg("--memory-budget=72MiB")
        .start()
        .await?;
    let mut callers = Vec::new();
    for caller in 0..CALLERS {
        let client = server.grpc().await?;
        callers.push(async move {
            let mut numbers = Numbers(caller as u64);
            let mut sent = [0_u64; MODELS.len()];
            for _ in 0..CALLS {
                let index = numbers.below(MODELS.len() as u64) as usize;
                let value = numbers.below(1000) as f32;
                let model = model(index);
                let request = model.request(&format!("m{index}"), value);
                model.ask_for(&client, request, value).await?;
                sent[index] += 1;
                tokio::time::sleep(Duration::from_micros(500 * numbers.below(6))).await;
            }
            anyhow::Ok(sent)
        });
    }
    let sent = try_join_all(callers).await;
    let sent = sent.with_context(|| format!("the server's log:\n{}", server.log.tail()))?;
    let client = server.grpc().await?;
    for index in 0..MODELS.len() {
        let name = format!("m{index}");
        let expected: u64 = sent.iter().map(|sent| sent[index]).sum();
        let statistics = wire::statistics(&client, &name).await?;
        ensure!(statistics.inference_count == expected, "{statistics:?}");
        let inference = statistics.inference_stats.context("no statistics")?;
        let count = |found: Option<_>| {
            let found: Option<dormouse_proto::inference::StatisticDuration> = found;
            found.map_or(0, |duration| duration.count)
        };
        ensure!(
            count(inference.success) == expected,
            "{name}: not {expected}"
        );
        ensure!(count(inference.fail) == 0, "{name} failed");
        let label = format!(r#"model="{name}""#);
        let answered = server
            .metric("nv_inference_request_success", &[&label])
            .await?;
        ensure!(answered == expected as f64, "{name}: {answered}");
    }
    for metric in [
        "dormouse_load_failures_total",
        "nv_inference_request_failure",
        "nv_inference_pending_request_count",
    ] {
        ensure!(server.metric(metric, &[]).await? == 0.0, "{metric}");
    }
    for metric in [
        "dormouse_sleeps_total",
        "dormouse_parks_total",
        "dormouse_evictions_total",
    ] {
        ensure!(
            server.metric(metric, &[]).await? > 1.0,
            "{metric}: the race was not run"
        );
    }
    let (good, report) = store.command("verify").await?;
    ensure!(good, "{report}");
    server.assert_healthy().await
}

//! Latency and throughput of a model in the server and in a process of its own, in turns.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dormouse_client::InferResponse;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{Bench, IsolationArgs, Running, agree, connect};
use crate::models::{self, BenchModel};
use crate::samples::Samples;
use crate::table::Titled;
use crate::undisturbed::{histogram, micros};

/// Requests in flight per connection.
const PER_CONNECTION: usize = 16;

/// One model at one concurrency; ratios are of the two measurements of one round.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Cost {
    model: String,
    concurrency: usize,
    inside: Speed,
    isolated: Speed,
    p50_ratio: Samples,
    p99_ratio: Samples,
    throughput_ratio: Samples,
}

/// Milliseconds, and answers per second.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Speed {
    p50: Samples,
    p99: Samples,
    throughput: Samples,
}

/// Drives both servers in turns.
pub(super) async fn measure(bench: &Bench, args: &IsolationArgs) -> Result<Vec<Cost>> {
    for model in &bench.models {
        model.lay_out(&bench.path("repository"), &model.name, "")?;
    }
    models::settled().await;
    let start = async |mode: &str| {
        let flags = [format!("--isolation={mode}")];
        bench
            .start("repository", &format!("store-{mode}"), &flags)
            .await
    };
    let servers = [start("none").await?, start("process").await?];
    let expected = servers[0].warm_up(&bench.models).await?;
    for (one, other) in expected
        .iter()
        .zip(servers[1].warm_up(&bench.models).await?)
    {
        ensure!(agree(one, &other), "the two servers answer differently");
    }
    let mut costs = Vec::new();
    for (model, expected) in bench.models.iter().zip(&expected) {
        for &concurrency in &args.concurrency {
            let mut speeds = [Speed::default(), Speed::default()];
            // The first round warms up and is not counted. Who begins takes turns, too.
            for round in 0..=args.repetitions {
                for turn in 0..servers.len() {
                    let which = (round + turn) % servers.len();
                    let drive = Drive {
                        model,
                        expected,
                        concurrency,
                        duration: args.duration,
                    };
                    let (p50, p99, throughput) = drive.run(&servers[which]).await?;
                    if round > 0 {
                        let speed = &mut speeds[which];
                        speed.p50.push(p50);
                        speed.p99.push(p99);
                        speed.throughput.push(throughput);
                    }
                }
            }
            let [inside, isolated] = speeds;
            costs.push(Cost {
                model: model.name.clone(),
                concurrency,
                p50_ratio: isolated.p50.ratios(&inside.p50),
                p99_ratio: isolated.p99.ratios(&inside.p99),
                throughput_ratio: isolated.throughput.ratios(&inside.throughput),
                inside,
                isolated,
            });
        }
    }
    Ok(costs)
}

/// A closed loop over one model.
struct Drive<'a> {
    model: &'a BenchModel,
    expected: &'a InferResponse,
    concurrency: usize,
    duration: Duration,
}

impl Drive<'_> {
    /// The median and p99 in milliseconds, and answers per second.
    async fn run(&self, server: &Running) -> Result<(f64, f64, f64)> {
        let mut clients = Vec::new();
        for _ in 0..self.concurrency.div_ceil(PER_CONNECTION) {
            let client = connect(&server.process).await?;
            let answer = client.infer(self.model.request(&self.model.name)).await?;
            ensure!(agree(self.expected, &answer), "an answer was wrong");
            clients.push(client);
        }
        let stop = Arc::new(AtomicBool::new(false));
        let mut tasks = JoinSet::new();
        let started = Instant::now();
        for index in 0..self.concurrency {
            let client = clients[index % clients.len()].clone();
            let request = self.model.request(&self.model.name);
            let stop = Arc::clone(&stop);
            tasks.spawn(async move {
                let mut took = histogram()?;
                while !stop.load(Ordering::Relaxed) {
                    let asked = Instant::now();
                    client.infer(request.clone()).await?;
                    took.saturating_record(micros(asked.elapsed()));
                }
                anyhow::Ok(took)
            });
        }
        tokio::time::sleep(self.duration).await;
        stop.store(true, Ordering::Relaxed);
        let mut all = histogram()?;
        while let Some(task) = tasks.join_next().await {
            all.add(task?.context("a request failed")?)?;
        }
        let seconds = started.elapsed().as_secs_f64();
        ensure!(!all.is_empty(), "no request was answered");
        let millis = |quantile| all.value_at_quantile(quantile) as f64 / 1e3;
        Ok((millis(0.5), millis(0.99), all.len() as f64 / seconds))
    }
}

/// One table per measure.
pub(super) fn tables(costs: &[Cost]) -> Vec<Titled> {
    let table = |title: &str, measure: fn(&Cost) -> [&Samples; 3]| {
        let rows = costs.iter().map(|cost| {
            let mut row = vec![cost.model.clone(), cost.concurrency.to_string()];
            row.extend(measure(cost).map(Samples::cell));
            row
        });
        let header = [
            "model",
            "in flight",
            "inside",
            "isolated",
            "isolated/inside",
        ];
        Titled::new(title, &header, rows.collect())
    };
    vec![
        table("p50 of a model inside the server and isolated; ms", |of| {
            [&of.inside.p50, &of.isolated.p50, &of.p50_ratio]
        }),
        table("p99; ms", |of| {
            [&of.inside.p99, &of.isolated.p99, &of.p99_ratio]
        }),
        table("Throughput; answers/s", |of| {
            let (inside, isolated) = (&of.inside.throughput, &of.isolated.throughput);
            [inside, isolated, &of.throughput_ratio]
        }),
    ]
}

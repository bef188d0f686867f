//! What a request costs beyond the protocol itself.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use bytes::Bytes;
use clap::Args;
use dormouse_proto::inference as pb;
use pb::grpc_inference_service_client::GrpcInferenceServiceClient;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::transport::Channel;

use crate::process::ServerProcess;
use crate::record::{Findings, ReportArgs, Started};
use crate::samples::Samples;
use crate::table::Titled;

/// The identity of an FP32 matrix.
const IDENTITY: &[u8] = include_bytes!("../../server/tests/models/identity_fp32.onnx");

/// Requests in flight per connection; more connections are opened beyond it.
const PER_CONNECTION: usize = 16;

/// Drives Dormouse with a model that does nothing, and in turns a bare echo of the same messages.
#[derive(Args, Debug)]
pub(crate) struct OverheadArgs {
    /// Requests in flight
    #[arg(long, value_delimiter = ',', default_value = "1,8,64")]
    concurrency: Vec<usize>,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 2)]
    seconds: u64,
    /// Measurements of each server, taken in turns
    #[arg(long, default_value_t = 5)]
    repetitions: usize,
    /// FP32 values per request
    #[arg(long, default_value_t = 16)]
    elements: usize,
    #[command(flatten)]
    report: ReportArgs,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct OverheadFigures {
    /// FP32 values per request.
    elements: usize,
    rows: Vec<OverheadRow>,
}

/// Both servers at one concurrency.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct OverheadRow {
    concurrency: usize,
    echo: Cost,
    dormouse: Cost,
    /// Of the measurements of one round.
    cpu_ratio: Samples,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Cost {
    requests_per_second: Samples,
    /// Microseconds per request.
    cpu_micros: Samples,
}

struct Sample {
    requests_per_second: f64,
    cpu_micros: f64,
}

pub(crate) async fn run(args: OverheadArgs) -> anyhow::Result<()> {
    ensure!(
        args.seconds <= 60 && args.repetitions <= 100,
        "at most 60 seconds and 100 repetitions"
    );
    ensure!(
        args.elements > 0
            && args
                .concurrency
                .iter()
                .all(|count| (1..=1024).contains(count)),
        "concurrency from 1 to 1024"
    );
    let started = Started::now();
    let repository = tempfile::tempdir()?;
    lay_out(repository.path())?;
    let echo = ServerProcess::start(&std::env::current_exe()?, &["echo"])?;
    let dormouse = ServerProcess::dormouse(repository.path())?;
    let mut rows = Vec::new();
    for &concurrency in &args.concurrency {
        let mut row = OverheadRow {
            concurrency,
            ..OverheadRow::default()
        };
        // The first round warms both up and is not counted.
        for repetition in 0..=args.repetitions {
            for (server, cost) in [(&echo, &mut row.echo), (&dormouse, &mut row.dormouse)] {
                let sample = measure(server, concurrency, &args).await?;
                if repetition > 0 {
                    cost.requests_per_second.push(sample.requests_per_second);
                    cost.cpu_micros.push(sample.cpu_micros);
                }
            }
        }
        row.cpu_ratio = row.dormouse.cpu_micros.ratios(&row.echo.cpu_micros);
        rows.push(row);
    }
    let figures = OverheadFigures {
        elements: args.elements,
        rows,
    };
    started.record(figures).publish(&args.report)
}

impl Findings for OverheadFigures {
    fn about(&self) -> String {
        format!(
            "A request of {} FP32 values through Dormouse to a model that returns them, beside a \
             bare gRPC service that echoes the same messages. Ratios are those within a round.",
            self.elements
        )
    }

    fn tables(&self) -> Vec<Titled> {
        let rows = self.rows.iter().map(|row| {
            vec![
                row.concurrency.to_string(),
                row.echo.requests_per_second.cell(),
                row.dormouse.requests_per_second.cell(),
                row.echo.cpu_micros.cell(),
                row.dormouse.cpu_micros.cell(),
                row.cpu_ratio.cell(),
            ]
        });
        vec![Titled::new(
            "",
            &[
                "in flight",
                "echo, requests/s",
                "Dormouse, requests/s",
                "echo, CPU µs/request",
                "Dormouse, CPU µs/request",
                "CPU, Dormouse/echo",
            ],
            rows.collect(),
        )]
    }
}

fn lay_out(repository: &Path) -> anyhow::Result<()> {
    let model = repository.join("identity");
    std::fs::create_dir_all(model.join("1"))?;
    std::fs::write(model.join("1/model.onnx"), IDENTITY)?;
    std::fs::write(
        model.join("config.pbtxt"),
        "max_batch_size: 0
input { name: \"INPUT\" data_type: TYPE_FP32 dims: [ -1, -1 ] }
output { name: \"OUTPUT\" data_type: TYPE_FP32 dims: [ -1, -1 ] }
parameters { key: \"dormouse.keep_alive\" value { string_value: \"forever\" } }
",
    )?;
    Ok(())
}

async fn measure(
    server: &ServerProcess,
    concurrency: usize,
    args: &OverheadArgs,
) -> anyhow::Result<Sample> {
    let request = Arc::new(pb::ModelInferRequest {
        model_name: "identity".to_owned(),
        inputs: vec![pb::model_infer_request::InferInputTensor {
            name: "INPUT".to_owned(),
            datatype: "FP32".to_owned(),
            shape: vec![1, args.elements as i64],
            ..Default::default()
        }],
        raw_input_contents: vec![Bytes::from(vec![0u8; args.elements * 4])],
        ..Default::default()
    });
    let mut clients = Vec::new();
    for _ in 0..concurrency.div_ceil(PER_CONNECTION) {
        let channel = Channel::from_shared(server.url())?.connect().await?;
        clients.push(GrpcInferenceServiceClient::new(channel));
    }
    // One answer before the clock starts: the first call wakes the model.
    let answer = clients[0]
        .model_infer((*request).clone())
        .await
        .context("first request")?
        .into_inner();
    ensure!(
        answer.raw_output_contents == request.raw_input_contents,
        "the answer is not the identity"
    );

    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    let cpu_before = server.cpu_time()?;
    let started = Instant::now();
    for index in 0..concurrency {
        let mut client = clients[index % clients.len()].clone();
        let (request, stop) = (Arc::clone(&request), Arc::clone(&stop));
        tasks.spawn(async move {
            let mut count = 0u64;
            while !stop.load(Ordering::Relaxed) {
                client.model_infer((*request).clone()).await?;
                count += 1;
            }
            anyhow::Ok(count)
        });
    }
    tokio::time::sleep(Duration::from_secs(args.seconds)).await;
    stop.store(true, Ordering::Relaxed);
    let mut requests = 0;
    while let Some(count) = tasks.join_next().await {
        requests += count??;
    }
    let elapsed = started.elapsed();
    let cpu = server.cpu_time()? - cpu_before;
    ensure!(requests > 0, "no request was answered");
    Ok(Sample {
        requests_per_second: requests as f64 / elapsed.as_secs_f64(),
        cpu_micros: cpu.as_secs_f64() * 1e6 / requests as f64,
    })
}

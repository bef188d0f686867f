//! Requests share runs, and nobody's answer shows it.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dormouse_proto::inference as pb;
use futures_util::future::{join_all, try_join_all};
use tokio::time::Instant;

use crate::repository::{Model, TestRepository};
use crate::server::TestServer;
use crate::wire::{self, Element, GrpcClient, Request, add_sub, output};

/// Batches of eight: a batch waits for its eighth row far longer than any test takes to send it.
const EIGHTS: &str = "max_batch_size: 8
dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 30000000 }";

/// Batches of whatever came within two milliseconds.
const LOOSE: &str = "max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 2000 }";

/// A small generator with a fixed seed, so that a failure can be run again.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() >> 33).expect("31 bits") % bound
    }

    /// Somewhere in -2..2.
    fn value(&mut self) -> f32 {
        (self.below(1 << 16) as f32 / 16384.0) - 2.0
    }
}

async fn start(models: &[(&str, &str, &str)]) -> Result<(TestRepository, TestServer, GrpcClient)> {
    let repository = TestRepository::new()?;
    for (name, file, config) in models {
        repository.add(name, Model::new(file).config(config))?;
    }
    let server = TestServer::over(&repository)
        // Another session may answer with other last bits.
        .arg("--background-preparation=false")
        .start()
        .await?;
    let client = server.grpc().await?;
    Ok((repository, server, client))
}

#[tokio::test]
async fn concurrent_requests_run_in_full_batches() -> Result<()> {
    let (_repository, mut server, client) = start(&[("simple", "add_sub", EIGHTS)]).await?;
    let calls = (0..32).map(|i| wire::infer(&client, add_sub("simple", i, 1)));
    for (i, answer) in (0..).zip(try_join_all(calls).await?) {
        ensure!(output::<i32>(&answer, "OUTPUT0", &[1, 16])? == [i + 1; 16]);
        ensure!(output::<i32>(&answer, "OUTPUT1", &[1, 16])? == [i - 1; 16]);
    }
    let statistics = wire::statistics(&client, "simple").await?;
    ensure!(statistics.inference_count == 32, "{statistics:?}");
    ensure!(statistics.execution_count == 4, "{statistics:?}");
    let sizes: Vec<_> = statistics
        .batch_stats
        .iter()
        .map(|batch| {
            let runs = batch.compute_infer.as_ref().map_or(0, |runs| runs.count);
            (batch.batch_size, runs)
        })
        .collect();
    ensure!(sizes == [(8, 4)], "{sizes:?}");
    server.assert_healthy().await
}

#[tokio::test]
async fn a_request_of_several_rows_counts_as_its_rows() -> Result<()> {
    let (_repository, _server, client) = start(&[("simple", "add_sub", EIGHTS)]).await?;
    let rows = |count: usize, value: i32| {
        let shape = [i64::try_from(count).expect("few rows"), 16];
        let values = vec![value; count * 16];
        Request::new("simple")
            .input("INPUT0", &shape, &values)
            .input("INPUT1", &shape, &values)
    };
    let calls = [(5, 10), (3, 20)].map(|(count, value)| wire::infer(&client, rows(count, value)));
    let answers = try_join_all(calls).await?;
    ensure!(output::<i32>(&answers[0], "OUTPUT0", &[5, 16])? == vec![20; 80]);
    ensure!(output::<i32>(&answers[1], "OUTPUT0", &[3, 16])? == vec![40; 48]);
    let statistics = wire::statistics(&client, "simple").await?;
    ensure!(statistics.inference_count == 8, "{statistics:?}");
    ensure!(statistics.execution_count == 1, "{statistics:?}");
    let status = wire::infer(&client, rows(9, 1)).await.err();
    let status = status.context("nine rows passed a limit of eight")?;
    ensure!(status.code() == tonic::Code::InvalidArgument, "{status:?}");
    Ok(())
}

/// Rows alone through a model that does not batch, then again in ten thousand random batches, or
/// as many as there is time for.
async fn batches_do_not_change_answers(file: &str, row_shape: &[i64], out: &[i64]) -> Result<()> {
    const ROWS: usize = 48;
    const BATCHES: u64 = 10_000;
    const AT_ONCE: usize = 400;
    const ENOUGH: Duration = Duration::from_secs(15);
    let models = [
        ("alone", file, "max_batch_size: 8"),
        ("batched", file, LOOSE),
    ];
    let (_repository, mut server, client) = start(&models).await?;
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let width = usize::try_from(row_shape.iter().product::<i64>())?;
    let rows: Vec<Vec<f32>> = (0..ROWS)
        .map(|_| (0..width).map(|_| random.value()).collect())
        .collect();
    let shape = |rows: usize, dims: &[i64]| {
        let mut shape = vec![i64::try_from(rows).expect("few rows")];
        shape.extend(dims);
        shape
    };
    let request = |model: &str, chosen: &[usize]| {
        let values: Vec<f32> = chosen.iter().flat_map(|row| rows[*row].clone()).collect();
        Request::new(model).input("X", &shape(chosen.len(), row_shape), &values)
    };
    let mut alone = Vec::new();
    for row in 0..ROWS {
        let answer = wire::infer(&client, request("alone", &[row])).await?;
        alone.push(f32::write(&output::<f32>(&answer, "Y", &shape(1, out))?));
    }
    let started = Instant::now();
    let mut requests = 0;
    let mut batches = 0;
    while batches < BATCHES && started.elapsed() < ENOUGH {
        let choices: Vec<Vec<usize>> = (0..AT_ONCE)
            .map(|_| {
                let rows = 1 + random.below(8);
                (0..rows).map(|_| random.below(ROWS)).collect()
            })
            .collect();
        let calls = choices
            .iter()
            .map(|chosen| wire::infer(&client, request("batched", chosen)));
        for (chosen, answer) in choices.iter().zip(try_join_all(calls).await?) {
            let found = f32::write(&output::<f32>(&answer, "Y", &shape(chosen.len(), out))?);
            let expected: Vec<u8> = chosen.iter().flat_map(|row| alone[*row].to_vec()).collect();
            ensure!(
                found == expected,
                "{file}: rows {chosen:?} changed in a batch"
            );
        }
        requests += choices.len() as u64;
        let statistics = wire::statistics(&client, "batched").await?;
        batches = statistics.execution_count;
    }
    eprintln!("{file}: {requests} requests in {batches} batches");
    ensure!(batches < requests, "nothing was batched");
    server.assert_healthy().await
}

#[tokio::test]
async fn a_dense_models_answers_are_the_same_bits_in_any_batch() -> Result<()> {
    batches_do_not_change_answers("mlp", &[16], &[4]).await
}

#[tokio::test]
async fn a_convolutions_answers_are_the_same_bits_in_any_batch() -> Result<()> {
    batches_do_not_change_answers("conv", &[2, 8, 8], &[4, 4, 4]).await
}

#[tokio::test]
async fn a_model_whose_rows_influence_each_other_is_not_batched() -> Result<()> {
    let (_repository, server, client) = start(&[("dynquant", "dynquant", LOOSE)]).await?;
    let request = |scale: f32| {
        let row: Vec<f32> = (0..8u8).map(|i| (f32::from(i) - 3.5) * scale).collect();
        Request::new("dynquant").input("X", &[1, 8], &row)
    };
    let scales: Vec<f32> = (0..24u8).map(|i| 1.0 + f32::from(i) * 7.0).collect();
    let mut alone = Vec::new();
    for scale in &scales {
        let answer = wire::infer(&client, request(*scale)).await?;
        alone.push(output::<f32>(&answer, "Y", &[1, 4])?);
    }
    let calls = scales.iter().map(|s| wire::infer(&client, request(*s)));
    for (expected, answer) in alone.iter().zip(try_join_all(calls).await?) {
        ensure!(&output::<f32>(&answer, "Y", &[1, 4])? == expected);
    }
    let statistics = wire::statistics(&client, "dynquant").await?;
    ensure!(statistics.execution_count == 48, "{statistics:?}");
    let told = server
        .log
        .lines()
        .iter()
        .any(|line| line.contains("DynamicQuantizeLinear"));
    ensure!(told, "the log does not say why the model is not batched");
    Ok(())
}

#[tokio::test]
async fn a_poisoned_request_in_a_full_batch_fails_alone() -> Result<()> {
    let (_repository, mut server, client) = start(&[("poison", "poison", EIGHTS)]).await?;
    let request = |value: i32| Request::new("poison").input("X", &[1, 1], &[value]);
    let values = [0, 1, 2, 99, 4, 5, 6, 7];
    let answers = join_all(values.map(|v| wire::infer(&client, request(v)))).await;
    for (value, answer) in values.into_iter().zip(answers) {
        if value == 99 {
            let status = answer.err().context("an index out of range was found")?;
            ensure!(status.message().contains("Gather"), "{status:?}");
        } else {
            let answer = answer.with_context(|| format!("{value} suffered for its neighbour"))?;
            ensure!(output::<i32>(&answer, "Y", &[1, 1])? == [value * 10]);
        }
    }
    let statistics = wire::statistics(&client, "poison").await?;
    let inference = statistics.inference_stats.context("no statistics")?;
    let count = |duration: Option<pb::StatisticDuration>| duration.map_or(0, |d| d.count);
    ensure!(count(inference.success) == 7 && count(inference.fail) == 1);
    server.assert_healthy().await
}

#[tokio::test]
async fn requests_of_different_shapes_wait_for_batches_of_their_own() -> Result<()> {
    let (_repository, mut server, client) = start(&[("echo", "identity_fp32", LOOSE)]).await?;
    let requests: Vec<Vec<f32>> = (0..120u8)
        .map(|i| vec![f32::from(i); 1 + usize::from(i % 5)])
        .collect();
    let calls = requests.iter().map(|row| {
        let shape = [1, i64::try_from(row.len()).expect("short rows")];
        wire::infer(&client, Request::new("echo").input("INPUT", &shape, row))
    });
    for (row, answer) in requests.iter().zip(try_join_all(calls).await?) {
        let shape = [1, i64::try_from(row.len())?];
        ensure!(&output::<f32>(&answer, "OUTPUT", &shape)? == row);
    }
    server.assert_healthy().await
}

#[tokio::test]
async fn many_clients_each_get_their_own_answers() -> Result<()> {
    const CLIENTS: i32 = 64;
    const CALLS: i32 = 20;
    let (_repository, mut server, _client) = start(&[("simple", "add_sub", LOOSE)]).await?;
    let address = server.grpc;
    let clients = (0..CLIENTS).map(|tag| async move {
        let client = wire::connect(address).await?;
        for call in 0..CALLS {
            let value = tag * 1000 + call;
            let request = add_sub("simple", value, 7).id(format!("{tag}-{call}"));
            let answer = wire::infer(&client, request).await?;
            ensure!(answer.id == format!("{tag}-{call}"), "{}", answer.id);
            ensure!(output::<i32>(&answer, "OUTPUT0", &[1, 16])? == [value + 7; 16]);
            ensure!(output::<i32>(&answer, "OUTPUT1", &[1, 16])? == [value - 7; 16]);
        }
        Ok(())
    });
    try_join_all(clients).await?;
    server.assert_healthy().await
}

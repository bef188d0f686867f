//! Replicas by load: KEDA's external scaler on the gRPC port.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use dormouse_proto::externalscaler as pb;
use pb::external_scaler_client::ExternalScalerClient;
use tonic::transport::{Channel, Endpoint};

use crate::deadlines::{occupy, pending, start_slow};
use crate::server::{TestServer, patiently};
use crate::wire::{self, slow};

async fn scaler(server: &TestServer) -> Result<ExternalScalerClient<Channel>> {
    let endpoint = Endpoint::from_shared(format!("http://{}", server.grpc))?;
    Ok(ExternalScalerClient::new(endpoint.connect().await?))
}

fn trigger(metadata: &[(&str, &str)]) -> pb::ScaledObjectRef {
    let pairs = metadata
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    pb::ScaledObjectRef {
        name: "dormouse".to_owned(),
        namespace: "default".to_owned(),
        scaler_metadata: pairs.collect::<HashMap<_, _>>(),
    }
}

#[tokio::test]
async fn metrics_follow_the_requests_that_wait_and_run() -> Result<()> {
    const WAITING: usize = 7;
    let (_repository, server, client) = start_slow().await?;
    let scaler = scaler(&server).await?;
    let endless = occupy(&server, &client).await?;
    let waiting: Vec<_> = (0..WAITING)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { wire::infer(&client, slow("slow", 1)).await })
        })
        .collect();
    pending(&server, WAITING).await?;
    for (metric, expected) in [("pending", 8.0), ("queued", 7.0), ("inflight", 1.0)] {
        for model in [&[("model", "slow")][..], &[]] {
            let metadata = [model, &[("metric", metric)]].concat();
            let request = pb::GetMetricsRequest {
                scaled_object_ref: Some(trigger(&metadata)),
                metric_name: String::new(),
            };
            let values = scaler.clone().get_metrics(request).await?.into_inner();
            let value = values.metric_values.first().context("a value")?;
            ensure!(
                value.metric_value_float == expected,
                "{metadata:?}: {value:?}"
            );
            ensure!(
                value.metric_value as f64 == expected,
                "{metadata:?}: {value:?}"
            );
        }
    }
    endless.run.abort();
    for request in waiting {
        request.await??;
    }
    Ok(())
}

#[tokio::test]
async fn a_stream_of_a_server_that_stops_ends_in_order() -> Result<()> {
    let (_repository, mut server, _client) = start_slow().await?;
    let mut scaler = scaler(&server).await?;
    let mut stream = scaler.stream_is_active(trigger(&[])).await?.into_inner();
    let first = stream.message().await?.context("an answer")?;
    ensure!(first.result, "it was called just now");
    server.terminate()?;
    // No error: KEDA tries again at once after that.
    let ended = patiently("the stream ends", stream.message()).await??;
    ensure!(ended.is_none(), "{ended:?}");
    let status = server.exited().await?;
    ensure!(status.success(), "{status}");
    Ok(())
}

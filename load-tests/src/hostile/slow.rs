//! Clients that send a byte now and then, and clients that do not read their answers.

use std::time::Duration;

use anyhow::Result;
use bytes::Bytes;
use dormouse_proto::inference as pb;
use http::Request;
use http::header::{CONTENT_TYPE, TE};
use http_body_util::Full;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{HEADER_TIMEOUT, HostileArgs, SLACK, Shown, TIMES, guests, until_hung_up};
use crate::bars::Bar;
use crate::frames::grpc_message;
use crate::samples::mib;
use crate::victim::Victim;

const MODEL: &str = "mlp";
/// What a server has for the next part of a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// An answer of a mebibyte: 8 rows of so many numbers.
const COLUMNS: usize = 32 << 10;
/// How long memory may take to be given back once slow readers have left.
const GIVE_BACK: Duration = Duration::from_secs(20);

pub(super) async fn run(args: &HostileArgs) -> Result<Shown> {
    let mut shown = Shown::new("slow");
    let victim = Victim::start(&args.server, &["--keep-alive=forever"], None).await?;
    let (grpc, http) = guests(&victim, MODEL)?;
    let (before, http_before) = (grpc.usual().await?, http.usual().await?);
    let resident = victim.resident()?;
    let (grpc, http) = (grpc.stay(), http.stay());
    let each = (args.connections / 10).max(2);
    let (mut headers, mut bodies, mut readers) = (JoinSet::new(), JoinSet::new(), JoinSet::new());
    for _ in 0..each {
        let address = victim.http_address()?.to_owned();
        let wait = args.wait;
        headers.spawn(async move {
            let words = b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: slow\r\nX-Slow: ";
            until_hung_up(&address, words, b"a", wait).await
        });
        let address = victim.http_address()?.to_owned();
        bodies.spawn(async move {
            let words = b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: slow\r\n\
                Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n{";
            until_hung_up(&address, words, b" ", wait).await
        });
        let address = victim.grpc_address().to_owned();
        readers.spawn(async move { unread(&address, wait).await });
    }
    let closed = all(headers).await?;
    shown.closed(
        "slow headers",
        &closed,
        HEADER_TIMEOUT + SLACK,
        args.wait > HEADER_TIMEOUT + SLACK,
    );
    let closed = all(bodies).await?;
    let within = BODY_TIMEOUT + 2 * SLACK;
    shown.closed("slow bodies", &closed, within, args.wait > within);
    let held = all(readers).await?;
    shown.compared("a gRPC client", &before, grpc.finish().await?, TIMES);
    shown.compared("an HTTP client", &http_before, http.finish().await?, TIMES);
    let answered = held.iter().filter(|&&answered| answered).count();
    shown.bar(Bar::equal(
        "answers begun for who does not read",
        each as u64,
        answered as u64,
    ));
    let most = resident + (64 << 20).max(resident / 4);
    let left = Instant::now();
    let mut after = victim.resident()?;
    while after > most && left.elapsed() < GIVE_BACK {
        tokio::time::sleep(Duration::from_millis(250)).await;
        after = victim.resident()?;
    }
    shown.bar(Bar::at_most(
        "memory after they left",
        mib(most),
        mib(after),
        " MiB",
    ));
    Ok(shown)
}

async fn all<T: 'static>(mut tasks: JoinSet<Result<T>>) -> Result<Vec<T>> {
    let mut ended = Vec::with_capacity(tasks.len());
    while let Some(one) = tasks.join_next().await {
        ended.push(one??);
    }
    Ok(ended)
}

/// Asks for a large answer over gRPC and does not read it; whether one was begun.
async fn unread(address: &str, wait: Duration) -> Result<bool> {
    let socket = TcpStream::connect(address).await?;
    let (mut sender, connection) = http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(16 << 10)
        .initial_connection_window_size(64 << 10)
        .handshake(TokioIo::new(socket))
        .await?;
    let connection = tokio::spawn(connection);
    let request = Request::post(format!(
        "http://{address}/inference.GRPCInferenceService/ModelInfer"
    ))
    .header(CONTENT_TYPE, "application/grpc")
    .header(TE, "trailers")
    .body(Full::new(large_request()?))?;
    let ended = Instant::now() + wait;
    let answer = tokio::time::timeout_at(ended, sender.send_request(request)).await;
    let begun = match answer {
        Ok(Ok(answer)) => {
            let begun =
                answer.status().is_success() && !answer.headers().contains_key("grpc-status");
            // Held, not read.
            tokio::time::sleep_until(ended).await;
            drop(answer);
            begun
        }
        Ok(Err(_)) | Err(_) => false,
    };
    connection.abort();
    Ok(begun)
}

fn large_request() -> Result<Bytes> {
    let bytes = 8 * COLUMNS * size_of::<f32>();
    let message = pb::ModelInferRequest {
        model_name: "identity_fp32".to_owned(),
        inputs: vec![pb::model_infer_request::InferInputTensor {
            name: "INPUT".to_owned(),
            datatype: "FP32".to_owned(),
            shape: vec![8, COLUMNS as i64],
            ..Default::default()
        }],
        raw_input_contents: vec![vec![0; bytes].into()],
        ..Default::default()
    };
    Ok(grpc_message(&message)?.into())
}

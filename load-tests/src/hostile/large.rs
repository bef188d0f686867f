//! A tensor of almost two gibibytes where that is allowed, and one that is larger than allowed.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use dormouse_proto::inference as pb;
use http::Request;
use http::header::{CONTENT_TYPE, TE};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use pb::grpc_inference_service_client::GrpcInferenceServiceClient;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tonic::Code;

use super::{HostileArgs, Shown};
use crate::bars::Bar;
use crate::victim::{Guest, Victim};

const MODEL: &str = "mlp";
/// 1.9 GiB, in whole blocks.
const LARGE: u64 = 1945 << 20;
const TOO_LARGE: u64 = 3 << 30;
const BLOCK: usize = 1 << 20;
/// What server, client and kernel need for it, sent and answered.
const NEEDED: u64 = 14 << 30;
const PATIENCE: Duration = Duration::from_secs(120);

pub(super) async fn run(args: &HostileArgs) -> Result<Shown> {
    let mut shown = Shown::new("large");
    let available = available_memory()?;
    if available < NEEDED {
        let found = format!("{} GiB of memory are there", available >> 30);
        let bar = Bar::new("a tensor of 1.9 GiB comes back", "equal", found, false);
        shown.bar(bar.unjudged());
        return Ok(shown);
    }
    let flags = [
        "--keep-alive=forever",
        "--http-max-input-size=2GiB",
        "--grpc-max-input-size=2147483647",
    ];
    let victim = Victim::start(&args.server, &flags, None).await?;
    let guest = Guest::new(victim.http()?, MODEL);
    let before = guest.usual().await?;
    let address = victim.http_address()?.to_owned();
    let block = block();
    let sent = exchange(&address, &block, LARGE);
    let answer = tokio::time::timeout(PATIENCE, sent).await;
    let answer = answer.context("no answer to 1.9 GiB")??;
    shown.bar(Bar::new(
        "a tensor of 1.9 GiB comes back over HTTP",
        "200, equal",
        answer.describe(),
        answer.status == 200 && answer.is_equal,
    ));
    let refused = exchange(&address, &block, TOO_LARGE);
    let answer = tokio::time::timeout(PATIENCE, refused).await;
    let answer = answer.context("no answer to 3 GiB")??;
    shown.bar(Bar::new(
        "a tensor of 3 GiB over HTTP",
        "400",
        answer.status.to_string(),
        answer.status == 400,
    ));
    let url = victim.url();
    let sent = call(&url, &block);
    let found = tokio::time::timeout(PATIENCE, sent).await;
    let found = found.context("no answer to 1.9 GiB over gRPC")??;
    shown.bar(Bar::new(
        "a tensor of 1.9 GiB comes back over gRPC",
        "equal",
        found,
        found == "equal",
    ));
    let refused = announce(victim.grpc_address());
    let status = tokio::time::timeout(PATIENCE, refused).await;
    let status = status.context("no answer to 3 GiB over gRPC")??;
    shown.bar(Bar::new(
        "a message of 3 GiB over gRPC",
        "OUT_OF_RANGE",
        format!("{status:?}"),
        status == Code::OutOfRange,
    ));
    shown.client("an HTTP client afterwards", &before, guest.usual().await?);
    shown.counted(&victim, "body_size", 2).await?;
    Ok(shown)
}

/// Has 1.9 GiB of the block sent through a model that changes nothing, over gRPC.
async fn call(url: &str, block: &[u8]) -> Result<&'static str> {
    let client = GrpcInferenceServiceClient::connect(url.to_owned()).await?;
    let mut client = client
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(usize::MAX);
    let tensor = Bytes::from(block.repeat(LARGE as usize / block.len()));
    let request = pb::ModelInferRequest {
        model_name: "identity_fp32".to_owned(),
        inputs: vec![pb::model_infer_request::InferInputTensor {
            name: "INPUT".to_owned(),
            datatype: "FP32".to_owned(),
            shape: vec![1, LARGE as i64 / 4],
            ..Default::default()
        }],
        raw_input_contents: vec![tensor],
        ..Default::default()
    };
    let answer = client.model_infer(request).await?.into_inner();
    let [back] = &answer.raw_output_contents[..] else {
        return Ok("no tensor");
    };
    let is_equal = back.len() as u64 == LARGE && back.chunks(block.len()).all(|one| one == block);
    Ok(if is_equal { "equal" } else { "different" })
}

/// Says over gRPC that a message of 3 GiB follows.
async fn announce(address: &str) -> Result<Code> {
    let socket = TcpStream::connect(address).await?;
    let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(socket));
    let (mut sender, connection) = handshake.await?;
    let connection = tokio::spawn(connection);
    let mut beginning = vec![0];
    beginning.extend((TOO_LARGE as u32).to_be_bytes());
    beginning.extend([0; 64]);
    let request = Request::post(format!(
        "http://{address}/inference.GRPCInferenceService/ModelInfer"
    ))
    .header(CONTENT_TYPE, "application/grpc")
    .header(TE, "trailers")
    .body(Full::new(Bytes::from(beginning)))?;
    let answer = sender.send_request(request).await?;
    let (head, body) = answer.into_parts();
    let body = body.collect().await?;
    let status = head.headers.get("grpc-status");
    let trailers = body.trailers();
    let status = status.or_else(|| trailers?.get("grpc-status"));
    connection.abort();
    Ok(Code::from_bytes(status.context("no status")?.as_bytes()))
}

/// What came back.
#[derive(Debug)]
struct Answer {
    status: u16,
    is_equal: bool,
}

impl Answer {
    fn describe(&self) -> String {
        let equal = if self.is_equal { "equal" } else { "different" };
        format!("{}, {equal}", self.status)
    }
}

/// Numbers that differ from each other, none of them special.
fn block() -> Vec<u8> {
    let numbers = (0..BLOCK / 4).map(|index| index as f32 * 0.5);
    numbers.flat_map(f32::to_le_bytes).collect()
}

/// Has `bytes` of the block, again and again, sent through a model that changes nothing.
async fn exchange(address: &str, block: &[u8], bytes: u64) -> Result<Answer> {
    let json = format!(
        "{{\"inputs\":[{{\"name\":\"INPUT\",\"datatype\":\"FP32\",\"shape\":[1,{}],\
         \"parameters\":{{\"binary_data_size\":{bytes}}}}}],\
         \"parameters\":{{\"binary_data_output\":true}}}}",
        bytes / 4
    );
    let head = format!(
        "POST /v2/models/identity_fp32/infer HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\
         Inference-Header-Content-Length: {}\r\nContent-Length: {}\r\n\r\n{json}",
        json.len(),
        json.len() as u64 + bytes
    );
    let mut socket = TcpStream::connect(address).await?;
    let (reader, mut writer) = socket.split();
    let sending = async {
        // The server may refuse before everything is sent.
        if writer.write_all(head.as_bytes()).await.is_err() {
            return;
        }
        let mut left = bytes;
        while left > 0 {
            let length = left.min(block.len() as u64);
            if writer.write_all(&block[..length as usize]).await.is_err() {
                return;
            }
            left -= length;
        }
    };
    let reading = read(BufReader::new(reader), block, bytes);
    let ((), answer) = tokio::join!(sending, reading);
    answer
}

async fn read(
    mut reader: BufReader<tokio::net::tcp::ReadHalf<'_>>,
    block: &[u8],
    bytes: u64,
) -> Result<Answer> {
    let mut json_length = 0;
    let mut line = String::new();
    reader.read_line(&mut line).await?;
    let status = line.split(' ').nth(1).and_then(|code| code.parse().ok());
    let status = status.with_context(|| format!("no answer but {line:?}"))?;
    loop {
        line.clear();
        ensure!(reader.read_line(&mut line).await? > 0, "no end of headers");
        let header = line.trim_end().to_ascii_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(value) = header.strip_prefix("inference-header-content-length: ") {
            json_length = value.parse()?;
        }
    }
    let mut answer = Answer {
        status,
        is_equal: false,
    };
    if status != 200 {
        return Ok(answer);
    }
    let mut json = vec![0; json_length];
    reader.read_exact(&mut json).await?;
    let mut back = vec![0; block.len()];
    let mut left = bytes;
    while left > 0 {
        let length = left.min(block.len() as u64) as usize;
        reader.read_exact(&mut back[..length]).await?;
        if back[..length] != block[..length] {
            return Ok(answer);
        }
        left -= length as u64;
    }
    answer.is_equal = true;
    Ok(answer)
}

fn available_memory() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kib.context("no MemAvailable")? << 10)
}

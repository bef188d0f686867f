//! Bodies that are small on the wire and large, or many, once they are taken apart.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::Request;
use http::header::{CONTENT_TYPE, TE};
use http_body_util::Full;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{HostileArgs, Shown};
use crate::bars::Bar;
use crate::samples::mib;
use crate::victim::{Guest, Victim};

const MODEL: &str = "mlp";
const PATH: &str = "/v2/models/mlp/infer";
/// What a bomb becomes.
const BOMB: usize = 1 << 30;
const CHUNKS: usize = 1_000_000;
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) async fn run(args: &HostileArgs) -> Result<Shown> {
    let mut shown = Shown::new("bombs");
    let victim = Victim::start(&args.server, &["--keep-alive=forever"], None).await?;
    let guest = Guest::new(victim.grpc(), MODEL);
    let before = guest.usual().await?;
    let bomb = tokio::task::spawn_blocking(bomb).await??;
    let flood = Bytes::from([&b"1\r\n \r\n".repeat(CHUNKS)[..], b"0\r\n\r\n"].concat());
    let address = victim.http_address()?;
    let gzip = format!(
        "Content-Encoding: gzip\r\nContent-Length: {}\r\n",
        bomb.len()
    );
    let chunked = "Transfer-Encoding: chunked\r\n".to_owned();
    let kinds = [
        ("1 GiB of gzip", gzip, bomb.clone(), 32.0),
        ("1,000,000 chunks", chunked, flood, 1.0),
    ];
    let guest = guest.stay();
    for (name, headers, body, most) in kinds {
        // The first one finds out how much memory one takes, which the next ones use again.
        post(address, &headers, &body).await?;
        let resident = victim.resident()?;
        let mut refused = 0;
        for _ in 0..args.repeats {
            refused += u64::from(post(address, &headers, &body).await? == 400);
        }
        shown.grown(name, resident, victim.resident()?, most);
        let name = format!("{name} over HTTP: refused with 400");
        shown.bar(Bar::equal(name, args.repeats, refused));
    }
    let address = victim.grpc_address();
    call(address, &bomb).await?;
    let resident = victim.resident()?;
    let calls = args.repeats.div_ceil(5);
    let mut refused = 0;
    for _ in 0..calls {
        refused += u64::from(call(address, &bomb).await?.as_deref() == Some("8"));
    }
    shown.grown(
        "1 GiB of gzip over gRPC",
        resident,
        victim.resident()?,
        32.0,
    );
    let name = "1 GiB of gzip over gRPC: refused as RESOURCE_EXHAUSTED";
    shown.bar(Bar::equal(name, calls, refused));
    shown.client("a gRPC client", &before, guest.finish().await?);
    for (limit, least) in [
        ("decompressed_size", args.repeats + calls),
        ("chunks", args.repeats),
    ] {
        shown.counted(&victim, limit, least).await?;
    }
    Ok(shown)
}

impl Shown {
    /// The bar of memory that must not grow.
    pub(super) fn grown(&mut self, name: &str, before: u64, after: u64, most: f64) {
        let grown = mib(after) - mib(before);
        self.bar(Bar::at_most(
            format!("memory grown by {name}"),
            most,
            grown,
            " MiB",
        ));
    }

    /// The bar of refusals that the server must have counted.
    pub(super) async fn counted(&mut self, victim: &Victim, limit: &str, least: u64) -> Result<()> {
        let label = format!("limit=\"{limit}\"");
        let name = "dormouse_limit_refusals_total";
        let found = victim.metric(name, &[&label]).await? as u64;
        self.bar(Bar::new(
            format!("refusals counted as {limit}"),
            format!("at least {least}"),
            found.to_string(),
            found >= least,
        ));
        Ok(())
    }
}

/// A gibibyte of spaces.
fn bomb() -> Result<Bytes> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    let piece = vec![b' '; 1 << 20];
    for _ in 0..BOMB >> 20 {
        encoder.write_all(&piece)?;
    }
    Ok(encoder.finish()?.into())
}

/// Sends a body on a connection of its own; the status of its answer.
pub(super) async fn post(address: &str, headers: &str, body: &[u8]) -> Result<u16> {
    let asking = async {
        let mut socket = TcpStream::connect(address).await?;
        let (mut reader, mut writer) = socket.split();
        let head = format!(
            "POST {PATH} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{headers}\r\n"
        );
        let sending = async {
            // The server may answer, and hang up, before it has read everything.
            if writer.write_all(head.as_bytes()).await.is_ok() {
                let _ = writer.write_all(body).await;
            }
        };
        let mut answer = Vec::new();
        let reading = async {
            // What was read before a reset counts.
            let _ = (&mut reader).take(1 << 20).read_to_end(&mut answer).await;
        };
        tokio::join!(sending, reading);
        let line = answer.split(|&byte| byte == b'\r').next();
        let line = String::from_utf8_lossy(line.unwrap_or_default()).into_owned();
        let status = line.split(' ').nth(1).and_then(|code| code.parse().ok());
        status.with_context(|| format!("no answer but {line:?}"))
    };
    tokio::time::timeout(PATIENCE, asking)
        .await
        .context("no answer")?
}

/// Sends a compressed message; the gRPC status of its answer.
async fn call(address: &str, compressed: &Bytes) -> Result<Option<String>> {
    let socket = TcpStream::connect(address).await?;
    let (mut sender, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(socket)).await?;
    let connection = tokio::spawn(connection);
    let mut frame = vec![1];
    frame.extend(u32::try_from(compressed.len())?.to_be_bytes());
    frame.extend_from_slice(compressed);
    let request = Request::post(format!(
        "http://{address}/inference.GRPCInferenceService/ModelInfer"
    ))
    .header(CONTENT_TYPE, "application/grpc")
    .header("grpc-encoding", "gzip")
    .header(TE, "trailers")
    .body(Full::new(Bytes::from(frame)))?;
    let answer = tokio::time::timeout(PATIENCE, sender.send_request(request))
        .await
        .context("no answer")??;
    connection.abort();
    let status = answer.headers().get("grpc-status");
    Ok(status.and_then(|status| Some(status.to_str().ok()?.to_owned())))
}

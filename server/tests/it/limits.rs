//! Every limit refuses who exceeds it, and is counted under its name.

use std::io::Write;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dormouse_proto::inference as pb;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tonic::codec::CompressionEncoding;
use tonic::{Code, Status};

use crate::deadlines::{ONE_AT_A_TIME, occupy, pending};
use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, eventually, patiently};
use crate::wire::{self, GrpcClient, Request, add_sub, slow};

/// Low enough to be reached by a test.
const LOW: &str = r#"
[http]
max_input_size = "1MiB"
[grpc]
max_input_size = "1MiB"
[limits]
max_queue_per_model = 1
max_request_bytes_in_flight = "600KiB"
max_connections = 8
max_streams = 2
max_stream_requests = 2
max_headers = 20
header_timeout = "PATIENCE"
idle_timeout = "IDLE"
http2_idle_timeout = "IDLE"
body_timeout = "PATIENCE"
max_chunks = 10
max_json_depth = 8
max_json_nodes = 100
max_tensors = 2
max_dimensions = 3
max_elements = 1000
"#;

/// A server with low limits, and what they have refused so far.
struct Watched {
    server: TestServer,
    _files: tempfile::TempDir,
    _repository: TestRepository,
}

impl Watched {
    async fn start() -> Result<Self> {
        Self::patient("1m", "1m").await
    }

    /// With so long for headers and bodies, which a busy machine may need for good ones, and for
    /// connections without a request.
    async fn patient(patience: &str, idle: &str) -> Result<Self> {
        let repository = TestRepository::new()?;
        repository.add("add_sub", Model::new("add_sub"))?;
        repository.add("slow", Model::new("slow").config(ONE_AT_A_TIME))?;
        let files = tempfile::tempdir()?;
        let config = files.path().join("low.toml");
        std::fs::write(
            &config,
            LOW.replace("PATIENCE", patience).replace("IDLE", idle),
        )?;
        let server = TestServer::over(&repository)
            .arg(format!("--config={}", config.display()))
            .start()
            .await?;
        Ok(Self {
            server,
            _files: files,
            _repository: repository,
        })
    }

    async fn refusals(&self, limit: &str) -> Result<f64> {
        let label = format!("limit=\"{limit}\"");
        let name = "dormouse_limit_refusals_total";
        self.server.metric(name, &[&label]).await
    }

    /// Waits until more refusals are counted than there were.
    async fn counts(&self, limit: &str, before: f64) -> Result<()> {
        let counted = async || Ok(self.refusals(limit).await? > before);
        eventually(&format!("a refusal is counted as {limit}"), counted).await
    }

    /// Sends bytes over a connection of their own; the answer begins with `status`, and the
    /// refusal is counted.
    async fn refused(&self, limit: &str, sent: &[u8], status: &str) -> Result<()> {
        let before = self.refusals(limit).await?;
        let answer = exchange(self.server.http, sent).await?;
        let expected = match status {
            "" => String::new(),
            status => format!("HTTP/1.1 {status}"),
        };
        ensure!(
            answer.starts_with(&expected) && answer.is_empty() == status.is_empty(),
            "{limit}: {answer}"
        );
        self.counts(limit, before).await
    }

    /// Asks for an inference in JSON, which is refused.
    async fn refused_json(&self, limit: &str, json: &str) -> Result<()> {
        let headers = format!("content-length: {}", json.len());
        self.refused(limit, &post(&headers, json.as_bytes()), "400")
            .await
    }

    /// Asks for an inference over gRPC, which is refused.
    async fn refused_call(&self, limit: &str, request: Request, code: Code) -> Result<()> {
        let before = self.refusals(limit).await?;
        let client = self.server.grpc().await?;
        let client = client.send_compressed(CompressionEncoding::Gzip);
        let status = wire::infer(&client, request).await;
        let status = status.err().context("it was answered")?;
        ensure!(status.code() == code, "{limit}: {status:?}");
        self.counts(limit, before).await
    }
}

fn post(headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST /v2/models/add_sub/infer HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

/// Sends bytes and reads until the server hangs up.
async fn exchange(address: SocketAddr, sent: &[u8]) -> Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    // The server may have enough before it has everything.
    let _ = stream.write_all(sent).await;
    let mut answer = Vec::new();
    let _ = patiently("the server hangs up", stream.read_to_end(&mut answer)).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[tokio::test]
async fn requests_over_a_limit_of_http_are_refused_and_counted() -> Result<()> {
    let mut watched = Watched::start().await?;
    let many: Vec<String> = (0..30).map(|index| format!("x-{index}: 1")).collect();
    watched
        .refused("headers", &post(&many.join("\r\n"), b""), "431")
        .await?;
    let large = post("content-length: 2000000", &vec![b' '; 2_000_000]);
    watched.refused("body_size", &large, "400").await?;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(&vec![b' '; 2 << 20])?;
    let bomb = encoder.finish()?;
    let headers = format!("content-encoding: gzip\r\ncontent-length: {}", bomb.len());
    watched
        .refused("decompressed_size", &post(&headers, &bomb), "400")
        .await?;
    let chunks = [&b"1\r\n \r\n".repeat(20)[..], b"0\r\n\r\n"].concat();
    let chunks = post("transfer-encoding: chunked", &chunks);
    watched.refused("chunks", &chunks, "400").await?;
    let never = post("content-length: 700000", &vec![b' '; 700_000]);
    watched.refused("bytes_in_flight", &never, "400").await?;
    let deep = format!("{{\"x\":{}{}}}", "[".repeat(10), "]".repeat(10));
    watched.refused_json("json_depth", &deep).await?;
    let wide = format!("{{\"x\":[{}1]}}", "1,".repeat(200));
    watched.refused_json("json_nodes", &wide).await?;
    let input = |shape: &str| {
        format!("{{\"name\":\"a\",\"datatype\":\"INT32\",\"shape\":{shape},\"data\":[1]}}")
    };
    let inputs = |inputs: &[String]| format!("{{\"inputs\":[{}]}}", inputs.join(","));
    let three = inputs(&[input("[1]"), input("[1]"), input("[1]")]);
    watched.refused_json("tensors", &three).await?;
    let four = inputs(&[input("[1,1,1,1]")]);
    watched.refused_json("dimensions", &four).await?;
    let huge = inputs(&[input("[1,1099511627776]")]);
    watched.refused_json("elements", &huge).await?;
    watched.server.assert_healthy().await
}

#[tokio::test]
async fn what_is_begun_and_not_ended_is_refused_and_counted() -> Result<()> {
    let mut watched = Watched::patient("2s", "1m").await?;
    watched.refused("header_time", b"POST /v2", "").await?;
    let stalled = post("content-length: 1000", b"{");
    watched.refused("body_time", &stalled, "408").await?;
    watched.server.assert_healthy().await
}

#[tokio::test]
async fn calls_over_a_limit_of_grpc_are_refused_and_counted() -> Result<()> {
    let mut watched = Watched::start().await?;
    let invalid = Code::InvalidArgument;
    let three = add_sub("add_sub", 1, 1).input("c", &[1], &[1i32]);
    watched.refused_call("tensors", three, invalid).await?;
    let four = Request::new("add_sub").input("INPUT0", &[1, 1, 1, 1], &[1i32]);
    watched.refused_call("dimensions", four, invalid).await?;
    let huge = Request::new("add_sub").input("INPUT0", &[1, 1 << 40], &[1i32]);
    watched.refused_call("elements", huge, invalid).await?;
    // As small as it is, each of these takes hundreds of bytes in memory.
    let mut swelling = Request::new("add_sub");
    swelling.0.inputs = vec![pb::model_infer_request::InferInputTensor::default(); 20_000];
    watched
        .refused_call("decoded_size", swelling, Code::ResourceExhausted)
        .await?;
    let zeros = Request::new("add_sub").input("INPUT0", &[1, 16], &vec![0u8; 2 << 20]);
    watched
        .refused_call("decompressed_size", zeros, Code::ResourceExhausted)
        .await?;
    // Numbers that no compression makes smaller than the limit.
    let mut state = 1u64;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        (state >> 56) as u8
    })
    .take(2 << 20)
    .collect();
    let noise = Request::new("add_sub").input("INPUT0", &[1, 16], &noise);
    watched
        .refused_call("body_size", noise, Code::OutOfRange)
        .await?;

    // One runs and one waits, which is all that a connection and a model may have.
    let (queue, streams) = (
        watched.refusals("queue").await?,
        watched.refusals("streams").await?,
    );
    let clients = [watched.server.grpc().await?, watched.server.grpc().await?];
    wire::infer(&clients[0], slow("slow", 1)).await?;
    let endless = occupy(&watched.server, &clients[0]).await?;
    let waits = tokio::spawn({
        let client = clients[0].clone();
        async move { wire::infer(&client, slow("slow", 1)).await }
    });
    pending(&watched.server, 1).await?;
    for _ in 0..2 {
        let status = wire::infer(&clients[1], slow("slow", 1)).await.err();
        let status = status.context("it found a place in a full queue")?;
        ensure!(status.code() == Code::Unavailable, "{status:?}");
    }
    watched.counts("queue", queue).await?;
    watched.counts("streams", streams).await?;
    endless.run.abort();
    waits.await??;
    watched.server.assert_healthy().await
}

#[tokio::test]
async fn connections_over_a_limit_wait_or_are_closed_and_floods_end_them() -> Result<()> {
    let mut watched = Watched::start().await?;
    for address in [watched.server.http, watched.server.grpc] {
        let before = watched.refusals("connections").await?;
        let mut idle = Vec::new();
        for _ in 0..10 {
            idle.push(TcpStream::connect(address).await?);
        }
        watched.counts("connections", before).await?;
    }
    // Those that say nothing make room for who does.
    let answered = async || {
        let Ok(client) = watched.server.grpc().await else {
            return Ok(false);
        };
        let answer = wire::infer(&client, add_sub("add_sub", 2, 3)).await;
        Ok(answer.is_ok())
    };
    eventually("there is room again", answered).await?;

    for (address, path) in [
        (watched.server.http, "/v2/models/add_sub/infer"),
        (
            watched.server.grpc,
            "/inference.GRPCInferenceService/ModelInfer",
        ),
    ] {
        let before = watched.refusals("http2_floods").await?;
        // POST, http, and values for :path, :authority and content-type.
        let mut head = b"\x83\x86\x01\x01x\x0f\x10\x10application/grpc\x04".to_vec();
        head.push(path.len() as u8);
        head.extend(path.bytes());
        let mut flood = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        let mut frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
            flood.extend([0, 0, payload.len() as u8, kind, flags, 0, 0, 0, stream]);
            flood.extend(payload);
        };
        frame(4, 0, 0, b"");
        frame(1, 4, 1, &head);
        for _ in 0..5000 {
            frame(0, 0, 1, b"");
        }
        exchange(address, &flood).await?;
        watched.counts("http2_floods", before).await?;
    }
    watched.server.assert_healthy().await
}

/// What an HTTP/2 client sends, frame by frame.
struct Frames(Vec<u8>);

impl Frames {
    const HEADERS: u8 = 1;
    const CONTINUATION: u8 = 9;
    const END_STREAM: u8 = 1;
    const END_HEADERS: u8 = 4;

    /// A client's first words.
    fn greeting() -> Self {
        let greeting = Self(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec());
        greeting.frame(4, 0, 0, b"")
    }

    fn frame(mut self, kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Self {
        let [.., long, middle, short] = payload.len().to_be_bytes();
        let head = [long, middle, short, kind, flags, 0, 0, 0, stream];
        self.0.extend(head);
        self.0.extend(payload);
        self
    }

    /// GET / of some host, complete or to be continued.
    fn get(self, end: u8, stream: u8) -> Self {
        let head = b"\x82\x86\x84\x01\x01x";
        self.frame(Self::HEADERS, Self::END_STREAM | end, stream, head)
    }
}

#[tokio::test]
async fn http2_connections_without_a_request_are_closed_and_counted() -> Result<()> {
    let mut watched = Watched::patient("1s", "3s").await?;
    for address in [watched.server.http, watched.server.grpc] {
        let mut half = Frames::greeting().get(Frames::END_HEADERS, 1);
        half.0.pop();
        let endless = Frames::greeting().get(0, 1);
        for words in [Frames::greeting(), half, endless] {
            let before = watched.refusals("header_time").await?;
            exchange(address, &words.0).await?;
            watched.counts("header_time", before).await?;
        }
        // One request was answered, then nothing more comes.
        let before = watched.refusals("idle_time").await?;
        let words = Frames::greeting().get(Frames::END_HEADERS, 1);
        exchange(address, &words.0).await?;
        watched.counts("idle_time", before).await?;
        // And half of another one.
        let before = watched.refusals("header_time").await?;
        let mut words = Frames::greeting()
            .get(Frames::END_HEADERS, 1)
            .get(Frames::END_HEADERS, 3);
        words.0.pop();
        exchange(address, &words.0).await?;
        watched.counts("header_time", before).await?;

        let before = watched.refusals("headers").await?;
        // Three headers of seven bits' names and 8,000 bytes each: two more for the length.
        let mut words = Frames::greeting().get(0, 1);
        for (index, end) in [(b'a', 0), (b'b', 0), (b'c', Frames::END_HEADERS)] {
            let field = [&[0, 1, index, 127, 0xc1, 0x3d][..], &[b'y'; 8000]].concat();
            words = words.frame(Frames::CONTINUATION, end, 1, &field);
        }
        exchange(address, &words.0).await?;
        watched.counts("headers", before).await?;
    }
    let before = watched.refusals("idle_time").await?;
    let kept = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n";
    let answer = exchange(watched.server.http, kept).await?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    watched.counts("idle_time", before).await?;
    watched.server.assert_healthy().await
}

/// Connections that are closed so soon that calls meet the moment again and again.
pub(crate) const FLEETING: &str = r#"
[limits]
header_timeout = "300ms"
http2_idle_timeout = "40ms"
max_connection_age = "1s"
"#;

/// Calls, and once more when the client notices the goodbye with the call in its hands: it says
/// "cancelled" of a call that it has not sent.
async fn call(client: &GrpcClient) -> Result<(), Status> {
    loop {
        match wire::infer(client, add_sub("add_sub", 2, 3)).await {
            Err(status) if status.code() == Code::Cancelled => {}
            answered => return answered.map(drop),
        }
    }
}

#[tokio::test]
async fn no_call_is_lost_when_idle_and_old_connections_are_closed() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("add_sub", Model::new("add_sub"))?;
    let files = tempfile::tempdir()?;
    let config = files.path().join("fleeting.toml");
    std::fs::write(&config, FLEETING)?;
    let mut server = TestServer::over(&repository)
        .arg(format!("--config={}", config.display()))
        .start()
        .await?;
    let client = server.grpc().await?;
    // The pauses lie around the moment when an idle connection is closed.
    for pause in (35..55).cycle().take(100) {
        tokio::time::sleep(Duration::from_millis(pause)).await;
        call(&client).await?;
    }
    // Without a pause, connections grow old.
    let mut calls = JoinSet::new();
    for _ in 0..4 {
        let client = client.clone();
        calls.spawn(async move {
            for _ in 0..500 {
                call(&client).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(called) = calls.join_next().await {
        called??;
    }
    let closed = server
        .metric("dormouse_limit_refusals_total", &["limit=\"idle_time\""])
        .await?;
    ensure!(closed > 0.0, "no connection was idle");
    server.assert_healthy().await
}

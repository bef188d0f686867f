//! Calls below the socket: hand-made messages in, frames out.

use std::io::Write;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use dormouse_core::id::ByteSize;
use dormouse_proto::inference as pb;
use flate2::write::GzEncoder;
use futures_util::FutureExt;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody};
use prost::Message;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use super::super::GrpcOptions;
use super::super::backend::Backend;
use super::super::router::Router;
use super::fake::{Fake, request};
use crate::frontend::health;

const LIMIT: usize = 1 << 20;

fn router(backend: &Fake) -> Router<Fake> {
    let options = GrpcOptions {
        max_message_size: LIMIT,
        body_patience: Duration::from_millis(20),
        ..Default::default()
    };
    let side_services = health::routes(backend.clone(), None).unwrap();
    Router::new(
        backend.clone(),
        options,
        side_services,
        CancellationToken::new(),
    )
}

fn framed(flag: u8, message: &[u8]) -> Bytes {
    let mut frame = BytesMut::new();
    frame.put_u8(flag);
    frame.put_u32(message.len() as u32);
    frame.put_slice(message);
    frame.freeze()
}

fn call<T>(path: &str, body: T) -> Request<T> {
    Request::post(format!("http://host/{path}"))
        .header("content-type", "application/grpc")
        .body(body)
        .unwrap()
}

fn infer(message: &impl Message) -> Request<Full<Bytes>> {
    let body = Full::new(framed(0, &message.encode_to_vec()));
    call("inference.GRPCInferenceService/ModelInfer", body)
}

struct Outcome {
    code: Code,
    message: String,
    headers: HeaderMap,
    trailers: HeaderMap,
    body: Bytes,
}

impl Outcome {
    fn answer<M: Message + Default>(mut self) -> M {
        assert_eq!((self.code, self.message.as_str()), (Code::Ok, ""));
        assert_eq!(self.body.get_u8(), 0);
        assert_eq!(self.body.get_u32() as usize, self.body.len());
        M::decode(self.body).unwrap()
    }
}

async fn outcome<T>(router: &Router<Fake>, request: Request<T>) -> Outcome
where
    T: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    T::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send,
{
    let response = router.handle(request).await;
    assert_eq!(response.status(), StatusCode::OK);
    let (parts, body) = response.into_parts();
    let collected = body.collect().await.unwrap();
    let trailers = collected.trailers().unwrap_or(&parts.headers).clone();
    let text = |name| {
        let value = trailers.get(name).map(|value| value.to_str().unwrap());
        value
            .unwrap_or_default()
            .replace("%20", " ")
            .replace("%27", "'")
    };
    Outcome {
        code: Code::from_bytes(text("grpc-status").as_bytes()),
        message: text("grpc-message"),
        headers: parts.headers,
        trailers,
        body: collected.to_bytes(),
    }
}

#[tokio::test]
async fn an_answer_is_raw_and_carries_the_id() {
    let outcome = outcome(&router(&Fake::new()), infer(&request("echo", "7", "abc"))).await;
    assert!(!outcome.headers.contains_key("server-timing"));
    let answer: pb::ModelInferResponse = outcome.answer();
    assert_eq!(
        (answer.id.as_str(), answer.model_version.as_str()),
        ("7", "3")
    );
    assert_eq!(answer.outputs[0].name, "x");
    assert_eq!(answer.outputs[0].shape, [3]);
    assert_eq!(answer.raw_output_contents, ["abc"]);
    assert!(answer.parameters.is_empty());
}

#[tokio::test]
async fn a_request_that_woke_a_model_is_told_what_that_took() {
    let outcome = outcome(&router(&Fake::new()), infer(&request("cold", "", "abc"))).await;
    let timing = &outcome.headers["server-timing"];
    assert_eq!(
        timing,
        "load;dur=12.000;desc=source, wait;dur=0.000, run;dur=0.000, total;dur=0.000"
    );
    assert_eq!(&outcome.trailers["server-timing"], timing);
    assert_eq!(outcome.trailers["grpc-status"], "0");
    let _: pb::ModelInferResponse = outcome.answer();
}

#[tokio::test]
async fn a_refusal_says_when_to_come_back() {
    let outcome = outcome(&router(&Fake::new()), infer(&request("busy", "", "abc"))).await;
    assert_eq!(
        (outcome.code, outcome.message.as_str()),
        (Code::Unavailable, "queue is full")
    );
    assert_eq!(outcome.headers["grpc-retry-pushback-ms"], "250");
}

#[tokio::test]
async fn a_deadline_is_kept_by_who_holds_the_request() {
    let router = router(&Fake::new());
    let mut late = infer(&request("hang", "", "abc"));
    late.headers_mut()
        .insert("grpc-timeout", "20m".parse().unwrap());
    let outcome = outcome(&router, late).await;
    assert_eq!(
        (outcome.code, outcome.message.as_str()),
        (Code::DeadlineExceeded, "kept by the model")
    );
}

#[tokio::test]
async fn a_deadline_is_kept_even_when_nobody_else_does() {
    let fake = Fake::new();
    let mut late = infer(&request("deaf", "", "abc"));
    late.headers_mut()
        .insert("grpc-timeout", "1m".parse().unwrap());
    assert_eq!(
        outcome(&router(&fake), late).await.code,
        Code::DeadlineExceeded
    );
    fake.until_cancelled(1).await;
}

#[tokio::test]
async fn a_wrong_timeout_is_the_clients_fault() {
    let mut wrong = infer(&request("echo", "", "abc"));
    wrong
        .headers_mut()
        .insert("grpc-timeout", "soon".parse().unwrap());
    assert_eq!(
        outcome(&router(&Fake::new()), wrong).await.code,
        Code::InvalidArgument
    );
}

#[tokio::test]
async fn a_dropped_call_cancels_its_request() {
    let fake = Fake::new();
    let router = router(&fake);
    tokio::select! {
        _ = router.handle(infer(&request("deaf", "", "abc"))) => unreachable!("it never answers"),
        () = fake.until_active(1) => {}
    }
    fake.until_cancelled(1).await;
    fake.until_active(0).await;
}

#[tokio::test]
async fn messages_are_bounded_to_the_byte() {
    let router = router(&Fake::new());
    let overhead = request("echo", "", vec![0; LIMIT - 100]).encoded_len() - (LIMIT - 100);
    let largest = request("echo", "", vec![0; LIMIT - overhead]);
    assert_eq!(largest.encoded_len(), LIMIT);
    let _: pb::ModelInferResponse = outcome(&router, infer(&largest)).await.answer();
    let larger = request("echo", "", vec![0; LIMIT - overhead + 1]);
    let outcome = outcome(&router, infer(&larger)).await;
    assert_eq!(outcome.code, Code::OutOfRange);
    assert!(outcome.message.contains("1048577"), "{}", outcome.message);
    assert!(outcome.message.contains("1048576"), "{}", outcome.message);
}

#[tokio::test]
async fn a_message_that_would_swell_in_memory_is_refused() {
    let swelling = Full::new(framed(0, &[0x2a, 0].repeat(LIMIT / 4)));
    let call = call("inference.GRPCInferenceService/ModelInfer", swelling);
    let outcome = outcome(&router(&Fake::new()), call).await;
    assert_eq!(outcome.code, Code::ResourceExhausted);
}

fn gzipped(message: &[u8]) -> Request<Full<Bytes>> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(message).unwrap();
    let body = Full::new(framed(1, &encoder.finish().unwrap()));
    let mut call = call("inference.GRPCInferenceService/ModelInfer", body);
    call.headers_mut()
        .insert("grpc-encoding", "gzip".parse().unwrap());
    call
}

#[tokio::test]
async fn compressed_requests_are_read_up_to_the_limit() {
    let router = router(&Fake::new());
    let small = gzipped(&request("echo", "", vec![0; LIMIT / 2]).encode_to_vec());
    let answer: pb::ModelInferResponse = outcome(&router, small).await.answer();
    assert_eq!(answer.raw_output_contents[0].len(), LIMIT / 2);
    let bomb = gzipped(&vec![0; 64 * LIMIT]);
    assert_eq!(outcome(&router, bomb).await.code, Code::ResourceExhausted);
}

#[tokio::test]
async fn responses_are_compressed_only_when_both_sides_want_it() {
    let fake = Fake::new();
    for (compress_responses, flag) in [(false, 0), (true, 1)] {
        let options = GrpcOptions {
            compress_responses,
            ..Default::default()
        };
        let side_services = health::routes(fake.clone(), None).unwrap();
        let router = Router::new(
            fake.clone(),
            options,
            side_services,
            CancellationToken::new(),
        );
        let mut asking = infer(&request("echo", "", vec![0; 4096]));
        asking
            .headers_mut()
            .insert("grpc-accept-encoding", "gzip".parse().unwrap());
        assert_eq!(outcome(&router, asking).await.body[0], flag);
        let silent = infer(&request("echo", "", vec![0; 4096]));
        assert_eq!(outcome(&router, silent).await.body[0], 0);
    }
}

#[tokio::test]
async fn a_body_that_stalls_is_given_up() {
    let first = Bytes::from_static(&[0, 0, 0, 0, 9, 1]);
    let frames = futures_util::StreamExt::chain(
        futures_util::stream::iter([Ok::<_, std::io::Error>(http_body::Frame::data(first))]),
        futures_util::stream::pending(),
    );
    let body = StreamBody::new(Box::pin(frames));
    let call = call("inference.GRPCInferenceService/ModelInfer", body);
    let outcome = outcome(&router(&Fake::new()), call).await;
    assert_eq!(outcome.code, Code::DeadlineExceeded);
    assert!(
        outcome
            .message
            .contains("the rest of the request did not come"),
        "{}",
        outcome.message
    );
}

#[tokio::test]
async fn malformed_messages_and_frames_are_errors_of_one_call() {
    let router = router(&Fake::new());
    let bodies = [
        framed(0, &[0x2a, 5, 1]),
        framed(0, &[0x0b]),
        framed(0, &[0xff; 20]),
        framed(0, b"\x0a\x02\xff\xff"),
        framed(1, b"not compressed"),
        framed(2, b""),
        Bytes::from_static(&[0, 0]),
        Bytes::new(),
    ];
    for body in bodies {
        let call = call(
            "inference.GRPCInferenceService/ModelInfer",
            Full::new(body.clone()),
        );
        assert_eq!(
            outcome(&router, call).await.code,
            Code::Internal,
            "{body:?}"
        );
    }
}

#[tokio::test]
async fn every_method_is_answered_or_refused_in_a_sentence() {
    let router = router(&Fake::new());
    let table = [
        ("ServerLive", Code::Ok),
        ("ServerReady", Code::Ok),
        ("ModelReady", Code::Ok),
        ("ServerMetadata", Code::Ok),
        ("ModelMetadata", Code::NotFound),
        ("ModelConfig", Code::NotFound),
        ("ModelInfer", Code::NotFound),
        ("ModelStatistics", Code::Ok),
        ("RepositoryIndex", Code::Ok),
        ("RepositoryModelLoad", Code::Ok),
        ("RepositoryModelUnload", Code::Ok),
        ("SystemSharedMemoryStatus", Code::Unimplemented),
        ("SystemSharedMemoryRegister", Code::Unimplemented),
        ("SystemSharedMemoryUnregister", Code::Unimplemented),
        ("CudaSharedMemoryStatus", Code::Ok),
        ("CudaSharedMemoryRegister", Code::InvalidArgument),
        ("CudaSharedMemoryUnregister", Code::Ok),
        ("TraceSetting", Code::Ok),
        ("LogSettings", Code::Unimplemented),
        ("Nonsense", Code::Unimplemented),
    ];
    for (method, code) in table {
        let call = call(
            &format!("inference.GRPCInferenceService/{method}"),
            Full::new(framed(0, b"")),
        );
        let outcome = outcome(&router, call).await;
        assert_eq!(outcome.code, code, "{method}: {}", outcome.message);
        if code == Code::Unimplemented {
            assert!(!outcome.message.is_empty(), "{method}");
        }
    }
    let elsewhere = call("other.Service/Method", Full::new(framed(0, b"")));
    assert_eq!(outcome(&router, elsewhere).await.code, Code::Unimplemented);
}

#[tokio::test]
async fn a_model_that_is_not_there_is_not_ready() {
    let router = router(&Fake::new());
    for (name, ready) in [("echo", true), ("other", false)] {
        let message = pb::ModelReadyRequest {
            name: name.into(),
            ..Default::default()
        };
        let body = Full::new(framed(0, &message.encode_to_vec()));
        let call = call("inference.GRPCInferenceService/ModelReady", body);
        let answer: pb::ModelReadyResponse = outcome(&router, call).await.answer();
        assert_eq!(answer.ready, ready);
    }
}

#[tokio::test]
async fn what_is_not_grpc_is_refused_by_http_status() {
    let router = router(&Fake::new());
    let mut plain = infer(&request("echo", "", "abc"));
    plain
        .headers_mut()
        .insert("content-type", "application/json".parse().unwrap());
    let status = router.handle(plain).await.status();
    assert_eq!(status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    let mut get = infer(&request("echo", "", "abc"));
    *get.method_mut() = http::Method::GET;
    assert_eq!(
        router.handle(get).await.status(),
        StatusCode::METHOD_NOT_ALLOWED
    );
}

#[tokio::test]
async fn a_call_counts_as_bytes_in_flight_until_its_model_has_it() {
    let fake = Fake::with_room(ByteSize::mib(4));
    let router = router(&fake);
    let in_flight = fake.in_flight().unwrap();
    let large = request("gate", "", vec![0; 500_000]);
    let mut calls: Vec<_> = (0..8)
        .map(|_| Box::pin(outcome(&router, infer(&large))))
        .collect();
    for call in &mut calls {
        assert!(call.now_or_never().is_none());
    }
    assert!(in_flight.used() >= 8 * 500_000, "{}", in_flight.used());
    let refused = outcome(&router, infer(&large)).await;
    assert_eq!(refused.code, Code::Unavailable, "{}", refused.message);
    fake.open_gate(9);
    for call in calls {
        assert_eq!(call.await.code, Code::Ok);
    }
    assert_eq!(in_flight.used(), 0);
    assert_eq!(outcome(&router, infer(&large)).await.code, Code::Ok);
}

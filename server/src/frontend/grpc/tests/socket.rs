//! The whole front end, over a real connection.

use std::time::Duration;

use dormouse_proto::inference as pb;
use futures_util::{FutureExt, StreamExt, stream};
use pb::grpc_inference_service_client::GrpcInferenceServiceClient;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::Code;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::{v1, v1alpha};

use super::super::{GrpcError, GrpcOptions, serve_backend};
use super::fake::{Fake, request};
use crate::limits::Limit;

struct Server {
    fake: Fake,
    address: String,
    stop: oneshot::Sender<()>,
    served: JoinHandle<Result<(), GrpcError>>,
}

impl Server {
    async fn start(options: GrpcOptions) -> Self {
        let fake = Fake::new();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (stop, stopped) = oneshot::channel();
        let serving = serve_backend(listener, fake.clone(), options, async {
            let _ = stopped.await;
        });
        Self {
            fake,
            address,
            stop,
            served: tokio::spawn(serving),
        }
    }

    async fn channel(&self) -> Channel {
        Channel::from_shared(format!("http://{}", self.address))
            .unwrap()
            .connect()
            .await
            .unwrap()
    }

    async fn client(&self) -> GrpcInferenceServiceClient<Channel> {
        GrpcInferenceServiceClient::new(self.channel().await).max_decoding_message_size(usize::MAX)
    }
}

#[tokio::test]
async fn large_tensors_go_both_ways() {
    let server = Server::start(GrpcOptions::default()).await;
    let data: Vec<u8> = (0..8 << 20).map(|byte| byte as u8).collect();
    let sent = request("echo", "big", data.clone());
    let answer = server.client().await.model_infer(sent).await.unwrap();
    assert!(answer.get_ref().raw_output_contents[0] == data);
}

#[tokio::test]
async fn a_client_that_goes_away_cancels_its_request() {
    let server = Server::start(GrpcOptions::default()).await;
    let mut client = server.client().await;
    let call = tokio::spawn(async move { client.model_infer(request("deaf", "", "x")).await });
    server.fake.until_active(1).await;
    call.abort();
    server.fake.until_cancelled(1).await;
}

#[tokio::test]
async fn a_vanished_client_cancels_all_its_stream_had_asked_for() {
    let server = Server::start(GrpcOptions::default()).await;
    let address = format!("http://{}", server.address);
    let (leave, left) = oneshot::channel::<()>();
    // A runtime of its own: dropping it closes the connection without a farewell.
    let client = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut client = GrpcInferenceServiceClient::connect(address).await.unwrap();
            let requests = stream::iter((0..5).map(|_| request("deaf", "", "x")));
            let call = client.model_stream_infer(requests.chain(stream::pending()));
            let _answers = call.await.unwrap();
            let _ = left.await;
        });
    });
    server.fake.until_active(5).await;
    leave.send(()).unwrap();
    server.fake.until_cancelled(5).await;
    client.join().unwrap();
}

#[tokio::test]
async fn a_stream_answers_in_order_until_the_client_is_done() {
    let server = Server::start(GrpcOptions::default()).await;
    let requests = stream::iter((0..200).map(|id| request("echo", &id.to_string(), "x")));
    let answers = server
        .client()
        .await
        .model_stream_infer(requests)
        .await
        .unwrap()
        .into_inner();
    let ids: Vec<_> = answers
        .map(|answer| answer.unwrap().infer_response.unwrap().id)
        .collect()
        .await;
    assert_eq!(ids, (0..200).map(|id| id.to_string()).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_stream_ends_at_its_deadline() {
    let server = Server::start(GrpcOptions::default()).await;
    let mut call = tonic::Request::new(stream::pending::<pb::ModelInferRequest>());
    call.metadata_mut()
        .insert("grpc-timeout", "20m".parse().unwrap());
    let mut answers = server
        .client()
        .await
        .model_stream_infer(call)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        answers.message().await.unwrap_err().code(),
        Code::DeadlineExceeded
    );
}

#[tokio::test]
async fn shutdown_finishes_what_was_begun_and_ends_what_would_not() {
    let server = Server::start(GrpcOptions::default()).await;
    let channel = server.channel().await;
    let mut client = GrpcInferenceServiceClient::new(channel.clone());
    let open = client
        .clone()
        .model_stream_infer(stream::pending())
        .await
        .unwrap();
    let watch = HealthClient::new(channel)
        .watch(HealthCheckRequest::default())
        .await
        .unwrap();
    let call = tokio::spawn(async move { client.model_infer(request("gate", "", "x")).await });
    server.fake.until_active(1).await;
    server.stop.send(()).unwrap();
    let ended = open.into_inner().message().await.unwrap_err();
    assert_eq!(ended.code(), Code::Unavailable);
    assert!(!server.served.is_finished());
    assert!(TcpStream::connect(&server.address).await.is_err());
    server.fake.open_gate(1);
    assert_eq!(
        call.await.unwrap().unwrap().get_ref().raw_output_contents,
        ["x"]
    );
    server.served.await.unwrap().unwrap();
    let statuses: Vec<_> = watch.into_inner().collect().await;
    assert_eq!(
        statuses[0].as_ref().unwrap().status(),
        ServingStatus::Serving
    );
    assert_eq!(statuses[1].as_ref().unwrap_err().code(), Code::Unavailable);
}

#[tokio::test]
async fn dropping_the_server_cancels_what_is_left() {
    let server = Server::start(GrpcOptions::default()).await;
    let mut client = server.client().await;
    let call = tokio::spawn(async move { client.model_infer(request("deaf", "", "x")).await });
    server.fake.until_active(1).await;
    server.served.abort();
    server.fake.until_cancelled(1).await;
    assert!(call.await.unwrap().is_err());
}

#[tokio::test]
async fn health_follows_readiness() {
    let server = Server::start(GrpcOptions::default()).await;
    let mut health = HealthClient::new(server.channel().await);
    let ask = |service: &str| HealthCheckRequest {
        service: service.into(),
    };
    let mut changes = health.watch(ask("")).await.unwrap().into_inner();
    let mut next = async || changes.message().await.unwrap().unwrap().status();
    assert_eq!(next().await, ServingStatus::Serving);
    server.fake.set_ready(false);
    assert_eq!(next().await, ServingStatus::NotServing);
    for service in ["", "inference.GRPCInferenceService"] {
        let status = health.check(ask(service)).await.unwrap().get_ref().status();
        assert_eq!(status, ServingStatus::NotServing);
    }
    server.fake.set_ready(true);
    assert_eq!(next().await, ServingStatus::Serving);
    assert_eq!(
        health.check(ask("other")).await.unwrap_err().code(),
        Code::NotFound
    );
    let mut other = health.watch(ask("other")).await.unwrap().into_inner();
    let status = other.message().await.unwrap().unwrap().status();
    assert_eq!(status, ServingStatus::ServiceUnknown);
}

#[tokio::test]
async fn reflection_lists_the_services_in_both_versions() {
    let server = Server::start(GrpcOptions::default()).await;
    let channel = server.channel().await;
    let expected = ["grpc.health.v1.Health", "inference.GRPCInferenceService"];

    let list = v1::server_reflection_request::MessageRequest::ListServices(String::new());
    let asking = v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(list),
    };
    let mut client = v1::server_reflection_client::ServerReflectionClient::new(channel.clone());
    let call = client
        .server_reflection_info(stream::iter([asking]))
        .await
        .unwrap();
    let answer = call.into_inner().message().await.unwrap().unwrap();
    let Some(v1::server_reflection_response::MessageResponse::ListServicesResponse(list)) =
        answer.message_response
    else {
        panic!("no list")
    };
    for name in expected {
        assert!(
            list.service.iter().any(|service| service.name == name),
            "{name}"
        );
    }

    let list = v1alpha::server_reflection_request::MessageRequest::ListServices(String::new());
    let asking = v1alpha::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(list),
    };
    let mut client = v1alpha::server_reflection_client::ServerReflectionClient::new(channel);
    let call = client
        .server_reflection_info(stream::iter([asking]))
        .await
        .unwrap();
    let answer = call.into_inner().message().await.unwrap().unwrap();
    assert!(answer.message_response.is_some());
}

#[tokio::test]
async fn connections_beyond_the_limit_are_closed_at_once() {
    let server = Server::start(GrpcOptions {
        max_connections: 1,
        ..Default::default()
    })
    .await;
    let mut client = server.client().await;
    client.model_infer(request("echo", "", "x")).await.unwrap();
    let mut second = TcpStream::connect(&server.address).await.unwrap();
    let read = second.read(&mut [0; 1]).await;
    assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
    client.model_infer(request("echo", "", "x")).await.unwrap();
}

#[tokio::test]
async fn who_speaks_http_1_is_told_so() {
    let server = Server::start(GrpcOptions::default()).await;
    let mut plain = TcpStream::connect(&server.address).await.unwrap();
    plain
        .write_all(b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    let mut answer = Vec::new();
    // The rest may be cut off by a reset, since our request is never read to its end.
    let _ = plain.read_to_end(&mut answer).await;
    assert!(answer.starts_with(b"HTTP/1.1 505 "), "{answer:?}");
}

#[tokio::test]
async fn old_connections_are_replaced_without_a_failed_call() {
    let server = Server::start(GrpcOptions {
        max_connection_age: Some(Duration::from_millis(200)),
        ..Default::default()
    })
    .await;
    let mut client = server.client().await;
    let call = {
        let mut client = client.clone();
        tokio::spawn(async move { client.model_infer(request("gate", "", "x")).await })
    };
    server.fake.until_active(1).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    server.fake.open_gate(1);
    call.await.unwrap().unwrap();
    client.model_infer(request("echo", "", "x")).await.unwrap();
}

/// Calls, and once more when the client notices the goodbye with the call in its hands: it says
/// "cancelled" of a call that it has not sent.
async fn ask(
    client: &mut GrpcInferenceServiceClient<Channel>,
    model: &str,
) -> pb::ModelInferResponse {
    loop {
        match client.model_infer(request(model, "", "x")).await {
            Ok(answer) => return answer.into_inner(),
            Err(status) => assert_eq!(status.code(), Code::Cancelled, "{status}"),
        }
    }
}

#[tokio::test]
async fn idle_connections_are_replaced_and_no_call_is_lost() {
    let server = Server::start(GrpcOptions {
        header_timeout: Duration::from_millis(200),
        idle_timeout: Duration::from_millis(8),
        ..Default::default()
    })
    .await;
    let mut client = server.client().await;
    let counted = Limit::IdleTime.refusals();
    // Around the moment when the server says goodbye.
    for pause in (5..20).cycle().take(90) {
        tokio::time::sleep(Duration::from_millis(pause)).await;
        ask(&mut client, "echo").await;
    }
    assert!(Limit::IdleTime.refusals() > counted);
    // A call that takes longer than that is no idleness, nor is an open stream.
    let mut streaming = server.client().await;
    let mut open = loop {
        match streaming.model_stream_infer(stream::pending()).await {
            Ok(open) => break open.into_inner(),
            Err(status) => assert_eq!(status.code(), Code::Cancelled, "{status}"),
        }
    };
    let counted = Limit::IdleTime.refusals();
    let call = tokio::spawn(async move { ask(&mut client, "gate").await });
    server.fake.until_active(1).await;
    // Another client's connection idles meanwhile.
    let mut other = server.client().await;
    ask(&mut other, "echo").await;
    while Limit::IdleTime.refusals() == counted {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let ended = open.message().now_or_never();
    assert!(ended.is_none(), "{ended:?}");
    server.fake.open_gate(1);
    call.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn connections_without_a_call_are_closed_after_the_header_timeout() {
    let server = Server::start(GrpcOptions::default()).await;
    let words =
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0\0\0\x08\x01\x05\0\0\0\x01\x82";
    for length in [0, 10, 24, 33, words.len()] {
        let mut client = TcpStream::connect(&server.address).await.unwrap();
        let begun = tokio::time::Instant::now();
        client.write_all(&words[..length]).await.unwrap();
        let mut said = Vec::new();
        let _ = client.read_to_end(&mut said).await;
        let waited = begun.elapsed().as_secs();
        assert!((10..14).contains(&waited), "{length} bytes: {waited}");
    }
}

#[tokio::test]
async fn impossible_options_are_refused_before_anything_is_served() {
    let wrong = [
        GrpcOptions {
            max_message_size: 1 << 31,
            ..Default::default()
        },
        GrpcOptions {
            max_frame_size: 1,
            ..Default::default()
        },
        GrpcOptions {
            max_concurrent_streams: 0,
            ..Default::default()
        },
    ];
    for options in wrong {
        let server = Server::start(options).await;
        assert!(server.served.await.unwrap().is_err());
    }
}

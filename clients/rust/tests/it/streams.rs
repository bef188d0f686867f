use std::time::Duration;

use dormouse_client::{Client, ClientError, Code, InferRequest, StreamOptions, Tensor};

use crate::fake::FakeServer;

fn request(model: &str, id: &str) -> InferRequest {
    let input = Tensor::from_slice([1], &[id.len() as i64]).expect("one element");
    InferRequest::new(model).id(id).input("x", input)
}

#[tokio::test]
async fn more_requests_than_fit_the_channel_are_all_answered() {
    let server = FakeServer::start().await;
    let client = Client::connect(&server.url).await.unwrap();
    let (sender, mut receiver) = client
        .stream_with(StreamOptions {
            unsent_requests: 2,
            ..Default::default()
        })
        .split();
    let sender = sender.unwrap();
    let sending = tokio::spawn(async move {
        for id in 0..200 {
            sender.send(request("echo", &id.to_string())).await.unwrap();
        }
    });
    let mut ids = Vec::new();
    while let Some(response) = receiver.next().await {
        ids.push(response.unwrap().id().parse::<u32>().unwrap());
    }
    sending.await.unwrap();
    assert_eq!(ids, (0..200).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_failed_request_leaves_the_stream_open() {
    let server = FakeServer::start().await;
    let client = Client::connect(&server.url).await.unwrap();
    let mut stream = client.stream();
    stream.send(request("broken", "a")).await.unwrap();
    stream.send(request("echo", "b")).await.unwrap();
    stream.finish();
    let error = stream.next().await.unwrap().unwrap_err();
    assert_eq!(
        error.to_string(),
        "request \"a\" of the stream failed: broken by design"
    );
    let answer = stream.next().await.unwrap().unwrap();
    assert_eq!(answer.output("x").unwrap().to_vec::<i64>().unwrap(), [1]);
    assert!(stream.next().await.is_none());
    let late = stream.send(request("echo", "c")).await;
    assert!(matches!(late, Err(ClientError::StreamClosed)));
}

#[tokio::test]
async fn a_crash_ends_the_stream() {
    let server = FakeServer::start().await;
    let client = Client::connect(&server.url).await.unwrap();
    let mut stream = client.stream();
    stream.send(request("crash", "a")).await.unwrap();
    let error = stream.next().await.unwrap().unwrap_err();
    assert_eq!(error.code(), Some(Code::Internal));
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn the_deadline_of_a_stream_reaches_the_server() {
    let server = FakeServer::start().await;
    let client = Client::connect(&server.url).await.unwrap();
    let options = StreamOptions {
        deadline: Some(Duration::from_secs(30)),
        ..Default::default()
    };
    let stream = client.stream_with(options);
    stream.send(request("echo", "a")).await.unwrap();
    let mut stream = stream;
    let answer = stream.next().await.unwrap().unwrap();
    assert!(answer.parameter("grpc-timeout").is_some());
}

#[tokio::test]
async fn a_stream_to_nowhere_fails_when_it_is_read() {
    let builder = Client::builder("http://127.0.0.1:1");
    let mut stream = builder.connect_lazy().unwrap().stream();
    let error = stream.next().await.unwrap().unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }), "{error:?}");
}

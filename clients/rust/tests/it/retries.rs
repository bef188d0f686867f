use std::time::Duration;

use dormouse_client::{Client, ClientError, Code, InferRequest, RetryPolicy};

use crate::fake::FakeServer;

#[tokio::test]
async fn a_busy_server_is_asked_again_when_it_says() {
    let server = FakeServer::start().await;
    let client = Client::connect(&server.url).await.unwrap();
    client.infer(InferRequest::new("busy twice")).await.unwrap();
    assert_eq!(server.attempts(), 3);
}

#[tokio::test]
async fn a_waking_server_is_asked_again() {
    let server = FakeServer::start().await;
    let client = Client::connect(&server.url).await.unwrap();
    client
        .infer(InferRequest::new("unavailable once"))
        .await
        .unwrap();
    assert_eq!(server.attempts(), 2);
}

#[tokio::test]
async fn a_server_that_is_busy_for_long_is_not_asked_again() {
    let server = FakeServer::start().await;
    let client = Client::connect(&server.url).await.unwrap();
    let error = client
        .infer(InferRequest::new("busy for an hour"))
        .await
        .unwrap_err();
    assert_eq!(error.retry_after(), Some(Duration::from_secs(3600)));
    assert_eq!(error.to_string(), "too busy (Unavailable)");
    assert_eq!(server.attempts(), 1);
}

#[tokio::test]
async fn nothing_is_tried_again_after_the_deadline() {
    let server = FakeServer::start().await;
    let client = Client::connect(&server.url).await.unwrap();
    let request = InferRequest::new("busy for a while").deadline(Duration::from_secs(8));
    let error = client.infer(request).await.unwrap_err();
    // Known at once: the wait would end too late, so there is none.
    assert_eq!(error.code(), Some(Code::Unavailable));
    assert_eq!(error.retry_after(), Some(Duration::from_secs(9)));
    assert_eq!(server.attempts(), 1);
}

#[tokio::test]
async fn retries_can_be_turned_off() {
    let server = FakeServer::start().await;
    let builder = Client::builder(&server.url).retry(RetryPolicy::NEVER);
    let client = builder.connect().await.unwrap();
    assert!(
        client
            .infer(InferRequest::new("unavailable once"))
            .await
            .is_err()
    );
    assert_eq!(server.attempts(), 1);
}

#[tokio::test]
async fn a_step_of_a_sequence_is_never_sent_twice() {
    let server = FakeServer::start().await;
    let client = Client::connect(&server.url).await.unwrap();
    let request = InferRequest::new("unavailable once").sequence(9, true, false);
    assert!(client.infer(request).await.is_err());
    assert_eq!(server.attempts(), 1);
}

#[tokio::test]
async fn a_server_that_hangs_is_left_at_the_deadline() {
    let server = FakeServer::start().await;
    let builder = Client::builder(&server.url).default_deadline(Duration::from_millis(30));
    let client = builder.connect().await.unwrap();
    let error = client.infer(InferRequest::new("hung")).await.unwrap_err();
    assert_eq!(error.to_string(), "no answer within the deadline of 30ms");
}

#[tokio::test]
async fn a_server_that_cannot_make_the_deadline_says_why() {
    let server = FakeServer::start().await;
    let client = Client::connect(&server.url).await.unwrap();
    let request = InferRequest::new("too late").deadline(Duration::from_secs(9));
    let error = client.infer(request).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "no answer within the deadline of 9s: cannot start in time"
    );
    let builder = Client::builder(&server.url).no_default_deadline();
    let client = builder.connect().await.unwrap();
    let error = client
        .infer(InferRequest::new("too late"))
        .await
        .unwrap_err();
    assert!(matches!(error, ClientError::Status { .. }), "{error:?}");
}

#[tokio::test]
async fn a_deadline_beyond_all_clocks_is_a_long_one() {
    let server = FakeServer::start().await;
    let client = Client::connect(&server.url).await.unwrap();
    let request = InferRequest::new("echo").deadline(Duration::MAX);
    client.infer(request).await.unwrap();
}

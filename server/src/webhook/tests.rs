//! Against a real listener that answers as it is told.

use std::collections::VecDeque;

use dormouse_core::id::ModelId;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::*;
use crate::config::{Endpoint, Secret};
use crate::events::EventKind;
use crate::unit::tests::fake::Bench;

/// How the listener treats one attempt.
#[derive(Clone, Copy, Debug)]
enum Answer {
    Status(&'static str),
    /// Says nothing and keeps the connection.
    Silence,
}

/// A request as the listener saw it.
#[derive(Debug)]
struct Seen {
    head: String,
    body: String,
}

impl Seen {
    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (found, value) = line.split_once(": ")?;
            found.eq_ignore_ascii_case(name).then_some(value)
        })
    }
}

/// Listens, and answers attempts in this order, then 204 for ever.
async fn listen(answers: &[Answer]) -> (u16, mpsc::UnboundedReceiver<Seen>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, seen) = mpsc::unbounded_channel();
    let mut answers: VecDeque<Answer> = answers.iter().copied().collect();
    tokio::spawn(async move {
        let mut silent = Vec::new();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut text = Vec::new();
            let (head, body) = loop {
                let mut chunk = [0; 4096];
                let length = stream.read(&mut chunk).await.unwrap();
                assert!(length > 0, "the request ended early");
                text.extend_from_slice(&chunk[..length]);
                let text = String::from_utf8(text.clone()).unwrap();
                if let Some((head, body)) = text.split_once("\r\n\r\n") {
                    let seen = Seen {
                        head: head.to_owned(),
                        body: String::new(),
                    };
                    let length: usize = seen.header("content-length").unwrap().parse().unwrap();
                    if body.len() == length {
                        break (head.to_owned(), body.to_owned());
                    }
                }
            };
            sender.send(Seen { head, body }).unwrap();
            match answers
                .pop_front()
                .unwrap_or(Answer::Status("204 No Content"))
            {
                Answer::Status(status) => {
                    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
                    stream.write_all(answer.as_bytes()).await.unwrap();
                }
                Answer::Silence => silent.push(stream),
            }
        }
    });
    (port, seen)
}

fn hook(port: u16) -> WebhookConfig {
    WebhookConfig {
        endpoint: Endpoint {
            is_https: false,
            host: "127.0.0.1".to_owned(),
            port,
            path: "/hook?token=abc".parse().unwrap(),
        },
        events: vec!["woke", "slept"],
        secret: Some(Secret::new(*b"Jefe")),
        timeout: Duration::from_secs(30),
        retries: 5,
        retry_delay: Duration::from_millis(1),
        ca_file: None,
    }
}

fn slept(bench: &Bench, returned_bytes: u64) {
    let model = ModelId::new("m", 1);
    bench
        .host
        .events
        .publish(&model, || EventKind::Slept { returned_bytes });
}

fn results(bench: &Bench) -> Vec<(String, u64)> {
    let text = bench.host.metrics.render();
    let lines = text.lines().filter_map(|line| {
        let rest = line.strip_prefix("dormouse_webhook_deliveries_total{result=\"")?;
        let (result, count) = rest.split_once("\"} ")?;
        Some((result.to_owned(), count.parse().unwrap()))
    });
    lines.filter(|(_, count)| *count > 0).collect()
}

const ENOUGH: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_receiver_that_fails_twice_gets_the_same_message_a_third_time() {
    let bench = Bench::new();
    let (port, mut seen) = listen(&[
        Answer::Status("500 Internal Server Error"),
        Answer::Status("429 Too Many Requests"),
    ])
    .await;
    let hooks = Webhooks::spawn(&[hook(port)], "s", &bench.host).unwrap();
    slept(&bench, 7);
    hooks.flush(ENOUGH).await;
    let mut first = None;
    for _ in 0..3 {
        let request = seen.recv().await.unwrap();
        assert!(
            request
                .head
                .starts_with("POST /hook?token=abc HTTP/1.1\r\n")
        );
        assert!(
            request
                .header("x-dormouse-signature")
                .unwrap()
                .starts_with("sha256=")
        );
        let id = request.header("x-dormouse-delivery").unwrap().to_owned();
        let first = first.get_or_insert_with(|| (id.clone(), request.body.clone()));
        assert_eq!(*first, (id, request.body));
    }
    assert!(seen.try_recv().is_err());
    assert_eq!(results(&bench), [("delivered".to_owned(), 1)]);
}

#[tokio::test]
async fn a_receiver_that_says_nothing_is_tried_again_after_the_timeout() {
    let bench = Bench::new();
    let (port, mut seen) = listen(&[Answer::Silence]).await;
    let config = WebhookConfig {
        timeout: Duration::from_millis(50),
        retries: 20,
        ..hook(port)
    };
    let hooks = Webhooks::spawn(&[config], "s", &bench.host).unwrap();
    slept(&bench, 7);
    hooks.flush(ENOUGH).await;
    seen.recv().await.unwrap();
    seen.recv().await.unwrap();
    assert_eq!(results(&bench), [("delivered".to_owned(), 1)]);
}

#[tokio::test]
async fn redirects_and_refusals_are_not_tried_again() {
    let bench = Bench::new();
    let (port, mut seen) = listen(&[
        Answer::Status("302 Found\r\nlocation: http://127.0.0.1:1/"),
        Answer::Status("410 Gone"),
    ])
    .await;
    let hooks = Webhooks::spawn(&[hook(port)], "s", &bench.host).unwrap();
    for bytes in 0..3 {
        slept(&bench, bytes);
    }
    // Not among the hook's events.
    bench.host.events.publish_server(EventKind::Active);
    hooks.flush(ENOUGH).await;
    for bytes in 0..3 {
        let request = seen.recv().await.unwrap();
        let body: serde_json::Value = serde_json::from_str(&request.body).unwrap();
        assert_eq!(body["data"]["returned_bytes"], bytes);
    }
    assert!(seen.try_recv().is_err());
    let mut results = results(&bench);
    results.sort();
    let expected = [("delivered".to_owned(), 1), ("refused".to_owned(), 2)];
    assert_eq!(results, expected);
}

#[tokio::test]
async fn attempts_are_used_up_and_the_next_message_follows() {
    let bench = Bench::new();
    let (port, _seen) = listen(&[Answer::Status("503 Service Unavailable"); 3]).await;
    let config = WebhookConfig {
        retries: 2,
        ..hook(port)
    };
    let hooks = Webhooks::spawn(&[config], "s", &bench.host).unwrap();
    slept(&bench, 1);
    slept(&bench, 2);
    hooks.flush(ENOUGH).await;
    let mut results = results(&bench);
    results.sort();
    let expected = [("delivered".to_owned(), 1), ("given_up".to_owned(), 1)];
    assert_eq!(results, expected);
}

#[tokio::test]
async fn the_flush_at_the_end_is_bounded() {
    let bench = Bench::new();
    let (port, mut seen) = listen(&[Answer::Silence]).await;
    let hooks = Webhooks::spawn(&[hook(port)], "s", &bench.host).unwrap();
    slept(&bench, 1);
    seen.recv().await.unwrap();
    hooks.flush(Duration::from_millis(20)).await;
    assert_eq!(results(&bench), []);
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_is_full_drops_its_oldest_message() {
    let bench = Bench::new();
    let mut queue = Queue {
        wanted: vec!["slept"],
        sender: Sender::new(String::new()),
        messages: VecDeque::new(),
        waiting: Arc::default(),
        metrics: bench.host.metrics.clone(),
    };
    let mut events = bench.host.events.subscribe();
    for bytes in 0..MAX_WAITING as u64 + 3 {
        slept(&bench, bytes);
        queue.push(&events.next().await.unwrap());
    }
    assert_eq!(queue.messages.len(), MAX_WAITING);
    assert_eq!(queue.waiting.load(Ordering::Relaxed), MAX_WAITING);
    let body: serde_json::Value = serde_json::from_slice(&queue.messages[0].body).unwrap();
    assert_eq!(body["data"]["returned_bytes"], 3);
    assert_eq!(results(&bench), [("dropped".to_owned(), 3)]);
}

#[test]
fn waits_double_up_to_a_minute() {
    let second = Duration::from_secs(1);
    for (attempt, full) in [(0, 1), (1, 2), (5, 32), (6, 60), (20, 60), (u32::MAX, 60)] {
        let wait = delay(second, attempt);
        assert!(
            wait <= second * full && wait >= second * full / 2,
            "{attempt}: {wait:?}"
        );
    }
}

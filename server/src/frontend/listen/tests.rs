use std::collections::VecDeque;
use std::net::SocketAddr;

use axum::routing::{get, post};
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::*;

struct Served {
    address: SocketAddr,
    counters: Arc<ListenCounters>,
    stop: oneshot::Sender<()>,
    done: JoinHandle<()>,
}

async fn start(router: Router, change: impl FnOnce(&mut ListenOptions)) -> Served {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut options = ListenOptions::new("test");
    change(&mut options);
    let counters = options.counters.clone();
    let (stop, stopped) = oneshot::channel();
    let done = tokio::spawn(serve(listener, router, options, async {
        let _ = stopped.await;
    }));
    Served {
        address,
        counters,
        stop,
        done,
    }
}

impl Served {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }
}

fn hello() -> Router {
    Router::new().route("/", get(async || "hello")).route(
        "/length",
        post(async |body: bytes::Bytes| body.len().to_string()),
    )
}

/// Reads until the other side closes.
async fn read_all(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    // A reset ends a connection as an orderly close does.
    let _ = stream.read_to_end(&mut text).await;
    String::from_utf8_lossy(&text).into_owned()
}

/// Reads one small answer whose body is `hello`.
async fn read_hello(stream: &mut TcpStream) -> String {
    let mut text = String::new();
    let mut buffer = [0; 1024];
    while !text.ends_with("hello") {
        let length = stream.read(&mut buffer).await.unwrap();
        assert_ne!(length, 0, "closed after {text:?}");
        text.push_str(std::str::from_utf8(&buffer[..length]).unwrap());
    }
    text
}

#[tokio::test]
async fn connections_are_kept_alive() {
    let served = start(hello(), |_| {}).await;
    let mut stream = served.connect().await;
    for _ in 0..3 {
        stream
            .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            .await
            .unwrap();
        assert!(read_hello(&mut stream).await.starts_with("HTTP/1.1 200"));
    }
    assert_eq!(served.counters.accepted.load(Ordering::Relaxed), 1);
    assert_eq!(served.counters.open.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn http2_without_tls_is_served() {
    let served = start(hello(), |_| {}).await;
    let stream = TokioIo::new(served.connect().await);
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), stream)
            .await
            .unwrap();
    tokio::spawn(connection);
    let request = hyper::Request::get(format!("http://{}/", served.address))
        .body(Empty::<bytes::Bytes>::new())
        .unwrap();
    let response = sender.send_request(request).await.unwrap();
    assert_eq!(response.status(), 200);
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "hello");
}

#[tokio::test(start_paused = true)]
async fn half_sent_headers_are_cut_off_after_the_header_timeout() {
    let served = start(hello(), |_| {}).await;
    for beginning in [
        "",
        "P",
        "PRI * HTTP/2.0\r\n",
        "GET / HTTP/1.1\r\nhost: x\r\nx-a: ",
    ] {
        let mut stream = served.connect().await;
        let begun = Instant::now();
        stream.write_all(beginning.as_bytes()).await.unwrap();
        assert_eq!(read_all(&mut stream).await, "", "{beginning:?}");
        let waited = begun.elapsed().as_secs();
        assert!((10..12).contains(&waited), "{beginning:?}: {waited}");
    }
}

/// An HTTP/2 client's first words, and the first half of a request's headers.
const HALF_A_REQUEST: &[u8] =
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0\0\0\x08\x01\x05\0\0\0\x01\x82\x86\x84";
const FIRST_WORDS: usize = 24;
const SETTINGS: usize = 33;

#[tokio::test(start_paused = true)]
async fn http2_connections_that_never_ask_are_closed_after_the_header_timeout() {
    let served = start(hello(), |_| {}).await;
    for length in [FIRST_WORDS, SETTINGS, HALF_A_REQUEST.len()] {
        let mut stream = served.connect().await;
        let begun = Instant::now();
        stream.write_all(&HALF_A_REQUEST[..length]).await.unwrap();
        read_all(&mut stream).await;
        let waited = begun.elapsed().as_secs();
        assert!((10..14).contains(&waited), "{length} bytes: {waited}");
    }
}

/// A connection that answers pings, and what tells of its end.
async fn http2(
    served: &Served,
) -> (
    hyper::client::conn::http2::SendRequest<Empty<bytes::Bytes>>,
    JoinHandle<hyper::Result<()>>,
) {
    let stream = TokioIo::new(served.connect().await);
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream);
    let (sender, connection) = handshake.await.unwrap();
    (sender, tokio::spawn(connection))
}

async fn ask(
    sender: &mut hyper::client::conn::http2::SendRequest<Empty<bytes::Bytes>>,
    path: &str,
) -> hyper::Result<hyper::Response<Incoming>> {
    let request = hyper::Request::get(format!("http://x{path}"));
    sender
        .send_request(request.body(Empty::new()).unwrap())
        .await
}

#[tokio::test(start_paused = true)]
async fn an_http2_client_that_only_answers_pings_is_told_to_go_away() {
    let served = start(hello(), |_| {}).await;
    let begun = Instant::now();
    let (_sender, connection) = http2(&served).await;
    connection.await.unwrap().unwrap();
    assert!((10..14).contains(&begun.elapsed().as_secs()));
}

#[tokio::test(start_paused = true)]
async fn an_http2_connection_is_told_to_go_away_once_it_has_idled_long_enough() {
    let slow = Router::new().route(
        "/",
        get(async || {
            // Longer than a connection may idle, and then the body takes as long.
            tokio::time::sleep(Duration::from_secs(9)).await;
            Body::new(http_body_util::StreamBody::new(futures_util::stream::once(
                async {
                    tokio::time::sleep(Duration::from_secs(9)).await;
                    Ok::<_, Infallible>(hyper::body::Frame::data(bytes::Bytes::from("hello")))
                },
            )))
        }),
    );
    // All of it is over before the first ping: a clock that jumps does not wait for its answer.
    let served = start(slow, |options| {
        options.header_timeout = Duration::from_secs(1);
        options.http2_idle_timeout = Duration::from_secs(8);
    })
    .await;
    let (mut sender, connection) = http2(&served).await;
    let answer = ask(&mut sender, "/").await.unwrap();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "hello");
    let idle = Instant::now();
    let counted = Limit::IdleTime.refusals();
    connection.await.unwrap().unwrap();
    let idled = idle.elapsed().as_secs();
    assert!((6..10).contains(&idled), "{idled}");
    assert!(Limit::IdleTime.refusals() > counted);
}

#[tokio::test(start_paused = true)]
async fn half_sent_headers_are_cut_off_after_requests_were_answered() {
    let served = start(hello(), |_| {}).await;
    let mut stream = served.connect().await;
    // GET / is complete with its last byte, an indexed header for the authority's name.
    let (first, rest) = HALF_A_REQUEST.split_at(SETTINGS);
    stream.write_all(first).await.unwrap();
    stream
        .write_all(b"\0\0\x06\x01\x05\0\0\0\x01\x82\x86\x84\x01\x01x")
        .await
        .unwrap();
    let mut buffer = [0; 1024];
    let mut seen = Vec::new();
    while !seen.ends_with(b"hello") {
        let length = stream.read(&mut buffer).await.unwrap();
        assert_ne!(length, 0, "closed after {seen:?}");
        seen.extend_from_slice(&buffer[..length]);
    }
    let begun = Instant::now();
    let mut second = rest.to_vec();
    // The next stream that a client may open.
    second[8] = 3;
    stream.write_all(&second).await.unwrap();
    read_all(&mut stream).await;
    let waited = begun.elapsed().as_secs();
    assert!((10..12).contains(&waited), "{waited}");
}

#[tokio::test(start_paused = true)]
async fn headers_that_trickle_are_cut_off_too() {
    let served = start(hello(), |_| {}).await;
    let mut stream = served.connect().await;
    let begun = Instant::now();
    stream.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    while stream.write_all(b"x: y\r\n").await.is_ok() {
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(begun.elapsed() < Duration::from_secs(30));
    }
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_outlives_the_header_timeout_but_not_its_own() {
    let served = start(hello(), |_| {}).await;
    let mut stream = served.connect().await;
    let request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
    stream.write_all(request).await.unwrap();
    read_hello(&mut stream).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    stream.write_all(request).await.unwrap();
    read_hello(&mut stream).await;
    let idle = Instant::now();
    let counted = Limit::IdleTime.refusals();
    assert_eq!(read_all(&mut stream).await, "");
    assert!((74..80).contains(&idle.elapsed().as_secs()));
    assert!(Limit::IdleTime.refusals() > counted);
}

#[tokio::test(start_paused = true)]
async fn a_slow_answer_is_not_mistaken_for_a_slow_client() {
    let slow = Router::new().route(
        "/",
        get(async || {
            tokio::time::sleep(Duration::from_secs(60)).await;
            "hello"
        }),
    );
    let served = start(slow, |_| {}).await;
    let mut stream = served.connect().await;
    for _ in 0..2 {
        stream
            .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            .await
            .unwrap();
        read_hello(&mut stream).await;
    }
}

#[tokio::test]
async fn too_many_or_too_large_headers_are_refused() {
    let served = start(hello(), |_| {}).await;
    let many: String = (0..65).map(|index| format!("h{index}: x\r\n")).collect();
    let large = format!("h: {}\r\n", "x".repeat(33 << 10));
    for headers in [many, large] {
        let mut stream = served.connect().await;
        let request = format!("GET / HTTP/1.1\r\n{headers}\r\n");
        let _ = stream.write_all(request.as_bytes()).await;
        let answer = read_all(&mut stream).await;
        assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    }
}

#[tokio::test]
async fn shutdown_finishes_requests_and_closes_idle_connections() {
    let begun = Arc::new(Notify::new());
    let release = Arc::new(Notify::new());
    let router = hello().route(
        "/slow",
        get({
            let (begun, release) = (begun.clone(), release.clone());
            async move || {
                begun.notify_one();
                release.notified().await;
                "hello"
            }
        }),
    );
    let served = start(router, |_| {}).await;
    let mut idle = served.connect().await;
    idle.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    read_hello(&mut idle).await;
    let mut silent = served.connect().await;
    let mut busy = served.connect().await;
    busy.write_all(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    begun.notified().await;

    served.stop.send(()).unwrap();
    assert_eq!(read_all(&mut idle).await, "");
    assert_eq!(read_all(&mut silent).await, "");
    assert!(TcpStream::connect(served.address).await.is_err());
    assert!(!served.done.is_finished());
    release.notify_one();
    assert!(read_all(&mut busy).await.ends_with("hello"));
    served.done.await.unwrap();
    assert_eq!(served.counters.open.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn dropping_the_server_closes_everything() {
    let router = Router::new().route("/", get(std::future::pending::<()>));
    let served = start(router, |_| {}).await;
    let mut busy = served.connect().await;
    busy.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    while served.counters.open.load(Ordering::Relaxed) == 0 {
        tokio::task::yield_now().await;
    }
    served.done.abort();
    assert_eq!(read_all(&mut busy).await, "");
}

#[tokio::test]
async fn connections_beyond_the_limit_wait_for_their_turn() {
    let served = start(hello(), |options| options.max_connections = 1).await;
    let mut first = served.connect().await;
    let request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
    first.write_all(request).await.unwrap();
    read_hello(&mut first).await;
    let mut second = served.connect().await;
    second.write_all(request).await.unwrap();
    assert_eq!(served.counters.accepted.load(Ordering::Relaxed), 1);
    drop(first);
    read_hello(&mut second).await;
    assert_eq!(served.counters.accepted.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn a_connection_that_waits_for_its_turn_is_served_at_the_end_too() {
    let request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
    for queue_survives in [true, false] {
        let refused = Limit::Connections.refusals();
        let served = start(hello(), |options| {
            options.max_connections = 1;
            options.queue_survives = queue_survives;
        })
        .await;
        let mut first = served.connect().await;
        first.write_all(request).await.unwrap();
        read_hello(&mut first).await;
        let mut second = served.connect().await;
        second.write_all(request).await.unwrap();
        // It has been accepted, so no successor will find it.
        while Limit::Connections.refusals() == refused {
            tokio::task::yield_now().await;
        }
        served.stop.send(()).unwrap();
        assert_eq!(read_all(&mut first).await, "");
        assert!(read_all(&mut second).await.ends_with("hello"));
        served.done.await.unwrap();
    }
}

#[tokio::test]
async fn a_client_that_vanishes_ends_its_request() {
    struct Gone(Option<oneshot::Sender<()>>);
    impl Drop for Gone {
        fn drop(&mut self) {
            let _ = self.0.take().unwrap().send(());
        }
    }
    let (gone, told) = oneshot::channel();
    let gone = Arc::new(parking_lot::Mutex::new(Some(gone)));
    let begun = Arc::new(Notify::new());
    let router = Router::new().route(
        "/",
        get({
            let begun = begun.clone();
            async move || {
                let _gone = Gone(gone.lock().take());
                begun.notify_one();
                std::future::pending::<()>().await
            }
        }),
    );
    let served = start(router, |_| {}).await;
    let mut stream = served.connect().await;
    stream
        .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    begun.notified().await;
    drop(stream);
    told.await.unwrap();
}

/// Fails a few times before it accepts.
struct Failing {
    listener: TcpListener,
    errors: VecDeque<io::Error>,
}

impl Accept for Failing {
    async fn accept(&mut self) -> io::Result<TcpStream> {
        match self.errors.pop_front() {
            Some(error) => Err(error),
            None => Accept::accept(&mut self.listener).await,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn failed_accepts_never_end_the_loop() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let too_many_files = || io::Error::from_raw_os_error(libc::EMFILE);
    let listener = Failing {
        listener,
        errors: (0..20).map(|_| too_many_files()).collect(),
    };
    let options = ListenOptions::new("test");
    let counters = options.counters.clone();
    tokio::spawn(run(listener, hello(), options, std::future::pending()));
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream
        .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    read_hello(&mut stream).await;
    assert_eq!(counters.accept_errors.load(Ordering::Relaxed), 20);
}

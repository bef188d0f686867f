//! The accept loop of the HTTP listeners: bounded connections, bounded waiting, graceful end.

mod guard;

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::GracefulShutdown;
use rustix::process::{Resource, getrlimit};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tower::ServiceExt;
use tracing::{debug, info, warn};

use self::guard::{Guard, Requests};

/// The wait after a failed accept, and how far it doubles.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// How a listener treats its connections.
#[derive(Clone, Debug)]
pub struct ListenOptions {
    /// What the listener is for, in logs.
    pub name: &'static str,
    /// Connections open at once; further ones wait to be accepted.
    pub max_connections: usize,
    /// How long a client may take for a request's headers, or to say anything at all.
    pub header_timeout: Duration,
    /// How long a connection without a request stays open.
    pub idle_timeout: Duration,
    pub max_headers: usize,
    /// Bytes of a request's headers.
    pub max_header_bytes: usize,
    /// Requests at once on one HTTP/2 connection.
    pub max_concurrent_streams: u32,
    pub counters: Arc<ListenCounters>,
}

impl ListenOptions {
    /// The defaults, with at most half of the process's file descriptors for connections.
    pub fn new(name: &'static str) -> Self {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let half = usize::try_from(descriptors / 2).unwrap_or(usize::MAX);
        Self {
            name,
            max_connections: half.clamp(1, 10_000),
            header_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(75),
            max_headers: 64,
            max_header_bytes: 32 << 10,
            max_concurrent_streams: 128,
            counters: Arc::default(),
        }
    }
}

/// What a listener has seen.
#[derive(Debug, Default)]
pub struct ListenCounters {
    /// Connections accepted.
    pub accepted: AtomicU64,
    /// Connections open now.
    pub open: AtomicU64,
    /// Accepts that failed, for want of file descriptors for one.
    pub accept_errors: AtomicU64,
}

/// Serves `router` over HTTP/1.1 and HTTP/2 without TLS until `shutdown` resolves; then stops
/// accepting, closes idle connections and returns when every request under way is answered.
///
/// Dropping the future closes everything at once: a caller bounds the drain by a timeout.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    options: ListenOptions,
    shutdown: impl Future<Output = ()>,
) {
    run(listener, router, options, shutdown).await;
}

/// Where connections come from.
trait Accept {
    fn accept(&mut self) -> impl Future<Output = io::Result<TcpStream>> + Send;
}

impl Accept for TcpListener {
    async fn accept(&mut self) -> io::Result<TcpStream> {
        TcpListener::accept(self).await.map(|(stream, _)| stream)
    }
}

async fn run(
    mut listener: impl Accept,
    router: Router,
    options: ListenOptions,
    shutdown: impl Future<Output = ()>,
) {
    let builder = builder(&options);
    let graceful = GracefulShutdown::new();
    let permits = Arc::new(Semaphore::new(options.max_connections));
    let mut connections = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    let mut back_off = None;
    loop {
        let (stream, permit) = tokio::select! {
            () = &mut shutdown => break,
            accepted = next(&mut listener, &permits, back_off) => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    options.counters.accept_errors.fetch_add(1, Ordering::Relaxed);
                    if back_off.is_none() {
                        warn!(listener = options.name, %error, "cannot accept connections, trying again");
                    }
                    let wait = back_off.map_or(BACK_OFF.0, |wait: Duration| wait * 2);
                    back_off = Some(wait.min(BACK_OFF.1));
                    continue;
                }
            },
            // Finished connections are forgotten as they finish.
            Some(_) = connections.join_next() => continue,
        };
        if back_off.take().is_some() {
            info!(listener = options.name, "accepting connections again");
        }
        if let Err(error) = stream.set_nodelay(true) {
            debug!(listener = options.name, %error, "connection was gone before it was served");
            continue;
        }
        let requests = Requests::default();
        let guard = Guard::new(stream, requests.clone(), options.header_timeout);
        let router = router.clone();
        let service = service_fn(move |request: hyper::Request<Incoming>| {
            let under_way = requests.begin();
            let answer = router.clone().oneshot(request.map(Body::new));
            async move {
                let _under_way = under_way;
                answer.await
            }
        });
        let connection = builder
            .serve_connection(TokioIo::new(guard), service)
            .into_owned();
        let connection = graceful.watch(connection);
        let open = Open::new(options.counters.clone(), permit);
        let name = options.name;
        connections.spawn(async move {
            let _open = open;
            if let Err(error) = connection.await {
                debug!(listener = name, error, "connection failed");
            }
        });
    }
    drop(listener);
    let drained = async { while connections.join_next().await.is_some() {} };
    tokio::join!(graceful.shutdown(), drained);
}

/// The next connection, once there is room for it and the wait after a failure is over.
async fn next(
    listener: &mut impl Accept,
    permits: &Arc<Semaphore>,
    wait: Option<Duration>,
) -> io::Result<(TcpStream, OwnedSemaphorePermit)> {
    if let Some(wait) = wait {
        tokio::time::sleep(wait).await;
    }
    let permit = permits.clone().acquire_owned().await;
    let permit = permit.map_err(io::Error::other)?;
    let stream = listener.accept().await?;
    Ok((stream, permit))
}

fn builder(options: &ListenOptions) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        // hyper counts from the end of the request before, so this is the time a connection may
        // idle; how long a begun header may take is up to the guard.
        .header_read_timeout(options.idle_timeout)
        .max_headers(options.max_headers)
        .max_buf_size(options.max_header_bytes.max(8 << 10))
        .keep_alive(true);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(options.max_concurrent_streams)
        .max_header_list_size(16 << 10)
        .initial_stream_window_size(256 << 10)
        .initial_connection_window_size(2 << 20)
        .keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(10));
    builder
}

/// A connection that counts as open until it is dropped.
struct Open {
    counters: Arc<ListenCounters>,
    _permit: OwnedSemaphorePermit,
}

impl Open {
    fn new(counters: Arc<ListenCounters>, permit: OwnedSemaphorePermit) -> Self {
        counters.accepted.fetch_add(1, Ordering::Relaxed);
        counters.open.fetch_add(1, Ordering::Relaxed);
        Self {
            counters,
            _permit: permit,
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.counters.open.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;

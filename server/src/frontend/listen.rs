//! The accept loop of the HTTP listeners: bounded connections, bounded waiting, graceful end.

mod frames;
mod guard;
mod idle;

use std::convert::Infallible;
use std::error::Error;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::Version;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use rustix::process::{Resource, getrlimit};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;
use tracing::{debug, info, warn};

pub(super) use self::guard::{Guard, Requests};
pub(super) use self::idle::{Patience, farewell};
use crate::guard::{Door, Refusal};
use crate::limits::Limit;

/// The wait after a failed accept, and how far it doubles.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// Connections taken from the queue of a listener that is being closed; systems queue 4096 at most.
const MAX_REST: usize = 4096;
/// How long a connection that was accepted just before the end may take to begin a request.
const FIRST_REQUEST_PATIENCE: Duration = Duration::from_secs(1);
/// How often it is looked at meanwhile.
const FIRST_REQUEST_LOOK: Duration = Duration::from_millis(5);

/// How a listener treats its connections.
#[derive(Clone, Debug)]
pub struct ListenOptions {
    /// What the listener is for, in logs.
    pub name: &'static str,
    /// Connections open at once; further ones wait to be accepted.
    pub max_connections: usize,
    /// How long a client may take for a request's headers, or to say anything at all.
    pub header_timeout: Duration,
    /// How long an HTTP/1 connection without a request stays open.
    pub idle_timeout: Duration,
    /// How long an HTTP/2 connection without a request stays open.
    pub http2_idle_timeout: Duration,
    pub max_headers: usize,
    /// Bytes of a request's headers.
    pub max_header_bytes: usize,
    /// Bytes of a request's headers over HTTP/2.
    pub max_header_list: u32,
    /// Requests at once on one HTTP/2 connection.
    pub max_concurrent_streams: u32,
    /// Somebody else holds the socket too: connections nobody accepted wait there for our successor.
    pub queue_survives: bool,
    pub counters: Arc<ListenCounters>,
    /// Who may come in, and what for.
    pub door: Door,
}

impl ListenOptions {
    /// The defaults, with a quarter of the process's file descriptors for connections.
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            max_connections: descriptors(4).min(10_000),
            header_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(75),
            http2_idle_timeout: Duration::from_secs(300),
            max_headers: 64,
            max_header_bytes: 32 << 10,
            max_header_list: 16 << 10,
            max_concurrent_streams: 128,
            queue_survives: false,
            counters: Arc::default(),
            door: Door::default(),
        }
    }
}

/// One part in so many of the file descriptors that the process may have. Two listeners for
/// inference have a quarter each and those for metrics and management less: however many connect,
/// descriptors are left for the files of models that are woken.
pub(crate) fn descriptors(parts: u64) -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / parts).unwrap_or(usize::MAX).max(1)
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
    /// Connections that were made before the listener is closed and that nobody has accepted.
    fn rest(self) -> Vec<TcpStream>
    where
        Self: Sized,
    {
        Vec::new()
    }
}

impl Accept for TcpListener {
    async fn accept(&mut self) -> io::Result<TcpStream> {
        TcpListener::accept(self).await.map(|(stream, _)| stream)
    }

    fn rest(self) -> Vec<TcpStream> {
        accept_rest(self)
    }
}

/// Closes a listener; gives back the connections that were waiting in its queue, which closing it
/// would reset.
pub(super) fn accept_rest(listener: TcpListener) -> Vec<TcpStream> {
    let mut rest = Vec::new();
    if let Ok(listener) = listener.into_std() {
        while rest.len() < MAX_REST
            && let Ok((stream, _)) = listener.accept()
        {
            let prepared = stream.set_nonblocking(true);
            rest.extend(prepared.and_then(|()| TcpStream::from_std(stream)).ok());
        }
    }
    rest
}

async fn run(
    mut listener: impl Accept,
    router: Router,
    options: ListenOptions,
    shutdown: impl Future<Output = ()>,
) {
    let permits = Arc::new(Semaphore::new(options.max_connections));
    let mut connections = JoinSet::new();
    let stopping = CancellationToken::new();
    let server = Server {
        router,
        stopping: stopping.clone(),
        options: options.clone(),
    };
    let mut shutdown = pin!(shutdown);
    let mut back_off = None;
    let mut waiting = None;
    loop {
        let next = next(&mut listener, &permits, back_off, &mut waiting);
        let (stream, permit) = tokio::select! {
            () = &mut shutdown => break,
            accepted = next => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    if lacks_descriptors(&error) {
                        Limit::Descriptors.refuse();
                    }
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
        connections.spawn(server.clone().serve(stream, permit));
    }
    stopping.cancel();
    let rest = match options.queue_survives {
        true => {
            drop(listener);
            Vec::new()
        }
        false => listener.rest(),
    };
    // This one is in nobody's queue any more. Room comes as those that idle are closed.
    if let Some(stream) = waiting
        && let Ok(permit) = Arc::clone(&permits).acquire_owned().await
    {
        connections.spawn(server.clone().serve(stream, permit));
    }
    for stream in rest {
        let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else {
            break;
        };
        connections.spawn(server.clone().serve(stream, permit));
    }
    while connections.join_next().await.is_some() {}
}

/// What a connection is served with.
#[derive(Clone)]
struct Server {
    router: Router,
    stopping: CancellationToken,
    options: ListenOptions,
}

impl Server {
    async fn serve(self, stream: TcpStream, permit: OwnedSemaphorePermit) {
        let name = self.options.name;
        let _open = Open::new(self.options.counters.clone(), permit);
        if let Err(error) = stream.set_nodelay(true) {
            debug!(listener = name, %error, "connection was gone before it was served");
            return;
        }
        let requests = Requests::default();
        let begun = requests.clone();
        let stopped = async {
            self.stopping.cancelled().await;
            first_request(|| begun.begun() > 0).await;
        };
        let mut stopped = pin!(stopped);
        let entered = tokio::select! {
            biased;
            entered = self.options.door.enter(stream) => entered,
            () = &mut stopped => None,
        };
        let Some((stream, visitor)) = entered else {
            return;
        };
        let header_timeout = self.options.header_timeout;
        let connected = Instant::now();
        let guard = Guard::new(stream, requests.clone(), connected, header_timeout);
        let patience = Patience {
            first: header_timeout,
            idle: self.options.http2_idle_timeout,
        };
        let unused = patience.runs_out(connected, &begun);
        let builder = builder(&self.options, Counted(requests.clone()));
        let router = self.router;
        let max_header_list = self.options.max_header_list;
        let max_streams = u64::from(self.options.max_concurrent_streams);
        let service = service_fn(move |request: hyper::Request<Incoming>| {
            let under_way = requests.begin();
            let is_stream = request.version() == Version::HTTP_2;
            if is_stream && requests.under_way() >= max_streams {
                Limit::Streams.refuse();
            }
            let fit = headers_fit(&request, max_header_list);
            let admitted = visitor.admit(&request);
            let speaks_grpc = visitor.speaks_grpc(&request);
            let router = router.clone();
            async move {
                let _under_way = under_way;
                if !fit {
                    return Ok(too_large());
                }
                let refuse = |refusal: Refusal| match speaks_grpc {
                    true => refusal.status().into_http(),
                    false => refusal.into_http(),
                };
                let pass = match admitted {
                    Ok(pass) => pass,
                    Err(refusal) => return Ok::<_, Infallible>(refuse(refusal)),
                };
                let answer = async |request: hyper::Request<_>| {
                    let Ok(response) = router.oneshot(request.map(Body::new)).await;
                    response
                };
                let answered = pass.accompany(request, answer).await;
                Ok(answered.unwrap_or_else(refuse))
            }
        });
        let connection = builder.serve_connection(TokioIo::new(guard), service);
        let mut connection = pin!(connection);
        let ended = tokio::select! {
            biased;
            ended = &mut connection => ended,
            () = &mut stopped => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
            () = unused => {
                connection.as_mut().graceful_shutdown();
                tokio::select! {
                    ended = &mut connection => ended,
                    () = farewell(&begun) => Ok(()),
                }
            }
        };
        if let Err(error) = ended {
            note_refusal(&*error);
            debug!(listener = name, error, "connection failed");
        }
    }
}

/// Waits until a connection has begun its first request, for a while: asked to stop before, it
/// would be closed under a client whose request is on its way.
pub(super) async fn first_request(has_begun: impl Fn() -> bool) {
    let begun = async {
        while !has_begun() {
            tokio::time::sleep(FIRST_REQUEST_LOOK).await;
        }
    };
    // Nothing came: the connection is closed like any other that idles.
    let _ = tokio::time::timeout(FIRST_REQUEST_PATIENCE, begun).await;
}

/// Counts what the protocol library refused by itself.
pub(super) fn note_refusal(error: &(dyn Error + 'static)) {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<hyper::Error>() {
            if error.is_parse_too_large() {
                Limit::Headers.refuse();
            }
            // Of HTTP/1: of a header that has begun it is the guard who tells.
            if error.is_timeout() && error.source().is_none() {
                Limit::IdleTime.refuse();
            }
        }
        if let Some(error) = error.downcast_ref::<h2::Error>()
            && error.reason() == Some(h2::Reason::ENHANCE_YOUR_CALM)
            && !error.is_remote()
        {
            Limit::Http2Floods.refuse();
        }
        cause = error.source();
    }
}

/// Whether an HTTP/2 request's headers are no larger than they may be; counted when not. The
/// protocol library would answer by itself, and tell nobody: it is given twice the limit.
pub(super) fn headers_fit<B>(request: &hyper::Request<B>, limit: u32) -> bool {
    // What a table of headers takes for each, as the protocol counts.
    const EACH: usize = 32;
    if request.version() != hyper::Version::HTTP_2 {
        return true;
    }
    let uri = request.uri();
    let mut length = 4 * EACH + ":method:scheme:authority:path".len();
    length += request.method().as_str().len();
    length += uri.scheme_str().map_or(0, str::len);
    length += uri
        .authority()
        .map_or(0, |authority| authority.as_str().len());
    length += uri.path_and_query().map_or(0, |path| path.as_str().len());
    for (name, value) in request.headers() {
        length += name.as_str().len() + value.len() + EACH;
    }
    let fit = length <= limit as usize;
    if !fit {
        Limit::Headers.refuse();
    }
    fit
}

/// What the protocol library would answer.
pub(super) fn too_large<B: Default>() -> hyper::Response<B> {
    let mut answer = hyper::Response::new(B::default());
    *answer.status_mut() = hyper::StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
    answer
}

/// Whether an accept failed because the process, or the system, has no descriptor left.
pub(super) fn lacks_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// The next connection, once there is room for it and the wait after a failure is over. One that
/// finds no room stays in `waiting`.
async fn next(
    listener: &mut impl Accept,
    permits: &Arc<Semaphore>,
    wait: Option<Duration>,
    waiting: &mut Option<TcpStream>,
) -> io::Result<(TcpStream, OwnedSemaphorePermit)> {
    if let Some(wait) = wait {
        tokio::time::sleep(wait).await;
    }
    if waiting.is_none() {
        *waiting = Some(listener.accept().await?);
        if permits.available_permits() == 0 {
            Limit::Connections.refuse();
        }
    }
    let permit = permits.clone().acquire_owned().await;
    let permit = permit.map_err(io::Error::other)?;
    let stream = waiting.take().ok_or(io::ErrorKind::NotConnected)?;
    Ok((stream, permit))
}

fn builder(options: &ListenOptions, executor: Counted) -> Builder<Counted> {
    let mut builder = Builder::new(executor);
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
        .max_header_list_size(options.max_header_list.saturating_mul(2))
        .initial_stream_window_size(256 << 10)
        .initial_connection_window_size(2 << 20)
        .keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(10));
    builder
}

/// Runs an HTTP/2 connection's requests, and counts them until their answers are sent to the end.
#[derive(Clone)]
struct Counted(Requests);

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Counted {
    fn execute(&self, request: F) {
        let stream = Stream::open(self.0.clone());
        tokio::spawn(async move {
            let _stream = stream;
            request.await;
        });
    }
}

struct Stream(Requests);

impl Stream {
    fn open(requests: Requests) -> Self {
        requests.open_streams(1);
        Self(requests)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.close_stream();
    }
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

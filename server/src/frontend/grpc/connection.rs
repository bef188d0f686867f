//! Connections: accepted, bounded, kept alive and, at the end, drained.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::GrpcOptions;
use super::backend::Backend;
use super::calls::{CallQueue, WithCalls};
use super::router::Router;
use crate::frontend::listen::{
    Guard, Patience, Requests, accept_rest, farewell, first_request, headers_fit,
    lacks_descriptors, note_refusal, too_large,
};
use crate::guard::Transport;
use crate::limits::Limit;

/// The first bytes of every HTTP/2 connection.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// What somebody gets who speaks HTTP/1 to this port.
const WRONG_PROTOCOL: &[u8] = b"HTTP/1.1 505 HTTP Version Not Supported\r\n\
    content-type: text/plain\r\nconnection: close\r\n\r\n\
    this port speaks gRPC, which needs HTTP/2\n";
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Serves connections until `stop` resolves, then lets them finish what they have begun.
/// Dropping the future closes every connection at once.
pub(super) async fn run<B: Backend>(
    listener: TcpListener,
    router: Arc<Router<B>>,
    options: &GrpcOptions,
    stop: impl Future<Output = ()>,
) {
    let mut connections = JoinSet::new();
    let mut pause = FIRST_PAUSE;
    let mut stop = pin!(stop);
    loop {
        let accepted = tokio::select! {
            () = &mut stop => break,
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        match accepted {
            Ok((_, peer)) if connections.len() >= options.max_connections => {
                // Closed at once: a client can try another replica, a silent backlog tells nothing.
                Limit::Connections.refuse();
                warn!(%peer, limit = options.max_connections, "connection limit reached, refusing");
            }
            Ok((stream, _)) => {
                pause = FIRST_PAUSE;
                let connection = Connection {
                    router: router.clone(),
                    options: options.clone(),
                };
                connections.spawn(connection.serve(stream));
            }
            Err(error) if concerns_one_connection(&error) => {
                debug!(%error, "connection was gone before it was accepted");
            }
            Err(error) => {
                // Out of descriptors or memory: the listener stays, others will close theirs.
                if lacks_descriptors(&error) {
                    Limit::Descriptors.refuse();
                }
                warn!(%error, retry_in = ?pause, "cannot accept connections");
                tokio::select! {
                    () = &mut stop => break,
                    () = tokio::time::sleep(pause) => {}
                }
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
    router.shutdown().cancel();
    if options.queue_survives {
        drop(listener);
    } else {
        // New clients are refused by the system from here on; those in its queue were not.
        for stream in accept_rest(listener) {
            if connections.len() < options.max_connections {
                let connection = Connection {
                    router: router.clone(),
                    options: options.clone(),
                };
                connections.spawn(connection.serve(stream));
            }
        }
    }
    while connections.join_next().await.is_some() {}
}

fn concerns_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::Interrupted
    )
}

fn http2_builder(options: &GrpcOptions, calls: CallQueue) -> http2::Builder<CallQueue> {
    let mut builder = http2::Builder::new(calls);
    builder
        .timer(TokioTimer::new())
        .auto_date_header(false)
        .adaptive_window(false)
        .initial_stream_window_size(options.stream_window)
        .initial_connection_window_size(options.connection_window)
        .max_frame_size(options.max_frame_size)
        .max_concurrent_streams(options.max_concurrent_streams)
        .max_header_list_size(options.max_header_list.saturating_mul(2))
        // The protocol library's own bounds against floods of resets. Absent means unbounded.
        .max_pending_accept_reset_streams(20)
        .max_local_error_reset_streams(1024)
        .keep_alive_interval(options.keep_alive_interval)
        .keep_alive_timeout(options.keep_alive_timeout);
    builder
}

struct Connection<B> {
    router: Arc<Router<B>>,
    options: GrpcOptions,
}

impl<B: Backend> Connection<B> {
    async fn serve(self, stream: TcpStream) {
        let shutdown = self.router.shutdown().clone();
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%error, "cannot set TCP_NODELAY");
        }
        let requests = Requests::default();
        let stopped = async {
            shutdown.cancelled().await;
            first_request(|| requests.streams_opened() > 0).await;
        };
        let mut stopped = pin!(stopped);
        let entered = tokio::select! {
            () = &mut stopped => return,
            entered = self.options.door.enter(stream) => entered,
        };
        let Some((stream, visitor)) = entered else {
            return;
        };
        let connected = Instant::now();
        let header_timeout = self.options.header_timeout;
        let patience = Patience {
            first: header_timeout,
            idle: self.options.idle_timeout,
        };
        let prefaced = tokio::select! {
            () = &mut stopped => return,
            prefaced = tokio::time::timeout(header_timeout, Prefaced::open(stream)) => prefaced,
        };
        if prefaced.is_err() {
            Limit::HeaderTime.refuse();
        }
        let Ok(Some(io)) = prefaced else {
            return;
        };
        let io = Guard::new(io, requests.clone(), connected, header_timeout);
        let router = self.router;
        let max_header_list = self.options.max_header_list;
        let service = service_fn(move |request| {
            let router = router.clone();
            let fit = headers_fit(&request, max_header_list);
            let admitted = visitor.admit(&request);
            async move {
                if !fit {
                    return Ok::<_, Infallible>(too_large());
                }
                let pass = match admitted {
                    Ok(pass) => pass,
                    Err(refusal) => return Ok(refusal.status().into_http()),
                };
                let answered = pass.accompany(request, |request| router.handle(request));
                let answered = answered.await;
                Ok(answered.unwrap_or_else(|refusal| refusal.status().into_http()))
            }
        });
        let calls = CallQueue::default();
        let connection =
            http2_builder(&self.options, calls.clone()).serve_connection(TokioIo::new(io), service);
        let max_calls = self.options.max_concurrent_streams as usize;
        let mut connection = WithCalls::new(connection, calls, max_calls, requests.clone());
        let unwanted = async {
            tokio::select! {
                biased;
                () = old(self.options.max_connection_age) => {}
                () = patience.runs_out(connected, &requests) => {}
            }
        };
        let ended = tokio::select! {
            biased;
            ended = &mut connection => ended,
            () = &mut stopped => {
                connection.connection().graceful_shutdown();
                connection.await
            }
            () = unwanted => {
                connection.connection().graceful_shutdown();
                tokio::select! {
                    ended = connection => ended,
                    () = farewell(&requests) => Ok(()),
                }
            }
        };
        if let Err(error) = ended {
            note_refusal(&error);
            debug!(%error, "connection failed");
        }
    }
}

async fn old(max_age: Option<Duration>) {
    match max_age {
        Some(age) => tokio::time::sleep(age).await,
        None => std::future::pending().await,
    }
}

/// A connection whose preface was read, and will be read once more by who serves it.
///
/// The protocol library waits for the preface without a limit; a client that never sends one
/// would keep its connection for ever.
#[derive(Debug)]
struct Prefaced {
    stream: Transport,
    replayed: usize,
}

impl Prefaced {
    /// None when the client went away or does not speak HTTP/2.
    async fn open(mut stream: Transport) -> Option<Self> {
        let mut seen = [0; PREFACE.len()];
        let mut length = 0;
        while length < seen.len() {
            match stream.read(&mut seen[length..]).await {
                Ok(0) => return None,
                Ok(more) => length += more,
                Err(error) => {
                    debug!(%error, "connection failed before it began");
                    return None;
                }
            }
            if !PREFACE.starts_with(&seen[..length]) {
                if seen[0].is_ascii_uppercase() {
                    // The connection is given up anyway.
                    let _ = stream.write_all(WRONG_PROTOCOL).await;
                    let _ = stream.shutdown().await;
                }
                return None;
            }
        }
        Some(Self {
            stream,
            replayed: 0,
        })
    }
}

impl AsyncRead for Prefaced {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.replayed < PREFACE.len() {
            let rest = &PREFACE[self.replayed..];
            let length = rest.len().min(buf.remaining());
            buf.put_slice(&rest[..length]);
            self.replayed += length;
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Prefaced {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

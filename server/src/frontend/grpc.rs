//! KServe v2 and Triton's extensions over gRPC.
//!
//! The transport is driven here rather than by tonic's server: that one answers `grpc-timeout`
//! with CANCELLED instead of DEADLINE_EXCEEDED and lifts limits that the protocol library has.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::service::Routes;

use crate::frontend::{health, scaler};
use crate::guard::Door;
use crate::limits::RequestLimits;
use crate::service::Service;

mod answer;
pub(crate) mod backend;
mod body;
mod calls;
mod codec;
mod connection;
mod contents;
mod deadline;
mod infer;
mod management;
pub(crate) mod methods;
#[doc(hidden)]
pub mod pieces;
mod repository;
mod router;
mod settings;
mod shared_memory;
mod statistics;
mod stream;
mod wire;
mod wishes;

#[cfg(test)]
mod tests;

/// The largest message that gRPC clients can send: their limits are signed 32-bit integers.
pub const LARGEST_MESSAGE: usize = i32::MAX as usize;

/// For calls that carry names and settings but no tensors.
const MAX_SMALL_MESSAGE: usize = 1 << 20;
/// Who holds a request answers at its deadline; only after this long we do it instead.
const DEADLINE_GRACE: Duration = Duration::from_millis(10);

/// Limits and habits of the gRPC front end.
#[derive(Clone, Debug)]
pub struct GrpcOptions {
    /// Bytes of one message, also once it is decompressed and decoded.
    pub max_message_size: usize,
    pub max_connections: usize,
    /// Calls at once on one connection.
    pub max_concurrent_streams: u32,
    /// Requests of one `ModelStreamInfer` call that are under way at once; more are not read.
    pub max_stream_requests: usize,
    /// Compress answers for clients that accept it.
    pub compress_responses: bool,
    /// Bytes of a call's headers.
    pub max_header_list: u32,
    /// How long a new connection may take until its first call, and each call for its headers.
    pub header_timeout: Duration,
    /// How long a connection without a call stays open.
    pub idle_timeout: Duration,
    /// How long the next 32 KiB of a message may take.
    pub body_patience: Duration,
    /// What a message may consist of.
    pub request: RequestLimits,
    /// Idle connections are asked this often whether they are still there.
    pub keep_alive_interval: Duration,
    pub keep_alive_timeout: Duration,
    /// Connections older than this are asked to reconnect, so that balancers see new replicas.
    pub max_connection_age: Option<Duration>,
    /// Somebody else holds the socket too: connections nobody accepted wait there for our successor.
    pub queue_survives: bool,
    /// Who may come in, and what for.
    pub door: Door,
    /// How long after its last request a model still counts as active, for who scales replicas.
    pub idle_after: Duration,
    /// Bytes that a client may send ahead on one call.
    pub stream_window: u32,
    /// Bytes that a client may send ahead on one connection.
    pub connection_window: u32,
    /// Bytes of one HTTP/2 frame.
    pub max_frame_size: u32,
}

impl Default for GrpcOptions {
    fn default() -> Self {
        Self {
            max_message_size: 64 << 20,
            max_connections: 10_000,
            max_concurrent_streams: 128,
            max_stream_requests: 64,
            compress_responses: false,
            max_header_list: 16 << 10,
            header_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(300),
            body_patience: Duration::from_secs(30),
            request: RequestLimits::default(),
            keep_alive_interval: Duration::from_secs(30),
            keep_alive_timeout: Duration::from_secs(10),
            max_connection_age: None,
            queue_survives: false,
            door: Door::default(),
            idle_after: Duration::from_secs(60),
            stream_window: 1 << 20,
            connection_window: 4 << 20,
            max_frame_size: 64 << 10,
        }
    }
}

/// Why the gRPC front end could not start.
#[derive(Debug, thiserror::Error)]
pub enum GrpcError {
    #[error("max_message_size is {0} bytes: expected 1 to {LARGEST_MESSAGE}")]
    MessageSize(usize),
    #[error("{option} is {value}: expected {expected}")]
    Option {
        option: &'static str,
        value: u64,
        expected: &'static str,
    },
    #[error("cannot describe the services for reflection")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// Serves gRPC on `listener` until `shutdown` resolves, then refuses new connections, tells the
/// open ones to go away, and returns when the last call is answered.
///
/// Dropping the future, or its deadline, ends the calls that are left.
pub async fn serve(
    listener: TcpListener,
    service: Service,
    options: GrpcOptions,
    shutdown: impl Future<Output = ()>,
) -> Result<(), GrpcError> {
    let scaler = scaler::server(service.clone(), options.idle_after);
    let side_services = health::routes(service.clone(), Some(scaler))?;
    serve_routes(listener, service, side_services, options, shutdown).await
}

/// Answers gRPC calls that somebody else's listener lets in, until `shutdown` is cancelled.
pub(super) fn call_handler(
    service: Service,
    options: GrpcOptions,
    shutdown: CancellationToken,
) -> Result<impl Fn(Request<axum::body::Body>) -> Called + Clone, GrpcError> {
    options.check()?;
    let scaler = scaler::server(service.clone(), options.idle_after);
    let side_services = health::routes(service.clone(), Some(scaler))?;
    let router = router::Router::new(service, options, side_services, shutdown);
    let router = Arc::new(router);
    Ok(move |request| -> Called {
        let router = Arc::clone(&router);
        Box::pin(async move { router.handle(request).await })
    })
}

/// An answer on its way.
type Called = Pin<Box<dyn Future<Output = Response<tonic::body::Body>> + Send>>;

#[cfg(test)]
async fn serve_backend<B: backend::Backend>(
    listener: TcpListener,
    backend: B,
    options: GrpcOptions,
    shutdown: impl Future<Output = ()>,
) -> Result<(), GrpcError> {
    let side_services = health::routes(backend.clone(), None)?;
    serve_routes(listener, backend, side_services, options, shutdown).await
}

async fn serve_routes<B: backend::Backend>(
    listener: TcpListener,
    backend: B,
    side_services: Routes,
    options: GrpcOptions,
    shutdown: impl Future<Output = ()>,
) -> Result<(), GrpcError> {
    options.check()?;
    let router = router::Router::new(
        backend,
        options.clone(),
        side_services,
        CancellationToken::new(),
    );
    connection::run(listener, Arc::new(router), &options, shutdown).await;
    Ok(())
}

impl GrpcOptions {
    fn check(&self) -> Result<(), GrpcError> {
        if !(1..=LARGEST_MESSAGE).contains(&self.max_message_size) {
            return Err(GrpcError::MessageSize(self.max_message_size));
        }
        let bounds = [
            (
                "max_connections",
                self.max_connections as u64,
                1,
                u64::MAX,
                "at least 1",
            ),
            (
                "max_concurrent_streams",
                self.max_concurrent_streams.into(),
                1,
                u64::MAX,
                "at least 1",
            ),
            (
                "max_stream_requests",
                self.max_stream_requests as u64,
                1,
                u64::MAX,
                "at least 1",
            ),
            (
                "stream_window",
                self.stream_window.into(),
                65_535,
                WINDOW,
                "65535 to 2147483647",
            ),
            (
                "connection_window",
                self.connection_window.into(),
                65_535,
                WINDOW,
                "65535 to 2147483647",
            ),
            (
                "max_frame_size",
                self.max_frame_size.into(),
                1 << 14,
                (1 << 24) - 1,
                "16384 to 16777215",
            ),
        ];
        for (option, value, least, most, expected) in bounds {
            if value < least || value > most {
                return Err(GrpcError::Option {
                    option,
                    value,
                    expected,
                });
            }
        }
        Ok(())
    }
}

/// The largest window that HTTP/2 knows.
const WINDOW: u64 = (1 << 31) - 1;

/// What a call gets that was not answered in the time its client gave it.
fn overdue() -> Status {
    Status::deadline_exceeded("the call was not answered within its grpc-timeout")
}

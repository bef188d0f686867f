//! The front end without a socket, whole or in steps: what `benches/` measures is what calls go
//! through.

use std::fmt;

use bytes::{BufMut, Bytes};
use dormouse_core::time::Timestamp;
use dormouse_proto::inference as pb;
use http::{Request, Response};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::body::Body;

use super::answer::Answer;
use super::codec::decode_bounded;
use super::deadline::CallTime;
use super::router::Router;
use super::{GrpcError, GrpcOptions, infer, wire};
use crate::frontend::health;
use crate::frontend::status::to_status;
use crate::limits::RequestLimits;
use crate::request::{InferResponse, RawRequest};
use crate::service::Service;

/// Reads the bytes of a `ModelInferRequest`.
pub fn read(message: Bytes, limit: usize, received: Timestamp) -> Result<RawRequest, Status> {
    let mut request: pb::ModelInferRequest =
        decode_bounded(wire::infer_request_cost, limit, message)?;
    let model = std::mem::take(&mut request.model_name);
    let time = CallTime {
        received,
        deadline: None,
    };
    let limits = RequestLimits::default();
    infer::read_request(&model, time, request, &limits).map_err(|error| to_status(&error))
}

/// Bytes of memory that decoding a `ModelInferRequest` is allowed to take beyond the message; none
/// when it is malformed.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn cost(message: &[u8]) -> Option<usize> {
    wire::infer_request_cost(message).ok()
}

/// Writes a `ModelInferResponse`.
pub fn write(response: InferResponse, buf: &mut impl BufMut) {
    Answer(response).encode(buf);
}

/// What answers calls once HTTP/2 is taken off them.
pub struct Calls(Router<Service>);

impl Calls {
    pub fn new(service: Service, options: GrpcOptions) -> Result<Self, GrpcError> {
        options.check()?;
        let side_services = health::routes(service.clone(), None)?;
        let shutdown = CancellationToken::new();
        Ok(Self(Router::new(service, options, side_services, shutdown)))
    }

    pub async fn answer<B>(&self, request: Request<B>) -> Response<Body>
    where
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send,
    {
        self.0.handle(request).await
    }
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calls").finish_non_exhaustive()
    }
}

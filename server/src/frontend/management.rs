//! A listener for management: both protocols on one port.

use axum::Router;
use axum::body::Body;
use http::{Method, Request};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::grpc::{self, GrpcError, GrpcOptions};
use super::http::{self as http_frontend, HttpLimits};
use crate::guard::{Need, is_grpc};
use crate::service::Service;

/// Serves every call of both protocols; its door lets management and questions in.
pub(crate) fn router(
    service: Service,
    limits: HttpLimits,
    options: GrpcOptions,
    shutdown: CancellationToken,
) -> Result<Router, GrpcError> {
    let plain = http_frontend::router(service.clone(), limits);
    let calls = grpc::call_handler(service, options, shutdown)?;
    Ok(Router::new().fallback(move |request: Request<Body>| {
        let (plain, calls) = (plain.clone(), calls.clone());
        async move {
            if is_grpc(request.headers()) {
                return calls(request).await.map(Body::new);
            }
            let Ok(response) = plain.oneshot(request).await;
            response
        }
    }))
}

/// What calls of either protocol need: their paths have nothing in common.
pub(crate) fn need(method: &Method, path: &str) -> Need {
    match http_frontend::routes::need(method, path) {
        Need::Unknown => grpc::methods::need(method, path),
        need => need,
    }
}

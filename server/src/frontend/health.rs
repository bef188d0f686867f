//! The services beside inference: health, for probes, and reflection, for tools.

use std::pin::Pin;

use dormouse_proto::FILE_DESCRIPTOR_SET;
use dormouse_proto::externalscaler::external_scaler_server::ExternalScalerServer;
use futures_util::stream::{self, Stream, StreamExt};
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_reflection::server::Builder;

use super::grpc::backend::Backend;
use super::scaler::Scaler;

/// The services that have a health of their own: the server's, by its two names.
const SERVICES: [&str; 2] = ["", "inference.GRPCInferenceService"];

/// Health, reflection in both its versions, and the scaler where there is one.
pub(super) fn routes<B: Backend>(
    backend: B,
    further: Option<ExternalScalerServer<Scaler>>,
) -> Result<Routes, tonic_reflection::server::Error> {
    let descriptors = || {
        Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let routes = Routes::new(HealthServer::new(Readiness { backend }))
        .add_service(descriptors().build_v1()?)
        .add_service(descriptors().build_v1alpha()?);
    Ok(match further {
        Some(scaler) => routes.add_service(scaler),
        None => routes,
    }
    .prepare())
}

/// Serving while the server is ready.
#[derive(Debug)]
struct Readiness<B> {
    backend: B,
}

type Statuses = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

#[tonic::async_trait]
impl<B: Backend> Health for Readiness<B> {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let service = &request.get_ref().service;
        if !SERVICES.contains(&service.as_str()) {
            let shown: String = service.chars().take(64).collect();
            return Err(Status::not_found(format!(
                "unknown service '{shown}': expected '{}' or '{}'",
                SERVICES[0], SERVICES[1]
            )));
        }
        Ok(Response::new(response(status(self.backend.is_ready()))))
    }

    type WatchStream = Statuses;

    /// Sends the status and then every change of it. A service that is not known yet is no error
    /// here: the protocol wants it reported as such.
    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Statuses>, Status> {
        if !SERVICES.contains(&request.get_ref().service.as_str()) {
            let unknown = stream::once(async { Ok(response(ServingStatus::ServiceUnknown)) });
            return Ok(Response::new(unknown.chain(stream::pending()).boxed()));
        }
        let backend = self.backend.clone();
        let changes = stream::unfold((backend, None), |(backend, known)| async move {
            let ready = match known {
                None => backend.is_ready(),
                Some(known) => backend.readiness_changed(known).await,
            };
            Some((Ok(response(status(ready))), (backend, Some(ready))))
        });
        Ok(Response::new(changes.boxed()))
    }
}

fn status(ready: bool) -> ServingStatus {
    match ready {
        true => ServingStatus::Serving,
        false => ServingStatus::NotServing,
    }
}

fn response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse {
        status: status.into(),
    }
}

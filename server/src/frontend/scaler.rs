//! KEDA's external scaler: tells how busy the server, or one of its models, is.
//!
//! Every answer follows from the trigger's metadata and from this replica's load alone, so equal
//! replicas describe the metric in equal words. Asking wakes no model and counts as no activity.

mod metadata;

use std::pin::Pin;
use std::time::Duration;

use dormouse_core::code::ErrorCode;
use dormouse_proto::externalscaler as pb;
use futures_util::stream::{self, Stream, StreamExt};
use pb::external_scaler_server::{ExternalScaler, ExternalScalerServer};
use tonic::{Request, Response, Status};

use self::metadata::{Metric, Trigger};
use crate::activity::Load;
use crate::service::Service;

/// Metadata is a handful of short words.
const MAX_MESSAGE: usize = 64 << 10;

/// The gRPC service; `idle_after` holds for triggers that do not say it themselves.
pub(super) fn server(service: Service, idle_after: Duration) -> ExternalScalerServer<Scaler> {
    ExternalScalerServer::new(Scaler {
        service,
        idle_after,
    })
    .max_decoding_message_size(MAX_MESSAGE)
}

/// Answers for one server.
#[derive(Clone, Debug)]
pub(super) struct Scaler {
    service: Service,
    idle_after: Duration,
}

type Stated = Pin<Box<dyn Stream<Item = Result<pb::IsActiveResponse, Status>> + Send>>;
type Specs = Pin<Box<dyn Stream<Item = Result<pb::GetMetricSpecResponse, Status>> + Send>>;

impl Scaler {
    /// The trigger that metadata describes, of a model and version that exist.
    async fn trigger(&self, reference: &pb::ScaledObjectRef) -> Result<Trigger, Status> {
        let trigger = Trigger::parse(&reference.scaler_metadata, self.idle_after)?;
        if !trigger.version.is_empty() {
            // A model nobody has called is not read yet, and its versions not known. One that
            // cannot be read has no load, which is no error of the trigger's.
            let registry = self.service.registry();
            if let Ok(generation) = registry.generation(&trigger.model).await
                && let Err(error) = generation.unit(&trigger.version)
            {
                return Err(metadata::invalid("version", &error));
            }
        }
        self.load(&trigger)?;
        Ok(trigger)
    }

    fn load(&self, trigger: &Trigger) -> Result<Load, Status> {
        self.service
            .load_of(&trigger.model, &trigger.version, trigger.rate_window)
            .map_err(|error| match error.code() {
                ErrorCode::NotFound | ErrorCode::InvalidRequest => {
                    metadata::invalid("model", &error)
                }
                _ => super::status::to_status(&error),
            })
    }

    fn is_active(&self, trigger: &Trigger) -> Result<bool, Status> {
        let load = self.load(trigger)?;
        Ok(load.is_active(trigger.idle_after, self.service.now()))
    }

    /// Resolves when the answer differs from `known`, with what it is then.
    async fn changed(&self, trigger: &Trigger, known: bool) -> Result<bool, Status> {
        let activity = &self.service.host().activity;
        if !known {
            activity
                .until(|| self.is_active(trigger).unwrap_or(true))
                .await;
            return self.is_active(trigger);
        }
        loop {
            let (load, now) = (self.load(trigger)?, self.service.now());
            if !load.is_active(trigger.idle_after, now) {
                return Ok(false);
            }
            let quiet = load.last.filter(|_| load.in_flight == 0).unwrap_or(now);
            let until = self
                .service
                .host()
                .clock
                .instant(quiet + trigger.idle_after);
            tokio::time::sleep_until(until.max(tokio::time::Instant::now() + LEAST_WAIT)).await;
        }
    }
}

/// Between two looks at a busy model whose trigger calls it idle after next to no time.
const LEAST_WAIT: Duration = Duration::from_millis(20);

#[tonic::async_trait]
impl ExternalScaler for Scaler {
    async fn is_active(
        &self,
        request: Request<pb::ScaledObjectRef>,
    ) -> Result<Response<pb::IsActiveResponse>, Status> {
        let trigger = self.trigger(request.get_ref()).await?;
        let result = Scaler::is_active(self, &trigger)?;
        Ok(Response::new(pb::IsActiveResponse { result }))
    }

    type StreamIsActiveStream = Stated;

    /// Sends the answer and then every change of it, at once when somebody is served again.
    async fn stream_is_active(
        &self,
        request: Request<pb::ScaledObjectRef>,
    ) -> Result<Response<Stated>, Status> {
        let trigger = self.trigger(request.get_ref()).await?;
        let changes = stream::unfold(Some((self.clone(), trigger, None)), |state| async move {
            let (scaler, trigger, known) = state?;
            let active = match known {
                None => Scaler::is_active(&scaler, &trigger),
                Some(known) => scaler.changed(&trigger, known).await,
            };
            Some(match active {
                Ok(result) => (
                    Ok(pb::IsActiveResponse { result }),
                    Some((scaler, trigger, Some(result))),
                ),
                // The model is gone.
                Err(status) => (Err(status), None),
            })
        });
        let service = self.service.clone();
        let changes = changes.take_until(async move { service.leaving().await });
        Ok(Response::new(changes.boxed()))
    }

    async fn get_metric_spec(
        &self,
        request: Request<pb::ScaledObjectRef>,
    ) -> Result<Response<pb::GetMetricSpecResponse>, Status> {
        let trigger = self.trigger(request.get_ref()).await?;
        Ok(Response::new(trigger.spec()))
    }

    async fn get_metrics(
        &self,
        request: Request<pb::GetMetricsRequest>,
    ) -> Result<Response<pb::GetMetricsResponse>, Status> {
        let request = request.into_inner();
        let reference = request.scaled_object_ref.unwrap_or_default();
        let trigger = self.trigger(&reference).await?;
        let name = trigger.metric_name();
        if !request.metric_name.is_empty() && request.metric_name != name {
            let shown: String = request.metric_name.chars().take(128).collect();
            return Err(Status::invalid_argument(format!(
                "metricName: '{}' is not this trigger's metric, which is '{name}'",
                shown.escape_debug()
            )));
        }
        let load = self.load(&trigger)?;
        let value = match trigger.metric {
            Metric::Pending => load.in_flight as f64,
            Metric::Queued => load.queued as f64,
            Metric::InFlight => load.in_flight.saturating_sub(load.queued) as f64,
            Metric::Rate => load.rate,
        };
        Ok(Response::new(pb::GetMetricsResponse {
            metric_values: vec![pb::MetricValue {
                metric_name: name,
                metric_value: value.ceil() as i64,
                metric_value_float: value,
            }],
        }))
    }

    type StreamMetricSpecStream = Specs;

    /// Sends the description once: it follows from the metadata, which does not change.
    async fn stream_metric_spec(
        &self,
        request: Request<pb::ScaledObjectRef>,
    ) -> Result<Response<Specs>, Status> {
        let spec = self.trigger(request.get_ref()).await?.spec();
        let service = self.service.clone();
        let specs = stream::once(async { Ok(spec) })
            .chain(stream::pending())
            .take_until(async move { service.leaving().await });
        Ok(Response::new(specs.boxed()))
    }
}

//! Takes spans off the queue and sends them in batches, by gRPC or as protobuf over HTTP.

use std::time::Duration;

use dormouse_proto::otlp as pb;
use http::{HeaderName, HeaderValue, Request, header};
use http_body_util::Full;
use pb::trace_service_client::TraceServiceClient;
use prost::Message;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::metadata::{MetadataKey, MetadataMap, MetadataValue};
use tonic::transport::{Channel, Endpoint};

use super::{SpanRecord, Tracer, otlp};
use crate::clock::Clock;
use crate::config::{OtlpProtocol, TracingConfig};
use crate::metrics::Metrics;
use crate::webhook::{Client, WebhookError};

/// Spans sent together, and how long the first of them waits for others.
const MAX_BATCH: usize = 512;
const BATCH_DELAY: Duration = Duration::from_secs(5);
/// Attempts for one batch, and the pause after the first; it doubles.
const ATTEMPTS: u32 = 3;
const PAUSE: Duration = Duration::from_millis(500);

/// Why spans cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum ExporterError {
    #[error("the collector's address cannot be used: {0}")]
    Address(#[from] tonic::transport::Error),
    #[error("a secure connection to the collector cannot be made: {0}")]
    Secure(#[from] WebhookError),
}

/// The task that sends spans.
#[derive(Debug)]
pub struct Exporter {
    task: JoinHandle<()>,
    stop: CancellationToken,
}

enum Way {
    Grpc(Box<TraceServiceClient<Channel>>, MetadataMap),
    Http(Box<Client>, Vec<(HeaderName, HeaderValue)>),
}

struct Sending {
    way: Way,
    config: TracingConfig,
    tracer: Tracer,
    metrics: Metrics,
}

impl Exporter {
    /// Starts sending what the tracer records.
    pub fn spawn(
        config: &TracingConfig,
        clock: Clock,
        metrics: &Metrics,
    ) -> Result<(Tracer, Self), ExporterError> {
        let way = match config.protocol {
            OtlpProtocol::Grpc => {
                let channel = Endpoint::from_shared(config.endpoint.to_string())?
                    .connect_timeout(config.timeout)
                    .connect_lazy();
                let client = TraceServiceClient::new(channel);
                Way::Grpc(Box::new(client), metadata(&config.headers))
            }
            OtlpProtocol::HttpProtobuf => {
                let client = Client::reaching(config.endpoint.clone(), config.ca_file.as_deref())?;
                Way::Http(Box::new(client), config.headers.clone())
            }
        };
        let (tracer, recorded) = Tracer::new(clock, config.sampler, metrics);
        let stop = CancellationToken::new();
        let sending = Sending {
            way,
            config: config.clone(),
            tracer: tracer.clone(),
            metrics: metrics.clone(),
        };
        tracing::info!(collector = %config.endpoint, "spans are recorded and sent");
        let task = tokio::spawn(sending.run(recorded, stop.clone()));
        Ok((tracer, Self { task, stop }))
    }

    /// Sends what waits, no longer than `patience`.
    pub async fn flush(self, patience: Duration) {
        self.stop.cancel();
        let abort = self.task.abort_handle();
        if tokio::time::timeout(patience, self.task).await.is_err() {
            abort.abort();
            tracing::warn!("spans that waited to be sent are given up: the collector is slow");
        }
    }
}

impl Sending {
    async fn run(mut self, mut recorded: mpsc::Receiver<SpanRecord>, stop: CancellationToken) {
        let mut batch = Vec::with_capacity(MAX_BATCH);
        loop {
            let first = tokio::select! {
                biased;
                first = recorded.recv() => first,
                () = stop.cancelled() => None,
            };
            let Some(first) = first else { return };
            batch.push(first);
            let until = Instant::now() + BATCH_DELAY;
            while batch.len() < MAX_BATCH {
                let room = MAX_BATCH - batch.len();
                let more = tokio::select! {
                    biased;
                    more = recorded.recv_many(&mut batch, room) => more > 0,
                    () = stop.cancelled() => false,
                    () = tokio::time::sleep_until(until) => false,
                };
                if !more {
                    break;
                }
            }
            self.send(std::mem::take(&mut batch)).await;
        }
    }

    async fn send(&mut self, spans: Vec<SpanRecord>) {
        let count = spans.len() as u64;
        let request = otlp::request(&self.tracer, &self.config.service_name, spans);
        let mut pause = PAUSE;
        for attempt in 1..=ATTEMPTS {
            let sent = tokio::time::timeout(self.config.timeout, self.attempt(&request));
            let failure = match sent.await {
                Ok(Ok(rejected)) => {
                    let rejected = rejected.min(count);
                    self.metrics.server().spans_sent.increment(count - rejected);
                    self.metrics.server().spans_dropped.increment(rejected);
                    return;
                }
                Ok(Err(failure)) => failure,
                Err(_) => Failure::passing("it did not answer in time"),
            };
            if attempt == ATTEMPTS || !failure.passes {
                self.metrics.server().spans_dropped.increment(count);
                tracing::warn!(
                    collector = %self.config.endpoint,
                    error = failure.why,
                    spans = count,
                    "spans could not be sent"
                );
                return;
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    /// Returns how many spans the collector did not want.
    async fn attempt(&mut self, request: &pb::ExportTraceServiceRequest) -> Result<u64, Failure> {
        match &mut self.way {
            Way::Grpc(client, metadata) => {
                let mut call = tonic::Request::new(request.clone());
                *call.metadata_mut() = metadata.clone();
                let answer = client.export(call).await.map_err(|status| {
                    use tonic::Code;
                    Failure {
                        why: status.to_string(),
                        passes: matches!(
                            status.code(),
                            Code::Unavailable
                                | Code::Cancelled
                                | Code::DeadlineExceeded
                                | Code::Aborted
                                | Code::OutOfRange
                                | Code::DataLoss
                        ),
                    }
                })?;
                let partial = answer.into_inner().partial_success.unwrap_or_default();
                Ok(u64::try_from(partial.rejected_spans).unwrap_or(0))
            }
            Way::Http(client, headers) => {
                let endpoint = &self.config.endpoint;
                let mut post = Request::post(endpoint.path.as_str())
                    .header(header::HOST, format!("{}:{}", endpoint.host, endpoint.port))
                    .header(header::CONTENT_TYPE, "application/x-protobuf");
                for (name, value) in headers.iter() {
                    post = post.header(name, value);
                }
                let body = Full::new(request.encode_to_vec().into());
                let post = post
                    .body(body)
                    .map_err(|error| Failure::lasting(error.to_string()))?;
                let reply = client.post(post).await;
                let reply = reply.map_err(|error| Failure::passing(error.to_string()))?;
                match reply.status.as_u16() {
                    200..=299 => Ok(0),
                    429 | 502 | 503 | 504 => Err(Failure::passing(reply.status.to_string())),
                    _ => Err(Failure::lasting(reply.status.to_string())),
                }
            }
        }
    }
}

/// Why a batch was not taken, and whether trying again makes sense.
struct Failure {
    why: String,
    passes: bool,
}

impl Failure {
    fn passing(why: impl Into<String>) -> Self {
        Self {
            why: why.into(),
            passes: true,
        }
    }

    fn lasting(why: impl Into<String>) -> Self {
        Self {
            why: why.into(),
            passes: false,
        }
    }
}

/// Headers as gRPC has them; ones that gRPC cannot carry were refused with the configuration.
fn metadata(headers: &[(HeaderName, HeaderValue)]) -> MetadataMap {
    let mut metadata = MetadataMap::new();
    for (name, value) in headers {
        let key = MetadataKey::from_bytes(name.as_str().as_bytes());
        let value = MetadataValue::try_from(value.as_bytes());
        if let (Ok(key), Ok(value)) = (key, value) {
            metadata.insert(key, value);
        }
    }
    metadata
}

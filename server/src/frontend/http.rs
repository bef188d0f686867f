//! The v2 protocol over HTTP, as Triton speaks it.
//!
//! Reads, asks the service, and writes; no decisions. Work that grows with a body (parsing,
//! encoding, compressing) leaves the async threads when the body is large.

mod answer;
mod body;
mod coding;
mod control;
mod documents;
mod infer;
mod json;
mod openapi;
mod page;
#[doc(hidden)]
pub mod pieces;
pub(crate) mod routes;
mod settings;
mod tensor_data;

use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

use ::http::header::{self, HeaderMap};
use ::http::{Method, Request, StatusCode};
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http_body::Body as _;
use tokio::sync::Semaphore;

use self::answer::{Answer, Failure};
use self::body::{BodyHead, Received, Room};
use self::coding::Coding;
use self::routes::{Access, Memory, ModelRef, Route};
use crate::error::ServeError;
use crate::guard::Need;
use crate::limits::RequestLimits;
use crate::log_settings;
use crate::request::RawRequest;
use crate::service::Service;
use crate::shared_memory::{Caller, no_cuda, no_cuda_region};
use crate::spans::{Protocol, RequestSpan};

/// The metrics port's only route.
pub const METRICS: &str = "/metrics";

/// Bodies up to this size are handled where they arrive.
const INLINE: u64 = 256 << 10;
/// Bodies below this size are not worth compressing.
const COMPRESS_ABOVE: u64 = 1 << 10;

/// What a client may send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpLimits {
    /// Bytes of a body, before and after decompression (`--http-max-input-size`).
    pub max_input_size: u64,
    /// How long a body may take for its next 32 KiB.
    pub body_progress_timeout: Duration,
    /// Chunks of a body without a declared length, for each 64 MiB of `max_input_size`.
    pub max_chunks: u64,
    /// What the content of a body may be like.
    pub request: RequestLimits,
    /// Whether the page is served.
    pub page: bool,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            max_input_size: 64 << 20,
            body_progress_timeout: Duration::from_secs(30),
            max_chunks: 65_536,
            request: RequestLimits::default(),
            page: true,
        }
    }
}

impl HttpLimits {
    /// Chunks of a body without a declared length.
    fn max_chunks(&self) -> u64 {
        let parts = (self.max_input_size / (64 << 20)).max(1);
        self.max_chunks.saturating_mul(parts)
    }
}

/// Serves the inference protocol.
pub fn router(service: Service, limits: HttpLimits) -> Router {
    let cores = available_parallelism().map_or(1, usize::from);
    let app = App {
        service,
        limits,
        heavy: Semaphore::new(cores),
    };
    Router::new().fallback(dispatch).with_state(Arc::new(app))
}

/// Serves `GET /metrics` in Prometheus' text format.
pub fn metrics_router(service: Service) -> Router {
    let metrics = async |State(service): State<Service>, headers: HeaderMap| {
        let answer = Answer {
            content_type: "text/plain; version=0.0.4",
            ..Answer::json(service.render_metrics().into_bytes())
        };
        let coding = accepted(&headers, answer.body.len());
        answer.into_response(coding)
    };
    Router::new()
        .route(METRICS, axum::routing::get(metrics))
        .method_not_allowed_fallback(async || Failure {
            allow: Some("GET, HEAD"),
            ..Failure::new(StatusCode::METHOD_NOT_ALLOWED, "expected GET")
        })
        .fallback(async || Failure::new(StatusCode::NOT_FOUND, "no such endpoint: try /metrics"))
        .with_state(service)
}

/// What the metrics port's only route needs.
pub(crate) fn metrics_need(_: &Method, path: &str) -> Need {
    match path {
        METRICS => Need::Metrics,
        _ => Need::Unknown,
    }
}

struct App {
    service: Service,
    limits: HttpLimits,
    /// Large bodies being worked on at once: more would only share the same cores.
    heavy: Semaphore,
}

/// The request without its body.
struct Head {
    headers: HeaderMap,
    query: String,
    /// When the request was taken up.
    received: dormouse_core::time::Timestamp,
    /// Whose regions of shared memory it may name, where that is known.
    caller: Option<Caller>,
}

async fn dispatch(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    let received = app.service.now();
    let (mut parts, body) = request.into_parts();
    let head = Head {
        caller: parts.extensions.remove(),
        query: parts.uri.query().unwrap_or_default().to_owned(),
        headers: parts.headers,
        received,
    };
    let result = match routes::find(&parts.method, parts.uri.path()) {
        Ok(route) => app.answer(route, &head, body).await,
        Err(failure) => Err(failure),
    };
    result.unwrap_or_else(IntoResponse::into_response)
}

impl App {
    async fn answer(&self, route: Route, head: &Head, body: Body) -> Result<Response, Failure> {
        let service = &self.service;
        let document = match route {
            Route::Live => return Ok(health("live", service.is_live())),
            Route::Ready => return Ok(health("ready", service.is_ready())),
            Route::ModelReady(model) => {
                return if service.is_model_ready(&model.name, &model.version).await? {
                    Ok(health("ready", true))
                } else {
                    Err(Failure::bad_request("Model version not ready"))
                };
            }
            Route::Infer(model) => {
                let tracer = service.host().tracer.as_ref();
                let span = tracer.and_then(|tracer| {
                    tracer.request(&head.headers, head.received, Protocol::Http)
                });
                let answered = self.infer(model, head, body, span.clone()).await;
                if let (Some(span), Err(failure)) = (span, &answered) {
                    span.refused(&failure.message);
                }
                return answered;
            }
            Route::Load(model) => {
                let Received { bytes, held: _held } = self.read_body(head, body, 0).await?;
                let overrides = self
                    .work(bytes.len() as u64, move || control::read_load(&bytes))
                    .await??;
                service.load(&model, overrides).await?;
                return Ok(Answer::json(Vec::new()).into_response(Coding::Identity));
            }
            Route::Unload(model) => {
                let body = self.read_body(head, body, 0).await?;
                control::read_unload(&body.bytes)?;
                service.unload(&model).await?;
                return Ok(Answer::json(Vec::new()).into_response(Coding::Identity));
            }
            Route::ServerMetadata => documents::server_metadata(&service.info()),
            Route::ModelMetadata(model) => {
                documents::model_metadata(&service.describe(&model.name, &model.version).await?)
            }
            Route::ModelConfig(model) => {
                let model = service.describe(&model.name, &model.version).await?;
                documents::config_json(&model.spec.config)
            }
            Route::Statistics(model) => {
                documents::statistics(&service.statistics(&model.name, &model.version).await?)
            }
            Route::Index => {
                let body = self.read_body(head, body, 0).await?;
                documents::index(&service.index(control::read_index(&body.bytes)?))
            }
            Route::Models => documents::models(&service.index(true)),
            Route::Overview => documents::overview(&service.overview(&page::query(&head.query)?)),
            Route::OpenApi => openapi::DOCUMENT.to_vec(),
            Route::Page(name) => return page::answer(&name, self.limits.page, &head.headers),
            Route::Unsupported(why) => return Err(ServeError::unsupported(why).into()),
            other => self.extension(other, head, body).await?,
        };
        // Never compressed, as in Triton: tritonclient's asyncio client accepts gzip for
        // everything and unpacks only answers to inference.
        Ok(Answer::json(document).into_response(Coding::Identity))
    }

    /// Answers what belongs to an extension with a document.
    async fn extension(&self, route: Route, head: &Head, body: Body) -> Result<Vec<u8>, Failure> {
        let extensions = self.service.extensions();
        let regions = extensions.shared_memory.of(head.caller.as_ref());
        let Received { bytes: body, .. } = self.read_body(head, body, 0).await?;
        Ok(match route {
            Route::LogSettings(access) => {
                if access == Access::Change {
                    log_settings::update(&settings::read_log(&body)?)?;
                }
                settings::log_document(log_settings::current()?)
            }
            Route::TraceSettings(model, access) => {
                self.service.check_known(&model)?;
                if access == Access::Change {
                    let changes = settings::read_trace(&body)?;
                    extensions.trace.update(&model, &changes)?;
                }
                settings::trace_document(extensions.trace.current(&model))
            }
            Route::RegionStatus(Memory::System, name) => {
                settings::regions_document(&regions.status(&name)?)
            }
            Route::RegisterRegion(Memory::System, name) => {
                let (key, region) = settings::read_register(&body, name)?;
                regions.register(&key, region)?;
                Vec::new()
            }
            Route::UnregisterRegion(Memory::System, name) => {
                regions.unregister(&name)?;
                Vec::new()
            }
            Route::RegionStatus(Memory::Cuda, name) if name.is_empty() => {
                settings::regions_document(&[])
            }
            Route::RegionStatus(Memory::Cuda, name) => return Err(no_cuda_region(&name).into()),
            Route::RegisterRegion(Memory::Cuda, name) => return Err(no_cuda(&name).into()),
            Route::UnregisterRegion(Memory::Cuda, _) => Vec::new(),
            _ => return Err(ServeError::internal("a route without an answer").into()),
        })
    }

    async fn infer(
        &self,
        model: ModelRef,
        head: &Head,
        body: Body,
        span: Option<RequestSpan>,
    ) -> Result<Response, Failure> {
        if let Some(span) = &span {
            span.asks(&model.name, &model.version, "");
        }
        let received = head.received;
        let header_length = match head.headers.get(infer::HEADER_LENGTH) {
            Some(value) => Some(infer::header_length(value.as_bytes())?),
            None => None,
        };
        // Counts until the request is queued, where it counts by itself.
        let Received {
            bytes: body,
            mut held,
        } = self
            .read_body(head, body, header_length.unwrap_or_default())
            .await?;
        let parsed = if header_length == Some(0) {
            let described = self.service.describe(&model.name, &model.version).await?;
            infer::parse_raw(body, &described.spec, received)?
        } else {
            // Only the JSON takes time; the binary tail is never looked at.
            let json = header_length.unwrap_or(body.len()) as u64;
            let limits = self.limits.request;
            // With the bytes: a caller who leaves does not end the reading.
            let parse = move || {
                let parsed = infer::parse(&body, header_length, received, &limits);
                (parsed, held)
            };
            let (parsed, still_held) = self.work(json, parse).await?;
            held = still_held;
            parsed?
        };
        let mut request = RawRequest {
            span: span.clone(),
            held,
            ..parsed.request
        };
        if let Some(wishes) = &mut request.wishes {
            wishes.caller = head.caller.clone();
        }
        let answered = self
            .service
            .infer(&model.name, &model.version, request)
            .await;
        if let Some(span) = span {
            span.ended(answered.as_ref().err());
        }
        let response = answered?;
        let plan = parsed.plan;
        let size = |binary: bool| -> u64 {
            let outputs = response.outputs.iter();
            let wanted = outputs.filter(|(name, _)| plan.is_binary(name) == binary);
            wanted.map(|(_, tensor)| tensor.data.len() as u64).sum()
        };
        let (text, total) = (size(false), size(false) + size(true));
        let coding = accepted(&head.headers, total.max(text.saturating_mul(2)));
        let effort = if coding == Coding::Identity {
            text
        } else {
            total
        };
        let response = self
            .work(effort, move || {
                Answer::infer(response, &plan).map(|answer| answer.into_response(coding))
            })
            .await??;
        Ok(response)
    }

    /// Reads a body; what begins at `offset` in it is aligned.
    async fn read_body(&self, head: &Head, body: Body, offset: usize) -> Result<Received, Failure> {
        let length = body.size_hint().exact();
        let body_head = BodyHead::read(&head.headers, length)?;
        let room = Room::new(&self.limits, &self.service.host().in_flight);
        body::read(body, body_head, offset, room).await
    }

    /// Runs `task` here, or where blocking is allowed when it has many bytes to go through.
    async fn work<T: Send + 'static>(
        &self,
        bytes: u64,
        task: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        if bytes <= INLINE {
            return Ok(task());
        }
        let gone = |_| ServeError::internal("a task of the server was lost");
        let _permit = self.heavy.acquire().await.map_err(|_| gone(()))?;
        let result = tokio::task::spawn_blocking(task).await;
        Ok(result.map_err(|_| gone(()))?)
    }
}

/// The answer to a probe: Triton's status, and the body that KServe's client reads.
fn health(what: &str, healthy: bool) -> Response {
    let status = match healthy {
        true => StatusCode::OK,
        false => StatusCode::BAD_REQUEST,
    };
    (status, axum::Json(serde_json::json!({ what: healthy }))).into_response()
}

/// The coding a client wants for a body of about `length` bytes.
fn accepted(headers: &HeaderMap, length: u64) -> Coding {
    if length < COMPRESS_ABOVE {
        return Coding::Identity;
    }
    headers
        .get(header::ACCEPT_ENCODING)
        .and_then(|value| value.to_str().ok())
        .map_or(Coding::Identity, Coding::from_accept_encoding)
}

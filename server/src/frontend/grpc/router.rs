//! From a path to the code behind it. Calls on tensors come first and take no detour.

use std::future::Future;

use bytes::Bytes;
use futures_util::StreamExt;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::{Body as _, Frame};
use http_body_util::BodyExt;
use prost::Message;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::body::Body;
use tonic::codec::{Codec, CompressionEncoding};
use tonic::server::Grpc;
use tonic::service::Routes;
use tonic_prost::ProstCodec;
use tower::Service as _;

use super::answer::{Answer, StreamAnswer};
use super::backend::Backend;
use super::body::{Steady, Stoppable, Waits};
use super::codec::{self, BoundedCodec, Received};
use super::deadline::{CallTime, grpc_timeout};
use super::stream::{self, Limited, StreamTerms};
use super::{
    DEADLINE_GRACE, GrpcOptions, MAX_SMALL_MESSAGE, infer, management, overdue, repository,
    settings, shared_memory, statistics, wire,
};
use crate::frontend::status::to_status;
use crate::shared_memory::Caller;
use crate::spans::Protocol;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What the paths of the inference service's methods begin with.
const SERVICE: &str = "/inference.GRPCInferenceService/";

/// Every method of every service on the gRPC port.
#[derive(Debug)]
pub(super) struct Router<B> {
    backend: B,
    options: GrpcOptions,
    /// Health, reflection and the scaler.
    side_services: Routes,
    /// Cancelled when the server stops: calls without an end of their own end then.
    shutdown: CancellationToken,
}

impl<B: Backend> Router<B> {
    pub(super) fn new(
        backend: B,
        options: GrpcOptions,
        side_services: Routes,
        shutdown: CancellationToken,
    ) -> Self {
        Self {
            backend,
            options,
            side_services,
            shutdown,
        }
    }

    pub(super) fn shutdown(&self) -> &CancellationToken {
        &self.shutdown
    }

    /// Answers one call. Dropping the future cancels what it asked for.
    pub(super) async fn handle<T>(&self, request: Request<T>) -> Response<Body>
    where
        T: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        T::Error: Into<BoxError> + Send,
    {
        if let Some(refusal) = refuse_other_protocols(&request) {
            return refusal;
        }
        let timeout = match grpc_timeout(request.headers()) {
            Ok(timeout) => timeout,
            Err(error) => return to_status(&error).into_http(),
        };
        let received = self.backend.now();
        let time = CallTime {
            received,
            deadline: timeout.map(|timeout| received + timeout),
        };
        if request.uri().path() == "/inference.GRPCInferenceService/ModelStreamInfer" {
            // Rare calls: their futures would only make the common one larger.
            return Box::pin(self.model_stream_infer(time, request)).await;
        }
        match timeout {
            None => self.unary_call(time, request).await,
            // Who is asked keeps the deadline itself and says what was late; this is for a
            // request whose body is late, and it counts on nobody.
            Some(timeout) => {
                let timeout = timeout.saturating_add(DEADLINE_GRACE);
                tokio::time::timeout(timeout, self.unary_call(time, request))
                    .await
                    .unwrap_or_else(|_| overdue().into_http())
            }
        }
    }

    async fn unary_call<T>(&self, time: CallTime, request: Request<T>) -> Response<Body>
    where
        T: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        T::Error: Into<BoxError> + Send,
    {
        match request.uri().path() {
            "/inference.GRPCInferenceService/ModelInfer" => self.model_infer(time, request).await,
            // Rare calls: their futures would only make the common one larger.
            path if path.starts_with(SERVICE) => Box::pin(self.management_call(request)).await,
            path if path.starts_with("/grpc.health.v1.Health/")
                || path.starts_with("/grpc.reflection.")
                || path.starts_with("/externalscaler.ExternalScaler/") =>
            {
                let mut services = self.side_services.clone();
                let request = self.steady(request, Waits::Steadily);
                match Box::pin(services.call(request)).await {
                    Ok(response) => {
                        response.map(|body| Body::new(Stoppable::new(body, &self.shutdown)))
                    }
                    Err(never) => match never {},
                }
            }
            path => unknown_method(path),
        }
    }

    async fn model_infer<T>(&self, time: CallTime, request: Request<T>) -> Response<Body>
    where
        T: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        T::Error: Into<BoxError> + Send,
    {
        let limit = self.options.max_message_size;
        let codec = BoundedCodec::<_, Answer>::new(wire::infer_request_cost, limit);
        let request = self.steady(request, Waits::OneNow);
        let tracer = self.backend.tracer();
        let span = tracer
            .and_then(|tracer| tracer.request(request.headers(), time.received, Protocol::Grpc));
        let response = self
            .grpc(codec, limit, true)
            .unary(
                tower::service_fn(|request: tonic::Request<Received<_>>| {
                    let limits = &self.options.request;
                    infer::model_infer(&self.backend, time, span.clone(), request, limits)
                }),
                request,
            )
            .await;
        note_refusal(&response);
        if let Some(span) = span {
            span.refused("the request cannot be read");
        }
        match response.headers().get(infer::SERVER_TIMING).cloned() {
            None => response,
            Some(timing) => response.map(|body| with_trailer(body, infer::SERVER_TIMING, timing)),
        }
    }

    async fn model_stream_infer<T>(&self, time: CallTime, request: Request<T>) -> Response<Body>
    where
        T: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        T::Error: Into<BoxError> + Send,
    {
        let limit = self.options.max_message_size;
        let codec = BoundedCodec::<_, StreamAnswer>::new(wire::infer_request_cost, limit);
        let terms = StreamTerms {
            time,
            fail_fast: stream::wants_status(request.headers()),
            in_flight: self.options.max_stream_requests,
            caller: self.backend.tracer().map(|_| request.headers().clone()),
            quota: request.extensions().get().cloned(),
            regions_of: request.extensions().get().cloned(),
            limits: self.options.request,
        };
        let timeout = time.deadline.map(|deadline| deadline - time.received);
        let request = self.steady(request, Waits::Forever);
        let service = |request: tonic::Request<tonic::Streaming<Received<_>>>| {
            let answers = stream::answers(
                self.backend.clone(),
                request.into_inner(),
                terms.clone(),
                self.shutdown.clone(),
            );
            // Its client may go on at any time: an open stream is not cut off for idleness.
            let hold = self.backend.hold();
            let answers = answers.inspect(move |_| {
                let _held = &hold;
            });
            let answers = Limited::new(answers, timeout);
            std::future::ready(Ok(tonic::Response::new(answers)))
        };
        self.grpc(codec, limit, true)
            .streaming(tower::service_fn(service), request)
            .await
    }

    async fn management_call<T>(&self, request: Request<T>) -> Response<Body>
    where
        T: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        T::Error: Into<BoxError> + Send,
    {
        let backend = &self.backend;
        let caller = request.extensions().get::<Caller>().cloned();
        let path = request.uri().path();
        // All of the rest: the guard knows whole paths only, and a longer one that ends in a
        // method's name needs nothing there.
        match path.strip_prefix(SERVICE).unwrap_or_default() {
            "ServerLive" => {
                self.unary(request, |q| management::server_live(backend, q))
                    .await
            }
            "ServerReady" => {
                self.unary(request, |q| management::server_ready(backend, q))
                    .await
            }
            "ModelReady" => {
                self.unary(request, |q| management::model_ready(backend, q))
                    .await
            }
            "ServerMetadata" => {
                self.unary(request, |q| management::server_metadata(backend, q))
                    .await
            }
            "ModelMetadata" => {
                self.unary(request, |q| management::model_metadata(backend, q))
                    .await
            }
            "ModelConfig" => {
                self.unary(request, |q| management::model_config(backend, q))
                    .await
            }
            "ModelStatistics" => {
                self.unary(request, |q| statistics::model_statistics(backend, q))
                    .await
            }
            "RepositoryIndex" => self.unary(request, |q| repository::index(backend, q)).await,
            "RepositoryModelLoad" => self.repository_model_load(request).await,
            "RepositoryModelUnload" => {
                self.unary(request, |q| repository::unload(backend, q))
                    .await
            }
            "SystemSharedMemoryStatus" => {
                self.unary(request, |q| {
                    shared_memory::status(backend, caller.clone(), q)
                })
                .await
            }
            "SystemSharedMemoryRegister" => {
                self.unary(request, |q| {
                    shared_memory::register(backend, caller.clone(), q)
                })
                .await
            }
            "SystemSharedMemoryUnregister" => {
                self.unary(request, |q| {
                    shared_memory::unregister(backend, caller.clone(), q)
                })
                .await
            }
            "CudaSharedMemoryStatus" => self.unary(request, shared_memory::cuda_status).await,
            "CudaSharedMemoryRegister" => self.unary(request, shared_memory::cuda_register).await,
            "CudaSharedMemoryUnregister" => {
                self.unary(request, shared_memory::cuda_unregister).await
            }
            "TraceSetting" => self.unary(request, |q| settings::trace(backend, q)).await,
            "LogSettings" => self.unary(request, settings::log).await,
            _ => unknown_method(path),
        }
    }

    /// Brings whole files along, so it is bounded like a call on tensors.
    async fn repository_model_load<T>(&self, request: Request<T>) -> Response<Body>
    where
        T: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        T::Error: Into<BoxError> + Send,
    {
        let limit = self.options.max_message_size;
        let codec = BoundedCodec::new(wire::load_request_cost, limit);
        let request = self.steady(request, Waits::OneNow);
        let service = tower::service_fn(|request: tonic::Request<Received<_>>| async {
            let Received { message, bytes } = request.into_inner();
            let held = self.backend.count(bytes);
            let _held = held.map_err(|error| to_status(&error))?;
            repository::load(&self.backend, message).await
        });
        let response = self.grpc(codec, limit, false).unary(service, request).await;
        note_refusal(&response);
        response
    }

    /// A call whose messages are small.
    async fn unary<T, Q, A, F, R>(&self, request: Request<T>, answer: F) -> Response<Body>
    where
        T: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        T::Error: Into<BoxError> + Send,
        Q: Message + Default + 'static,
        A: Message + Default + 'static,
        F: Fn(Q) -> R,
        R: Future<Output = Result<A, Status>>,
    {
        let request = self.steady(request, Waits::OneNow);
        let service = tower::service_fn(|request: tonic::Request<Q>| {
            let answer = answer(request.into_inner());
            async move { answer.await.map(tonic::Response::new) }
        });
        let response = self
            .grpc(ProstCodec::default(), MAX_SMALL_MESSAGE, false)
            .unary(service, request)
            .await;
        note_refusal(&response);
        response
    }

    /// Bounds the time, and the memory, that a request's body takes.
    fn steady<T>(&self, request: Request<T>, waits: Waits) -> Request<Steady<T>> {
        let in_flight = self.backend.in_flight();
        request.map(|body| Steady::new(body, self.options.body_patience, waits).counted(in_flight))
    }

    fn grpc<C: Codec>(&self, codec: C, max_message: usize, tensors: bool) -> Grpc<C> {
        let grpc = Grpc::new(codec)
            .accept_compressed(CompressionEncoding::Gzip)
            .accept_compressed(CompressionEncoding::Deflate)
            .max_decoding_message_size(max_message);
        if tensors && self.options.compress_responses {
            grpc.send_compressed(CompressionEncoding::Gzip)
                .send_compressed(CompressionEncoding::Deflate)
        } else {
            grpc
        }
    }
}

/// Counts an answer that says that a message was too large.
fn note_refusal(response: &Response<Body>) {
    // An answer has a body, what was refused has none.
    if response.body().is_end_stream()
        && let Some(status) = response.headers().get(Status::GRPC_STATUS)
    {
        let said = response.headers().get(Status::GRPC_MESSAGE);
        let code = tonic::Code::from_bytes(status.as_bytes());
        codec::note_refusal(code, said.map_or(b"", HeaderValue::as_bytes));
    }
}

/// Says something after the answer as well: some clients show only one of both places.
fn with_trailer(body: Body, name: &'static str, value: HeaderValue) -> Body {
    Body::new(body.map_frame(move |frame| match frame.into_trailers() {
        Ok(mut trailers) => {
            trailers.insert(name, value.clone());
            Frame::trailers(trailers)
        }
        Err(data) => data,
    }))
}

/// What gRPC asks of every request: a POST with its content type.
fn refuse_other_protocols<T>(request: &Request<T>) -> Option<Response<Body>> {
    let status = if request.method() != Method::POST {
        StatusCode::METHOD_NOT_ALLOWED
    } else if request
        .headers()
        .get(header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
    {
        return None;
    } else {
        StatusCode::UNSUPPORTED_MEDIA_TYPE
    };
    let mut refusal = Response::new(Body::empty());
    *refusal.status_mut() = status;
    Some(refusal)
}

fn unknown_method(path: &str) -> Response<Body> {
    let path: String = path.chars().take(128).collect();
    Status::unimplemented(format!("this server has no method '{path}'")).into_http()
}

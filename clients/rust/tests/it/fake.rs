//! A v2 server whose models do as their names say.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use dormouse_client::pb;
use pb::grpc_inference_service_server::{GrpcInferenceService, GrpcInferenceServiceServer};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::codec::CompressionEncoding;
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_types::{ErrorDetails, StatusExt};

/// A server that stops when this is dropped.
pub(crate) struct FakeServer {
    pub(crate) url: String,
    attempts: Arc<AtomicU32>,
    task: tokio::task::JoinHandle<()>,
}

impl FakeServer {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address: SocketAddr = listener.local_addr().expect("a bound socket");
        let attempts = Arc::new(AtomicU32::new(0));
        let service = GrpcInferenceServiceServer::new(Fake {
            attempts: attempts.clone(),
        })
        .accept_compressed(CompressionEncoding::Gzip)
        .send_compressed(CompressionEncoding::Gzip)
        .max_decoding_message_size(64 << 20);
        let serve = tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(TcpListenerStream::new(listener));
        Self {
            url: format!("http://{address}"),
            attempts,
            task: tokio::spawn(async move { serve.await.expect("the server runs") }),
        }
    }

    pub(crate) fn attempts(&self) -> u32 {
        self.attempts.load(Ordering::SeqCst)
    }
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Fake {
    attempts: Arc<AtomicU32>,
}

/// The inputs as outputs, with the metadata of the call in the parameters.
fn echo(
    request: pb::ModelInferRequest,
    headers: HashMap<String, String>,
) -> pb::ModelInferResponse {
    let text = |text: String| pb::InferParameter {
        parameter_choice: Some(pb::infer_parameter::ParameterChoice::StringParam(text)),
    };
    let mut parameters = request.parameters;
    parameters.extend(headers.into_iter().map(|(key, value)| (key, text(value))));
    pb::ModelInferResponse {
        model_name: request.model_name,
        model_version: "1".to_owned(),
        id: request.id,
        parameters,
        outputs: request
            .inputs
            .into_iter()
            .map(|input| pb::model_infer_response::InferOutputTensor {
                name: input.name,
                datatype: input.datatype,
                shape: input.shape,
                ..Default::default()
            })
            .collect(),
        raw_output_contents: request.raw_input_contents,
    }
}

fn headers<T>(request: &Request<T>) -> HashMap<String, String> {
    ["authorization", "grpc-timeout", "grpc-encoding"]
        .into_iter()
        .filter_map(|key| {
            let value = request.metadata().get(key)?;
            Some((key.to_owned(), value.to_str().ok()?.to_owned()))
        })
        .collect()
}

fn refused(code: Code, wait: Duration) -> Status {
    let details = ErrorDetails::with_retry_info(Some(wait));
    Status::with_error_details(code, "too busy", details)
}

#[tonic::async_trait]
impl GrpcInferenceService for Fake {
    async fn model_infer(
        &self,
        request: Request<pb::ModelInferRequest>,
    ) -> Result<Response<pb::ModelInferResponse>, Status> {
        let attempt = self.attempts.fetch_add(1, Ordering::SeqCst) + 1;
        let headers = headers(&request);
        let request = request.into_inner();
        match request.model_name.as_str() {
            "echo" => Ok(Response::new(echo(request, headers))),
            "cold" => {
                let mut response = Response::new(echo(request, headers));
                let timing = "load;dur=12.3, read;dur=1.0, session;dur=9.5";
                let metadata = response.metadata_mut();
                metadata.insert("server-timing", timing.parse().expect("ascii"));
                Ok(response)
            }
            "typed" => {
                let mut response = echo(request, headers);
                response.raw_output_contents.clear();
                response.outputs = vec![pb::model_infer_response::InferOutputTensor {
                    name: "y".to_owned(),
                    datatype: "FP32".to_owned(),
                    shape: vec![2],
                    contents: Some(pb::InferTensorContents {
                        fp32_contents: vec![0.5, 2.0],
                        ..Default::default()
                    }),
                    ..Default::default()
                }];
                Ok(Response::new(response))
            }
            "busy twice" if attempt <= 2 => {
                Err(refused(Code::ResourceExhausted, Duration::from_millis(5)))
            }
            "unavailable once" if attempt == 1 => Err(Status::unavailable("waking")),
            "busy twice" | "unavailable once" => Ok(Response::new(echo(request, headers))),
            "busy for an hour" => Err(refused(Code::Unavailable, Duration::from_secs(3600))),
            "busy for a while" => Err(refused(Code::Unavailable, Duration::from_secs(9))),
            "hung" => std::future::pending().await,
            "too late" => Err(Status::deadline_exceeded("cannot start in time")),
            name => Err(Status::not_found(format!("model {name:?} is unknown"))),
        }
    }

    type ModelStreamInferStream = ReceiverStream<Result<pb::ModelStreamInferResponse, Status>>;

    async fn model_stream_infer(
        &self,
        request: Request<Streaming<pb::ModelInferRequest>>,
    ) -> Result<Response<Self::ModelStreamInferStream>, Status> {
        let headers = headers(&request);
        let mut requests = request.into_inner();
        // Like Triton's, this server says nothing before the first request has come.
        let Some(first) = requests.next().await else {
            return Err(Status::invalid_argument("no request"));
        };
        let (responses, unsent) = mpsc::channel(4);
        tokio::spawn(async move {
            let mut request = Some(first);
            while let Some(Ok(message)) = request {
                let answer = match message.model_name.as_str() {
                    "broken" => Ok(pb::ModelStreamInferResponse {
                        error_message: "broken by design".to_owned(),
                        infer_response: Some(pb::ModelInferResponse {
                            id: message.id,
                            ..Default::default()
                        }),
                    }),
                    "crash" => Err(Status::internal("crashed")),
                    _ => Ok(pb::ModelStreamInferResponse {
                        error_message: String::new(),
                        infer_response: Some(echo(message, headers.clone())),
                    }),
                };
                if responses.send(answer).await.is_err() {
                    return;
                }
                request = requests.next().await;
            }
        });
        Ok(Response::new(ReceiverStream::new(unsent)))
    }

    async fn server_live(
        &self,
        _: Request<pb::ServerLiveRequest>,
    ) -> Result<Response<pb::ServerLiveResponse>, Status> {
        Ok(Response::new(pb::ServerLiveResponse { live: true }))
    }

    async fn server_ready(
        &self,
        _: Request<pb::ServerReadyRequest>,
    ) -> Result<Response<pb::ServerReadyResponse>, Status> {
        Ok(Response::new(pb::ServerReadyResponse { ready: false }))
    }

    async fn model_ready(
        &self,
        request: Request<pb::ModelReadyRequest>,
    ) -> Result<Response<pb::ModelReadyResponse>, Status> {
        let ready = request.into_inner().version == "2";
        Ok(Response::new(pb::ModelReadyResponse { ready }))
    }

    async fn server_metadata(
        &self,
        _: Request<pb::ServerMetadataRequest>,
    ) -> Result<Response<pb::ServerMetadataResponse>, Status> {
        Ok(Response::new(pb::ServerMetadataResponse {
            name: "fake".to_owned(),
            version: "1.2".to_owned(),
            extensions: vec!["statistics".to_owned()],
        }))
    }

    async fn model_metadata(
        &self,
        request: Request<pb::ModelMetadataRequest>,
    ) -> Result<Response<pb::ModelMetadataResponse>, Status> {
        let name = request.into_inner().name;
        let datatype = if name == "exotic" { "FP8" } else { "INT64" };
        Ok(Response::new(pb::ModelMetadataResponse {
            name,
            versions: vec!["1".to_owned(), "2".to_owned()],
            inputs: vec![pb::model_metadata_response::TensorMetadata {
                name: "x".to_owned(),
                datatype: datatype.to_owned(),
                shape: vec![-1, 3],
            }],
            ..Default::default()
        }))
    }

    async fn model_config(
        &self,
        request: Request<pb::ModelConfigRequest>,
    ) -> Result<Response<pb::ModelConfigResponse>, Status> {
        let name = request.into_inner().name;
        let config = (name != "bare").then(|| pb::ModelConfig {
            name,
            max_batch_size: 8,
            ..Default::default()
        });
        Ok(Response::new(pb::ModelConfigResponse { config }))
    }

    async fn model_statistics(
        &self,
        _: Request<pb::ModelStatisticsRequest>,
    ) -> Result<Response<pb::ModelStatisticsResponse>, Status> {
        let model = pb::ModelStatistics {
            name: "echo".to_owned(),
            inference_count: 3,
            ..Default::default()
        };
        Ok(Response::new(pb::ModelStatisticsResponse {
            model_stats: vec![model],
        }))
    }

    async fn repository_index(
        &self,
        request: Request<pb::RepositoryIndexRequest>,
    ) -> Result<Response<pb::RepositoryIndexResponse>, Status> {
        let entry =
            |name: &str, state: &str, reason: &str| pb::repository_index_response::ModelIndex {
                name: name.to_owned(),
                version: "1".to_owned(),
                state: state.to_owned(),
                reason: reason.to_owned(),
            };
        let mut models = vec![entry("echo", "READY", "")];
        if !request.into_inner().ready {
            models.push(entry("torn", "UNAVAILABLE", "no graph"));
            models.push(entry("new", "", ""));
        }
        Ok(Response::new(pb::RepositoryIndexResponse { models }))
    }

    /// Fails with what it was asked, so that the test can see it.
    async fn repository_model_load(
        &self,
        request: Request<pb::RepositoryModelLoadRequest>,
    ) -> Result<Response<pb::RepositoryModelLoadResponse>, Status> {
        let request = request.into_inner();
        if request.parameters.is_empty() {
            return Ok(Response::new(pb::RepositoryModelLoadResponse {}));
        }
        let mut parameters: Vec<_> = request.parameters.into_iter().collect();
        parameters.sort_by(|left, right| left.0.cmp(&right.0));
        Err(Status::invalid_argument(format!("{parameters:?}")))
    }

    async fn repository_model_unload(
        &self,
        request: Request<pb::RepositoryModelUnloadRequest>,
    ) -> Result<Response<pb::RepositoryModelUnloadResponse>, Status> {
        let request = request.into_inner();
        if request.parameters.is_empty() {
            return Ok(Response::new(pb::RepositoryModelUnloadResponse {}));
        }
        Err(Status::invalid_argument(format!(
            "{:?}",
            request.parameters
        )))
    }

    async fn system_shared_memory_status(
        &self,
        _: Request<pb::SystemSharedMemoryStatusRequest>,
    ) -> Result<Response<pb::SystemSharedMemoryStatusResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn system_shared_memory_register(
        &self,
        _: Request<pb::SystemSharedMemoryRegisterRequest>,
    ) -> Result<Response<pb::SystemSharedMemoryRegisterResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn system_shared_memory_unregister(
        &self,
        _: Request<pb::SystemSharedMemoryUnregisterRequest>,
    ) -> Result<Response<pb::SystemSharedMemoryUnregisterResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn cuda_shared_memory_status(
        &self,
        _: Request<pb::CudaSharedMemoryStatusRequest>,
    ) -> Result<Response<pb::CudaSharedMemoryStatusResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn cuda_shared_memory_register(
        &self,
        _: Request<pb::CudaSharedMemoryRegisterRequest>,
    ) -> Result<Response<pb::CudaSharedMemoryRegisterResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn cuda_shared_memory_unregister(
        &self,
        _: Request<pb::CudaSharedMemoryUnregisterRequest>,
    ) -> Result<Response<pb::CudaSharedMemoryUnregisterResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn trace_setting(
        &self,
        _: Request<pb::TraceSettingRequest>,
    ) -> Result<Response<pb::TraceSettingResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn log_settings(
        &self,
        _: Request<pb::LogSettingsRequest>,
    ) -> Result<Response<pb::LogSettingsResponse>, Status> {
        Err(Status::unimplemented(""))
    }
}

//! A small v2 server for tests of the commands: one model, `add`, that adds two rows.

use std::net::SocketAddr;

use dormouse_client::pb;
use pb::grpc_inference_service_server::{GrpcInferenceService, GrpcInferenceServiceServer};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

/// A server that stops when this is dropped.
#[derive(Debug)]
pub(crate) struct FakeServer {
    pub(crate) address: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl FakeServer {
    /// Starts a server; what it answers to any inference is up to `infer`.
    pub(crate) async fn start(infer: Infer) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("a free port");
        let address = listener.local_addr().expect("a bound socket");
        let serve = tonic::transport::Server::builder()
            .add_service(GrpcInferenceServiceServer::new(Fake { infer }))
            .serve_with_incoming(TcpListenerStream::new(listener));
        Self {
            address,
            task: tokio::spawn(async move { serve.await.expect("the server runs") }),
        }
    }
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// How inferences are answered.
pub(crate) type Infer = fn(pb::ModelInferRequest) -> Result<pb::ModelInferResponse, Status>;

/// Answers with one FP32 output of one row.
pub(crate) fn one_output(model: String, name: &str, values: &[f32]) -> pb::ModelInferResponse {
    let data: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    pb::ModelInferResponse {
        model_name: model,
        model_version: "1".to_owned(),
        outputs: vec![pb::model_infer_response::InferOutputTensor {
            name: name.to_owned(),
            datatype: "FP32".to_owned(),
            shape: vec![1, values.len() as i64],
            ..Default::default()
        }],
        raw_output_contents: vec![data.into()],
        ..Default::default()
    }
}

#[derive(Debug)]
struct Fake {
    infer: Infer,
}

fn known(name: &str) -> Result<(), Status> {
    match name {
        "add" => Ok(()),
        _ => Err(Status::not_found(format!("model '{name}' is not found"))),
    }
}

/// A cold start so many seconds after the first one.
fn cold_start(seconds: u64) -> pb::ColdStart {
    let stage = |name: &str, lane, [start, duration]: [u64; 2], bytes| pb::cold_start::Stage {
        name: name.to_owned(),
        lane,
        start_ns: start * 1_000_000,
        duration_ns: duration * 1_000_000,
        bytes,
        running: false,
    };
    pb::ColdStart {
        kind: "prepared".to_owned(),
        ahead: seconds == 0,
        started_unix_ns: (1_700_000_000 + seconds) * 1_000_000_000,
        total_ns: 20_000_000,
        bytes: 60_000_000,
        overlap_ns: 10_000_000,
        stages: vec![
            stage("look-up", 0, [0, 2], 0),
            stage("populate", 0, [2, 12], 60_000_000),
            stage("session", 1, [2, 18], 0),
            stage("first-run", 0, [20, 20], 0),
        ],
    }
}

macro_rules! unimplemented_calls {
    ($($call:ident($request:ident) -> $response:ident;)*) => {
        #[tonic::async_trait]
        impl GrpcInferenceService for Fake {
            $(async fn $call(
                &self,
                _: Request<pb::$request>,
            ) -> Result<Response<pb::$response>, Status> {
                Err(Status::unimplemented(""))
            })*

            async fn model_infer(
                &self,
                request: Request<pb::ModelInferRequest>,
            ) -> Result<Response<pb::ModelInferResponse>, Status> {
                let mut response = Response::new((self.infer)(request.into_inner())?);
                let timing = "load;dur=20, read;dur=5, session;dur=15";
                let timing = timing.parse().expect("ascii");
                response.metadata_mut().insert("server-timing", timing);
                Ok(response)
            }

            type ModelStreamInferStream =
                ReceiverStream<Result<pb::ModelStreamInferResponse, Status>>;

            async fn model_stream_infer(
                &self,
                _: Request<Streaming<pb::ModelInferRequest>>,
            ) -> Result<Response<Self::ModelStreamInferStream>, Status> {
                Err(Status::unimplemented(""))
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
                Ok(Response::new(pb::ServerReadyResponse { ready: true }))
            }

            async fn model_ready(
                &self,
                request: Request<pb::ModelReadyRequest>,
            ) -> Result<Response<pb::ModelReadyResponse>, Status> {
                known(&request.into_inner().name)?;
                Ok(Response::new(pb::ModelReadyResponse { ready: true }))
            }

            async fn server_metadata(
                &self,
                _: Request<pb::ServerMetadataRequest>,
            ) -> Result<Response<pb::ServerMetadataResponse>, Status> {
                Ok(Response::new(pb::ServerMetadataResponse {
                    name: "fake".to_owned(),
                    version: "1.2".to_owned(),
                    ..Default::default()
                }))
            }

            async fn model_metadata(
                &self,
                request: Request<pb::ModelMetadataRequest>,
            ) -> Result<Response<pb::ModelMetadataResponse>, Status> {
                let name = request.into_inner().name;
                known(&name)?;
                let tensor = |name: &str| pb::model_metadata_response::TensorMetadata {
                    name: name.to_owned(),
                    datatype: "FP32".to_owned(),
                    shape: vec![-1, 2],
                };
                Ok(Response::new(pb::ModelMetadataResponse {
                    name,
                    inputs: vec![tensor("left"), tensor("right")],
                    outputs: vec![tensor("sum")],
                    ..Default::default()
                }))
            }

            async fn model_statistics(
                &self,
                request: Request<pb::ModelStatisticsRequest>,
            ) -> Result<Response<pb::ModelStatisticsResponse>, Status> {
                let version = request.into_inner().version;
                // Version 2 sleeps, version 3 is of a server that tells nothing.
                let cold_starts = match version.as_str() {
                    "" | "1" => vec![cold_start(0), cold_start(30)],
                    _ => Vec::new(),
                };
                let [version, runs] = match version.as_str() {
                    "2" => ["2", "0"],
                    "3" => ["3", "4"],
                    _ => ["1", "4"],
                };
                let duration = |count, ns| Some(pb::StatisticDuration { count, ns });
                let model = pb::ModelStatistics {
                    name: "add".to_owned(),
                    version: version.to_owned(),
                    inference_count: 6,
                    execution_count: runs.parse().expect("a number"),
                    cold_starts,
                    inference_stats: Some(pb::InferStatistics {
                        success: duration(4, 8_000_000),
                        queue: duration(4, 400_000),
                        compute_infer: duration(4, 4_000_000),
                        ..Default::default()
                    }),
                    ..Default::default()
                };
                Ok(Response::new(pb::ModelStatisticsResponse {
                    model_stats: vec![model],
                }))
            }

            async fn repository_index(
                &self,
                _: Request<pb::RepositoryIndexRequest>,
            ) -> Result<Response<pb::RepositoryIndexResponse>, Status> {
                let entry = |name: &str, version: &str, state: &str, reason: &str| {
                    pb::repository_index_response::ModelIndex {
                        name: name.to_owned(),
                        version: version.to_owned(),
                        state: state.to_owned(),
                        reason: reason.to_owned(),
                    }
                };
                Ok(Response::new(pb::RepositoryIndexResponse {
                    models: vec![
                        entry("add", "1", "READY", ""),
                        entry("torn", "", "UNAVAILABLE", "no graph"),
                    ],
                }))
            }

            async fn repository_model_load(
                &self,
                request: Request<pb::RepositoryModelLoadRequest>,
            ) -> Result<Response<pb::RepositoryModelLoadResponse>, Status> {
                known(&request.into_inner().model_name)?;
                Ok(Response::new(pb::RepositoryModelLoadResponse {}))
            }

            async fn repository_model_unload(
                &self,
                request: Request<pb::RepositoryModelUnloadRequest>,
            ) -> Result<Response<pb::RepositoryModelUnloadResponse>, Status> {
                known(&request.into_inner().model_name)?;
                Ok(Response::new(pb::RepositoryModelUnloadResponse {}))
            }
        }
    };
}

unimplemented_calls! {
    model_config(ModelConfigRequest) -> ModelConfigResponse;
    system_shared_memory_status(SystemSharedMemoryStatusRequest) -> SystemSharedMemoryStatusResponse;
    system_shared_memory_register(SystemSharedMemoryRegisterRequest) -> SystemSharedMemoryRegisterResponse;
    system_shared_memory_unregister(SystemSharedMemoryUnregisterRequest) -> SystemSharedMemoryUnregisterResponse;
    cuda_shared_memory_status(CudaSharedMemoryStatusRequest) -> CudaSharedMemoryStatusResponse;
    cuda_shared_memory_register(CudaSharedMemoryRegisterRequest) -> CudaSharedMemoryRegisterResponse;
    cuda_shared_memory_unregister(CudaSharedMemoryUnregisterRequest) -> CudaSharedMemoryUnregisterResponse;
    trace_setting(TraceSettingRequest) -> TraceSettingResponse;
    log_settings(LogSettingsRequest) -> LogSettingsResponse;
}

//! The least that a gRPC server must do for an inference request: decode it and answer with its
//! tensors. What a server does beyond this is its own overhead.

use std::io::Write;

use dormouse_proto::inference as pb;
use pb::grpc_inference_service_server::{GrpcInferenceService, GrpcInferenceServiceServer};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, Streaming};

#[derive(Debug)]
struct Echo;

type Reply<T> = Result<Response<T>, Status>;

fn only_infer<T>() -> Reply<T> {
    Err(Status::unimplemented(
        "the echo service answers ModelInfer only",
    ))
}

#[tonic::async_trait]
impl GrpcInferenceService for Echo {
    async fn model_infer(
        &self,
        request: Request<pb::ModelInferRequest>,
    ) -> Reply<pb::ModelInferResponse> {
        let request = request.into_inner();
        let outputs =
            request
                .inputs
                .into_iter()
                .map(|input| pb::model_infer_response::InferOutputTensor {
                    name: input.name,
                    datatype: input.datatype,
                    shape: input.shape,
                    ..Default::default()
                });
        Ok(Response::new(pb::ModelInferResponse {
            model_name: request.model_name,
            model_version: "1".to_owned(),
            id: request.id,
            outputs: outputs.collect(),
            raw_output_contents: request.raw_input_contents,
            ..Default::default()
        }))
    }

    async fn server_live(
        &self,
        _: Request<pb::ServerLiveRequest>,
    ) -> Reply<pb::ServerLiveResponse> {
        Ok(Response::new(pb::ServerLiveResponse { live: true }))
    }

    async fn server_ready(
        &self,
        _: Request<pb::ServerReadyRequest>,
    ) -> Reply<pb::ServerReadyResponse> {
        Ok(Response::new(pb::ServerReadyResponse { ready: true }))
    }

    async fn model_ready(
        &self,
        _: Request<pb::ModelReadyRequest>,
    ) -> Reply<pb::ModelReadyResponse> {
        Ok(Response::new(pb::ModelReadyResponse { ready: true }))
    }

    async fn server_metadata(
        &self,
        _: Request<pb::ServerMetadataRequest>,
    ) -> Reply<pb::ServerMetadataResponse> {
        only_infer()
    }

    async fn model_metadata(
        &self,
        _: Request<pb::ModelMetadataRequest>,
    ) -> Reply<pb::ModelMetadataResponse> {
        only_infer()
    }

    type ModelStreamInferStream = tokio_stream::Empty<Result<pb::ModelStreamInferResponse, Status>>;

    async fn model_stream_infer(
        &self,
        _: Request<Streaming<pb::ModelInferRequest>>,
    ) -> Reply<Self::ModelStreamInferStream> {
        only_infer()
    }

    async fn model_config(
        &self,
        _: Request<pb::ModelConfigRequest>,
    ) -> Reply<pb::ModelConfigResponse> {
        only_infer()
    }

    async fn model_statistics(
        &self,
        _: Request<pb::ModelStatisticsRequest>,
    ) -> Reply<pb::ModelStatisticsResponse> {
        only_infer()
    }

    async fn repository_index(
        &self,
        _: Request<pb::RepositoryIndexRequest>,
    ) -> Reply<pb::RepositoryIndexResponse> {
        only_infer()
    }

    async fn repository_model_load(
        &self,
        _: Request<pb::RepositoryModelLoadRequest>,
    ) -> Reply<pb::RepositoryModelLoadResponse> {
        only_infer()
    }

    async fn repository_model_unload(
        &self,
        _: Request<pb::RepositoryModelUnloadRequest>,
    ) -> Reply<pb::RepositoryModelUnloadResponse> {
        only_infer()
    }

    async fn system_shared_memory_status(
        &self,
        _: Request<pb::SystemSharedMemoryStatusRequest>,
    ) -> Reply<pb::SystemSharedMemoryStatusResponse> {
        only_infer()
    }

    async fn system_shared_memory_register(
        &self,
        _: Request<pb::SystemSharedMemoryRegisterRequest>,
    ) -> Reply<pb::SystemSharedMemoryRegisterResponse> {
        only_infer()
    }

    async fn system_shared_memory_unregister(
        &self,
        _: Request<pb::SystemSharedMemoryUnregisterRequest>,
    ) -> Reply<pb::SystemSharedMemoryUnregisterResponse> {
        only_infer()
    }

    async fn cuda_shared_memory_status(
        &self,
        _: Request<pb::CudaSharedMemoryStatusRequest>,
    ) -> Reply<pb::CudaSharedMemoryStatusResponse> {
        only_infer()
    }

    async fn cuda_shared_memory_register(
        &self,
        _: Request<pb::CudaSharedMemoryRegisterRequest>,
    ) -> Reply<pb::CudaSharedMemoryRegisterResponse> {
        only_infer()
    }

    async fn cuda_shared_memory_unregister(
        &self,
        _: Request<pb::CudaSharedMemoryUnregisterRequest>,
    ) -> Reply<pb::CudaSharedMemoryUnregisterResponse> {
        only_infer()
    }

    async fn trace_setting(
        &self,
        _: Request<pb::TraceSettingRequest>,
    ) -> Reply<pb::TraceSettingResponse> {
        only_infer()
    }

    async fn log_settings(
        &self,
        _: Request<pb::LogSettingsRequest>,
    ) -> Reply<pb::LogSettingsResponse> {
        only_infer()
    }
}

/// Serves on a free port until it is killed; tells the address in the form of Dormouse's log.
pub(crate) async fn serve() -> anyhow::Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let address = listener.local_addr()?;
    writeln!(
        std::io::stderr(),
        "{}",
        serde_json::json!({"message": "listening", "protocol": "grpc", "address": address.to_string()})
    )?;
    tonic::transport::Server::builder()
        .tcp_nodelay(true)
        .add_service(GrpcInferenceServiceServer::new(Echo))
        .serve_with_incoming(TcpListenerStream::new(listener))
        .await?;
    Ok(())
}

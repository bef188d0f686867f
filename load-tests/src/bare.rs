//! The least that a gRPC server must do for an inference request: decode it, have it answered and
//! encode the answer. What a server does beyond this is its own overhead.

use std::io::Write;
use std::net::SocketAddr;

use dormouse_proto::inference as pb;
use pb::grpc_inference_service_server::{GrpcInferenceService, GrpcInferenceServiceServer};
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use crate::live;

/// What answers the requests.
type Answer = dyn Fn(pb::ModelInferRequest) -> anyhow::Result<pb::ModelInferResponse> + Send + Sync;

struct Bare(Box<Answer>);

type Reply<T> = Result<Response<T>, Status>;

fn only_infer<T>() -> Reply<T> {
    Err(Status::unimplemented(
        "the bare service answers ModelInfer only",
    ))
}

#[tonic::async_trait]
impl GrpcInferenceService for Bare {
    async fn model_infer(
        &self,
        request: Request<pb::ModelInferRequest>,
    ) -> Reply<pb::ModelInferResponse> {
        let answer = (self.0)(request.into_inner());
        answer
            .map(Response::new)
            .map_err(|error| Status::internal(format!("{error:#}")))
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

/// A server of this process that answers on the thread that read the request, and ends when this is
/// dropped.
#[derive(Debug)]
pub(crate) struct BareServer {
    address: SocketAddr,
    serving: tokio::task::JoinHandle<()>,
}

impl BareServer {
    pub(crate) async fn start(
        answer: impl Fn(pb::ModelInferRequest) -> anyhow::Result<pb::ModelInferResponse>
        + Send
        + Sync
        + 'static,
    ) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let serving = tokio::spawn(async move {
            if let Err(error) = serve(listener, Box::new(answer)).await {
                eprintln!("the bare server ended: {error:#}");
            }
        });
        Ok(Self { address, serving })
    }

    pub(crate) async fn client(&self) -> anyhow::Result<dormouse_client::Client> {
        live::connect(self.address).await
    }
}

impl Drop for BareServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Answers with what was sent, on a free port, until it is killed; tells the address in the form of
/// Dormouse's log.
pub(crate) async fn serve_echo() -> anyhow::Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let address = listener.local_addr()?;
    writeln!(
        std::io::stderr(),
        "{}",
        serde_json::json!({"message": "listening", "protocol": "grpc", "address": address.to_string()})
    )?;
    serve(listener, Box::new(|request| Ok(echo(request)))).await
}

fn echo(request: pb::ModelInferRequest) -> pb::ModelInferResponse {
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
    pb::ModelInferResponse {
        model_name: request.model_name,
        model_version: "1".to_owned(),
        id: request.id,
        outputs: outputs.collect(),
        raw_output_contents: request.raw_input_contents,
        ..Default::default()
    }
}

async fn serve(listener: TcpListener, answer: Box<Answer>) -> anyhow::Result<()> {
    tonic::transport::Server::builder()
        .add_service(
            GrpcInferenceServiceServer::new(Bare(answer)).max_decoding_message_size(usize::MAX),
        )
        .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)))
        .await?;
    Ok(())
}

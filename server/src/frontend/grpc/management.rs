//! Questions about the server and its models.

use dormouse_core::code::ErrorCode;
use dormouse_model_store::spec::TensorSpec;
use dormouse_proto::inference as pb;
use pb::model_metadata_response::TensorMetadata;
use tonic::Status;

use super::backend::Backend;
use crate::frontend::status::to_status;

pub(super) async fn server_live<B: Backend>(
    backend: &B,
    _: pb::ServerLiveRequest,
) -> Result<pb::ServerLiveResponse, Status> {
    Ok(pb::ServerLiveResponse {
        live: backend.is_live(),
    })
}

pub(super) async fn server_ready<B: Backend>(
    backend: &B,
    _: pb::ServerReadyRequest,
) -> Result<pb::ServerReadyResponse, Status> {
    Ok(pb::ServerReadyResponse {
        ready: backend.is_ready(),
    })
}

/// As in Triton, a model that is not there is not ready, which is no error.
pub(super) async fn model_ready<B: Backend>(
    backend: &B,
    request: pb::ModelReadyRequest,
) -> Result<pb::ModelReadyResponse, Status> {
    match backend
        .is_model_ready(&request.name, &request.version)
        .await
    {
        Ok(ready) => Ok(pb::ModelReadyResponse { ready }),
        Err(error) if error.code() == ErrorCode::NotFound => {
            Ok(pb::ModelReadyResponse { ready: false })
        }
        Err(error) => Err(to_status(&error)),
    }
}

pub(super) async fn server_metadata<B: Backend>(
    backend: &B,
    _: pb::ServerMetadataRequest,
) -> Result<pb::ServerMetadataResponse, Status> {
    let info = backend.info();
    Ok(pb::ServerMetadataResponse {
        name: info.name,
        version: info.version.to_owned(),
        extensions: info.extensions.into_iter().map(str::to_owned).collect(),
    })
}

pub(super) async fn model_metadata<B: Backend>(
    backend: &B,
    request: pb::ModelMetadataRequest,
) -> Result<pb::ModelMetadataResponse, Status> {
    let model = backend
        .describe(&request.name, &request.version)
        .await
        .map_err(|error| to_status(&error))?;
    let spec = &model.spec;
    let tensors = |specs: &[TensorSpec]| {
        specs
            .iter()
            .map(|tensor| TensorMetadata {
                name: tensor.name.to_string(),
                datatype: tensor.datatype.to_string(),
                shape: tensor.metadata_shape(spec.max_batch_size),
            })
            .collect()
    };
    Ok(pb::ModelMetadataResponse {
        name: spec.name.to_string(),
        versions: model.versions.iter().map(u64::to_string).collect(),
        platform: spec.platform.to_string(),
        inputs: tensors(&spec.inputs),
        outputs: tensors(&spec.outputs),
        ..Default::default()
    })
}

pub(super) async fn model_config<B: Backend>(
    backend: &B,
    request: pb::ModelConfigRequest,
) -> Result<pb::ModelConfigResponse, Status> {
    let model = backend
        .describe(&request.name, &request.version)
        .await
        .map_err(|error| to_status(&error))?;
    Ok(pb::ModelConfigResponse {
        config: Some(model.spec.config.clone()),
    })
}

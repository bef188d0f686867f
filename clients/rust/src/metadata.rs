//! What a server and its models say about themselves.

use crate::client::Client;
use crate::datatype::DataType;
use crate::error::ClientError;
use crate::pb;
use crate::timing::VersionColdStarts;

/// What a server says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerMetadata {
    /// The server's name.
    pub name: String,
    /// The server's version.
    pub version: String,
    /// The extensions of the protocol that it speaks.
    pub extensions: Vec<String>,
}

/// A model's signature.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelMetadata {
    /// The model's name.
    pub name: String,
    /// The versions that can be asked for.
    pub versions: Vec<String>,
    /// The framework of the model, such as `onnxruntime_onnx`.
    pub platform: String,
    /// What it takes.
    pub inputs: Vec<TensorMetadata>,
    /// What it answers.
    pub outputs: Vec<TensorMetadata>,
}

/// One input or output of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorMetadata {
    /// The tensor's name.
    pub name: String,
    /// The type of its elements.
    pub datatype: DataType,
    /// Its dimensions, `-1` where any size goes.
    pub shape: Vec<i64>,
}

impl TensorMetadata {
    /// Describes a tensor.
    pub fn new(name: impl Into<String>, datatype: DataType, shape: impl Into<Vec<i64>>) -> Self {
        Self {
            name: name.into(),
            datatype,
            shape: shape.into(),
        }
    }

    fn from_message(
        message: pb::model_metadata_response::TensorMetadata,
    ) -> Result<Self, ClientError> {
        match message.datatype.parse() {
            Ok(datatype) => Ok(Self {
                name: message.name,
                datatype,
                shape: message.shape,
            }),
            Err(source) => Err(ClientError::Tensor {
                name: message.name,
                source,
            }),
        }
    }
}

impl Client {
    /// Whether the server's process answers.
    ///
    /// ```no_run
    /// # async fn example(client: dormouse_client::Client) -> Result<(), dormouse_client::ClientError> {
    /// let up = client.live().await? && client.ready().await?;
    /// # drop(up);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn live(&self) -> Result<bool, ClientError> {
        let answer = self.simple_call(pb::ServerLiveRequest {}, |mut stub, request| async move {
            stub.server_live(request).await
        });
        Ok(answer.await?.live)
    }

    /// Whether the server takes requests.
    pub async fn ready(&self) -> Result<bool, ClientError> {
        let answer = self.simple_call(pb::ServerReadyRequest {}, |mut stub, request| async move {
            stub.server_ready(request).await
        });
        Ok(answer.await?.ready)
    }

    /// Whether a model can answer; version "" is the newest.
    ///
    /// ```no_run
    /// # async fn example(client: dormouse_client::Client) -> Result<(), dormouse_client::ClientError> {
    /// if !client.model_ready("bert", "").await? {
    ///     client.load("bert").await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn model_ready(&self, model: &str, version: &str) -> Result<bool, ClientError> {
        let message = pb::ModelReadyRequest {
            name: model.to_owned(),
            version: version.to_owned(),
        };
        let answer = self.simple_call(message, |mut stub, request| async move {
            stub.model_ready(request).await
        });
        Ok(answer.await?.ready)
    }

    /// What the server says about itself.
    pub async fn server_metadata(&self) -> Result<ServerMetadata, ClientError> {
        let message = pb::ServerMetadataRequest {};
        let answer = self.simple_call(message, |mut stub, request| async move {
            stub.server_metadata(request).await
        });
        let answer = answer.await?;
        Ok(ServerMetadata {
            name: answer.name,
            version: answer.version,
            extensions: answer.extensions,
        })
    }

    /// A model's signature; version "" is the newest.
    ///
    /// ```no_run
    /// # async fn example(client: dormouse_client::Client) -> Result<(), dormouse_client::ClientError> {
    /// for input in client.model_metadata("bert", "").await?.inputs {
    ///     println!("{} {} {:?}", input.name, input.datatype, input.shape);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn model_metadata(
        &self,
        model: &str,
        version: &str,
    ) -> Result<ModelMetadata, ClientError> {
        let message = pb::ModelMetadataRequest {
            name: model.to_owned(),
            version: version.to_owned(),
        };
        let answer = self.simple_call(message, |mut stub, request| async move {
            stub.model_metadata(request).await
        });
        let answer = answer.await?;
        let tensors = |tensors: Vec<_>| {
            let tensors = tensors.into_iter();
            tensors
                .map(TensorMetadata::from_message)
                .collect::<Result<_, _>>()
        };
        Ok(ModelMetadata {
            name: answer.name,
            versions: answer.versions,
            platform: answer.platform,
            inputs: tensors(answer.inputs)?,
            outputs: tensors(answer.outputs)?,
        })
    }

    /// A model's configuration as the server completed it; version "" is the newest.
    ///
    /// ```no_run
    /// # async fn example(client: dormouse_client::Client) -> Result<(), dormouse_client::ClientError> {
    /// println!("{}", client.model_config("bert", "").await?.max_batch_size);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn model_config(
        &self,
        model: &str,
        version: &str,
    ) -> Result<pb::ModelConfig, ClientError> {
        let message = pb::ModelConfigRequest {
            name: model.to_owned(),
            version: version.to_owned(),
        };
        let answer = self.simple_call(message, |mut stub, request| async move {
            stub.model_config(request).await
        });
        answer.await?.config.ok_or_else(|| {
            ClientError::Protocol(format!("no configuration of model {model:?} in the answer"))
        })
    }

    /// The counters of a model version; of all its versions when `version` is "", of all models
    /// when `model` is "" too.
    ///
    /// ```no_run
    /// # async fn example(client: dormouse_client::Client) -> Result<(), dormouse_client::ClientError> {
    /// for version in client.statistics("", "").await? {
    ///     println!("{} {}: {}", version.name, version.version, version.inference_count);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn statistics(
        &self,
        model: &str,
        version: &str,
    ) -> Result<Vec<pb::ModelStatistics>, ClientError> {
        let message = pb::ModelStatisticsRequest {
            name: model.to_owned(),
            version: version.to_owned(),
        };
        let answer = self.simple_call(message, |mut stub, request| async move {
            stub.model_statistics(request).await
        });
        Ok(answer.await?.model_stats)
    }

    /// What waking a model took lately, per version; only Dormouse tells.
    ///
    /// ```no_run
    /// # async fn example(client: dormouse_client::Client) -> Result<(), dormouse_client::ClientError> {
    /// for version in client.cold_starts("bert", "").await? {
    ///     for cold in version.cold_starts {
    ///         println!("{} woke in {:?}", version.version, cold.total);
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn cold_starts(
        &self,
        model: &str,
        version: &str,
    ) -> Result<Vec<VersionColdStarts>, ClientError> {
        let statistics = self.statistics(model, version).await?;
        Ok(statistics.into_iter().map(Into::into).collect())
    }
}

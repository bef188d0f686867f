//! The server's model repository: what is in it, and which of it is loaded.

use std::collections::HashMap;
use std::fmt;

use bytes::Bytes;

use crate::client::Client;
use crate::error::ClientError;
use crate::pb;
use crate::pb::model_repository_parameter::ParameterChoice;

/// A line of the repository's index.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IndexEntry {
    /// The model's name.
    pub name: String,
    /// The version, empty when the server tells none.
    pub version: String,
    /// Whether it can answer.
    pub state: ModelState,
    /// Why it cannot, or what it is doing.
    pub reason: String,
}

/// Whether a model in the repository can answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModelState {
    /// It can, at once or after waking.
    Ready,
    /// It cannot.
    Unavailable,
    /// It is being loaded.
    Loading,
    /// It is being unloaded.
    Unloading,
    /// It was never asked for, in the words of the server (often none).
    Other(String),
}

impl ModelState {
    fn from_name(name: String) -> Self {
        match name.as_str() {
            "READY" => Self::Ready,
            "UNAVAILABLE" => Self::Unavailable,
            "LOADING" => Self::Loading,
            "UNLOADING" => Self::Unloading,
            _ => Self::Other(name),
        }
    }
}

impl fmt::Display for ModelState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ready => "READY",
            Self::Unavailable => "UNAVAILABLE",
            Self::Loading => "LOADING",
            Self::Unloading => "UNLOADING",
            Self::Other(name) => name,
        })
    }
}

/// What to load, and what to put in place of what the repository has.
///
/// ```no_run
/// use dormouse_client::{Client, LoadRequest};
///
/// # async fn example(client: Client) -> Result<(), dormouse_client::ClientError> {
/// client.load("bert").await?;
/// let batched = LoadRequest::new("bert").config(r#"{"max_batch_size": 32}"#);
/// client.load(batched).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct LoadRequest {
    model: String,
    parameters: HashMap<String, pb::ModelRepositoryParameter>,
}

impl LoadRequest {
    /// The model as the repository has it.
    pub fn new(model: impl Into<String>) -> Self {
        Self {
            model: model.into(),
            parameters: HashMap::new(),
        }
    }

    /// Uses this configuration (JSON) instead of the repository's.
    pub fn config(self, json: impl Into<String>) -> Self {
        self.parameter(
            "config".to_owned(),
            ParameterChoice::StringParam(json.into()),
        )
    }

    /// Uses this file, by its path in the model's directory (`1/model.onnx`), instead of the
    /// repository's; the server then wants a configuration too.
    pub fn file(self, path: impl fmt::Display, content: impl Into<Bytes>) -> Self {
        self.parameter(
            format!("file:{path}"),
            ParameterChoice::BytesParam(content.into()),
        )
    }

    fn parameter(mut self, key: String, value: ParameterChoice) -> Self {
        let value = pb::ModelRepositoryParameter {
            parameter_choice: Some(value),
        };
        self.parameters.insert(key, value);
        self
    }
}

impl<T: Into<String>> From<T> for LoadRequest {
    fn from(model: T) -> Self {
        Self::new(model)
    }
}

impl Client {
    /// The models of the repository, or those of them that are ready.
    ///
    /// ```no_run
    /// # async fn example(client: dormouse_client::Client) -> Result<(), dormouse_client::ClientError> {
    /// for entry in client.repository_index(false).await? {
    ///     println!("{} {} {}", entry.name, entry.version, entry.state);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn repository_index(&self, ready_only: bool) -> Result<Vec<IndexEntry>, ClientError> {
        let message = pb::RepositoryIndexRequest {
            ready: ready_only,
            ..Default::default()
        };
        let answer = self.simple_call(message, |mut stub, request| async move {
            stub.repository_index(request).await
        });
        let models = answer.await?.models.into_iter();
        let entry = |model: pb::repository_index_response::ModelIndex| IndexEntry {
            name: model.name,
            version: model.version,
            state: ModelState::from_name(model.state),
            reason: model.reason,
        };
        Ok(models.map(entry).collect())
    }

    /// Loads a model, or loads it again; returns when it can answer.
    pub async fn load(&self, request: impl Into<LoadRequest>) -> Result<(), ClientError> {
        let request = request.into();
        let message = pb::RepositoryModelLoadRequest {
            model_name: request.model,
            parameters: request.parameters,
            ..Default::default()
        };
        let answer = self.simple_call(message, |mut stub, request| async move {
            stub.repository_model_load(request).await
        });
        answer.await.map(drop)
    }

    /// Unloads a model.
    ///
    /// ```no_run
    /// # async fn example(client: dormouse_client::Client) -> Result<(), dormouse_client::ClientError> {
    /// client.unload("bert").await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn unload(&self, model: &str) -> Result<(), ClientError> {
        self.unload_with(model, HashMap::new()).await
    }

    /// Unloads a model and those that it was composed of.
    pub async fn unload_dependents(&self, model: &str) -> Result<(), ClientError> {
        let value = pb::ModelRepositoryParameter {
            parameter_choice: Some(ParameterChoice::BoolParam(true)),
        };
        let parameters = HashMap::from([("unload_dependents".to_owned(), value)]);
        self.unload_with(model, parameters).await
    }

    async fn unload_with(
        &self,
        model: &str,
        parameters: HashMap<String, pb::ModelRepositoryParameter>,
    ) -> Result<(), ClientError> {
        let message = pb::RepositoryModelUnloadRequest {
            model_name: model.to_owned(),
            parameters,
            ..Default::default()
        };
        let answer = self.simple_call(message, |mut stub, request| async move {
            stub.repository_model_unload(request).await
        });
        answer.await.map(drop)
    }
}

//! The repository: what is in it, and loading and unloading by hand.

use std::collections::HashMap;

use dormouse_proto::inference as pb;
use pb::model_repository_parameter::ParameterChoice;
use pb::repository_index_response::ModelIndex;
use tonic::{Response, Status};

use super::backend::Backend;
use crate::error::ServeError;
use crate::frontend::status::to_status;
use crate::service::LoadOverrides;

pub(super) async fn index<B: Backend>(
    backend: &B,
    request: pb::RepositoryIndexRequest,
) -> Result<pb::RepositoryIndexResponse, Status> {
    check_repository(&request.repository_name).map_err(|error| to_status(&error))?;
    let models = backend
        .index(request.ready)
        .into_iter()
        .map(|entry| ModelIndex {
            name: entry.name.to_string(),
            version: entry.version,
            state: entry.state.name().to_owned(),
            reason: entry.reason,
        })
        .collect();
    Ok(pb::RepositoryIndexResponse { models })
}

pub(super) async fn load<B: Backend>(
    backend: &B,
    request: pb::RepositoryModelLoadRequest,
) -> Result<Response<pb::RepositoryModelLoadResponse>, Status> {
    let loaded = async {
        check_repository(&request.repository_name)?;
        let overrides = overrides(request.parameters)?;
        backend.load(&request.model_name, overrides).await
    };
    match loaded.await {
        Ok(()) => Ok(Response::new(pb::RepositoryModelLoadResponse {})),
        Err(error) => Err(to_status(&error)),
    }
}

pub(super) async fn unload<B: Backend>(
    backend: &B,
    request: pb::RepositoryModelUnloadRequest,
) -> Result<pb::RepositoryModelUnloadResponse, Status> {
    let unloaded = async {
        check_repository(&request.repository_name)?;
        check_unload(&request.parameters)?;
        backend.unload(&request.model_name).await
    };
    match unloaded.await {
        Ok(()) => Ok(pb::RepositoryModelUnloadResponse {}),
        Err(error) => Err(to_status(&error)),
    }
}

fn check_repository(name: &str) -> Result<(), ServeError> {
    if name.is_empty() {
        return Ok(());
    }
    Err(ServeError::unsupported(format!(
        "repository_name '{}' is not supported: leave it empty, models are found by name alone",
        cut(name)
    )))
}

fn overrides(
    parameters: HashMap<String, pb::ModelRepositoryParameter>,
) -> Result<LoadOverrides, ServeError> {
    let mut overrides = LoadOverrides::default();
    for (name, value) in parameters {
        let value = value.parameter_choice;
        if name == "config" {
            let Some(ParameterChoice::StringParam(config)) = value else {
                return Err(unexpected(&name, "a string", value.as_ref()));
            };
            overrides.config = Some(config);
        } else if let Some(path) = name.strip_prefix("file:") {
            let Some(ParameterChoice::BytesParam(file)) = value else {
                return Err(unexpected(&name, "bytes", value.as_ref()));
            };
            overrides.files.insert(path.to_owned(), file);
        } else {
            return Err(ServeError::invalid(format!(
                "unknown load parameter '{}': expected 'config' or 'file:<path>'",
                cut(&name)
            )));
        }
    }
    Ok(overrides)
}

/// No model depends on another here, so unloading dependents as well asks for nothing more.
fn check_unload(
    parameters: &HashMap<String, pb::ModelRepositoryParameter>,
) -> Result<(), ServeError> {
    for (name, value) in parameters {
        let value = value.parameter_choice.as_ref();
        if name != "unload_dependents" {
            return Err(ServeError::invalid(format!(
                "unknown unload parameter '{}': expected 'unload_dependents'",
                cut(name)
            )));
        }
        let Some(ParameterChoice::BoolParam(_)) = value else {
            return Err(unexpected(name, "a bool", value));
        };
    }
    Ok(())
}

fn unexpected(name: &str, expected: &str, value: Option<&ParameterChoice>) -> ServeError {
    let got = match value {
        None => "nothing",
        Some(ParameterChoice::BoolParam(_)) => "bool_param",
        Some(ParameterChoice::Int64Param(_)) => "int64_param",
        Some(ParameterChoice::StringParam(_)) => "string_param",
        Some(ParameterChoice::BytesParam(_)) => "bytes_param",
    };
    ServeError::invalid(format!(
        "unexpected value for parameter '{}': expected {expected}, got {got}",
        cut(name)
    ))
}

fn cut(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn parameter(choice: ParameterChoice) -> pb::ModelRepositoryParameter {
        pb::ModelRepositoryParameter {
            parameter_choice: Some(choice),
        }
    }

    #[test]
    fn a_load_may_bring_a_configuration_and_files() {
        let read = overrides(HashMap::from([
            (
                "config".to_owned(),
                parameter(ParameterChoice::StringParam("{}".into())),
            ),
            (
                "file:1/model.onnx".to_owned(),
                parameter(ParameterChoice::BytesParam(Bytes::from_static(b"onnx"))),
            ),
        ]))
        .unwrap();
        assert_eq!(read.config.as_deref(), Some("{}"));
        assert_eq!(read.files["1/model.onnx"], "onnx");
    }

    #[test]
    fn wrong_load_parameters_are_named() {
        let table = [
            (
                "config",
                ParameterChoice::BoolParam(true),
                "'config': expected a string, got bool_param",
            ),
            (
                "file:a",
                ParameterChoice::StringParam("x".into()),
                "'file:a': expected bytes, got string_param",
            ),
            (
                "files",
                ParameterChoice::BoolParam(true),
                "unknown load parameter 'files'",
            ),
        ];
        for (name, choice, expected) in table {
            let parameters = HashMap::from([(name.to_owned(), parameter(choice))]);
            let error = overrides(parameters).unwrap_err();
            assert!(error.message().contains(expected), "{error}");
        }
        let error = overrides(HashMap::from([(
            "x".repeat(256),
            parameter(ParameterChoice::BoolParam(true)),
        )]))
        .unwrap_err();
        assert!(error.message().len() < 200, "{error}");
    }

    #[test]
    fn dependents_may_be_unloaded_too() {
        let with = |name: &str, choice| HashMap::from([(name.to_owned(), parameter(choice))]);
        assert!(check_unload(&HashMap::new()).is_ok());
        assert!(check_unload(&with("unload_dependents", ParameterChoice::BoolParam(true))).is_ok());
        assert!(check_unload(&with("unload_dependents", ParameterChoice::Int64Param(1))).is_err());
        assert!(check_unload(&with("other", ParameterChoice::BoolParam(true))).is_err());
    }
}

//! `ModelInfer`, and what it shares with the stream: reading a request.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use dormouse_core::code::ErrorCode;
use dormouse_core::datatype::DataType;
use dormouse_core::shape::{Shape, element_count};
use dormouse_proto::inference as pb;
use pb::infer_parameter::ParameterChoice;
use pb::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use tonic::metadata::MetadataValue;
use tonic::{Response, Status};
use tracing::error;

use super::answer::Answer;
use super::backend::Backend;
use super::contents::{self, Place};
use super::deadline::CallTime;
use crate::error::ServeError;
use crate::frontend::status::to_status;
use crate::request::{RawInput, RawRequest};

/// A dimension list longer than this is no tensor of any model.
const MAX_RANK: usize = 64;

/// Where a request that woke its model is told what that took.
pub(super) const SERVER_TIMING: &str = "server-timing";

/// Answers one request.
pub(super) async fn model_infer<B: Backend>(
    backend: &B,
    time: CallTime,
    mut request: pb::ModelInferRequest,
) -> Result<Response<Answer>, Status> {
    let name = std::mem::take(&mut request.model_name);
    let version = std::mem::take(&mut request.model_version);
    let raw = read_request(&name, time, request).map_err(|error| to_status(&error))?;
    let response = backend.infer(&name, &version, raw).await.map_err(|error| {
        log_internal(&name, &error);
        to_status(&error)
    })?;
    let timing = response
        .cold_start
        .as_ref()
        .map(|load| load.server_timing());
    let mut response = Response::new(Answer(response));
    if let Some(Ok(timing)) = timing.map(MetadataValue::try_from) {
        response.metadata_mut().insert(SERVER_TIMING, timing);
    }
    Ok(response)
}

/// A fault of ours is logged here, once; the client gets its top line.
pub(super) fn log_internal(model: &str, error: &ServeError) {
    if error.code() == ErrorCode::Internal {
        error!(model, error = error.message(), "request failed");
    }
}

/// Takes a request off the wire; tensors stay views of the received message.
pub(super) fn read_request(
    model: &str,
    time: CallTime,
    request: pb::ModelInferRequest,
) -> Result<RawRequest, ServeError> {
    let parameters = Parameters::read(&request.parameters)?;
    let inputs = match request.raw_input_contents.is_empty() {
        false => raw_inputs(model, request.inputs, request.raw_input_contents)?,
        true => typed_inputs(model, request.inputs)?,
    };
    let outputs = request
        .outputs
        .into_iter()
        .map(|output| output_name(model, output))
        .collect::<Result<_, _>>()?;
    Ok(RawRequest {
        id: request.id,
        inputs,
        outputs,
        priority: parameters.priority,
        deadline: time.within(parameters.timeout),
        received: time.received,
    })
}

fn raw_inputs(
    model: &str,
    inputs: Vec<InferInputTensor>,
    raw: Vec<Bytes>,
) -> Result<Vec<RawInput>, ServeError> {
    for input in &inputs {
        check_no_shared_memory(model, "input", &input.name, &input.parameters)?;
    }
    if raw.len() != inputs.len() {
        return Err(ServeError::invalid(format!(
            "unexpected number of raw_input_contents for model '{model}': expected {}, one for \
             each of inputs, got {}",
            inputs.len(),
            raw.len()
        )));
    }
    inputs
        .into_iter()
        .zip(raw)
        .map(|(input, data)| {
            if input
                .contents
                .as_ref()
                .is_some_and(|typed| !contents::is_empty(typed))
            {
                return Err(ServeError::invalid(format!(
                    "input '{}' of model '{model}' has contents although raw_input_contents is \
                     used: expected all inputs in one or all in the other",
                    input.name
                )));
            }
            Ok(RawInput {
                datatype: datatype(model, &input)?,
                shape: shape(model, &input)?,
                name: input.name,
                data,
            })
        })
        .collect()
}

fn typed_inputs(model: &str, inputs: Vec<InferInputTensor>) -> Result<Vec<RawInput>, ServeError> {
    inputs
        .into_iter()
        .map(|input| {
            check_no_shared_memory(model, "input", &input.name, &input.parameters)?;
            let datatype = datatype(model, &input)?;
            let shape = shape(model, &input)?;
            let place = Place {
                model,
                input: &input.name,
            };
            let data = match &input.contents {
                Some(typed) => contents::to_raw(typed, datatype, &shape, place)?,
                None if element_count(&shape) == Some(0) => Bytes::new(),
                None => {
                    return Err(ServeError::invalid(format!(
                        "input '{}' of model '{model}' has no data: expected it in \
                         raw_input_contents or in contents",
                        input.name
                    )));
                }
            };
            Ok(RawInput {
                name: input.name,
                datatype,
                shape,
                data,
            })
        })
        .collect()
}

fn datatype(model: &str, input: &InferInputTensor) -> Result<DataType, ServeError> {
    DataType::from_name(&input.datatype).ok_or_else(|| {
        let shown: String = input.datatype.chars().take(16).collect();
        let known = DataType::ALL.map(DataType::name).join(", ");
        ServeError::invalid(format!(
            "unknown datatype '{shown}' of input '{}' of model '{model}': expected one of {known}",
            input.name
        ))
    })
}

fn shape(model: &str, input: &InferInputTensor) -> Result<Shape, ServeError> {
    if input.shape.len() > MAX_RANK {
        return Err(ServeError::invalid(format!(
            "unexpected shape for input '{}' of model '{model}': expected at most {MAX_RANK} \
             dimensions, got {}",
            input.name,
            input.shape.len()
        )));
    }
    Ok(Shape::from_slice(&input.shape))
}

fn output_name(model: &str, output: InferRequestedOutputTensor) -> Result<String, ServeError> {
    check_no_shared_memory(model, "output", &output.name, &output.parameters)?;
    match output.parameters.get("classification") {
        // What clients send that do not want any.
        None
        | Some(pb::InferParameter {
            parameter_choice: Some(ParameterChoice::Int64Param(0) | ParameterChoice::Uint64Param(0)),
        }) => Ok(output.name),
        Some(_) => Err(ServeError::unsupported(format!(
            "parameter 'classification' of output '{}' of model '{model}' is not supported: ask \
             for the tensor and sort its values",
            output.name
        ))),
    }
}

fn check_no_shared_memory(
    model: &str,
    side: &str,
    tensor: &str,
    parameters: &HashMap<String, pb::InferParameter>,
) -> Result<(), ServeError> {
    if parameters.is_empty() {
        return Ok(());
    }
    for name in [
        "shared_memory_region",
        "shared_memory_byte_size",
        "shared_memory_offset",
    ] {
        if parameters.contains_key(name) {
            return Err(ServeError::unsupported(format!(
                "parameter '{name}' of {side} '{tensor}' of model '{model}' is not supported: \
                 this server takes and gives tensors in messages only"
            )));
        }
    }
    Ok(())
}

/// The request parameters that mean something to this server.
#[derive(Debug, Default, PartialEq)]
struct Parameters {
    priority: u64,
    timeout: Option<Duration>,
}

impl Parameters {
    fn read(parameters: &HashMap<String, pb::InferParameter>) -> Result<Self, ServeError> {
        let mut read = Self::default();
        for (name, value) in parameters {
            let value = value.parameter_choice.as_ref();
            match name.as_str() {
                "priority" => read.priority = number(name, value)?,
                // 0 is Triton's "no timeout".
                "timeout" => {
                    let micros = number(name, value)?;
                    read.timeout = (micros > 0).then(|| Duration::from_micros(micros));
                }
                "sequence_id" | "sequence_start" | "sequence_end" => no_sequence(name, value)?,
                // Each request has one response, marked as its last: there is never another.
                "triton_enable_empty_final_response" => flag(name, value)?,
                _ if name.starts_with("triton_") => {
                    return Err(ServeError::invalid(format!(
                        "unknown parameter '{}': names that start with 'triton_' are reserved",
                        cut(name)
                    )));
                }
                _ => {}
            }
        }
        Ok(read)
    }
}

fn number(name: &str, value: Option<&ParameterChoice>) -> Result<u64, ServeError> {
    let read = match value {
        Some(ParameterChoice::Uint64Param(number)) => Some(*number),
        Some(ParameterChoice::Int64Param(number)) => u64::try_from(*number).ok(),
        Some(ParameterChoice::StringParam(text)) => text.parse().ok(),
        _ => None,
    };
    read.ok_or_else(|| unexpected(name, "a whole number that is not negative", value))
}

fn flag(name: &str, value: Option<&ParameterChoice>) -> Result<(), ServeError> {
    match value {
        Some(ParameterChoice::BoolParam(_)) => Ok(()),
        _ => Err(unexpected(name, "a bool", value)),
    }
}

/// An id of 0 or "" stands for no sequence, as does a flag that is off.
fn no_sequence(name: &str, value: Option<&ParameterChoice>) -> Result<(), ServeError> {
    match value {
        None
        | Some(
            ParameterChoice::BoolParam(false)
            | ParameterChoice::Int64Param(0)
            | ParameterChoice::Uint64Param(0),
        ) => Ok(()),
        Some(ParameterChoice::StringParam(id)) if id.is_empty() => Ok(()),
        Some(_) => Err(ServeError::unsupported(format!(
            "parameter '{name}' is not supported: this server keeps no state between requests"
        ))),
    }
}

fn unexpected(name: &str, expected: &str, value: Option<&ParameterChoice>) -> ServeError {
    let got = match value {
        None => "nothing".to_owned(),
        Some(ParameterChoice::BoolParam(value)) => format!("bool_param {value}"),
        Some(ParameterChoice::Int64Param(value)) => format!("int64_param {value}"),
        Some(ParameterChoice::Uint64Param(value)) => format!("uint64_param {value}"),
        Some(ParameterChoice::DoubleParam(value)) => format!("double_param {value}"),
        Some(ParameterChoice::StringParam(value)) => format!("string_param '{}'", cut(value)),
    };
    ServeError::invalid(format!(
        "unexpected value for parameter '{name}': expected {expected}, got {got}"
    ))
}

fn cut(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests;

//! `ModelInfer`, and what it shares with the stream: reading a request.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use dormouse_core::code::ErrorCode;
use dormouse_core::datatype::DataType;
use dormouse_core::sequence::SequenceId;
use dormouse_core::shape::{Shape, element_count};
use dormouse_proto::inference as pb;
use pb::infer_parameter::ParameterChoice;
use pb::model_infer_request::InferInputTensor;
use tonic::metadata::MetadataValue;
use tonic::{Response, Status};
use tracing::error;

use super::answer::Answer;
use super::backend::Backend;
use super::codec::Received;
use super::contents::{self, Place};
use super::deadline::CallTime;
use super::wishes;
use crate::error::ServeError;
use crate::frontend::status::to_status;
use crate::limits::RequestLimits;
use crate::request::{Origin, RawInput, RawRequest, SequenceParameters, Wishes};
use crate::shared_memory::Caller;
use crate::spans::RequestSpan;

/// Where a request that woke its model is told what that took.
pub(super) const SERVER_TIMING: &str = "server-timing";

/// Answers one request.
pub(super) async fn model_infer<B: Backend>(
    backend: &B,
    time: CallTime,
    span: Option<RequestSpan>,
    request: tonic::Request<Received<pb::ModelInferRequest>>,
    limits: &RequestLimits,
) -> Result<Response<Answer>, Status> {
    let (_, mut extensions, received) = request.into_parts();
    let caller: Option<Caller> = extensions.remove();
    drop(extensions);
    let held = backend.count(received.bytes);
    let mut request = received.message;
    let name = std::mem::take(&mut request.model_name);
    let version = std::mem::take(&mut request.model_version);
    if let Some(span) = &span {
        span.asks(&name, &version, &request.id);
    }
    let read = held.and_then(|held| {
        let mut raw = read_request(&name, time, request, limits)?;
        raw.held = held;
        Ok(raw)
    });
    let answered = match read {
        Ok(mut raw) => {
            raw.origin = Origin::Unary;
            raw.span = span.clone();
            if let Some(wishes) = &mut raw.wishes {
                wishes.caller = caller;
            }
            backend.infer(&name, &version, raw).await
        }
        Err(error) => Err(error),
    };
    if let Some(span) = &span {
        span.ended(answered.as_ref().err());
    }
    let response = answered.map_err(|error| {
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
    limits: &RequestLimits,
) -> Result<RawRequest, ServeError> {
    limits.check_tensors(request.inputs.len(), "inputs")?;
    limits.check_tensors(request.outputs.len(), "outputs")?;
    for input in &request.inputs {
        check_shape(model, input, limits)?;
    }
    let parameters = Parameters::read(&request.parameters)?;
    let mut wishes = Wishes::default();
    for (index, input) in request.inputs.iter().enumerate() {
        let tensor = || format!("input '{}' of model '{model}'", input.name);
        if let Some(slice) = wishes::region(&input.parameters, tensor)? {
            wishes.inputs.push((index, slice));
        }
    }
    for output in &request.outputs {
        if let Some(wish) = wishes::output(model, output)? {
            wishes.outputs.push((output.name.clone(), wish));
        }
    }
    let inputs = match request.raw_input_contents.is_empty() {
        false => raw_inputs(model, request.inputs, request.raw_input_contents, &wishes)?,
        true => typed_inputs(model, request.inputs, &wishes)?,
    };
    let outputs = request.outputs.into_iter().map(|output| output.name);
    let outputs = outputs.collect();
    Ok(RawRequest {
        id: request.id,
        inputs,
        outputs,
        priority: parameters.priority,
        deadline: time.within(parameters.timeout),
        received: time.received,
        sequence: parameters.sequence.step(),
        origin: Origin::Stream,
        wishes: wishes.some(),
        span: None,
        held: None,
    })
}

fn raw_inputs(
    model: &str,
    inputs: Vec<InferInputTensor>,
    raw: Vec<Bytes>,
    wishes: &Wishes,
) -> Result<Vec<RawInput>, ServeError> {
    let expected = inputs.len() - wishes.inputs.len();
    if raw.len() != expected {
        let which = match wishes.inputs.is_empty() {
            true => "",
            false => " that is not in shared memory",
        };
        return Err(ServeError::invalid(format!(
            "unexpected number of raw_input_contents for model '{model}': expected {expected}, \
             one for each of inputs{which}, got {}",
            raw.len()
        )));
    }
    let mut raw = raw.into_iter();
    inputs
        .into_iter()
        .enumerate()
        .map(|(index, input)| {
            // As in Triton, contents follow each other without those that are elsewhere.
            let data = match is_elsewhere(wishes, index) {
                true => Bytes::new(),
                false => raw.next().unwrap_or_default(),
            };
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
                shape: Shape::from_slice(&input.shape),
                name: input.name,
                data,
            })
        })
        .collect()
}

/// Whether the data of this input is in shared memory.
fn is_elsewhere(wishes: &Wishes, input: usize) -> bool {
    let elsewhere = &wishes.inputs;
    !elsewhere.is_empty()
        && elsewhere
            .binary_search_by_key(&input, |(index, _)| *index)
            .is_ok()
}

fn typed_inputs(
    model: &str,
    inputs: Vec<InferInputTensor>,
    wishes: &Wishes,
) -> Result<Vec<RawInput>, ServeError> {
    inputs
        .into_iter()
        .enumerate()
        .map(|(index, input)| {
            let datatype = datatype(model, &input)?;
            let shape = Shape::from_slice(&input.shape);
            let place = Place {
                model,
                input: &input.name,
            };
            let data = match &input.contents {
                _ if is_elsewhere(wishes, index) => Bytes::new(),
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

fn check_shape(
    model: &str,
    input: &InferInputTensor,
    limits: &RequestLimits,
) -> Result<(), ServeError> {
    let place = format_args!("input '{}' of model '{model}'", input.name);
    if input.shape.len() > limits.dimensions {
        return Err(limits.too_many_dimensions(place));
    }
    limits.check_elements(&input.shape, place)
}

/// The request parameters that mean something to this server.
#[derive(Debug, Default, PartialEq)]
struct Parameters {
    priority: u64,
    timeout: Option<Duration>,
    sequence: SequenceParameters,
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
                "sequence_id" => read.sequence.id = sequence_id(name, value)?,
                "sequence_start" => read.sequence.start = flag(name, value)?,
                "sequence_end" => read.sequence.end = flag(name, value)?,
                // Each request has one response, marked as its last: there is never another.
                "triton_enable_empty_final_response" => drop(flag(name, value)?),
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

pub(super) fn number(name: &str, value: Option<&ParameterChoice>) -> Result<u64, ServeError> {
    let read = match value {
        Some(ParameterChoice::Uint64Param(number)) => Some(*number),
        Some(ParameterChoice::Int64Param(number)) => u64::try_from(*number).ok(),
        Some(ParameterChoice::StringParam(text)) => text.parse().ok(),
        _ => None,
    };
    read.ok_or_else(|| unexpected(name, "a whole number that is not negative", value))
}

fn flag(name: &str, value: Option<&ParameterChoice>) -> Result<bool, ServeError> {
    match value {
        Some(ParameterChoice::BoolParam(value)) => Ok(*value),
        _ => Err(unexpected(name, "a bool", value)),
    }
}

/// An id of 0 or "" stands for no sequence.
fn sequence_id(
    name: &str,
    value: Option<&ParameterChoice>,
) -> Result<Option<SequenceId>, ServeError> {
    if let Some(ParameterChoice::StringParam(id)) = value {
        return Ok((!id.is_empty()).then(|| SequenceId::Text(id.as_str().into())));
    }
    let number = match value {
        // As in Triton, the bits are what counts.
        Some(ParameterChoice::Int64Param(number)) => Some(*number as u64),
        Some(ParameterChoice::Uint64Param(number)) => Some(*number),
        _ => None,
    };
    let number = number.ok_or_else(|| unexpected(name, "a whole number or a string", value))?;
    Ok((number != 0).then_some(SequenceId::Number(number)))
}

pub(super) fn unexpected(
    name: &str,
    expected: &str,
    value: Option<&ParameterChoice>,
) -> ServeError {
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

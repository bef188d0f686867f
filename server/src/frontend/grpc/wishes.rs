//! Parameters of single tensors: shared memory and classification.

use std::collections::HashMap;

use dormouse_proto::inference as pb;
use pb::infer_parameter::ParameterChoice;
use pb::model_infer_request::InferRequestedOutputTensor;

use super::infer::{number, unexpected};
use crate::error::ServeError;
use crate::request::OutputWish;
use crate::shared_memory::RegionSlice;

/// The part of shared memory that a tensor's parameters name.
pub(super) fn region(
    parameters: &HashMap<String, pb::InferParameter>,
    tensor: impl Fn() -> String,
) -> Result<Option<RegionSlice>, ServeError> {
    if parameters.is_empty() {
        return Ok(None);
    }
    let value = |name| {
        parameters
            .get(name)
            .map(|value| value.parameter_choice.as_ref())
    };
    let of_tensor = |error: ServeError| ServeError::invalid(format!("{}: {error}", tensor()));
    let Some(region) = value("shared_memory_region") else {
        for name in ["shared_memory_byte_size", "shared_memory_offset"] {
            if parameters.contains_key(name) {
                return Err(ServeError::invalid(format!(
                    "{}: parameter '{name}' is given without 'shared_memory_region'",
                    tensor()
                )));
            }
        }
        return Ok(None);
    };
    let Some(ParameterChoice::StringParam(region)) = region else {
        let error = unexpected("shared_memory_region", "a string", region);
        return Err(of_tensor(error));
    };
    let size = "shared_memory_byte_size";
    let byte_size = match value(size) {
        Some(value) => number(size, value).map_err(of_tensor)?,
        None => {
            return Err(ServeError::invalid(format!(
                "{}: parameter 'shared_memory_region' is given without '{size}'",
                tensor()
            )));
        }
    };
    let offset = "shared_memory_offset";
    let offset = match value(offset) {
        Some(value) => number(offset, value).map_err(of_tensor)?,
        None => 0,
    };
    Ok(Some(RegionSlice {
        region: region.clone(),
        offset,
        byte_size,
    }))
}

/// What a requested output's parameters ask for.
pub(super) fn output(
    model: &str,
    output: &InferRequestedOutputTensor,
) -> Result<Option<OutputWish>, ServeError> {
    let tensor = || format!("output '{}' of model '{model}'", output.name);
    let region = region(&output.parameters, tensor)?;
    let classes = match output.parameters.get("classification") {
        None => 0,
        Some(value) => number("classification", value.parameter_choice.as_ref())?,
    };
    match (region, classes) {
        // What clients send that do not want any.
        (None, 0) => Ok(None),
        (Some(slice), 0) => Ok(Some(OutputWish::Region(slice))),
        (None, classes) => Ok(Some(OutputWish::Classes(classes))),
        (Some(_), _) => Err(ServeError::invalid(format!(
            "{}: shared memory can't be set on classification output",
            tensor()
        ))),
    }
}

//! One inference: what is asked and what is answered.

use std::collections::HashMap;
use std::time::Duration;

use tonic::Response;

use crate::error::ClientError;
use crate::pb;
use crate::pb::infer_parameter::ParameterChoice;
use crate::tensor::Tensor;
use crate::timing::ColdStart;

/// A request to run a model once.
///
/// ```
/// use std::time::Duration;
/// use dormouse_client::{InferRequest, Tensor};
///
/// let request = InferRequest::new("sentiment")
///     .version("3")
///     .id("review-17")
///     .input("text", Tensor::bytes([1], ["a fine mouse"])?)
///     .output("label")
///     .priority(1)
///     .parameter("language", "en")
///     .deadline(Duration::from_millis(50));
/// # drop(request);
/// # Ok::<(), dormouse_client::ClientError>(())
/// ```
#[derive(Clone, Debug)]
pub struct InferRequest {
    message: pb::ModelInferRequest,
    deadline: Option<Duration>,
}

impl InferRequest {
    /// Asks for the newest version of a model, and for all of its outputs.
    pub fn new(model: impl Into<String>) -> Self {
        Self {
            message: pb::ModelInferRequest {
                model_name: model.into(),
                ..Default::default()
            },
            deadline: None,
        }
    }

    /// Asks for this version of the model.
    pub fn version(mut self, version: impl Into<String>) -> Self {
        self.message.model_version = version.into();
        self
    }

    /// Names the request; the response carries the same id.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.message.id = id.into();
        self
    }

    /// Adds an input. Its data is shared, not copied.
    pub fn input(mut self, name: impl Into<String>, tensor: Tensor) -> Self {
        let input = pb::model_infer_request::InferInputTensor {
            name: name.into(),
            datatype: tensor.datatype().name().to_owned(),
            shape: tensor.shape().to_vec(),
            ..Default::default()
        };
        self.message.inputs.push(input);
        self.message.raw_input_contents.push(tensor.data().clone());
        self
    }

    /// Asks for this output; without any, all outputs are answered.
    pub fn output(mut self, name: impl Into<String>) -> Self {
        let output = pb::model_infer_request::InferRequestedOutputTensor {
            name: name.into(),
            ..Default::default()
        };
        self.message.outputs.push(output);
        self
    }

    /// The time the call has, retries included; the server is told and drops what is too late.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// The time the request may wait in the model's queue, if the model allows setting it.
    pub fn queue_timeout(self, timeout: Duration) -> Self {
        let micros = i64::try_from(timeout.as_micros()).unwrap_or(i64::MAX);
        self.parameter("timeout", micros)
    }

    /// The place in the model's queue, for models with priority levels: 1 is the highest.
    pub fn priority(self, priority: u64) -> Self {
        self.parameter("priority", priority)
    }

    /// Makes the request a part of a sequence. It is then never sent twice.
    pub fn sequence(self, id: u64, start: bool, end: bool) -> Self {
        self.parameter("sequence_id", id)
            .parameter("sequence_start", start)
            .parameter("sequence_end", end)
    }

    /// On a stream, asks for an empty last response that says that there are no more.
    pub fn empty_final_response(self) -> Self {
        self.parameter("triton_enable_empty_final_response", true)
    }

    /// Sets a parameter for the server or the model.
    pub fn parameter(mut self, key: impl Into<String>, value: impl Into<Parameter>) -> Self {
        let value = pb::InferParameter {
            parameter_choice: Some(value.into().into()),
        };
        self.message.parameters.insert(key.into(), value);
        self
    }

    pub(crate) fn call_deadline(&self) -> Option<Duration> {
        self.deadline
    }

    /// Whether the model would see a difference if this arrived twice.
    pub(crate) fn is_in_sequence(&self) -> bool {
        self.message.parameters.contains_key("sequence_id")
    }

    pub(crate) fn message(&self) -> &pb::ModelInferRequest {
        &self.message
    }

    pub(crate) fn into_message(self) -> pb::ModelInferRequest {
        self.message
    }
}

/// The value of a parameter of a request or response.
///
/// ```
/// use dormouse_client::Parameter;
///
/// assert_eq!(Parameter::from(true), Parameter::Bool(true));
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Parameter {
    /// A truth value.
    Bool(bool),
    /// A signed integer.
    Int(i64),
    /// An unsigned integer.
    Uint(u64),
    /// A number.
    Float(f64),
    /// Text.
    Text(String),
}

impl From<bool> for Parameter {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<i64> for Parameter {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl From<u64> for Parameter {
    fn from(value: u64) -> Self {
        Self::Uint(value)
    }
}

impl From<f64> for Parameter {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

impl From<&str> for Parameter {
    fn from(value: &str) -> Self {
        Self::Text(value.to_owned())
    }
}

impl From<String> for Parameter {
    fn from(value: String) -> Self {
        Self::Text(value)
    }
}

impl From<Parameter> for ParameterChoice {
    fn from(value: Parameter) -> Self {
        match value {
            Parameter::Bool(value) => Self::BoolParam(value),
            Parameter::Int(value) => Self::Int64Param(value),
            Parameter::Uint(value) => Self::Uint64Param(value),
            Parameter::Float(value) => Self::DoubleParam(value),
            Parameter::Text(value) => Self::StringParam(value),
        }
    }
}

impl From<ParameterChoice> for Parameter {
    fn from(value: ParameterChoice) -> Self {
        match value {
            ParameterChoice::BoolParam(value) => Self::Bool(value),
            ParameterChoice::Int64Param(value) => Self::Int(value),
            ParameterChoice::Uint64Param(value) => Self::Uint(value),
            ParameterChoice::DoubleParam(value) => Self::Float(value),
            ParameterChoice::StringParam(value) => Self::Text(value),
        }
    }
}

/// The answer to an [`InferRequest`].
///
/// ```no_run
/// use dormouse_client::{ClientError, InferResponse};
///
/// # fn example(response: InferResponse) -> Result<(), ClientError> {
/// for (name, tensor) in response.outputs() {
///     println!("{name}: {} {:?}", tensor.datatype(), tensor.shape());
/// }
/// let scores = response.output("scores")?.to_vec::<f32>()?;
/// # drop(scores);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct InferResponse {
    model: String,
    version: String,
    id: String,
    parameters: HashMap<String, Parameter>,
    outputs: Vec<(String, Tensor)>,
    timing: Option<ColdStart>,
}

impl InferResponse {
    /// The model that answered.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The version of the model that answered.
    pub fn model_version(&self) -> &str {
        &self.version
    }

    /// The id of the request.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The outputs in the order of the answer.
    pub fn outputs(&self) -> impl ExactSizeIterator<Item = (&str, &Tensor)> {
        self.outputs
            .iter()
            .map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// The output of this name.
    pub fn output(&self, name: &str) -> Result<&Tensor, ClientError> {
        self.outputs()
            .find_map(|(candidate, tensor)| (candidate == name).then_some(tensor))
            .ok_or_else(|| ClientError::NoOutput {
                name: name.to_owned(),
                available: self.outputs.iter().map(|(name, _)| name.clone()).collect(),
            })
    }

    /// A parameter that the server sent along.
    pub fn parameter(&self, key: &str) -> Option<&Parameter> {
        self.parameters.get(key)
    }

    /// Whether the server says that no more responses to the request follow on the stream.
    pub fn is_final(&self) -> bool {
        self.parameter("triton_final_response") == Some(&Parameter::Bool(true))
    }

    /// What waking the model took, none when it was warm or the server does not tell.
    pub fn timing(&self) -> Option<&ColdStart> {
        self.timing.as_ref()
    }

    pub(crate) fn from_call(
        response: Response<pb::ModelInferResponse>,
    ) -> Result<Self, ClientError> {
        let timing = response
            .metadata()
            .get_all("server-timing")
            .iter()
            .find_map(|value| ColdStart::parse(value.to_str().ok()?));
        let mut answer = Self::from_message(response.into_inner())?;
        answer.timing = timing;
        Ok(answer)
    }

    pub(crate) fn from_message(message: pb::ModelInferResponse) -> Result<Self, ClientError> {
        let raw = message.raw_output_contents;
        if !raw.is_empty() && raw.len() != message.outputs.len() {
            return Err(ClientError::Protocol(format!(
                "{} outputs came with {} pieces of raw data",
                message.outputs.len(),
                raw.len()
            )));
        }
        let mut raw = raw.into_iter();
        let mut outputs = Vec::with_capacity(message.outputs.len());
        for output in message.outputs {
            let data = raw.next();
            let build = || {
                let datatype = output.datatype.parse()?;
                match (data, output.contents) {
                    (Some(data), _) => Tensor::raw(datatype, output.shape, data),
                    (None, contents) => {
                        Tensor::from_contents(datatype, output.shape, contents.unwrap_or_default())
                    }
                }
            };
            match build() {
                Ok(tensor) => outputs.push((output.name, tensor)),
                Err(source) => {
                    return Err(ClientError::Tensor {
                        name: output.name,
                        source,
                    });
                }
            }
        }
        let parameters = message.parameters.into_iter();
        Ok(Self {
            model: message.model_name,
            version: message.model_version,
            id: message.id,
            parameters: parameters
                .filter_map(|(key, value)| Some((key, value.parameter_choice?.into())))
                .collect(),
            outputs,
            timing: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pb::model_infer_response::InferOutputTensor;

    fn output(name: &str, datatype: &str, shape: &[i64]) -> InferOutputTensor {
        InferOutputTensor {
            name: name.to_owned(),
            datatype: datatype.to_owned(),
            shape: shape.to_vec(),
            ..Default::default()
        }
    }

    #[test]
    fn raw_data_belongs_to_the_output_at_its_place() {
        let message = pb::ModelInferResponse {
            outputs: vec![output("a", "UINT8", &[1]), output("b", "INT16", &[1])],
            raw_output_contents: vec![vec![7].into(), vec![1, 1].into()],
            ..Default::default()
        };
        let response = InferResponse::from_message(message).unwrap();
        assert_eq!(
            response.output("b").unwrap().to_vec::<i16>().unwrap(),
            [257]
        );
        let error = response.output("c").unwrap_err().to_string();
        assert_eq!(error, "the response has no output \"c\"; it has a, b");
    }

    #[test]
    fn answers_that_do_not_add_up_are_refused() {
        let mut message = pb::ModelInferResponse {
            outputs: vec![output("a", "UINT8", &[2])],
            raw_output_contents: vec![vec![7].into()],
            ..Default::default()
        };
        let error = InferResponse::from_message(message.clone()).unwrap_err();
        let text = error.to_string();
        assert_eq!(text, "tensor \"a\": UINT8 [2] takes 2 bytes, 1 were given");
        message.raw_output_contents.push(vec![].into());
        let error = InferResponse::from_message(message.clone()).unwrap_err();
        assert!(matches!(error, ClientError::Protocol(_)), "{error}");
        message.raw_output_contents.truncate(1);
        message.outputs[0].datatype = "FP8".to_owned();
        let error = InferResponse::from_message(message).unwrap_err();
        assert_eq!(
            error.to_string(),
            "tensor \"a\": unknown element type \"FP8\""
        );
    }
}

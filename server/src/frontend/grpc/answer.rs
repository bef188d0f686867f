//! Answers, encoded straight from what the engine returned: no intermediate message, tensors
//! copied once, into the buffer that is sent.

use bytes::BufMut;
use dormouse_core::shape::Shape;
use dormouse_proto::inference as pb;
use pb::infer_parameter::ParameterChoice;
use prost::Message;
use prost::encoding::{encode_varint, encoded_len_varint};

use crate::request::{InferResponse, Tensor};
use crate::shared_memory::RegionSlice;

/// The `parameters` entry of `ModelInferResponse` that says `triton_final_response: true`.
const FINAL_RESPONSE: &[u8] = b"\x22\x1b\x0a\x15triton_final_response\x12\x02\x08\x01";

/// A `ModelInferResponse`.
#[derive(Debug)]
pub(super) struct Answer(pub(super) InferResponse);

/// A `ModelStreamInferResponse`. Each request of a stream has exactly one, marked as its last.
#[derive(Debug)]
pub(super) enum StreamAnswer {
    Answer(Answer),
    Failure {
        message: String,
        /// What tells the client which of its requests failed.
        id: String,
        model_name: String,
        model_version: String,
    },
}

impl Answer {
    pub(super) fn encoded_len(&self) -> usize {
        let response = &self.0;
        let outputs: usize = response
            .outputs
            .iter()
            .enumerate()
            .map(|(index, (name, tensor))| {
                let output = output_len(name, tensor, response.place_of(index));
                delimited_len(output) + delimited_len(tensor.data.len())
            })
            .sum();
        text_len(response.model_name.len())
            + text_len(Decimal::new(response.model_version).as_bytes().len())
            + text_len(response.id.len())
            + outputs
    }

    pub(super) fn encode(&self, buf: &mut impl BufMut) {
        let response = &self.0;
        put_text(buf, 1, response.model_name.as_bytes());
        put_text(buf, 2, Decimal::new(response.model_version).as_bytes());
        put_text(buf, 3, response.id.as_bytes());
        for (index, (name, tensor)) in response.outputs.iter().enumerate() {
            let place = response.place_of(index);
            put_head(buf, 5, output_len(name, tensor, place));
            put_text(buf, 1, name.as_bytes());
            put_text(buf, 2, tensor.datatype.name().as_bytes());
            if !tensor.shape.is_empty() {
                put_head(buf, 3, packed_len(&tensor.shape));
                for &dim in &tensor.shape {
                    encode_varint(dim as u64, buf);
                }
            }
            if let Some(place) = place {
                buf.put_slice(&place_parameters(place));
            }
        }
        // Unlike a field that is empty, an element of a list is always written.
        for (_, tensor) in &response.outputs {
            put_head(buf, 6, tensor.data.len());
            buf.put_slice(&tensor.data);
        }
    }
}

impl StreamAnswer {
    pub(super) fn encoded_len(&self) -> usize {
        match self {
            Self::Answer(answer) => delimited_len(answer.encoded_len() + FINAL_RESPONSE.len()),
            Self::Failure { message, .. } => {
                text_len(message.len()) + delimited_len(self.failure_len())
            }
        }
    }

    pub(super) fn encode(&self, buf: &mut impl BufMut) {
        match self {
            Self::Answer(answer) => {
                put_head(buf, 2, answer.encoded_len() + FINAL_RESPONSE.len());
                answer.encode(buf);
            }
            Self::Failure {
                message,
                id,
                model_name,
                model_version,
            } => {
                put_text(buf, 1, message.as_bytes());
                put_head(buf, 2, self.failure_len());
                put_text(buf, 1, model_name.as_bytes());
                put_text(buf, 2, model_version.as_bytes());
                put_text(buf, 3, id.as_bytes());
            }
        }
        buf.put_slice(FINAL_RESPONSE);
    }

    fn failure_len(&self) -> usize {
        match self {
            Self::Answer(_) => 0,
            Self::Failure {
                id,
                model_name,
                model_version,
                ..
            } => {
                text_len(model_name.len())
                    + text_len(model_version.len())
                    + text_len(id.len())
                    + FINAL_RESPONSE.len()
            }
        }
    }
}

/// The `parameters` of an output that was put into shared memory.
#[cold]
fn place_parameters(place: &RegionSlice) -> Vec<u8> {
    let number = |value: u64| ParameterChoice::Int64Param(value.min(i64::MAX as u64) as i64);
    let parameters = [
        (
            "shared_memory_region",
            Some(ParameterChoice::StringParam(place.region.clone())),
        ),
        ("shared_memory_byte_size", Some(number(place.byte_size))),
        (
            "shared_memory_offset",
            (place.offset > 0).then(|| number(place.offset)),
        ),
    ];
    let mut encoded = Vec::new();
    for (name, choice) in parameters {
        if choice.is_none() {
            continue;
        }
        let value = pb::InferParameter {
            parameter_choice: choice,
        };
        put_head(
            &mut encoded,
            4,
            text_len(name.len()) + delimited_len(value.encoded_len()),
        );
        put_text(&mut encoded, 1, name.as_bytes());
        put_head(&mut encoded, 2, value.encoded_len());
        encoded.extend(value.encode_to_vec());
    }
    encoded
}

fn output_len(name: &str, tensor: &Tensor, place: Option<&RegionSlice>) -> usize {
    let parameters = place.map_or(0, |place| place_parameters(place).len());
    let shape = match tensor.shape.len() {
        0 => 0,
        _ => delimited_len(packed_len(&tensor.shape)),
    };
    text_len(name.len()) + text_len(tensor.datatype.name().len()) + shape + parameters
}

fn packed_len(shape: &Shape) -> usize {
    shape
        .iter()
        .map(|&dim| encoded_len_varint(dim as u64))
        .sum()
}

/// A field of `length` bytes with its key, which is one byte: our field numbers are below 16.
fn delimited_len(length: usize) -> usize {
    1 + encoded_len_varint(length as u64) + length
}

/// Like [`delimited_len`], but proto3 leaves an empty field out.
fn text_len(length: usize) -> usize {
    if length == 0 {
        0
    } else {
        delimited_len(length)
    }
}

fn put_head(buf: &mut impl BufMut, field: u8, length: usize) {
    buf.put_u8(field << 3 | 2);
    encode_varint(length as u64, buf);
}

fn put_text(buf: &mut impl BufMut, field: u8, text: &[u8]) {
    if !text.is_empty() {
        put_head(buf, field, text.len());
        buf.put_slice(text);
    }
}

/// A number's decimal digits, without an allocation.
struct Decimal {
    digits: [u8; 20],
    start: usize,
}

impl Decimal {
    fn new(mut number: u64) -> Self {
        let mut digits = [0; 20];
        let mut start = digits.len();
        loop {
            start -= 1;
            digits[start] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                return Self { digits, start };
            }
        }
    }

    fn as_bytes(&self) -> &[u8] {
        &self.digits[self.start..]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use bytes::Bytes;
    use dormouse_core::datatype::DataType;
    use pb::model_infer_response::InferOutputTensor;
    use proptest::prelude::*;

    use super::*;

    fn responses() -> impl Strategy<Value = InferResponse> {
        let tensor = (
            prop::sample::select(&DataType::ALL[..]),
            prop::collection::vec(any::<i64>(), 0..6),
            prop::collection::vec(any::<u8>(), 0..300),
        );
        (
            ".{0,40}",
            any::<u64>(),
            ".{0,200}",
            prop::collection::vec((".{0,12}", tensor), 0..5),
        )
            .prop_map(|(name, version, id, outputs)| InferResponse {
                model_name: name.into(),
                model_version: version,
                id,
                outputs: outputs
                    .into_iter()
                    .map(|(name, (datatype, shape, data))| {
                        let tensor = Tensor {
                            datatype,
                            shape: shape.into(),
                            data: data.into(),
                        };
                        (name.into(), tensor)
                    })
                    .collect(),
                cold_start: None,
                placed: None,
            })
    }

    fn expected(response: &InferResponse) -> pb::ModelInferResponse {
        pb::ModelInferResponse {
            model_name: response.model_name.to_string(),
            model_version: response.model_version.to_string(),
            id: response.id.clone(),
            outputs: response
                .outputs
                .iter()
                .map(|(name, tensor)| InferOutputTensor {
                    name: name.to_string(),
                    datatype: tensor.datatype.to_string(),
                    shape: tensor.shape.to_vec(),
                    ..Default::default()
                })
                .collect(),
            raw_output_contents: response
                .outputs
                .iter()
                .map(|(_, tensor)| tensor.data.clone())
                .collect(),
            ..Default::default()
        }
    }

    fn final_response() -> HashMap<String, pb::InferParameter> {
        let last = pb::InferParameter {
            parameter_choice: Some(ParameterChoice::BoolParam(true)),
        };
        HashMap::from([("triton_final_response".to_owned(), last)])
    }

    proptest! {
        #[test]
        fn answers_are_encoded_as_the_generated_code_would(response in responses()) {
            let expected = expected(&response);
            let answer = Answer(response);
            let mut wire = Vec::new();
            answer.encode(&mut wire);
            prop_assert_eq!(wire.len(), answer.encoded_len());
            prop_assert_eq!(&wire, &expected.encode_to_vec());

            let mut wire = Vec::new();
            let answer = StreamAnswer::Answer(answer);
            answer.encode(&mut wire);
            prop_assert_eq!(wire.len(), answer.encoded_len());
            let decoded = pb::ModelStreamInferResponse::decode(&wire[..]).unwrap();
            prop_assert_eq!(decoded, pb::ModelStreamInferResponse {
                error_message: String::new(),
                infer_response: Some(pb::ModelInferResponse {
                    parameters: final_response(),
                    ..expected
                }),
            });
        }
    }

    #[test]
    fn a_failure_names_the_request_and_is_its_last_response() {
        let failure = StreamAnswer::Failure {
            message: "no such model".into(),
            id: "7".into(),
            model_name: "m".into(),
            model_version: String::new(),
        };
        let mut wire = Vec::new();
        failure.encode(&mut wire);
        assert_eq!(wire.len(), failure.encoded_len());
        let decoded = pb::ModelStreamInferResponse::decode(&wire[..]).unwrap();
        assert_eq!(decoded.error_message, "no such model");
        let response = decoded.infer_response.unwrap();
        assert_eq!(
            (response.id.as_str(), response.model_name.as_str()),
            ("7", "m")
        );
        assert_eq!(response.parameters, final_response());
    }

    #[test]
    fn an_output_in_shared_memory_says_where_it_is() {
        let tensor = Tensor {
            datatype: DataType::Uint8,
            shape: Shape::from_slice(&[7]),
            data: Bytes::new(),
        };
        let place = |offset| RegionSlice {
            region: "out".into(),
            offset,
            byte_size: 7,
        };
        let answer = Answer(InferResponse {
            model_name: "m".into(),
            model_version: 1,
            id: String::new(),
            outputs: vec![("a".into(), tensor.clone()), ("b".into(), tensor)],
            cold_start: None,
            placed: Some(Box::new(vec![Some(place(0)), Some(place(300))])),
        });
        let mut wire = Vec::new();
        answer.encode(&mut wire);
        assert_eq!(wire.len(), answer.encoded_len());
        let decoded = pb::ModelInferResponse::decode(&wire[..]).unwrap();
        assert_eq!(decoded.raw_output_contents.len(), 2);
        let parameter = |output: usize, name: &str| {
            let parameter = decoded.outputs[output].parameters.get(name).cloned();
            parameter.and_then(|parameter| parameter.parameter_choice)
        };
        assert_eq!(parameter(0, "shared_memory_offset"), None);
        assert_eq!(
            parameter(1, "shared_memory_offset"),
            Some(ParameterChoice::Int64Param(300))
        );
        assert_eq!(
            parameter(1, "shared_memory_byte_size"),
            Some(ParameterChoice::Int64Param(7))
        );
        assert_eq!(
            parameter(0, "shared_memory_region"),
            Some(ParameterChoice::StringParam("out".into()))
        );
    }

    #[test]
    fn an_empty_output_keeps_its_place() {
        let tensor = |data: &'static [u8]| Tensor {
            datatype: DataType::Uint8,
            shape: Shape::from_slice(&[data.len() as i64]),
            data: Bytes::from_static(data),
        };
        let answer = Answer(InferResponse {
            model_name: "m".into(),
            model_version: 1,
            id: String::new(),
            outputs: vec![("a".into(), tensor(&[])), ("b".into(), tensor(&[7]))],
            cold_start: None,
            placed: None,
        });
        let mut wire = Vec::new();
        answer.encode(&mut wire);
        let decoded = pb::ModelInferResponse::decode(&wire[..]).unwrap();
        assert_eq!(decoded.raw_output_contents, [&[][..], &[7]]);
    }
}

//! BYTES tensors: elements with their lengths, as requests bring them and as engines give them.

use bytes::Bytes;
use dormouse_core::datatype::DataType;
use dormouse_core::shape::Shape;
use dormouse_proto::inference as pb;
use pb::model_infer_request::InferInputTensor;
use prost::Message;

use super::allocations::within;
use super::requests::{self, MESSAGE_LIMIT, RECEIVED, elements_of, is_sound};
use crate::frontend::{grpc, http};
use crate::request::{InferRequest, RawInput, RawRequest, Tensor};
use crate::signature;
use crate::unit::split_outputs;

/// Enough for rows and what is behind them; more would only repeat it.
const MAX_RANK: u8 = 4;

/// A rank, that many dimensions of 8 bytes, then the tensor.
pub(super) fn tensor(data: &[u8]) -> bool {
    let Some((shape, data)) = split(data) else {
        return false;
    };
    let input = RawInput {
        name: "INPUT".to_owned(),
        datatype: DataType::Bytes,
        shape: shape.clone(),
        data: Bytes::copy_from_slice(data),
    };
    let request = RawRequest {
        inputs: vec![input],
        received: RECEIVED,
        ..RawRequest::default()
    };
    requests::check(&request);
    requests::survives_both_protocols(&request);
    let output = Tensor {
        datatype: DataType::Bytes,
        shape: shape.clone(),
        data: Bytes::copy_from_slice(data),
    };
    falls_apart_within_bounds(&output);
    // A byte may become an escape of six, and text grows by doubling.
    let bound = 32 * data.len() + (4 << 10);
    let written = within(bound, || http::pieces::write(answer(output), false));
    let is_sound = is_sound(DataType::Bytes, &shape, data);
    assert!(
        is_sound || written.is_err(),
        "written as JSON: {shape:?} {data:?}"
    );
    if is_sound {
        let elements = elements_of(data).expect("it is sound");
        is_read_from_typed_contents(&request, &elements);
        is_read_from_strings(&request, &elements);
    }
    is_sound
}

fn split(data: &[u8]) -> Option<(Shape, &[u8])> {
    let (&rank, mut data) = data.split_first()?;
    let mut shape = Shape::new();
    for _ in 0..rank % (MAX_RANK + 1) {
        let (dim, rest) = data.split_first_chunk()?;
        shape.push(i64::from_le_bytes(*dim));
        data = rest;
    }
    Some((shape, data))
}

fn answer(output: Tensor) -> crate::request::InferResponse {
    crate::request::InferResponse {
        model_name: "fuzzed".into(),
        model_version: 1,
        id: String::new(),
        outputs: vec![("OUTPUT".into(), output)],
        cold_start: None,
        placed: None,
    }
}

/// Whatever an engine gives, rows are taken from within it and one after the other.
fn falls_apart_within_bounds(output: &Tensor) {
    let Some(rows @ 1..) = output
        .shape
        .first()
        .and_then(|&rows| u32::try_from(rows).ok())
    else {
        return;
    };
    let request = |rows| InferRequest {
        id: String::new(),
        inputs: Vec::new(),
        outputs: vec![0],
        rows,
        priority: 0,
        deadline: None,
        received: RECEIVED,
        sequence: None,
        span: None,
        held: None,
    };
    let first = request(rows / 2);
    let second = request(rows - rows / 2);
    let spec = [signature::tensor("OUTPUT", DataType::Bytes, &[-1])];
    let Ok(split) = split_outputs(&[Some(output.clone())], &[&first, &second], rows, &spec) else {
        return;
    };
    let parts: Vec<u8> = split
        .iter()
        .flatten()
        .flat_map(|part| part.data.to_vec())
        .collect();
    assert!(output.data.starts_with(&parts));
    if is_sound(output.datatype, &output.shape, &output.data) {
        assert_eq!(parts.len(), output.data.len());
    }
}

fn is_read_from_typed_contents(request: &RawRequest, elements: &[&[u8]]) {
    let input = &request.inputs[0];
    let contents = pb::InferTensorContents {
        bytes_contents: elements
            .iter()
            .map(|&element| Bytes::copy_from_slice(element))
            .collect(),
        ..Default::default()
    };
    let message = pb::ModelInferRequest {
        inputs: vec![InferInputTensor {
            name: input.name.clone(),
            datatype: "BYTES".to_owned(),
            shape: input.shape.to_vec(),
            contents: Some(contents),
            ..Default::default()
        }],
        ..Default::default()
    };
    let read = grpc::pieces::read(message.encode_to_vec().into(), MESSAGE_LIMIT, RECEIVED);
    requests::assert_same(&read.expect("there are as many as the shape says"), request);
}

fn is_read_from_strings(request: &RawRequest, elements: &[&[u8]]) {
    let strings = elements.iter().map(|element| std::str::from_utf8(element));
    let Ok(strings) = strings.collect::<Result<Vec<&str>, _>>() else {
        return;
    };
    let input = &request.inputs[0];
    let body = serde_json::json!({"inputs": [{
        "name": input.name, "datatype": "BYTES", "shape": input.shape.as_slice(), "data": strings,
    }]});
    let read = http::pieces::read(&body.to_string().into(), None, RECEIVED);
    requests::assert_same(&read.expect("there are as many as the shape says"), request);
}

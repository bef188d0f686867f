//! What holds for every request once it was read, by whichever protocol.

use std::collections::HashSet;

use bytes::Bytes;
use dormouse_core::code::ErrorCode;
use dormouse_core::datatype::DataType;
use dormouse_core::shape::Shape;
use dormouse_core::time::Timestamp;
use dormouse_model_store::spec::{ModelSpec, TensorSpec};
use dormouse_proto::inference as pb;
use futures_util::FutureExt;
use http_body_util::BodyExt;
use pb::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use prost::Message;

use super::assert_presentable;
use crate::error::ServeError;
use crate::frontend::{grpc, http};
use crate::limits::RequestLimits;
use crate::request::{InferRequest, InferResponse, RawInput, RawRequest, Tensor};
use crate::signature::{model, tensor};
use crate::unit::{gather_inputs, split_outputs};
use crate::validate::validate;

pub(super) const RECEIVED: Timestamp = Timestamp::from_nanos(5_000);
/// Far above the inputs that are tried, so that it is the estimate that bounds.
pub(super) const MESSAGE_LIMIT: usize = 64 << 20;
/// The most rows of the models that are tried.
const MAX_ROWS: u32 = 8;
/// The HTTP front end's limits: beyond them gRPC takes more.
const HTTP_TENSORS: usize = 4096;
const HTTP_DIMS: usize = 32;

/// Whether a tensor is as long as its type and shape say, found out in another way than the
/// server does.
pub(super) fn is_sound(datatype: DataType, shape: &[i64], data: &[u8]) -> bool {
    if shape.iter().any(|&dim| dim < 0) {
        return false;
    }
    let mut elements = u128::from(!shape.contains(&0));
    for &dim in shape {
        elements = elements.saturating_mul(dim as u128);
    }
    match (datatype, datatype.element_size()) {
        (DataType::Bool, _) => data.len() as u128 == elements && data.iter().all(|&byte| byte <= 1),
        (_, Some(size)) => data.len() as u128 == elements.saturating_mul(size as u128),
        (_, None) => elements_of(data).is_some_and(|found| found.len() as u128 == elements),
    }
}

/// The elements of a BYTES tensor, none when they do not fill it.
pub(super) fn elements_of(mut data: &[u8]) -> Option<Vec<&[u8]>> {
    let mut elements = Vec::new();
    while !data.is_empty() {
        let length = u32::from_le_bytes(data.get(..4)?.try_into().ok()?) as usize;
        elements.push(data.get(4..4 + length)?);
        data = &data[4 + length..];
    }
    Some(elements)
}

/// Holds a request against models that were made for it and against one that was not.
pub(super) fn check(request: &RawRequest) {
    let names: HashSet<&str> = request.inputs.iter().map(|input| &*input.name).collect();
    let outputs: HashSet<&str> = request.outputs.iter().map(String::as_str).collect();
    let is_plain = names.len() == request.inputs.len() && outputs.len() == request.outputs.len();
    let is_sound = request
        .inputs
        .iter()
        .all(|input| is_sound(input.datatype, &input.shape, &input.data));

    let as_given = fitting(request, 0, |shape| Some(Shape::from_slice(shape)));
    let as_given = as_given.expect("every shape is its own");
    if let Some(valid) = agrees(&as_given, request, is_plain && is_sound) {
        assert_eq!(valid.rows, 1);
        survives_json(&as_given, &valid);
    }

    let open = |shape: &[i64]| Some(shape.get(1..)?.iter().map(|_| -1).collect());
    if let Some(batched) = fitting(request, MAX_ROWS, open) {
        let mut rows = request.inputs.iter().map(|input| input.shape[0]);
        let first = rows.next().unwrap_or(1);
        let even = (1..=i64::from(MAX_ROWS)).contains(&first) && rows.all(|other| other == first);
        if let Some(valid) = agrees(&batched, request, is_plain && is_sound && even) {
            assert_eq!(i64::from(valid.rows), first);
            shares_a_run(&batched, &valid);
        }
    }

    let other = model(
        "fuzzed",
        MAX_ROWS,
        vec![
            tensor("INPUT0", DataType::Int32, &[16]),
            TensorSpec {
                optional: true,
                reshape: Some(Shape::from_slice(&[-1, 1])),
                ..tensor("INPUT1", DataType::Fp32, &[-1])
            },
        ],
        vec![tensor("OUTPUT0", DataType::Int32, &[16])],
    );
    match validate(&other, request.clone()) {
        Ok(valid) => assert!((1..=MAX_ROWS).contains(&valid.rows)),
        Err(error) => assert_refusal(&error),
    }
}

/// A refusal of what came over the wire is the client's fault, and says so briefly.
pub(super) fn assert_refusal(error: &ServeError) {
    assert_eq!(error.code(), ErrorCode::InvalidRequest, "{error}");
    assert_presentable(error.message());
}

/// A model that takes the request's tensors, by what `dims` makes of their shapes.
fn fitting(
    request: &RawRequest,
    max_batch_size: u32,
    dims: impl Fn(&[i64]) -> Option<Shape>,
) -> Option<ModelSpec> {
    let mut inputs: Vec<TensorSpec> = Vec::new();
    let mut seen = HashSet::new();
    for input in &request.inputs {
        let dims = dims(&input.shape)?;
        if seen.insert(&*input.name) {
            inputs.push(tensor(&input.name, input.datatype, &dims));
        }
    }
    let mut seen = HashSet::new();
    let outputs = request.outputs.iter().filter(|name| seen.insert(*name));
    let outputs = outputs.map(|name| tensor(name, DataType::Fp32, &[-1]));
    Some(model("fuzzed", max_batch_size, inputs, outputs.collect()))
}

/// Validates a request whose fate is known. Where it is valid, nothing was changed.
fn agrees(spec: &ModelSpec, request: &RawRequest, expected: bool) -> Option<InferRequest> {
    let valid = match validate(spec, request.clone()) {
        Ok(valid) => valid,
        Err(error) => {
            assert!(!expected, "a sound request is refused: {error}");
            assert_refusal(&error);
            return None;
        }
    };
    assert!(expected, "an unsound request is taken: {request:?}");
    assert_eq!(valid.inputs.len(), request.inputs.len());
    for (tensor, input) in valid.inputs.iter().zip(&request.inputs) {
        let tensor = tensor.as_ref().expect("no input was left out");
        assert_eq!(
            (tensor.datatype, &tensor.shape, &tensor.data),
            (input.datatype, &input.shape, &input.data)
        );
    }
    let named = valid.outputs.iter();
    let named: Vec<&str> = named.map(|&index| &*spec.outputs[index].name).collect();
    match request.outputs.is_empty() {
        true => assert_eq!(named.len(), spec.outputs.len()),
        false => assert_eq!(named, request.outputs),
    }
    Some(valid)
}

/// Rows of two requests that share a run come back to them as they were.
fn shares_a_run(spec: &ModelSpec, valid: &InferRequest) {
    if valid.inputs.is_empty() {
        return;
    }
    let inputs: Vec<usize> = (0..spec.inputs.len()).collect();
    let mut request = valid.clone();
    request.outputs.clone_from(&inputs);
    let (requests, rows) = ([&request, &request], 2 * request.rows);
    let gathered = gather_inputs(&inputs, &requests, rows);
    let outputs: Vec<Option<Tensor>> = gathered
        .into_iter()
        .map(|(_, tensor)| Some(tensor))
        .collect();
    let split = split_outputs(&outputs, &requests, rows, &spec.inputs);
    for own in split.expect("there are as many rows as were put together") {
        let given: Vec<Tensor> = request.inputs.iter().flatten().cloned().collect();
        assert_eq!(own, given);
    }
}

/// What is answered as JSON is read as the same tensors.
fn survives_json(spec: &ModelSpec, valid: &InferRequest) {
    if spec.inputs.len() > HTTP_TENSORS
        || spec.inputs.iter().any(|input| input.dims.len() > HTTP_DIMS)
    {
        return;
    }
    let tensors = valid.inputs.iter().flatten().cloned();
    let names = spec.inputs.iter().map(|input| input.name.clone());
    let outputs: Vec<_> = names.zip(tensors).collect();
    let all_text = outputs.iter().all(|(_, tensor)| is_text(tensor));
    let answer = http::pieces::write(answer_of(outputs), false);
    let answer = match answer {
        Ok(answer) => answer,
        Err(error) => {
            assert!(!all_text, "{error}");
            return assert_refusal(&error);
        }
    };
    let json = answer.into_body().collect().now_or_never();
    let json = json.expect("the body is there").expect("and whole");
    let json = String::from_utf8(json.to_bytes().to_vec()).expect("JSON is text");
    let begin = json.find("\"outputs\":").expect("it has outputs") + "\"outputs\":".len();
    let request = Bytes::from(format!("{{\"inputs\":{}", &json[begin..]));
    let read = http::pieces::read(&request, None, RECEIVED);
    let read = read.unwrap_or_else(|error| panic!("{error}: {json}"));
    assert_eq!(read.inputs.len(), spec.inputs.len());
    for ((input, tensor), spec) in read
        .inputs
        .iter()
        .zip(valid.inputs.iter().flatten())
        .zip(&spec.inputs)
    {
        assert_eq!(&*input.name, &*spec.name);
        assert_eq!(
            (input.datatype, &input.shape),
            (tensor.datatype, &tensor.shape)
        );
        if !has_nan(tensor) {
            assert_eq!(input.data, tensor.data, "{json}");
        }
    }
}

fn answer_of(outputs: Vec<(std::sync::Arc<str>, Tensor)>) -> InferResponse {
    InferResponse {
        model_name: "fuzzed".into(),
        model_version: 1,
        id: String::new(),
        outputs,
        cold_start: None,
        placed: None,
    }
}

/// Whether JSON can carry it.
fn is_text(tensor: &Tensor) -> bool {
    let elements = match tensor.datatype {
        DataType::Bytes => elements_of(&tensor.data).expect("it was valid"),
        _ => return true,
    };
    elements
        .iter()
        .all(|element| std::str::from_utf8(element).is_ok())
}

/// JSON has one NaN, the raw layout has many.
fn has_nan(tensor: &Tensor) -> bool {
    let data = &tensor.data;
    match tensor.datatype {
        DataType::Fp16 => data
            .as_chunks()
            .0
            .iter()
            .any(|&it| half::f16::from_le_bytes(it).is_nan()),
        DataType::Bf16 => data
            .as_chunks()
            .0
            .iter()
            .any(|&it| half::bf16::from_le_bytes(it).is_nan()),
        DataType::Fp32 => data
            .as_chunks()
            .0
            .iter()
            .any(|&it| f32::from_le_bytes(it).is_nan()),
        DataType::Fp64 => data
            .as_chunks()
            .0
            .iter()
            .any(|&it| f64::from_le_bytes(it).is_nan()),
        _ => false,
    }
}

/// Asserts that two requests ask for the same.
pub(super) fn assert_same(read: &RawRequest, expected: &RawRequest) {
    assert_eq!(read.id, expected.id);
    assert_eq!(read.outputs, expected.outputs);
    assert_eq!(read.inputs.len(), expected.inputs.len());
    for (read, expected) in read.inputs.iter().zip(&expected.inputs) {
        assert_eq!(read.name, expected.name);
        assert_eq!(read.datatype, expected.datatype);
        assert_eq!(read.shape, expected.shape);
        assert_eq!(read.data, expected.data);
    }
}

/// The request over gRPC, its tensors raw; none when that would mean something else.
pub(super) fn as_message(request: &RawRequest) -> Option<pb::ModelInferRequest> {
    if request.wishes.is_some() {
        return None;
    }
    let inputs = request.inputs.iter().map(|input| InferInputTensor {
        name: input.name.clone(),
        datatype: input.datatype.name().to_owned(),
        shape: input.shape.to_vec(),
        ..Default::default()
    });
    let outputs = request
        .outputs
        .iter()
        .map(|name| InferRequestedOutputTensor {
            name: name.clone(),
            ..Default::default()
        });
    Some(pb::ModelInferRequest {
        id: request.id.clone(),
        inputs: inputs.collect(),
        outputs: outputs.collect(),
        raw_input_contents: request
            .inputs
            .iter()
            .map(|input| input.data.clone())
            .collect(),
        ..Default::default()
    })
}

/// Sends the request through both protocols, which read the same of it.
pub(super) fn survives_both_protocols(request: &RawRequest) {
    let Some(message) = as_message(request) else {
        return;
    };
    let limits = RequestLimits::default();
    let is_allowed = |input: &RawInput| {
        input.shape.len() <= limits.dimensions && limits.check_elements(&input.shape, "").is_ok()
    };
    if !request.inputs.iter().all(is_allowed) {
        return;
    }
    let message = Bytes::from(message.encode_to_vec());
    let read = grpc::pieces::read(message, MESSAGE_LIMIT, RECEIVED);
    assert_same(&read.expect("gRPC carries what is allowed"), request);

    let carries = |input: &RawInput| {
        input.shape.len() <= HTTP_DIMS && input.shape.iter().all(|&dim| dim >= 0)
    };
    let count = request.inputs.len().max(request.outputs.len());
    if count > HTTP_TENSORS || !request.inputs.iter().all(carries) {
        return;
    }
    let inputs: Vec<_> = request
        .inputs
        .iter()
        .map(|input| {
            serde_json::json!({
                "name": input.name, "datatype": input.datatype.name(), "shape": input.shape.as_slice(),
                "parameters": {"binary_data_size": input.data.len()},
            })
        })
        .collect();
    let outputs = request
        .outputs
        .iter()
        .map(|name| serde_json::json!({"name": name}));
    let outputs: Vec<_> = outputs.collect();
    let header = serde_json::json!({"id": request.id, "inputs": inputs, "outputs": outputs});
    let mut body = header.to_string().into_bytes();
    let header_length = body.len();
    for input in &request.inputs {
        body.extend_from_slice(&input.data);
    }
    let read = http::pieces::read(&body.into(), Some(header_length), RECEIVED);
    assert_same(&read.expect("HTTP carries it as well"), request);
}

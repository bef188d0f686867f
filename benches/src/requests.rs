//! The model and the messages that the hot paths are measured with.

use std::sync::Arc;

use bytes::Bytes;
use dormouse_core::datatype::DataType;
use dormouse_model_store::config::{self, ConfigDefaults, ResolveInput};
use dormouse_model_store::graph::{GraphSummary, GraphTensor, GraphType};
use dormouse_model_store::spec::ModelSpec;
use dormouse_proto::inference as pb;
use dormouse_server::request::{InferResponse, Tensor};
use prost::Message;

/// FP32 values or strings per request.
pub(crate) const ELEMENTS: usize = 16;
/// What the model is called, here and in the repository of `echo`.
pub(crate) const MODEL: &str = "identity";

/// A model that takes and gives rows of sixteen elements.
pub(crate) fn spec(datatype: DataType) -> ModelSpec {
    let tensor = |name: &str| GraphTensor {
        name: name.to_owned(),
        kind: GraphType::Tensor(datatype),
        dims: Some([-1, ELEMENTS as i64].into_iter().collect()),
    };
    let graph = GraphSummary {
        ir_version: 10,
        inputs: vec![tensor("INPUT")],
        outputs: vec![tensor("OUTPUT")],
        ..GraphSummary::default()
    };
    let name: Arc<str> = MODEL.into();
    let input = ResolveInput {
        name,
        config: Default::default(),
        graph: &graph,
        defaults: &ConfigDefaults::default(),
    };
    config::resolve(input).expect("the graph needs no configuration")
}

/// Sixteen different numbers in the raw layout.
pub(crate) fn numbers() -> Bytes {
    (0..ELEMENTS)
        .flat_map(|number| (number as f32 * 0.37).to_le_bytes())
        .collect()
}

/// Sixteen words in the raw layout.
pub(crate) fn words() -> Bytes {
    [4, 0, 0, 0, b'w', b'a', b'k', b'e'].repeat(ELEMENTS).into()
}

/// A `ModelInferRequest` as it is on the wire.
pub(crate) fn grpc_message(datatype: DataType, data: Bytes) -> Bytes {
    let request = pb::ModelInferRequest {
        model_name: MODEL.to_owned(),
        id: "request-1".to_owned(),
        inputs: vec![pb::model_infer_request::InferInputTensor {
            name: "INPUT".to_owned(),
            datatype: datatype.name().to_owned(),
            shape: vec![1, ELEMENTS as i64],
            ..Default::default()
        }],
        raw_input_contents: vec![data],
        ..Default::default()
    };
    request.encode_to_vec().into()
}

/// A JSON header with a binary tail, and the header's length.
pub(crate) fn http_binary() -> (Bytes, usize) {
    let data = numbers();
    let header = serde_json::json!({
        "id": "request-1",
        "inputs": [{
            "name": "INPUT", "shape": [1, ELEMENTS], "datatype": "FP32",
            "parameters": {"binary_data_size": data.len()},
        }],
        "outputs": [{"name": "OUTPUT", "parameters": {"binary_data": true}}],
    })
    .to_string();
    let body = [header.as_bytes(), &data].concat();
    (body.into(), header.len())
}

/// A request that is all JSON.
pub(crate) fn http_json() -> Bytes {
    let numbers: Vec<f32> = (0..ELEMENTS).map(|number| number as f32 * 0.37).collect();
    serde_json::json!({
        "id": "request-1",
        "inputs": [{
            "name": "INPUT", "shape": [1, ELEMENTS], "datatype": "FP32", "data": numbers,
        }],
    })
    .to_string()
    .into()
}

/// An answer of one row.
pub(crate) fn response() -> InferResponse {
    InferResponse {
        model_name: MODEL.into(),
        model_version: 1,
        id: "request-1".to_owned(),
        outputs: vec![(
            "OUTPUT".into(),
            Tensor {
                datatype: DataType::Fp32,
                shape: [1, ELEMENTS as i64].into_iter().collect(),
                data: numbers(),
            },
        )],
        cold_start: None,
        placed: None,
    }
}

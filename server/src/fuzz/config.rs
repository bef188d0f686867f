//! Model configurations: `config.pbtxt`, and the JSON that a load request may bring instead.

use std::sync::LazyLock;

use bytes::Bytes;
use dormouse_core::datatype::DataType;
use dormouse_core::sequence::{SequenceId, Step};
use dormouse_core::shape::{Shape, byte_count};
use dormouse_model_store::config::{
    ConfigDefaults, ConfigSyntaxError, ResolveInput, json, resolve, text as pbtxt,
};
use dormouse_model_store::graph::{GraphSummary, GraphTensor, GraphType};
use dormouse_model_store::spec::ModelSpec;
use dormouse_proto::inference as pb;
use prost_reflect::{DescriptorPool, DynamicMessage};

use super::allocations::within;
use super::assert_presentable;
use super::requests::RECEIVED;
use crate::request::{RawInput, RawRequest, SequenceStep};
use crate::validate::validate;

/// A byte or two of text can be a message of its own, and lists grow by doubling.
const TIMES_THE_TEXT: usize = 512;
const ASIDE: usize = 256 << 10;
/// A request that needs more is not made.
const MAX_REQUEST: u64 = 1 << 20;

static POOL: LazyLock<DescriptorPool> = LazyLock::new(|| {
    DescriptorPool::decode(dormouse_proto::FILE_DESCRIPTOR_SET).expect("the build wrote them")
});

pub(super) fn text(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else {
        return false;
    };
    // What is made once belongs to no input.
    LazyLock::force(&POOL);
    let _ = (pbtxt::parse(""), json::from_json("{}"));
    let read = match text.starts_with('{') {
        true => json::from_json,
        false => pbtxt::parse,
    };
    let config = match within(text.len() * TIMES_THE_TEXT + ASIDE, || read(text)) {
        Ok(config) => config,
        Err(error) => {
            assert_place(text, &error);
            return false;
        }
    };
    let shown = json::to_json(&config);
    let again = json::from_json(&shown.to_string()).expect("what is written is read");
    assert_eq!(json::to_json(&again), shown);
    let again = pbtxt::parse(&written(&config)).expect("another's text is read");
    assert_eq!(json::to_json(&again), shown);

    for graph in [&*NUMBERS, &*WORDS] {
        let input = ResolveInput {
            name: config.name.as_str().into(),
            config: config.clone(),
            graph,
            defaults: &ConfigDefaults::default(),
        };
        match resolve(input) {
            Ok(spec) => is_served(&spec, graph),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    true
}

/// An error points at a place in the text.
fn assert_place(text: &str, error: &ConfigSyntaxError) {
    assert_presentable(&error.message);
    let lines = text.split('\n').count();
    let line = error.line as usize;
    assert!(
        (1..=lines).contains(&line),
        "line {line} of {lines}: {error}"
    );
    assert!(error.column >= 1);
}

/// The configuration in the text format, by a writer that is not ours.
fn written(config: &pb::ModelConfig) -> String {
    let descriptor = POOL.get_message_by_name("inference.ModelConfig");
    let mut message = DynamicMessage::new(descriptor.expect("the schema has it"));
    message
        .transcode_from(config)
        .expect("they are of one schema");
    message.to_text_format()
}

/// A model that came of it takes the requests that its own metadata describes, and completing its
/// configuration once more changes nothing.
fn is_served(spec: &ModelSpec, graph: &GraphSummary) {
    let input = ResolveInput {
        name: spec.name.clone(),
        config: spec.config.clone(),
        graph,
        defaults: &ConfigDefaults::default(),
    };
    let again = resolve(input).expect("a complete configuration is one");
    assert_eq!(again.inputs, spec.inputs);
    assert_eq!(again.outputs, spec.outputs);
    assert_eq!(again.max_batch_size, spec.max_batch_size);
    for open in [1, 3] {
        let Some(request) = request_for(spec, open) else {
            return;
        };
        if let Err(error) = validate(spec, request) {
            panic!("a request after the model's own signature is refused: {error}");
        }
    }
}

/// A request after the model's metadata, `open` where a dimension is; none when it would be large.
fn request_for(spec: &ModelSpec, open: i64) -> Option<RawRequest> {
    let mut inputs = Vec::new();
    for tensor in &spec.inputs {
        let mut shape: Shape = tensor.dims.clone();
        for dim in shape.iter_mut().filter(|dim| **dim == -1) {
            *dim = open;
        }
        if spec.max_batch_size > 0 {
            shape.insert(0, 1);
        }
        let length = match tensor.datatype {
            DataType::Bytes => dormouse_core::shape::element_count(&shape)?.checked_mul(4)?,
            datatype => byte_count(datatype, &shape)?,
        };
        if length > MAX_REQUEST {
            return None;
        }
        inputs.push(RawInput {
            name: tensor.name.to_string(),
            datatype: tensor.datatype,
            shape,
            data: Bytes::from(vec![0; length as usize]),
        });
    }
    let step = Step {
        id: SequenceId::Number(1),
        start: true,
        end: false,
    };
    Some(RawRequest {
        inputs,
        received: RECEIVED,
        sequence: Some(Box::new(SequenceStep { step, turn: None })),
        ..RawRequest::default()
    })
}

static NUMBERS: LazyLock<GraphSummary> = LazyLock::new(|| graph(DataType::Fp32, 2));
static WORDS: LazyLock<GraphSummary> = LazyLock::new(|| graph(DataType::Bytes, 1));

/// A graph of the names that the seeds use.
fn graph(datatype: DataType, inputs: usize) -> GraphSummary {
    let tensor = |side: &str, index: usize| GraphTensor {
        name: format!("{side}{index}"),
        kind: GraphType::Tensor(datatype),
        dims: Some([-1, 4].into_iter().collect()),
    };
    GraphSummary {
        ir_version: 10,
        inputs: (0..inputs).map(|index| tensor("INPUT", index)).collect(),
        outputs: vec![tensor("OUTPUT", 0)],
        ..GraphSummary::default()
    }
}

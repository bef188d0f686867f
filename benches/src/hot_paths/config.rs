//! Reading `config.pbtxt`: what start-up does for every model.

use std::hint::black_box;

use dormouse_core::datatype::DataType;
use dormouse_model_store::config::{self, ConfigDefaults, ResolveInput, text};
use dormouse_model_store::graph::{GraphSummary, GraphTensor, GraphType};

use super::{Step, Workload};

pub const WORKLOADS: &[Workload] = &[
    Workload {
        name: "config: parse a classifier's",
        prepare: parse,
    },
    Workload {
        name: "config: check and complete a classifier's",
        prepare: resolve,
    },
];

const CLASSIFIER: &str = include_str!("../../../configs/models/classifier.pbtxt");

fn parse() -> Step {
    Box::new(|| {
        black_box(text::parse(black_box(CLASSIFIER)).expect("the example is well-formed"));
    })
}

fn resolve() -> Step {
    let tensor = |name: &str, dims: &[i64]| GraphTensor {
        name: name.to_owned(),
        kind: GraphType::Tensor(DataType::Fp32),
        dims: Some(dims.iter().copied().collect()),
    };
    let graph = GraphSummary {
        ir_version: 10,
        inputs: vec![tensor("image", &[-1, 3, 224, 224])],
        outputs: vec![tensor("scores", &[-1, 1000])],
        ..GraphSummary::default()
    };
    let parsed = text::parse(CLASSIFIER).expect("the example is well-formed");
    let defaults = ConfigDefaults::default();
    Box::new(move || {
        let input = ResolveInput {
            name: "classifier".into(),
            config: black_box(parsed.clone()),
            graph: &graph,
            defaults: &defaults,
        };
        black_box(config::resolve(input).expect("the example fits its graph"));
    })
}

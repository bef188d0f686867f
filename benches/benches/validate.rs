//! Comparing a request with its model's signature.

use std::hint::black_box;
use std::sync::Arc;

use bytes::Bytes;
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use dormouse_core::datatype::DataType;
use dormouse_model_store::config::{self, ConfigDefaults, ResolveInput};
use dormouse_model_store::graph::{GraphSummary, GraphTensor, GraphType};
use dormouse_model_store::spec::ModelSpec;
use dormouse_server::request::{RawInput, RawRequest};
use dormouse_server::validate::validate;

fn spec(datatype: DataType) -> ModelSpec {
    let tensor = |name: &str| GraphTensor {
        name: name.to_owned(),
        kind: GraphType::Tensor(datatype),
        dims: Some([-1, 16].into_iter().collect()),
    };
    let graph = GraphSummary {
        ir_version: 10,
        inputs: vec![tensor("INPUT")],
        outputs: vec![tensor("OUTPUT")],
        ..GraphSummary::default()
    };
    let name: Arc<str> = "identity".into();
    let input = ResolveInput {
        name,
        config: Default::default(),
        graph: &graph,
        defaults: &ConfigDefaults::default(),
    };
    config::resolve(input).expect("the graph needs no configuration")
}

fn request(datatype: DataType, data: Bytes) -> RawRequest {
    RawRequest {
        inputs: vec![RawInput {
            name: "INPUT".to_owned(),
            datatype,
            shape: [1, 16].into_iter().collect(),
            data,
        }],
        ..RawRequest::default()
    }
}

fn benches(criterion: &mut Criterion) {
    let numbers = spec(DataType::Fp32);
    let data = Bytes::from(vec![0; 64]);
    criterion.bench_function("validate: one FP32 input", |bencher| {
        bencher.iter_batched(
            || request(DataType::Fp32, data.clone()),
            |request| black_box(validate(&numbers, request)),
            BatchSize::SmallInput,
        );
    });
    let strings = spec(DataType::Bytes);
    let encoded = Bytes::from([4, 0, 0, 0, b'w', b'a', b'k', b'e'].repeat(16));
    criterion.bench_function("validate: sixteen strings", |bencher| {
        bencher.iter_batched(
            || request(DataType::Bytes, encoded.clone()),
            |request| black_box(validate(&strings, request)),
            BatchSize::SmallInput,
        );
    });
}

criterion_group!(group, benches);
criterion_main!(group);

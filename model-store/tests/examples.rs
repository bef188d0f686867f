//! Every model configuration under `configs/models` is one that a server takes.

use std::path::Path;

use dormouse_core::datatype::DataType;
use dormouse_model_store::config::{ConfigDefaults, ResolveInput, resolve, text};
use dormouse_model_store::graph::{GraphSummary, GraphTensor, GraphType};
use dormouse_proto::inference as pb;

/// A graph that has just the tensors that the configuration names.
fn graph_for(config: &pb::ModelConfig) -> GraphSummary {
    let tensor = |name: &str, data_type: pb::DataType, dims: &[i64]| GraphTensor {
        name: name.to_owned(),
        kind: GraphType::Tensor(
            DataType::from_name(data_type.as_str_name().trim_start_matches("TYPE_"))
                .expect("examples use plain types"),
        ),
        dims: Some(std::iter::once(-1).chain(dims.iter().copied()).collect()),
    };
    GraphSummary {
        ir_version: 10,
        inputs: config
            .input
            .iter()
            .map(|input| tensor(&input.name, input.data_type(), &input.dims))
            .collect(),
        outputs: config
            .output
            .iter()
            .map(|output| tensor(&output.name, output.data_type(), &output.dims))
            .collect(),
        ..GraphSummary::default()
    }
}

#[test]
fn every_example_configuration_resolves_without_a_warning() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/models");
    let mut seen = 0;
    for entry in folder.read_dir().unwrap() {
        let path = entry.unwrap().path();
        let config = text::parse(&std::fs::read_to_string(&path).unwrap())
            .unwrap_or_else(|error| panic!("{}:{error}", path.display()));
        assert_eq!(
            Some(config.name.as_str()),
            path.file_stem().unwrap().to_str()
        );
        let graph = graph_for(&config);
        let spec = resolve(ResolveInput {
            name: config.name.as_str().into(),
            config: config.clone(),
            graph: &graph,
            defaults: &ConfigDefaults::default(),
        })
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert_eq!(spec.warnings, Vec::<String>::new(), "{}", path.display());
        seen += 1;
    }
    assert!(seen >= 3);
}

//! Every model configuration under `configs/models` is one that a server takes.

use std::path::Path;

use dormouse_core::datatype::DataType;
use dormouse_model_store::config::{ConfigDefaults, ResolveInput, resolve, text};
use dormouse_model_store::graph::{GraphSummary, GraphTensor, GraphType};
use dormouse_proto::inference as pb;
use pb::model_config::SchedulingChoice;

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
    let mut graph = GraphSummary {
        ir_version: 10,
        inputs: config
            .input
            .iter()
            .map(|input| {
                let dims = if input.allow_ragged_batch {
                    &[]
                } else {
                    &input.dims[..]
                };
                tensor(&input.name, input.data_type(), dims)
            })
            .collect(),
        outputs: config
            .output
            .iter()
            .map(|output| tensor(&output.name, output.data_type(), &output.dims))
            .collect(),
        ..GraphSummary::default()
    };
    for made in &config.batch_input {
        let targets = made.target_name.iter();
        let targets = targets.map(|name| tensor(name, made.data_type(), &[]));
        graph.inputs.extend(targets);
    }
    if let Some(SchedulingChoice::SequenceBatching(batching)) = &config.scheduling_choice {
        for control in &batching.control_input {
            let mark = tensor(&control.name, pb::DataType::TypeInt32, &[1]);
            graph.inputs.push(mark);
        }
        for state in &batching.state {
            let (datatype, dims) = (state.data_type(), &state.dims);
            graph.inputs.push(tensor(&state.input_name, datatype, dims));
            graph
                .outputs
                .push(tensor(&state.output_name, datatype, dims));
        }
    }
    graph
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

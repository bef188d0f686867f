//! What is filled in from the graph.

use super::*;

#[test]
fn a_bare_model_is_completed_as_triton_completes_it() {
    let spec = spec_of(&batchable(), "");
    let mut config = text::parse(
        r#"name: "m" platform: "onnxruntime_onnx" backend: "onnxruntime" max_batch_size: 4
           default_model_filename: "model.onnx" version_policy { latest { num_versions: 1 } }
           input { name: "x" data_type: TYPE_FP32 dims: 3 }
           output { name: "y" data_type: TYPE_FP32 dims: 10 }
           dynamic_batching { preferred_batch_size: 4 }
           instance_group { name: "m" kind: KIND_CPU count: 2 }
           optimization { input_pinned_memory { enable: true } output_pinned_memory { enable: true } }"#,
    )
    .unwrap();
    assert_eq!(spec.config, config);
    assert_eq!(spec.warnings, [] as [String; 0]);
    assert_eq!((spec.max_batch_size, spec.concurrency), (4, 2));
    assert_eq!(spec.inputs[0].dims[..], [3]);
    assert_eq!(spec.inputs[0].metadata_shape(4), [-1, 3]);
    assert_eq!(spec.batching.unwrap().preferred_rows, [4]);
    assert_eq!(spec.model_filename, "model.onnx");
    // A completed configuration is complete.
    config.optimization = None;
    let again = resolve(ResolveInput {
        name: "m".into(),
        config: config.clone(),
        graph: &batchable(),
        defaults: &ConfigDefaults::default(),
    })
    .unwrap();
    assert_eq!(again.config.input, config.input);
    assert_eq!(again.max_batch_size, 4);
}

#[test]
fn a_batch_size_is_assumed_only_when_every_tensor_allows_it_and_nothing_speaks_against_it() {
    let size = |graph: &GraphSummary, text: &str| spec_of(graph, text).max_batch_size;
    let graph = batchable();
    assert_eq!(size(&graph, ""), 4);
    assert_eq!(size(&graph, "max_batch_size: 2"), 2);
    // A signature in full, with the batch dimension among its dims.
    let full = "input { name: 'x' data_type: TYPE_FP32 dims: [-1, 3] }
                output { name: 'y' data_type: TYPE_FP32 dims: [-1, 10] }";
    assert_eq!(size(&graph, full), 0);
    assert_eq!(size(&graph, "input { name: 'x' dims: [-1, 3] }"), 0);
    assert_eq!(size(&graph, "input { name: 'x' dims: [3] }"), 4);
    let mut fixed = batchable();
    fixed.outputs[0].dims = Some(Shape::from_slice(&[1, 10]));
    assert_eq!(size(&fixed, ""), 0);
    let mut scalar = batchable();
    scalar.outputs.push(tensor("loss", DataType::Fp32, &[]));
    assert_eq!(size(&scalar, ""), 0);
    let one = ConfigDefaults {
        default_max_batch_size: 1,
        ..Default::default()
    };
    let spec = resolve_with(&graph, &one, "").unwrap();
    assert_eq!((spec.max_batch_size, spec.batching), (1, None));
}

#[test]
fn without_auto_complete_the_signature_must_be_there() {
    let strict = ConfigDefaults {
        auto_complete: false,
        ..Default::default()
    };
    let resolved = resolve_with(&batchable(), &strict, "max_batch_size: 8");
    assert_eq!(
        resolved.unwrap_err().to_string(),
        "model 'm': the graph needs input 'x', which the configuration does not list"
    );
    let text = "max_batch_size: 8 input { name: 'x' data_type: TYPE_FP32 dims: 3 }
                output { name: 'y' data_type: TYPE_FP32 dims: 10 }";
    let spec = resolve_with(&batchable(), &strict, text).unwrap();
    assert_eq!(
        spec.batching, None,
        "batching is only assumed by auto-complete"
    );
    assert_eq!(spec.concurrency, 2);
    assert_eq!(spec.platform.as_ref(), "onnxruntime_onnx");
}

#[test]
fn missing_parts_of_a_listed_tensor_are_filled_in() {
    let spec = spec_of(
        &batchable(),
        "max_batch_size: 8 input { name: 'x' } output { name: 'y' dims: 10 }",
    );
    assert_eq!(spec.inputs[0].datatype, DataType::Fp32);
    assert_eq!(spec.inputs[0].dims[..], [3]);
    assert_eq!(spec.config.output[0].data_type(), pb::DataType::TypeFp32);
}

#[test]
fn a_scalar_is_one_on_the_wire_and_nothing_inside() {
    let graph = GraphSummary {
        inputs: vec![tensor("x", DataType::Fp32, &[])],
        outputs: vec![tensor("y", DataType::Fp32, &[])],
        ..Default::default()
    };
    let spec = spec_of(&graph, "");
    assert_eq!(spec.config.input[0].dims, [1]);
    assert_eq!(spec.config.input[0].reshape, None);
    assert_eq!(spec.inputs[0].dims[..], [1]);
    assert_eq!(spec.inputs[0].reshape.as_deref(), Some(&[][..]));
    assert!(spec.inputs[0].admits(&[1]) && spec.inputs[0].admits(&[]));
    assert!(!spec.inputs[0].admits(&[2]) && !spec.inputs[0].admits(&[1, 1]));
    assert_eq!(
        error_of(&graph, "input { name: 'x' dims: 2 }"),
        "model 'm': input 'x': the configuration has dims [2], the graph a single value (dims [1])"
    );

    // One value per row: the same, beside the batch dimension.
    let rows = GraphSummary {
        inputs: vec![tensor("x", DataType::Fp32, &[-1])],
        outputs: vec![tensor("y", DataType::Fp32, &[-1])],
        ..Default::default()
    };
    let spec = spec_of(&rows, "");
    assert_eq!(spec.max_batch_size, 4);
    assert_eq!(spec.inputs[0].metadata_shape(4), [-1, 1]);
    assert_eq!(spec.inputs[0].reshape.as_deref(), Some(&[][..]));
    assert!(!spec.inputs[0].admits(&[2]));
}

#[test]
fn a_tensor_of_unknown_rank_needs_its_owners_word_when_it_is_an_input() {
    let graph = GraphSummary {
        inputs: vec![unranked("x")],
        outputs: vec![unranked("y")],
        ..Default::default()
    };
    assert_eq!(
        error_of(&graph, ""),
        "model 'm': input 'x' dims: expected dims, which neither the configuration nor the graph \
         tells, found none"
    );
    let spec = spec_of(&graph, "input { name: 'x' dims: [ 2, -1 ] }");
    assert_eq!(spec.inputs[0].dims[..], [2, -1]);
    assert_eq!(spec.outputs[0].dims[..], [-1]);
    assert_eq!(
        spec.warnings,
        ["output: the graph does not tell the rank of 'y'; its dims are shown as [-1]"]
    );
    let text = "max_batch_size: 8 input { name: 'x' dims: 2 } output { name: 'y' dims: 5 }";
    assert_eq!(spec_of(&graph, text).max_batch_size, 8);
}

#[test]
fn what_v2_cannot_carry_is_left_out_of_the_outputs_and_refused_as_an_input() {
    let mut graph = batchable();
    graph.outputs.push(sequence("probabilities"));
    let spec = spec_of(&graph, "");
    assert_eq!((spec.outputs.len(), spec.max_batch_size), (1, 4));
    assert_eq!(
        spec.warnings,
        [
            "output: 'probabilities' is of type seq(map(int64,tensor(float))), which the v2 protocol \
          cannot carry; it is left out"
        ]
    );
    let listed = error_of(
        &graph,
        "output { name: 'probabilities' data_type: TYPE_FP32 dims: 1 }",
    );
    assert_eq!(
        listed,
        "model 'm': output 'probabilities' is of type seq(map(int64,tensor(float))), which the v2 \
         protocol cannot carry"
    );
    graph.inputs.push(sequence("s"));
    assert!(error_of(&graph, "").starts_with("model 'm': input 's' is of type seq(map("));
}

#[test]
fn an_initializer_may_be_offered_as_an_optional_input() {
    let graph = GraphSummary {
        inputs: vec![tensor("x", DataType::Fp32, &[2])],
        optional_inputs: vec![tensor("scale", DataType::Fp32, &[1])],
        outputs: vec![tensor("y", DataType::Fp32, &[2])],
        ..Default::default()
    };
    assert_eq!(spec_of(&graph, "").inputs.len(), 1);
    let spec = spec_of(
        &graph,
        "input [ { name: 'x' }, { name: 'scale' optional: true } ]",
    );
    assert!(spec.inputs[1].optional && spec.inputs[1].dims[..] == [1]);
    assert_eq!(
        error_of(&graph, "input { name: 'x' optional: true }"),
        "model 'm': input 'x' optional: expected false, since the graph has no value of its own \
         for it, found true"
    );
    check_errors(
        &["input { name: 'x' optional: true }"],
        expect![[r#"
            model 'm': input 'x' optional: expected false in a model with a batch dimension, found true
        "#]],
    );
}

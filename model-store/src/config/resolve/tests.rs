//! What a configuration and a graph make of each other.

mod batching;
mod completion;

use std::time::Duration;

use dormouse_core::datatype::DataType;
use dormouse_core::shape::Shape;
use expect_test::{Expect, expect};

use super::*;
use crate::graph::{GraphTensor, GraphType};
use crate::spec::{GraphLevel, KeepAliveSpec, WarmupData};

fn tensor(name: &str, datatype: DataType, dims: &[i64]) -> GraphTensor {
    GraphTensor {
        name: name.to_owned(),
        kind: GraphType::Tensor(datatype),
        dims: Some(Shape::from_slice(dims)),
    }
}

fn unranked(name: &str) -> GraphTensor {
    GraphTensor {
        dims: None,
        ..tensor(name, DataType::Fp32, &[])
    }
}

fn sequence(name: &str) -> GraphTensor {
    GraphTensor {
        kind: GraphType::Other("seq(map(int64,tensor(float)))"),
        ..tensor(name, DataType::Fp32, &[])
    }
}

/// `x: FP32[-1,3] → y: FP32[-1,10]`.
fn batchable() -> GraphSummary {
    GraphSummary {
        inputs: vec![tensor("x", DataType::Fp32, &[-1, 3])],
        outputs: vec![tensor("y", DataType::Fp32, &[-1, 10])],
        ..Default::default()
    }
}

fn resolve_with(
    graph: &GraphSummary,
    defaults: &ConfigDefaults,
    text: &str,
) -> Result<ModelSpec, ConfigError> {
    resolve(ResolveInput {
        name: "m".into(),
        config: text::parse(text).unwrap(),
        graph,
        defaults,
    })
}

fn spec_of(graph: &GraphSummary, text: &str) -> ModelSpec {
    resolve_with(graph, &ConfigDefaults::default(), text).unwrap()
}

fn error_of(graph: &GraphSummary, text: &str) -> String {
    match resolve_with(graph, &ConfigDefaults::default(), text) {
        Ok(spec) => panic!("{text}: {spec:?}"),
        Err(error) => error.to_string(),
    }
}

/// The errors of several configurations for the batchable graph, a line each.
fn check_errors(texts: &[&str], expected: Expect) {
    let errors: Vec<_> = texts
        .iter()
        .map(|text| error_of(&batchable(), text))
        .collect();
    expected.assert_eq(&(errors.join("\n") + "\n"));
}

fn check_warnings(text: &str, expected: Expect) {
    let warnings = spec_of(&batchable(), text).warnings;
    expected.assert_eq(
        &warnings
            .iter()
            .map(|line| format!("{line}\n"))
            .collect::<String>(),
    );
}

#[test]
fn identity_must_fit_folder_and_server() {
    check_errors(
        &[
            "name: 'other'",
            "backend: 'python'",
            "platform: 'tensorrt_plan'",
            "backend: 'onnxruntime' platform: 'pytorch_libtorch'",
            "max_batch_size: -1 backend: 'onnxruntime'",
            "default_model_filename: '../../etc/passwd'",
            "default_model_filename: '/model.onnx'",
            "version_policy { specific { } }",
            "version_policy { specific { versions: [1, -2] } }",
        ],
        expect![[r#"
            model 'm': 'name' must be that of the model's folder, found 'other'
            model 'm': backend 'python' is not supported by this server (only 'onnxruntime' is)
            model 'm': backend 'tensorrt_plan' is not supported by this server (only 'onnxruntime' is)
            model 'm': platform: expected 'onnxruntime_onnx' with backend 'onnxruntime', found 'pytorch_libtorch'
            model 'm': max_batch_size: expected 0 or more, found -1
            model 'm': default_model_filename: expected a path inside the version's folder, found '../../etc/passwd'
            model 'm': default_model_filename: expected a path inside the version's folder, found '/model.onnx'
            model 'm': version_policy.specific.versions: expected at least one version, found none
            model 'm': version_policy.specific.versions: expected versions from 1, found -2
        "#]],
    );
}

#[test]
fn tensors_are_held_against_the_graph() {
    check_errors(
        &[
            "input { name: 'X' }",
            "input { }",
            "input [ { name: 'x' }, { name: 'x' } ]",
            "input { name: 'x' data_type: TYPE_INT64 }",
            "input { name: 'x' data_type: 77 }",
            "input { name: 'x' dims: [ 0 ] }",
            "input { name: 'x' dims: [ -2 ] }",
            "max_batch_size: 8 input { name: 'x' dims: [ 4 ] }",
            "max_batch_size: 8 input { name: 'x' dims: [ -1 ] }",
            "max_batch_size: 8 input { name: 'x' dims: [ 3, 1 ] }",
            "max_batch_size: 8 output { name: 'y' dims: [ -1 ] }",
            "input { name: 'x' dims: [ -1, 4 ] } output { name: 'y' dims: [ -1, 10 ] }",
            "input { name: 'x' dims: [ -1, 3 ] } output { name: 'y' dims: [ 2, 10 ] }",
            "max_batch_size: 8 input { name: 'x' dims: 6 reshape { shape: 3 } }",
            "max_batch_size: 8 input { name: 'x' dims: 3 reshape { shape: 0 } }",
            "input { name: 'x' dims: [ 1 ] reshape { } } output { name: 'y' dims: [ 1 ] }",
            "max_batch_size: 8 input { name: 'x' dims: 3 format: FORMAT_NHWC }",
        ],
        expect![[r#"
            model 'm': input 'X' is not in the graph, which has 'x' (did you mean 'x'?)
            model 'm': input.name: expected a name, found none
            model 'm': input: expected every name once, found 'x' twice
            model 'm': input 'x': the configuration has TYPE_INT64, the graph TYPE_FP32
            model 'm': input 'x' data_type: expected an element type, found 77
            model 'm': input 'x' dims: expected sizes from 1, or -1 for any, found [0]
            model 'm': input 'x' dims: expected sizes from 1, or -1 for any, found [-2]
            model 'm': input 'x': the configuration has [-1,4] with the batch dimension, the graph [-1,3]
            model 'm': input 'x': the configuration has [-1,-1] with the batch dimension, the graph [-1,3]
            model 'm': input 'x': the configuration has [-1,3,1] with the batch dimension, the graph [-1,3]
            model 'm': output 'y': the configuration has [-1,-1] with the batch dimension, the graph [-1,10]
            model 'm': input 'x': the configuration has [-1,4], the graph [-1,3]
            model 'm': output 'y': the configuration has [2,10], the graph [-1,10]
            model 'm': input 'x' reshape.shape: expected as many elements as dims [6], found [3]
            model 'm': input 'x' reshape.shape: expected sizes from 1, or -1 for any, found [0]
            model 'm': input 'x' reshape.shape: expected at least one size in a model without a batch dimension, found none
            model 'm': input 'x' dims: expected 3 sizes, which its format needs, found [3]
        "#]],
    );
    let spec = spec_of(
        &batchable(),
        "max_batch_size: 8 input { name: 'x' dims: [ 1, 3 ] reshape { shape: 3 } }",
    );
    assert_eq!(spec.inputs[0].dims[..], [1, 3]);
    assert_eq!(spec.inputs[0].reshape.as_deref(), Some(&[3][..]));
    let mut fixed = batchable();
    fixed.inputs[0].dims = Some(Shape::from_slice(&[1, 3]));
    assert_eq!(
        error_of(&fixed, "max_batch_size: 8"),
        "model 'm': input 'x': the configuration has max_batch_size 8, for which the first \
         dimension must be open, the graph [1,3]"
    );
    // An open dimension may be narrowed for inputs.
    let narrowed = "input { name: 'x' dims: [ 5, 3 ] }";
    assert_eq!(spec_of(&batchable(), narrowed).inputs[0].dims[..], [5, 3]);
}

#[test]
fn instance_groups_add_up() {
    let count = |text: &str| spec_of(&batchable(), text).concurrency;
    assert_eq!(
        count("instance_group [ { count: 3 }, { count: 2 kind: KIND_CPU } ]"),
        5
    );
    assert_eq!(count("instance_group { kind: KIND_CPU }"), 2);
    assert_eq!(count("instance_group { kind: KIND_MODEL }"), 1);
    let is_default = |text: &str| spec_of(&batchable(), text).concurrency_is_default;
    assert!(is_default(""));
    assert!(is_default("instance_group { kind: KIND_CPU }"));
    assert!(!is_default("instance_group { count: 2 }"));
    let spec = spec_of(
        &batchable(),
        "instance_group [ { kind: KIND_GPU gpus: [0] count: 2 }, { } ]",
    );
    assert_eq!(spec.concurrency, 4);
    assert_eq!(spec.config.instance_group[0].name, "m_0");
    assert_eq!(
        spec.warnings,
        ["instance_group.kind KIND_GPU has no effect: the model runs on the CPU"]
    );
    check_errors(
        &[
            "instance_group { count: 100000 }",
            "instance_group { kind: 9 }",
            "instance_group { kind: KIND_CPU gpus: 0 }",
        ],
        expect![[r#"
            model 'm': instance_group.count: expected counts that sum to 1 to 4096, found 100000
            model 'm': instance_group 'm_0' kind: expected KIND_AUTO, KIND_CPU, KIND_GPU or KIND_MODEL, found 9
            model 'm': instance_group 'm_0' gpus: expected none with KIND_CPU, found [0]
        "#]],
    );
}

#[test]
fn an_arena_that_is_not_there_does_not_shrink() {
    const KEY: &str = "memory.enable_memory_arena_shrinkage";
    let both = spec_of(&batchable(), &parameters(&[(KEY, "gpu:0;cpu:0")]));
    assert!(both.session.shrinks_arena);
    assert_eq!(
        both.warnings,
        [
            "parameters.memory.enable_memory_arena_shrinkage has no effect on gpu:0: the model runs \
          on the CPU, cpu:0"
        ]
    );
    let switched_off = parameters(&[(KEY, "cpu:0"), ("enable_mem_arena", "0")]);
    let spec = spec_of(&batchable(), &switched_off);
    assert!(!spec.session.shrinks_arena);
    assert_eq!(
        spec.warnings,
        ["parameters.memory.enable_memory_arena_shrinkage has no effect: enable_mem_arena is off"]
    );
}

fn parameters(pairs: &[(&str, &str)]) -> String {
    let entry = |(key, value): &(&str, &str)| {
        format!("parameters {{ key: '{key}' value {{ string_value: '{value}' }} }}\n")
    };
    pairs.iter().map(entry).collect()
}

#[test]
fn parameters_set_up_the_session_and_the_lifecycle() {
    let spec = spec_of(
        &batchable(),
        &(parameters(&[
            ("intra_op_thread_count", "3"),
            ("inter_op_thread_count", "0"),
            ("execution_mode", "1"),
            ("enable_mem_arena", "true"),
            ("enable_mem_pattern", "1"),
            ("memory.enable_memory_arena_shrinkage", "cpu:0"),
            ("session.dynamic_block_base", "4"),
            ("share_session_between_instances", "true"),
            ("team", "vision"),
            ("dormouse.keep_alive", "5m"),
            ("dormouse.park_after", "30s"),
            ("dormouse.load", "eager"),
        ]) + "optimization { graph { level: 1 } }"),
    );
    let session = &spec.session;
    assert_eq!(
        (session.intra_op_threads, session.inter_op_threads),
        (Some(3), None)
    );
    assert!(session.parallel_execution);
    assert_eq!(
        (session.memory_arena, session.memory_pattern),
        (Some(true), Some(true))
    );
    assert_eq!(session.graph_level, GraphLevel::Extended);
    assert_eq!(session.entries["session.dynamic_block_base"], "4");
    assert!(session.shrinks_arena);
    assert_eq!(
        spec.lifecycle.keep_alive,
        Some(KeepAliveSpec::For(Duration::from_secs(300)))
    );
    assert_eq!(
        spec.lifecycle.park_after,
        Some(Some(Duration::from_secs(30)))
    );
    assert!(spec.lifecycle.eager);
    assert_eq!(spec.warnings, [] as [String; 0]);

    let defaults = ConfigDefaults {
        intra_op_threads: Some(2),
        inter_op_threads: Some(1),
        ..Default::default()
    };
    let overridden = parameters(&[
        ("intra_op_thread_count", "5"),
        ("dormouse.keep_alive", "forever"),
    ]);
    let spec = resolve_with(&batchable(), &defaults, &overridden).unwrap();
    assert_eq!(spec.session.intra_op_threads, Some(5));
    assert_eq!(spec.session.inter_op_threads, Some(1));
    assert_eq!(spec.lifecycle.keep_alive, Some(KeepAliveSpec::Forever));
    for (text, meant) in [
        ("adaptive", KeepAliveSpec::Adaptive),
        ("off", KeepAliveSpec::Off),
    ] {
        let spec = spec_of(&batchable(), &parameters(&[("dormouse.keep_alive", text)]));
        assert_eq!(spec.lifecycle.keep_alive, Some(meant));
    }
    let never = parameters(&[("dormouse.park_after", "never")]);
    assert_eq!(
        spec_of(&batchable(), &never).lifecycle.park_after,
        Some(None)
    );
    assert_eq!(spec_of(&batchable(), "").lifecycle.keep_alive, None);
}

#[test]
fn wrong_parameters_are_named() {
    let wrong = [
        ("intra_op_thread_count", "many"),
        ("inter_op_thread_count", "-1"),
        ("execution_mode", "2"),
        ("enable_mem_arena", "yes"),
        ("memory.enable_memory_arena_shrinkage", "cpu"),
        ("dormouse.keep_alive", "5 minutes"),
        ("dormouse.load", "now"),
        ("dormouse.batching", "yes"),
        ("dormouse.keepalive", "5s"),
        ("dormouse.colour", "red"),
    ]
    .map(|pair| parameters(&[pair]));
    let mut texts: Vec<_> = wrong.iter().map(String::as_str).collect();
    texts.push("optimization { graph { level: 3 } }");
    check_errors(
        &texts,
        expect![[r#"
            model 'm': parameters.intra_op_thread_count: expected a number of threads up to 1024, or 0 for the default, found 'many'
            model 'm': parameters.inter_op_thread_count: expected a number of threads up to 1024, or 0 for the default, found '-1'
            model 'm': parameters.execution_mode: expected 0 (one operator at a time) or 1 (parallel), found '2'
            model 'm': parameters.enable_mem_arena: expected true, false, 1 or 0, found 'yes'
            model 'm': parameters.memory.enable_memory_arena_shrinkage: expected devices such as 'cpu:0' or 'cpu:0;gpu:0', found 'cpu'
            model 'm': parameters.dormouse.keep_alive: expected a duration such as '500ms', '30s', '5m', '2h', or 'adaptive', 'forever' or 'off', found '5 minutes'
            model 'm': parameters.dormouse.load: expected 'on_demand' or 'eager', found 'now'
            model 'm': parameters.dormouse.batching: expected 'auto' or 'force', found 'yes'
            model 'm': unknown parameter 'dormouse.keepalive' (did you mean 'dormouse.keep_alive'?)
            model 'm': unknown parameter 'dormouse.colour'; known are dormouse.keep_alive, dormouse.park_after, dormouse.load, dormouse.batching, dormouse.weights, dormouse.isolation
            model 'm': optimization.graph.level: expected -1 (basic), 0 (all), 1 (extended) or 2 (none), found 3
        "#]],
    );
    check_warnings(
        &parameters(&[("intra_op_threads_count", "2"), ("gpu_mem_limit", "1")]),
        expect![[r#"
            parameters.gpu_mem_limit has no effect: the model runs on the CPU
            parameters.intra_op_threads_count has no meaning here (did you mean 'intra_op_thread_count'?)
        "#]],
    );
}

#[test]
fn warm_ups_are_complete_and_stay_in_their_folder() {
    let warmup = |inside: &str| format!("max_batch_size: 4 model_warmup {{ name: 'w' {inside} }}");
    let input = |inside: &str| {
        warmup(&format!(
            "batch_size: 2 inputs {{ key: 'x' value {{ data_type: TYPE_FP32 {inside} }} }}"
        ))
    };
    let spec = spec_of(&batchable(), &input("dims: 3 input_data_file: 'sub/x.bin'"));
    let warm = &spec.warmups[0];
    assert_eq!((warm.rows, warm.count, warm.name.as_str()), (2, 1, "w"));
    assert_eq!(
        warm.inputs[0].data,
        WarmupData::File("sub/x.bin".to_owned())
    );
    assert_eq!(warm.inputs[0].dims[..], [3]);
    let skipped = spec_of(&batchable(), &warmup(""));
    assert_eq!(skipped.warmups, []);
    assert_eq!(
        skipped.warnings,
        ["model_warmup 'w' has no effect: its batch_size is 0"]
    );
    let texts = [
        warmup("batch_size: 5"),
        warmup("batch_size: 1"),
        warmup("batch_size: 1 count: 20000"),
        input("dims: 3"),
        input("dims: 4 zero_data: true"),
        input("dims: -1 zero_data: true"),
        input("dims: 3 input_data_file: '../secret'"),
        input("dims: 3 input_data_file: '/etc/passwd'"),
        input("dims: 3 input_data_file: ''"),
        warmup(
            "batch_size: 1 inputs { key: 'x' value { data_type: TYPE_INT8 dims: 3 zero_data: true } }",
        ),
        input("dims: 3 zero_data: true } } inputs { key: 'z' value {"),
    ];
    check_errors(
        &texts.iter().map(String::as_str).collect::<Vec<_>>(),
        expect![[r#"
            model 'm': model_warmup 'w' batch_size: expected 1 to 4, found 5
            model 'm': model_warmup 'w' inputs: expected a value for input 'x', found none
            model 'm': model_warmup 'w' count: expected at most 10000, found 20000
            model 'm': model_warmup 'w' input 'x': expected zero_data, random_data or input_data_file, found none
            model 'm': model_warmup 'w' input 'x' dims: expected sizes from 1 that fit [3] in at most 1073741824 bytes, found [4]
            model 'm': model_warmup 'w' input 'x' dims: expected sizes from 1 that fit [3] in at most 1073741824 bytes, found [-1]
            model 'm': model_warmup 'w' input 'x' input_data_file: expected a path inside the model's warmup folder, found '../secret'
            model 'm': model_warmup 'w' input 'x' input_data_file: expected a path inside the model's warmup folder, found '/etc/passwd'
            model 'm': model_warmup 'w' input 'x' input_data_file: expected a path inside the model's warmup folder, found ''
            model 'm': model_warmup 'w' input 'x' data_type: expected TYPE_FP32, found TYPE_INT8
            model 'm': model_warmup 'w' input 'z': expected an input of the model ('x'), found 'z'
        "#]],
    );
}

#[test]
fn what_would_change_answers_if_ignored_is_refused() {
    check_errors(
        &[
            "sequence_batching { iterative_sequence: true }",
            "ensemble_scheduling {}",
            "platform: 'ensemble'",
            "model_operations { op_library_filename: 'ops.so' }",
            "model_metrics { metric_control { } }",
            "model_metrics { metric_control { metric_identifier { family: 'f' } } }",
        ],
        expect![[r#"
            model 'm': sequence_batching.iterative_sequence is not supported by this server: an ONNX graph cannot ask to be run again
            model 'm': ensemble_scheduling is not supported by this server: its steps would not be run
            model 'm': ensemble_scheduling is not supported by this server: its steps would not be run
            model 'm': model_operations is not supported by this server: libraries of custom operators are not loaded
            model 'm': model_metrics.metric_control.metric_identifier.family: expected a metric's name, found none
            model 'm': model_metrics.metric_control.histogram_options.buckets: expected at least one bound, found none
        "#]],
    );
}

#[test]
fn what_cannot_apply_is_named_once_each() {
    check_warnings(
        r#"runtime: "r" cc_model_filenames { key: "7.5" value: "a" } metric_tags { key: "a" value: "b" }
           model_repository_agents { agents { name: "checksum" } } response_cache { enable: true }
           model_metrics { metric_control { metric_identifier { family: "f" } histogram_options { buckets: 1 } } }
           output { name: "y" label_filename: "labels.txt" is_shape_tensor: true is_non_linear_format_io: true }
           instance_group [ { kind: KIND_GPU rate_limiter { priority: 1 } secondary_devices { device_id: 1 }
                              profile: "0" passive: true host_policy: "gpu_0" }, { kind: KIND_GPU } ]
           optimization { priority: PRIORITY_MAX cuda { graphs: true } gather_kernel_buffer_threshold: 1
             execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } eager_batching: true
             input_pinned_memory { enable: true } output_pinned_memory { enable: true } }
           model_transaction_policy { decoupled: true }"#,
        expect![[r#"
            runtime has no effect: there is one runtime
            is_shape_tensor has no effect: it is for TensorRT models
            is_non_linear_format_io has no effect: it is for TensorRT models
            cc_model_filenames has no effect: the model runs on the CPU
            metric_tags has no effect: metrics carry model and version only
            model_repository_agents has no effect: agents are not supported
            model_metrics has no effect: histogram buckets are fixed
            instance_group.kind KIND_GPU has no effect: the model runs on the CPU
            instance_group.rate_limiter has no effect: runs are limited by count only
            instance_group.secondary_devices has no effect: the model runs on the CPU
            instance_group.profile has no effect: it is for TensorRT models
            instance_group.passive has no effect: every instance serves requests
            instance_group.host_policy has no effect: threads are not bound to parts of the host
            optimization.priority has no effect: it is for TensorRT models
            optimization.cuda has no effect: the model runs on the CPU
            optimization.execution_accelerators has no effect: the engine's own CPU kernels run the model
            optimization.input_pinned_memory has no effect: the model runs on the CPU
            optimization.output_pinned_memory has no effect: the model runs on the CPU
            optimization.gather_kernel_buffer_threshold has no effect: the model runs on the CPU
            optimization.eager_batching has no effect: batches are gathered when they run
            response_cache has no effect: the server keeps no answers (--cache-config)
        "#]],
    );
}

#[test]
fn an_override_takes_the_place_of_the_file() {
    let config = read(Some("max_batch_size: 1"), Some(r#"{"max_batch_size": 2}"#)).unwrap();
    assert_eq!(config.max_batch_size, 2);
    assert_eq!(
        read(Some("max_batch_size: 1"), None)
            .unwrap()
            .max_batch_size,
        1
    );
    assert_eq!(read(None, None).unwrap(), pb::ModelConfig::default());
    assert_eq!(read(Some("x"), None).unwrap_err().column, 1);
}

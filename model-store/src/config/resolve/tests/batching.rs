//! What the configuration says of batches and sequences, beside what the graph says.

use super::*;
use crate::spec::{SequenceStrategy, TensorSpec};

#[test]
fn dynamic_batching_is_taken_over_and_checked() {
    let spec = spec_of(
        &batchable(),
        "max_batch_size: 8 dynamic_batching {
           preferred_batch_size: [ 8, 4, 4 ] max_queue_delay_microseconds: 500
           priority_levels: 3 default_priority_level: 2
           default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 7
                                  allow_timeout_override: true max_queue_size: 9 }
           priority_queue_policy { key: 3 value { max_queue_size: 1 } } }",
    );
    let batching = spec.batching.unwrap();
    assert_eq!(batching.preferred_rows, [4, 8]);
    assert_eq!(batching.max_delay, Duration::from_micros(500));
    assert_eq!(
        (batching.priority_levels, batching.default_priority_level),
        (3, 2)
    );
    let policy = &batching.default_queue_policy;
    assert!(policy.delay_on_timeout && policy.allow_timeout_override);
    assert_eq!(policy.default_timeout, Some(Duration::from_micros(7)));
    assert_eq!(policy.max_queue_size, Some(9));
    assert_eq!(batching.priority_queue_policy[&3].max_queue_size, Some(1));
    check_errors(
        &[
            "max_batch_size: 8 dynamic_batching { preferred_batch_size: 9 }",
            "max_batch_size: 8 dynamic_batching { preferred_batch_size: 0 }",
            "dynamic_batching { priority_levels: 2 }",
            "dynamic_batching { priority_levels: 2 default_priority_level: 3 }",
            "dynamic_batching { priority_levels: 18446744073709551615 default_priority_level: 1 }",
            "dynamic_batching { priority_levels: 1 default_priority_level: 1
               priority_queue_policy { key: 2 value { } } }",
            "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
            "dynamic_batching { preserve_ordering: true
               default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 } }",
        ],
        expect![[r#"
            model 'm': dynamic_batching.preferred_batch_size: expected sizes from 1 to max_batch_size 8, found 9
            model 'm': dynamic_batching.preferred_batch_size: expected sizes from 1 to max_batch_size 8, found 0
            model 'm': dynamic_batching.default_priority_level: expected a level from 1 to priority_levels 2, found 0
            model 'm': dynamic_batching.default_priority_level: expected a level from 1 to priority_levels 2, found 3
            model 'm': dynamic_batching.priority_levels: expected at most 1000, found 18446744073709551615
            model 'm': dynamic_batching.priority_queue_policy: expected a level from 1 to priority_levels 1, found 2
            model 'm': dynamic_batching.priority_levels: expected at most 1 with preserve_ordering, found 2
            model 'm': dynamic_batching queue policy timeout_action: expected REJECT with preserve_ordering, found DELAY
        "#]],
    );
}

#[test]
fn a_model_whose_rows_influence_each_other_keeps_its_queue_rules_but_shares_no_runs() {
    let mut graph = batchable();
    graph.batch_coupling = vec![
        "node 'q' (DynamicQuantizeLinear) mixes rows".to_owned(),
        "b".to_owned(),
    ];
    let spec = spec_of(&graph, "");
    assert_eq!((spec.max_batch_size, spec.runs_rows_together), (4, false));
    assert_eq!(
        spec.warnings,
        [
            "dynamic_batching forms no batches: node 'q' (DynamicQuantizeLinear) mixes rows; each \
          request runs alone (set parameter 'dormouse.batching' to 'force' to batch all the same)"
        ]
    );
    let queued = "dynamic_batching { priority_levels: 2 default_priority_level: 2
        default_queue_policy { max_queue_size: 3 } }";
    let batching = spec_of(&graph, queued).batching.unwrap();
    assert_eq!(batching.priority_levels, 2);
    assert_eq!(batching.default_queue_policy.max_queue_size, Some(3));
    let forced = "parameters { key: 'dormouse.batching' value { string_value: 'force' } }";
    let spec = spec_of(&graph, forced);
    assert!(spec.runs_rows_together && spec.warnings.is_empty());
    let unbatched = "max_batch_size: 1";
    let spec = spec_of(&graph, unbatched);
    assert!(!spec.runs_rows_together && spec.warnings.is_empty());
    assert!(!spec_of(&batchable(), unbatched).runs_rows_together);
    assert!(spec_of(&batchable(), "").runs_rows_together);
}

#[test]
fn sequences_are_held_against_the_graph() {
    let control = |name: &str, control: &str| {
        format!("sequence_batching {{ control_input {{ name: '{name}' {control} }} }}")
    };
    let state = |rest: &str| {
        format!(
            "sequence_batching {{ state {{ input_name: 'x' output_name: 'y' data_type: TYPE_FP32 {rest} }} }}"
        )
    };
    let texts = [
        control("", ""),
        control("z", "control { int32_false_true: [ 0, 1 ] }"),
        control("x", ""),
        control("x", "control { }"),
        control("x", "control { int32_false_true: 1 }"),
        control("x", "control { int32_false_true: [ 0, 1 ] }"),
        control("x", "control { fp32_false_true: [ 0, 1 ] }"),
        control(
            "x",
            "control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 }",
        ),
        state(""),
        state("dims: 3"),
        state("dims: -1 initial_state { } initial_state { }"),
        state("dims: -1 initial_state { name: 'i' data_type: TYPE_FP32 dims: 3 }"),
        state(
            "dims: -1 initial_state { name: 'i' data_type: TYPE_FP32 dims: 3 data_file: '../x' }",
        ),
        state("dims: -1 initial_state { name: 'i' data_type: TYPE_INT8 dims: 3 zero_data: true }"),
        "sequence_batching { direct { minimum_slot_utilization: 2 } }".to_owned(),
        "sequence_batching { oldest { max_candidate_sequences: -1 } }".to_owned(),
        "sequence_batching { oldest { preferred_batch_size: 9 } }".to_owned(),
    ];
    check_errors(
        &texts.each_ref().map(String::as_str),
        expect![[r#"
            model 'm': sequence_batching.control_input.name: expected a name, found none
            model 'm': sequence_batching.control_input 'z': expected one of the graph's tensors ["x"], found 'z'
            model 'm': sequence_batching.control_input 'x': expected one control, found 0
            model 'm': sequence_batching.control_input 'x': expected int32_false_true, fp32_false_true or bool_false_true, found none
            model 'm': sequence_batching.control_input 'x': expected one of int32_false_true, fp32_false_true and bool_false_true, with two values, found others
            model 'm': sequence_batching.control_input 'x' type of 'x': expected TYPE_FP32, found TYPE_INT32
            model 'm': sequence_batching.control_input 'x' shape of 'x': expected [-1,3], which the graph has, found [-1,1]
            model 'm': sequence_batching.control_input 'x' data_type: expected TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 or TYPE_STRING, found TYPE_FP32
            model 'm': sequence_batching.state 'x' dims: expected sizes from 1, or -1 for any, found []
            model 'm': sequence_batching.state 'x' shape of 'y': expected [-1,10], which the graph has, found [-1,3]
            model 'm': sequence_batching.state 'x' initial_state: expected one at most, found 2
            model 'm': sequence_batching.state 'x' initial_state: expected zero_data or data_file, found none
            model 'm': sequence_batching.state 'x' initial_state.data_file: expected a path inside the model's initial_state folder, found '../x'
            model 'm': sequence_batching.state 'x' initial_state.data_type: expected the state's TYPE_FP32, found TYPE_INT8
            model 'm': sequence_batching.direct.minimum_slot_utilization: expected 0 to 1, found 2
            model 'm': sequence_batching.oldest.max_candidate_sequences: expected 0 or more, found -1
            model 'm': sequence_batching.oldest.preferred_batch_size: expected sizes from 1 to max_batch_size 4, found 9
        "#]],
    );
}

#[test]
fn ragged_batches_are_held_against_the_graph() {
    let input = |rest: &str| format!("batch_input {{ source_input: 'x' {rest} }}");
    let texts = [
        "input { name: 'x' allow_ragged_batch: true }".to_owned(),
        "batch_input { }".to_owned(),
        "batch_input { source_input: 'z' }".to_owned(),
        input("data_type: TYPE_INT64"),
        input("data_type: TYPE_INT32"),
        input("data_type: TYPE_INT32 target_name: 'z'"),
        input("data_type: TYPE_INT32 target_name: 'x'"),
        "batch_output { target_name: 'z' source_input: 'x' }".to_owned(),
        "batch_output { target_name: 'y' source_input: 'x' }".to_owned(),
    ];
    check_errors(
        &texts.each_ref().map(String::as_str),
        expect![[r#"
        model 'm': input 'x': the configuration has a ragged batch, for which the shape must be [-1], the graph [-1,3]
        model 'm': batch_input.source_input: expected one input, found 0
        model 'm': batch_input.source_input: expected the name of an input, found 'z'
        model 'm': batch_input.data_type: expected TYPE_INT32 or TYPE_FP32, found TYPE_INT64
        model 'm': batch_input: expected a target_name, found none
        model 'm': batch_input: expected the name of an input of the graph, found 'z'
        model 'm': batch_input.source_input: expected the name of an input, found 'x'
        model 'm': batch_output: expected the name of an output, found 'z'
        model 'm': output 'y': the configuration has a ragged batch, for which the shape must be [-1], the graph [-1,10]
    "#]],
    );
}

#[test]
fn what_the_server_makes_and_keeps_is_no_input_of_a_request() {
    let mut graph = batchable();
    graph
        .inputs
        .push(tensor("start", DataType::Int32, &[-1, 1]));
    graph
        .inputs
        .push(tensor("before", DataType::Fp32, &[-1, -1]));
    graph
        .outputs
        .push(tensor("after", DataType::Fp32, &[-1, -1]));
    let spec = spec_of(
        &graph,
        "max_batch_size: 4 sequence_batching { oldest { }
           control_input { name: 'start' control { int32_false_true: [ 0, 1 ] } }
           state { input_name: 'before' output_name: 'after' data_type: TYPE_FP32 dims: -1 } }",
    );
    let names = |specs: &[TensorSpec]| -> Vec<String> {
        specs.iter().map(|spec| spec.name.to_string()).collect()
    };
    assert_eq!(names(&spec.inputs), ["x"]);
    assert_eq!(names(&spec.outputs), ["y"]);
    let sequence = spec.sequence.unwrap();
    assert_eq!(sequence.max_idle, Duration::from_secs(1));
    assert_eq!(sequence.states[0].initial.dims[..], [1]);
    let SequenceStrategy::Oldest { candidates, .. } = sequence.strategy else {
        panic!("{:?}", sequence.strategy);
    };
    assert_eq!(candidates, 4);
}

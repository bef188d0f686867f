//! Sequences, ragged batches and decoupled models, as tritonclient asks for them.

use std::fs;

use anyhow::{Result, ensure};
use dormouse_proto::inference as pb;
use pb::infer_parameter::ParameterChoice;

use crate::foreign::run_over;
use crate::repository::{Model, TestRepository};
use crate::server::TestServer;
use crate::wire::{self, Request, output};

/// Every control, and a running total that the server keeps.
fn totals(strategy: &str) -> String {
    format!(
        r#"max_batch_size: 4
        input [ {{ name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
        output [ {{ name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }},
                 {{ name: "MARKS" data_type: TYPE_INT32 dims: [ 4 ] }} ]
        sequence_batching {{
          {strategy}
          control_input [
            {{ name: "START" control [ {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }} ] }},
            {{ name: "END" control [ {{ kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 1 ] }} ] }},
            {{ name: "READY" control [ {{ kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] }} ] }},
            {{ name: "CORRID" control [ {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }} ] }}
          ]
          state [ {{ input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
        }}"#
    )
}

fn repository() -> Result<TestRepository> {
    let repository = TestRepository::new()?;
    let idle = "max_sequence_idle_microseconds: 60000000";
    let one = "instance_group [ { kind: KIND_CPU count: 1 } ]";
    let direct = totals(&format!(
        "{idle} direct {{ max_queue_delay_microseconds: 2000 minimum_slot_utilization: 0.5 }}"
    ));
    let oldest = totals(&format!(
        "{idle} oldest {{ max_candidate_sequences: 6 max_queue_delay_microseconds: 2000 }}"
    ));
    // Waited for, and longer than a busy machine takes from one step to the next.
    let single =
        totals("max_sequence_idle_microseconds: 5000000 oldest { max_candidate_sequences: 1 }");
    let patient =
        totals("max_sequence_idle_microseconds: 120000000 oldest { max_candidate_sequences: 1 }");
    let sleepy = totals("max_sequence_idle_microseconds: 60000000");
    let sleepy = format!(
        r#"{sleepy} parameters {{ key: "dormouse.keep_alive" value {{ string_value: "200ms" }} }}"#
    );
    repository.add("direct", Model::new("sequence").config(&direct))?;
    repository.add("oldest", Model::new("sequence").config(&oldest))?;
    repository.add("fresh", Model::new("sequence").config(&oldest))?;
    for (name, config) in [("single", single), ("patient", patient), ("sleepy", sleepy)] {
        let config = format!("{config} {one}");
        repository.add(name, Model::new("sequence").config(&config))?;
    }
    let unbatched = r#"
        input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
        output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
        sequence_batching {
          max_sequence_idle_microseconds: 60000000
          control_input [ { name: "START" control [
            { kind: CONTROL_SEQUENCE_START bool_false_true: [ false, true ] } ] } ]
          state [ { input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_INT32 dims: [ 1 ]
            initial_state: { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true name: "zero" } } ]
        }
        model_warmup [ { name: "once" inputs { key: "INPUT"
          value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } } ]"#;
    repository.add(
        "unbatched",
        Model::new("sequence_unbatched").config(unbatched),
    )?;
    let history = format!(
        r#"max_batch_size: 4
        input [ {{ name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
        sequence_batching {{
          {idle}
          oldest {{ max_candidate_sequences: 4 }}
          control_input [ {{ name: "CORRID" control [
            {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING }} ] }} ]
          state [ {{ input_name: "PAST" output_name: "FUTURE" data_type: TYPE_INT32 dims: [ -1 ]
            initial_state: {{ data_type: TYPE_INT32 dims: [ 2 ] data_file: "past" name: "past" }} }} ]
        }}"#
    );
    repository.add("history", Model::new("history").config(&history))?;
    let folder = repository.model_dir("history").join("initial_state");
    fs::create_dir(&folder)?;
    let past: Vec<u8> = [41i32, 42].map(i32::to_le_bytes).concat();
    fs::write(folder.join("past"), past)?;

    let made = |name: &str, kind: &str, datatype: &str| {
        format!(
            r#"batch_input [ {{ kind: {kind} target_name: "{name}" data_type: {datatype} source_input: "INPUT" }} ]"#
        )
    };
    let ragged = [
        r#"max_batch_size: 8
        dynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 5000000 }
        input [ { name: "INPUT" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
        output [ { name: "SUM" data_type: TYPE_FP32 dims: [ 1 ] },
                 { name: "ELEMENTS" data_type: TYPE_FP32 dims: [ 1 ] },
                 { name: "END" data_type: TYPE_INT32 dims: [ 1 ] },
                 { name: "MOST" data_type: TYPE_INT64 dims: [ 1 ] },
                 { name: "SHAPES" data_type: TYPE_INT32 dims: [ 2 ] },
                 { name: "DOUBLED" data_type: TYPE_FP32 dims: [ -1 ] } ]
        batch_output [ { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "DOUBLED" source_input: "INPUT" } ]"#
            .to_owned(),
        made("COUNT", "BATCH_ELEMENT_COUNT", "TYPE_FP32"),
        made("REACHED", "BATCH_ACCUMULATED_ELEMENT_COUNT", "TYPE_INT32"),
        made("BOUNDS", "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", "TYPE_INT32"),
        made("LONGEST", "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", "TYPE_INT32"),
        made("ITEM", "BATCH_ITEM_SHAPE", "TYPE_INT32"),
        made("FLAT", "BATCH_ITEM_SHAPE_FLATTEN", "TYPE_INT32"),
    ];
    repository.add("ragged", Model::new("ragged").config(&ragged.join("\n")))?;
    repository.add("simple", Model::new("add_sub"))?;
    let decoupled = "max_batch_size: 8 model_transaction_policy { decoupled: true }";
    repository.add("decoupled", Model::new("add_sub").config(decoupled))?;
    Ok(repository)
}

#[tokio::test]
async fn tritonclient_keeps_sequences() -> Result<()> {
    run_over(&repository()?, "triton_sequence.py").await
}

fn step(model: &str, id: i64, start: bool) -> Request {
    let mut step = Request::new(model).input("INPUT", &[1, 1], &[1i32]);
    for (name, value) in [
        ("sequence_id", ParameterChoice::Int64Param(id)),
        ("sequence_start", ParameterChoice::BoolParam(start)),
    ] {
        let parameter = pb::InferParameter {
            parameter_choice: Some(value),
        };
        step.0.parameters.insert(name.to_owned(), parameter);
    }
    step
}

#[tokio::test]
async fn sequences_of_a_worker_do_not_keep_the_memory_that_is_shared_with_it() -> Result<()> {
    let repository = TestRepository::new()?;
    let config =
        totals("max_sequence_idle_microseconds: 600000000 oldest { max_candidate_sequences: 100 }");
    let isolated = r#"parameters { key: "dormouse.isolation" value { string_value: "process" } }"#;
    let config = format!("{config} {isolated}");
    repository.add("worker", Model::new("sequence").config(&config))?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("server.toml");
    // Room for the tensors of a few runs.
    fs::write(&file, "[isolation]\nshared_memory = \"1MiB\"\n")?;
    let server = TestServer::over(&repository)
        .arg(format!("--config={}", file.display()))
        .start()
        .await?;
    let client = server.grpc().await?;
    for round in 1..=2 {
        for id in 1..=40 {
            let answer = wire::infer(&client, step("worker", id, round == 1)).await?;
            ensure!(output::<i32>(&answer, "OUTPUT", &[1, 1])? == [round]);
        }
    }
    Ok(())
}

//! What graphs are given beside what requests hold.

use dormouse_core::datatype::DataType;
use dormouse_core::sequence::{SequenceId, Step};
use dormouse_core::shape::Shape;
use dormouse_core::time::Timestamp;
use dormouse_model_store::config::{ConfigDefaults, ResolveInput, resolve, text};
use dormouse_model_store::graph::{GraphSummary, GraphTensor, GraphType};
use dormouse_model_store::spec::ModelSpec;

use super::inputs::Gathering;
use super::{MadePlaces, Part};
use crate::request::{InferRequest, SequenceStep, Tensor};

const CONFIG: &str = r#"max_batch_size: 4
    input { name: "x" data_type: TYPE_INT32 dims: 1 }
    output { name: "y" data_type: TYPE_INT32 dims: 1 }
    sequence_batching {
      control_input { name: "start" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 5, 6 ] } }
      control_input { name: "end" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }
      control_input { name: "ready" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }
      control_input { name: "id" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 } }
      state { input_name: "before" output_name: "y" data_type: TYPE_INT32 dims: 1 }
    }"#;

fn spec() -> ModelSpec {
    let tensor = |name: &str| GraphTensor {
        name: name.to_owned(),
        kind: GraphType::Tensor(DataType::Int32),
        dims: Some(Shape::from_slice(&[-1, 1])),
    };
    let graph = GraphSummary {
        inputs: ["x", "start", "end", "ready", "id", "before"]
            .map(tensor)
            .into(),
        outputs: vec![tensor("y")],
        ..GraphSummary::default()
    };
    let resolved = resolve(ResolveInput {
        name: "m".into(),
        config: text::parse(CONFIG).unwrap(),
        graph: &graph,
        defaults: &ConfigDefaults::default(),
    });
    resolved.unwrap()
}

fn number(number: i32) -> Tensor {
    Tensor {
        datatype: DataType::Int32,
        shape: Shape::from_slice(&[1, 1]),
        data: number.to_le_bytes().to_vec().into(),
    }
}

fn request(value: i32, id: u64, start: bool) -> InferRequest {
    let step = Step {
        id: SequenceId::Number(id),
        start,
        end: !start,
    };
    InferRequest {
        id: String::new(),
        inputs: vec![Some(number(value))],
        outputs: vec![0],
        rows: 1,
        priority: 0,
        deadline: None,
        received: Timestamp::ZERO,
        sequence: Some(Box::new(SequenceStep { step, turn: None })),
        span: None,
        held: None,
    }
}

#[test]
fn rows_without_a_request_are_zeros_and_not_ready() {
    let spec = spec();
    let places = MadePlaces {
        controls: vec![1, 2, 3, 4],
        state_inputs: vec![5],
        state_outputs: vec![0],
        batch_inputs: Vec::new(),
        shapes_vary: false,
    };
    let (first, second) = (request(10, 7, true), request(20, 8, false));
    let kept = [number(300)];
    let part = |request, row| Part {
        request,
        row: Some(row),
        states: &kept,
    };
    let parts = [part(&first, 0), part(&second, 2)];
    let initial = [number(-1)];
    let gathering = Gathering::new(&spec, &parts, &initial);
    assert_eq!(gathering.rows, 3);
    let inputs = gathering.inputs(&[0], &places).unwrap();
    let shown: Vec<(usize, Vec<i32>)> = inputs
        .iter()
        .map(|(index, tensor)| {
            assert_eq!(tensor.shape[..], [3, 1]);
            let numbers = tensor.data.chunks_exact(4);
            let numbers = numbers.map(|four| i32::from_le_bytes(four.try_into().unwrap()));
            (*index, numbers.collect())
        })
        .collect();
    assert_eq!(
        shown,
        [
            (0, vec![10, 0, 20]),
            (1, vec![6, 5, 5]),
            (2, vec![0, 0, 1]),
            (3, vec![1, 0, 1]),
            (4, vec![7, 0, 8]),
            // The first one starts anew, whatever is left of an earlier sequence.
            (5, vec![-1, 0, 300]),
        ]
    );
}

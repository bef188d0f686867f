use dormouse_core::shape::Shape;

use super::graph::{
    identity, int_attribute, node, onnx_type, tensor as initializer, tensor_attribute, value_info,
};
use super::*;
use crate::engine::SessionTensor;

const FLOAT: u64 = 1;

fn message(result: Result<Vec<Tensor>, EngineError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn every_datatype_passes_through_unchanged() {
    for datatype in DataType::ALL {
        let session = open(&identity(onnx_type(datatype), &[-1, 2]));
        assert_eq!(
            session.inputs(),
            [SessionTensor {
                name: "x".to_owned(),
                datatype: Some(datatype),
                dims: Some(Shape::from_slice(&[-1, 2])),
            }]
        );
        let data: Vec<u8> = match datatype.element_size() {
            Some(1) => vec![0, 1, 1, 0],
            Some(size) => (0..4 * size as u8).collect(),
            None => b"\x02\0\0\0\xff\0\0\0\0\0\x01\0\0\0a\x03\0\0\0\0\0\0".to_vec(),
        };
        let given = tensor(datatype, &[2, 2], data);
        let got = run(&*session, std::slice::from_ref(&given)).unwrap();
        assert_eq!(got, [given], "{datatype}");
    }
}

#[test]
fn empty_tensors_and_scalars_run() {
    for datatype in DataType::ALL {
        let session = open(&identity(onnx_type(datatype), &[-1, 2]));
        let empty = tensor(datatype, &[0, 2], Bytes::new());
        assert_eq!(
            run(&*session, std::slice::from_ref(&empty)).unwrap(),
            [empty]
        );
    }
    let session = open(&identity(FLOAT, &[]));
    assert_eq!(session.outputs()[0].dims, Some(Shape::new()));
    let scalar = floats(&[], &[4.5]);
    assert_eq!(
        run(&*session, std::slice::from_ref(&scalar)).unwrap(),
        [scalar]
    );
}

#[test]
fn unaligned_bytes_give_the_same_answer() {
    let session = open(&identity(onnx_type(DataType::Int64), &[-1]));
    let values: Vec<u8> = (0..80).collect();
    let backing = Bytes::from([&[0; 8][..], &values].concat());
    for shift in 0..8 {
        let data = Bytes::from([&backing[..shift], &values].concat()).slice(shift..);
        let got = run(&*session, &[tensor(DataType::Int64, &[10], data)]).unwrap();
        assert_eq!(got[0].data, values, "shifted by {shift}");
    }
}

#[test]
fn odd_bytes_of_a_bool_are_true() {
    let session = open(&identity(onnx_type(DataType::Bool), &[-1]));
    let got = run(
        &*session,
        &[tensor(DataType::Bool, &[4], vec![0, 2, 255, 1])],
    )
    .unwrap();
    assert_eq!(got[0].data, [0, 1, 1, 1].as_slice());
}

#[test]
fn an_output_outlives_its_session_and_its_input() {
    // The second output is the input itself.
    let mut graph = identity(FLOAT, &[-1]);
    graph.outputs.push(value_info("x", FLOAT, &[-1]));
    let session = open(&graph);
    let values: Vec<f32> = (0..50_000u16).chain(0..50_000).map(f32::from).collect();
    let given = floats(&[100_000], &values);
    let got = run(&*session, std::slice::from_ref(&given)).unwrap();
    let start = |tensor: &Tensor| tensor.data.as_ptr().addr();
    assert_ne!(start(&got[1]), start(&given));
    drop((session, given));
    let expected = floats(&[100_000], &values);
    assert_eq!(got, [expected.clone(), expected]);
}

#[test]
fn an_initializer_as_output_outlives_its_session() {
    let mut graph = identity(FLOAT, &[-1]);
    let data: Vec<u8> = (0..40_000u32)
        .flat_map(|n| (n as f32).to_le_bytes())
        .collect();
    graph
        .initializers
        .push(initializer("w", FLOAT, &[40_000], &data));
    graph.outputs.push(value_info("w", FLOAT, &[40_000]));
    let session = open(&graph);
    let got = run(&*session, &[floats(&[1], &[1.0])]).unwrap();
    drop(session);
    crate::memory::release_memory();
    assert_eq!(got[1].data, data);
}

#[test]
fn outputs_come_in_the_order_they_were_asked_for() {
    let mut graph = identity(FLOAT, &[-1]);
    graph.nodes.push(node("Neg", &["x"], &["z"]));
    graph.outputs.push(value_info("z", FLOAT, &[-1]));
    let session = open(&graph);
    let stop = session.stop_handle().unwrap();
    let got = session
        .run(&[(0, floats(&[1], &[3.0]))], &[1, 0, 1], &stop)
        .unwrap();
    let values = [
        floats(&[1], &[-3.0]),
        floats(&[1], &[3.0]),
        floats(&[1], &[-3.0]),
    ];
    assert_eq!(got, values);
}

#[test]
fn an_input_with_a_value_in_the_graph_may_be_given() {
    let mut graph = identity(FLOAT, &[-1]);
    graph.nodes = vec![node("Add", &["x", "b"], &["y"])];
    graph.inputs.push(value_info("b", FLOAT, &[1]));
    graph
        .initializers
        .push(initializer("b", FLOAT, &[1], &10f32.to_le_bytes()));
    let session = open(&graph);
    assert_eq!(session.inputs().len(), 1);
    assert_eq!(session.optional_inputs()[0].name, "b");
    let one = floats(&[1], &[1.0]);
    assert_eq!(
        run(&*session, std::slice::from_ref(&one)).unwrap(),
        [floats(&[1], &[11.0])]
    );
    assert_eq!(
        run(&*session, &[one.clone(), one]).unwrap(),
        [floats(&[1], &[2.0])]
    );
}

#[test]
fn what_does_not_fit_is_named() {
    let session = open(&identity(FLOAT, &[-1, 2]));
    let run = |given| message(run(&*session, &[given]));
    assert_eq!(
        run(tensor(DataType::Fp32, &[3, 2], vec![0; 20])),
        "input 'x' has 20 bytes, its shape [3,2] of FP32 needs 24"
    );
    assert_eq!(
        run(tensor(DataType::Fp32, &[i64::MAX, 2], vec![0; 8])),
        "input 'x' has 8 bytes, its shape [9223372036854775807,2] of FP32 needs more than can be counted"
    );
    assert_eq!(
        run(tensor(DataType::Int32, &[1, 2], vec![0; 8])),
        "input 'x' is FP32, INT32 was given"
    );
    let wrong = run(floats(&[1, 3], &[0.0; 3]));
    assert!(wrong.contains("invalid dimensions for input: x"), "{wrong}");

    let stop = session.stop_handle().unwrap();
    let good = [(0, floats(&[1, 2], &[0.0; 2]))];
    assert_eq!(
        message(session.run(&good, &[9], &stop)),
        "output 9 was asked for, the session has 1"
    );
    assert_eq!(
        message(session.run(&good, &[], &stop)),
        "no output was asked for"
    );
    assert_eq!(
        message(session.run(&[(4, floats(&[1, 2], &[0.0; 2]))], &[0], &stop)),
        "input 4 was given, the session has 1"
    );
    assert_eq!(
        message(session.run(&[], &[0], &stop)),
        "input 'x' is missing"
    );
    let twice = [
        (0, floats(&[1, 2], &[0.0; 2])),
        (0, floats(&[1, 2], &[0.0; 2])),
    ];
    assert_eq!(
        message(session.run(&twice, &[0], &stop)),
        "input 'x' was given twice"
    );
}

#[test]
fn malformed_strings_are_named() {
    let session = open(&identity(onnx_type(DataType::Bytes), &[-1]));
    let run = |shape: &[i64], data: &[u8]| {
        message(run(
            &*session,
            &[tensor(DataType::Bytes, shape, data.to_vec())],
        ))
    };
    assert_eq!(
        run(&[1], b"\xff\xff\xff\xffabc"),
        "input 'x': BYTES element 0 does not fit: 7 bytes are left for a length and its bytes"
    );
    assert_eq!(
        run(&[2], b"\x01\0\0\0a"),
        "input 'x' has 1 BYTES elements, its shape [2] needs 2"
    );
    assert_eq!(
        run(&[i64::MAX], b""),
        "input 'x' has 0 BYTES elements, its shape [9223372036854775807] needs 9223372036854775807"
    );
}

#[test]
fn outputs_that_v2_cannot_carry_are_named() {
    // A sequence.
    let mut graph = identity(FLOAT, &[1]);
    graph.nodes.push(node("SequenceConstruct", &["x"], &["s"]));
    let tensor_type = graph::Proto::default().number(1, 1);
    let sequence =
        graph::Proto::default().messages(1, &[graph::Proto::default().messages(1, &[tensor_type])]);
    graph.outputs.push(
        graph::Proto::default()
            .bytes(1, "s")
            .messages(2, &[graph::Proto::default().messages(4, &[sequence])]),
    );
    let session = open(&graph);
    assert_eq!(
        (session.outputs()[1].datatype, &session.outputs()[1].dims),
        (None, &None)
    );
    assert_eq!(
        message(run(&*session, &[floats(&[1], &[1.0])])),
        "output 's' is a sequence, which has no form in the v2 protocol"
    );
    // What can be carried still is.
    let stop = session.stop_handle().unwrap();
    assert!(
        session
            .run(&[(0, floats(&[1], &[1.0]))], &[0], &stop)
            .is_ok()
    );

    // An 8-bit float.
    let mut graph = identity(FLOAT, &[1]);
    let mut cast = node("Cast", &["x"], &["f"]);
    cast = cast.messages(5, &[int_attribute("to", 17)]);
    graph.nodes.push(cast);
    graph.outputs.push(value_info("f", 17, &[1]));
    let session = open(&graph);
    assert_eq!(session.outputs()[1].datatype, None);
    assert_eq!(
        message(run(&*session, &[floats(&[1], &[1.0])])),
        "output 'f' has elements of type float8e4m3fn, which have no form in the v2 protocol"
    );
}

#[test]
fn constants_in_attributes_are_read() {
    let mut graph = identity(FLOAT, &[1]);
    let value = initializer("", FLOAT, &[1], &2f32.to_le_bytes());
    graph.nodes = vec![
        node("Constant", &[], &["c"]).messages(5, &[tensor_attribute("value", &value)]),
        node("Mul", &["x", "c"], &["y"]),
    ];
    let session = open(&graph);
    assert_eq!(
        run(&*session, &[floats(&[1], &[4.0])]).unwrap(),
        [floats(&[1], &[8.0])]
    );
}

#[test]
fn many_threads_run_one_session_and_each_gets_its_own_answer() {
    let mut graph = identity(FLOAT, &[-1]);
    graph.nodes = vec![node("Neg", &["x"], &["t"]), node("Neg", &["t"], &["y"])];
    let session = open(&graph);
    std::thread::scope(|scope| {
        for thread in 0..8u16 {
            let session = &session;
            scope.spawn(move || {
                for round in 0..200u16 {
                    let given = floats(&[64], &[f32::from(thread * 1000 + round); 64]);
                    let got = run(&**session, std::slice::from_ref(&given)).unwrap();
                    assert_eq!(got, [given]);
                }
            });
        }
    });
}

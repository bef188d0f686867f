//! Sessions over a model in one file whose weights were taken out of it.

use std::io::Write;

use super::super::apart;
use super::super::session::OnnxSession;
use super::graph::{Graph, identity, node, tensor as initializer, value_info};
use super::*;
use crate::engine::GraphBytes;

const FLOAT: u64 = 1;
const INT64: u64 = 7;
/// Weights of 6 MiB.
const N: usize = 3 << 19;

fn in_one_file(graph: &Graph) -> ModelBytes {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&graph.model()).unwrap();
    ModelBytes {
        graph: GraphBytes::File(file),
        external: Vec::new(),
    }
}

/// Opens it without its weights; what was read of them is given up as after a load.
fn open_apart(graph: &Graph) -> OnnxSession {
    let opened = apart::opened(
        &in_one_file(graph),
        |_| false,
        |model| {
            assert!(!model.external.is_empty(), "its weights are inside");
            engine().open_source(model, &SessionSpec::default(), Effort::Least)
        },
    );
    opened.unwrap()
}

fn run(session: &OnnxSession, x: Tensor, outputs: &[usize]) -> Vec<Tensor> {
    let stop = session.stop_handle().unwrap();
    session.run(&[(0, x)], outputs, &stop).unwrap()
}

fn all_ones() -> Tensor {
    let ones = std::iter::repeat_n(1.0, N);
    tensor(DataType::Fp32, &[N as i64], raw(ones))
}

fn raw(values: impl Iterator<Item = f32>) -> Vec<u8> {
    values.flat_map(f32::to_le_bytes).collect()
}

fn numbers(tensor: &Tensor) -> impl Iterator<Item = f32> {
    let numbers = tensor.data.as_chunks().0.iter();
    numbers.map(|bytes| f32::from_le_bytes(*bytes))
}

#[test]
fn weights_outlive_the_file_and_are_right_to_the_bit() {
    let n = N as i64;
    let mut graph = identity(FLOAT, &[n]);
    let counted = raw((0..N).map(|at| at as f32));
    let small = raw(std::iter::once(0.5));
    graph.initializers = vec![
        initializer("w", FLOAT, &[n], &counted),
        initializer("k", FLOAT, &[1], &small),
    ];
    graph.nodes = vec![
        node("Add", &["x", "w"], &["s"]),
        node("Add", &["s", "k"], &["y"]),
    ];
    // A weight may be an answer, which lives longer than the session.
    graph.outputs.push(value_info("w", FLOAT, &[n]));
    let session = open_apart(&graph);
    let answers = run(&session, all_ones(), &[0, 1]);
    drop(session);
    assert!(numbers(&answers[0]).eq((0..N).map(|at| at as f32 + 1.5)));
    assert!(numbers(&answers[1]).eq((0..N).map(|at| at as f32)));
}

#[test]
fn a_weight_that_is_needed_while_the_graph_is_read_is_no_obstacle() {
    // The shape comes from a list that is longer than what stays in the graph for sure.
    const LONG: usize = 16 << 10;
    let n = N as i64;
    let mut graph = identity(FLOAT, &[n]);
    let mut shape = vec![0u8; LONG * 8];
    shape[..8].copy_from_slice(&n.to_le_bytes());
    let index = |value: i64| value.to_le_bytes();
    let twos = raw(std::iter::repeat_n(2.0, N));
    graph.initializers = vec![
        initializer("w", FLOAT, &[n], &twos),
        initializer("list", INT64, &[LONG as i64], &shape),
        initializer("from", INT64, &[1], &index(0)),
        initializer("to", INT64, &[1], &index(1)),
    ];
    graph.nodes = vec![
        node("Slice", &["list", "from", "to"], &["shape"]),
        node("Reshape", &["x", "shape"], &["r"]),
        node("Add", &["r", "w"], &["y"]),
    ];
    let session = open_apart(&graph);
    let answers = run(&session, all_ones(), &[0]);
    assert!(numbers(&answers[0]).all(|sum| sum == 3.0));
}

#[test]
fn a_model_that_cannot_be_opened_without_its_weights_is_opened_with_them() {
    let n = N as i64;
    let mut graph = identity(FLOAT, &[n]);
    graph.initializers = vec![initializer("w", FLOAT, &[n], &vec![0; N * 4])];
    let mut tried = Vec::new();
    let opened = apart::opened(
        &in_one_file(&graph),
        |_| false,
        |model| {
            tried.push(model.external.len());
            match model.external.is_empty() {
                true => Ok("whole"),
                false => Err("its weights are elsewhere"),
            }
        },
    );
    assert_eq!((opened, &tried[..]), (Ok("whole"), &[1, 0][..]));
    let mut tries = 0;
    let refused: Result<(), _> = apart::opened(
        &in_one_file(&graph),
        |_| true,
        |_| {
            tries += 1;
            Err("it cannot be opened at all")
        },
    );
    assert_eq!((refused, tries), (Err("it cannot be opened at all"), 1));
}

use super::super::external;
use super::graph::{
    Graph, external_tensor, graph_attribute, identity, node, tensor_attribute, value_info,
};
use super::*;
use crate::engine::GraphBytes;

const FLOAT: u64 = 1;
/// Large enough to stay outside the graph.
const N: usize = 2048;

fn file(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| std::iter::repeat_n(value.to_le_bytes(), N))
        .flatten()
        .collect()
}

/// `x + w + v + k`, with `w` and `v` in two files and `k` a constant of the first.
fn plain() -> Graph {
    let n = N as i64;
    let bytes = N as u64 * 4;
    let mut graph = identity(FLOAT, &[n]);
    let constant = external_tensor("", FLOAT, &[n], ("a.bin", Some(0), Some(bytes)));
    graph.initializers = vec![
        external_tensor("w", FLOAT, &[n], ("a.bin", Some(bytes), Some(bytes))),
        external_tensor("v", FLOAT, &[n], ("deep/b.bin", None, None)),
    ];
    graph.nodes = vec![
        node("Constant", &[], &["k"]).messages(5, &[tensor_attribute("value", &constant)]),
        node("Add", &["x", "w"], &["s1"]),
        node("Add", &["s1", "v"], &["s2"]),
        node("Add", &["s2", "k"], &["y"]),
    ];
    graph
}

/// The same, and in a subgraph of a subgraph `+ u` from a third file.
fn nested(location: (&str, Option<u64>, Option<u64>)) -> Graph {
    let n = N as i64;
    let info = |name: &str| value_info(name, FLOAT, &[n]);
    let inner = Graph {
        nodes: vec![node("Add", &["s3", "u"], &["i"])],
        initializers: vec![external_tensor("u", FLOAT, &[n], location)],
        outputs: vec![info("i")],
        ..Graph::default()
    };
    let other = |name: &str| Graph {
        nodes: vec![node("Identity", &["s3"], &[name])],
        outputs: vec![info(name)],
        ..Graph::default()
    };
    let outer = Graph {
        nodes: vec![node("If", &["c"], &["o"]).messages(
            5,
            &[
                graph_attribute("then_branch", &inner),
                graph_attribute("else_branch", &other("ie")),
            ],
        )],
        outputs: vec![info("o")],
        ..Graph::default()
    };
    let mut graph = plain();
    graph.nodes.pop();
    graph.nodes.push(node("Add", &["s2", "k"], &["s3"]));
    graph.nodes.push(node("If", &["c"], &["y"]).messages(
        5,
        &[
            graph_attribute("then_branch", &outer),
            graph_attribute("else_branch", &other("oe")),
        ],
    ));
    graph.inputs.push(value_info("c", 9, &[]));
    graph
}

fn files() -> Vec<(String, Vec<u8>)> {
    vec![
        ("a.bin".to_owned(), file(&[100.0, 10.0])),
        ("deep/b.bin".to_owned(), file(&[1000.0])),
        ("c.bin".to_owned(), file(&[7.0, 10_000.0, 7.0])),
    ]
}

fn open_with(
    graph: &Graph,
    external: Vec<(String, Vec<u8>)>,
) -> Result<Arc<dyn Session>, EngineError> {
    open_by(graph, external, Effort::Full)
}

fn open_by(
    graph: &Graph,
    external: Vec<(String, Vec<u8>)>,
    effort: Effort,
) -> Result<Arc<dyn Session>, EngineError> {
    let model = ModelBytes::in_memory(graph.model(), external);
    engine().open(model, &SessionSpec::default(), effort)
}

fn answer(session: &dyn Session) -> Tensor {
    let mut inputs = vec![floats(&[N as i64], &[1.0; N])];
    if session.inputs().len() > 1 {
        inputs.push(tensor(DataType::Bool, &[], vec![1]));
    }
    run(session, &inputs).unwrap().remove(0)
}

#[test]
fn weights_come_from_several_files_at_their_offsets() {
    let session = open_with(&plain(), files()).unwrap();
    // The files are freed by now; what they held must not be looked at again.
    crate::memory::release_memory();
    let poison = vec![0xffu8; 1 << 20];
    assert_eq!(answer(&*session), floats(&[N as i64], &[1111.0; N]));
    drop(poison);
}

#[test]
fn weights_are_read_where_they_lie_only_if_numbers_may_lie_there() {
    let bytes = N as u64 * 4;
    for skew in [0, 1, 2, 4] {
        let mut graph = plain();
        let place = ("a.bin", Some(bytes + skew), Some(bytes));
        graph.initializers[0] = external_tensor("w", FLOAT, &[N as i64], place);
        let mut given = files();
        let second = given[0].1.split_off(bytes as usize);
        given[0].1.extend(vec![0; skew as usize]);
        given[0].1.extend(second);
        let model = ModelBytes::in_memory(graph.model(), given.clone());
        let GraphBytes::Memory(bytes) = &model.graph else {
            panic!("it is in memory");
        };
        let settled = external::settle(bytes, &model.external).unwrap();
        assert_eq!(settled.is_aligned, skew % 4 == 0, "{skew}");
        let session = open_by(&graph, given, Effort::Least).unwrap();
        crate::memory::release_memory();
        assert_eq!(answer(&*session), floats(&[N as i64], &[1111.0; N]));
    }
}

#[test]
fn weights_of_subgraphs_come_from_the_files_too() {
    let bytes = N as u64 * 4;
    for length in [Some(bytes), None] {
        let session = open_with(&nested(("c.bin", Some(bytes), length)), files()).unwrap();
        assert_eq!(answer(&*session), floats(&[N as i64], &[11_111.0; N]));
    }
}

#[test]
fn a_file_that_was_not_given_is_never_looked_for() {
    // This file is there, in the directory tests run in.
    let there = "Cargo.toml";
    let error = open_with(&nested((there, Some(0), Some(64))), files()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "tensor 'u' is kept in 'Cargo.toml', which is not among the model's files"
    );
    let mut graph = plain();
    graph.initializers[0] = external_tensor("w", FLOAT, &[1], (there, None, None));
    for given in [files(), Vec::new()] {
        let error = open_with(&graph, given).unwrap_err().to_string();
        assert!(error.contains("is not among the model's files"), "{error}");
    }
}

#[test]
fn a_shape_that_is_kept_outside_is_known_when_shapes_are_inferred() {
    let mut graph = identity(FLOAT, &[6]);
    graph.nodes = vec![node("Reshape", &["x", "shape"], &["y"])];
    graph.initializers = vec![external_tensor("shape", 7, &[2], ("s.bin", Some(8), None))];
    graph.outputs = vec![value_info("y", FLOAT, &[-1, -1])];
    let shape: Vec<u8> = [9i64, 2, 3].iter().flat_map(|n| n.to_le_bytes()).collect();
    let session = open_with(&graph, vec![("s.bin".to_owned(), shape)]).unwrap();
    let got = run(&*session, &[floats(&[6], &[1.0; 6])]).unwrap();
    assert_eq!(got, [floats(&[2, 3], &[1.0; 6])]);
}

#[test]
fn data_beyond_the_end_of_a_file_is_refused() {
    let bytes = N as u64 * 4;
    for offset in [bytes * 2 + 4, u64::MAX] {
        let error = open_with(&nested(("c.bin", Some(offset), Some(bytes))), files()).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("tensor 'u' needs 8192 bytes from byte {offset} of 'c.bin', which has 24576")
        );
    }
    let mut short = files();
    short[1].1.truncate(8);
    assert_eq!(
        open_with(&plain(), short).unwrap_err().to_string(),
        "tensor 'v' needs 8192 bytes from byte 0 of 'deep/b.bin', which has 8"
    );
}

#[test]
fn a_model_that_is_no_protobuf_is_refused() {
    for bytes in [
        &b"\x0a\xff\xff\xff\xff\x0f"[..],
        b"\xff",
        b"hello world",
        b"",
    ] {
        let model = ModelBytes::in_memory(bytes.to_vec(), Vec::new());
        let error = engine()
            .open(model, &SessionSpec::default(), Effort::Full)
            .unwrap_err();
        assert!(!error.to_string().is_empty(), "{bytes:?}");
    }
    // Truncated anywhere, a good model is a clean error or still a model.
    let whole = nested(("c.bin", None, Some(4))).model();
    for length in (0..whole.len()).step_by(37) {
        let model = ModelBytes::in_memory(whole[..length].to_vec(), files());
        let _ = engine().open(model, &SessionSpec::default(), Effort::Full);
    }
}

#[test]
fn a_graph_given_twice_is_refused() {
    let mut bytes = plain().model();
    bytes.extend(plain().model());
    let model = ModelBytes::in_memory(bytes, files());
    let error = engine()
        .open(model, &SessionSpec::default(), Effort::Full)
        .unwrap_err();
    assert!(error.to_string().contains("is repeated"), "{error}");
}

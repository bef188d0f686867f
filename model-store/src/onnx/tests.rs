use std::cell::Cell;

use dormouse_core::datatype::DataType;
use proptest::prelude::*;

use super::writer::*;
use super::*;
use crate::graph::{ExternalData, GraphTensor, GraphType};

fn read(model: Message) -> Result<GraphSummary, GraphError> {
    summarize(&model.0.as_slice())
}

fn refused(model: Message) -> String {
    read(model).unwrap_err().to_string()
}

fn with_initializer(tensor: Message) -> Message {
    model(Message::new().message(5, tensor))
}

/// `y = x W` with everything a graph can have around it.
fn rich_model() -> Message {
    let sparse = Message::new()
        .message(1, external("s", &[2], &[("location", "sparse.bin")]))
        .message(2, ints("", &[2], &[0, 3]))
        .int(3, 4);
    let branch = Message::new()
        .message(
            5,
            external("deep", &[1], &[("location", "deep.bin"), ("offset", "8")]),
        )
        .message(12, value("y", FLOAT, &[-1, 2]));
    let graph = Message::new()
        .message(1, node("h = MatMul(x,W)", vec![]))
        .message(
            1,
            node("y = If(c)", vec![graph_attribute("then_branch", branch)]),
        )
        .message(
            5,
            external("W", &[4, 2], &[("location", "w.bin"), ("length", "32")]),
        )
        .message(5, ints("k", &[1], &[7]))
        .message(15, sparse)
        .message(11, value("x", FLOAT, &[-1, 4]))
        .message(11, value("k", INT64, &[1]))
        .message(12, value("y", FLOAT, &[-1, 2]))
        .message(13, value("h", FLOAT, &[-1, 2]));
    let body = node(
        "z = Constant()",
        vec![tensor_attribute(
            "value",
            external("f", &[1], &[("location", "f.bin")]),
        )],
    );
    let function = Message::new()
        .bytes(1, "F")
        .bytes(10, "mine")
        .message(7, body);
    let training = Message::new().message(
        2,
        Message::new().message(5, external("t", &[1], &[("location", "t.bin")])),
    );
    model(graph).message(25, function).message(20, training)
}

#[test]
fn a_graph_tells_its_signature_and_everything_it_refers_to() {
    let summary = read(rich_model()).unwrap();
    let tensor = |name: &str, kind, dims: &[i64]| GraphTensor {
        name: name.to_owned(),
        kind: GraphType::Tensor(kind),
        dims: Some(dims.iter().copied().collect()),
    };
    assert_eq!(summary.ir_version, 8);
    assert_eq!(summary.opsets, [(String::new(), 17)]);
    assert_eq!(summary.inputs, [tensor("x", DataType::Fp32, &[-1, 4])]);
    assert_eq!(
        summary.optional_inputs,
        [tensor("k", DataType::Int64, &[1])]
    );
    assert_eq!(summary.outputs, [tensor("y", DataType::Fp32, &[-1, 2])]);
    let reference = |location: &str, offset, length| ExternalData {
        location: location.to_owned(),
        offset,
        length: Some(length),
    };
    assert_eq!(
        summary.external,
        [
            reference("deep.bin", 8, 4),
            reference("w.bin", 0, 32),
            reference("sparse.bin", 0, 8),
            reference("f.bin", 0, 4),
            reference("t.bin", 0, 4),
        ]
    );
}

#[test]
fn types_without_a_v2_name_are_told_by_their_own() {
    let other = |kind: Message| Message::new().bytes(1, "x").message(2, kind);
    let empty = Message::new();
    let inputs = [
        value("x", 14, &[1]),
        value("x", 17, &[1]),
        value("x", 99, &[1]),
        other(Message::new().message(4, empty.clone())),
        other(Message::new().message(5, empty.clone())),
        other(Message::new().message(9, empty.clone())),
        Message::new().bytes(1, "x"),
    ];
    let summary = read(model(Message::new().messages(11, inputs))).unwrap();
    let kinds: Vec<GraphType> = summary.inputs.iter().map(|input| input.kind).collect();
    assert_eq!(
        kinds,
        [
            "complex64",
            "float8e4m3fn",
            "unknown element type",
            "sequence",
            "map",
            "optional",
            "no type"
        ]
        .map(GraphType::Other)
    );
    assert_eq!(summary.inputs[6].dims, None);
}

#[test]
fn weights_are_not_read() {
    struct Counting<'a>(&'a [u8], Cell<usize>);
    impl ReadAt for Counting<'_> {
        fn size(&self) -> u64 {
            self.0.len() as u64
        }
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
            let count = ReadAt::read_at(&self.0, buffer, offset)?;
            self.1.set(self.1.get() + count);
            Ok(count)
        }
    }
    let weights = tensor("W", FLOAT, &[1 << 20]).bytes(9, vec![0xff; 4 << 20]);
    let packed = tensor("P", FLOAT, &[1 << 20]).bytes(4, vec![0xff; 4 << 20]);
    let numbers = tensor("I", INT64, &[4 << 20]).bytes(7, vec![0x01; 4 << 20]);
    let graph = Message::new()
        .messages(5, [weights, packed, numbers])
        .message(11, value("x", FLOAT, &[-1]));
    let bytes = model(graph).0;
    let source = Counting(&bytes, Cell::new(0));
    assert_eq!(summarize(&source).unwrap().inputs.len(), 1);
    assert!(source.1.get() < 256 << 10, "{} bytes read", source.1.get());
}

#[test]
fn external_data_that_could_reach_other_files_or_memory_is_refused() {
    let at = |location: &str| {
        refused(with_initializer(external(
            "W",
            &[1],
            &[("location", location)],
        )))
    };
    assert!(at("../secret").contains("'W'") && at("../secret").contains("'..'"));
    assert!(at("/etc/passwd").contains("absolute"));
    assert!(at("a\\b").contains("backslash"));
    assert!(at("C:secret").contains("drive letter"));
    assert!(at("").contains("empty"));
    assert!(at("*/_ORT_MEM_ADDR_/*").contains("own memory"));
    let entries =
        |entries: &[(&str, &str)]| refused(with_initializer(external("W", &[1], entries)));
    assert!(entries(&[]).contains("no location"));
    assert!(entries(&[("location", "a"), ("location", "b")]).contains("more than once"));
    assert!(entries(&[("location", "a"), ("offset", "-1")]).contains("whole number"));
    assert!(entries(&[("location", "a"), ("length", "8")]).contains("its shape and type need 4"));
    assert!(entries(&[("location", "a"), ("offset", "9223372036854775807")]).contains("64 bits"));
}

#[test]
fn a_location_is_checked_even_where_the_tensor_says_it_is_not_used() {
    let unused = tensor("W", FLOAT, &[1]).message(
        13,
        Message::new().bytes(1, "location").bytes(2, "../secret"),
    );
    assert!(refused(with_initializer(unused)).contains("'..'"));
}

#[test]
fn a_later_unknown_location_kind_does_not_hide_external_data() {
    let tensor = external("W", &[1], &[("location", "w")]).int(14, 2);
    assert_eq!(read(with_initializer(tensor)).unwrap().external.len(), 1);
    let wide = external("W", &[1], &[("location", "w")]).int(14, (1 << 32) | 1);
    assert_eq!(read(with_initializer(wide)).unwrap().external.len(), 1);
}

#[test]
fn messages_that_protobuf_would_merge_are_refused() {
    let graph = Message::new().message(11, value("x", FLOAT, &[-1]));
    assert!(refused(model(graph.clone()).message(7, graph)).contains("the graph"));
    let twice = Message::new()
        .bytes(1, "value")
        .message(5, external("a", &[1], &[("location", "a")]))
        .message(5, tensor("a", FLOAT, &[1]));
    let graph = Message::new().message(1, node("c = Constant()", vec![twice]));
    assert!(refused(model(graph)).contains("twice"));
}

#[test]
fn malformed_files_are_refused_with_the_place() {
    assert_eq!(refused(Message::new()), "the file is empty");
    assert!(refused(Message::new().int(1, 8)).contains("no graph"));
    assert!(refused(Message(vec![0x3a, 0x7f])).contains("at byte 2"));
    assert!(refused(Message(vec![0x3a])).contains("past the end"));
    assert!(refused(Message(vec![0xff; 12])).contains("64 bits"));
    assert!(refused(Message(vec![0x07])).contains("not an ONNX model"));
    assert!(refused(Message(vec![0x3b, 0x3c])).contains("wire type"));
    assert!(refused(Message::new().int(7, 1)).contains("wire type"));
    assert!(refused(Message(b"not a model at all".to_vec())).contains("not an ONNX model"));
    let negative = with_initializer(tensor("W", FLOAT, &[-4]));
    assert_eq!(refused(negative), "tensor 'W' has a dimension of -4");
}

#[test]
fn nesting_is_bounded() {
    let nested = |levels: usize| {
        let mut graph = Message::new();
        for _ in 0..levels {
            graph = Message::new().message(1, node("y = If(c)", vec![graph_attribute("b", graph)]));
        }
        model(graph)
    };
    assert!(read(nested(20)).is_ok());
    assert!(refused(nested(21)).contains("nested deeper than 64"));
    assert!(refused(nested(2_000)).contains("nested deeper than 64"));
}

#[test]
fn counts_are_bounded() {
    let many = |field: u32, count: usize| {
        model(Message::new().messages(field, std::iter::repeat_n(Message::new(), count)))
    };
    assert!(read(many(11, 4_096)).is_ok());
    assert_eq!(refused(many(11, 4_097)), "more than 4096 inputs of a graph");
    assert_eq!(
        refused(many(12, 4_097)),
        "more than 4096 outputs of a graph"
    );
    assert_eq!(
        refused(many(5, 1_000_001)),
        "more than 1000000 initializers"
    );
    let dims = with_initializer(tensor("W", FLOAT, &[1; 65]));
    assert_eq!(refused(dims), "more than 64 dimensions of a tensor");
    let packed = with_initializer(Message::new().bytes(1, vec![1; 1_000]));
    assert_eq!(refused(packed), "more than 64 dimensions of a tensor");
    let long = model(Message::new().message(11, value(&"x".repeat(70_000), FLOAT, &[1])));
    assert!(refused(long).contains("70000 bytes, at most 65536"));
}

#[test]
fn names_in_messages_cannot_forge_a_line() {
    let name = format!("a\n\u{1b}[31m{}", "x".repeat(500));
    let text = refused(with_initializer(external(
        &name,
        &[1],
        &[("location", "../b\n")],
    )));
    assert!(!text.contains(['\n', '\u{1b}']), "{text}");
    assert!(text.len() < 400, "{text}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    #[test]
    fn no_mutation_of_a_model_panics(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..12)
    ) {
        let mut bytes = rich_model().0;
        for (at, byte, how) in edits {
            if bytes.is_empty() {
                break;
            }
            let at = at.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => bytes[at] ^= 1 << (byte % 8),
                2 => bytes.insert(at, byte),
                _ => bytes.truncate(at),
            }
        }
        if let Ok(summary) = summarize(&bytes.as_slice()) {
            for reference in summary.external {
                prop_assert!(!reference.location.starts_with('/'));
                prop_assert!(!reference.location.split('/').any(|part| part == ".."));
            }
        }
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = summarize(&bytes.as_slice());
    }
}

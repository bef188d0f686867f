use std::io::Write;

use super::super::writer::*;
use super::*;
use crate::onnx::summarize;

const LOCATION: &str = "weights";

fn on_disk(model: &Message) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&model.0).unwrap();
    file
}

fn read(apart: &TakenApart, file: &File) -> io::Result<Vec<u8>> {
    let mut weights = vec![0xee; apart.size() as usize];
    apart.read(file, &mut weights).map(|()| weights)
}

const DOUBLE: i64 = 11;

fn taken_apart(file: &File) -> TakenApart {
    TakenApart::of(file, LOCATION, 0).unwrap().unwrap()
}

/// So many elements of eight bytes, as whole numbers that count up from `first`.
fn numbers(name: &str, count: i64, first: i64) -> Message {
    tensor(name, DOUBLE, &[count]).bytes(9, raw(first, count))
}

fn raw(first: i64, count: i64) -> Vec<u8> {
    (first..first + count)
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

#[test]
fn large_initializers_are_taken_out_and_lie_apart() {
    let graph = Message::new()
        .message(5, numbers("a", 513, 0))
        .message(1, node("y = Identity(a)", vec![]))
        .message(5, numbers("small", 512, 7))
        .message(5, numbers("b", 1_000, 5))
        .message(12, value("y", DOUBLE, &[513]));
    let whole = model(graph);
    let file = on_disk(&whole);
    let apart = taken_apart(&file);

    let summary = summarize(&apart.graph.as_slice()).unwrap();
    let places = [(0, 513 * 8), (4_160, 8_000)].map(|(offset, length)| ExternalData {
        location: LOCATION.to_owned(),
        offset,
        length: Some(length),
    });
    assert_eq!(summary.external, places);
    assert_eq!(
        summary.outputs,
        summarize(&whole.0.as_slice()).unwrap().outputs
    );
    assert!(apart.graph.len() < 5_000, "{} bytes", apart.graph.len());

    let weights = read(&apart, &file).unwrap();
    assert_eq!(weights.len(), 12_160);
    assert_eq!(weights[..4_104], raw(0, 513));
    assert_eq!(weights[4_104..4_160], [0xee; 56]);
    assert_eq!(weights[4_160..], raw(5, 1_000));
}

#[test]
fn what_is_no_plain_initializer_stays_in_the_graph() {
    let branch = Message::new().message(5, numbers("deep", 1_000, 0));
    let sparse = Message::new()
        .message(1, numbers("s", 1_000, 0))
        .message(2, numbers("", 1_000, 0))
        .int(3, 4_000);
    let constant = tensor_attribute("value", numbers("c", 1_000, 0));
    let encoded = tensor("encoded", INT64, &[100_000]).bytes(7, vec![1; 100_000]);
    let indices = ints("indices", &[8_192], &[1; 8_192]);
    let short = tensor("short", DOUBLE, &[2_000]).bytes(9, raw(0, 1_000));
    let text = tensor("text", 8, &[1]).bytes(6, vec![b'x'; 10_000]);
    let graph = Message::new()
        .message(1, node("y = If(c)", vec![graph_attribute("b", branch)]))
        .message(1, node("c = Constant()", vec![constant]))
        .messages(5, [encoded, indices, short, text])
        .message(15, sparse)
        .message(12, value("y", INT64, &[1]));
    let whole = model(graph);
    let apart = taken_apart(&on_disk(&whole));
    assert_eq!(apart.size(), 0);
    assert_eq!(apart.graph, whole.0);
}

#[test]
fn weights_of_many_chunks_are_read_whole() {
    let count = (2 * CHUNK + 4_096) as i64 / 8;
    let graph = Message::new()
        .message(5, numbers("one", count, 1))
        .message(5, numbers("other", count, -count));
    let file = on_disk(&model(graph));
    let apart = taken_apart(&file);
    let weights = read(&apart, &file).unwrap();
    assert_eq!(weights, [raw(1, count), raw(-count, count)].concat());
}

#[test]
fn a_file_that_was_cut_off_since_is_an_error() {
    let file = on_disk(&model(Message::new().message(5, numbers("a", 1_000, 0))));
    let apart = taken_apart(&file);
    file.set_len(100).unwrap();
    let error = read(&apart, &file).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn what_is_not_worthwhile_or_refers_to_other_files_is_left_alone() {
    let inside = Message::new().message(5, numbers("a", 1_000, 0));
    let file = on_disk(&model(inside.clone()));
    let of = |file, worthwhile| TakenApart::of(file, LOCATION, worthwhile).unwrap();
    assert!(of(&file, 8_000).is_some());
    assert!(of(&file, 8_001).is_none());
    let outside = external("b", &[1], &[("location", "b.bin")]);
    let file = on_disk(&model(inside.message(5, outside)));
    assert!(of(&file, 8_000).is_none());
}

#[test]
fn values_that_are_written_one_by_one_are_taken_out_as_well() {
    let floats = tensor("f", FLOAT, &[2_000]).bytes(4, vec![7; 8_000]);
    let file = on_disk(&model(Message::new().message(5, floats)));
    let apart = taken_apart(&file);
    assert_eq!(read(&apart, &file).unwrap(), [7; 8_000]);
    assert!(apart.graph.len() < 200, "{} bytes", apart.graph.len());
}

/// A file that is others' may change between two looks at it.
#[test]
fn a_file_that_nests_deeper_than_when_it_was_walked_is_refused() {
    let mut rewrite = Rewrite::default();
    let mut nested = Message::new().int(1, 1);
    for _ in 0..1_000 {
        nested = Message::new().message(1, nested);
    }
    let place = ExternalData {
        location: LOCATION.to_owned(),
        offset: 0,
        length: None,
    };
    rewrite.places.insert(nested.0.len() as u64 - 2, place);
    let refused = rewrite.apply(&nested.0.as_slice()).unwrap_err();
    assert!(refused.to_string().contains("nested deeper"), "{refused}");
}

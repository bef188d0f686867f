use std::collections::BTreeMap;

use bytes::Bytes;

use super::*;
use crate::onnx::writer::*;
use crate::repository::{Examined, GraphFile, ModelDir, Repository};
use crate::safetensors::writer::{Tensor, padded};
use crate::store::Digest;

const FLOAT16: i64 = 10;
const BFLOAT16: i64 = 16;

/// Name, type by number and by name, shape, bytes.
type Weight = (&'static str, i64, &'static str, &'static [i64], Vec<u8>);

fn weights() -> Vec<Weight> {
    let floats = [1.5f32, -2.0, 0.0, 3.25].map(f32::to_le_bytes).concat();
    let halves = [0x3c00u16, 0xc000, 0x0001, 0x7bff]
        .map(u16::to_le_bytes)
        .concat();
    let numbers = [-1i64, i64::MAX].map(i64::to_le_bytes).concat();
    vec![
        ("w", FLOAT, "F32", &[2, 2], floats),
        ("h", FLOAT16, "F16", &[4], halves.clone()),
        ("b", BFLOAT16, "BF16", &[2, 2], halves),
        ("n", INT64, "I64", &[2], numbers),
        ("none", FLOAT, "F32", &[0, 4], Vec::new()),
        ("flags", 9, "BOOL", &[3], vec![1, 0, 1]),
        ("scalar", 3, "I8", &[], vec![0xfe]),
    ]
}

fn graph_of(initializers: Vec<Message>, inputs: Vec<Message>) -> Vec<u8> {
    let graph = Message::new()
        .message(1, node("y = Identity(x)", vec![]))
        .messages(5, initializers)
        .message(11, value("x", FLOAT, &[-1, 2]))
        .messages(11, inputs)
        .message(12, value("y", FLOAT, &[-1, 2]));
    model(graph).0
}

fn version(files: Vec<(&str, Vec<u8>)>) -> GraphFile {
    let files: BTreeMap<String, Bytes> = files
        .into_iter()
        .map(|(name, bytes)| (format!("1/{name}"), Bytes::from(bytes)))
        .collect();
    let model = ModelDir::in_memory("m", files).unwrap();
    model.open_graph(1, "model.onnx").unwrap()
}

fn at(location: &str, place: Option<(usize, usize)>) -> Vec<Message> {
    let entry = |key: &str, value: &str| Message::new().bytes(1, key).bytes(2, value);
    let mut entries = vec![entry("location", location)];
    if let Some((offset, length)) = place {
        entries.push(entry("offset", &offset.to_string()));
        entries.push(entry("length", &length.to_string()));
    }
    entries
}

fn inline() -> GraphFile {
    let tensors = weights()
        .into_iter()
        .map(|(name, kind, _, dims, bytes)| tensor(name, kind, dims).bytes(9, bytes));
    version(vec![("model.onnx", graph_of(tensors.collect(), vec![]))])
}

/// In the fields that ONNX has for each type, packed and not.
fn typed() -> GraphFile {
    let tensors = weights().into_iter().map(|(name, kind, _, dims, bytes)| {
        let tensor = tensor(name, kind, dims);
        match kind {
            FLOAT => tensor.bytes(4, bytes),
            INT64 => bytes.chunks(8).fold(tensor, |tensor, chunk| {
                tensor.int(7, i64::from_le_bytes(chunk.try_into().unwrap()))
            }),
            FLOAT16 | BFLOAT16 => bytes.chunks(2).fold(tensor, |tensor, chunk| {
                tensor.int(5, i64::from(u16::from_le_bytes(chunk.try_into().unwrap())))
            }),
            _ => bytes.iter().fold(tensor, |tensor, &byte| {
                tensor.int(5, i64::from(byte.cast_signed()))
            }),
        }
    });
    version(vec![("model.onnx", graph_of(tensors.collect(), vec![]))])
}

fn external_file() -> GraphFile {
    let mut data = vec![0; 3];
    let tensors = weights().into_iter().map(|(name, kind, _, dims, bytes)| {
        let place = (data.len(), bytes.len());
        data.extend_from_slice(&bytes);
        data.push(0xff);
        tensor(name, kind, dims)
            .messages(13, at("weights.bin", Some(place)))
            .int(14, 1)
    });
    let graph = graph_of(tensors.collect(), vec![]);
    version(vec![("model.onnx", graph), ("weights.bin", data)])
}

fn stored() -> Vec<u8> {
    let weights = weights();
    let tensors: Vec<Tensor<'_>> = weights
        .iter()
        .rev()
        .map(|(name, _, dtype, dims, bytes)| (*name, *dtype, *dims, bytes.as_slice()))
        .collect();
    padded(&tensors, 3)
}

fn safetensors_by_input() -> GraphFile {
    let inputs = weights()
        .into_iter()
        .map(|(name, kind, _, dims, _)| value(name, kind, dims));
    let graph = graph_of(vec![], inputs.collect());
    version(vec![("model.onnx", graph), ("model.safetensors", stored())])
}

fn safetensors_by_reference() -> GraphFile {
    let tensors = weights().into_iter().map(|(name, kind, _, dims, _)| {
        tensor(name, kind, dims)
            .messages(13, at("w.safetensors", None))
            .int(14, 1)
    });
    let graph = graph_of(tensors.collect(), vec![]);
    version(vec![("model.onnx", graph), ("w.safetensors", stored())])
}

fn forms() -> [(&'static str, GraphFile); 5] {
    [
        ("inline", inline()),
        ("typed", typed()),
        ("external", external_file()),
        ("safetensors by input", safetensors_by_input()),
        ("safetensors by reference", safetensors_by_reference()),
    ]
}

#[test]
fn every_form_of_the_same_weights_gives_the_same_tensors() {
    let expected: Vec<_> = weights()
        .into_iter()
        .map(|(name, kind, _, dims, bytes)| {
            let element = ElementType(kind as i32);
            (
                name.to_owned(),
                element,
                dims.to_vec(),
                Some(Digest::of(&bytes)),
            )
        })
        .collect();
    for (form, graph) in forms() {
        let mut manifest = graph.examine().unwrap().manifest;
        manifest.digest_tensors(&graph, &mut |_| {}).unwrap();
        let tensors = manifest.tensors.iter();
        let found: Vec<_> = tensors
            .map(|tensor| {
                let ManifestTensor {
                    name,
                    element,
                    dims,
                    digest,
                    ..
                } = tensor.clone();
                (name, element, dims, digest)
            })
            .collect();
        assert_eq!(found, expected, "{form}");
    }
}

#[test]
fn a_plan_reads_every_file_and_counts_every_byte() {
    let bytes: usize = weights().iter().map(|(.., bytes)| bytes.len()).sum();
    for (form, graph) in forms() {
        let Examined { manifest, summary } = graph.examine().unwrap();
        let plan = manifest.plan();
        assert_eq!(plan.bytes_read_only, bytes as u64, "{form}");
        assert_eq!(plan.bytes_read, graph.load().unwrap().bytes, "{form}");
        assert_eq!(plan.read.len(), manifest.files.len());
        assert_eq!(plan.read[0].path, "m/1/model.onnx");
        assert!(plan.bytes_context > 0);
        assert_eq!(manifest.inputs.len(), 1);
        assert_eq!(summary.inputs.len(), 1, "{form}");
    }
}

#[test]
fn a_manifest_survives_being_written_down() {
    for (_, graph) in forms() {
        let mut manifest = graph.examine().unwrap().manifest;
        manifest.digest_files(&graph, &mut |_| {}).unwrap();
        let text = serde_json::to_string(&manifest).unwrap();
        let back: Manifest = serde_json::from_str(&text).unwrap();
        assert_eq!(back, manifest);
    }
}

#[test]
fn constants_that_are_weights_are_listed_and_settings_are_not() {
    let large = tensor("", FLOAT, &[256]).bytes(9, [1; 1024]);
    let small = tensor("", FLOAT, &[4]).bytes(9, [1; 16]);
    let inner = Message::new()
        .message(5, tensor("u", FLOAT, &[4]).bytes(9, [1; 16]))
        .message(1, node("i = Identity(u)", vec![]))
        .message(12, value("i", FLOAT, &[4]));
    let graph = Message::new()
        .message(
            1,
            node("big = Constant()", vec![tensor_attribute("value", large)]),
        )
        .message(
            1,
            node(
                "little = Constant()",
                vec![tensor_attribute("value", small)],
            ),
        )
        .message(
            1,
            node("y = If(c)", vec![graph_attribute("then_branch", inner)]),
        )
        .message(11, value("c", 9, &[]))
        .message(12, value("y", FLOAT, &[4]));
    let manifest = version(vec![("model.onnx", model(graph).0)])
        .examine()
        .unwrap()
        .manifest;
    let found: Vec<_> = manifest
        .tensors
        .iter()
        .map(|tensor| (tensor.name.as_str(), tensor.is_constant, tensor.in_subgraph))
        .collect();
    assert_eq!(found, [("big", true, false), ("u", false, true)]);
    assert_eq!(manifest.nodes, 4);
    assert_eq!(manifest.inputs[0].bytes, Some(1));
}

#[test]
fn the_digest_of_a_file_is_that_of_its_bytes_and_not_of_others_in_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m/1/model.onnx");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let first = graph_of(vec![], vec![]);
    std::fs::write(&path, &first).unwrap();
    let model = Repository::open(folder.path()).unwrap().model("m").unwrap();
    let graph = model.open_graph(1, "model.onnx").unwrap();
    let mut manifest = graph.examine().unwrap().manifest;
    let mut read = 0;
    manifest
        .digest_files(&graph, &mut |bytes| read += bytes)
        .unwrap();
    assert_eq!(manifest.files[0].digest, Some(Digest::of(&first)));
    assert_eq!(read, first.len() as u64);
    let second = graph_of(vec![], vec![value("z", FLOAT, &[1])]);
    std::fs::write(&path, &second).unwrap();
    assert!(manifest.digest_files(&graph, &mut |_| {}).is_err());
}

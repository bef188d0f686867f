use std::collections::BTreeMap;

use bytes::Bytes;
use expect_test::{Expect, expect};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::graph::GraphSummary;
use crate::manifest::{FileRole, TensorPlace};
use crate::onnx::writer::*;
use crate::repository::{Examined, GraphFile, LoadedGraph, ModelDir, Repository, RepositoryError};
use crate::safetensors::writer::{Tensor, file, padded};

const F32: [u8; 16] = [7; 16];

/// `y = x · w`, with `w` an input.
fn with_input(w: Message) -> Vec<u8> {
    let graph = Message::new()
        .message(1, node("y = MatMul(x,w)", vec![]))
        .message(11, value("x", FLOAT, &[-1, 2]))
        .message(11, w)
        .message(12, value("y", FLOAT, &[-1, 2]));
    model(graph).0
}

fn plain_input() -> Vec<u8> {
    with_input(value("w", FLOAT, &[2, 2]))
}

/// The same, with `w` an initializer that names a file.
fn with_reference(entries: &[(&str, &str)]) -> Vec<u8> {
    let graph = Message::new()
        .message(1, node("y = MatMul(x,w)", vec![]))
        .message(5, external("w", &[2, 2], entries))
        .message(11, value("x", FLOAT, &[-1, 2]))
        .message(12, value("y", FLOAT, &[-1, 2]));
    model(graph).0
}

struct Version {
    files: BTreeMap<String, Bytes>,
    named: Option<&'static str>,
}

impl Version {
    fn of(graph: Vec<u8>) -> Self {
        let files = BTreeMap::from([("1/model.onnx".to_owned(), Bytes::from(graph))]);
        Self { files, named: None }
    }

    fn with(mut self, name: &str, bytes: impl Into<Bytes>) -> Self {
        self.files.insert(format!("1/{name}"), bytes.into());
        self
    }

    fn weights(self, tensors: &[Tensor<'_>]) -> Self {
        self.with("model.safetensors", file(tensors))
    }

    fn named(mut self, name: &'static str) -> Self {
        self.named = Some(name);
        self
    }

    fn open(&self) -> GraphFile {
        let model = ModelDir::in_memory("m", self.files.clone()).unwrap();
        let graph = model.open_graph(1, "model.onnx").unwrap();
        graph.with_weights(self.named)
    }

    fn load(&self) -> LoadedGraph {
        self.open().load().unwrap()
    }

    /// Looks at the graph in every way there is; they must agree.
    fn look(&self) -> Result<(Examined, LoadedGraph), RepositoryError> {
        let open = self.open();
        let (summary, examined, loaded) = (open.summary(), open.examine(), open.load());
        let (Ok(summary), Ok(examined), Ok(loaded)) = (summary, examined, loaded) else {
            return Err(open.summary().unwrap_err());
        };
        assert_eq!(sorted(summary), sorted(loaded.summary.clone()));
        assert_eq!(
            sorted(examined.summary.clone()),
            sorted(loaded.summary.clone())
        );
        Ok((examined, loaded))
    }

    fn refused(&self, expected: &Expect) {
        expected.assert_eq(&self.look().unwrap_err().to_string());
        self.open().load().unwrap_err();
    }

    /// Serves with `w` still an input, and this warning.
    fn ignored(&self, expected: &Expect) {
        let (examined, loaded) = self.look().unwrap();
        assert_eq!(inputs(&examined.summary), ["x", "w"]);
        assert!(loaded.external.is_empty());
        expected.assert_eq(&examined.summary.warnings.join("\n"));
    }
}

fn sorted(mut summary: GraphSummary) -> GraphSummary {
    summary
        .external
        .sort_by(|a, b| (&a.location, a.offset).cmp(&(&b.location, b.offset)));
    summary
}

fn inputs(summary: &GraphSummary) -> Vec<&str> {
    summary
        .inputs
        .iter()
        .map(|input| input.name.as_str())
        .collect()
}

#[test]
fn an_input_becomes_an_initializer_when_the_usual_file_holds_it() {
    let version = Version::of(plain_input()).weights(&[("w", "F32", &[2, 2], &F32)]);
    let (examined, loaded) = version.look().unwrap();
    assert_eq!(inputs(&examined.summary), ["x"]);
    assert!(examined.summary.warnings.is_empty());
    let [reference] = &loaded.summary.external[..] else {
        panic!("one reference");
    };
    let (location, bytes) = &loaded.external[0];
    assert_eq!(
        (location.as_str(), &reference.location),
        ("model.safetensors", location)
    );
    let start = reference.offset as usize;
    assert_eq!(bytes[start..start + 16], F32);
    let manifest = examined.manifest;
    assert_eq!(manifest.files[1].role, FileRole::Safetensors);
    assert!(matches!(
        manifest.tensors[0].place,
        TensorPlace::Safetensors {
            file: 1,
            length: 16,
            ..
        }
    ));
}

#[test]
fn a_reference_without_a_place_is_looked_up_by_name() {
    let reference = with_reference(&[("location", "./deep/w.safetensors")]);
    let bytes = padded(&[("v", "U8", &[1], &[9]), ("w", "F32", &[2, 2], &F32)], 4);
    let version = Version::of(reference).with("deep/w.safetensors", bytes);
    let (examined, loaded) = version.look().unwrap();
    assert_eq!(inputs(&examined.summary), ["x"]);
    let reference = &loaded.summary.external[0];
    let start = reference.offset as usize;
    assert_eq!(loaded.external[0].1[start..start + 16], F32);
    assert_eq!(start % 2, 1);
    expect!["1 of the 2 tensors in 'deep/w.safetensors' are not used by the graph: 'v'"]
        .assert_eq(&examined.summary.warnings.join("\n"));
}

#[test]
fn references_with_a_place_are_left_as_they_are() {
    let bytes = file(&[("other", "F32", &[2, 2], &F32)]);
    let start = (bytes.len() - 16).to_string();
    let entries = [("location", "w.safetensors"), ("offset", start.as_str())];
    let graph = with_reference(&entries);
    let version = Version::of(graph.clone()).with("w.safetensors", bytes);
    let (examined, loaded) = version.look().unwrap();
    assert_eq!(loaded.graph, graph);
    assert_eq!(examined.manifest.files[1].role, FileRole::ExternalData);
}

#[test]
fn references_inside_subgraphs_are_found_too() {
    let branch = |name: &str, entries: &[(&str, &str)]| {
        Message::new()
            .message(1, node(&format!("{name} = Identity(w)"), vec![]))
            .message(5, external("w", &[2, 2], entries))
            .message(12, value(name, FLOAT, &[2, 2]))
    };
    let by_name = [("location", "w.safetensors")];
    let choice = node(
        "y = If(c)",
        vec![
            graph_attribute("then_branch", branch("t", &by_name)),
            graph_attribute("else_branch", branch("e", &by_name)),
        ],
    );
    let graph = Message::new()
        .message(1, choice)
        .message(11, value("c", 9, &[]))
        .message(12, value("y", FLOAT, &[2, 2]));
    let version =
        Version::of(model(graph).0).with("w.safetensors", file(&[("w", "F32", &[2, 2], &F32)]));
    let (examined, loaded) = version.look().unwrap();
    assert_eq!(loaded.summary.external.len(), 2);
    assert!(loaded.summary.external.iter().all(|data| data.offset > 8));
    assert!(
        examined
            .manifest
            .tensors
            .iter()
            .all(|tensor| tensor.in_subgraph)
    );
}

#[test]
fn nothing_that_nobody_asked_for_changes_a_graph() {
    Version::of(plain_input())
        .weights(&[("w", "F32", &[2, 2], &F32), ("b", "F32", &[2], &F32[..8])])
        .ignored(&expect!["'model.safetensors' beside the graph is not used: its tensor 'b' is no input of the graph; the parameter 'dormouse.weights' can say that it is meant"]);
    Version::of(plain_input())
        .weights(&[("x", "F32", &[2, 2], &F32), ("w", "F32", &[2, 2], &F32)])
        .ignored(&expect!["'model.safetensors' beside the graph is not used: input 'x' has an open shape; the parameter 'dormouse.weights' can say that it is meant"]);
    Version::of(plain_input())
        .with("model.safetensors", "nonsense")
        .ignored(&expect!["'model.safetensors' beside the graph is not used: 'm/1/model.safetensors' is not a safetensors file that can be used: its header has 7310308002159816558 bytes, at most 1048576 are allowed; the parameter 'dormouse.weights' can say that it is meant"]);
    Version::of(plain_input())
        .with("other.safetensors", file(&[("w", "F32", &[2, 2], &F32)]))
        .ignored(&expect![""]);
    let fixed = Message::new()
        .message(1, node("y = Identity(w)", vec![]))
        .message(11, value("w", FLOAT, &[2, 2]))
        .message(12, value("y", FLOAT, &[2, 2]));
    let all = Version::of(model(fixed).0).weights(&[("w", "F32", &[2, 2], &F32)]);
    let (examined, _) = all.look().unwrap();
    assert_eq!(inputs(&examined.summary), ["w"]);
    expect!["'model.safetensors' beside the graph is not used: no input would be left; the parameter 'dormouse.weights' can say that it is meant"]
        .assert_eq(&examined.summary.warnings.join("\n"));
}

#[test]
fn a_named_file_is_used_and_what_is_left_over_is_told() {
    let spare: Vec<String> = (0..7).map(|at| format!("spare{at}")).collect();
    let mut tensors: Vec<Tensor<'_>> = vec![("w", "F32", &[2, 2], &F32)];
    tensors.extend(
        spare
            .iter()
            .map(|name| (name.as_str(), "U8", &[1i64][..], &[1u8][..])),
    );
    let version = Version::of(with_input(value("w", FLOAT, &[-1, 2])))
        .with("trained.safetensors", file(&tensors))
        .named("trained.safetensors");
    let (examined, _) = version.look().unwrap();
    assert_eq!(inputs(&examined.summary), ["x"]);
    expect!["7 of the 8 tensors in 'trained.safetensors' are not used by the graph: 'spare0', 'spare1', 'spare2', 'spare3', 'spare4', and 2 more"]
        .assert_eq(&examined.summary.warnings.join("\n"));
    Version::of(plain_input())
        .with("trained.safetensors", file(&[("v", "U8", &[1], &[1])]))
        .named("trained.safetensors")
        .refused(&expect!["'m/1/model.onnx' cannot be given its weights: none of the 1 tensors in 'trained.safetensors' is an input of the graph ('v')"]);
    Version::of(plain_input())
        .named("trained.safetensors")
        .refused(&expect!["'m/1/trained.safetensors' does not exist"]);
    for (name, expected) in [
        (
            "weights.bin",
            expect![
                "'m/1/model.onnx' cannot be given its weights: dormouse.weights is 'weights.bin', which ends neither in '.safetensors' nor in '.safetensors.index.json'"
            ],
        ),
        (
            "../w.safetensors",
            expect![
                "'m/1/model.onnx' cannot be given its weights: dormouse.weights is '../w.safetensors', which is not a path in the version's folder: it contains '..'"
            ],
        ),
    ] {
        Version::of(plain_input()).named(name).refused(&expected);
    }
}

#[test]
fn types_and_shapes_must_match() {
    let check = |tensor: Tensor<'_>, by_input: Expect, by_reference: Expect| {
        Version::of(plain_input())
            .weights(&[tensor])
            .refused(&by_input);
        let reference = with_reference(&[("location", "model.safetensors")]);
        Version::of(reference)
            .weights(&[tensor])
            .refused(&by_reference);
    };
    check(
        ("w", "F16", &[2, 2], &F32[..8]),
        expect![
            "'m/1/model.onnx' cannot be given its weights: tensor 'w' is float in the graph and F16 in 'model.safetensors'"
        ],
        expect![
            "'m/1/model.onnx' cannot be given its weights: tensor 'w' is float in the graph and F16 in 'model.safetensors'"
        ],
    );
    check(
        ("w", "F32", &[4], &F32),
        expect![
            "'m/1/model.onnx' cannot be given its weights: tensor 'w' has the shape [2, 2] in the graph and [4] in 'model.safetensors'"
        ],
        expect![
            "'m/1/model.onnx' cannot be given its weights: tensor 'w' has the shape [2, 2] in the graph and [4] in 'model.safetensors'"
        ],
    );
    let reference = with_reference(&[("location", "model.safetensors")]);
    Version::of(reference)
        .weights(&[("v", "F32", &[2, 2], &F32)])
        .refused(&expect![
            "'m/1/model.onnx' cannot be given its weights: tensor 'w' is not in 'model.safetensors'"
        ]);
}

/// `y = x · w + b`, both inputs.
fn two_inputs() -> Vec<u8> {
    let graph = Message::new()
        .message(1, node("s = MatMul(x,w)", vec![]))
        .message(1, node("y = Add(s,b)", vec![]))
        .message(11, value("w", FLOAT, &[2, 2]))
        .message(11, value("x", FLOAT, &[-1, 2]))
        .message(11, value("b", 10, &[2]))
        .message(12, value("y", FLOAT, &[-1, 2]));
    model(graph).0
}

fn sharded(map: &str) -> Version {
    Version::of(two_inputs())
        .with("a.safetensors", file(&[("w", "F32", &[2, 2], &F32)]))
        .with("b.safetensors", file(&[("b", "F16", &[2], &F32[..4])]))
        .with(
            "model.safetensors.index.json",
            format!(r#"{{"metadata":{{"total_size":20}},"weight_map":{{{map}}}}}"#),
        )
}

#[test]
fn shards_are_found_by_their_index() {
    let version = sharded(r#""w":"a.safetensors","b":"b.safetensors""#);
    let (examined, loaded) = version.look().unwrap();
    assert_eq!(inputs(&examined.summary), ["x"]);
    let roles: Vec<FileRole> = examined
        .manifest
        .files
        .iter()
        .map(|file| file.role)
        .collect();
    assert_eq!(
        roles,
        [
            FileRole::Graph,
            FileRole::Safetensors,
            FileRole::Safetensors,
            FileRole::SafetensorsIndex
        ]
    );
    let locations: Vec<&str> = loaded.external.iter().map(|(at, _)| at.as_str()).collect();
    assert_eq!(locations, ["a.safetensors", "b.safetensors"]);
}

#[test]
fn an_index_that_does_not_match_its_files_is_refused() {
    let named = |map| sharded(map).named("model.safetensors.index.json");
    named(r#""w":"a.safetensors","b":"a.safetensors""#).refused(&expect![
        "'m/1/model.onnx' cannot be given its weights: tensor 'b' is not in 'a.safetensors'"
    ]);
    named(r#""w":"a.safetensors","b":"b.safetensors""#)
        .with("b.safetensors", file(&[("b", "F16", &[2], &F32[..4]), ("w", "U8", &[1], &[1])]))
        .refused(&expect!["'m/1/model.onnx' cannot be given its weights: tensor 'w' is in 'a.safetensors' and in 'b.safetensors'"]);
    named(r#""w":"../a.safetensors""#)
        .refused(&expect!["'m/1/model.onnx' cannot be given its weights: 'model.safetensors.index.json' says that tensor 'w' is in '../a.safetensors', which is not a file beside it"]);
    named(r#""w":"a.safetensors","w":"b.safetensors""#)
        .refused(&expect!["'m/1/model.onnx' cannot be given its weights: 'model.safetensors.index.json' is not an index of safetensors files: 'w' is given twice at line 1 column 84"]);
    named(r#""w":"gone.safetensors""#).refused(&expect!["'m/1/gone.safetensors' does not exist"]);
}

#[test]
fn a_graph_given_its_weights_is_judged_like_one_that_holds_them() {
    let inside = Message::new()
        .message(1, node("y = MatMul(x,w)", vec![]))
        .message(5, tensor("w", FLOAT, &[2, 2]).bytes(9, F32))
        .message(11, value("x", FLOAT, &[-1, 2]))
        .message(12, value("y", FLOAT, &[-1, 2]));
    let inside = Version::of(model(inside).0).load().summary;
    let beside = Version::of(plain_input())
        .weights(&[("w", "F32", &[2, 2], &F32)])
        .load()
        .summary;
    assert_eq!(inside.inputs, beside.inputs);
    assert_eq!(inside.outputs, beside.outputs);
    assert_eq!(inside.batch_coupling, beside.batch_coupling);
    assert_eq!(inside.operators, beside.operators);
}

#[test]
fn files_that_could_be_somebody_elses_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let version = folder.path().join("models/m/1");
    std::fs::create_dir_all(&version).unwrap();
    let reference = with_reference(&[("location", "model.safetensors")]);
    std::fs::write(version.join("model.onnx"), reference).unwrap();
    let secret = folder.path().join("secret.safetensors");
    std::fs::write(&secret, file(&[("w", "F32", &[2, 2], &F32)])).unwrap();
    let repository = Repository::open(folder.path().join("models")).unwrap();
    let load = || repository.model("m")?.open_graph(1, "model.onnx")?.load();
    let beside = version.join("model.safetensors");
    std::os::unix::fs::symlink(&secret, &beside).unwrap();
    expect!["'m/1/model.safetensors' is a link that leads out of the repository"]
        .assert_eq(&load().unwrap_err().to_string());
    std::fs::remove_file(&beside).unwrap();
    std::fs::hard_link(&secret, &beside).unwrap();
    let hard = load().unwrap_err();
    assert!(
        matches!(hard, RepositoryError::HardLinked { links: 2, .. }),
        "{hard}"
    );
    std::fs::remove_file(&beside).unwrap();
    std::fs::copy(&secret, &beside).unwrap();
    load().unwrap();
}

proptest! {
    /// However the files are damaged, looking and loading come to the same end.
    #[test]
    fn damage_is_judged_alike_by_looking_and_by_loading(
        by_input in any::<bool>(),
        edits in vec((any::<bool>(), any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut graph = match by_input {
            true => plain_input(),
            false => with_reference(&[("location", "model.safetensors")]),
        };
        let mut weights = padded(&[("w", "F32", &[2, 2], &F32)], 2);
        for (in_graph, at, byte) in edits {
            let bytes = if in_graph { &mut graph } else { &mut weights };
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let version = Version::of(graph).with("model.safetensors", weights);
        let open = version.open();
        match (open.summary(), open.load()) {
            (Ok(looked), Ok(loaded)) => prop_assert_eq!(sorted(looked), sorted(loaded.summary)),
            (Ok(_), Err(RepositoryError::NotFound { .. })) => {}
            (Ok(_), Err(RepositoryError::ExternalDataTooShort { .. })) => {}
            (Err(_), Err(_)) => {}
            (looked, loaded) => prop_assert!(false, "{looked:?} but {loaded:?}"),
        }
    }
}

use std::fs;
use std::sync::Weak;

use super::super::graph_inputs::{hide_shapes, hides_shapes};
use super::super::packed::open_families;
use super::graph::{
    Graph, Proto, external_tensor, graph_attribute, identity, node, tensor as initializer,
    tensor_attribute, value_info,
};
use super::*;
use crate::engine::{OptimizeError, Optimized, Packing, PreparedBytes, SharedWeight};

const FLOAT: u64 = 1;
const N: i64 = 64;

fn model_file(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models");
    fs::read(folder.join(name)).unwrap()
}

/// Values that repeat late, so that a wrong place shows.
fn ramp(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i % 251) as f32 / 251.0 - 0.5).collect()
}

fn raw(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn weight(name: &str, dims: &[i64]) -> Proto {
    let count = dims.iter().product::<i64>() as usize;
    initializer(name, FLOAT, dims, &raw(&ramp(count)))
}

/// `y = relu(x · w) · v + k`, with `k` a constant node.
fn layers() -> Graph {
    let mut graph = identity(FLOAT, &[-1, N]);
    let constant = initializer("", FLOAT, &[N], &raw(&ramp(N as usize)));
    graph.initializers = vec![weight("w", &[N, N]), weight("v", &[N, N])];
    graph.nodes = vec![
        node("Constant", &[], &["k"]).messages(5, &[tensor_attribute("value", &constant)]),
        node("MatMul", &["x", "w"], &["a"]),
        node("Relu", &["a"], &["b"]),
        node("MatMul", &["b", "v"], &["c"]),
        node("Add", &["c", "k"], &["y"]),
    ];
    graph
}

struct Prepared {
    optimized: Optimized,
    data: Bytes,
}

impl Prepared {
    fn new(model: Vec<u8>) -> Self {
        Self::with(model, Vec::new(), &SessionSpec::default()).unwrap()
    }

    fn with(
        graph: Vec<u8>,
        external: Vec<(String, Vec<u8>)>,
        spec: &SessionSpec,
    ) -> Result<Self, OptimizeError> {
        let scratch = tempfile::tempdir().unwrap();
        let model = ModelBytes::in_memory(graph, external);
        let optimized = engine().optimize(model, spec, scratch.path())?;
        let data = match &optimized.data_file {
            Some(file) => fs::read(file).unwrap().into(),
            None => Bytes::new(),
        };
        Ok(Self { optimized, data })
    }

    fn bytes(&self) -> PreparedBytes {
        let weights = self.optimized.tensors.iter().map(|tensor| SharedWeight {
            name: tensor.name.clone(),
            element_type: tensor.element_type,
            dims: tensor.dims.clone(),
            data: self
                .data
                .slice(tensor.offset as usize..(tensor.offset + tensor.len) as usize),
        });
        PreparedBytes {
            graph: self.optimized.graph.clone().into(),
            weights: weights.collect(),
            family: None,
        }
    }

    fn open(&self, packing: Packing) -> Arc<dyn Session> {
        open_prepared(self.bytes(), packing).unwrap()
    }

    fn names(&self) -> Vec<&str> {
        let tensors = self.optimized.tensors.iter();
        tensors.map(|tensor| tensor.name.as_str()).collect()
    }
}

fn open_prepared(model: PreparedBytes, packing: Packing) -> Result<Arc<dyn Session>, EngineError> {
    engine().open_prepared(model, &SessionSpec::default(), packing)
}

fn plain(graph: Vec<u8>, external: Vec<(String, Vec<u8>)>) -> Arc<dyn Session> {
    let model = ModelBytes::in_memory(graph, external);
    engine()
        .open(model, &SessionSpec::default(), Effort::Full)
        .unwrap()
}

fn close(a: &Tensor, b: &Tensor) -> bool {
    let values = |tensor: &Tensor| -> Vec<f32> {
        let (chunks, _) = tensor.data.as_chunks::<4>();
        chunks
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect()
    };
    a.shape == b.shape
        && values(a)
            .iter()
            .zip(values(b))
            .all(|(a, b)| (a - b).abs() <= 1e-4 * (1.0 + b.abs()))
}

/// The prepared model answers like the plain one, packed and unpacked, and tells the same
/// signature.
fn check_same(graph: Vec<u8>, external: Vec<(String, Vec<u8>)>, inputs: &[Tensor]) -> Prepared {
    let plain = plain(graph.clone(), external.clone());
    let prepared = Prepared::with(graph, external, &SessionSpec::default()).unwrap();
    let expected = run(&*plain, inputs).unwrap();
    for packing in [Packing::Off, Packing::On] {
        let session = prepared.open(packing);
        assert_eq!(session.inputs(), plain.inputs());
        assert_eq!(session.optional_inputs(), plain.optional_inputs());
        assert_eq!(session.outputs(), plain.outputs());
        let answers = run(&*session, inputs).unwrap();
        assert_eq!(answers.len(), expected.len());
        for (answer, expected) in answers.iter().zip(&expected) {
            assert!(close(answer, expected), "{packing:?}");
            if packing == Packing::On {
                assert_eq!(answer.data, expected.data);
            }
        }
    }
    prepared
}

#[test]
fn prepared_models_answer_like_plain_ones() {
    let rows = |n: usize, width: usize| floats(&[n as i64, width as i64], &ramp(n * width));
    let prepared = check_same(model_file("mlp.onnx"), Vec::new(), &[rows(3, 16)]);
    assert_eq!(prepared.names().len(), 1);
    check_same(
        model_file("conv.onnx"),
        Vec::new(),
        &[floats(&[2, 2, 8, 8], &ramp(256))],
    );
    let prepared = check_same(layers().model(), Vec::new(), &[rows(5, 64)]);
    assert_eq!(prepared.names(), ["w", "v"]);
    check_same(model_file("dynquant.onnx"), Vec::new(), &[rows(2, 8)]);
    check_same(
        model_file("scalar.onnx"),
        Vec::new(),
        &[floats(&[], &[21.0])],
    );
}

#[test]
fn weights_from_external_data_are_prepared() {
    let file = raw(&ramp(4 * N as usize * N as usize));
    let mut graph = layers();
    let place = ("deep/w.bin", Some(4096), Some(4 * (N * N) as u64));
    graph.initializers[0] = external_tensor("w", FLOAT, &[N, N], place);
    let external = vec![("deep/w.bin".to_owned(), file)];
    let input = floats(&[2, N], &ramp(2 * N as usize));
    let prepared = check_same(graph.model(), external, &[input]);
    assert_eq!(prepared.names().len(), 2);
}

#[test]
fn weights_of_subgraphs_stay_in_the_graph() {
    let branch = |name: &str, tensor: &str| Graph {
        nodes: vec![node("MatMul", &["c", tensor], &[name])],
        initializers: vec![weight(tensor, &[N, N])],
        outputs: vec![value_info(name, FLOAT, &[-1, N])],
        ..Graph::default()
    };
    let mut graph = layers();
    graph.nodes.pop();
    // One branch's weight has the name of one of the main graph.
    let branches = [
        graph_attribute("then_branch", &branch("t", "w")),
        graph_attribute("else_branch", &branch("e", "u")),
    ];
    graph
        .nodes
        .push(node("If", &["which"], &["y"]).messages(5, &branches));
    graph.inputs.push(value_info("which", 9, &[]));
    let model = graph.model();
    // ONNX Runtime may refuse a name that is used twice; then there is nothing to prepare.
    let opens = engine().open(
        ModelBytes::in_memory(model.clone(), Vec::new()),
        &SessionSpec::default(),
        Effort::Full,
    );
    let x = floats(&[2, N], &ramp(2 * N as usize));
    let which = |yes: u8| tensor(DataType::Bool, &[], vec![yes]);
    if opens.is_ok() {
        for yes in [0, 1] {
            let prepared = check_same(model.clone(), Vec::new(), &[x.clone(), which(yes)]);
            assert_eq!(prepared.names(), ["v"]);
        }
    }
    graph.nodes.pop();
    let branches = [
        graph_attribute("then_branch", &branch("t", "s")),
        graph_attribute("else_branch", &branch("e", "u")),
    ];
    graph
        .nodes
        .push(node("If", &["which"], &["y"]).messages(5, &branches));
    for yes in [0, 1] {
        let prepared = check_same(graph.model(), Vec::new(), &[x.clone(), which(yes)]);
        assert_eq!(prepared.names().len(), 2);
    }
}

#[test]
fn an_input_with_a_default_stays_in_the_graph_and_can_be_overridden() {
    let model = model_file("optional_input.onnx");
    let x = floats(&[1, 4], &[1.0; 4]);
    check_same(model.clone(), Vec::new(), std::slice::from_ref(&x));

    let mut graph = layers();
    graph.inputs.push(value_info("v", FLOAT, &[N, N]));
    let x = floats(&[1, N], &ramp(N as usize));
    let prepared = check_same(graph.model(), Vec::new(), std::slice::from_ref(&x));
    assert_eq!(prepared.names(), ["w"]);
    let v = floats(&[N, N], &vec![0.0; (N * N) as usize]);
    let session = prepared.open(Packing::Off);
    let answer = run(&*session, &[x, v]).unwrap().remove(0);
    assert_eq!(answer.data, raw(&ramp(N as usize)));
}

#[test]
fn an_output_that_is_a_weight_outlives_the_session() {
    let mut graph = identity(FLOAT, &[-1, N]);
    graph.initializers = vec![weight("w", &[N, N])];
    graph.nodes = vec![
        node("MatMul", &["x", "w"], &["y"]),
        node("Identity", &["w"], &["z"]),
    ];
    graph.outputs.push(value_info("z", FLOAT, &[N, N]));
    let prepared = Prepared::new(graph.model());
    let session = prepared.open(Packing::Off);
    let x = floats(&[1, N], &ramp(N as usize));
    let answer = run(&*session, &[x]).unwrap().remove(1);
    drop((session, prepared));
    assert_eq!(answer.data, raw(&ramp((N * N) as usize)));
}

#[test]
fn runtime_format_is_not_preparable() {
    let mut model = vec![0; 64];
    model[4..8].copy_from_slice(b"ORTM");
    let refused = Prepared::with(model, Vec::new(), &SessionSpec::default());
    assert!(matches!(refused, Err(OptimizeError::NotPreparable(_))));
}

#[test]
fn a_model_that_cannot_be_opened_cannot_be_optimised() {
    for name in ["corrupt.onnx", "custom_op.onnx", "empty.onnx"] {
        let refused = Prepared::with(model_file(name), Vec::new(), &SessionSpec::default());
        assert!(matches!(refused, Err(OptimizeError::Engine(_))), "{name}");
    }
}

#[test]
fn initializers_of_old_models_are_weights_though_they_are_inputs() {
    let mut graph = layers();
    graph.nodes.remove(0);
    graph.nodes.pop();
    graph.nodes.pop();
    graph.nodes.push(node("MatMul", &["b", "v"], &["y"]));
    graph.inputs.push(value_info("w", FLOAT, &[N, N]));
    graph.inputs.push(value_info("v", FLOAT, &[N, N]));
    let opset = Proto::default().bytes(1, "").number(2, 8);
    let model = Proto::default()
        .number(1, 3)
        .messages(8, &[opset])
        .messages(7, &[graph.proto()]);
    let x = floats(&[3, N], &ramp(3 * N as usize));
    let prepared = check_same(model.into_bytes(), Vec::new(), &[x]);
    assert_eq!(prepared.names().len(), 2);
}

#[test]
fn many_threads_run_a_prepared_session_at_once() {
    let prepared = Prepared::new(layers().model());
    let session = prepared.open(Packing::Off);
    let x = |row: i64| floats(&[1, N], &vec![row as f32; N as usize]);
    let expected: Vec<_> = (0..4)
        .map(|row| run(&*session, &[x(row)]).unwrap())
        .collect();
    std::thread::scope(|scope| {
        for row in 0..4 {
            let (session, expected) = (&session, &expected[row as usize]);
            scope.spawn(move || {
                for _ in 0..50 {
                    let answer = run(&**session, &[x(row)]).unwrap();
                    assert_eq!(answer[0].data, expected[0].data);
                }
            });
        }
    });
}

#[test]
fn weights_live_exactly_as_long_as_the_sessions_that_read_them() {
    struct Watched(Arc<()>, Bytes);
    impl AsRef<[u8]> for Watched {
        fn as_ref(&self) -> &[u8] {
            let _ = &self.0;
            &self.1
        }
    }
    let mut prepared = Prepared::new(layers().model());
    let alive = Arc::new(());
    let watch: Weak<()> = Arc::downgrade(&alive);
    prepared.data = Bytes::from_owner(Watched(alive, prepared.data.clone()));
    let (first, second) = (prepared.open(Packing::Off), prepared.open(Packing::On));
    drop(prepared);
    let x = floats(&[1, N], &ramp(N as usize));
    drop(first);
    assert!(watch.upgrade().is_some());
    run(&*second, &[x]).unwrap();
    drop(second);
    assert!(watch.upgrade().is_none());
}

#[test]
fn what_does_not_match_the_graph_is_refused() {
    let prepared = Prepared::new(layers().model());
    let refusal = |change: &dyn Fn(&mut PreparedBytes)| {
        let mut model = prepared.bytes();
        model.weights.sort_by(|a, b| b.name.cmp(&a.name));
        change(&mut model);
        open_prepared(model, Packing::Off).unwrap_err().to_string()
    };
    assert_eq!(
        refusal(&|model| model.weights[0].element_type = 6),
        "weight 'w' has elements of type 6, the graph wants type 1"
    );
    assert_eq!(
        refusal(&|model| model.weights[0].dims = vec![N * N]),
        "weight 'w' has shape [4096], the graph wants [64,64]"
    );
    assert_eq!(
        refusal(&|model| {
            let data = &mut model.weights[0].data;
            data.truncate(data.len() - 4);
        }),
        "weight 'w' has 16380 bytes, its shape [64,64] needs 16384"
    );
    assert_eq!(
        refusal(&|model| drop(model.weights.remove(0))),
        "the graph needs weight 'w', which was not given"
    );
    assert_eq!(
        refusal(&|model| model.weights.push(model.weights[0].clone())),
        "weight 'w' was given twice"
    );
    assert_eq!(
        refusal(&|model| {
            let mut more = model.weights[0].clone();
            more.name = "other".to_owned();
            model.weights.push(more);
        }),
        "weight 'other' was given, the graph has none of that name outside"
    );
    assert_eq!(
        refusal(&|model| {
            let length = model.weights[0].data.len();
            let mut moved = vec![0; length + 8];
            let odd = usize::from(moved.as_ptr().addr().is_multiple_of(2));
            moved[odd..odd + length].copy_from_slice(&model.weights[0].data);
            model.weights[0].data = Bytes::from(moved).slice(odd..odd + length);
        }),
        "weight 'w' lies at an address that is not a multiple of 4 bytes"
    );
    let message = refusal(&|model| model.graph = model.graph.slice(..model.graph.len() / 2));
    assert!(message.starts_with("Protobuf parsing failed"), "{message}");
}

#[test]
fn hidden_shapes_are_told_and_checked_all_the_same() {
    let plain = plain(layers().model(), Vec::new());
    let mut prepared = Prepared::new(layers().model());
    hide_shapes(&mut prepared.optimized.graph);
    let session = prepared.open(Packing::Off);
    assert_eq!(session.inputs(), plain.inputs());
    let input = floats(&[3, N], &ramp(3 * N as usize));
    let expected = run(&*plain, std::slice::from_ref(&input)).unwrap();
    assert!(close(&run(&*session, &[input]).unwrap()[0], &expected[0]));
    let refusal = |dims: &[i64]| {
        let count = dims.iter().product::<i64>() as usize;
        run(&*session, &[floats(dims, &vec![0.0; count])])
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        refusal(&[2, N + 1]),
        "input 'x' has shape [2,65], the model expects [-1,64]"
    );
    assert_eq!(
        refusal(&[N]),
        "input 'x' has shape [64], the model expects [-1,64]"
    );
}

/// A chain of layers whose row count is lost on the way, as in many exported transformers.
#[test]
fn shapes_are_hidden_only_where_planning_with_them_takes_long() {
    let hidden = |depth: usize| {
        let mut graph = identity(FLOAT, &[-1, N]);
        graph.inputs.push(value_info("rows", 7, &[1]));
        graph.initializers = vec![
            weight("w", &[N, N]),
            initializer("zero", 7, &[1], &0i64.to_le_bytes()),
        ];
        // Slicing to a length that only a run knows leaves the first dimension without a name.
        graph.nodes = vec![node("Slice", &["x", "zero", "rows"], &["s0"])];
        for layer in 0..depth {
            let name = |step: &str, at: usize| format!("{step}{at}");
            let (from, to) = (name("s", layer), name("s", layer + 1));
            let (product, active) = (name("p", layer), name("a", layer));
            graph.nodes.extend([
                node("MatMul", &[&from, "w"], &[&product]),
                node("Tanh", &[&product], &[&active]),
                node("Add", &[&active, &from], &[&to]),
            ]);
        }
        let last = format!("s{depth}");
        graph.nodes.push(node("Identity", &[&last], &["y"]));
        hides_shapes(&Prepared::new(graph.model()).optimized.graph).unwrap()
    };
    assert!(!hidden(2));
    assert!(hidden(200));
}

#[test]
fn sessions_of_a_family_share_packed_weights_until_the_last_one_closes() {
    let prepared = Prepared::new(layers().model());
    let family = [7; 32];
    let open = || {
        let mut model = prepared.bytes();
        model.family = Some(family);
        open_prepared(model, Packing::On).unwrap()
    };
    let before = open_families();
    let (first, second) = (open(), open());
    assert_eq!(open_families(), before + 1);
    let x = floats(&[4, N], &ramp(4 * N as usize));
    let expected = run(&*first, std::slice::from_ref(&x)).unwrap();
    drop(first);
    let answer = run(&*second, &[x]).unwrap();
    assert_eq!(answer[0].data, expected[0].data);
    drop(second);
    assert_eq!(open_families(), before);
}

#[test]
fn the_models_own_graph_level_is_used() {
    let spec = SessionSpec {
        graph_level: dormouse_model_store::spec::GraphLevel::Disabled,
        ..SessionSpec::default()
    };
    let model = layers().model();
    let untouched = Prepared::with(model.clone(), Vec::new(), &spec).unwrap();
    let optimised = Prepared::new(model);
    assert_ne!(untouched.optimized.graph, optimised.optimized.graph);
    assert_eq!(untouched.names().len(), 2);
    run(
        &*untouched.open(Packing::Off),
        &[floats(&[1, N], &ramp(N as usize))],
    )
    .unwrap();
}

#[test]
fn the_identity_names_library_and_processor() {
    let identity = engine().identity().unwrap();
    assert!(identity.engine.starts_with("onnxruntime 1."), "{identity}");
    assert!(identity.engine.contains("git-commit-id="), "{identity}");
    assert_eq!(identity.provider, "cpu");
    assert!(identity.cpu.starts_with(std::env::consts::ARCH));
}

//! The shared allocator under real sessions.

use std::process::Command;

use super::graph::{identity, node, tensor as initializer, value_info};
use super::*;
use crate::engine::onnx::allocator;

const FLOAT: u64 = 1;
const INT64: u64 = 7;
const MIB: u64 = 1 << 20;

/// Runs this program's test `name` as well, in a process of its own, where nothing else uses memory; no
/// there, where it has its way.
fn tested_alone(name: &str) -> bool {
    const ALONE: &str = "DORMOUSE_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return false;
    }
    // The library is there by then.
    engine();
    let test = format!("{}::{name}", module_path!().split_once("::").unwrap().1);
    let ran = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &test, "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    let went_wrong = String::from_utf8_lossy(&ran.stderr);
    assert!(
        ran.status.success() && said.contains("1 passed"),
        "{said}{went_wrong}"
    );
    true
}

fn session(graph: &graph::Graph, memory_arena: Option<bool>) -> Arc<dyn Session> {
    let spec = SessionSpec {
        memory_arena,
        ..SessionSpec::default()
    };
    let model = ModelBytes::in_memory(graph.model(), Vec::new());
    engine().open(model, &spec, Effort::Full).unwrap()
}

fn zeros(count: usize) -> Tensor {
    tensor(DataType::Fp32, &[count as i64], vec![0; count * 4])
}

fn negation() -> graph::Graph {
    let mut graph = identity(FLOAT, &[-1]);
    graph.nodes = vec![node("Neg", &["x"], &["y"])];
    graph
}

/// 64 MiB of weights.
fn heavy() -> graph::Graph {
    let mut graph = identity(FLOAT, &[-1, 4096]);
    let weights = vec![0u8; 64 << 20];
    graph
        .initializers
        .push(initializer("w", FLOAT, &[4096, 4096], &weights));
    graph.nodes = vec![node("MatMul", &["x", "w"], &["y"])];
    graph.outputs = vec![value_info("y", FLOAT, &[-1, 4096])];
    graph
}

#[test]
fn outputs_and_weights_are_counted_while_they_live() {
    if tested_alone("outputs_and_weights_are_counted_while_they_live") {
        return;
    }
    let before = allocator::stats().live_bytes;
    let heavy = session(&heavy(), None);
    let loaded = allocator::stats().live_bytes;
    assert!(loaded >= before + 56 * MIB, "{before} {loaded}");
    let values = zeros(16 << 20);
    let negation = session(&negation(), None);
    let output = run(&*negation, &[values]).unwrap();
    let running = allocator::stats();
    assert!(
        running.live_bytes >= loaded + 56 * MIB,
        "{loaded} {running:?}"
    );
    drop((output, negation, heavy));
    let after = allocator::stats();
    assert!(after.live_bytes < before + 32 * MIB, "{before} {after:?}");
    assert!(after.peak_bytes >= running.live_bytes);
    assert!(
        after.cached_bytes < 64 * MIB,
        "what the closed session left"
    );
}

#[test]
fn a_model_that_asks_for_an_arena_gets_one() {
    if tested_alone("a_model_that_asks_for_an_arena_gets_one") {
        return;
    }
    for arena in [Some(true), Some(false)] {
        let before = allocator::stats().live_bytes;
        let negation = session(&negation(), arena);
        let values = zeros(16 << 20);
        let output = run(&*negation, &[values]).unwrap();
        let after = allocator::stats().live_bytes;
        assert!(after < before + 56 * MIB, "{arena:?}: {before} {after}");
        drop(output);
    }
}

#[test]
fn a_buffer_larger_than_memory_is_an_error_and_the_session_goes_on() {
    let mut graph = identity(INT64, &[1]);
    graph.nodes = vec![node("ConstantOfShape", &["x"], &["y"])];
    graph.outputs = vec![value_info("y", FLOAT, &[-1])];
    let session = session(&graph, None);
    let count = |count: i64| tensor(DataType::Int64, &[1], count.to_le_bytes().to_vec());
    for too_many in [1i64 << 45, 1 << 61, i64::MAX] {
        let error = run(&*session, &[count(too_many)]).unwrap_err();
        assert!(!error.to_string().is_empty());
    }
    let fine = run(&*session, &[count(3)]).unwrap();
    assert_eq!(fine, [floats(&[3], &[0.0; 3])]);
    let none = run(&*session, &[count(0)]).unwrap();
    assert_eq!(none, [floats(&[0], &[])]);
}

#[test]
fn memory_that_was_short_is_released() {
    if tested_alone("memory_that_was_short_is_released") {
        return;
    }
    let negation = session(&negation(), None);
    let values = zeros(32 << 20);
    drop(run(&*negation, &[values]).unwrap());
    assert!(allocator::release() > 0 || allocator::stats().cached_bytes == 0);
}

#[test]
fn threads_of_a_session_keep_the_priority_of_requests() {
    // A session with a pool of its own, built by a job in the background.
    let niceness = || {
        let mut found = Vec::new();
        for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
            let read = |file| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
            if read("comm").trim() == "onnx-pool" {
                let stat = read("stat");
                let fields = stat.rsplit(')').next().unwrap_or_default();
                found.extend(fields.split_whitespace().nth(16).map(str::to_owned));
            }
        }
        found
    };
    let spec = SessionSpec {
        intra_op_threads: Some(3),
        ..SessionSpec::default()
    };
    let usual = rustix::process::getpriority_process(None).unwrap();
    engine().prepare().unwrap();
    let model = ModelBytes::in_memory(negation().model(), Vec::new());
    let background = crate::priority::Background::new("test-build", 1);
    let job = background.spawn(move || engine().open(model, &spec, Effort::Full));
    let session = job.unwrap().wait().unwrap().unwrap();
    // A thread has its name from its first moments on a core, which the session did not wait for.
    let mut looks = (0..100_000).map(|_| niceness());
    let found = looks.find(|found| found.len() >= 2).unwrap_or_default();
    assert!(found.len() >= 2, "{found:?}");
    assert!(
        found.iter().all(|nice| *nice == usual.to_string()),
        "{found:?}"
    );
    let output = run(&*session, &[floats(&[2], &[1.0, 2.0])]).unwrap();
    assert_eq!(output, [floats(&[2], &[-1.0, -2.0])]);
}

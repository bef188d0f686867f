use crate::engine::GraphBytes;
use std::collections::BTreeMap;
use std::sync::Barrier;

use dormouse_model_store::spec::GraphLevel;

use super::graph::{Graph, graph_attribute, identity, node, tensor as initializer, value_info};
use super::*;

const FLOAT: u64 = 1;
const INT64: u64 = 7;
const BOOL: u64 = 9;

/// Counts to a number that takes for ever, a tiny node at a time.
fn endless() -> Graph {
    let body = Graph {
        nodes: vec![
            node("Identity", &["go"], &["go_on"]),
            node("Neg", &["v"], &["next"]),
        ],
        inputs: vec![
            value_info("i", INT64, &[]),
            value_info("go", BOOL, &[]),
            value_info("v", FLOAT, &[1]),
        ],
        outputs: vec![
            value_info("go_on", BOOL, &[]),
            value_info("next", FLOAT, &[1]),
        ],
        ..Graph::default()
    };
    let mut graph = identity(FLOAT, &[1]);
    graph.initializers = vec![
        initializer("times", INT64, &[], &(1i64 << 50).to_le_bytes()),
        initializer("true", BOOL, &[], &[1]),
    ];
    graph.nodes = vec![
        node("Loop", &["times", "true", "x"], &["y"])
            .messages(5, &[graph_attribute("body", &body)]),
    ];
    graph
}

#[test]
fn a_run_is_stopped_from_another_thread() {
    let session = open(&endless());
    let stop = session.stop_handle().unwrap();
    let started = Barrier::new(2);
    std::thread::scope(|scope| {
        let running = scope.spawn(|| {
            started.wait();
            session.run(&[(0, floats(&[1], &[1.0]))], &[0], &stop)
        });
        started.wait();
        stop.stop();
        stop.stop();
        let ended = running.join().unwrap();
        assert!(matches!(ended, Err(EngineError::Terminated)), "{ended:?}");
    });
    // The handle stays pulled; a new one runs.
    let again = session.run(&[(0, floats(&[1], &[1.0]))], &[0], &stop);
    assert!(matches!(again, Err(EngineError::Terminated)), "{again:?}");
}

#[test]
fn one_stopped_run_leaves_the_others_of_its_session_alone() {
    let session = open(&identity(FLOAT, &[1]));
    session.stop_handle().unwrap().stop();
    assert!(run(&*session, &[floats(&[1], &[1.0])]).is_ok());
}

#[test]
fn every_option_of_a_session_is_accepted() {
    let shared = SessionSpec::default();
    let own_threads = SessionSpec {
        intra_op_threads: Some(2),
        inter_op_threads: Some(2),
        parallel_execution: true,
        memory_arena: Some(false),
        memory_pattern: Some(false),
        graph_level: GraphLevel::Disabled,
        entries: BTreeMap::from([("session.intra_op.allow_spinning".to_owned(), "1".to_owned())]),
        shrinks_arena: false,
    };
    let parallel = SessionSpec {
        parallel_execution: true,
        memory_arena: Some(true),
        memory_pattern: Some(true),
        graph_level: GraphLevel::Basic,
        ..SessionSpec::default()
    };
    let extended = SessionSpec {
        intra_op_threads: Some(0),
        graph_level: GraphLevel::Extended,
        shrinks_arena: true,
        ..SessionSpec::default()
    };
    for options in [shared, own_threads, parallel, extended] {
        let model = ModelBytes {
            graph: GraphBytes::Memory(identity(FLOAT, &[1]).model()),
            external: Vec::new(),
        };
        let session = engine().open(model, &options, Effort::Full).unwrap();
        let one = floats(&[1], &[1.0]);
        assert_eq!(run(&*session, std::slice::from_ref(&one)).unwrap(), [one]);
    }
}

#[test]
fn entries_that_reach_for_files_or_freed_memory_are_refused() {
    for key in [
        "session.optimized_model_filepath",
        "session.model_external_initializers_file_folder_path",
        "session.use_external_initializer_file_buffers_directly",
        "session.use_ort_model_bytes_directly",
        "session.enable_profiling",
        "ep.context_enable",
    ] {
        let options = SessionSpec {
            entries: BTreeMap::from([(key.to_owned(), "1".to_owned())]),
            ..SessionSpec::default()
        };
        let model = ModelBytes {
            graph: GraphBytes::Memory(identity(FLOAT, &[1]).model()),
            external: Vec::new(),
        };
        let error = engine()
            .open(model, &options, Effort::Full)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(&format!("session entry '{key}' cannot be set")),
            "{error}"
        );
    }
}

#[test]
fn the_engines_own_words_come_through() {
    let mut graph = identity(FLOAT, &[1]);
    graph.nodes = vec![node("NoSuchOperator", &["x"], &["y"])];
    let error = try_open(&graph).unwrap_err().to_string();
    assert!(error.contains("NoSuchOperator"), "{error}");
    assert!(!error.contains("/onnxruntime_src"), "{error}");
}

#[test]
fn preparing_again_takes_no_time_and_another_library_is_refused() {
    engine().prepare().unwrap();
    assert!(engine().prepare().unwrap().is_zero());
    assert_eq!(
        engine().describe(),
        format!("ONNX Runtime {}", runtime_library::VERSION)
    );

    let missing = OnnxEngine::new(OnnxOptions::new("/nowhere/libonnxruntime.so")).unwrap_err();
    assert!(
        missing.to_string().contains("/nowhere/libonnxruntime.so"),
        "{missing}"
    );
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("libonnxruntime.so");
    std::fs::write(&other, b"not a library").unwrap();
    let other = OnnxEngine::new(OnnxOptions::new(other)).unwrap();
    let error = other.prepare().unwrap_err().to_string();
    assert!(error.contains("was already loaded from"), "{error}");
}

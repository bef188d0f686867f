//! Figures, not checks: `cargo test --release -p dormouse-server measure -- --ignored --nocapture
//! --test-threads 1`.

use tokio::time::Instant;

use super::graph::{identity, node, tensor as initializer, value_info};
use super::*;
use crate::memory::{release_memory, resident_bytes};

const FLOAT: u64 = 1;

#[test]
#[ignore = "a measurement"]
fn measure_a_run_of_an_identity_graph() {
    let session = open(&identity(FLOAT, &[-1]));
    let inputs = [(0, floats(&[16], &[1.0; 16]))];
    // By batches: the least is what the code costs, the median what the machine lets it.
    let time = |name: &str, per_batch: u32, mut work: Box<dyn FnMut() + '_>| {
        let mut batches: Vec<f64> = (0..101)
            .map(|_| {
                let started = Instant::now();
                (0..per_batch).for_each(|_| work());
                started.elapsed().as_secs_f64() * 1e6 / f64::from(per_batch)
            })
            .collect();
        batches.sort_by(f64::total_cmp);
        println!(
            "{name}: {:.3} µs at least, {:.3} µs median",
            batches[0], batches[50]
        );
    };
    let stop = session.stop_handle().unwrap();
    time(
        "stop handle",
        1000,
        Box::new(|| drop(session.stop_handle().unwrap())),
    );
    time(
        "run, one handle",
        1000,
        Box::new(|| drop(session.run(&inputs, &[0], &stop).unwrap())),
    );
    time(
        "run, a handle each",
        1000,
        Box::new(|| {
            drop(
                session
                    .run(&inputs, &[0], &session.stop_handle().unwrap())
                    .unwrap(),
            )
        }),
    );
    let large = [(0, floats(&[1 << 20], &vec![1.0; 1 << 20]))];
    time(
        "run, 4 MiB",
        5,
        Box::new(|| drop(session.run(&large, &[0], &stop).unwrap())),
    );
}

#[test]
#[ignore = "a measurement"]
fn measure_memory_after_unloading() {
    engine().prepare().unwrap();
    let mib = |bytes: Option<u64>| bytes.unwrap_or(0) as f64 / (1 << 20) as f64;
    let model = || {
        let mut graph = identity(FLOAT, &[-1, 4096]);
        let weights = vec![1u8; 64 << 20];
        graph
            .initializers
            .push(initializer("w", FLOAT, &[4096, 4096], &weights));
        graph.nodes = vec![node("MatMul", &["x", "w"], &["y"])];
        graph.outputs = vec![value_info("y", FLOAT, &[-1, 4096])];
        graph.model()
    };
    for arena in [None, Some(false)] {
        release_memory();
        let base = mib(resident_bytes());
        let mut peak = 0f64;
        for _ in 0..20 {
            let spec = SessionSpec {
                memory_arena: arena,
                ..SessionSpec::default()
            };
            let bytes = ModelBytes::in_memory(model(), Vec::new());
            let session = engine().open(bytes, &spec, Effort::Full).unwrap();
            drop(run(&*session, &[floats(&[2, 4096], &[1.0; 8192])]).unwrap());
            peak = peak.max(mib(resident_bytes()));
            drop(session);
        }
        let before = mib(resident_bytes());
        let started = Instant::now();
        release_memory();
        println!(
            "arena {arena:?}: base {base:.1}, loaded {peak:.1}, unloaded {before:.1}, trimmed {:.1} MiB ({:?})",
            mib(resident_bytes()),
            started.elapsed()
        );
    }
}

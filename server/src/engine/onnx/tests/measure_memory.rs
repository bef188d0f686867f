//! Figures of the shared allocator beside ONNX Runtime's arena, not checks: `cargo test --release
//! -p dormouse-server measure_memory -- --ignored --nocapture --test-threads 1`.

use tokio::time::Instant;

use super::graph::{
    Graph, Proto, identity, int_attribute, node, tensor as initializer, value_info,
};
use super::*;
use crate::engine::onnx::allocator;
use crate::memory::{Footprint, release_memory, resident_bytes};

const FLOAT: u64 = 1;
const INT64: u64 = 7;

fn mib(bytes: u64) -> f64 {
    bytes as f64 / (1 << 20) as f64
}

fn resident() -> f64 {
    mib(resident_bytes().unwrap_or(0))
}

fn session(graph: &Graph, memory_arena: Option<bool>) -> Arc<dyn Session> {
    let spec = SessionSpec {
        memory_arena,
        ..SessionSpec::default()
    };
    let model = ModelBytes::in_memory(graph.model(), Vec::new());
    engine().open(model, &spec, Effort::Full).unwrap()
}

/// Small values without a pattern, so that nothing overflows.
fn weights(name: &str, dims: &[i64]) -> Proto {
    let count: i64 = dims.iter().product();
    let data: Vec<u8> = (0..count)
        .flat_map(|n| (((n * 7919) % 101 - 50) as f32 / 2000.0).to_le_bytes())
        .collect();
    initializer(name, FLOAT, dims, &data)
}

fn ints(name: &str, values: &[i64]) -> Proto {
    let data: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    initializer(name, INT64, &[values.len() as i64], &data)
}

fn ints_attribute(name: &str, values: &[i64]) -> Proto {
    let head = Proto::default().bytes(1, name).number(20, 7);
    values
        .iter()
        .fold(head, |proto, &value| proto.number(8, value))
}

fn mlp() -> (Graph, Tensor) {
    let mut graph = identity(FLOAT, &[-1, 512]);
    graph.nodes.clear();
    let mut from = "x".to_owned();
    for layer in 0..4 {
        let (w, product, to) = (
            format!("w{layer}"),
            format!("m{layer}"),
            format!("r{layer}"),
        );
        let to = if layer == 3 { "y".to_owned() } else { to };
        graph.initializers.push(weights(&w, &[512, 512]));
        graph.nodes.push(node("MatMul", &[&from, &w], &[&product]));
        graph.nodes.push(node("Relu", &[&product], &[&to]));
        from = to;
    }
    (graph, floats(&[1, 512], &[0.5; 512]))
}

fn convolutions() -> (Graph, Tensor) {
    let dims = [-1, 32, 56, 56];
    let mut graph = identity(FLOAT, &dims);
    graph.nodes.clear();
    let mut from = "x".to_owned();
    for layer in 0..6 {
        let (w, made, to) = (
            format!("w{layer}"),
            format!("c{layer}"),
            format!("r{layer}"),
        );
        let to = if layer == 5 { "y".to_owned() } else { to };
        graph.initializers.push(weights(&w, &[32, 32, 3, 3]));
        let pads = ints_attribute("pads", &[1, 1, 1, 1]);
        graph
            .nodes
            .push(node("Conv", &[&from, &w], &[&made]).messages(5, &[pads]));
        graph.nodes.push(node("Relu", &[&made], &[&to]));
        from = to;
    }
    let count = 32 * 56 * 56;
    (graph, floats(&[1, 32, 56, 56], &vec![0.5; count]))
}

/// An encoder of `layers` with 12 heads of 32, as a sentence model has.
pub(super) fn encoder(layers: usize, rows: i64) -> (Graph, Tensor) {
    const WIDTH: i64 = 384;
    let mut graph = identity(FLOAT, &[-1, WIDTH]);
    graph.nodes.clear();
    graph.initializers.push(ints("split", &[-1, 12, 32]));
    graph.initializers.push(ints("join", &[-1, WIDTH]));
    graph.initializers.push(weights("scale", &[WIDTH]));
    let mut from = "x".to_owned();
    for layer in 0..layers {
        let name = |part: &str| format!("{part}{layer}");
        let nodes = &mut graph.nodes;
        for part in ["q", "k", "v"] {
            let (w, flat, heads, turned) = (
                name(&format!("w{part}")),
                name(&format!("{part}f")),
                name(&format!("{part}h")),
                name(&format!("{part}t")),
            );
            graph.initializers.push(weights(&w, &[WIDTH, WIDTH]));
            nodes.push(node("MatMul", &[&from, &w], &[&flat]));
            nodes.push(node("Reshape", &[&flat, "split"], &[&heads]));
            let order = if part == "k" { [1, 2, 0] } else { [1, 0, 2] };
            let order = ints_attribute("perm", &order);
            nodes.push(node("Transpose", &[&heads], &[&turned]).messages(5, &[order]));
        }
        let (scores, shares, mixed) = (name("scores"), name("shares"), name("mixed"));
        nodes.push(node("MatMul", &[&name("qt"), &name("kt")], &[&scores]));
        let axis = int_attribute("axis", -1);
        nodes.push(node("Softmax", &[&scores], &[&shares]).messages(5, &[axis]));
        nodes.push(node("MatMul", &[&shares, &name("vt")], &[&mixed]));
        let order = ints_attribute("perm", &[1, 0, 2]);
        nodes.push(node("Transpose", &[&mixed], &[&name("back")]).messages(5, &[order]));
        nodes.push(node(
            "Reshape",
            &[&name("back"), "join"],
            &[&name("attended")],
        ));
        nodes.push(node("Add", &[&name("attended"), &from], &[&name("sum")]));
        nodes.push(node(
            "LayerNormalization",
            &[&name("sum"), "scale"],
            &[&name("normal")],
        ));
        let (up, down) = (name("wu"), name("wd"));
        graph.initializers.push(weights(&up, &[WIDTH, 4 * WIDTH]));
        graph.initializers.push(weights(&down, &[4 * WIDTH, WIDTH]));
        nodes.push(node("MatMul", &[&name("normal"), &up], &[&name("wide")]));
        nodes.push(node("Relu", &[&name("wide")], &[&name("bent")]));
        nodes.push(node("MatMul", &[&name("bent"), &down], &[&name("narrow")]));
        let to = if layer + 1 == layers {
            "y".to_owned()
        } else {
            name("out")
        };
        nodes.push(node("Add", &[&name("narrow"), &name("normal")], &[&to]));
        from = to;
    }
    let count = (rows * WIDTH) as usize;
    (graph, floats(&[rows, WIDTH], &vec![0.5; count]))
}

/// CPU time of the process so far, in microseconds: other processes do not count.
#[expect(unsafe_code, reason = "a clock without a binding here")]
fn cpu_time() -> f64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a place for the time.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut now) };
    now.tv_sec as f64 * 1e6 + now.tv_nsec as f64 / 1e3
}

#[test]
#[ignore = "a measurement"]
fn measure_memory_steady_speed_beside_the_arena() {
    let (mlp, mlp_input) = mlp();
    let (conv, conv_input) = convolutions();
    let (encoder_graph, encoder_input) = encoder(6, 128);
    let small = floats(&[16], &[1.0; 16]);
    let large = floats(&[1 << 20], &vec![1.0; 1 << 20]);
    let identity_graph = identity(FLOAT, &[-1]);
    let mut negation = identity(FLOAT, &[-1]);
    negation.nodes = vec![node("Neg", &["x"], &["y"])];
    let models = [
        ("identity, 64 B", &identity_graph, small, 2000u32),
        ("negation, 4 MiB", &negation, large, 20),
        ("mlp 4 x 512", &mlp, mlp_input, 500),
        ("6 convolutions", &conv, conv_input, 4),
        (
            "encoder 6 x 384, 128 tokens",
            &encoder_graph,
            encoder_input,
            2,
        ),
    ];
    for (name, graph, input, per_batch) in models {
        let inputs = [(0, input)];
        let mut times: [Vec<f64>; 3] = Default::default();
        // Which pages of memory a session gets matters to the caches, and is luck: so several.
        for _ in 0..8 {
            let sessions = [Some(true), None, Some(false)].map(|arena| session(graph, arena));
            let stops = sessions
                .each_ref()
                .map(|session| session.stop_handle().unwrap());
            allocator::release();
            for round in 0..12 {
                for (which, session) in sessions.iter().enumerate() {
                    let started = cpu_time();
                    for _ in 0..per_batch {
                        drop(session.run(&inputs, &[0], &stops[which]).unwrap());
                    }
                    if round > 1 {
                        times[which].push((cpu_time() - started) / f64::from(per_batch));
                    }
                }
            }
        }
        let [arena, shared, heap] = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            (times[0], times[times.len() / 4], times[times.len() / 2])
        });
        println!(
            "{name}: CPU time, least / quarter / median µs: arena {:.2} {:.2} {:.2}, shared {:.2} {:.2} {:.2}, heap {:.2} {:.2} {:.2}; speed of arena's {:.3} {:.3} {:.3}",
            arena.0,
            arena.1,
            arena.2,
            shared.0,
            shared.1,
            shared.2,
            heap.0,
            heap.1,
            heap.2,
            arena.0 / shared.0,
            arena.1 / shared.1,
            arena.2 / shared.2,
        );
    }
}

#[test]
#[ignore = "a measurement"]
fn measure_memory_after_a_large_tensor() {
    let mut negation = identity(FLOAT, &[-1]);
    negation.nodes = vec![node("Neg", &["x"], &["t"]), node("Abs", &["t"], &["y"])];
    for arena in [Some(true), None] {
        let session = session(&negation, arena);
        let small = floats(&[16], &[1.0; 16]);
        drop(run(&*session, &[small]).unwrap());
        release_memory();
        let base = resident();
        drop(run(&*session, &[floats(&[128 << 20], &vec![1.0; 128 << 20])]).unwrap());
        let passed = resident();
        release_memory();
        let trimmed = resident();
        let started = Instant::now();
        let released = mib(allocator::release());
        println!(
            "arena {arena:?}: base {base:.1}, after 512 MiB {passed:.1}, trimmed {trimmed:.1}, released {released:.1} in {:?}: {:.1} MiB",
            started.elapsed(),
            resident()
        );
        drop(session);
        release_memory();
        println!("  closed: {:.1} MiB", resident());
    }
}

#[test]
#[ignore = "a measurement"]
fn measure_memory_over_sixty_loads() {
    engine().prepare().unwrap();
    let graph = {
        let mut graph = identity(FLOAT, &[-1, 4096]);
        graph.initializers.push(weights("w", &[4096, 4096]));
        graph.nodes = vec![node("MatMul", &["x", "w"], &["y"])];
        graph.outputs = vec![value_info("y", FLOAT, &[-1, 4096])];
        graph
    };
    for arena in [Some(true), None] {
        release_memory();
        let base = resident();
        let started = Footprint::read().unwrap_or_default();
        let mut highest = 0f64;
        let mut trims = Vec::new();
        for _ in 0..60 {
            let session = session(&graph, arena);
            drop(run(&*session, &[floats(&[64, 4096], &vec![1.0; 64 * 4096])]).unwrap());
            drop(session);
            let started = Instant::now();
            release_memory();
            trims.push(started.elapsed());
            highest = highest.max(resident());
        }
        trims.sort();
        println!(
            "arena {arena:?}: base {base:.1}, highest after a close {highest:.1}, at the end {:.1} MiB; private {:.1} -> {:.1}; allocator {:?}; trim {:?} median {:?} most",
            resident(),
            mib(started.private_bytes),
            mib(Footprint::read().unwrap_or_default().private_bytes),
            allocator::stats(),
            trims[30],
            trims[59],
        );
    }
}

//! How much a small model feels a large one that is built and run beside it. Figures, not checks:
//! `cargo test --release -p dormouse-server measure_disturbance -- --ignored --nocapture`.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::process::{Pid, setpriority_process};
use tokio::time::Instant;

use super::graph::identity;
use super::measure_memory::encoder;
use super::*;
use crate::priority::Background;

const FLOAT: u64 = 1;
const PERIOD: Duration = Duration::from_millis(1);

/// Latencies of `count` runs, one each millisecond, in microseconds and in order.
fn steady_load(session: &dyn Session, count: u32) -> Vec<f64> {
    let input = [(0, floats(&[16], &[1.0; 16]))];
    let stop = session.stop_handle().unwrap();
    let (never, idle) = (Condvar::new(), Mutex::new(()));
    let started = Instant::now();
    let mut latencies: Vec<f64> = (0..count)
        .map(|number| {
            let due = started + PERIOD * number;
            loop {
                let left = due.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                never.wait_for(&mut idle.lock(), left);
            }
            drop(session.run(&input, &[0], &stop).unwrap());
            (Instant::now() - due).as_secs_f64() * 1e6
        })
        .collect();
    latencies.sort_by(f64::total_cmp);
    latencies
}

fn pool_threads() -> Vec<Pid> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let pool = tasks.filter(|task| {
        let name = std::fs::read_to_string(task.path().join("comm"));
        name.is_ok_and(|name| name.trim() == "onnx-pool")
    });
    pool.filter_map(|task| Pid::from_raw(task.file_name().to_str()?.parse().ok()?))
        .collect()
}

/// Gives a thread turns of this length (Linux 6.12 and later).
#[expect(unsafe_code, reason = "a system call without a binding")]
fn set_turn(thread: i32, niceness: i32, nanoseconds: u64) {
    let mut attributes = [0u64; 6];
    attributes[0] = 48;
    attributes[2] = u64::from(niceness.cast_unsigned());
    attributes[3] = nanoseconds;
    // SAFETY: the attributes are as long as their first number says.
    let set = unsafe { libc::syscall(libc::SYS_sched_setattr, thread, attributes.as_ptr(), 0) };
    if set != 0 {
        println!("no turns: {}", std::io::Error::last_os_error());
    }
}

#[test]
#[ignore = "a measurement"]
fn measure_disturbance_of_a_small_model() {
    let small = open(&identity(FLOAT, &[-1]));
    let (large, input) = encoder(12, 64);
    let large = large.model();
    println!("large model: {} MiB", large.len() >> 20);
    let inputs = [(0, input)];
    // Niceness of building, of the pool, and the length of their turns in microseconds.
    let cases = [
        (0, 0, 0),
        (5, 0, 0),
        (5, 3, 0),
        (5, 5, 0),
        (10, 5, 0),
        (5, 0, 200),
        (5, 5, 200),
    ];
    for round in 0..2 {
        let alone = steady_load(&*small, 3000);
        println!(
            "round {round}: alone p50 {:.0} p99 {:.0}",
            alone[1500], alone[2970]
        );
        for (build, pool, turn) in cases {
            for thread in pool_threads() {
                setpriority_process(Some(thread), pool).unwrap();
                if turn > 0 {
                    set_turn(thread.as_raw_nonzero().get(), pool, turn * 1000);
                }
            }
            let background = Background::with_niceness("build", 1, build);
            let done = AtomicBool::new(false);
            let cycles = AtomicUsize::new(0);
            let latencies = std::thread::scope(|scope| {
                scope.spawn(|| {
                    if turn > 0 {
                        set_turn(0, 0, turn * 1000);
                    }
                    while !done.load(Ordering::Relaxed) {
                        let model = ModelBytes::in_memory(large.clone(), Vec::new());
                        let job = background.spawn(move || {
                            if turn > 0 {
                                set_turn(0, build, turn * 1000);
                            }
                            engine().open(model, &SessionSpec::default(), Effort::Full)
                        });
                        let session = job.unwrap().wait().unwrap().unwrap();
                        let stop = session.stop_handle().unwrap();
                        for _ in 0..10 {
                            drop(session.run(&inputs, &[0], &stop).unwrap());
                        }
                        cycles.fetch_add(1, Ordering::Relaxed);
                    }
                });
                let latencies = steady_load(&*small, 4000);
                done.store(true, Ordering::Relaxed);
                latencies
            });
            println!(
                "  build +{build} pool +{pool} turns {turn} µs: p50 {:.0} p99 {:.0} p99.9 {:.0} µs, {} cycles; p99 {:.2} of alone",
                latencies[2000],
                latencies[3960],
                latencies[3996],
                cycles.into_inner(),
                latencies[3960] / alone[2970],
            );
        }
    }
}

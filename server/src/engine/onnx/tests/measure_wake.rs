//! Figures, not checks: how long the ways of loading a model take. `MODEL=bert.onnx cargo test
//! --release -p dormouse-server measure_wake -- --ignored --nocapture --test-threads 1`.

use std::fs::{self, File};

use memmap2::{Advice, Mmap};
use tokio::time::Instant;

use super::*;
use crate::engine::{Optimized, Packing, PreparedBytes, SharedWeight};
use crate::memory::release_memory;

const ROUNDS: usize = 7;
/// What stands for the open dimensions of an input, in order.
const OPEN: [i64; 4] = [1, 128, 128, 128];

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn least(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().fold(f64::INFINITY, f64::min)
}

fn inputs(session: &dyn Session) -> Vec<Tensor> {
    let inputs = session.inputs().iter().map(|input| {
        let mut open = OPEN.iter();
        let dims: Vec<i64> = input
            .dims
            .iter()
            .flatten()
            .map(|&dim| if dim < 0 { *open.next().unwrap() } else { dim })
            .collect();
        let datatype = input.datatype.unwrap();
        let count = dims.iter().product::<i64>() as usize;
        let mut data = vec![0u8; count * datatype.element_size().unwrap()];
        for element in data.chunks_mut(datatype.element_size().unwrap()) {
            if datatype == DataType::Fp32 {
                element.copy_from_slice(&0.5f32.to_le_bytes());
            } else {
                element[0] = 1;
            }
        }
        tensor(datatype, &dims, data)
    });
    inputs.collect()
}

/// Memory of the process that is backed by no file.
fn anonymous() -> f64 {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = rollup
        .lines()
        .find(|l| l.starts_with("Anonymous:"))
        .unwrap();
    let kib: f64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib / 1024.0
}

fn steady(session: &dyn Session) -> f64 {
    let inputs = inputs(session);
    median((0..15).map(|_| {
        let started = Instant::now();
        run(session, &inputs).unwrap();
        ms(started)
    }))
}

fn weights(optimized: &Optimized, data: &Bytes) -> Vec<SharedWeight> {
    let tensors = optimized.tensors.iter().map(|tensor| SharedWeight {
        name: tensor.name.clone(),
        element_type: tensor.element_type,
        dims: tensor.dims.clone(),
        data: data.slice(tensor.offset as usize..(tensor.offset + tensor.len) as usize),
    });
    tensors.collect()
}

#[expect(unsafe_code, reason = "maps a file of the test's own")]
fn map(file: &File) -> Mmap {
    // SAFETY: nobody else knows the file.
    unsafe { Mmap::map(file) }.unwrap()
}

struct Case<'o> {
    optimized: &'o Optimized,
    file: File,
    packing: Packing,
    /// Threads that populate the map while the session is built.
    populate: usize,
    cold: bool,
}

impl Case<'_> {
    /// Times of building and of the first run, and the session.
    fn wake(&self) -> (f64, f64, Arc<dyn Session>) {
        if self.cold {
            rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        }
        let started = Instant::now();
        let map = Arc::new(map(&self.file));
        for part in 0..self.populate {
            let map = Arc::clone(&map);
            let chunk = (map.len().div_ceil(self.populate) + 4095) & !4095;
            std::thread::spawn(move || {
                let start = part * chunk;
                // By pieces, so that the parts a run needs first are not all behind one call.
                for at in (start..map.len().min(start + chunk)).step_by(4 << 20) {
                    let length = (4 << 20).min(map.len().min(start + chunk) - at);
                    map.advise_range(Advice::PopulateRead, at, length).unwrap();
                }
            });
        }
        struct Shared(Arc<Mmap>);
        impl AsRef<[u8]> for Shared {
            fn as_ref(&self) -> &[u8] {
                &self.0
            }
        }
        let data = Bytes::from_owner(Shared(map));
        let model = PreparedBytes {
            graph: self.optimized.graph.clone().into(),
            weights: weights(self.optimized, &data),
            family: Some([1; 32]),
        };
        let session = engine()
            .open_prepared(model, &SessionSpec::default(), self.packing)
            .unwrap();
        let build = ms(started);
        let inputs = inputs(&*session);
        let started = Instant::now();
        run(&*session, &inputs).unwrap();
        (build, ms(started), session)
    }

    fn print(&self, name: &str) {
        let mut rounds = Vec::new();
        let mut private = 0.0;
        let mut later = 0.0;
        for round in 0..ROUNDS {
            release_memory();
            let before = anonymous();
            let (build, first, session) = self.wake();
            rounds.push((build, first));
            if round + 1 == ROUNDS {
                private = anonymous() - before;
                later = steady(&*session);
            }
        }
        let build = || rounds.iter().map(|round| round.0);
        let first = || rounds.iter().map(|round| round.1);
        println!(
            "{name:<38} build {:7.1} ({:7.1})  first {:7.1} ({:7.1})  wake {:7.1} ({:7.1})  steady {later:6.1} ms  private {private:6.1} MiB",
            median(build()),
            least(build()),
            median(first()),
            least(first()),
            median(rounds.iter().map(|r| r.0 + r.1)),
            least(rounds.iter().map(|r| r.0 + r.1)),
        );
    }
}

#[test]
#[ignore = "a measurement"]
fn measure_wake() {
    let path = PathBuf::from(std::env::var_os("MODEL").unwrap());
    let scratch = tempfile::tempdir_in(path.parent().unwrap()).unwrap();
    engine().prepare().unwrap();
    println!("{}, median (least) of {ROUNDS}", path.display());
    let read = || ModelBytes::in_memory(fs::read(&path).unwrap(), Vec::new());
    let mut rounds = Vec::new();
    for round in 0..3 {
        release_memory();
        let before = anonymous();
        let started = Instant::now();
        let session = engine()
            .open(read(), &SessionSpec::default(), Effort::Full)
            .unwrap();
        let build = ms(started);
        let inputs = inputs(&*session);
        let started = Instant::now();
        run(&*session, &inputs).unwrap();
        rounds.push((build, ms(started)));
        if round == 2 {
            release_memory();
            println!(
                "{:<38} build {:7.1}            first {:7.1}            steady {:6.1} ms  private {:6.1} MiB",
                "plain",
                median(rounds.iter().map(|r| r.0)),
                median(rounds.iter().map(|r| r.1)),
                steady(&*session),
                anonymous() - before
            );
        }
    }
    let started = Instant::now();
    let optimized = engine()
        .optimize(read(), &SessionSpec::default(), scratch.path())
        .unwrap();
    let file = optimized.data_file.clone().unwrap();
    println!(
        "optimise {:.0} ms: graph {} bytes, {} weights, {} MiB",
        ms(started),
        optimized.graph.len(),
        optimized.tensors.len(),
        fs::metadata(&file).unwrap().len() >> 20
    );
    drop(fs::read(&file).unwrap());
    let touch = (0..ROUNDS).map(|_| {
        let map = map(&File::open(&file).unwrap());
        let started = Instant::now();
        std::thread::scope(|scope| {
            for half in 0..2 {
                let map = &map;
                scope.spawn(move || {
                    let part = map.len().div_ceil(2);
                    let bytes = &map[half * part..map.len().min((half + 1) * part)];
                    bytes
                        .iter()
                        .step_by(4096)
                        .map(|&b| u64::from(b))
                        .sum::<u64>()
                });
            }
        });
        ms(started)
    });
    let touch: Vec<_> = touch.collect();
    println!(
        "touching every page in two threads: {:.1} ({:.1}) ms",
        median(touch.iter().copied()),
        least(touch.iter().copied())
    );
    for packing in [Packing::Off, Packing::On] {
        for cold in [false, true] {
            for populate in [0, 1, 2] {
                if packing == Packing::On && (populate > 0 || cold) {
                    continue;
                }
                let case = Case {
                    optimized: &optimized,
                    file: File::open(&file).unwrap(),
                    packing,
                    populate,
                    cold,
                };
                case.print(&format!(
                    "packing {packing:?}, {}, {populate} populating",
                    if cold { "cold" } else { "cached" }
                ));
            }
        }
    }
    // A second session of a family, over the same map.
    let data = Bytes::from_owner(map(&File::open(&file).unwrap()));
    for packing in [Packing::Off, Packing::On] {
        let open = || {
            let model = PreparedBytes {
                graph: optimized.graph.clone().into(),
                weights: weights(&optimized, &data),
                family: Some([2; 32]),
            };
            engine()
                .open_prepared(model, &SessionSpec::default(), packing)
                .unwrap()
        };
        let first = open();
        run(&*first, &inputs(&*first)).unwrap();
        let before = anonymous();
        let started = Instant::now();
        let second = open();
        let build = ms(started);
        run(&*second, &inputs(&*second)).unwrap();
        println!(
            "a second session, packing {packing:?}: {build:.1} ms, private {:.1} MiB",
            anonymous() - before
        );
    }
}

//! From a response to the bytes that are sent, by both protocols.

use criterion::{Criterion, criterion_group, criterion_main};
use dormouse_benches::hot_paths::encode::WORKLOADS;

fn benches(criterion: &mut Criterion) {
    for workload in WORKLOADS {
        let mut step = (workload.prepare)();
        criterion.bench_function(workload.name, |bencher| bencher.iter(&mut step));
    }
}

criterion_group!(group, benches);
criterion_main!(group);

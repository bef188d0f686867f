//! What a request does to its model's state machine.

use criterion::{Criterion, criterion_group, criterion_main};
use dormouse_benches::hot_paths::lifecycle::WORKLOADS;

fn benches(criterion: &mut Criterion) {
    for workload in WORKLOADS {
        let mut step = (workload.prepare)();
        criterion.bench_function(workload.name, |bencher| bencher.iter(&mut step));
    }
}

criterion_group!(group, benches);
criterion_main!(group);

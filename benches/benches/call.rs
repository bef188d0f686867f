//! A whole call below the socket, on a model that returns its input.

use criterion::{Criterion, criterion_group, criterion_main};
use dormouse_benches::hot_paths::call::WORKLOADS;

fn benches(criterion: &mut Criterion) {
    for workload in WORKLOADS {
        let mut step = (workload.prepare)();
        criterion.bench_function(workload.name, |bencher| bencher.iter(&mut step));
    }
}

criterion_group!(group, benches);
criterion_main!(group);

//! Whether a request can be answered in time.

use criterion::{Criterion, criterion_group, criterion_main};
use dormouse_benches::hot_paths::admission::WORKLOADS;

fn benches(criterion: &mut Criterion) {
    for workload in WORKLOADS {
        let mut step = (workload.prepare)();
        criterion.bench_function(workload.name, |bencher| bencher.iter(&mut step));
    }
}

criterion_group!(group, benches);
criterion_main!(group);

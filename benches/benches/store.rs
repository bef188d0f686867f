//! Finding a model in the prepared store: the beginning of every wake.

use criterion::{Criterion, criterion_group, criterion_main};
use dormouse_benches::hot_paths::store::WORKLOADS;

fn benches(criterion: &mut Criterion) {
    for workload in WORKLOADS {
        let mut step = (workload.prepare)();
        criterion.bench_function(workload.name, |bencher| bencher.iter(&mut step));
    }
}

criterion_group!(group, benches);
criterion_main!(group);

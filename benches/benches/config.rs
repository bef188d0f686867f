//! Reading `config.pbtxt`: what start-up does for every model.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use dormouse_model_store::config::text;

fn benches(criterion: &mut Criterion) {
    let config = include_str!("../../configs/models/classifier.pbtxt");
    criterion.bench_function("config: parse a classifier's", |bencher| {
        bencher.iter(|| black_box(text::parse(black_box(config))));
    });
}

criterion_group!(group, benches);
criterion_main!(group);

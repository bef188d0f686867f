//! A request's way through the batcher.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use dormouse_core::batch::{BatchItem, BatchPolicy, Batcher, QueuePolicy, TimeoutAction, Waiting};
use dormouse_core::time::Timestamp;

struct Item;

impl BatchItem for Item {
    fn rows(&self) -> u32 {
        1
    }

    fn can_join(&self, _first: &Self) -> bool {
        true
    }
}

fn policy(max_rows: u32) -> BatchPolicy {
    BatchPolicy {
        max_rows,
        preferred_rows: Vec::new(),
        max_delay: Duration::ZERO,
        levels: vec![QueuePolicy {
            timeout_action: TimeoutAction::Reject,
            default_timeout: None,
            allow_timeout_override: false,
            max_queue_size: 10_000,
        }],
        default_level: 1,
    }
}

fn push(batcher: &mut Batcher<Item>, now: Timestamp) {
    let waiting = Waiting {
        item: Item,
        priority: 0,
        deadline: None,
        timeout: None,
    };
    assert!(batcher.push(waiting, now).is_ok(), "the queue has room");
}

fn benches(criterion: &mut Criterion) {
    let now = Timestamp::from_nanos(1);
    criterion.bench_function("batcher: one request in and out", |bencher| {
        let mut batcher = Batcher::new(policy(1));
        bencher.iter(|| {
            push(&mut batcher, now);
            black_box(batcher.take_batch(now, |_| None))
        });
    });
    criterion.bench_function("batcher: 64 requests in, one batch out", |bencher| {
        let mut batcher = Batcher::new(policy(64));
        bencher.iter(|| {
            for _ in 0..64 {
                push(&mut batcher, now);
            }
            black_box(batcher.take_batch(now, |_| None))
        });
    });
}

criterion_group!(group, benches);
criterion_main!(group);

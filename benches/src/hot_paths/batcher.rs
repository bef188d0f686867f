//! A request's way through the batcher.

use std::hint::black_box;
use std::time::Duration;

use dormouse_core::batch::{BatchItem, BatchPolicy, Batcher, QueuePolicy, TimeoutAction, Waiting};
use dormouse_core::time::Timestamp;

use super::{Step, Workload};

pub const WORKLOADS: &[Workload] = &[
    Workload {
        name: "batcher: one request in and out",
        prepare: || through(1, None),
    },
    Workload {
        name: "batcher: 64 requests in, one batch out",
        prepare: || through(64, None),
    },
    Workload {
        name: "batcher: 64 requests with deadlines in, one batch out",
        prepare: || through(64, Some(Timestamp::from_nanos(1_000_000_000))),
    },
];

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

fn through(rows: u32, deadline: Option<Timestamp>) -> Step {
    let mut batcher = Batcher::new(policy(rows));
    let now = Timestamp::from_nanos(1);
    let expected_run = |_| Some(Duration::from_micros(100));
    Box::new(move || {
        for _ in 0..rows {
            let waiting = Waiting {
                item: Item,
                priority: 0,
                deadline,
                timeout: None,
            };
            assert!(batcher.push(waiting, now).is_ok(), "the queue has room");
        }
        black_box(batcher.wake_at(expected_run));
        let batch = batcher.take_batch(now, expected_run);
        assert!(black_box(batch).is_some(), "the batch is full");
    })
}

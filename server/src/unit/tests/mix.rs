//! Everything at once, from a seed.

use dormouse_model_store::spec::KeepAliveSpec;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dormouse_core::code::ErrorCode;
use parking_lot::Mutex;

use super::fake::{Bench, POISON, batching, counts, request};
use crate::unit::{NotAnswered, Unit};

/// A small generator: the same numbers for the same seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

#[derive(Default)]
struct Tally {
    answered: AtomicU64,
    refused: AtomicU64,
    cancelled: AtomicU64,
    retired: AtomicU64,
}

#[tokio::test(flavor = "multi_thread")]
async fn every_request_is_answered_and_counted_once_whatever_happens() {
    for seed in 1..=6 {
        mix(seed).await;
    }
}

async fn mix(seed: u64) {
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let bench = Bench::with(|defaults| {
        defaults.keep_alive = KeepAliveSpec::For(Duration::from_millis(dice.below(3)));
        defaults.retry_backoff = Duration::from_millis(1);
        defaults.retry_backoff_max = Duration::from_millis(2);
        defaults.max_queue = 20;
    });
    let make = |dice: &mut Dice| {
        let (orders, waits) = (dice.below(2) == 0, dice.below(2) == 0);
        bench.unit(|spec| {
            spec.concurrency = 1 + dice.below(2) as u32;
            if dice.below(4) > 0 {
                let mut batching = batching();
                batching.preserve_ordering = orders;
                batching.max_delay = Duration::from_micros(if waits { 300 } else { 0 });
                batching.default_queue_policy.default_timeout =
                    (dice.below(2) == 0).then_some(Duration::from_millis(2));
                spec.batching = Some(batching);
            }
        })
    };
    // The one that serves, and every one there was.
    let places: Arc<Vec<Mutex<Arc<Unit>>>> =
        Arc::new((0..5).map(|_| Mutex::new(make(&mut dice))).collect());
    let mut all: Vec<Arc<Unit>> = places.iter().map(|place| place.lock().clone()).collect();
    let tally = Arc::new(Tally::default());
    let mut asked = Vec::new();
    let mut retiring = Vec::new();
    const SENT: u64 = 2_000;
    for number in 0..SENT {
        if dice.below(100) == 0 {
            let place = &places[dice.below(5) as usize];
            let next = make(&mut dice);
            all.push(Arc::clone(&next));
            let old = std::mem::replace(&mut *place.lock(), next);
            retiring.push(tokio::spawn(async move { old.retire().await }));
        }
        bench.engine.fail_loads(dice.below(10) == 0);
        let value = match dice.below(20) {
            0 => POISON,
            _ => number as i32,
        };
        let mut request = request(value);
        let deadline = dice.below(4_000);
        if dice.below(3) == 0 {
            request.deadline = Some(bench.host.clock.now() + Duration::from_micros(deadline));
        }
        let patience = (dice.below(4) == 0).then(|| Duration::from_micros(dice.below(2_000)));
        let unit = places[dice.below(5) as usize].lock().clone();
        let tally = Arc::clone(&tally);
        asked.push(tokio::spawn(async move {
            let answer = async {
                match unit.infer(request).await {
                    Ok(response) => {
                        let data = &response.outputs[0].1.data;
                        assert_eq!(data.as_ref(), value.to_le_bytes());
                        &tally.answered
                    }
                    Err(NotAnswered::Failed(error)) => {
                        let message = error.message();
                        assert!(!message.contains("without an answer"), "{message}");
                        assert!(
                            error.code() != ErrorCode::Internal || value == POISON,
                            "{message}"
                        );
                        &tally.refused
                    }
                    Err(NotAnswered::Retired(_)) => &tally.retired,
                }
            };
            let outcome = match patience {
                None => answer.await,
                Some(patience) => match tokio::time::timeout(patience, answer).await {
                    Ok(outcome) => outcome,
                    Err(_) => &tally.cancelled,
                },
            };
            outcome.fetch_add(1, Ordering::SeqCst);
        }));
        if dice.below(50) == 0 {
            tokio::time::sleep(Duration::from_millis(dice.below(4))).await;
        }
    }
    for asked in asked {
        asked.await.unwrap();
    }
    for retiring in retiring {
        retiring.await.unwrap();
    }
    for place in places.iter() {
        let unit = place.lock().clone();
        bench.assert_idle(&unit).await;
    }
    let read = |count: &AtomicU64| count.load(Ordering::SeqCst);
    let given_back = read(&tally.retired);
    let (succeeded, failed) = all
        .iter()
        .map(|unit| counts(unit))
        .fold((0, 0), |(successes, failures), (success, failure)| {
            (successes + success, failures + failure)
        });
    assert_eq!(succeeded + failed + given_back, SENT, "seed {seed}");
    // A caller may leave while its answer is on its way.
    assert!(succeeded >= read(&tally.answered), "seed {seed}");
    assert_eq!(bench.engine.open_sessions(), 0, "seed {seed}");
}

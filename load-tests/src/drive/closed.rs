//! The closed loop: as many requests under way as the step says, whatever they take.

use std::sync::Arc;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::dice::Dice;
use super::load::{Running, until_stopped};
use super::progress::Progress;

/// Streams of random numbers that are not those of inputs.
const STREAMS: u64 = 1 << 32;

/// Keeps `concurrency` requests under way until the measured time ends.
pub(crate) async fn drive(running: &Arc<Running>, concurrency: usize, progress: &Progress) {
    let to = running.recorder().to();
    let mut workers = JoinSet::new();
    for worker in 0..concurrency as u64 {
        let running = Arc::clone(running);
        workers.spawn(async move {
            let mut dice = Dice::new(running.load.seed, STREAMS + worker);
            loop {
                let now = Instant::now();
                if now >= to || running.is_stopping() {
                    return;
                }
                let model = running.load.draw(&mut dice);
                running.one(model, now, &mut dice).await;
            }
        });
    }
    until_stopped(progress, async {
        while workers.join_next().await.is_some() {}
    })
    .await;
    workers.shutdown().await;
}

//! The open loop: requests are sent when they are due, whatever becomes of the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::arrivals::Schedule;
use super::dice::Dice;
use super::load::{Running, until_stopped};
use super::progress::Progress;

/// Streams of random numbers that are neither those of inputs nor those of closed loops.
const STREAMS: u64 = 2 << 32;
/// How long the pacer sleeps at most before it looks whether to stop.
const LOOK: Duration = Duration::from_millis(50);

/// Sends requests at their time from a thread of its own: the runtime's timers tick in
/// milliseconds, and its threads may be busy when a request is due.
struct Pacer {
    running: Arc<Running>,
    schedule: Schedule,
    start: Instant,
    bound: usize,
    runtime: Handle,
    /// Everything that was started, so that it can be ended.
    started: Vec<AbortHandle>,
    /// Dropped by the last request that ends.
    alive: mpsc::Sender<()>,
}

/// What a request holds while it is under way. It says that it has ended after it has let go of the
/// step: fields are dropped in order.
struct Held {
    running: Arc<Running>,
    _alive: mpsc::Sender<()>,
}

/// Sends what `schedule` has from `start` on, at most `bound` at once.
pub(crate) async fn drive(
    running: &Arc<Running>,
    schedule: Schedule,
    (start, bound): (Instant, usize),
    progress: &Progress,
) -> Result<()> {
    let (alive, mut all_ended) = mpsc::channel(1);
    let pacer = Pacer {
        running: Arc::clone(running),
        schedule,
        start,
        bound,
        runtime: Handle::current(),
        started: Vec::new(),
        alive,
    };
    let thread = std::thread::Builder::new()
        .name("pacer".to_owned())
        .spawn(move || pacer.run())
        .context("cannot start a thread")?;
    until_stopped(progress, async {
        // Nobody sends: it ends when the pacer and every request have.
        let _: Option<()> = all_ended.recv().await;
    })
    .await;
    running.stopping.store(true, Ordering::Relaxed);
    let joined = tokio::task::spawn_blocking(move || thread.join()).await?;
    let started = joined.map_err(|_| anyhow::anyhow!("the pacer panicked"))?;
    for request in started {
        request.abort();
    }
    // Those that were ended drop what they hold.
    let _: Option<()> = all_ended.recv().await;
    Ok(())
}

impl Pacer {
    fn run(mut self) -> Vec<AbortHandle> {
        let to = self.running.recorder().to();
        let seed = self.running.load.seed;
        let mut dice = Dice::new(seed, STREAMS);
        let outstanding = Arc::new(AtomicUsize::new(0));
        let mut number = STREAMS;
        while let Some(due) = self.schedule.next() {
            let at = self.start + due.at;
            if at >= to || !self.wait_until(at) {
                break;
            }
            let model = match due.model {
                Some(model) => model,
                None => self.running.load.draw(&mut dice),
            };
            if outstanding.load(Ordering::Acquire) >= self.bound {
                self.running.recorder().not_sent(model, at);
                continue;
            }
            outstanding.fetch_add(1, Ordering::AcqRel);
            number += 1;
            let mut dice = Dice::new(seed, number);
            let outstanding = Arc::clone(&outstanding);
            let held = Held {
                running: Arc::clone(&self.running),
                _alive: self.alive.clone(),
            };
            let request = self.runtime.spawn(async move {
                let held = held;
                held.running.one(model, at, &mut dice).await;
                outstanding.fetch_sub(1, Ordering::AcqRel);
            });
            self.started.push(request.abort_handle());
            if self.started.len() > 2 * self.bound + 1024 {
                self.started.retain(|request| !request.is_finished());
            }
        }
        self.started
    }

    /// Whether the moment came, rather than the wish to stop.
    fn wait_until(&self, moment: Instant) -> bool {
        loop {
            if self.running.is_stopping() {
                return false;
            }
            let left = moment.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            std::thread::park_timeout(left.min(LOOK));
        }
    }
}

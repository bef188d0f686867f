//! Requests of one stream, worked on side by side and answered in the order in which they came.
//!
//! A step of a sequence may have to wait for another sequence to end, and the step that ends that
//! one may come later on the same stream. So steps that wait do not keep the stream from being
//! read: behind one, more requests may be under way than otherwise, up to a second bound.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use futures_util::stream::{FuturesOrdered, Stream, StreamExt};

/// How many times as many requests may be under way while steps of sequences are among them.
pub(super) const BEHIND_STEPS: usize = 16;

/// Bytes of finished answers behind a step that still waits; with more the stream is not read.
const MAX_HELD: u64 = 64 << 20;

/// A request that was read.
pub(super) struct Job<F> {
    pub(super) work: F,
    /// It is a step of a sequence.
    pub(super) is_step: bool,
}

/// What an answer takes while it waits for those before it.
pub(super) trait Weigh {
    fn bytes(&self) -> u64;
}

/// Works on up to `limit` jobs at a time, as the module says; gives their outcomes in order.
pub(super) fn ordered<S, F>(source: S, limit: usize) -> impl Stream<Item = F::Output> + Send
where
    S: Stream<Item = Job<F>> + Send,
    F: Future<Output: Weigh + Send> + Send,
{
    let tally: Arc<Tally> = Arc::default();
    let counted = Arc::clone(&tally);
    let source = source.map(move |job| Job {
        is_step: job.is_step,
        work: watch(job, Arc::clone(&counted)),
    });
    Ordered {
        source: Some(Box::pin(source)),
        under_way: FuturesOrdered::new(),
        steps: 0,
        limit: limit.max(1),
        tally,
    }
}

struct Ordered<S, W: Future> {
    /// None once it has ended.
    source: Option<Pin<Box<S>>>,
    under_way: FuturesOrdered<W>,
    /// Steps of sequences that have not been answered.
    steps: usize,
    /// Requests that may be under way while there is no step among them.
    limit: usize,
    tally: Arc<Tally>,
}

/// What the requests under way say of themselves.
#[derive(Debug, Default)]
struct Tally {
    /// Requests that are no steps and not finished.
    running: AtomicUsize,
    /// Bytes of answers that wait for those before them.
    held: AtomicU64,
}

struct Finished<T> {
    output: T,
    is_step: bool,
    bytes: u64,
}

async fn watch<F: Future<Output: Weigh>>(job: Job<F>, tally: Arc<Tally>) -> Finished<F::Output> {
    let is_step = job.is_step;
    let output = job.work.await;
    let bytes = output.bytes();
    tally.held.fetch_add(bytes, Ordering::Relaxed);
    if !is_step {
        tally.running.fetch_sub(1, Ordering::Relaxed);
    }
    Finished {
        output,
        is_step,
        bytes,
    }
}

impl<S, W: Future> Ordered<S, W> {
    fn has_room(&self) -> bool {
        let count = self.under_way.len();
        count < self.limit
            || self.steps > 0
                && count < self.limit.saturating_mul(BEHIND_STEPS)
                && self.tally.running.load(Ordering::Relaxed) < self.limit
                && self.tally.held.load(Ordering::Relaxed) < MAX_HELD
    }

    fn begin(&mut self, job: Job<W>) {
        if job.is_step {
            self.steps += 1;
        } else {
            self.tally.running.fetch_add(1, Ordering::Relaxed);
        }
        self.under_way.push_back(job.work);
    }
}

impl<S, W, T> Stream for Ordered<S, W>
where
    S: Stream<Item = Job<W>>,
    W: Future<Output = Finished<T>>,
{
    type Item = T;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let this = &mut *self;
        loop {
            let mut is_drained = false;
            while this.has_room()
                && let Some(source) = &mut this.source
            {
                match source.poll_next_unpin(cx) {
                    Poll::Ready(Some(job)) => this.begin(job),
                    Poll::Ready(None) => this.source = None,
                    Poll::Pending => {
                        is_drained = true;
                        break;
                    }
                }
            }
            match this.under_way.poll_next_unpin(cx) {
                Poll::Ready(Some(finished)) => {
                    this.steps -= usize::from(finished.is_step);
                    let held = finished.bytes;
                    this.tally.held.fetch_sub(held, Ordering::Relaxed);
                    return Poll::Ready(Some(finished.output));
                }
                Poll::Ready(None) if this.source.is_none() => return Poll::Ready(None),
                // What finished meanwhile may have made room.
                Poll::Pending if !is_drained && this.source.is_some() && this.has_room() => {}
                Poll::Ready(None) | Poll::Pending => return Poll::Pending,
            }
        }
    }
}

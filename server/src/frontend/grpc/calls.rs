//! Runs a connection's calls on the connection's own task.
//!
//! A task for each call would let another thread flush every answer by itself: a write to the
//! socket per answer instead of one for all that are ready. Calls that take long wait for threads
//! made for that; nothing here blocks.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Where the protocol library puts the calls of one connection.
#[derive(Clone, Default)]
pub(super) struct CallQueue {
    arrived: Arc<Mutex<Vec<Call>>>,
}

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for CallQueue {
    fn execute(&self, call: F) {
        self.arrived.lock().push(Box::pin(call));
    }
}

/// A connection together with its calls. Dropping it drops, and so cancels, them all.
pub(super) struct WithCalls<C> {
    connection: Pin<Box<C>>,
    queue: CallQueue,
    calls: FuturesUnordered<Call>,
}

impl<C: Future> WithCalls<C> {
    /// `connection` must hand its calls to `queue`.
    pub(super) fn new(connection: C, queue: CallQueue) -> Self {
        Self {
            connection: Box::pin(connection),
            queue,
            calls: FuturesUnordered::new(),
        }
    }

    pub(super) fn connection(&mut self) -> Pin<&mut C> {
        self.connection.as_mut()
    }
}

impl<C: Future> Future for WithCalls<C> {
    type Output = C::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<C::Output> {
        let this = &mut *self;
        loop {
            if let Poll::Ready(ended) = this.connection.as_mut().poll(cx) {
                return Poll::Ready(ended);
            }
            let arrived = mem::take(&mut *this.queue.arrived.lock());
            let mut progress = !arrived.is_empty();
            this.calls.extend(arrived);
            while let Poll::Ready(Some(())) = this.calls.poll_next_unpin(cx) {
                progress = true;
            }
            if !progress {
                return Poll::Pending;
            }
            // The answers lie in the connection's buffers: once more, to write them.
        }
    }
}

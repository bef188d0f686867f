//! Runs a connection's calls on the connection's own task.
//!
//! A task for each call would let another thread flush every answer by itself: a write to the
//! socket per answer instead of one for all that are ready. Calls that take long wait for threads
//! made for that; nothing here blocks.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use futures_util::task::AtomicWaker;
use parking_lot::Mutex;

use crate::frontend::listen::Requests;
use crate::limits::Limit;

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// How often a connection looks again before other tasks get their turn.
const ROUNDS: usize = 16;

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
    /// As many as the connection may have at once.
    max_calls: usize,
    /// Where they are counted.
    requests: Requests,
    bell: Arc<Bell>,
    waker: Waker,
}

impl<C: Future> WithCalls<C> {
    /// `connection` must hand its calls to `queue`.
    pub(super) fn new(
        connection: C,
        queue: CallQueue,
        max_calls: usize,
        requests: Requests,
    ) -> Self {
        let bell = Arc::new(Bell::default());
        Self {
            connection: Box::pin(connection),
            queue,
            calls: FuturesUnordered::new(),
            max_calls,
            requests,
            waker: Arc::clone(&bell).into(),
            bell,
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
        this.bell.task.register(cx.waker());
        let inner = &mut Context::from_waker(&this.waker);
        for _ in 0..ROUNDS {
            this.bell.listen();
            if let Poll::Ready(ended) = this.connection.as_mut().poll(inner) {
                return Poll::Ready(ended);
            }
            let arrived = mem::take(&mut *this.queue.arrived.lock());
            if !arrived.is_empty() {
                this.requests.open_streams(arrived.len());
                if this.calls.len() + arrived.len() >= this.max_calls {
                    Limit::Streams.refuse();
                }
            }
            this.calls.extend(arrived);
            while let Poll::Ready(Some(())) = this.calls.poll_next_unpin(inner) {
                this.requests.close_stream();
            }
            // An answer rings too: it lies in the connection's buffers and is written next.
            if !this.bell.has_rung() {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

/// Wakes the connection's task, or lets it look once more when it is the one that rings.
///
/// Each answer wakes its connection. A task that wakes itself goes to the end of its thread's
/// queue, and the runtime wakes another thread to help with that queue: two system calls and a
/// thread's wake-up for every request, which is more than the request itself takes.
#[derive(Default)]
struct Bell {
    state: AtomicU8,
    task: AtomicWaker,
}

/// Nobody has rung since the task last looked, and it will not look again by itself.
const QUIET: u8 = 0;
/// The task is looking.
const LISTENING: u8 = 1;
/// Somebody has rung: the task was woken, or is still looking and will look again.
const RUNG: u8 = 2;

impl Bell {
    /// What rings from here on is heard by [`Bell::has_rung`]; what rang before is seen now.
    fn listen(&self) {
        self.state.swap(LISTENING, Ordering::AcqRel);
    }

    /// Whether somebody rang since [`Bell::listen`]; if not, the next one wakes the task.
    fn has_rung(&self) -> bool {
        let quiet =
            self.state
                .compare_exchange(LISTENING, QUIET, Ordering::AcqRel, Ordering::Acquire);
        quiet.is_err()
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.swap(RUNG, Ordering::AcqRel) == QUIET {
            self.task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use futures_util::task::noop_waker;

    use super::*;

    /// A connection that does as it is told at each poll.
    struct Scripted<F>(F);

    impl<F: FnMut(&mut Context<'_>) -> Poll<()> + Unpin> Future for Scripted<F> {
        type Output = ();

        fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
            (self.0)(cx)
        }
    }

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_connection_that_wakes_itself_is_polled_again_without_waking_its_task() {
        let mut polls = 0;
        let connection = Scripted(|cx: &mut Context<'_>| {
            polls += 1;
            if polls < 3 {
                cx.waker().wake_by_ref();
            }
            Poll::Pending
        });
        let mut with_calls = WithCalls::new(
            connection,
            CallQueue::default(),
            usize::MAX,
            Requests::default(),
        );
        let wakes = Arc::new(Wakes::default());
        let waker = Arc::clone(&wakes).into();
        let polled = Pin::new(&mut with_calls).poll(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
        drop(with_calls);
        assert_eq!((polls, wakes.0.load(Ordering::SeqCst)), (3, 0));
    }

    #[test]
    fn whoever_rings_later_wakes_the_task_once_until_it_looks_again() {
        let mut inner = None;
        let connection = Scripted(|cx: &mut Context<'_>| {
            inner = Some(cx.waker().clone());
            Poll::Pending
        });
        let mut with_calls = WithCalls::new(
            connection,
            CallQueue::default(),
            usize::MAX,
            Requests::default(),
        );
        let bell = with_calls.waker.clone();
        let wakes = Arc::new(Wakes::default());
        let waker = Arc::clone(&wakes).into();
        let cx = &mut Context::from_waker(&waker);
        for round in 1..4 {
            assert!(Pin::new(&mut with_calls).poll(cx).is_pending());
            bell.wake_by_ref();
            bell.wake_by_ref();
            assert_eq!(wakes.0.load(Ordering::SeqCst), round);
        }
    }

    #[test]
    fn a_connection_that_never_rests_lets_others_have_their_turn() {
        let mut polls = 0;
        let connection = Scripted(|cx: &mut Context<'_>| {
            polls += 1;
            cx.waker().wake_by_ref();
            Poll::Pending
        });
        let mut with_calls = WithCalls::new(
            connection,
            CallQueue::default(),
            usize::MAX,
            Requests::default(),
        );
        let wakes = Arc::new(Wakes::default());
        let waker = Arc::clone(&wakes).into();
        let polled = Pin::new(&mut with_calls).poll(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
        drop(with_calls);
        assert_eq!((polls, wakes.0.load(Ordering::SeqCst)), (ROUNDS, 1));
    }

    #[test]
    fn calls_are_run_and_dropped_with_their_connection() {
        use hyper::rt::Executor;

        let queue = CallQueue::default();
        let finished = Arc::new(AtomicUsize::new(0));
        let held = Arc::new(());
        let connection = Scripted(|_: &mut Context<'_>| Poll::Pending);
        let mut with_calls =
            WithCalls::new(connection, queue.clone(), usize::MAX, Requests::default());
        let (done, kept) = (Arc::clone(&finished), Arc::clone(&held));
        queue.execute(async move {
            done.fetch_add(1, Ordering::SeqCst);
        });
        queue.execute(async move {
            let _kept = kept;
            std::future::pending::<()>().await;
        });
        let waker = noop_waker();
        let polled = Pin::new(&mut with_calls).poll(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
        assert_eq!(finished.load(Ordering::SeqCst), 1);
        assert_eq!(Arc::strong_count(&held), 2);
        drop(with_calls);
        assert_eq!(Arc::strong_count(&held), 1);
    }
}

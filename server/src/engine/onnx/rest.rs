//! Lets the threads of ONNX Runtime's pool rest while nobody computes.
//!
//! # Why
//! Between the steps of a run the pool's threads look for work without sleeping, which makes a
//! small transformer's run a fifth shorter. But they go on for a million rounds after the run has
//! ended: some 45 ms, on every core but one, after each call of any model. ONNX Runtime can be told
//! to stop that (`session.force_spinning_stop`) for the pool of one session only, not for the pool
//! that sessions share.
//!
//! So each thread of the pool has a timer that counts the thread's own processor time. When it has
//! run for a few milliseconds its handler looks whether anybody computes, and if nobody did since it
//! looked before waits there until somebody does. A thread that sleeps by itself is left alone, and
//! one that computes pays for a signal every few milliseconds.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::thread_timer::{self, ThreadTimer};

/// How much processor time a thread may use before it is asked whether anybody computes.
const PATIENCE: Duration = Duration::from_millis(2);
/// The longest rest: a call that was forgotten is slow instead of stuck. ONNX Runtime's count of rounds
/// goes on after it, so a thread that nobody calls looks for work a few times more, some milliseconds
/// each, until the count is up and it sleeps by itself.
const LONGEST_REST: Duration = Duration::from_secs(10);

/// How many calls that may use the pool are under way; threads at rest wait for it to change.
static CALLS: AtomicU32 = AtomicU32::new(0);
/// How many were ever begun.
static BEGUN: AtomicU32 = AtomicU32::new(0);
/// Threads at rest, or about to be.
static RESTING: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// What [`BEGUN`] was when this thread's timer last found that nobody computes.
    static SEEN: Cell<u32> = const { Cell::new(0) };
}

/// While it lives threads of the pool work, and look for work.
#[must_use]
#[derive(Debug)]
pub(super) struct AtWork(());

/// To be held during every call that has work for the pool.
pub(super) fn at_work() -> AtWork {
    let working = at_work_alone();
    // Both sides write first and look afterwards, in one order for all: a thread either sees the
    // call before it rests, or is seen here.
    if RESTING.load(Ordering::SeqCst) > 0 {
        wake_all();
    }
    working
}

/// As [`at_work`], for a call that has nothing to speak of for the pool: who rests is left to it.
pub(super) fn at_work_alone() -> AtWork {
    BEGUN.fetch_add(1, Ordering::SeqCst);
    CALLS.fetch_add(1, Ordering::SeqCst);
    AtWork(())
}

impl Drop for AtWork {
    fn drop(&mut self) {
        CALLS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Has the calling thread rest when it finds nothing to do, until the guard is dropped. Where the
/// system does not allow it the thread looks for work as long as ONNX Runtime has it do so.
pub(super) fn when_idle() -> Option<ThreadTimer> {
    static SIGNAL: OnceLock<Option<c_int>> = OnceLock::new();
    let signal = (*SIGNAL.get_or_init(|| thread_timer::take_signal(rest)))?;
    ThreadTimer::every(PATIENCE, signal)
        .inspect_err(|error| {
            tracing::debug!(%error, "threads of the pool do not rest between runs");
        })
        .ok()
}

/// Waits until somebody computes. Within a signal handler, so nothing but atomics, a number of this
/// thread's own and system calls.
///
/// The thread has used its patience up since the last call, so it has long ended what that gave it:
/// all it does is look into the pool's queues. Nobody but a call waits for these, and a call that has
/// work lets it go on first.
#[expect(unsafe_code, reason = "waits by system calls and keeps errno")]
extern "C" fn rest(_signal: c_int) {
    let begun = BEGUN.load(Ordering::SeqCst);
    if CALLS.load(Ordering::SeqCst) > 0 || SEEN.replace(begun) != begun {
        return;
    }
    let longest = libc::timespec {
        tv_sec: LONGEST_REST.as_secs() as libc::time_t,
        tv_nsec: LONGEST_REST.subsec_nanos().into(),
    };
    RESTING.fetch_add(1, Ordering::SeqCst);
    // SAFETY: the counter lives for ever, the time until the call returns, and errno is this
    // thread's. The kernel compares the counter itself before it lets the thread sleep.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        libc::syscall(
            libc::SYS_futex,
            CALLS.as_ptr(),
            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
            0,
            &longest,
        );
        *errno = before;
    }
    RESTING.fetch_sub(1, Ordering::SeqCst);
}

#[expect(unsafe_code, reason = "wakes threads by a system call")]
#[cold]
fn wake_all() {
    // SAFETY: the counter lives for ever; waking nobody is harmless.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            CALLS.as_ptr(),
            libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
            c_int::MAX,
        );
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64};

    use tokio::time::Instant;

    use super::*;

    /// A thread that looks for work and finds none, as those of the pool do.
    struct Seeker {
        rounds: Arc<AtomicU64>,
        stop: Arc<AtomicBool>,
        thread: Option<std::thread::JoinHandle<()>>,
    }

    impl Seeker {
        fn start() -> Self {
            let (rounds, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
            let (counted, stopped) = (Arc::clone(&rounds), Arc::clone(&stop));
            let thread = std::thread::spawn(move || {
                let _timer = when_idle().expect("timers of a thread's own time are allowed");
                while !stopped.load(Ordering::Relaxed) {
                    counted.fetch_add(1, Ordering::Relaxed);
                    std::hint::spin_loop();
                }
            });
            Self {
                rounds,
                stop,
                thread: Some(thread),
            }
        }

        fn rounds(&self) -> u64 {
            self.rounds.load(Ordering::Relaxed)
        }
    }

    impl Drop for Seeker {
        fn drop(&mut self) {
            self.stop.store(true, Ordering::Relaxed);
            // It ends sooner when it is let go on.
            drop(at_work());
            if let Some(thread) = self.thread.take() {
                thread.join().expect("the thread does not panic");
            }
        }
    }

    /// So that a failure is one, and does not hang.
    const PATIENCE_OF_TESTS: Duration = Duration::from_secs(120);

    fn until(what: &str, mut reached: impl FnMut() -> bool) {
        let started = Instant::now();
        while !reached() {
            assert!(
                started.elapsed() < PATIENCE_OF_TESTS,
                "waited in vain: {what}"
            );
            std::thread::yield_now();
        }
    }

    /// Waits until a thread makes no more rounds while others run.
    fn until_at_rest(seeker: &Seeker) {
        let (mut rounds, mut looks) = (seeker.rounds(), 0);
        until("a thread rests", || {
            let now = seeker.rounds();
            looks = if now == rounds { looks + 1 } else { 0 };
            rounds = now;
            looks > 100_000 && RESTING.load(Ordering::SeqCst) > 0
        });
    }

    /// One test: the counters are the process's, and other tests compute at times.
    #[test]
    fn threads_rest_while_nobody_computes_and_go_on_when_somebody_does() {
        let seekers = [Seeker::start(), Seeker::start()];
        seekers.iter().for_each(until_at_rest);

        let working = at_work();
        for seeker in &seekers {
            let before = seeker.rounds();
            // More than its timer's time: nobody rests while there may be something to do.
            until("a thread goes on", || seeker.rounds() > before + 10_000_000);
        }
        drop(working);
        seekers.iter().for_each(until_at_rest);
    }
}

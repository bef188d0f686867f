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
use std::mem;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How much processor time a thread may use before it is asked whether anybody computes. The
/// kernel looks at its ticks only, which are 1 to 10 ms apart.
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
pub(super) fn when_idle() -> Option<Timer> {
    let signal = signal()?;
    Timer::of_this_thread(signal)
        .inspect_err(|error| {
            tracing::debug!(%error, "threads of the pool do not rest between runs");
        })
        .ok()
}

/// A timer of the calling thread's processor time, deleted on drop.
#[derive(Debug)]
pub(super) struct Timer(libc::timer_t);

impl Timer {
    #[expect(unsafe_code, reason = "creates a timer that signals this thread")]
    fn of_this_thread(signal: c_int) -> std::io::Result<Self> {
        let interval = libc::timespec {
            tv_sec: 0,
            tv_nsec: PATIENCE.subsec_nanos().into(),
        };
        let times = libc::itimerspec {
            it_interval: interval,
            it_value: interval,
        };
        // SAFETY: zeroes are a valid event, the fields that count are set; the timer is ours from
        // its creation on and deleted once. It signals a thread that exists as long as the timer.
        unsafe {
            let mut event: libc::sigevent = mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal;
            event.sigev_notify_thread_id = libc::gettid();
            let mut timer = ptr::null_mut();
            check(libc::timer_create(
                libc::CLOCK_THREAD_CPUTIME_ID,
                &mut event,
                &mut timer,
            ))?;
            let timer = Self(timer);
            check(libc::timer_settime(timer.0, 0, &times, ptr::null_mut()))?;
            Ok(timer)
        }
    }
}

impl Drop for Timer {
    #[expect(unsafe_code, reason = "deletes a timer")]
    fn drop(&mut self) {
        // SAFETY: created once, deleted once.
        unsafe { libc::timer_delete(self.0) };
    }
}

fn check(result: c_int) -> std::io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// The signal that timers send, with our handler; none where every real-time signal is somebody's.
#[expect(unsafe_code, reason = "installs a signal handler")]
fn signal() -> Option<c_int> {
    static SIGNAL: OnceLock<Option<c_int>> = OnceLock::new();
    *SIGNAL.get_or_init(|| {
        // From above: who wants one for himself begins below.
        (libc::SIGRTMIN()..=libc::SIGRTMAX()).rev().find(|&signal| {
            // SAFETY: zeroes are a valid action; the old one is a place for one, and the
            // handler does what may be done in one.
            unsafe {
                let mut before: libc::sigaction = mem::zeroed();
                if libc::sigaction(signal, ptr::null(), &mut before) != 0
                    || before.sa_sigaction != libc::SIG_DFL
                {
                    return false;
                }
                let mut action: libc::sigaction = mem::zeroed();
                action.sa_sigaction = rest as extern "C" fn(c_int) as libc::sighandler_t;
                action.sa_flags = libc::SA_RESTART;
                libc::sigaction(signal, &action, ptr::null_mut()) == 0
            }
        })
    })
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

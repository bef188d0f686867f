//! Threads that take requests go ahead of those that compute, where the system allows it.
//!
//! # Why
//! Taking a request in and sending its answer are a matter of microseconds. While every processor
//! computes, the kernel mostly gives such a thread one of them at once, but about one time in a
//! hundred only at its next tick, milliseconds later. In real time (`SCHED_FIFO`, the lowest of its
//! priorities) it goes ahead of everything that has no deadline of its own.
//!
//! What a thread may use that way is bounded by [`Urgency`]: a timer of its own processor time looks
//! whether it used too much, and puts it back in line. A thread that is in line looks before it
//! waits, so one that goes ahead pays nothing for all this.
//!
//! Runs that are sure to be short happen on such a thread, too. Should one wait for a thread of the
//! engine's pool, and another request thread keep that from running, it waits until the other one waits
//! or is put back in line: a burst and a tick at most.

use std::cell::{Cell, OnceCell};
use std::ffi::c_int;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, compiler_fence};
use std::time::Duration;

use dormouse_core::time::Timestamp;
use dormouse_core::urgency::{Urgency, UrgencyPolicy};

use crate::config::RequestPriority;
use crate::thread_timer::{self, ThreadTimer};

/// An eighth of a core for each thread, interruptions included.
const POLICY: UrgencyPolicy = UrgencyPolicy {
    share: 8,
    burst: Duration::from_millis(5),
};

/// What each time counts beside its processor time that a thread goes ahead and waits again: it has
/// interrupted somebody. With ten times the load that fits, refusing took each thread as little as a small
/// model's requests do, but interrupted runs some thousand times per second, which cost a twentieth of
/// the answers.
const INTERRUPTION: Duration = Duration::from_micros(100);

/// How much processor time a thread uses before it is looked at.
const LOOK: Duration = Duration::from_millis(2);

/// Any real-time priority is above all usual ones; the others are for those who know better.
const REAL_TIME_PRIORITY: c_int = 1;

/// Whether threads that take requests may go ahead.
static ALLOWED: AtomicBool = AtomicBool::new(false);
/// How often a thread used too much.
static PUT_BACK: AtomicU64 = AtomicU64::new(0);

/// Why threads cannot go ahead although they were told to.
#[derive(Debug, thiserror::Error)]
#[error(
    "requests cannot go ahead of computing: {0}; --request-priority=realtime needs the capability CAP_SYS_NICE or a limit of real-time priorities (RLIMIT_RTPRIO) of at least 1"
)]
pub struct NotAllowed(io::Error);

/// Lets this process's request threads go ahead from now on, if that is wanted and allowed.
pub fn set_up(priority: RequestPriority) -> Result<(), NotAllowed> {
    let allowed = match priority {
        RequestPriority::Normal => Ok(false),
        RequestPriority::Auto | RequestPriority::Realtime => try_out().map(|()| true),
    };
    match allowed {
        Ok(allowed) => {
            ALLOWED.store(allowed, Ordering::Relaxed);
            if allowed {
                tracing::info!("threads that take requests go ahead of computing");
            }
            Ok(())
        }
        Err(error) if priority == RequestPriority::Realtime => Err(NotAllowed(error)),
        Err(error) => {
            tracing::debug!(%error, "threads that take requests have the usual priority");
            Ok(())
        }
    }
}

/// How often a thread that went ahead used more than its share.
pub fn put_back() -> u64 {
    PUT_BACK.load(Ordering::Relaxed)
}

/// To be called by a thread that takes requests, before it waits for the next one.
pub fn before_wait() {
    if ALLOWED.load(Ordering::Relaxed) {
        // Fails only while the thread ends.
        let _ = THREAD.try_with(RequestThread::before_wait);
    }
}

thread_local! {
    static THREAD: RequestThread = const {
        RequestThread {
            timer: OnceCell::new(),
            urgency: Cell::new(Urgency::new(POLICY, Timestamp::ZERO)),
            used: Cell::new(Duration::ZERO),
            waits: AtomicU32::new(0),
            is_ahead: AtomicBool::new(false),
            is_looking: AtomicBool::new(false),
        }
    };
}

/// A thread's own; its timer's handler runs on it too, at any moment.
struct RequestThread {
    /// None where there can be none: such a thread never goes ahead.
    timer: OnceCell<Option<ThreadTimer>>,
    urgency: Cell<Urgency>,
    /// The processor time that it had used at the last look.
    used: Cell<Duration>,
    /// How often it has waited since then.
    waits: AtomicU32,
    is_ahead: AtomicBool,
    is_looking: AtomicBool,
}

impl RequestThread {
    fn before_wait(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
        if self.timer.get_or_init(timer).is_some() && !self.is_ahead.load(Ordering::Relaxed) {
            self.look(true);
        }
    }

    /// Goes ahead if it may, or back if it must.
    fn look(&self, may_go_ahead: bool) {
        if self.is_looking.swap(true, Ordering::Relaxed) {
            // The timer has run out in the midst of a look.
            return;
        }
        compiler_fence(Ordering::SeqCst);
        let used = clock(libc::CLOCK_THREAD_CPUTIME_ID);
        let spent = used.saturating_sub(self.used.replace(used));
        let spent = spent + INTERRUPTION * self.waits.swap(0, Ordering::Relaxed);
        let now = Timestamp::ZERO + clock(libc::CLOCK_MONOTONIC);
        let mut urgency = self.urgency.get();
        let was_ahead = self.is_ahead.load(Ordering::Relaxed);
        let may_stay = urgency.used(spent, now);
        self.urgency.set(urgency);
        if was_ahead && !may_stay {
            PUT_BACK.fetch_add(1, Ordering::Relaxed);
        }
        let ahead = may_stay && (may_go_ahead || was_ahead);
        if ahead != was_ahead && schedule(ahead).is_ok() {
            self.is_ahead.store(ahead, Ordering::Relaxed);
        }
        compiler_fence(Ordering::SeqCst);
        self.is_looking.store(false, Ordering::Relaxed);
    }
}

fn timer() -> Option<ThreadTimer> {
    static SIGNAL: OnceLock<Option<c_int>> = OnceLock::new();
    let signal = (*SIGNAL.get_or_init(|| thread_timer::take_signal(used_more)))?;
    ThreadTimer::every(LOOK, signal)
        .inspect_err(|error| tracing::debug!(%error, "a request thread has the usual priority"))
        .ok()
}

/// The thread that this is called on has used its processor for a while.
#[expect(
    unsafe_code,
    reason = "keeps errno, which is read by whoever was interrupted"
)]
extern "C" fn used_more(_signal: c_int) {
    // SAFETY: errno is this thread's.
    let before = unsafe { *libc::__errno_location() };
    let _ = THREAD.try_with(|thread| thread.look(false));
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = before };
}

/// Whether the system lets a thread of this process go ahead.
fn try_out() -> io::Result<()> {
    // Not on this one: it would be back in line, but marked for its children.
    let trial = std::thread::Builder::new().name("trial".into());
    let trial = trial.spawn(|| {
        if !is_usual() {
            return Err(io::Error::other("the process is scheduled by hand"));
        }
        schedule(true)
    })?;
    trial
        .join()
        .unwrap_or_else(|_| Err(io::Error::other("the trial panicked")))
}

/// Whether the calling thread is scheduled as threads are unless somebody says otherwise.
#[expect(unsafe_code, reason = "asks the kernel about this thread")]
fn is_usual() -> bool {
    // SAFETY: asks only.
    unsafe { libc::sched_getscheduler(0) == libc::SCHED_OTHER }
}

/// Puts the calling thread ahead of all usual ones, or among them. Threads that it starts are usual
/// ones in any case.
#[expect(
    unsafe_code,
    reason = "asks the kernel to schedule this thread differently"
)]
fn schedule(ahead: bool) -> io::Result<()> {
    let (policy, priority) = match ahead {
        true => (libc::SCHED_FIFO, REAL_TIME_PRIORITY),
        false => (libc::SCHED_OTHER, 0),
    };
    // SAFETY: zeroes are a valid parameter; the kernel reads it and nothing else. A system call may
    // be made in a signal handler.
    let changed = unsafe {
        let mut parameter: libc::sched_param = std::mem::zeroed();
        parameter.sched_priority = priority;
        libc::sched_setscheduler(0, policy | libc::SCHED_RESET_ON_FORK, &parameter)
    };
    match changed {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Read by hand: this is also done in a signal handler.
#[expect(unsafe_code, reason = "reads a clock")]
fn clock(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a place for one time.
    unsafe { libc::clock_gettime(clock, &mut time) };
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    fn policy() -> c_int {
        #[expect(unsafe_code, reason = "asks the kernel about this thread")]
        // SAFETY: asks only.
        let policy = unsafe { libc::sched_getscheduler(0) };
        policy & !libc::SCHED_RESET_ON_FORK
    }

    /// Long enough to pay a whole burst back and to earn another one.
    fn be_idle() {
        let (sender, gate) = std::sync::mpsc::channel::<()>();
        let _ = gate.recv_timeout(POLICY.burst * POLICY.share * 2);
        drop(sender);
    }

    /// One test: whether it is allowed is the process's.
    #[test]
    fn a_request_thread_goes_ahead_until_it_uses_too_much() {
        if set_up(RequestPriority::Realtime).is_err() {
            println!("skipped: real-time priorities are not allowed here");
            return;
        }
        let thread = std::thread::spawn(|| {
            assert_eq!(policy(), libc::SCHED_OTHER);
            before_wait();
            assert_eq!(policy(), libc::SCHED_FIFO);
            let child = std::thread::spawn(policy).join().unwrap();
            assert_eq!(child, libc::SCHED_OTHER, "what it starts does not go ahead");

            // A flood: it never waits.
            let (before, started) = (put_back(), Instant::now());
            while policy() == libc::SCHED_FIFO {
                assert!(started.elapsed() < Duration::from_secs(120), "not put back");
            }
            assert!(put_back() > before);
            // Where the machine itself is kept waiting, some of that counts as used.
            while policy() != libc::SCHED_FIFO {
                assert!(started.elapsed() < Duration::from_secs(120), "not ahead");
                be_idle();
                before_wait();
            }
        });
        let ended = thread.join();
        set_up(RequestPriority::Normal).unwrap();
        ended.unwrap();
    }
}

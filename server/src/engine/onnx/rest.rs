//! Lets the threads of ONNX Runtime's pool rest while nobody computes.
//!
//! # Why
//! Between the steps of a run the pool's threads look for work without sleeping, which makes a
//! small transformer's run a fifth shorter. But they go on for a million rounds after the run has
//! ended: some 45 ms, on every core but one, after each call of any model. ONNX Runtime can be told
//! to stop that (`session.force_spinning_stop`) for the pool of one session only, not for the pool
//! that sessions share. Whoever is to send or to read the answer may be waiting for that very core:
//! a virtual machine's kernel takes a core that sleeps for one that others use, and puts a thread
//! that wakes behind one that looks for work, until its next tick.
//!
//! So the end of the last call sets an alarm for one of the pool's threads. When it goes off and still
//! nobody computes, the thread tells the others, and each looks once more some moments later: if it was
//! running all the while, without a call, it looks for work, holds no lock, and waits in its signal
//! handler until somebody computes, or a while. Then each is woken on a core of its own, for the same
//! reason. A thread that is new rests as well, before it has looked for work so long that it sleeps by
//! itself: who wakes it then, for the very first run, mostly has it put on its own core.

use std::cell::Cell;
use std::ffi::c_int;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{CpuSet, futex, sched_getaffinity, sched_getcpu, sched_setaffinity};
use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::thread_timer::{self, ThreadAlarm};

/// How long nobody must have computed before threads rest. A caller that waits for its answer and
/// asks again finds them awake.
const PATIENCE: Duration = Duration::from_micros(400);
/// When it looks once more, and how much processor time it must have used until then. One that used
/// less has slept, or others had its core: it may have been anywhere when it was interrupted.
const SECOND_LOOK: Duration = Duration::from_micros(100);
const AT_WORK: Duration = Duration::from_micros(50);
/// So often before it is left alone.
const MOST_LOOKS: u32 = 8;
/// When a thread that is new looks first: it has begun to look for work by then, and has not given up.
const SETTLED: Duration = Duration::from_millis(10);
/// The longest rest: a call that was forgotten is slow instead of stuck.
const LONGEST_REST: Duration = Duration::from_secs(10);

/// What no core is numbered.
const NO_CORE: usize = usize::MAX;

/// How many calls that may use the pool are under way; threads at rest wait for it to change.
static CALLS: AtomicU32 = AtomicU32::new(0);
/// How many were ever begun.
static BEGUN: AtomicU32 = AtomicU32::new(0);
/// Threads at rest, or about to be.
static RESTING: AtomicU32 = AtomicU32::new(0);
/// A list of all threads that rest at times. None is ever taken out: the pool lives as long as the
/// process.
static SEATS: AtomicPtr<Seat> = AtomicPtr::new(ptr::null_mut());

thread_local! {
    static MINE: Cell<Option<&'static Seat>> = const { Cell::new(None) };
    static LOOKED: Cell<Look> = const { Cell::new(Look { begun: None, used: Duration::ZERO, looks: 0 }) };
}

/// What a thread has found when it looked last.
#[derive(Clone, Copy)]
struct Look {
    /// What [`BEGUN`] was; none before its first look.
    begun: Option<u32>,
    /// Its own processor time.
    used: Duration,
    /// How often since a call began.
    looks: u32,
}

/// What has ended a thread's rest.
#[derive(Clone, Copy, PartialEq)]
enum Rested {
    UntilACall,
    AsLongAsMayBe,
}

/// What there is of one thread of the pool.
struct Seat {
    /// The kernel's number of the thread, zero once it has ended.
    thread: AtomicI32,
    alarm: ThreadAlarm,
    signal: c_int,
    /// It rests, or is about to.
    is_resting: AtomicBool,
    /// The core that somebody has given it to wake on, or [`NO_CORE`].
    core: AtomicUsize,
    /// Where it may run.
    cores: CpuSet,
    next: Option<&'static Seat>,
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
    // Whoever sees that it has begun sees it under way, or ended.
    CALLS.fetch_add(1, Ordering::SeqCst);
    BEGUN.fetch_add(1, Ordering::SeqCst);
    AtWork(())
}

impl Drop for AtWork {
    fn drop(&mut self) {
        if CALLS.fetch_sub(1, Ordering::SeqCst) == 1
            && let Some(seat) = seats_in_use().next()
        {
            seat.alarm.set(PATIENCE);
        }
    }
}

/// The threads of the pool that have not ended.
fn seats() -> impl Iterator<Item = &'static Seat> {
    let first = SEATS.load(Ordering::Acquire);
    #[expect(unsafe_code, reason = "follows a list of what lives for ever")]
    // SAFETY: null or a seat that was leaked.
    let first = unsafe { first.as_ref() };
    std::iter::successors(first, |seat| seat.next)
        .filter(|seat| seat.thread.load(Ordering::Relaxed) != 0)
}

/// Those that do not rest.
fn seats_in_use() -> impl Iterator<Item = &'static Seat> {
    seats().filter(|seat| !seat.is_resting.load(Ordering::SeqCst))
}

/// Has a thread of the pool rest when nobody computes, until it is dropped.
#[must_use]
#[derive(Debug)]
pub(super) struct WhenIdle(());

impl Drop for WhenIdle {
    fn drop(&mut self) {
        if let Some(seat) = MINE.take() {
            seat.thread.store(0, Ordering::Relaxed);
        }
    }
}

/// Has the calling thread rest when nobody computes, until the guard is dropped. Where the system
/// does not allow it the thread looks for work as long as ONNX Runtime has it do so.
pub(super) fn when_idle() -> Option<WhenIdle> {
    static SIGNAL: OnceLock<Option<c_int>> = OnceLock::new();
    let signal = (*SIGNAL.get_or_init(|| thread_timer::take_signal(rest)))?;
    let alarm = ThreadAlarm::new(signal)
        .inspect_err(|error| {
            tracing::debug!(%error, "threads of the pool do not rest between runs");
        })
        .ok()?;
    #[expect(
        unsafe_code,
        reason = "asks for this thread's number and adds to a list"
    )]
    let seat = {
        // SAFETY: asks only.
        let thread = unsafe { libc::gettid() };
        let mut first = SEATS.load(Ordering::Acquire);
        let seat = Box::into_raw(Box::new(Seat {
            thread: AtomicI32::new(thread),
            alarm,
            signal,
            is_resting: AtomicBool::new(false),
            core: AtomicUsize::new(NO_CORE),
            next: None,
            // None known: it is woken wherever the kernel likes.
            cores: sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new()),
        }));
        loop {
            // SAFETY: nobody else knows the seat yet; `first` is null or was leaked.
            unsafe { (*seat).next = first.as_ref() };
            match SEATS.compare_exchange(first, seat, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: leaked, and from here on only read.
                Ok(_) => break unsafe { &*seat },
                Err(other) => first = other,
            }
        }
    };
    MINE.set(Some(seat));
    seat.alarm.set(SETTLED);
    Some(WhenIdle(()))
}

/// Waits until somebody computes, if the thread looks for work. Within a signal handler, so nothing
/// but atomics, what is this thread's own, and system calls.
#[expect(unsafe_code, reason = "keeps errno")]
extern "C" fn rest(_signal: c_int) {
    let Ok(Some(seat)) = MINE.try_with(Cell::get) else {
        return;
    };
    // SAFETY: errno is this thread's.
    let before = unsafe { *libc::__errno_location() };
    let begun = BEGUN.load(Ordering::SeqCst);
    if CALLS.load(Ordering::SeqCst) == 0 {
        seat.look(Some(begun));
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = before };
}

impl Seat {
    /// Nobody computes: rests if this thread, whose seat it is, has done nothing but look for work
    /// since it looked before. So many calls had begun.
    fn look(&self, begun: Option<u32>) {
        let used = own_time();
        let last = LOOKED.get();
        if last.begun != begun {
            LOOKED.set(Look {
                begun,
                used,
                looks: 0,
            });
            // The others do not know yet either; who does is not told twice. One that rests may have been
            // woken for nothing, and rests on.
            let mut in_use = seats_in_use();
            if in_use.next().is_some_and(|first| ptr::eq(first, self)) {
                in_use.for_each(Self::tell);
            }
            self.alarm.set(SECOND_LOOK);
            return;
        }
        let mut looks = last.looks + 1;
        // Who has rested as long as may be looks for work again, and is to rest again.
        if used.saturating_sub(last.used) >= AT_WORK && self.wait() == Rested::AsLongAsMayBe {
            looks = last.looks;
        }
        LOOKED.set(Look {
            begun,
            used: own_time(),
            looks,
        });
        // Its rest was too long, or the call was over already, or it had no processor.
        if CALLS.load(Ordering::SeqCst) == 0 && looks < MOST_LOOKS {
            self.alarm.set(SECOND_LOOK);
        }
    }

    /// Until a call is under way, or a while.
    fn wait(&self) -> Rested {
        let longest = Timespec {
            tv_sec: LONGEST_REST.as_secs() as i64,
            tv_nsec: LONGEST_REST.subsec_nanos().into(),
        };
        self.is_resting.store(true, Ordering::SeqCst);
        RESTING.fetch_add(1, Ordering::SeqCst);
        // One that was over before the thread had a processor does not count.
        let mut rested = Rested::UntilACall;
        while CALLS.load(Ordering::SeqCst) == 0 && rested == Rested::UntilACall {
            self.core.store(NO_CORE, Ordering::SeqCst);
            // The kernel compares the counter itself before it lets the thread sleep.
            let woken = futex::wait(&CALLS, futex::Flags::PRIVATE, 0, Some(&longest));
            match woken {
                Ok(()) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::TIMEDOUT) => rested = Rested::AsLongAsMayBe,
                // It may not wait.
                Err(_) => break,
            }
        }
        RESTING.fetch_sub(1, Ordering::SeqCst);
        self.is_resting.store(false, Ordering::SeqCst);
        // It was woken on one core only; if it cannot leave that, it computes there.
        let _ = sched_setaffinity(None, &self.cores);
        rested
    }

    /// Has another thread look.
    #[expect(unsafe_code, reason = "signals a thread of this process")]
    fn tell(&self) {
        // SAFETY: a signal that has a handler; one for a thread that has ended is not sent.
        unsafe {
            libc::syscall(
                libc::SYS_tgkill,
                libc::getpid(),
                self.thread.load(Ordering::Relaxed),
                self.signal,
            );
        }
    }
}

/// The processor time of the calling thread.
fn own_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// Each on a core of its own and not on the caller's, which is about to compute: the kernel of a virtual
/// machine would mostly put them there, and the whole of a short run would go by before they had a turn.
#[cold]
fn wake_all() {
    let callers = sched_getcpu();
    let mut last = callers;
    for seat in seats().filter(|seat| seat.is_resting.load(Ordering::SeqCst)) {
        let thread = Pid::from_raw(seat.thread.load(Ordering::Relaxed));
        let core = next_core(&seat.cores, last, callers);
        let (Some(core), Some(thread)) = (core, thread) else {
            continue;
        };
        // Another caller woke it: on a core that was not that caller's, but may be this one's.
        let given = seat.core.load(Ordering::SeqCst);
        if given != NO_CORE && given != callers {
            last = given;
            continue;
        }
        seat.core.store(core, Ordering::SeqCst);
        last = core;
        let mut alone = CpuSet::new();
        alone.set(core);
        // One that may not run there any more is left to the kernel.
        let _ = sched_setaffinity(Some(thread), &alone);
        // Somebody else has woken it: it may be past the place where it leaves that core.
        if !seat.is_resting.load(Ordering::SeqCst) {
            let _ = sched_setaffinity(Some(thread), &seat.cores);
        }
    }
    let _ = futex::wake(&CALLS, futex::Flags::PRIVATE, c_int::MAX.cast_unsigned());
}

/// The core after `last`, round and round, leaving one out.
fn next_core(cores: &CpuSet, last: usize, left_out: usize) -> Option<usize> {
    let following = (last + 1..CpuSet::MAX_CPU).chain(0..=last);
    following
        .into_iter()
        .find(|&core| core != left_out && cores.is_set(core))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64};
    use std::sync::{Arc, mpsc};

    use tokio::time::Instant;

    use super::*;

    /// A thread that looks for work and finds none, as those of the pool do.
    struct Seeker {
        id: i32,
        rounds: Arc<AtomicU64>,
        stop: Arc<AtomicBool>,
        thread: Option<std::thread::JoinHandle<()>>,
    }

    impl Seeker {
        fn start() -> Self {
            let (rounds, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
            let (counted, stopped) = (Arc::clone(&rounds), Arc::clone(&stop));
            let (tell, told) = mpsc::channel();
            let thread = std::thread::spawn(move || {
                tell.send(rustix::thread::gettid().as_raw_nonzero().get())
                    .expect("somebody asked");
                let _guard = when_idle().expect("timers that signal a thread are allowed");
                while !stopped.load(Ordering::Relaxed) {
                    counted.fetch_add(1, Ordering::Relaxed);
                    std::hint::spin_loop();
                }
            });
            Self {
                id: told.recv().expect("it begins with this"),
                rounds,
                stop,
                thread: Some(thread),
            }
        }

        fn rounds(&self) -> u64 {
            self.rounds.load(Ordering::Relaxed)
        }

        /// Whether it says so and makes no more rounds.
        fn is_resting(&self) -> bool {
            let before = self.rounds();
            // In slices of the scheduler's choosing: the thread has its turn if it wants one.
            (0..10).all(|_| {
                std::thread::yield_now();
                let mut own = seats().filter(|seat| seat.thread.load(Ordering::Relaxed) == self.id);
                own.any(|seat| seat.is_resting.load(Ordering::SeqCst)) && self.rounds() == before
            })
        }
    }

    impl Drop for Seeker {
        fn drop(&mut self) {
            self.stop.store(true, Ordering::Relaxed);
            // Who rests sees that it is to end when somebody computes.
            let _working = at_work();
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

    /// Waits until all of them rest at once. A thread that others kept from its processor is only looked
    /// at again after the next call.
    fn until_at_rest(seekers: &[Seeker]) {
        until("threads rest", || {
            drop(at_work());
            let called = Instant::now();
            loop {
                let rest = seekers.iter().all(Seeker::is_resting);
                if rest || called.elapsed() > Duration::from_millis(50) {
                    return rest;
                }
            }
        });
    }

    #[test]
    fn threads_are_woken_on_the_cores_that_follow() {
        let mut cores = CpuSet::new();
        [1, 2, 5].into_iter().for_each(|core| cores.set(core));
        let after = |last| next_core(&cores, last, 2);
        assert_eq!([0, 1, 2, 5].map(after), [1, 5, 5, 1].map(Some));
        assert_eq!(next_core(&CpuSet::new(), 3, 3), None);
    }

    /// One test: the counters are the process's, and other tests compute at times.
    #[test]
    fn threads_rest_while_nobody_computes_and_go_on_when_somebody_does() {
        let seekers = [Seeker::start(), Seeker::start()];
        let all_look = || seekers.iter().all(|seeker| seeker.rounds() > 0);
        until("threads look for work", all_look);
        until_at_rest(&seekers);

        let asked = Instant::now();
        let working = at_work();
        for seeker in &seekers {
            let before = seeker.rounds();
            // More than an alarm's time: nobody rests while there may be something to do.
            until("a thread goes on", || seeker.rounds() > before + 10_000_000);
        }
        assert!(asked.elapsed() < LONGEST_REST, "nobody woke them");
        let everywhere = sched_getaffinity(None).unwrap();
        for seat in seats() {
            let thread = Pid::from_raw(seat.thread.load(Ordering::Relaxed));
            until("a thread may run everywhere again", || {
                sched_getaffinity(thread).is_ok_and(|cores| cores == everywhere)
            });
        }
        drop(working);
        until_at_rest(&seekers);
    }
}

//! Signals a thread when it has used so much processor time, or when so much time has passed.

use std::ffi::c_int;
use std::io;
use std::mem;
use std::ptr;
use std::time::Duration;

/// What is called on the thread itself: within a signal handler, so nothing but atomics, what is the
/// thread's own, and system calls.
pub(crate) type Handler = extern "C" fn(c_int);

/// A timer of the calling thread's processor time, deleted on drop.
#[derive(Debug)]
pub(crate) struct ThreadTimer {
    _timer: Timer,
}

impl ThreadTimer {
    /// Sends `signal` to the calling thread each time it has used `interval`. The kernel looks at its
    /// ticks only, which are 1 to 10 ms apart.
    pub(crate) fn every(interval: Duration, signal: c_int) -> io::Result<Self> {
        let timer = Timer::new(libc::CLOCK_THREAD_CPUTIME_ID, signal)?;
        timer.set(interval, interval)?;
        Ok(Self { _timer: timer })
    }
}

/// A timer of the clock's time that signals the thread it was made on; anybody may set it.
#[derive(Debug)]
pub(crate) struct ThreadAlarm(Timer);

impl ThreadAlarm {
    pub(crate) fn new(signal: c_int) -> io::Result<Self> {
        Timer::new(libc::CLOCK_MONOTONIC, signal).map(Self)
    }

    /// Signals once, so long from now; forgets what it was set to before. May be called in a signal
    /// handler.
    pub(crate) fn set(&self, after: Duration) {
        // What can fail is a timer or a time that there is none of.
        let _ = self.0.set(after, Duration::ZERO);
    }
}

#[derive(Debug)]
struct Timer(libc::timer_t);

#[expect(unsafe_code, reason = "a timer is a number in a pointer's clothes")]
// SAFETY: the kernel knows timers by number, from any thread of the process.
unsafe impl Send for Timer {}
#[expect(unsafe_code, reason = "a timer is a number in a pointer's clothes")]
// SAFETY: as for `Send`; setting one is atomic.
unsafe impl Sync for Timer {}

impl Timer {
    /// A timer that signals the calling thread, not set yet.
    #[expect(unsafe_code, reason = "creates a timer that signals this thread")]
    fn new(clock: libc::clockid_t, signal: c_int) -> io::Result<Self> {
        // SAFETY: zeroes are a valid event, the fields that count are set; the timer is ours from
        // its creation on and deleted once. A thread that has ended is not signalled.
        unsafe {
            let mut event: libc::sigevent = mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal;
            event.sigev_notify_thread_id = libc::gettid();
            let mut timer = ptr::null_mut();
            check(libc::timer_create(clock, &mut event, &mut timer))?;
            Ok(Self(timer))
        }
    }

    #[expect(unsafe_code, reason = "sets a timer")]
    fn set(&self, first: Duration, interval: Duration) -> io::Result<()> {
        let [it_value, it_interval] = [first, interval].map(|time| libc::timespec {
            tv_sec: time.as_secs() as libc::time_t,
            tv_nsec: time.subsec_nanos().into(),
        });
        let times = libc::itimerspec {
            it_interval,
            it_value,
        };
        // SAFETY: the timer is alive, and the kernel reads the times and nothing else.
        check(unsafe { libc::timer_settime(self.0, 0, &times, ptr::null_mut()) })
    }
}

impl Drop for Timer {
    #[expect(unsafe_code, reason = "deletes a timer")]
    fn drop(&mut self) {
        // SAFETY: created once, deleted once.
        unsafe { libc::timer_delete(self.0) };
    }
}

fn check(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes a signal that nobody uses for `handler`; none where every real-time signal is somebody's.
#[expect(unsafe_code, reason = "installs a signal handler")]
pub(crate) fn take_signal(handler: Handler) -> Option<c_int> {
    // Two threads that look at the same time must not find the same one.
    static LOOKING: parking_lot::Mutex<()> = parking_lot::Mutex::new(());
    let _looking = LOOKING.lock();
    // From above: who wants one for himself begins below.
    (libc::SIGRTMIN()..=libc::SIGRTMAX()).rev().find(|&signal| {
        // SAFETY: zeroes are a valid action; the old one is a place for one, and the handler does
        // what may be done in one.
        unsafe {
            let mut before: libc::sigaction = mem::zeroed();
            if libc::sigaction(signal, ptr::null(), &mut before) != 0
                || before.sa_sigaction != libc::SIG_DFL
            {
                return false;
            }
            let mut action: libc::sigaction = mem::zeroed();
            action.sa_sigaction = handler as libc::sighandler_t;
            action.sa_flags = libc::SA_RESTART;
            libc::sigaction(signal, &action, ptr::null_mut()) == 0
        }
    })
}

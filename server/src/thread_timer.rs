//! Signals a thread whenever it has used so much processor time.

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
pub(crate) struct ThreadTimer(libc::timer_t);

impl ThreadTimer {
    /// Sends `signal` to the calling thread each time it has used `interval`. The kernel looks at its
    /// ticks only, which are 1 to 10 ms apart.
    #[expect(unsafe_code, reason = "creates a timer that signals this thread")]
    pub(crate) fn every(interval: Duration, signal: c_int) -> io::Result<Self> {
        let interval = libc::timespec {
            tv_sec: 0,
            tv_nsec: interval.subsec_nanos().into(),
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

impl Drop for ThreadTimer {
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

//! Sends at the right moment: ticks to some microseconds, on a thread that others do not hold up.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

/// Moments at a fixed distance. The runtime's own timers know milliseconds only. A tick that was
/// missed is told all the same, as soon as somebody asks.
#[derive(Debug)]
pub(crate) struct Ticks {
    timer: AsyncFd<OwnedFd>,
    next: Instant,
    period: Duration,
}

impl Ticks {
    /// The first tick is a period from now.
    #[expect(unsafe_code, reason = "registers a descriptor with the runtime")]
    pub(crate) fn every(period: Duration) -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        // SAFETY: a descriptor that is owned stays the same and open until it is dropped, which the
        // registration is first.
        let timer = unsafe { AsyncFd::register(timer)? };
        Ok(Self {
            timer,
            next: Instant::now() + period,
            period,
        })
    }

    /// Waits for the next tick and tells when it was due.
    pub(crate) async fn tick(&mut self) -> io::Result<Instant> {
        let due = self.next;
        self.next += self.period;
        loop {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(due);
            }
            let ring = Itimerspec {
                it_interval: Timespec::default(),
                it_value: Timespec::try_from(left).map_err(io::Error::other)?,
            };
            timerfd_settime(self.timer.get_ref(), TimerfdTimerFlags::empty(), &ring)?;
            // Setting it again takes back what it rang, so nothing has to be read.
            self.timer.readable().await?.clear_ready();
        }
    }
}

/// Puts the calling thread ahead of all usual ones; tells whether that was allowed.
#[expect(
    unsafe_code,
    reason = "asks the kernel to schedule this thread differently"
)]
pub(crate) fn in_real_time() -> bool {
    // SAFETY: zeroes are a valid parameter; the kernel reads it and nothing else.
    unsafe {
        let mut parameter: libc::sched_param = std::mem::zeroed();
        parameter.sched_priority = 1;
        libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &parameter) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn ticks_come_when_they_are_due_and_none_is_lost() {
        let period = Duration::from_millis(2);
        let mut ticks = Ticks::every(period).unwrap();
        let first = ticks.tick().await.unwrap();
        tokio::time::sleep(period * 5).await;
        for index in 1..20 {
            let due = ticks.tick().await.unwrap();
            assert_eq!(due, first + period * index);
            assert!(Instant::now() >= due);
        }
    }
}

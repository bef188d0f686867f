//! Threads that compute take long turns, so that others need not wait for the end of one.
//!
//! # Why
//! Linux (from 6.12 on) lets a thread that wakes interrupt one whose turns are longer than its own,
//! at once. Between equals it lets the one that runs finish its turn, and looks whether it has at its
//! ticks only, milliseconds apart. A thread of the engine's pool may do nothing but look for work, and
//! one that brings weights in has time; the client that waits for an answer has not.

use std::cell::Cell;
use std::io;
use std::time::Duration;

/// For threads that compute answers.
pub const LONG_TURN: Duration = Duration::from_millis(50);
/// The longest there are, for work that has time.
pub(super) const LONGEST_TURN: Duration = Duration::from_millis(100);

/// Has the calling thread take turns of this length for the rest of its life. Older kernels have turns
/// of one length only, and nothing changes.
pub fn take_turns_of(turn: Duration) {
    thread_local! {
        static TAKEN: Cell<Option<Duration>> = const { Cell::new(None) };
    }
    // Threads that run batches ask before each of them.
    if TAKEN.replace(Some(turn)) == Some(turn) {
        return;
    }
    if let Err(error) = set_turn(turn) {
        tracing::debug!(%error, "a thread that computes takes turns of the usual length");
    }
}

fn set_turn(turn: Duration) -> io::Result<()> {
    let mut attributes = attributes()?;
    // Other policies have no turns, or mean something else by this field.
    if attributes.sched_policy != libc::SCHED_OTHER.cast_unsigned() {
        return Ok(());
    }
    attributes.size = size_of_val(&attributes) as libc::c_uint;
    attributes.sched_runtime = turn.as_nanos() as u64;
    #[expect(unsafe_code, reason = "a system call that has no binding")]
    // SAFETY: the kernel reads attributes that say how large they are.
    check(unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) })
}

/// How the kernel runs the calling thread.
fn attributes() -> io::Result<libc::sched_attr> {
    #[expect(unsafe_code, reason = "a system call that has no binding")]
    // SAFETY: zeroes are valid attributes, which the kernel fills in as far as it is told.
    unsafe {
        let mut attributes: libc::sched_attr = std::mem::zeroed();
        let size = size_of_val(&attributes) as libc::c_uint;
        let place = &raw mut attributes;
        check(libc::syscall(libc::SYS_sched_getattr, 0, place, size, 0))?;
        Ok(attributes)
    }
}

fn check(result: libc::c_long) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::priority::step_back;

    #[test]
    fn a_thread_takes_long_turns_and_keeps_its_priority() {
        let thread = std::thread::spawn(|| {
            step_back(3);
            let before = rustix::process::getpriority_process(None).unwrap();
            set_turn(LONGEST_TURN).unwrap();
            let after = rustix::process::getpriority_process(None).unwrap();
            assert_eq!(before, after);
            // Kernels that know no such turns say nothing.
            let told = Duration::from_nanos(attributes().unwrap().sched_runtime);
            assert!(told == LONGEST_TURN || told.is_zero(), "{told:?}");
        });
        thread.join().unwrap();
    }
}

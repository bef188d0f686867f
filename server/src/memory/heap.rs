//! The heap that Rust and ONNX Runtime share, and giving back what it keeps.
//!
//! Its settings are left alone. Fewer arenas (`M_ARENA_MAX` of 2 or 4 instead of 8 for each core)
//! did not change what stays after a model went to sleep, 55 MB; of what is there more than
//! before, most is code of the engine's library that was run, which costs nobody anything. A
//! fixed `M_MMAP_THRESHOLD` saved 3 MB and would make every request body past it pay for fresh
//! pages.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// A trim takes tens of milliseconds; one that takes this long is stuck, and nobody waits for it.
const LONGEST_TRIM: Duration = Duration::from_secs(10);

static TRIMS: Trims = Trims::new();

/// Hands freed heap memory back to the operating system. The heap keeps it otherwise, so that an
/// unloaded model would still be paid for.
///
/// Returns when memory that was freed before the call is back. Trimming walks the whole heap and
/// holds its locks, so calls that come together share one: at most one trim runs and one waits.
pub fn release_memory() {
    TRIMS.run(trim);
}

/// Rounds of trimming, of which callers share what they can.
#[derive(Debug)]
pub(super) struct Trims {
    rounds: Mutex<Rounds>,
    ended: Condvar,
}

#[derive(Debug)]
struct Rounds {
    /// The number of the round that runs or ran last.
    started: u64,
    is_running: bool,
}

impl Trims {
    pub(super) const fn new() -> Self {
        Self {
            rounds: Mutex::new(Rounds {
                started: 0,
                is_running: false,
            }),
            ended: Condvar::new(),
        }
    }

    /// Returns after a run of `trim` that began after this was called; by whom does not matter.
    pub(super) fn run(&self, trim: impl FnOnce()) {
        let mut rounds = self.rounds.lock();
        // The round that runs now may have passed by what the caller freed: the next one counts.
        let mine = rounds.started + 1;
        loop {
            if rounds.started >= mine && !(rounds.is_running && rounds.started == mine) {
                return;
            }
            if !rounds.is_running {
                break;
            }
            if self.ended.wait_for(&mut rounds, LONGEST_TRIM).timed_out() {
                return;
            }
        }
        rounds.started += 1;
        rounds.is_running = true;
        drop(rounds);
        let running = Running(self);
        trim();
        drop(running);
    }
}

/// Ends the round even when it panics, so that nobody waits for it.
struct Running<'a>(&'a Trims);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.rounds.lock().is_running = false;
        self.0.ended.notify_all();
    }
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "glibc's trim has no safe binding")]
fn trim() {
    // SAFETY: `malloc_trim` takes no pointer, locks the allocator itself and may be called from
    // any thread at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn trim() {}

#[cfg(test)]
impl Trims {
    pub(super) fn is_running(&self) -> bool {
        self.rounds.lock().is_running
    }
}

//! Who takes a storm of requests in for a model that wakes lets it wake first.
//!
//! # Why
//! Taking a thousand requests in takes two cores as long as waking a small model and running it once,
//! and all but the first of them have to wait for that anyway. The kernel cannot know: it shares the
//! cores evenly, and a thread that offers its turn to others keeps a core that they do not wait for,
//! while the threads of a run share the other one. So such a thread sleeps for a moment with each
//! request it has put into the queue, until there is an answer to be sent.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// How long one request holds its thread up at most. It has others' requests to take in, too.
const MOMENT: Duration = Duration::from_millis(1);

static LOCK: Mutex<()> = Mutex::new(());
static ANSWERS: Condvar = Condvar::new();
/// Threads that sleep. Who is overlooked sleeps a moment.
static ASLEEP: AtomicUsize = AtomicUsize::new(0);

/// Sleeps for a moment, or until somebody has an answer to be sent.
pub fn give_way() {
    ASLEEP.fetch_add(1, Ordering::Relaxed);
    ANSWERS.wait_for(&mut LOCK.lock(), MOMENT);
    ASLEEP.fetch_sub(1, Ordering::Relaxed);
}

/// There are answers to be sent: whoever sleeps goes on.
pub fn end() {
    if ASLEEP.load(Ordering::Relaxed) > 0 {
        ANSWERS.notify_all();
    }
}

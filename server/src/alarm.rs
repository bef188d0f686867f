//! Wakes things at a point in time, to a fraction of a millisecond.
//!
//! Batching delays are often 100 µs, while the async runtime's timers tick in milliseconds. One
//! thread sleeps until the earliest alarm; it holds only weak references, so an alarm never keeps
//! a model alive.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use dormouse_core::time::Timestamp;
use parking_lot::{Condvar, Mutex};

use crate::clock::Clock;
use crate::priority::ahead;

/// Something that wants to be called at a time. The call must be short.
pub trait Ring: Send + Sync {
    fn ring(self: Arc<Self>);
}

/// A handle to the alarm thread, which runs until [`Alarm::stop`].
#[derive(Clone, Debug)]
pub struct Alarm {
    shared: Arc<Shared>,
}

struct Shared {
    clock: Clock,
    queue: Mutex<Queue>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Queue {
    entries: BinaryHeap<Reverse<Entry>>,
    /// Breaks ties so that entries need no order of their own.
    issued: u64,
    closed: bool,
}

struct Entry {
    at: Timestamp,
    sequence: u64,
    target: Weak<dyn Ring>,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.sequence).cmp(&(other.at, other.sequence))
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let queue = self.queue.lock();
        f.debug_struct("Alarm")
            .field("pending", &queue.entries.len())
            .finish()
    }
}

impl Alarm {
    pub fn spawn(clock: Clock) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            clock,
            queue: Mutex::default(),
            changed: Condvar::new(),
            thread: Mutex::default(),
        });
        let thread = std::thread::Builder::new().name("alarm".into()).spawn({
            let shared = Arc::clone(&shared);
            move || run(&shared)
        })?;
        *shared.thread.lock() = Some(thread);
        Ok(Self { shared })
    }

    /// Rings `target` at `at`, if it still exists then.
    pub fn set(&self, at: Timestamp, target: Weak<dyn Ring>) {
        let mut queue = self.shared.queue.lock();
        let sequence = queue.issued;
        queue.issued += 1;
        let is_first = queue
            .entries
            .peek()
            .is_none_or(|Reverse(first)| at < first.at);
        queue.entries.push(Reverse(Entry {
            at,
            sequence,
            target,
        }));
        drop(queue);
        if is_first {
            self.shared.changed.notify_one();
        }
    }

    /// Alarms that are set.
    #[cfg(test)]
    pub(crate) fn pending(&self) -> usize {
        self.shared.queue.lock().entries.len()
    }

    /// Ends the thread; alarms still set never ring.
    pub fn stop(&self) {
        self.shared.queue.lock().closed = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.shared.thread.lock().take() {
            // The thread catches the panics of what it rings; nothing is left to report.
            let _ = thread.join();
        }
    }
}

fn run(shared: &Shared) {
    let mut queue = shared.queue.lock();
    while !queue.closed {
        let now = shared.clock.now();
        if queue
            .entries
            .peek()
            .is_none_or(|Reverse(first)| first.at > now)
        {
            ahead::before_wait();
        }
        match queue.entries.peek() {
            None => shared.changed.wait(&mut queue),
            Some(Reverse(first)) if first.at > now => {
                let until = shared.clock.instant(first.at).into_std();
                shared.changed.wait_until(&mut queue, until);
            }
            Some(_) => {
                let due = queue
                    .entries
                    .pop()
                    .and_then(|Reverse(entry)| entry.target.upgrade());
                parking_lot::MutexGuard::unlocked(&mut queue, || {
                    if let Some(target) = due
                        && std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| target.ring()))
                            .is_err()
                    {
                        tracing::error!("a timer's work panicked");
                    }
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    struct Note(mpsc::Sender<u32>, u32);

    impl Ring for Note {
        fn ring(self: Arc<Self>) {
            self.0.send(self.1).unwrap();
        }
    }

    #[test]
    fn alarms_ring_in_order_of_time_and_dropped_targets_never() {
        let clock = Clock::start();
        let alarm = Alarm::spawn(clock).unwrap();
        let (sender, receiver) = mpsc::channel();
        let notes: Vec<Arc<dyn Ring>> = (0..3)
            .map(|n| Arc::new(Note(sender.clone(), n)) as Arc<dyn Ring>)
            .collect();
        let gone: Arc<dyn Ring> = Arc::new(Note(sender, 99));
        let now = clock.now();
        alarm.set(now + Duration::from_millis(6), Arc::downgrade(&notes[2]));
        alarm.set(now + Duration::from_millis(2), Arc::downgrade(&notes[0]));
        alarm.set(now + Duration::from_millis(3), Arc::downgrade(&gone));
        alarm.set(now + Duration::from_millis(4), Arc::downgrade(&notes[1]));
        drop(gone);
        let heard: Vec<u32> = (0..3).map(|_| receiver.recv().unwrap()).collect();
        assert_eq!(heard, [0, 1, 2]);
        alarm.stop();
    }
}

//! Work that gives way: building sessions, unless that is known to be quick, bringing weights in,
//! packing and preparing run below the threads that answer requests, which go ahead of all that
//! computes where that is allowed.

pub mod ahead;
pub mod courtesy;
#[cfg(test)]
mod tests;
mod turns;

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Once};
use std::task::{Context, Poll};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use self::turns::LONGEST_TURN;
pub use self::turns::{LONG_TURN, take_turns_of};

/// How far background work steps back, in the kernel's units of niceness.
pub const BACKGROUND_NICENESS: i32 = 5;

/// Graphs are walked recursively, so loads get as much stack as a program's first thread.
const STACK_BYTES: usize = 8 << 20;

/// Jobs that may wait for a thread; more means that something asks in a loop.
const MOST_WAITING: usize = 4096;

/// Runs jobs below the priority of everything else, so many at a time and each on a thread that
/// ends when there is no more to do.
///
/// # Why not the runtime's blocking threads
/// A thread that has stepped back cannot come forward again without privilege, and threads it
/// starts begin where it stands. So a job must not start anything that lives on, nor call what
/// may start a thread for a request: it returns its result through its [`Job`], and whoever
/// awaits that goes on at full priority. Jobs that step back by nothing may do what they like.
#[derive(Clone)]
pub struct Background {
    shared: Arc<Shared>,
}

struct Shared {
    name: String,
    most_threads: usize,
    niceness: i32,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Box<dyn FnOnce() + Send>>,
    threads: usize,
}

/// Why a job was not taken.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    #[error("{MOST_WAITING} {name} jobs wait already")]
    TooMany { name: String },
    #[error("cannot start a thread for {name}")]
    Thread {
        name: String,
        source: std::io::Error,
    },
}

/// The job ended without a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the job panicked")]
pub struct JobPanicked;

/// A job under way: a future of its result. Dropping it leaves the job running.
#[derive(Debug)]
pub struct Job<T> {
    result: oneshot::Receiver<T>,
}

impl<T> Job<T> {
    /// Blocks until the job has ended; not for threads of the runtime.
    pub fn wait(self) -> Result<T, JobPanicked> {
        self.result.blocking_recv().map_err(|_| JobPanicked)
    }
}

impl<T> Future for Job<T> {
    type Output = Result<T, JobPanicked>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.result)
            .poll(context)
            .map_err(|_| JobPanicked)
    }
}

impl Background {
    /// Jobs of this `name`, which their threads bear, at most `jobs_at_once` of them running.
    pub fn new(name: impl Into<String>, jobs_at_once: usize) -> Self {
        Self::with_niceness(name, jobs_at_once, BACKGROUND_NICENESS)
    }

    /// As [`Background::new`], stepping back by `niceness`.
    pub fn with_niceness(name: impl Into<String>, jobs_at_once: usize, niceness: i32) -> Self {
        Self {
            shared: Arc::new(Shared {
                name: name.into(),
                most_threads: jobs_at_once.max(1),
                niceness,
                queue: Mutex::default(),
            }),
        }
    }

    /// Whether no job runs or waits.
    pub fn is_idle(&self) -> bool {
        let queue = self.shared.queue.lock();
        queue.threads == 0 && queue.waiting.is_empty()
    }

    /// How many jobs run side by side.
    pub fn jobs_at_once(&self) -> usize {
        self.shared.most_threads
    }

    /// Runs `work` as soon as there is a thread for it, in the order of the calls.
    pub fn spawn<T, F>(&self, work: F) -> Result<Job<T>, SpawnError>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let (sender, result) = oneshot::channel();
        let job = Box::new(move || {
            // Nobody may be waiting any more; the work is done all the same.
            drop(sender.send(work()));
        });
        let mut queue = self.shared.queue.lock();
        if queue.waiting.len() >= MOST_WAITING {
            return Err(SpawnError::TooMany {
                name: self.shared.name.clone(),
            });
        }
        queue.waiting.push_back(job);
        if queue.threads < self.shared.most_threads {
            let shared = Arc::clone(&self.shared);
            let started = std::thread::Builder::new()
                .name(self.shared.name.clone())
                .stack_size(STACK_BYTES)
                .spawn(move || shared.work_off());
            match started {
                Ok(_) => queue.threads += 1,
                // Whoever runs already comes round to it.
                Err(_) if queue.threads > 0 => {}
                Err(source) => {
                    queue.waiting.pop_back();
                    return Err(SpawnError::Thread {
                        name: self.shared.name.clone(),
                        source,
                    });
                }
            }
        }
        Ok(Job { result })
    }
}

impl Shared {
    fn work_off(&self) {
        if self.niceness > 0 {
            step_back(self.niceness);
            take_turns_of(LONGEST_TURN);
        }
        loop {
            let job = {
                let mut queue = self.queue.lock();
                let Some(job) = queue.waiting.pop_front() else {
                    queue.threads -= 1;
                    return;
                };
                job
            };
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                tracing::error!(job = %self.name, "a background job panicked");
            }
        }
    }
}

impl fmt::Debug for Background {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Background")
            .field("name", &self.shared.name)
            .field("most_threads", &self.shared.most_threads)
            .finish_non_exhaustive()
    }
}

/// Lowers the calling thread's priority for the rest of its life; without privilege nothing can
/// raise it again. A refusal is logged once and otherwise harmless.
pub fn step_back(niceness: i32) {
    static REFUSED: Once = Once::new();
    // On Linux both concern the calling thread, not the process. The whole server may have been
    // started at low priority: steps are taken from there.
    let stepped = rustix::process::getpriority_process(None).and_then(|now| {
        rustix::process::setpriority_process(None, now.saturating_add(niceness).min(19))
    });
    if let Err(error) = stepped {
        REFUSED.call_once(|| {
            tracing::warn!(%error, niceness, "background work runs at full priority");
        });
    }
}

//! A worker as the server has it: lanes to talk to it, memory shared with it, and its end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::messages::{Hello, Notice, Reply, Request};
use super::nursery::{Cause, Nursery, OnDeath, Order, Vitals};
use super::segment::Pool;
use super::socket::{Inbox, Socket};
use crate::engine::{EngineError, LostWorker};

/// How long a new worker may take to load the engine.
const STARTING: Duration = Duration::from_secs(60);
/// How long the end of a worker that was killed is waited for.
const ENDING: Duration = Duration::from_secs(2);
/// Calls to one worker at a time; a model has far fewer instances.
const MOST_LANES: usize = 256;

/// A process that sessions live in. Dropping the last reference ends it.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) vitals: Arc<Vitals>,
    pub(super) pool: Arc<Pool>,
    pub(super) notices: Arc<Notices>,
    free_lanes: Mutex<Vec<Lane>>,
    lanes: AtomicUsize,
    calls: AtomicU64,
}

/// The line for what needs no answer.
#[derive(Debug)]
pub(super) struct Notices(Socket);

impl Notices {
    /// Tells the worker something without waiting: one that does not listen is found out by the
    /// calls that it does not answer.
    pub(super) fn tell(&self, notice: &Notice) {
        if let Err(error) = self.0.try_send(notice.encode().bytes()) {
            tracing::debug!(%error, "a worker was not told");
        }
    }
}

/// A connection for one call at a time: whoever asks reads the answer itself, so that no thread
/// stands between the two processes.
#[derive(Debug)]
struct Lane {
    socket: Socket,
    inbox: Inbox,
}

/// A call under way. It must be answered in time, or the worker is killed.
#[derive(Debug)]
pub(super) struct Call<'w> {
    worker: &'w Worker,
    /// None once the lane cannot be used for another call.
    lane: Option<Lane>,
    pub(super) number: u64,
}

impl Worker {
    /// Starts a process and waits until it has loaded the engine.
    pub(super) fn start(
        nursery: &Arc<Nursery>,
        hello: &Hello,
        shared_memory: u64,
        on_death: OnDeath,
    ) -> Result<Self, EngineError> {
        let failed =
            |error: io::Error| EngineError::Failed(format!("no worker can be started: {error}"));
        let (ours, theirs) = Socket::pair().map_err(failed)?;
        let order = Order {
            label: hello.label.clone(),
            theirs: theirs.into_fd(),
            ours: rustix::io::fcntl_dupfd_cloexec(&ours, 3)
                .map_err(io::Error::from)
                .map_err(failed)?,
        };
        let vitals = nursery.start(order, on_death).map_err(failed)?;
        let worker = Self {
            vitals,
            pool: Pool::new(shared_memory),
            notices: Arc::new(Notices(ours)),
            free_lanes: Mutex::default(),
            lanes: AtomicUsize::new(0),
            calls: AtomicU64::new(1),
        };
        let greeting = worker.begin(STARTING);
        let mut inbox = Inbox::default();
        let line = &worker.notices.0;
        let answer = line
            .send(hello.encode().bytes(), &[])
            .and_then(|()| line.receive(&mut inbox));
        worker.vitals.end(greeting);
        match answer {
            Ok(Some(_)) => match Reply::decode(inbox.message()) {
                Ok(Reply::Ready) => Ok(worker),
                Ok(Reply::Failed(why)) => Err(EngineError::Failed(why)),
                Ok(_) | Err(_) => Err(worker.garbled()),
            },
            Ok(None) | Err(_) => Err(worker.lost()),
        }
    }

    pub(super) fn is_dead(&self) -> bool {
        self.vitals.is_dead()
    }

    fn begin(&self, limit: Duration) -> u64 {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        self.vitals.begin(number, limit);
        number
    }

    /// Begins a call that must be answered within `limit`.
    pub(super) fn call(&self, limit: Duration) -> Result<Call<'_>, EngineError> {
        let free = self.free_lanes.lock().pop();
        let lane = match free {
            Some(lane) => lane,
            None => self.new_lane()?,
        };
        Ok(Call {
            worker: self,
            lane: Some(lane),
            number: self.begin(limit),
        })
    }

    fn new_lane(&self) -> Result<Lane, EngineError> {
        if self.lanes.fetch_add(1, Ordering::Relaxed) >= MOST_LANES {
            self.lanes.fetch_sub(1, Ordering::Relaxed);
            return Err(EngineError::Failed(format!(
                "{MOST_LANES} calls to its worker are under way already"
            )));
        }
        let (ours, theirs) = Socket::pair().map_err(|error| {
            EngineError::Failed(format!("no connection to its worker can be made: {error}"))
        })?;
        let message = Notice::Lane.encode();
        match self.notices.0.send(message.bytes(), &[theirs.as_fd()]) {
            Ok(()) => Ok(Lane {
                socket: ours,
                inbox: Inbox::default(),
            }),
            Err(_) => Err(self.lost()),
        }
    }

    /// What became of the worker, which does not answer any more.
    pub(super) fn lost(&self) -> EngineError {
        let lost = self.vitals.wait_for_death(ENDING);
        EngineError::Lost(lost.unwrap_or_else(|| LostWorker {
            worker: self.vitals.id,
            reason: format!("its worker process {} does not answer", self.vitals.pid).into(),
        }))
    }

    /// Ends a worker that says what makes no sense.
    pub(super) fn garbled(&self) -> EngineError {
        self.vitals.kill(Cause::Garbled);
        self.lost()
    }

    /// Memory that is the worker's alone, and what is shared with it for tensors.
    pub(super) fn held_bytes(&self) -> u64 {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.vitals.pid));
        let own = statm.ok().and_then(|statm| {
            let mut fields = statm.split_ascii_whitespace().skip(1);
            let resident: u64 = fields.next()?.parse().ok()?;
            let of_files: u64 = fields.next()?.parse().ok()?;
            resident.checked_sub(of_files)?.checked_mul(PAGE)
        });
        own.unwrap_or(0).saturating_add(self.pool.bytes())
    }
}

/// What the kernel counts in where it tells of a process's memory; larger pages err on the small
/// side, which the estimate beside it makes good.
const PAGE: u64 = 4096;

impl Drop for Worker {
    fn drop(&mut self) {
        self.vitals.dismiss(ENDING);
    }
}

impl Call<'_> {
    /// Says something and waits for the answer.
    pub(super) fn ask(
        &mut self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), EngineError> {
        let worker = self.worker;
        let Some(lane) = &mut self.lane else {
            return Err(worker.lost());
        };
        let answer = lane
            .socket
            .send(request.encode().bytes(), fds)
            .and_then(|()| lane.socket.receive(&mut lane.inbox));
        let read = match answer {
            Ok(Some(fds)) => Reply::decode(lane.inbox.message()).map(|reply| (reply, fds)),
            // What could not be sent for want of memory or files was not said either.
            Err(error) if is_ours(&error) => {
                return Err(EngineError::Failed(format!(
                    "its worker cannot be asked: {error}"
                )));
            }
            Ok(None) | Err(_) => {
                self.abandon();
                return Err(worker.lost());
            }
        };
        read.map_err(|_| {
            self.abandon();
            worker.garbled()
        })
    }
}

impl Call<'_> {
    /// Gives the lane up: what is said on it from here on would be misunderstood.
    pub(super) fn abandon(&mut self) {
        self.lane = None;
        self.worker.lanes.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether an error is for lack of something here, not for lack of a worker.
fn is_ours(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS | libc::ETOOMANYREFS)
    ) || error.kind() == io::ErrorKind::InvalidInput
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.worker.vitals.end(self.number);
        if let Some(lane) = self.lane.take() {
            self.worker.free_lanes.lock().push(lane);
        }
    }
}

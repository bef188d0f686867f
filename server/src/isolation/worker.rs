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
    lanes: Arc<AtomicUsize>,
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
    _place: LanePlace,
}

/// One of the lanes that a worker may have; given back with the lane, whatever becomes of it.
#[derive(Debug)]
struct LanePlace(Arc<AtomicUsize>);

impl LanePlace {
    fn take(lanes: &Arc<AtomicUsize>) -> Option<Self> {
        let before = lanes.fetch_add(1, Ordering::Relaxed);
        let place = Self(Arc::clone(lanes));
        (before < MOST_LANES).then_some(place)
    }
}

impl Drop for LanePlace {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
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
            lanes: Arc::default(),
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
                Ok(Reply::Failed(why)) => {
                    // It names the library's file, which is nobody's business elsewhere.
                    tracing::error!(model = hello.label, error = why, "a worker has no engine");
                    Err(EngineError::Failed(
                        "its worker cannot load the engine; the server's log says why".to_owned(),
                    ))
                }
                Ok(_) | Err(_) => Err(worker.garbled()),
            },
            Ok(None) | Err(_) => Err(worker.lost()),
        }
    }

    fn begin(&self, limit: Duration) -> u64 {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        self.vitals.begin(number, limit);
        number
    }

    /// Begins a call that must be answered within `limit`.
    pub(super) fn call(&self, limit: Duration) -> Result<Call<'_>, EngineError> {
        // First: making a lane waits for the worker, too.
        let mut call = Call {
            worker: self,
            lane: None,
            number: self.begin(limit),
        };
        let free = self.free_lanes.lock().pop();
        call.lane = Some(match free {
            Some(lane) => lane,
            None => self.new_lane()?,
        });
        Ok(call)
    }

    fn new_lane(&self) -> Result<Lane, EngineError> {
        let place = LanePlace::take(&self.lanes).ok_or_else(|| {
            EngineError::Failed(format!(
                "{MOST_LANES} calls to its worker are under way already"
            ))
        })?;
        let failed = |error: io::Error| {
            EngineError::Failed(format!("no connection to its worker can be made: {error}"))
        };
        let (ours, theirs) = Socket::pair().map_err(failed)?;
        let message = Notice::Lane.encode();
        match self.notices.0.send(message.bytes(), &[theirs.as_fd()]) {
            Ok(()) => Ok(Lane {
                socket: ours,
                inbox: Inbox::default(),
                _place: place,
            }),
            Err(error) if is_ours(&error) => Err(failed(error)),
            Err(_) => Err(self.lost()),
        }
    }

    /// What became of the worker, which does not answer any more.
    pub(super) fn lost(&self) -> EngineError {
        let lost = self.vitals.wait_for_death(ENDING).or_else(|| {
            // It has hung up and lives on: nobody could tell what it still does.
            self.vitals.kill(Cause::Garbled);
            self.vitals.wait_for_death(ENDING)
        });
        EngineError::Lost(lost.unwrap_or_else(|| LostWorker {
            worker: self.vitals.id,
            reason: format!("its worker process {} does not answer", self.vitals.pid).into(),
            by_itself: true,
        }))
    }

    /// Ends a worker that says what makes no sense.
    pub(super) fn garbled(&self) -> EngineError {
        self.vitals.kill(Cause::Garbled);
        self.lost()
    }
}

/// Memory that is a process's alone; zero when it is gone.
pub(super) fn own_bytes(pid: u32) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm"));
    let own = statm.ok().and_then(|statm| {
        let mut fields = statm.split_ascii_whitespace().skip(1);
        let resident: u64 = fields.next()?.parse().ok()?;
        let of_files: u64 = fields.next()?.parse().ok()?;
        resident.checked_sub(of_files)?.checked_mul(PAGE)
    });
    own.unwrap_or(0)
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
        let failed =
            |error: io::Error| EngineError::Failed(format!("its worker cannot be asked: {error}"));
        match lane.socket.send(request.encode().bytes(), fds) {
            Ok(()) => {}
            // What could not be sent for want of memory or files was not said either.
            Err(error) if is_ours(&error) => return Err(failed(error)),
            Err(_) => {
                self.abandon();
                return Err(worker.lost());
            }
        }
        let answer = match lane.socket.receive(&mut lane.inbox) {
            Ok(Some(fds)) => match Reply::decode(lane.inbox.message()) {
                Ok(reply) => return Ok((reply, fds)),
                Err(_) => worker.garbled(),
            },
            Ok(None) => worker.lost(),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => worker.garbled(),
            Err(error) if is_ours(&error) => failed(error),
            Err(_) => worker.lost(),
        };
        // Whatever comes on it from here on is an answer to this, and nobody else's.
        self.abandon();
        Err(answer)
    }

    /// Gives the lane up: what is said on it from here on would be misunderstood.
    pub(super) fn abandon(&mut self) {
        self.lane = None;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker that is no process; the test has the other end of its first socket.
    fn worker() -> (Worker, Socket) {
        let (ours, theirs) = Socket::pair().unwrap();
        let worker = Worker {
            vitals: Vitals::of_the_dead(1),
            pool: Pool::new(1 << 20),
            notices: Arc::new(Notices(ours)),
            free_lanes: Mutex::default(),
            lanes: Arc::default(),
            calls: AtomicU64::new(1),
        };
        (worker, theirs)
    }

    /// The other end of the lane that was made last.
    fn lane_of(line: &Socket) -> Socket {
        let fds = line.receive(&mut Inbox::default()).unwrap().unwrap();
        Socket::from(fds.into_iter().next().unwrap())
    }

    #[test]
    fn lanes_that_could_not_be_made_do_not_count() {
        let (worker, theirs) = worker();
        drop(theirs);
        for _ in 0..MOST_LANES + 1 {
            let error = worker.call(ENDING).unwrap_err();
            assert!(matches!(error, EngineError::Lost(_)), "{error}");
        }
        assert_eq!(worker.lanes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_lane_is_used_again_unless_what_came_on_it_makes_no_sense() {
        let (worker, line) = worker();
        let request = Request::Release { session: 1 };
        let mut call = worker.call(ENDING).unwrap();
        let lane = lane_of(&line);
        lane.send(Reply::Done.encode().bytes(), &[]).unwrap();
        assert_eq!(call.ask(&request, &[]).unwrap().0, Reply::Done);
        drop(call);
        let mut call = worker.call(ENDING).unwrap();
        // An answer, then another one that nobody asked for: of a form that there is not.
        lane.send(&[u8::MAX], &[]).unwrap();
        lane.send(Reply::Done.encode().bytes(), &[]).unwrap();
        let error = call.ask(&request, &[]).unwrap_err();
        assert!(matches!(error, EngineError::Lost(_)), "{error}");
        drop(call);
        assert_eq!(worker.lanes.load(Ordering::Relaxed), 0);
        assert!(worker.free_lanes.lock().is_empty());
        assert!(worker.vitals.is_sentenced());
    }
}

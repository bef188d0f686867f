//! A session in a worker, as the server has it.

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use dormouse_model_store::store::Pack;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::messages::{Notice, Placed, Reply, Request, RunRequest};
use super::segment::{ALIGNMENT, Filling, Lease, Segment, slice};
use super::worker::{Call, Notices, Worker};
use crate::engine::{EngineError, Session, SessionTensor, Stop, StopHandle, TensorRoom};
use crate::request::Tensor;

/// How long giving memory back may take.
const RELEASING: Duration = Duration::from_secs(60);

/// A session in a worker.
#[derive(Debug)]
pub(super) struct RemoteSession {
    pub(super) worker: Arc<Worker>,
    pub(super) id: u32,
    pub(super) inputs: Vec<SessionTensor>,
    pub(super) optional_inputs: Vec<SessionTensor>,
    pub(super) outputs: Vec<SessionTensor>,
    /// The packs that the worker has mapped for it: nobody clears them out of the store.
    pub(super) _packs: Vec<Arc<Pack>>,
    /// The longest that a run may take.
    pub(super) watchdog: Duration,
    /// What the outputs of the last run took: the next ones probably fit.
    pub(super) output_bytes: AtomicUsize,
}

impl Session for RemoteSession {
    fn inputs(&self) -> &[SessionTensor] {
        &self.inputs
    }

    fn optional_inputs(&self) -> &[SessionTensor] {
        &self.optional_inputs
    }

    fn outputs(&self) -> &[SessionTensor] {
        &self.outputs
    }

    fn run(
        &self,
        inputs: &[(usize, Tensor)],
        outputs: &[usize],
        stop: &StopHandle,
    ) -> Result<Vec<Tensor>, EngineError> {
        let stop = stop.as_any().downcast_ref::<RemoteStop>();
        let mut call = self.worker.call(self.watchdog)?;
        if stop.is_some_and(|stop| !stop.enter(call.number)) {
            return Err(EngineError::Terminated);
        }
        let ran = self.run_on(&mut call, inputs, outputs);
        if let Some(stop) = stop {
            stop.leave();
        }
        ran
    }

    fn room(&self, bytes: usize) -> Option<Box<dyn TensorRoom>> {
        let lease = self.worker.pool.lease(bytes).ok()?;
        Some(Box::new(Filling::new(lease)))
    }

    fn is_lost(&self) -> bool {
        self.worker.is_dead()
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn release_memory(&self) {
        self.worker.pool.release();
        let released = self.worker.call(RELEASING).and_then(|mut call| {
            let request = Request::Release { session: self.id };
            call.ask(&request, &[])
        });
        if let Err(error) = released {
            tracing::debug!(pid = self.worker.vitals.pid, %error, "a worker kept its memory");
        }
    }

    fn stop_handle(&self) -> Result<StopHandle, EngineError> {
        Ok(Arc::new(RemoteStop {
            notices: Arc::downgrade(&self.worker.notices),
            call: Mutex::new(None),
            stopped: AtomicBool::new(false),
        }))
    }
}

impl Drop for RemoteSession {
    fn drop(&mut self) {
        self.worker
            .notices
            .tell(&Notice::Close { session: self.id });
    }
}

impl RemoteSession {
    fn run_on(
        &self,
        call: &mut Call<'_>,
        inputs: &[(usize, Tensor)],
        outputs: &[usize],
    ) -> Result<Vec<Tensor>, EngineError> {
        let no_room = |error: super::segment::NoRoom| EngineError::Failed(error.to_string());
        let pool = &self.worker.pool;
        // Held until the worker has read what is in them.
        let mut used: SmallVec<[Arc<Segment>; 4]> = SmallVec::new();
        let (placed, _inputs) = self.place(inputs, &mut used)?;
        let room = pool
            .lease(self.output_bytes.load(Ordering::Relaxed))
            .map_err(no_room)?;
        used.push(Arc::clone(&room.segment));
        let mut new: SmallVec<[&Arc<Segment>; 4]> = SmallVec::new();
        for segment in &used {
            let told = new.iter().any(|new| new.id == segment.id);
            if !told && !segment.is_introduced() {
                new.push(segment);
            }
        }
        let fds: SmallVec<[BorrowedFd<'_>; 4]> =
            new.iter().map(|segment| segment.as_fd()).collect();
        let request = Request::Run(RunRequest {
            call: call.number,
            session: self.id,
            new: new.iter().map(|segment| segment.id).collect(),
            forgotten: pool.take_forgotten(),
            inputs: placed,
            outputs: outputs.to_vec(),
            room: room.segment.id,
        });
        let (mut reply, _) = call.ask(&request, &fds)?;
        for segment in &new {
            segment.set_introduced();
        }
        let mut room = room;
        if let Reply::NeedsRoom(bytes) = reply {
            let bytes = usize::try_from(bytes).map_err(|_| self.worker.garbled())?;
            room = match pool.lease(bytes) {
                Ok(larger) => larger,
                Err(error) => {
                    // The worker waits for room: this lane is of no use any more.
                    call.abandon();
                    return Err(no_room(error));
                }
            };
            let is_new = !room.segment.is_introduced();
            let request = Request::Room {
                segment: room.segment.id,
                is_new,
            };
            let fds: SmallVec<[BorrowedFd<'_>; 1]> =
                is_new.then(|| room.segment.as_fd()).into_iter().collect();
            (reply, _) = call.ask(&request, &fds)?;
            room.segment.set_introduced();
        }
        match reply {
            Reply::Ran(placed) => self.take_up(placed, outputs.len(), room),
            Reply::Failed(why) => Err(EngineError::Failed(why)),
            Reply::Terminated => Err(EngineError::Terminated),
            _ => Err(self.worker.garbled()),
        }
    }

    /// Says where each input lies, and puts those that lie nowhere in shared memory there.
    fn place(
        &self,
        inputs: &[(usize, Tensor)],
        used: &mut SmallVec<[Arc<Segment>; 4]>,
    ) -> Result<(Inputs, Option<Lease>), EngineError> {
        let pool = &self.worker.pool;
        let located: SmallVec<[Option<Place>; 4]> = inputs
            .iter()
            .map(|(_, tensor)| {
                pool.locate(&tensor.data)
                    .filter(|(_, offset)| offset % ALIGNMENT == 0)
            })
            .collect();
        let mut needed = 0usize;
        for ((_, tensor), place) in inputs.iter().zip(&located) {
            if place.is_none() {
                needed = needed.saturating_add(aligned(tensor.data.len()));
            }
        }
        let copies = located.iter().any(Option::is_none);
        let lease = match copies {
            true => Some(
                pool.lease(needed)
                    .map_err(|error| EngineError::Failed(error.to_string()))?,
            ),
            false => None,
        };
        let mut next = 0;
        let mut placed = Vec::with_capacity(inputs.len());
        for ((index, tensor), place) in inputs.iter().zip(located) {
            let (segment, offset) = match (place, &lease) {
                (Some(place), _) => place,
                (None, Some(lease)) => {
                    let offset = next;
                    next += aligned(tensor.data.len());
                    if !lease.segment.write(offset, &tensor.data) {
                        return Err(EngineError::Failed("an input does not fit".to_owned()));
                    }
                    (Arc::clone(&lease.segment), offset)
                }
                (None, None) => unreachable!("a lease was taken for what lies nowhere"),
            };
            placed.push((
                *index,
                Placed {
                    datatype: tensor.datatype,
                    shape: tensor.shape.clone(),
                    segment: segment.id,
                    offset,
                    len: tensor.data.len(),
                },
            ));
            used.push(segment);
        }
        Ok((placed, lease))
    }

    /// The outputs as parts of the segment they are in, which is free again when the last of them
    /// is dropped.
    fn take_up(
        &self,
        placed: Vec<Placed>,
        wanted: usize,
        room: Lease,
    ) -> Result<Vec<Tensor>, EngineError> {
        let room = Arc::new(room);
        let mut total = 0usize;
        let mut tensors = Vec::with_capacity(placed.len());
        for output in placed {
            let range = output.offset..output.offset.saturating_add(output.len);
            total = total.saturating_add(aligned(output.len));
            let fits = dormouse_core::shape::byte_count(output.datatype, &output.shape)
                .is_none_or(|bytes| bytes == output.len as u64);
            let data = slice(&room.segment, range, Arc::clone(&room))
                .filter(|_| fits && output.segment == room.segment.id);
            let Some(data) = data else {
                return Err(self.worker.garbled());
            };
            tensors.push(Tensor {
                datatype: output.datatype,
                shape: output.shape,
                data,
            });
        }
        if tensors.len() != wanted {
            return Err(self.worker.garbled());
        }
        self.output_bytes.store(total, Ordering::Relaxed);
        Ok(tensors)
    }
}

/// Inputs by the session's index.
type Inputs = Vec<(usize, Placed)>;

/// A segment, and where in it.
type Place = (Arc<Segment>, usize);

/// The bytes that a tensor takes up in a segment.
pub(super) fn aligned(len: usize) -> usize {
    len.checked_next_multiple_of(ALIGNMENT)
        .unwrap_or(usize::MAX)
}

/// Stops a run in a worker.
#[derive(Debug)]
struct RemoteStop {
    notices: Weak<Notices>,
    /// The call that a run is under way as.
    call: Mutex<Option<u64>>,
    stopped: AtomicBool,
}

impl RemoteStop {
    /// Names the call that is to be stopped from now on; false when it was stopped already.
    fn enter(&self, call: u64) -> bool {
        *self.call.lock() = Some(call);
        !self.stopped.load(Ordering::SeqCst)
    }

    fn leave(&self) {
        *self.call.lock() = None;
    }
}

impl Stop for RemoteStop {
    fn stop(&self) {
        if self.stopped.swap(true, Ordering::SeqCst) {
            return;
        }
        let call = *self.call.lock();
        if let (Some(call), Some(notices)) = (call, self.notices.upgrade()) {
            notices.tell(&Notice::Stop { call });
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

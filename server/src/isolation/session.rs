//! A session in a worker, as the server has it.

use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use dormouse_model_store::store::Pack;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::messages::{Notice, Placed, Reply, Request, RunRequest};
use super::segment::{ALIGNMENT, Filling, Lease, Segment, slice};
use super::worker::{Call, Notices, Worker};
use crate::engine::{
    EngineError, LostWorker, Session, SessionTensor, Stop, StopHandle, TensorRoom,
};
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

    fn lost(&self) -> Option<LostWorker> {
        self.worker.vitals.death()
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
        let mut new: SmallVec<[(&Arc<Segment>, Arc<OwnedFd>); 4]> = SmallVec::new();
        for segment in &used {
            let told = new.iter().any(|(new, _)| new.id == segment.id);
            if !told && let Some(file) = segment.to_introduce() {
                new.push((segment, file));
            }
        }
        let fds: SmallVec<[BorrowedFd<'_>; 4]> = new.iter().map(|(_, file)| file.as_fd()).collect();
        let request = Request::Run(RunRequest {
            call: call.number,
            session: self.id,
            new: new.iter().map(|(segment, _)| segment.id).collect(),
            forgotten: pool.take_forgotten(),
            inputs: placed,
            outputs: outputs.to_vec(),
            room: room.segment.id,
        });
        let asked = call.ask(&request, &fds);
        if let (Err(_), Request::Run(run)) = (&asked, request) {
            // It may not have heard of it; hearing of it twice does no harm.
            pool.put_back_forgotten(run.forgotten);
        }
        let (mut reply, _) = asked?;
        // A run that failed may have failed for want of them.
        if !matches!(reply, Reply::Failed(_)) {
            for (segment, _) in &new {
                segment.set_introduced();
            }
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
            let file = room.segment.to_introduce();
            let request = Request::Room {
                segment: room.segment.id,
                is_new: file.is_some(),
            };
            let fds: SmallVec<[BorrowedFd<'_>; 1]> = file.iter().map(|file| file.as_fd()).collect();
            (reply, _) = match call.ask(&request, &fds) {
                Ok(answer) => answer,
                Err(error) => {
                    // It waits for room still, if that could not be sent.
                    call.abandon();
                    return Err(error);
                }
            };
            if !matches!(reply, Reply::Failed(_)) {
                room.segment.set_introduced();
            }
        }
        match reply {
            Reply::Ran(placed) => {
                let taken = take_up(placed, outputs.len(), room);
                let (mut tensors, bytes) = taken.ok_or_else(|| self.worker.garbled())?;
                self.output_bytes.store(bytes, Ordering::Relaxed);
                // An answer lies there until its client has taken it. Clients that take their
                // time must not keep others from being served.
                if self.worker.pool.is_tight() {
                    for tensor in &mut tensors {
                        tensor.data = Bytes::copy_from_slice(&tensor.data);
                    }
                }
                Ok(tensors)
            }
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
}

/// The outputs as parts of the segment they are in, which is free again when the last of them is
/// dropped, and the bytes that they take up there. None when they are not what was wanted or not
/// where they may be: nothing that a worker says is believed.
pub(super) fn take_up(
    placed: Vec<Placed>,
    wanted: usize,
    room: Lease,
) -> Option<(Vec<Tensor>, usize)> {
    if placed.len() != wanted {
        return None;
    }
    let room = Arc::new(room);
    let mut total = 0usize;
    let mut tensors = Vec::with_capacity(placed.len());
    for output in placed {
        let range = output.offset..output.offset.checked_add(output.len)?;
        total = total.saturating_add(aligned(output.len));
        if !output.makes_sense() || output.segment != room.segment.id {
            return None;
        }
        tensors.push(Tensor {
            datatype: output.datatype,
            shape: output.shape,
            data: slice(&room.segment, range, Arc::clone(&room))?,
        });
    }
    Some((tensors, total))
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

#[cfg(test)]
mod tests {
    use dormouse_core::datatype::DataType;
    use dormouse_core::shape::Shape;

    use super::super::segment::Pool;
    use super::*;

    fn taken(datatype: DataType, shape: &[i64], range: (usize, usize)) -> bool {
        let room = Pool::new(u64::MAX).lease(4096).unwrap();
        let placed = Placed {
            datatype,
            shape: Shape::from_slice(shape),
            segment: room.segment.id,
            offset: range.0,
            len: range.1,
        };
        take_up(vec![placed], 1, room).is_some()
    }

    #[test]
    fn a_worker_is_believed_only_what_can_be() {
        assert!(taken(DataType::Fp32, &[2, 3], (64, 24)));
        assert!(taken(DataType::Bytes, &[2], (0, 100)));
        assert!(taken(DataType::Fp32, &[0], (0, 0)));
        assert!(!taken(DataType::Fp32, &[2, 3], (64, 20)));
        assert!(!taken(DataType::Fp32, &[2, 3], (usize::MAX - 8, 24)));
        assert!(!taken(DataType::Uint8, &[1 << 30], (0, 1 << 30)));
        // Shapes that no tensor has.
        assert!(!taken(DataType::Fp32, &[-2, -3], (64, 24)));
        assert!(!taken(DataType::Fp32, &[1 << 62, 4], (0, 24)));
        assert!(!taken(DataType::Bytes, &[1 << 62, 4], (0, 24)));
        assert!(!taken(DataType::Bytes, &[7], (0, 24)));
    }
}

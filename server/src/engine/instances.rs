//! Sessions that share nothing, one per instance: what a server without sharing does. Kept so
//! that the worth of sharing can be measured.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::{EngineError, LostWorker, Session, SessionTensor, StopHandle, TensorRoom};
use crate::request::Tensor;

/// Equal sessions, each with its own copy of the weights; a run takes one that is free.
#[derive(Debug)]
pub struct Instances {
    sessions: Vec<Arc<dyn Session>>,
    free: Mutex<Vec<usize>>,
    freed: Condvar,
}

impl Instances {
    /// Takes at least one session.
    pub fn new(first: Arc<dyn Session>, others: Vec<Arc<dyn Session>>) -> Self {
        let mut sessions = vec![first];
        sessions.extend(others);
        Self {
            free: Mutex::new((0..sessions.len()).collect()),
            freed: Condvar::new(),
            sessions,
        }
    }

    fn take(&self) -> Taken<'_> {
        let mut free = self.free.lock();
        loop {
            // A unit starts no more runs than it has instances: whoever waits here waits for the
            // end of a run that is bounded itself.
            if let Some(index) = free.pop() {
                return Taken {
                    instances: self,
                    index,
                };
            }
            self.freed.wait(&mut free);
        }
    }
}

/// An instance in use, given back even if its run panics.
struct Taken<'a> {
    instances: &'a Instances,
    index: usize,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.instances.free.lock().push(self.index);
        self.instances.freed.notify_one();
    }
}

impl Session for Instances {
    fn inputs(&self) -> &[SessionTensor] {
        self.sessions[0].inputs()
    }

    fn optional_inputs(&self) -> &[SessionTensor] {
        self.sessions[0].optional_inputs()
    }

    fn outputs(&self) -> &[SessionTensor] {
        self.sessions[0].outputs()
    }

    fn run(
        &self,
        inputs: &[(usize, Tensor)],
        outputs: &[usize],
        stop: &StopHandle,
    ) -> Result<Vec<Tensor>, EngineError> {
        let taken = self.take();
        self.sessions[taken.index].run(inputs, outputs, stop)
    }

    fn room(&self, bytes: usize) -> Option<Box<dyn TensorRoom>> {
        // Those of one model live in one place.
        self.sessions[0].room(bytes)
    }

    fn lost(&self) -> Option<LostWorker> {
        self.sessions.iter().find_map(|session| session.lost())
    }

    fn is_remote(&self) -> bool {
        self.sessions[0].is_remote()
    }

    fn release_memory(&self) {
        for session in &self.sessions {
            session.release_memory();
        }
    }

    fn stop_handle(&self) -> Result<StopHandle, EngineError> {
        self.sessions[0].stop_handle()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A session in a process that is gone.
    #[derive(Debug)]
    struct Gone;

    fn lost() -> LostWorker {
        LostWorker {
            worker: 1,
            reason: "told to".into(),
            by_itself: true,
        }
    }

    impl Session for Gone {
        fn inputs(&self) -> &[SessionTensor] {
            &[]
        }

        fn outputs(&self) -> &[SessionTensor] {
            &[]
        }

        fn run(
            &self,
            _: &[(usize, Tensor)],
            _: &[usize],
            _: &StopHandle,
        ) -> Result<Vec<Tensor>, EngineError> {
            Err(EngineError::Lost(lost()))
        }

        fn lost(&self) -> Option<LostWorker> {
            Some(lost())
        }

        fn is_remote(&self) -> bool {
            true
        }

        fn stop_handle(&self) -> Result<StopHandle, EngineError> {
            Err(EngineError::Lost(lost()))
        }
    }

    #[test]
    fn instances_are_where_their_sessions_are_and_lost_with_them() {
        let instances = Instances::new(Arc::new(Gone), vec![Arc::new(Gone)]);
        assert!(instances.is_remote());
        assert_eq!(instances.lost(), Some(lost()));
    }
}

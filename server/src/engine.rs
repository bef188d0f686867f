//! What runs a graph. `onnx` is the only module that names ONNX Runtime's bindings.

pub mod instances;
pub mod onnx;
mod prepared;

use std::fmt;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dormouse_core::datatype::DataType;
use dormouse_core::shape::Shape;
use dormouse_model_store::spec::SessionSpec;
use dormouse_model_store::store::PreparedModel;

pub use self::prepared::{
    EngineIdentity, OptimizeError, Optimized, OptimizedTensor, Packing, PreparedBytes, SharedWeight,
};
use crate::request::Tensor;

/// A graph and its weights as they were read from the repository: the engine never opens a file
/// of the user's.
#[derive(Debug)]
pub struct ModelBytes {
    /// The serialized ONNX model.
    pub graph: GraphBytes,
    /// External data by the location the graph names.
    pub external: Vec<(String, Bytes)>,
}

/// Where a serialized model is.
#[derive(Debug)]
pub enum GraphBytes {
    Memory(Vec<u8>),
    /// An open file that holds the whole model, without external data.
    File(File),
}

impl ModelBytes {
    /// A model that is all in memory.
    pub fn in_memory(graph: Vec<u8>, external: Vec<(String, Vec<u8>)>) -> Self {
        let external = external.into_iter();
        let external = external.map(|(location, data)| (location, data.into()));
        Self {
            graph: GraphBytes::Memory(graph),
            external: external.collect(),
        }
    }
}

/// A failure of the engine, in its own words.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EngineError {
    #[error("{0}")]
    Failed(String),
    /// The run was stopped because nobody waits for it any more.
    #[error("the run was stopped")]
    Terminated,
    /// The process that had the session is gone, and the session with it.
    #[error("{}", .0.reason)]
    Lost(LostWorker),
}

/// A process that ended though nobody closed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostWorker {
    /// Tells one worker from every other.
    pub worker: u64,
    /// What became of it.
    pub reason: Arc<str>,
    /// Whether that was its own doing, and so may be its model's; not when somebody killed it, or
    /// the system for want of memory.
    pub by_itself: bool,
}

/// One input or output of a session, in the graph's order.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionTensor {
    pub name: String,
    /// None for a type that v2 cannot express.
    pub datatype: Option<DataType>,
    /// `-1` where the graph leaves a dimension open; none when the graph does not tell the rank.
    pub dims: Option<Shape>,
}

/// How much is done to a graph and its weights before a session answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// All that makes runs short.
    Full,
    /// As little as brings the first answer soonest, for a session that is replaced by a better one.
    Least,
}

/// Opens sessions.
pub trait Engine: Send + Sync + fmt::Debug {
    /// Creates what every session shares (library, environment, thread pool), once. Returns how
    /// long it took, zero when it was there.
    fn prepare(&self) -> Result<Duration, EngineError>;

    /// Builds a session. Blocks; called on a thread where that is allowed.
    fn open(
        &self,
        model: ModelBytes,
        options: &SessionSpec,
        effort: Effort,
    ) -> Result<Arc<dyn Session>, EngineError>;

    /// Optimises a model once, so that [`Engine::open_prepared`] need not. Writes into `scratch`,
    /// an empty folder of the caller's. Blocks.
    fn optimize(
        &self,
        _model: ModelBytes,
        _options: &SessionSpec,
        _scratch: &Path,
    ) -> Result<Optimized, OptimizeError> {
        Err(OptimizeError::NotPreparable(format!(
            "{} prepares no models",
            self.describe()
        )))
    }

    /// Builds a session from what [`Engine::optimize`] made, with the same options. Blocks.
    fn open_prepared(
        &self,
        _model: PreparedBytes,
        _options: &SessionSpec,
        _packing: Packing,
    ) -> Result<Arc<dyn Session>, EngineError> {
        Err(EngineError::Failed(format!(
            "{} opens no prepared models",
            self.describe()
        )))
    }

    /// As [`Engine::open_prepared`], of a model in the prepared store.
    fn open_stored(
        &self,
        prepared: &Arc<PreparedModel>,
        options: &SessionSpec,
        packing: Packing,
    ) -> Result<Arc<dyn Session>, EngineError> {
        self.open_prepared(PreparedBytes::of(prepared), options, packing)
    }

    /// What prepared models depend on beside the model; loads the engine if it is not loaded.
    fn identity(&self) -> Result<EngineIdentity, EngineError> {
        Ok(EngineIdentity {
            engine: self.describe(),
            provider: String::new(),
            cpu: String::new(),
        })
    }

    /// Gives back everything that is kept for later runs, also what busy sessions would take: for
    /// when memory is short.
    fn release_memory(&self) {}

    /// Has the buffers ready that a run will ask for, so that it need not wait for fresh pages.
    /// Blocks; returns how many bytes were not there yet.
    fn ready_buffers(&self, _buffers: &RunBuffers) -> u64 {
        0
    }

    /// What the engine calls itself, with its version.
    fn describe(&self) -> String;
}

/// The large buffers that a run has at the same time: their bytes, and how many of such.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunBuffers(pub Vec<(usize, usize)>);

/// A loaded graph. `run` may be called from many threads at once.
pub trait Session: Send + Sync + fmt::Debug {
    /// Inputs that every run must be given.
    fn inputs(&self) -> &[SessionTensor];
    /// Inputs that have a value in the graph and may be left out. In [`Session::run`] their
    /// indices follow those of [`Session::inputs`].
    fn optional_inputs(&self) -> &[SessionTensor] {
        &[]
    }
    fn outputs(&self) -> &[SessionTensor];

    /// Runs the graph on `inputs` (pairs of an index, see [`Session::inputs`], and a tensor) and
    /// returns the tensors of `outputs` (indices into [`Session::outputs`]) in that order.
    /// Blocks the calling thread. Fails with [`EngineError::Terminated`] once `stop` was pulled.
    fn run(
        &self,
        inputs: &[(usize, Tensor)],
        outputs: &[usize],
        stop: &StopHandle,
    ) -> Result<Vec<Tensor>, EngineError>;

    /// Room for an input of so many bytes that [`Session::run`] need not copy; none when it makes
    /// no difference where an input lies.
    fn room(&self, _bytes: usize) -> Option<Box<dyn TensorRoom>> {
        None
    }

    /// The process that had the session and is gone, and the session with it.
    fn lost(&self) -> Option<LostWorker> {
        None
    }

    /// Whether another process runs it: a run may then end, or hang, as that process does.
    fn is_remote(&self) -> bool {
        false
    }

    /// Gives what the session keeps for its next run back to the system.
    fn release_memory(&self) {}

    /// What its first run had; none before that, or where it is not known.
    fn first_buffers(&self) -> Option<RunBuffers> {
        None
    }

    /// Creates a handle by which one later run can be stopped.
    fn stop_handle(&self) -> Result<StopHandle, EngineError>;
}

/// Where an input is put together piece by piece.
pub trait TensorRoom {
    /// Adds a piece; false when it does not fit, and then nothing of it was added.
    fn put(&mut self, piece: &[u8]) -> bool;
    /// What was put together.
    fn finish(self: Box<Self>) -> Bytes;
}

/// Stops a run that is under way; pulling it twice, or after the run, does nothing.
pub type StopHandle = Arc<dyn Stop>;

/// See [`StopHandle`].
pub trait Stop: Send + Sync + fmt::Debug {
    fn stop(&self);
    /// For the session that made it to find its own state again.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// Joins rows of equal inputs: `Bytes` of one piece are passed on, more are copied once.
pub fn gather(pieces: &[Bytes]) -> Bytes {
    match pieces {
        [only] => only.clone(),
        _ => {
            let mut joined = Vec::with_capacity(pieces.iter().map(Bytes::len).sum());
            for piece in pieces {
                joined.extend_from_slice(piece);
            }
            joined.into()
        }
    }
}

/// Joins rows of equal inputs where `session` reads them without copying them again.
pub fn gather_for(session: &dyn Session, pieces: &[Bytes]) -> Bytes {
    if pieces.len() > 1
        && let Some(mut room) = session.room(pieces.iter().map(Bytes::len).sum())
        && pieces.iter().all(|piece| room.put(piece))
    {
        return room.finish();
    }
    gather(pieces)
}

//! A model in the form that loads fastest: a graph that was optimised once, and its weights
//! outside of it, as memory that sessions read where it lies.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use dormouse_model_store::store::{Pack, PreparedModel};

use super::EngineError;

/// What [`super::Engine::optimize`] made of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Optimized {
    /// The optimised graph. It names `tensors` and holds every other tensor itself.
    pub graph: Vec<u8>,
    /// The weights that [`super::Engine::open_prepared`] must be given, in the graph's order.
    pub tensors: Vec<OptimizedTensor>,
    /// The names of those of which a run reads some rows only.
    pub by_rows: Vec<String>,
    /// Holds the bytes of `tensors`, in the scratch folder; none when there are no tensors.
    pub data_file: Option<PathBuf>,
}

/// Why a model was not optimised.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OptimizeError {
    /// The model can be opened as it is and in no other way; trying again gives the same.
    #[error("not preparable: {0}")]
    NotPreparable(String),
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// A weight of an optimised graph: `len` bytes at `offset` of [`Optimized::data_file`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptimizedTensor {
    pub name: String,
    /// ONNX's number of the element type (1: fp32, 7: int64, 10: fp16 …).
    pub element_type: i32,
    pub dims: Vec<i64>,
    pub offset: u64,
    pub len: u64,
}

/// What a prepared session is built from.
#[derive(Clone, Debug)]
pub struct PreparedBytes {
    /// [`Optimized::graph`]; not needed once the session is built.
    pub graph: Bytes,
    /// One for each of [`Optimized::tensors`].
    pub weights: Vec<SharedWeight>,
    /// Sessions of one family were given the same weights, and share what packing makes of
    /// them. None: the packed copies are the session's own.
    pub family: Option<[u8; 32]>,
}

/// A pack's bytes, kept mapped as long as somebody holds a part of them.
struct PackBytes(Arc<Pack>);

impl AsRef<[u8]> for PackBytes {
    fn as_ref(&self) -> &[u8] {
        self.0
            .bytes(0..self.0.len())
            .expect("a pack has as many bytes as it says")
    }
}

impl PreparedBytes {
    /// A part of a pack, which stays mapped as long as it is held.
    pub(crate) fn part(pack: &Arc<Pack>, range: Range<u64>) -> Option<Bytes> {
        pack.bytes(range.clone())?;
        let whole = Bytes::from_owner(PackBytes(Arc::clone(pack)));
        Some(whole.slice(range.start as usize..range.end as usize))
    }

    /// What the prepared store has of a model, its weights as parts of the map, not copies.
    pub fn of(prepared: &Arc<PreparedModel>) -> Self {
        let packs = prepared.packs.iter();
        let packs: Vec<Bytes> = packs
            .map(|pack| Bytes::from_owner(PackBytes(Arc::clone(pack))))
            .collect();
        let weights = prepared.weights.iter().map(|weight| {
            let range = weight.range();
            SharedWeight {
                name: weight.name.clone(),
                element_type: weight.element_type,
                dims: weight.dims.clone(),
                data: packs[weight.pack].slice(range.start as usize..range.end as usize),
            }
        });
        // Whoever shares the largest pack shares nearly everything that packing copies.
        let largest = prepared.packs.iter().max_by_key(|pack| pack.len());
        Self {
            graph: prepared.graph.clone(),
            weights: weights.collect(),
            family: largest.map(|pack| *pack.digest().as_bytes()),
        }
    }
}

/// A weight that lies in memory that the session reads but does not own.
#[derive(Clone, Debug)]
pub struct SharedWeight {
    pub name: String,
    pub element_type: i32,
    pub dims: Vec<i64>,
    /// Kept by the session as long as it lives. Bytes of a map (`Bytes::from_owner(map)`, then
    /// `slice`) are not touched while a session is built with [`Packing::Off`].
    pub data: Bytes,
}

/// Whether a session makes copies of its weights in the layout its kernels read fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Packing {
    /// Reads the weights where they are: the fastest start, and no private memory.
    Off,
    /// Copies them at building: slower to start, faster to run for some models.
    On,
}

/// What a prepared model depends on beside the model itself: one that was prepared under
/// another identity must be prepared again.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EngineIdentity {
    /// Name, version and build.
    pub engine: String,
    pub provider: String,
    /// The instruction sets that decide layouts.
    pub cpu: String,
}

impl fmt::Display for EngineIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}; {}", self.engine, self.provider, self.cpu)
    }
}

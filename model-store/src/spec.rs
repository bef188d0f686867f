//! What a model is, once its configuration has been read, completed and checked.

mod ragged;
mod sequence;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::datatype::DataType;
use dormouse_core::shape::Shape;
use dormouse_proto::inference as pb;

pub use self::ragged::{BatchInputKind, BatchInputSpec, RaggedSpec};
pub use self::sequence::{
    ControlKind, ControlSpec, InitialState, Marks, SequenceSpec, SequenceStrategy, StateSpec,
};

/// One input or output as clients see it.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    pub name: Arc<str>,
    pub datatype: DataType,
    /// Dimensions without the batch dimension; `-1` means any.
    pub dims: Shape,
    /// What the graph is given instead of `dims` (Triton's `reshape`), without the batch dimension.
    pub reshape: Option<Shape>,
    /// An input that a request may leave out.
    pub optional: bool,
}

/// The labels of outputs' elements by index, by the output's name.
pub type OutputLabels = BTreeMap<Arc<str>, Arc<[Box<str>]>>;

/// When a full queue or an expired wait refuses a request.
#[derive(Clone, Debug, PartialEq)]
pub struct QueuePolicySpec {
    /// True for Triton's `DELAY`: after the timeout the request yields to others instead of failing.
    pub delay_on_timeout: bool,
    pub default_timeout: Option<Duration>,
    pub allow_timeout_override: bool,
    /// None: only the server's own bound applies.
    pub max_queue_size: Option<usize>,
}

/// Triton's `dynamic_batching`.
#[derive(Clone, Debug, PartialEq)]
pub struct DynamicBatchingSpec {
    pub preferred_rows: Vec<u32>,
    pub max_delay: Duration,
    pub preserve_ordering: bool,
    /// 0: no priorities.
    pub priority_levels: u32,
    pub default_priority_level: u32,
    pub default_queue_policy: QueuePolicySpec,
    /// By level, 1 the most important.
    pub priority_queue_policy: BTreeMap<u32, QueuePolicySpec>,
}

/// How the engine's session is built.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct SessionSpec {
    /// None: the shared thread pool.
    pub intra_op_threads: Option<u32>,
    pub inter_op_threads: Option<u32>,
    pub parallel_execution: bool,
    pub memory_arena: Option<bool>,
    pub memory_pattern: Option<bool>,
    pub graph_level: GraphLevel,
    /// Further ONNX Runtime session configuration entries, by key.
    pub entries: BTreeMap<String, String>,
    /// The CPU's memory arena is given back after each run, as far as nothing uses it.
    pub shrinks_arena: bool,
}

/// How far the engine optimises a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum GraphLevel {
    Disabled,
    Basic,
    Extended,
    #[default]
    All,
}

/// Where a warm-up input's values come from.
#[derive(Clone, Debug, PartialEq)]
pub enum WarmupData {
    Zero,
    Random,
    /// A file under the model's `warmup/` folder, in the raw layout of requests.
    File(String),
}

/// One input of a warm-up request.
#[derive(Clone, Debug, PartialEq)]
pub struct WarmupInput {
    pub name: String,
    pub datatype: DataType,
    /// Without the batch dimension.
    pub dims: Shape,
    pub data: WarmupData,
}

/// One of Triton's `model_warmup` entries.
#[derive(Clone, Debug, PartialEq)]
pub struct WarmupSpec {
    pub name: String,
    pub rows: u32,
    pub count: u32,
    pub inputs: Vec<WarmupInput>,
}

/// How long a model that nobody calls is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepAliveSpec {
    For(Duration),
    Forever,
    /// As long as the model's past calls make another one likely, and ahead of the next expected.
    Adaptive,
    /// Not at all: it is closed with its last run.
    Off,
}

/// Dormouse's own settings, read from `parameters` with keys `dormouse.*`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LifecycleSpec {
    /// `dormouse.keep_alive`: how long an idle model is kept.
    pub keep_alive: Option<KeepAliveSpec>,
    /// `dormouse.park_after`: idle time after which the weights' memory is given up while the
    /// session stays. `Some(None)` means never.
    pub park_after: Option<Option<Duration>>,
    /// `dormouse.load`: `eager` loads at start-up.
    pub eager: bool,
    /// `dormouse.isolation`: `process` has the model run in a process of its own.
    pub isolated: bool,
}

/// A model's configuration, complete and checked: what the server needs to know about it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    pub name: Arc<str>,
    /// The whole configuration after auto-completion, as `ModelConfig` answers it.
    pub config: pb::ModelConfig,
    pub platform: Arc<str>,
    pub inputs: Vec<TensorSpec>,
    pub outputs: Vec<TensorSpec>,
    /// 0: the model has no batch dimension.
    pub max_batch_size: u32,
    /// How requests wait and which of them share a run; absent: they wait in one plain queue.
    pub batching: Option<DynamicBatchingSpec>,
    /// Present when requests come in sequences; then `batching` is absent.
    pub sequence: Option<SequenceSpec>,
    /// Present when requests of different shapes share a run.
    pub ragged: Option<Arc<RaggedSpec>>,
    /// Whether rows of several requests may share a run. False without batching, and for a graph
    /// whose rows influence each other: its queue rules in `batching` hold all the same.
    pub runs_rows_together: bool,
    /// How many runs of the model may be under way at once (Triton's instance count).
    pub concurrency: u32,
    /// Nobody said how many, so that fewer are as good.
    pub concurrency_is_default: bool,
    pub session: SessionSpec,
    pub warmups: Vec<WarmupSpec>,
    pub lifecycle: LifecycleSpec,
    pub decoupled: bool,
    /// File or directory name of the graph inside a version's folder.
    pub model_filename: String,
    /// The labels of outputs' elements, by the output's name.
    pub labels: OutputLabels,
    /// What was read but cannot apply here, each a sentence that names its field.
    pub warnings: Vec<String>,
}

impl TensorSpec {
    /// The shape clients see: the batch dimension, if the model has one, then `dims`.
    pub fn metadata_shape(&self, max_batch_size: u32) -> Vec<i64> {
        let batch = (max_batch_size > 0).then_some(-1);
        batch.into_iter().chain(self.dims.iter().copied()).collect()
    }

    /// Whether a tensor of these dimensions, the batch dimension left out, is one of this kind.
    ///
    /// A graph's scalar is `[1]` to clients, as in Triton; no dimensions at all mean the same.
    pub fn admits(&self, dims: &[i64]) -> bool {
        let fits = dims.len() == self.dims.len()
            && dims
                .iter()
                .zip(&self.dims)
                .all(|(&given, &wanted)| wanted == -1 || wanted == given);
        let scalar = self.reshape.as_ref().is_some_and(|shape| shape.is_empty());
        fits || (scalar && dims.is_empty())
    }
}

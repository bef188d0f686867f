//! What a configuration says of sequences: how they are scheduled, and what the server tells and
//! keeps of each.

use std::sync::Arc;
use std::time::Duration;

use dormouse_core::datatype::DataType;
use dormouse_core::shape::Shape;

/// Triton's `sequence_batching`.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceSpec {
    pub strategy: SequenceStrategy,
    /// A sequence that nobody continues for so long is over.
    pub max_idle: Duration,
    /// Inputs by which the graph hears where in its sequence a request is.
    pub controls: Vec<ControlSpec>,
    /// What is kept between a sequence's requests.
    pub states: Vec<StateSpec>,
}

/// How requests of different sequences share a run.
#[derive(Clone, Debug, PartialEq)]
pub enum SequenceStrategy {
    Direct {
        max_delay: Duration,
        /// Of the largest batch, the part that is not waited for beyond; 0 waits for none.
        min_utilization: f32,
    },
    Oldest {
        /// Sequences under way at once, for each run at a time.
        candidates: u32,
        preferred_rows: Vec<u32>,
        max_delay: Duration,
        preserve_ordering: bool,
    },
}

/// An input that the server fills in for each request of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct ControlSpec {
    pub name: Arc<str>,
    pub datatype: DataType,
    pub kind: ControlKind,
}

/// What a control input tells.
#[derive(Clone, Debug, PartialEq)]
pub enum ControlKind {
    Start(Marks),
    End(Marks),
    Ready(Marks),
    CorrelationId,
}

/// The bytes that stand for no and for yes.
#[derive(Clone, Debug, PartialEq)]
pub struct Marks {
    pub no: Vec<u8>,
    pub yes: Vec<u8>,
}

/// A tensor that goes from one request of a sequence to the next.
#[derive(Clone, Debug, PartialEq)]
pub struct StateSpec {
    pub input: Arc<str>,
    pub output: Arc<str>,
    pub datatype: DataType,
    /// Without the batch dimension; `-1` means any.
    pub dims: Shape,
    pub initial: InitialState,
}

/// What a sequence's first request is given.
#[derive(Clone, Debug, PartialEq)]
pub struct InitialState {
    /// Without the batch dimension.
    pub dims: Shape,
    /// In the model's `initial_state` folder; zeros without one.
    pub file: Option<String>,
}

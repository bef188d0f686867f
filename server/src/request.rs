//! A request once validated: names, shapes, types and byte counts are facts here.

use std::sync::Arc;

use bytes::Bytes;
use dormouse_core::datatype::DataType;
use dormouse_core::sequence::{SequenceId, Step};
use dormouse_core::shape::Shape;
use dormouse_core::time::Timestamp;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::host::InFlightBytes;
use crate::shared_memory::{Caller, RegionSlice};
use crate::spans::RequestSpan;
use crate::timeline::ColdRequest;

/// A tensor in the v2 raw layout: little-endian rows, BYTES as length-prefixed elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub datatype: DataType,
    pub shape: Shape,
    pub data: Bytes,
}

impl Tensor {
    /// The same values in memory of their own.
    pub fn detached(self) -> Self {
        Self {
            data: Bytes::copy_from_slice(&self.data),
            ..self
        }
    }
}

/// What a front end read from the wire, before it is compared with the model's signature.
#[derive(Clone, Debug, Default)]
pub struct RawRequest {
    pub id: String,
    pub inputs: Vec<RawInput>,
    /// Empty: every output.
    pub outputs: Vec<String>,
    /// The `priority` parameter; 0 means the model's default.
    pub priority: u64,
    /// Absolute: from `grpc-timeout`, the `timeout` parameter, or the earlier of both.
    pub deadline: Option<Timestamp>,
    /// When the first byte of the request was seen.
    pub received: Timestamp,
    /// The `sequence_*` parameters, where they name a sequence.
    pub sequence: Option<Box<SequenceStep>>,
    pub origin: Origin,
    /// What most requests do not ask for.
    pub wishes: Option<Box<Wishes>>,
    /// Present when it is recorded.
    pub span: Option<RequestSpan>,
    /// What counts as in flight of it; none while it is small.
    pub held: Option<InFlightBytes>,
}

/// The call that a request came by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    #[default]
    Http,
    /// gRPC, with one answer to one request.
    Unary,
    /// gRPC, with any number of answers.
    Stream,
}

/// A request's place in its sequence.
#[derive(Clone, Debug)]
pub struct SequenceStep {
    pub step: Step,
    /// Its place among the requests of its stream, until it is queued.
    pub turn: Option<Turn>,
}

/// The `sequence_*` parameters of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SequenceParameters {
    pub id: Option<SequenceId>,
    pub start: bool,
    pub end: bool,
}

impl SequenceParameters {
    /// The step they stand for; none when they name no sequence.
    pub fn step(self) -> Option<Box<SequenceStep>> {
        let Self { id, start, end } = self;
        let step = Step {
            id: id?,
            start,
            end,
        };
        Some(Box::new(SequenceStep { step, turn: None }))
    }
}

/// Keeps the requests of a stream in order: each is queued after the one before it was.
#[derive(Clone, Debug)]
pub struct Turn {
    before: Option<CancellationToken>,
    /// Dropping the last of it lets the next one come.
    _done: Arc<DropGuard>,
}

impl Turn {
    /// The turn behind `before`, which is replaced by this one's end.
    pub fn after(before: &mut Option<CancellationToken>) -> Self {
        let done = CancellationToken::new();
        Self {
            before: before.replace(done.clone()),
            _done: Arc::new(done.drop_guard()),
        }
    }

    /// Resolves when the request before this one was queued or will never be.
    pub async fn comes(&self) {
        if let Some(before) = &self.before {
            before.cancelled().await;
        }
    }
}

/// What a request asks for beyond tensors in messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// Inputs whose elements are in shared memory, by their index.
    pub inputs: Vec<(usize, RegionSlice)>,
    /// What becomes of outputs, by their names.
    pub outputs: Vec<(String, OutputWish)>,
    /// Whose regions it may name, where that is known.
    pub caller: Option<Caller>,
}

/// What becomes of an output instead of being sent as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputWish {
    /// Its largest values are sent, so many of each row.
    Classes(u64),
    /// It is written to shared memory.
    Region(RegionSlice),
}

impl Wishes {
    /// None when nothing is asked for.
    pub fn some(self) -> Option<Box<Self>> {
        let asks = !self.inputs.is_empty() || !self.outputs.is_empty();
        asks.then(|| Box::new(self))
    }
}

/// One input as it came: the bytes are already in the raw layout.
#[derive(Clone, Debug)]
pub struct RawInput {
    pub name: String,
    pub datatype: DataType,
    pub shape: Shape,
    pub data: Bytes,
}

/// A request that fits its model's signature.
#[derive(Clone, Debug)]
pub struct InferRequest {
    pub id: String,
    /// In the order of the model's inputs; absent where an optional input was left out.
    pub inputs: Vec<Option<Tensor>>,
    /// Indices into the model's outputs, in the order they were asked for.
    pub outputs: Vec<usize>,
    /// Rows along the batch dimension; 1 for a model without one.
    pub rows: u32,
    pub priority: u64,
    pub deadline: Option<Timestamp>,
    pub received: Timestamp,
    /// Present when the model's requests come in sequences, and only then.
    pub sequence: Option<Box<SequenceStep>>,
    pub span: Option<RequestSpan>,
    /// What counts as in flight of it: all of it once it is queued.
    pub held: Option<InFlightBytes>,
}

/// The answer to an [`InferRequest`].
#[derive(Clone, Debug)]
pub struct InferResponse {
    pub model_name: Arc<str>,
    pub model_version: u64,
    pub id: String,
    pub outputs: Vec<(Arc<str>, Tensor)>,
    /// Present when this request waited for the model to wake.
    pub cold_start: Option<Box<ColdRequest>>,
    /// Where outputs were put instead of being sent, by their index.
    pub placed: Option<Box<Vec<Option<RegionSlice>>>>,
}

impl InferResponse {
    /// Where the output of this index was put instead of being sent.
    pub fn place_of(&self, output: usize) -> Option<&RegionSlice> {
        self.placed.as_ref()?.get(output)?.as_ref()
    }
}

//! What a configuration says of batches whose requests differ in shape.

use std::sync::Arc;

use dormouse_core::datatype::DataType;

/// Inputs that are joined without regard to their shapes, and what the graph is told of these.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RaggedSpec {
    /// For each input of the model, whether it is joined into one row of elements.
    pub inputs: Vec<bool>,
    /// Inputs that are made of the batch.
    pub batch_inputs: Vec<BatchInputSpec>,
    /// For each output of the model, the input whose shapes say how it is dealt out.
    pub scattered: Vec<Option<usize>>,
}

/// An input that the server makes of the batch.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchInputSpec {
    pub name: Arc<str>,
    pub kind: BatchInputKind,
    /// INT32 or FP32.
    pub datatype: DataType,
    /// The model's input that it tells about.
    pub source: usize,
}

/// What a batch input tells about its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchInputKind {
    /// The elements of each request.
    ElementCount,
    /// The elements up to and with each request.
    AccumulatedElementCount,
    /// The same after a zero.
    AccumulatedElementCountWithZero,
    /// Only its length says something: the elements of the largest request.
    MaxElementCountAsShape,
    /// The shape of each row, one below the other.
    ItemShape,
    /// The shape of each row, one after the other.
    ItemShapeFlatten,
}

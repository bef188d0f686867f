//! A request once validated: names, shapes, types and byte counts are facts here.

use std::sync::Arc;

use bytes::Bytes;
use dormouse_core::datatype::DataType;
use dormouse_core::shape::Shape;
use dormouse_core::time::Timestamp;

use crate::timeline::ColdRequest;

/// A tensor in the v2 raw layout: little-endian rows, BYTES as length-prefixed elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub datatype: DataType,
    pub shape: Shape,
    pub data: Bytes,
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
}

//! Steps of the front end without a socket: what `benches/` measures is what requests go through.

use axum::response::Response;
use bytes::Bytes;
use dormouse_core::time::Timestamp;
#[cfg(any(test, feature = "fuzzing"))]
use dormouse_model_store::spec::ModelSpec;

use super::answer::Answer;
use super::coding::Coding;
use super::infer::{self, OutputPlan};
use crate::error::ServeError;
use crate::limits::RequestLimits;
use crate::request::{InferResponse, RawRequest};

/// Reads a request whose first `header_length` bytes (all, when absent) are JSON.
pub fn read(
    body: &Bytes,
    header_length: Option<usize>,
    received: Timestamp,
) -> Result<RawRequest, ServeError> {
    infer::parse(body, header_length, received, &RequestLimits::default())
        .map(|parsed| parsed.request)
}

/// Reads a request that is nothing but the input of a model with one.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn read_raw(
    body: Bytes,
    spec: &ModelSpec,
    received: Timestamp,
) -> Result<RawRequest, ServeError> {
    infer::parse_raw(body, spec, received).map(|parsed| parsed.request)
}

/// Writes an answer, its tensors in binary or in JSON.
pub fn write(response: InferResponse, binary: bool) -> Result<Response, ServeError> {
    let plan = match binary {
        true => OutputPlan::all_binary(),
        false => OutputPlan::default(),
    };
    Answer::infer(response, &plan).map(|answer| answer.into_response(Coding::Identity))
}

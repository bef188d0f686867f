//! What clients may ask for at most, and how often they asked for more.
//!
//! Who checks a limit says [`Limit::refuse`] or makes its error with `Limit::error`: that counts.
//! What stays within its limits touches nothing here. The counts are those of the process, whose
//! sockets and memory are being guarded.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};

use dormouse_core::code::ErrorCode;
use dormouse_core::shape::element_count;

use crate::error::ServeError;

mod documented;

pub use documented::{Documented, documented};

/// Something that clients may not exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Connections that had to wait, or were closed, because a listener had all it may have.
    Connections,
    /// Connections that could not be accepted for want of file descriptors.
    Descriptors,
    /// Times that every stream of an HTTP/2 connection was in use.
    Streams,
    /// The number or the size of a request's headers, or its URI.
    Headers,
    /// Headers, or a connection's first words or request, that did not come in time.
    HeaderTime,
    /// Connections closed because no request came for long.
    IdleTime,
    /// HTTP/2 connections closed for resets, empty frames or continued headers without end.
    Http2Floods,
    /// A body or message as it was sent.
    BodySize,
    /// A body or message once it is decompressed.
    DecompressedSize,
    /// A message once it is decoded.
    DecodedSize,
    /// A body that stopped or trickled.
    BodyTime,
    Chunks,
    JsonDepth,
    JsonNodes,
    Tensors,
    Dimensions,
    Elements,
    /// Requests that wait for one model.
    Queue,
    /// Bytes of requests that are received, wait or run.
    BytesInFlight,
    /// Requests refused because the process is about to run out of memory.
    Memory,
}

impl Limit {
    pub const ALL: [Self; 20] = [
        Self::Connections,
        Self::Descriptors,
        Self::Streams,
        Self::Headers,
        Self::HeaderTime,
        Self::IdleTime,
        Self::Http2Floods,
        Self::BodySize,
        Self::DecompressedSize,
        Self::DecodedSize,
        Self::BodyTime,
        Self::Chunks,
        Self::JsonDepth,
        Self::JsonNodes,
        Self::Tensors,
        Self::Dimensions,
        Self::Elements,
        Self::Queue,
        Self::BytesInFlight,
        Self::Memory,
    ];

    /// Its name in metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Connections => "connections",
            Self::Descriptors => "descriptors",
            Self::Streams => "streams",
            Self::Headers => "headers",
            Self::HeaderTime => "header_time",
            Self::IdleTime => "idle_time",
            Self::Http2Floods => "http2_floods",
            Self::BodySize => "body_size",
            Self::DecompressedSize => "decompressed_size",
            Self::DecodedSize => "decoded_size",
            Self::BodyTime => "body_time",
            Self::Chunks => "chunks",
            Self::JsonDepth => "json_depth",
            Self::JsonNodes => "json_nodes",
            Self::Tensors => "tensors",
            Self::Dimensions => "dimensions",
            Self::Elements => "elements",
            Self::Queue => "queue",
            Self::BytesInFlight => "bytes_in_flight",
            Self::Memory => "memory",
        }
    }

    /// Counts one refusal.
    #[cold]
    pub fn refuse(self) {
        REFUSALS[self as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts one refusal of a request that asks for too much; the error that says so.
    #[cold]
    pub(crate) fn error(self, message: impl Into<String>) -> ServeError {
        self.refuse();
        ServeError::invalid(message)
    }

    /// Counts one refusal of a request that might pass later; the error that says so.
    #[cold]
    pub(crate) fn overload(self, message: impl Into<String>) -> ServeError {
        self.refuse();
        ServeError::new(ErrorCode::Overloaded, message)
    }

    /// Refusals of this process so far.
    pub fn refusals(self) -> u64 {
        REFUSALS[self as usize].load(Ordering::Relaxed)
    }
}

static REFUSALS: [AtomicU64; Limit::ALL.len()] = [const { AtomicU64::new(0) }; Limit::ALL.len()];

/// What one request may consist of, in either protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// How deep arrays and objects may nest.
    pub json_depth: u32,
    /// Values of a JSON text, elements of tensors aside.
    pub json_nodes: u32,
    /// Inputs a request may give, and outputs it may name.
    pub tensors: usize,
    /// Dimensions an input may have.
    pub dimensions: usize,
    /// Elements an input may have.
    pub elements: u64,
}

impl Default for RequestLimits {
    fn default() -> Self {
        Self {
            json_depth: 100,
            json_nodes: 1_000_000,
            tensors: 4096,
            dimensions: 32,
            // What a signed 32-bit number counts, as many kernels do.
            elements: i32::MAX as u64,
        }
    }
}

impl RequestLimits {
    /// The deepest that [`RequestLimits::json_depth`] may be set to: levels are kept as bits.
    pub const DEEPEST: u32 = 120;

    /// Checks how many tensors a request has; `what` they are is for the error.
    pub(crate) fn check_tensors(&self, count: usize, what: &str) -> Result<(), ServeError> {
        if count <= self.tensors {
            return Ok(());
        }
        Err(self.too_many_tensors(what))
    }

    #[cold]
    pub(crate) fn too_many_tensors(&self, what: &str) -> ServeError {
        let most = self.tensors;
        Limit::Tensors.error(format!(
            "the request has more than {most} {what} (limits.max_tensors)"
        ))
    }

    #[cold]
    pub(crate) fn too_many_dimensions(&self, input: impl Display) -> ServeError {
        let most = self.dimensions;
        Limit::Dimensions.error(format!(
            "{input}: its shape has more than {most} dimensions (limits.max_dimensions)"
        ))
    }

    /// Checks the elements that a shape stands for. One that cannot be is left to who knows the
    /// model.
    pub(crate) fn check_elements(
        &self,
        shape: &[i64],
        input: impl Display,
    ) -> Result<(), ServeError> {
        if shape.iter().any(|&dim| dim < 0)
            || element_count(shape).is_some_and(|count| count <= self.elements)
        {
            return Ok(());
        }
        Err(self.too_many_elements(input))
    }

    #[cold]
    fn too_many_elements(&self, input: impl Display) -> ServeError {
        let most = self.elements;
        Limit::Elements.error(format!(
            "{input}: its shape stands for more than {most} elements (limits.max_elements)"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_is_counted_under_its_own_name() {
        for (index, limit) in Limit::ALL.into_iter().enumerate() {
            assert_eq!(limit as usize, index);
            let others = Limit::ALL.iter().filter(|other| **other != limit);
            assert!(
                others
                    .into_iter()
                    .all(|other| other.label() != limit.label())
            );
            let before = limit.refusals();
            limit.refuse();
            assert!(limit.refusals() > before);
        }
    }

    #[test]
    fn a_shape_is_within_its_limit_or_counted() {
        let limits = RequestLimits::default();
        for shape in [
            &[][..],
            &[1, 16],
            &[0, 1 << 62],
            &[i64::from(i32::MAX)],
            &[-1, 5],
        ] {
            assert!(limits.check_elements(shape, "x").is_ok(), "{shape:?}");
        }
        let before = Limit::Elements.refusals();
        for shape in [
            &[1, 1 << 40][..],
            &[1 << 31],
            &[1 << 62, 1 << 62],
            &[i64::MAX],
        ] {
            let error = limits.check_elements(shape, "x").unwrap_err();
            assert!(error.message().contains("limits.max_elements"), "{error}");
        }
        assert!(Limit::Elements.refusals() >= before + 4);
    }
}

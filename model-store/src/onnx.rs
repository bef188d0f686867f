//! Reads what an ONNX file says about itself before the engine sees it: signature, references to
//! other files, operators. Weights are skipped unread, every count is bounded, and no sequence of
//! bytes makes it panic.
//!
//! It is stricter than protobuf where two readers of one file could disagree (a message given
//! twice, groups): the engine must see the file that was checked.

mod apart;
mod elements;
mod external;
mod nodes;
mod rewrite;
mod sites;
mod typed;
mod walk;
mod wire;
#[cfg(test)]
pub(crate) mod writer;

use std::io;

use crate::graph::GraphSummary;

pub use apart::TakenApart;
pub(crate) use elements::{element_name, element_number, element_type, tensor_bytes};
pub use external::ExternalError;
pub(crate) use external::shown;
pub(crate) use nodes::{Block, Constant, Function, NameId, Names, Node, Nodes, Value};
pub(crate) use rewrite::{NewInitializer, Rewrite};
pub(crate) use sites::{SiteData, TensorSite, Walked};
pub(crate) use typed::{TypedData, typed_data};
pub use wire::{MAX_FIELDS, ReadAt};

/// The largest model file: protobuf itself goes no further.
pub const MAX_FILE_BYTES: u64 = (2 << 30) - 1;
/// The deepest nesting of messages (a subgraph takes three).
pub const MAX_NESTING: usize = 64;
/// The most nodes in a model, those of subgraphs and functions included.
pub const MAX_NODES: u64 = 2_000_000;
/// The most inputs and the most outputs of a graph or node.
pub const MAX_SIGNATURE: u64 = 4_096;
/// The most initializers in a model, those of subgraphs included.
pub const MAX_INITIALIZERS: u64 = 1_000_000;
/// The most functions in a model.
pub const MAX_FUNCTIONS: u64 = 100_000;
/// The most operator sets a model or function imports.
pub const MAX_OPSETS: u64 = 1_024;
/// The most dimensions of a tensor.
pub const MAX_DIMENSIONS: u64 = 64;
/// The longest name, in bytes.
pub const MAX_TEXT_BYTES: u64 = 64 << 10;

/// Why a file is not a model that can be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    #[error("the file is empty")]
    Empty,
    #[error("the file has {bytes} bytes, an ONNX file has at most {MAX_FILE_BYTES}")]
    FileTooLarge { bytes: u64 },
    #[error("not an ONNX model: {what} at byte {offset}")]
    Malformed { offset: u64, what: &'static str },
    #[error("not an ONNX model: it has no graph")]
    NoGraph,
    #[error("messages are nested deeper than {MAX_NESTING} at byte {offset}")]
    TooDeep { offset: u64 },
    #[error("more than {limit} {what}")]
    TooMany { what: &'static str, limit: u64 },
    #[error("{what} at byte {offset} has {bytes} bytes, at most {limit} are allowed")]
    TooLong {
        what: &'static str,
        offset: u64,
        bytes: u64,
        limit: u64,
    },
    #[error("{what} at byte {offset} is given twice")]
    Twice { what: &'static str, offset: u64 },
    #[error("{what} at byte {offset} is not valid UTF-8")]
    NotUtf8 { what: &'static str, offset: u64 },
    #[error("tensor {tensor} has a dimension of {dimension}")]
    Dimension { tensor: String, dimension: i64 },
    #[error("data of tensor {tensor} lies outside the model file and cannot be used: {cause}")]
    External {
        tensor: String,
        cause: ExternalError,
    },
    #[error("cannot read at byte {offset}: {cause}")]
    Read { offset: u64, cause: io::Error },
}

/// Reads a model's signature, its references to other files and whether its rows are coupled.
pub fn summarize(source: &dyn ReadAt) -> Result<GraphSummary, GraphError> {
    walk(source).map(Walked::finish)
}

/// Reads all that one walk over a file finds.
pub(crate) fn walk(source: &dyn ReadAt) -> Result<Walked, GraphError> {
    walk::read(source)
}

#[cfg(test)]
mod tests;

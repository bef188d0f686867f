//! A model's configuration: read from `config.pbtxt` or JSON, completed from the graph, checked
//! against it, and turned into a [`ModelSpec`](crate::spec::ModelSpec).
//!
//! Knows no file system: the caller brings the text and the graph's summary.

pub mod complete;
pub mod error;
pub mod json;
pub mod resolve;
pub mod text;
pub mod versions;

mod made;
mod parameters;
mod ragged;
mod scheduling;
mod schema;
mod sequence;
mod suggest;
mod tensors;
mod unsupported;
mod warmup;

pub use self::complete::AutoComplete;
pub use self::error::{ConfigError, ConfigSyntaxError};
pub use self::parameters::{is_eager, weights_file};
pub use self::resolve::{ConfigDefaults, ResolveInput, resolve};
pub use self::versions::select_versions;

//! Why a configuration cannot be used.

use std::sync::Arc;

/// Text that is not a configuration, and where it stops being one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}:{column}: {message}")]
pub struct ConfigSyntaxError {
    /// From 1.
    pub line: u32,
    /// In characters, from 1.
    pub column: u32,
    pub message: String,
}

impl ConfigSyntaxError {
    /// Cut where it repeats too much of a text that may be long.
    pub(super) fn new((line, column): (u32, u32), mut message: String) -> Self {
        const LONGEST: usize = 500;
        if let Some((end, _)) = message.char_indices().nth(LONGEST) {
            message.truncate(end);
            message.push('…');
        }
        Self {
            line,
            column,
            message,
        }
    }
}

/// A configuration that was read but cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The configuration names another model than its folder does.
    #[error("model '{model}': 'name' must be that of the model's folder, found '{found}'")]
    Name { model: Arc<str>, found: String },
    /// Another engine than ours is asked for.
    #[error(
        "model '{model}': backend '{backend}' is not supported by this server (only 'onnxruntime' is)"
    )]
    Backend { model: Arc<str>, backend: String },
    /// A field holds a value that cannot be.
    #[error("model '{model}': {field}: expected {expected}, found {found}")]
    Invalid {
        model: Arc<str>,
        field: String,
        expected: String,
        found: String,
    },
    /// A field that would change answers if it were ignored.
    #[error("model '{model}': {field} is not supported by this server: {reason}")]
    Unsupported {
        model: Arc<str>,
        field: String,
        reason: String,
    },
    /// The configuration names a tensor that the graph does not have.
    #[error("model '{model}': {field} '{tensor}' is not in the graph, which has {present}{hint}")]
    UnknownTensor {
        model: Arc<str>,
        /// `input` or `output`.
        field: &'static str,
        tensor: String,
        present: String,
        hint: String,
    },
    /// The graph needs an input that the configuration leaves out.
    #[error(
        "model '{model}': the graph needs input '{tensor}', which the configuration does not list"
    )]
    MissingInput { model: Arc<str>, tensor: String },
    /// Configuration and graph do not agree about a tensor.
    #[error(
        "model '{model}': {field} '{tensor}': the configuration has {expected}, the graph {found}"
    )]
    GraphMismatch {
        model: Arc<str>,
        field: &'static str,
        tensor: String,
        expected: String,
        found: String,
    },
    /// A tensor of the graph that a request or an answer cannot carry.
    #[error(
        "model '{model}': {field} '{tensor}' is of type {kind}, which the v2 protocol cannot carry"
    )]
    TensorType {
        model: Arc<str>,
        field: &'static str,
        tensor: String,
        kind: &'static str,
    },
    /// A setting of ours that does not exist.
    #[error("model '{model}': unknown parameter '{key}'{hint}")]
    UnknownParameter {
        model: Arc<str>,
        key: String,
        hint: String,
    },
}

//! The few kinds of failure a caller can act on.

/// What a failure means to the caller; front ends map it to a status, a metric label and a log level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorCode {
    /// The request itself is wrong; sending it again will not help.
    InvalidRequest,
    /// No such model, version or tensor.
    NotFound,
    /// The thing exists but this server does not do it.
    Unsupported,
    /// Queues or budgets are full; try again later.
    Overloaded,
    /// More than the server may ever use; only another configuration helps.
    NeverFits,
    /// The deadline passed, or cannot be met.
    DeadlineExceeded,
    /// The model or server cannot answer now (loading failed, shutting down).
    Unavailable,
    /// The caller went away.
    Cancelled,
    /// A fault of the server or of the engine.
    Internal,
}

//! Why a request or a management call got no answer.

use std::sync::Arc;
use std::time::Duration;

use dormouse_core::code::ErrorCode;

/// An error for the caller. Cloned to every request that a failed load was holding.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ServeError {
    code: ErrorCode,
    message: Arc<str>,
    /// When trying again makes sense.
    retry_after: Option<Duration>,
}

impl ServeError {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into().into(),
            retry_after: None,
        }
    }

    /// A refusal of a request. It may repeat what the request says, and of that not too much.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidRequest, shorten(message.into()))
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::NotFound, message)
    }

    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Unsupported, message)
    }

    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Unavailable, message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Internal, message)
    }

    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    pub fn code(&self) -> ErrorCode {
        self.code
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    pub fn retry_hint(&self) -> Option<Duration> {
        self.retry_after
    }
}

/// Longer messages are cut: a status travels in headers, which clients bound to 8 KiB.
pub(crate) const MAX_MESSAGE: usize = 2048;

/// Cuts a message to what fits into headers, between characters.
pub(crate) fn shorten(mut message: String) -> String {
    if message.len() > MAX_MESSAGE {
        message.truncate(message.floor_char_boundary(MAX_MESSAGE));
        message.push('…');
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_repeats_little_of_a_long_request() {
        let error = ServeError::invalid("é".repeat(3000));
        assert!(error.message().len() <= MAX_MESSAGE + '…'.len_utf8());
        assert!(error.message().ends_with("é…"));
    }
}

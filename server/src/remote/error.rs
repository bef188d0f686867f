//! Why something could not be listed or fetched, in words that carry no secret.

use std::error::Error;

use http::StatusCode;

/// What went wrong, as far as a decision or a dashboard depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// Nobody answers: no such host, no connection, no TLS.
    Unreachable,
    /// It took too long, or the connection broke.
    Interrupted,
    /// The server has too much to do, or trouble of its own.
    Busy,
    /// Credentials are missing, wrong or not enough.
    Denied,
    NotFound,
    /// It is not what was listed any more.
    Changed,
    /// Our own rules forbid it.
    Refused,
    /// What came is not what was promised.
    Damaged,
    /// The server's answer makes no sense.
    Malformed,
    /// The cache's disk.
    Disk,
    /// The server is ending.
    Stopped,
}

impl ErrorKind {
    pub(crate) const ALL: [Self; 11] = [
        Self::Unreachable,
        Self::Interrupted,
        Self::Busy,
        Self::Denied,
        Self::NotFound,
        Self::Changed,
        Self::Refused,
        Self::Damaged,
        Self::Malformed,
        Self::Disk,
        Self::Stopped,
    ];

    /// A metric's label.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Interrupted => "interrupted",
            Self::Busy => "busy",
            Self::Denied => "denied",
            Self::NotFound => "not_found",
            Self::Changed => "changed",
            Self::Refused => "refused",
            Self::Damaged => "damaged",
            Self::Malformed => "malformed",
            Self::Disk => "disk",
            Self::Stopped => "stopped",
        }
    }

    /// Whether the same request may well succeed in a moment.
    pub const fn is_passing(self) -> bool {
        matches!(
            self,
            Self::Unreachable | Self::Interrupted | Self::Busy | Self::Damaged
        )
    }
}

/// See [`ErrorKind`]; the message names host and file, never a credential.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RemoteError {
    pub kind: ErrorKind,
    pub message: String,
}

/// How much of a foreign message is repeated.
const MAX_REPEATED: usize = 300;

impl RemoteError {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }

    pub(crate) fn disk(what: &str, cause: &std::io::Error) -> Self {
        Self::new(
            ErrorKind::Disk,
            format!("the repository cache cannot {what}: {cause}"),
        )
    }

    /// What an answer's status means. `body` is the beginning of the answer.
    pub(super) fn of_status(host: &str, status: StatusCode, body: &str) -> Self {
        let kind = match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ErrorKind::Denied,
            StatusCode::NOT_FOUND | StatusCode::GONE => ErrorKind::NotFound,
            StatusCode::PRECONDITION_FAILED => ErrorKind::Changed,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => ErrorKind::Busy,
            status if status.is_server_error() => ErrorKind::Busy,
            status if status.is_redirection() => ErrorKind::Refused,
            _ => ErrorKind::Malformed,
        };
        let mut message = format!("{host} answered {status}");
        // The clouds say what they mean in an element of this name.
        if let Some(code) = between(body, "<Code>", "</Code>") {
            message.push_str(&format!(" ({})", printable(code)));
        }
        Self { kind, message }
    }

    /// What the storage library says; our own client's error is inside if it was a request's.
    pub(super) fn of_store(error: &object_store::Error) -> Self {
        let mut cause: Option<&(dyn Error + 'static)> = Some(error);
        while let Some(current) = cause {
            if let Some(own) = current.downcast_ref::<Self>() {
                return own.clone();
            }
            cause = current.source();
        }
        let kind = match error {
            object_store::Error::NotFound { .. } => ErrorKind::NotFound,
            object_store::Error::Precondition { .. } | object_store::Error::NotModified { .. } => {
                ErrorKind::Changed
            }
            object_store::Error::PermissionDenied { .. }
            | object_store::Error::Unauthenticated { .. } => ErrorKind::Denied,
            _ => ErrorKind::Malformed,
        };
        Self::new(kind, printable(&error.to_string()))
    }
}

/// Foreign text on one line, without what follows a question mark: signatures are there.
pub(super) fn printable(text: &str) -> String {
    let mut shown = String::new();
    let mut hidden = false;
    for character in text.chars().take(MAX_REPEATED) {
        match character {
            '?' => {
                hidden = true;
                shown.push_str("?...");
            }
            character if character.is_whitespace() => {
                hidden = false;
                shown.push(' ');
            }
            _ if hidden => {}
            character => shown.extend(character.escape_debug()),
        }
    }
    shown
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    let from = text.find(start)? + start.len();
    let length = text[from..].find(end)?;
    Some(&text[from..from + length])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_told_with_the_servers_own_word_for_it() {
        let body = "<?xml?><Error><Code>SlowDown</Code><Key>a</Key></Error>";
        let error = RemoteError::of_status("s3.example", StatusCode::SERVICE_UNAVAILABLE, body);
        assert_eq!(error.kind, ErrorKind::Busy);
        assert_eq!(
            error.to_string(),
            "s3.example answered 503 Service Unavailable (SlowDown)"
        );
        let error = RemoteError::of_status("h", StatusCode::FORBIDDEN, "");
        assert_eq!(error.kind, ErrorKind::Denied);
        assert!(!error.kind.is_passing());
    }

    #[test]
    fn what_follows_a_question_mark_is_not_repeated() {
        let text = "Error performing GET https://h/c/x?sig=SECRET&se=1 in 3ms\nnext";
        assert_eq!(
            printable(text),
            "Error performing GET https://h/c/x?... in 3ms next"
        );
    }
}

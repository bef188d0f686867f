//! What an error is called in each protocol. No side effects: who sends an error logs it.

use std::time::Duration;

use dormouse_core::code::ErrorCode;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic_types::{ErrorDetails, StatusExt};

use crate::error::{ServeError, shorten};

/// The gRPC code of an error, as Triton's clients know it.
pub const fn grpc_code(code: ErrorCode) -> tonic::Code {
    match code {
        ErrorCode::InvalidRequest => tonic::Code::InvalidArgument,
        ErrorCode::NotFound => tonic::Code::NotFound,
        ErrorCode::Unsupported => tonic::Code::Unimplemented,
        ErrorCode::Overloaded | ErrorCode::Unavailable => tonic::Code::Unavailable,
        // Not one of the codes that clients try again by themselves.
        ErrorCode::NeverFits => tonic::Code::FailedPrecondition,
        ErrorCode::DeadlineExceeded => tonic::Code::DeadlineExceeded,
        ErrorCode::Cancelled => tonic::Code::Cancelled,
        ErrorCode::Internal => tonic::Code::Internal,
    }
}

/// The HTTP status of an error, as Triton's clients know it.
pub const fn http_status(code: ErrorCode) -> http::StatusCode {
    match code {
        ErrorCode::InvalidRequest => http::StatusCode::BAD_REQUEST,
        ErrorCode::NotFound => http::StatusCode::NOT_FOUND,
        ErrorCode::Unsupported => http::StatusCode::NOT_IMPLEMENTED,
        ErrorCode::Overloaded
        | ErrorCode::Unavailable
        | ErrorCode::DeadlineExceeded
        | ErrorCode::Cancelled => http::StatusCode::SERVICE_UNAVAILABLE,
        ErrorCode::NeverFits => http::StatusCode::INSUFFICIENT_STORAGE,
        ErrorCode::Internal => http::StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// What the gRPC code of an error is called. HTTP answers carry it beside their status, of which
/// 503 alone does not tell a deadline from a full queue.
pub const fn grpc_code_name(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::InvalidRequest => "INVALID_ARGUMENT",
        ErrorCode::NotFound => "NOT_FOUND",
        ErrorCode::Unsupported => "UNIMPLEMENTED",
        ErrorCode::Overloaded | ErrorCode::Unavailable => "UNAVAILABLE",
        ErrorCode::NeverFits => "FAILED_PRECONDITION",
        ErrorCode::DeadlineExceeded => "DEADLINE_EXCEEDED",
        ErrorCode::Cancelled => "CANCELLED",
        ErrorCode::Internal => "INTERNAL",
    }
}

/// The gRPC status of an error. A retry hint travels twice: as `google.rpc.RetryInfo` for
/// programs that read details and as `grpc-retry-pushback-ms` for the retry policy built into
/// gRPC clients.
pub fn to_status(error: &ServeError) -> tonic::Status {
    let code = grpc_code(error.code());
    let message = shorten(error.message().to_owned());
    let Some(wait) = error.retry_hint() else {
        return tonic::Status::new(code, message);
    };
    let mut metadata = MetadataMap::with_capacity(1);
    metadata.insert(
        "grpc-retry-pushback-ms",
        MetadataValue::from(pushback_millis(wait)),
    );
    tonic::Status::with_error_details_and_metadata(
        code,
        message,
        ErrorDetails::with_retry_info(Some(wait)),
        metadata,
    )
}

/// Rounded up: a client that waits must not come back too early. The field is a 32-bit integer.
fn pushback_millis(wait: Duration) -> i32 {
    i32::try_from(wait.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::MAX_MESSAGE;

    #[test]
    fn codes_are_those_that_triton_clients_expect() {
        use ErrorCode::*;
        let table = [
            (InvalidRequest, tonic::Code::InvalidArgument, 400),
            (NotFound, tonic::Code::NotFound, 404),
            (Unsupported, tonic::Code::Unimplemented, 501),
            (Overloaded, tonic::Code::Unavailable, 503),
            (DeadlineExceeded, tonic::Code::DeadlineExceeded, 503),
            (NeverFits, tonic::Code::FailedPrecondition, 507),
            (Unavailable, tonic::Code::Unavailable, 503),
            (Cancelled, tonic::Code::Cancelled, 503),
            (Internal, tonic::Code::Internal, 500),
        ];
        for (code, grpc, http) in table {
            assert_eq!(grpc_code(code), grpc, "{code:?}");
            assert_eq!(http_status(code).as_u16(), http, "{code:?}");
            let name = grpc_code_name(code).replace('_', "").to_lowercase();
            assert_eq!(name, format!("{grpc:?}").to_lowercase());
        }
    }

    #[test]
    fn a_retry_hint_travels_as_details_and_as_pushback() {
        let error = ServeError::new(ErrorCode::Overloaded, "queue is full")
            .retry_after(Duration::from_micros(1_500_100));
        let status = to_status(&error);
        assert_eq!(status.code(), tonic::Code::Unavailable);
        assert_eq!(status.message(), "queue is full");
        let info = status.get_details_retry_info().unwrap();
        assert_eq!(info.retry_delay, Some(Duration::from_micros(1_500_100)));
        let pushback = status.metadata().get("grpc-retry-pushback-ms").unwrap();
        assert_eq!(pushback, "1501");
    }

    #[test]
    fn without_a_hint_a_status_has_no_details() {
        let status = to_status(&ServeError::invalid("wrong"));
        assert!(status.details().is_empty());
        assert!(status.metadata().is_empty());
    }

    #[test]
    fn long_messages_are_cut_between_characters() {
        let status = to_status(&ServeError::internal("é".repeat(3000)));
        assert!(status.message().len() <= MAX_MESSAGE + '…'.len_utf8());
        assert!(status.message().ends_with("é…"));
    }
}

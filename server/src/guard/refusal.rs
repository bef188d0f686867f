//! A request that is turned away before anybody looks into it.

use std::borrow::Cow;
use std::time::Duration;

use axum::body::Body;
use http::header::{self, HeaderValue};
use http::{Response, StatusCode};
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic_types::{ErrorDetails, StatusExt};

/// Why, and how to say it in both protocols.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    kind: Kind,
    message: Cow<'static, str>,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Nobody we know; `invalid` when a credential was given and is of no use.
    Unauthenticated {
        invalid: bool,
    },
    Forbidden,
    Exhausted {
        wait: Duration,
    },
}

impl Refusal {
    pub(super) fn no_credential() -> Self {
        Self {
            kind: Kind::Unauthenticated { invalid: false },
            message: "this server needs a credential: send 'authorization: Bearer TOKEN'".into(),
        }
    }

    pub(super) fn invalid_credential(message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind: Kind::Unauthenticated { invalid: true },
            message: message.into(),
        }
    }

    pub(super) fn forbidden(message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind: Kind::Forbidden,
            message: message.into(),
        }
    }

    pub(super) fn exhausted(message: String, wait: Duration) -> Self {
        Self {
            kind: Kind::Exhausted { wait },
            message: message.into(),
        }
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    #[cfg(test)]
    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self.kind {
            Kind::Exhausted { wait } => Some(wait),
            Kind::Unauthenticated { .. } | Kind::Forbidden => None,
        }
    }

    /// In the form of every other error over HTTP.
    pub(crate) fn into_http(self) -> Response<Body> {
        let body = serde_json::json!({ "error": self.message }).to_string();
        let mut response = Response::new(Body::from(body));
        let (status, extra) = match self.kind {
            Kind::Unauthenticated { invalid } => {
                let challenge = match invalid {
                    true => "Bearer realm=\"dormouse\", error=\"invalid_token\"",
                    false => "Bearer realm=\"dormouse\"",
                };
                let challenge = HeaderValue::from_static(challenge);
                (
                    StatusCode::UNAUTHORIZED,
                    Some((header::WWW_AUTHENTICATE, challenge)),
                )
            }
            Kind::Forbidden => (StatusCode::FORBIDDEN, None),
            Kind::Exhausted { wait } => {
                let seconds = wait.as_nanos().div_ceil(1_000_000_000).max(1);
                let seconds = u64::try_from(seconds).unwrap_or(u64::MAX);
                (
                    StatusCode::TOO_MANY_REQUESTS,
                    Some((header::RETRY_AFTER, seconds.into())),
                )
            }
        };
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        );
        headers.extend(extra.map(|(name, value)| (Some(name), value)));
        response
    }

    /// As gRPC says it.
    pub(crate) fn status(&self) -> tonic::Status {
        let message = self.message.clone();
        match self.kind {
            Kind::Unauthenticated { .. } => tonic::Status::unauthenticated(message),
            Kind::Forbidden => tonic::Status::permission_denied(message),
            Kind::Exhausted { wait } => {
                let millis = i32::try_from(wait.as_millis()).unwrap_or(i32::MAX);
                let mut metadata = MetadataMap::with_capacity(1);
                metadata.insert("grpc-retry-pushback-ms", MetadataValue::from(millis));
                tonic::Status::with_error_details_and_metadata(
                    tonic::Code::ResourceExhausted,
                    message,
                    ErrorDetails::with_retry_info(Some(wait)),
                    metadata,
                )
            }
        }
    }
}

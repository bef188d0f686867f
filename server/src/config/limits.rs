//! `[limits]`: what connections and requests may be like.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

use dormouse_core::id::ByteSize;

use super::file::{LimitsSection, Span};
use super::{ConfigError, invalid};
use crate::limits::RequestLimits;

/// A day: longer is a mistake.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// What clients may do at most, on every port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientLimits {
    /// Requests at once on one HTTP/2 connection.
    pub max_streams: u32,
    /// Requests of one `ModelStreamInfer` call that are under way at once; more are not read.
    pub max_stream_requests: usize,
    /// Headers of an HTTP/1 request.
    pub max_headers: usize,
    /// Bytes of an HTTP/1 request's head.
    pub max_header_size: ByteSize,
    /// Bytes of an HTTP/2 request's headers, decompressed.
    pub max_header_list: ByteSize,
    /// How long a request's head, a connection's first words or its first request may take.
    pub header_timeout: Duration,
    /// How long an HTTP/1 connection without a request stays open.
    pub idle_timeout: Duration,
    /// How long an HTTP/2 connection without a request stays open.
    pub http2_idle_timeout: Duration,
    /// How long the next 32 KiB of a body may take.
    pub body_timeout: Duration,
    /// Chunks of a body, for each 64 MiB that bodies may have.
    pub max_chunks: u64,
    /// gRPC connections older than this are asked to reconnect.
    pub max_connection_age: Option<Duration>,
    pub request: RequestLimits,
}

impl Default for ClientLimits {
    fn default() -> Self {
        Self {
            max_streams: 128,
            max_stream_requests: 64,
            max_headers: 64,
            max_header_size: ByteSize(32 << 10),
            max_header_list: ByteSize(16 << 10),
            header_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(75),
            http2_idle_timeout: Duration::from_secs(300),
            body_timeout: Duration::from_secs(30),
            max_chunks: 65_536,
            max_connection_age: None,
            request: RequestLimits::default(),
        }
    }
}

impl ClientLimits {
    pub(super) fn join(file: &LimitsSection) -> Result<Self, ConfigError> {
        let usual = Self::default();
        let request = usual.request;
        let kib = |size: u64| ByteSize(size << 10);
        Ok(Self {
            max_streams: within(
                "limits.max_streams",
                file.max_streams.unwrap_or(usual.max_streams),
                1..=i32::MAX as u32,
            )?,
            max_stream_requests: within(
                "limits.max_stream_requests",
                file.max_stream_requests
                    .unwrap_or(usual.max_stream_requests),
                1..=10_000,
            )?,
            max_headers: within(
                "limits.max_headers",
                file.max_headers.unwrap_or(usual.max_headers),
                1..=10_000,
            )?,
            // The protocol library takes no less.
            max_header_size: within(
                "limits.max_header_size",
                file.max_header_size.unwrap_or(usual.max_header_size),
                kib(8)..=kib(16 << 10),
            )?,
            max_header_list: within(
                "limits.max_header_list",
                file.max_header_list.unwrap_or(usual.max_header_list),
                kib(1)..=kib(16 << 10),
            )?,
            header_timeout: time(
                "limits.header_timeout",
                file.header_timeout,
                usual.header_timeout,
            )?,
            idle_timeout: time("limits.idle_timeout", file.idle_timeout, usual.idle_timeout)?,
            http2_idle_timeout: time(
                "limits.http2_idle_timeout",
                file.http2_idle_timeout,
                usual.http2_idle_timeout,
            )?,
            body_timeout: time("limits.body_timeout", file.body_timeout, usual.body_timeout)?,
            max_chunks: within(
                "limits.max_chunks",
                file.max_chunks.unwrap_or(usual.max_chunks),
                1..=u64::from(u32::MAX),
            )?,
            max_connection_age: file
                .max_connection_age
                .map(|age| time("limits.max_connection_age", Some(age), age.0))
                .transpose()?,
            request: RequestLimits {
                json_depth: within(
                    "limits.max_json_depth",
                    file.max_json_depth.unwrap_or(request.json_depth),
                    8..=RequestLimits::DEEPEST,
                )?,
                json_nodes: within(
                    "limits.max_json_nodes",
                    file.max_json_nodes.unwrap_or(request.json_nodes),
                    100..=u32::MAX,
                )?,
                tensors: within(
                    "limits.max_tensors",
                    file.max_tensors.unwrap_or(request.tensors),
                    1..=1 << 20,
                )?,
                dimensions: within(
                    "limits.max_dimensions",
                    file.max_dimensions.unwrap_or(request.dimensions),
                    1..=1024,
                )?,
                elements: within(
                    "limits.max_elements",
                    file.max_elements.unwrap_or(request.elements),
                    1..=u64::MAX,
                )?,
            },
        })
    }
}

fn within<T: PartialOrd + Display>(
    setting: &'static str,
    value: T,
    range: RangeInclusive<T>,
) -> Result<T, ConfigError> {
    if range.contains(&value) {
        return Ok(value);
    }
    let (least, most) = range.into_inner();
    Err(invalid(setting, format!("expected {least} to {most}")))
}

fn time(
    setting: &'static str,
    given: Option<Span>,
    usual: Duration,
) -> Result<Duration, ConfigError> {
    let time = given.map_or(usual, |span| span.0);
    match time.is_zero() || time > LONGEST {
        true => Err(invalid(setting, "expected more than 0s and at most 24h")),
        false => Ok(time),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join(text: &str) -> Result<ClientLimits, String> {
        let section: LimitsSection = toml::from_str(text).map_err(|error| error.to_string())?;
        ClientLimits::join(&section).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_not_set_has_its_default() {
        assert_eq!(join("").unwrap(), ClientLimits::default());
        let set = join("max_streams = 8\nbody_timeout = \"2s\"\nmax_json_depth = 20").unwrap();
        assert_eq!((set.max_streams, set.request.json_depth), (8, 20));
        assert_eq!(set.body_timeout, Duration::from_secs(2));
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        for (text, name) in [
            ("max_streams = 0", "limits.max_streams"),
            ("max_stream_requests = 0", "limits.max_stream_requests"),
            ("max_headers = 0", "limits.max_headers"),
            ("max_header_size = \"1KiB\"", "limits.max_header_size"),
            ("max_header_list = \"1GiB\"", "limits.max_header_list"),
            ("header_timeout = \"0s\"", "limits.header_timeout"),
            ("idle_timeout = \"2days\"", "limits.idle_timeout"),
            ("http2_idle_timeout = \"0s\"", "limits.http2_idle_timeout"),
            ("body_timeout = \"0s\"", "limits.body_timeout"),
            ("max_chunks = 0", "limits.max_chunks"),
            ("max_connection_age = \"0s\"", "limits.max_connection_age"),
            ("max_json_depth = 1000", "limits.max_json_depth"),
            ("max_json_nodes = 1", "limits.max_json_nodes"),
            ("max_tensors = 0", "limits.max_tensors"),
            ("max_dimensions = 0", "limits.max_dimensions"),
            ("max_elements = 0", "limits.max_elements"),
        ] {
            let error = join(text).unwrap_err();
            assert!(error.contains(name), "{text}: {error}");
        }
    }
}

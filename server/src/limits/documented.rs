//! The limits as users are told of them: `docs/security.md` has this table.

use std::fmt::Display;

use dormouse_core::id::ByteSize;

use super::Limit;
use crate::config::Limits;

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Documented {
    pub what: &'static str,
    pub default: String,
    /// Key in the file; empty for what cannot be set.
    pub setting: &'static str,
    /// What its refusals are counted as; none where they cannot be seen.
    pub limit: Option<Limit>,
}

/// Every limit with its default.
pub fn documented() -> Vec<Documented> {
    let limits = Limits::default();
    let clients = &limits.clients;
    let request = clients.request;
    let row = |what, default: &dyn Display, setting, limit: Option<Limit>| Documented {
        what,
        default: default.to_string(),
        setting,
        limit,
    };
    let size = |bytes: ByteSize| bytes.to_string().replace(".0 ", " ");
    let time = |time| humantime::format_duration(time).to_string();
    use Limit::*;
    vec![
        row(
            "connections of a listener; at most a quarter of the file descriptors, for metrics and management a sixteenth",
            &limits.max_connections,
            "limits.max_connections",
            Some(Connections),
        ),
        row(
            "file descriptors, when a connection was to be accepted",
            &"the hard limit",
            "",
            Some(Descriptors),
        ),
        row(
            "requests at once on an HTTP/2 connection; further ones wait at the client",
            &clients.max_streams,
            "limits.max_streams",
            Some(Streams),
        ),
        row(
            "requests at once on a gRPC stream; further ones are not read yet",
            &clients.max_stream_requests,
            "limits.max_stream_requests",
            None,
        ),
        row(
            "headers of an HTTP/1 request",
            &clients.max_headers,
            "limits.max_headers",
            Some(Headers),
        ),
        row(
            "bytes of an HTTP/1 request's head",
            &size(clients.max_header_size),
            "limits.max_header_size",
            Some(Headers),
        ),
        row(
            "bytes of an HTTP/2 request's headers (answered 431; twice as many are not counted)",
            &size(clients.max_header_list),
            "limits.max_header_list",
            Some(Headers),
        ),
        row(
            "time for a request's head, a connection's first words, and its first request",
            &time(clients.header_timeout),
            "limits.header_timeout",
            Some(HeaderTime),
        ),
        row(
            "time that an HTTP/1 connection may idle",
            &time(clients.idle_timeout),
            "limits.idle_timeout",
            Some(IdleTime),
        ),
        row(
            "time that an HTTP/2 connection may idle; then its client is asked to reconnect",
            &time(clients.http2_idle_timeout),
            "limits.http2_idle_timeout",
            Some(IdleTime),
        ),
        row(
            "HTTP/2 connections with endless resets, empty frames or continued headers",
            &"20 resets, 100 frames",
            "",
            Some(Http2Floods),
        ),
        row(
            "bytes of a body over HTTP",
            &size(limits.http_max_input),
            "http.max_input_size",
            Some(BodySize),
        ),
        row(
            "bytes of a message over gRPC",
            &size(limits.grpc_max_message),
            "grpc.max_input_size",
            Some(BodySize),
        ),
        row(
            "the same after decompression",
            &"the same",
            "",
            Some(DecompressedSize),
        ),
        row(
            "memory of a gRPC message once it is decoded, beside its bytes",
            &"the same",
            "",
            Some(DecodedSize),
        ),
        row(
            "time for the next 32 KiB of a body",
            &time(clients.body_timeout),
            "limits.body_timeout",
            Some(BodyTime),
        ),
        row(
            "chunks of a body, for each 64 MiB that bodies may have",
            &clients.max_chunks,
            "limits.max_chunks",
            Some(Chunks),
        ),
        row(
            "levels of JSON",
            &request.json_depth,
            "limits.max_json_depth",
            Some(JsonDepth),
        ),
        row(
            "values in JSON, elements of tensors aside",
            &request.json_nodes,
            "limits.max_json_nodes",
            Some(JsonNodes),
        ),
        row(
            "inputs of a request, and outputs that it names",
            &request.tensors,
            "limits.max_tensors",
            Some(Tensors),
        ),
        row(
            "dimensions of an input",
            &request.dimensions,
            "limits.max_dimensions",
            Some(Dimensions),
        ),
        row(
            "elements of an input",
            &request.elements,
            "limits.max_elements",
            Some(Elements),
        ),
        row(
            "requests that wait for one model",
            &limits.max_queue_per_model,
            "limits.max_queue_per_model",
            Some(Queue),
        ),
        row(
            "bytes of requests that arrive, wait or run; at most a quarter of the memory there is",
            &size(limits.max_bytes_in_flight),
            "limits.max_request_bytes_in_flight",
            Some(BytesInFlight),
        ),
        row(
            "memory of the container (its control group); above, requests are refused",
            &"95 %",
            "",
            Some(Memory),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;
    use crate::config::FileConfig;
    use crate::config::keys::settings_of;

    #[test]
    fn the_documented_limits_are_those_of_the_code() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/security.md");
        let page = std::fs::read_to_string(path).unwrap();
        let mut expected =
            "| limit | default | setting | counted as |\n|---|---|---|---|".to_owned();
        for row in documented() {
            let setting = match row.setting {
                "" => String::new(),
                setting => format!("`{setting}`"),
            };
            let label = row.limit.map(|limit| format!("`{}`", limit.label()));
            let label = label.unwrap_or_default();
            let _ = write!(
                expected,
                "\n| {} | {} | {setting} | {label} |",
                row.what, row.default
            );
        }
        assert!(
            page.contains(&format!("{expected}\n\n")),
            "docs/security.md should have:\n{expected}\n"
        );
    }

    #[test]
    fn every_setting_that_is_told_of_exists_and_every_limit_is_told_of() {
        let settings = settings_of::<FileConfig>();
        let told = documented();
        for row in &told {
            assert!(
                row.setting.is_empty() || settings.iter().any(|known| known == row.setting),
                "{}",
                row.setting
            );
        }
        for limit in Limit::ALL {
            assert!(told.iter().any(|row| row.limit == Some(limit)), "{limit:?}");
        }
    }
}

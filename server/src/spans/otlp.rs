//! Spans as the collector's protocol has them.

use dormouse_proto::otlp as pb;
use pb::any_value::Value as Any;

use super::{Kind, SpanContext, SpanRecord, Tracer, Value};

/// A request to a collector.
pub(super) fn request(
    tracer: &Tracer,
    service: &str,
    spans: Vec<SpanRecord>,
) -> pb::ExportTraceServiceRequest {
    let text = |text: &str| Any::StringValue(text.to_owned());
    let resource = pb::Resource {
        attributes: vec![
            pair("service.name", text(service)),
            pair("service.version", text(env!("CARGO_PKG_VERSION"))),
            pair("process.pid", Any::IntValue(std::process::id().into())),
            pair("telemetry.sdk.name", text("dormouse")),
            pair("telemetry.sdk.language", text("rust")),
        ],
    };
    pb::ExportTraceServiceRequest {
        resource_spans: vec![pb::ResourceSpans {
            resource: Some(resource),
            scope_spans: vec![pb::ScopeSpans {
                scope: Some(pb::InstrumentationScope {
                    name: "dormouse".to_owned(),
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                }),
                spans: spans.into_iter().map(|span| wire(tracer, span)).collect(),
            }],
        }],
    }
}

fn wire(tracer: &Tracer, span: SpanRecord) -> pb::Span {
    let (trace_id, span_id) = ids(span.context);
    let links = span.links.into_iter().map(|link| {
        let (trace_id, span_id) = ids(link);
        pb::span::Link { trace_id, span_id }
    });
    let status = span.error.map(|message| pb::Status {
        message,
        code: pb::status::StatusCode::Error.into(),
    });
    let attributes = span.attributes.into_iter().map(|(key, value)| {
        let value = match value {
            Value::Text(text) => Any::StringValue(text),
            Value::Word(word) => Any::StringValue(word.to_owned()),
            Value::Int(number) => Any::IntValue(number),
            Value::Float(number) => Any::DoubleValue(number),
            Value::Bool(flag) => Any::BoolValue(flag),
        };
        pair(key, value)
    });
    pb::Span {
        trace_id,
        span_id,
        trace_state: span.state,
        parent_span_id: span
            .parent
            .map_or_else(Vec::new, |parent| parent.0.to_be_bytes().to_vec()),
        name: span.name.into_owned(),
        kind: match span.kind {
            Kind::Server => pb::span::SpanKind::Server,
            Kind::Internal => pb::span::SpanKind::Internal,
        }
        .into(),
        start_time_unix_nano: tracer.unix_nanos(span.start),
        end_time_unix_nano: tracer.unix_nanos(span.end),
        attributes: attributes.collect(),
        links: links.collect(),
        status,
    }
}

fn ids(context: SpanContext) -> (Vec<u8>, Vec<u8>) {
    let trace = context.trace.0.to_be_bytes().to_vec();
    let span = context.span.0.to_be_bytes().to_vec();
    (trace, span)
}

fn pair(key: &str, value: Any) -> pb::KeyValue {
    pb::KeyValue {
        key: key.to_owned(),
        value: Some(pb::AnyValue { value: Some(value) }),
    }
}

//! A request's span: begun by a front end, told of its run by the unit, sent when the last of
//! them lets go of it.

use std::sync::Arc;
use std::time::Duration;

use dormouse_core::code::ErrorCode;
use dormouse_core::time::Timestamp;
use http::HeaderMap;
use parking_lot::Mutex;

use super::context::state_of_caller;
use super::{Kind, SpanContext, SpanId, SpanRecord, Tracer, Value};
use crate::error::ServeError;
use crate::stats::RunDurations;

/// A kind of failure in one word.
const fn label(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::InvalidRequest => "invalid_request",
        ErrorCode::NotFound => "not_found",
        ErrorCode::Unsupported => "unsupported",
        ErrorCode::Overloaded => "overloaded",
        ErrorCode::NeverFits => "never_fits",
        ErrorCode::DeadlineExceeded => "deadline_exceeded",
        ErrorCode::Unavailable => "unavailable",
        ErrorCode::Cancelled => "cancelled",
        ErrorCode::Internal => "internal",
    }
}

/// How a request came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Grpc,
    Http,
}

/// A request that is being recorded. Clones are the same span.
#[derive(Clone, Debug)]
pub struct RequestSpan {
    live: Arc<Live>,
}

#[derive(Debug)]
struct Live {
    tracer: Tracer,
    context: SpanContext,
    parent: Option<SpanId>,
    state: String,
    protocol: Protocol,
    received: Timestamp,
    facts: Mutex<Facts>,
}

#[derive(Debug, Default)]
struct Facts {
    model: String,
    version: String,
    id: String,
    ran: Option<Ran>,
    /// When it was answered, and the error's label and text if that was one.
    ended: Option<(Timestamp, Option<(&'static str, String)>)>,
}

/// What a run tells of a request in it.
#[derive(Clone, Copy, Debug)]
pub struct Ran {
    pub version: u64,
    /// The request's own.
    pub rows: u32,
    /// Of all requests that ran together.
    pub batch_rows: u32,
    pub queued: Duration,
    pub took: RunDurations,
    /// What it was woken from, if it had to be, and the span of that.
    pub woken: Option<(&'static str, Option<SpanContext>)>,
}

impl Tracer {
    /// A request that came with these headers, if it is to be recorded.
    pub fn request(
        &self,
        headers: &HeaderMap,
        received: Timestamp,
        protocol: Protocol,
    ) -> Option<RequestSpan> {
        let caller = SpanContext::of_caller(headers);
        let trace = caller.map_or_else(|| self.shared.ids.trace(), |caller| caller.trace);
        self.shared
            .sampler
            .wants(trace, caller)
            .then(|| RequestSpan {
                live: Arc::new(Live {
                    tracer: self.clone(),
                    context: SpanContext {
                        trace,
                        span: self.shared.ids.span(),
                        sampled: true,
                    },
                    parent: caller.map(|caller| caller.span),
                    state: caller.map_or_else(String::new, |_| state_of_caller(headers)),
                    protocol,
                    received,
                    facts: Mutex::default(),
                }),
            })
    }
}

impl RequestSpan {
    pub fn context(&self) -> SpanContext {
        self.live.context
    }

    /// What it asks for.
    pub fn asks(&self, model: &str, version: &str, id: &str) {
        // Names come from outside and may be megabytes long.
        let cut = |text: &str| text.chars().take(256).collect();
        let mut facts = self.live.facts.lock();
        facts.model = cut(model);
        facts.version = cut(version);
        facts.id = cut(id);
    }

    /// It was run.
    pub fn ran(&self, ran: Ran) {
        self.live.facts.lock().ran = Some(ran);
    }

    /// It was answered, or refused.
    pub fn ended(&self, error: Option<&ServeError>) {
        let error = error.map(|error| (label(error.code()), error.message().to_owned()));
        let now = self.live.tracer.now();
        self.live.facts.lock().ended.get_or_insert((now, error));
    }
}

impl RequestSpan {
    /// It was refused before anybody could be asked for it; nothing new for one that has ended.
    pub fn refused(&self, why: &str) {
        let error = (label(ErrorCode::InvalidRequest), why.to_owned());
        let now = self.live.tracer.now();
        self.live
            .facts
            .lock()
            .ended
            .get_or_insert((now, Some(error)));
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        let facts = std::mem::take(self.facts.get_mut());
        let given_up = || {
            (
                self.tracer.now(),
                Some(("cancelled", "given up".to_owned())),
            )
        };
        let (end, error) = facts.ended.unwrap_or_else(given_up);
        let protocol = match self.protocol {
            Protocol::Grpc => "grpc",
            Protocol::Http => "http",
        };
        let mut attributes = vec![
            ("dormouse.model", Value::Text(facts.model.clone())),
            ("network.protocol.name", Value::Word(protocol)),
        ];
        if !facts.id.is_empty() {
            attributes.push(("dormouse.request_id", Value::Text(facts.id)));
        }
        let mut links = Vec::new();
        match &facts.ran {
            None if facts.version.is_empty() => {}
            None => attributes.push(("dormouse.version", Value::Text(facts.version))),
            Some(ran) => {
                attributes.extend(ran.attributes());
                let load = ran.woken.and_then(|(_, load)| load);
                // Its own load is its child; somebody else's is only told of.
                links.extend(load.filter(|load| load.trace != self.context.trace));
            }
        }
        if let Some((label, _)) = &error {
            attributes.push(("error.type", Value::Word(label)));
        }
        let name = match facts.model.as_str() {
            "" => "infer".into(),
            model => format!("infer {model}").into(),
        };
        self.tracer.record(SpanRecord {
            context: self.context,
            parent: self.parent,
            state: std::mem::take(&mut self.state),
            name,
            kind: Kind::Server,
            start: self.received,
            end,
            attributes,
            links,
            error: error.map(|(_, message)| message),
        });
    }
}

impl Ran {
    fn attributes(&self) -> Vec<(&'static str, Value)> {
        let seconds = |span: Duration| Value::Float(span.as_secs_f64());
        let mut attributes = vec![
            ("dormouse.version", Value::Text(self.version.to_string())),
            ("dormouse.rows", Value::Int(self.rows.into())),
            ("dormouse.batch_rows", Value::Int(self.batch_rows.into())),
            ("dormouse.queue_seconds", seconds(self.queued)),
            (
                "dormouse.compute_input_seconds",
                seconds(self.took.compute_input),
            ),
            (
                "dormouse.compute_infer_seconds",
                seconds(self.took.compute_infer),
            ),
            (
                "dormouse.compute_output_seconds",
                seconds(self.took.compute_output),
            ),
            ("dormouse.cold", Value::Bool(self.woken.is_some())),
        ];
        if let Some((kind, _)) = self.woken {
            attributes.push(("dormouse.cold_start", Value::Word(kind)));
        }
        attributes
    }
}

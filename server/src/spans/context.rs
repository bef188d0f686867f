//! Who a span is and whose child, as W3C's Trace Context writes it.

use http::HeaderMap;

const PARENT: &str = "traceparent";
const STATE: &str = "tracestate";
/// Callers' state beyond this need not be passed on.
const MAX_STATE: usize = 512;

/// The number of a trace; never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceId(pub u128);

/// The number of a span; never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanId(pub u64);

/// A span as others refer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanContext {
    pub trace: TraceId,
    pub span: SpanId,
    /// Whether whoever made it records it.
    pub sampled: bool,
}

impl SpanContext {
    /// The caller's span. One that is written wrongly is none, as the standard wants it.
    pub fn of_caller(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(PARENT).iter();
        let value = values.next()?;
        // Two of them say nothing.
        values
            .next()
            .is_none()
            .then(|| Self::parse(value.as_bytes()))
            .flatten()
    }

    fn parse(value: &[u8]) -> Option<Self> {
        let value = std::str::from_utf8(value).ok()?;
        let mut parts = value.split('-');
        let version = hex(parts.next()?, 2)?;
        let trace = hex(parts.next()?, 32)?;
        let span = hex(parts.next()?, 16)?;
        let flags = hex(parts.next()?, 2)?;
        // Later versions may have more to say behind what this one knows.
        let complete = version != 0 || parts.next().is_none();
        (complete && version != 0xff && trace != 0 && span != 0).then_some(Self {
            trace: TraceId(trace),
            span: SpanId(span as u64),
            sampled: flags & 1 == 1,
        })
    }
}

/// The caller's `tracestate`, in one line.
pub(super) fn state_of_caller(headers: &HeaderMap) -> String {
    let values = headers.get_all(STATE).iter();
    let values: Vec<&str> = values.filter_map(|value| value.to_str().ok()).collect();
    let state = values.join(",");
    if state.len() > MAX_STATE {
        String::new()
    } else {
        state
    }
}

/// Exactly so many small hexadecimal digits.
fn hex(text: &str, digits: usize) -> Option<u128> {
    let right = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    (text.len() == digits && text.bytes().all(right))
        .then(|| u128::from_str_radix(text, 16).ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const SPAN: &str = "00f067aa0ba902b7";

    #[test]
    fn callers_spans_are_read() {
        for (flags, sampled) in [("01", true), ("00", false), ("03", true)] {
            let value = format!("00-{TRACE}-{SPAN}-{flags}");
            let context = SpanContext::parse(value.as_bytes()).unwrap();
            assert_eq!(context.trace.0, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
            assert_eq!(context.span.0, 0x00f0_67aa_0ba9_02b7);
            assert_eq!(context.sampled, sampled);
        }
        let later = format!("01-{TRACE}-{SPAN}-01-more");
        assert!(SpanContext::parse(later.as_bytes()).is_some());
    }

    #[test]
    fn what_is_written_wrongly_is_no_span() {
        let zeros = "0".repeat(32);
        for value in [
            String::new(),
            "00".to_owned(),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("00-{zeros}-{SPAN}-01"),
            format!("00-{TRACE}-0000000000000000-01"),
            format!("00-{TRACE}-{SPAN}-01-more"),
            format!("00-{TRACE}-{SPAN}"),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-{}-{SPAN}-01", &TRACE[1..]),
            format!("00-{TRACE}-{SPAN}-1"),
            format!("00-{TRACE}-+0f067aa0ba902b7-01"),
        ] {
            assert_eq!(SpanContext::parse(value.as_bytes()), None, "{value}");
        }
    }

    #[test]
    fn two_callers_are_none() {
        let mut headers = HeaderMap::new();
        let value = format!("00-{TRACE}-{SPAN}-01");
        headers.append(PARENT, value.parse().unwrap());
        assert!(SpanContext::of_caller(&headers).is_some());
        headers.append(PARENT, value.parse().unwrap());
        assert!(SpanContext::of_caller(&headers).is_none());
        headers.append(STATE, "a=1".parse().unwrap());
        headers.append(STATE, "b=2".parse().unwrap());
        assert_eq!(state_of_caller(&headers), "a=1,b=2");
    }
}

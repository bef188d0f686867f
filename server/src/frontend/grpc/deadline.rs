//! The one deadline of a call: the earlier of `grpc-timeout` and the `timeout` parameter.

use std::time::Duration;

use dormouse_core::time::Timestamp;
use http::HeaderMap;

use crate::error::ServeError;

const HEADER: &str = "grpc-timeout";

/// When a call came and until when its client waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallTime {
    pub(super) received: Timestamp,
    pub(super) deadline: Option<Timestamp>,
}

impl CallTime {
    /// Narrows the deadline to `timeout` after the request was seen.
    pub(super) fn within(self, timeout: Option<Duration>) -> Option<Timestamp> {
        let own = timeout.map(|timeout| self.received + timeout);
        match (self.deadline, own) {
            (Some(call), Some(own)) => Some(call.min(own)),
            (call, own) => call.or(own),
        }
    }
}

/// The time that the client gives the call, none when it sets no limit.
pub(super) fn grpc_timeout(headers: &HeaderMap) -> Result<Option<Duration>, ServeError> {
    let Some(value) = headers.get(HEADER) else {
        return Ok(None);
    };
    parse(value.as_bytes()).map(Some).ok_or_else(|| {
        let shown: String = String::from_utf8_lossy(value.as_bytes())
            .chars()
            .take(16)
            .collect();
        ServeError::invalid(format!(
            "unexpected grpc-timeout '{shown}': expected 1 to 8 digits and a unit (H, M, S, m, u, n)"
        ))
    })
}

/// At most 8 digits and one unit: nothing here can overflow.
fn parse(value: &[u8]) -> Option<Duration> {
    let (unit, digits) = value.split_last()?;
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number = digits
        .iter()
        .fold(0u64, |number, digit| number * 10 + u64::from(digit - b'0'));
    Some(match unit {
        b'H' => Duration::from_secs(number * 3600),
        b'M' => Duration::from_secs(number * 60),
        b'S' => Duration::from_secs(number),
        b'm' => Duration::from_millis(number),
        b'u' => Duration::from_micros(number),
        b'n' => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_the_grpc_protocol_writes_them() {
        let table = [
            ("1H", Some(Duration::from_secs(3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("3S", Some(Duration::from_secs(3))),
            ("4m", Some(Duration::from_millis(4))),
            ("5u", Some(Duration::from_micros(5))),
            ("6n", Some(Duration::from_nanos(6))),
            ("0n", Some(Duration::ZERO)),
            ("00000001S", Some(Duration::from_secs(1))),
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3600))),
            ("100000000n", None),
            ("", None),
            ("S", None),
            ("1", None),
            ("1s", None),
            ("-1S", None),
            ("+1S", None),
            ("1.5S", None),
            (" 1S", None),
            ("1 S", None),
            ("1SS", None),
            ("٣S", None),
        ];
        for (text, expected) in table {
            assert_eq!(parse(text.as_bytes()), expected, "{text:?}");
        }
    }

    #[test]
    fn a_wrong_timeout_is_refused_by_its_text() {
        let mut headers = HeaderMap::new();
        assert_eq!(grpc_timeout(&headers).unwrap(), None);
        headers.insert(HEADER, "soon".parse().unwrap());
        let error = grpc_timeout(&headers).unwrap_err();
        assert!(error.message().contains("'soon'"), "{error}");
    }

    #[test]
    fn the_earlier_limit_is_the_deadline() {
        let time = |deadline| CallTime {
            received: Timestamp::from_nanos(1_000),
            deadline,
        };
        let at = Timestamp::from_nanos;
        let nanos = |nanos| Some(Duration::from_nanos(nanos));
        assert_eq!(time(None).within(None), None);
        assert_eq!(time(None).within(nanos(5)), Some(at(1_005)));
        assert_eq!(time(Some(at(1_003))).within(nanos(5)), Some(at(1_003)));
        assert_eq!(time(Some(at(1_009))).within(nanos(5)), Some(at(1_005)));
        assert_eq!(time(Some(at(1_009))).within(None), Some(at(1_009)));
    }
}

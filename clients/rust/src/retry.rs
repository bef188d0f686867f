//! When a refused call is tried again.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

use prost::Message;
use tonic::{Code, Status};

/// When a call that was refused (UNAVAILABLE, RESOURCE_EXHAUSTED) is tried again.
///
/// Waits grow by half-random doubling, unless the server says when trying again makes sense; a
/// wait never goes past the call's deadline. Requests that belong to a sequence and streams are
/// never sent twice.
///
/// ```no_run
/// use std::time::Duration;
/// use dormouse_client::{Client, RetryPolicy};
///
/// # async fn example() -> Result<(), dormouse_client::ClientError> {
/// let client = Client::builder("http://127.0.0.1:8001")
///     .retry(RetryPolicy { attempts: 8, longest_wait: Duration::from_secs(5), ..RetryPolicy::default() })
///     .connect()
///     .await?;
/// # drop(client);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetryPolicy {
    /// How often a call is sent at most, the first time included; 1 turns retries off.
    pub attempts: u32,
    /// The wait before the second attempt; doubled for each one after it.
    pub first_wait: Duration,
    /// No wait is longer; a server that asks for more gets no further attempt.
    pub longest_wait: Duration,
}

impl Default for RetryPolicy {
    /// Four attempts, waiting 50 ms before the second and at most 10 s.
    fn default() -> Self {
        Self {
            attempts: 4,
            first_wait: Duration::from_millis(50),
            longest_wait: Duration::from_secs(10),
        }
    }
}

impl RetryPolicy {
    /// Every call is sent once.
    pub const NEVER: Self = Self {
        attempts: 1,
        first_wait: Duration::ZERO,
        longest_wait: Duration::ZERO,
    };

    /// How long to wait after `attempt` (from 1) failed like this; none when that was the last.
    pub(crate) fn wait_after(
        &self,
        attempt: u32,
        status: &Status,
        random: f64,
    ) -> Option<Duration> {
        if attempt >= self.attempts
            || !matches!(status.code(), Code::Unavailable | Code::ResourceExhausted)
        {
            return None;
        }
        match retry_hint(status) {
            Hint::Never => None,
            // Spread after the hinted time, never before it: everybody was told the same.
            Hint::After(wait) if wait <= self.longest_wait => {
                Some(wait.mul_f64(1.0 + random / 10.0))
            }
            Hint::After(_) => None,
            Hint::Unknown => {
                let doubled = self
                    .first_wait
                    .saturating_mul(1u32.checked_shl(attempt - 1).unwrap_or(u32::MAX));
                Some(doubled.min(self.longest_wait).mul_f64(0.5 + random / 2.0))
            }
        }
    }
}

/// A number in 0..1, different in every call and process.
pub(crate) fn random_fraction() -> f64 {
    let bits = RandomState::new().build_hasher().finish();
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// What the server says about trying again.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Hint {
    Unknown,
    After(Duration),
    Never,
}

/// When the server says that trying again makes sense.
pub(crate) fn retry_after(status: &Status) -> Option<Duration> {
    match retry_hint(status) {
        Hint::After(wait) => Some(wait),
        Hint::Unknown | Hint::Never => None,
    }
}

fn retry_hint(status: &Status) -> Hint {
    if let Some(wait) = retry_info(status.details()) {
        return Hint::After(wait);
    }
    // gRPC's own push-back: a negative or unreadable number forbids trying again.
    match status.metadata().get("grpc-retry-pushback-ms") {
        None => Hint::Unknown,
        Some(value) => match value.to_str().ok().and_then(|text| text.parse().ok()) {
            Some(millis) => Hint::After(Duration::from_millis(millis)),
            None => Hint::Never,
        },
    }
}

/// The delay of the `google.rpc.RetryInfo` among the details of a status.
fn retry_info(details: &[u8]) -> Option<Duration> {
    let status = RpcStatus::decode(details).ok()?;
    status
        .details
        .iter()
        .filter(|detail| detail.type_url.ends_with("/google.rpc.RetryInfo"))
        .find_map(|detail| {
            let delay = RetryInfo::decode(detail.value.as_slice()).ok()?.delay?;
            let seconds = Duration::from_secs(delay.seconds.try_into().ok()?);
            Some(seconds + Duration::from_nanos(delay.nanos.try_into().ok()?))
        })
}

/// `google.rpc.Status`, as far as it is needed.
#[derive(Clone, PartialEq, prost::Message)]
struct RpcStatus {
    #[prost(message, repeated, tag = "3")]
    details: Vec<Detail>,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, prost::Message)]
struct Detail {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// `google.rpc.RetryInfo`.
#[derive(Clone, Copy, PartialEq, prost::Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    delay: Option<Delay>,
}

/// `google.protobuf.Duration`.
#[derive(Clone, Copy, PartialEq, prost::Message)]
struct Delay {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hinted(seconds: i64, nanos: i32) -> Status {
        let delay = Some(Delay { seconds, nanos });
        let details = RpcStatus {
            details: vec![
                Detail {
                    type_url: "type.googleapis.com/google.rpc.DebugInfo".to_owned(),
                    value: vec![1, 2, 3],
                },
                Detail {
                    type_url: "type.googleapis.com/google.rpc.RetryInfo".to_owned(),
                    value: RetryInfo { delay }.encode_to_vec(),
                },
            ],
        };
        Status::with_details(Code::Unavailable, "busy", details.encode_to_vec().into())
    }

    #[test]
    fn the_servers_delay_is_waited_out_and_spread_after_it() {
        let policy = RetryPolicy::default();
        let status = hinted(2, 500_000_000);
        assert_eq!(retry_after(&status), Some(Duration::from_millis(2500)));
        let least = policy.wait_after(1, &status, 0.0);
        let most = policy.wait_after(1, &status, 0.999);
        assert_eq!(least, Some(Duration::from_millis(2500)));
        assert!(most > least && most <= Some(Duration::from_millis(2750)));
        assert_eq!(policy.wait_after(1, &hinted(11, 0), 0.0), None);
        assert_eq!(retry_after(&hinted(-1, 0)), None);
    }

    #[test]
    fn waits_double_up_to_the_longest() {
        let policy = RetryPolicy {
            attempts: u32::MAX,
            ..RetryPolicy::default()
        };
        let status = Status::unavailable("");
        let waits: Vec<_> = (1..4)
            .filter_map(|attempt| policy.wait_after(attempt, &status, 1.0))
            .collect();
        assert_eq!(waits, [50, 100, 200].map(Duration::from_millis));
        let half = policy.wait_after(1, &status, 0.0);
        assert_eq!(half, Some(Duration::from_millis(25)));
        for attempt in [20, 40, 4_000_000] {
            let wait = policy.wait_after(attempt, &status, 1.0);
            assert_eq!(wait, Some(policy.longest_wait));
        }
    }

    #[test]
    fn only_refusals_are_tried_again_and_only_so_often() {
        let policy = RetryPolicy::default();
        for code in [Code::Unavailable, Code::ResourceExhausted] {
            assert!(policy.wait_after(3, &Status::new(code, ""), 0.5).is_some());
            assert!(policy.wait_after(4, &Status::new(code, ""), 0.5).is_none());
        }
        for code in [
            Code::Internal,
            Code::DeadlineExceeded,
            Code::InvalidArgument,
        ] {
            assert!(policy.wait_after(1, &Status::new(code, ""), 0.5).is_none());
        }
        let never = RetryPolicy::NEVER.wait_after(1, &Status::unavailable(""), 0.5);
        assert_eq!(never, None);
    }

    #[test]
    fn push_back_metadata_is_obeyed() {
        let mut status = Status::unavailable("");
        let waits = |status: &Status| RetryPolicy::default().wait_after(1, status, 0.0);
        status
            .metadata_mut()
            .insert("grpc-retry-pushback-ms", "70".parse().unwrap());
        assert_eq!(waits(&status), Some(Duration::from_millis(70)));
        status
            .metadata_mut()
            .insert("grpc-retry-pushback-ms", "-1".parse().unwrap());
        assert_eq!(waits(&status), None);
    }

    #[test]
    fn details_that_are_no_status_say_nothing() {
        let status = Status::with_details(Code::Unavailable, "", vec![0xff; 9].into());
        assert_eq!(retry_after(&status), None);
    }
}

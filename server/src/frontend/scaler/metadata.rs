//! A trigger's metadata, checked once.

use std::collections::HashMap;
use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use dormouse_proto::externalscaler as pb;
use tonic::Status;

use crate::activity::LONGEST_WINDOW;
use crate::config::parse_span;

const KEYS: [&str; 6] = [
    "model",
    "version",
    "metric",
    "target",
    "idleAfter",
    "rateWindow",
];
const SHORTEST_WINDOW: Duration = Duration::from_secs(4);
const DEFAULT_WINDOW: Duration = Duration::from_secs(60);
const DEFAULT_TARGET: f64 = 10.0;
const MAX_TARGET: f64 = 1e12;
const MAX_IDLE_AFTER: Duration = Duration::from_secs(30 * 24 * 3600);

/// What a trigger scales by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Metric {
    /// Requests that wait or run.
    Pending,
    /// Requests that wait.
    Queued,
    /// Requests that run.
    InFlight,
    /// Requests per second.
    Rate,
}

impl Metric {
    const ALL: [Self; 4] = [Self::Pending, Self::Queued, Self::InFlight, Self::Rate];

    const fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Queued => "queued",
            Self::InFlight => "inflight",
            Self::Rate => "rate",
        }
    }
}

impl FromStr for Metric {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|metric| metric.name() == text);
        found.ok_or_else(|| "expected pending, queued, inflight or rate".to_owned())
    }
}

/// A trigger of a ScaledObject.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Trigger {
    /// Empty for the whole server.
    pub(super) model: String,
    /// Empty for all versions.
    pub(super) version: String,
    pub(super) metric: Metric,
    /// How much of the metric one replica is to get.
    pub(super) target: f64,
    /// How long after its last request a model still counts as active.
    pub(super) idle_after: Duration,
    pub(super) rate_window: Duration,
}

impl Trigger {
    /// Reads the keys that are ours. KEDA puts its own beside them (`scalerAddress`, TLS), so an
    /// unknown one is refused only when it looks like one of ours with a slip of the pen.
    pub(super) fn parse(
        metadata: &HashMap<String, String>,
        idle_after: Duration,
    ) -> Result<Self, Status> {
        for key in metadata.keys() {
            let similar = |known: &&str| {
                key.len().abs_diff(known.len()) <= 2 && strsim::levenshtein(key, known) <= 2
            };
            if !KEYS.contains(&key.as_str())
                && let Some(known) = KEYS.iter().find(|known| similar(known))
            {
                return Err(invalid(
                    key,
                    &format!("unknown key: did you mean '{known}'?"),
                ));
            }
        }
        let model = metadata.get("model").cloned().unwrap_or_default();
        let version = metadata.get("version").cloned().unwrap_or_default();
        if model.is_empty() && metadata.contains_key("model") {
            return Err(invalid(
                "model",
                &"is empty: name a model, or leave the key out for the whole server",
            ));
        }
        if !version.is_empty() {
            if model.is_empty() {
                return Err(invalid("version", &"needs the key 'model' beside it"));
            }
            let number: Result<u64, _> = version.parse();
            if number.is_err() {
                return Err(invalid("version", &"expected a whole number"));
            }
        }
        let trigger = Self {
            model,
            version,
            metric: value(metadata, "metric")?.unwrap_or(Metric::Pending),
            target: value(metadata, "target")?.unwrap_or(DEFAULT_TARGET),
            idle_after: span(metadata, "idleAfter")?.unwrap_or(idle_after),
            rate_window: span(metadata, "rateWindow")?.unwrap_or(DEFAULT_WINDOW),
        };
        if !(trigger.target > 0.0 && trigger.target <= MAX_TARGET) {
            return Err(invalid("target", &"expected a number above 0"));
        }
        if trigger.idle_after > MAX_IDLE_AFTER {
            return Err(invalid("idleAfter", &"expected at most 30 days"));
        }
        if !(SHORTEST_WINDOW..=LONGEST_WINDOW).contains(&trigger.rate_window) {
            return Err(invalid("rateWindow", &"expected 4s to 64s"));
        }
        Ok(trigger)
    }

    /// The metric's name: what a URL's path and KEDA's index in front of it allow.
    pub(super) fn metric_name(&self) -> String {
        let mut name = format!("dormouse-{}", self.metric.name());
        if !self.model.is_empty() {
            name.push('-');
            name.extend(self.model.chars().take(100).map(|letter| match letter {
                'a'..='z' | '0'..='9' => letter,
                'A'..='Z' => letter.to_ascii_lowercase(),
                _ => '-',
            }));
        }
        if !self.version.is_empty() {
            name.push_str("-v");
            name.push_str(&self.version);
        }
        name
    }

    pub(super) fn spec(&self) -> pb::GetMetricSpecResponse {
        pb::GetMetricSpecResponse {
            metric_specs: vec![pb::MetricSpec {
                metric_name: self.metric_name(),
                target_size: self.target.ceil() as i64,
                target_size_float: self.target,
            }],
        }
    }
}

fn value<T>(metadata: &HashMap<String, String>, key: &str) -> Result<Option<T>, Status>
where
    T: FromStr,
    T::Err: Display,
{
    let text = metadata.get(key);
    text.map(|text| {
        text.parse()
            .map_err(|error: T::Err| wrong(key, text, &error))
    })
    .transpose()
}

fn span(metadata: &HashMap<String, String>, key: &str) -> Result<Option<Duration>, Status> {
    let text = metadata.get(key);
    text.map(|text| parse_span(text).map_err(|error| wrong(key, text, &error)))
        .transpose()
}

fn wrong(key: &str, text: &str, why: &dyn Display) -> Status {
    let shown: String = text.chars().take(64).collect();
    invalid(key, &format!("'{}': {why}", shown.escape_debug()))
}

/// The refusal of a trigger, with the key at fault.
pub(super) fn invalid(key: &str, why: &dyn Display) -> Status {
    let key: String = key.chars().take(64).collect();
    Status::invalid_argument(format!("scalerMetadata.{}: {why}", key.escape_debug()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Duration = Duration::from_secs(60);

    fn parse(pairs: &[(&str, &str)]) -> Result<Trigger, String> {
        let metadata = pairs
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect();
        Trigger::parse(&metadata, IDLE).map_err(|status| {
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            status.message().to_owned()
        })
    }

    #[test]
    fn no_metadata_means_the_whole_server() {
        let trigger = parse(&[("scalerAddress", "dormouse:8001"), ("enableTLS", "false")]).unwrap();
        assert_eq!(trigger.model, "");
        assert_eq!(trigger.metric, Metric::Pending);
        assert_eq!(trigger.idle_after, IDLE);
        assert_eq!(trigger.metric_name(), "dormouse-pending");
    }

    #[test]
    fn every_key_is_read() {
        let trigger = parse(&[
            ("model", "Text_Encoder.v2"),
            ("version", "3"),
            ("metric", "rate"),
            ("target", "2.5"),
            ("idleAfter", "5m"),
            ("rateWindow", "20s"),
        ])
        .unwrap();
        assert_eq!(trigger.metric_name(), "dormouse-rate-text-encoder-v2-v3");
        assert_eq!(trigger.idle_after, Duration::from_secs(300));
        assert_eq!(trigger.rate_window, Duration::from_secs(20));
        let spec = &trigger.spec().metric_specs[0];
        assert_eq!((spec.target_size, spec.target_size_float), (3, 2.5));
    }

    #[test]
    fn wrong_metadata_is_refused_with_its_key() {
        for (pairs, expected) in [
            (
                vec![("metric", "tokens")],
                "scalerMetadata.metric: 'tokens': expected pending",
            ),
            (
                vec![("target", "0")],
                "scalerMetadata.target: expected a number above 0",
            ),
            (
                vec![("target", "NaN")],
                "scalerMetadata.target: expected a number above 0",
            ),
            (vec![("target", "many")], "scalerMetadata.target: 'many'"),
            (vec![("idleAfter", "60")], "scalerMetadata.idleAfter: '60'"),
            (
                vec![("idleAfter", "99999d")],
                "scalerMetadata.idleAfter: expected at most",
            ),
            (
                vec![("rateWindow", "1s")],
                "scalerMetadata.rateWindow: expected 4s",
            ),
            (vec![("model", "")], "scalerMetadata.model: is empty"),
            (vec![("version", "1")], "scalerMetadata.version: needs"),
            (
                vec![("model", "m"), ("version", "x")],
                "scalerMetadata.version: expected",
            ),
            (
                vec![("modle", "m")],
                "scalerMetadata.modle: unknown key: did you mean 'model'?",
            ),
            (vec![("idleafter", "1s")], "did you mean 'idleAfter'?"),
        ] {
            let refused = parse(&pairs).unwrap_err();
            assert!(refused.contains(expected), "{pairs:?}: {refused}");
        }
    }
}

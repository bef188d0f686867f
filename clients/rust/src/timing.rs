//! What waking a model took, as told by the `server-timing` metadata and by statistics.

use std::time::{Duration, SystemTime};

use crate::pb;

/// What waking a model took.
///
/// ```
/// use dormouse_client::ColdStart;
///
/// let cold = ColdStart::parse("load;dur=12.5, read;dur=1.25, session;dur=9").unwrap();
/// assert_eq!(cold.total.as_micros(), 12_500);
/// assert_eq!(cold.stages[0].name, "read");
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct ColdStart {
    /// What the model was woken from: `source`, `prepared` or `parked`; empty when not told.
    pub kind: String,
    /// No request waited for it: it was loaded by hand or ahead of an expected request.
    pub ahead: bool,
    /// When it began, where the server tells.
    pub started: Option<SystemTime>,
    /// From the start of the load until the model could run; stages may overlap, and those in the
    /// background may end later.
    pub total: Duration,
    /// The time that doing stages side by side saved.
    pub overlap: Duration,
    /// The stages in the order they started.
    pub stages: Vec<Stage>,
    /// What the request that was told of this spent; none in statistics.
    pub request: Option<RequestTiming>,
}

/// One stage of a cold start.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Stage {
    /// A short word: `queue`, `read`, `populate`, `session`, `warmup`, `first-run`.
    pub name: String,
    /// Two stages on one lane never overlap.
    pub lane: u32,
    /// From the start of the load, where the server tells.
    pub start: Option<Duration>,
    /// How long it took, or has taken so far.
    pub duration: Duration,
    /// Bytes it moved, 0 when the server does not tell.
    pub bytes: u64,
    /// Whether it had not ended when the server told of it.
    pub running: bool,
}

/// What a request that found its model asleep spent its time on, as the server saw it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct RequestTiming {
    /// From its arrival to the start of its run.
    pub waited: Duration,
    /// The run that answered it.
    pub run: Duration,
    /// From its arrival to its answer.
    pub total: Duration,
}

/// The latest cold starts of one version of a model.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct VersionColdStarts {
    /// The model's name.
    pub model: String,
    /// The version's number.
    pub version: String,
    /// Whether it has answered anything since the server started.
    pub has_run: bool,
    /// The latest last; empty when it was never woken or the server does not tell.
    pub cold_starts: Vec<ColdStart>,
}

impl ColdStart {
    /// Bytes moved by all stages.
    pub fn bytes(&self) -> u64 {
        let bytes = self.stages.iter().map(|stage| stage.bytes);
        bytes.fold(0, u64::saturating_add)
    }

    /// Reads a `Server-Timing` value; none when it has no `load` entry with a duration, which is
    /// to say that the model was warm. Entries without a duration are left out.
    pub fn parse(value: &str) -> Option<Self> {
        let mut cold = Self::default();
        let mut total = None;
        for entry in split_unquoted(value, ',') {
            let mut parts = split_unquoted(entry, ';').into_iter();
            let name = parts.next().unwrap_or_default().trim();
            let params = Params::read(parts);
            let Some(duration) = params.duration else {
                continue;
            };
            match name {
                "" => {}
                "load" => {
                    total = Some(duration);
                    cold.overlap = params.overlap.unwrap_or_default();
                    cold.kind = params.description;
                }
                "wait" => cold.request.get_or_insert_default().waited = duration,
                "run" => cold.request.get_or_insert_default().run = duration,
                "total" => cold.request.get_or_insert_default().total = duration,
                name => cold.stages.push(Stage {
                    name: name.to_owned(),
                    start: params.start,
                    duration,
                    bytes: params.bytes,
                    ..Stage::default()
                }),
            }
        }
        cold.total = total?;
        Some(cold)
    }
}

impl From<pb::ColdStart> for ColdStart {
    fn from(told: pb::ColdStart) -> Self {
        let stage = |stage: pb::cold_start::Stage| Stage {
            name: stage.name,
            lane: stage.lane,
            start: Some(Duration::from_nanos(stage.start_ns)),
            duration: Duration::from_nanos(stage.duration_ns),
            bytes: stage.bytes,
            running: stage.running,
        };
        let started = Duration::from_nanos(told.started_unix_ns);
        Self {
            kind: told.kind,
            ahead: told.ahead,
            started: SystemTime::UNIX_EPOCH.checked_add(started),
            total: Duration::from_nanos(told.total_ns),
            overlap: Duration::from_nanos(told.overlap_ns),
            stages: told.stages.into_iter().map(stage).collect(),
            request: None,
        }
    }
}

impl From<pb::ModelStatistics> for VersionColdStarts {
    fn from(told: pb::ModelStatistics) -> Self {
        Self {
            model: told.name,
            version: told.version,
            has_run: told.execution_count > 0,
            cold_starts: told.cold_starts.into_iter().map(Into::into).collect(),
        }
    }
}

/// The parameters of an entry that mean something here.
#[derive(Debug, Default)]
struct Params {
    duration: Option<Duration>,
    start: Option<Duration>,
    overlap: Option<Duration>,
    bytes: u64,
    description: String,
}

impl Params {
    fn read<'a>(parts: impl Iterator<Item = &'a str>) -> Self {
        let mut read = Self::default();
        for part in parts {
            let Some((key, value)) = part.split_once('=') else {
                continue;
            };
            let value = value.trim().trim_matches('"');
            match key.trim().to_ascii_lowercase().as_str() {
                "dur" => read.duration = milliseconds(value),
                "start" => read.start = milliseconds(value),
                "overlap" => read.overlap = milliseconds(value),
                "bytes" => read.bytes = value.parse().unwrap_or(0),
                "desc" => value.clone_into(&mut read.description),
                _ => {}
            }
        }
        read
    }
}

fn milliseconds(text: &str) -> Option<Duration> {
    let value: f64 = text.parse().ok()?;
    Duration::try_from_secs_f64(value / 1e3).ok()
}

/// Splits where the separator is not inside a quoted string.
fn split_unquoted(text: &str, separator: char) -> Vec<&str> {
    let mut quoted = false;
    let mut escaped = false;
    text.split(|character| {
        let splits = character == separator && !quoted;
        match character {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            _ => {}
        }
        splits
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_keep_their_order_and_their_starts() {
        let cold = ColdStart::parse("load;dur=30, read;dur=1.5;start=0, session;start=1;dur=20");
        let cold = cold.unwrap();
        assert_eq!(cold.total, Duration::from_millis(30));
        let names: Vec<_> = cold.stages.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["read", "session"]);
        assert_eq!(cold.stages[0].start, Some(Duration::ZERO));
        assert_eq!(cold.stages[1].start, Some(Duration::from_millis(1)));
        assert_eq!(cold.request, None);
    }

    #[test]
    fn the_request_is_told_apart_from_the_load() {
        let cold = ColdStart::parse(
            "load;dur=30;desc=prepared;overlap=2, populate;dur=1;bytes=4096, wait;dur=31, run;dur=4, total;dur=35",
        );
        let cold = cold.unwrap();
        assert_eq!(cold.kind, "prepared");
        assert_eq!(cold.overlap, Duration::from_millis(2));
        assert_eq!(cold.bytes(), 4096);
        assert_eq!(cold.stages.len(), 1);
        let request = cold.request.unwrap();
        let parts = [request.waited, request.run, request.total];
        assert_eq!(parts, [31, 4, 35].map(Duration::from_millis));
    }

    #[test]
    fn what_is_not_a_load_is_not_a_cold_start() {
        for value in [
            "",
            ",,;",
            "cache;dur=3",
            "load",
            "load;dur=x",
            "load;dur=-1",
            "load;dur=NaN",
            "total;dur=3, run;dur=1",
        ] {
            assert_eq!(ColdStart::parse(value), None, "{value:?}");
        }
    }

    #[test]
    fn quoted_descriptions_are_skipped_whole() {
        let cold = ColdStart::parse(r#"read;desc="a, b;dur=9 \" c";dur=2, load;dur=3"#).unwrap();
        assert_eq!(cold.stages.len(), 1);
        assert_eq!(cold.stages[0].duration, Duration::from_millis(2));
    }

    #[test]
    fn statistics_tell_when_and_how() {
        let told = pb::ModelStatistics {
            version: "3".to_owned(),
            cold_starts: vec![pb::ColdStart {
                kind: "parked".to_owned(),
                started_unix_ns: 1_000,
                total_ns: 7,
                stages: vec![pb::cold_start::Stage {
                    name: "populate".to_owned(),
                    lane: 2,
                    start_ns: 1,
                    duration_ns: u64::MAX,
                    bytes: 9,
                    running: true,
                }],
                ..Default::default()
            }],
            ..Default::default()
        };
        let told = VersionColdStarts::from(told);
        assert_eq!((told.version.as_str(), told.has_run), ("3", false));
        let [cold] = &told.cold_starts[..] else {
            panic!("one cold start");
        };
        assert_eq!(cold.kind, "parked");
        let micro = SystemTime::UNIX_EPOCH + Duration::from_micros(1);
        assert_eq!(cold.started, Some(micro));
        let stage = &cold.stages[0];
        assert_eq!((stage.lane, stage.bytes, stage.running), (2, 9, true));
    }
}

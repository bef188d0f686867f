//! What waking a model took, as told by the `server-timing` metadata.

use std::time::Duration;

/// What a request that found its model asleep spent on waking it.
///
/// ```
/// use dormouse_client::ColdStart;
///
/// let cold = ColdStart::parse("load;dur=12.5, read;dur=1.25, session;dur=9").unwrap();
/// assert_eq!(cold.total.as_micros(), 12_500);
/// assert_eq!(cold.stages[0].name, "read");
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ColdStart {
    /// From the start of the load to the first run; stages may overlap.
    pub total: Duration,
    /// The stages in the order they started.
    pub stages: Vec<Stage>,
}

/// One stage of a cold start.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Stage {
    /// A short word: `read`, `environment`, `session`, `warmup`.
    pub name: String,
    /// From the start of the load, where the server tells.
    pub start: Option<Duration>,
    /// How long it took.
    pub duration: Duration,
}

impl ColdStart {
    /// Reads a `Server-Timing` value; none when it has no `load` entry with a duration, which is
    /// to say that the model was warm. Entries without a duration are left out.
    pub fn parse(value: &str) -> Option<Self> {
        let mut total = None;
        let mut stages = Vec::new();
        for entry in split_unquoted(value, ',') {
            let mut parts = split_unquoted(entry, ';').into_iter();
            let name = parts.next().unwrap_or_default().trim();
            let mut start = None;
            let mut duration = None;
            for part in parts {
                let Some((key, number)) = part.split_once('=') else {
                    continue;
                };
                let slot = match key.trim() {
                    key if key.eq_ignore_ascii_case("dur") => &mut duration,
                    key if key.eq_ignore_ascii_case("start") => &mut start,
                    _ => continue,
                };
                *slot = milliseconds(number);
            }
            let Some(duration) = duration else { continue };
            if name == "load" {
                total = Some(duration);
            } else if !name.is_empty() {
                stages.push(Stage {
                    name: name.to_owned(),
                    start,
                    duration,
                });
            }
        }
        total.map(|total| Self { total, stages })
    }
}

fn milliseconds(text: &str) -> Option<Duration> {
    let value: f64 = text.trim().trim_matches('"').parse().ok()?;
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
}

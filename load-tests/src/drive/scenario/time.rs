//! Durations as people write them: `"250ms"`, `"1m 30s"`.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer, de};

pub(crate) fn serialize<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_duration(*time))
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(input)?;
    humantime::parse_duration(&text)
        .map_err(|error| de::Error::custom(format!("{text:?} is not a duration: {error}")))
}

/// The same for one that may be absent.
pub(crate) mod optional {
    use super::{Deserializer, Duration, Serializer};

    pub(crate) fn serialize<S: Serializer>(
        time: &Option<Duration>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match time {
            Some(time) => super::serialize(time, serializer),
            None => serializer.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        input: D,
    ) -> Result<Option<Duration>, D::Error> {
        super::deserialize(input).map(Some)
    }
}

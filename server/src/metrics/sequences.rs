//! How many sequences a model version has: series that exist once it had one.

use dormouse_core::id::ModelId;
use dormouse_core::sequence::SequenceCounts;
use metrics::{Counter, Gauge, Key, KeyName, Label, Recorder};
use metrics_exporter_prometheus::PrometheusRecorder;

use super::{METADATA, Metrics};

const OPEN: &str = "dormouse_sequences_open";
const WAITING: &str = "dormouse_sequences_waiting";
const EXPIRED: &str = "dormouse_sequences_expired_total";

/// Tells of one unit's sequences. Units of the same model version add up: the old one of a reload
/// may still have some.
#[derive(Debug)]
pub struct SequenceMeter {
    metrics: Metrics,
    id: ModelId,
    series: Option<Series>,
    told: SequenceCounts,
}

#[derive(Debug)]
struct Series {
    open: Gauge,
    waiting: Gauge,
    expired: Counter,
}

impl SequenceMeter {
    pub fn new(metrics: Metrics, id: ModelId) -> Self {
        Self {
            metrics,
            id,
            series: None,
            told: SequenceCounts::default(),
        }
    }

    /// Brings the series to what there is now.
    pub fn tell(&mut self, now: SequenceCounts) {
        let before = std::mem::replace(&mut self.told, now);
        if before == now {
            return;
        }
        let series = self
            .series
            .get_or_insert_with(|| Series::of(&self.metrics, &self.id));
        series.open.increment(now.open as f64 - before.open as f64);
        let waiting = now.waiting as f64 - before.waiting as f64;
        series.waiting.increment(waiting);
        let expired = now.expired.saturating_sub(before.expired);
        series.expired.increment(expired);
    }
}

impl Drop for SequenceMeter {
    fn drop(&mut self) {
        let expired = self.told.expired;
        self.tell(SequenceCounts {
            expired,
            ..SequenceCounts::default()
        });
    }
}

impl Series {
    fn of(metrics: &Metrics, id: &ModelId) -> Self {
        let key = |name: &'static str| {
            let labels = vec![
                Label::new("model", id.name.to_string()),
                Label::new("version", id.version.to_string()),
            ];
            Key::from_parts(name, labels)
        };
        let gauge = |name| metrics.recorder.register_gauge(&key(name), &METADATA);
        Self {
            open: gauge(OPEN),
            waiting: gauge(WAITING),
            expired: metrics.recorder.register_counter(&key(EXPIRED), &METADATA),
        }
    }
}

pub(super) fn describe(recorder: &PrometheusRecorder) {
    let gauge = |name: &'static str, help: &'static str| {
        recorder.describe_gauge(KeyName::from_const_str(name), None, help.into());
    };
    gauge(OPEN, "Sequences that are not over");
    gauge(WAITING, "Sequences that wait for a slot");
    recorder.describe_counter(
        KeyName::from_const_str(EXPIRED),
        None,
        "Sequences that ended because no request of theirs came for too long".into(),
    );
}

#[cfg(test)]
mod tests {
    use dormouse_core::id::Version;

    use super::*;

    #[test]
    fn units_of_one_version_add_up_and_leave_nothing_behind() {
        let metrics = Metrics::new().unwrap();
        let id = ModelId {
            name: "m".into(),
            version: Version(1),
        };
        let value = |name: &str| {
            let text = metrics.render();
            let line = text.lines().find(|line| line.starts_with(name));
            line.map(|line| line.rsplit(' ').next().unwrap().to_owned())
        };
        let mut old = SequenceMeter::new(metrics.clone(), id.clone());
        let mut new = SequenceMeter::new(metrics.clone(), id);
        assert_eq!(value("dormouse_sequences_open{"), None);
        old.tell(SequenceCounts {
            open: 3,
            waiting: 1,
            expired: 0,
        });
        new.tell(SequenceCounts {
            open: 2,
            waiting: 0,
            expired: 4,
        });
        assert_eq!(value("dormouse_sequences_open{").as_deref(), Some("5"));
        assert_eq!(value("dormouse_sequences_waiting{").as_deref(), Some("1"));
        drop(old);
        assert_eq!(value("dormouse_sequences_open{").as_deref(), Some("2"));
        assert_eq!(value("dormouse_sequences_waiting{").as_deref(), Some("0"));
        assert_eq!(
            value("dormouse_sequences_expired_total{").as_deref(),
            Some("4")
        );
    }
}

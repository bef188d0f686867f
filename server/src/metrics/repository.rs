//! What remote repositories cost: bytes and time on the way, what the cache saved, what failed.

use std::time::Duration;

use metrics::{Key, KeyName, Label, Recorder, Unit};
use metrics_exporter_prometheus::PrometheusRecorder;

use super::{METADATA, Metrics};
use crate::remote::ErrorKind;

const BYTES: &str = "dormouse_repository_fetched_bytes_total";
const SECONDS: &str = "dormouse_repository_fetch_seconds";
const HITS: &str = "dormouse_repository_cache_hits_total";
const CACHED: &str = "dormouse_repository_cache_bytes";
const ERRORS: &str = "dormouse_repository_errors_total";

impl Metrics {
    /// Counts bytes that came from a remote repository.
    pub(crate) fn repository_bytes(&self, bytes: u64) {
        self.count(BYTES, bytes);
    }

    /// Counts a file that was fetched, and how long that took.
    pub(crate) fn repository_fetched(&self, took: Duration) {
        let histogram = self
            .recorder
            .register_histogram(&Key::from_static_name(SECONDS), &METADATA);
        histogram.record(took.as_secs_f64());
    }

    /// Counts a file that was there already.
    pub(crate) fn repository_cache_hit(&self) {
        self.count(HITS, 1);
    }

    /// Tells how large the cache is.
    pub(crate) fn repository_cache(&self, bytes: u64) {
        let gauge = self
            .recorder
            .register_gauge(&Key::from_static_name(CACHED), &METADATA);
        gauge.set(bytes as f64);
    }

    /// Counts a request that failed, whether or not it was tried again.
    pub(crate) fn repository_error(&self, kind: ErrorKind) {
        self.repository_errors(kind, 1);
    }

    /// Brings the series into being, which a server without remote repositories does not have.
    pub(crate) fn repository_series(&self) {
        self.count(BYTES, 0);
        self.count(HITS, 0);
        for kind in ErrorKind::ALL {
            self.repository_errors(kind, 0);
        }
    }

    fn repository_errors(&self, kind: ErrorKind, count: u64) {
        let key = Key::from_parts(ERRORS, vec![Label::new("kind", kind.label())]);
        let counter = self.recorder.register_counter(&key, &METADATA);
        counter.increment(count);
    }

    fn count(&self, name: &'static str, count: u64) {
        let counter = self
            .recorder
            .register_counter(&Key::from_static_name(name), &METADATA);
        counter.increment(count);
    }
}

pub(super) fn describe(recorder: &PrometheusRecorder) {
    let counter = |name: &'static str, help: &'static str| {
        recorder.describe_counter(KeyName::from_const_str(name), None, help.into());
    };
    counter(BYTES, "Bytes fetched from remote repositories");
    counter(HITS, "Files of remote repositories that were in the cache");
    counter(
        ERRORS,
        "Requests to remote repositories that failed, by kind; most are tried again",
    );
    recorder.describe_histogram(
        KeyName::from_const_str(SECONDS),
        Some(Unit::Count),
        "Time it took to fetch files from remote repositories".into(),
    );
    recorder.describe_gauge(
        KeyName::from_const_str(CACHED),
        None,
        "Disk space that the cache of remote repositories takes".into(),
    );
}

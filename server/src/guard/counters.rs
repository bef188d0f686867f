//! The metrics of the guard.

use std::sync::Arc;

use metrics::{Counter, Gauge, Key, KeyName, Label, Level, Metadata, Recorder};

use super::quota::Quota;
use crate::metrics::Metrics;

const METADATA: Metadata<'static> = Metadata::new("dormouse", Level::INFO, None);
const REFUSALS: &str = "dormouse_auth_refusals_total";
const QUOTA_REFUSALS: &str = "dormouse_quota_refusals_total";
const HANDSHAKE_FAILURES: &str = "dormouse_tls_handshake_failures_total";
const EXPIRY: &str = "dormouse_tls_certificate_expiry_timestamp_seconds";
const RELOADS: &str = "dormouse_credential_reloads_total";

/// Why somebody was turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Denial {
    /// No credential was given.
    Missing,
    /// It is unknown, expired or not for us.
    Invalid,
    /// It does not allow this.
    Scope,
    /// Management from where it is not served.
    Management,
    /// A browser acting for another site.
    CrossOrigin,
}

impl Denial {
    const ALL: [Self; 5] = [
        Self::Missing,
        Self::Invalid,
        Self::Scope,
        Self::Management,
        Self::CrossOrigin,
    ];

    const fn label(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Invalid => "invalid",
            Self::Scope => "scope",
            Self::Management => "management",
            Self::CrossOrigin => "cross_origin",
        }
    }
}

/// The guard's series.
#[derive(Clone, Debug)]
pub(super) struct Counters {
    metrics: Metrics,
    series: Arc<Series>,
}

#[derive(Debug)]
struct Series {
    refusals: [Counter; 5],
    handshake_failures: Counter,
    expiry: Gauge,
}

impl Counters {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let recorder = metrics.recorder();
        let described = [
            (REFUSALS, "Requests turned away, by reason"),
            (
                QUOTA_REFUSALS,
                "Requests turned away because their client has a quota",
            ),
            (
                HANDSHAKE_FAILURES,
                "Connections that ended before TLS was set up",
            ),
            (
                RELOADS,
                "Certificates, tokens and keys read again after a change, by result",
            ),
        ];
        for (name, help) in described {
            recorder.describe_counter(KeyName::from_const_str(name), None, help.into());
        }
        let series = Series {
            refusals: Denial::ALL.map(|denial| {
                let label = Label::new("reason", denial.label());
                let key = Key::from_parts(REFUSALS, vec![label]);
                recorder.register_counter(&key, &METADATA)
            }),
            handshake_failures: recorder
                .register_counter(&Key::from_static_name(HANDSHAKE_FAILURES), &METADATA),
            expiry: Gauge::noop(),
        };
        Self {
            metrics: metrics.clone(),
            series: Arc::new(series),
        }
    }

    /// The same with the series of a server that has a certificate.
    pub(super) fn with_certificate(self) -> Self {
        let recorder = self.metrics.recorder();
        let help = "When the certificate that is being presented ends, in Unix time";
        recorder.describe_gauge(KeyName::from_const_str(EXPIRY), None, help.into());
        let series = Series {
            refusals: self.series.refusals.clone(),
            handshake_failures: self.series.handshake_failures.clone(),
            expiry: recorder.register_gauge(&Key::from_static_name(EXPIRY), &METADATA),
        };
        Self {
            series: Arc::new(series),
            ..self
        }
    }

    pub(super) fn denied(&self, denial: Denial) {
        self.series.refusals[denial as usize].increment(1);
    }

    /// `client` is a name from the file of credentials or one for all others.
    pub(super) fn over_quota(&self, quota: Quota, client: &Arc<str>) {
        let labels = vec![
            Label::new("quota", quota.label()),
            Label::new("client", Arc::clone(client)),
        ];
        let key = Key::from_parts(QUOTA_REFUSALS, labels);
        let counter = self.metrics.recorder().register_counter(&key, &METADATA);
        counter.increment(1);
    }

    pub(super) fn handshake_failed(&self) {
        self.series.handshake_failures.increment(1);
    }

    pub(super) fn certificate_expires(&self, unix_seconds: f64) {
        self.series.expiry.set(unix_seconds);
    }

    /// Brings the series of files that are followed into being: where a series begins at one,
    /// Prometheus sees no increase.
    pub(super) fn follows(&self, what: &'static str) {
        for is_good in [true, false] {
            self.reloads(what, is_good).increment(0);
        }
    }

    pub(super) fn reloaded(&self, what: &'static str, is_good: bool) {
        self.reloads(what, is_good).increment(1);
    }

    fn reloads(&self, what: &'static str, is_good: bool) -> Counter {
        let result = if is_good { "ok" } else { "failed" };
        let labels = vec![Label::new("what", what), Label::new("result", result)];
        let key = Key::from_parts(RELOADS, labels);
        self.metrics.recorder().register_counter(&key, &METADATA)
    }
}

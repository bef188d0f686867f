//! Refusals, by the limit that was reached. They are counted in [`crate::limits`] and told when
//! somebody asks.

use metrics::{Counter, Key, KeyName, Label, Recorder};
use metrics_exporter_prometheus::PrometheusRecorder;

use super::METADATA;
use crate::limits::Limit;

const NAME: &str = "dormouse_limit_refusals_total";

/// In the order of [`Limit::ALL`].
pub(super) type Refusals = [Counter; Limit::ALL.len()];

pub(super) fn register(recorder: &PrometheusRecorder) -> Refusals {
    let help = "Clients that were refused something or had to wait, by the limit they reached";
    recorder.describe_counter(KeyName::from_const_str(NAME), None, help.into());
    Limit::ALL.map(|limit| {
        let label = Label::new("limit", limit.label());
        recorder.register_counter(&Key::from_parts(NAME, vec![label]), &METADATA)
    })
}

pub(super) fn tell(refusals: &Refusals) {
    for (counter, limit) in refusals.iter().zip(Limit::ALL) {
        counter.absolute(limit.refusals());
    }
}

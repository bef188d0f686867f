//! What a load spent its time on.

use std::time::Duration;

/// One stage of a load.
#[derive(Clone, Debug, PartialEq)]
pub struct StageSpan {
    /// A short word: `read`, `environment`, `session`, `warmup`.
    pub name: &'static str,
    /// From the start of the load.
    pub start: Duration,
    pub duration: Duration,
    /// Bytes moved in this stage, 0 when that says nothing.
    pub bytes: u64,
}

/// The stages of one load, in the order they started.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadTimeline {
    pub total: Duration,
    pub stages: Vec<StageSpan>,
}

impl LoadTimeline {
    /// The value of a `Server-Timing` header: `load;dur=12.3, read;dur=1.0, …` in milliseconds.
    pub fn server_timing(&self) -> String {
        use std::fmt::Write;
        let mut text = format!("load;dur={:.3}", self.total.as_secs_f64() * 1e3);
        for stage in &self.stages {
            // Writing to a string cannot fail.
            let _ = write!(
                text,
                ", {};dur={:.3}",
                stage.name,
                stage.duration.as_secs_f64() * 1e3
            );
        }
        text
    }
}

//! The value of a `Server-Timing` header, by the grammar of W3C's Server Timing.

use std::fmt::Write as _;
use std::time::Duration;

use super::{ColdRequest, LoadStage, LoadTimeline, covered};

impl LoadTimeline {
    /// `load;dur=12.300;desc=prepared, read;dur=1.000;start=0.250;bytes=4096, …`: milliseconds
    /// from the start of the load, each stage once, however many lanes it took. What overlapping
    /// saved is told where it did.
    pub fn server_timing(&self) -> String {
        let mut text = String::with_capacity(64 + 48 * self.stages.len().min(LoadStage::ALL.len()));
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "load;dur={:.3};desc={}",
            millis(self.total),
            self.kind.label()
        );
        let overlap = self.overlap();
        if !overlap.is_zero() {
            let _ = write!(text, ";overlap={:.3}", millis(overlap));
        }
        let mut told: Vec<LoadStage> = Vec::new();
        for first in &self.stages {
            // The request that is told has its own entry for its run.
            if first.stage == LoadStage::FirstRun || told.contains(&first.stage) {
                continue;
            }
            told.push(first.stage);
            let spans = || self.stages.iter().filter(|span| span.stage == first.stage);
            let _ = write!(
                text,
                ", {};dur={:.3};start={:.3}",
                first.stage.label(),
                millis(covered(spans())),
                millis(first.start)
            );
            let bytes = spans().fold(0_u64, |sum, span| sum.saturating_add(span.bytes));
            if bytes > 0 {
                let _ = write!(text, ";bytes={bytes}");
            }
        }
        text
    }
}

impl ColdRequest {
    /// The load's timeline, then what the request itself waited, ran and took in all.
    pub fn server_timing(&self) -> String {
        let mut text = self.load.server_timing();
        let parts = [
            ("wait", self.waited),
            ("run", self.run),
            ("total", self.total),
        ];
        for (name, took) in parts {
            let _ = write!(text, ", {name};dur={:.3}", millis(took));
        }
        text
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

//! Counts what the response cache did for a model version.

use std::time::Duration;

use dormouse_core::time::Timestamp;

use super::Unit;
use crate::metrics::Phase;

impl Unit {
    /// Counts a request that was answered without the model.
    pub fn count_cache_hit(&self, received: Timestamp, took: Duration) {
        let total = self.host.clock.now() - received;
        self.counters.cache_hit(total, took);
        self.host.metrics.cache_hit(&self.id, took);
        let metrics = self.metrics();
        metrics.success.increment(1);
        metrics.phase(Phase::Request, total);
    }

    /// Counts a request whose answer had to be made, and what looking for it and keeping it took.
    pub fn count_cache_miss(&self, took: Duration) {
        self.counters.cache_miss(took);
        self.host.metrics.cache_miss(&self.id, took);
    }
}

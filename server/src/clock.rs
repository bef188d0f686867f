//! The one clock that deadlines, queues and timelines are measured with.

use dormouse_core::time::Timestamp;
use tokio::time::Instant;

/// A monotonic clock that starts at zero. Cheap to copy; every part of a server holds the same.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    pub fn start() -> Self {
        Self {
            start: Instant::now(),
        }
    }

    pub fn now(&self) -> Timestamp {
        Timestamp::ZERO + self.start.elapsed()
    }

    /// The instant of `at`, for timers.
    pub fn instant(&self, at: Timestamp) -> Instant {
        // A century from now stands for "never"; adding more could overflow the platform's clock.
        const FAR: std::time::Duration = std::time::Duration::from_secs(100 * 365 * 24 * 3600);
        self.start + (at - Timestamp::ZERO).min(FAR)
    }
}

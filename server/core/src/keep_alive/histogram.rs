//! How long a model was idle between calls, in a few hundred bytes.
//!
//! Up to eight seconds each second has a bin; from there every doubling is cut into eight. Even
//! minute bins, as on a platform where starts take seconds, would put all that matters to a model
//! that wakes in a tenth of a second into the first bin; even second bins up to four hours would
//! take 14,400. Here the error is at most an eighth at any scale, which is the size of the
//! margins that are added anyway.

use std::time::Duration;

/// Idle times from here on are counted but not resolved.
pub(super) const RANGE: Duration = Duration::from_secs(4 * 60 * 60);
/// The bin of the longest idle time within range, and one more.
const BINS: usize = bin_of(RANGE.as_secs() - 1) + 1;
/// All counts are halved when there are so many: old habits fade.
const MAX_COUNT: u16 = 1024;

/// Counts of idle times by length.
#[derive(Clone, Debug)]
pub(super) struct IdleHistogram {
    bins: [u16; BINS],
    /// Idle times within range.
    count: u16,
    out_of_bounds: u16,
}

impl Default for IdleHistogram {
    fn default() -> Self {
        Self {
            bins: [0; BINS],
            count: 0,
            out_of_bounds: 0,
        }
    }
}

impl IdleHistogram {
    pub(super) fn record(&mut self, idle: Duration) {
        if self.count + self.out_of_bounds >= MAX_COUNT {
            self.fade();
        }
        if idle < RANGE {
            self.bins[bin_of(idle.as_secs())] += 1;
            self.count += 1;
        } else {
            self.out_of_bounds += 1;
        }
    }

    /// Idle times within range.
    pub(super) fn count(&self) -> u16 {
        self.count
    }

    /// Idle times beyond the range.
    pub(super) fn out_of_bounds(&self) -> u16 {
        self.out_of_bounds
    }

    /// The bounds of the bin in which so many percent of the idle times lie at or below it.
    pub(super) fn percentile(&self, percent: u32) -> Option<(Duration, Duration)> {
        let rank = (u32::from(self.count) * percent).div_ceil(100).max(1);
        let mut seen = 0;
        let bin = self.bins.iter().position(|&count| {
            seen += u32::from(count);
            seen >= rank
        })?;
        Some((seconds(lower_bound(bin)), seconds(lower_bound(bin + 1))))
    }

    /// Coefficient of variation of the bins' counts: high when few bins hold most idle times.
    pub(super) fn variation(&self) -> f64 {
        let mean = f64::from(self.count) / BINS as f64;
        if mean == 0.0 {
            return 0.0;
        }
        let squares: f64 = self.bins.iter().map(|&bin| f64::from(bin).powi(2)).sum();
        let variance = squares / BINS as f64 - mean * mean;
        variance.max(0.0).sqrt() / mean
    }

    fn fade(&mut self) {
        self.count = 0;
        for bin in &mut self.bins {
            *bin /= 2;
            self.count += *bin;
        }
        self.out_of_bounds /= 2;
    }
}

const fn bin_of(seconds: u64) -> usize {
    if seconds < 8 {
        return seconds as usize;
    }
    let octave = seconds.ilog2() - 3;
    8 * octave as usize + (seconds >> octave) as usize
}

const fn lower_bound(bin: usize) -> u64 {
    if bin < 16 {
        return bin as u64;
    }
    let octave = bin / 8 - 1;
    ((bin % 8 + 8) as u64) << octave
}

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_follow_each_other_without_gap_and_are_an_eighth_wide_at_most() {
        let mut last = 0;
        for second in 0..RANGE.as_secs() {
            let bin = bin_of(second);
            assert!(bin == last || bin == last + 1, "second {second}");
            assert!(lower_bound(bin) <= second && second < lower_bound(bin + 1));
            let width = lower_bound(bin + 1) - lower_bound(bin);
            assert!(width == 1 || width * 8 <= lower_bound(bin));
            last = bin;
        }
        assert_eq!(last + 1, BINS);
    }

    #[test]
    fn percentiles_are_the_bins_that_hold_them() {
        let mut histogram = IdleHistogram::default();
        assert_eq!(histogram.percentile(99), None);
        for second in 1..=100 {
            histogram.record(seconds(second));
        }
        assert_eq!(histogram.percentile(5), Some((seconds(5), seconds(6))));
        assert_eq!(histogram.percentile(50), Some((seconds(48), seconds(52))));
        assert_eq!(histogram.percentile(99), Some((seconds(96), seconds(104))));
    }

    #[test]
    fn counts_fade_and_stay_bounded() {
        let mut histogram = IdleHistogram::default();
        for _ in 0..100_000 {
            histogram.record(seconds(100));
        }
        for _ in 0..100_000 {
            histogram.record(seconds(5000));
        }
        histogram.record(RANGE);
        assert_eq!(histogram.percentile(1).unwrap().0, seconds(4608));
        assert!(histogram.count() <= MAX_COUNT);
        assert_eq!(histogram.out_of_bounds(), 1);
        assert!(size_of::<IdleHistogram>() <= 256);
    }

    #[test]
    fn variation_tells_a_habit_from_noise() {
        let mut habit = IdleHistogram::default();
        let mut noise = IdleHistogram::default();
        for step in 0..BINS {
            habit.record(seconds(600 + step as u64 % 10));
            noise.record(seconds(lower_bound(step)));
        }
        assert!(habit.variation() > 5.0);
        assert!(noise.variation() < 0.1);
        assert_eq!(IdleHistogram::default().variation(), 0.0);
    }
}

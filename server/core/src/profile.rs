//! How long a model runs and loads, learnt from what it did lately.
//!
//! Runs are grouped by size, a group per power of two of rows. Each group keeps a moving mean and
//! a moving mean deviation, and what lies between two groups is interpolated.

use std::time::Duration;

/// Weight of a new observation in the moving mean.
const MEAN_GAIN: f64 = 1.0 / 8.0;
/// Weight of a new observation in the moving deviation.
const DEVIATION_GAIN: f64 = 1.0 / 8.0;
/// Deviations added to the mean by a cautious estimate.
pub(crate) const CAUTION: f64 = 3.0;
/// How much longer the work ahead of a request may take than it took lately, as a share of it.
/// Runs slow down together when the machine is busy, and a queue that is filled to the last moment
/// turns that into requests that wait in vain. A shorter queue keeps the model just as busy.
const DRIFT: f64 = 0.25;
/// The most that is learnt on top of it: then half of the time that a request has is kept free.
const MOST_LEARNT_DRIFT: f64 = 0.75;
/// How much one request that waited in vain adds.
const DRIFT_GAIN: f64 = 0.05;
/// Of a hundred requests that were let in, about one may wait in vain.
const IN_VAIN: f64 = 0.01;
/// Runs of other sizes after which a size is no longer believed while others are fresher.
const STALE_AFTER: u64 = 1024;

/// A model's service times by batch size, and its load times.
#[derive(Clone, Debug, Default)]
pub struct ServiceProfile {
    /// By power of two of the rows.
    sizes: Vec<SizeClass>,
    any: Average,
    load: Average,
    resume: Average,
    runs: u64,
    /// What was learnt of the drift beyond [`DRIFT`].
    learnt_drift: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct SizeClass {
    rows: f64,
    run: Average,
    last_run: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Average {
    count: u32,
    mean: f64,
    deviation: f64,
}

/// Mean and deviation of a run, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Estimate {
    pub(crate) mean: f64,
    pub(crate) deviation: f64,
}

impl ServiceProfile {
    /// A profile that knows nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Learns from a finished run.
    pub fn record_run(&mut self, rows: u32, took: Duration) {
        let rows = rows.max(1);
        let class = class_of(rows);
        if self.sizes.len() <= class {
            self.sizes.resize(class + 1, SizeClass::default());
        }
        self.runs += 1;
        let size = &mut self.sizes[class];
        // A class that was not seen for long starts afresh: what it knew is of another time.
        if self.runs - size.last_run > STALE_AFTER {
            *size = SizeClass::default();
        }
        let gain = size.run.gain(MEAN_GAIN);
        size.rows += gain * (f64::from(rows) - size.rows);
        size.run.record(took.as_secs_f64());
        size.last_run = self.runs;
        self.any.record(took.as_secs_f64());
    }

    /// Learns from a finished load.
    pub fn record_load(&mut self, took: Duration) {
        self.load.record(took.as_secs_f64());
    }

    /// A request that was let in ran out of time before its turn came.
    pub fn waited_in_vain(&mut self) {
        let learnt = self.learnt_drift + DRIFT_GAIN * (1.0 - IN_VAIN);
        self.learnt_drift = learnt.min(MOST_LEARNT_DRIFT);
    }

    /// A request that was let in ran in time. So many of these undo one that did not that the
    /// share of those settles where it is to be.
    pub fn waited_with_success(&mut self) {
        self.learnt_drift = (self.learnt_drift - DRIFT_GAIN * IN_VAIN).max(0.0);
    }

    /// How much longer work may take than it took lately, as a share of it.
    pub(crate) fn drift(&self) -> f64 {
        DRIFT + self.learnt_drift
    }

    /// Learns from a run that had to read in weights which were dropped: what it took beyond the
    /// usual. Until that is known, it is a run like any other.
    pub fn record_resume(&mut self, rows: u32, took: Duration) {
        match self.expected_run(rows) {
            Some(usual) => {
                let longer = took.saturating_sub(usual);
                self.resume.record(longer.as_secs_f64());
            }
            None => self.record_run(rows, took),
        }
    }

    /// The mean time of a run of so many rows; `None` before the first run.
    pub fn expected_run(&self, rows: u32) -> Option<Duration> {
        self.estimate(rows).map(|run| seconds(run.mean))
    }

    /// A time that a run of so many rows rarely exceeds: the mean and three mean deviations.
    pub fn cautious_run(&self, rows: u32) -> Option<Duration> {
        let run = self.estimate(rows)?;
        Some(seconds(run.mean + CAUTION * run.deviation))
    }

    /// The mean time of a run, of whatever size runs have lately.
    pub fn typical_run(&self) -> Option<Duration> {
        self.any.estimate().map(|run| seconds(run.mean))
    }

    /// The mean time of a load; `None` before the first.
    pub fn expected_load(&self) -> Option<Duration> {
        self.load.estimate().map(|load| seconds(load.mean))
    }

    /// How much longer a run takes after weights were dropped; `None` before the first.
    pub fn expected_resume(&self) -> Option<Duration> {
        self.resume.estimate().map(|resume| seconds(resume.mean))
    }

    pub(crate) fn estimate(&self, rows: u32) -> Option<Estimate> {
        let rows = f64::from(rows.max(1));
        let mut below: Option<SizeClass> = None;
        let mut before_below = None;
        let mut above = None;
        for size in self.believed() {
            if size.rows <= rows {
                before_below = below.replace(size);
            } else {
                above = Some(size);
                break;
            }
        }
        match (below, above) {
            (Some(below), Some(above)) => Some(interpolate(&below, &above, rows)),
            (Some(below), None) => Some(extrapolate(before_below.as_ref(), &below, rows)),
            // A smaller batch is hardly slower than a larger one; how much faster, nobody knows.
            (None, Some(above)) => above.run.estimate(),
            (None, None) => None,
        }
    }

    /// The size classes that were seen lately, by ascending rows.
    fn believed(&self) -> impl Iterator<Item = SizeClass> {
        let fresh = |size: &&SizeClass| self.runs - size.last_run <= STALE_AFTER;
        let seen = self.sizes.iter().filter(|size| size.run.count > 0);
        seen.filter(fresh).copied()
    }
}

impl Average {
    /// Early observations weigh more, so that the first one is not remembered for long.
    fn gain(&self, steady: f64) -> f64 {
        (1.0 / (f64::from(self.count) + 1.0)).max(steady)
    }

    fn record(&mut self, value: f64) {
        if self.count == 0 {
            self.mean = value;
            self.deviation = value / 4.0;
        } else {
            let error = value - self.mean;
            self.mean += self.gain(MEAN_GAIN) * error;
            self.deviation += DEVIATION_GAIN * (error.abs() - self.deviation);
        }
        self.count = self.count.saturating_add(1);
    }

    fn estimate(&self) -> Option<Estimate> {
        (self.count > 0).then_some(Estimate {
            mean: self.mean,
            deviation: self.deviation,
        })
    }
}

fn interpolate(below: &SizeClass, above: &SizeClass, rows: f64) -> Estimate {
    let part = (rows - below.rows) / (above.rows - below.rows);
    let between = |low: f64, high: f64| low + part * (high - low);
    Estimate {
        mean: between(below.run.mean, above.run.mean),
        deviation: between(below.run.deviation, above.run.deviation),
    }
}

/// Continues the slope of the two largest sizes, never steeper than in proportion to the rows.
fn extrapolate(smaller: Option<&SizeClass>, largest: &SizeClass, rows: f64) -> Estimate {
    let SizeClass {
        rows: known, run, ..
    } = *largest;
    let proportional = run.mean / known;
    let slope = match smaller {
        Some(smaller) => {
            let slope = (run.mean - smaller.run.mean) / (known - smaller.rows);
            slope.clamp(0.0, proportional)
        }
        None => proportional,
    };
    let mean = run.mean + slope * (rows - known);
    let growth = if run.mean > 0.0 { mean / run.mean } else { 1.0 };
    Estimate {
        mean,
        deviation: run.deviation * growth,
    }
}

/// 1, 2, 3–4, 5–8, and so on.
fn class_of(rows: u32) -> usize {
    (u32::BITS - (rows - 1).leading_zeros()) as usize
}

pub(crate) fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn profile(runs: &[(u32, u64)]) -> ServiceProfile {
        let mut profile = ServiceProfile::new();
        for _ in 0..200 {
            for &(rows, took) in runs {
                profile.record_run(rows, millis(took));
            }
        }
        profile
    }

    #[test]
    fn coming_back_takes_what_a_run_takes_longer() {
        let mut profile = ServiceProfile::new();
        profile.record_resume(1, millis(20));
        assert_eq!(profile.expected_resume(), None);
        assert_eq!(profile.expected_run(1), Some(millis(20)));
        for _ in 0..2 {
            profile.record_resume(1, millis(90));
        }
        let found = profile.expected_resume().unwrap();
        assert!(found.abs_diff(millis(70)) < millis(1), "{found:?}");
        assert_eq!(profile.expected_run(1), Some(millis(20)));
        let mut fast = ServiceProfile::new();
        fast.record_run(1, millis(20));
        fast.record_resume(1, millis(10));
        assert_eq!(fast.expected_resume(), Some(Duration::ZERO));
    }

    fn check(runs: &[(u32, u64)], expected: &[(u32, u64)]) {
        let profile = profile(runs);
        for &(rows, expected) in expected {
            let found = profile.expected_run(rows).unwrap();
            assert!(
                found.abs_diff(millis(expected)) < millis(1),
                "{rows} rows after {runs:?}: {found:?}, not {expected} ms"
            );
        }
    }

    #[test]
    fn sizes_in_between_are_interpolated_and_larger_ones_extrapolated() {
        check(&[(1, 20)], &[(1, 20), (4, 80)]);
        check(&[(8, 80)], &[(1, 80), (8, 80), (16, 160)]);
        check(
            &[(1, 20), (8, 90)],
            &[(1, 20), (2, 30), (4, 50), (8, 90), (16, 170)],
        );
        // A slope that measurements bent downwards is not followed below what was measured.
        check(&[(1, 30), (8, 20)], &[(8, 20), (64, 20)]);
        // Sizes of one class count at their mean.
        check(&[(6, 60), (8, 80)], &[(7, 70)]);
    }

    #[test]
    fn nothing_is_known_before_the_first_observation() {
        let mut profile = ServiceProfile::new();
        assert_eq!(profile.expected_run(1), None);
        assert_eq!(profile.cautious_run(1), None);
        assert_eq!(profile.typical_run(), None);
        assert_eq!(profile.expected_load(), None);
        profile.record_load(millis(300));
        assert_eq!(profile.expected_load(), Some(millis(300)));
        assert_eq!(profile.expected_run(1), None);
    }

    #[test]
    fn cautious_estimate_covers_most_of_what_varies() {
        let mut profile = ServiceProfile::new();
        for round in 0..200 {
            profile.record_run(1, millis(80 + round % 5 * 10));
        }
        let expected = profile.expected_run(1).unwrap();
        let cautious = profile.cautious_run(1).unwrap();
        assert!(
            (millis(90)..millis(110)).contains(&expected),
            "{expected:?}"
        );
        assert!(
            (millis(120)..millis(160)).contains(&cautious),
            "{cautious:?}"
        );
    }

    #[test]
    fn estimate_follows_a_change_within_a_few_runs() {
        let mut profile = profile(&[(1, 100)]);
        for _ in 0..16 {
            profile.record_run(1, millis(200));
        }
        assert!(profile.expected_run(1).unwrap() > millis(180));
        assert!(profile.cautious_run(1).unwrap() > millis(200));
    }

    #[test]
    fn size_not_seen_for_long_is_no_longer_believed() {
        let mut profile = profile(&[(32, 5_000)]);
        for _ in 0..=STALE_AFTER {
            profile.record_run(1, millis(10));
        }
        let expected = profile.expected_run(32).unwrap();
        assert!(expected.abs_diff(millis(320)) < millis(1), "{expected:?}");
        profile.record_run(32, millis(100));
        assert_eq!(profile.expected_run(32), Some(millis(100)));
    }

    #[test]
    fn classes_are_powers_of_two() {
        let classes: Vec<usize> = [1, 2, 3, 4, 5, 8, 9, u32::MAX].map(class_of).to_vec();
        assert_eq!(classes, [0, 1, 2, 2, 3, 3, 4, 32]);
    }

    proptest! {
        #[test]
        fn estimates_stay_within_what_was_observed(
            runs in prop::collection::vec((0u32..100, 0u64..10_000), 1..100),
            rows in 0u32..200,
        ) {
            let mut profile = ServiceProfile::new();
            for &(rows, took) in &runs {
                profile.record_run(rows, millis(took));
            }
            let longest = runs.iter().map(|&(_, took)| took).max().unwrap();
            let expected = profile.expected_run(rows).unwrap();
            // In proportion at most: from one row to 200.
            assert!(expected <= millis(longest) * 200 + millis(1));
            assert!(profile.cautious_run(rows).unwrap() >= expected);
            assert!(profile.typical_run().unwrap() <= millis(longest) + millis(1));
        }
    }
}

//! Histograms that every request adds to.
//!
//! The exporter keeps each sample, with its time, until somebody sorts them all into buckets. Here
//! a sample is sorted in when it comes, which costs two additions, and written out when asked for.

use std::fmt::{Display, Write};
use std::sync::atomic::{AtomicU64, Ordering};

/// How often values fell into which range.
#[derive(Debug)]
pub struct Histogram {
    /// What is counted up to which value.
    bounds: &'static [u64],
    /// One for each bound, and one for what is beyond them.
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl Histogram {
    pub(super) fn new(bounds: &'static [u64]) -> Self {
        Self {
            bounds,
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
        }
    }

    /// Counts a value.
    pub fn record(&self, value: u64) {
        let range = self.bounds.partition_point(|&bound| bound < value);
        self.counts[range].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// All values together.
    pub(super) fn sum(&self) -> u64 {
        self.sum.load(Ordering::Relaxed)
    }

    /// Writes the series with these labels, its values in units of `unit`.
    pub(super) fn write(&self, text: &mut String, name: &str, labels: &str, unit: f64) {
        let mut line = |suffix: &str, bound: Option<&dyn Display>, value: &dyn Display| {
            let written = match bound {
                Some(bound) => writeln!(text, "{name}_{suffix}{{{labels},le=\"{bound}\"}} {value}"),
                None => writeln!(text, "{name}_{suffix}{{{labels}}} {value}"),
            };
            written.expect("writing to a string cannot fail");
        };
        let mut count = 0;
        let counts = self
            .counts
            .iter()
            .map(|count| count.load(Ordering::Relaxed));
        let bounds = self.bounds.iter().map(|&bound| Some(bound as f64 / unit));
        for (bound, within) in bounds.chain([None]).zip(counts) {
            count += within;
            match bound {
                Some(bound) => line("bucket", Some(&bound), &count),
                None => line("bucket", Some(&"+Inf"), &count),
            }
        }
        line("sum", None, &(self.sum() as f64 / unit));
        line("count", None, &count);
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    #[test]
    fn a_value_counts_in_every_bucket_that_reaches_it() {
        let histogram = Histogram::new(&[100, 250, 1000]);
        for value in [0, 100, 101, 250, 1000, 1001] {
            histogram.record(value);
        }
        let mut text = String::new();
        histogram.write(&mut text, "h", r#"model="m""#, 1000.0);
        expect![[r#"
            h_bucket{model="m",le="0.1"} 2
            h_bucket{model="m",le="0.25"} 4
            h_bucket{model="m",le="1"} 5
            h_bucket{model="m",le="+Inf"} 6
            h_sum{model="m"} 2.452
            h_count{model="m"} 6
        "#]]
        .assert_eq(&text);
    }
}

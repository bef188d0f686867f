//! Repeated measurements of one thing, and what is said about them.

use std::time::Duration;

use serde::ser::SerializeStruct;
use serde::{Deserialize, Serialize};

use crate::table::number;

/// Values of one measure, in the order they were taken.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Samples(pub(crate) Vec<f64>);

impl Samples {
    pub(crate) fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// Adds a time in milliseconds.
    pub(crate) fn push_millis(&mut self, time: Duration) {
        self.0.push(time.as_secs_f64() * 1e3);
    }

    /// The middle value; none without values.
    pub(crate) fn median(&self) -> Option<f64> {
        let mut sorted = self.0.clone();
        (!sorted.is_empty()).then(|| crate::table::median(&mut sorted))
    }

    pub(crate) fn min(&self) -> Option<f64> {
        self.0.iter().copied().min_by(f64::total_cmp)
    }

    pub(crate) fn max(&self) -> Option<f64> {
        self.0.iter().copied().max_by(f64::total_cmp)
    }

    /// How many times the other this one is: the median over the repetitions, in each of which both
    /// were measured. A machine that is slower in one minute than in the next is so for both.
    pub(crate) fn over(&self, other: &Self) -> Option<f64> {
        if self.0.len() == other.0.len() {
            return self.ratios(other).median();
        }
        match (self.median(), other.median()) {
            (Some(ours), Some(theirs)) if theirs != 0.0 => Some(ours / theirs),
            _ => None,
        }
    }

    /// This one's values divided by the other's of the same repetition.
    pub(crate) fn ratios(&self, other: &Self) -> Self {
        let pairs = self.0.iter().zip(&other.0);
        let ratios = pairs.map(|(ours, theirs)| ours / theirs);
        Self(ratios.filter(|ratio| ratio.is_finite()).collect())
    }

    /// `12.3 (11.9–14.0)` with three digits or so; a single value alone, a dash without values.
    pub(crate) fn cell(&self) -> String {
        match (self.median(), self.min(), self.max()) {
            (Some(median), _, _) if self.0.len() == 1 => number(median),
            (Some(median), Some(min), Some(max)) => {
                format!("{} ({}–{})", number(median), number(min), number(max))
            }
            _ => "–".to_owned(),
        }
    }
}

impl Serialize for Samples {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut out = serializer.serialize_struct("Samples", 4)?;
        out.serialize_field("median", &self.median())?;
        out.serialize_field("min", &self.min())?;
        out.serialize_field("max", &self.max())?;
        out.serialize_field("values", &self.0)?;
        out.end()
    }
}

impl<'de> Deserialize<'de> for Samples {
    fn deserialize<D: serde::Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Document {
            values: Vec<f64>,
        }
        Ok(Self(Document::deserialize(input)?.values))
    }
}

/// A ratio for a table.
pub(crate) fn times(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{}×", number(ratio)))
}

/// Bytes as MiB for a table.
pub(crate) fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// MiB as megabytes, in which limits are told.
pub(crate) fn megabytes(mib: f64) -> f64 {
    mib * f64::from(1 << 20) / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_tell_their_middle_and_their_ends() {
        let samples = Samples(vec![3.0, 1.0, 2.0, 10.0]);
        assert_eq!(samples.median(), Some(2.5));
        assert_eq!(samples.cell(), "2.50 (1.00–10.0)");
        assert_eq!(Samples(vec![2.0]).cell(), "2.00");
        assert_eq!(Samples::default().cell(), "–");
        assert_eq!(
            serde_json::to_string(&Samples(vec![2.0])).unwrap(),
            r#"{"median":2.0,"min":2.0,"max":2.0,"values":[2.0]}"#
        );
        let read: Samples =
            serde_json::from_value(serde_json::to_value(&samples).unwrap()).unwrap();
        assert_eq!(read, samples);
    }

    #[test]
    fn ratios_need_both_sides() {
        let two = Samples(vec![2.0]);
        assert_eq!(two.over(&Samples(vec![4.0])), Some(0.5));
        assert_eq!(two.over(&Samples::default()), None);
        assert_eq!(two.over(&Samples(vec![0.0])), None);
        // The middle of 10, 2 and 1, whatever the medians are to each other.
        let (ours, theirs) = (vec![10.0, 40.0, 30.0], vec![1.0, 20.0, 30.0]);
        assert_eq!(Samples(ours.clone()).over(&Samples(theirs)), Some(2.0));
        assert_eq!(Samples(ours).over(&Samples(vec![10.0, 20.0])), Some(2.0));
        assert_eq!(times(None), "–");
    }

    #[test]
    fn ratios_pair_what_was_measured_in_one_round() {
        // A machine that is twice as fast in the second round leaves ratios as they are.
        let ours = Samples(vec![10.0, 20.0]);
        let theirs = Samples(vec![5.0, 10.0]);
        assert_eq!(ours.ratios(&theirs).0, [2.0, 2.0]);
        assert_eq!(ours.ratios(&Samples(vec![0.0, 4.0])).0, [5.0]);
        assert_eq!(ours.ratios(&Samples::default()).0, [0.0; 0]);
    }
}

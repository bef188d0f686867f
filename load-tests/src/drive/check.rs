//! Whether an answer is the expected one.

use std::sync::OnceLock;

use dormouse_client::{DataType, Tensor};
use half::{bf16, f16};

use super::scenario::Tolerance;

/// What a request is to be answered with.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    outputs: Vec<(String, Tensor)>,
    tolerance: Tolerance,
}

/// What the answers to one request are compared with.
#[derive(Debug)]
pub(crate) enum Reference {
    Nothing,
    Recorded(Expected),
    /// Whichever came first: equal inputs have equal answers.
    First {
        seen: OnceLock<Expected>,
        tolerance: Tolerance,
    },
}

impl Reference {
    pub(crate) fn first(tolerance: Tolerance) -> Self {
        Self::First {
            seen: OnceLock::new(),
            tolerance,
        }
    }

    /// What is wrong with an answer, in words.
    pub(crate) fn complaint(&self, outputs: &[(String, Tensor)]) -> Option<String> {
        match self {
            Self::Nothing => None,
            Self::Recorded(expected) => expected.complaint(outputs),
            Self::First { seen, tolerance } => {
                let expected = seen.get_or_init(|| Expected::new(outputs.to_vec(), *tolerance));
                let complaint = expected.complaint(outputs)?;
                Some(format!(
                    "unlike the first answer to these inputs: {complaint}"
                ))
            }
        }
    }
}

impl Expected {
    pub(crate) fn new(outputs: Vec<(String, Tensor)>, tolerance: Tolerance) -> Self {
        Self { outputs, tolerance }
    }

    /// What is wrong with an answer, in words; outputs that nobody expects are nobody's business.
    pub(crate) fn complaint(&self, outputs: &[(String, Tensor)]) -> Option<String> {
        for (name, wanted) in &self.outputs {
            let Some((_, found)) = outputs.iter().find(|(candidate, _)| candidate == name) else {
                return Some(format!("output '{name}' is missing"));
            };
            if found.datatype() != wanted.datatype() || found.shape() != wanted.shape() {
                return Some(format!(
                    "output '{name}' is {} {:?} instead of {} {:?}",
                    found.datatype(),
                    found.shape(),
                    wanted.datatype(),
                    wanted.shape()
                ));
            }
            if found.data() == wanted.data() {
                continue;
            }
            let (Some(found), Some(wanted)) = (numbers(found), numbers(wanted)) else {
                return Some(format!("output '{name}' holds other strings"));
            };
            let places = found.iter().zip(&wanted).enumerate();
            for (index, (&found, &wanted)) in places {
                if !self.is_close(found, wanted) {
                    return Some(format!(
                        "output '{name}' has {found} instead of {wanted} at place {index}"
                    ));
                }
            }
        }
        None
    }

    fn is_close(&self, found: f64, wanted: f64) -> bool {
        let allowed = self.tolerance.absolute + self.tolerance.relative * wanted.abs();
        found == wanted
            || (found.is_nan() && wanted.is_nan())
            || (found.is_finite() && wanted.is_finite() && (found - wanted).abs() <= allowed)
    }
}

/// A tensor's elements as numbers; none of strings. Those beyond 2^53 lose their last digits.
fn numbers(tensor: &Tensor) -> Option<Vec<f64>> {
    macro_rules! list {
        ($element:ty, $to:expr) => {
            tensor
                .as_slice::<$element>()
                .ok()?
                .iter()
                .copied()
                .map($to)
                .collect()
        };
    }
    Some(match tensor.datatype() {
        DataType::Bool => list!(bool, |value| f64::from(u8::from(value))),
        DataType::Uint8 => list!(u8, f64::from),
        DataType::Uint16 => list!(u16, f64::from),
        DataType::Uint32 => list!(u32, f64::from),
        DataType::Uint64 => list!(u64, |value| value as f64),
        DataType::Int8 => list!(i8, f64::from),
        DataType::Int16 => list!(i16, f64::from),
        DataType::Int32 => list!(i32, f64::from),
        DataType::Int64 => list!(i64, |value| value as f64),
        DataType::Fp16 => list!(f16, f16::to_f64),
        DataType::Bf16 => list!(bf16, bf16::to_f64),
        DataType::Fp32 => list!(f32, f64::from),
        DataType::Fp64 => list!(f64, |value| value),
        DataType::Bytes => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outputs(name: &str, values: &[f32]) -> Vec<(String, Tensor)> {
        let tensor = Tensor::from_slice([values.len() as i64], values).unwrap();
        vec![(name.to_owned(), tensor)]
    }

    fn expected(values: &[f32]) -> Expected {
        let tolerance = Tolerance {
            absolute: 0.01,
            relative: 0.1,
        };
        Expected::new(outputs("y", values), tolerance)
    }

    #[test]
    fn close_answers_are_right() {
        let expected = expected(&[10.0, 0.0, f32::NAN, f32::INFINITY]);
        let found = outputs("y", &[10.9, 0.005, f32::NAN, f32::INFINITY]);
        assert_eq!(expected.complaint(&found), None);
        let more: Vec<_> = [outputs("other", &[1.0]), found].concat();
        assert_eq!(expected.complaint(&more), None);
    }

    #[test]
    fn the_first_answer_is_what_later_ones_are_compared_with() {
        let first = Reference::first(Tolerance {
            absolute: 0.01,
            relative: 0.0,
        });
        assert_eq!(first.complaint(&outputs("y", &[1.0, 2.0])), None);
        assert_eq!(first.complaint(&outputs("y", &[1.0, 2.005])), None);
        let words = first.complaint(&outputs("y", &[1.0, 3.0])).unwrap();
        let wanted = "unlike the first answer to these inputs: \
                      output 'y' has 3 instead of 2 at place 1";
        assert_eq!(words, wanted);
        assert!(first.complaint(&outputs("z", &[1.0])).is_some());
    }

    #[test]
    fn other_answers_are_told_with_their_place() {
        let expected = expected(&[10.0, 0.0]);
        let complaint = |found: Vec<_>| expected.complaint(&found).unwrap();
        let words = complaint(outputs("y", &[10.0, 0.5]));
        assert_eq!(words, "output 'y' has 0.5 instead of 0 at place 1");
        assert!(complaint(outputs("y", &[f32::NAN, 0.0])).contains("NaN instead of 10"));
        assert!(complaint(outputs("y", &[1.0])).contains("FP32 [1] instead of FP32 [2]"));
        assert!(complaint(outputs("z", &[1.0])).contains("'y' is missing"));
        let strings = |text: &str| vec![("y".to_owned(), Tensor::bytes([1], [text]).unwrap())];
        let expected = Expected::new(strings("a"), Tolerance::default());
        assert_eq!(expected.complaint(&strings("a")), None);
        assert!(expected.complaint(&strings("b")).is_some());
    }
}

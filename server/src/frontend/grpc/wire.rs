//! A walk over an encoded message before it is decoded: a few bytes on the wire can become
//! hundreds in memory, so what a message will cost is known before it is spent.

use std::mem::size_of;

use bytes::Bytes;
use dormouse_proto::inference as pb;
use pb::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};

/// A map entry: its slot with the key's header and value, and the key's own allocation.
const PARAMETER: usize = 128;

/// The message is cut short or has a field that protobuf does not know.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// Memory that decoding a `ModelInferRequest` takes beyond the message itself.
pub(super) fn infer_request_cost(message: &[u8]) -> Result<usize, Malformed> {
    let mut cost = 0;
    for field in Fields(message) {
        cost += match field? {
            (4, Value::Bytes(_)) => PARAMETER,
            (5, Value::Bytes(input)) => size_of::<InferInputTensor>() + input_cost(input)?,
            (6, Value::Bytes(output)) => {
                size_of::<InferRequestedOutputTensor>() + entries(output, 2)? * PARAMETER
            }
            (7, Value::Bytes(_)) => size_of::<Bytes>(),
            _ => 0,
        };
    }
    Ok(cost)
}

/// Memory that decoding a `RepositoryModelLoadRequest` takes beyond the message itself.
pub(super) fn load_request_cost(message: &[u8]) -> Result<usize, Malformed> {
    Ok(entries(message, 3)? * PARAMETER)
}

fn input_cost(input: &[u8]) -> Result<usize, Malformed> {
    let mut cost = 0;
    for field in Fields(input) {
        cost += match field? {
            (3, value) => value.varints() * size_of::<i64>(),
            (4, Value::Bytes(_)) => PARAMETER,
            (5, Value::Bytes(contents)) => contents_cost(contents)?,
            _ => 0,
        };
    }
    Ok(cost)
}

fn contents_cost(contents: &[u8]) -> Result<usize, Malformed> {
    let mut cost = 0;
    for field in Fields(contents) {
        cost += match field? {
            (1, value) => value.varints(),
            (2 | 4, value) => value.varints() * size_of::<i32>(),
            (3 | 5, value) => value.varints() * size_of::<i64>(),
            // Fixed-width values are as long on the wire as in memory.
            (6 | 7, Value::Bytes(packed)) => packed.len(),
            (6 | 7, Value::Number) => size_of::<f64>(),
            (8, Value::Bytes(_)) => size_of::<Bytes>(),
            _ => 0,
        };
    }
    Ok(cost)
}

fn entries(message: &[u8], number: u64) -> Result<usize, Malformed> {
    let mut count = 0;
    for field in Fields(message) {
        count += usize::from(field?.0 == number);
    }
    Ok(count)
}

/// A field's value, as far as it matters here.
enum Value<'a> {
    Number,
    Bytes(&'a [u8]),
}

impl Value<'_> {
    /// How many integers this is: one, or as many as are packed. Each ends in a byte below 128.
    fn varints(&self) -> usize {
        match self {
            Self::Number => 1,
            Self::Bytes(packed) => packed.iter().map(|&byte| usize::from(byte < 128)).sum(),
        }
    }
}

/// The fields of an encoded message, by number.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Result<u64, Malformed> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first().ok_or(Malformed)?;
            self.0 = rest;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(Malformed)
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn field(&mut self) -> Result<(u64, Value<'a>), Malformed> {
        let key = self.varint()?;
        let value = match key & 7 {
            0 => self.varint().map(|_| Value::Number)?,
            1 => self.take(8).map(|_| Value::Number)?,
            2 => {
                let length = usize::try_from(self.varint()?).map_err(|_| Malformed)?;
                Value::Bytes(self.take(length)?)
            }
            5 => self.take(4).map(|_| Value::Number)?,
            // Groups: no message of ours has ever had one.
            _ => return Err(Malformed),
        };
        Ok((key >> 3, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Value<'a>), Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        (!self.0.is_empty()).then(|| self.field())
    }
}

#[cfg(test)]
mod tests {
    use dormouse_proto::inference::InferTensorContents;
    use proptest::prelude::*;
    use prost::Message;

    use super::*;

    fn with_contents(contents: InferTensorContents) -> Vec<u8> {
        pb::ModelInferRequest {
            inputs: vec![InferInputTensor {
                contents: Some(contents),
                ..Default::default()
            }],
            ..Default::default()
        }
        .encode_to_vec()
    }

    #[test]
    fn an_ordinary_request_costs_little() {
        let request = pb::ModelInferRequest {
            model_name: "simple".into(),
            id: "1".into(),
            inputs: vec![InferInputTensor {
                name: "INPUT0".into(),
                datatype: "FP32".into(),
                shape: vec![1, 3, 224, 224],
                ..Default::default()
            }],
            raw_input_contents: vec![vec![0; 1 << 16].into()],
            ..Default::default()
        };
        let cost = infer_request_cost(&request.encode_to_vec()).unwrap();
        assert!(cost < 1024, "{cost}");
    }

    #[test]
    fn a_million_tiny_fields_are_expensive() {
        for (tag, least) in [(5u8, 256), (6, 64), (7, 32), (4, 64)] {
            let message = [tag << 3 | 2, 0].repeat(1_000_000);
            let cost = infer_request_cost(&message).unwrap();
            assert!(cost >= least * 1_000_000, "{tag}: {cost}");
        }
    }

    #[test]
    fn small_integers_are_counted_at_the_size_they_decode_to() {
        let base = infer_request_cost(&with_contents(InferTensorContents::default())).unwrap();
        let wide = with_contents(InferTensorContents {
            int64_contents: vec![1; 1000],
            ..Default::default()
        });
        assert_eq!(infer_request_cost(&wide).unwrap(), base + 8000);
        let negative = with_contents(InferTensorContents {
            int_contents: vec![-1; 1000],
            ..Default::default()
        });
        assert_eq!(infer_request_cost(&negative).unwrap(), base + 4000);
        let strings = with_contents(InferTensorContents {
            bytes_contents: vec![Bytes::new(); 1000],
            ..Default::default()
        });
        assert_eq!(infer_request_cost(&strings).unwrap(), base + 32_000);
    }

    #[test]
    fn a_message_cut_short_is_malformed() {
        let whole = with_contents(InferTensorContents {
            int64_contents: vec![300; 10],
            ..Default::default()
        });
        for length in 1..whole.len() {
            let walked = infer_request_cost(&whole[..length]).is_ok();
            let decoded = pb::ModelInferRequest::decode(&whole[..length]).is_ok();
            assert_eq!(walked, decoded, "cut to {length}");
        }
    }

    proptest! {
        #[test]
        fn what_decodes_can_be_walked(message in prop::collection::vec(any::<u8>(), 0..64)) {
            let has_groups = message.iter().any(|byte| matches!(byte & 7, 3 | 4));
            if pb::ModelInferRequest::decode(&message[..]).is_ok() && !has_groups {
                prop_assert!(infer_request_cost(&message).is_ok());
            }
        }
    }
}

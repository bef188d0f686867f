//! Tensors from and to what people type and read.

use dormouse_client::{DataType, Tensor, TensorMetadata};
use dormouse_core::shape::{DisplayShape, element_count};
use half::{bf16, f16};
use serde_json::Value;

use super::usage;

/// No input is made larger than a message may be.
const MAX_INPUT_BYTES: u64 = i32::MAX as u64;

/// Where an input's elements come from.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Source {
    Zeros,
    Random,
    File(String),
    Json(String),
}

impl Source {
    pub(super) fn parse(text: &str) -> Self {
        match text {
            "zeros" => Self::Zeros,
            "random" => Self::Random,
            _ => match text.strip_prefix('@') {
                Some(path) => Self::File(path.to_owned()),
                None => Self::Json(text.to_owned()),
            },
        }
    }

    /// The tensor for an input. `shape` is the user's, where the input leaves it open.
    pub(super) fn tensor(
        &self,
        input: &TensorMetadata,
        shape: Option<&[i64]>,
        random: &mut Random,
    ) -> anyhow::Result<Tensor> {
        let name = &input.name;
        let wrong = |reason: String| usage(format!("input {name:?}: {reason}"));
        match self {
            Self::Zeros | Self::Random => {
                let shape = match shape {
                    Some(shape) => shape.to_vec(),
                    None => input.shape.iter().map(|dim| (*dim).max(1)).collect(),
                };
                let random = (*self == Self::Random).then_some(random);
                filled(input.datatype, shape, random).map_err(wrong)
            }
            Self::Json(text) => {
                let value = serde_json::from_str(text).map_err(|error| {
                    wrong(format!(
                        "{text:?} is neither `zeros`, `random`, @FILE nor JSON: {error}"
                    ))
                })?;
                from_json(&value, input, shape).map_err(wrong)
            }
            Self::File(path) => {
                let content = std::fs::read(path)
                    .map_err(|error| wrong(format!("cannot read {path}: {error}")))?;
                if path.ends_with(".json") {
                    let value = serde_json::from_slice(&content)
                        .map_err(|error| wrong(format!("{path} is not JSON: {error}")))?;
                    from_json(&value, input, shape).map_err(wrong)
                } else {
                    from_raw(content, input, shape).map_err(wrong)
                }
            }
        }
    }
}

/// Numbers that look random and are the same in every run.
#[derive(Clone, Debug)]
pub(super) struct Random(pub(super) u64);

impl Random {
    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// In 0..1.
    fn fraction(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u32 << 24) as f32
    }

    /// Small enough to be an index into most tables of embeddings.
    fn small(&mut self) -> u8 {
        (self.next() % 100) as u8
    }
}

fn filled(
    datatype: DataType,
    shape: Vec<i64>,
    random: Option<&mut Random>,
) -> Result<Tensor, String> {
    // A BYTES element takes at least its length field.
    let size = datatype.element_size().unwrap_or(4) as u64;
    let elements = element_count(&shape)
        .filter(|count| {
            count
                .checked_mul(size)
                .is_some_and(|bytes| bytes <= MAX_INPUT_BYTES)
        })
        .ok_or_else(|| {
            format!(
                "shape {} is negative or makes more than {MAX_INPUT_BYTES} bytes",
                DisplayShape(&shape)
            )
        })? as usize;
    let tensor = match (datatype, random) {
        (DataType::Bytes, None) => Tensor::bytes(shape, std::iter::repeat_n("", elements)),
        (DataType::Bytes, Some(random)) => {
            let word = |_| format!("{:016x}", random.next());
            Tensor::bytes(shape, (0..elements).map(word))
        }
        (_, None) => Tensor::raw(datatype, shape, vec![0u8; elements * size as usize]),
        (_, Some(random)) => {
            let mut data = Vec::with_capacity(elements * size as usize);
            for _ in 0..elements {
                match datatype {
                    DataType::Bool => data.push((random.next() & 1) as u8),
                    DataType::Uint8 => data.push(random.next() as u8),
                    DataType::Fp16 => data.extend(f16::from_f32(random.fraction()).to_le_bytes()),
                    DataType::Bf16 => data.extend(bf16::from_f32(random.fraction()).to_le_bytes()),
                    DataType::Fp32 => data.extend(random.fraction().to_le_bytes()),
                    DataType::Fp64 => data.extend(f64::from(random.fraction()).to_le_bytes()),
                    // Little-endian: the value, then zeros up to the element's size.
                    _ => {
                        data.push(random.small());
                        data.resize(data.len() + size as usize - 1, 0);
                    }
                }
            }
            Tensor::raw(datatype, shape, data)
        }
    };
    tensor.map_err(|error| error.to_string())
}

/// Raw little-endian elements; for BYTES, one element.
fn from_raw(
    content: Vec<u8>,
    input: &TensorMetadata,
    shape: Option<&[i64]>,
) -> Result<Tensor, String> {
    let datatype = input.datatype;
    let Some(size) = datatype.element_size() else {
        let ones = || vec![1; input.shape.len()];
        let shape = shape.map_or_else(ones, <[i64]>::to_vec);
        return Tensor::bytes(shape, [content]).map_err(|error| error.to_string());
    };
    let shape = match shape {
        Some(shape) => shape.to_vec(),
        None => solved(&input.shape, content.len() / size)?,
    };
    Tensor::raw(datatype, shape, content).map_err(|error| error.to_string())
}

/// The shape that a signature's open dimension must have for so many elements.
fn solved(signature: &[i64], elements: usize) -> Result<Vec<i64>, String> {
    let shown = DisplayShape(signature);
    let open: Vec<_> = (0..signature.len())
        .filter(|at| signature[*at] < 0)
        .collect();
    let mut shape = signature.to_vec();
    match open[..] {
        [] => {}
        [at] => {
            let closed = signature.iter().copied().filter(|dim| *dim >= 0);
            let rest = element_count(&closed.collect::<Vec<_>>()).unwrap_or(0);
            let known = i64::try_from(elements).ok().zip(i64::try_from(rest).ok());
            shape[at] = known
                .filter(|(elements, rest)| *rest > 0 && elements % rest == 0)
                .map(|(elements, rest)| elements / rest)
                .ok_or_else(|| format!("{elements} elements do not fill {shown}; give --shape"))?;
        }
        _ => {
            return Err(format!(
                "{shown} leaves several dimensions open; give --shape"
            ));
        }
    }
    Ok(shape)
}

fn from_json(
    value: &Value,
    input: &TensorMetadata,
    shape: Option<&[i64]>,
) -> Result<Tensor, String> {
    let mut nested = Vec::new();
    let mut innermost = value;
    while let Value::Array(items) = innermost {
        nested.push(i64::try_from(items.len()).map_err(|error| error.to_string())?);
        let Some(first) = items.first() else { break };
        innermost = first;
    }
    let mut leaves = Vec::new();
    flatten(value, &nested, &mut leaves)?;
    let shape = match shape {
        Some(shape) => shape.to_vec(),
        None if nested.len() == input.shape.len() => nested,
        // One row, written without the brackets of the batch.
        None if nested.len() + 1 == input.shape.len() => {
            nested.insert(0, 1);
            nested
        }
        None => solved(&input.shape, leaves.len())?,
    };
    typed(input.datatype, shape, &leaves)
}

/// The elements in order; every list on a level must be as long as the first.
fn flatten<'a>(value: &'a Value, dims: &[i64], leaves: &mut Vec<&'a Value>) -> Result<(), String> {
    match (value, dims.split_first()) {
        (Value::Array(items), Some((length, rest))) => {
            if items.len() as i64 != *length {
                let found = items.len();
                return Err(format!(
                    "ragged JSON: a list of {found} where others have {length}"
                ));
            }
            items
                .iter()
                .try_for_each(|item| flatten(item, rest, leaves))
        }
        (Value::Array(_), None) | (_, Some(_)) => {
            Err("ragged JSON: a list where others have a value".to_owned())
        }
        (leaf, None) => {
            leaves.push(leaf);
            Ok(())
        }
    }
}

fn typed(datatype: DataType, shape: Vec<i64>, leaves: &[&Value]) -> Result<Tensor, String> {
    fn each<T>(
        leaves: &[&Value],
        datatype: DataType,
        convert: impl Fn(&Value) -> Option<T>,
    ) -> Result<Vec<T>, String> {
        let convert = |leaf: &&Value| {
            convert(leaf).ok_or_else(|| format!("{leaf} is not a value of {datatype}"))
        };
        leaves.iter().map(convert).collect()
    }
    macro_rules! tensor {
        ($convert:expr) => {
            Tensor::from_vec(shape, each(leaves, datatype, $convert)?)
        };
    }
    macro_rules! integers {
        ($integer:ty) => {
            tensor!(|leaf| match leaf.as_i64() {
                Some(value) => <$integer>::try_from(value).ok(),
                None => <$integer>::try_from(leaf.as_u64()?).ok(),
            })
        };
    }
    let tensor = match datatype {
        DataType::Bool => tensor!(|leaf| match leaf.as_u64() {
            Some(0) => Some(false),
            Some(1) => Some(true),
            _ => leaf.as_bool(),
        }),
        DataType::Uint8 => integers!(u8),
        DataType::Uint16 => integers!(u16),
        DataType::Uint32 => integers!(u32),
        DataType::Uint64 => integers!(u64),
        DataType::Int8 => integers!(i8),
        DataType::Int16 => integers!(i16),
        DataType::Int32 => integers!(i32),
        DataType::Int64 => integers!(i64),
        DataType::Fp16 => tensor!(|leaf| leaf.as_f64().map(f16::from_f64)),
        DataType::Bf16 => tensor!(|leaf| leaf.as_f64().map(bf16::from_f64)),
        DataType::Fp32 => tensor!(|leaf| leaf.as_f64().map(|value| value as f32)),
        DataType::Fp64 => tensor!(Value::as_f64),
        DataType::Bytes => {
            let strings = each(leaves, datatype, |leaf| leaf.as_str().map(str::to_owned))?;
            Tensor::bytes(shape, strings)
        }
    };
    tensor.map_err(|error| error.to_string())
}

/// The first `limit` elements as JSON.
pub(super) fn to_json(tensor: &Tensor, limit: usize) -> anyhow::Result<Vec<Value>> {
    macro_rules! integers {
        ($integer:ty) => {{
            let values = tensor.as_slice::<$integer>()?;
            values
                .iter()
                .take(limit)
                .map(|value| Value::from(*value))
                .collect()
        }};
    }
    macro_rules! floats {
        ($float:ty) => {{
            let values = tensor.as_slice::<$float>()?;
            values
                .iter()
                .take(limit)
                .map(|value| number(&value.to_string()))
                .collect()
        }};
    }
    Ok(match tensor.datatype() {
        DataType::Bool => integers!(bool),
        DataType::Uint8 => integers!(u8),
        DataType::Uint16 => integers!(u16),
        DataType::Uint32 => integers!(u32),
        DataType::Uint64 => integers!(u64),
        DataType::Int8 => integers!(i8),
        DataType::Int16 => integers!(i16),
        DataType::Int32 => integers!(i32),
        DataType::Int64 => integers!(i64),
        DataType::Fp16 => floats!(f16),
        DataType::Bf16 => floats!(bf16),
        DataType::Fp32 => floats!(f32),
        DataType::Fp64 => floats!(f64),
        DataType::Bytes => {
            let elements = tensor.byte_elements()?;
            let text = |one: &bytes::Bytes| String::from_utf8_lossy(one).into_owned();
            elements
                .iter()
                .take(limit)
                .map(|one| Value::from(text(one)))
                .collect()
        }
    })
}

/// The shortest number that reads as the float did; what JSON has no number for becomes a string.
fn number(text: &str) -> Value {
    let value = text.parse().ok().and_then(serde_json::Number::from_f64);
    value.map_or_else(|| Value::from(text), Value::Number)
}

#[cfg(test)]
mod tests;

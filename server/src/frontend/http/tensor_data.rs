//! Tensor elements between JSON and the raw layout.
//!
//! Elements are appended to the raw buffer as they are read: no tree, no second pass, and no
//! allocation that a number in the request decides. FP16 and BF16 travel as JSON numbers.
//! `NaN`, `Infinity` and `-Infinity` are accepted bare (as Python's `json` writes them) or as
//! strings, and written bare, which is what Triton writes and Python's parsers read.

use dormouse_core::datatype::DataType;
use dormouse_core::shape::{DisplayShape, element_count};
use half::{bf16, f16};
use serde::Serialize;
use smallvec::SmallVec;

use super::json::{NotInteger, Number, Reader, parse_integer};
use crate::error::ServeError;
use crate::request::Tensor;

/// The declared side of an input whose elements are about to be read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Declared<'a> {
    pub name: &'a str,
    pub datatype: DataType,
    pub shape: &'a [i64],
}

/// Reads `data`, flat or nested in row-major order, into the raw layout.
pub(super) fn read(reader: &mut Reader<'_>, declared: Declared<'_>) -> Result<Vec<u8>, ServeError> {
    macro_rules! integers {
        ($kind:ty) => {
            elements(reader, declared, |reader, raw| {
                let token = reader.number("a whole number")?;
                let value: $kind = parse_integer(token).map_err(|error| match error {
                    NotInteger::NotWhole(token) => not_a(token, declared.datatype),
                    NotInteger::OutOfRange(token) => {
                        out_of_range(token, declared.datatype, (<$kind>::MIN, <$kind>::MAX))
                    }
                })?;
                raw.extend_from_slice(&value.to_le_bytes());
                Ok(())
            })
        };
    }
    macro_rules! floats {
        ($parse:expr, $from:expr) => {
            elements(reader, declared, |reader, raw| {
                let value = match reader.float("a number")? {
                    Number::Finite(token) => {
                        let value = $parse(token);
                        if !value.is_finite() {
                            return Err(overflow(token, declared.datatype));
                        }
                        value
                    }
                    Number::Special(value) => $from(value),
                };
                raw.extend_from_slice(&value.to_le_bytes());
                Ok(())
            })
        };
    }
    // The grammar was checked, so these cannot fail; NaN would be refused above.
    let double = |token: &str| token.parse::<f64>().unwrap_or(f64::NAN);
    match declared.datatype {
        DataType::Bool => elements(reader, declared, |reader, raw| {
            raw.push(match reader.peek() {
                Some(b't' | b'f') => u8::from(reader.boolean("an element")?),
                Some(b'0' | b'1') => match reader.number("0 or 1")? {
                    "0" => 0,
                    "1" => 1,
                    other => return Err(not_a(other, DataType::Bool)),
                },
                _ => return Err(reader.error("true, false, 0 or 1")),
            });
            Ok(())
        }),
        DataType::Uint8 => integers!(u8),
        DataType::Uint16 => integers!(u16),
        DataType::Uint32 => integers!(u32),
        DataType::Uint64 => integers!(u64),
        DataType::Int8 => integers!(i8),
        DataType::Int16 => integers!(i16),
        DataType::Int32 => integers!(i32),
        DataType::Int64 => integers!(i64),
        DataType::Fp16 => floats!(|token| f16::from_f64(double(token)), f16::from_f64),
        DataType::Bf16 => floats!(|token| bf16::from_f64(double(token)), bf16::from_f64),
        DataType::Fp32 => floats!(
            |token: &str| token.parse::<f32>().unwrap_or(f32::NAN),
            |value| value as f32
        ),
        DataType::Fp64 => floats!(double, |value: f64| value),
        DataType::Bytes => elements(reader, declared, |reader, raw| {
            let string = reader.string("a string")?;
            let length = u32::try_from(string.len())
                .map_err(|_| ServeError::invalid("a string longer than 4 GiB"))?;
            raw.extend_from_slice(&length.to_le_bytes());
            raw.extend_from_slice(string.as_bytes());
            Ok(())
        }),
    }
}

/// Walks the arrays of `data`, holding nested ones to one shape, and reads each element by `one`.
fn elements(
    reader: &mut Reader<'_>,
    declared: Declared<'_>,
    mut one: impl FnMut(&mut Reader<'_>, &mut Vec<u8>) -> Result<(), ServeError>,
) -> Result<Vec<u8>, ServeError> {
    let Declared { name, shape, .. } = declared;
    let expected = element_count(shape).ok_or_else(|| {
        ServeError::invalid(format!(
            "input '{name}': shape {} has more elements than can be counted",
            DisplayShape(shape)
        ))
    })?;
    let ragged = || {
        ServeError::invalid(format!(
            "input '{name}': the arrays in 'data' are ragged: expected a flat array or nested \
             arrays of equal lengths"
        ))
    };
    let wrong_count = |found: &str| {
        ServeError::invalid(format!(
            "input '{name}': shape {} has {expected} elements, 'data' has {found}",
            DisplayShape(shape)
        ))
    };
    // An element takes two bytes of text at least, so this is bounded by what has arrived.
    let elements_left = reader.remaining() as u64 / 2 + 1;
    let element_size = declared.datatype.element_size().unwrap_or(4) as u64;
    let mut raw = Vec::with_capacity((expected.min(elements_left) * element_size) as usize);

    // By depth, from the outermost: items seen in the open array, and the length that the first
    // complete array of that depth had.
    let mut open: SmallVec<[u64; 8]> = SmallVec::new();
    let mut lengths: SmallVec<[Option<u64>; 8]> = SmallVec::new();
    let mut has_elements = false;
    let mut count = 0u64;
    if !reader.take(b'[') {
        return Err(reader.error(&format!("an array for 'data' of input '{name}'")));
    }
    open.push(0);
    lengths.push(None);
    loop {
        // An item, or the end of an array that has none.
        let depth = open.len();
        match reader.peek() {
            Some(b'[') => {
                reader.take(b'[');
                if has_elements && lengths.len() == depth {
                    return Err(ragged());
                }
                if depth == reader.max_depth() as usize {
                    return Err(reader.too_deep());
                }
                open[depth - 1] += 1;
                open.push(0);
                if lengths.len() == depth {
                    lengths.push(None);
                }
                continue;
            }
            Some(b']') if open[depth - 1] == 0 => {}
            _ => {
                if lengths.len() != depth {
                    return Err(ragged());
                }
                if count == expected {
                    return Err(wrong_count("more"));
                }
                one(reader, &mut raw).map_err(|error| {
                    ServeError::invalid(format!(
                        "input '{name}', element {count}: {}",
                        error.message()
                    ))
                })?;
                has_elements = true;
                count += 1;
                open[depth - 1] += 1;
                if reader.take(b',') {
                    if reader.peek() == Some(b']') {
                        return Err(reader.error("an element"));
                    }
                    continue;
                }
            }
        }
        // The ends of arrays.
        loop {
            if !reader.take(b']') {
                return Err(reader.error(&format!("',' or ']' in 'data' of input '{name}'")));
            }
            let Some(items) = open.pop() else {
                return Err(ragged());
            };
            let depth = open.len();
            if *lengths[depth].get_or_insert(items) != items {
                return Err(ragged());
            }
            if depth == 0 {
                return if count == expected {
                    Ok(raw)
                } else {
                    Err(wrong_count(&count.to_string()))
                };
            }
            if reader.take(b',') {
                if reader.peek() == Some(b']') {
                    return Err(reader.error("an array"));
                }
                break;
            }
        }
    }
}

fn not_a(token: &str, datatype: DataType) -> ServeError {
    let expected = match datatype {
        DataType::Bool => "true, false, 0 or 1",
        _ => "a whole number",
    };
    ServeError::invalid(format!("{token} is not {expected}, as {datatype} needs"))
}

fn out_of_range<T: std::fmt::Display>(
    token: &str,
    datatype: DataType,
    (least, most): (T, T),
) -> ServeError {
    ServeError::invalid(format!(
        "{token} is out of range for {datatype} ({least} to {most})"
    ))
}

fn overflow(token: &str, datatype: DataType) -> ServeError {
    ServeError::invalid(format!("{token} is out of range for {datatype}"))
}

/// Appends `tensor`'s elements as a flat JSON array.
pub(super) fn write(text: &mut Vec<u8>, name: &str, tensor: &Tensor) -> Result<(), ServeError> {
    macro_rules! numbers {
        ($kind:ty, $size:literal, $write:expr) => {
            list(text, fixed::<$size>(name, tensor)?, |text, bytes| {
                $write(text, <$kind>::from_le_bytes(*bytes));
                Ok(())
            })
        };
    }
    match tensor.datatype {
        DataType::Bool => list(text, fixed::<1>(name, tensor)?, |text, [byte]| {
            text.extend_from_slice(if *byte == 0 { b"false" } else { b"true" });
            Ok(())
        }),
        DataType::Uint8 => numbers!(u8, 1, put),
        DataType::Uint16 => numbers!(u16, 2, put),
        DataType::Uint32 => numbers!(u32, 4, put),
        DataType::Uint64 => numbers!(u64, 8, put),
        DataType::Int8 => numbers!(i8, 1, put),
        DataType::Int16 => numbers!(i16, 2, put),
        DataType::Int32 => numbers!(i32, 4, put),
        DataType::Int64 => numbers!(i64, 8, put),
        DataType::Fp16 => numbers!(f16, 2, |text, value: f16| float(text, value.to_f32())),
        DataType::Bf16 => numbers!(bf16, 2, |text, value: bf16| float(text, value.to_f32())),
        DataType::Fp32 => numbers!(f32, 4, float),
        DataType::Fp64 => numbers!(f64, 8, float),
        DataType::Bytes => {
            let strings = strings(name, tensor)?;
            list(text, strings.into_iter(), |text, bytes| {
                let string = std::str::from_utf8(bytes).map_err(|_| {
                    ServeError::invalid(format!(
                        "output '{name}' has bytes that are not UTF-8, which JSON cannot carry; \
                         ask for it with \"binary_data\": true"
                    ))
                })?;
                put(text, string);
                Ok(())
            })
        }
    }
}

fn list<T>(
    text: &mut Vec<u8>,
    items: impl Iterator<Item = T>,
    mut one: impl FnMut(&mut Vec<u8>, T) -> Result<(), ServeError>,
) -> Result<(), ServeError> {
    text.push(b'[');
    for (index, item) in items.enumerate() {
        if index > 0 {
            text.push(b',');
        }
        one(text, item)?;
    }
    text.push(b']');
    Ok(())
}

/// Appends a value the way serde_json writes it.
pub(super) fn put(text: &mut Vec<u8>, value: impl Serialize) {
    value
        .serialize(&mut serde_json::Serializer::new(text))
        .expect("numbers and strings can be written to memory");
}

fn float<T: Serialize + Into<f64> + Copy>(text: &mut Vec<u8>, value: T) {
    let wide: f64 = value.into();
    if wide.is_finite() {
        put(text, value);
    } else if wide.is_nan() {
        text.extend_from_slice(b"NaN");
    } else if wide > 0.0 {
        text.extend_from_slice(b"Infinity");
    } else {
        text.extend_from_slice(b"-Infinity");
    }
}

fn mismatch(name: &str, tensor: &Tensor) -> ServeError {
    ServeError::internal(format!(
        "output '{name}' of type {} and shape {} does not fit its {} bytes",
        tensor.datatype,
        DisplayShape(&tensor.shape),
        tensor.data.len()
    ))
}

/// The elements of a tensor whose elements take `N` bytes.
fn fixed<'a, const N: usize>(
    name: &str,
    tensor: &'a Tensor,
) -> Result<impl Iterator<Item = &'a [u8; N]>, ServeError> {
    let (elements, rest) = tensor.data.as_chunks::<N>();
    if !rest.is_empty() || element_count(&tensor.shape) != Some(elements.len() as u64) {
        return Err(mismatch(name, tensor));
    }
    Ok(elements.iter())
}

/// The elements of a BYTES tensor.
fn strings<'a>(name: &str, tensor: &'a Tensor) -> Result<Vec<&'a [u8]>, ServeError> {
    let mut rest: &[u8] = &tensor.data;
    let mut found = Vec::new();
    while let Some((length, after)) = rest.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length) as usize;
        let Some((string, after)) = after.split_at_checked(length) else {
            return Err(mismatch(name, tensor));
        };
        found.push(string);
        rest = after;
    }
    if !rest.is_empty() || element_count(&tensor.shape) != Some(found.len() as u64) {
        return Err(mismatch(name, tensor));
    }
    Ok(found)
}

#[cfg(test)]
mod tests;

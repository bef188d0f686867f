//! Typed tensor contents, brought into the raw layout.

use bytes::Bytes;
use dormouse_core::datatype::DataType;
use dormouse_core::shape::{DisplayShape, element_count};
use dormouse_proto::inference as pb;

use crate::error::ServeError;

/// Which tensor of which model an error is about.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) model: &'a str,
    pub(super) input: &'a str,
}

/// Whether any typed value is present.
pub(super) fn is_empty(contents: &pb::InferTensorContents) -> bool {
    filled(contents).iter().all(|(_, count)| *count == 0)
}

/// Writes typed values in the raw layout, once their number is what the shape says.
pub(super) fn to_raw(
    contents: &pb::InferTensorContents,
    datatype: DataType,
    shape: &[i64],
    place: Place<'_>,
) -> Result<Bytes, ServeError> {
    let Some(field) = field_of(datatype) else {
        return Err(ServeError::invalid(format!(
            "input '{}' of model '{}' is {datatype}, which has no typed contents: expected only raw \
             bytes in raw_input_contents",
            place.input, place.model
        )));
    };
    let mut count = 0;
    for (name, filled) in filled(contents) {
        if name == field {
            count = filled;
        } else if filled > 0 {
            return Err(ServeError::invalid(format!(
                "unexpected {name} for input '{}' of model '{}': {datatype} values belong in {field}",
                place.input, place.model
            )));
        }
    }
    if element_count(shape) != Some(count as u64) {
        return Err(ServeError::invalid(format!(
            "unexpected number of values in {field} for input '{}' of model '{}': shape {} needs \
             {}, got {count}",
            place.input,
            place.model,
            DisplayShape(shape),
            element_count(shape).map_or("more than can be sent".to_owned(), |n| n.to_string()),
        )));
    }
    match datatype {
        DataType::Bool => Ok(contents
            .bool_contents
            .iter()
            .copied()
            .map(u8::from)
            .collect()),
        DataType::Int8 => narrow(&contents.int_contents, i8::to_le_bytes, datatype, place),
        DataType::Int16 => narrow(&contents.int_contents, i16::to_le_bytes, datatype, place),
        DataType::Int32 => Ok(join(&contents.int_contents, i32::to_le_bytes)),
        DataType::Int64 => Ok(join(&contents.int64_contents, i64::to_le_bytes)),
        DataType::Uint8 => narrow(&contents.uint_contents, u8::to_le_bytes, datatype, place),
        DataType::Uint16 => narrow(&contents.uint_contents, u16::to_le_bytes, datatype, place),
        DataType::Uint32 => Ok(join(&contents.uint_contents, u32::to_le_bytes)),
        DataType::Uint64 => Ok(join(&contents.uint64_contents, u64::to_le_bytes)),
        DataType::Fp32 => Ok(join(&contents.fp32_contents, f32::to_le_bytes)),
        DataType::Fp64 => Ok(join(&contents.fp64_contents, f64::to_le_bytes)),
        DataType::Bytes => prefix(&contents.bytes_contents, place),
        DataType::Fp16 | DataType::Bf16 => unreachable!("these have no field"),
    }
}

/// The field that carries values of a type, none for types that only travel raw.
const fn field_of(datatype: DataType) -> Option<&'static str> {
    match datatype {
        DataType::Bool => Some("bool_contents"),
        DataType::Int8 | DataType::Int16 | DataType::Int32 => Some("int_contents"),
        DataType::Int64 => Some("int64_contents"),
        DataType::Uint8 | DataType::Uint16 | DataType::Uint32 => Some("uint_contents"),
        DataType::Uint64 => Some("uint64_contents"),
        DataType::Fp32 => Some("fp32_contents"),
        DataType::Fp64 => Some("fp64_contents"),
        DataType::Bytes => Some("bytes_contents"),
        DataType::Fp16 | DataType::Bf16 => None,
    }
}

fn filled(contents: &pb::InferTensorContents) -> [(&'static str, usize); 8] {
    [
        ("bool_contents", contents.bool_contents.len()),
        ("int_contents", contents.int_contents.len()),
        ("int64_contents", contents.int64_contents.len()),
        ("uint_contents", contents.uint_contents.len()),
        ("uint64_contents", contents.uint64_contents.len()),
        ("fp32_contents", contents.fp32_contents.len()),
        ("fp64_contents", contents.fp64_contents.len()),
        ("bytes_contents", contents.bytes_contents.len()),
    ]
}

fn join<T: Copy, const N: usize>(values: &[T], to_bytes: fn(T) -> [u8; N]) -> Bytes {
    let mut raw = Vec::with_capacity(values.len() * N);
    for &value in values {
        raw.extend_from_slice(&to_bytes(value));
    }
    raw.into()
}

fn narrow<W, T, const N: usize>(
    values: &[W],
    to_bytes: fn(T) -> [u8; N],
    datatype: DataType,
    place: Place<'_>,
) -> Result<Bytes, ServeError>
where
    W: Copy + std::fmt::Display,
    T: TryFrom<W>,
{
    let mut raw = Vec::with_capacity(values.len() * N);
    for (element, &value) in values.iter().enumerate() {
        let Ok(narrow) = T::try_from(value) else {
            return Err(ServeError::invalid(format!(
                "element {element} of input '{}' of model '{}' is {value}, which is no {datatype}",
                place.input, place.model
            )));
        };
        raw.extend_from_slice(&to_bytes(narrow));
    }
    Ok(raw.into())
}

fn prefix(elements: &[Bytes], place: Place<'_>) -> Result<Bytes, ServeError> {
    let mut raw = Vec::with_capacity(elements.iter().map(|element| element.len() + 4).sum());
    for (index, element) in elements.iter().enumerate() {
        let Ok(length) = u32::try_from(element.len()) else {
            return Err(ServeError::invalid(format!(
                "element {index} of input '{}' of model '{}' is {} bytes long, expected less than 4 GiB",
                place.input,
                place.model,
                element.len()
            )));
        };
        raw.extend_from_slice(&length.to_le_bytes());
        raw.extend_from_slice(element);
    }
    Ok(raw.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place<'_> = Place {
        model: "m",
        input: "x",
    };

    fn contents(fill: impl FnOnce(&mut pb::InferTensorContents)) -> pb::InferTensorContents {
        let mut contents = pb::InferTensorContents::default();
        fill(&mut contents);
        contents
    }

    #[test]
    fn every_type_is_written_in_the_raw_layout() {
        let table: Vec<(DataType, pb::InferTensorContents, &[u8])> = vec![
            (
                DataType::Bool,
                contents(|c| c.bool_contents = vec![true, false]),
                &[1, 0],
            ),
            (
                DataType::Int8,
                contents(|c| c.int_contents = vec![-128, 127]),
                &[0x80, 0x7f],
            ),
            (
                DataType::Int16,
                contents(|c| c.int_contents = vec![-2, 258]),
                &[0xfe, 0xff, 2, 1],
            ),
            (
                DataType::Int32,
                contents(|c| c.int_contents = vec![-1, 1]),
                &[255, 255, 255, 255, 1, 0, 0, 0],
            ),
            (
                DataType::Int64,
                contents(|c| c.int64_contents = vec![-2, 1]),
                &[
                    254, 255, 255, 255, 255, 255, 255, 255, 1, 0, 0, 0, 0, 0, 0, 0,
                ],
            ),
            (
                DataType::Uint8,
                contents(|c| c.uint_contents = vec![0, 255]),
                &[0, 255],
            ),
            (
                DataType::Uint16,
                contents(|c| c.uint_contents = vec![1, 65535]),
                &[1, 0, 255, 255],
            ),
            (
                DataType::Uint32,
                contents(|c| c.uint_contents = vec![1, u32::MAX]),
                &[1, 0, 0, 0, 255, 255, 255, 255],
            ),
            (
                DataType::Uint64,
                contents(|c| c.uint64_contents = vec![1, u64::MAX]),
                &[
                    1, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255,
                ],
            ),
            (
                DataType::Fp32,
                contents(|c| c.fp32_contents = vec![1.0, -0.0]),
                &[0, 0, 0x80, 0x3f, 0, 0, 0, 0x80],
            ),
            (
                DataType::Fp64,
                contents(|c| c.fp64_contents = vec![1.0, 0.0]),
                &[0, 0, 0, 0, 0, 0, 0xf0, 0x3f, 0, 0, 0, 0, 0, 0, 0, 0],
            ),
            (
                DataType::Bytes,
                contents(|c| c.bytes_contents = vec![Bytes::new(), "ab".into()]),
                &[0, 0, 0, 0, 2, 0, 0, 0, b'a', b'b'],
            ),
        ];
        let mut seen = Vec::new();
        for (datatype, contents, raw) in table {
            assert_eq!(
                to_raw(&contents, datatype, &[2], PLACE).unwrap(),
                raw,
                "{datatype}"
            );
            seen.push(datatype);
        }
        let left: Vec<_> = DataType::ALL
            .into_iter()
            .filter(|d| !seen.contains(d))
            .collect();
        assert_eq!(left, [DataType::Fp16, DataType::Bf16]);
    }

    #[test]
    fn half_floats_are_only_raw() {
        for datatype in [DataType::Fp16, DataType::Bf16] {
            let contents = contents(|c| c.fp32_contents = vec![1.0]);
            let error = to_raw(&contents, datatype, &[1], PLACE).unwrap_err();
            assert!(error.message().contains("only raw"), "{error}");
            assert!(error.message().contains(datatype.name()), "{error}");
        }
    }

    #[test]
    fn values_out_of_range_are_refused_by_position() {
        let table = [
            (
                DataType::Int8,
                contents(|c| c.int_contents = vec![0, 128]),
                "element 1 of input 'x' of model 'm' is 128, which is no INT8",
            ),
            (
                DataType::Int8,
                contents(|c| c.int_contents = vec![-129, 0]),
                "element 0 of input 'x' of model 'm' is -129, which is no INT8",
            ),
            (
                DataType::Int16,
                contents(|c| c.int_contents = vec![0, 32768]),
                "element 1 of input 'x' of model 'm' is 32768, which is no INT16",
            ),
            (
                DataType::Uint8,
                contents(|c| c.uint_contents = vec![0, 256]),
                "element 1 of input 'x' of model 'm' is 256, which is no UINT8",
            ),
            (
                DataType::Uint16,
                contents(|c| c.uint_contents = vec![0, 65536]),
                "element 1 of input 'x' of model 'm' is 65536, which is no UINT16",
            ),
        ];
        for (datatype, contents, expected) in table {
            let error = to_raw(&contents, datatype, &[2], PLACE).unwrap_err();
            assert_eq!(error.message(), expected);
        }
    }

    #[test]
    fn values_in_another_types_field_are_refused() {
        let contents = contents(|c| c.fp32_contents = vec![1.0]);
        let error = to_raw(&contents, DataType::Int32, &[1], PLACE).unwrap_err();
        assert_eq!(
            error.message(),
            "unexpected fp32_contents for input 'x' of model 'm': INT32 values belong in int_contents"
        );
    }

    #[test]
    fn the_number_of_values_must_fit_the_shape() {
        let contents = contents(|c| c.int_contents = vec![1, 2, 3]);
        for shape in [&[4][..], &[1 << 40], &[i64::MAX, i64::MAX], &[-3], &[]] {
            let error = to_raw(&contents, DataType::Int32, shape, PLACE).unwrap_err();
            assert!(error.message().contains("got 3"), "{error}");
        }
        assert!(to_raw(&contents, DataType::Int32, &[3, 1], PLACE).is_ok());
    }
}

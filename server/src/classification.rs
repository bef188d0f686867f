//! Triton's classification extension: an output's largest values as strings `value:index[:label]`.

use std::fmt::Write;

use bytes::{BufMut, BytesMut};
use dormouse_core::datatype::DataType;
use dormouse_core::shape::{Shape, element_count};
use half::{bf16, f16};

use crate::error::ServeError;
use crate::request::Tensor;

/// The labels of an output's elements, by index.
pub type Labels = [Box<str>];

/// Replaces a tensor by its `count` largest values, of each row where it has rows.
pub fn classify(
    output: &str,
    tensor: &Tensor,
    has_rows: bool,
    (count, labels): (u64, &Labels),
) -> Result<Tensor, ServeError> {
    let rows = match tensor.shape.first() {
        Some(&rows) if has_rows => Some(rows),
        _ => None,
    };
    let classes = element_count(&tensor.shape[usize::from(rows.is_some())..]).unwrap_or(0);
    let kept = count.min(classes);
    let mut data = BytesMut::new();
    if kept > 0 {
        let row_bytes = tensor.data.len() as u64 / rows.map_or(1, |rows| rows.max(1) as u64);
        let row_bytes = usize::try_from(row_bytes).unwrap_or(usize::MAX).max(1);
        for row in tensor.data.chunks_exact(row_bytes) {
            classify_row(
                output,
                tensor.datatype,
                row,
                (kept as usize, labels),
                &mut data,
            )?;
        }
    } else {
        check_datatype(output, tensor.datatype)?;
    }
    let shape: Shape = rows.into_iter().chain([kept as i64]).collect();
    Ok(Tensor {
        datatype: DataType::Bytes,
        shape,
        data: data.freeze(),
    })
}

/// Refuses what has no order, before a model is run for it.
pub fn check_datatype(output: &str, datatype: DataType) -> Result<(), ServeError> {
    match datatype {
        DataType::Bytes | DataType::Bool => Err(ServeError::invalid(format!(
            "class result not available for output '{output}' due to unsupported type '{datatype}'"
        ))),
        _ => Ok(()),
    }
}

fn classify_row(
    output: &str,
    datatype: DataType,
    row: &[u8],
    wanted: (usize, &Labels),
    data: &mut BytesMut,
) -> Result<(), ServeError> {
    // Whole numbers are written as such, others with six digits, as C++'s `to_string` does.
    match datatype {
        DataType::Uint8 => whole(row, u8::from_le_bytes, wanted, data),
        DataType::Uint16 => whole(row, u16::from_le_bytes, wanted, data),
        DataType::Uint32 => whole(row, u32::from_le_bytes, wanted, data),
        DataType::Uint64 => whole(row, u64::from_le_bytes, wanted, data),
        DataType::Int8 => whole(row, i8::from_le_bytes, wanted, data),
        DataType::Int16 => whole(row, i16::from_le_bytes, wanted, data),
        DataType::Int32 => whole(row, i32::from_le_bytes, wanted, data),
        DataType::Int64 => whole(row, i64::from_le_bytes, wanted, data),
        DataType::Fp16 => real(row, |bytes| f16::from_le_bytes(bytes).into(), wanted, data),
        DataType::Bf16 => real(row, |bytes| bf16::from_le_bytes(bytes).into(), wanted, data),
        DataType::Fp32 => real(row, |bytes| f32::from_le_bytes(bytes).into(), wanted, data),
        DataType::Fp64 => real(row, f64::from_le_bytes, wanted, data),
        DataType::Bytes | DataType::Bool => check_datatype(output, datatype)?,
    }
    Ok(())
}

fn whole<const N: usize, T: Copy + Ord + std::fmt::Display>(
    row: &[u8],
    read: impl Fn([u8; N]) -> T,
    (count, labels): (usize, &Labels),
    data: &mut BytesMut,
) {
    let values: Vec<T> = values(row, read);
    for index in largest(&values, count, |a, b| b.cmp(a)) {
        put(
            data,
            format_args!("{}:{index}", values[index]),
            labels.get(index).map(|label| &**label),
        );
    }
}

fn real<const N: usize>(
    row: &[u8],
    read: impl Fn([u8; N]) -> f64,
    (count, labels): (usize, &Labels),
    data: &mut BytesMut,
) {
    let values: Vec<f64> = values(row, read);
    // What is not a number is no score: it comes last.
    let key = |value: f64| {
        if value.is_nan() {
            f64::NEG_INFINITY
        } else {
            value
        }
    };
    for index in largest(&values, count, |&a, &b| key(b).total_cmp(&key(a))) {
        put(
            data,
            format_args!("{:.6}:{index}", values[index]),
            labels.get(index).map(|label| &**label),
        );
    }
}

fn values<const N: usize, T>(row: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    let (elements, _) = row.as_chunks::<N>();
    elements.iter().map(|element| read(*element)).collect()
}

/// The indices of the first `count` values by `order`; equal ones keep their order.
fn largest<T>(
    values: &[T],
    count: usize,
    order: impl Fn(&T, &T) -> std::cmp::Ordering,
) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..values.len()).collect();
    let by_value = |&a: &usize, &b: &usize| order(&values[a], &values[b]).then_with(|| a.cmp(&b));
    // A few of many thousand classes: only these are sorted.
    if count > 0 && count < indices.len() {
        indices.select_nth_unstable_by(count - 1, by_value);
        indices.truncate(count);
    }
    indices.sort_unstable_by(by_value);
    indices
}

/// Appends one element of a BYTES tensor.
fn put(data: &mut BytesMut, value: std::fmt::Arguments<'_>, label: Option<&str>) {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = text.write_fmt(value);
    if let Some(label) = label {
        text.push(':');
        text.push_str(label);
    }
    data.put_u32_le(text.len() as u32);
    data.put_slice(text.as_bytes());
}

/// The labels in a file: one per line.
pub fn read_labels(text: &str) -> Vec<Box<str>> {
    text.lines().map(Box::from).collect()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn tensor(datatype: DataType, shape: &[i64], data: impl Into<Bytes>) -> Tensor {
        Tensor {
            datatype,
            shape: Shape::from_slice(shape),
            data: data.into(),
        }
    }

    fn floats(values: &[f32]) -> Vec<u8> {
        values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect()
    }

    fn strings(tensor: &Tensor) -> Vec<String> {
        let mut rest = &tensor.data[..];
        let mut found = Vec::new();
        while let Some((length, tail)) = rest.split_first_chunk::<4>() {
            let (text, tail) = tail.split_at(u32::from_le_bytes(*length) as usize);
            found.push(String::from_utf8(text.to_vec()).unwrap());
            rest = tail;
        }
        found
    }

    #[test]
    fn each_row_has_its_own_largest_values() {
        let scores = tensor(
            DataType::Fp32,
            &[2, 3],
            floats(&[0.1, 0.7, 0.2, 4.0, -1.0, 4.0]),
        );
        let classes = classify("y", &scores, true, (2, &[])).unwrap();
        assert_eq!(classes.datatype, DataType::Bytes);
        assert_eq!(classes.shape[..], [2, 2]);
        assert_eq!(
            strings(&classes),
            ["0.700000:1", "0.200000:2", "4.000000:0", "4.000000:2"]
        );
    }

    #[test]
    fn without_rows_the_whole_tensor_is_one() {
        let scores = tensor(
            DataType::Int64,
            &[1, 3],
            [5i64, -2, 9].map(i64::to_le_bytes).concat(),
        );
        let labels = read_labels("cat\r\ndog\n");
        let classes = classify("y", &scores, false, (9, &labels)).unwrap();
        assert_eq!(classes.shape[..], [3]);
        assert_eq!(strings(&classes), ["9:2", "5:0:cat", "-2:1:dog"]);
    }

    #[test]
    fn not_a_number_comes_last_and_no_class_is_none() {
        let scores = tensor(DataType::Fp32, &[1, 2], floats(&[f32::NAN, -3.0]));
        let classes = classify("y", &scores, true, (2, &[])).unwrap();
        assert_eq!(strings(&classes), ["-3.000000:1", "NaN:0"]);
        let empty = tensor(DataType::Fp32, &[3, 0], Vec::new());
        let classes = classify("y", &empty, true, (2, &[])).unwrap();
        assert_eq!(
            (classes.shape.as_slice(), classes.data.len()),
            (&[3, 0][..], 0)
        );
    }

    #[test]
    fn strings_have_no_classes() {
        let words = tensor(DataType::Bytes, &[1, 1], vec![0, 0, 0, 0]);
        let error = classify("y", &words, true, (1, &[])).unwrap_err();
        assert!(
            error.message().contains("unsupported type 'BYTES'"),
            "{error}"
        );
    }
}

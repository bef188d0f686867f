//! Element types of tensors, what they take, and the values of small ones.

use dormouse_core::datatype::DataType;
use dormouse_core::shape::element_count;

use crate::graph::GraphType;

/// Constants of at most this many elements are kept for the analysis of axes and shapes.
pub(super) const KEPT_VALUES: usize = 64;

/// The type behind a number of `TensorProto.DataType`.
pub(crate) fn element_type(number: i32) -> GraphType {
    use GraphType::{Other, Tensor};
    match number {
        1 => Tensor(DataType::Fp32),
        2 => Tensor(DataType::Uint8),
        3 => Tensor(DataType::Int8),
        4 => Tensor(DataType::Uint16),
        5 => Tensor(DataType::Int16),
        6 => Tensor(DataType::Int32),
        7 => Tensor(DataType::Int64),
        8 => Tensor(DataType::Bytes),
        9 => Tensor(DataType::Bool),
        10 => Tensor(DataType::Fp16),
        11 => Tensor(DataType::Fp64),
        12 => Tensor(DataType::Uint32),
        13 => Tensor(DataType::Uint64),
        14 => Other("complex64"),
        15 => Other("complex128"),
        16 => Tensor(DataType::Bf16),
        17 => Other("float8e4m3fn"),
        18 => Other("float8e4m3fnuz"),
        19 => Other("float8e5m2"),
        20 => Other("float8e5m2fnuz"),
        21 => Other("uint4"),
        22 => Other("int4"),
        23 => Other("float4e2m1"),
        24 => Other("float8e8m0"),
        25 => Other("uint2"),
        26 => Other("int2"),
        _ => Other("unknown element type"),
    }
}

/// ONNX's name of an element type.
pub(crate) fn element_name(number: i32) -> &'static str {
    match number {
        1 => "float",
        2 => "uint8",
        3 => "int8",
        4 => "uint16",
        5 => "int16",
        6 => "int32",
        7 => "int64",
        8 => "string",
        9 => "bool",
        10 => "float16",
        11 => "double",
        12 => "uint32",
        13 => "uint64",
        16 => "bfloat16",
        _ => match element_type(number) {
            GraphType::Other(name) => name,
            GraphType::Tensor(datatype) => datatype.name(),
        },
    }
}

/// The number behind [`element_name`].
pub(crate) fn element_number(name: &str) -> Option<i32> {
    NUMBERS
        .into_iter()
        .find(|&number| element_name(number) == name)
}

/// Every element type there is.
const NUMBERS: std::ops::RangeInclusive<i32> = 1..=26;

/// Bytes a tensor's data takes outside the file, none where the type does not tell.
pub(crate) fn tensor_bytes(data_type: i32, dims: &[i64]) -> Option<u64> {
    let bits = match element_type(data_type) {
        GraphType::Tensor(datatype) => 8 * datatype.element_size()? as u64,
        GraphType::Other(_) => match data_type {
            14 => 64,
            15 => 128,
            17..=20 | 24 => 8,
            21..=23 => 4,
            25 | 26 => 2,
            _ => return None,
        },
    };
    let bits = element_count(dims)?.checked_mul(bits)?;
    Some(bits.div_ceil(8))
}

/// The values of a small tensor of whole numbers or truth values.
pub(super) fn small_values(
    data_type: i32,
    dims: &[i64],
    raw: Option<Vec<u8>>,
    values: Vec<i64>,
) -> Option<Vec<i64>> {
    let count = usize::try_from(element_count(dims)?).ok()?;
    if count > KEPT_VALUES {
        return None;
    }
    let values = match (raw, data_type) {
        (None, 6 | 7 | 9) => values,
        (Some(raw), 6) => raw
            .chunks_exact(4)
            .filter_map(|chunk| chunk.try_into().ok())
            .map(|chunk| i64::from(i32::from_le_bytes(chunk)))
            .collect(),
        (Some(raw), 7) => raw
            .chunks_exact(8)
            .filter_map(|chunk| chunk.try_into().ok())
            .map(i64::from_le_bytes)
            .collect(),
        (Some(raw), 9) => raw.into_iter().map(i64::from).collect(),
        _ => return None,
    };
    (values.len() == count).then_some(values)
}

//! Tensor element types of the v2 protocol.

use std::fmt;
use std::str::FromStr;

use crate::error::TensorError;

/// An element type, by its v2 name.
///
/// ```
/// use dormouse_client::DataType;
///
/// assert_eq!("FP16".parse(), Ok(DataType::Fp16));
/// assert_eq!(DataType::Fp16.element_size(), Some(2));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DataType {
    /// One byte, 0 or 1.
    Bool,
    /// An 8-bit unsigned integer.
    Uint8,
    /// A 16-bit unsigned integer.
    Uint16,
    /// A 32-bit unsigned integer.
    Uint32,
    /// A 64-bit unsigned integer.
    Uint64,
    /// An 8-bit signed integer.
    Int8,
    /// A 16-bit signed integer.
    Int16,
    /// A 32-bit signed integer.
    Int32,
    /// A 64-bit signed integer.
    Int64,
    /// An IEEE half.
    Fp16,
    /// The upper half of a 32-bit float.
    Bf16,
    /// A 32-bit float.
    Fp32,
    /// A 64-bit float.
    Fp64,
    /// Strings of bytes: each element is a 4-byte little-endian length and that many bytes.
    Bytes,
}

impl DataType {
    /// Every type of the protocol.
    pub const ALL: [Self; 14] = [
        Self::Bool,
        Self::Uint8,
        Self::Uint16,
        Self::Uint32,
        Self::Uint64,
        Self::Int8,
        Self::Int16,
        Self::Int32,
        Self::Int64,
        Self::Fp16,
        Self::Bf16,
        Self::Fp32,
        Self::Fp64,
        Self::Bytes,
    ];

    /// The name in requests and metadata.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::Uint8 => "UINT8",
            Self::Uint16 => "UINT16",
            Self::Uint32 => "UINT32",
            Self::Uint64 => "UINT64",
            Self::Int8 => "INT8",
            Self::Int16 => "INT16",
            Self::Int32 => "INT32",
            Self::Int64 => "INT64",
            Self::Fp16 => "FP16",
            Self::Bf16 => "BF16",
            Self::Fp32 => "FP32",
            Self::Fp64 => "FP64",
            Self::Bytes => "BYTES",
        }
    }

    /// Bytes per element; none for [`DataType::Bytes`], whose elements vary.
    pub const fn element_size(self) -> Option<usize> {
        match self {
            Self::Bool | Self::Uint8 | Self::Int8 => Some(1),
            Self::Uint16 | Self::Int16 | Self::Fp16 | Self::Bf16 => Some(2),
            Self::Uint32 | Self::Int32 | Self::Fp32 => Some(4),
            Self::Uint64 | Self::Int64 | Self::Fp64 => Some(8),
            Self::Bytes => None,
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DataType {
    type Err = TensorError;

    fn from_str(name: &str) -> Result<Self, TensorError> {
        Self::ALL
            .into_iter()
            .find(|datatype| datatype.name() == name)
            .ok_or_else(|| TensorError::UnknownDataType {
                name: name.to_owned(),
            })
    }
}

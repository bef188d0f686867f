//! The safetensors format: a header that says what is where, then the data. Only the header is
//! read here, every number in it is checked against the file, and no bytes make it panic.

pub(crate) mod bind;
pub(crate) mod index;
#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) mod writer;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io;

use ::safetensors::tensor::{Dtype, TensorInfo};
use serde::Deserializer;
use serde::de::{self, MapAccess, Visitor};

use crate::manifest::ElementType;
use crate::onnx::{MAX_DIMENSIONS, MAX_TEXT_BYTES, ReadAt, shown};

pub use bind::WeightsError;

/// The longest header: that of a model with thousands of tensors has some hundred kilobytes.
pub const MAX_HEADER_BYTES: u64 = 1 << 20;
/// Before the header comes its length.
const LENGTH_BYTES: u64 = 8;

/// Why a file is not one of safetensors that can be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SafetensorsError {
    #[error("it has {bytes} bytes, the header's length alone takes {LENGTH_BYTES}")]
    TooShort { bytes: u64 },
    #[error("its header has {bytes} bytes, at most {MAX_HEADER_BYTES} are allowed")]
    HeaderTooLarge { bytes: u64 },
    #[error("its header has {header} bytes, the file ends after {available} of them")]
    HeaderCutOff { header: u64, available: u64 },
    #[error("its header does not begin with '{{'")]
    NotAnObject,
    #[error("its header is not valid UTF-8 at byte {offset}")]
    NotUtf8 { offset: usize },
    #[error("its header cannot be understood: {}", told(.0))]
    Header(serde_json::Error),
    #[error("tensor {tensor} has {rank} dimensions, at most {MAX_DIMENSIONS} are allowed")]
    TooManyDimensions { tensor: String, rank: usize },
    #[error("tensor {tensor} has more elements than 64 bits can count")]
    TooManyElements { tensor: String },
    #[error("tensor {tensor} ends at byte {end} of the data, before it begins at byte {start}")]
    Reversed {
        tensor: String,
        start: u64,
        end: u64,
    },
    #[error("tensor {tensor} takes {given} bytes, its shape and type need {needed}")]
    Length {
        tensor: String,
        given: u64,
        needed: u64,
    },
    #[error(
        "tensor {tensor} begins at byte {start} of the data, the one before it ends at {expected}: \
         tensors must follow each other without gaps and without overlap"
    )]
    NotContiguous {
        tensor: String,
        start: u64,
        expected: u64,
    },
    #[error("its tensors take {described} bytes, there are {available} bytes of data")]
    DataSize { described: u64, available: u64 },
    #[error("cannot read: {0}")]
    Read(io::Error),
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    pub name: String,
    /// The type as the file names it.
    pub dtype: &'static str,
    /// None for a type that ONNX does not have.
    pub element: Option<ElementType>,
    pub dims: Vec<i64>,
    /// From the beginning of the file.
    pub offset: u64,
    pub length: u64,
}

/// Reads a file's header and checks it against the file; tensors in the order of their data.
pub fn read_header(source: &dyn ReadAt) -> Result<Vec<StoredTensor>, SafetensorsError> {
    let size = source.size();
    if size < LENGTH_BYTES {
        return Err(SafetensorsError::TooShort { bytes: size });
    }
    let mut length = [0; LENGTH_BYTES as usize];
    read_exact(source, &mut length, 0)?;
    let header = u64::from_le_bytes(length);
    if header > MAX_HEADER_BYTES {
        return Err(SafetensorsError::HeaderTooLarge { bytes: header });
    }
    let available = size - LENGTH_BYTES;
    if header > available {
        return Err(SafetensorsError::HeaderCutOff { header, available });
    }
    let mut bytes = vec![0; header as usize];
    read_exact(source, &mut bytes, LENGTH_BYTES)?;
    let entries = parse(&bytes)?;
    lay_out(entries, LENGTH_BYTES + header, available - header)
}

fn parse(bytes: &[u8]) -> Result<Vec<(String, TensorInfo)>, SafetensorsError> {
    if bytes.first() != Some(&b'{') {
        return Err(SafetensorsError::NotAnObject);
    }
    let text = std::str::from_utf8(bytes).map_err(|error| SafetensorsError::NotUtf8 {
        offset: error.valid_up_to(),
    })?;
    let mut json = serde_json::Deserializer::from_str(text);
    let entries = json
        .deserialize_map(Entries)
        .map_err(SafetensorsError::Header)?;
    json.end().map_err(SafetensorsError::Header)?;
    Ok(entries)
}

/// Checks that the tensors fill the data from its beginning to its end.
fn lay_out(
    mut entries: Vec<(String, TensorInfo)>,
    data: u64,
    available: u64,
) -> Result<Vec<StoredTensor>, SafetensorsError> {
    entries.sort_by_key(|(_, info)| info.data_offsets);
    let mut expected = 0;
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, info) in entries {
        let tensor = || shown(name.as_bytes());
        let (start, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        if info.shape.len() as u64 > MAX_DIMENSIONS {
            return Err(SafetensorsError::TooManyDimensions {
                tensor: tensor(),
                rank: info.shape.len(),
            });
        }
        let Some((dims, needed)) = measure(&info) else {
            return Err(SafetensorsError::TooManyElements { tensor: tensor() });
        };
        let Some(given) = end.checked_sub(start) else {
            return Err(SafetensorsError::Reversed {
                tensor: tensor(),
                start,
                end,
            });
        };
        if given != needed {
            return Err(SafetensorsError::Length {
                tensor: tensor(),
                given,
                needed,
            });
        }
        if start != expected {
            return Err(SafetensorsError::NotContiguous {
                tensor: tensor(),
                start,
                expected,
            });
        }
        if end > available {
            return Err(SafetensorsError::DataSize {
                described: end,
                available,
            });
        }
        expected = end;
        tensors.push(StoredTensor {
            name,
            dtype: dtype_name(info.dtype),
            element: element(info.dtype),
            dims,
            offset: data + start,
            length: given,
        });
    }
    if expected != available {
        return Err(SafetensorsError::DataSize {
            described: expected,
            available,
        });
    }
    Ok(tensors)
}

/// Dimensions and bytes, none when they cannot be counted.
fn measure(info: &TensorInfo) -> Option<(Vec<i64>, u64)> {
    let dims: Option<Vec<i64>> = info
        .shape
        .iter()
        .map(|&dimension| i64::try_from(dimension).ok())
        .collect();
    let dims = dims?;
    let count = dormouse_core::shape::element_count(&dims)?;
    let bits = count.checked_mul(info.dtype.bitsize() as u64)?;
    Some((dims, bits.div_ceil(8)))
}

/// The entries of a header in its order; names must be there once.
struct Entries;

impl<'de> Visitor<'de> for Entries {
    type Value = Vec<(String, TensorInfo)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tensors by their names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut seen = HashSet::new();
        let mut entries = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name.len() as u64 > MAX_TEXT_BYTES {
                return Err(de::Error::custom("a name is too long"));
            }
            if !seen.insert(name.clone()) {
                let name = shown(name.as_bytes());
                return Err(de::Error::custom(format_args!("{name} is given twice")));
            }
            if name == "__metadata__" {
                map.next_value::<Option<HashMap<String, String>>>()?;
            } else {
                entries.push((name, map.next_value()?));
            }
        }
        Ok(entries)
    }
}

/// A complaint about JSON, which may repeat anything that stands there, as part of a line.
pub(crate) fn told(error: &serde_json::Error) -> String {
    const LONGEST: usize = 300;
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    let (what, place) = match text.strip_suffix(&place) {
        Some(what) => (what, &*place),
        None => (&*text, ""),
    };
    let mut told = String::new();
    for character in what.chars().take(LONGEST) {
        match character.is_control() {
            true => told.extend(character.escape_default()),
            false => told.push(character),
        }
    }
    if what.chars().nth(LONGEST).is_some() {
        told.push('…');
    }
    told + place
}

fn read_exact(source: &dyn ReadAt, buffer: &mut [u8], offset: u64) -> Result<(), SafetensorsError> {
    let mut filled = 0;
    while filled < buffer.len() {
        match source.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => {
                let cause = io::Error::from(io::ErrorKind::UnexpectedEof);
                return Err(SafetensorsError::Read(cause));
            }
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) => return Err(SafetensorsError::Read(cause)),
        }
    }
    Ok(())
}

/// ONNX's element type with the same bytes, none where it has none.
fn element(dtype: Dtype) -> Option<ElementType> {
    Some(ElementType(match dtype {
        Dtype::F32 => 1,
        Dtype::U8 => 2,
        Dtype::I8 => 3,
        Dtype::U16 => 4,
        Dtype::I16 => 5,
        Dtype::I32 => 6,
        Dtype::I64 => 7,
        Dtype::BOOL => 9,
        Dtype::F16 => 10,
        Dtype::F64 => 11,
        Dtype::U32 => 12,
        Dtype::U64 => 13,
        Dtype::C64 => 14,
        Dtype::BF16 => 16,
        Dtype::F8_E4M3 => 17,
        Dtype::F8_E4M3FNUZ => 18,
        Dtype::F8_E5M2 => 19,
        Dtype::F8_E5M2FNUZ => 20,
        Dtype::F8_E8M0 => 24,
        // In which half of a byte the first of two lies is not agreed on.
        _ => return None,
    }))
}

fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::BOOL => "BOOL",
        Dtype::F4 => "F4",
        Dtype::F6_E2M3 => "F6_E2M3",
        Dtype::F6_E3M2 => "F6_E3M2",
        Dtype::U8 => "U8",
        Dtype::I8 => "I8",
        Dtype::F8_E5M2 => "F8_E5M2",
        Dtype::F8_E4M3 => "F8_E4M3",
        Dtype::F8_E8M0 => "F8_E8M0",
        Dtype::F8_E4M3FNUZ => "F8_E4M3FNUZ",
        Dtype::F8_E5M2FNUZ => "F8_E5M2FNUZ",
        Dtype::I16 => "I16",
        Dtype::U16 => "U16",
        Dtype::F16 => "F16",
        Dtype::BF16 => "BF16",
        Dtype::I32 => "I32",
        Dtype::U32 => "U32",
        Dtype::F32 => "F32",
        Dtype::C64 => "C64",
        Dtype::F64 => "F64",
        Dtype::I64 => "I64",
        Dtype::U64 => "U64",
        _ => "unknown",
    }
}

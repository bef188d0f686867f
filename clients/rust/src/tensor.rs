//! Tensors in the protocol's raw layout, checked once when they are made.

use std::borrow::Cow;
use std::fmt;

use bytes::{BufMut, Bytes, BytesMut};

use crate::datatype::DataType;
use crate::element::Element;
use crate::element::layout::Layout;
use crate::error::TensorError;
use crate::pb;

/// A tensor: element type, shape, and data in the protocol's raw layout (little-endian,
/// row-major). Its shape and its data always agree. Cloning shares the data.
///
/// ```
/// use dormouse_client::{DataType, Tensor, TensorError};
///
/// let tensor = Tensor::from_slice([2, 2], &[1.0f32, 2.0, 3.0, 4.0])?;
/// assert_eq!(tensor.datatype(), DataType::Fp32);
/// assert_eq!(tensor.as_slice::<f32>()?[3], 4.0);
/// assert!(Tensor::from_slice([3], &[1u8, 2]).is_err());
///
/// let words = Tensor::bytes([2], ["dor", "mouse"])?;
/// assert_eq!(words.strings()?, ["dor", "mouse"]);
/// # Ok::<(), TensorError>(())
/// ```
#[derive(Clone, PartialEq)]
pub struct Tensor {
    datatype: DataType,
    shape: Vec<i64>,
    data: Bytes,
}

impl Tensor {
    /// A tensor of a copy of these elements.
    pub fn from_slice<T: Element>(
        shape: impl Into<Vec<i64>>,
        values: &[T],
    ) -> Result<Self, TensorError> {
        let shape = counted(shape.into(), values.len())?;
        Ok(Self {
            datatype: T::DATATYPE,
            shape,
            data: T::encode(values),
        })
    }

    /// A tensor that takes these elements over without copying them.
    pub fn from_vec<T: Element>(
        shape: impl Into<Vec<i64>>,
        values: Vec<T>,
    ) -> Result<Self, TensorError> {
        let shape = counted(shape.into(), values.len())?;
        Ok(Self {
            datatype: T::DATATYPE,
            shape,
            data: T::adopt(values),
        })
    }

    /// A BYTES tensor of these strings.
    pub fn bytes<I>(shape: impl Into<Vec<i64>>, elements: I) -> Result<Self, TensorError>
    where
        I: IntoIterator,
        I::Item: AsRef<[u8]>,
    {
        let mut data = BytesMut::new();
        let mut count = 0;
        for element in elements {
            let element = element.as_ref();
            let length = u32::try_from(element.len()).map_err(|_| TensorError::ElementTooLong {
                index: count,
                length: element.len(),
            })?;
            data.put_u32_le(length);
            data.put_slice(element);
            count += 1;
        }
        Ok(Self {
            datatype: DataType::Bytes,
            shape: counted(shape.into(), count)?,
            data: data.freeze(),
        })
    }

    /// A tensor over data that is in the raw layout already; the data is shared, not copied.
    pub fn raw(
        datatype: DataType,
        shape: impl Into<Vec<i64>>,
        data: impl Into<Bytes>,
    ) -> Result<Self, TensorError> {
        let (shape, data) = (shape.into(), data.into());
        let elements = element_count(&shape)?;
        match datatype.element_size() {
            Some(size) => {
                let expected = elements
                    .checked_mul(size)
                    .ok_or_else(|| TensorError::Shape {
                        shape: shape.clone(),
                    })?;
                if expected != data.len() {
                    return Err(TensorError::ByteCount {
                        datatype,
                        shape,
                        expected,
                        actual: data.len(),
                    });
                }
            }
            None => {
                let mut rest = &data[..];
                let mut count = 0;
                while !rest.is_empty() {
                    let (_, after) =
                        first_element(rest).ok_or(TensorError::Truncated { index: count })?;
                    rest = after;
                    count += 1;
                }
                if count != elements {
                    return Err(TensorError::ElementCount {
                        shape,
                        expected: elements,
                        actual: count,
                    });
                }
            }
        }
        Ok(Self {
            datatype,
            shape,
            data,
        })
    }

    /// The type of the elements.
    pub fn datatype(&self) -> DataType {
        self.datatype
    }

    /// The dimensions.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// The number of elements.
    pub fn element_count(&self) -> usize {
        match self.datatype.element_size() {
            Some(size) => self.data.len() / size,
            None => self.elements().count(),
        }
    }

    /// The data in the raw layout.
    pub fn data(&self) -> &Bytes {
        &self.data
    }

    /// The elements, in place where the data is aligned for them, else copied.
    pub fn as_slice<T: Element>(&self) -> Result<Cow<'_, [T]>, TensorError> {
        if T::DATATYPE != self.datatype {
            return Err(TensorError::WrongType {
                expected: T::DATATYPE,
                actual: self.datatype,
            });
        }
        Ok(<T as Layout>::decode(&self.data))
    }

    /// A copy of the elements.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>, TensorError> {
        self.as_slice().map(Cow::into_owned)
    }

    /// The elements of a BYTES tensor, as views of its data.
    pub fn byte_elements(&self) -> Result<Vec<Bytes>, TensorError> {
        self.expect_bytes()?;
        Ok(self
            .elements()
            .map(|one| self.data.slice_ref(one))
            .collect())
    }

    /// The elements of a BYTES tensor that holds text.
    pub fn strings(&self) -> Result<Vec<&str>, TensorError> {
        self.expect_bytes()?;
        self.elements()
            .enumerate()
            .map(|(index, one)| str::from_utf8(one).map_err(|_| TensorError::NotText { index }))
            .collect()
    }

    fn expect_bytes(&self) -> Result<(), TensorError> {
        if self.datatype == DataType::Bytes {
            return Ok(());
        }
        Err(TensorError::WrongType {
            expected: DataType::Bytes,
            actual: self.datatype,
        })
    }

    /// The elements of BYTES data, which was checked when the tensor was made.
    fn elements(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = &self.data[..];
        std::iter::from_fn(move || {
            let (element, after) = first_element(rest)?;
            rest = after;
            Some(element)
        })
    }

    /// A tensor of what a server sent as typed contents.
    pub(crate) fn from_contents(
        datatype: DataType,
        shape: Vec<i64>,
        contents: pb::InferTensorContents,
    ) -> Result<Self, TensorError> {
        match datatype {
            DataType::Bool => Self::from_vec(shape, contents.bool_contents),
            DataType::Uint8 => {
                Self::from_vec(shape, narrowed::<_, u8>(datatype, contents.uint_contents)?)
            }
            DataType::Uint16 => {
                Self::from_vec(shape, narrowed::<_, u16>(datatype, contents.uint_contents)?)
            }
            DataType::Uint32 => Self::from_vec(shape, contents.uint_contents),
            DataType::Uint64 => Self::from_vec(shape, contents.uint64_contents),
            DataType::Int8 => {
                Self::from_vec(shape, narrowed::<_, i8>(datatype, contents.int_contents)?)
            }
            DataType::Int16 => {
                Self::from_vec(shape, narrowed::<_, i16>(datatype, contents.int_contents)?)
            }
            DataType::Int32 => Self::from_vec(shape, contents.int_contents),
            DataType::Int64 => Self::from_vec(shape, contents.int64_contents),
            DataType::Fp32 => Self::from_vec(shape, contents.fp32_contents),
            DataType::Fp64 => Self::from_vec(shape, contents.fp64_contents),
            DataType::Bytes => Self::bytes(shape, contents.bytes_contents),
            DataType::Fp16 | DataType::Bf16 => Err(TensorError::NoTypedContents { datatype }),
        }
    }
}

impl fmt::Debug for Tensor {
    /// Type, shape and size; the data may be large and is left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tensor")
            .field("datatype", &self.datatype)
            .field("shape", &self.shape)
            .field("bytes", &self.data.len())
            .finish()
    }
}

/// The first element of BYTES data and what follows it.
fn first_element(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = data.split_first_chunk::<4>()?;
    rest.split_at_checked(u32::from_le_bytes(*length) as usize)
}

/// How many elements a shape has.
fn element_count(shape: &[i64]) -> Result<usize, TensorError> {
    let count = if shape.iter().any(|dim| *dim < 0) {
        None
    } else if shape.contains(&0) {
        // Empty, however large its neighbours are.
        Some(0)
    } else {
        shape.iter().try_fold(1usize, |count, dim| {
            count.checked_mul(usize::try_from(*dim).ok()?)
        })
    };
    count.ok_or_else(|| TensorError::Shape {
        shape: shape.to_vec(),
    })
}

/// The shape again, if it has that many elements.
fn counted(shape: Vec<i64>, actual: usize) -> Result<Vec<i64>, TensorError> {
    let expected = element_count(&shape)?;
    if expected == actual {
        return Ok(shape);
    }
    Err(TensorError::ElementCount {
        shape,
        expected,
        actual,
    })
}

fn narrowed<W, N>(datatype: DataType, values: Vec<W>) -> Result<Vec<N>, TensorError>
where
    W: Copy + Into<i64>,
    N: TryFrom<W>,
{
    let fits = |(index, value): (usize, W)| {
        N::try_from(value).map_err(|_| TensorError::OutOfRange {
            index,
            value: value.into(),
            datatype,
        })
    };
    values.into_iter().enumerate().map(fits).collect()
}

#[cfg(test)]
mod tests;

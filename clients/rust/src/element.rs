//! Which Rust types are elements of which tensors.

use crate::datatype::DataType;

/// A Rust type that is an element of a tensor: `bool`, the integers of 8 to 64 bits, `f32`, `f64`,
/// [`half::f16`] and [`half::bf16`].
///
/// ```
/// use dormouse_client::{DataType, Element};
///
/// assert_eq!(half::bf16::DATATYPE, DataType::Bf16);
/// ```
pub trait Element: layout::Layout {
    /// The protocol's name for this type.
    const DATATYPE: DataType;
}

pub(crate) mod layout {
    use std::borrow::Cow;

    use bytes::Bytes;
    use zerocopy::{FromBytes, IntoBytes, TryFromBytes};

    /// How elements become little-endian bytes and back; also seals [`super::Element`].
    pub trait Layout: Copy + Send + Sync + 'static {
        /// Copies the elements into a new buffer.
        fn encode(values: &[Self]) -> Bytes;
        /// Takes the elements over, without a copy where the host is little-endian.
        fn adopt(values: Vec<Self>) -> Bytes;
        /// Looks at bytes whose length is a whole number of elements, in place where possible.
        fn decode(data: &[u8]) -> Cow<'_, [Self]>;
    }

    /// Lets a `Bytes` own a vector of elements.
    struct Elements<T>(Vec<T>);

    impl<T: IntoBytes + zerocopy::Immutable> AsRef<[u8]> for Elements<T> {
        fn as_ref(&self) -> &[u8] {
            self.0.as_slice().as_bytes()
        }
    }

    macro_rules! layout {
        ($($element:ty),*) => {$(
            impl Layout for $element {
                fn encode(values: &[Self]) -> Bytes {
                    if cfg!(target_endian = "little") {
                        Bytes::copy_from_slice(values.as_bytes())
                    } else {
                        values.iter().flat_map(|value| value.to_le_bytes()).collect()
                    }
                }

                fn adopt(values: Vec<Self>) -> Bytes {
                    if cfg!(target_endian = "little") {
                        Bytes::from_owner(Elements(values))
                    } else {
                        Self::encode(&values)
                    }
                }

                fn decode(data: &[u8]) -> Cow<'_, [Self]> {
                    const SIZE: usize = size_of::<$element>();
                    if cfg!(target_endian = "little")
                        && let Ok(values) = <[Self]>::ref_from_bytes(data)
                    {
                        return Cow::Borrowed(values);
                    }
                    let (elements, _) = data.as_chunks::<SIZE>();
                    elements.iter().map(|bytes| Self::from_le_bytes(*bytes)).collect()
                }
            }
        )*};
    }

    layout!(u8, u16, u32, u64, i8, i16, i32, i64, f32, f64);
    layout!(half::f16, half::bf16);

    impl Layout for bool {
        fn encode(values: &[Self]) -> Bytes {
            Bytes::copy_from_slice(values.as_bytes())
        }

        fn adopt(values: Vec<Self>) -> Bytes {
            Bytes::from_owner(Elements(values))
        }

        fn decode(data: &[u8]) -> Cow<'_, [Self]> {
            // Some servers send any non-zero byte for true.
            match <[bool]>::try_ref_from_bytes(data) {
                Ok(values) => Cow::Borrowed(values),
                Err(_) => data.iter().map(|byte| *byte != 0).collect(),
            }
        }
    }
}

macro_rules! element {
    ($($element:ty => $datatype:ident),*) => {$(
        impl Element for $element {
            const DATATYPE: DataType = DataType::$datatype;
        }
    )*};
}

element!(
    bool => Bool, u8 => Uint8, u16 => Uint16, u32 => Uint32, u64 => Uint64,
    i8 => Int8, i16 => Int16, i32 => Int32, i64 => Int64,
    half::f16 => Fp16, half::bf16 => Bf16, f32 => Fp32, f64 => Fp64
);

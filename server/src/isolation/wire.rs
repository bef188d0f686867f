//! Numbers, strings and lists as bytes, and back: every length is checked against what is there.

use dormouse_core::datatype::DataType;
use dormouse_core::shape::Shape;

use crate::engine::SessionTensor;

/// A message that is not what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message of a worker cannot be read: {0}")]
pub(super) struct WireError(pub(super) &'static str);

/// Builds a message.
#[derive(Debug, Default)]
pub(super) struct Writer(Vec<u8>);

impl Writer {
    pub(super) fn of(kind: u8) -> Self {
        Self(vec![kind])
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn u8(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    pub(super) fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(super) fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(super) fn i64(&mut self, value: i64) -> &mut Self {
        self.u64(value.cast_unsigned())
    }

    /// A length or an index: never above what one message can hold.
    pub(super) fn size(&mut self, value: usize) -> &mut Self {
        self.u64(value as u64)
    }

    pub(super) fn text(&mut self, text: &str) -> &mut Self {
        self.size(text.len());
        self.0.extend_from_slice(text.as_bytes());
        self
    }

    pub(super) fn option<T>(
        &mut self,
        value: Option<T>,
        write: impl FnOnce(&mut Self, T),
    ) -> &mut Self {
        self.u8(u8::from(value.is_some()));
        if let Some(value) = value {
            write(self, value);
        }
        self
    }

    pub(super) fn list<T>(
        &mut self,
        items: impl IntoIterator<Item = T, IntoIter: ExactSizeIterator>,
        mut write: impl FnMut(&mut Self, T),
    ) -> &mut Self {
        let items = items.into_iter();
        self.size(items.len());
        for item in items {
            write(self, item);
        }
        self
    }

    pub(super) fn dims(&mut self, dims: &[i64]) -> &mut Self {
        self.list(dims, |out, &dim| {
            out.i64(dim);
        })
    }

    pub(super) fn datatype(&mut self, datatype: DataType) -> &mut Self {
        let known = DataType::ALL.iter();
        let place = known.take_while(|&&known| known != datatype).count();
        self.u8(u8::try_from(place).expect("there are few data types"))
    }

    pub(super) fn tensors(&mut self, tensors: &[SessionTensor]) -> &mut Self {
        self.list(tensors, |out, tensor| {
            out.text(&tensor.name);
            out.option(tensor.datatype, |out, datatype| {
                out.datatype(datatype);
            });
            out.option(tensor.dims.as_ref(), |out, dims| {
                out.dims(dims);
            });
        })
    }
}

/// Takes a message apart.
#[derive(Debug)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (taken, rest) = self
            .0
            .split_first_chunk()
            .ok_or(WireError("it ends early"))?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(super) fn u8(&mut self) -> Result<u8, WireError> {
        self.take().map(u8::from_le_bytes)
    }

    pub(super) fn bool(&mut self) -> Result<bool, WireError> {
        self.u8().map(|value| value != 0)
    }

    pub(super) fn u32(&mut self) -> Result<u32, WireError> {
        self.take().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, WireError> {
        self.take().map(u64::from_le_bytes)
    }

    pub(super) fn i64(&mut self) -> Result<i64, WireError> {
        self.take().map(i64::from_le_bytes)
    }

    pub(super) fn size(&mut self) -> Result<usize, WireError> {
        usize::try_from(self.u64()?).map_err(|_| WireError("a size is too large"))
    }

    pub(super) fn text(&mut self) -> Result<String, WireError> {
        let len = self.size()?;
        let (text, rest) = self
            .0
            .split_at_checked(len)
            .ok_or(WireError("it ends early"))?;
        self.0 = rest;
        String::from_utf8(text.to_vec()).map_err(|_| WireError("a text is not one"))
    }

    pub(super) fn option<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, WireError>,
    ) -> Result<Option<T>, WireError> {
        match self.bool()? {
            true => read(self).map(Some),
            false => Ok(None),
        }
    }

    pub(super) fn list<T>(
        &mut self,
        mut read: impl FnMut(&mut Self) -> Result<T, WireError>,
    ) -> Result<Vec<T>, WireError> {
        let count = self.size()?;
        // Each item has a byte at least, so a count beyond what is left is a lie.
        if count > self.0.len() {
            return Err(WireError("a list is longer than its message"));
        }
        (0..count).map(|_| read(self)).collect()
    }

    pub(super) fn dims(&mut self) -> Result<Shape, WireError> {
        let dims = self.list(Self::i64)?;
        Ok(dims.into_iter().collect())
    }

    pub(super) fn datatype(&mut self) -> Result<DataType, WireError> {
        let place = usize::from(self.u8()?);
        let known = DataType::ALL.get(place).copied();
        known.ok_or(WireError("a data type is unknown"))
    }

    pub(super) fn tensors(&mut self) -> Result<Vec<SessionTensor>, WireError> {
        self.list(|reader| {
            Ok(SessionTensor {
                name: reader.text()?,
                datatype: reader.option(Self::datatype)?,
                dims: reader.option(Self::dims)?,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let tensor = SessionTensor {
            name: "größe".to_owned(),
            datatype: Some(DataType::Bytes),
            dims: Some(Shape::from_slice(&[-1, 3])),
        };
        let mut writer = Writer::of(9);
        writer.u32(7).u64(u64::MAX).i64(-5).text("text");
        writer.option(None::<u8>, |_, _| {});
        writer.tensors(std::slice::from_ref(&tensor));
        let mut reader = Reader(writer.bytes());
        assert_eq!(reader.u8(), Ok(9));
        assert_eq!(reader.u32(), Ok(7));
        assert_eq!(reader.u64(), Ok(u64::MAX));
        assert_eq!(reader.i64(), Ok(-5));
        assert_eq!(reader.text().as_deref(), Ok("text"));
        assert_eq!(reader.option(Reader::u8), Ok(None));
        assert_eq!(reader.tensors(), Ok(vec![tensor]));
        assert_eq!(reader.u8(), Err(WireError("it ends early")));
    }

    #[test]
    fn lengths_beyond_the_message_are_refused() {
        let mut writer = Writer::default();
        writer.u64(u64::MAX);
        assert!(Reader(writer.bytes()).text().is_err());
        assert!(Reader(writer.bytes()).list(Reader::u8).is_err());
        assert!(Reader(writer.bytes()).dims().is_err());
    }
}

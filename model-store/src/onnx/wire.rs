//! The protobuf wire format over positioned reads: fields one by one, payloads skipped unread.

use std::io;
use std::ops::Deref;

use super::GraphError;

/// The most fields walked in one file, so that a file of empty fields cannot hold a thread for long.
pub const MAX_FIELDS: u64 = 100_000_000;
const SMALL_READ: usize = 4 << 10;
const LARGE_READ: usize = 64 << 10;

/// Something with a length that is read from any position, as a file is.
pub trait ReadAt {
    /// The number of bytes there are.
    fn size(&self) -> u64;
    /// Reads from `offset` into `buffer` and tells how many bytes came; none only at the end.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
}

impl<T: Deref<Target = [u8]>> ReadAt for T {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let rest = usize::try_from(offset)
            .ok()
            .and_then(|start| self.get(start..))
            .unwrap_or_default();
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }
}

/// A stretch of the file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

impl Span {
    pub(crate) fn len(self) -> u64 {
        self.end - self.start
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Payload {
    Varint(u64),
    Fixed32,
    Fixed64,
    Bytes(Span),
}

/// One field; reading continues behind it at `end`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    pub(crate) number: u32,
    pub(crate) payload: Payload,
    pub(crate) at: u64,
    pub(crate) end: u64,
}

impl Field {
    pub(crate) fn span(&self) -> Result<Span, GraphError> {
        match self.payload {
            Payload::Bytes(span) => Ok(span),
            _ => Err(self.unexpected()),
        }
    }

    pub(crate) fn varint(&self) -> Result<u64, GraphError> {
        match self.payload {
            Payload::Varint(value) => Ok(value),
            _ => Err(self.unexpected()),
        }
    }

    /// Protobuf cuts an `int32` or enum down to its low half, so must whoever agrees with it.
    pub(crate) fn int32(&self) -> Result<i32, GraphError> {
        Ok(self.varint()? as i32)
    }

    pub(crate) fn int64(&self) -> Result<i64, GraphError> {
        Ok(self.varint()? as i64)
    }

    fn unexpected(&self) -> GraphError {
        GraphError::Malformed {
            offset: self.at,
            what: "a field whose wire type is not the one ONNX gives it",
        }
    }
}

/// Reads fields in order, with a small window that grows while reading is sequential.
pub(crate) struct Wire<'a> {
    source: &'a dyn ReadAt,
    size: u64,
    position: u64,
    window: Vec<u8>,
    window_start: u64,
    next_read: usize,
    fields: u64,
}

impl<'a> Wire<'a> {
    pub(crate) fn new(source: &'a dyn ReadAt) -> Self {
        Self {
            source,
            size: source.size(),
            position: 0,
            window: Vec::new(),
            window_start: 0,
            next_read: LARGE_READ,
            fields: 0,
        }
    }

    pub(crate) fn whole(&self) -> Span {
        Span {
            start: 0,
            end: self.size,
        }
    }

    /// How many fields were walked so far.
    pub(crate) fn fields(&self) -> u64 {
        self.fields
    }

    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    pub(crate) fn seek(&mut self, position: u64) {
        self.position = position;
    }

    /// The next field before `end`, none at `end`.
    pub(crate) fn field(&mut self, end: u64) -> Result<Option<Field>, GraphError> {
        if self.position >= end {
            return Ok(None);
        }
        self.fields += 1;
        if self.fields > MAX_FIELDS {
            return Err(GraphError::TooMany {
                what: "protobuf fields",
                limit: MAX_FIELDS,
            });
        }
        let at = self.position;
        let tag = self.varint(end)?;
        let number = u32::try_from(tag).map_or(0, |tag| tag >> 3);
        if number == 0 {
            return Err(malformed(at, "a field tag that protobuf does not allow"));
        }
        let payload = match tag & 7 {
            0 => Payload::Varint(self.varint(end)?),
            1 => {
                self.skip(8, end)?;
                Payload::Fixed64
            }
            5 => {
                self.skip(4, end)?;
                Payload::Fixed32
            }
            2 => {
                let length = self.varint(end)?;
                let start = self.position;
                self.skip(length, end)?;
                Payload::Bytes(Span {
                    start,
                    end: self.position,
                })
            }
            _ => return Err(malformed(at, "a wire type that ONNX does not use")),
        };
        let field = Field {
            number,
            payload,
            at,
            end: self.position,
        };
        if let Payload::Bytes(span) = payload {
            self.position = span.start;
        }
        Ok(Some(field))
    }

    /// One varint that ends before `end`.
    pub(crate) fn varint(&mut self, end: u64) -> Result<u64, GraphError> {
        let at = self.position;
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            if self.position >= end {
                return Err(malformed(
                    at,
                    "a number that runs past the end of its message",
                ));
            }
            let byte = self.byte()?;
            if shift == 63 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(malformed(at, "a number of more than 64 bits"))
    }

    /// The bytes of a span, refused when longer than `limit`.
    pub(crate) fn bytes(
        &mut self,
        span: Span,
        what: &'static str,
        limit: u64,
    ) -> Result<Vec<u8>, GraphError> {
        if span.len() > limit {
            return Err(GraphError::TooLong {
                what,
                offset: span.start,
                bytes: span.len(),
                limit,
            });
        }
        let mut bytes = vec![0; span.len() as usize];
        let mut filled = 0;
        while filled < bytes.len() {
            self.position = span.start + filled as u64;
            let have = self.buffered()?;
            let count = have.len().min(bytes.len() - filled);
            bytes[filled..filled + count].copy_from_slice(&have[..count]);
            filled += count;
        }
        self.position = span.end;
        Ok(bytes)
    }

    /// Appends the bytes of a span, read at once; reading fields goes on where it was.
    pub(crate) fn copy(&mut self, span: Span, out: &mut Vec<u8>) -> Result<(), GraphError> {
        let start = out.len();
        out.resize(start + span.len() as usize, 0);
        let mut position = span.start;
        while position < span.end {
            let rest = &mut out[start + (position - span.start) as usize..];
            position += read(self.source, rest, position)? as u64;
        }
        Ok(())
    }

    fn skip(&mut self, count: u64, end: u64) -> Result<(), GraphError> {
        let at = self.position;
        match self.position.checked_add(count) {
            Some(next) if next <= end => {
                self.position = next;
                Ok(())
            }
            _ => Err(malformed(
                at,
                "a field that runs past the end of its message",
            )),
        }
    }

    fn byte(&mut self) -> Result<u8, GraphError> {
        let byte = self.buffered()?[0];
        self.position += 1;
        Ok(byte)
    }

    /// What the window holds from the current position on: at least one byte.
    fn buffered(&mut self) -> Result<&[u8], GraphError> {
        let window_end = self.window_start + self.window.len() as u64;
        if self.position < self.window_start || self.position >= window_end {
            // Behind a skipped payload little is wanted; in a run of nodes, a lot.
            self.next_read = if self.position == window_end {
                LARGE_READ.min(self.next_read * 2)
            } else {
                SMALL_READ
            };
            self.fill()?;
        }
        let start = (self.position - self.window_start) as usize;
        Ok(&self.window[start..])
    }

    fn fill(&mut self) -> Result<(), GraphError> {
        let wanted = (self.size - self.position).min(self.next_read as u64) as usize;
        self.window.resize(wanted, 0);
        self.window_start = self.position;
        let count = read(self.source, &mut self.window, self.position);
        self.window.truncate(*count.as_ref().unwrap_or(&0));
        count.map(drop)
    }
}

/// Reads at least one byte.
fn read(source: &dyn ReadAt, buffer: &mut [u8], offset: u64) -> Result<usize, GraphError> {
    loop {
        match source.read_at(buffer, offset) {
            Ok(0) => {
                return Err(malformed(
                    offset,
                    "an end before the one the file's size tells",
                ));
            }
            Ok(count) => return Ok(count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) => return Err(GraphError::Read { offset, cause }),
        }
    }
}

fn malformed(offset: u64, what: &'static str) -> GraphError {
    GraphError::Malformed { offset, what }
}

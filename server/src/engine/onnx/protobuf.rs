//! Protobuf's wire format, as far as a model's file needs it: fields are found where they lie and
//! copied as they are, so that what is not understood is kept.

/// One field of a message: where it lies, and its payload if it is bytes or a number.
pub(super) struct Field<'a> {
    pub(super) number: u32,
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) message: Option<&'a [u8]>,
    pub(super) varint: Option<u64>,
}

/// The fields of a message in the order they lie in; ends after the first malformed one.
pub(super) struct Fields<'a> {
    bytes: &'a [u8],
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, rest: bytes }
    }

    fn take(&mut self) -> Result<Field<'a>, String> {
        let start = self.bytes.len() - self.rest.len();
        let tag = u32::try_from(take_varint(&mut self.rest)?)
            .map_err(|_| malformed("a field has an impossible number"))?;
        let (mut message, mut varint) = (None, None);
        match tag & 7 {
            0 => varint = Some(take_varint(&mut self.rest)?),
            1 => {
                take_bytes(&mut self.rest, 8)?;
            }
            2 => {
                let length = usize::try_from(take_varint(&mut self.rest)?)
                    .map_err(|_| malformed("a field is longer than memory"))?;
                message = Some(take_bytes(&mut self.rest, length)?);
            }
            5 => {
                take_bytes(&mut self.rest, 4)?;
            }
            _ => return Err(malformed("a field has an unknown form")),
        }
        Ok(Field {
            number: tag >> 3,
            start,
            end: self.bytes.len() - self.rest.len(),
            message,
            varint,
        })
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<Field<'a>, String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = self.take();
        if field.is_err() {
            self.rest = &[];
        }
        Some(field)
    }
}

/// The error for a file that is no model.
pub(super) fn malformed(why: &str) -> String {
    format!("Protobuf parsing failed: the file is not a valid ONNX model, {why}")
}

fn take_bytes<'a>(rest: &mut &'a [u8], length: usize) -> Result<&'a [u8], String> {
    let (taken, left) = rest
        .split_at_checked(length)
        .ok_or_else(|| malformed("it ends in the middle of a field"))?;
    *rest = left;
    Ok(taken)
}

pub(super) fn take_varint(rest: &mut &[u8]) -> Result<u64, String> {
    let mut value = 0u64;
    for shift in (0..70).step_by(7) {
        let byte = take_bytes(rest, 1)?[0];
        value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(malformed("a number has no end"))
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push((value as u8) | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Appends a field of bytes: a message, a string or raw data.
pub(super) fn put_message(out: &mut Vec<u8>, field: u32, bytes: &[u8]) {
    put_varint(out, u64::from(field) << 3 | 2);
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Appends a field that is a number.
pub(super) fn put_number(out: &mut Vec<u8>, field: u32, value: u64) {
    put_varint(out, u64::from(field) << 3);
    put_varint(out, value);
}

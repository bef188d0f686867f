//! Values that a tensor keeps number by number, turned into the bytes they are in memory.

use super::GraphError;
use super::wire::{Field, Payload, ReadAt, Span, Wire};

/// A tensor's message in a file that was walked.
#[derive(Debug)]
pub(crate) struct TypedData {
    pub(crate) element: i32,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// Hands the tensor's bytes over in order. Strings, which have no form of their own in memory, come
/// as eight bytes of length and then the string.
pub(crate) fn typed_data(
    source: &dyn ReadAt,
    data: &TypedData,
    sink: &mut dyn FnMut(&[u8]),
) -> Result<(), GraphError> {
    let mut wire = Wire::new(source);
    let end = data.offset.saturating_add(data.length);
    wire.seek(data.offset);
    while let Some(field) = wire.field(end)? {
        match field.number {
            4 | 10 => fixed(&mut wire, &field, sink)?,
            5 | 7 | 11 => varints(&mut wire, &field, width(data.element), sink)?,
            6 => {
                let span = field.span()?;
                sink(&span.len().to_le_bytes());
                pieces(&mut wire, span, sink)?;
            }
            _ => {}
        }
        wire.seek(field.end);
    }
    Ok(())
}

/// Bytes one number becomes; types of less than a byte share a number as they share a byte.
fn width(element: i32) -> usize {
    match element {
        4 | 5 | 10 | 16 => 2,
        6 | 12 => 4,
        7 | 13 => 8,
        _ => 1,
    }
}

fn fixed(
    wire: &mut Wire<'_>,
    field: &Field,
    sink: &mut dyn FnMut(&[u8]),
) -> Result<(), GraphError> {
    let span = match field.payload {
        Payload::Bytes(span) => span,
        Payload::Fixed32 => Span {
            start: field.end - 4,
            end: field.end,
        },
        Payload::Fixed64 => Span {
            start: field.end - 8,
            end: field.end,
        },
        Payload::Varint(_) => return field.span().map(drop),
    };
    pieces(wire, span, sink)
}

fn varints(
    wire: &mut Wire<'_>,
    field: &Field,
    width: usize,
    sink: &mut dyn FnMut(&[u8]),
) -> Result<(), GraphError> {
    let span = match field.payload {
        Payload::Varint(value) => {
            sink(&value.to_le_bytes()[..width]);
            return Ok(());
        }
        _ => field.span()?,
    };
    wire.seek(span.start);
    while wire.position() < span.end {
        let value = wire.varint(span.end)?;
        sink(&value.to_le_bytes()[..width]);
    }
    Ok(())
}

fn pieces(wire: &mut Wire<'_>, span: Span, sink: &mut dyn FnMut(&[u8])) -> Result<(), GraphError> {
    const PIECE: u64 = 64 << 10;
    let mut start = span.start;
    while start < span.end {
        let end = span.end.min(start.saturating_add(PIECE));
        sink(&wire.bytes(Span { start, end }, "data", PIECE)?);
        start = end;
    }
    Ok(())
}

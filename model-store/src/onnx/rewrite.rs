//! Changes where a model's tensors are, message by message; everything else is copied as it is.

use std::collections::{BTreeMap, BTreeSet};

use super::wire::{Payload, ReadAt, Span, Wire};
use super::{GraphError, MAX_FILE_BYTES, MAX_NESTING};
use crate::graph::ExternalData;

/// An initializer that the file does not have yet, with its data elsewhere.
#[derive(Debug)]
pub(crate) struct NewInitializer {
    pub(crate) name: String,
    pub(crate) element: i32,
    pub(crate) dims: Vec<i64>,
    pub(crate) data: ExternalData,
}

/// What to change in a file; positions are those of the file that was walked.
#[derive(Debug, Default)]
pub(crate) struct Rewrite {
    /// New places of data, by where the tensor's message begins.
    pub(crate) places: BTreeMap<u64, ExternalData>,
    /// Fields to leave out, by where they begin.
    pub(crate) dropped: BTreeSet<u64>,
    /// Where the main graph's message begins.
    pub(crate) graph: u64,
    /// Initializers for the main graph.
    pub(crate) added: Vec<NewInitializer>,
}

impl Rewrite {
    pub(crate) fn is_empty(&self) -> bool {
        self.places.is_empty() && self.dropped.is_empty() && self.added.is_empty()
    }

    /// The file with the changes made.
    pub(crate) fn apply(&self, source: &dyn ReadAt) -> Result<Vec<u8>, GraphError> {
        let mut out = Vec::new();
        let mut wire = Wire::new(source);
        let whole = wire.whole();
        self.message(&mut wire, whole, 0, &mut out)?;
        match out.len() as u64 {
            bytes if bytes > MAX_FILE_BYTES => Err(GraphError::FileTooLarge { bytes }),
            _ => Ok(out),
        }
    }

    /// Copies a message that lies so deep. A file may have changed since it was walked.
    fn message(
        &self,
        wire: &mut Wire<'_>,
        span: Span,
        depth: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), GraphError> {
        if depth == MAX_NESTING {
            return Err(GraphError::TooDeep { offset: span.start });
        }
        let place = self.places.get(&span.start);
        // What stays as it is, up to the field that is looked at: copied in as few reads as possible.
        let mut same = Span {
            start: span.start,
            end: span.start,
        };
        wire.seek(span.start);
        while let Some(field) = wire.field(span.end)? {
            // Data, references and where the data is give way to the new place.
            let gives_way = place.is_some() && matches!(field.number, 4..=7 | 9..=11 | 13 | 14);
            match field.payload {
                Payload::Bytes(child) if !gives_way && self.changes(child) => {
                    wire.copy(same, out)?;
                    let mut inner = Vec::new();
                    self.message(wire, child, depth + 1, &mut inner)?;
                    put_bytes(out, field.number, &inner);
                    same.start = field.end;
                }
                _ if gives_way || self.dropped.contains(&field.at) => {
                    wire.copy(same, out)?;
                    same.start = field.end;
                }
                _ => {}
            }
            same.end = field.end;
            wire.seek(field.end);
        }
        wire.copy(same, out)?;
        if let Some(place) = place {
            put_place(out, place);
        }
        if span.start == self.graph {
            for tensor in &self.added {
                put_bytes(out, 5, &tensor.encode());
            }
        }
        Ok(())
    }

    fn changes(&self, span: Span) -> bool {
        let within = span.start..span.end;
        self.places.range(within.clone()).next().is_some()
            || self.dropped.range(within.clone()).next().is_some()
            || !self.added.is_empty() && (within.contains(&self.graph) || span.start == self.graph)
    }
}

impl NewInitializer {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for &dim in &self.dims {
            put_varint(&mut out, 1 << 3);
            put_varint(&mut out, dim.cast_unsigned());
        }
        put_varint(&mut out, 2 << 3);
        put_varint(&mut out, u64::from(self.element.cast_unsigned()));
        put_bytes(&mut out, 8, self.name.as_bytes());
        put_place(&mut out, &self.data);
        out
    }
}

fn put_place(out: &mut Vec<u8>, place: &ExternalData) {
    let mut entry = |key: &str, value: &str| {
        let mut entry = Vec::new();
        put_bytes(&mut entry, 1, key.as_bytes());
        put_bytes(&mut entry, 2, value.as_bytes());
        put_bytes(out, 13, &entry);
    };
    entry("location", &place.location);
    entry("offset", &place.offset.to_string());
    if let Some(length) = place.length {
        entry("length", &length.to_string());
    }
    put_varint(out, 14 << 3);
    put_varint(out, 1);
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn put_bytes(out: &mut Vec<u8>, field: u32, bytes: &[u8]) {
    put_varint(out, u64::from(field) << 3 | 2);
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

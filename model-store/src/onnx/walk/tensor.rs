//! Tensors: what they are and where their data lies. The data itself stays unread.

use super::{Holder, Tensor, Walk, once, push};
use crate::onnx::elements::{KEPT_VALUES, small_values, tensor_bytes};
use crate::onnx::external::{ExternalEntries, shown};
use crate::onnx::nodes::{Constant, NameId};
use crate::onnx::sites::{SiteData, TensorSite};
use crate::onnx::wire::{Field, Payload, Span};
use crate::onnx::{ExternalError, GraphError, MAX_DIMENSIONS, MAX_INITIALIZERS, MAX_TEXT_BYTES};

/// Attributes of nodes with less data than this are settings, not weights.
const LARGE_CONSTANT: u64 = 1 << 10;
/// Initializers, and constants that are as good as one.
const MAX_TENSORS: u64 = 2 * MAX_INITIALIZERS;

/// `TensorProto.DataLocation`: `DEFAULT` and `EXTERNAL`.
const DATA_IS_INSIDE: i32 = 0;
const DATA_IS_OUTSIDE: i32 = 1;

impl Walk<'_> {
    pub(super) fn sparse_tensor(
        &mut self,
        span: Span,
        holder: Holder,
    ) -> Result<Tensor, GraphError> {
        let (mut values, mut indices) = (None, None);
        let mut dims = Vec::new();
        self.message(span, |walk, field| {
            match field.number {
                1 => {
                    let tensor = walk.tensor(field.span()?, holder)?;
                    once(&mut values, tensor, "a sparse tensor's values", &field)?;
                }
                2 => {
                    let tensor = walk.tensor(field.span()?, holder)?;
                    once(&mut indices, tensor, "a sparse tensor's indices", &field)?;
                }
                3 => walk.dimensions(&field, &mut dims)?,
                _ => {}
            }
            Ok(())
        })?;
        Ok(Tensor {
            // A sparse initializer has the name of its values.
            name: values.map_or(0, |values| values.name),
            constant: Constant {
                rank: dims.len(),
                values: None,
            },
        })
    }

    pub(super) fn tensor(&mut self, span: Span, holder: Holder) -> Result<Tensor, GraphError> {
        let mut name = 0;
        let mut dims = Vec::new();
        let mut data_type = 0;
        let mut located_outside = false;
        let mut entries: Option<ExternalEntries> = None;
        let mut values = Vec::new();
        let mut raw = None;
        let mut data = DataFields::default();
        self.message(span, |walk, field| {
            data.see(&field);
            match field.number {
                1 => walk.dimensions(&field, &mut dims)?,
                2 => data_type = field.int32()?,
                // Packed data longer than any axes or shape could be stays unread.
                5 | 7 if field.end - field.at <= 16 * KEPT_VALUES as u64 => {
                    walk.integers(&field, &mut values, KEPT_VALUES)?;
                }
                8 => name = walk.name(&field)?,
                9 => {
                    let bytes = field.span()?;
                    let limit = 8 * KEPT_VALUES as u64;
                    // Anything longer is weights, and stays unread.
                    if bytes.len() <= limit {
                        raw = Some(walk.wire.bytes(bytes, "raw data", limit)?);
                    }
                }
                13 => {
                    let (key, value) = walk.entry(field.span()?)?;
                    let entries = entries.get_or_insert_default();
                    let pushed = entries.push(&key, &value);
                    pushed.map_err(|cause| walk.external_error(name, cause))?;
                }
                // A value that the enum does not have leaves it as it was.
                14 => match field.int32()? {
                    DATA_IS_INSIDE => located_outside = false,
                    DATA_IS_OUTSIDE => located_outside = true,
                    _ => {}
                },
                _ => {}
            }
            Ok(())
        })?;
        if let Some(&dimension) = dims.iter().find(|&&dimension| dimension < 0) {
            return Err(GraphError::Dimension {
                tensor: shown(self.names.text(name).as_bytes()),
                dimension,
            });
        }
        let needed = tensor_bytes(data_type, &dims);
        let place = if located_outside {
            let entries = entries.unwrap_or_default();
            let by_name = entries.names_a_tensor();
            let finished = entries.finish(needed);
            let reference = finished.map_err(|cause| self.external_error(name, cause))?;
            self.external.push(reference);
            let index = self.external.len() - 1;
            match by_name {
                true => SiteData::ByName(index),
                false => SiteData::Outside(index),
            }
        } else {
            data.place(data_type, span)
        };
        let values = (!located_outside)
            .then(|| small_values(data_type, &dims, raw, values))
            .flatten();
        let constant = Constant {
            rank: dims.len(),
            values,
        };
        let inside = !located_outside;
        if holder != Holder::Node || !inside || place.bytes_inside(span) >= LARGE_CONSTANT {
            let site = TensorSite {
                name,
                element: data_type,
                dims,
                bytes: needed,
                data: place,
                message: span,
                in_subgraph: self.level > 1,
                is_constant: holder == Holder::Node,
                is_sparse: holder == Holder::Sparse,
            };
            push(&mut self.sites, site, "tensors", MAX_TENSORS)?;
        }
        Ok(Tensor { name, constant })
    }

    fn external_error(&self, tensor: NameId, cause: ExternalError) -> GraphError {
        GraphError::External {
            tensor: shown(self.names.text(tensor).as_bytes()),
            cause,
        }
    }

    fn entry(&mut self, span: Span) -> Result<(Vec<u8>, Vec<u8>), GraphError> {
        let mut entry = (Vec::new(), Vec::new());
        self.message(span, |walk, field| {
            let slot = match field.number {
                1 => &mut entry.0,
                2 => &mut entry.1,
                _ => return Ok(()),
            };
            *slot = walk.wire.bytes(
                field.span()?,
                "a reference to external data",
                MAX_TEXT_BYTES,
            )?;
            Ok(())
        })?;
        Ok(entry)
    }

    fn dimensions(&mut self, field: &Field, dims: &mut Vec<i64>) -> Result<(), GraphError> {
        self.integers(field, dims, MAX_DIMENSIONS as usize)?;
        if dims.len() as u64 > MAX_DIMENSIONS {
            return Err(GraphError::TooMany {
                what: "dimensions of a tensor",
                limit: MAX_DIMENSIONS,
            });
        }
        Ok(())
    }

    /// Appends a field of whole numbers, packed or not; stops one past `keep`.
    pub(super) fn integers(
        &mut self,
        field: &Field,
        to: &mut Vec<i64>,
        keep: usize,
    ) -> Result<(), GraphError> {
        match field.payload {
            Payload::Varint(value) => {
                if to.len() <= keep {
                    to.push(value as i64);
                }
                Ok(())
            }
            Payload::Bytes(span) => {
                let mut position = span.start;
                while position < span.end && to.len() <= keep {
                    self.wire.seek(position);
                    to.push(self.wire.varint(span.end)? as i64);
                    position = self.wire.position();
                }
                Ok(())
            }
            _ => field.span().map(drop),
        }
    }
}

/// The fields of a tensor that hold its data.
#[derive(Default)]
struct DataFields {
    raw: Option<Span>,
    /// Packed numbers that lie in the file as in memory.
    plain: Option<(u32, Span)>,
    /// Fields with values in protobuf's own encoding.
    typed: u64,
}

impl DataFields {
    fn see(&mut self, field: &Field) {
        match (field.number, field.payload) {
            // Given twice, the last one counts.
            (9, Payload::Bytes(span)) => self.raw = Some(span),
            (4 | 10, Payload::Bytes(span)) => {
                self.plain = Some((field.number, span));
                self.typed += 1;
            }
            (4..=7 | 10 | 11, _) => self.typed += 1,
            _ => {}
        }
    }

    fn place(&self, element: i32, message: Span) -> SiteData {
        let fits = |number| matches!((number, element), (4, 1 | 14) | (10, 11 | 15));
        match (self.raw, self.plain) {
            (Some(raw), _) => SiteData::Inline(raw),
            (None, Some((number, span))) if self.typed == 1 && fits(number) => {
                SiteData::Inline(span)
            }
            _ if self.typed == 0 => SiteData::Inline(Span {
                start: message.end,
                end: message.end,
            }),
            _ => SiteData::Encoded,
        }
    }
}

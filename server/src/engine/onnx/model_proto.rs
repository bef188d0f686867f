//! Finds the tensors of a serialized model and puts others in their place, leaving every other
//! byte as it is.

use dormouse_core::shape::element_count;

use super::protobuf::{Fields, malformed, put_message, take_varint};

/// Protobuf's own limit on nested messages.
const DEEPEST: usize = 100;
/// Protobuf's own limit on a message's size.
pub(super) const LARGEST: usize = i32::MAX as usize;

/// Where a tensor is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// An initializer of the main graph.
    Main,
    /// An initializer of a subgraph.
    Subgraph,
    /// A part of a sparse tensor or a node's attribute.
    Other,
}

/// Decides on each tensor of a model.
pub(super) trait Rewrite {
    /// The tensor to put in this one's place, none to leave it.
    fn tensor(&mut self, place: Place, bytes: &[u8]) -> Result<Option<Vec<u8>>, String>;
}

/// The model with its tensors rewritten, none when nothing changed.
pub(super) fn rewrite(model: &[u8], rewrite: &mut dyn Rewrite) -> Result<Option<Vec<u8>>, String> {
    Walk { rewrite }.message(Message::Model, model, 0)
}

/// Whether these bytes are a model in ONNX Runtime's own format, which is recognised by the same
/// four bytes as it does it.
pub(super) fn is_ort_format(model: &[u8]) -> bool {
    model.get(4..8) == Some(b"ORTM")
}

/// The messages on the way to a tensor.
#[derive(Clone, Copy)]
enum Message {
    Model,
    MainGraph,
    Graph,
    Function,
    Node,
    Attribute,
    SparseTensor,
    Tensor(Place),
}

impl Message {
    /// The message in a field and whether the field occurs once.
    fn child(self, field: u32) -> Option<(Self, bool)> {
        Some(match (self, field) {
            (Self::Model, 7) => (Self::MainGraph, true),
            (Self::Model, 25) => (Self::Function, false),
            (Self::MainGraph | Self::Graph, 1) => (Self::Node, false),
            (Self::MainGraph, 5) => (Self::Tensor(Place::Main), false),
            (Self::Graph, 5) => (Self::Tensor(Place::Subgraph), false),
            (Self::MainGraph | Self::Graph, 15) => (Self::SparseTensor, false),
            (Self::Function, 7) => (Self::Node, false),
            (Self::Function, 11) => (Self::Attribute, false),
            (Self::Node, 5) => (Self::Attribute, false),
            (Self::Attribute, 5) => (Self::Tensor(Place::Other), true),
            (Self::Attribute, 10) => (Self::Tensor(Place::Other), false),
            (Self::Attribute, 6) => (Self::Graph, true),
            (Self::Attribute, 11) => (Self::Graph, false),
            (Self::Attribute, 22) => (Self::SparseTensor, true),
            (Self::Attribute, 23) => (Self::SparseTensor, false),
            (Self::SparseTensor, 1 | 2) => (Self::Tensor(Place::Other), true),
            _ => return None,
        })
    }
}

struct Walk<'r> {
    rewrite: &'r mut dyn Rewrite,
}

impl Walk<'_> {
    /// The message with its tensors rewritten, none when nothing changed.
    fn message(
        &mut self,
        message: Message,
        bytes: &[u8],
        depth: usize,
    ) -> Result<Option<Vec<u8>>, String> {
        if depth > DEEPEST {
            return Err(malformed("it nests too deeply"));
        }
        if let Message::Tensor(place) = message {
            return self.rewrite.tensor(place, bytes);
        }
        let mut changed: Option<Vec<u8>> = None;
        let mut copied = 0;
        let mut seen = 0u32;
        for field in Fields::new(bytes) {
            let field = field?;
            let Some(payload) = field.message else {
                continue;
            };
            let Some((child, once)) = message.child(field.number) else {
                continue;
            };
            if once {
                // Protobuf would merge the two, and the parts could mean what neither says.
                let bit = 1 << field.number;
                if seen & bit != 0 {
                    return Err(malformed("a field that occurs once is repeated"));
                }
                seen |= bit;
            }
            if let Some(new) = self.message(child, payload, depth + 1)? {
                let out = changed.get_or_insert_default();
                out.extend_from_slice(&bytes[copied..field.start]);
                put_message(out, field.number, &new);
                copied = field.end;
            }
        }
        if let Some(out) = &mut changed {
            out.extend_from_slice(&bytes[copied..]);
        }
        Ok(changed)
    }
}

/// What a tensor says before its data.
#[derive(Default)]
pub(super) struct TensorHead {
    pub(super) name: String,
    pub(super) dims: Vec<i64>,
    /// ONNX's number of the element type.
    pub(super) element: u64,
    pub(super) external: bool,
    pub(super) location: Option<String>,
    pub(super) offset: Option<u64>,
    pub(super) length: Option<u64>,
}

impl TensorHead {
    pub(super) fn read(bytes: &[u8]) -> Result<Self, String> {
        let mut head = Self::default();
        for field in Fields::new(bytes) {
            let field = field?;
            match (field.number, field.message, field.varint) {
                (1, None, Some(dim)) => head.dims.push(dim.cast_signed()),
                (1, Some(mut packed), None) => {
                    while !packed.is_empty() {
                        head.dims.push(take_varint(&mut packed)?.cast_signed());
                    }
                }
                (2, None, Some(element)) => head.element = element,
                (8, Some(name), None) => head.name = String::from_utf8_lossy(name).into_owned(),
                (13, Some(entry), None) => head.entry(entry)?,
                (14, None, Some(place)) => head.external = place == 1,
                _ => {}
            }
        }
        Ok(head)
    }

    fn entry(&mut self, bytes: &[u8]) -> Result<(), String> {
        let (mut key, mut value) = (String::new(), String::new());
        for field in Fields::new(bytes) {
            let field = field?;
            let text = field.message.map(String::from_utf8_lossy);
            match (field.number, text) {
                (1, Some(text)) => key = text.into_owned(),
                (2, Some(text)) => value = text.into_owned(),
                _ => {}
            }
        }
        let number = |value: &str| {
            value.parse().map_err(|_| {
                format!("external data has {key} '{value}', expected a whole number of bytes")
            })
        };
        match key.as_str() {
            "location" => self.location = Some(value),
            "offset" => self.offset = Some(number(&value)?),
            "length" => self.length = Some(number(&value)?),
            _ => {}
        }
        Ok(())
    }

    /// The bytes the shape needs, none for a type of unknown width.
    pub(super) fn byte_count(&self) -> Option<u64> {
        let count = element_count(&self.dims)?;
        match self.is_in_halves() {
            true => Some(count.div_ceil(2)),
            false => count.checked_mul(self.width()? as u64),
        }
    }

    /// The bytes of an element, or of two that share one; none for a type of unknown width.
    pub(super) fn width(&self) -> Option<usize> {
        Some(match self.element {
            2 | 3 | 9 | 17..=20 | 24 => 1,
            4 | 5 | 10 | 16 => 2,
            1 | 6 | 12 => 4,
            7 | 11 | 13 | 14 => 8,
            15 => 16,
            _ if self.is_in_halves() => 1,
            _ => return None,
        })
    }

    /// Two elements share a byte.
    fn is_in_halves(&self) -> bool {
        matches!(self.element, 21..=23)
    }
}

/// The tensor without its data and whatever said where that lies.
pub(super) fn without_data(tensor: &[u8]) -> Result<Vec<u8>, String> {
    let mut out = Vec::with_capacity(tensor.len());
    for field in Fields::new(tensor) {
        let field = field?;
        // The raw data, external_data and data_location.
        if !matches!(field.number, 9 | 13 | 14) {
            out.extend_from_slice(&tensor[field.start..field.end]);
        }
    }
    Ok(out)
}

/// The tensor with these bytes as its data.
pub(super) fn with_data(tensor: &[u8], data: &[u8]) -> Result<Vec<u8>, String> {
    let mut out = without_data(tensor)?;
    put_message(&mut out, 9, data);
    Ok(out)
}

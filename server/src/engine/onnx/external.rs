//! Weights outside the graph that ONNX Runtime would look for on the disk.
//!
//! Files given in memory reach only the initializers of the main graph, and those only after
//! shapes were inferred. A tensor inside a subgraph or an attribute would be read from the working
//! directory instead, and a small one that holds a shape would be missed, so their bytes are put
//! into the graph here; and a tensor whose file was not given is refused.

use std::borrow::Cow;

use dormouse_core::shape::element_count;

use crate::engine::EngineError;

/// Protobuf's own limit on nested messages.
const DEEPEST: usize = 100;
/// Protobuf's own limit on a message's size.
const LARGEST: usize = i32::MAX as usize;

/// Initializers up to this size are put into the graph: some of them are shapes.
const SMALL: usize = 4096;

/// The graph with every tensor that ONNX Runtime could not find among `files` settled: unchanged
/// unless something small or inside a subgraph lives outside.
pub(super) fn settle<'a>(
    graph: &'a [u8],
    files: &[(String, Vec<u8>)],
) -> Result<Cow<'a, [u8]>, EngineError> {
    // ONNX Runtime's own format is recognised by the same four bytes as it does it.
    if graph.get(4..8) == Some(b"ORTM") {
        return Ok(Cow::Borrowed(graph));
    }
    let settled = Settle { files }
        .message(Message::Model, graph, 0)
        .map_err(EngineError::Failed)?;
    match settled {
        None => Ok(Cow::Borrowed(graph)),
        Some(graph) if graph.len() > LARGEST => Err(EngineError::Failed(format!(
            "the graph has {} bytes with the external data put into it, {LARGEST} at most can be loaded",
            graph.len()
        ))),
        Some(graph) => Ok(Cow::Owned(graph)),
    }
}

/// The messages on the way to a tensor.
#[derive(Clone, Copy, PartialEq)]
enum Message {
    Model,
    MainGraph,
    Graph,
    Function,
    Node,
    Attribute,
    SparseTensor,
    /// An initializer of the main graph: ONNX Runtime finds its bytes among the files.
    MainTensor,
    /// Any other tensor.
    Tensor,
}

impl Message {
    /// The message in a field and whether the field occurs once.
    fn child(self, field: u32) -> Option<(Self, bool)> {
        Some(match (self, field) {
            (Self::Model, 7) => (Self::MainGraph, true),
            (Self::Model, 25) => (Self::Function, false),
            (Self::MainGraph | Self::Graph, 1) => (Self::Node, false),
            (Self::MainGraph, 5) => (Self::MainTensor, false),
            (Self::Graph, 5) => (Self::Tensor, false),
            (Self::MainGraph | Self::Graph, 15) => (Self::SparseTensor, false),
            (Self::Function, 7) => (Self::Node, false),
            (Self::Function, 11) => (Self::Attribute, false),
            (Self::Node, 5) => (Self::Attribute, false),
            (Self::Attribute, 5) => (Self::Tensor, true),
            (Self::Attribute, 10) => (Self::Tensor, false),
            (Self::Attribute, 6) => (Self::Graph, true),
            (Self::Attribute, 11) => (Self::Graph, false),
            (Self::Attribute, 22) => (Self::SparseTensor, true),
            (Self::Attribute, 23) => (Self::SparseTensor, false),
            (Self::SparseTensor, 1 | 2) => (Self::Tensor, true),
            _ => return None,
        })
    }
}

struct Settle<'f> {
    files: &'f [(String, Vec<u8>)],
}

impl Settle<'_> {
    /// The message with its tensors settled, none when nothing changed.
    fn message(
        &self,
        message: Message,
        bytes: &[u8],
        depth: usize,
    ) -> Result<Option<Vec<u8>>, String> {
        if depth > DEEPEST {
            return Err(malformed("it nests too deeply"));
        }
        if matches!(message, Message::MainTensor | Message::Tensor) {
            return self.tensor(message, bytes);
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

    fn tensor(&self, message: Message, bytes: &[u8]) -> Result<Option<Vec<u8>>, String> {
        let tensor = TensorHead::read(bytes)?;
        if !tensor.external {
            return Ok(None);
        }
        let name = &tensor.name;
        let location = tensor
            .location
            .as_deref()
            .ok_or_else(|| format!("tensor '{name}' is external and names no file"))?;
        let Some((_, file)) = self.files.iter().find(|(given, _)| given == location) else {
            return Err(format!(
                "tensor '{name}' is kept in '{location}', which is not among the model's files"
            ));
        };
        let start = tensor.offset.unwrap_or(0);
        let length = match tensor.length.or_else(|| tensor.byte_count()) {
            Some(length) => length,
            None => (file.len() as u64).saturating_sub(start),
        };
        let data = start
            .checked_add(length)
            .and_then(|end| file.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?))
            .ok_or_else(|| {
                format!(
                    "tensor '{name}' needs {length} bytes from byte {start} of '{location}', which has {}",
                    file.len()
                )
            })?;
        if message == Message::MainTensor && data.len() > SMALL {
            return Ok(None);
        }
        let mut out = Vec::with_capacity(bytes.len().saturating_add(data.len()));
        for field in Fields::new(bytes) {
            let field = field?;
            // Data, external_data and data_location give way to the bytes themselves.
            if !matches!(field.number, 9 | 13 | 14) {
                out.extend_from_slice(&bytes[field.start..field.end]);
            }
        }
        put_message(&mut out, 9, data);
        Ok(Some(out))
    }
}

/// What a tensor says before its data.
#[derive(Default)]
struct TensorHead {
    name: String,
    dims: Vec<i64>,
    element: u64,
    external: bool,
    location: Option<String>,
    offset: Option<u64>,
    length: Option<u64>,
}

impl TensorHead {
    fn read(bytes: &[u8]) -> Result<Self, String> {
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
    fn byte_count(&self) -> Option<u64> {
        let count = element_count(&self.dims)?;
        let width = match self.element {
            2 | 3 | 9 | 17..=20 | 24 => 1,
            4 | 5 | 10 | 16 => 2,
            1 | 6 | 12 => 4,
            7 | 11 | 13 | 14 => 8,
            15 => 16,
            21..=23 => return Some(count.div_ceil(2)),
            _ => return None,
        };
        count.checked_mul(width)
    }
}

/// One field of a message: where it lies, and its payload if it is bytes or a number.
struct Field<'a> {
    number: u32,
    start: usize,
    end: usize,
    message: Option<&'a [u8]>,
    varint: Option<u64>,
}

struct Fields<'a> {
    bytes: &'a [u8],
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    fn new(bytes: &'a [u8]) -> Self {
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

fn malformed(why: &str) -> String {
    format!("Protobuf parsing failed: the file is not a valid ONNX model, {why}")
}

fn take_bytes<'a>(rest: &mut &'a [u8], length: usize) -> Result<&'a [u8], String> {
    let (taken, left) = rest
        .split_at_checked(length)
        .ok_or_else(|| malformed("it ends in the middle of a field"))?;
    *rest = left;
    Ok(taken)
}

fn take_varint(rest: &mut &[u8]) -> Result<u64, String> {
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

fn put_message(out: &mut Vec<u8>, field: u32, bytes: &[u8]) {
    put_varint(out, u64::from(field) << 3 | 2);
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

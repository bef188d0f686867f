//! The declared inputs of a serialized model's main graph.

use dormouse_core::shape::Shape;

use super::protobuf::{Fields, malformed, put_message, put_number};

/// Since this version an initializer that is no input is a constant; before it every initializer
/// was an input as well.
const CONSTANT_INITIALIZERS: u64 = 4;

/// A property of models whose inputs lose their shapes when they are opened.
const WITHOUT_SHAPES: (&str, &str) = ("dormouse.input_shapes", "hidden");

/// What becomes of an input.
pub(super) enum Edit {
    Keep,
    Drop,
    /// These bytes in the place of the declaration's.
    Replace(Vec<u8>),
}

/// One input's declaration.
pub(super) struct Declared<'a> {
    pub(super) name: String,
    bytes: &'a [u8],
}

impl Declared<'_> {
    /// The declaration with the shape taken out and that shape; none when it declares no tensor
    /// or no shape.
    pub(super) fn without_shape(&self) -> Result<Option<(Vec<u8>, Shape)>, String> {
        // ValueInfoProto.type, TypeProto.tensor_type, TypeProto.Tensor.shape.
        take_out(self.bytes, &[2, 1, 2])?
            .map(|(bytes, shape)| Ok((bytes, read_shape(shape)?)))
            .transpose()
    }
}

/// The names of a model's inputs, those with an initializer included.
pub(super) fn input_names(model: &[u8]) -> Result<Vec<String>, String> {
    let mut names = Vec::new();
    edit_inputs(model, &mut |input| {
        names.push(input.name.clone());
        Ok(Edit::Keep)
    })?;
    Ok(names)
}

/// The model with its inputs edited, none when nothing changed.
pub(super) fn edit_inputs(
    model: &[u8],
    edit: &mut dyn FnMut(&Declared<'_>) -> Result<Edit, String>,
) -> Result<Option<Vec<u8>>, String> {
    replace(model, 7, &mut |graph| {
        let edited = replace(graph, 11, &mut |bytes| {
            let declared = Declared {
                name: name(bytes)?,
                bytes,
            };
            edit(&declared)
        })?;
        Ok(edited.map_or(Edit::Keep, Edit::Replace))
    })
}

/// Whether the model is of the time when every initializer was declared as an input.
pub(super) fn declares_initializers(model: &[u8]) -> Result<bool, String> {
    let mut version = 0;
    for field in Fields::new(model) {
        let field = field?;
        if field.number == 1 {
            version = field.varint.unwrap_or(0);
        }
    }
    Ok(version < CONSTANT_INITIALIZERS)
}

/// The model as one of the first version in which initializers are constants.
pub(super) fn raise_version(model: &[u8]) -> Result<Vec<u8>, String> {
    let mut out = Vec::with_capacity(model.len() + 2);
    put_number(&mut out, 1, CONSTANT_INITIALIZERS);
    for field in Fields::new(model) {
        let field = field?;
        if field.number != 1 {
            out.extend_from_slice(&model[field.start..field.end]);
        }
    }
    Ok(out)
}

/// Adds the property that [`hides_shapes`] looks for.
pub(super) fn hide_shapes(model: &mut Vec<u8>) {
    let mut entry = Vec::new();
    put_message(&mut entry, 1, WITHOUT_SHAPES.0.as_bytes());
    put_message(&mut entry, 2, WITHOUT_SHAPES.1.as_bytes());
    put_message(model, 14, &entry);
}

/// Whether ONNX Runtime is better not told the shapes of the model's inputs.
pub(super) fn hides_shapes(model: &[u8]) -> Result<bool, String> {
    let mut entry = Vec::new();
    hide_shapes(&mut entry);
    for field in Fields::new(model) {
        let field = field?;
        if field.number == 14 && model[field.start..field.end] == entry {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The message with each occurrence of a field edited, none when nothing changed.
fn replace(
    message: &[u8],
    number: u32,
    edit: &mut dyn FnMut(&[u8]) -> Result<Edit, String>,
) -> Result<Option<Vec<u8>>, String> {
    let mut changed: Option<Vec<u8>> = None;
    let mut copied = 0;
    for field in Fields::new(message) {
        let field = field?;
        let Some(payload) = field.message.filter(|_| field.number == number) else {
            continue;
        };
        let new = match edit(payload)? {
            Edit::Keep => continue,
            Edit::Drop => None,
            Edit::Replace(bytes) => Some(bytes),
        };
        let out = changed.get_or_insert_default();
        out.extend_from_slice(&message[copied..field.start]);
        if let Some(new) = new {
            put_message(out, number, &new);
        }
        copied = field.end;
    }
    if let Some(out) = &mut changed {
        out.extend_from_slice(&message[copied..]);
    }
    Ok(changed)
}

/// A message without one of its fields, and that field's payload.
type Parted<'a> = (Vec<u8>, &'a [u8]);

/// Takes out the field at the end of `path`; none when there is no such field.
fn take_out<'a>(message: &'a [u8], path: &[u32]) -> Result<Option<Parted<'a>>, String> {
    let Some((&number, rest)) = path.split_first() else {
        return Err(malformed("it has an impossible type"));
    };
    let mut found = None;
    for field in Fields::new(message) {
        let field = field?;
        let Some(payload) = field.message.filter(|_| field.number == number) else {
            continue;
        };
        if found.is_some() {
            return Err(malformed("a field that occurs once is repeated"));
        }
        found = Some((field.start, field.end, payload));
    }
    let Some((start, end, payload)) = found else {
        return Ok(None);
    };
    let mut out = message[..start].to_vec();
    let taken = if rest.is_empty() {
        payload
    } else {
        let Some((inner, taken)) = take_out(payload, rest)? else {
            return Ok(None);
        };
        put_message(&mut out, number, &inner);
        taken
    };
    out.extend_from_slice(&message[end..]);
    Ok(Some((out, taken)))
}

fn name(value_info: &[u8]) -> Result<String, String> {
    let mut name = String::new();
    for field in Fields::new(value_info) {
        let field = field?;
        if let (1, Some(text)) = (field.number, field.message) {
            name = String::from_utf8_lossy(text).into_owned();
        }
    }
    Ok(name)
}

/// The dimensions of a TensorShapeProto, -1 where one is open.
fn read_shape(shape: &[u8]) -> Result<Shape, String> {
    let mut dims = Shape::new();
    for field in Fields::new(shape) {
        let field = field?;
        let Some(dim) = field.message.filter(|_| field.number == 1) else {
            continue;
        };
        let mut size = -1;
        for field in Fields::new(dim) {
            let field = field?;
            match (field.number, field.varint) {
                (1, Some(value)) => size = value.cast_signed(),
                (2, None) => size = -1,
                _ => {}
            }
        }
        dims.push(size);
    }
    Ok(dims)
}

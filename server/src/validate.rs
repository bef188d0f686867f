//! Compares what a front end read from the wire with the model's signature. Behind this point
//! names, shapes, types and byte counts are facts.

use std::fmt::Write;

use dormouse_core::datatype::DataType;
use dormouse_core::sequence::SequenceId;
use dormouse_core::shape::{DisplayShape, Shape, element_count};
use dormouse_model_store::spec::{ControlKind, ModelSpec, TensorSpec};

use crate::error::ServeError;
use crate::request::{InferRequest, RawInput, RawRequest, SequenceStep, Tensor};

/// How many names an error lists before it only counts the rest.
const MAX_LISTED: usize = 16;
/// Names from the wire are cut to this many characters in errors.
const MAX_QUOTED: usize = 64;
/// Triton's limit of a sequence's name, in bytes.
const MAX_SEQUENCE_ID: usize = 128;
/// Dimensions from the wire beyond these are only counted in errors.
const MAX_SHOWN_DIMS: usize = 16;

/// Checks a request against its model and brings it into the model's order.
pub fn validate(spec: &ModelSpec, raw: RawRequest) -> Result<InferRequest, ServeError> {
    let mut inputs: Vec<Option<Tensor>> = Vec::new();
    inputs.resize_with(spec.inputs.len(), || None);
    let given = raw.inputs.len();
    let mut rows = None;
    for (position, input) in raw.inputs.into_iter().enumerate() {
        let Some(index) = find(&spec.inputs, position, &input.name) else {
            return Err(unknown(spec, Side::Input, &input.name));
        };
        let tensor_spec = &spec.inputs[index];
        if inputs[index].is_some() {
            return Err(duplicate(spec, Side::Input, &input.name));
        }
        check_datatype(spec, tensor_spec, input.datatype)?;
        let input_rows = check_shape(spec, tensor_spec, &input.shape)?;
        match rows {
            None => rows = Some((input_rows, index)),
            Some((expected, _)) if expected == input_rows => {}
            Some((expected, first)) => {
                return Err(uneven_rows(spec, (first, expected), (index, input_rows)));
            }
        }
        check_bytes(spec, &input)?;
        let shape = graph_shape(spec, tensor_spec, input.shape)?;
        inputs[index] = Some(Tensor {
            datatype: input.datatype,
            shape,
            data: input.data,
        });
    }
    // No name came twice, so equal counts mean that every input is there.
    if given < inputs.len() {
        check_present(spec, &inputs)?;
    }
    let rows = rows.map_or(1, |(rows, _)| rows);
    let sequence = match spec.sequence {
        None => None,
        Some(_) => Some(check_step(spec, raw.sequence, rows)?),
    };
    Ok(InferRequest {
        id: raw.id,
        inputs,
        outputs: check_outputs(spec, &raw.outputs)?,
        rows,
        priority: raw.priority,
        deadline: raw.deadline,
        received: raw.received,
        sequence,
        span: raw.span,
        held: raw.held,
    })
}

/// A request's place in its sequence, which a model with sequences must be told.
fn check_step(
    spec: &ModelSpec,
    sequence: Option<Box<SequenceStep>>,
    rows: u32,
) -> Result<Box<SequenceStep>, ServeError> {
    let refused = |why: &str| {
        Err(ServeError::invalid(format!(
            "inference request to model '{}' must {why}",
            spec.name
        )))
    };
    if rows > 1 {
        return refused("specify batch-size 1 due to requirements of sequence batcher");
    }
    let Some(sequence) = sequence else {
        return refused("specify a non-zero or non-empty correlation ID");
    };
    if let SequenceId::Text(id) = &sequence.step.id {
        if id.len() > MAX_SEQUENCE_ID {
            return refused("specify a correlation ID of at most 128 bytes");
        }
        let controls = spec.sequence.iter().flat_map(|spec| &spec.controls);
        let mut numbers = controls.filter(|control| {
            control.kind == ControlKind::CorrelationId && control.datatype != DataType::Bytes
        });
        if numbers.next().is_some() {
            return refused("specify a correlation ID that is a number, as its CORRID control is");
        }
    }
    Ok(sequence)
}

/// The index of a tensor; clients mostly keep the model's order, so that place is tried first.
fn find(specs: &[TensorSpec], position: usize, name: &str) -> Option<usize> {
    if specs.get(position).is_some_and(|spec| &*spec.name == name) {
        return Some(position);
    }
    specs.iter().position(|spec| &*spec.name == name)
}

fn check_datatype(spec: &ModelSpec, tensor: &TensorSpec, got: DataType) -> Result<(), ServeError> {
    if got == tensor.datatype {
        return Ok(());
    }
    Err(ServeError::invalid(format!(
        "unexpected datatype for input '{}' of model '{}': expected {}, got {got}",
        tensor.name, spec.name, tensor.datatype
    )))
}

/// Compares a shape with the signature and returns its rows.
fn check_shape(spec: &ModelSpec, tensor: &TensorSpec, shape: &[i64]) -> Result<u32, ServeError> {
    let (rows, dims) = if spec.max_batch_size == 0 {
        (1, shape)
    } else {
        let Some((&rows, dims)) = shape.split_first() else {
            return Err(unexpected_shape(spec, tensor, shape));
        };
        (rows, dims)
    };
    if dims.iter().any(|&dim| dim < 0) || !tensor.admits(dims) {
        return Err(unexpected_shape(spec, tensor, shape));
    }
    match u32::try_from(rows) {
        Ok(rows) if rows >= 1 && (spec.max_batch_size == 0 || rows <= spec.max_batch_size) => {
            Ok(rows)
        }
        _ => Err(ServeError::invalid(format!(
            "unexpected batch size for input '{}' of model '{}': expected 1 to {} rows, got {rows}",
            tensor.name, spec.name, spec.max_batch_size
        ))),
    }
}

/// Counts the bytes of an input: exactly what its type and shape say.
fn check_bytes(spec: &ModelSpec, input: &RawInput) -> Result<(), ServeError> {
    let Some(elements) = element_count(&input.shape) else {
        return Err(too_large(spec, input));
    };
    let Some(size) = input.datatype.element_size() else {
        return walk_bytes(spec, input, elements);
    };
    let Some(expected) = elements.checked_mul(size as u64) else {
        return Err(too_large(spec, input));
    };
    if input.data.len() as u64 != expected {
        return Err(ServeError::invalid(format!(
            "unexpected byte size for input '{}' of model '{}': expected {expected} bytes for {} \
             of shape {}, got {}",
            quote(&input.name),
            spec.name,
            input.datatype,
            show(&input.shape),
            input.data.len()
        )));
    }
    if input.datatype == DataType::Bool {
        return check_bools(spec, input);
    }
    Ok(())
}

/// Anything but 0 and 1 is no boolean to the engine: what it would do with it is undefined.
fn check_bools(spec: &ModelSpec, input: &RawInput) -> Result<(), ServeError> {
    // Without an early exit the loop runs many bytes at a time.
    let union = input.data.iter().fold(0, |union, byte| union | byte);
    if union <= 1 {
        return Ok(());
    }
    let position = input.data.iter().position(|&byte| byte > 1);
    let position = position.expect("a bit above the lowest came from some byte");
    Err(ServeError::invalid(format!(
        "input '{}' of model '{}' is not BOOL: element {position} is {}, expected 0 or 1",
        quote(&input.name),
        spec.name,
        input.data[position]
    )))
}

/// Walks the length-prefixed elements of a BYTES tensor.
fn walk_bytes(spec: &ModelSpec, input: &RawInput, elements: u64) -> Result<(), ServeError> {
    let wrong = |what: String| {
        Err(ServeError::invalid(format!(
            "unexpected contents of BYTES input '{}' of model '{}': {what}",
            quote(&input.name),
            spec.name
        )))
    };
    let mut rest = &input.data[..];
    // Stops at the end of the data, however many elements the shape claims.
    for element in 0..elements {
        let Some((length, tail)) = rest.split_first_chunk() else {
            return wrong(format!(
                "expected {elements} elements for shape {}, got {element} and {} stray bytes",
                show(&input.shape),
                rest.len()
            ));
        };
        let length = u32::from_le_bytes(*length) as usize;
        let Some(tail) = tail.get(length..) else {
            return wrong(format!(
                "element {element} of {elements} is {length} bytes long, but only {} are left",
                tail.len()
            ));
        };
        rest = tail;
    }
    if !rest.is_empty() {
        return wrong(format!(
            "expected {elements} elements for shape {}, got {} more bytes behind them",
            show(&input.shape),
            rest.len()
        ));
    }
    Ok(())
}

/// The shape that the graph is given: `reshape` behind the batch dimension, where there is one.
fn graph_shape(spec: &ModelSpec, tensor: &TensorSpec, shape: Shape) -> Result<Shape, ServeError> {
    let Some(reshape) = &tensor.reshape else {
        return Ok(shape);
    };
    let batch_dims = usize::from(spec.max_batch_size > 0);
    let mut reshaped: Shape = shape[..batch_dims].iter().copied().collect();
    // As in Triton, open dimensions keep their order: the first `-1` becomes the first one.
    let mut open = tensor
        .dims
        .iter()
        .zip(&shape[batch_dims..])
        .filter_map(|(&dim, &got)| (dim == -1).then_some(got));
    for &dim in reshape {
        if dim != -1 {
            reshaped.push(dim);
        } else if let Some(got) = open.next() {
            reshaped.push(got);
        } else {
            return Err(bad_reshape(spec, tensor, &shape));
        }
    }
    if element_count(&reshaped) != element_count(&shape) {
        return Err(bad_reshape(spec, tensor, &shape));
    }
    Ok(reshaped)
}

/// Every input that may not be left out is there.
fn check_present(spec: &ModelSpec, inputs: &[Option<Tensor>]) -> Result<(), ServeError> {
    let missing = |(index, tensor): (usize, &TensorSpec)| {
        (inputs[index].is_none() && !tensor.optional).then_some(index)
    };
    let absent: Vec<usize> = spec.inputs.iter().enumerate().filter_map(missing).collect();
    if absent.is_empty() {
        return Ok(());
    }
    let names = list(absent.iter().map(|&index| &*spec.inputs[index].name));
    let noun = if absent.len() == 1 { "input" } else { "inputs" };
    Err(ServeError::invalid(format!(
        "missing {noun} {names} of model '{}': expected {}, got {}",
        spec.name,
        expected_count(&spec.inputs),
        inputs.iter().flatten().count()
    )))
}

/// The indices of the outputs that were asked for; none means all.
fn check_outputs(spec: &ModelSpec, names: &[String]) -> Result<Vec<usize>, ServeError> {
    if names.is_empty() {
        return Ok((0..spec.outputs.len()).collect());
    }
    // Names may repeat without end, indices may not.
    let mut outputs = Vec::with_capacity(names.len().min(spec.outputs.len()));
    for (position, name) in names.iter().enumerate() {
        let Some(index) = find(&spec.outputs, position, name) else {
            return Err(unknown(spec, Side::Output, name));
        };
        if outputs.contains(&index) {
            return Err(duplicate(spec, Side::Output, name));
        }
        outputs.push(index);
    }
    Ok(outputs)
}

#[derive(Clone, Copy)]
enum Side {
    Input,
    Output,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Output => "output",
        }
    }

    fn specs(self, spec: &ModelSpec) -> &[TensorSpec] {
        match self {
            Self::Input => &spec.inputs,
            Self::Output => &spec.outputs,
        }
    }
}

#[cold]
fn unknown(spec: &ModelSpec, side: Side, name: &str) -> ServeError {
    let known = side.specs(spec);
    let expected = if known.is_empty() {
        "the model has none".to_owned()
    } else {
        format!(
            "expected {}",
            list(known.iter().map(|tensor| &*tensor.name))
        )
    };
    ServeError::invalid(format!(
        "unexpected {} '{}' for model '{}': {expected}",
        side.name(),
        quote(name),
        spec.name
    ))
}

#[cold]
fn duplicate(spec: &ModelSpec, side: Side, name: &str) -> ServeError {
    ServeError::invalid(format!(
        "{} '{}' of model '{}' is given more than once",
        side.name(),
        quote(name),
        spec.name
    ))
}

#[cold]
fn unexpected_shape(spec: &ModelSpec, tensor: &TensorSpec, shape: &[i64]) -> ServeError {
    ServeError::invalid(format!(
        "unexpected shape for input '{}' of model '{}': expected {}, got {}",
        tensor.name,
        spec.name,
        DisplayShape(&tensor.metadata_shape(spec.max_batch_size)),
        show(shape)
    ))
}

#[cold]
fn uneven_rows(spec: &ModelSpec, first: (usize, u32), other: (usize, u32)) -> ServeError {
    ServeError::invalid(format!(
        "inputs of model '{}' have different batch sizes: '{}' has {} rows, '{}' has {}",
        spec.name, spec.inputs[first.0].name, first.1, spec.inputs[other.0].name, other.1
    ))
}

#[cold]
fn too_large(spec: &ModelSpec, input: &RawInput) -> ServeError {
    ServeError::invalid(format!(
        "shape {} of input '{}' of model '{}' stands for more than 2^64 bytes, got {}",
        show(&input.shape),
        quote(&input.name),
        spec.name,
        input.data.len()
    ))
}

#[cold]
fn bad_reshape(spec: &ModelSpec, tensor: &TensorSpec, shape: &[i64]) -> ServeError {
    let reshape = tensor.reshape.as_deref().unwrap_or_default();
    ServeError::internal(format!(
        "the configuration of model '{}' reshapes input '{}' to {}, which does not fit {}",
        spec.name,
        tensor.name,
        DisplayShape(reshape),
        show(shape)
    ))
}

fn expected_count(specs: &[TensorSpec]) -> String {
    let optional = specs.iter().filter(|tensor| tensor.optional).count();
    match optional {
        0 => specs.len().to_string(),
        _ => format!("{} to {}", specs.len() - optional, specs.len()),
    }
}

/// `'a', 'b', 'c' and 40 more`.
fn list<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let count = names.len();
    let mut text = String::new();
    for (index, name) in names.take(MAX_LISTED).enumerate() {
        let comma = if index > 0 { ", " } else { "" };
        // Writing to a string cannot fail.
        let _ = write!(text, "{comma}'{name}'");
    }
    if count > MAX_LISTED {
        let _ = write!(text, " and {} more", count - MAX_LISTED);
    }
    text
}

/// The beginning of a name from the wire.
fn quote(name: &str) -> &str {
    match name.char_indices().nth(MAX_QUOTED) {
        Some((end, _)) => &name[..end],
        None => name,
    }
}

/// A shape from the wire, bounded.
fn show(shape: &[i64]) -> String {
    match shape.get(..MAX_SHOWN_DIMS) {
        Some(first) if shape.len() > MAX_SHOWN_DIMS => {
            format!("{} of {} dimensions", DisplayShape(first), shape.len())
        }
        _ => DisplayShape(shape).to_string(),
    }
}

#[cfg(test)]
mod tests;

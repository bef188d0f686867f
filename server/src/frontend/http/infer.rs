//! The bytes of an inference request → what the service takes, and how the answer is wanted.
//!
//! Three forms: all JSON; a JSON header followed by a binary tail (`Inference-Header-Content-Length`
//! tells where it begins); and, with that header at 0, a body that is the single input itself.

use std::collections::HashMap;
use std::fmt::Display;
use std::time::Duration;

use bytes::Bytes;
use dormouse_core::datatype::DataType;
use dormouse_core::sequence::SequenceId;
use dormouse_core::shape::{DisplayShape, Shape, byte_count};
use dormouse_core::time::Timestamp;
use dormouse_model_store::spec::ModelSpec;

use super::json::Reader;
use super::tensor_data::{self, Declared};
use crate::error::ServeError;
use crate::limits::RequestLimits;
use crate::request::{Origin, OutputWish, RawInput, RawRequest, SequenceParameters, Wishes};
use crate::shared_memory::RegionSlice;

/// The header that tells how many bytes of the body are JSON.
pub(super) const HEADER_LENGTH: &str = "inference-header-content-length";

/// How the outputs of a request are to be sent.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct OutputPlan {
    /// For outputs the request says nothing about.
    binary: bool,
    /// By output name, where the request says it.
    by_name: HashMap<String, bool>,
}

impl OutputPlan {
    /// A plan that sends every output in binary.
    pub(super) fn all_binary() -> Self {
        Self {
            binary: true,
            by_name: HashMap::new(),
        }
    }

    pub(super) fn is_binary(&self, output: &str) -> bool {
        if self.by_name.is_empty() {
            return self.binary;
        }
        self.by_name.get(output).copied().unwrap_or(self.binary)
    }
}

/// A request as read, and how its answer is wanted.
#[derive(Debug)]
pub(super) struct Parsed {
    pub request: RawRequest,
    pub plan: OutputPlan,
}

/// Reads the value of [`HEADER_LENGTH`].
pub(super) fn header_length(value: &[u8]) -> Result<usize, ServeError> {
    let length = std::str::from_utf8(value)
        .ok()
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))
        .and_then(|text| text.parse().ok());
    length.ok_or_else(|| {
        ServeError::invalid(format!(
            "unable to parse Inference-Header-Content-Length, got: {}",
            value.escape_ascii()
        ))
    })
}

/// Reads a request whose first `header_length` bytes (all, when absent) are JSON.
pub(super) fn parse(
    body: &Bytes,
    header_length: Option<usize>,
    received: Timestamp,
    limits: &RequestLimits,
) -> Result<Parsed, ServeError> {
    let header_length = header_length.unwrap_or(body.len());
    let Some((json, _)) = body.split_at_checked(header_length) else {
        return Err(ServeError::invalid(format!(
            "Inference-Header-Content-Length is {header_length}, but the body has only {} bytes",
            body.len()
        )));
    };
    let mut reader = Reader::within(json, limits)?;
    if reader.peek().is_none() {
        return Err(ServeError::invalid(
            "the request body is empty: expected a JSON object with 'inputs'",
        ));
    }
    let mut keys = Keys::new(&["id", "inputs", "outputs", "parameters"]);
    let mut id = String::new();
    let mut inputs = None;
    let mut outputs = Outputs::default();
    let mut parameters = Parameters::default();
    reader.object("the request", |reader, key| {
        if !keys.knows(key, "the request")? {
            return reader.skip();
        }
        match key {
            "inputs" => inputs = Some(read_inputs(reader, limits)?),
            _ if reader.null() => {}
            "id" => id = reader.string("a string for 'id'")?.into_owned(),
            "outputs" => outputs = read_outputs(reader, limits)?,
            _ => parameters = Parameters::read(reader)?,
        }
        Ok(())
    })?;
    reader.finish()?;
    let inputs = inputs.ok_or_else(|| ServeError::invalid("the request has no 'inputs'"))?;

    let mut tail = body.slice(header_length..);
    let regions = inputs.iter().enumerate();
    let regions = regions.filter_map(|(index, input)| Some((index, input.region.clone()?)));
    let wishes = Wishes {
        inputs: regions.collect(),
        outputs: outputs.wishes,
        caller: None,
    };
    let inputs = inputs
        .into_iter()
        .map(|input| input.complete(&mut tail))
        .collect::<Result<Vec<_>, _>>()?;
    if !tail.is_empty() {
        return Err(ServeError::invalid(format!(
            "unexpected additional input data: {} bytes follow the last binary input",
            tail.len()
        )));
    }
    let plan = OutputPlan {
        binary: parameters.binary_data_output,
        by_name: outputs.binary,
    };
    let request = RawRequest {
        id,
        inputs,
        outputs: outputs.names,
        priority: parameters.priority,
        deadline: parameters.timeout.map(|timeout| received + timeout),
        received,
        sequence: parameters.sequence.step(),
        origin: Origin::Http,
        wishes: wishes.some(),
        span: None,
        held: None,
    };
    Ok(Parsed { request, plan })
}

/// Takes a whole body as the single input of a model, deducing its shape as Triton does: a batch
/// of one, and the one open dimension from the number of bytes.
pub(super) fn parse_raw(
    body: Bytes,
    spec: &ModelSpec,
    received: Timestamp,
) -> Result<Parsed, ServeError> {
    let [input] = spec.inputs.as_slice() else {
        return Err(ServeError::invalid(format!(
            "a raw binary request needs a model with one input, and model '{}' has {}",
            spec.name,
            spec.inputs.len()
        )));
    };
    let name = &input.name;
    let mut shape: Shape = input.dims.clone();
    if spec.max_batch_size > 0 {
        shape.insert(0, 1);
    }
    let mut open = (0..shape.len()).filter(|&axis| shape[axis] < 0);
    let (open_axis, second_open) = (open.next(), open.next());
    if second_open.is_some() {
        return Err(ServeError::invalid(format!(
            "the shape of raw input '{name}' cannot be deduced: {} has more than one variable \
             dimension",
            DisplayShape(&input.dims)
        )));
    }
    let data = match (input.datatype.element_size(), open_axis) {
        (None, _) => {
            if shape.iter().any(|&dim| dim != 1) {
                return Err(ServeError::invalid(format!(
                    "raw input '{name}' is of type BYTES: its shape must hold one element, not {}",
                    DisplayShape(&input.dims)
                )));
            }
            let length = u32::try_from(body.len())
                .map_err(|_| ServeError::invalid("a BYTES element longer than 4 GiB"))?;
            [&length.to_le_bytes()[..], &body].concat().into()
        }
        (Some(_), Some(axis)) => {
            let length = body.len() as u64;
            // The bytes that one step along the open axis takes.
            shape[axis] = 1;
            let extent = byte_count(input.datatype, &shape)
                .filter(|&step| step > 0 && length.is_multiple_of(step))
                .and_then(|step| i64::try_from(length / step).ok());
            shape[axis] = extent.ok_or_else(|| {
                ServeError::invalid(format!(
                    "raw input '{name}' of type {} and shape {} does not divide {length} bytes",
                    input.datatype,
                    DisplayShape(&input.dims)
                ))
            })?;
            body
        }
        (Some(_), None) => body,
    };
    let input = RawInput {
        name: name.to_string(),
        datatype: input.datatype,
        shape,
        data,
    };
    let request = RawRequest {
        inputs: vec![input],
        received,
        ..RawRequest::default()
    };
    let plan = OutputPlan::all_binary();
    Ok(Parsed { request, plan })
}

/// The keys an object may have once, and which of them have been read.
#[derive(Debug)]
struct Keys {
    known: &'static [&'static str],
    seen: u8,
}

impl Keys {
    fn new(known: &'static [&'static str]) -> Self {
        Self { known, seen: 0 }
    }

    /// Whether `key` is known; an error when it comes for the second time.
    fn knows(&mut self, key: &str, place: impl Display) -> Result<bool, ServeError> {
        let Some(index) = self.known.iter().position(|known| *known == key) else {
            return Ok(false);
        };
        if self.seen & 1 << index != 0 {
            return Err(ServeError::invalid(format!(
                "'{key}' is given twice in {place}"
            )));
        }
        self.seen |= 1 << index;
        Ok(true)
    }
}

/// What a request asks for beside tensors.
#[derive(Debug, Default)]
struct Parameters {
    binary_data_output: bool,
    priority: u64,
    timeout: Option<Duration>,
    sequence: SequenceParameters,
}

impl Parameters {
    fn read(reader: &mut Reader<'_>) -> Result<Self, ServeError> {
        let mut parameters = Self::default();
        let mut keys = Keys::new(&[
            "binary_data_output",
            "priority",
            "timeout",
            "sequence_id",
            "sequence_start",
            "sequence_end",
        ]);
        reader.object("'parameters'", |reader, key| {
            keys.knows(key, "'parameters'")?;
            match key {
                "binary_data_output" => {
                    parameters.binary_data_output = reader.boolean("'binary_data_output'")?;
                }
                "priority" => parameters.priority = reader.integer("'priority'")?,
                "timeout" => {
                    let micros: u64 = reader.integer("'timeout' (microseconds)")?;
                    parameters.timeout = (micros > 0).then(|| Duration::from_micros(micros));
                }
                "sequence_id" => parameters.sequence.id = sequence_id(reader)?,
                "sequence_start" => {
                    parameters.sequence.start = reader.boolean("'sequence_start'")?;
                }
                "sequence_end" => {
                    parameters.sequence.end = reader.boolean("'sequence_end'")?;
                }
                _ if key.starts_with("triton_") => {
                    return Err(ServeError::invalid(format!(
                        "parameter '{key}': names that start with 'triton_' are reserved"
                    )));
                }
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        Ok(parameters)
    }
}

/// A sequence's id; 0 and "" stand for no sequence.
fn sequence_id(reader: &mut Reader<'_>) -> Result<Option<SequenceId>, ServeError> {
    if reader.peek() == Some(b'"') {
        let id = reader.string("'sequence_id'")?;
        return Ok((!id.is_empty()).then(|| SequenceId::Text(id.as_ref().into())));
    }
    let number: u64 = reader.integer("'sequence_id'")?;
    Ok((number != 0).then_some(SequenceId::Number(number)))
}

/// One input's header, before the binary tail is dealt out.
#[derive(Debug, Default)]
struct InputHeader {
    name: Option<String>,
    datatype: Option<DataType>,
    shape: Option<Shape>,
    binary_data_size: Option<usize>,
    data: Option<Vec<u8>>,
    region: Option<RegionSlice>,
}

impl InputHeader {
    /// Joins the header with its elements: those read from JSON, or a slice of the tail.
    fn complete(self, tail: &mut Bytes) -> Result<RawInput, ServeError> {
        let name = self.name.unwrap_or_default();
        let data = match (self.data, self.binary_data_size) {
            (Some(data), _) => Bytes::from(data),
            _ if self.region.is_some() => Bytes::new(),
            (None, Some(size)) if size <= tail.len() => tail.split_to(size),
            (None, size) => {
                let size = size.unwrap_or_default();
                return Err(ServeError::invalid(format!(
                    "unexpected size for input '{name}': 'binary_data_size' is {size}, and {} \
                     bytes are left in the body",
                    tail.len()
                )));
            }
        };
        Ok(RawInput {
            name,
            datatype: self
                .datatype
                .ok_or_else(|| ServeError::internal("an input without its datatype"))?,
            shape: self.shape.unwrap_or_default(),
            data,
        })
    }
}

fn read_inputs(
    reader: &mut Reader<'_>,
    limits: &RequestLimits,
) -> Result<Vec<InputHeader>, ServeError> {
    let mut inputs = Vec::new();
    reader.array("'inputs'", |reader, index| {
        if index == limits.tensors {
            return Err(limits.too_many_tensors("inputs"));
        }
        inputs.push(read_input(reader, index, limits)?);
        Ok(())
    })?;
    Ok(inputs)
}

fn read_input(
    reader: &mut Reader<'_>,
    index: usize,
    limits: &RequestLimits,
) -> Result<InputHeader, ServeError> {
    let mut input = InputHeader::default();
    let mut keys = Keys::new(&["name", "datatype", "shape", "parameters", "data"]);
    let mut region = RegionParameters::default();
    // Elements can be read once type and shape are known; some clients sort `data` before them.
    let mut deferred = None;
    let place = format_args!("inputs[{index}]");
    reader.object("an input", |reader, key| {
        if !keys.knows(key, place)? {
            return reader.skip();
        }
        match key {
            "name" => input.name = Some(reader.string("a string for 'name'")?.into_owned()),
            "datatype" => {
                let name = reader.string("a string for 'datatype'")?;
                let datatype = DataType::from_name(&name).ok_or_else(|| {
                    ServeError::invalid(format!("{place}: unknown datatype '{name}'"))
                })?;
                input.datatype = Some(datatype);
            }
            "shape" => input.shape = Some(read_shape(reader, place, limits)?),
            "parameters" if reader.null() => {}
            "parameters" => {
                let mut keys = Keys::new(&["binary_data_size"]);
                reader.object("an input's 'parameters'", |reader, key| match key {
                    "binary_data_size" => {
                        keys.knows(key, place)?;
                        input.binary_data_size = Some(reader.integer("'binary_data_size'")?);
                        Ok(())
                    }
                    _ if region.read(reader, key)? => Ok(()),
                    _ => reader.skip(),
                })?;
            }
            _ => match (&input.name, input.datatype, &input.shape) {
                (Some(name), Some(datatype), Some(shape)) => {
                    let declared = Declared {
                        name,
                        datatype,
                        shape,
                    };
                    input.data = Some(tensor_data::read(reader, declared)?);
                }
                _ => {
                    deferred = Some(*reader);
                    reader.skip_elements()?;
                }
            },
        }
        Ok(())
    })?;
    let missing = |key: &str| ServeError::invalid(format!("{place} has no '{key}'"));
    let name = input.name.as_deref().ok_or_else(|| missing("name"))?;
    let datatype = input.datatype.ok_or_else(|| missing("datatype"))?;
    let shape = input.shape.as_deref().ok_or_else(|| missing("shape"))?;
    let has_data = input.data.is_some() || deferred.is_some();
    if let Some(slice) = region.slice(format_args!("input '{name}'"))? {
        if has_data || input.binary_data_size.is_some() {
            return Err(ServeError::invalid(format!(
                "input '{name}' is in shared memory and must set neither 'data' nor \
                 'binary_data_size'"
            )));
        }
        input.region = Some(slice);
        return Ok(input);
    }
    if has_data == input.binary_data_size.is_some() {
        let found = if has_data {
            "both are set"
        } else {
            "none is set"
        };
        return Err(ServeError::invalid(format!(
            "input '{name}' must set either 'data' or 'binary_data_size' in 'parameters': {found}"
        )));
    }
    if let Some(mut place) = deferred {
        let declared = Declared {
            name,
            datatype,
            shape,
        };
        input.data = Some(tensor_data::read(&mut place, declared)?);
    }
    Ok(input)
}

fn read_shape(
    reader: &mut Reader<'_>,
    place: impl Display,
    limits: &RequestLimits,
) -> Result<Shape, ServeError> {
    let mut shape = Shape::new();
    reader.array("'shape'", |reader, index| {
        if index == limits.dimensions {
            return Err(limits.too_many_dimensions(&place));
        }
        let dim: i64 = reader.integer("a dimension of 'shape'")?;
        if dim < 0 {
            return Err(ServeError::invalid(format!(
                "{place}: 'shape' has the negative dimension {dim}"
            )));
        }
        shape.push(dim);
        Ok(())
    })?;
    limits.check_elements(&shape, &place)?;
    Ok(shape)
}

/// The parameters by which a tensor names a part of shared memory.
#[derive(Debug, Default)]
struct RegionParameters {
    region: Option<String>,
    byte_size: Option<u64>,
    offset: Option<u64>,
}

impl RegionParameters {
    /// Reads the value of `key` if it is one of these.
    fn read(&mut self, reader: &mut Reader<'_>, key: &str) -> Result<bool, ServeError> {
        match key {
            "shared_memory_region" => {
                let name = reader.string("a string for 'shared_memory_region'")?;
                self.region = Some(name.into_owned());
            }
            "shared_memory_byte_size" => {
                self.byte_size = Some(reader.integer("'shared_memory_byte_size'")?);
            }
            "shared_memory_offset" => {
                self.offset = Some(reader.integer("'shared_memory_offset'")?);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn slice(self, tensor: impl Display) -> Result<Option<RegionSlice>, ServeError> {
        match (self.region, self.byte_size) {
            (None, None) if self.offset.is_none() => Ok(None),
            (None, _) => Err(ServeError::invalid(format!(
                "{tensor}: parameters of shared memory are given without 'shared_memory_region'"
            ))),
            (Some(_), None) => Err(ServeError::invalid(format!(
                "{tensor}: 'shared_memory_region' is given without 'shared_memory_byte_size'"
            ))),
            (Some(region), Some(byte_size)) => Ok(Some(RegionSlice {
                region,
                offset: self.offset.unwrap_or(0),
                byte_size,
            })),
        }
    }
}

/// The outputs a request names.
#[derive(Debug, Default)]
struct Outputs {
    names: Vec<String>,
    binary: HashMap<String, bool>,
    wishes: Vec<(String, OutputWish)>,
}

fn read_outputs(reader: &mut Reader<'_>, limits: &RequestLimits) -> Result<Outputs, ServeError> {
    let mut outputs = Outputs::default();
    reader.array("'outputs'", |reader, index| {
        if index == limits.tensors {
            return Err(limits.too_many_tensors("outputs"));
        }
        let mut name = None;
        let mut binary = None;
        let (mut region, mut classes) = (RegionParameters::default(), 0);
        let mut keys = Keys::new(&["name", "parameters"]);
        reader.object("an output", |reader, key| {
            if !keys.knows(key, format_args!("outputs[{index}]"))? {
                return reader.skip();
            }
            match key {
                "name" => name = Some(reader.string("a string for 'name'")?.into_owned()),
                _ if reader.null() => {}
                _ => reader.object("an output's 'parameters'", |reader, key| {
                    match key {
                        "binary_data" => binary = Some(reader.boolean("'binary_data'")?),
                        "classification" => classes = reader.integer("'classification'")?,
                        _ if region.read(reader, key)? => {}
                        _ => reader.skip()?,
                    }
                    Ok(())
                })?,
            }
            Ok(())
        })?;
        let name =
            name.ok_or_else(|| ServeError::invalid(format!("outputs[{index}] has no 'name'")))?;
        match region.slice(format_args!("output '{name}'"))? {
            Some(_) if classes > 0 => {
                return Err(ServeError::invalid(format!(
                    "output '{name}': shared memory can't be set on classification output"
                )));
            }
            Some(slice) => outputs
                .wishes
                .push((name.clone(), OutputWish::Region(slice))),
            None if classes > 0 => outputs
                .wishes
                .push((name.clone(), OutputWish::Classes(classes))),
            None => {}
        }
        if let Some(binary) = binary {
            outputs.binary.insert(name.clone(), binary);
        }
        outputs.names.push(name);
        Ok(())
    })?;
    Ok(outputs)
}

#[cfg(test)]
mod tests;

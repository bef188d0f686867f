//! Opens a session over weights that lie in memory of ours.
//!
//! ONNX Runtime checks that the file of an external tensor exists even when the tensor was given
//! as a value. Every weight therefore names a file that exists everywhere and holds nothing, and
//! no weight is left for ONNX Runtime to look up there.

use std::collections::HashMap;
use std::ffi::CString;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use bytes::Bytes;
use dormouse_core::shape::{DisplayShape, Shape};
use dormouse_model_store::spec::SessionSpec;
use ort::sys;
use sys::ONNXTensorElementDataType as Element;

use super::OnnxOptions;
use super::environment::{Environment, missing};
use super::graph_inputs::{Edit, edit_inputs, hides_shapes, input_names};
use super::model_proto::{Place, Rewrite, TensorHead, is_ort_format, rewrite, without_data};
use super::packed::PackedWeights;
use super::protobuf::{put_message, put_number};
use super::session::{Graph, OnnxSession};
use super::session_options::SessionOptions;
use super::status::check;
use super::value::Value;
use crate::engine::{EngineError, Packing, PreparedBytes, SharedWeight};

/// The folder and the file that weights name.
const FOLDER: &str = "/dev";
const FILE: &str = "null";

/// See [`crate::engine::Engine::open_prepared`].
pub(super) fn open(
    environment: &'static Environment,
    engine: &OnnxOptions,
    model: PreparedBytes,
    (spec, packing): (&SessionSpec, Packing),
) -> Result<OnnxSession, EngineError> {
    let prepared =
        PreparedGraph::new(&model.graph, &model.weights, packing).map_err(EngineError::Failed)?;
    let values = model
        .weights
        .iter()
        .map(|weight| value(environment, weight))
        .collect::<Result<Vec<_>, _>>()?;

    let mut options = SessionOptions::new(environment, engine, spec, &[])?;
    options.unoptimized()?;
    options.entry(
        "session.model_external_initializers_file_folder_path",
        FOLDER,
    )?;
    match packing {
        Packing::Off => options.unpacked()?,
        Packing::On => options.packs_in_parallel(spec)?,
    }
    for (weight, value) in model.weights.iter().zip(&values) {
        let name = CString::new(weight.name.as_str()).map_err(|_| {
            EngineError::Failed(format!("weight {:?} has a zero byte", weight.name))
        })?;
        options.initializer(&name, value)?;
    }
    let packed = match (packing, model.family) {
        (Packing::On, Some(family)) => Some(PackedWeights::of(environment, family)?),
        _ => None,
    };
    let memory: Vec<Bytes> = model
        .weights
        .into_iter()
        .map(|weight| weight.data)
        .collect();
    OnnxSession::open(
        environment,
        Graph::Bytes(&prepared.graph),
        &options,
        spec.shrinks_arena,
        Some(Lent::new(values, memory, packed, prepared.shapes)),
    )
}

/// What a session uses and does not own. Dropped after the session.
#[must_use]
pub(super) struct Lent {
    // Declared first: values go before the memory they point into.
    _values: Vec<Value>,
    _memory: Vec<Bytes>,
    pub(super) packed: Option<Arc<PackedWeights>>,
    /// The shapes of inputs that the session itself was not told.
    pub(super) shapes: HashMap<String, Shape>,
    /// Addresses of the memory, from lowest to highest, without overlaps.
    ranges: Vec<(usize, usize)>,
}

impl Lent {
    /// Data outside the graph that a session reads where it lies.
    pub(super) fn external(external: &[(String, Bytes)]) -> Self {
        let memory = external.iter().map(|(_, data)| data.clone());
        Self::new(Vec::new(), memory.collect(), None, HashMap::new())
    }

    fn new(
        values: Vec<Value>,
        memory: Vec<Bytes>,
        packed: Option<Arc<PackedWeights>>,
        shapes: HashMap<String, Shape>,
    ) -> Self {
        let mut sorted: Vec<_> = memory
            .iter()
            .map(|bytes| {
                let start = bytes.as_ptr().addr();
                (start, start.saturating_add(bytes.len()))
            })
            .collect();
        sorted.sort_unstable();
        let mut ranges: Vec<(usize, usize)> = Vec::new();
        for (start, end) in sorted {
            match ranges.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => ranges.push((start, end)),
            }
        }
        Self {
            _values: values,
            _memory: memory,
            packed,
            shapes,
            ranges,
        }
    }

    /// Whether an address is in a weight, so that an output that is really a weight is noticed.
    pub(super) fn covers(&self, address: usize) -> bool {
        let after = self.ranges.partition_point(|&(start, _)| start <= address);
        after
            .checked_sub(1)
            .is_some_and(|index| address < self.ranges[index].1)
    }
}

/// A graph as ONNX Runtime is given it.
struct PreparedGraph {
    graph: Vec<u8>,
    shapes: HashMap<String, Shape>,
}

impl PreparedGraph {
    /// Checks that the weights are those the graph wants, and hides the shapes of inputs where
    /// [`super::optimize`] found that to pay.
    fn new(graph: &[u8], weights: &[SharedWeight], packing: Packing) -> Result<Self, String> {
        if is_ort_format(graph) {
            return Err("a prepared graph must be in ONNX's own format".to_owned());
        }
        let mut matching = Match {
            weights: HashMap::new(),
            initializers: Vec::new(),
        };
        for weight in weights {
            if matching
                .weights
                .insert(&weight.name, (weight, false))
                .is_some()
            {
                return Err(format!("weight '{}' was given twice", weight.name));
            }
        }
        let inputs = input_names(graph)?;
        let rewritten = rewrite(graph, &mut matching)?;
        if let Some(name) = weights
            .iter()
            .map(|weight| weight.name.as_str())
            .find(|name| !matching.weights[name].1)
        {
            return Err(format!(
                "weight '{name}' was given, the graph has none of that name outside"
            ));
        }
        if let Some(name) = inputs
            .iter()
            .find(|name| matching.weights.contains_key(name.as_str()))
        {
            return Err(format!("weight '{name}' is also an input of the graph"));
        }
        let mut shapes = HashMap::new();
        // A packed session is built in the background: it has the time to plan its memory, and
        // serves what comes for long.
        let hidden = packing == Packing::Off && hides_shapes(graph)?;
        let graph = rewritten.unwrap_or_else(|| graph.to_vec());
        if !hidden {
            return Ok(Self { graph, shapes });
        }
        let stripped = edit_inputs(&graph, &mut |input| {
            // An input with a value in the graph has that value's shape.
            if matching.initializers.contains(&input.name) {
                return Ok(Edit::Keep);
            }
            let Some((bytes, shape)) = input.without_shape()? else {
                return Ok(Edit::Keep);
            };
            shapes.insert(input.name.clone(), shape);
            Ok(Edit::Replace(bytes))
        })?;
        Ok(Self {
            graph: stripped.unwrap_or(graph),
            shapes,
        })
    }
}

/// Compares the tensors outside a graph with those that were given.
struct Match<'w> {
    /// With whether the graph has it.
    weights: HashMap<&'w str, (&'w SharedWeight, bool)>,
    /// Names of initializers inside the graph.
    initializers: Vec<String>,
}

impl Rewrite for Match<'_> {
    fn tensor(&mut self, place: Place, bytes: &[u8]) -> Result<Option<Vec<u8>>, String> {
        let tensor = TensorHead::read(bytes)?;
        let name = tensor.name.as_str();
        if !tensor.external {
            if place != Place::Other && self.weights.contains_key(name) {
                return Err(format!(
                    "weight '{name}' was given, the graph has it inside"
                ));
            }
            if place == Place::Main {
                self.initializers.push(tensor.name);
            }
            return Ok(None);
        }
        if place != Place::Main {
            return Err(format!(
                "tensor '{name}' lies outside a prepared graph and is not one of its initializers"
            ));
        }
        let Some((weight, seen)) = self.weights.get_mut(name) else {
            return Err(format!(
                "the graph needs weight '{name}', which was not given"
            ));
        };
        if std::mem::replace(seen, true) {
            return Err(format!("the graph has two initializers named '{name}'"));
        }
        if u64::try_from(weight.element_type) != Ok(tensor.element) {
            return Err(format!(
                "weight '{name}' has elements of type {}, the graph wants type {}",
                weight.element_type, tensor.element
            ));
        }
        if weight.dims != tensor.dims {
            return Err(format!(
                "weight '{name}' has shape {}, the graph wants {}",
                DisplayShape(&weight.dims),
                DisplayShape(&tensor.dims)
            ));
        }
        let Some((_, size)) = element(tensor.element) else {
            return Err(format!(
                "weight '{name}' has elements of type {}, which cannot be given from outside",
                tensor.element
            ));
        };
        if tensor.byte_count() != Some(weight.data.len() as u64) {
            return Err(format!(
                "weight '{name}' has {} bytes, its shape {} needs {}",
                weight.data.len(),
                DisplayShape(&tensor.dims),
                tensor.byte_count().map_or_else(
                    || "more than can be counted".to_owned(),
                    |count| count.to_string()
                )
            ));
        }
        if !weight.data.as_ptr().addr().is_multiple_of(size) {
            return Err(format!(
                "weight '{name}' lies at an address that is not a multiple of {size} bytes"
            ));
        }
        outside(bytes).map(Some)
    }
}

/// The tensor as one that lies outside the graph.
pub(super) fn outside(tensor: &[u8]) -> Result<Vec<u8>, String> {
    let mut out = without_data(tensor)?;
    let mut entry = Vec::new();
    put_message(&mut entry, 1, b"location");
    put_message(&mut entry, 2, FILE.as_bytes());
    put_message(&mut out, 13, &entry);
    put_number(&mut out, 14, 1);
    Ok(out)
}

/// The element types whose tensors can lie outside, with the bytes of an element.
pub(super) fn element(onnx: u64) -> Option<(Element, usize)> {
    Some(match onnx {
        1 => (Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4),
        2 => (Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, 1),
        3 => (Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, 1),
        4 => (Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16, 2),
        5 => (Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16, 2),
        6 => (Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, 4),
        7 => (Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, 8),
        10 => (Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 2),
        11 => (Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, 8),
        12 => (Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32, 4),
        13 => (Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64, 8),
        16 => (Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, 2),
        _ => return None,
    })
}

/// A value over a weight's memory, which [`PreparedGraph::new`] has checked.
#[expect(unsafe_code, reason = "creates a value over foreign memory")]
fn value(environment: &'static Environment, weight: &SharedWeight) -> Result<Value, EngineError> {
    let (element, _) = u64::try_from(weight.element_type)
        .ok()
        .and_then(element)
        .ok_or_else(|| missing("such element type"))?;
    let api = environment.api;
    let mut value = ptr::null_mut();
    // SAFETY: the memory is valid for its length, which is what the shape needs, aligned to the
    // element, and stays as long as the session, which is closed before `Lent` goes. ONNX Runtime
    // takes the pointer as mutable but never writes to an initializer.
    check(api, unsafe {
        (api.CreateTensorWithDataAsOrtValue)(
            environment.memory.as_ptr(),
            weight.data.as_ptr().cast_mut().cast(),
            weight.data.len(),
            weight.dims.as_ptr(),
            weight.dims.len(),
            element,
            &mut value,
        )
    })?;
    let ptr = NonNull::new(value).ok_or_else(|| missing("tensor for a weight"))?;
    Ok(Value::own(environment, ptr))
}

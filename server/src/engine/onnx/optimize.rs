//! Lets ONNX Runtime optimise a model once and reads back what it wrote.

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use dormouse_model_store::spec::SessionSpec;

use super::environment::Environment;
use super::graph_inputs::{
    Edit, declares_initializers, edit_inputs, hide_shapes, input_names, raise_version,
};
use super::model_proto::{LARGEST, Place, Rewrite, TensorHead, is_ort_format, rewrite, with_data};
use super::prepared::{element, outside};
use super::session::OnnxSession;
use super::session_options::SessionOptions;
use super::{OnnxOptions, prepared, settled, use_order};
use crate::engine::{
    EngineError, GraphBytes, ModelBytes, OptimizeError, Optimized, OptimizedTensor, Packing,
    PreparedBytes, SharedWeight,
};

const GRAPH_FILE: &str = "optimized.onnx";
const DATA_FILE: &str = "optimized.bin";

/// Smaller tensors stay in the graph: sharing them saves nothing, and some of them are shapes.
const SMALLEST: &str = "1024";
/// Whole numbers up to this size stay in the graph: kernels read indices while they are created.
const SMALL_INDICES: u64 = 64 << 10;

/// What hiding shapes must save each time a session is built.
const WORTHWHILE: Duration = Duration::from_millis(2);

/// See [`crate::engine::Engine::optimize`].
pub(super) fn optimize(
    environment: &'static Environment,
    engine: &OnnxOptions,
    (model, spec): (&ModelBytes, &SessionSpec),
    scratch: &Path,
) -> Result<Optimized, OptimizeError> {
    let is_ort_format = match &model.graph {
        GraphBytes::Memory(graph) => is_ort_format(graph),
        GraphBytes::File(file) => {
            let mut head = [0; 8];
            file.read_exact_at(&mut head, 0).is_ok() && is_ort_format(&head)
        }
    };
    if is_ort_format {
        return Err(OptimizeError::NotPreparable(
            "the model is in ONNX Runtime's own format, which holds an optimised graph already"
                .to_owned(),
        ));
    }
    let graph_file = scratch.join(GRAPH_FILE);
    let data_file = scratch.join(DATA_FILE);
    // An attempt before this one may have left some.
    for file in [&graph_file, &data_file] {
        match fs::remove_file(file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                let why = format!("cannot remove {}: {error}", file.display());
                return Err(EngineError::Failed(why).into());
            }
            _ => {}
        }
    }
    let written = settled(model, |graph, may_lend| {
        let mut options = SessionOptions::new(environment, engine, spec, &model.external)?;
        let lent = match may_lend {
            true => Some(options.borrow_external(&model.external)?),
            false => None,
        };
        options.optimized_model(&graph_file)?;
        for (key, value) in [
            (
                "session.optimized_model_external_initializers_file_name",
                DATA_FILE,
            ),
            (
                "session.optimized_model_external_initializers_min_size_in_bytes",
                SMALLEST,
            ),
            // The session is closed at once.
            ("session.disable_prepacking", "1"),
        ] {
            options.entry(key, value)?;
        }
        OnnxSession::open(environment, graph, &options, spec.shrinks_arena, lent)
    });
    drop(written?);

    let failed = |what: &str, error: std::io::Error| {
        EngineError::Failed(format!("cannot {what} the optimised graph: {error}"))
    };
    let graph = fs::read(&graph_file).map_err(|error| failed("read", error))?;
    fs::remove_file(&graph_file).map_err(|error| failed("remove", error))?;
    let data = match File::open(&data_file) {
        Ok(file) => Some(file),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(failed("read the weights of", error).into()),
    };
    let (mut graph, mut tensors) = read_back(graph, data.as_ref()).map_err(EngineError::Failed)?;
    let by_rows = use_order::sort(&mut tensors, &graph).map_err(EngineError::Failed)?;
    if graph.len() > LARGEST {
        return Err(OptimizeError::NotPreparable(format!(
            "the optimised graph has {} bytes without its weights, {LARGEST} at most can be loaded",
            graph.len()
        )));
    }
    let trial = Trial {
        environment,
        engine,
        spec,
        weights: stand_ins(&tensors),
    };
    if trial.shapes_cost_time(&graph) {
        hide_shapes(&mut graph);
    }
    Ok(Optimized {
        graph,
        data_file: (!tensors.is_empty()).then_some(data_file),
        tensors,
        by_rows,
    })
}

/// Builds sessions to see how long it takes: in time on the processor, since a machine that is
/// busy with something else must not decide this.
///
/// # Why shapes can cost time
/// ONNX Runtime plans which values can follow each other in the same memory by comparing the shape
/// of each with those of all that ended before it. Where dimensions are open nearly nothing is
/// found, and the list of those that ended grows with the graph: the search was five sixths of the
/// time it took to build a transformer's session. Values without a shape are not searched for;
/// their memory comes from the arena when it is needed, as it did before. Where shapes are known
/// the plan saves memory and takes no time, so both ways are tried.
struct Trial<'t> {
    environment: &'static Environment,
    engine: &'t OnnxOptions,
    spec: &'t SessionSpec,
    weights: Vec<SharedWeight>,
}

impl Trial<'_> {
    fn shapes_cost_time(&self, graph: &[u8]) -> bool {
        let mut hidden = graph.to_vec();
        hide_shapes(&mut hidden);
        // What cannot be built over weights of nothing but zeros is left as it is.
        match (self.time(graph), self.time(&hidden)) {
            (Some(told), Some(hidden)) => told > hidden.mul_f64(1.5) + WORTHWHILE,
            _ => false,
        }
    }

    /// The shorter of two tries.
    fn time(&self, graph: &[u8]) -> Option<Duration> {
        let graph = Bytes::copy_from_slice(graph);
        let mut shortest = Duration::MAX;
        for _ in 0..2 {
            let model = PreparedBytes {
                graph: graph.clone(),
                weights: self.weights.clone(),
                family: None,
            };
            let started = processor_time()?;
            let how = (self.spec, Packing::Off);
            drop(prepared::open(self.environment, self.engine, model, how).ok()?);
            shortest = shortest.min(processor_time()?.saturating_sub(started));
        }
        Some(shortest)
    }
}

/// How long this thread, which builds an unpacked session alone, has been running.
#[expect(unsafe_code, reason = "asks for a thread's time on the processor")]
fn processor_time() -> Option<Duration> {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a place for the answer.
    let asked = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    if asked != 0 {
        return None;
    }
    let seconds = u64::try_from(time.tv_sec).ok()?;
    let nanoseconds = u32::try_from(time.tv_nsec).ok()?;
    Some(Duration::new(seconds, nanoseconds))
}

/// Weights that all lie in the same memory, of which no page is ever touched.
fn stand_ins(tensors: &[OptimizedTensor]) -> Vec<SharedWeight> {
    let largest = tensors.iter().map(|tensor| tensor.len).max().unwrap_or(0);
    // Not larger than a part of the file that was just written, and zeroed lazily by the system.
    let zeros = Bytes::from(vec![0; usize::try_from(largest).unwrap_or(0)]);
    let stand_in = |tensor: &OptimizedTensor| {
        let length = usize::try_from(tensor.len).unwrap_or(0);
        SharedWeight {
            name: tensor.name.clone(),
            element_type: tensor.element_type,
            dims: tensor.dims.clone(),
            data: zeros.slice(..length.min(zeros.len())),
        }
    };
    tensors.iter().map(stand_in).collect()
}

/// The graph with every tensor inside that must be, and the tensors that stay outside.
fn read_back(
    mut graph: Vec<u8>,
    data: Option<&File>,
) -> Result<(Vec<u8>, Vec<OptimizedTensor>), String> {
    let mut names = Names::default();
    rewrite(&graph, &mut names)?;
    if declares_initializers(&graph)? {
        // ONNX Runtime takes these initializers for constants although they are inputs.
        let edited = edit_inputs(&graph, &mut |input| {
            let constant = names.main.contains(&input.name);
            Ok(if constant { Edit::Drop } else { Edit::Keep })
        })?;
        graph = raise_version(edited.as_deref().unwrap_or(&graph))?;
    }
    let length = match data {
        Some(file) => file
            .metadata()
            .map_err(|error| format!("cannot read the weights: {error}"))?
            .len(),
        None => 0,
    };
    let mut split = Split {
        data,
        length,
        inputs: input_names(&graph)?.into_iter().collect(),
        inner: names.inner,
        tensors: Vec::new(),
    };
    let changed = rewrite(&graph, &mut split)?;
    Ok((changed.unwrap_or(graph), split.tensors))
}

/// The names of initializers.
#[derive(Default)]
struct Names {
    main: HashSet<String>,
    inner: HashSet<String>,
}

impl Rewrite for Names {
    fn tensor(&mut self, place: Place, bytes: &[u8]) -> Result<Option<Vec<u8>>, String> {
        let names = match place {
            Place::Main => &mut self.main,
            Place::Subgraph => &mut self.inner,
            Place::Other => return Ok(None),
        };
        names.insert(TensorHead::read(bytes)?.name);
        Ok(None)
    }
}

/// Puts tensors back into the graph or lists them as weights.
struct Split<'f> {
    data: Option<&'f File>,
    length: u64,
    /// Inputs, of which some have an initializer that a request may override.
    inputs: HashSet<String>,
    /// Initializers of subgraphs. A weight is given by its name alone, which must not reach them.
    inner: HashSet<String>,
    tensors: Vec<OptimizedTensor>,
}

impl Split<'_> {
    fn stays_outside(&self, tensor: &TensorHead, length: u64) -> bool {
        let index = matches!(tensor.element, 6 | 7) && length <= SMALL_INDICES;
        length > 0
            && !index
            && element(tensor.element).is_some()
            && !self.inputs.contains(&tensor.name)
            && !self.inner.contains(&tensor.name)
    }
}

impl Rewrite for Split<'_> {
    fn tensor(&mut self, place: Place, bytes: &[u8]) -> Result<Option<Vec<u8>>, String> {
        let tensor = TensorHead::read(bytes)?;
        if !tensor.external {
            return Ok(None);
        }
        let name = &tensor.name;
        if tensor.location.as_deref() != Some(DATA_FILE) {
            return Err(format!("tensor '{name}' was written to an unknown file"));
        }
        let offset = tensor.offset.unwrap_or(0);
        let length = tensor
            .length
            .or_else(|| tensor.byte_count())
            .filter(|length| offset.checked_add(*length) <= Some(self.length))
            .ok_or_else(|| {
                format!(
                    "tensor '{name}' does not lie within the {} bytes that were written",
                    self.length
                )
            })?;
        if place == Place::Main
            && tensor.byte_count() == Some(length)
            && self.stays_outside(&tensor, length)
        {
            self.tensors.push(OptimizedTensor {
                name: name.clone(),
                element_type: i32::try_from(tensor.element)
                    .map_err(|_| format!("tensor '{name}' has an unknown element type"))?,
                dims: tensor.dims,
                offset,
                len: length,
            });
            return outside(bytes).map(Some);
        }
        let mut inside =
            vec![0; usize::try_from(length).map_err(|_| format!("tensor '{name}' is too large"))?];
        if let Some(file) = self.data {
            file.read_exact_at(&mut inside, offset)
                .map_err(|error| format!("cannot read tensor '{name}': {error}"))?;
        }
        with_data(bytes, &inside).map(Some)
    }
}

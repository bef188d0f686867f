//! A session: built from memory, run from many threads at once.

use std::any::Any;
use std::ffi::{CStr, CString};
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use dormouse_core::shape::{DisplayShape, Shape};
use ort::sys;
use smallvec::SmallVec;

use super::allocator::{Owner, Watched};
use super::environment::{Environment, missing};
use super::prepared::Lent;
use super::rest;
use super::session_options::SessionOptions;
use super::status::check;
use super::value::{Input, Value, datatype, output};
use crate::engine::{EngineError, RunBuffers, Session, SessionTensor, Stop, StopHandle};
use crate::request::Tensor;

/// A loaded graph. Closing it (dropping the last reference) frees its weights and its arena.
pub(super) struct OnnxSession {
    environment: &'static Environment,
    session: NonNull<sys::OrtSession>,
    inputs: Vec<SessionTensor>,
    optional_inputs: Vec<SessionTensor>,
    outputs: Vec<SessionTensor>,
    /// Of `inputs`, then of `optional_inputs`.
    input_names: Vec<CString>,
    output_names: Vec<CString>,
    /// Each run ends with handing unused memory of the arena back.
    shrinks_arena: bool,
    /// Whose the session's buffers are in the shared allocator.
    owner: Owner,
    /// What its first run had of them.
    first_buffers: OnceLock<RunBuffers>,
    /// Weights that the session reads where they lie. Not in `drop` but after it: the session goes
    /// first.
    lent: Option<Lent>,
}

/// What a session is built from.
#[derive(Clone, Copy)]
pub(super) enum Graph<'a> {
    Bytes(&'a [u8]),
    /// A file that is read while the session is built.
    Path(&'a CStr),
}

#[expect(unsafe_code, reason = "a session holds a pointer of the C API")]
// SAFETY: a session is bound to no thread.
unsafe impl Send for OnnxSession {}
#[expect(unsafe_code, reason = "a session holds a pointer of the C API")]
// SAFETY: the C API documents `Run` as callable from many threads at once on the CPU provider, and
// nothing else is called on a session after it was built.
unsafe impl Sync for OnnxSession {}

impl OnnxSession {
    /// Builds a session; `graph` is not needed afterwards.
    #[expect(unsafe_code, reason = "builds a session through the C API")]
    pub(super) fn open(
        environment: &'static Environment,
        graph: Graph<'_>,
        options: &SessionOptions<'_>,
        shrinks_arena: bool,
        lent: Option<Lent>,
    ) -> Result<Self, EngineError> {
        let api = environment.api;
        let owner = Owner::new();
        let _entered = owner.enter();
        let env = environment.env.as_ptr();
        let mut session = ptr::null_mut();
        let packed = lent.as_ref().and_then(|lent| lent.packed.as_ref());
        let _working = options.at_work();
        // SAFETY: environment and options are alive, the graph is valid for its length, and
        // the external data that the options lend stays borrowed until this returns. ONNX Runtime
        // copies both (a model's own entries that would make it keep pointers are refused), unless
        // these options have it read external data where it lies; that, values given as initializers
        // and the container of packed weights are kept by `lent` beyond the session, or by whoever
        // closes it at once.
        check(api, unsafe {
            match (graph, packed) {
                (Graph::Bytes(bytes), None) => (api.CreateSessionFromArray)(
                    env,
                    bytes.as_ptr().cast(),
                    bytes.len(),
                    options.as_ptr(),
                    &mut session,
                ),
                (Graph::Bytes(bytes), Some(packed)) => (api
                    .CreateSessionFromArrayWithPrepackedWeightsContainer)(
                    env,
                    bytes.as_ptr().cast(),
                    bytes.len(),
                    options.as_ptr(),
                    packed.as_ptr(),
                    &mut session,
                ),
                (Graph::Path(path), _) => {
                    (api.CreateSession)(env, path.as_ptr(), options.as_ptr(), &mut session)
                }
            }
        })?;
        let session = NonNull::new(session).ok_or_else(|| missing("session"))?;
        let mut opened = Self {
            environment,
            session,
            inputs: Vec::new(),
            optional_inputs: Vec::new(),
            outputs: Vec::new(),
            input_names: Vec::new(),
            output_names: Vec::new(),
            shrinks_arena,
            owner,
            first_buffers: OnceLock::new(),
            lent,
        };
        let (inputs, mut names) = opened.signature(
            api.SessionGetInputCount,
            api.SessionGetInputName,
            api.SessionGetInputTypeInfo,
        )?;
        let (optional_inputs, optional_names) = opened.signature(
            api.SessionGetOverridableInitializerCount,
            api.SessionGetOverridableInitializerName,
            api.SessionGetOverridableInitializerTypeInfo,
        )?;
        let (outputs, output_names) = opened.signature(
            api.SessionGetOutputCount,
            api.SessionGetOutputName,
            api.SessionGetOutputTypeInfo,
        )?;
        names.extend(optional_names);
        opened.inputs = inputs;
        opened.tell_shapes();
        opened.optional_inputs = optional_inputs;
        opened.input_names = names;
        opened.outputs = outputs;
        opened.output_names = output_names;
        Ok(opened)
    }

    /// Reads names and types through the three calls that differ for inputs, overridable
    /// initializers and outputs.
    #[expect(unsafe_code, reason = "asks the C API for a session's signature")]
    fn signature(
        &self,
        count_of: unsafe extern "system" fn(
            *const sys::OrtSession,
            *mut usize,
        ) -> sys::OrtStatusPtr,
        name_of: unsafe extern "system" fn(
            *const sys::OrtSession,
            usize,
            *mut sys::OrtAllocator,
            *mut *mut std::ffi::c_char,
        ) -> sys::OrtStatusPtr,
        type_of: unsafe extern "system" fn(
            *const sys::OrtSession,
            usize,
            *mut *mut sys::OrtTypeInfo,
        ) -> sys::OrtStatusPtr,
    ) -> Result<(Vec<SessionTensor>, Vec<CString>), EngineError> {
        let api = self.environment.api;
        let allocator = self.environment.allocator.as_ptr();
        let session = self.session.as_ptr();
        let mut count = 0usize;
        // SAFETY: the session is alive.
        check(api, unsafe { count_of(session, &mut count) })?;
        let mut tensors = Vec::new();
        let mut names = Vec::new();
        for index in 0..count {
            let mut name = ptr::null_mut();
            let mut info = ptr::null_mut();
            // SAFETY: `index` is below the count; the name is a C string from `allocator`, copied
            // and freed here; the type is released by `TypeInfo`.
            let (name, info) = unsafe {
                check(api, name_of(session, index, allocator, &mut name))?;
                if name.is_null() {
                    return Err(missing("tensor name"));
                }
                let copy = CStr::from_ptr(name).to_owned();
                check(api, (api.AllocatorFree)(allocator, name.cast()))?;
                check(api, type_of(session, index, &mut info))?;
                (copy, TypeInfo(api, info))
            };
            let (datatype, dims) = info.tensor()?;
            tensors.push(SessionTensor {
                name: name.to_string_lossy().into_owned(),
                datatype,
                dims,
            });
            names.push(name);
        }
        Ok((tensors, names))
    }

    /// Fills in the shapes that the session was not told.
    fn tell_shapes(&mut self) {
        let Some(lent) = &self.lent else {
            return;
        };
        for input in &mut self.inputs {
            if input.dims.is_none() {
                input.dims = lent.shapes.get(&input.name).cloned();
            }
        }
    }

    /// Checks what ONNX Runtime cannot check because it was not told the input's shape.
    fn check_shape(&self, declared: &SessionTensor, tensor: &Tensor) -> Result<(), EngineError> {
        let untold = self
            .lent
            .as_ref()
            .and_then(|lent| lent.shapes.get(&declared.name));
        let Some(expected) = untold else {
            return Ok(());
        };
        let fits = expected.len() == tensor.shape.len()
            && expected
                .iter()
                .zip(&tensor.shape)
                .all(|(&expected, &given)| expected < 0 || expected == given);
        if fits {
            return Ok(());
        }
        Err(EngineError::Failed(format!(
            "input '{}' has shape {}, the model expects {}",
            declared.name,
            DisplayShape(&tensor.shape),
            DisplayShape(expected)
        )))
    }

    fn input(&self, index: usize) -> Option<&SessionTensor> {
        match index.checked_sub(self.inputs.len()) {
            None => self.inputs.get(index),
            Some(optional) => self.optional_inputs.get(optional),
        }
    }

    fn wrong_input(&self, index: usize, how: &str) -> EngineError {
        let name = self.input(index).map_or("", |input| &input.name);
        EngineError::Failed(format!("input '{name}' {how}"))
    }

    fn feed(&self, index: usize, tensor: &Tensor) -> Result<Input, EngineError> {
        let Some(declared) = self.input(index) else {
            return Err(EngineError::Failed(format!(
                "input {index} was given, the session has {}",
                self.input_names.len()
            )));
        };
        if let Some(expected) = declared.datatype
            && expected != tensor.datatype
        {
            return Err(EngineError::Failed(format!(
                "input '{}' is {expected}, {} was given",
                declared.name, tensor.datatype
            )));
        }
        self.check_shape(declared, tensor)?;
        Input::new(self.environment, &declared.name, tensor)
    }
}

impl Session for OnnxSession {
    fn inputs(&self) -> &[SessionTensor] {
        &self.inputs
    }

    fn optional_inputs(&self) -> &[SessionTensor] {
        &self.optional_inputs
    }

    fn outputs(&self) -> &[SessionTensor] {
        &self.outputs
    }

    #[expect(unsafe_code, reason = "runs a session through the C API")]
    fn run(
        &self,
        inputs: &[(usize, Tensor)],
        outputs: &[usize],
        stop: &StopHandle,
    ) -> Result<Vec<Tensor>, EngineError> {
        // A handle of another engine cannot reach into this one; the run is then unstoppable.
        let stop = stop.as_any().downcast_ref::<OnnxStop>();
        if stop.is_some_and(OnnxStop::is_stopped) {
            return Err(EngineError::Terminated);
        }
        if outputs.is_empty() {
            return Err(EngineError::Failed("no output was asked for".to_owned()));
        }
        let _entered = self.owner.enter();
        let mut fed: SmallVec<[Input; 4]> = SmallVec::new();
        let mut input_names: SmallVec<[*const std::ffi::c_char; 8]> = SmallVec::new();
        let mut input_values: SmallVec<[*const sys::OrtValue; 8]> = SmallVec::new();
        let mut given: SmallVec<[bool; 16]> = SmallVec::from_elem(false, self.input_names.len());
        for (index, tensor) in inputs {
            let input = self.feed(*index, tensor)?;
            if std::mem::replace(&mut given[*index], true) {
                return Err(self.wrong_input(*index, "was given twice"));
            }
            input_names.push(self.input_names[*index].as_ptr());
            input_values.push(input.value.ptr.as_ptr().cast_const());
            fed.push(input);
        }
        // ONNX Runtime would run its kernels on nothing.
        if let Some(index) = given[..self.inputs.len()].iter().position(|&given| !given) {
            return Err(self.wrong_input(index, "is missing"));
        }
        let mut output_names: SmallVec<[*const std::ffi::c_char; 8]> = SmallVec::new();
        for &index in outputs {
            let Some(name) = self.output_names.get(index) else {
                return Err(EngineError::Failed(format!(
                    "output {index} was asked for, the session has {}",
                    self.output_names.len()
                )));
            };
            output_names.push(name.as_ptr());
        }
        let mut results: SmallVec<[*mut sys::OrtValue; 8]> =
            SmallVec::from_elem(ptr::null_mut(), outputs.len());

        let watched = self.first_buffers.get().is_none().then(Watched::start);
        let api = self.environment.api;
        let run_options = stop.map_or(ptr::null(), |stop| stop.options.as_ptr().cast_const());
        let working = rest::at_work();
        // SAFETY: the session is alive and may be run from many threads; names and values are
        // valid for the lengths given and outlive the call; `results` has a null place for each
        // output, which ONNX Runtime fills with values that are ours; the run options are alive
        // as long as `stop`.
        let status = unsafe {
            (api.Run)(
                self.session.as_ptr(),
                run_options,
                input_names.as_ptr(),
                input_values.as_ptr(),
                input_values.len(),
                output_names.as_ptr(),
                output_names.len(),
                results.as_mut_ptr(),
            )
        };
        drop(working);
        // Owned before anything can fail, so that no path leaks one.
        let values: SmallVec<[Option<Value>; 8]> = results
            .into_iter()
            .map(|value| NonNull::new(value).map(|ptr| Value::own(self.environment, ptr)))
            .collect();
        let ran = check(api, status);
        if stop.is_some_and(OnnxStop::is_stopped) {
            return Err(EngineError::Terminated);
        }
        ran?;
        if let Some(watched) = watched {
            // Of two first runs at once one is enough.
            let _ = self.first_buffers.set(watched.finish());
        }
        let lent = |address| {
            fed.iter().any(|input| input.covers(address))
                || self.lent.as_ref().is_some_and(|lent| lent.covers(address))
        };
        outputs
            .iter()
            .zip(values)
            .map(|(&index, value)| {
                let name = &self.outputs[index].name;
                let value = value.ok_or_else(|| {
                    EngineError::Failed(format!("the run gave no value for output '{name}'"))
                })?;
                output(name, value, lent)
            })
            .collect()
    }

    fn release_memory(&self) {
        self.owner.leave();
    }

    fn first_buffers(&self) -> Option<RunBuffers> {
        self.first_buffers.get().cloned()
    }

    #[expect(unsafe_code, reason = "creates run options through the C API")]
    fn stop_handle(&self) -> Result<StopHandle, EngineError> {
        let api = self.environment.api;
        let mut options = ptr::null_mut();
        // SAFETY: `options` is a place for one pointer.
        check(api, unsafe { (api.CreateRunOptions)(&mut options) })?;
        let stop = OnnxStop {
            api,
            options: NonNull::new(options).ok_or_else(|| missing("run options"))?,
            stopped: AtomicBool::new(false),
        };
        if self.shrinks_arena {
            let (key, arena) = (c"memory.enable_memory_arena_shrinkage", c"cpu:0");
            // SAFETY: the options are alive and nobody else has them yet; both strings are copied.
            check(api, unsafe {
                (api.AddRunConfigEntry)(options, key.as_ptr(), arena.as_ptr())
            })?;
        }
        Ok(Arc::new(stop))
    }
}

impl Drop for OnnxSession {
    #[expect(unsafe_code, reason = "closes a session of the C API")]
    fn drop(&mut self) {
        // One with threads of its own waits for their end.
        let _working = rest::at_work();
        // SAFETY: owned, released once; runs borrow the session, so none is under way.
        unsafe { (self.environment.api.ReleaseSession)(self.session.as_ptr()) }
        self.owner.leave();
    }
}

impl fmt::Debug for OnnxSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnnxSession")
            .field("inputs", &self.inputs)
            .field("optional_inputs", &self.optional_inputs)
            .field("outputs", &self.outputs)
            .finish_non_exhaustive()
    }
}

/// Stops a run through its run options, which ONNX Runtime reads between nodes.
struct OnnxStop {
    api: &'static sys::OrtApi,
    options: NonNull<sys::OrtRunOptions>,
    stopped: AtomicBool,
}

#[expect(unsafe_code, reason = "a stop handle holds a pointer of the C API")]
// SAFETY: run options are bound to no thread.
unsafe impl Send for OnnxStop {}
#[expect(unsafe_code, reason = "a stop handle holds a pointer of the C API")]
// SAFETY: the terminate flag is documented to be set from other threads while a run reads it;
// nothing else of the options is changed.
unsafe impl Sync for OnnxStop {}

impl OnnxStop {
    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }
}

impl Stop for OnnxStop {
    #[expect(unsafe_code, reason = "sets a flag of the C API")]
    fn stop(&self) {
        if self.stopped.swap(true, Ordering::AcqRel) {
            return;
        }
        // SAFETY: the options are alive as long as `self`.
        let status = unsafe { (self.api.RunOptionsSetTerminate)(self.options.as_ptr()) };
        if let Err(error) = check(self.api, status) {
            tracing::warn!(%error, "a run could not be stopped");
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for OnnxStop {
    #[expect(unsafe_code, reason = "frees run options of the C API")]
    fn drop(&mut self) {
        // SAFETY: owned, released once; a run borrows the handle for as long as it uses them.
        unsafe { (self.api.ReleaseRunOptions)(self.options.as_ptr()) }
    }
}

impl fmt::Debug for OnnxStop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnnxStop")
            .field("stopped", &self.stopped)
            .finish_non_exhaustive()
    }
}

/// The type of an input or output, released on drop.
struct TypeInfo(&'static sys::OrtApi, *mut sys::OrtTypeInfo);

impl TypeInfo {
    /// Element type and dimensions; both none for what is not a tensor.
    #[expect(unsafe_code, reason = "asks the C API for a type")]
    fn tensor(&self) -> Result<(Option<super::DataType>, Option<Shape>), EngineError> {
        let Self(api, info) = *self;
        if info.is_null() {
            return Err(missing("tensor type"));
        }
        // The enums are read as integers: a newer library may know more of them than we do.
        let mut kind = 0i32;
        let mut tensor = ptr::null();
        // SAFETY: `info` is alive; the tensor info belongs to it.
        unsafe {
            check(
                api,
                (api.GetOnnxTypeFromTypeInfo)(info, (&raw mut kind).cast()),
            )?;
            if kind != sys::ONNXType::ONNX_TYPE_TENSOR as i32 {
                return Ok((None, None));
            }
            check(api, (api.CastTypeInfoToTensorInfo)(info, &mut tensor))?;
        }
        if tensor.is_null() {
            return Ok((None, None));
        }
        let mut element = 0i32;
        let mut has_shape = false;
        let mut rank = 0usize;
        // SAFETY: as above; `dims` has room for the rank that was told.
        let dims = unsafe {
            check(
                api,
                (api.GetTensorElementType)(tensor, (&raw mut element).cast()),
            )?;
            has_shape |= (api.TensorTypeAndShape_HasShape)(tensor);
            check(api, (api.GetDimensionsCount)(tensor, &mut rank))?;
            let mut dims: Shape = Shape::from_elem(0, rank);
            check(api, (api.GetDimensions)(tensor, dims.as_mut_ptr(), rank))?;
            dims
        };
        Ok((datatype(element), has_shape.then_some(dims)))
    }
}

impl Drop for TypeInfo {
    #[expect(unsafe_code, reason = "frees a type of the C API")]
    fn drop(&mut self) {
        if !self.1.is_null() {
            // SAFETY: owned, released once.
            unsafe { (self.0.ReleaseTypeInfo)(self.1) }
        }
    }
}

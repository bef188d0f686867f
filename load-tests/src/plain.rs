//! ONNX Runtime as everybody uses it: a session with default options from a file. What the server
//! is compared with, in the same process and with the same library.

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::slice;

use anyhow::{Context, Result, bail, ensure};
use dormouse_client::{DataType, Tensor};
use dormouse_proto::inference as pb;
use dormouse_server::engine::Engine;
use dormouse_server::engine::onnx::{OnnxEngine, OnnxOptions};
use dormouse_server::runtime_library;
use ort::sys;
use sys::ONNXTensorElementDataType as Element;

use crate::models;

/// The library that servers and plain sessions use; installed beside the build where none is.
pub(crate) fn library() -> Result<PathBuf> {
    if let Ok(found) = runtime_library::locate(None) {
        return Ok(found);
    }
    let cache = models::target_dir()?.join("dormouse-cache");
    let progress = dormouse_server::assets::progress();
    Ok(runtime_library::install_in(&cache, &*progress)?.library)
}

/// The version of [`library`] as its file says; none where there is none yet or it does not tell.
pub(crate) fn version() -> Option<String> {
    let found = runtime_library::locate(None).ok().or_else(|| {
        let cache = models::target_dir().ok()?.join("dormouse-cache");
        let mut files = crate::pages::files_below(&cache).ok()?.into_iter();
        files.find(|file| version_of(file).is_some())
    })?;
    version_of(&found.canonicalize().ok()?)
}

/// `1.31.1` of `libonnxruntime.so.1.31.1`.
fn version_of(library: &Path) -> Option<String> {
    let name = library.file_name()?.to_str()?;
    let version = name.strip_prefix("libonnxruntime.so.")?;
    version.contains('.').then(|| version.to_owned())
}

/// ONNX Runtime in this process.
#[derive(Clone, Copy)]
pub(crate) struct PlainRuntime {
    api: &'static sys::OrtApi,
    env: *mut sys::OrtEnv,
}

/// What a run answered.
pub(crate) struct Output<'a> {
    pub(crate) name: &'a str,
    pub(crate) shape: Vec<i64>,
    pub(crate) values: &'a [f32],
}

/// A session with default options: its own threads, every optimisation, packed weights.
pub(crate) struct PlainSession {
    runtime: PlainRuntime,
    session: *mut sys::OrtSession,
    output_names: Vec<CString>,
}

#[expect(unsafe_code, reason = "a session holds a pointer of the C API")]
// SAFETY: a session is bound to no thread.
unsafe impl Send for PlainSession {}
#[expect(unsafe_code, reason = "a session holds a pointer of the C API")]
// SAFETY: the C API documents `Run` as callable from many threads at once.
unsafe impl Sync for PlainSession {}
#[expect(unsafe_code, reason = "the runtime holds a pointer of the C API")]
// SAFETY: an environment is bound to no thread, and is never released here.
unsafe impl Send for PlainRuntime {}
#[expect(unsafe_code, reason = "the runtime holds a pointer of the C API")]
// SAFETY: as for `Send`.
unsafe impl Sync for PlainRuntime {}

impl PlainRuntime {
    /// Loads the library. The environment is the one that servers of this process use: a process
    /// has one, and the server's has to be made first because it brings the shared thread pool.
    #[expect(unsafe_code, reason = "creates the environment through the C API")]
    pub(crate) fn load(library: &Path) -> Result<Self> {
        OnnxEngine::new(OnnxOptions::new(library))?.prepare()?;
        let api = ort::api();
        let mut env = ptr::null_mut();
        // SAFETY: the name lives for ever and `env` is a place for one pointer.
        check(api, unsafe {
            (api.CreateEnv)(
                sys::OrtLoggingLevel::ORT_LOGGING_LEVEL_ERROR,
                c"plain".as_ptr(),
                &mut env,
            )
        })?;
        ensure!(!env.is_null(), "ONNX Runtime gave no environment");
        Ok(Self { api, env })
    }

    /// Opens a session from a file.
    #[expect(unsafe_code, reason = "opens a session through the C API")]
    pub(crate) fn open(self, file: &Path) -> Result<PlainSession> {
        let api = self.api;
        let path = CString::new(file.as_os_str().as_bytes())?;
        let (mut options, mut session) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: each out pointer is a place for one pointer; the options live until they are
        // released here, once, and a session does not need them afterwards.
        unsafe {
            check(api, (api.CreateSessionOptions)(&mut options))?;
            let opened = check(
                api,
                (api.CreateSession)(self.env, path.as_ptr(), options, &mut session),
            );
            (api.ReleaseSessionOptions)(options);
            opened.with_context(|| format!("cannot open {}", file.display()))?;
        }
        ensure!(!session.is_null(), "ONNX Runtime gave no session");
        let mut opened = PlainSession {
            runtime: self,
            session,
            output_names: Vec::new(),
        };
        opened.output_names = opened.read_output_names()?;
        Ok(opened)
    }
}

impl PlainSession {
    #[expect(unsafe_code, reason = "asks the C API for names")]
    fn read_output_names(&self) -> Result<Vec<CString>> {
        let api = self.runtime.api;
        let (mut allocator, mut count) = (ptr::null_mut(), 0);
        // SAFETY: the session is alive; the allocator is the library's own.
        unsafe {
            check(api, (api.GetAllocatorWithDefaultOptions)(&mut allocator))?;
            check(api, (api.SessionGetOutputCount)(self.session, &mut count))?;
        }
        let mut names = Vec::new();
        for index in 0..count {
            let mut name = ptr::null_mut();
            // SAFETY: `index` is below the count; the name is a C string of `allocator`, copied
            // and freed here.
            unsafe {
                check(
                    api,
                    (api.SessionGetOutputName)(self.session, index, allocator, &mut name),
                )?;
                ensure!(!name.is_null(), "ONNX Runtime gave no name");
                names.push(CStr::from_ptr(name).to_owned());
                check(api, (api.AllocatorFree)(allocator, name.cast()))?;
            }
        }
        Ok(names)
    }

    /// Runs once; the outputs of floats are looked at by `see`.
    #[expect(unsafe_code, reason = "runs a session through the C API")]
    pub(crate) fn run(
        &self,
        inputs: &[(String, Tensor)],
        mut see: impl FnMut(Output<'_>),
    ) -> Result<()> {
        let api = self.runtime.api;
        let mut values = Vec::new();
        let mut names = Vec::new();
        for (name, tensor) in inputs {
            values.push(Value::over(api, tensor)?);
            names.push(CString::new(name.as_str())?);
        }
        let input_names: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        let input_values: Vec<_> = values.iter().map(|value| value.ptr.cast_const()).collect();
        let output_names: Vec<_> = self.output_names.iter().map(|name| name.as_ptr()).collect();
        let mut outputs = vec![ptr::null_mut(); output_names.len()];
        // SAFETY: every array has the length that is passed with it, and what they point to lives
        // until this returns.
        let ran = check(api, unsafe {
            (api.Run)(
                self.session,
                ptr::null(),
                input_names.as_ptr(),
                input_values.as_ptr(),
                input_values.len(),
                output_names.as_ptr(),
                output_names.len(),
                outputs.as_mut_ptr(),
            )
        });
        let outputs: Vec<Value> = outputs.into_iter().map(|ptr| Value { api, ptr }).collect();
        ran?;
        for (name, output) in self.output_names.iter().zip(&outputs) {
            if let Some((shape, values)) = output.floats()? {
                let name = &name.to_string_lossy();
                see(Output {
                    name,
                    shape,
                    values,
                });
            }
        }
        Ok(())
    }

    /// Answers a request of the protocol with the outputs of floats.
    pub(crate) fn answer(&self, request: pb::ModelInferRequest) -> Result<pb::ModelInferResponse> {
        let mut inputs = Vec::new();
        for (input, data) in request.inputs.into_iter().zip(request.raw_input_contents) {
            let datatype: DataType = input.datatype.parse()?;
            let size = datatype.element_size().unwrap_or(1);
            // Where a tensor begins in a message is up to what stands before it.
            let data = match data.as_ptr().addr().is_multiple_of(size) {
                true => data,
                false => data.to_vec().into(),
            };
            inputs.push((input.name, Tensor::raw(datatype, input.shape, data)?));
        }
        let mut outputs = Vec::new();
        self.run(&inputs, |output| {
            let tensor = Tensor::from_slice(output.shape, output.values);
            outputs.push((output.name.to_owned(), tensor));
        })?;
        let mut response = pb::ModelInferResponse {
            model_name: request.model_name,
            model_version: "1".to_owned(),
            id: request.id,
            ..Default::default()
        };
        for (name, tensor) in outputs {
            let tensor = tensor?;
            let described = pb::model_infer_response::InferOutputTensor {
                name,
                datatype: tensor.datatype().name().to_owned(),
                shape: tensor.shape().to_vec(),
                ..Default::default()
            };
            response.outputs.push(described);
            response.raw_output_contents.push(tensor.data().clone());
        }
        Ok(response)
    }
}

impl Drop for PlainSession {
    #[expect(unsafe_code, reason = "frees a session of the C API")]
    fn drop(&mut self) {
        // SAFETY: owned, released once.
        unsafe { (self.runtime.api.ReleaseSession)(self.session) }
    }
}

/// A tensor of the C API, released on drop.
struct Value {
    api: &'static sys::OrtApi,
    ptr: *mut sys::OrtValue,
}

impl Value {
    /// A value over a tensor's own bytes.
    #[expect(unsafe_code, reason = "creates a value over foreign memory")]
    fn over(api: &'static sys::OrtApi, tensor: &Tensor) -> Result<Self> {
        let element = match tensor.datatype() {
            DataType::Fp32 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
            DataType::Int32 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
            DataType::Int64 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
            other => bail!("requests of {other} are not recorded"),
        };
        let data = tensor.data();
        let size = tensor.datatype().element_size().unwrap_or(1);
        ensure!(
            data.as_ptr().addr().is_multiple_of(size),
            "a recorded input is not aligned"
        );
        let (mut memory, mut value) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the value borrows the tensor's bytes, which the caller keeps for the run; inputs
        // are only read.
        unsafe {
            check(
                api,
                (api.CreateCpuMemoryInfo)(
                    sys::OrtAllocatorType::OrtDeviceAllocator,
                    sys::OrtMemType::OrtMemTypeDefault,
                    &mut memory,
                ),
            )?;
            let created = check(
                api,
                (api.CreateTensorWithDataAsOrtValue)(
                    memory,
                    data.as_ptr().cast_mut().cast(),
                    data.len(),
                    tensor.shape().as_ptr(),
                    tensor.shape().len(),
                    element,
                    &mut value,
                ),
            );
            (api.ReleaseMemoryInfo)(memory);
            created?;
        }
        Ok(Self { api, ptr: value })
    }

    /// Shape and elements of a tensor of 32-bit floats.
    #[expect(unsafe_code, reason = "reads a value of the C API")]
    fn floats(&self) -> Result<Option<(Vec<i64>, &[f32])>> {
        let (mut info, mut data) = (ptr::null_mut(), ptr::null_mut());
        let (mut rank, mut shape) = (0, Vec::new());
        let (mut count, mut element) = (0, Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED);
        // SAFETY: the value is a tensor that lives as long as `self`; the type is released once,
        // and the data has as many elements as it says.
        unsafe {
            check(
                self.api,
                (self.api.GetTensorTypeAndShape)(self.ptr, &mut info),
            )?;
            let read = check(
                self.api,
                (self.api.GetTensorElementType)(info, &mut element),
            )
            .and_then(|()| {
                check(
                    self.api,
                    (self.api.GetTensorShapeElementCount)(info, &mut count),
                )
            })
            .and_then(|()| check(self.api, (self.api.GetDimensionsCount)(info, &mut rank)))
            .and_then(|()| {
                shape.resize(rank, 0);
                check(
                    self.api,
                    (self.api.GetDimensions)(info, shape.as_mut_ptr(), rank),
                )
            });
            (self.api.ReleaseTensorTypeAndShapeInfo)(info);
            read?;
            if element != Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || count == 0 {
                return Ok(None);
            }
            check(
                self.api,
                (self.api.GetTensorMutableData)(self.ptr, &mut data),
            )?;
            let values = slice::from_raw_parts(data.cast::<f32>(), count);
            Ok(Some((shape, values)))
        }
    }
}

impl Drop for Value {
    #[expect(unsafe_code, reason = "frees a value of the C API")]
    fn drop(&mut self) {
        if !self.ptr.is_null() {
            // SAFETY: owned, released once.
            unsafe { (self.api.ReleaseValue)(self.ptr) }
        }
    }
}

#[expect(unsafe_code, reason = "reads and frees a status of the C API")]
fn check(api: &'static sys::OrtApi, status: sys::OrtStatusPtr) -> Result<()> {
    if status.0.is_null() {
        return Ok(());
    }
    // SAFETY: a status that is not null has a message, and is released once.
    let message = unsafe {
        let message = CStr::from_ptr((api.GetErrorMessage)(status.0))
            .to_string_lossy()
            .into_owned();
        (api.ReleaseStatus)(status.0);
        message
    };
    bail!("ONNX Runtime: {message}")
}

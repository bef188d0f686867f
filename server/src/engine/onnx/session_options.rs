//! How a session is built, in ONNX Runtime's terms.

use std::ffi::{CStr, CString};
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{self, NonNull};

use bytes::Bytes;
use dormouse_model_store::spec::{GraphLevel, SessionSpec};
use ort::sys;

use super::OnnxOptions;
use super::environment::{Environment, c_int, missing};
use super::prepared::Lent;
use super::rest::{self, AtWork};
use super::status::check;
use super::threads;
use super::value::Value;
use crate::engine::EngineError;

/// Parts of configuration keys that a model must not set: those that name files, and those that
/// make ONNX Runtime keep pointers into bytes that are freed once the session is built.
const REFUSED: &[(&str, &str)] = &[
    ("file", "it names a file on the server"),
    ("path", "it names a file on the server"),
    ("profiling", "it writes files on the server"),
    ("save_", "it writes files on the server"),
    ("ep.context", "it reads and writes files on the server"),
    ("directly", "the model's bytes are freed once it is loaded"),
    (
        "bytes_for_initializers",
        "the model's bytes are freed once it is loaded",
    ),
    ("load_model_format", "the format is told by the file itself"),
];

/// Session options; `'a` is the external data lent to them.
pub(super) struct SessionOptions<'a> {
    environment: &'static Environment,
    options: NonNull<sys::OrtSessionOptions>,
    /// Building a session computes constants or packs weights.
    has_work_for_pool: bool,
    _external: PhantomData<&'a [u8]>,
}

impl<'a> SessionOptions<'a> {
    pub(super) fn new(
        environment: &'static Environment,
        engine: &OnnxOptions,
        spec: &SessionSpec,
        external: &'a [(String, Bytes)],
    ) -> Result<Self, EngineError> {
        let mut options = Self::empty(environment)?;
        options.threads(engine, spec)?;
        options.memory(engine, spec)?;
        options.graph(spec)?;
        for (key, value) in &spec.entries {
            if let Some((_, why)) = REFUSED.iter().find(|(part, _)| key.contains(part)) {
                return Err(EngineError::Failed(format!(
                    "session entry '{key}' cannot be set: {why}"
                )));
            }
            options.entry(key, value)?;
        }
        options.external(external)?;
        Ok(options)
    }

    pub(super) fn as_ptr(&self) -> *const sys::OrtSessionOptions {
        self.options.as_ptr().cast_const()
    }

    #[expect(unsafe_code, reason = "creates an object of the C API")]
    fn empty(environment: &'static Environment) -> Result<Self, EngineError> {
        let mut options = ptr::null_mut();
        // SAFETY: `options` is a place for one pointer.
        check(environment.api, unsafe {
            (environment.api.CreateSessionOptions)(&mut options)
        })?;
        Ok(Self {
            environment,
            options: NonNull::new(options).ok_or_else(|| missing("session options"))?,
            has_work_for_pool: true,
            _external: PhantomData,
        })
    }

    #[expect(unsafe_code, reason = "sets options of the C API")]
    fn threads(&mut self, engine: &OnnxOptions, spec: &SessionSpec) -> Result<(), EngineError> {
        let api = self.environment.api;
        let options = self.options.as_ptr();
        // Zero is how Triton's configurations say "the default".
        let intra = spec.intra_op_threads.filter(|&count| count > 0);
        let inter = spec.inter_op_threads.filter(|&count| count > 0);
        let mode = if spec.parallel_execution {
            sys::ExecutionMode::ORT_PARALLEL
        } else {
            sys::ExecutionMode::ORT_SEQUENTIAL
        };
        // SAFETY: the options are alive.
        check(api, unsafe { (api.SetSessionExecutionMode)(options, mode) })?;
        // The shared pool has threads between operators only when it was asked for.
        let shared = self.environment.shared.is_some_and(|shared| {
            intra.is_none() && inter.is_none() && (!spec.parallel_execution || shared.inter > 1)
        });
        if shared {
            // SAFETY: the options are alive.
            return check(api, unsafe { (api.DisablePerSessionThreads)(options) });
        }
        let intra = match intra {
            Some(count) => count as usize,
            None => engine.intra_op_threads.unwrap_or(0),
        };
        let inter = match inter {
            Some(count) => count as usize,
            None => engine.inter_op_threads.unwrap_or(0),
        };
        // SAFETY: the options are alive and both numbers fit.
        unsafe {
            check(api, (api.SetIntraOpNumThreads)(options, c_int(intra)?))?;
            check(api, (api.SetInterOpNumThreads)(options, c_int(inter)?))?;
        }
        threads::for_session(api, options)?;
        let spin = if engine.allow_spinning { "1" } else { "0" };
        for key in [
            "session.intra_op.allow_spinning",
            "session.inter_op.allow_spinning",
        ] {
            self.default_entry(spec, key, spin)?;
        }
        if engine.allow_spinning {
            // Threads look for work while a run goes on, and sleep as soon as none does; those of
            // the shared pool are sent to rest by `rest`.
            self.default_entry(spec, "session.force_spinning_stop", "1")?;
        }
        Ok(())
    }

    #[expect(unsafe_code, reason = "sets options of the C API")]
    fn memory(&mut self, engine: &OnnxOptions, spec: &SessionSpec) -> Result<(), EngineError> {
        let api = self.environment.api;
        let options = self.options.as_ptr();
        // SAFETY: the options are alive.
        unsafe {
            match spec.memory_arena {
                Some(true) => check(api, (api.EnableCpuMemArena)(options))?,
                Some(false) => check(api, (api.DisableCpuMemArena)(options))?,
                None => {}
            }
            match spec.memory_pattern {
                Some(true) => check(api, (api.EnableMemPattern)(options))?,
                Some(false) => check(api, (api.DisableMemPattern)(options))?,
                None => {}
            }
        }
        // Whoever says what the arena should do gets an arena, or none, as told.
        let says_nothing = spec.memory_arena.is_none() && !spec.shrinks_arena;
        if self.environment.has_allocator && engine.shared_cache_bytes.is_some() && says_nothing {
            self.default_entry(spec, "session.use_env_allocators", "1")?;
        }
        // Weights do not come and go, so the arena, which grows by doubling, is no place for them.
        self.default_entry(spec, "session.use_device_allocator_for_initializers", "1")
    }

    #[expect(unsafe_code, reason = "sets options of the C API")]
    fn level(&mut self, level: sys::GraphOptimizationLevel) -> Result<(), EngineError> {
        let api = self.environment.api;
        // SAFETY: the options are alive.
        check(api, unsafe {
            (api.SetSessionGraphOptimizationLevel)(self.options.as_ptr(), level)
        })
    }

    fn graph(&mut self, spec: &SessionSpec) -> Result<(), EngineError> {
        let level = match spec.graph_level {
            GraphLevel::Disabled => sys::GraphOptimizationLevel::ORT_DISABLE_ALL,
            GraphLevel::Basic => sys::GraphOptimizationLevel::ORT_ENABLE_BASIC,
            GraphLevel::Extended => sys::GraphOptimizationLevel::ORT_ENABLE_EXTENDED,
            GraphLevel::All => sys::GraphOptimizationLevel::ORT_ENABLE_ALL,
        };
        self.level(level)
    }

    /// Takes the graph as it is.
    pub(super) fn unoptimized(&mut self) -> Result<(), EngineError> {
        self.level(sys::GraphOptimizationLevel::ORT_DISABLE_ALL)
    }

    /// Has the optimised graph written to a file.
    #[expect(unsafe_code, reason = "sets options of the C API")]
    pub(super) fn optimized_model(&mut self, file: &Path) -> Result<(), EngineError> {
        let path = CString::new(file.as_os_str().as_bytes())
            .map_err(|_| EngineError::Failed(format!("path {} has a zero byte", file.display())))?;
        let api = self.environment.api;
        // SAFETY: the options are alive and the path is copied by the call.
        check(api, unsafe {
            (api.SetOptimizedModelFilePath)(self.options.as_ptr(), path.as_ptr())
        })
    }

    /// Gives the value of an initializer. The value must outlive the session.
    #[expect(unsafe_code, reason = "lends a value to the C API")]
    pub(super) fn initializer(&mut self, name: &CStr, value: &Value) -> Result<(), EngineError> {
        let api = self.environment.api;
        // SAFETY: the options and the value are alive, and the name is copied by the call; who
        // builds a session from these options keeps the value as long as the session.
        check(api, unsafe {
            (api.AddInitializer)(
                self.options.as_ptr(),
                name.as_ptr(),
                value.ptr.as_ptr().cast_const(),
            )
        })
    }

    /// Leaves weights as they are. Of a graph that is taken as it is nothing is left to compute.
    pub(super) fn unpacked(&mut self) -> Result<(), EngineError> {
        self.has_work_for_pool = false;
        self.entry("session.disable_prepacking", "1")
    }

    /// Leaves weights as they are if that is up to us.
    pub(super) fn hasty(&mut self, spec: &SessionSpec) -> Result<(), EngineError> {
        self.default_entry(spec, "session.disable_prepacking", "1")
    }

    /// Has the session read external data where it lies instead of copying it. What is returned must be
    /// dropped after the session.
    #[expect(unsafe_code, reason = "sets options of the C API")]
    pub(super) fn borrow_external(
        &mut self,
        external: &[(String, Bytes)],
    ) -> Result<Lent, EngineError> {
        self.entry(
            "session.use_external_initializer_file_buffers_directly",
            "1",
        )?;
        let api = self.environment.api;
        // A pattern of memory has room for all weights, those that are elsewhere included.
        // SAFETY: the options are alive.
        check(api, unsafe {
            (api.DisableMemPattern)(self.options.as_ptr())
        })?;
        Ok(Lent::external(external))
    }

    /// Says that a session is being built from these options.
    pub(super) fn at_work(&self) -> AtWork {
        match self.has_work_for_pool {
            true => rest::at_work(),
            false => rest::at_work_alone(),
        }
    }

    /// Packs weights on all threads of the pool; by default one thread does it all.
    pub(super) fn packs_in_parallel(&mut self, spec: &SessionSpec) -> Result<(), EngineError> {
        self.default_entry(spec, "session.prepack.enable_parallel", "1")
    }

    fn default_entry(
        &mut self,
        spec: &SessionSpec,
        key: &str,
        value: &str,
    ) -> Result<(), EngineError> {
        if spec.entries.contains_key(key) {
            return Ok(());
        }
        self.entry(key, value)
    }

    #[expect(unsafe_code, reason = "sets an entry of the C API")]
    pub(super) fn entry(&mut self, key: &str, value: &str) -> Result<(), EngineError> {
        let c_string = |what: &str| {
            CString::new(what).map_err(|_| {
                EngineError::Failed(format!("session entry {key:?} = {value:?} has a zero byte"))
            })
        };
        let (c_key, c_value) = (c_string(key)?, c_string(value)?);
        let api = self.environment.api;
        // SAFETY: the options are alive and both strings are copied by the call.
        check(api, unsafe {
            (api.AddSessionConfigEntry)(self.options.as_ptr(), c_key.as_ptr(), c_value.as_ptr())
        })
    }

    #[expect(unsafe_code, reason = "lends buffers to the C API")]
    fn external(&mut self, external: &'a [(String, Bytes)]) -> Result<(), EngineError> {
        if external.is_empty() {
            return Ok(());
        }
        let mut names = Vec::new();
        for (location, _) in external {
            names.push(CString::new(location.as_str()).map_err(|_| {
                EngineError::Failed(format!("external data {location:?} has a zero byte"))
            })?);
        }
        let name_ptrs: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        let buffers: Vec<_> = external
            .iter()
            .map(|(_, data)| data.as_ptr().cast_mut().cast())
            .collect();
        let lengths: Vec<_> = external.iter().map(|(_, data)| data.len()).collect();
        let api = self.environment.api;
        // SAFETY: the three arrays have the length given; the names are copied, and the buffers
        // stay borrowed for `'a`, which the options do not outlive; a session that reads them where
        // they lie is closed before they go (see `borrow_external`). ONNX Runtime only reads them.
        check(api, unsafe {
            (api.AddExternalInitializersFromMemory)(
                self.options.as_ptr(),
                name_ptrs.as_ptr(),
                buffers.as_ptr(),
                lengths.as_ptr(),
                external.len(),
            )
        })
    }
}

impl Drop for SessionOptions<'_> {
    #[expect(unsafe_code, reason = "frees an object of the C API")]
    fn drop(&mut self) {
        // SAFETY: owned, released once.
        unsafe { (self.environment.api.ReleaseSessionOptions)(self.options.as_ptr()) }
    }
}

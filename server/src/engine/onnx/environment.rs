//! What every session shares: the library, its environment and the thread pool. Created once and
//! kept for the life of the process, since ONNX Runtime refuses a second environment.

use std::ffi::{CStr, CString, c_char, c_void};
use std::mem;
use std::num::NonZero;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::time::Duration;

use ort::sys;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::OnnxOptions;
use super::allocator;
use super::status::{check, clean};
use super::threads;
use crate::engine::EngineError;

static ENVIRONMENT: OnceLock<Environment> = OnceLock::new();
/// Held while the environment is being created, so that it is tried by one thread at a time and
/// can be tried again after a failure.
static CREATING: Mutex<()> = Mutex::new(());

/// The process's ONNX Runtime.
pub(super) struct Environment {
    pub(super) api: &'static sys::OrtApi,
    pub(super) env: NonNull<sys::OrtEnv>,
    /// Describes the memory of every input: plain, on the CPU.
    pub(super) memory: NonNull<sys::OrtMemoryInfo>,
    /// ONNX Runtime's default allocator; owned by the library.
    pub(super) allocator: NonNull<sys::OrtAllocator>,
    /// Threads of the shared pools; none when sessions bring their own.
    pub(super) shared: Option<SharedThreads>,
    /// Sessions may use the allocator of [`allocator`].
    pub(super) has_allocator: bool,
    pub(super) version: String,
    library: PathBuf,
    /// The same, as it was asked for.
    asked: PathBuf,
}

/// Sizes of the shared pools.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedThreads {
    pub(super) inter: usize,
}

#[expect(unsafe_code, reason = "the environment holds pointers of the C API")]
// SAFETY: an OrtEnv, a memory info and the default allocator may be used from every thread; none of
// them is changed or freed after creation.
unsafe impl Send for Environment {}
#[expect(unsafe_code, reason = "the environment holds pointers of the C API")]
// SAFETY: as for `Send`.
unsafe impl Sync for Environment {}

impl Environment {
    /// The environment and how long its creation took, zero when it was there.
    pub(super) fn prepare(options: &OnnxOptions) -> Result<(&'static Self, Duration), EngineError> {
        if let Some(environment) = ENVIRONMENT.get() {
            return environment
                .same_library(options)
                .map(|same| (same, Duration::ZERO));
        }
        let _creating = CREATING.lock();
        if let Some(environment) = ENVIRONMENT.get() {
            return environment
                .same_library(options)
                .map(|same| (same, Duration::ZERO));
        }
        let started = Instant::now();
        let created = Self::create(options)?;
        let environment = ENVIRONMENT.get_or_init(|| created);
        let took = started.elapsed();
        tracing::info!(
            version = %environment.version,
            library = %environment.library.display(),
            took = ?took,
            "onnx runtime is ready"
        );
        Ok((environment, took))
    }

    pub(super) fn current() -> Option<&'static Self> {
        ENVIRONMENT.get()
    }

    fn same_library(&'static self, options: &OnnxOptions) -> Result<&'static Self, EngineError> {
        // Every load comes by here; looking at the disk is for others.
        if options.library == self.asked || absolute(&options.library)? == self.library {
            return Ok(self);
        }
        tracing::error!(loaded = %self.library.display(), asked = %options.library.display(), "another ONNX Runtime is loaded already");
        Err(EngineError::Failed(
            "ONNX Runtime was already loaded from another file: a process cannot load a second one"
                .to_owned(),
        ))
    }

    #[expect(unsafe_code, reason = "creates the environment through the C API")]
    fn create(options: &OnnxOptions) -> Result<Self, EngineError> {
        let library = absolute(&options.library)?;
        // The builder that comes back is not used: the environment is created below with a log
        // level and a logger of our own.
        drop(
            ort::init_from(&library)
                .map_err(|error| failed(&library, "cannot load ONNX Runtime", &error))?,
        );
        let api = ort::api();

        let mut env = ptr::null_mut();
        let shared = options.global_thread_pool.then(|| SharedThreads {
            inter: options.inter_op_threads.unwrap_or(1).max(1),
        });
        let log_id = c"dormouse".as_ptr();
        let level = sys::OrtLoggingLevel::ORT_LOGGING_LEVEL_WARNING;
        if let Some(shared) = shared {
            let pools = ThreadingOptions::new(api)?;
            threads::for_shared_pools(api, pools.0.1)?;
            let intra = options
                .intra_op_threads
                .filter(|&count| count > 0)
                .unwrap_or_else(cores);
            // SAFETY: `pools` is alive, every number is within an `int`, the logger is a
            // function that lives for ever and takes no state, and `env` is a place for one
            // pointer.
            unsafe {
                check(
                    api,
                    (api.SetGlobalIntraOpNumThreads)(pools.0.1, c_int(intra)?),
                )?;
                check(
                    api,
                    (api.SetGlobalInterOpNumThreads)(pools.0.1, c_int(shared.inter)?),
                )?;
                check(
                    api,
                    (api.SetGlobalSpinControl)(pools.0.1, i32::from(options.allow_spinning)),
                )?;
                check(
                    api,
                    (api.CreateEnvWithCustomLoggerAndGlobalThreadPools)(
                        log,
                        ptr::null_mut(),
                        level,
                        log_id,
                        pools.0.1,
                        &mut env,
                    ),
                )?;
            }
        } else {
            // SAFETY: as above, without a pool.
            check(api, unsafe {
                (api.CreateEnvWithCustomLogger)(log, ptr::null_mut(), level, log_id, &mut env)
            })?;
        }
        let env = NonNull::new(env).ok_or_else(|| missing("environment"))?;

        let mut memory = ptr::null_mut();
        let mut default_allocator = ptr::null_mut();
        // SAFETY: `env` was just created; the others are places for one pointer each.
        unsafe {
            check(api, (api.DisableTelemetryEvents)(env.as_ptr()))?;
            check(
                api,
                (api.CreateCpuMemoryInfo)(
                    sys::OrtAllocatorType::OrtDeviceAllocator,
                    sys::OrtMemType::OrtMemTypeDefault,
                    &mut memory,
                ),
            )?;
            check(
                api,
                (api.GetAllocatorWithDefaultOptions)(&mut default_allocator),
            )?;
        }
        let default_allocator =
            NonNull::new(default_allocator).ok_or_else(|| missing("allocator"))?;
        if let Some(cache_bytes) = options.shared_cache_bytes {
            allocator::register(api, env, default_allocator, cache_bytes)?;
        }
        Ok(Self {
            api,
            env,
            memory: NonNull::new(memory).ok_or_else(|| missing("memory description"))?,
            allocator: default_allocator,
            shared,
            has_allocator: options.shared_cache_bytes.is_some(),
            version: version(&library).unwrap_or_else(|| ort::info().to_owned()),
            library,
            asked: options.library.clone(),
        })
    }
}

/// The error for a call that reported success and gave nothing.
pub(super) fn missing(what: &str) -> EngineError {
    EngineError::Failed(format!("ONNX Runtime gave no {what}"))
}

/// Checked narrowing for counts that the C API takes as `int`.
pub(super) fn c_int(count: usize) -> Result<i32, EngineError> {
    i32::try_from(count)
        .map_err(|_| EngineError::Failed(format!("{count} threads are more than can be asked for")))
}

fn absolute(library: &Path) -> Result<PathBuf, EngineError> {
    std::fs::canonicalize(library)
        .map_err(|error| failed(library, "cannot open the ONNX Runtime library", &error))
}

/// The error for callers, who need not know where things are on this machine; the log does.
fn failed(library: &Path, what: &str, cause: &dyn std::fmt::Display) -> EngineError {
    tracing::error!(library = %library.display(), %cause, "{what}");
    let cause = cause.to_string();
    let name = library.file_name().unwrap_or_default().to_string_lossy();
    let cause = cause.replace(&*library.to_string_lossy(), &name);
    EngineError::Failed(clean(&format!("{what} {name}: {cause}")))
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// What the library calls its version: `1.31.1`. The bindings read it and keep it to themselves.
#[expect(unsafe_code, reason = "asks the loaded library for its version")]
fn version(library: &Path) -> Option<String> {
    let path = CString::new(library.as_os_str().as_bytes()).ok()?;
    // SAFETY: the library is loaded and stays so, and is only looked up here; `OrtGetApiBase` has
    // this signature in every version, and the version is a C string of the library's own.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY);
        if handle.is_null() {
            return None;
        }
        let base = libc::dlsym(handle, c"OrtGetApiBase".as_ptr());
        libc::dlclose(handle);
        if base.is_null() {
            return None;
        }
        let base: unsafe extern "system" fn() -> *const sys::OrtApiBase = mem::transmute(base);
        let base = base().as_ref()?;
        let version = (base.GetVersionString)();
        (!version.is_null()).then(|| text(version))
    }
}

/// Options of the shared pools, freed when the environment has read them.
struct ThreadingOptions((&'static sys::OrtApi, *mut sys::OrtThreadingOptions));

impl ThreadingOptions {
    #[expect(unsafe_code, reason = "creates an object of the C API")]
    fn new(api: &'static sys::OrtApi) -> Result<Self, EngineError> {
        let mut options = ptr::null_mut();
        // SAFETY: `options` is a place for one pointer.
        check(api, unsafe { (api.CreateThreadingOptions)(&mut options) })?;
        if options.is_null() {
            return Err(missing("threading options"));
        }
        Ok(Self((api, options)))
    }
}

impl Drop for ThreadingOptions {
    #[expect(unsafe_code, reason = "frees an object of the C API")]
    fn drop(&mut self) {
        // SAFETY: created in `new`, freed once.
        unsafe { (self.0.0.ReleaseThreadingOptions)(self.0.1) }
    }
}

/// What ONNX Runtime complains about and is as it should be.
const EXPECTED: [&str; 3] = [
    "device discovery failed",
    "terminate flag being set",
    "Serializing optimized model with Graph Optimization level",
];

/// Passes ONNX Runtime's warnings and errors on to our log.
#[expect(unsafe_code, reason = "reads the C strings of a log callback")]
unsafe extern "system" fn log(
    _state: *mut c_void,
    severity: sys::OrtLoggingLevel,
    _category: *const c_char,
    id: *const c_char,
    location: *const c_char,
    message: *const c_char,
) {
    // A panic must not unwind into C++.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: ONNX Runtime passes C strings (or null) that live until this returns.
        let (session, location, message) = unsafe { (text(id), text(location), text(message)) };
        // Looking for graphics cards is not something a server on the CPU should warn about, and
        // a run that was stopped is stopped because we asked for it.
        let expected = EXPECTED.iter().any(|part| message.contains(part));
        match severity {
            sys::OrtLoggingLevel::ORT_LOGGING_LEVEL_ERROR
            | sys::OrtLoggingLevel::ORT_LOGGING_LEVEL_FATAL
                if !expected =>
            {
                tracing::error!(target: "onnxruntime", session, location, "{message}");
            }
            sys::OrtLoggingLevel::ORT_LOGGING_LEVEL_WARNING if !expected => {
                tracing::warn!(target: "onnxruntime", session, location, "{message}");
            }
            _ => tracing::debug!(target: "onnxruntime", session, location, "{message}"),
        }
    }));
}

#[expect(unsafe_code, reason = "reads a C string")]
/// # Safety
/// `text` is null or a C string.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: promised by the caller.
    clean(&unsafe { CStr::from_ptr(text) }.to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_told_without_its_folder() {
        let error = absolute(Path::new("/no/such/folder/libonnxruntime.so")).unwrap_err();
        let told = error.to_string();
        assert!(told.contains("libonnxruntime.so"), "{told}");
        assert!(!told.contains("folder"), "{told}");
    }
}

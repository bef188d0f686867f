//! ONNX Runtime. This module and those below it are the only ones that name its bindings, and
//! they use the C API through them: it lets a session be run by reference from many threads, and
//! takes and gives tensors without copying them.

pub mod allocator;
mod apart;
mod environment;
mod external;
mod graph_inputs;
mod identity;
mod model_proto;
mod optimize;
mod packed;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod pieces;
mod prepared;
mod protobuf;
mod rest;
mod session;
mod session_options;
mod status;
#[cfg(test)]
pub(crate) mod tests;
mod threads;
mod use_order;
mod value;

use std::ffi::CString;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::datatype::DataType;
use dormouse_model_store::spec::SessionSpec;

use self::environment::Environment;
use self::session::{Graph, OnnxSession};
use self::session_options::SessionOptions;
use super::{
    Effort, Engine, EngineError, EngineIdentity, GraphBytes, ModelBytes, OptimizeError, Optimized,
    Packing, PreparedBytes, RunBuffers, Session,
};

/// What the engine is made of.
#[derive(Clone, Debug)]
pub struct OnnxOptions {
    /// The ONNX Runtime library, see [`crate::runtime_library::locate`].
    pub library: PathBuf,
    /// Threads within an operator; none: as many as the process may use cores.
    pub intra_op_threads: Option<usize>,
    /// Threads between operators, for sessions with parallel execution; none: one.
    pub inter_op_threads: Option<usize>,
    /// One pool for every session that does not ask for threads of its own.
    pub global_thread_pool: bool,
    /// While a session runs, threads without work look for some instead of sleeping: a little
    /// faster, and what other runs could have had of their cores is burnt.
    pub allow_spinning: bool,
    /// Free memory that sessions share and keep for the next run, see [`allocator`]; none: each
    /// session gets ONNX Runtime's own arena, which keeps all it ever had.
    pub shared_cache_bytes: Option<u64>,
}

impl OnnxOptions {
    /// The defaults with this library.
    pub fn new(library: impl Into<PathBuf>) -> Self {
        Self {
            library: library.into(),
            intra_op_threads: None,
            inter_op_threads: None,
            global_thread_pool: true,
            allow_spinning: true,
            shared_cache_bytes: Some(allocator::default_cache_bytes()),
        }
    }
}

/// Passes a model on in the form that ONNX Runtime takes, and whether there is data outside of it that a
/// session may read where it lies.
fn settled<T, E: From<EngineError>>(
    model: &ModelBytes,
    open: impl FnOnce(Graph<'_>, bool) -> Result<T, E>,
) -> Result<T, E> {
    match &model.graph {
        GraphBytes::Memory(graph) => {
            let settled = external::settle(graph, &model.external)?;
            let may_lend = settled.is_aligned && !model.external.is_empty();
            open(Graph::Bytes(&settled.graph), may_lend)
        }
        GraphBytes::File(file) => {
            // By its descriptor: whatever a path may lead to by now, this is the file that was
            // looked at.
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            let path = CString::new(path)
                .map_err(|_| EngineError::Failed("a descriptor has a zero byte".to_owned()))?;
            open(Graph::Path(&path), false)
        }
    }
}

/// Opens sessions of ONNX Runtime on the CPU. The process has one environment: the first engine
/// that is prepared decides its threads, and a second one must name the same library.
#[derive(Debug)]
pub struct OnnxEngine {
    options: OnnxOptions,
}

impl OnnxEngine {
    /// Checks that the library can be opened; it is loaded by [`Engine::prepare`] or the first
    /// session.
    pub fn new(options: OnnxOptions) -> Result<Self, EngineError> {
        std::fs::File::open(&options.library).map_err(|error| {
            EngineError::Failed(format!(
                "cannot open the ONNX Runtime library {}: {error}",
                options.library.display()
            ))
        })?;
        Ok(Self { options })
    }

    fn open_source(
        &self,
        model: &ModelBytes,
        options: &SessionSpec,
        effort: Effort,
    ) -> Result<OnnxSession, EngineError> {
        let (environment, _) = Environment::prepare(&self.options)?;
        settled(model, |graph, may_lend| {
            let mut session_options =
                SessionOptions::new(environment, &self.options, options, &model.external)?;
            let mut lent = None;
            match effort {
                Effort::Full => session_options.packs_in_parallel(options)?,
                Effort::Least => {
                    session_options.hasty(options)?;
                    if may_lend {
                        lent = Some(session_options.borrow_external(&model.external)?);
                    }
                }
            }
            OnnxSession::open(
                environment,
                graph,
                &session_options,
                options.shrinks_arena,
                lent,
            )
        })
    }
}

impl Engine for OnnxEngine {
    fn prepare(&self) -> Result<Duration, EngineError> {
        Environment::prepare(&self.options).map(|(_, took)| took)
    }

    fn open(
        &self,
        model: ModelBytes,
        options: &SessionSpec,
        effort: Effort,
    ) -> Result<Arc<dyn Session>, EngineError> {
        let session = match effort {
            // What is packed is not read again, and would stay beside what was packed of it.
            Effort::Full => self.open_source(&model, options, effort),
            Effort::Least => apart::opened(
                &model,
                |_| false,
                |model| self.open_source(model, options, effort),
            ),
        };
        Ok(Arc::new(session?))
    }

    fn optimize(
        &self,
        model: ModelBytes,
        options: &SessionSpec,
        scratch: &Path,
    ) -> Result<Optimized, OptimizeError> {
        let (environment, _) = Environment::prepare(&self.options)?;
        apart::opened(
            &model,
            // With its weights inside the graph is no smaller.
            |error| matches!(error, OptimizeError::NotPreparable(_)),
            |model| optimize::optimize(environment, &self.options, (model, options), scratch),
        )
    }

    fn open_prepared(
        &self,
        model: PreparedBytes,
        options: &SessionSpec,
        packing: Packing,
    ) -> Result<Arc<dyn Session>, EngineError> {
        let (environment, _) = Environment::prepare(&self.options)?;
        let session = prepared::open(environment, &self.options, model, (options, packing))?;
        Ok(Arc::new(session))
    }

    fn identity(&self) -> Result<EngineIdentity, EngineError> {
        let (environment, _) = Environment::prepare(&self.options)?;
        Ok(identity::identity(environment))
    }

    fn release_memory(&self) {
        allocator::release();
    }

    fn ready_buffers(&self, buffers: &RunBuffers) -> u64 {
        allocator::stock(buffers)
    }

    fn describe(&self) -> String {
        match Environment::current() {
            Some(environment) => format!("ONNX Runtime {}", environment.version),
            None => "ONNX Runtime".to_owned(),
        }
    }
}

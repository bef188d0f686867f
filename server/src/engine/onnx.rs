//! ONNX Runtime. This module and those below it are the only ones that name its bindings, and
//! they use the C API through them: it lets a session be run by reference from many threads, and
//! takes and gives tensors without copying them.

mod environment;
mod external;
mod session;
mod session_options;
mod status;
#[cfg(test)]
pub(crate) mod tests;
mod value;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::datatype::DataType;
use dormouse_model_store::spec::SessionSpec;

use self::environment::Environment;
use self::session::OnnxSession;
use self::session_options::SessionOptions;
use super::{Engine, EngineError, ModelBytes, Session};

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
    /// Idle threads look for work instead of sleeping: a little faster, and a core burnt each.
    pub allow_spinning: bool,
}

impl OnnxOptions {
    /// The defaults with this library.
    pub fn new(library: impl Into<PathBuf>) -> Self {
        Self {
            library: library.into(),
            intra_op_threads: None,
            inter_op_threads: None,
            global_thread_pool: true,
            allow_spinning: false,
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
}

impl Engine for OnnxEngine {
    fn prepare(&self) -> Result<Duration, EngineError> {
        Environment::prepare(&self.options).map(|(_, took)| took)
    }

    fn open(
        &self,
        model: ModelBytes,
        options: &SessionSpec,
    ) -> Result<Arc<dyn Session>, EngineError> {
        let (environment, _) = Environment::prepare(&self.options)?;
        let graph = external::settle(&model.graph, &model.external)?;
        let session_options =
            SessionOptions::new(environment, &self.options, options, &model.external)?;
        let session =
            OnnxSession::open(environment, &graph, &session_options, options.shrinks_arena)?;
        Ok(Arc::new(session))
    }

    fn describe(&self) -> String {
        match Environment::current() {
            Some(environment) => format!("ONNX Runtime {}", environment.version),
            None => "ONNX Runtime".to_owned(),
        }
    }
}

//! Models in processes of their own: a crash, a hang or a leak there ends that process and fails
//! what it was running, and nothing else.
//!
//! The seam is [`crate::engine::Engine`]: an [`IsolatedEngine`] opens sessions that live in a
//! worker, and everything above it (units, batching, the lifecycle) is the same code. A worker is
//! this program again (`dormouse worker`), talks to its server over sockets it was handed, and
//! has neither the repository nor the network.

mod engine;
pub mod inside;
mod log;
mod messages;
mod nursery;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod pieces;
mod segment;
mod session;
mod socket;
mod trial;
mod wire;
mod worker;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use dormouse_core::id::ModelId;
use dormouse_model_store::spec::ModelSpec;

pub use self::engine::IsolatedEngine;
pub use self::nursery::Cause;
pub use self::trial::{TrialError, Trials};
use crate::config::IsolationConfig;
use crate::engine::onnx::OnnxOptions;
use crate::engine::{Engine, EngineError, LostWorker};
use crate::metrics::Metrics;
use engine::Bounds;
use nursery::Nursery;

/// This program, even if its file was replaced or removed since it was started.
const PROGRAM: &str = "/proc/self/exe";

/// What a worker takes beside its model: the engine's library, its threads, its heap.
pub const WORKER_BYTES: u64 = 32 << 20;

/// Decides which models run in processes of their own, and has what these need.
#[derive(Debug)]
pub struct Isolation {
    settings: IsolationConfig,
    /// What workers make their engines of.
    engine_options: OnnxOptions,
    /// The server's own.
    inner: Arc<dyn Engine>,
    metrics: Metrics,
    runtime: tokio::runtime::Handle,
    nursery: OnceLock<Arc<Nursery>>,
    trials: Trials,
}

impl Isolation {
    /// Starts nothing. To be called within the runtime.
    pub fn new(
        settings: IsolationConfig,
        engine_options: OnnxOptions,
        inner: Arc<dyn Engine>,
        metrics: Metrics,
    ) -> Arc<Self> {
        Arc::new(Self {
            settings,
            engine_options,
            inner,
            metrics,
            runtime: tokio::runtime::Handle::current(),
            nursery: OnceLock::new(),
            trials: Trials::default(),
        })
    }

    /// How the server is set.
    pub fn settings(&self) -> &IsolationConfig {
        &self.settings
    }

    /// What is known of models that were tried out.
    pub fn trials(&self) -> &Trials {
        &self.trials
    }

    /// The engine of a model that runs in a process of its own; none for one that does not.
    /// `on_death` is called when that process ends though nobody closed it.
    pub fn engine_for(
        self: &Arc<Self>,
        id: &ModelId,
        spec: &ModelSpec,
        on_death: impl Fn(&LostWorker) + Send + Sync + 'static,
    ) -> Option<Arc<IsolatedEngine>> {
        let isolated = self.settings.isolates(&id.name, spec.lifecycle.isolated);
        isolated.then(|| {
            let label = format!("{}/{}", id.name, id.version);
            let bounds = Bounds::default();
            let on_death = Arc::new(on_death);
            Arc::new(IsolatedEngine::new(
                Arc::clone(self),
                label,
                bounds,
                on_death,
            ))
        })
    }

    /// An engine for work on an isolated model that is none of its serving: whatever becomes of
    /// that worker, the one that serves goes on.
    pub fn engine_aside(self: &Arc<Self>, id: &ModelId) -> Arc<IsolatedEngine> {
        let label = format!("{}/{}", id.name, id.version);
        let isolation = Arc::clone(self);
        Arc::new(IsolatedEngine::new(
            isolation,
            label,
            Bounds::default(),
            Arc::new(|_| {}),
        ))
    }

    fn nursery(&self) -> Result<&Arc<Nursery>, EngineError> {
        if let Some(nursery) = self.nursery.get() {
            return Ok(nursery);
        }
        let workers = self.metrics.server().workers.clone();
        let nursery = Nursery::new(PathBuf::from(PROGRAM), workers, self.runtime.clone());
        let nursery = nursery
            .map_err(|error| EngineError::Failed(format!("no worker can be started: {error}")))?;
        Ok(self.nursery.get_or_init(|| nursery))
    }
}

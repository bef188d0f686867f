//! The parts that a server and the commands without one have in common.

use std::sync::Arc;
use std::time::Duration;

use dormouse_core::dispatch::RunSlots;
use dormouse_core::id::ByteSize;
use dormouse_model_store::config::ConfigDefaults;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::StartError;
use crate::activity::Activity;
use crate::alarm::Alarm;
use crate::clock::Clock;
use crate::config::Config;
use crate::engine::Engine;
use crate::engine::onnx::{OnnxEngine, OnnxOptions};
use crate::error::ServeError;
use crate::events::Events;
use crate::host::{Host, InFlight, UnitDefaults};
use crate::isolation::Isolation;
use crate::memory::MemoryLimit;
use crate::metrics::Metrics;
use crate::registry::{Registry, RegistryConfig};
use crate::runtime_library;
use crate::spans::Tracer;
use crate::wake::Wake;

/// The models of a repository, without a server in front of them.
pub async fn open_registry(config: Config) -> Result<Arc<Registry>, StartError> {
    let clock = Clock::start();
    let metrics = Metrics::new()?;
    let recording = Recording {
        metrics,
        tracer: None,
    };
    let host = host(
        &config,
        &engine(&config)?,
        clock,
        Alarm::spawn(clock)?,
        recording,
    )?;
    registry(&config, &host).await
}

/// Where what happens is noted.
pub(super) struct Recording {
    pub(super) metrics: Metrics,
    pub(super) tracer: Option<Tracer>,
}

pub(super) fn engine(config: &Config) -> Result<Arc<dyn Engine>, StartError> {
    let engine = OnnxEngine::new(engine_options(config)?).map_err(StartError::Engine)?;
    Ok(Arc::new(engine))
}

/// What the engine is made of, here and in workers.
fn engine_options(config: &Config) -> Result<OnnxOptions, StartError> {
    let library = runtime_library::locate(config.engine.library.as_deref())?;
    Ok(OnnxOptions {
        intra_op_threads: config.engine.intra_op_threads.map(|count| count as usize),
        inter_op_threads: config.engine.inter_op_threads.map(|count| count as usize),
        global_thread_pool: config.engine.global_thread_pool,
        allow_spinning: config.engine.spinning,
        ..OnnxOptions::new(library)
    })
}

pub(super) fn host(
    config: &Config,
    engine: &Arc<dyn Engine>,
    clock: Clock,
    alarm: Alarm,
    recording: Recording,
) -> Result<Arc<Host>, StartError> {
    let metrics = recording.metrics;
    let isolation = Isolation::new(
        config.isolation.clone(),
        engine_options(config)?,
        Arc::clone(engine),
        metrics.clone(),
    );
    Ok(Arc::new(Host {
        clock,
        engine: Arc::clone(engine),
        alarm,
        metrics,
        isolation,
        slots: Mutex::new(RunSlots::new(config.limits.max_concurrent_runs)),
        loads: Arc::new(Semaphore::new(config.load_threads)),
        in_flight: InFlight::new(bytes_in_flight(config)),
        activity: Activity::new(clock),
        events: Events::default(),
        tracer: recording.tracer,
        wake: Wake::new(&config.wake, config.load_threads, engine, clock),
        runtime: tokio::runtime::Handle::current(),
        defaults: UnitDefaults {
            keep_alive: config.wake.keep_alive,
            park_after: config.wake.park_after,
            max_queue: config.limits.max_queue_per_model,
            retry_backoff: Duration::from_secs(1),
            retry_backoff_max: Duration::from_secs(60),
            load_retries: config.load_retries,
        },
    }))
}

/// What is configured, as far as there is memory for it.
fn bytes_in_flight(config: &Config) -> ByteSize {
    let configured = config.limits.max_bytes_in_flight;
    let most = MemoryLimit::detect().map_or(u64::MAX, |limit| limit.most_in_flight());
    if configured.0 > most {
        tracing::info!(limit = %ByteSize(most), "bytes of requests in flight are limited by memory");
    }
    let limit = configured.min(ByteSize(most));
    let largest = config.limits.http_max_input;
    let largest = largest.max(config.limits.grpc_max_message);
    if limit < largest {
        tracing::warn!(
            %limit, %largest,
            "requests may be larger than all of them together: those above the limit are refused (limits.max_request_bytes_in_flight, http.max_input_size, grpc.max_input_size)"
        );
    }
    limit
}

pub(super) async fn registry(
    config: &Config,
    host: &Arc<Host>,
) -> Result<Arc<Registry>, StartError> {
    let registry_config = RegistryConfig {
        repositories: config.repositories.clone(),
        remote: config.remote.clone(),
        tolerates_unreachable: !config.exit_on_error,
        control: config.control.clone(),
        config_name: config.model_config_name.clone(),
        defaults: ConfigDefaults {
            auto_complete: config.auto_complete,
            default_max_batch_size: config.engine.default_max_batch_size,
            // Of the shared pool, whose size the engine was told.
            intra_op_threads: None,
            inter_op_threads: None,
            response_cache: config.extensions.cache_size.is_some(),
        },
        max_override_bytes: config.extensions.max_override_bytes,
    };
    let host = Arc::clone(host);
    let opened = tokio::task::spawn_blocking(move || Registry::open(registry_config, host)).await;
    opened
        .unwrap_or_else(|_| {
            Err(ServeError::internal(
                "opening the model repository panicked",
            ))
        })
        .map_err(StartError::Repository)
}

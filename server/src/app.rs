//! Builds every part in dependency order, and takes them down again; the only place that knows
//! them all.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::dispatch::RunSlots;
use dormouse_model_store::config::ConfigDefaults;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::alarm::Alarm;
use crate::clock::Clock;
use crate::config::{Config, ControlMode, ListenConfig};
use crate::engine::onnx::{OnnxEngine, OnnxOptions};
use crate::engine::{Engine, EngineError};
use crate::error::ServeError;
use crate::frontend::grpc::{self, GrpcOptions};
use crate::frontend::http::{self, HttpLimits};
use crate::frontend::listen::{self, ListenOptions};
use crate::host::{Host, InFlight, UnitDefaults};
use crate::metrics::Metrics;
use crate::registry::{Registry, RegistryConfig};
use crate::runtime_library;
use crate::service::{LoadOverrides, Readiness, Service};

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot listen for {protocol} on {address} (--{protocol}-address, --{protocol}-port)")]
    Listen {
        protocol: &'static str,
        address: SocketAddr,
        source: io::Error,
    },
    #[error(transparent)]
    Library(#[from] runtime_library::NotFound),
    #[error("cannot use the ONNX Runtime library: {0}")]
    Engine(EngineError),
    #[error("{0}")]
    Repository(ServeError),
    #[error("model '{model}' was to be loaded at start-up: {source}")]
    Model { model: String, source: ServeError },
    #[error("cannot start a thread")]
    Thread(#[from] io::Error),
    #[error("cannot set up metrics")]
    Metrics(#[from] metrics_exporter_prometheus::BuildError),
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    service: Service,
    config: Config,
    alarm: Alarm,
    http: Option<SocketAddr>,
    grpc: Option<SocketAddr>,
    metrics: Option<SocketAddr>,
    /// Front ends that hold requests.
    frontends: JoinSet<()>,
    stop_frontends: CancellationToken,
    /// The metrics listener and chores; they outlive the requests.
    chores: JoinSet<()>,
    stop_chores: CancellationToken,
}

impl Server {
    /// Starts a server and loads its start-up models.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        let mut server = Self::listening(config).await?;
        server.load_startup_models().await?;
        Ok(server)
    }

    /// A server that answers requests, its start-up models not yet loaded.
    async fn listening(config: Config) -> Result<Self, StartError> {
        let library = runtime_library::locate(config.engine.library.as_deref())?;
        let engine = OnnxEngine::new(OnnxOptions {
            library,
            intra_op_threads: config.engine.intra_op_threads.map(|count| count as usize),
            inter_op_threads: config.engine.inter_op_threads.map(|count| count as usize),
            global_thread_pool: config.engine.global_thread_pool,
            allow_spinning: config.engine.spinning,
        })
        .map_err(StartError::Engine)?;
        Self::open(config, Arc::new(engine)).await
    }

    async fn open(config: Config, engine: Arc<dyn Engine>) -> Result<Self, StartError> {
        let clock = Clock::start();
        let alarm = Alarm::spawn(clock)?;
        let host = Arc::new(Host {
            clock,
            engine: Arc::clone(&engine),
            alarm: alarm.clone(),
            metrics: Metrics::new()?,
            slots: Mutex::new(RunSlots::new(config.limits.max_concurrent_runs)),
            loads: Arc::new(Semaphore::new(config.load_threads)),
            in_flight: InFlight::new(config.limits.max_bytes_in_flight),
            runtime: tokio::runtime::Handle::current(),
            defaults: UnitDefaults {
                keep_alive: config.keep_alive,
                max_queue: config.limits.max_queue_per_model,
                retry_backoff: Duration::from_secs(1),
                retry_backoff_max: Duration::from_secs(60),
                load_retries: config.load_retries,
            },
        });
        let registry_config = RegistryConfig {
            repositories: config.repositories.clone(),
            control: config.control.clone(),
            config_name: config.model_config_name.clone(),
            defaults: ConfigDefaults {
                auto_complete: config.auto_complete,
                default_max_batch_size: config.engine.default_max_batch_size,
                // Of the shared pool, whose size the engine was told.
                intra_op_threads: None,
                inter_op_threads: None,
            },
        };
        let registry = {
            let host = Arc::clone(&host);
            let opened =
                tokio::task::spawn_blocking(move || Registry::open(registry_config, host)).await;
            opened
                .unwrap_or_else(|_| {
                    Err(ServeError::internal(
                        "opening the model repository panicked",
                    ))
                })
                .map_err(StartError::Repository)?
        };
        let service = Service::new(config.server_id.clone(), registry, Arc::clone(&host));
        let mut server = Self {
            service,
            alarm,
            http: None,
            grpc: None,
            metrics: None,
            frontends: JoinSet::new(),
            stop_frontends: CancellationToken::new(),
            chores: JoinSet::new(),
            stop_chores: CancellationToken::new(),
            config,
        };
        // What does not depend on any model is created now, so that no request waits for it.
        let prepared = tokio::task::spawn_blocking({
            let engine = Arc::clone(&engine);
            move || engine.prepare()
        });
        server.listen().await?;
        let prepared = prepared
            .await
            .unwrap_or_else(|_| Err(EngineError::Failed("the engine panicked".into())));
        let took = prepared.map_err(StartError::Engine)?;
        tracing::info!(engine = engine.describe(), ?took, "engine ready");
        server.spawn_chores(host);
        Ok(server)
    }

    pub fn service(&self) -> &Service {
        &self.service
    }

    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http
    }

    pub fn grpc_address(&self) -> Option<SocketAddr> {
        self.grpc
    }

    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics
    }

    async fn listen(&mut self) -> Result<(), StartError> {
        let limits = &self.config.limits;
        let options = |name| {
            let defaults = ListenOptions::new(name);
            // The default already leaves half of the file descriptors for everything else.
            let max_connections = defaults.max_connections.min(limits.max_connections);
            ListenOptions {
                max_connections,
                ..defaults
            }
        };
        let http = bind("http", self.config.http.as_ref()).await?;
        let grpc = bind("grpc", self.config.grpc.as_ref()).await?;
        let metrics = bind("metrics", self.config.metrics.as_ref()).await?;
        if let Some((listener, address)) = http {
            self.http = Some(address);
            let router = http::router(
                self.service.clone(),
                HttpLimits {
                    max_input_size: limits.http_max_input.0,
                    ..HttpLimits::default()
                },
            );
            let stop = self.stop_frontends.clone().cancelled_owned();
            self.frontends
                .spawn(listen::serve(listener, router, options("http"), stop));
        }
        if let Some((listener, address)) = grpc {
            self.grpc = Some(address);
            let grpc_options = GrpcOptions {
                max_message_size: limits.grpc_max_message.0 as usize,
                max_connections: limits.max_connections,
                compress_responses: self.config.grpc_response_compression,
                ..GrpcOptions::default()
            };
            let stop = self.stop_frontends.clone().cancelled_owned();
            let service = self.service.clone();
            self.frontends.spawn(async move {
                if let Err(error) = grpc::serve(listener, service, grpc_options, stop).await {
                    tracing::error!(%error, "the gRPC front end ended");
                }
            });
        }
        if let Some((listener, address)) = metrics {
            self.metrics = Some(address);
            let router = http::metrics_router(self.service.clone());
            let stop = self.stop_chores.clone().cancelled_owned();
            self.chores
                .spawn(listen::serve(listener, router, options("metrics"), stop));
        }
        Ok(())
    }

    fn spawn_chores(&mut self, host: Arc<Host>) {
        let stop = self.stop_chores.clone();
        self.chores.spawn(async move {
            let mut ticks = tokio::time::interval(Duration::from_secs(5));
            loop {
                tokio::select! {
                    _ = ticks.tick() => host.metrics.upkeep(),
                    () = stop.cancelled() => return,
                }
            }
        });
        let registry = Arc::clone(self.service.registry());
        let control = self.config.control.clone();
        let stop = self.stop_chores.clone();
        self.chores.spawn(async move {
            let work = async {
                match control {
                    ControlMode::Explicit => {}
                    ControlMode::OnDemand => registry.check_all().await,
                    ControlMode::Poll { interval } => {
                        registry.check_all().await;
                        registry.follow(interval).await;
                    }
                }
            };
            tokio::select! {
                () = work => {}
                () = stop.cancelled() => {}
            }
        });
    }

    async fn load_startup_models(&mut self) -> Result<(), StartError> {
        let registry = Arc::clone(self.service.registry());
        let names: Vec<String> = if self.config.startup_models.iter().any(|name| name == "*") {
            registry.names().iter().map(ToString::to_string).collect()
        } else {
            self.config.startup_models.clone()
        };
        let mut loads = JoinSet::new();
        for model in names.clone() {
            let registry = Arc::clone(&registry);
            loads.spawn(async move {
                let result = registry.load_now(&model, LoadOverrides::default()).await;
                (model, result)
            });
        }
        let mut all_loaded = true;
        while let Some(loaded) = loads.join_next().await {
            let Ok((model, result)) = loaded else {
                all_loaded = false;
                continue;
            };
            if let Err(source) = result {
                all_loaded = false;
                if self.config.exit_on_error {
                    return Err(StartError::Model { model, source });
                }
                tracing::error!(%model, error = %source, "start-up model could not be loaded");
            }
        }
        if all_loaded || !self.config.strict_readiness {
            self.service.set_ready();
        } else {
            self.spawn_readiness(names);
        }
        tracing::info!(
            models = self.service.registry().len(),
            ready = self.service.is_ready(),
            "server started"
        );
        Ok(())
    }

    /// Makes the server ready once the models it lacked at start-up were loaded after all.
    fn spawn_readiness(&mut self, required: Vec<String>) {
        let service = self.service.clone();
        let stop = self.stop_chores.clone();
        self.chores.spawn(async move {
            let loaded = async {
                while !service.registry().required_models_serve(&required) {
                    tokio::time::sleep(READINESS_INTERVAL).await;
                }
            };
            tokio::select! {
                () = loaded => service.set_ready(),
                () = stop.cancelled() => {}
            }
        });
    }

    /// Stops in Kubernetes' manner: not ready first, then no new work, then what runs finishes,
    /// all within the exit timeout. Returns whether everything was finished in time.
    pub async fn shutdown(mut self) -> bool {
        self.service.set_readiness(Readiness::Leaving);
        tracing::info!(drain_delay = ?self.config.drain_delay, exit_timeout = ?self.config.exit_timeout, "shutting down");
        tokio::time::sleep(self.config.drain_delay).await;
        self.service.set_readiness(Readiness::Refusing);
        self.stop_frontends.cancel();
        let drained = tokio::time::timeout(self.config.exit_timeout, async {
            while self.frontends.join_next().await.is_some() {}
        });
        let in_time = drained.await.is_ok();
        if !in_time {
            tracing::warn!("requests were still running after the exit timeout; they are given up");
        }
        self.stop_chores.cancel();
        // Nobody waits for a load that is under way; what is warm closes in no time.
        let _ = tokio::time::timeout(CLOSE_PATIENCE, self.service.registry().retire_all()).await;
        self.alarm.stop();
        tracing::info!(in_time, "stopped");
        in_time
    }
}

/// How often models that are missing for readiness are looked for.
const READINESS_INTERVAL: Duration = Duration::from_millis(500);

/// How long closing sessions may delay the end of a server that has no request left.
const CLOSE_PATIENCE: Duration = Duration::from_millis(500);

async fn bind(
    protocol: &'static str,
    config: Option<&ListenConfig>,
) -> Result<Option<(TcpListener, SocketAddr)>, StartError> {
    let Some(&ListenConfig { address }) = config else {
        return Ok(None);
    };
    let failed = |source| StartError::Listen {
        protocol,
        address,
        source,
    };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    tracing::info!(protocol, address = %bound, "listening");
    Ok(Some((listener, bound)))
}

/// Runs a server until `stop` resolves.
pub async fn run(config: Config, stop: impl Future<Output = ()>) -> Result<bool, StartError> {
    tokio::pin!(stop);
    let mut server = tokio::select! {
        listening = Server::listening(config) => listening?,
        () = &mut stop => return Ok(true),
    };
    tokio::select! {
        loaded = server.load_startup_models() => {
            loaded?;
            stop.await;
        }
        // Nobody waits for start-up models any more, but others may have been called already.
        () = &mut stop => {}
    }
    Ok(server.shutdown().await)
}

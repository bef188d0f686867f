//! Builds every part in dependency order, and takes them down again; the only place that knows
//! them all.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::activation::{Activation, ActivationError, Sockets};
use crate::alarm::Alarm;
use crate::clock::Clock;
use crate::config::{Config, ControlMode, ListenConfig};
use crate::engine::{Engine, EngineError};
use crate::error::ServeError;
use crate::events::EventKind;
use crate::extensions::Extensions;
use crate::frontend::grpc::{self, GrpcOptions};
use crate::frontend::http::{self, HttpLimits};
use crate::frontend::listen::{self, ListenOptions};
use crate::frontend::management;
use crate::guard::{Guard, GuardError, Listener};
use crate::host::Host;
use crate::metrics::Metrics;
use crate::priority::ahead;
use crate::runtime_library;
use crate::service::{LoadOverrides, Readiness, Service};
use crate::spans::{Exporter, ExporterError};
use crate::wake;
use crate::webhook::{WebhookError, Webhooks};

mod parts;

pub use parts::open_registry;

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
    Sockets(#[from] ActivationError),
    #[error(transparent)]
    Guard(#[from] GuardError),
    #[error(transparent)]
    Grpc(#[from] grpc::GrpcError),
    #[error(transparent)]
    Priority(#[from] ahead::NotAllowed),
    #[error("cannot use a webhook: {0}")]
    Webhook(#[from] WebhookError),
    #[error(transparent)]
    Library(#[from] runtime_library::NotFound),
    #[error("cannot use the ONNX Runtime library: {0}")]
    Engine(EngineError),
    #[error("{0}")]
    Repository(ServeError),
    #[error("model '{model}' was to be loaded at start-up")]
    Model { model: String, source: ServeError },
    #[error("cannot start a thread")]
    Thread(#[from] io::Error),
    #[error("cannot send spans: {0}")]
    Spans(#[from] ExporterError),
    #[error("cannot set up metrics")]
    Metrics(#[from] metrics_exporter_prometheus::BuildError),
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    service: Service,
    config: Config,
    alarm: Alarm,
    guard: Arc<Guard>,
    http: Option<SocketAddr>,
    grpc: Option<SocketAddr>,
    metrics: Option<SocketAddr>,
    management: Option<SocketAddr>,
    /// Front ends that hold requests.
    frontends: JoinSet<()>,
    stop_frontends: CancellationToken,
    /// The metrics listener and chores; they outlive the requests.
    chores: JoinSet<()>,
    stop_chores: CancellationToken,
    /// Cancelled when nobody has called for as long as `exit_when_idle` says.
    idle_exit: CancellationToken,
    webhooks: Webhooks,
    exporter: Option<Exporter>,
}

/// Why a server ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// Somebody asked for it and wants nothing new to be taken on.
    Asked,
    /// Nobody needs it now: whoever comes at the last moment is still served.
    Idle,
}

impl Server {
    /// Starts a server and loads its start-up models.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        let mut server = Self::listening(config, Sockets::default()).await?;
        server.load_startup_models().await?;
        Ok(server)
    }

    /// A server that answers requests, its start-up models not yet loaded.
    async fn listening(config: Config, sockets: Sockets) -> Result<Self, StartError> {
        let engine = parts::engine(&config)?;
        Self::open(config, engine, sockets).await
    }

    async fn open(
        config: Config,
        engine: Arc<dyn Engine>,
        sockets: Sockets,
    ) -> Result<Self, StartError> {
        ahead::set_up(config.request_priority)?;
        let clock = Clock::start();
        let alarm = Alarm::spawn(clock)?;
        let metrics = Metrics::new()?;
        let (tracer, exporter) = match &config.tracing {
            Some(tracing) => {
                Exporter::spawn(tracing, clock, &metrics).map(|(t, e)| (Some(t), Some(e)))?
            }
            None => (None, None),
        };
        let recording = parts::Recording { metrics, tracer };
        let host = parts::host(&config, &engine, clock, alarm.clone(), recording)?;
        let guard = Guard::open(config.guard.clone(), &host.metrics)?;
        let registry = parts::registry(&config, &host).await?;
        let service = Service::new(config.server_id.clone(), registry, Arc::clone(&host))
            .with_extensions(Extensions::new(&config.extensions));
        let webhooks = Webhooks::spawn(&config.webhooks, &config.server_id, &host)?;
        let mut server = Self {
            service,
            alarm,
            guard,
            http: None,
            grpc: None,
            metrics: None,
            management: None,
            frontends: JoinSet::new(),
            stop_frontends: CancellationToken::new(),
            chores: JoinSet::new(),
            stop_chores: CancellationToken::new(),
            idle_exit: CancellationToken::new(),
            webhooks,
            exporter,
            config,
        };
        // What does not depend on any model is created now, so that no request waits for it.
        let prepared = tokio::task::spawn_blocking({
            let engine = Arc::clone(&engine);
            move || engine.prepare()
        });
        server.listen(sockets).await?;
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

    pub fn management_address(&self) -> Option<SocketAddr> {
        self.management
    }

    async fn listen(&mut self, sockets: Sockets) -> Result<(), StartError> {
        let limits = &self.config.limits;
        let clients = &limits.clients;
        let max_connections = |parts| listen::descriptors(parts).min(limits.max_connections);
        let options = |name, queue_survives| ListenOptions {
            max_connections: max_connections(match name {
                "http" => INFERENCE_SHARE,
                _ => SIDE_SHARE,
            }),
            queue_survives,
            header_timeout: clients.header_timeout,
            idle_timeout: clients.idle_timeout,
            http2_idle_timeout: clients.http2_idle_timeout,
            max_headers: clients.max_headers,
            max_header_bytes: clients.max_header_size.0 as usize,
            max_header_list: clients.max_header_list.0 as u32,
            max_concurrent_streams: clients.max_streams,
            ..ListenOptions::new(name)
        };
        let http_survives = sockets.http.is_some();
        let grpc_survives = sockets.grpc.is_some();
        let metrics_survives = sockets.metrics.is_some();
        let http = bind("http", self.config.http.as_ref(), sockets.http).await?;
        let grpc = bind("grpc", self.config.grpc.as_ref(), sockets.grpc).await?;
        let metrics = bind("metrics", self.config.metrics.as_ref(), sockets.metrics).await?;
        let own = self.config.guard.management.as_ref();
        let management = bind("management", own, None).await?;
        // Sockets that were handed over are not where the settings say.
        for (_, address) in [&http, &grpc, &metrics, &management].into_iter().flatten() {
            self.config.guard.check_exposure(*address)?;
        }
        let http_limits = HttpLimits {
            max_input_size: limits.http_max_input.0,
            page: self.config.page,
            body_progress_timeout: clients.body_timeout,
            max_chunks: clients.max_chunks,
            request: clients.request,
        };
        let grpc_options = GrpcOptions {
            max_message_size: limits.grpc_max_message.0 as usize,
            max_connections: max_connections(INFERENCE_SHARE),
            max_concurrent_streams: clients.max_streams,
            max_stream_requests: clients.max_stream_requests,
            max_header_list: clients.max_header_list.0 as u32,
            header_timeout: clients.header_timeout,
            idle_timeout: clients.http2_idle_timeout,
            body_patience: clients.body_timeout,
            max_connection_age: clients.max_connection_age,
            request: clients.request,
            compress_responses: self.config.grpc_response_compression,
            idle_after: self.config.idle_after,
            queue_survives: grpc_survives,
            door: self.guard.door(Listener::Grpc, grpc::methods::need),
            ..GrpcOptions::default()
        };
        if let Some((listener, address)) = management {
            self.management = Some(address);
            let router = management::router(
                self.service.clone(),
                http_limits.clone(),
                grpc_options.clone(),
                self.stop_frontends.clone(),
            )?;
            let options = ListenOptions {
                door: self.guard.door(Listener::Management, management::need),
                ..options("management", false)
            };
            let stop = self.stop_frontends.clone().cancelled_owned();
            self.frontends
                .spawn(listen::serve(listener, router, options, stop));
        }
        if let Some((listener, address)) = http {
            self.http = Some(address);
            let router = http::router(self.service.clone(), http_limits);
            let options = ListenOptions {
                door: self.guard.door(Listener::Http, http::routes::need),
                ..options("http", http_survives)
            };
            let stop = self.stop_frontends.clone().cancelled_owned();
            self.frontends
                .spawn(listen::serve(listener, router, options, stop));
        }
        if let Some((listener, address)) = grpc {
            self.grpc = Some(address);
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
            let options = ListenOptions {
                door: self.guard.door(Listener::Metrics, http::metrics_need),
                ..options("metrics", metrics_survives)
            };
            let stop = self.stop_chores.clone().cancelled_owned();
            self.chores
                .spawn(listen::serve(listener, router, options, stop));
        }
        Ok(())
    }

    fn spawn_chores(&mut self, host: Arc<Host>) {
        let stop = self.stop_chores.clone();
        let metrics = host.metrics.clone();
        self.chores.spawn(async move {
            let mut ticks = tokio::time::interval(Duration::from_secs(5));
            loop {
                tokio::select! {
                    _ = ticks.tick() => metrics.upkeep(),
                    () = stop.cancelled() => return,
                }
            }
        });
        let stop = self.stop_chores.clone();
        self.chores
            .spawn(async move { wake::watch_memory(&host, stop).await });
        let files = Arc::clone(&self.guard).follow_files(self.stop_chores.clone());
        self.chores.spawn(files);
        let registry = Arc::clone(self.service.registry());
        let control = self.config.control.clone();
        let stop = self.stop_chores.clone();
        self.chores.spawn(async move {
            let work = async {
                match control {
                    ControlMode::Explicit => registry.reach_all().await,
                    ControlMode::OnDemand => {
                        registry.check_all().await;
                        registry.reach_all().await;
                    }
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
        self.watch_idleness();
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

    /// Tells when the server is idle and when it is not any more, and when it is time to go.
    fn watch_idleness(&mut self) {
        let host = Arc::clone(self.service.host());
        // Time counts from when the server could first be called.
        host.activity.touch();
        let exit_when_idle = self.config.exit_when_idle;
        let idle_after = self.config.idle_after;
        // The event comes before the end.
        let patience = exit_when_idle.map_or(idle_after, |exit| exit.min(idle_after));
        let (stop, idle_exit) = (self.stop_chores.clone(), self.idle_exit.clone());
        self.chores.spawn(async move {
            let activity = &host.activity;
            let watch = async {
                loop {
                    let idle_for = activity.idle_for(patience).await;
                    tracing::debug!(?idle_for, "idle");
                    host.events.publish_server(EventKind::Idle { idle_for });
                    // None when somebody has called since.
                    let known = activity.quiet_since();
                    let is_over = || known.is_none() || activity.quiet_since() != known;
                    let long_enough = async {
                        match exit_when_idle {
                            Some(exit) => activity.idle_for(exit).await,
                            None => std::future::pending().await,
                        }
                    };
                    tokio::select! {
                        biased;
                        () = activity.until(is_over) => {}
                        _ = long_enough => return idle_exit.cancel(),
                    }
                    host.events.publish_server(EventKind::Active);
                }
            };
            tokio::select! {
                () = watch => {}
                () = stop.cancelled() => {}
            }
        });
    }

    /// Stops in Kubernetes' manner: not ready first, then no new work, then what runs finishes,
    /// all within the exit timeout. Returns whether everything was finished in time.
    pub async fn shutdown(self) -> bool {
        self.end(Ending::Asked).await
    }

    /// Has what is being prepared given up, and waits for that: its draft goes with it.
    async fn stop_preparing(&self) {
        let wake = &self.service.host().wake;
        let Some(preparation) = &wake.preparation else {
            return;
        };
        preparation.stop();
        let stopped = tokio::time::timeout(PREPARING_PATIENCE, async {
            while !wake.preparers.is_idle() {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        });
        if stopped.await.is_err() {
            tracing::warn!("a preparation is cut off: whoever opens the store next clears it up");
        }
    }

    async fn end(mut self, ending: Ending) -> bool {
        self.service.set_readiness(Readiness::Leaving);
        tracing::info!(?ending, drain_delay = ?self.config.drain_delay, exit_timeout = ?self.config.exit_timeout, "shutting down");
        if ending == Ending::Asked {
            tokio::time::sleep(self.config.drain_delay).await;
            self.service.set_readiness(Readiness::Refusing);
        }
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
        self.stop_preparing().await;
        self.webhooks.flush(FLUSH_PATIENCE).await;
        if let Some(exporter) = self.exporter {
            exporter.flush(FLUSH_PATIENCE).await;
        }
        self.alarm.stop();
        tracing::info!(in_time, "stopped");
        in_time
    }
}

/// The part of the file descriptors that connections of HTTP, and those of gRPC, may take.
const INFERENCE_SHARE: u64 = 4;
/// The part that connections for metrics, and those for management, may take.
const SIDE_SHARE: u64 = 16;

/// How often models that are missing for readiness are looked for.
const READINESS_INTERVAL: Duration = Duration::from_millis(500);

/// How long closing sessions may delay the end of a server that has no request left.
const CLOSE_PATIENCE: Duration = Duration::from_millis(500);

/// How long a preparation under way may delay the end: no step of it can be interrupted.
const PREPARING_PATIENCE: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// How long undelivered webhook messages, and then spans, may delay the end.
const FLUSH_PATIENCE: Duration = Duration::from_secs(5);

async fn bind(
    protocol: &'static str,
    config: Option<&ListenConfig>,
    handed_over: Option<std::net::TcpListener>,
) -> Result<Option<(TcpListener, SocketAddr)>, StartError> {
    let Some(&ListenConfig { address }) = config else {
        return match handed_over {
            Some(_) => Err(ActivationError::SwitchedOff(protocol).into()),
            None => Ok(None),
        };
    };
    let failed = |source| StartError::Listen {
        protocol,
        address,
        source,
    };
    let is_handed_over = handed_over.is_some();
    let listener = match handed_over {
        Some(listener) => TcpListener::from_std(listener),
        None => TcpListener::bind(address).await,
    };
    let listener = listener.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    if is_handed_over {
        tracing::info!(
            protocol,
            "the socket was handed over: address and port settings are not used"
        );
    }
    tracing::info!(protocol, address = %bound, "listening");
    Ok(Some((listener, bound)))
}

/// Runs a server until `stop` resolves, or until it was idle for as long as it is configured to.
pub async fn run(
    config: Config,
    activation: &Activation,
    stop: impl Future<Output = ()>,
) -> Result<bool, StartError> {
    tokio::pin!(stop);
    let notifier = activation.notifier();
    let sockets = activation.sockets()?;
    let mut server = tokio::select! {
        listening = Server::listening(config, sockets) => listening?,
        () = &mut stop => return Ok(true),
    };
    let ending = tokio::select! {
        loaded = server.load_startup_models() => {
            loaded?;
            notifier.ready();
            tokio::select! {
                () = &mut stop => Ending::Asked,
                () = server.idle_exit.cancelled() => Ending::Idle,
            }
        }
        // Nobody waits for start-up models any more, but others may have been called already.
        () = &mut stop => Ending::Asked,
    };
    notifier.stopping();
    Ok(server.end(ending).await)
}

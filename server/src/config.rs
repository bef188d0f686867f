//! The server's settings: raw structs as files and flags have them, resolved once into a
//! [`Config`] whose fields cannot be wrong. A flag wins over the environment, the environment
//! over the file, the file over the default.

pub(crate) mod extensions;
pub(crate) mod file;
pub(crate) mod guard;
pub(crate) mod isolation;
#[cfg(test)]
pub(crate) mod keys;
mod limits;
pub(crate) mod remote;
pub(crate) mod tracing;
pub(crate) mod wake;
mod webhooks;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use dormouse_core::id::ByteSize;

use crate::cli::serve::ServeArgs;
use crate::guard::GuardConfig;
pub use extensions::ExtensionsConfig;
pub use file::{FileConfig, MemoryBudgetSetting, parse_span};
pub use isolation::{IsolationConfig, IsolationMode, IsolationRule, Pattern};
pub use limits::ClientLimits;
pub use remote::RemoteConfig;
pub use tracing::{OtlpProtocol, TracingConfig};
pub use wake::WakeConfig;
pub use webhooks::{Endpoint, Secret, WebhookConfig};

/// Who decides which models can be called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlMode {
    /// Every model of the repository, on demand.
    OnDemand,
    /// Those that were loaded through the API or named at start-up.
    Explicit,
    /// Every model, and the repository is looked at again and again.
    Poll { interval: Duration },
}

/// Where a protocol listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenConfig {
    pub address: SocketAddr,
}

/// What is logged, how and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogConfig {
    pub format: LogFormat,
    pub verbose: u32,
    pub info: bool,
    pub warning: bool,
    pub error: bool,
    pub file: Option<PathBuf>,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One line of text per event.
    #[default]
    #[value(alias = "ISO8601")]
    Default,
    /// One JSON object per event.
    Json,
}

/// What threads that take requests are to those that compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RequestPriority {
    /// In real time where the system allows that.
    #[default]
    Auto,
    /// In real time; the server does not start without.
    Realtime,
    /// As any other thread.
    Normal,
}

/// Settings of the ONNX Runtime engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineConfig {
    pub library: Option<PathBuf>,
    pub intra_op_threads: Option<u32>,
    pub inter_op_threads: Option<u32>,
    pub global_thread_pool: bool,
    pub spinning: bool,
    pub default_max_batch_size: u32,
}

/// Bounds on what requests may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    pub http_max_input: ByteSize,
    pub grpc_max_message: ByteSize,
    pub max_queue_per_model: usize,
    pub max_bytes_in_flight: ByteSize,
    pub max_connections: usize,
    pub max_concurrent_runs: usize,
    pub clients: ClientLimits,
}

/// Everything a server needs to know to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub server_id: String,
    pub request_priority: RequestPriority,
    /// Folders, and addresses of remote repositories.
    pub repositories: Vec<PathBuf>,
    pub remote: RemoteConfig,
    pub control: ControlMode,
    /// Models loaded before the server is ready; `*` stands for all.
    pub startup_models: Vec<String>,
    pub strict_readiness: bool,
    pub exit_on_error: bool,
    pub exit_timeout: Duration,
    pub drain_delay: Duration,
    pub auto_complete: bool,
    pub model_config_name: Option<String>,
    pub http: Option<ListenConfig>,
    pub grpc: Option<ListenConfig>,
    pub metrics: Option<ListenConfig>,
    pub grpc_response_compression: bool,
    /// Whether the page is served at `/` of the HTTP port.
    pub page: bool,
    pub load_threads: usize,
    pub load_retries: u32,
    pub wake: WakeConfig,
    /// Who may do what.
    pub guard: GuardConfig,
    pub extensions: ExtensionsConfig,
    pub isolation: IsolationConfig,
    /// How long nobody must have called before the server calls itself idle.
    pub idle_after: Duration,
    /// The process ends after being idle this long.
    pub exit_when_idle: Option<Duration>,
    pub webhooks: Vec<WebhookConfig>,
    pub limits: Limits,
    pub engine: EngineConfig,
    pub log: LogConfig,
    /// None: nothing is recorded.
    pub tracing: Option<TracingConfig>,
}

/// Loads and runs share the runtime's 512 threads for blocking work with reading files.
const MAX_LOAD_THREADS: usize = 256;
const MAX_CONCURRENT_RUNS: usize = 128;
const DEFAULT_IDLE_AFTER: Duration = Duration::from_secs(60);

/// A setting that cannot be used, with the name under which it was given.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the configuration file {}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{}: {message}", path.display())]
    Syntax { path: PathBuf, message: String },
    #[error("{setting}: {message}")]
    Invalid {
        setting: &'static str,
        message: String,
    },
}

impl Config {
    /// Joins flags (which already carry the environment) with the file they name.
    pub fn resolve(args: &ServeArgs) -> Result<Self, ConfigError> {
        let file = match &args.config {
            Some(path) => FileConfig::read(path)?,
            None => FileConfig::default(),
        };
        Self::join(args, file)
    }

    fn join(args: &ServeArgs, file: FileConfig) -> Result<Self, ConfigError> {
        let repositories = if args.model_repository.is_empty() {
            file.repository.paths.clone()
        } else {
            args.model_repository.clone()
        };
        if repositories.is_empty() {
            return Err(invalid(
                "--model-repository",
                "at least one model repository directory is needed; name it with this flag, with \
                 DORMOUSE_MODEL_REPOSITORY or as repository.paths in the file of --config",
            ));
        }
        let remote = RemoteConfig::join(&args.remote, &file.repository, &repositories)?;
        let backend = backend_settings(&args.backend_config)?;
        let interval = args
            .repository_poll_secs
            .or(file.repository.poll_secs)
            .unwrap_or(15);
        let control = match args
            .model_control_mode
            .or(file.repository.control_mode)
            .unwrap_or_default()
        {
            file::ControlModeName::None => ControlMode::OnDemand,
            file::ControlModeName::Explicit => ControlMode::Explicit,
            file::ControlModeName::Poll if interval == 0 => {
                return Err(invalid(
                    "--repository-poll-secs",
                    "must be at least 1 in control mode 'poll'",
                ));
            }
            file::ControlModeName::Poll => ControlMode::Poll {
                interval: Duration::from_secs(interval),
            },
        };
        let startup_models = if args.load_model.is_empty() {
            file.repository.load_models
        } else {
            args.load_model.clone()
        };
        let auto_complete = match (args.disable_auto_complete_config, args.strict_model_config) {
            (Some(disabled), _) => !disabled,
            (None, Some(strict)) => !strict,
            (None, None) => file.repository.auto_complete.unwrap_or(true),
        };
        let guard = guard::join(
            &args.guard,
            guard::GuardSections {
                tls: file.tls,
                auth: file.auth,
                management: file.management,
                quotas: file.quotas,
            },
        )?;
        let everywhere = Some(guard.default_address());
        let http = listen(
            args.allow_http.or(file.http.enabled).unwrap_or(true),
            args.http_address
                .as_deref()
                .or(file.http.address.as_deref())
                .or(everywhere),
            args.http_port.or(file.http.port).unwrap_or(8000),
            "--http-address",
        )?;
        let grpc = listen(
            args.allow_grpc.or(file.grpc.enabled).unwrap_or(true),
            args.grpc_address
                .as_deref()
                .or(file.grpc.address.as_deref())
                .or(everywhere),
            args.grpc_port.or(file.grpc.port).unwrap_or(8001),
            "--grpc-address",
        )?;
        // As in Triton, metrics listen where HTTP does unless told otherwise.
        let metrics = listen(
            args.allow_metrics.or(file.metrics.enabled).unwrap_or(true),
            args.metrics_address
                .as_deref()
                .or(file.metrics.address.as_deref())
                .or(args.http_address.as_deref())
                .or(file.http.address.as_deref())
                .or(everywhere),
            args.metrics_port.or(file.metrics.port).unwrap_or(8002),
            "--metrics-address",
        )?;
        if http.is_none() && grpc.is_none() {
            return Err(invalid(
                "--allow-http",
                "HTTP and gRPC are both switched off: nothing could reach the server",
            ));
        }
        guard::check_exposure(
            &guard,
            [
                ("--http-address", http.as_ref()),
                ("--grpc-address", grpc.as_ref()),
                ("--metrics-address", metrics.as_ref()),
                ("--management-address", guard.management.as_ref()),
            ],
        )?;
        let grpc_max_message = args
            .grpc_max_input_size
            .or(file.grpc.max_input_size)
            .unwrap_or(ByteSize::mib(64));
        if grpc_max_message.0 > u64::from(u32::MAX >> 1) {
            return Err(invalid(
                "--grpc-max-input-size",
                "a gRPC message holds at most 2147483647 bytes",
            ));
        }
        let load_threads = args
            .model_load_thread_count
            .or(file.repository.load_threads)
            .unwrap_or(4);
        if load_threads == 0 {
            return Err(invalid("--model-load-thread-count", "must be at least 1"));
        }
        // Runs share the threads with loads: these must never take them all.
        if load_threads > MAX_LOAD_THREADS {
            return Err(invalid(
                "--model-load-thread-count",
                format!("must be at most {MAX_LOAD_THREADS}"),
            ));
        }
        let defaults = Limits::default();
        let limits = Limits {
            http_max_input: args
                .http_max_input_size
                .or(file.http.max_input_size)
                .unwrap_or(defaults.http_max_input),
            grpc_max_message,
            max_queue_per_model: file
                .limits
                .max_queue_per_model
                .unwrap_or(defaults.max_queue_per_model)
                .max(1),
            max_bytes_in_flight: file
                .limits
                .max_request_bytes_in_flight
                .unwrap_or(defaults.max_bytes_in_flight),
            max_connections: file
                .limits
                .max_connections
                .unwrap_or(defaults.max_connections)
                .max(1),
            max_concurrent_runs: file
                .limits
                .max_concurrent_runs
                .unwrap_or(defaults.max_concurrent_runs),
            clients: ClientLimits::join(&file.limits)?,
        };
        if !(1..=MAX_CONCURRENT_RUNS).contains(&limits.max_concurrent_runs) {
            return Err(invalid(
                "limits.max_concurrent_runs",
                format!("expected 1 to {MAX_CONCURRENT_RUNS}"),
            ));
        }
        let exit_when_idle = args
            .exit_when_idle
            .or(file.lifecycle.exit_when_idle.map(|idle| idle.0));
        if exit_when_idle.is_some_and(|idle| idle.is_zero()) {
            return Err(invalid(
                "--exit-when-idle",
                "must be longer than 0s: nothing could ever be served",
            ));
        }
        let idle_after = file
            .lifecycle
            .idle_after
            .map_or(DEFAULT_IDLE_AFTER, |idle| idle.0);
        if idle_after.is_zero() {
            return Err(invalid("lifecycle.idle_after", "must be longer than 0s"));
        }
        Ok(Self {
            request_priority: args
                .request_priority
                .or(file.request_priority)
                .unwrap_or_default(),
            server_id: args
                .id
                .clone()
                .or(file.id)
                .unwrap_or_else(|| "dormouse".to_owned()),
            repositories,
            remote,
            control,
            startup_models,
            strict_readiness: args
                .strict_readiness
                .or(file.repository.strict_readiness)
                .unwrap_or(true),
            exit_on_error: args
                .exit_on_error
                .or(file.repository.exit_on_error)
                .unwrap_or(true),
            exit_timeout: Duration::from_secs(
                args.exit_timeout_secs
                    .or(file.shutdown.timeout_secs)
                    .unwrap_or(30),
            ),
            drain_delay: args
                .drain_delay
                .or(file.shutdown.drain_delay.map(|delay| delay.0))
                .unwrap_or_default(),
            auto_complete,
            model_config_name: args
                .model_config_name
                .clone()
                .or(file.repository.config_name),
            http,
            grpc,
            metrics,
            grpc_response_compression: args
                .grpc_infer_response_compression_level
                .as_deref()
                .is_some_and(|level| level != "none"),
            page: args.page.or(file.http.page).unwrap_or(true),
            load_threads,
            load_retries: args
                .model_load_retry_count
                .or(file.repository.load_retries)
                .unwrap_or(0),
            guard,
            wake: WakeConfig::join(&args.wake, file.lifecycle, file.store),
            extensions: ExtensionsConfig::join(
                &args.extensions,
                file.shared_memory,
                file.response_cache,
                file.limits.max_override_bytes,
            )?,
            isolation: IsolationConfig::join(&args.isolation, file.isolation)?,
            idle_after,
            exit_when_idle,
            webhooks: webhooks::resolve(file.webhooks)?,
            limits,
            engine: EngineConfig {
                library: args.onnxruntime_library.clone().or(file.engine.library),
                intra_op_threads: backend.intra_op_threads.or(file.engine.intra_op_threads),
                inter_op_threads: backend.inter_op_threads.or(file.engine.inter_op_threads),
                global_thread_pool: backend
                    .global_thread_pool
                    .or(file.engine.global_thread_pool)
                    .unwrap_or(true),
                spinning: file.engine.spinning.unwrap_or(true),
                default_max_batch_size: backend
                    .default_max_batch_size
                    .or(file.engine.default_max_batch_size)
                    .unwrap_or(4),
            },
            tracing: tracing::resolve(&args.tracing, file.tracing)?,
            log: LogConfig {
                format: args.log_format.or(file.log.format).unwrap_or_default(),
                verbose: args.log_verbose.or(file.log.verbose).unwrap_or(0),
                info: args.log_info.or(file.log.info).unwrap_or(true),
                warning: args.log_warning.or(file.log.warning).unwrap_or(true),
                error: args.log_error.or(file.log.error).unwrap_or(true),
                file: args.log_file.clone().or(file.log.file),
            },
        })
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            http_max_input: ByteSize::mib(64),
            grpc_max_message: ByteSize::mib(64),
            max_queue_per_model: 10_000,
            max_bytes_in_flight: ByteSize::gib(4),
            max_connections: 10_000,
            max_concurrent_runs: 64,
            clients: ClientLimits::default(),
        }
    }
}

fn invalid(setting: &'static str, message: impl Into<String>) -> ConfigError {
    ConfigError::Invalid {
        setting,
        message: message.into(),
    }
}

fn listen(
    enabled: bool,
    address: Option<&str>,
    port: u16,
    setting: &'static str,
) -> Result<Option<ListenConfig>, ConfigError> {
    if !enabled {
        return Ok(None);
    }
    let address = address.unwrap_or("0.0.0.0");
    let ip: IpAddr = match address {
        "localhost" => [127, 0, 0, 1].into(),
        _ => address
            .parse()
            .map_err(|_| invalid(setting, format!("'{address}' is not an IP address")))?,
    };
    Ok(Some(ListenConfig {
        address: SocketAddr::new(ip, port),
    }))
}

#[derive(Debug, Default)]
struct BackendSettings {
    intra_op_threads: Option<u32>,
    inter_op_threads: Option<u32>,
    global_thread_pool: Option<bool>,
    default_max_batch_size: Option<u32>,
}

/// Reads Triton's `--backend-config=onnxruntime,key=value`; other backends' settings are warned
/// about, unknown keys of ours refused.
fn backend_settings(entries: &[String]) -> Result<BackendSettings, ConfigError> {
    const SETTING: &str = "--backend-config";
    let mut settings = BackendSettings::default();
    let mut other = BTreeMap::new();
    for entry in entries {
        let (backend, assignment) = entry.split_once(',').unwrap_or(("", entry));
        let Some((key, value)) = assignment.split_once('=') else {
            return Err(invalid(
                SETTING,
                format!("'{entry}' is not of the form <backend>,<setting>=<value>"),
            ));
        };
        if !matches!(backend, "" | "onnxruntime") {
            other.insert(backend.to_owned(), ());
            continue;
        }
        let number = || -> Result<u32, ConfigError> {
            value.parse().map_err(|_| {
                invalid(
                    SETTING,
                    format!("{key} must be a whole number, not '{value}'"),
                )
            })
        };
        match key {
            "default-max-batch-size" => settings.default_max_batch_size = Some(number()?),
            // Zero means "choose yourself", as in ONNX Runtime.
            "intra_op_thread_count" => {
                settings.intra_op_threads = Some(number()?).filter(|&count| count > 0)
            }
            "inter_op_thread_count" => {
                settings.inter_op_threads = Some(number()?).filter(|&count| count > 0)
            }
            "enable-global-threadpool" => settings.global_thread_pool = Some(number()? != 0),
            "auto-complete-config" | "backend-directory" | "min-compute-capability" => {
                ::tracing::warn!("{SETTING} {key} has no meaning here and is ignored");
            }
            _ => {
                return Err(invalid(
                    SETTING,
                    format!(
                        "unknown setting '{key}': known are default-max-batch-size, intra_op_thread_count, \
                         inter_op_thread_count and enable-global-threadpool"
                    ),
                ));
            }
        }
    }
    for backend in other.keys() {
        ::tracing::warn!(
            "{SETTING} for backend '{backend}' is ignored: this server runs ONNX models only"
        );
    }
    Ok(settings)
}

#[cfg(test)]
mod tests;

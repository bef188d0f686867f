//! The command line of `dormouse serve`: Triton's flags with Triton's defaults where they exist.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use dormouse_core::id::ByteSize;

use crate::config::extensions::ExtensionsArgs;
use crate::config::file::ControlModeName;
use crate::config::guard::GuardArgs;
use crate::config::isolation::IsolationArgs;
use crate::config::remote::RemoteArgs;
use crate::config::tracing::TracingArgs;
use crate::config::wake::WakeArgs;
use crate::config::{LogFormat, RequestPriority, parse_span};

/// Flags of `dormouse serve`. A flag wins over its environment variable, that over the file.
#[derive(Args, Clone, Debug, Default)]
pub struct ServeArgs {
    /// Configuration file (TOML) for what flags do not cover
    #[arg(long, value_name = "FILE", env = "DORMOUSE_CONFIG")]
    pub config: Option<PathBuf>,
    /// Name of this server, as its metadata tells it
    #[arg(long, value_name = "NAME", env = "DORMOUSE_ID")]
    pub id: Option<String>,
    /// Whether threads that take requests go ahead of those that compute: in real time where the
    /// system allows it (auto), in real time or not at all (realtime), or like any other (normal)
    /// [default: auto]
    #[arg(
        long,
        value_name = "PRIORITY",
        env = "DORMOUSE_REQUEST_PRIORITY",
        hide_possible_values = true
    )]
    pub request_priority: Option<RequestPriority>,

    /// Directory or address (s3://, gs://, as://, https://) with one folder per model; may be given
    /// several times
    #[arg(
        long,
        visible_alias = "model-store",
        value_name = "DIR",
        env = "DORMOUSE_MODEL_REPOSITORY",
        value_delimiter = ',',
        help_heading = "Models"
    )]
    pub model_repository: Vec<PathBuf>,
    /// Which models can be called: every one on demand (none), those loaded through the API
    /// (explicit), or every one with changes picked up (poll)
    #[arg(
        long,
        value_name = "MODE",
        env = "DORMOUSE_MODEL_CONTROL_MODE",
        help_heading = "Models"
    )]
    pub model_control_mode: Option<ControlModeName>,
    /// Model to load before the server is ready; '*' for all; may be given several times
    #[arg(
        long,
        value_name = "NAME",
        env = "DORMOUSE_LOAD_MODEL",
        value_delimiter = ',',
        help_heading = "Models"
    )]
    pub load_model: Vec<String>,
    /// Seconds between looks at the repository in control mode 'poll' [default: 15]
    #[arg(
        long,
        value_name = "SECONDS",
        env = "DORMOUSE_REPOSITORY_POLL_SECS",
        help_heading = "Models"
    )]
    pub repository_poll_secs: Option<u64>,
    /// Models loading at the same time [default: 4]
    #[arg(
        long,
        value_name = "COUNT",
        env = "DORMOUSE_MODEL_LOAD_THREAD_COUNT",
        help_heading = "Models"
    )]
    pub model_load_thread_count: Option<usize>,
    /// Further attempts before a load counts as failed [default: 0]
    #[arg(
        long,
        value_name = "COUNT",
        env = "DORMOUSE_MODEL_LOAD_RETRY_COUNT",
        help_heading = "Models"
    )]
    pub model_load_retry_count: Option<u32>,
    /// Require complete configurations instead of completing them from the graphs
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, env = "DORMOUSE_DISABLE_AUTO_COMPLETE_CONFIG", help_heading = "Models")]
    pub disable_auto_complete_config: Option<bool>,
    /// Older spelling of --disable-auto-complete-config
    #[arg(long, hide = true, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool)]
    pub strict_model_config: Option<bool>,
    /// Use configs/NAME.pbtxt of models that have one
    #[arg(
        long,
        value_name = "NAME",
        env = "DORMOUSE_MODEL_CONFIG_NAME",
        help_heading = "Models"
    )]
    pub model_config_name: Option<String>,
    /// Setting of the engine, as onnxruntime,KEY=VALUE; keys: default-max-batch-size,
    /// intra_op_thread_count, inter_op_thread_count, enable-global-threadpool
    #[arg(long, value_name = "BACKEND,KEY=VALUE", help_heading = "Models")]
    pub backend_config: Vec<String>,
    /// ONNX Runtime library to use instead of searching for one
    #[arg(long, value_name = "FILE", help_heading = "Models")]
    pub onnxruntime_library: Option<PathBuf>,

    #[command(flatten)]
    pub remote: RemoteArgs,

    #[command(flatten)]
    pub wake: WakeArgs,
    #[command(flatten)]
    pub guard: GuardArgs,

    #[command(flatten)]
    pub extensions: ExtensionsArgs,

    #[command(flatten)]
    pub isolation: IsolationArgs,

    /// Ready only while every model that was asked to be loaded is [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, env = "DORMOUSE_STRICT_READINESS", help_heading = "Start and stop")]
    pub strict_readiness: Option<bool>,
    /// End at once when a model named by --load-model cannot be loaded [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, env = "DORMOUSE_EXIT_ON_ERROR", help_heading = "Start and stop")]
    pub exit_on_error: Option<bool>,
    /// Seconds that running requests get to finish after SIGTERM [default: 30]
    #[arg(
        long,
        value_name = "SECONDS",
        env = "DORMOUSE_EXIT_TIMEOUT_SECS",
        help_heading = "Start and stop"
    )]
    pub exit_timeout_secs: Option<u64>,
    /// How long to go on serving after SIGTERM while reporting not ready [default: 0s]
    #[arg(long, value_name = "DURATION", env = "DORMOUSE_DRAIN_DELAY", value_parser = parse_span, help_heading = "Start and stop")]
    pub drain_delay: Option<Duration>,
    /// End the process when nobody called for this long, such as 10m; with socket activation the
    /// next connection starts it again
    #[arg(long, value_name = "DURATION", env = "DORMOUSE_EXIT_WHEN_IDLE", value_parser = parse_span, help_heading = "Start and stop")]
    pub exit_when_idle: Option<Duration>,

    /// Serve HTTP [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, env = "DORMOUSE_ALLOW_HTTP", help_heading = "Listeners")]
    pub allow_http: Option<bool>,
    /// HTTP address [default: 0.0.0.0 with authentication or --allow-unauthenticated, else
    /// 127.0.0.1]
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "DORMOUSE_HTTP_ADDRESS",
        help_heading = "Listeners"
    )]
    pub http_address: Option<String>,
    /// HTTP port, 0 for any free one [default: 8000]
    #[arg(
        long,
        value_name = "PORT",
        env = "DORMOUSE_HTTP_PORT",
        help_heading = "Listeners"
    )]
    pub http_port: Option<u16>,
    /// Largest HTTP request body, after decompression [default: 64MiB]
    #[arg(
        long,
        value_name = "BYTES",
        env = "DORMOUSE_HTTP_MAX_INPUT_SIZE",
        help_heading = "Listeners"
    )]
    pub http_max_input_size: Option<ByteSize>,
    /// Serve the page at / of the HTTP port [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, env = "DORMOUSE_PAGE", help_heading = "Listeners")]
    pub page: Option<bool>,
    /// Serve gRPC [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, env = "DORMOUSE_ALLOW_GRPC", help_heading = "Listeners")]
    pub allow_grpc: Option<bool>,
    /// gRPC address [default: as --http-address]
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "DORMOUSE_GRPC_ADDRESS",
        help_heading = "Listeners"
    )]
    pub grpc_address: Option<String>,
    /// gRPC port, 0 for any free one [default: 8001]
    #[arg(
        long,
        value_name = "PORT",
        env = "DORMOUSE_GRPC_PORT",
        help_heading = "Listeners"
    )]
    pub grpc_port: Option<u16>,
    /// Largest gRPC message, after decompression, up to 2147483647 [default: 64MiB]
    #[arg(
        long,
        value_name = "BYTES",
        env = "DORMOUSE_GRPC_MAX_INPUT_SIZE",
        help_heading = "Listeners"
    )]
    pub grpc_max_input_size: Option<ByteSize>,
    /// Compress gRPC answers for clients that accept it: none, low, medium or high [default: none]
    #[arg(long, value_name = "LEVEL", value_parser = ["none", "low", "medium", "high"], help_heading = "Listeners")]
    pub grpc_infer_response_compression_level: Option<String>,
    /// Serve Prometheus metrics [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, env = "DORMOUSE_ALLOW_METRICS", help_heading = "Listeners")]
    pub allow_metrics: Option<bool>,
    /// Metrics address [default: the HTTP address]
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "DORMOUSE_METRICS_ADDRESS",
        help_heading = "Listeners"
    )]
    pub metrics_address: Option<String>,
    /// Metrics port, 0 for any free one [default: 8002]
    #[arg(
        long,
        value_name = "PORT",
        env = "DORMOUSE_METRICS_PORT",
        help_heading = "Listeners"
    )]
    pub metrics_port: Option<u16>,

    #[command(flatten)]
    pub tracing: TracingArgs,

    /// How log lines look [default: default]
    #[arg(
        long,
        value_name = "FORMAT",
        env = "DORMOUSE_LOG_FORMAT",
        help_heading = "Logging"
    )]
    pub log_format: Option<LogFormat>,
    /// Log details: 0 none, 1 decisions, 2 everything [default: 0]
    #[arg(long, value_name = "LEVEL", num_args = 0..=1, default_missing_value = "1", env = "DORMOUSE_LOG_VERBOSE", help_heading = "Logging")]
    pub log_verbose: Option<u32>,
    /// Log information [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, help_heading = "Logging")]
    pub log_info: Option<bool>,
    /// Log warnings [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, help_heading = "Logging")]
    pub log_warning: Option<bool>,
    /// Log errors [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, help_heading = "Logging")]
    pub log_error: Option<bool>,
    /// Write the log to a file instead of standard error
    #[arg(
        long,
        value_name = "FILE",
        env = "DORMOUSE_LOG_FILE",
        help_heading = "Logging"
    )]
    pub log_file: Option<PathBuf>,
}

/// Triton's spellings of a boolean.
pub(crate) fn parse_bool(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" | "on" => Ok(true),
        "false" | "0" | "off" => Ok(false),
        _ => Err("expected true, false, 1 or 0".to_owned()),
    }
}

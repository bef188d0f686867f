//! The TOML file, field by field.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use dormouse_core::id::ByteSize;
use dormouse_model_store::spec::KeepAliveSpec;
use serde::{Deserialize, Deserializer};

use super::extensions::{ResponseCacheSection, SharedMemorySection};
use super::guard::{AuthSection, ManagementSection, TlsSection};
use super::isolation::IsolationSection;
use super::tracing::TracingSection;
use super::wake::{LifecycleSection, StoreSection};
use super::webhooks::WebhookSection;
use super::{ConfigError, LogFormat, RequestPriority};
use crate::guard::QuotaSection;

/// A server's configuration file. Every field is optional and every unknown one refused.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FileConfig {
    pub id: Option<String>,
    pub request_priority: Option<RequestPriority>,
    pub repository: RepositorySection,
    pub http: HttpSection,
    pub grpc: GrpcSection,
    pub metrics: MetricsSection,
    pub lifecycle: LifecycleSection,
    pub store: StoreSection,
    pub shared_memory: SharedMemorySection,
    pub response_cache: ResponseCacheSection,
    pub isolation: IsolationSection,
    pub limits: LimitsSection,
    pub engine: EngineSection,
    pub shutdown: ShutdownSection,
    pub log: LogSection,
    pub webhooks: Vec<WebhookSection>,
    pub tracing: TracingSection,
    pub tls: TlsSection,
    pub auth: AuthSection,
    pub management: ManagementSection,
    pub quotas: QuotaSection,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RepositorySection {
    pub paths: Vec<PathBuf>,
    pub control_mode: Option<ControlModeName>,
    pub poll_secs: Option<u64>,
    pub load_models: Vec<String>,
    pub strict_readiness: Option<bool>,
    pub exit_on_error: Option<bool>,
    pub auto_complete: Option<bool>,
    pub config_name: Option<String>,
    pub load_threads: Option<usize>,
    pub load_retries: Option<u32>,
    pub cache_dir: Option<PathBuf>,
    #[serde(deserialize_with = "from_text")]
    pub cache_size: Option<ByteSize>,
    #[serde(deserialize_with = "from_text")]
    pub chunk_size: Option<ByteSize>,
    pub concurrency: Option<usize>,
    pub retries: Option<u32>,
    #[serde(deserialize_with = "from_text")]
    pub deadline: Option<Span>,
    pub allow: Vec<String>,
    pub ca_file: Option<PathBuf>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpSection {
    pub enabled: Option<bool>,
    pub address: Option<String>,
    pub port: Option<u16>,
    #[serde(deserialize_with = "from_text")]
    pub max_input_size: Option<ByteSize>,
    pub page: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GrpcSection {
    pub enabled: Option<bool>,
    pub address: Option<String>,
    pub port: Option<u16>,
    #[serde(deserialize_with = "from_text")]
    pub max_input_size: Option<ByteSize>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsSection {
    pub enabled: Option<bool>,
    pub address: Option<String>,
    pub port: Option<u16>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsSection {
    pub max_queue_per_model: Option<usize>,
    #[serde(deserialize_with = "from_text")]
    pub max_request_bytes_in_flight: Option<ByteSize>,
    pub max_connections: Option<usize>,
    pub max_concurrent_runs: Option<usize>,
    #[serde(deserialize_with = "from_text")]
    pub max_override_bytes: Option<ByteSize>,
    pub max_streams: Option<u32>,
    pub max_stream_requests: Option<usize>,
    pub max_headers: Option<usize>,
    #[serde(deserialize_with = "from_text")]
    pub max_header_size: Option<ByteSize>,
    #[serde(deserialize_with = "from_text")]
    pub max_header_list: Option<ByteSize>,
    #[serde(deserialize_with = "from_text")]
    pub header_timeout: Option<Span>,
    #[serde(deserialize_with = "from_text")]
    pub idle_timeout: Option<Span>,
    #[serde(deserialize_with = "from_text")]
    pub http2_idle_timeout: Option<Span>,
    #[serde(deserialize_with = "from_text")]
    pub body_timeout: Option<Span>,
    pub max_chunks: Option<u64>,
    #[serde(deserialize_with = "from_text")]
    pub max_connection_age: Option<Span>,
    pub max_json_depth: Option<u32>,
    pub max_json_nodes: Option<u32>,
    pub max_tensors: Option<usize>,
    pub max_dimensions: Option<usize>,
    pub max_elements: Option<u64>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineSection {
    pub library: Option<PathBuf>,
    pub intra_op_threads: Option<u32>,
    pub inter_op_threads: Option<u32>,
    pub global_thread_pool: Option<bool>,
    pub spinning: Option<bool>,
    pub default_max_batch_size: Option<u32>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ShutdownSection {
    pub timeout_secs: Option<u64>,
    #[serde(deserialize_with = "from_text")]
    pub drain_delay: Option<Span>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogSection {
    pub format: Option<LogFormat>,
    pub verbose: Option<u32>,
    pub info: Option<bool>,
    pub warning: Option<bool>,
    pub error: Option<bool>,
    pub file: Option<PathBuf>,
}

/// Triton's names of the control modes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ControlModeName {
    /// Every model of the repository, on demand.
    #[default]
    None,
    /// Only models that are loaded through the API or with --load-model.
    Explicit,
    /// Every model; changes in the repository are picked up.
    Poll,
}

/// `"30s"`, `"5m"`, `"adaptive"`, `"forever"` or `"off"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepAlive(pub KeepAliveSpec);

impl FromStr for KeepAlive {
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(match text {
            "adaptive" => KeepAliveSpec::Adaptive,
            "forever" => KeepAliveSpec::Forever,
            "off" => KeepAliveSpec::Off,
            _ => KeepAliveSpec::For(duration(
                text,
                "a duration such as 10s, 5m or 1h, or adaptive, forever or off",
            )?),
        }))
    }
}

/// A setting's text that means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("accepted is {accepted}")]
pub struct InvalidSetting {
    accepted: &'static str,
}

/// A duration and nothing else.
pub fn parse_span(text: &str) -> Result<Duration, InvalidSetting> {
    duration(text, "a duration such as 500ms, 10s, 5m or 1h")
}

fn duration(text: &str, accepted: &'static str) -> Result<Duration, InvalidSetting> {
    humantime::parse_duration(text).map_err(|_| InvalidSetting { accepted })
}

/// `"30s"`, `"5m"`, or `"never"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParkAfter(pub Option<Duration>);

impl FromStr for ParkAfter {
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "never" => Ok(Self(None)),
            _ => duration(text, "a duration such as 10s, 5m or 1h, or never")
                .map(Some)
                .map(Self),
        }
    }
}

/// `"8GiB"`, `"auto"` or `"unlimited"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryBudgetSetting {
    /// From what the container or the host has.
    Auto,
    Bytes(ByteSize),
    Unlimited,
}

impl FromStr for MemoryBudgetSetting {
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "unlimited" => Ok(Self::Unlimited),
            _ => match text.parse() {
                Ok(ByteSize(0)) => Err(InvalidSetting {
                    accepted: "a size above zero such as 8GiB (none would be left for any model), or auto or unlimited",
                }),
                Ok(bytes) => Ok(Self::Bytes(bytes)),
                Err(_) => Err(InvalidSetting {
                    accepted: "a size such as 512MiB or 8GiB, or auto or unlimited",
                }),
            },
        }
    }
}

/// `"500ms"`, `"30s"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_span(text).map(Self)
    }
}

impl FileConfig {
    /// Reads a file; errors name it and point into it.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        toml::from_str(&text).map_err(|error| ConfigError::Syntax {
            path: path.to_owned(),
            message: error.to_string(),
        })
    }
}

pub(crate) fn from_text<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr,
    T::Err: std::fmt::Display,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

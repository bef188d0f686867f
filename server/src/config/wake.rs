//! Settings of how models wake and fall asleep: the prepared store, the memory budget, the stages
//! of the exit, and a switch for each mechanism.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use dormouse_core::id::ByteSize;
use dormouse_model_store::spec::KeepAliveSpec;
use serde::Deserialize;

use super::file::{KeepAlive, MemoryBudgetSetting, ParkAfter, Span, from_text};
use crate::cli::serve::parse_bool;

/// How models wake and fall asleep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WakeConfig {
    /// For models that do not say it themselves.
    pub keep_alive: KeepAliveSpec,
    /// None: an idle model is not parked on its way to sleep.
    pub park_after: Option<Duration>,
    pub memory_budget: MemoryBudgetSetting,
    /// Where prepared models are kept; none: in the cache directory.
    pub store: Option<PathBuf>,
    pub store_max_size: ByteSize,
    /// Models are woken from the store if it has them.
    pub use_store: bool,
    /// Models are prepared in the background after their first load.
    pub prepare: bool,
    /// Weights are brought in while the session is built.
    pub overlap: bool,
    /// One session and one copy of the weights serve every run.
    pub sharing: bool,
    /// An idle model is parked before it is closed.
    pub staging: bool,
}

impl Default for WakeConfig {
    fn default() -> Self {
        Self {
            keep_alive: KeepAliveSpec::For(Duration::from_secs(300)),
            park_after: Some(Duration::from_secs(60)),
            memory_budget: MemoryBudgetSetting::Auto,
            store: None,
            store_max_size: ByteSize::gib(20),
            use_store: true,
            prepare: true,
            overlap: true,
            sharing: true,
            staging: true,
        }
    }
}

/// Flags of `dormouse serve` about waking and sleeping.
#[derive(Args, Clone, Debug, Default)]
pub struct WakeArgs {
    /// How long an idle model stays loaded, such as 30s or 5m; adaptive learns it from the
    /// model's calls, forever keeps it, off closes it at once [default: 5m]
    #[arg(
        long,
        value_name = "DURATION",
        env = "DORMOUSE_KEEP_ALIVE",
        help_heading = "Sleep and wake"
    )]
    pub keep_alive: Option<KeepAlive>,
    /// Idle time after which a model gives up its weights' memory and keeps its session, or never
    /// [default: 60s]
    #[arg(
        long,
        value_name = "DURATION",
        env = "DORMOUSE_PARK_AFTER",
        help_heading = "Sleep and wake"
    )]
    pub park_after: Option<ParkAfter>,
    /// Memory that models may hold, such as 8GiB; auto takes most of what the container or the
    /// host has; unlimited [default: auto]
    #[arg(
        long,
        value_name = "BYTES",
        env = "DORMOUSE_MEMORY_BUDGET",
        help_heading = "Sleep and wake"
    )]
    pub memory_budget: Option<MemoryBudgetSetting>,
    /// Where prepared models are kept [default: 'store' in the cache directory]
    #[arg(
        long,
        value_name = "DIR",
        env = "DORMOUSE_STORE",
        help_heading = "Sleep and wake"
    )]
    pub store: Option<PathBuf>,
    /// Disk space for prepared models; the longest unused leave first [default: 20GiB]
    #[arg(
        long,
        value_name = "BYTES",
        env = "DORMOUSE_STORE_MAX_SIZE",
        help_heading = "Sleep and wake"
    )]
    pub store_max_size: Option<ByteSize>,
    /// Wake models from the prepared store [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, env = "DORMOUSE_PREPARED_STORE", help_heading = "Sleep and wake")]
    pub prepared_store: Option<bool>,
    /// Prepare models in the background after their first load [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, env = "DORMOUSE_BACKGROUND_PREPARATION", help_heading = "Sleep and wake")]
    pub background_preparation: Option<bool>,
    /// Bring weights in while the session is built [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, env = "DORMOUSE_OVERLAP", help_heading = "Sleep and wake")]
    pub overlap: Option<bool>,
    /// Serve every run of a model by one session over one copy of its weights; when off, each of
    /// an instance group's instances has its own [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, env = "DORMOUSE_SHARING", help_heading = "Sleep and wake")]
    pub sharing: Option<bool>,
    /// Park idle models before closing them [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, env = "DORMOUSE_STAGED_EXIT", help_heading = "Sleep and wake")]
    pub staged_exit: Option<bool>,
}

/// The file's `[lifecycle]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LifecycleSection {
    #[serde(deserialize_with = "from_text")]
    pub keep_alive: Option<KeepAlive>,
    #[serde(deserialize_with = "from_text")]
    pub park_after: Option<ParkAfter>,
    #[serde(deserialize_with = "from_text")]
    pub memory_budget: Option<MemoryBudgetSetting>,
    pub overlap: Option<bool>,
    pub sharing: Option<bool>,
    pub staged_exit: Option<bool>,
    #[serde(deserialize_with = "from_text")]
    pub idle_after: Option<Span>,
    #[serde(deserialize_with = "from_text")]
    pub exit_when_idle: Option<Span>,
}

/// The file's `[store]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StoreSection {
    pub dir: Option<PathBuf>,
    #[serde(deserialize_with = "from_text")]
    pub max_size: Option<ByteSize>,
    pub enabled: Option<bool>,
    pub background_preparation: Option<bool>,
}

impl WakeConfig {
    /// Joins flags with the file's sections.
    pub(super) fn join(args: &WakeArgs, lifecycle: LifecycleSection, store: StoreSection) -> Self {
        let defaults = Self::default();
        Self {
            keep_alive: args
                .keep_alive
                .or(lifecycle.keep_alive)
                .map_or(defaults.keep_alive, |keep_alive| keep_alive.0),
            park_after: args
                .park_after
                .or(lifecycle.park_after)
                .map_or(defaults.park_after, |park_after| park_after.0),
            memory_budget: args
                .memory_budget
                .or(lifecycle.memory_budget)
                .unwrap_or(defaults.memory_budget),
            store: args.store.clone().or(store.dir),
            store_max_size: args
                .store_max_size
                .or(store.max_size)
                .unwrap_or(defaults.store_max_size),
            use_store: args.prepared_store.or(store.enabled).unwrap_or(true),
            prepare: args
                .background_preparation
                .or(store.background_preparation)
                .unwrap_or(true),
            overlap: args.overlap.or(lifecycle.overlap).unwrap_or(true),
            sharing: args.sharing.or(lifecycle.sharing).unwrap_or(true),
            staging: args.staged_exit.or(lifecycle.staged_exit).unwrap_or(true),
        }
    }
}

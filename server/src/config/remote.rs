//! Settings of remote repositories: where their files are kept, how they are fetched, and which
//! may be reached.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use dormouse_core::id::ByteSize;

use super::file::RepositorySection;
use super::{ConfigError, invalid, parse_span};
use crate::remote::Location;

/// How remote repositories are reached and kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteConfig {
    /// Where fetched files are kept; none: in the cache directory.
    pub cache_dir: Option<PathBuf>,
    pub cache_size: ByteSize,
    /// Bytes of a part of a file.
    pub chunk: ByteSize,
    /// Parts on their way at a time.
    pub concurrency: usize,
    /// Attempts after the first.
    pub retries: u32,
    /// How long one part may take.
    pub deadline: Duration,
    /// How long listing a repository may take, with all its pages and attempts.
    pub listing: Duration,
    /// How long to wait for a connection, an answer, or the next piece of it.
    pub patience: Duration,
    /// Empty: exactly the repositories that are given.
    pub allow: Vec<Location>,
    /// Certificate authorities beside the usual ones.
    pub ca_file: Option<PathBuf>,
}

impl Default for RemoteConfig {
    fn default() -> Self {
        Self {
            cache_dir: None,
            cache_size: ByteSize::gib(20),
            chunk: ByteSize::mib(8),
            concurrency: 8,
            retries: 4,
            deadline: Duration::from_secs(120),
            listing: Duration::from_secs(600),
            patience: Duration::from_secs(20),
            allow: Vec::new(),
            ca_file: None,
        }
    }
}

/// Flags of commands that read repositories.
#[derive(Args, Clone, Debug, Default)]
pub struct RemoteArgs {
    /// Where files of remote repositories are kept [default: 'repository' in the cache directory]
    #[arg(
        long,
        value_name = "DIR",
        env = "DORMOUSE_REPOSITORY_CACHE",
        help_heading = "Remote repositories"
    )]
    pub repository_cache: Option<PathBuf>,
    /// Disk space for them; the longest unused leave first [default: 20GiB]
    #[arg(
        long,
        value_name = "BYTES",
        env = "DORMOUSE_REPOSITORY_CACHE_SIZE",
        help_heading = "Remote repositories"
    )]
    pub repository_cache_size: Option<ByteSize>,
    /// Files are fetched in parts of this size [default: 8MiB]
    #[arg(
        long,
        value_name = "BYTES",
        env = "DORMOUSE_REPOSITORY_CHUNK_SIZE",
        help_heading = "Remote repositories"
    )]
    pub repository_chunk_size: Option<ByteSize>,
    /// Parts that are fetched at the same time [default: 8]
    #[arg(
        long,
        value_name = "COUNT",
        env = "DORMOUSE_REPOSITORY_CONCURRENCY",
        help_heading = "Remote repositories"
    )]
    pub repository_concurrency: Option<usize>,
    /// Further attempts at a part before the fetch has failed [default: 4]
    #[arg(
        long,
        value_name = "COUNT",
        env = "DORMOUSE_REPOSITORY_RETRIES",
        help_heading = "Remote repositories"
    )]
    pub repository_retries: Option<u32>,
    /// How long one attempt at a part may take [default: 2m]
    #[arg(long, value_name = "DURATION", env = "DORMOUSE_REPOSITORY_DEADLINE", value_parser = parse_span, help_heading = "Remote repositories")]
    pub repository_deadline: Option<Duration>,
    /// Address that repositories and redirects may lie in; may be given several times [default:
    /// exactly the given repositories]
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "DORMOUSE_ALLOW_REPOSITORY",
        value_delimiter = ',',
        help_heading = "Remote repositories"
    )]
    pub allow_repository: Vec<String>,
    /// Certificate authorities (PEM) to trust beside the usual ones
    #[arg(
        long,
        value_name = "FILE",
        env = "DORMOUSE_REPOSITORY_CA_FILE",
        help_heading = "Remote repositories"
    )]
    pub repository_ca_file: Option<PathBuf>,
}

const CHUNKS: std::ops::RangeInclusive<u64> = (64 << 10)..=(256 << 20);
const MAX_CONCURRENCY: usize = 256;
const MAX_RETRIES: u32 = 20;

impl RemoteConfig {
    /// Joins flags with the file's section, and checks the repositories against them.
    pub(super) fn join(
        args: &RemoteArgs,
        file: &RepositorySection,
        repositories: &[PathBuf],
    ) -> Result<Self, ConfigError> {
        let defaults = Self::default();
        let allow = match args.allow_repository.is_empty() {
            true => &file.allow,
            false => &args.allow_repository,
        };
        let allow = allow.iter().map(|address| {
            Location::parse(address)
                .map_err(|error| invalid("--allow-repository", format!("'{address}': {error}")))
        });
        let config = Self {
            cache_dir: args
                .repository_cache
                .clone()
                .or_else(|| file.cache_dir.clone()),
            cache_size: args
                .repository_cache_size
                .or(file.cache_size)
                .unwrap_or(defaults.cache_size),
            chunk: args
                .repository_chunk_size
                .or(file.chunk_size)
                .unwrap_or(defaults.chunk),
            concurrency: args
                .repository_concurrency
                .or(file.concurrency)
                .unwrap_or(defaults.concurrency),
            retries: args
                .repository_retries
                .or(file.retries)
                .unwrap_or(defaults.retries),
            deadline: args
                .repository_deadline
                .or(file.deadline.map(|span| span.0))
                .unwrap_or(defaults.deadline),
            listing: defaults.listing,
            patience: defaults.patience,
            allow: allow.collect::<Result<_, _>>()?,
            ca_file: args
                .repository_ca_file
                .clone()
                .or_else(|| file.ca_file.clone()),
        };
        if !CHUNKS.contains(&config.chunk.0) {
            return Err(invalid(
                "--repository-chunk-size",
                "expected 64KiB to 256MiB",
            ));
        }
        if !(1..=MAX_CONCURRENCY).contains(&config.concurrency) {
            return Err(invalid(
                "--repository-concurrency",
                format!("expected 1 to {MAX_CONCURRENCY}"),
            ));
        }
        if config.retries > MAX_RETRIES {
            return Err(invalid(
                "--repository-retries",
                format!("expected at most {MAX_RETRIES}"),
            ));
        }
        if config.deadline.is_zero() {
            return Err(invalid(
                "--repository-deadline",
                "must be longer than 0s: nothing could ever be fetched",
            ));
        }
        for repository in repositories {
            let Some(name) = repository
                .to_str()
                .filter(|name| Location::is_address(name))
            else {
                continue;
            };
            let checked = Location::parse(name).and_then(|location| location.check(&config.allow));
            checked.map_err(|error| {
                // What is wrong with it may be that a password is in it.
                let shown = name.split_once('@').map_or(name, |(_, rest)| rest);
                invalid("--model-repository", format!("'{shown}': {error}"))
            })?;
        }
        Ok(config)
    }
}

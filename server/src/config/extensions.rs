//! Settings of the protocol's extensions: shared memory, the response cache, files in loads.

use clap::Args;
use dormouse_core::id::ByteSize;
use serde::Deserialize;

use super::file::from_text;
use super::{ConfigError, invalid};
use crate::cli::serve::parse_bool;
use crate::shared_memory::SharedMemoryLimits;

/// What the server offers beyond the protocol's core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtensionsConfig {
    /// None: clients may not use shared memory.
    pub shared_memory: Option<SharedMemoryLimits>,
    /// None: answers are not kept.
    pub cache_size: Option<ByteSize>,
    /// The files that load requests brought, of all models together.
    pub max_override_bytes: ByteSize,
}

impl Default for ExtensionsConfig {
    fn default() -> Self {
        Self {
            shared_memory: None,
            cache_size: None,
            max_override_bytes: ByteSize::gib(1),
        }
    }
}

/// Flags of `dormouse serve` about extensions.
#[derive(Args, Clone, Debug, Default)]
pub struct ExtensionsArgs {
    /// Let clients on this host register system shared memory for tensors [default: false]
    #[arg(long, visible_alias = "allow-shared-memory", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, env = "DORMOUSE_ALLOW_CLIENT_SHM", help_heading = "Extensions")]
    pub allow_client_shm: Option<bool>,
    /// Keep answers of models whose configuration enables response_cache, in this much memory, as
    /// local,size=BYTES
    #[arg(
        long,
        value_name = "CACHE,KEY=VALUE",
        env = "DORMOUSE_CACHE_CONFIG",
        help_heading = "Extensions"
    )]
    pub cache_config: Vec<String>,
    /// Older spelling of --cache-config=local,size=BYTES
    #[arg(long, hide = true, value_name = "BYTES")]
    pub response_cache_byte_size: Option<ByteSize>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SharedMemorySection {
    pub allowed: Option<bool>,
    pub max_regions: Option<usize>,
    #[serde(deserialize_with = "from_text")]
    pub max_bytes: Option<ByteSize>,
    pub key_prefixes: Option<Vec<String>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ResponseCacheSection {
    #[serde(deserialize_with = "from_text")]
    pub size: Option<ByteSize>,
}

impl ExtensionsConfig {
    pub(super) fn join(
        args: &ExtensionsArgs,
        shared_memory: SharedMemorySection,
        cache: ResponseCacheSection,
        max_override_bytes: Option<ByteSize>,
    ) -> Result<Self, ConfigError> {
        let defaults = SharedMemoryLimits::default();
        let allowed = args
            .allow_client_shm
            .or(shared_memory.allowed)
            .unwrap_or(false);
        let limits = SharedMemoryLimits {
            max_regions: shared_memory.max_regions.unwrap_or(defaults.max_regions),
            max_bytes: shared_memory.max_bytes.unwrap_or(defaults.max_bytes),
            key_prefixes: key_prefixes(shared_memory.key_prefixes.unwrap_or_default())?,
        };
        let cache_size = match cache_flag(&args.cache_config)? {
            Some(size) => Some(size),
            None => args.response_cache_byte_size.or(cache.size),
        };
        Ok(Self {
            shared_memory: allowed.then_some(limits),
            cache_size: cache_size.filter(|size| size.0 > 0),
            max_override_bytes: max_override_bytes.unwrap_or(Self::default().max_override_bytes),
        })
    }
}

/// Keys are compared without the slash that `shm_open` wants, so prefixes may have one, too.
fn key_prefixes(given: Vec<String>) -> Result<Vec<String>, ConfigError> {
    let prefixes = given.iter().map(|prefix| prefix.trim_start_matches('/'));
    let prefixes: Vec<String> = prefixes.map(str::to_owned).collect();
    if prefixes.iter().any(String::is_empty) {
        return Err(invalid(
            "shared_memory.key_prefixes",
            "every key begins with an empty prefix: leave the list empty to permit all",
        ));
    }
    Ok(prefixes)
}

/// Reads Triton's `--cache-config=local,size=1048576`.
fn cache_flag(entries: &[String]) -> Result<Option<ByteSize>, ConfigError> {
    const SETTING: &str = "--cache-config";
    let mut size = None;
    for entry in entries {
        let Some((cache, setting)) = entry.split_once(',') else {
            return Err(invalid(
                SETTING,
                format!("'{entry}' is not of the form local,size=BYTES"),
            ));
        };
        if cache != "local" {
            return Err(invalid(
                SETTING,
                format!(
                    "there is no cache '{cache}': answers are kept in the server's memory, as 'local'"
                ),
            ));
        }
        let value = setting.strip_prefix("size=").ok_or_else(|| {
            invalid(
                SETTING,
                format!("unknown setting '{setting}' of the local cache: known is size=BYTES"),
            )
        })?;
        let value = value.parse().map_err(|_| {
            invalid(
                SETTING,
                format!("'{value}' is not a size such as 64MiB or 67108864"),
            )
        })?;
        size = Some(value);
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_of_keys_go_without_their_slash() {
        let read = |given: &[&str]| key_prefixes(given.iter().map(|&one| one.into()).collect());
        assert_eq!(read(&["/a-", "b"]).unwrap(), ["a-", "b"]);
        assert!(read(&[]).unwrap().is_empty());
        for given in ["", "/"] {
            let error = read(&["a", given]).unwrap_err().to_string();
            assert!(error.contains("shared_memory.key_prefixes"), "{error}");
        }
    }

    #[test]
    fn tritons_cache_flag_is_understood_and_others_are_refused() {
        let read = |entry: &str| cache_flag(&[entry.to_owned()]);
        assert_eq!(read("local,size=1048576").unwrap(), Some(ByteSize::mib(1)));
        assert_eq!(read("local,size=2MiB").unwrap(), Some(ByteSize::mib(2)));
        assert_eq!(cache_flag(&[]).unwrap(), None);
        for entry in ["local", "redis,host=x", "local,ttl=5", "local,size=much"] {
            let error = read(entry).unwrap_err().to_string();
            assert!(error.contains("--cache-config"), "{error}");
        }
    }
}

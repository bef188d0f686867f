//! Model repositories that are elsewhere: in the object stores of the clouds, or on a web server.
//!
//! A repository is known by a listing. Its files are fetched when somebody opens them, into a
//! cache on disk, and are read from there: a sleeping model costs its line in the listing.

mod bucket;
mod cache;
mod credentials;
mod error;
mod fetch;
pub mod index_file;
mod location;
#[cfg(test)]
mod tests;
mod transport;

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use dormouse_core::time::Timestamp;
use dormouse_model_store::repository::{
    FetchError, LocalCopy, RemoteFile, RemoteFiles, RemoteListing,
};
use http::{HeaderValue, Uri};
use parking_lot::Mutex;

use crate::clock::Clock;
use crate::config::RemoteConfig;
use crate::metrics::Metrics;

use bucket::Bucket;
use cache::{Cache, Key};
pub use error::{ErrorKind, RemoteError};
use fetch::{FetchOptions, Fetcher, Wanted, persevere};
pub use location::{Location, LocationError};
use transport::{Addresses, Transport, TransportOptions, tls_config};

/// A token for web servers, sent as `Authorization: Bearer`.
const TOKEN_VARIABLE: &str = "DORMOUSE_REPOSITORY_TOKEN";

/// Beyond a part, an answer may have what a listing's page has.
const PAGE: u64 = 64 << 20;

/// Files that are fetched side by side when many are wanted, all of them small.
const SMALL_AT_ONCE: usize = 16;

/// What all remote repositories of a server share.
#[derive(Debug)]
pub struct Remotes {
    config: RemoteConfig,
    tls: Arc<rustls::ClientConfig>,
    fetcher: Arc<Fetcher>,
    clock: Clock,
}

/// When files of a model were fetched, and how much that was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchSpan {
    pub start: Timestamp,
    pub end: Timestamp,
    pub bytes: u64,
}

/// A repository that is elsewhere.
#[derive(Debug)]
pub struct RemoteRepository {
    location: Location,
    address: Arc<str>,
    bucket: Bucket,
    fetcher: Arc<Fetcher>,
    clock: Clock,
    listing: ArcSwap<RemoteListing>,
    /// Why the last listing failed.
    trouble: Mutex<Option<RemoteError>>,
    /// Held while it is listed, so that an older listing never replaces a newer one.
    turn: Mutex<()>,
    /// What was fetched of each model since somebody asked.
    fetched: Mutex<HashMap<String, FetchSpan>>,
}

impl Remotes {
    /// Opens the cache; `folder` is where it is.
    pub fn open(
        config: RemoteConfig,
        folder: &Path,
        clock: Clock,
        metrics: &Metrics,
    ) -> Result<Self, RemoteError> {
        let tls = tls_config(config.ca_file.as_deref())
            .map_err(|error| RemoteError::new(ErrorKind::Refused, error.to_string()))?;
        let options = FetchOptions {
            chunk: config.chunk.0,
            concurrency: config.concurrency,
            retries: config.retries,
            deadline: config.deadline,
            listing: config.listing,
        };
        let cache = Cache::open(folder, config.cache_size)?;
        metrics.repository_series();
        let fetcher = Fetcher::new(cache, options, metrics.clone())?;
        Ok(Self {
            config,
            tls,
            fetcher: Arc::new(fetcher),
            clock,
        })
    }

    /// Opens a repository with what it held when it was last listed; nothing is sent yet.
    pub fn repository(&self, location: Location) -> Result<Arc<RemoteRepository>, RemoteError> {
        let transport = self.transport(&location);
        let bucket = match credentials::open(&location, &transport)? {
            Some(store) => Bucket::objects(store, &location)?,
            None => Bucket::web(transport, &location.to_string(), token()?),
        };
        Ok(self.with_bucket(location, bucket))
    }

    fn transport(&self, location: &Location) -> Transport {
        let is_web = matches!(location, Location::Web { .. });
        let mut allowed = self.config.allow.clone();
        if allowed.is_empty() {
            allowed.push(location.clone());
        }
        Transport::new(TransportOptions {
            patience: self.config.patience,
            tls: Arc::clone(&self.tls),
            addresses: match is_web {
                true => Addresses::Public {
                    listed: listed_addresses(&self.config.allow),
                },
                false => Addresses::Any,
            },
            allowed: is_web.then_some(allowed),
            tags_are_md5: matches!(location, Location::S3 { .. }),
            max_body: self.config.chunk.0.saturating_add(PAGE),
        })
    }

    fn with_bucket(&self, location: Location, bucket: Bucket) -> Arc<RemoteRepository> {
        let address: Arc<str> = location.to_string().into();
        let saved = self.fetcher.cache.saved_listing(&address);
        Arc::new(RemoteRepository {
            location,
            address,
            bucket,
            fetcher: Arc::clone(&self.fetcher),
            clock: self.clock,
            listing: ArcSwap::from_pointee(RemoteListing::of(saved.unwrap_or_default())),
            trouble: Mutex::default(),
            turn: Mutex::default(),
            fetched: Mutex::default(),
        })
    }
}

impl RemoteRepository {
    /// The repository's address.
    pub fn location(&self) -> &Location {
        &self.location
    }

    /// Whether it was never listed.
    pub fn is_unknown(&self) -> bool {
        self.listing.load().files().next().is_none()
    }

    /// Why it could not be listed the last time it was tried.
    pub fn trouble(&self) -> Option<RemoteError> {
        self.trouble.lock().clone()
    }

    /// Lists the repository again. What cannot be listed stays as it was.
    pub fn refresh(&self) -> Result<(), RemoteError> {
        let _turn = self.turn.lock();
        let listed = self.list(None);
        let result = listed.map(|files| {
            let kept = files.clone();
            let listing = RemoteListing::of(files);
            for path in &listing.ignored {
                tracing::warn!(repository = %self.address, path, "a file in the model repository has a name that none may have");
            }
            self.fetcher.cache.save_listing(&self.address, &kept);
            self.listing.store(Arc::new(listing));
        });
        let mut trouble = self.trouble.lock();
        match &result {
            Ok(()) => {
                if trouble.take().is_some() {
                    tracing::info!(repository = %self.address, "the model repository can be reached again");
                }
            }
            Err(error) => {
                if trouble.replace(error.clone()).is_none() {
                    tracing::error!(repository = %self.address, %error, "the model repository cannot be listed: what is known of it and in the cache goes on serving");
                }
            }
        }
        result
    }

    /// Lists one model again.
    pub fn refresh_model(&self, model: &str) -> Result<(), RemoteError> {
        let _turn = self.turn.lock();
        let files = self.list(Some(model))?;
        let found = RemoteListing::of(files);
        let listing = self.listing.load().with_model_of(model, &found);
        self.listing.store(Arc::new(listing));
        Ok(())
    }

    fn list(&self, model: Option<&str>) -> Result<Vec<RemoteFile>, RemoteError> {
        let bucket = self.bucket.clone();
        let model = model.map(str::to_owned);
        let metrics = self.fetcher.metrics.clone();
        let retries = self.fetcher.retries();
        let limit = self.fetcher.listing_limit();
        self.fetcher.wait(async move {
            let listing = persevere(retries, &metrics, || bucket.list(model.as_deref()));
            // Each answer comes in time, but there may always be another.
            let listed = tokio::time::timeout(limit, listing).await;
            listed.unwrap_or_else(|_| {
                Err(RemoteError::new(
                    ErrorKind::Interrupted,
                    format!("it could not be listed within {limit:?}"),
                ))
            })
        })
    }

    /// Whether all of these files are in the cache.
    pub fn has_all<'a>(&self, mut files: impl Iterator<Item = &'a RemoteFile>) -> bool {
        let cache = &self.fetcher.cache;
        files.all(|file| cache.has(&Key::of(&self.address, file)))
    }

    /// Fetches small files, many at a time. Whoever opens one that failed learns why.
    pub fn fetch_small(&self, files: &[RemoteFile]) {
        let missing: Vec<&RemoteFile> = files
            .iter()
            .filter(|file| !self.has_all(std::iter::once(*file)))
            .collect();
        let next = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..SMALL_AT_ONCE.min(missing.len()) {
                scope.spawn(|| {
                    while let Some(file) =
                        missing.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
                    {
                        if self.fetcher.open(&self.wanted(file)).is_err_and(|error| {
                            matches!(error.kind, ErrorKind::Unreachable | ErrorKind::Stopped)
                        }) {
                            return;
                        }
                    }
                });
            }
        });
    }

    /// What was fetched of a model since this was last asked.
    pub fn take_fetched(&self, model: &str) -> Option<FetchSpan> {
        self.fetched.lock().remove(model)
    }

    fn wanted(&self, file: &RemoteFile) -> Wanted {
        Wanted {
            repository: Arc::clone(&self.address),
            bucket: self.bucket.clone(),
            file: file.clone(),
        }
    }

    fn note_fetch(&self, file: &RemoteFile, start: Timestamp, bytes: u64) {
        let Some((model, _)) = file.path.split_once('/') else {
            return;
        };
        let end = self.clock.now();
        let mut fetched = self.fetched.lock();
        let span = fetched.entry(model.to_owned()).or_insert(FetchSpan {
            start,
            end,
            bytes: 0,
        });
        span.start = span.start.min(start);
        span.end = span.end.max(end);
        span.bytes = span.bytes.saturating_add(bytes);
    }
}

impl RemoteFiles for RemoteRepository {
    fn listing(&self) -> Arc<RemoteListing> {
        self.listing.load_full()
    }

    fn open(&self, file: &RemoteFile) -> Result<LocalCopy, FetchError> {
        let start = self.clock.now();
        match self.fetcher.open(&self.wanted(file)) {
            Ok((copy, 0)) => Ok(copy),
            Ok((copy, bytes)) => {
                self.note_fetch(file, start, bytes);
                Ok(copy)
            }
            Err(error) => {
                tracing::warn!(repository = %self.address, path = %file.path, %error, "cannot be fetched");
                let is_other = matches!(
                    error.kind,
                    ErrorKind::Changed | ErrorKind::NotFound | ErrorKind::Damaged
                );
                // So that whoever asks next is given what is there now.
                if is_other && let Some((model, _)) = file.path.split_once('/') {
                    let _ = self.refresh_model(model);
                }
                Err(error.into())
            }
        }
    }
}

fn token() -> Result<Option<HeaderValue>, RemoteError> {
    let Some(token) = std::env::var(TOKEN_VARIABLE)
        .ok()
        .filter(|token| !token.is_empty())
    else {
        return Ok(None);
    };
    let value = HeaderValue::from_str(&format!("Bearer {token}"));
    let mut value = value.map_err(|_| {
        RemoteError::new(
            ErrorKind::Denied,
            format!("the token in {TOKEN_VARIABLE} has characters that no header may have"),
        )
    })?;
    value.set_sensitive(true);
    Ok(Some(value))
}

/// Addresses that were allowed by their numbers.
fn listed_addresses(allowed: &[Location]) -> Vec<IpAddr> {
    let hosts = allowed.iter().filter_map(|location| match location {
        Location::Web { base } => base.parse::<Uri>().ok()?.host().map(str::to_owned),
        _ => None,
    });
    hosts
        .filter_map(|host| host.trim_matches(['[', ']']).parse::<IpAddr>().ok())
        .map(|address| address.to_canonical())
        .collect()
}

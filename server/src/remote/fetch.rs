//! Fetches files into the cache: many parts at a time, each tried again for a while, all of them
//! of the same state of the file.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::id::ByteSize;
use dormouse_model_store::repository::{LocalCopy, RemoteFile};
use futures_util::StreamExt;
use parking_lot::Mutex;
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::bucket::{Bucket, Piece, next_data};
use super::cache::{Cache, Expected, Key, Part, PartWriter};
use super::error::{ErrorKind, RemoteError};
use crate::metrics::Metrics;
use crate::priority::{BACKGROUND_NICENESS, step_back};

/// The first pause before another attempt, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// How often the log tells of a file that takes long.
const TELL_EVERY: Duration = Duration::from_secs(5);

/// Files of at least this size get a line in the log.
const WORTH_TELLING: u64 = 1 << 20;

/// Threads that receive: one decrypts about as much as a fast network brings.
const THREADS: usize = 2;

/// How files are fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FetchOptions {
    /// Bytes of a part.
    pub(super) chunk: u64,
    /// Parts on their way at a time, over all files.
    pub(super) concurrency: usize,
    /// Attempts after the first.
    pub(super) retries: u32,
    /// How long a part may take.
    pub(super) deadline: Duration,
    /// How long listing a repository may take.
    pub(super) listing: Duration,
}

/// Fetches for all repositories of a server.
#[derive(Debug)]
pub(super) struct Fetcher {
    /// Of its own, so that receiving and decrypting give way to serving.
    runtime: Option<Runtime>,
    pub(super) cache: Arc<Cache>,
    options: FetchOptions,
    parts: Arc<Semaphore>,
    pub(super) metrics: Metrics,
    /// Files that are being fetched; whoever wants the same waits for it.
    under_way: Mutex<HashMap<Key, Arc<Mutex<()>>>>,
}

/// What there is to fetch, and from where.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    /// The repository's address.
    pub(super) repository: Arc<str>,
    pub(super) bucket: Bucket,
    pub(super) file: RemoteFile,
}

impl Fetcher {
    pub(super) fn new(
        cache: Cache,
        options: FetchOptions,
        metrics: Metrics,
    ) -> Result<Self, RemoteError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("fetch")
            .on_thread_start(|| step_back(BACKGROUND_NICENESS))
            .enable_all()
            .build()
            .map_err(|error| {
                RemoteError::new(ErrorKind::Stopped, format!("cannot start threads: {error}"))
            })?;
        metrics.repository_cache(cache.size());
        Ok(Self {
            runtime: Some(runtime),
            cache: Arc::new(cache),
            parts: Arc::new(Semaphore::new(options.concurrency)),
            options,
            metrics,
            under_way: Mutex::default(),
        })
    }

    /// Does something on the threads that receive, and waits for it; not for the runtime's threads.
    pub(super) fn wait<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, RemoteError>> + Send + 'static,
    ) -> Result<T, RemoteError> {
        let stopped = || RemoteError::new(ErrorKind::Stopped, "the server is ending".to_owned());
        let runtime = self.runtime.as_ref().ok_or_else(stopped)?;
        let (sender, result) = std::sync::mpsc::sync_channel(1);
        runtime.spawn(async move {
            // Nobody waits any more when the server is ending.
            let _ = sender.send(work.await);
        });
        result.recv().unwrap_or_else(|_| Err(stopped()))
    }

    /// The copy of a file, and how many bytes had to be fetched for it.
    pub(super) fn open(&self, wanted: &Wanted) -> Result<(LocalCopy, u64), RemoteError> {
        let key = Key::of(&wanted.repository, &wanted.file);
        if let Some(copy) = self.cache.find(&key) {
            self.metrics.repository_cache_hit();
            return Ok((copy, 0));
        }
        let turn = Arc::clone(self.under_way.lock().entry(key.clone()).or_default());
        let fetched = {
            let _turn = turn.lock();
            match self.cache.find(&key) {
                Some(copy) => Ok((copy, 0)),
                None => self.fetch(wanted, &key),
            }
        };
        let mut under_way = self.under_way.lock();
        drop(turn);
        if under_way
            .get(&key)
            .is_some_and(|turn| Arc::strong_count(turn) == 1)
        {
            under_way.remove(&key);
        }
        fetched
    }

    fn fetch(&self, wanted: &Wanted, key: &Key) -> Result<(LocalCopy, u64), RemoteError> {
        let started = Instant::now();
        let size = wanted.file.size;
        let path = &wanted.file.path;
        tracing::debug!(repository = %wanted.repository, path, bytes = size, "fetching");
        let mut damaged = None;
        // What came damaged is fetched anew once: it may have been the network.
        for _ in 0..2 {
            let Some(part) = self.cache.begin(key, &wanted.file, self.options.chunk)? else {
                break;
            };
            let transfer = Transfer {
                wanted: wanted.clone(),
                options: self.options,
                parts: Arc::clone(&self.parts),
                metrics: self.metrics.clone(),
            };
            let (part, expected) = self.wait(transfer.run(part))?;
            let is_whole = part.is(&expected);
            match is_whole.map_err(|error| RemoteError::disk("be read", &error))? {
                true => {
                    self.cache
                        .finish(key, &wanted.repository, &wanted.file, part)?;
                    damaged = None;
                    break;
                }
                false => {
                    part.discard();
                    tracing::warn!(repository = %wanted.repository, path, "what came does not have the digest it should have");
                    damaged = Some(RemoteError::new(
                        ErrorKind::Damaged,
                        "what came does not have the digest it should have".to_owned(),
                    ));
                }
            }
        }
        if let Some(damaged) = damaged {
            return Err(damaged);
        }
        let took = started.elapsed();
        self.metrics.repository_fetched(took);
        self.metrics.repository_cache(self.cache.size());
        // Ten thousand configurations are not worth a line each.
        match size >= WORTH_TELLING {
            true => {
                tracing::info!(repository = %wanted.repository, path, bytes = size, ?took, "fetched");
            }
            false => {
                tracing::debug!(repository = %wanted.repository, path, bytes = size, ?took, "fetched");
            }
        }
        let copy = self.cache.find(key).ok_or_else(|| {
            RemoteError::new(
                ErrorKind::Disk,
                "it was removed from the repository cache at once".to_owned(),
            )
        })?;
        Ok((copy, size))
    }

    pub(super) fn retries(&self) -> u32 {
        self.options.retries
    }

    pub(super) fn listing_limit(&self) -> Duration {
        self.options.listing
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// One file on its way.
struct Transfer {
    wanted: Wanted,
    options: FetchOptions,
    parts: Arc<Semaphore>,
    metrics: Metrics,
}

impl Transfer {
    async fn run(self, mut part: Part) -> Result<(Part, Expected), RemoteError> {
        let tag = self.wanted.file.tag.as_deref();
        let sha256 = tag.and_then(|tag| tag.strip_prefix("sha256:"));
        let mut expected = Expected {
            sha256: sha256.map(str::to_owned),
            md5: None,
        };
        let fetched = self.all(&mut part, &mut expected).await;
        // Whatever went wrong, the next attempt goes on from here.
        let kept = tokio::task::spawn_blocking(move || {
            let kept = part.keep();
            (part, kept)
        });
        let (part, kept) = kept.await.map_err(|_| crashed())?;
        fetched?;
        kept.map_err(|error| RemoteError::disk("be written to", &error))?;
        Ok((part, expected))
    }

    async fn all(&self, part: &mut Part, expected: &mut Expected) -> Result<(), RemoteError> {
        let size = self.wanted.file.size;
        let missing = part.missing();
        let mut progress = Progress::new(&self.wanted, &missing);
        let mut missing = missing.into_iter();
        // The first part tells what the others must belong to.
        let Some((index, range)) = missing.next() else {
            return Ok(());
        };
        let asked = (range.end - range.start < size).then(|| range.clone());
        let writer = part.writer();
        let (first, bytes) = self.one(&writer, range.start, asked, None).await?;
        if first.is_whole {
            return self.sequentially(part, &mut progress).await;
        }
        self.written(part, index, bytes)?;
        progress.came(bytes);
        expected.md5 = first.md5.map(|md5| md5.0);
        let tag = first.tag;
        let mut others = futures_util::stream::iter(missing.map(|(index, range)| {
            let read = self.one(&writer, range.start, Some(range.clone()), tag.as_deref());
            async move {
                match read.await? {
                    (piece, _) if piece.is_whole => Err(RemoteError::new(
                        ErrorKind::Malformed,
                        "the server sent a part of the file at first and then no more".to_owned(),
                    )),
                    (_, bytes) => Ok((index, bytes)),
                }
            }
        }))
        .buffer_unordered(self.options.concurrency);
        while let Some(read) = others.next().await {
            let (index, bytes) = read?;
            self.written(part, index, bytes)?;
            progress.came(bytes);
        }
        Ok(())
    }

    /// Notes a part that was written, which now and then waits for the disk.
    fn written(&self, part: &mut Part, index: usize, bytes: u64) -> Result<(), RemoteError> {
        tokio::task::block_in_place(|| part.written(index, bytes))
            .map_err(|error| RemoteError::disk("be written to", &error))
    }

    /// Reads one part and writes it where it belongs; tells how many bytes that were.
    async fn one(
        &self,
        writer: &PartWriter,
        at: u64,
        range: Option<std::ops::Range<u64>>,
        tag: Option<&str>,
    ) -> Result<(Piece, u64), RemoteError> {
        let writer = writer.clone();
        // Held until it is written, so that what is in memory is bounded.
        let _permit = self.parts.acquire().await.map_err(|_| crashed())?;
        let mut piece = persevere(self.options.retries, &self.metrics, || async {
            let read = self
                .wanted
                .bucket
                .read(&self.wanted.file, range.clone(), tag);
            match tokio::time::timeout(self.options.deadline, read).await {
                Ok(read) => read,
                Err(_) => Err(RemoteError::new(
                    ErrorKind::Interrupted,
                    format!("a part did not come within {:?}", self.options.deadline),
                )),
            }
        })
        .await?;
        let bytes = std::mem::take(&mut piece.bytes);
        let length = bytes.len() as u64;
        self.metrics.repository_bytes(length);
        let written = tokio::task::spawn_blocking(move || writer.write(&bytes, at));
        let written = written.await.map_err(|_| crashed())?;
        written.map_err(|error| RemoteError::disk("be written to", &error))?;
        Ok((piece, length))
    }

    /// Reads the whole file from a web server that sends nothing less.
    async fn sequentially(
        &self,
        part: &mut Part,
        progress: &mut Progress,
    ) -> Result<(), RemoteError> {
        let Bucket::Web(web) = &self.wanted.bucket else {
            return Err(RemoteError::new(
                ErrorKind::Malformed,
                "the server sends no parts of files".to_owned(),
            ));
        };
        let _permit = self.parts.acquire().await.map_err(|_| crashed())?;
        let size = self.wanted.file.size;
        // As long as all of its parts together could take.
        let parts = size.div_ceil(self.options.chunk.max(1));
        let parts = u32::try_from(parts).unwrap_or(u32::MAX).max(1);
        let limit = self.options.deadline.saturating_mul(parts);
        let attempt = || async {
            let mut body = web.stream(&self.wanted.file).await?;
            let mut at = 0;
            while let Some(bytes) = next_data(&mut body).await? {
                let length = bytes.len() as u64;
                if length > size - at {
                    return Err(RemoteError::new(
                        ErrorKind::Damaged,
                        format!("more than {size} bytes came"),
                    ));
                }
                let writer = part.writer();
                let written = tokio::task::spawn_blocking(move || writer.write(&bytes, at));
                let written = written.await.map_err(|_| crashed())?;
                written.map_err(|error| RemoteError::disk("be written to", &error))?;
                self.metrics.repository_bytes(length);
                at += length;
            }
            match at == size {
                true => Ok(()),
                false => Err(RemoteError::new(
                    ErrorKind::Damaged,
                    format!("{size} bytes were expected, {at} came"),
                )),
            }
        };
        let attempt = || async {
            let whole = tokio::time::timeout(limit, attempt()).await;
            whole.unwrap_or_else(|_| {
                Err(RemoteError::new(
                    ErrorKind::Interrupted,
                    format!("the file did not come within {limit:?}"),
                ))
            })
        };
        persevere(self.options.retries, &self.metrics, attempt).await?;
        progress.came(size);
        Ok(())
    }
}

fn crashed() -> RemoteError {
    RemoteError::new(ErrorKind::Stopped, "the server is ending".to_owned())
}

/// Tries again what may well succeed, after pauses that grow and that no two wait alike.
pub(super) async fn persevere<T, F>(
    retries: u32,
    metrics: &Metrics,
    mut attempt: impl FnMut() -> F,
) -> Result<T, RemoteError>
where
    F: Future<Output = Result<T, RemoteError>>,
{
    let mut pause = FIRST_PAUSE;
    let mut tried = 0;
    loop {
        let error = match attempt().await {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        metrics.repository_error(error.kind);
        if !error.kind.is_passing() || tried >= retries {
            return Err(error);
        }
        tried += 1;
        let waited = pause.mul_f64(0.5 + 0.5 * fraction());
        tracing::debug!(%error, ?waited, tried, "trying again");
        tokio::time::sleep(waited).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Some number from 0 to 1, another each time.
fn fraction() -> f64 {
    let random = RandomState::new().build_hasher().finish();
    (random >> 11) as f64 / (1u64 << 53) as f64
}

/// Tells in the log how far a large file is.
struct Progress {
    path: String,
    size: u64,
    came: u64,
    told: Instant,
    started: Instant,
    at_start: u64,
}

impl Progress {
    fn new(wanted: &Wanted, missing: &[(usize, std::ops::Range<u64>)]) -> Self {
        let left: u64 = missing
            .iter()
            .map(|(_, range)| range.end - range.start)
            .sum();
        let now = Instant::now();
        let came = wanted.file.size.saturating_sub(left);
        if came > 0 {
            tracing::info!(path = %wanted.file.path, bytes = came, of = wanted.file.size, "goes on from what was fetched before");
        }
        Self {
            path: wanted.file.path.clone(),
            size: wanted.file.size,
            came,
            told: now,
            started: now,
            at_start: came,
        }
    }

    fn came(&mut self, bytes: u64) {
        self.came = self.came.saturating_add(bytes);
        let now = Instant::now();
        if now.duration_since(self.told) < TELL_EVERY {
            return;
        }
        self.told = now;
        let seconds = now.duration_since(self.started).as_secs_f64().max(1e-3);
        let speed = (self.came - self.at_start) as f64 / seconds;
        let left = (self.size.saturating_sub(self.came)) as f64 / speed.max(1.0);
        tracing::info!(
            path = %self.path,
            came = %ByteSize(self.came),
            of = %ByteSize(self.size),
            per_second = %ByteSize(speed as u64),
            seconds_left = left.ceil() as u64,
            "fetching"
        );
    }
}

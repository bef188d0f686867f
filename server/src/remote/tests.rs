//! Repositories on a web server of this process, which can be told to misbehave.

mod object_store;
mod web;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::Response;
use dormouse_core::id::ByteSize;
use dormouse_model_store::repository::{LocalCopy, RemoteFile, RemoteFiles as _};
use parking_lot::Mutex;
use std::io::Read as _;
use tokio::runtime::Runtime;

use super::*;

/// What the server answers is up to each test.
type Behaviour = Box<dyn Fn(&Site, &Request) -> Response + Send + Sync>;

/// Files of a web server, and what was asked of it.
struct Site {
    files: Mutex<BTreeMap<String, Vec<u8>>>,
    asked: Mutex<Vec<String>>,
    behaviour: Behaviour,
}

/// A server and a cache to fetch into.
struct Fixture {
    site: Arc<Site>,
    address: SocketAddr,
    cache: tempfile::TempDir,
    metrics: Metrics,
    /// Ends with the fixture, and the server with it.
    _runtime: Runtime,
}

impl Fixture {
    fn new(behaviour: impl Fn(&Site, &Request) -> Response + Send + Sync + 'static) -> Self {
        let site = Arc::new(Site {
            files: Mutex::default(),
            asked: Mutex::default(),
            behaviour: Box::new(behaviour),
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let router = Router::new().fallback(answer).with_state(Arc::clone(&site));
        let address = runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            tokio::spawn(async move { axum::serve(listener, router).await });
            address
        });
        Self {
            site,
            address,
            cache: tempfile::tempdir().unwrap(),
            metrics: Metrics::new().unwrap(),
            _runtime: runtime,
        }
    }

    fn put(&self, path: &str, bytes: impl Into<Vec<u8>>) -> &Self {
        self.site.files.lock().insert(path.to_owned(), bytes.into());
        self
    }

    /// How often something was asked for.
    fn asked(&self, what: &str) -> usize {
        let asked = self.site.asked.lock();
        asked.iter().filter(|line| line.contains(what)).count()
    }

    fn remotes(&self, change: impl FnOnce(&mut RemoteConfig)) -> Remotes {
        let mut config = RemoteConfig {
            chunk: ByteSize(64 << 10),
            retries: 2,
            patience: Duration::from_secs(5),
            ..RemoteConfig::default()
        };
        change(&mut config);
        Remotes::open(config, self.cache.path(), Clock::start(), &self.metrics).unwrap()
    }

    fn open(&self, address: &str, remotes: &Remotes) -> Arc<RemoteRepository> {
        remotes
            .repository(Location::parse(address).unwrap())
            .unwrap()
    }
}

async fn answer(State(site): State<Arc<Site>>, request: Request) -> Response {
    let range = request.headers().get("range");
    let range = range.and_then(|range| range.to_str().ok()).unwrap_or("-");
    let line = format!("{} {} {range}", request.method(), request.uri());
    site.asked.lock().push(line);
    (site.behaviour)(&site, &request)
}

/// A file, or the part of it that was asked for.
fn send(bytes: &[u8], request: &Request, tag: &str) -> Response {
    let range = request.headers().get("range");
    let range = range.and_then(|range| range.to_str().ok()?.strip_prefix("bytes="));
    let parts = range.and_then(|range| range.split_once('-'));
    let body = |bytes: &[u8]| axum::body::Body::from(bytes.to_vec());
    let builder = Response::builder().header("etag", tag);
    let response = match parts {
        None => builder.body(body(bytes)),
        Some((start, end)) => {
            let (start, end): (usize, usize) = (start.parse().unwrap(), end.parse().unwrap());
            builder
                .status(206)
                .header(
                    "content-range",
                    format!("bytes {start}-{end}/{}", bytes.len()),
                )
                .body(body(&bytes[start..=end]))
        }
    };
    response.unwrap()
}

fn refuse(status: u16) -> Response {
    Response::builder()
        .status(status)
        .body("<Error><Code>Because</Code></Error>".into())
        .unwrap()
}

fn content(copy: &LocalCopy) -> Vec<u8> {
    let mut bytes = Vec::new();
    (&copy.file).read_to_end(&mut bytes).unwrap();
    bytes
}

/// Bytes that differ everywhere.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 1u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

fn file_of(repository: &RemoteRepository, path: &str) -> RemoteFile {
    let listing = repository.listing();
    let found = listing.files().find(|file| file.path == path).cloned();
    found.unwrap_or_else(|| panic!("{path} is not listed"))
}

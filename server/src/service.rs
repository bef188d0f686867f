//! What both protocols serve, without either's words.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dormouse_core::code::ErrorCode;
use dormouse_core::time::Timestamp;
use dormouse_model_store::spec::ModelSpec;
use tokio::sync::watch;

use crate::activity::Load;
use crate::error::ServeError;
use crate::extensions::Extensions;
use crate::host::Host;
use crate::registry::Registry;
use crate::request::{InferResponse, Origin, RawRequest};
use crate::response_cache::Found;
use crate::stats::VersionStatistics;
use crate::unit::{NotAnswered, Unit};
use crate::validate::validate;

mod extended;

/// How many units of a model are asked in turn, each found replaced by the next.
const MAX_UNITS: usize = 16;

/// Name, version and extensions, as `ServerMetadata` answers them.
#[derive(Clone, Debug)]
pub struct ServerInfo {
    pub name: String,
    pub version: &'static str,
    pub extensions: Vec<&'static str>,
}

/// A model's signature with the versions that can be asked for.
#[derive(Clone, Debug)]
pub struct ModelDescription {
    pub spec: Arc<ModelSpec>,
    /// The version this description was asked for, or the newest one.
    pub version: u64,
    /// Every version served, oldest first.
    pub versions: Vec<u64>,
}

/// Triton's states of a model in the repository index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexState {
    Ready,
    Unavailable,
    Loading,
    Unloading,
}

impl IndexState {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ready => "READY",
            Self::Unavailable => "UNAVAILABLE",
            Self::Loading => "LOADING",
            Self::Unloading => "UNLOADING",
        }
    }
}

/// A line of the repository index.
#[derive(Clone, Debug)]
pub struct IndexEntry {
    pub name: Arc<str>,
    /// Empty when no version of the model can be told.
    pub version: String,
    pub state: IndexState,
    pub reason: String,
}

/// What a load request may bring along.
#[derive(Clone, Debug, Default)]
pub struct LoadOverrides {
    /// A ModelConfig as JSON that replaces the one in the repository.
    pub config: Option<String>,
    /// Files by path (`1/model.onnx`) that replace the model's directory.
    pub files: BTreeMap<String, Bytes>,
}

/// The server below its front ends. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Service {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    id: String,
    registry: Arc<Registry>,
    host: Arc<Host>,
    readiness: watch::Sender<Readiness>,
    extensions: Extensions,
}

/// What the server tells about itself, from start to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    Starting,
    Ready,
    /// Not ready any more, but what arrives is still served.
    Leaving,
    /// Nothing new is taken on.
    Refusing,
}

impl Service {
    pub fn new(id: String, registry: Arc<Registry>, host: Arc<Host>) -> Self {
        let readiness = watch::Sender::new(Readiness::Starting);
        Self {
            shared: Arc::new(Shared {
                id,
                registry,
                host,
                readiness,
                extensions: Extensions::default(),
            }),
        }
    }

    /// The same service with extensions that are off by default.
    pub fn with_extensions(mut self, extensions: Extensions) -> Self {
        let shared = Arc::get_mut(&mut self.shared);
        shared.expect("the service is not in use yet").extensions = extensions;
        self
    }

    pub fn extensions(&self) -> &Extensions {
        &self.shared.extensions
    }

    pub fn registry(&self) -> &Arc<Registry> {
        &self.shared.registry
    }

    pub fn set_readiness(&self, readiness: Readiness) {
        self.shared.readiness.send_replace(readiness);
    }

    /// Ends the start-up; a server that is on its way out stays so.
    pub fn set_ready(&self) {
        self.shared.readiness.send_if_modified(|readiness| {
            let is_starting = *readiness == Readiness::Starting;
            if is_starting {
                *readiness = Readiness::Ready;
            }
            is_starting
        });
    }

    pub fn host(&self) -> &Arc<Host> {
        &self.shared.host
    }

    /// The load of one model (all its versions when `version` is "") or, with `name` "", of the
    /// whole server; the rate is taken over `window`. Wakes and reads nothing.
    pub fn load_of(&self, name: &str, version: &str, window: Duration) -> Result<Load, ServeError> {
        let host = &self.shared.host;
        if name.is_empty() {
            let queued = self.shared.registry.queued();
            return Ok(Load {
                queued,
                ..host.activity.load(window)
            });
        }
        self.shared.registry.load_of(name, version, window)
    }

    /// Now, on the clock that deadlines are measured with.
    pub fn now(&self) -> Timestamp {
        self.shared.host.clock.now()
    }

    pub fn info(&self) -> ServerInfo {
        ServerInfo {
            name: self.shared.id.clone(),
            version: env!("CARGO_PKG_VERSION"),
            extensions: self.shared.extensions.names(),
        }
    }

    /// Fails for a model that is in no repository; "" stands for all of them.
    pub fn check_known(&self, model: &str) -> Result<(), ServeError> {
        match model {
            "" => Ok(()),
            model => self.shared.registry.check_known(model),
        }
    }

    /// True as long as the process can answer at all.
    pub fn is_live(&self) -> bool {
        true
    }

    pub fn is_ready(&self) -> bool {
        *self.shared.readiness.borrow() == Readiness::Ready
    }

    /// Resolves when readiness differs from `known`, with what it is then.
    pub async fn readiness_changed(&self, known: bool) -> bool {
        let mut receiver = self.shared.readiness.subscribe();
        // The sender lives in the service itself, so the channel cannot be closed here.
        let changed = receiver
            .wait_for(|readiness| (*readiness == Readiness::Ready) != known)
            .await;
        changed.map_or(!known, |readiness| *readiness == Readiness::Ready)
    }

    /// Resolves when the server is on its way out.
    pub async fn leaving(&self) {
        let mut receiver = self.shared.readiness.subscribe();
        let leaving =
            |readiness: &Readiness| matches!(readiness, Readiness::Leaving | Readiness::Refusing);
        // An error means that the service is gone, which is as good.
        let _ = receiver.wait_for(leaving).await;
    }

    /// Whether the model can answer: warm, or asleep and able to wake. `version` "" is the newest.
    /// An unknown model is an error.
    pub async fn is_model_ready(&self, name: &str, version: &str) -> Result<bool, ServeError> {
        match self.shared.registry.generation(name).await {
            Ok(generation) => Ok(generation.unit(version)?.is_ready()),
            Err(error) if error.code() == ErrorCode::NotFound => Err(error),
            Err(_) => Ok(false),
        }
    }

    pub async fn describe(
        &self,
        name: &str,
        version: &str,
    ) -> Result<ModelDescription, ServeError> {
        self.shared.host.activity.touch();
        let generation = self.shared.registry.generation(name).await?;
        let unit = generation.unit(version)?;
        Ok(ModelDescription {
            spec: Arc::clone(&generation.spec),
            version: unit.id().version.0,
            versions: generation.versions(),
        })
    }

    /// Answers one request, waking the model if it sleeps. Dropping the future cancels the request.
    pub async fn infer(
        &self,
        name: &str,
        version: &str,
        request: RawRequest,
    ) -> Result<InferResponse, ServeError> {
        if request.wishes.is_none() && !self.shared.extensions.trace.is_on() {
            return self.infer_plain(name, version, request).await;
        }
        self.infer_extended(name, version, request).await
    }

    /// Answers a request for tensors in messages.
    async fn infer_plain(
        &self,
        name: &str,
        version: &str,
        request: RawRequest,
    ) -> Result<InferResponse, ServeError> {
        if *self.shared.readiness.borrow() == Readiness::Refusing {
            return Err(ServeError::unavailable("the server is shutting down"));
        }
        let mut now = self.now();
        let under_way = self.shared.host.activity.begin(now);
        let (received, deadline) = (request.received, request.deadline);
        let registry = &self.shared.registry;
        // What is seldom waited for is boxed: the space for it would be carried about each time.
        let unit = match registry.awake_unit(name, version)? {
            Some(unit) => unit,
            None => {
                let look_up = registry.unit_of_sleeper(name, version);
                let unit = Box::pin(self.in_time(name, deadline, look_up)).await?;
                now = self.now();
                unit
            }
        };
        let _under_way = under_way.goes_to(&unit.counters().traffic, now);
        check_transaction(unit.spec(), request.origin)?;
        let mut request =
            validate(unit.spec(), request).inspect_err(|_| unit.count_invalid(received))?;
        if let Some(turn) = request
            .sequence
            .as_ref()
            .and_then(|step| step.turn.as_ref())
        {
            let comes = async {
                turn.comes().await;
                Ok(())
            };
            let come = Box::pin(self.in_time(name, deadline, comes)).await;
            come.inspect_err(|_| unit.count_unserved(received))?;
        }
        let cache = self.shared.extensions.cache.as_ref();
        let cache = cache.filter(|cache| cache.serves(unit.spec()));
        let mut missing = None;
        if let Some(cache) = cache {
            match cache.look_up(&unit, &request) {
                Found::Answer(response) => return Ok(response),
                Found::Nothing(key) => missing = Some(key),
            }
        }
        let mut successor: Option<Arc<Unit>> = None;
        for _ in 0..MAX_UNITS {
            let unit = successor.as_ref().unwrap_or(&unit);
            request = match unit.infer(request).await {
                Ok(response) => {
                    if let (Some(cache), Some(missing)) = (cache, missing) {
                        cache.keep(unit, missing, &response);
                    }
                    return Ok(response);
                }
                Err(NotAnswered::Failed(error)) => return Err(error),
                Err(NotAnswered::Retired(request)) => *request,
            };
            // The model was reloaded, or is being unloaded, between the look-up and the call, or
            // its files were replaced before they were loaded.
            let look_up = registry.unit_of_sleeper(name, version);
            let found = Box::pin(self.in_time(name, deadline, look_up)).await;
            let found = found.inspect_err(|_| unit.count_unserved(received))?;
            if found.spec().inputs != unit.spec().inputs
                || found.spec().outputs != unit.spec().outputs
                || found.spec().max_batch_size != unit.spec().max_batch_size
                || found.spec().sequence.is_some() != unit.spec().sequence.is_some()
            {
                unit.count_unserved(received);
                return Err(ServeError::unavailable(format!(
                    "model '{name}' was replaced by one with another signature while the request was on its way"
                )));
            }
            successor = Some(found);
        }
        let last = successor.as_ref().unwrap_or(&unit);
        last.count_unserved(received);
        Err(ServeError::unavailable(format!(
            "model '{name}' was replaced again and again while the request was on its way"
        )))
    }

    /// Looks a unit up, no longer than the request may take: a reload under way can hold it up.
    async fn in_time<T>(
        &self,
        name: &str,
        deadline: Option<Timestamp>,
        look_up: impl Future<Output = Result<T, ServeError>>,
    ) -> Result<T, ServeError> {
        let Some(deadline) = deadline else {
            return look_up.await;
        };
        let at = self.shared.host.clock.instant(deadline);
        tokio::time::timeout_at(at, look_up)
            .await
            .unwrap_or_else(|_| {
                Err(ServeError::new(
                    ErrorCode::DeadlineExceeded,
                    format!("the deadline passed before model '{name}' answered"),
                ))
            })
    }

    /// Counters of one model (all its versions when `version` is "") or, with `name` "", of all
    /// that were asked for.
    pub async fn statistics(
        &self,
        name: &str,
        version: &str,
    ) -> Result<Vec<VersionStatistics>, ServeError> {
        if name.is_empty() {
            return Ok(self.shared.registry.all_statistics());
        }
        self.shared
            .registry
            .generation(name)
            .await?
            .statistics(version)
    }

    pub fn index(&self, ready_only: bool) -> Vec<IndexEntry> {
        self.shared.registry.index(ready_only)
    }

    pub async fn load(&self, name: &str, overrides: LoadOverrides) -> Result<(), ServeError> {
        let _hold = self.shared.host.activity.hold();
        self.shared.registry.load(name, overrides).await
    }

    pub async fn unload(&self, name: &str) -> Result<(), ServeError> {
        let _hold = self.shared.host.activity.hold();
        let unloaded = self.shared.registry.unload(name).await;
        if let Some(cache) = &self.shared.extensions.cache {
            cache.forget(name);
        }
        unloaded
    }

    /// The exposition text of `/metrics`.
    pub fn render_metrics(&self) -> String {
        let host = &self.shared.host;
        host.metrics
            .server()
            .bytes_in_flight
            .set(host.in_flight.used() as f64);
        let lost = &host.metrics.server().events_lost;
        lost.absolute(host.events.lost());
        if let Some(cache) = &self.shared.extensions.cache {
            let held = &host.metrics.server().response_cache_bytes;
            held.set(cache.used() as f64);
        }
        if let Some(preparation) = &host.wake.preparation {
            let dropped = &host.metrics.server().prepared_dropped;
            dropped.absolute(preparation.store().dropped());
        }
        host.metrics.render()
    }
}

/// A model that may answer any number of times is asked through a stream.
fn check_transaction(spec: &ModelSpec, origin: Origin) -> Result<(), ServeError> {
    if !spec.decoupled {
        return Ok(());
    }
    let caller = match origin {
        Origin::Stream => return Ok(()),
        Origin::Http => "HTTP end point",
        Origin::Unary => "ModelInfer RPC",
    };
    Err(ServeError::unsupported(format!(
        "{caller} doesn't support models with decoupled transaction policy"
    )))
}

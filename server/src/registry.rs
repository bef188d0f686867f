//! Every model of the repositories: which there are, which may be called, and by what they are
//! served at the moment.
//!
//! A model is only a name until somebody asks for it. Then its configuration and graph are read
//! into a [`Generation`], whose units load when they are called. A reload builds the next
//! generation beside the present one and swaps when it is warm.

mod elsewhere;
mod model;
mod overrides;
mod poll;
mod source;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use dormouse_core::id::ByteSize;
use dormouse_core::lifecycle::Stage;
use dormouse_model_store::config::ConfigDefaults;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::activity::Load;
use crate::config::{ControlMode, RemoteConfig};
use crate::error::ServeError;
use crate::host::Host;
use crate::overview::{CountersOverview, Counts, OverviewQuery, VersionOverview};
use crate::service::{IndexEntry, IndexState, LoadOverrides};
use crate::stats::VersionStatistics;
use crate::unit::Unit;

use elsewhere::Place;
pub use model::Generation;
use model::{Model, Rank};
use overrides::OverrideBudget;

/// How long an unload waits for the model's requests before it answers and goes on alone.
const UNLOAD_PATIENCE: Duration = Duration::from_secs(30);

/// How many names a mistyped one is compared with: each comparison takes about a microsecond of a
/// thread that has other requests to serve.
const MAX_COMPARED: usize = 1_000;

/// How much of a name that nobody has is repeated to whoever asked for it.
const MAX_SHOWN: usize = 128;

/// So many models that nobody has called are kept as the check after the start read them: each
/// holds its folder open, and some kilobytes.
const MOST_READ_AHEAD: usize = 256;

/// What a registry is made of.
#[derive(Debug)]
pub struct RegistryConfig {
    /// Folders, and addresses of remote repositories.
    pub repositories: Vec<PathBuf>,
    pub remote: RemoteConfig,
    /// A remote repository that cannot be reached and never could be does not end the start.
    pub tolerates_unreachable: bool,
    pub control: ControlMode,
    pub config_name: Option<String>,
    pub defaults: ConfigDefaults,
    /// The files that load requests brought, of all models together.
    pub max_override_bytes: ByteSize,
}

/// All models of a server.
#[derive(Debug)]
pub struct Registry {
    places: Vec<Place>,
    models: ArcSwap<HashMap<Arc<str>, Arc<Model>>>,
    /// Held while the repositories are listed, so that two listings cannot make two models of one
    /// name; carries the folders that were warned about.
    listing: Mutex<HashSet<String>>,
    control: ControlMode,
    config_name: Option<String>,
    defaults: ConfigDefaults,
    override_budget: Arc<OverrideBudget>,
    /// Room for models that were read ahead of their first call.
    read_ahead: Arc<Semaphore>,
    host: Arc<Host>,
}

impl Registry {
    /// Opens the repositories and lists their models, without reading any of them.
    pub fn open(config: RegistryConfig, host: Arc<Host>) -> Result<Arc<Self>, ServeError> {
        let places = elsewhere::open_places(&config, &host)?;
        let registry = Arc::new(Self {
            places,
            models: ArcSwap::default(),
            listing: Mutex::default(),
            control: config.control,
            config_name: config.config_name,
            defaults: config.defaults,
            override_budget: OverrideBudget::new(config.max_override_bytes),
            read_ahead: Arc::new(Semaphore::new(MOST_READ_AHEAD)),
            host,
        });
        registry.rescan()?;
        Ok(registry)
    }

    /// A registry without repositories that serves one unit: for benches, which cannot read a
    /// repository under valgrind. The unit must be awake, as there is nothing to wake it from.
    #[doc(hidden)]
    pub fn of_unit(unit: Arc<Unit>, host: Arc<Host>) -> Arc<Self> {
        let model = Arc::new(Model::of_unit(unit));
        let models = HashMap::from([(Arc::clone(model.name()), model)]);
        Arc::new(Self {
            places: Vec::new(),
            models: ArcSwap::from_pointee(models),
            listing: Mutex::default(),
            control: ControlMode::OnDemand,
            config_name: None,
            defaults: ConfigDefaults::default(),
            override_budget: OverrideBudget::new(ByteSize(0)),
            read_ahead: Arc::new(Semaphore::new(0)),
            host,
        })
    }

    /// How many models there are.
    pub fn len(&self) -> usize {
        self.models.load().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The names of all models, sorted.
    pub fn names(&self) -> Vec<Arc<str>> {
        let mut names: Vec<Arc<str>> = self.models.load().keys().cloned().collect();
        names.sort_unstable();
        names
    }

    /// Lists the repositories again: new models appear, models whose folder is gone disappear.
    /// Returns those that disappeared. Unless the repositories are followed, what serves stays
    /// until it is unloaded.
    fn rescan(&self) -> Result<Vec<Arc<Model>>, ServeError> {
        let mut warned = self.listing.lock();
        let mut refused = HashSet::new();
        let mut found: HashMap<String, Vec<usize>> = HashMap::new();
        for (index, place) in self.places.iter().enumerate() {
            let listing = place.repository.list().map_err(|error| {
                ServeError::unavailable(format!("cannot list a model repository: {error}"))
            })?;
            for (name, problem) in &listing.refused {
                if !warned.contains(name) {
                    tracing::warn!(name, %problem, "folder in the model repository is not a model");
                }
                refused.insert(name.clone());
            }
            for name in listing.models {
                found.entry(name).or_default().push(index);
            }
        }
        *warned = refused;
        let known = self.models.load_full();
        let mut models = HashMap::with_capacity(found.len());
        for (name, places) in found {
            let name: Arc<str> = name.into();
            let model = match known.get(&name) {
                Some(model) => Arc::clone(model),
                None => Arc::new(Model::new(
                    Arc::clone(&name),
                    self.control != ControlMode::Explicit,
                )),
            };
            model.set_places(places);
            models.insert(name, model);
        }
        if !matches!(self.control, ControlMode::Poll { .. }) {
            for (name, model) in known.iter().filter(|(_, model)| model.is_in_use()) {
                models
                    .entry(Arc::clone(name))
                    .or_insert_with(|| Arc::clone(model));
            }
        }
        let gone = known
            .iter()
            .filter(|(name, _)| !models.contains_key(*name))
            .map(|(_, model)| Arc::clone(model))
            .collect();
        self.models.store(Arc::new(models));
        Ok(gone)
    }

    fn model(&self, name: &str) -> Result<Arc<Model>, ServeError> {
        self.models
            .load()
            .get(name)
            .cloned()
            .ok_or_else(|| self.unknown(name))
    }

    /// Fails for a model that is not there.
    pub fn check_known(&self, name: &str) -> Result<(), ServeError> {
        self.model(name).map(drop)
    }

    fn unknown(&self, name: &str) -> ServeError {
        let models = self.models.load();
        // The name comes from outside and may be megabytes long.
        let near = models
            .keys()
            .filter(|known| known.len().abs_diff(name.len()) <= 2)
            .take(MAX_COMPARED)
            .map(|known| (strsim::levenshtein(known, name), known))
            .min()
            .filter(|(distance, _)| *distance <= 2);
        let name: String = name.chars().take(MAX_SHOWN).collect();
        let name = name.escape_debug();
        match near {
            Some((_, near)) => {
                ServeError::not_found(format!("unknown model '{name}': did you mean '{near}'?"))
            }
            None => match self.out_of_reach() {
                Some(trouble) => ServeError::unavailable(format!(
                    "unknown model '{name}': it may be in a model repository that cannot be reached: {trouble}"
                )),
                None => ServeError::not_found(format!(
                    "unknown model '{name}': it is not in the model repository"
                )),
            },
        }
    }

    /// The unit that serves a version ("" for the newest), if it has been asked for and does not
    /// sleep: nearly always, so nothing is waited for here.
    pub(crate) fn awake_unit(
        &self,
        name: &str,
        version: &str,
    ) -> Result<Option<Arc<Unit>>, ServeError> {
        let models = self.models.load();
        let Some(model) = models.get(name) else {
            return Ok(None);
        };
        let generation = model.present();
        let Some(generation) = &*generation else {
            return Ok(None);
        };
        let unit = generation.unit(version)?;
        // Who is on the way to sleep wakes like a sleeper: as what is on the disk by then.
        let sleeps = matches!(
            unit.stage(),
            Stage::Cold | Stage::Closing | Stage::Failed { .. }
        );
        Ok((!sleeps).then(|| Arc::clone(unit)))
    }

    /// The unit that serves a version, its model read if nobody had asked yet; sees to it that a
    /// model about to wake is what is on the disk.
    pub(crate) async fn unit_of_sleeper(
        self: &Arc<Self>,
        name: &str,
        version: &str,
    ) -> Result<Arc<Unit>, ServeError> {
        let model = self.model(name)?;
        model.check_callable()?;
        let generation = self.refresh(&model).await?;
        generation.unit(version).cloned()
    }

    /// The present generation of a model, read from the repository if nobody had asked for it yet.
    pub async fn generation(self: &Arc<Self>, name: &str) -> Result<Arc<Generation>, ServeError> {
        let model = self.model(name)?;
        model.check_callable()?;
        match model.current() {
            Some(generation) => Ok(generation),
            None => self.refresh(&model).await,
        }
    }

    /// Loads or reloads a model: what is new is loaded and warm before it replaces what serves.
    pub async fn load(
        self: &Arc<Self>,
        name: &str,
        overrides: LoadOverrides,
    ) -> Result<(), ServeError> {
        self.require_explicit()?;
        self.load_now(name, overrides).await
    }

    pub(crate) async fn load_now(
        self: &Arc<Self>,
        name: &str,
        overrides: LoadOverrides,
    ) -> Result<(), ServeError> {
        dormouse_model_store::names::check_name(name).map_err(|error| {
            ServeError::invalid(format!(
                "'{}' is not a model name: {error}",
                name.escape_default()
            ))
        })?;
        if self.has_remotes() {
            let (registry, name) = (Arc::clone(self), name.to_owned());
            blocking(move || {
                registry.look_elsewhere(&name);
                Ok(())
            })
            .await?;
        }
        if !self.models.load().contains_key(name) {
            // It may have been added since the repository was listed.
            let registry = Arc::clone(self);
            blocking(move || registry.rescan().map(drop)).await?;
        }
        // Before a model is made for it: what cannot be used leaves no trace.
        let given = self.given(name, overrides).await?;
        let model = match given.files.is_some() {
            true => self.model_or_new(name),
            false => self.model(name)?,
        };
        // A caller that goes away must not leave a half-done reload behind: the work runs on.
        let registry = Arc::clone(self);
        let reload = tokio::spawn(async move {
            let loaded = registry.reload(&model, given, true).await;
            registry.drop_unlisted(&model);
            loaded
        });
        reload
            .await
            .unwrap_or_else(|_| Err(ServeError::internal("loading panicked")))
    }

    /// Stops serving a model: its requests finish, then its memory is given back.
    pub async fn unload(self: &Arc<Self>, name: &str) -> Result<(), ServeError> {
        self.require_explicit()?;
        let model = self.model(name)?;
        let registry = Arc::clone(self);
        let retiring = tokio::spawn(async move {
            model.withdraw().await;
            registry.drop_unlisted(&model);
        });
        // Past the patience the model drains on its own; the caller's wish is carried out.
        let _ = tokio::time::timeout(UNLOAD_PATIENCE, retiring).await;
        Ok(())
    }

    fn require_explicit(&self) -> Result<(), ServeError> {
        match self.control {
            ControlMode::Explicit => Ok(()),
            ControlMode::OnDemand | ControlMode::Poll { .. } => Err(ServeError::unavailable(
                "explicit model load / unload is not allowed: models load on demand here; \
                 start the server with --model-control-mode=explicit to control them by hand",
            )),
        }
    }

    /// One entry per model version, sorted by name.
    pub fn index(&self, ready_only: bool) -> Vec<IndexEntry> {
        let models = self.models.load();
        let mut sorted: Vec<&Arc<Model>> = models.values().collect();
        sorted.sort_unstable_by(|a, b| a.name().cmp(b.name()));
        let entries = sorted.into_iter().flat_map(|model| model.index());
        entries
            .filter(|entry| !ready_only || entry.state == IndexState::Ready)
            .collect()
    }

    /// Who decides which models can be called.
    pub fn control(&self) -> &ControlMode {
        &self.control
    }

    /// What models are doing, as many as `query` asks for, and how many there are.
    pub fn overview(
        &self,
        query: &OverviewQuery,
    ) -> (Counts, CountersOverview, Vec<VersionOverview>) {
        let models = self.models.load();
        let mut totals = CountersOverview::default();
        for model in models.values() {
            model.add_totals(&mut totals);
        }
        let mut ranked: Vec<_> = models.values().map(|model| (model.rank(), model)).collect();
        let awake = ranked.iter().filter(|(rank, _)| *rank == Rank::Awake);
        let mut counts = Counts {
            models: ranked.len(),
            matching: 0,
            awake: awake.count(),
        };
        ranked.retain(|(_, model)| query.wants(model.name()));
        counts.matching = ranked.len();
        ranked.sort_unstable_by(|(a, model), (b, other)| (a, model.name()).cmp(&(b, other.name())));
        let now = self.host.clock.now();
        let residency = &self.host.wake.residency;
        let shown = ranked.into_iter().take(query.limit);
        let lines = shown.flat_map(|(_, model)| model.overview(residency, now));
        (counts, totals, lines.collect())
    }

    /// Counters of every version that was ever asked for.
    pub fn all_statistics(&self) -> Vec<VersionStatistics> {
        let mut statistics: Vec<VersionStatistics> = self
            .models
            .load()
            .values()
            .filter_map(|model| model.current())
            .flat_map(|generation| generation.counts())
            .collect();
        statistics.sort_unstable_by(|a, b| (&a.name, a.version).cmp(&(&b.name, b.version)));
        statistics
    }

    /// The load of one model, all its versions when `version` is ""; reads and wakes nothing.
    pub fn load_of(&self, name: &str, version: &str, window: Duration) -> Result<Load, ServeError> {
        let model = self.model(name)?;
        model.load_of(version, window, self.host.clock.now())
    }

    /// Requests that wait to be run, over all models.
    pub fn queued(&self) -> u64 {
        let now = self.host.clock.now();
        let models = self.models.load();
        let loads = models.values().filter_map(|model| {
            let load = model.load_of("", Duration::ZERO, now);
            load.ok()
        });
        loads.map(|load| load.queued).sum()
    }

    /// Whether any version of a model has a session.
    pub fn is_warm(&self, name: &str) -> bool {
        let model = self.models.load().get(name).cloned();
        model
            .and_then(|model| model.current())
            .is_some_and(|generation| generation.is_warm())
    }

    /// Whether every model that was asked to be loaded can serve.
    pub fn required_models_serve(&self, required: &[String]) -> bool {
        let models = self.models.load();
        required.iter().all(|name| {
            models
                .get(name.as_str())
                .is_some_and(|model| model.is_serving())
        })
    }

    /// Finishes every request and closes every session.
    pub async fn retire_all(&self) {
        let models = self.models.load_full();
        let retiring = models.values().map(|model| model.withdraw());
        futures_util::future::join_all(retiring).await;
    }
}

/// Runs file work on a thread where blocking is allowed.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ServeError> + Send + 'static,
) -> Result<T, ServeError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| {
        Err(ServeError::internal(
            "reading the model repository panicked",
        ))
    })
}

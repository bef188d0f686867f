//! One model: its name, its present generation, and what is known against it.

mod generation;
mod index;
mod inspect;
mod labels;
mod overview;
mod traffic;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::{ArcSwapOption, Guard};
use dormouse_core::id::ModelId;
use dormouse_core::lifecycle::Stage;
use dormouse_core::time::Timestamp;
use dormouse_model_store::config;
use parking_lot::Mutex;
use tokio::sync::OwnedSemaphorePermit;

pub use self::generation::Generation;
use self::generation::Stamp;
use self::inspect::Inspected;
pub(super) use self::overview::Rank;
use super::overrides::Given;
use super::source::{Reads, RepositorySource};
use super::{Registry, blocking};
use crate::error::ServeError;
use crate::stats::VersionCounters;
use crate::unit::{Unit, UnitParts};

/// A model that could not be read is not read again for this long, however often it is asked for.
const PROBLEM_STANDS: Duration = Duration::from_secs(1);

/// The files of a model that failed to load are not looked at again for this long.
const LOOK_STANDS: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Model {
    name: Arc<str>,
    generation: ArcSwapOption<Generation>,
    /// Held while the generation is read, replaced or withdrawn; carries what the next one is
    /// made from.
    control: tokio::sync::Mutex<Control>,
    status: Mutex<Status>,
    /// Counters outlive generations.
    counters: Mutex<BTreeMap<u64, Arc<VersionCounters>>>,
}

#[derive(Debug, Default)]
struct Control {
    /// What the last load gave in place of what is in the repository.
    given: Given,
    /// When a caller last had the files looked at.
    looked: Option<Timestamp>,
}

#[derive(Debug)]
struct Status {
    /// Indices of the repositories that have it; more than one is a conflict.
    places: Vec<usize>,
    callable: bool,
    unloading: bool,
    loading: bool,
    /// Versions seen by the last look at the repository.
    versions: Vec<u64>,
    problem: Option<(ServeError, Timestamp)>,
    /// What the files were like when they were last found good, or tried in place of those that
    /// serve: without a change they are not read again.
    seen: Option<u64>,
    /// Why the last reload was not taken, while the old generation serves on.
    reload_problem: Option<ServeError>,
    /// What the last check read, for the first call.
    ahead: Option<ReadAhead>,
}

/// A model that was read before anybody called it.
#[derive(Debug)]
struct ReadAhead {
    inspected: Inspected,
    _room: OwnedSemaphorePermit,
}

impl Model {
    pub(super) fn new(name: Arc<str>, callable: bool) -> Self {
        Self {
            name,
            generation: ArcSwapOption::empty(),
            control: tokio::sync::Mutex::default(),
            status: Mutex::new(Status {
                places: Vec::new(),
                callable,
                unloading: false,
                loading: false,
                versions: Vec::new(),
                problem: None,
                seen: None,
                reload_problem: None,
                ahead: None,
            }),
            counters: Mutex::default(),
        }
    }

    /// A model that is in no repository.
    pub(super) fn of_unit(unit: Arc<Unit>) -> Self {
        let model = Self::new(Arc::clone(&unit.id().name), true);
        model.generation.store(Some(Arc::new(Generation {
            spec: Arc::clone(unit.spec()),
            units: vec![unit],
            stamp: Stamp {
                present: Vec::new(),
                served: Vec::new(),
            },
        })));
        model
    }

    pub(super) fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(super) fn set_places(&self, places: Vec<usize>) {
        self.status.lock().places = places;
    }

    /// The repository that it is in, if it is in one.
    pub(super) fn place(&self) -> Option<usize> {
        match self.status.lock().places.as_slice() {
            [place] => Some(*place),
            _ => None,
        }
    }

    pub(super) fn current(&self) -> Option<Arc<Generation>> {
        self.generation.load_full()
    }

    /// As [`Model::current`], for a moment.
    pub(super) fn present(&self) -> Guard<Option<Arc<Generation>>> {
        self.generation.load()
    }

    /// Whether it is in a repository.
    pub(super) fn is_listed(&self) -> bool {
        !self.status.lock().places.is_empty()
    }

    pub(super) fn set_loading(&self) {
        self.status.lock().loading = true;
    }

    /// Whether it serves or is about to.
    pub(super) fn is_in_use(&self) -> bool {
        self.status.lock().loading || self.current().is_some()
    }

    pub(super) fn has_problem(&self) -> bool {
        self.status.lock().problem.is_some()
    }

    pub(super) fn check_callable(&self) -> Result<(), ServeError> {
        let status = self.status.lock();
        if status.callable {
            return Ok(());
        }
        Err(match &status.problem {
            Some((error, _)) => error.clone(),
            None => ServeError::not_found(format!(
                "model '{}' is not loaded: in control mode 'explicit' it has to be loaded first",
                self.name
            )),
        })
    }

    pub(super) fn is_serving(&self) -> bool {
        self.current().is_some_and(|generation| {
            generation.units.iter().all(|unit| {
                matches!(
                    unit.stage(),
                    Stage::Warm | Stage::Parked | Stage::Cold | Stage::Closing
                )
            })
        })
    }

    /// Takes the model away from callers, lets its requests finish and closes its sessions.
    pub(super) async fn withdraw(&self) {
        let mut control = self.control.lock().await;
        control.given = Given::default();
        {
            let mut status = self.status.lock();
            status.callable = false;
            status.unloading = true;
            status.problem = None;
            status.ahead = None;
            status.reload_problem = None;
        }
        if let Some(generation) = self.current() {
            generation.retire().await;
            self.generation.store(None);
        }
        self.status.lock().unloading = false;
    }

    fn counters_of(&self, version: u64) -> Arc<VersionCounters> {
        Arc::clone(self.counters.lock().entry(version).or_default())
    }

    /// Notes a problem; returns whether it was not known.
    fn note_problem(&self, error: &ServeError, now: Timestamp) -> bool {
        let known = self.status.lock().problem.replace((error.clone(), now));
        known.is_none_or(|(known, _)| known.message() != error.message())
    }

    /// Whether the files are not as they were when this was last asked.
    pub(super) fn is_news(&self, files: u64) -> bool {
        self.status.lock().seen.replace(files) != Some(files)
    }
}

impl Registry {
    /// The model's generation, read again if its files have changed since. Only models that are
    /// not awake are looked at: what serves is changed by a reload alone.
    pub(super) async fn refresh(
        self: &Arc<Self>,
        model: &Arc<Model>,
    ) -> Result<Arc<Generation>, ServeError> {
        let mut control = model.control.lock().await;
        model.check_callable()?;
        let present = model.current();
        if let Some(generation) = present.as_ref().filter(|generation| generation.is_awake()) {
            return Ok(Arc::clone(generation));
        }
        let now = self.host.clock.now();
        // Callers of a model that cannot be loaded come as fast as they are refused.
        if let Some(generation) = present.as_ref().filter(|present| present.has_failed(now))
            && control
                .looked
                .is_some_and(|looked| now - looked < LOOK_STANDS)
        {
            return Ok(Arc::clone(generation));
        }
        control.looked = Some(now);
        if let Some((error, since)) = &model.status.lock().problem
            && now - *since < PROBLEM_STANDS
        {
            return Err(error.clone());
        }
        let read = {
            let registry = Arc::clone(self);
            let model = Arc::clone(model);
            let given = control.given.clone();
            let known = present.as_ref().map(|generation| generation.stamp.clone());
            let ahead = model.status.lock().ahead.take();
            let ahead = ahead.filter(|_| known.is_none() && given.is_none());
            blocking(move || {
                if let Some(known) = known
                    && (given.files.is_some() || !registry.has_changed(&model, &known)?)
                {
                    return Ok(None);
                }
                if let Some(ReadAhead { mut inspected, .. }) = ahead
                    && !registry.has_changed(&model, &inspected.stamp)?
                {
                    // The same files may be in another folder of that name by now.
                    inspected.dir = Arc::new(registry.dir(&model)?);
                    return Ok(Some(inspected));
                }
                registry.inspect(&model, given).map(Some)
            })
            .await
        };
        let inspected = match (read, present) {
            (Ok(None), Some(generation)) => return Ok(generation),
            (Ok(Some(inspected)), _) => inspected,
            (Ok(None), None) => {
                return Err(ServeError::internal(
                    "a model that was never read has not changed",
                ));
            }
            (Err(error), _) => {
                model.note_problem(&error, now);
                return Err(error);
            }
        };
        let previous = model.current();
        let generation = self.make_generation(model, inspected, previous.as_deref());
        self.install(model, &generation);
        Ok(generation)
    }

    /// Reads the model anew, brings the new generation up and swaps. When that fails the old
    /// generation serves on.
    pub(super) async fn reload(
        self: &Arc<Self>,
        model: &Arc<Model>,
        given: Given,
        wake: bool,
    ) -> Result<(), ServeError> {
        let mut control = model.control.lock().await;
        model.set_loading();
        let result = self.reload_held(model, given.clone(), wake).await;
        let mut status = model.status.lock();
        status.loading = false;
        match result {
            Ok(()) => {
                control.given = given;
                status.callable = true;
                status.problem = None;
                status.reload_problem = None;
                Ok(())
            }
            Err(error) => {
                let serves_on = model.current().is_some();
                let what = if serves_on {
                    "reload failed"
                } else {
                    "load failed"
                };
                tracing::error!(model = %model.name, %error, serves_on, "{what}");
                if serves_on {
                    status.reload_problem = Some(error.clone());
                } else {
                    status.problem = Some((error.clone(), self.host.clock.now()));
                }
                Err(error)
            }
        }
    }

    async fn reload_held(
        self: &Arc<Self>,
        model: &Arc<Model>,
        given: Given,
        wake: bool,
    ) -> Result<(), ServeError> {
        let inspected = {
            let registry = Arc::clone(self);
            let model = Arc::clone(model);
            blocking(move || registry.inspect(&model, given)).await?
        };
        let previous = model.current();
        let next = self.make_generation(model, inspected, previous.as_deref());
        let was_callable = model.status.lock().callable;
        if previous.is_none() {
            // Nobody is served yet: requests that come now may as well wait for this load.
            self.install(model, &next);
            let mut status = model.status.lock();
            status.callable = true;
            status.loading = true;
        }
        let loads = next.units.iter().filter(|unit| {
            let was_awake = previous.as_ref().is_some_and(|previous| {
                previous.units.iter().any(|old| {
                    old.id() == unit.id()
                        && matches!(old.stage(), Stage::Warm | Stage::Parked | Stage::Loading)
                })
            });
            wake || was_awake
        });
        let loaded = futures_util::future::join_all(loads.map(|unit| {
            if wake {
                unit.pardon();
            }
            unit.ensure_loaded()
        }))
        .await;
        if let Some(error) = loaded.into_iter().find_map(Result::err) {
            let kept: Vec<&Arc<Unit>> = previous
                .iter()
                .flat_map(|previous| &previous.units)
                .collect();
            for unit in next
                .units
                .iter()
                .filter(|unit| !kept.iter().any(|kept| Arc::ptr_eq(kept, unit)))
            {
                unit.retire().await;
            }
            if previous.is_none() {
                model.generation.store(None);
                model.status.lock().callable = was_callable;
            }
            return Err(error);
        }
        self.install(model, &next);
        Ok(())
    }

    /// Makes a generation the present one; units that it does not take over drain and close.
    fn install(&self, model: &Arc<Model>, generation: &Arc<Generation>) {
        let previous = model.generation.swap(Some(Arc::clone(generation)));
        {
            let mut status = model.status.lock();
            status.problem = None;
            status.versions = generation.versions();
            status.ahead = None;
        }
        let Some(previous) = previous else { return };
        for unit in &previous.units {
            if !generation.units.iter().any(|kept| Arc::ptr_eq(kept, unit)) {
                let unit = Arc::clone(unit);
                self.host.runtime.spawn(async move { unit.retire().await });
            }
        }
    }

    /// Builds units for what was read; a unit whose files and configuration are the same as
    /// before is taken over as it is.
    fn make_generation(
        &self,
        model: &Model,
        inspected: Inspected,
        previous: Option<&Generation>,
    ) -> Arc<Generation> {
        let Inspected {
            spec,
            versions,
            stamp,
            dir,
            newest,
        } = inspected;
        for warning in &spec.warnings {
            tracing::warn!(model = %model.name, "{warning}");
        }
        let same_spec = previous.filter(|previous| *previous.spec == *spec);
        let units = versions
            .iter()
            .map(|&version| {
                let same =
                    same_spec.filter(|previous| previous.stamp.of(version) == stamp.of(version));
                let kept = same.and_then(|previous| {
                    previous
                        .units
                        .iter()
                        .find(|unit| unit.id().version.0 == version)
                });
                kept.filter(|unit| unit.stage() != Stage::Retired)
                    .cloned()
                    .unwrap_or_else(|| {
                        let whole = newest.clone();
                        let whole = whole.filter(|_| versions.last() == Some(&version));
                        let reads = whole.as_ref().map(Reads::only);
                        Unit::new(UnitParts {
                            id: ModelId::new(Arc::clone(&model.name), version),
                            spec: Arc::clone(&spec),
                            source: Box::new(RepositorySource {
                                remote: self.remote_of(model).cloned(),
                                dir: Arc::clone(&dir),
                                version,
                                filename: spec.model_filename.clone(),
                                weights: config::weights_file(&spec.config).map(str::to_owned),
                                files: stamp.files_of(version),
                                reads: reads.map_or_else(OnceLock::new, OnceLock::from),
                                whole,
                            }),
                            counters: model.counters_of(version),
                            host: Arc::clone(&self.host),
                        })
                    })
            })
            .collect();
        Arc::new(Generation { spec, units, stamp })
    }
}

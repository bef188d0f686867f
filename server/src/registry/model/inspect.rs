//! Reads a model from its repository, and tells whether its files have changed since.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use dormouse_model_store::config::{self, ResolveInput};
use dormouse_model_store::repository::{ModelDir, RepositoryError, WholeFacts};
use dormouse_model_store::spec::ModelSpec;
use dormouse_proto::inference as pb;

use super::generation::Stamp;
use super::{Model, ReadAhead, labels};
use crate::error::ServeError;
use crate::registry::Registry;
use crate::registry::overrides::Given;

/// A model as read from the repository.
#[derive(Debug)]
pub(super) struct Inspected {
    pub(super) spec: Arc<ModelSpec>,
    pub(super) versions: Vec<u64>,
    pub(super) stamp: Stamp,
    pub(super) dir: Arc<ModelDir>,
    /// Of the newest version's graph, for its first load.
    pub(super) newest: Option<WholeFacts>,
}

impl Registry {
    pub(in crate::registry) fn dir(&self, model: &Model) -> Result<ModelDir, ServeError> {
        let place = match model.status.lock().places.as_slice() {
            [place] => *place,
            [] => return Err(self.unknown(&model.name)),
            _ => {
                return Err(ServeError::unavailable(format!(
                    "model '{}' is in more than one model repository: remove all but one",
                    model.name
                )));
            }
        };
        self.places[place]
            .repository
            .model(&model.name)
            .map_err(|error| broken(&model.name, &error))
    }

    /// Whether the model's files differ from what they were when `known` was taken.
    pub(in crate::registry) fn has_changed(
        &self,
        model: &Model,
        known: &Stamp,
    ) -> Result<bool, ServeError> {
        let dir = self.dir(model)?;
        let versions: Vec<u64> = known.served.iter().map(|(version, _)| *version).collect();
        match self.stamp(&dir, &versions) {
            Ok(stamp) => Ok(stamp != *known),
            // A version that cannot be looked at any more was changed as well.
            Err(_) => Ok(true),
        }
    }

    fn stamp(&self, dir: &ModelDir, versions: &[u64]) -> Result<Stamp, RepositoryError> {
        let served = versions
            .iter()
            .map(|&version| {
                Ok((
                    version,
                    dir.fingerprint(self.config_name.as_deref(), version)?,
                ))
            })
            .collect::<Result<_, RepositoryError>>()?;
        Ok(Stamp {
            present: dir.versions()?,
            served,
        })
    }

    /// What all of the model's files are like at the moment, in one number.
    pub(in crate::registry) fn state_of_files(&self, model: &Model) -> Option<u64> {
        let dir = self.dir(model).ok()?;
        let versions = dir.versions().ok()?;
        let mut hasher = DefaultHasher::new();
        self.stamp(&dir, &versions).ok()?.hash(&mut hasher);
        Some(hasher.finish())
    }

    /// Reads and checks a model's configuration and the graph of its newest version.
    pub(super) fn inspect(&self, model: &Model, given: Given) -> Result<Inspected, ServeError> {
        let dir = match given.files {
            Some(brought) => brought.dir.clone(),
            None => self.dir(model)?,
        };
        let name = &model.name;
        let config = match given.config {
            Some(config) => config,
            None => {
                let text = dir
                    .config_text(self.config_name.as_deref())
                    .map_err(|error| broken(name, &error))?;
                match text {
                    Some(text) => {
                        config::text::parse(&text).map_err(|error| broken(name, &error))?
                    }
                    None => pb::ModelConfig::default(),
                }
            }
        };
        let present = dir.versions().map_err(|error| broken(name, &error))?;
        let versions = config::select_versions(config.version_policy.as_ref(), &present);
        let Some(&newest) = versions.last() else {
            return Err(ServeError::unavailable(format!(
                "model '{name}' has no version to serve: its folder has the versions {present:?} and its version policy selects none"
            )));
        };
        // Taken before anything is read: a change in between shows as one at the next look.
        let stamp = self
            .stamp(&dir, &versions)
            .map_err(|error| broken(name, &error))?;
        let filename = match config.default_model_filename.as_str() {
            "" => "model.onnx",
            filename => filename,
        };
        let (graph, newest) = dir
            .open_graph(newest, filename)
            .and_then(|graph| {
                let weights = config::weights_file(&config);
                graph.with_weights(weights).describe()
            })
            .map_err(|error| broken(name, &error))?;
        let mut spec = config::resolve(ResolveInput {
            name: Arc::clone(name),
            config,
            graph: &graph,
            defaults: &self.defaults,
        })
        .map_err(|error| broken(name, &error))?;
        spec.labels = labels::read(&dir, &spec.config)?;
        Ok(Inspected {
            spec: Arc::new(spec),
            versions,
            stamp,
            dir: Arc::new(dir),
            newest,
        })
    }

    /// Reads a model before anybody calls it, to learn whether it could serve and, while there is
    /// room, to spare its first caller the reading; of one that is elsewhere, only what is small.
    /// Returns whether it asks to be loaded at once.
    pub(in crate::registry) fn check(&self, model: &Model) -> bool {
        if model.current().is_some() {
            return false;
        }
        let looked = self.glance(model).and_then(|glance| match glance {
            Some(glance) => Ok((glance.versions, glance.eager, None)),
            None => {
                let inspected = self.inspect(model, Given::default())?;
                let (versions, eager) =
                    (inspected.versions.clone(), inspected.spec.lifecycle.eager);
                Ok((versions, eager, Some(inspected)))
            }
        });
        // Those of before go first, and their room with them.
        model.status.lock().ahead = None;
        match looked {
            Ok((versions, eager, inspected)) => {
                let room = Arc::clone(&self.read_ahead).try_acquire_owned().ok();
                let mut status = model.status.lock();
                status.versions = versions;
                status.problem = None;
                // Whether labels are still the same is not to be seen by a model's stamp.
                status.ahead = inspected
                    .filter(|inspected| {
                        model.current().is_none() && inspected.spec.labels.is_empty()
                    })
                    .zip(room)
                    .map(|(inspected, _room)| ReadAhead { inspected, _room });
                eager
            }
            Err(error) => {
                if model.note_problem(&error, self.host.clock.now()) {
                    tracing::warn!(model = %model.name, %error, "model cannot be served");
                }
                false
            }
        }
    }
}

fn broken(name: &str, cause: &dyn std::fmt::Display) -> ServeError {
    ServeError::unavailable(format!("model '{name}' cannot be served: {cause}"))
}

//! Files that a load request brings in place of the model's folder. They are kept in memory until
//! the model is unloaded or loaded without them, and never written to a disk.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use dormouse_core::code::ErrorCode;
use dormouse_core::id::ByteSize;
use dormouse_model_store::config;
use dormouse_model_store::repository::ModelDir;
use dormouse_proto::inference as pb;

use super::model::Model;
use super::{Registry, blocking};
use crate::error::ServeError;
use crate::service::LoadOverrides;

/// Files that one load request may bring.
const MAX_FILES: usize = 4096;

/// What a load request gave in place of what is in the repository.
#[derive(Clone, Debug, Default)]
pub(super) struct Given {
    pub(super) config: Option<pb::ModelConfig>,
    pub(super) files: Option<Arc<Brought>>,
}

impl Given {
    pub(super) fn is_none(&self) -> bool {
        self.config.is_none() && self.files.is_none()
    }
}

/// A model's files that came with a request.
#[derive(Debug)]
pub(super) struct Brought {
    pub(super) dir: ModelDir,
    bytes: u64,
    budget: Arc<OverrideBudget>,
}

impl Drop for Brought {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The bytes of all files that load requests brought, bounded.
#[derive(Debug)]
pub(super) struct OverrideBudget {
    limit: u64,
    used: AtomicU64,
}

impl OverrideBudget {
    pub(super) fn new(limit: ByteSize) -> Arc<Self> {
        Arc::new(Self {
            limit: limit.0,
            used: AtomicU64::new(0),
        })
    }

    fn bring(
        self: &Arc<Self>,
        model: &str,
        files: BTreeMap<String, Bytes>,
    ) -> Result<Brought, ServeError> {
        if files.len() > MAX_FILES {
            return Err(ServeError::invalid(format!(
                "the load request brings {} files, at most {MAX_FILES} are allowed",
                files.len()
            )));
        }
        let sizes = files.values().map(|file| file.len() as u64);
        let bytes = sizes.fold(0, u64::saturating_add);
        // Copied: each is a slice of its request, which would stay in memory as a whole.
        let own = |(path, file): (String, Bytes)| (path, Bytes::copy_from_slice(&file));
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        let give_back = || self.used.fetch_sub(bytes, Ordering::Relaxed);
        if before.saturating_add(bytes) > self.limit {
            give_back();
            return Err(ServeError::new(
                ErrorCode::Overloaded,
                format!(
                    "the load request brings {} of files and {} are kept already: the limit is {} (limits.max_override_bytes)",
                    ByteSize(bytes),
                    ByteSize(before),
                    ByteSize(self.limit)
                ),
            ));
        }
        let files = files.into_iter().map(own).collect();
        let dir = ModelDir::in_memory(model, files).map_err(|error| {
            give_back();
            ServeError::invalid(format!("the load request cannot be used: {error}"))
        })?;
        Ok(Brought {
            dir,
            bytes,
            budget: Arc::clone(self),
        })
    }
}

impl Registry {
    /// Reads what a load request gave.
    pub(super) async fn given(
        &self,
        model: &str,
        overrides: LoadOverrides,
    ) -> Result<Given, ServeError> {
        let LoadOverrides { config, files } = overrides;
        let config = match &config {
            None => None,
            Some(json) => Some(config::json::from_json(json).map_err(|error| {
                ServeError::invalid(format!(
                    "the 'config' parameter for model '{model}' cannot be used: {error}"
                ))
            })?),
        };
        if files.is_empty() {
            return Ok(Given {
                config,
                files: None,
            });
        }
        if config.is_none() {
            return Err(ServeError::invalid(format!(
                "the load request for model '{model}' brings files without a configuration: a 'file:' parameter needs the 'config' parameter beside it"
            )));
        }
        let (budget, name) = (Arc::clone(&self.override_budget), model.to_owned());
        let brought = blocking(move || budget.bring(&name, files)).await?;
        Ok(Given {
            config,
            files: Some(Arc::new(brought)),
        })
    }

    /// The model of this name, made if only a load request knows it.
    pub(super) fn model_or_new(&self, name: &str) -> Arc<Model> {
        let _listing = self.listing.lock();
        let known = self.models.load_full();
        if let Some(model) = known.get(name) {
            return Arc::clone(model);
        }
        let name: Arc<str> = name.into();
        let model = Arc::new(Model::new(Arc::clone(&name), false));
        // Counts as in use from here on, so that a listing does not take it away.
        model.set_loading();
        let mut models = (*known).clone();
        models.insert(name, Arc::clone(&model));
        self.models.store(Arc::new(models));
        model
    }

    /// Forgets a model that is in no repository once it does not serve any more.
    pub(super) fn drop_unlisted(&self, model: &Arc<Model>) {
        let _listing = self.listing.lock();
        let known = self.models.load_full();
        let is_it = known
            .get(model.name())
            .is_some_and(|known| Arc::ptr_eq(known, model));
        if !is_it || model.is_listed() || model.is_in_use() {
            return;
        }
        let mut models = (*known).clone();
        models.remove(model.name());
        self.models.store(Arc::new(models));
    }
}

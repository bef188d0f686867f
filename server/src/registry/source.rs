//! Where the units of a repository's models get their bytes.

use std::sync::Arc;

use dormouse_model_store::repository::ModelDir;

use crate::engine::ModelBytes;
use crate::error::ServeError;
use crate::unit::{Source, SourceModel};

/// A warm-up file larger than this is a mistake.
const MAX_WARMUP_FILE: u64 = 1 << 30;

/// A unit's bytes, read from its folder in the repository.
#[derive(Debug)]
pub(super) struct RepositorySource {
    pub(super) dir: Arc<ModelDir>,
    pub(super) version: u64,
    pub(super) filename: String,
}

impl Source for RepositorySource {
    fn read(&self) -> Result<SourceModel, ServeError> {
        let loaded = self
            .dir
            .open_graph(self.version, &self.filename)
            .and_then(|graph| graph.load());
        let loaded = loaded.map_err(|error| {
            ServeError::unavailable(format!("version {} cannot be read: {error}", self.version))
        })?;
        Ok(SourceModel {
            bytes: ModelBytes {
                graph: loaded.graph,
                external: loaded.external,
            },
            is_steady: loaded.summary.is_steady,
        })
    }

    fn warmup_file(&self, name: &str) -> Result<Vec<u8>, ServeError> {
        self.dir
            .read_file(&format!("warmup/{name}"), MAX_WARMUP_FILE)
            .map_err(|error| {
                ServeError::unavailable(format!("warm-up file '{name}' cannot be read: {error}"))
            })
    }
}

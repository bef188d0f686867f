//! Where a unit's bytes come from.

use std::time::Duration;

use dormouse_model_store::graph::OperatorFacts;
use dormouse_model_store::repository::{FileIdentity, GraphFile};
use dormouse_model_store::store::DigestCache;

use crate::engine::ModelBytes;
use crate::error::ServeError;
use crate::preparation::SourceDigests;
use crate::timeline::TimelineRecorder;

/// Where a unit's bytes come from.
pub trait Source: Send + Sync + std::fmt::Debug {
    /// Whether the files may have to be fetched first.
    fn is_remote(&self) -> bool {
        false
    }
    /// Fetches what `read` reads, as far as it is not here.
    fn fetch(&self, recorder: &TimelineRecorder) -> Result<(), ServeError> {
        let _ = recorder;
        Ok(())
    }
    /// Reads graph and weights, or opens the file that holds them.
    fn read(&self) -> Result<SourceModel, ServeError>;
    /// The size of everything that `read` reads, or about that.
    fn size(&self) -> u64;
    /// Whether the files are those that the unit was made for.
    fn is_current(&self) -> bool;
    /// The digests of the files that `read` reads, if they are known without reading them.
    fn known_digests(&self, known: &DigestCache) -> Result<Option<SourceDigests>, ServeError>;
    /// The digests of the files that `read` reads; fails when these are not the ones in `read`.
    fn digests(
        &self,
        known: &DigestCache,
        read: Option<&[FileIdentity]>,
    ) -> Result<SourceDigests, ServeError>;
    /// How long until the files count as unchanged since they were last written.
    fn settles_in(&self) -> Duration {
        Duration::ZERO
    }
    /// Reads a file of the model's `initial_state` folder.
    fn initial_state_file(&self, name: &str) -> Result<Vec<u8>, ServeError> {
        Err(ServeError::unavailable(format!(
            "initial state file '{name}' cannot be read: the model has no folder"
        )))
    }
    /// Reads a file of the model's `warmup` folder.
    fn warmup_file(&self, name: &str) -> Result<Vec<u8>, ServeError>;
}

/// What a source read.
#[derive(Debug)]
pub struct SourceModel {
    pub bytes: ModelBytes,
    /// Its size.
    pub size: u64,
    pub operators: OperatorFacts,
    /// The file that the engine reads itself.
    pub file: Option<GraphFile>,
    /// Which files these are.
    pub files: Vec<FileIdentity>,
    /// They are those that the unit was made for.
    pub is_current: bool,
}

/// Fails when a file was changed while the engine read it: what it built is then of neither state.
pub(crate) fn still_the_same(file: Option<&GraphFile>) -> Result<(), ServeError> {
    match file.map(GraphFile::unchanged) {
        Some(Err(error)) => Err(ServeError::unavailable(error.to_string())),
        Some(Ok(())) | None => Ok(()),
    }
}

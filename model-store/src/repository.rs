//! A folder of models on disk, or elsewhere. On disk everything is opened beneath one directory
//! handle, so that no name, link or rename leads out of it; symbolic links inside it work.

mod beneath;
mod fingerprint;
mod folder;
mod graph_file;
mod model_dir;
mod remote;
mod tree;
mod weights;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dormouse_core::id::ByteSize;

use crate::names::{NameError, check_name};
use crate::onnx::{GraphError, shown};
use crate::safetensors::{SafetensorsError, WeightsError};

use beneath::Dir;
use folder::EntryKind;

pub use fingerprint::{FileStamp, Fingerprint};
pub use folder::{FileIdentity, OpenFile};
pub use graph_file::{Examined, GraphFile, LoadedGraph, WholeFacts, WholeFile};
pub use model_dir::{MAX_CONFIG_BYTES, ModelDir};
pub use remote::{FetchError, LocalCopy, RemoteFile, RemoteFiles, RemoteListing};

/// Why something in a repository cannot be used. Paths in messages are relative to the repository.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RepositoryError {
    #[error("the model repository cannot be opened: {cause}")]
    Open { path: PathBuf, cause: io::Error },
    #[error(
        "the model repository cannot be read safely: openat2 is refused ({cause}); it needs Linux 5.6 or later and a sandbox profile that allows it"
    )]
    NoOpenat2 { cause: io::Error },
    #[error("model {} is not in the repository", shown(.model.as_bytes()))]
    ModelNotFound { model: String },
    #[error("{} is not a usable {what}: {cause}", shown(.name.as_bytes()))]
    Name {
        what: &'static str,
        name: String,
        cause: NameError,
    },
    #[error("{} does not exist", shown(.path.as_bytes()))]
    NotFound { path: String },
    #[error("{} is a link that leads out of the repository", shown(.path.as_bytes()))]
    LeadsOut { path: String },
    #[error("{} is a {found}, not a regular file", shown(.path.as_bytes()))]
    NotRegular { path: String, found: &'static str },
    #[error("{} is not a folder", shown(.path.as_bytes()))]
    NotAFolder { path: String },
    #[error(
        "{} has {links} hard links; data outside the model file must have one, or it could be another file of this machine",
        shown(.path.as_bytes())
    )]
    HardLinked { path: String, links: u64 },
    #[error("{} has {size} bytes, at most {limit} are allowed", shown(.path.as_bytes()))]
    TooLarge { path: String, size: u64, limit: u64 },
    #[error("{} needs {}, which cannot be allocated", shown(.path.as_bytes()), ByteSize(*.size))]
    OutOfMemory { path: String, size: u64 },
    #[error("{} is not valid UTF-8 at byte {offset}", shown(.path.as_bytes()))]
    NotUtf8 { path: String, offset: usize },
    #[error("{} changed while it was read", shown(.path.as_bytes()))]
    Changed { path: String },
    #[error(
        "{} has {size} bytes, the model refers to byte {offset} to {end} of it",
        shown(.path.as_bytes())
    )]
    ExternalDataTooShort {
        path: String,
        size: u64,
        offset: u64,
        end: u64,
    },
    #[error("{} holds more than {limit} entries", shown(.path.as_bytes()))]
    TooManyEntries { path: String, limit: usize },
    #[error("{} cannot be loaded: {cause}", shown(.path.as_bytes()))]
    Graph { path: String, cause: GraphError },
    #[error("{} is not a safetensors file that can be used: {cause}", shown(.path.as_bytes()))]
    Safetensors {
        path: String,
        cause: SafetensorsError,
    },
    #[error("{} cannot be given its weights: {cause}", shown(.path.as_bytes()))]
    Weights { path: String, cause: WeightsError },
    #[error("{} cannot be fetched: {cause}", shown(.path.as_bytes()))]
    Fetch { path: String, cause: FetchError },
    #[error("{} cannot be read: {cause}", shown(.path.as_bytes()))]
    Io { path: String, cause: io::Error },
}

/// What a repository holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// Names of models, sorted.
    pub models: Vec<String>,
    /// Folders whose names no model may have, sorted; hidden folders are left out.
    pub refused: Vec<(String, NameError)>,
}

/// A model repository, by the handle of its folder or by what lists and fetches its files.
#[derive(Clone, Debug)]
pub struct Repository {
    root: Root,
}

#[derive(Clone, Debug)]
enum Root {
    Disk(Arc<Dir>),
    Elsewhere(Arc<dyn RemoteFiles>),
}

impl Repository {
    /// Opens the folder once; everything else is found beneath it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, RepositoryError> {
        let root = Dir::open_root(path.as_ref())?;
        Ok(Self {
            root: Root::Disk(Arc::new(root)),
        })
    }

    /// A repository that is elsewhere.
    pub fn elsewhere(files: Arc<dyn RemoteFiles>) -> Self {
        Self {
            root: Root::Elsewhere(files),
        }
    }

    /// The models' names; looks at folder entries only, not into models.
    pub fn list(&self) -> Result<Listing, RepositoryError> {
        let root = match &self.root {
            Root::Disk(root) => root,
            Root::Elsewhere(remote) => return Ok(remote.listing().names()),
        };
        let mut listing = Listing::default();
        for entry in root.entries()? {
            let folder = match entry.kind {
                EntryKind::Folder => true,
                EntryKind::Link => {
                    matches!(root.kind(&entry.name), Ok(Some(EntryKind::Folder)))
                }
                _ => false,
            };
            // Ext4 puts `lost+found` at the top of every volume.
            if !folder || entry.name == "lost+found" {
                continue;
            }
            match check_name(&entry.name) {
                _ if !entry.utf8 => listing.refused.push((entry.name, NameError::NotUtf8)),
                Ok(()) => listing.models.push(entry.name),
                Err(NameError::Hidden | NameError::Dots) => {}
                Err(error) => listing.refused.push((entry.name, error)),
            }
        }
        listing.models.sort_unstable();
        listing.refused.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        Ok(listing)
    }

    /// A model's folder.
    pub fn model(&self, name: &str) -> Result<ModelDir, RepositoryError> {
        check_name(name).map_err(|cause| RepositoryError::Name {
            what: "model name",
            name: name.to_owned(),
            cause,
        })?;
        let root = match &self.root {
            Root::Disk(root) => root,
            Root::Elsewhere(files) => return remote::model_dir(files, name),
        };
        match Dir::open_below(root, name) {
            Ok(dir) => Ok(ModelDir::on_disk(name, dir)),
            Err(RepositoryError::NotFound { .. } | RepositoryError::NotAFolder { .. }) => {
                Err(RepositoryError::ModelNotFound {
                    model: name.to_owned(),
                })
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests;

//! A repository whose files are elsewhere: known by a listing, and fetched when they are opened.
//! How they are listed and fetched is somebody else's business.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs::File;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::fingerprint::FileStamp;
use super::tree::Tree;
use super::{Listing, ModelDir, RepositoryError};
use crate::names::{NameError, check_name, check_relative_path};

/// What stands for the device in the stamps of files that are elsewhere.
pub(super) const ELSEWHERE: u64 = u64::MAX;

/// What tells one state of a file from another, as its server tells it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RemoteFile {
    /// Relative to the repository.
    pub path: String,
    pub size: u64,
    /// The last change, in nanoseconds since 1970; 0 when that is not told.
    pub modified_ns: i64,
    /// The ETag, or a digest of the content.
    pub tag: Option<String>,
    /// What the server calls this state of the file, where it keeps several.
    pub generation: Option<String>,
}

/// Every model's files, by model and by their paths relative to the model's folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteListing {
    models: BTreeMap<String, Arc<BTreeMap<String, RemoteFile>>>,
    refused: Vec<(String, NameError)>,
    /// Files whose paths no file of a model may have.
    pub ignored: Vec<String>,
}

/// Why a file that is elsewhere could not be opened.
pub type FetchError = Box<dyn std::error::Error + Send + Sync>;

/// A file's copy on this machine. It stays as long as somebody holds on to it.
#[derive(Debug)]
pub struct LocalCopy {
    pub file: File,
    pub hold: Arc<dyn Any + Send + Sync>,
}

/// A repository's files, wherever they are.
pub trait RemoteFiles: Debug + Send + Sync {
    /// What there was at the last look.
    fn listing(&self) -> Arc<RemoteListing>;
    /// The file in exactly this state, fetched if it is not here yet. Blocks.
    fn open(&self, file: &RemoteFile) -> Result<LocalCopy, FetchError>;
}

impl RemoteListing {
    /// Sorts files into models. Folders whose names no model may have are told of; files at the
    /// top and hidden ones belong to nothing.
    pub fn of(files: impl IntoIterator<Item = RemoteFile>) -> Self {
        let mut listing = Self::default();
        let mut models: BTreeMap<String, BTreeMap<String, RemoteFile>> = BTreeMap::new();
        for file in files {
            let Some((model, path)) = file.path.split_once('/') else {
                continue;
            };
            match check_name(model) {
                Ok(()) => {}
                Err(NameError::Hidden | NameError::Dots) => continue,
                Err(error) => {
                    if !listing.refused.iter().any(|(name, _)| name == model) {
                        listing.refused.push((model.to_owned(), error));
                    }
                    continue;
                }
            }
            if check_relative_path(path).is_err() {
                listing.ignored.push(file.path);
                continue;
            }
            let (model, path) = (model.to_owned(), path.to_owned());
            models.entry(model).or_default().insert(path, file);
        }
        // Some tools put an empty object where a folder would be.
        for files in models.values_mut() {
            let paths: Vec<String> = files.keys().cloned().collect();
            for path in &paths {
                let below = format!("{path}/");
                let next = files.range(below.clone()..).next();
                if next.is_some_and(|(path, _)| path.starts_with(&below)) {
                    files.remove(path);
                }
            }
        }
        let models = models.into_iter();
        listing.models = models
            .map(|(name, files)| (name, Arc::new(files)))
            .collect();
        listing.refused.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        listing
    }

    /// One model's files by their paths relative to its folder.
    pub fn model(&self, name: &str) -> Option<&Arc<BTreeMap<String, RemoteFile>>> {
        self.models.get(name)
    }

    /// Replaces one model's files by those of another listing.
    #[must_use]
    pub fn with_model_of(&self, name: &str, other: &Self) -> Self {
        let mut changed = self.clone();
        match other.models.get(name) {
            Some(files) => changed.models.insert(name.to_owned(), Arc::clone(files)),
            None => changed.models.remove(name),
        };
        changed
    }

    /// Every file of every model.
    pub fn files(&self) -> impl Iterator<Item = &RemoteFile> {
        self.models.values().flat_map(|files| files.values())
    }

    pub(super) fn names(&self) -> Listing {
        Listing {
            models: self.models.keys().cloned().collect(),
            refused: self.refused.clone(),
        }
    }
}

/// A folder of a model that is elsewhere, as it was when it was looked at.
#[derive(Clone, Debug)]
pub(super) struct RemoteFolder {
    pub(super) tree: Tree<RemoteFile>,
    pub(super) remote: Arc<dyn RemoteFiles>,
}

impl RemoteFolder {
    /// Opens the copy of a file; `path` is how messages show it.
    pub(super) fn open(&self, file: &RemoteFile, path: &str) -> Result<LocalCopy, RepositoryError> {
        let opened = self.remote.open(file);
        opened.map_err(|cause| RepositoryError::Fetch {
            path: path.to_owned(),
            cause,
        })
    }
}

/// The model's folder as it is in the last listing.
pub(super) fn model_dir(
    remote: &Arc<dyn RemoteFiles>,
    name: &str,
) -> Result<ModelDir, RepositoryError> {
    let listing = remote.listing();
    let Some(files) = listing.model(name) else {
        return Err(RepositoryError::ModelNotFound {
            model: name.to_owned(),
        });
    };
    let name: Arc<str> = Arc::from(name);
    let tree = Tree::new(Arc::clone(&name), Arc::clone(files));
    let remote = Arc::clone(remote);
    Ok(ModelDir::elsewhere(name, RemoteFolder { tree, remote }))
}

/// A file's state in the form that files on disk have.
pub(super) fn stamp(file: &RemoteFile, path: String) -> FileStamp {
    let mut hasher = blake3::Hasher::new();
    for part in [&file.tag, &file.generation] {
        let part = part.as_deref().unwrap_or_default();
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    let mut hash = [0; 8];
    hasher.finalize_xof().fill(&mut hash);
    FileStamp {
        path,
        size: file.size,
        modified: (
            file.modified_ns.div_euclid(1_000_000_000),
            file.modified_ns.rem_euclid(1_000_000_000),
        ),
        inode: (ELSEWHERE, u64::from_le_bytes(hash)),
    }
}

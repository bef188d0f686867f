//! A model being prepared, until it is committed.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Store;
use super::commit;
use super::error::{At, StoreError};
use super::facts::PreparedFacts;
use super::key::EntryKey;
use super::lock;
use super::packs::{names, remove_file};
use super::prepared::PreparedModel;

/// Whether a model is to be prepared, and by whom.
#[derive(Debug)]
pub enum Begun {
    /// By the caller.
    Draft(Draft),
    /// It is there already.
    Exists(Arc<PreparedModel>),
    /// Somebody else, in this process or another, is at it.
    Busy,
}

/// What is kept of a prepared model.
#[derive(Debug)]
pub struct PreparedContent<'a> {
    /// The optimised graph; it refers to the tensors by name.
    pub graph: Vec<u8>,
    pub tensors: Vec<NewTensor<'a>>,
    pub facts: PreparedFacts,
}

/// A tensor that is to be stored; one without elements belongs into the graph.
#[derive(Clone, Debug)]
pub struct NewTensor<'a> {
    /// The initializer's name in the graph.
    pub name: String,
    /// ONNX's number of the element type.
    pub element_type: i32,
    pub dims: Vec<i64>,
    pub data: TensorData<'a>,
}

/// Where the bytes of a tensor that is to be stored are.
#[derive(Clone, Debug)]
pub enum TensorData<'a> {
    Memory(&'a [u8]),
    /// A part of a file in the draft's scratch folder, by its path relative to that.
    Scratch {
        file: PathBuf,
        offset: u64,
        len: u64,
    },
}

/// The right to prepare one model, with a folder to do it in. Dropped, it leaves nothing behind.
#[derive(Debug)]
pub struct Draft {
    pub(super) store: Arc<Store>,
    pub(super) key: EntryKey,
    place: Place,
    _lock: File,
}

/// Where a draft is kept; cleared when dropped.
#[derive(Debug)]
struct Place {
    folder: PathBuf,
    scratch: PathBuf,
    lock: PathBuf,
}

impl Draft {
    /// Takes the right to prepare a model; none when somebody else has it.
    pub(super) fn claim(store: &Arc<Store>, key: &EntryKey) -> Result<Option<Self>, StoreError> {
        let drafts = store.drafts_dir();
        let lock_path = drafts.join(format!("{key}.lock"));
        let Some(lock) = lock::claim(&lock_path)? else {
            return Ok(None);
        };
        let folder = drafts.join(key.to_string());
        let draft = Self {
            store: store.clone(),
            key: *key,
            place: Place {
                scratch: folder.join("scratch"),
                folder,
                lock: lock_path,
            },
            _lock: lock,
        };
        // Left behind by a process that died.
        remove_tree(&draft.place.folder).at(&draft.place.folder)?;
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&draft.place.scratch)
            .at(&draft.place.scratch)?;
        Ok(Some(draft))
    }

    /// An empty folder for the engine's files.
    pub fn scratch(&self) -> &Path {
        &self.place.scratch
    }

    /// Where the parts of the entry wait for their names.
    pub(super) fn folder(&self) -> &Path {
        &self.place.folder
    }

    /// Makes the prepared model part of the store, on the disk when this returns. If it fails the
    /// store is as it was before.
    pub fn commit(self, content: PreparedContent<'_>) -> Result<Arc<PreparedModel>, StoreError> {
        commit::commit(&self, content)?;
        self.store
            .find(&self.key)?
            .ok_or(StoreError::Gone { key: self.key })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        #[cfg(test)]
        if super::steps::crashing() {
            return;
        }
        // The lock file goes while its lock is held: nobody can take it for theirs in between.
        let cleared = remove_tree(&self.folder).and_then(|()| remove_file(&self.lock));
        if let Err(error) = cleared {
            tracing::warn!(folder = %self.folder.display(), %error, "a draft could not be cleared");
        }
    }
}

/// Clears drafts whose makers are gone.
pub(super) fn sweep(drafts: &Path) -> Result<(), StoreError> {
    let mut keys: Vec<EntryKey> = names(drafts)
        .at(drafts)?
        .iter()
        .filter_map(|name| name.strip_suffix(".lock").unwrap_or(name).parse().ok())
        .collect();
    keys.sort_unstable();
    keys.dedup();
    for key in keys {
        let lock_path = drafts.join(format!("{key}.lock"));
        if let Some(lock) = lock::claim(&lock_path)? {
            let folder = drafts.join(key.to_string());
            remove_tree(&folder).at(&folder)?;
            remove_file(&lock_path).at(&lock_path)?;
            drop(lock);
        }
    }
    Ok(())
}

/// Removes whatever is there.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    let removed = match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => fs::remove_file(path),
        removed => removed,
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

//! The prepared store: optimised graphs and their weights, content-addressed, immutable, shared by
//! the processes of one host. It stores what it is given and knows no engine.
//!
//! ```text
//! v1/entries/<key>/   manifest.json graph.onnx facts.json; the folder's time is that of its last use
//! v1/packs/           <digest>.bin and beside it .seal (what it looked like when its digest was
//!                     checked) and .index (digests of its tensors)
//! v1/sources/         digests of source files
//! v1/drafts/, tmp/    what is being written; left behind by a crash, cleared by whoever comes next
//! v1/store.lock       held around commits and clearing up; looking up takes no lock
//! ```
//!
//! Anything that is not what was written is dropped, with a line in the log, and prepared again
//! from its source: damage is never a reason not to serve.

mod clearing;
mod commit;
mod digest;
mod draft;
mod entry;
mod error;
mod facts;
mod heads;
mod key;
mod lock;
mod manifest;
mod pack;
mod packs;
mod prepared;
mod record;
mod source_digests;
mod stamp;
mod steps;
#[cfg(test)]
mod tests;
mod verify;

use std::collections::HashSet;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

pub use clearing::{EntryInfo, GcReport};
pub use digest::{Digest, InvalidDigest};
pub use draft::{Begun, Draft, NewTensor, PreparedContent, TensorData};
pub use error::StoreError;
pub use facts::{PackingVerdict, PreparedFacts};
pub use key::{EntryKey, KeyParts};
pub use manifest::Weight;
pub use pack::Pack;
pub use prepared::{PreparedModel, Table};
pub use source_digests::DigestCache;
pub use verify::{Damage, VerifyReport};

use entry::{Broken, EntryFolder, FACTS};
use error::At;
use heads::Heads;
use packs::Packs;
use record::Unreadable;

/// Where the store is and how much it may hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreConfig {
    pub dir: PathBuf,
    /// Of all files of prepared models together.
    pub max_bytes: u64,
}

impl StoreConfig {
    /// What a store holds unless its owner says otherwise.
    pub const DEFAULT_MAX_BYTES: u64 = 20 << 30;
}

/// The prepared models of this host.
#[derive(Debug)]
pub struct Store {
    config: StoreConfig,
    root: PathBuf,
    access: Access,
    packs: Packs,
    sources: DigestCache,
    heads: Heads,
    /// Models that were dropped because they could not be used.
    dropped: AtomicU64,
    /// What was here when somebody asked first: sizes of sources, and their names.
    found: OnceLock<HashSet<(u64, String)>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Full,
    ReadOnly,
}

impl Store {
    /// Opens the store, creating it if need be. A folder that cannot be written to is used as it
    /// is: prepared models are found, none is added.
    pub fn open(config: StoreConfig) -> Result<Arc<Self>, StoreError> {
        let root = config.dir.join("v1");
        let access = match create(&root) {
            Ok(()) => Access::Full,
            Err(StoreError::Io { source, .. })
                if matches!(
                    source.kind(),
                    io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem
                ) && root.is_dir() =>
            {
                Access::ReadOnly
            }
            Err(error) => return Err(error),
        };
        Self::open_as(config, access)
    }

    /// Opens a store that is there; none when nothing was ever prepared.
    pub fn open_existing(config: StoreConfig) -> Result<Option<Arc<Self>>, StoreError> {
        if config.dir.join("v1").try_exists().at(&config.dir)? {
            Self::open(config).map(Some)
        } else {
            Ok(None)
        }
    }

    fn open_as(config: StoreConfig, access: Access) -> Result<Arc<Self>, StoreError> {
        let root = config.dir.join("v1");
        check_owner(&root)?;
        let tmp = (access == Access::Full).then(|| root.join("tmp"));
        let store = Self {
            packs: Packs::new(root.join("packs"), tmp.clone()),
            sources: DigestCache::new(root.join("sources"), tmp),
            heads: Heads::default(),
            config,
            root,
            access,
            dropped: AtomicU64::new(0),
            found: OnceLock::new(),
        };
        // Whoever holds the lock has swept or will.
        if access == Access::Full
            && let Some(_lock) = lock::claim(&store.lock_path())?
        {
            store.sweep()?;
        }
        Ok(Arc::new(store))
    }

    pub fn config(&self) -> &StoreConfig {
        &self.config
    }

    /// Whether models can only be found, not added.
    pub fn is_read_only(&self) -> bool {
        self.access == Access::ReadOnly
    }

    /// Whether a model of this name and of so many bytes was here when that was first asked. A hint that
    /// reading its files, to find out whether it is that one, is worthwhile.
    pub fn had(&self, name: &str, source_bytes: u64) -> bool {
        let found = self.found.get_or_init(|| {
            let list = self.list().unwrap_or_else(|error| {
                tracing::debug!(%error, "the store cannot be listed");
                Vec::new()
            });
            let named = list.into_iter().flat_map(|entry| {
                let bytes = entry.facts.source_bytes;
                entry
                    .facts
                    .models
                    .into_iter()
                    .map(move |name| (bytes, name))
            });
            named.collect()
        });
        found.contains(&(source_bytes, name.to_owned()))
    }

    /// The prepared model of this key, if it is there and undamaged; a damaged one is dropped. An
    /// error says that it could not be found out; the source is still there.
    pub fn find(&self, key: &EntryKey) -> Result<Option<Arc<PreparedModel>>, StoreError> {
        let path = self.entry_path(key);
        let folder = match EntryFolder::open(path.clone()) {
            Ok(Some(folder)) => Arc::new(folder),
            Ok(None) => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                self.note(key, self.drop_stray(key));
                return Ok(None);
            }
            Err(error) => return Err(StoreError::io(&path, error)),
        };
        let broken = match entry::load(&folder, *key, &self.packs) {
            Ok(found) => return Ok(found),
            Err(broken) => broken,
        };
        let dropped = match broken {
            Broken::Io(error) => return Err(StoreError::io(&path, error)),
            // Somebody has cleared it while we looked.
            _ if !folder.is_current().at(&path)? => return Ok(None),
            Broken::Entry(reason) => {
                tracing::warn!(%key, reason, "a damaged prepared model is dropped");
                self.writable().and_then(|()| self.drop_entry(&folder, key))
            }
            Broken::Pack(digest, seen, reason) => {
                tracing::warn!(%key, reason, "a damaged pack and all who use it are dropped");
                self.writable()
                    .and_then(|()| self.drop_pack(&digest, seen.as_ref()))
                    .map(|users| {
                        for user in users.iter().filter(|user| *user != key) {
                            tracing::warn!(key = %user, pack = %digest, "a prepared model lost its pack");
                        }
                    })
            }
        };
        self.note(key, dropped);
        Ok(None)
    }

    /// Drops a model that is as it was written and cannot be used all the same, so that it is
    /// prepared again.
    pub fn discard(&self, model: &PreparedModel, reason: &dyn std::fmt::Display) {
        let key = &model.key;
        tracing::warn!(%key, %reason, "a prepared model that cannot be used is dropped");
        let dropped = self.writable();
        let dropped = dropped.and_then(|()| self.drop_entry(&model.folder, key));
        self.note(key, dropped);
    }

    /// How many models this process found damaged or useless and dropped.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Asks for the right to prepare a model: one at a time for each key over all processes.
    pub fn begin(self: &Arc<Self>, key: &EntryKey) -> Result<Begun, StoreError> {
        self.writable()?;
        let Some(draft) = Draft::claim(self, key)? else {
            return Ok(Begun::Busy);
        };
        // Whoever had the right before may have committed.
        Ok(match self.find(key)? {
            Some(found) => Begun::Exists(found),
            None => Begun::Draft(draft),
        })
    }

    /// Changes what is noted about a model, in one step, and returns it.
    pub fn update_facts(
        &self,
        key: &EntryKey,
        change: impl FnOnce(&mut PreparedFacts),
    ) -> Result<PreparedFacts, StoreError> {
        self.writable()?;
        let _lock = self.lock()?;
        let path = self.entry_path(key);
        let gone = || StoreError::Gone { key: *key };
        let folder = EntryFolder::open(path.clone())
            .at(&path)?
            .ok_or_else(gone)?;
        let mut facts = match folder.facts() {
            Ok(facts) => facts,
            // The next to look it up drops it.
            Err(Unreadable::Damaged(_)) => return Err(gone()),
            Err(Unreadable::Io(error)) => return Err(StoreError::io(&path, error)),
        };
        change(&mut facts);
        let new = self.tmp_dir().join("facts");
        packs::remove_file(&new).at(&new)?;
        record::write_new(&new, &record::encode(&facts)).at(&new)?;
        let place = path.join(FACTS);
        std::fs::rename(&new, &place).at(&place)?;
        record::sync_dir(&path).at(&path)?;
        Ok(facts)
    }

    /// The digests of source files that this store remembers.
    pub fn source_digests(&self) -> &DigestCache {
        &self.sources
    }

    /// Damage that stays is not served, and whoever comes next tries again.
    fn note(&self, key: &EntryKey, dropped: Result<(), StoreError>) {
        match dropped {
            Ok(()) => {
                self.dropped.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => {
                tracing::warn!(%key, %error, "damage could not be removed from the store");
            }
        }
    }

    fn writable(&self) -> Result<(), StoreError> {
        match self.access {
            Access::Full => Ok(()),
            Access::ReadOnly => Err(StoreError::ReadOnly {
                dir: self.config.dir.clone(),
            }),
        }
    }

    /// Keeps other processes and threads from changing what the store holds.
    fn lock(&self) -> Result<File, StoreError> {
        lock::exclusive(&self.lock_path())
    }

    fn packs(&self) -> &Packs {
        &self.packs
    }

    fn lock_path(&self) -> PathBuf {
        self.root.join("store.lock")
    }

    fn entries_dir(&self) -> PathBuf {
        self.root.join("entries")
    }

    fn entry_path(&self, key: &EntryKey) -> PathBuf {
        self.entries_dir().join(key.to_string())
    }

    fn packs_dir(&self) -> PathBuf {
        self.root.join("packs")
    }

    fn drafts_dir(&self) -> PathBuf {
        self.root.join("drafts")
    }

    fn tmp_dir(&self) -> PathBuf {
        self.root.join("tmp")
    }
}

/// Makes the store's folders; fails where it could not be written to.
fn create(root: &Path) -> Result<(), StoreError> {
    for name in ["entries", "packs", "sources", "drafts", "tmp"] {
        let path = root.join(name);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&path)
            .at(&path)?;
        rustix::fs::access(&path, rustix::fs::Access::WRITE_OK).at(&path)?;
    }
    Ok(())
}

/// What others may write to must not be mapped.
fn check_owner(root: &Path) -> Result<(), StoreError> {
    let metadata = root.metadata().at(root)?;
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    let trusted = [0, rustix::process::geteuid().as_raw()].contains(&owner);
    if trusted && mode & 0o022 == 0 {
        return Ok(());
    }
    Err(StoreError::Exposed {
        dir: root.to_owned(),
        owner,
        mode,
    })
}

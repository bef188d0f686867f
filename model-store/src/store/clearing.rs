//! What the store holds, and what leaves it: the damaged, the unused, and what was used longest
//! ago when there is too much.

use std::collections::HashMap;
use std::fs::{self, TryLockError};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::Store;
use super::digest::Digest;
use super::draft::{self, remove_tree};
use super::entry::{EntryFolder, MANIFEST};
use super::error::{At, StoreError};
use super::facts::PreparedFacts;
use super::heads::Head;
use super::key::EntryKey;
use super::packs::{names, remove_file};
use super::record::Unreadable;
use super::stamp::Stamp;

/// What was used so recently stays, whoever used it.
const RECENT: Duration = Duration::from_secs(60);

/// One prepared model, as `dormouse store ls` shows it.
#[derive(Clone, Debug)]
pub struct EntryInfo {
    pub key: EntryKey,
    pub graph_bytes: u64,
    /// Packs that only this model uses.
    pub own_bytes: u64,
    /// Of its weights, those in packs that other models use as well.
    pub shared_bytes: u64,
    pub last_used: SystemTime,
    pub facts: PreparedFacts,
}

/// What [`Store::gc`] did.
#[derive(Clone, Debug, Default)]
pub struct GcReport {
    /// Keys and the models they were for, in the order they went.
    pub removed: Vec<(EntryKey, Vec<String>)>,
    pub packs_removed: usize,
    pub freed_bytes: u64,
    /// What is left; more than was asked for if that much is in use.
    pub kept_bytes: u64,
}

/// An entry, when it was used and what it takes.
#[derive(Debug)]
struct Held {
    key: EntryKey,
    last_used: SystemTime,
    bytes: u64,
    head: Arc<Head>,
}

/// Everything the store holds.
#[derive(Debug, Default)]
struct Scan {
    entries: Vec<Held>,
    /// Entries that cannot be read.
    damaged: Vec<(EntryKey, String)>,
    /// What each pack takes on the disk.
    packs: HashMap<Digest, u64>,
}

impl Scan {
    fn bytes(&self) -> u64 {
        let entries = self.entries.iter().map(|entry| entry.bytes);
        entries.chain(self.packs.values().copied()).sum()
    }

    /// How many entries use each pack.
    fn users(&self) -> HashMap<Digest, usize> {
        let mut users: HashMap<Digest, usize> = HashMap::new();
        for pack in self.entries.iter().flat_map(|entry| &entry.head.packs) {
            *users.entry(pack.digest).or_default() += 1;
        }
        users
    }
}

impl Store {
    /// All prepared models, last used first.
    pub fn list(&self) -> Result<Vec<EntryInfo>, StoreError> {
        let scan = self.scan()?;
        let users = scan.users();
        let mut list: Vec<EntryInfo> = scan
            .entries
            .into_iter()
            .map(|entry| {
                let (mut own_bytes, mut shared_bytes) = (0, 0);
                for pack in &entry.head.packs {
                    if users.get(&pack.digest).is_some_and(|users| *users > 1) {
                        shared_bytes += pack.used_bytes;
                    } else {
                        own_bytes += pack.bytes;
                    }
                }
                EntryInfo {
                    key: entry.key,
                    graph_bytes: entry.head.graph_bytes,
                    own_bytes,
                    shared_bytes,
                    last_used: entry.last_used,
                    facts: entry.head.facts.clone(),
                }
            })
            .collect();
        list.sort_by_key(|entry| (std::cmp::Reverse(entry.last_used), entry.key));
        Ok(list)
    }

    /// Removes what was used longest ago until at most `max_bytes` are left, packs that no model
    /// uses, and what crashes left behind. What a process holds or used within the last minute
    /// stays.
    pub fn gc(&self, max_bytes: u64) -> Result<GcReport, StoreError> {
        self.writable()?;
        let _lock = self.lock()?;
        self.sweep()?;
        self.clear(max_bytes)
    }

    /// Makes the store hold at most `max_bytes` if it can, and returns what it holds. Only under
    /// the store's lock.
    pub(super) fn make_room(&self, max_bytes: u64) -> Result<u64, StoreError> {
        let bytes = self.bytes_on_disk()?;
        if bytes <= max_bytes {
            return Ok(bytes);
        }
        Ok(self.clear(max_bytes)?.kept_bytes)
    }

    /// What prepared models take on the disk.
    pub fn bytes_on_disk(&self) -> Result<u64, StoreError> {
        let packs_dir = self.packs_dir();
        let packs = self.packs().digests().at(&packs_dir)?;
        let mut bytes: u64 = packs
            .iter()
            .map(|digest| self.packs().bytes_on_disk(digest))
            .sum();
        for key in self.keys()? {
            let path = self.entry_path(&key);
            if let Some(folder) = EntryFolder::open(path.clone()).at(&path)? {
                bytes += folder.bytes_on_disk();
            }
        }
        Ok(bytes)
    }

    /// See [`Store::gc`]. Only under the store's lock.
    fn clear(&self, max_bytes: u64) -> Result<GcReport, StoreError> {
        let mut report = GcReport::default();
        let mut scan = self.scan()?;
        let before = scan.bytes();
        for (key, reason) in std::mem::take(&mut scan.damaged) {
            tracing::warn!(%key, reason, "a damaged prepared model is removed");
            self.remove_entry(&key)?;
        }
        report.kept_bytes = before;
        let mut users = scan.users();
        for digest in scan.packs.keys() {
            if !users.contains_key(digest) {
                self.clear_pack(digest, &scan, &mut report)?;
            }
        }
        let now = SystemTime::now();
        scan.entries
            .sort_unstable_by_key(|entry| (entry.last_used, entry.key));
        for entry in &scan.entries {
            if report.kept_bytes <= max_bytes {
                break;
            }
            let recent = now
                .duration_since(entry.last_used)
                .map_or(true, |since| since < RECENT);
            if recent || !self.remove_unused_entry(&entry.key)? {
                continue;
            }
            let models = entry.head.facts.models.clone();
            tracing::info!(key = %entry.key, ?models, "a prepared model made room");
            report.removed.push((entry.key, models));
            report.kept_bytes -= entry.bytes;
            for pack in &entry.head.packs {
                if let Some(count) = users.get_mut(&pack.digest) {
                    *count -= 1;
                    if *count == 0 {
                        self.clear_pack(&pack.digest, &scan, &mut report)?;
                    }
                }
            }
        }
        self.packs().remove_strays().at(&self.packs_dir())?;
        self.source_digests().prune()?;
        report.freed_bytes = before - report.kept_bytes;
        Ok(report)
    }

    fn clear_pack(
        &self,
        digest: &Digest,
        scan: &Scan,
        report: &mut GcReport,
    ) -> Result<(), StoreError> {
        let path = self.packs().path(digest);
        // Somebody who is preparing a model may be about to refer to it.
        if self.packs().remove_unused(digest).at(&path)? {
            report.kept_bytes -= scan.packs.get(digest).copied().unwrap_or(0);
            report.packs_removed += 1;
        }
        Ok(())
    }

    /// Clears what crashes left behind. Only under the store's lock.
    pub(super) fn sweep(&self) -> Result<(), StoreError> {
        let tmp = self.tmp_dir();
        for name in names(&tmp).at(&tmp)? {
            let path = tmp.join(name);
            remove_file(&path).at(&path)?;
        }
        draft::sweep(&self.drafts_dir())
    }

    /// Removes an entry that turned out damaged, unless its name leads to another one by now.
    pub(super) fn drop_entry(
        &self,
        folder: &EntryFolder,
        key: &EntryKey,
    ) -> Result<(), StoreError> {
        let _lock = self.lock()?;
        if folder.is_current().at(&folder.path)? {
            self.remove_entry(key)?;
        }
        Ok(())
    }

    /// Removes what is in an entry's place and is not even a folder.
    pub(super) fn drop_stray(&self, key: &EntryKey) -> Result<(), StoreError> {
        self.writable()?;
        let _lock = self.lock()?;
        let path = self.entry_path(key);
        if path.symlink_metadata().is_ok_and(|found| !found.is_dir()) {
            remove_file(&path).at(&path)?;
        }
        Ok(())
    }

    /// Removes a pack that turned out damaged, unless it was replaced by now, and the entries that
    /// use it.
    pub(super) fn drop_pack(
        &self,
        digest: &Digest,
        seen: Option<&Stamp>,
    ) -> Result<Vec<EntryKey>, StoreError> {
        let _lock = self.lock()?;
        if self.packs().stamp(digest).as_ref() != seen {
            return Ok(Vec::new());
        }
        let path = self.packs().path(digest);
        self.packs().remove(digest).at(&path)?;
        let scan = self.scan()?;
        let users = scan
            .entries
            .iter()
            .filter(|entry| entry.head.packs.iter().any(|used| used.digest == *digest));
        let users: Vec<EntryKey> = users.map(|entry| entry.key).collect();
        for key in &users {
            self.remove_entry(key)?;
        }
        Ok(users)
    }

    /// Removes an entry that nobody holds; whether it is gone.
    fn remove_unused_entry(&self, key: &EntryKey) -> Result<bool, StoreError> {
        let path = self.entry_path(key);
        let Some(folder) = EntryFolder::open(path.clone()).at(&path)? else {
            return Ok(true);
        };
        match folder.file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(false),
            Err(TryLockError::Error(error)) => return Err(StoreError::io(&path, error)),
        }
        self.remove_entry(key)?;
        Ok(true)
    }

    /// Removes an entry, whoever holds it. Works on a full disk, where nothing can be moved aside.
    pub(super) fn remove_entry(&self, key: &EntryKey) -> Result<(), StoreError> {
        let path = self.entry_path(key);
        // Interrupted after this, what is left is a damaged entry.
        match fs::remove_file(path.join(MANIFEST)) {
            Err(error)
                if !matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                return Err(StoreError::io(&path, error));
            }
            _ => {}
        }
        remove_tree(&path).at(&path)
    }

    /// The keys of all entries, damaged or not, in order.
    pub(super) fn keys(&self) -> Result<Vec<EntryKey>, StoreError> {
        let entries = self.entries_dir();
        let mut keys: Vec<EntryKey> = names(&entries)
            .at(&entries)?
            .iter()
            .filter_map(|name| name.parse().ok())
            .collect();
        keys.sort_unstable();
        Ok(keys)
    }

    fn scan(&self) -> Result<Scan, StoreError> {
        let mut scan = Scan::default();
        let keys = self.keys()?;
        for &key in &keys {
            let path: PathBuf = self.entry_path(&key);
            let folder = match EntryFolder::open(path.clone()) {
                Ok(Some(folder)) => folder,
                Ok(None) => continue,
                Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                    scan.damaged.push((key, "is not a folder".to_owned()));
                    continue;
                }
                Err(error) => return Err(StoreError::io(&path, error)),
            };
            match self.held(key, &folder) {
                Ok(entry) => scan.entries.push(entry),
                // Cleared while we looked.
                Err(_) if !folder.is_current().at(&path)? => {}
                Err(Unreadable::Damaged(reason)) => scan.damaged.push((key, reason)),
                // Without knowing which packs it uses none can be said to be unused.
                Err(Unreadable::Io(error)) => return Err(StoreError::io(&path, error)),
            }
        }
        self.heads.keep(&keys);
        let packs_dir = self.packs_dir();
        for digest in self.packs().digests().at(&packs_dir)? {
            scan.packs
                .insert(digest, self.packs().bytes_on_disk(&digest));
        }
        Ok(scan)
    }

    fn held(&self, key: EntryKey, folder: &EntryFolder) -> Result<Held, Unreadable> {
        Ok(Held {
            key,
            head: self.heads.of(&key, folder, SystemTime::now())?,
            last_used: folder.last_used()?,
            bytes: folder.bytes_on_disk(),
        })
    }
}

//! Copies of remote files on disk, each under a name made of everything that tells its state. A
//! copy appears whole or not at all; the longest unused go when there is no room.
//!
//! `objects/KEY` is a copy, `objects/KEY.json` says what it is of and what the file looked like
//! when it was finished: one that was touched since is fetched again. The time of the note is the
//! time of the last use. `parts/` has what is on its way, `listings/` what repositories held.

mod part;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use dormouse_core::id::ByteSize;
use dormouse_model_store::repository::{LocalCopy, RemoteFile};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::error::{ErrorKind, RemoteError};
use super::index_file::hex;

pub(super) use part::{Expected, Part, PartWriter};

/// Uses within this time are one use.
const SAME_USE: Duration = Duration::from_secs(30);
const MAX_NOTE: u64 = 64 << 10;
/// Of a listing: as many files as a repository may have.
const MAX_LISTING: u64 = 1 << 30;

/// The name of a state of a file of a repository.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key(String);

impl Key {
    pub(super) fn of(repository: &str, file: &RemoteFile) -> Self {
        let tag = file.tag.as_deref();
        // Without a tag, the time of the last change is what there is.
        let modified = tag.map_or(file.modified_ns, |_| 0);
        let mut hasher = Sha256::new();
        for part in [
            repository,
            &file.path,
            tag.unwrap_or_default(),
            file.generation.as_deref().unwrap_or_default(),
        ] {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        hasher.update(file.size.to_le_bytes());
        hasher.update(modified.to_le_bytes());
        Self(hex(&hasher.finalize()))
    }
}

/// What a copy is of, and what its file was like when it was finished.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    repository: String,
    file: RemoteFile,
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

/// While one of these lives, its copy is not removed for want of room.
#[derive(Debug)]
struct Hold;

/// The copies.
#[derive(Debug)]
pub(super) struct Cache {
    folder: PathBuf,
    limit: ByteSize,
    holds: Mutex<HashMap<Key, Weak<Hold>>>,
}

impl Cache {
    pub(super) fn open(folder: &Path, limit: ByteSize) -> Result<Self, RemoteError> {
        let cache = Self {
            folder: folder.to_owned(),
            limit,
            holds: Mutex::default(),
        };
        for name in ["objects", "parts", "listings"] {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(folder.join(name))
                .map_err(|error| RemoteError::disk("be opened", &error))?;
        }
        Ok(cache)
    }

    fn object(&self, key: &Key) -> PathBuf {
        self.folder.join("objects").join(&key.0)
    }

    fn note(&self, key: &Key) -> PathBuf {
        self.folder.join("objects").join(format!("{}.json", key.0))
    }

    fn part(&self, key: &Key, kind: &str) -> PathBuf {
        self.folder.join("parts").join(format!("{}.{kind}", key.0))
    }

    /// Whether a copy seems to be there; opening it looks closer.
    pub(super) fn has(&self, key: &Key) -> bool {
        let is_file = |path: &Path| {
            let metadata = fs::symlink_metadata(path);
            metadata.is_ok_and(|metadata| metadata.is_file())
        };
        is_file(&self.note(key)) && is_file(&self.object(key))
    }

    /// Opens a copy. One that is not as it was finished is removed.
    pub(super) fn find(&self, key: &Key) -> Option<LocalCopy> {
        // Held before it is looked at, so that it does not go in between.
        let hold = self.hold(key);
        let path = self.object(key);
        let file = match open_plain(&path) {
            Ok(file) => file,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    self.remove(key);
                }
                return None;
            }
        };
        let metadata = file.metadata().ok()?;
        let note_path = self.note(key);
        let note: Option<Note> = read_json(&note_path, MAX_NOTE);
        let is_same = note.is_some_and(|note| {
            metadata.is_file()
                && (note.inode, note.size) == (metadata.ino(), metadata.len())
                && note.modified == (metadata.mtime(), metadata.mtime_nsec())
        });
        if !is_same {
            tracing::warn!(copy = %key.0, "a copy in the repository cache was changed; it is fetched again");
            self.remove(key);
            return None;
        }
        self.used(&note_path);
        Some(LocalCopy { file, hold })
    }

    fn hold(&self, key: &Key) -> Arc<Hold> {
        let mut holds = self.holds.lock();
        if let Some(hold) = holds.get(key).and_then(Weak::upgrade) {
            return hold;
        }
        holds.retain(|_, hold| hold.strong_count() > 0);
        let hold = Arc::new(Hold);
        holds.insert(key.clone(), Arc::downgrade(&hold));
        hold
    }

    fn used(&self, note: &Path) {
        let now = SystemTime::now();
        let last = fs::metadata(note).and_then(|metadata| metadata.modified());
        let is_news =
            last.is_ok_and(|last| now.duration_since(last).is_ok_and(|since| since > SAME_USE));
        if is_news && let Ok(file) = File::options().write(true).open(note) {
            // Only the order in which copies go depends on it.
            let _ = file.set_modified(now);
        }
    }

    pub(super) fn remove(&self, key: &Key) {
        // The copy first: a note alone means nothing.
        let _ = fs::remove_file(self.object(key));
        let _ = fs::remove_file(self.note(key));
    }

    /// Makes room for a file and begins or resumes to fetch it. Waits for another process that
    /// does the same; none when it has done so.
    pub(super) fn begin(
        &self,
        key: &Key,
        file: &RemoteFile,
        chunk: u64,
    ) -> Result<Option<Part>, RemoteError> {
        if file.size > self.limit.0 {
            return Err(RemoteError::new(
                ErrorKind::Disk,
                format!(
                    "it has {}, and the repository cache may hold {} (--repository-cache-size)",
                    ByteSize(file.size),
                    self.limit
                ),
            ));
        }
        let opened = Part::open(
            self.part(key, "part"),
            self.part(key, "done"),
            file.size,
            chunk,
        );
        let mut part = opened.map_err(|error| RemoteError::disk("be written to", &error))?;
        if self.has(key) {
            part.discard();
            return Ok(None);
        }
        if !part.is_allocated() {
            let _lock = self.lock()?;
            self.make_room(file.size)?;
            if let Err(error) = part.allocate() {
                part.discard();
                let what = format!("take {}", ByteSize(file.size));
                return Err(RemoteError::disk(&what, &error));
            }
        }
        Ok(Some(part))
    }

    /// Makes a finished part a copy.
    pub(super) fn finish(
        &self,
        key: &Key,
        repository: &str,
        file: &RemoteFile,
        part: Part,
    ) -> Result<(), RemoteError> {
        let finish = || -> io::Result<()> {
            let metadata = part.sync()?;
            let note = Note {
                repository: repository.to_owned(),
                file: file.clone(),
                inode: metadata.ino(),
                size: metadata.len(),
                modified: (metadata.mtime(), metadata.mtime_nsec()),
            };
            write_json(&self.note(key), &note)?;
            part.rename(&self.object(key))?;
            File::open(self.folder.join("objects"))?.sync_all()
        };
        finish().map_err(|error| RemoteError::disk("be written to", &error))
    }

    /// Bytes of all copies and of what is on its way.
    pub(super) fn size(&self) -> u64 {
        self.scan().iter().map(|entry| entry.size).sum()
    }

    fn lock(&self) -> Result<File, RemoteError> {
        let lock = || -> io::Result<File> {
            let file = File::create(self.folder.join("lock"))?;
            file.lock()?;
            Ok(file)
        };
        lock().map_err(|error| RemoteError::disk("be locked", &error))
    }

    /// Removes the longest unused copies until there is room.
    fn make_room(&self, needed: u64) -> Result<(), RemoteError> {
        let mut entries = self.scan();
        entries.sort_by_key(|entry| entry.used);
        let mut total: u64 = entries.iter().map(|entry| entry.size).sum();
        let fits = |total: u64| total.saturating_add(needed) <= self.limit.0;
        for entry in entries {
            if fits(total) {
                break;
            }
            let is_held = {
                let holds = self.holds.lock();
                let hold = holds.get(&entry.key).and_then(Weak::upgrade);
                hold.is_some()
            };
            if is_held && !entry.is_part {
                continue;
            }
            match entry.is_part {
                true if !Part::abandoned(&self.part(&entry.key, "part")) => continue,
                true => {
                    let _ = fs::remove_file(self.part(&entry.key, "part"));
                    let _ = fs::remove_file(self.part(&entry.key, "done"));
                }
                false => self.remove(&entry.key),
            }
            tracing::info!(copy = %entry.key.0, bytes = entry.size, "removed from the repository cache to make room");
            total -= entry.size;
        }
        match fits(total) {
            true => Ok(()),
            false => Err(RemoteError::new(
                ErrorKind::Disk,
                format!(
                    "the repository cache may hold {} (--repository-cache-size) and {} of it are in use",
                    self.limit,
                    ByteSize(total)
                ),
            )),
        }
    }

    fn scan(&self) -> Vec<Entry> {
        let mut entries = Vec::new();
        for (folder, is_part) in [("objects", false), ("parts", true)] {
            let Ok(found) = fs::read_dir(self.folder.join(folder)) else {
                continue;
            };
            for file in found.filter_map(Result::ok) {
                let name = file.file_name();
                let Some(name) = name.to_str() else { continue };
                let key = match (is_part, name.strip_suffix(".part")) {
                    (true, Some(key)) => Key(key.to_owned()),
                    (false, _) if !name.contains('.') => Key(name.to_owned()),
                    _ => continue,
                };
                let Ok(metadata) = file.metadata() else {
                    continue;
                };
                let used = match is_part {
                    true => metadata.modified(),
                    false => fs::metadata(self.note(&key)).and_then(|note| note.modified()),
                };
                entries.push(Entry {
                    key,
                    is_part,
                    size: metadata.len(),
                    // What cannot tell when it was used goes first.
                    used: used.unwrap_or(SystemTime::UNIX_EPOCH),
                });
            }
        }
        entries
    }

    /// Keeps what a repository held, for when it cannot be reached.
    pub(super) fn save_listing(&self, repository: &str, files: &[RemoteFile]) {
        let path = self.listing(repository);
        if let Err(error) = write_json(&path, &files) {
            tracing::warn!(%error, "the repository's listing cannot be kept");
        }
    }

    /// What a repository held when it was last listed.
    pub(super) fn saved_listing(&self, repository: &str) -> Option<Vec<RemoteFile>> {
        read_json(&self.listing(repository), MAX_LISTING)
    }

    fn listing(&self, repository: &str) -> PathBuf {
        let name = hex(&Sha256::digest(repository.as_bytes()));
        self.folder.join("listings").join(format!("{name}.json"))
    }
}

#[derive(Debug)]
struct Entry {
    key: Key,
    is_part: bool,
    size: u64,
    used: SystemTime,
}

/// Opens a file that is no link.
fn open_plain(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
}

fn read_json<T: for<'de> Deserialize<'de>>(path: &Path, limit: u64) -> Option<T> {
    let file = open_plain(path).ok()?;
    if file.metadata().ok()?.len() > limit {
        return None;
    }
    serde_json::from_reader(io::BufReader::new(file)).ok()
}

fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    let mut file = tempfile::Builder::new()
        .prefix(".new")
        .tempfile_in(folder)?;
    let bytes = serde_json::to_vec(value)?;
    file.write_all(&bytes)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests;

//! The folder of packs: which are there, whether they are what they say, which tensors they hold.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::digest::Digest;
use super::draft::remove_tree;
use super::lock::is_at;
use super::pack::Pack;
use super::record::{self, Unreadable};
use super::stamp::Stamp;

const SEAL_LIMIT: u64 = 4096;
/// More than the tensors of any model that fits a machine.
const INDEX_LIMIT: u64 = 64 << 20;
/// Digest, offset and length of a tensor.
const INDEX_RECORD: usize = 48;

/// The packs of a store, each mapped at most once in this process.
#[derive(Debug)]
pub(super) struct Packs {
    dir: PathBuf,
    /// Where files are written before they get their names; none in a store that is only read.
    tmp: Option<PathBuf>,
    slots: Mutex<HashMap<Digest, Arc<Mutex<Slot>>>>,
}

#[derive(Debug, Default)]
struct Slot {
    pack: Weak<Pack>,
    mapped: Option<Stamp>,
    /// What the file looked like when its digest was found right and no seal could be written.
    verified: Option<Stamp>,
}

/// Where a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Indexed {
    pub(super) digest: Digest,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Packs {
    pub(super) fn new(dir: PathBuf, tmp: Option<PathBuf>) -> Self {
        Self {
            dir,
            tmp,
            slots: Mutex::default(),
        }
    }

    pub(super) fn path(&self, digest: &Digest) -> PathBuf {
        self.dir.join(format!("{digest}.bin"))
    }

    pub(super) fn seal_path(&self, digest: &Digest) -> PathBuf {
        self.dir.join(format!("{digest}.seal"))
    }

    pub(super) fn index_path(&self, digest: &Digest) -> PathBuf {
        self.dir.join(format!("{digest}.index"))
    }

    /// The pack, mapped; its digest is computed only when its file is not the one that was sealed.
    pub(super) fn open(
        &self,
        digest: &Digest,
        bytes: Option<u64>,
    ) -> Result<Arc<Pack>, Unreadable> {
        let slot = {
            let mut slots = relock(&self.slots);
            slots.retain(|_, slot| {
                Arc::strong_count(slot) > 1
                    || slot
                        .try_lock()
                        .is_ok_and(|slot| slot.verified.is_some() || slot.pack.strong_count() > 0)
            });
            slots.entry(*digest).or_default().clone()
        };
        // Whoever wants the same pack meanwhile waits here, not for another's.
        let mut slot = relock(&slot);
        let (file, stamp) = self.open_file(digest)?;
        if let (Some(pack), Some(mapped)) = (slot.pack.upgrade(), slot.mapped)
            && mapped == stamp
        {
            return Ok(pack);
        }
        if let Some(bytes) = bytes.filter(|bytes| *bytes != stamp.size) {
            let found = stamp.size;
            let reason = format!("pack {digest} has {found} bytes instead of {bytes}");
            return Err(Unreadable::Damaged(reason));
        }
        if slot.verified != Some(stamp) && !self.is_sealed(digest, &stamp) {
            check(digest, &file, stamp, &|_| {})?;
            if !self.seal(digest, &stamp) {
                slot.verified = Some(stamp);
            }
        }
        let pack = Arc::new(Pack::map(file, *digest)?);
        slot.pack = Arc::downgrade(&pack);
        slot.mapped = Some(stamp);
        Ok(pack)
    }

    /// Computes the digest of a pack whatever its seal says.
    pub(super) fn verify(
        &self,
        digest: &Digest,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), Unreadable> {
        let (file, stamp) = self.open_file(digest)?;
        check(digest, &file, stamp, progress)?;
        if self.sealed(digest) != Some(stamp) {
            self.seal(digest, &stamp);
        }
        Ok(())
    }

    /// What the file looks like now; none when it is not there.
    pub(super) fn stamp(&self, digest: &Digest) -> Option<Stamp> {
        let metadata = self.path(digest).symlink_metadata().ok()?;
        Some(Stamp::of(&metadata))
    }

    /// The file, with a lock that keeps it from being cleared up.
    fn open_file(&self, digest: &Digest) -> Result<(File, Stamp), Unreadable> {
        let gone = || Unreadable::Damaged(format!("pack {digest} is missing"));
        let path = self.path(digest);
        let file = match record::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(gone()),
            opened => opened?,
        };
        match file.try_lock_shared() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(gone()),
            Err(fs::TryLockError::Error(error)) => return Err(error.into()),
        }
        if !is_at(&file, &path)? {
            return Err(gone());
        }
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(Unreadable::Damaged(format!("pack {digest} is not a file")));
        }
        Ok((file, Stamp::of(&metadata)))
    }

    /// In a store that is only read nobody can seal a copy, such as an image has: it would be read from
    /// end to end by every process.
    fn is_sealed(&self, digest: &Digest, stamp: &Stamp) -> bool {
        let is_only_read = self.tmp.is_none();
        self.sealed(digest)
            .is_some_and(|sealed| sealed == *stamp || is_only_read && stamp.is_copy_of(&sealed))
    }

    fn sealed(&self, digest: &Digest) -> Option<Stamp> {
        record::read(&self.seal_path(digest), SEAL_LIMIT).ok()
    }

    /// Records that the file has the right digest; whether that could be done. It need not last:
    /// without it the digest is computed again.
    pub(super) fn seal(&self, digest: &Digest, stamp: &Stamp) -> bool {
        let Some(tmp) = &self.tmp else { return false };
        let sealed = replace(tmp, &self.seal_path(digest), &record::encode(stamp));
        if let Err(error) = &sealed {
            tracing::warn!(pack = %digest, %error, "a pack could not be sealed");
        }
        sealed.is_ok()
    }

    /// Where packs hold tensors with these digests. A hint: what is there must be compared.
    pub(super) fn holders(
        &self,
        wanted: impl Fn(&Digest) -> bool,
    ) -> io::Result<Vec<(Digest, Indexed)>> {
        let mut found = Vec::new();
        for digest in self.digests()? {
            // Without an index its tensors are stored again: no harm but space.
            let Ok(index) = record::read_bytes(&self.index_path(&digest), INDEX_LIMIT) else {
                continue;
            };
            let records = index
                .as_chunks::<INDEX_RECORD>()
                .0
                .iter()
                .map(Indexed::read);
            found.extend(
                records
                    .filter(|record| wanted(&record.digest))
                    .map(|record| (digest, record)),
            );
        }
        Ok(found)
    }

    /// Every pack that has a file, in order.
    pub(super) fn digests(&self) -> io::Result<Vec<Digest>> {
        let mut digests = Vec::new();
        for name in names(&self.dir)? {
            if let Some(digest) = name.strip_suffix(".bin").and_then(|name| name.parse().ok()) {
                digests.push(digest);
            }
        }
        digests.sort_unstable();
        Ok(digests)
    }

    /// What the pack and the files beside it take.
    pub(super) fn bytes_on_disk(&self, digest: &Digest) -> u64 {
        [
            self.path(digest),
            self.seal_path(digest),
            self.index_path(digest),
        ]
        .iter()
        .filter_map(|path| path.symlink_metadata().ok())
        .map(|metadata| metadata.len())
        .sum()
    }

    /// Removes a pack that nobody holds; whether it is gone. Only under the store's lock.
    pub(super) fn remove_unused(&self, digest: &Digest) -> io::Result<bool> {
        let file = match record::open(&self.path(digest)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
            Err(error) => return Err(error),
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Ok(false),
            Err(fs::TryLockError::Error(error)) => return Err(error),
        }
        self.remove(digest)?;
        Ok(true)
    }

    /// Removes a pack's files; whoever has it mapped keeps it. Only under the store's lock.
    pub(super) fn remove(&self, digest: &Digest) -> io::Result<()> {
        // The pack first: the others mean nothing without it, and it nothing good without them.
        for path in [
            self.path(digest),
            self.seal_path(digest),
            self.index_path(digest),
        ] {
            remove_tree(&path)?;
        }
        Ok(())
    }

    /// Removes seals and indexes whose pack is gone. Only under the store's lock.
    pub(super) fn remove_strays(&self) -> io::Result<()> {
        for name in names(&self.dir)? {
            let stem = name.strip_suffix(".seal").or(name.strip_suffix(".index"));
            if let Some(digest) = stem.and_then(|stem| stem.parse::<Digest>().ok())
                && !self.path(&digest).exists()
            {
                remove_file(&self.dir.join(&name))?;
            }
        }
        Ok(())
    }
}

impl Indexed {
    fn read(record: &[u8; INDEX_RECORD]) -> Self {
        let (digest, rest) = record.split_first_chunk::<32>().expect("48 bytes");
        let (offset, rest) = rest.split_first_chunk::<8>().expect("16 bytes");
        let (len, _) = rest.split_first_chunk::<8>().expect("8 bytes");
        Self {
            digest: Digest::from_bytes(*digest),
            offset: u64::from_le_bytes(*offset),
            len: u64::from_le_bytes(*len),
        }
    }

    /// The content of an index.
    pub(super) fn encode(records: &[Self]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(records.len() * INDEX_RECORD);
        for record in records {
            bytes.extend_from_slice(record.digest.as_bytes());
            bytes.extend_from_slice(&record.offset.to_le_bytes());
            bytes.extend_from_slice(&record.len.to_le_bytes());
        }
        bytes
    }
}

fn check(
    digest: &Digest,
    file: &File,
    stamp: Stamp,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), Unreadable> {
    if Digest::of_file(file, stamp.size, progress)? != *digest {
        return Err(Unreadable::Damaged(format!(
            "pack {digest} does not have the digest it is named after"
        )));
    }
    if Stamp::of(&file.metadata()?) != stamp {
        return Err(Unreadable::Damaged(format!(
            "pack {digest} changed while it was read"
        )));
    }
    Ok(())
}

/// Puts a small file in place of another in one step.
pub(super) fn replace(tmp: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = tempfile::NamedTempFile::new_in(tmp)?;
    io::Write::write_all(&mut file, bytes)?;
    file.persist(path)?;
    Ok(())
}

pub(super) fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// The names in a folder that are UTF-8, as all of ours are; none when it is not there.
pub(super) fn names(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        if let Ok(name) = entry?.file_name().into_string() {
            names.push(name);
        }
    }
    Ok(names)
}

/// What these locks guard is whole at every step.
fn relock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

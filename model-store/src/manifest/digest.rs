//! Digests of files: computed when somebody asks, remembered by what tells one state of a file
//! from another.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::onnx::ReadAt;
use crate::repository::{FileIdentity, OpenFile, RepositoryError};
use crate::store::Digest;

/// How much is read at a time; progress is told as often.
const CHUNK: usize = 1 << 20;
/// The most digests kept in memory.
const MAX_REMEMBERED: usize = 65_536;
/// A file changed this recently may change again without its times telling.
const SETTLED_AFTER_NS: i64 = 2_000_000_000;

/// Where digests of files come from.
pub trait Digests: Send + Sync {
    /// The digest of the file as it was when it was opened; `progress` is told of bytes read, and
    /// not called when the digest was known.
    fn digest(
        &self,
        file: &OpenFile,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Digest, RepositoryError>;
}

/// Digests remembered as long as the process lives.
#[derive(Debug, Default)]
pub struct MemoryDigests {
    known: Mutex<HashMap<FileIdentity, Digest>>,
}

impl Digests for MemoryDigests {
    fn digest(
        &self,
        file: &OpenFile,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Digest, RepositoryError> {
        let identity = file.identity();
        let known = identity.and_then(|identity| self.lock().get(&identity).copied());
        if let Some(digest) = known {
            return Ok(digest);
        }
        let settled = identity.filter(|identity| is_settled(identity, SystemTime::now()));
        let digest = hash_file(file, progress)?;
        if let Some(identity) = settled {
            let mut known = self.lock();
            if known.len() >= MAX_REMEMBERED {
                known.clear();
            }
            known.insert(identity, digest);
        }
        Ok(digest)
    }
}

impl MemoryDigests {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<FileIdentity, Digest>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a file's last change lies so far back that another one would show in its times.
pub fn is_settled(identity: &FileIdentity, now: SystemTime) -> bool {
    let Ok(now) = now.duration_since(UNIX_EPOCH) else {
        return false;
    };
    let now = i64::try_from(now.as_nanos()).unwrap_or(i64::MAX);
    let last = identity.modified_ns.max(identity.changed_ns);
    last < now.saturating_sub(SETTLED_AFTER_NS)
}

/// Reads a file from its beginning to its end and tells its digest.
pub fn hash_file(
    file: &OpenFile,
    progress: &mut dyn FnMut(u64),
) -> Result<Digest, RepositoryError> {
    let mut hasher = blake3::Hasher::new();
    hash_range(file, (0, file.size()), &mut hasher, progress)?;
    file.unchanged()?;
    Ok(Digest::from_bytes(hasher.finalize().into()))
}

/// Feeds `length` bytes from `offset` to a hasher.
pub(super) fn hash_range(
    file: &OpenFile,
    (offset, length): (u64, u64),
    hasher: &mut blake3::Hasher,
    progress: &mut dyn FnMut(u64),
) -> Result<(), RepositoryError> {
    let mut buffer = vec![0; CHUNK.min(usize::try_from(length).unwrap_or(CHUNK))];
    let mut done = 0;
    while done < length {
        let wanted = usize::try_from(length - done).map_or(CHUNK, |left| left.min(CHUNK));
        let count = match file.read_at(&mut buffer[..wanted], offset + done) {
            Ok(0) => return Err(file.changed()),
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(cause) => return Err(file.failed(cause)),
        };
        hasher.update(&buffer[..count]);
        done += count as u64;
        progress(count as u64);
    }
    Ok(())
}

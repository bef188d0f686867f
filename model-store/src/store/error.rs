//! Why the store could not do what it was asked. None of it is a reason to stop serving: the
//! source model remains.

use std::io;
use std::path::{Path, PathBuf};

use dormouse_core::id::ByteSize;

use super::key::EntryKey;

/// Why the store could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    #[error("the store cannot use {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("no space is left on the disk for {}", path.display())]
    NoSpace { path: PathBuf },
    #[error("the store in {} cannot be written", dir.display())]
    ReadOnly { dir: PathBuf },
    #[error(
        "{} may be changed by other users (owner {owner}, mode {mode:04o}): what is mapped from it could change under a running model",
        dir.display()
    )]
    Exposed { dir: PathBuf, owner: u32, mode: u32 },
    #[error(
        "the prepared model takes {}, the store holds at most {}",
        ByteSize(*.needed), ByteSize(*.max)
    )]
    TooLarge { needed: u64, max: u64 },
    #[error(
        "the prepared model takes {}, the store holds at most {} and {} of that are in use",
        ByteSize(*.needed), ByteSize(*.max), ByteSize(*.in_use)
    )]
    Full { needed: u64, max: u64, in_use: u64 },
    #[error("another process has held {} for more than {seconds} s", path.display())]
    Locked { path: PathBuf, seconds: u64 },
    #[error("tensor '{tensor}' cannot be stored: {reason}")]
    Tensor { tensor: String, reason: String },
    #[error("{} changed while it was read", path.display())]
    Changed { path: PathBuf },
    #[error("prepared model {} is not in the store", .key.short())]
    Gone { key: EntryKey },
}

impl StoreError {
    pub(super) fn io(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        if matches!(
            source.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        ) {
            return Self::NoSpace { path };
        }
        Self::Io { path, source }
    }
}

/// Gives an error of the system the path it was about.
pub(super) trait At<T> {
    fn at(self, path: &Path) -> Result<T, StoreError>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, path: &Path) -> Result<T, StoreError> {
        self.map_err(|source| StoreError::io(path, source))
    }
}

impl<T> At<T> for Result<T, rustix::io::Errno> {
    fn at(self, path: &Path) -> Result<T, StoreError> {
        self.map_err(|source| StoreError::io(path, source.into()))
    }
}

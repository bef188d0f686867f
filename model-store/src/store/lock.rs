//! Locks between processes; the system lets go of them when their holder dies.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::error::{At, StoreError};

/// How long commits and clearing up wait for each other. They hold the lock for renames and
/// removals only, never while bulk data is written or hashed.
const PATIENCE: Duration = Duration::from_secs(30);

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
}

/// Holds the lock until the file is dropped.
pub(super) fn exclusive(path: &Path) -> Result<File, StoreError> {
    let file = open(path).at(path)?;
    match file.try_lock() {
        Ok(()) => return Ok(file),
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => return Err(StoreError::io(path, error)),
    }
    // The system has no lock with a deadline: another thread waits, and lets go at once of a lock
    // that comes too late.
    let (sender, receiver) = mpsc::sync_channel(0);
    thread::Builder::new()
        .name("store-lock".to_owned())
        .spawn(move || {
            let locked = file.lock().map(|()| file);
            let _ = sender.send(locked);
        })
        .at(path)?;
    match receiver.recv_timeout(PATIENCE) {
        Ok(locked) => locked.at(path),
        Err(_) => Err(StoreError::Locked {
            path: path.to_owned(),
            seconds: PATIENCE.as_secs(),
        }),
    }
}

/// Holds the lock if nobody else does. The holder may remove the file before it lets go.
pub(super) fn claim(path: &Path) -> Result<Option<File>, StoreError> {
    loop {
        let file = open(path).at(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(StoreError::io(path, error)),
        }
        // Between opening and locking the previous holder may have removed it, and somebody else
        // may hold a new one.
        if is_at(&file, path).at(path)? {
            return Ok(Some(file));
        }
    }
}

/// Whether the path still leads to this open file.
pub(super) fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let open = file.metadata()?;
    match path.symlink_metadata() {
        Ok(there) => Ok((there.dev(), there.ino()) == (open.dev(), open.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_is_exclusive_until_it_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = claim(&path).unwrap().unwrap();
        assert!(claim(&path).unwrap().is_none());
        std::fs::remove_file(&path).unwrap();
        drop(held);
        assert!(claim(&path).unwrap().is_some());
    }

    #[test]
    fn an_exclusive_lock_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = exclusive(&path).unwrap();
        let waiting = thread::scope(|scope| {
            let waiting = scope.spawn(|| exclusive(&path));
            drop(held);
            waiting.join().unwrap()
        });
        assert!(waiting.is_ok());
    }
}

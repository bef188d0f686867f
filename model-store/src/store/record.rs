//! Small JSON files whose damage is noticed: a line with the digest, then the content.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::digest::Digest;

/// Why a file of the store cannot be used.
#[derive(Debug)]
pub(super) enum Unreadable {
    /// It is not what was written; with a sentence for the log.
    Damaged(String),
    /// Nothing is known about its content.
    Io(io::Error),
}

impl Unreadable {
    pub(super) fn damaged(reason: impl Into<String>) -> Self {
        Self::Damaged(reason.into())
    }
}

impl From<io::Error> for Unreadable {
    fn from(error: io::Error) -> Self {
        // A part that is missing or short is damage; anything else may pass.
        match error.kind() {
            io::ErrorKind::NotFound => Self::damaged("is missing"),
            io::ErrorKind::UnexpectedEof => Self::damaged("is too short"),
            io::ErrorKind::IsADirectory => Self::damaged("is a folder"),
            io::ErrorKind::NotADirectory => Self::damaged("is not in a folder"),
            _ if error.raw_os_error() == Some(libc::ELOOP) => Self::damaged("is a link"),
            _ => Self::Io(error),
        }
    }
}

/// A file of the store opened for reading; a link in its place is not followed.
pub(super) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
}

/// A whole file of at most `limit` bytes.
pub(super) fn read_bytes(path: &Path, limit: u64) -> Result<Vec<u8>, Unreadable> {
    let file = open(path)?;
    let size = file.metadata()?.len();
    if size > limit {
        return Err(Unreadable::Damaged(format!(
            "has {size} bytes, at most {limit} are expected"
        )));
    }
    let mut bytes = Vec::new();
    bytes
        .try_reserve_exact(usize::try_from(size).map_err(io::Error::other)?)
        .map_err(io::Error::other)?;
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

pub(super) fn read<T: DeserializeOwned>(path: &Path, limit: u64) -> Result<T, Unreadable> {
    let bytes = read_bytes(path, limit)?;
    let mut parts = bytes.splitn(2, |byte| *byte == b'\n');
    let digest = parts
        .next()
        .and_then(|line| std::str::from_utf8(line).ok())
        .and_then(|line| line.parse::<Digest>().ok())
        .ok_or_else(|| Unreadable::damaged("does not begin with a digest"))?;
    let content = parts.next().unwrap_or_default();
    if Digest::of(content) != digest {
        return Err(Unreadable::damaged("does not have the digest it says"));
    }
    serde_json::from_slice(content)
        .map_err(|error| Unreadable::Damaged(format!("cannot be read: {error}")))
}

/// What [`read`] reads.
pub(super) fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    let mut content = serde_json::to_vec(value).expect("records serialise");
    content.push(b'\n');
    let mut bytes = format!("{}\n", Digest::of(&content)).into_bytes();
    bytes.append(&mut content);
    bytes
}

/// Writes a new file, on the disk when this returns.
pub(super) fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Makes names in a folder last.
pub(super) fn sync_dir(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

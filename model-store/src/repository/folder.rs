//! A model's files, wherever they are: on disk, handed over in memory, or elsewhere.

use std::any::Any;
use std::fs::{File, Metadata};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::RepositoryError;
use super::beneath::Dir;
use super::remote::RemoteFolder;
use super::tree::Tree;
use crate::onnx::ReadAt;

/// Files at least this large are read by two threads: one does not fill the memory bus.
const TWO_STREAMS_FROM: u64 = 64 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EntryKind {
    File,
    Folder,
    /// Not followed yet.
    Link,
    Other,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) kind: EntryKind,
    pub(super) utf8: bool,
}

/// A folder of a model.
#[derive(Clone, Debug)]
pub(super) enum Folder {
    Disk(Arc<Dir>),
    Memory(Tree<MemoryFile>),
    Elsewhere(RemoteFolder),
}

/// A file that was handed over.
#[derive(Clone, Debug)]
pub(super) struct MemoryFile {
    pub(super) bytes: Bytes,
    /// A hash of its content, in the place of an inode's number.
    pub(super) hash: u64,
}

impl MemoryFile {
    pub(super) fn new(bytes: Bytes) -> Self {
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        Self {
            bytes,
            hash: hasher.finish(),
        }
    }
}

impl Folder {
    pub(super) fn kind(&self, relative: &str) -> Result<Option<EntryKind>, RepositoryError> {
        match self {
            Self::Disk(dir) => dir.kind(relative),
            Self::Memory(tree) => Ok(tree.kind(relative)),
            Self::Elsewhere(folder) => Ok(folder.tree.kind(relative)),
        }
    }

    pub(super) fn folder(&self, relative: &str) -> Result<Self, RepositoryError> {
        match self {
            Self::Disk(dir) => Ok(Self::Disk(Arc::new(Dir::open_below(dir, relative)?))),
            Self::Memory(_) | Self::Elsewhere(_) => match self.kind(relative)? {
                Some(EntryKind::Folder) => Ok(match self {
                    Self::Elsewhere(folder) => Self::Elsewhere(RemoteFolder {
                        tree: folder.tree.folder(relative),
                        remote: Arc::clone(&folder.remote),
                    }),
                    Self::Memory(tree) => Self::Memory(tree.folder(relative)),
                    Self::Disk(_) => self.clone(),
                }),
                Some(_) => Err(RepositoryError::NotAFolder {
                    path: self.join(relative),
                }),
                None => Err(RepositoryError::NotFound {
                    path: self.join(relative),
                }),
            },
        }
    }

    /// Names in this folder; those of links with what they lead to, unless that is outside.
    pub(super) fn entries(&self) -> Result<Vec<Entry>, RepositoryError> {
        match self {
            Self::Disk(dir) => {
                let mut entries = dir.entries()?;
                for entry in &mut entries {
                    if entry.kind == EntryKind::Link {
                        entry.kind = match dir.kind(&entry.name) {
                            Ok(Some(kind)) => kind,
                            _ => EntryKind::Other,
                        };
                    }
                }
                Ok(entries)
            }
            Self::Memory(tree) => Ok(tree.entries()),
            Self::Elsewhere(folder) => Ok(folder.tree.entries()),
        }
    }

    /// Opens a regular file.
    pub(super) fn file(&self, relative: &str) -> Result<OpenFile, RepositoryError> {
        let path = self.join(relative);
        match self {
            Self::Disk(dir) => {
                let file = dir.open_file(relative)?;
                OpenFile::on_disk(path, file, None)
            }
            Self::Memory(tree) => {
                let Some(file) = tree.get(relative) else {
                    return Err(RepositoryError::NotFound { path });
                };
                Ok(OpenFile {
                    path,
                    links: 1,
                    identity: FileIdentity {
                        size: file.bytes.len() as u64,
                        inode: file.hash,
                        ..FileIdentity::default()
                    },
                    content: Content::Memory(file.bytes.clone()),
                    hold: None,
                })
            }
            Self::Elsewhere(folder) => {
                let Some(listed) = folder.tree.get(relative) else {
                    return Err(RepositoryError::NotFound { path });
                };
                let copy = folder.open(listed, &path)?;
                OpenFile::on_disk(path, copy.file, Some(Hold(copy.hold)))
            }
        }
    }

    /// Opens a file of data beside a graph: a regular one with one name.
    pub(super) fn data_file(&self, relative: &str) -> Result<OpenFile, RepositoryError> {
        let file = self.file(relative)?;
        if file.links != 1 {
            return Err(RepositoryError::HardLinked {
                links: file.links,
                path: file.path,
            });
        }
        Ok(file)
    }

    /// A path below this folder as messages show it.
    pub(super) fn join(&self, relative: &str) -> String {
        match self {
            Self::Disk(dir) => dir.join(relative),
            Self::Memory(tree) => tree.join(relative),
            Self::Elsewhere(folder) => folder.tree.join(relative),
        }
    }
}

/// What tells one state of a file from another.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct FileIdentity {
    pub device: u64,
    pub inode: u64,
    pub size: u64,
    /// When its content last changed, in nanoseconds since 1970.
    pub modified_ns: i64,
    /// When its content, its name or its owner last changed: nobody can set this one back.
    pub changed_ns: i64,
}

impl FileIdentity {
    /// Of the file that this was asked of.
    pub fn of(metadata: &Metadata) -> Self {
        let since_1970 = |seconds: i64, nanoseconds: i64| {
            seconds
                .saturating_mul(1_000_000_000)
                .saturating_add(nanoseconds)
        };
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.len(),
            modified_ns: since_1970(metadata.mtime(), metadata.mtime_nsec()),
            changed_ns: since_1970(metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// A regular file, open; its size and kind are those of the open file.
#[derive(Debug)]
pub struct OpenFile {
    pub(super) path: String,
    pub(super) links: u64,
    pub(super) identity: FileIdentity,
    content: Content,
    /// Keeps the copy of a file that is elsewhere.
    #[expect(dead_code, reason = "its life is what counts")]
    hold: Option<Hold>,
}

/// See [`super::LocalCopy`].
struct Hold(#[expect(dead_code, reason = "its life is what counts")] Arc<dyn Any + Send + Sync>);

impl std::fmt::Debug for Hold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hold")
    }
}

#[derive(Debug)]
enum Content {
    Disk(File),
    Memory(Bytes),
}

impl ReadAt for OpenFile {
    fn size(&self) -> u64 {
        self.identity.size
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        match &self.content {
            Content::Disk(file) => file.read_at(buffer, offset),
            Content::Memory(bytes) => ReadAt::read_at(bytes, buffer, offset),
        }
    }
}

impl OpenFile {
    fn on_disk(path: String, file: File, hold: Option<Hold>) -> Result<Self, RepositoryError> {
        let metadata = match file.metadata() {
            Ok(metadata) => metadata,
            Err(cause) => return Err(RepositoryError::Io { path, cause }),
        };
        if !metadata.is_file() {
            let found = describe(&metadata);
            return Err(RepositoryError::NotRegular { path, found });
        }
        Ok(Self {
            path,
            links: metadata.nlink(),
            identity: FileIdentity::of(&metadata),
            content: Content::Disk(file),
            hold,
        })
    }

    /// The file's path relative to the repository.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// What the file was like when it was opened; none for one that was handed over in memory,
    /// which nothing outside tells from another.
    pub fn identity(&self) -> Option<FileIdentity> {
        match self.content {
            Content::Disk(_) => Some(self.identity),
            Content::Memory(_) => None,
        }
    }

    /// The file behind it; none for one that was handed over in memory.
    pub fn as_file(&self) -> Option<&File> {
        match &self.content {
            Content::Disk(file) => Some(file),
            Content::Memory(_) => None,
        }
    }

    /// Reads the whole file; fails when it changes meanwhile.
    pub fn read(&self) -> Result<Vec<u8>, RepositoryError> {
        let size = self.identity.size;
        let file = match &self.content {
            Content::Memory(bytes) => return Ok(bytes.to_vec()),
            Content::Disk(file) => file,
        };
        let mut bytes = self.allocate(size)?;
        if size < TWO_STREAMS_FROM {
            self.read_into(file, &mut bytes, 0)?;
        } else {
            let middle = bytes.len() / 2;
            let (front, back) = bytes.split_at_mut(middle);
            std::thread::scope(|scope| {
                let other = std::thread::Builder::new()
                    .name("read-weights".to_owned())
                    .spawn_scoped(scope, || self.read_into(file, front, 0));
                let read_back = self.read_into(file, back, middle as u64);
                match other {
                    Ok(other) => other.join().unwrap_or_else(|_| {
                        Err(self.failed(io::Error::other("the reading thread panicked")))
                    })?,
                    Err(cause) => return Err(self.failed(cause)),
                }
                read_back
            })?;
        }
        self.unchanged()?;
        Ok(bytes)
    }

    /// Fails when the open file is no longer what it was when it was opened.
    pub fn unchanged(&self) -> Result<(), RepositoryError> {
        if let Content::Disk(file) = &self.content {
            let metadata = file.metadata().map_err(|cause| self.failed(cause))?;
            if FileIdentity::of(&metadata) != self.identity {
                return Err(self.changed());
            }
        }
        Ok(())
    }

    pub(crate) fn changed(&self) -> RepositoryError {
        RepositoryError::Changed {
            path: self.path.clone(),
        }
    }

    fn allocate(&self, size: u64) -> Result<Vec<u8>, RepositoryError> {
        let refused = || RepositoryError::OutOfMemory {
            path: self.path.clone(),
            size,
        };
        let length = usize::try_from(size).map_err(|_| refused())?;
        // Asked for first, because a zeroed vector aborts where this can fail; the zeroed one then
        // comes as untouched pages, which are written once instead of twice.
        let mut probe: Vec<u8> = Vec::new();
        probe.try_reserve_exact(length).map_err(|_| refused())?;
        drop(probe);
        Ok(vec![0; length])
    }

    fn read_into(&self, file: &File, to: &mut [u8], from: u64) -> Result<(), RepositoryError> {
        file.read_exact_at(to, from)
            .map_err(|cause| match cause.kind() {
                // It was longer when it was opened.
                io::ErrorKind::UnexpectedEof => self.changed(),
                _ => self.failed(cause),
            })
    }

    pub(crate) fn failed(&self, cause: io::Error) -> RepositoryError {
        RepositoryError::Io {
            path: self.path.clone(),
            cause,
        }
    }
}

fn describe(metadata: &Metadata) -> &'static str {
    let kind = metadata.file_type();
    if kind.is_dir() {
        "folder"
    } else if kind.is_fifo() {
        "pipe"
    } else if kind.is_socket() {
        "socket"
    } else {
        "device"
    }
}

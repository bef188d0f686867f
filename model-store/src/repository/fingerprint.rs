//! What tells one state of a model from another, without reading its files.

use std::os::unix::fs::MetadataExt;

use super::folder::{EntryKind, FileIdentity, Folder};
use super::{RepositoryError, remote};

/// The most files and folders of one version.
const MAX_FILES: usize = 10_000;
/// How deep folders may be nested; also what ends a circle of links.
const MAX_DEPTH: usize = 8;

/// One file's state.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileStamp {
    /// Relative to the model's folder.
    pub path: String,
    pub size: u64,
    /// Seconds and nanoseconds of the last change of content.
    pub modified: (i64, i64),
    /// Device and inode; for a file in memory, a hash of its content, and for one that is
    /// elsewhere, of what its server tells it by.
    pub inode: (u64, u64),
}

impl FileStamp {
    /// Whether this is the state of an opened file. The copy of a file that is elsewhere was
    /// opened by its state and has it.
    pub fn is(&self, file: &FileIdentity) -> bool {
        if self.inode.0 == remote::ELSEWHERE {
            return self.size == file.size;
        }
        let (seconds, nanoseconds) = self.modified;
        let modified_ns = seconds
            .saturating_mul(1_000_000_000)
            .saturating_add(nanoseconds);
        (self.inode, self.size, modified_ns)
            == ((file.device, file.inode), file.size, file.modified_ns)
    }
}

/// The state of a version's files and of the configuration, in order of their paths.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    pub files: Vec<FileStamp>,
}

pub(super) fn of(
    model: &Folder,
    config: Option<String>,
    version: &str,
) -> Result<Fingerprint, RepositoryError> {
    let mut files = Vec::new();
    if let Some(config) = config {
        files.push(stamp(model, &config, config.clone())?);
    }
    let mut seen = 0;
    let mut open = vec![(model.folder(version)?, version.to_owned(), 0)];
    while let Some((folder, path, depth)) = open.pop() {
        for entry in folder.entries()? {
            // Hidden entries are where links of mounted volumes lead; the links are counted.
            if entry.name.starts_with('.') || !entry.utf8 {
                continue;
            }
            seen += 1;
            if seen > MAX_FILES {
                return Err(RepositoryError::TooManyEntries {
                    path: model.join(version),
                    limit: MAX_FILES,
                });
            }
            let below = format!("{path}/{}", entry.name);
            match entry.kind {
                EntryKind::Folder if depth < MAX_DEPTH => {
                    open.push((folder.folder(&entry.name)?, below, depth + 1));
                }
                EntryKind::File => files.push(stamp(&folder, &entry.name, below)?),
                // No part of a model; loading says why if the model refers to it.
                _ => {}
            }
        }
    }
    files.sort_unstable();
    Ok(Fingerprint { files })
}

fn stamp(folder: &Folder, name: &str, path: String) -> Result<FileStamp, RepositoryError> {
    match folder {
        Folder::Disk(dir) => {
            let metadata = dir.open_path(name)?.metadata();
            let metadata = metadata.map_err(|cause| dir.io(name, cause))?;
            Ok(FileStamp {
                path,
                size: metadata.len(),
                modified: (metadata.mtime(), metadata.mtime_nsec()),
                inode: (metadata.dev(), metadata.ino()),
            })
        }
        Folder::Memory(tree) => {
            let content = tree.get(name);
            Ok(FileStamp {
                path,
                size: content.map_or(0, |content| content.bytes.len() as u64),
                modified: (0, 0),
                inode: (0, content.map_or(0, |content| content.hash)),
            })
        }
        Folder::Elsewhere(elsewhere) => match elsewhere.tree.get(name) {
            Some(file) => Ok(remote::stamp(file, path)),
            None => Err(RepositoryError::NotFound {
                path: folder.join(name),
            }),
        },
    }
}

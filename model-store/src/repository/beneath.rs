//! Opening files and folders beneath a directory handle, with the kernel keeping them there.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{self, CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::RepositoryError;
use super::folder::{Entry, EntryKind};

/// The most entries read from one folder.
const MAX_ENTRIES: usize = 1_000_000;
/// The kernel asks to try again when something was renamed while it resolved a path.
const ATTEMPTS: usize = 16;

/// An open folder of the repository.
#[derive(Debug)]
pub(super) struct Dir {
    handle: OwnedFd,
    /// Relative to the repository, empty for the repository itself.
    path: String,
    /// None for the repository itself.
    root: Option<Arc<Dir>>,
}

impl Dir {
    pub(super) fn open_root(path: &Path) -> Result<Self, RepositoryError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let handle =
            fs::openat(CWD, path, flags, Mode::empty()).map_err(|errno| RepositoryError::Open {
                path: path.to_owned(),
                cause: errno.into(),
            })?;
        // Fails here, with the reason, rather than at the first model.
        open_at(&handle, ".", OFlags::PATH).map_err(|errno| RepositoryError::NoOpenat2 {
            cause: errno.into(),
        })?;
        Ok(Self {
            handle,
            path: String::new(),
            root: None,
        })
    }

    /// Opens a folder by a checked path relative to `parent`.
    pub(super) fn open_below(parent: &Arc<Self>, relative: &str) -> Result<Self, RepositoryError> {
        let handle = parent.open(relative, OFlags::RDONLY | OFlags::DIRECTORY)?;
        Ok(Self {
            handle,
            path: parent.join(relative),
            root: Some(parent.root.clone().unwrap_or_else(|| parent.clone())),
        })
    }

    /// Opens a file for reading; what kind of file is for the caller to see.
    pub(super) fn open_file(&self, relative: &str) -> Result<File, RepositoryError> {
        // Non-blocking, or opening a pipe would wait for its writer.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        self.open(relative, flags).map(File::from)
    }

    /// A handle that only tells what is there; opening it has no effect on devices and pipes.
    pub(super) fn open_path(&self, relative: &str) -> Result<File, RepositoryError> {
        self.open(relative, OFlags::PATH).map(File::from)
    }

    /// What is at a path, links followed; none when there is nothing.
    pub(super) fn kind(&self, relative: &str) -> Result<Option<EntryKind>, RepositoryError> {
        let file = match self.open_path(relative) {
            Ok(file) => file,
            Err(RepositoryError::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let metadata = file.metadata().map_err(|cause| self.io(relative, cause))?;
        Ok(Some(match metadata.file_type() {
            kind if kind.is_file() => EntryKind::File,
            kind if kind.is_dir() => EntryKind::Folder,
            _ => EntryKind::Other,
        }))
    }

    pub(super) fn entries(&self) -> Result<Vec<Entry>, RepositoryError> {
        let failed = |errno: Errno| self.io("", errno.into());
        let mut entries = Vec::new();
        for entry in fs::Dir::read_from(&self.handle).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_string_lossy();
            if name == "." || name == ".." {
                continue;
            }
            if entries.len() == MAX_ENTRIES {
                return Err(RepositoryError::TooManyEntries {
                    path: self.join(""),
                    limit: MAX_ENTRIES,
                });
            }
            entries.push(Entry {
                utf8: entry.file_name().to_str().is_ok(),
                name: name.into_owned(),
                kind: match entry.file_type() {
                    FileType::Directory => EntryKind::Folder,
                    FileType::RegularFile => EntryKind::File,
                    // Some file systems do not tell; following finds out.
                    FileType::Symlink | FileType::Unknown => EntryKind::Link,
                    _ => EntryKind::Other,
                },
            });
        }
        Ok(entries)
    }

    /// A path below this folder as messages show it.
    pub(super) fn join(&self, relative: &str) -> String {
        match (self.path.as_str(), relative) {
            ("", "") => ".".to_owned(),
            ("", relative) => relative.to_owned(),
            (path, "") => path.to_owned(),
            (path, relative) => format!("{path}/{relative}"),
        }
    }

    pub(super) fn io(&self, relative: &str, cause: io::Error) -> RepositoryError {
        RepositoryError::Io {
            path: self.join(relative),
            cause,
        }
    }

    fn open(&self, relative: &str, flags: OFlags) -> Result<OwnedFd, RepositoryError> {
        let own = open_at(&self.handle, relative, flags);
        let opened = match (own, &self.root) {
            // A link out of this folder may still stay inside the repository.
            (Err(Errno::XDEV), Some(root)) => open_at(&root.handle, &self.join(relative), flags),
            (own, _) => own,
        };
        opened.map_err(|errno| {
            let path = self.join(relative);
            match errno {
                Errno::NOENT => RepositoryError::NotFound { path },
                Errno::XDEV => RepositoryError::LeadsOut { path },
                Errno::NOTDIR => RepositoryError::NotAFolder { path },
                Errno::NXIO => RepositoryError::NotRegular {
                    path,
                    found: "socket or device",
                },
                errno => RepositoryError::Io {
                    path,
                    cause: errno.into(),
                },
            }
        })
    }
}

fn open_at(handle: &OwnedFd, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let flags = flags | OFlags::CLOEXEC;
    let mut attempts = 0;
    loop {
        attempts += 1;
        match fs::openat2(handle, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) if attempts < ATTEMPTS => {}
            result => return result,
        }
    }
}

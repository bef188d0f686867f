//! One region: an open file of the client's and the part of it that was registered.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};

use crate::error::ServeError;

#[derive(Debug)]
pub(super) struct Region {
    /// As the client wrote it.
    pub(super) key: String,
    /// Where the region begins in the file.
    pub(super) offset: u64,
    pub(super) byte_size: u64,
    pub(super) opened: Opened,
    /// Who registered it, where that is known.
    pub(super) owner: Option<(&'static str, Arc<str>)>,
}

/// A shared memory object.
#[derive(Debug)]
pub(super) struct Opened {
    file: File,
    writable: bool,
}

/// Opens a shared memory object: a regular file directly in `root`, and not by way of a link.
pub(super) fn open_key(root: &Path, key: &str, name: &str) -> Result<Opened, ServeError> {
    // The file's own name is not repeated: the caller knows it, and others may read the message.
    let refuse = |why: &str| {
        ServeError::invalid(format!(
            "unable to open shared memory region '{name}': {why}"
        ))
    };
    let folder = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = openat(CWD, root, folder, Mode::empty())
        .map_err(|_| refuse("this system has no shared memory"))?;
    let within = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    // Without blocking: the name may be that of a pipe.
    let flags = OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let open = |access| openat2(&root, key, access | flags, Mode::empty(), within);
    let (opened, writable) = match open(OFlags::RDWR) {
        // What can only be read still does for inputs.
        Err(rustix::io::Errno::ACCESS) => (open(OFlags::RDONLY), false),
        opened => (opened, true),
    };
    let file = File::from(opened.map_err(|error| match error {
        rustix::io::Errno::NOENT => refuse("there is no shared memory object of this key"),
        rustix::io::Errno::ACCESS => refuse("the server is not permitted to open it"),
        _ => refuse("its key does not name a shared memory object"),
    })?);
    match file.metadata() {
        Ok(metadata) if metadata.is_file() => Ok(Opened { file, writable }),
        _ => Err(refuse("its key does not name a shared memory object")),
    }
}

impl Region {
    /// Whether `byte_size` bytes from `offset` are within the region, and the region, as the file
    /// is now, within the file. Returns where they begin in the file.
    pub(super) fn check_bounds(
        &self,
        name: &str,
        offset: u64,
        byte_size: u64,
    ) -> Result<u64, ServeError> {
        if offset > self.byte_size {
            return Err(ServeError::invalid(format!(
                "invalid offset for shared memory region: '{name}': {offset} in {} bytes",
                self.byte_size
            )));
        }
        if offset
            .checked_add(byte_size)
            .is_none_or(|end| end > self.byte_size)
        {
            return Err(ServeError::invalid(format!(
                "invalid offset + byte size for shared memory region: '{name}': {offset} + {byte_size} in {} bytes",
                self.byte_size
            )));
        }
        let size = self.opened.file.metadata().map(|metadata| metadata.len());
        let size = size.map_err(|error| unusable(name, &error))?;
        let begin = self.offset.checked_add(offset);
        let end = begin.and_then(|begin| begin.checked_add(byte_size));
        match (begin, end) {
            (Some(begin), Some(end)) if end <= size => Ok(begin),
            _ => Err(ServeError::invalid(format!(
                "shared memory region '{name}' needs bytes up to {} + {offset} + {byte_size} of its object, which has {size}",
                self.offset
            ))),
        }
    }

    pub(super) fn read(
        &self,
        name: &str,
        offset: u64,
        byte_size: u64,
    ) -> Result<Vec<u8>, ServeError> {
        // The file has these bytes now, so nothing is allocated for a size that is only claimed.
        let begin = self.check_bounds(name, offset, byte_size)?;
        let length = usize::try_from(byte_size).map_err(|_| too_large(name, byte_size))?;
        let mut probe: Vec<u8> = Vec::new();
        probe
            .try_reserve_exact(length)
            .map_err(|_| too_large(name, byte_size))?;
        drop(probe);
        let mut data = vec![0; length];
        self.opened
            .file
            .read_exact_at(&mut data, begin)
            .map_err(|error| unusable(name, &error))?;
        Ok(data)
    }

    pub(super) fn write(&self, name: &str, offset: u64, data: &[u8]) -> Result<(), ServeError> {
        if !self.opened.writable {
            return Err(ServeError::invalid(format!(
                "outputs cannot be written to shared memory region '{name}': the server may only read it"
            )));
        }
        let begin = self.check_bounds(name, offset, data.len() as u64)?;
        self.opened
            .file
            .write_all_at(data, begin)
            .map_err(|error| unusable(name, &error))
    }
}

fn too_large(name: &str, byte_size: u64) -> ServeError {
    ServeError::invalid(format!(
        "{byte_size} bytes of shared memory region '{name}' cannot be read: there is no memory for them"
    ))
}

fn unusable(name: &str, error: &io::Error) -> ServeError {
    let why = match error.kind() {
        io::ErrorKind::UnexpectedEof => "its object was cut short meanwhile".to_owned(),
        _ => error.to_string(),
    };
    ServeError::invalid(format!(
        "shared memory region '{name}' cannot be used: {why}"
    ))
}

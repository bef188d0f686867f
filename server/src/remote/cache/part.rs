//! A file on its way: its pieces come in any order, and a journal says which are safely there, so
//! that whoever comes after a crash goes on from them.

use std::fs::{self, File, Metadata, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use md5::Md5;
use rustix::fs::{FallocateFlags, fallocate};
use sha2::{Digest, Sha256};

use crate::remote::index_file::hex;

/// How much may have to be fetched again after a crash of the machine.
const SYNC_EVERY: u64 = 64 << 20;

/// What a finished file must come to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::remote) struct Expected {
    pub(in crate::remote) sha256: Option<String>,
    pub(in crate::remote) md5: Option<[u8; 16]>,
}

/// See the module. The file is locked as long as this lives.
#[derive(Debug)]
pub(in crate::remote) struct Part {
    file: Arc<File>,
    path: PathBuf,
    journal: PathBuf,
    size: u64,
    chunk: u64,
    done: Vec<bool>,
    /// Written, but perhaps not on the disk.
    unsynced: Vec<usize>,
    unsynced_bytes: u64,
    is_allocated: bool,
}

impl Part {
    /// Opens a part and takes up what its journal says; waits for another who has it.
    pub(super) fn open(path: PathBuf, journal: PathBuf, size: u64, chunk: u64) -> io::Result<Self> {
        let file = loop {
            let file = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&path)?;
            file.lock()?;
            // Whoever had it may have finished or removed it: then this is another's file.
            let here = fs::symlink_metadata(&path);
            if here.is_ok_and(|here| file.metadata().is_ok_and(|own| own.ino() == here.ino())) {
                break file;
            }
        };
        let chunks = usize::try_from(size.div_ceil(chunk)).map_err(io::Error::other)?;
        let is_allocated = file.metadata()?.len() == size && size > 0;
        let mut part = Self {
            file: Arc::new(file),
            path,
            journal,
            size,
            chunk,
            done: vec![false; chunks],
            unsynced: Vec::new(),
            unsynced_bytes: 0,
            is_allocated,
        };
        if is_allocated {
            part.take_up();
        }
        Ok(part)
    }

    /// Whether nobody has the part at a path.
    pub(super) fn abandoned(path: &Path) -> bool {
        File::open(path).is_ok_and(|file| !matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
    }

    fn header(&self) -> String {
        format!("{} {}", self.size, self.chunk)
    }

    /// Reads which chunks are there, and writes the journal anew: its last line may be cut.
    fn take_up(&mut self) {
        let known = fs::read_to_string(&self.journal).unwrap_or_default();
        let _ = fs::remove_file(&self.journal);
        let mut lines = known.split_inclusive('\n');
        let mut whole = || lines.next().and_then(|line| line.strip_suffix('\n'));
        if whole() != Some(&self.header()) {
            return;
        }
        while let Some(index) = whole().and_then(|line| line.parse::<usize>().ok()) {
            let Some(done) = self.done.get_mut(index) else {
                break;
            };
            *done = true;
            self.unsynced.push(index);
        }
        // One is always asked for: its answer tells the digest that the whole must have.
        if self.done.iter().all(|done| *done)
            && let Some(last) = self.done.last_mut()
        {
            *last = false;
            let last = self.done.len() - 1;
            self.unsynced.retain(|index| *index != last);
        }
        // Without a journal they are fetched again, which is all there is to lose.
        let _ = self.keep();
    }

    pub(super) fn is_allocated(&self) -> bool {
        self.is_allocated
    }

    /// Takes the room on the disk, so that it is not missing later.
    pub(super) fn allocate(&mut self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.done.fill(false);
        let _ = fs::remove_file(&self.journal);
        if self.size > 0 {
            match fallocate(&*self.file, FallocateFlags::empty(), 0, self.size) {
                Ok(()) => {}
                Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
                    self.file.set_len(self.size)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.is_allocated = true;
        Ok(())
    }

    /// Chunks that have to be fetched, and the place of each in the file.
    pub(in crate::remote) fn missing(&self) -> Vec<(usize, std::ops::Range<u64>)> {
        let missing = self.done.iter().enumerate().filter(|(_, done)| !**done);
        missing
            .map(|(index, _)| {
                let start = index as u64 * self.chunk;
                (
                    index,
                    start..start.saturating_add(self.chunk).min(self.size),
                )
            })
            .collect()
    }

    /// Something that writes into the file from any thread.
    pub(in crate::remote) fn writer(&self) -> PartWriter {
        PartWriter {
            file: Arc::clone(&self.file),
        }
    }

    /// Notes that a chunk was written; brings what was written to the disk now and then.
    pub(in crate::remote) fn written(&mut self, index: usize, bytes: u64) -> io::Result<()> {
        self.done[index] = true;
        self.unsynced.push(index);
        self.unsynced_bytes += bytes;
        match self.unsynced_bytes >= SYNC_EVERY {
            true => self.keep(),
            false => Ok(()),
        }
    }

    /// Brings what was written to the disk, and then says so in the journal.
    pub(in crate::remote) fn keep(&mut self) -> io::Result<()> {
        if self.unsynced.is_empty() {
            return Ok(());
        }
        self.file.sync_data()?;
        let mut text = match self.journal.exists() {
            true => String::new(),
            false => format!("{}\n", self.header()),
        };
        for index in self.unsynced.drain(..) {
            text.push_str(&format!("{index}\n"));
        }
        self.unsynced_bytes = 0;
        let mut journal = File::options()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(&self.journal)?;
        journal.write_all(text.as_bytes())
    }

    /// Whether the whole file is what it should be, as far as anything is known about that.
    pub(in crate::remote) fn is(&self, expected: &Expected) -> io::Result<bool> {
        if let Some(sha256) = &expected.sha256 {
            return Ok(hex(&self.digest::<Sha256>()?) == *sha256);
        }
        if let Some(md5) = &expected.md5 {
            return Ok(self.digest::<Md5>()? == *md5);
        }
        Ok(true)
    }

    fn digest<D: Digest>(&self) -> io::Result<Vec<u8>> {
        let mut hasher = D::new();
        let mut buffer = vec![0; 1 << 20];
        let mut at = 0;
        while at < self.size {
            let length = (self.size - at).min(buffer.len() as u64) as usize;
            self.file.read_exact_at(&mut buffer[..length], at)?;
            hasher.update(&buffer[..length]);
            at += length as u64;
        }
        Ok(hasher.finalize().to_vec())
    }

    pub(super) fn sync(&self) -> io::Result<Metadata> {
        self.file.sync_all()?;
        self.file.metadata()
    }

    pub(super) fn rename(self, to: &Path) -> io::Result<()> {
        fs::rename(&self.path, to)?;
        let _ = fs::remove_file(&self.journal);
        Ok(())
    }

    /// Gives up what was fetched.
    pub(in crate::remote) fn discard(self) {
        let _ = fs::remove_file(&self.journal);
        let _ = fs::remove_file(&self.path);
    }
}

/// See [`Part::writer`].
#[derive(Clone, Debug)]
pub(in crate::remote) struct PartWriter {
    file: Arc<File>,
}

impl PartWriter {
    pub(in crate::remote) fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, at)
    }
}

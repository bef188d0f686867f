//! Pages of files and of processes: what is resident, who shares it, and how to make it not so.

use std::fs::{self, File};
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, bail, ensure};
use memmap2::Mmap;
use rustix::fs::Advice;

const PAGE: usize = 4096;

/// How many reads the disk is given at a time, and of how many bytes each.
const READERS: usize = 4;
const READ: usize = 2 << 20;

/// Reads one byte of every page through a new map of the file, on as many threads as there are
/// cores: the least that any loader of these bytes has to do.
pub(crate) fn touch(file: &Path) -> Result<()> {
    let map = map(file)?;
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    let part = map.len().div_ceil(threads).next_multiple_of(PAGE);
    std::thread::scope(|scope| {
        for chunk in map.chunks(part.max(PAGE)) {
            scope.spawn(move || {
                let sum = chunk
                    .iter()
                    .step_by(PAGE)
                    .fold(0u8, |sum, &byte| sum.wrapping_add(byte));
                std::hint::black_box(sum);
            });
        }
    });
    Ok(())
}

/// Reads files once, with several reads at a time: what the disk takes at the least to give them.
pub(crate) fn read(files: &[PathBuf]) -> Result<()> {
    let mut parts = Vec::new();
    for path in files {
        let file = Arc::new(File::open(path)?);
        let size = file.metadata()?.len();
        let starts = (0..size).step_by(READ);
        parts.extend(starts.map(|start| (Arc::clone(&file), start)));
    }
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let read = || {
            let mut buffer = vec![0; READ];
            while let Some((file, start)) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                let mut from = *start;
                let end = start + READ as u64;
                while from < end {
                    let wanted = (end - from) as usize;
                    match file.read_at(&mut buffer[..wanted], from)? {
                        0 => break,
                        count => from += count as u64,
                    }
                }
            }
            anyhow::Ok(())
        };
        let readers: Vec<_> = (0..READERS).map(|_| scope.spawn(read)).collect();
        let mut ended = readers.into_iter();
        ended.try_for_each(|reader| match reader.join() {
            Ok(read) => read,
            Err(_) => bail!("reading panicked"),
        })
    })
}

/// Brings a file into the page cache.
pub(crate) fn warm(file: &Path) -> Result<()> {
    std::io::copy(&mut File::open(file)?, &mut std::io::sink())?;
    Ok(())
}

/// Drops a file's pages from the page cache, and checks that they went.
pub(crate) fn evict(path: &Path) -> Result<()> {
    let file = File::open(path)?;
    // Pages that were not written yet cannot be dropped.
    file.sync_all()?;
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)
        .with_context(|| format!("cannot drop {} from the page cache", path.display()))?;
    let (resident, all) = residency(path)?;
    ensure!(
        resident * 100 <= all,
        "{resident} of {all} pages of {} stayed in the page cache: somebody maps it",
        path.display()
    );
    Ok(())
}

/// Pages of a file that are in the page cache, and all of them.
#[expect(unsafe_code, reason = "asks the system about pages of a map")]
fn residency(path: &Path) -> Result<(usize, usize)> {
    if fs::metadata(path)?.len() == 0 {
        return Ok((0, 0));
    }
    let map = map(path)?;
    let mut pages = vec![0u8; map.len().div_ceil(PAGE)];
    // SAFETY: the range is the map's own, and there is one byte for each of its pages.
    let result = unsafe {
        libc::mincore(
            map.as_ptr().cast_mut().cast(),
            map.len(),
            pages.as_mut_ptr(),
        )
    };
    ensure!(result == 0, std::io::Error::last_os_error());
    let resident = pages.iter().filter(|&&page| page & 1 == 1).count();
    Ok((resident, pages.len()))
}

#[expect(unsafe_code, reason = "maps a file of the measurement's own")]
fn map(path: &Path) -> Result<Mmap> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    // SAFETY: the file belongs to this measurement, and nobody shortens it meanwhile.
    Ok(unsafe { Mmap::map(&file) }?)
}

/// Every file below a folder; none when it is not there.
pub(crate) fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else {
                files.push(entry.path());
            }
        }
    }
    Ok(files)
}

/// A process's memory in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct ProcessMemory {
    pub(crate) resident: u64,
    /// Pages shared with others counted by their share.
    pub(crate) proportional: u64,
    /// Pages that nobody shares and that no file backs.
    pub(crate) private: u64,
}

impl ProcessMemory {
    /// Reads `/proc/PID/smaps_rollup`.
    pub(crate) fn of(pid: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/smaps_rollup");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        Self::parse(&text)
    }

    fn parse(text: &str) -> Result<Self> {
        let field = |name: &str| -> Result<u64> {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .with_context(|| format!("smaps_rollup has no {name}"))?;
            let kib: u64 = line.trim().trim_end_matches("kB").trim_end().parse()?;
            kib.checked_mul(1024).context("too many kilobytes")
        };
        Ok(Self {
            resident: field("Rss")?,
            proportional: field("Pss")?,
            private: field("Private_Dirty")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rollup_is_read_in_bytes() {
        let text = "00400000-7ffc [rollup]\nRss:    2040 kB\nPss:     540 kB\nPss_Dirty: 9 kB\n\
                    Private_Clean:  4 kB\nPrivate_Dirty:       96 kB\n";
        assert_eq!(
            ProcessMemory::parse(text).unwrap(),
            ProcessMemory {
                resident: 2040 * 1024,
                proportional: 540 * 1024,
                private: 96 * 1024,
            }
        );
        let error = ProcessMemory::parse("Rss: 1 kB\n").unwrap_err();
        assert!(error.to_string().contains("Pss"), "{error}");
    }

    #[test]
    fn evicted_file_is_not_resident_until_it_is_read() {
        // In the build's folder: a file system in memory keeps its pages whatever it is told.
        let folder = crate::models::scratch().unwrap();
        let path = folder.path().join("nested/data");
        fs::create_dir(folder.path().join("nested")).unwrap();
        fs::write(&path, vec![7; 300_000]).unwrap();
        assert_eq!(
            files_below(folder.path()).unwrap(),
            std::slice::from_ref(&path)
        );
        warm(&path).unwrap();
        touch(&path).unwrap();
        read(std::slice::from_ref(&path)).unwrap();
        assert_eq!(residency(&path).unwrap(), (74, 74));
        if evict(&path).is_ok() {
            assert_eq!(residency(&path).unwrap().0, 0);
        }
        assert!(
            files_below(&folder.path().join("absent"))
                .unwrap()
                .is_empty()
        );
    }
}

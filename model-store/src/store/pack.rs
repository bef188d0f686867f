//! One pack, mapped: an immutable file of tensors.

use std::fs::File;
use std::hint::black_box;
use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use memmap2::{Advice, Mmap, UncheckedAdvice};
use rustix::fs::Advice as FileAdvice;

use super::digest::Digest;

/// An immutable file of tensors, mapped once per process and shared by all that use it.
#[derive(Debug)]
pub struct Pack {
    digest: Digest,
    map: Mmap,
    /// Holds a shared lock: whoever clears the store up leaves the file alone.
    file: File,
    /// Some of it is expected to be read by rows.
    has_tables: AtomicBool,
}

impl Pack {
    /// Maps a file of the store's own whose content is known to be right.
    #[expect(unsafe_code, reason = "mapping a file")]
    pub(super) fn map(file: File, digest: Digest) -> io::Result<Self> {
        // SAFETY: the file is ours and immutable: mode 0444 in a folder only its owner (or root)
        // may write to, written under another name and renamed; nothing in this crate opens a
        // pack for writing, and removing or replacing its name leaves the mapped inode alone.
        let map = unsafe { Mmap::map(&file) }?;
        let pack = Self {
            digest,
            map,
            file,
            has_tables: AtomicBool::new(false),
        };
        pack.expect_all(0..pack.len());
        Ok(pack)
    }

    /// Maps a pack that another process of ours has found in the store and handed over.
    pub fn handed_over(file: OwnedFd, digest: Digest) -> io::Result<Self> {
        Self::map(file.into(), digest)
    }

    pub fn digest(&self) -> Digest {
        self.digest
    }

    pub fn len(&self) -> u64 {
        self.map.len() as u64
    }

    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// The bytes in this range of the file; none when it does not lie within.
    pub fn bytes(&self, range: Range<u64>) -> Option<&[u8]> {
        let start = usize::try_from(range.start).ok()?;
        let end = usize::try_from(range.end).ok()?;
        self.map.get(start..end)
    }

    /// Says that all of this part will be read: from a cold disk in huge pages, which are faster to
    /// bring in and to map again.
    pub(super) fn expect_all(&self, range: Range<u64>) {
        self.expect(range, [Advice::Normal, Advice::HugePage]);
    }

    /// Whether that was ever said otherwise of a part.
    pub(super) fn has_tables(&self) -> bool {
        self.has_tables.load(Ordering::Relaxed)
    }

    /// Says that only some rows of this part will be read: each of its pages then comes by itself.
    /// Otherwise the first of them would bring two megabytes from the disk.
    pub(super) fn expect_rows(&self, range: Range<u64>) {
        self.has_tables.store(true, Ordering::Relaxed);
        self.expect(range, [Advice::NoHugePage, Advice::Random]);
    }

    /// Advises on the whole pages of a part, and on the last one of the file. A wish: where the
    /// system does otherwise, the map is as good.
    fn expect(&self, range: Range<u64>, advices: [Advice; 2]) {
        let page = page_size() as u64;
        let from = range.start.next_multiple_of(page);
        let to = match range.end >= self.len() {
            true => self.len(),
            false => range.end / page * page,
        };
        let Some((start, len)) = self.clamp(from, to.saturating_sub(from)) else {
            return;
        };
        for advice in advices {
            if let Err(error) = self.map.advise_range(advice, start, len) {
                tracing::debug!(pack = %self.digest, %error, "pages come as the system likes");
            }
        }
    }

    /// Asks for a part of the file to be read from the disk, and does not wait for it.
    pub fn fetch(&self, from: u64, len: u64) -> io::Result<()> {
        let Some((start, len)) = self.clamp(from, len) else {
            return Ok(());
        };
        let len = NonZero::new(len as u64);
        rustix::fs::fadvise(&self.file, start as u64, len, FileAdvice::WillNeed)?;
        Ok(())
    }

    /// Brings a part of the file into memory and into this process's page tables, and returns when
    /// it is there. Several threads may each take a part.
    pub fn populate(&self, from: u64, len: u64) -> io::Result<()> {
        let Some((start, len)) = self.clamp(from, len) else {
            return Ok(());
        };
        loop {
            match self.map.advise_range(Advice::PopulateRead, start, len) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN) => {}
                    // Linux before 5.14 does not know it.
                    Some(libc::EINVAL) => break,
                    _ => return Err(error),
                },
            }
        }
        self.touch(start, len)
    }

    /// What `populate` does where the kernel has no call for it.
    fn touch(&self, start: usize, len: usize) -> io::Result<()> {
        self.map.advise_range(Advice::WillNeed, start, len)?;
        let bytes = &self.map[start..start + len];
        for page in bytes.chunks(page_size()) {
            black_box(page[0]);
        }
        Ok(())
    }

    /// Takes the pages out of this process; they stay in the page cache, and come back when they
    /// are touched.
    #[expect(unsafe_code, reason = "giving pages back")]
    pub fn drop_pages(&self) {
        // SAFETY: pages of a shared, read-only map of a file: none is dirty, and the next access
        // finds the same bytes in the file.
        let dropped = unsafe { self.map.unchecked_advise(UncheckedAdvice::DontNeed) };
        if let Err(error) = dropped {
            tracing::warn!(pack = %self.digest, %error, "pages could not be given back");
        }
    }

    /// Takes the pages out of this process and, unless another has them mapped, out of the page
    /// cache.
    pub fn evict_cache(&self) {
        self.drop_pages();
        if let Err(error) = rustix::fs::fadvise(&self.file, 0, None, FileAdvice::DontNeed) {
            tracing::warn!(pack = %self.digest, %error, "pages could not be evicted");
        }
    }

    /// How much of the file is in this process's page tables; none where the system does not tell.
    pub fn resident_bytes(&self) -> Option<u64> {
        const PRESENT: u64 = 1 << 63;
        let page = page_size();
        let first = self.map.as_ptr() as usize / page;
        let pages = self.map.len().div_ceil(page);
        let pagemap = File::open("/proc/self/pagemap").ok()?;
        let mut present = 0_u64;
        let mut buffer = [0_u8; 8 * 512];
        let mut done = 0;
        while done < pages {
            let want = 8 * (pages - done).min(512);
            let at = (first + done) as u64 * 8;
            pagemap.read_exact_at(&mut buffer[..want], at).ok()?;
            let entries = buffer[..want].as_chunks::<8>().0;
            present += entries
                .iter()
                .filter(|entry| u64::from_ne_bytes(**entry) & PRESENT != 0)
                .count() as u64;
            done += want / 8;
        }
        Some((present * page as u64).min(self.len()))
    }

    /// How much of the file is in the page cache, whoever brought it there.
    #[expect(unsafe_code, reason = "asking for pages in the cache")]
    pub fn cached_bytes(&self) -> Option<u64> {
        let page = page_size();
        let mut pages = vec![0_u8; self.map.len().div_ceil(page)];
        let start = self.map.as_ptr().cast_mut().cast();
        // SAFETY: the range is our map's, and the buffer has one byte for each of its pages.
        let done = unsafe { libc::mincore(start, self.map.len(), pages.as_mut_ptr()) };
        if done != 0 {
            return None;
        }
        let cached = pages.iter().filter(|page| **page & 1 != 0).count() as u64;
        Some((cached * page as u64).min(self.len()))
    }

    /// The part of the range that lies within the file; none when that is empty.
    fn clamp(&self, from: u64, len: u64) -> Option<(usize, usize)> {
        let end = from.saturating_add(len).min(self.len());
        let length = end.checked_sub(from).filter(|length| *length > 0)?;
        Some((usize::try_from(from).ok()?, usize::try_from(length).ok()?))
    }
}

#[expect(unsafe_code, reason = "asking for the size of a page")]
fn page_size() -> usize {
    // SAFETY: it takes a number and gives a number.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

impl AsFd for Pack {
    /// The file, open for reading: what is handed over with it cannot be written.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const LEN: usize = 40 * 4096 + 100;

    fn pack() -> Pack {
        let mut file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..LEN).map(|n| (n % 251) as u8).collect();
        file.write_all(&bytes).unwrap();
        file.sync_all().unwrap();
        Pack::map(file, Digest::of(&bytes)).unwrap()
    }

    #[test]
    fn populated_pages_are_resident_until_they_are_dropped() {
        let pack = pack();
        pack.drop_pages();
        assert_eq!(pack.resident_bytes(), Some(0));
        pack.populate(0, u64::MAX).unwrap();
        assert_eq!(pack.resident_bytes(), Some(LEN as u64));
        assert_eq!(pack.cached_bytes(), Some(LEN as u64));
        pack.drop_pages();
        assert_eq!(pack.resident_bytes(), Some(0));
        assert_eq!(
            Digest::of(pack.bytes(0..LEN as u64).unwrap()),
            pack.digest()
        );
    }

    #[test]
    fn a_kernel_without_populate_has_its_pages_touched() {
        let pack = pack();
        pack.drop_pages();
        pack.touch(0, LEN).unwrap();
        assert_eq!(pack.resident_bytes(), Some(LEN as u64));
    }

    #[test]
    fn rows_are_read_as_any_other_bytes() {
        let pack = pack();
        pack.expect_rows(100..LEN as u64 - 5000);
        pack.expect_rows(10..20);
        pack.evict_cache();
        pack.fetch(4096 * 3 + 7, 100).unwrap();
        pack.fetch(LEN as u64, 1).unwrap();
        let bytes = pack.bytes(4096 * 3..4096 * 3 + 200).unwrap();
        assert_eq!(bytes[7], ((4096 * 3 + 7) % 251) as u8);
        let all = pack.bytes(0..LEN as u64).unwrap();
        assert_eq!(Digest::of(all), pack.digest());
    }

    #[test]
    fn ranges_beyond_the_file_are_cut_or_none() {
        let pack = pack();
        pack.populate(LEN as u64, 1).unwrap();
        pack.populate(u64::MAX, u64::MAX).unwrap();
        pack.populate(4097, u64::MAX).unwrap();
        assert_eq!(pack.bytes(0..LEN as u64 + 1), None);
        assert_eq!(pack.bytes(u64::MAX - 1..u64::MAX), None);
        assert_eq!(pack.bytes(1..3), Some([1, 2].as_slice()));
    }
}

//! Memory that a server and one of its workers both map. Every file of it is sealed at its size:
//! who maps it can read and write all of it for as long as the map stands, whatever the other
//! side does.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use bytes::Bytes;
use memmap2::{MmapOptions, MmapRaw};
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, SealFlags};

use super::socket::broken;

/// Where tensors begin: as vector instructions like it.
pub(super) const ALIGNMENT: usize = 64;
/// The smallest segment.
const SMALLEST: u64 = 64 << 10;
/// Free segments that are kept for the next run.
const MOST_KEPT: u64 = 64 << 20;

/// Seals that keep a file's size as it is.
fn fixed_size() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL
}

fn memory_file(name: &str, len: usize) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(name, flags)?;
    rustix::fs::ftruncate(&file, len as u64)?;
    rustix::fs::fcntl_add_seals(&file, fixed_size())?;
    Ok(file)
}

/// The size of a file that somebody else made, when it is sealed at it.
fn sealed_size(file: &OwnedFd, most: u64) -> io::Result<u64> {
    let seals = rustix::fs::fcntl_get_seals(file)?;
    let size = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(u64::MAX);
    if !seals.contains(SealFlags::SHRINK) || size > most {
        return Err(broken("a memory file that is not sealed, or too large"));
    }
    Ok(size)
}

/// Bytes in a memory file that nobody writes to any more.
#[derive(Debug)]
pub(super) struct Blob {
    file: OwnedFd,
    map: Option<MmapRaw>,
}

impl Blob {
    /// A blob of `len` bytes that `fill` writes.
    pub(super) fn new(len: usize, fill: impl FnOnce(&mut [u8])) -> io::Result<Self> {
        let file = memory_file("dormouse-blob", len)?;
        let blob = Self::mapped(file, len)?;
        if let Some(map) = &blob.map {
            fill(mutable(map));
        }
        Ok(blob)
    }

    /// A blob that came from the other side.
    pub(super) fn from_fd(file: OwnedFd, most: u64) -> io::Result<Self> {
        let len = sealed_size(&file, most)?;
        Self::mapped(file, usize::try_from(len).map_err(io::Error::other)?)
    }

    fn mapped(file: OwnedFd, len: usize) -> io::Result<Self> {
        let map = match len {
            0 => None,
            _ => Some(MmapOptions::new().len(len).map_raw(&file)?),
        };
        Ok(Self { file, map })
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(super) fn into_fd(self) -> OwnedFd {
        self.file
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.map.as_ref().map_or(&[], shared)
    }

    pub(super) fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Blob {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

#[expect(unsafe_code, reason = "reads memory that another process maps")]
fn shared(map: &MmapRaw) -> &[u8] {
    // SAFETY: the map is as long as its file, which is sealed at its size. The other side is this
    // very program and has stopped writing to a range before it tells of it; were it out of its
    // mind, plain bytes would change under a reader that bounds every number it takes from them.
    unsafe { std::slice::from_raw_parts(map.as_ptr(), map.len()) }
}

#[expect(
    unsafe_code,
    clippy::mut_from_ref,
    reason = "writes memory that nobody else has yet"
)]
fn mutable(map: &MmapRaw) -> &mut [u8] {
    // SAFETY: as above; only a blob that was just made is written, before anybody is told of it.
    unsafe { std::slice::from_raw_parts_mut(map.as_mut_ptr(), map.len()) }
}

/// A segment of memory, mapped.
pub(super) struct Segment {
    pub(super) id: u32,
    map: MmapRaw,
    /// To be handed over. Both sides need it no longer than that: the map stays, and descriptors
    /// are few.
    file: Mutex<Option<Arc<OwnedFd>>>,
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment")
            .field("id", &self.id)
            .field("len", &self.map.len())
            .finish_non_exhaustive()
    }
}

impl Segment {
    fn new(id: u32, len: usize) -> io::Result<Self> {
        let file = memory_file("dormouse-tensors", len)?;
        let map = MmapOptions::new().len(len).map_raw(&file)?;
        Ok(Self {
            id,
            map,
            file: Mutex::new(Some(Arc::new(file))),
        })
    }

    /// A segment that the server made.
    pub(super) fn from_fd(id: u32, file: OwnedFd) -> io::Result<Self> {
        let len = usize::try_from(sealed_size(&file, u64::MAX)?).map_err(io::Error::other)?;
        let map = MmapOptions::new().len(len).map_raw(&file)?;
        Ok(Self {
            id,
            map,
            file: Mutex::new(None),
        })
    }

    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    /// Its file, until the worker has it.
    pub(super) fn to_introduce(&self) -> Option<Arc<OwnedFd>> {
        self.file.lock().clone()
    }

    pub(super) fn set_introduced(&self) {
        let file = self.file.lock().take();
        drop(file);
    }

    /// Copies `bytes` to `offset`; false when they do not fit.
    #[expect(unsafe_code, reason = "writes memory that another process maps")]
    pub(super) fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        if offset
            .checked_add(bytes.len())
            .is_none_or(|end| end > self.map.len())
        {
            return false;
        }
        // SAFETY: the range was checked to lie within the map. Whoever writes holds the lease of
        // the segment, and the other side reads the range only after it is told of it.
        unsafe {
            let to = self.map.as_mut_ptr().add(offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        true
    }

    fn covers(&self, address: usize, len: usize) -> Option<usize> {
        let offset = address.checked_sub(self.map.as_ptr().addr())?;
        let end = offset.checked_add(len)?;
        (end <= self.map.len()).then_some(offset)
    }
}

/// A part of a segment as bytes; `keep` is held as long as they are.
pub(super) fn slice<K>(segment: &Arc<Segment>, range: Range<usize>, keep: K) -> Option<Bytes>
where
    K: Send + Sync + 'static,
{
    struct Part<K> {
        segment: Arc<Segment>,
        range: Range<usize>,
        _keep: K,
    }
    impl<K> AsRef<[u8]> for Part<K> {
        fn as_ref(&self) -> &[u8] {
            &shared(&self.segment.map)[self.range.clone()]
        }
    }
    if range.start > range.end || range.end > segment.len() {
        return None;
    }
    if range.is_empty() {
        return Some(Bytes::new());
    }
    Some(Bytes::from_owner(Part {
        segment: Arc::clone(segment),
        range,
        _keep: keep,
    }))
}

/// The segments that a server shares with one worker: free ones are used again, and all of them
/// together are bounded.
#[derive(Debug)]
pub(super) struct Pool {
    limit: u64,
    state: Mutex<PoolState>,
}

#[derive(Debug, Default)]
struct PoolState {
    free: Vec<Arc<Segment>>,
    /// Those in use, by which a tensor that lies in one is recognised.
    leased: Vec<Arc<Segment>>,
    issued: u32,
    bytes: u64,
    free_bytes: u64,
    /// Segments that are gone here and that the worker may unmap.
    forgotten: Vec<u32>,
}

/// A segment in use; back in its pool when dropped.
#[derive(Debug)]
pub(super) struct Lease {
    pool: Arc<Pool>,
    pub(super) segment: Arc<Segment>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock();
        let place = state
            .leased
            .iter()
            .position(|leased| leased.id == self.segment.id);
        let Some(place) = place else { return };
        let segment = state.leased.swap_remove(place);
        let len = segment.len() as u64;
        state.free_bytes += len;
        state.free.push(segment);
        if state.free_bytes > MOST_KEPT {
            state.shrink(MOST_KEPT);
        }
    }
}

impl PoolState {
    /// Gives free segments up until no more than `keep` bytes of them are left, the largest first.
    fn shrink(&mut self, keep: u64) {
        self.free.sort_unstable_by_key(|segment| segment.len());
        while self.free_bytes > keep {
            let Some(segment) = self.free.pop() else {
                return;
            };
            let len = segment.len() as u64;
            self.free_bytes -= len;
            self.bytes -= len;
            // The worker may never have heard of it, which does no harm.
            self.forgotten.push(segment.id);
        }
    }
}

/// Why no segment was to be had.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoRoom {
    #[error(
        "its tensors of {needed} bytes do not fit the {limit} bytes of memory that are shared with its process, {used} of which are in use (isolation.shared_memory)"
    )]
    Limit { needed: u64, used: u64, limit: u64 },
    #[error("no memory can be shared with its process: {0}")]
    System(#[from] io::Error),
}

impl Pool {
    pub(super) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self {
            limit,
            state: Mutex::default(),
        })
    }

    /// A segment of at least so many bytes.
    pub(super) fn lease(self: &Arc<Self>, bytes: usize) -> Result<Lease, NoRoom> {
        let needed = (bytes as u64)
            .max(SMALLEST)
            .checked_next_power_of_two()
            .unwrap_or(u64::MAX);
        let mut state = self.state.lock();
        let fits = |segment: &Arc<Segment>| {
            // Much larger ones are kept for those that need them.
            (needed..=needed.saturating_mul(4)).contains(&(segment.len() as u64))
        };
        let segment = match state.free.iter().position(fits) {
            Some(place) => {
                let segment = state.free.swap_remove(place);
                state.free_bytes -= segment.len() as u64;
                segment
            }
            None => {
                if state.bytes.saturating_add(needed) > self.limit {
                    state.shrink(0);
                }
                let used = state.bytes;
                if used.saturating_add(needed) > self.limit {
                    return Err(NoRoom::Limit {
                        needed,
                        used,
                        limit: self.limit,
                    });
                }
                let id = state.issued;
                let len = usize::try_from(needed).map_err(io::Error::other)?;
                let segment = Arc::new(Segment::new(id, len)?);
                state.issued = state.issued.wrapping_add(1);
                state.bytes += needed;
                segment
            }
        };
        state.leased.push(Arc::clone(&segment));
        drop(state);
        Ok(Lease {
            pool: Arc::clone(self),
            segment,
        })
    }

    /// The segment in use in which these bytes lie, and where.
    pub(super) fn locate(&self, bytes: &[u8]) -> Option<(Arc<Segment>, usize)> {
        let address = bytes.as_ptr().addr();
        let state = self.state.lock();
        state.leased.iter().find_map(|segment| {
            let offset = segment.covers(address, bytes.len())?;
            Some((Arc::clone(segment), offset))
        })
    }

    /// The segments that the worker has not been told to forget yet.
    pub(super) fn take_forgotten(&self) -> Vec<u32> {
        std::mem::take(&mut self.state.lock().forgotten)
    }

    /// What it was not told after all.
    pub(super) fn put_back_forgotten(&self, forgotten: Vec<u32>) {
        if !forgotten.is_empty() {
            self.state.lock().forgotten.extend(forgotten);
        }
    }

    /// Whether more than half of what may be shared is in use.
    pub(super) fn is_tight(&self) -> bool {
        let state = self.state.lock();
        state.bytes - state.free_bytes > self.limit / 2
    }

    /// Gives every free segment up.
    pub(super) fn release(&self) {
        self.state.lock().shrink(0);
    }

    /// Bytes of all segments, as large as they are.
    pub(super) fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }
}

/// Room in a segment that is filled piece by piece.
#[derive(Debug)]
pub(super) struct Filling {
    lease: Lease,
    len: usize,
}

impl Filling {
    pub(super) fn new(lease: Lease) -> Self {
        Self { lease, len: 0 }
    }
}

impl crate::engine::TensorRoom for Filling {
    fn put(&mut self, piece: &[u8]) -> bool {
        let fits = self.lease.segment.write(self.len, piece);
        if fits {
            self.len += piece.len();
        }
        fits
    }

    fn finish(self: Box<Self>) -> Bytes {
        let Self { lease, len } = *self;
        let segment = Arc::clone(&lease.segment);
        slice(&segment, 0..len, lease).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_used_again_and_bounded() {
        let pool = Pool::new(3 * SMALLEST);
        let first = pool.lease(10).unwrap();
        let id = first.segment.id;
        assert!(first.segment.write(0, b"tensor"));
        assert!(!first.segment.write(first.segment.len(), b"tensor"));
        let second = pool.lease(2 * SMALLEST as usize).unwrap();
        let full = pool.lease(1).unwrap_err();
        assert!(matches!(full, NoRoom::Limit { .. }), "{full}");
        drop(first);
        assert_eq!(pool.lease(100).unwrap().segment.id, id);
        drop(second);
        // A free one of another size makes room.
        assert!(pool.lease(3 * SMALLEST as usize).is_err());
        assert_eq!(pool.bytes(), 0);
    }

    #[test]
    fn a_pool_is_tight_while_more_than_half_of_it_is_in_use() {
        let pool = Pool::new(4 * SMALLEST);
        let leases: Vec<Lease> = (0..3).map(|_| pool.lease(1).unwrap()).collect();
        assert!(pool.is_tight());
        drop(leases);
        assert!(!pool.is_tight());
        // They are kept for later runs, and forgotten when they are given up.
        assert_eq!(pool.bytes(), 3 * SMALLEST);
        pool.release();
        let mut forgotten = pool.take_forgotten();
        forgotten.sort_unstable();
        assert_eq!(forgotten, [0, 1, 2]);
        pool.put_back_forgotten(vec![2]);
        assert_eq!(pool.take_forgotten(), [2]);
    }

    #[test]
    fn bytes_of_a_segment_keep_it_from_being_used_again() {
        let pool = Pool::new(u64::MAX);
        let lease = pool.lease(10).unwrap();
        let segment = Arc::clone(&lease.segment);
        assert!(segment.write(64, b"answer"));
        let bytes = slice(&segment, 64..70, lease).unwrap();
        assert_eq!(&bytes[..], b"answer");
        let (found, offset) = pool.locate(&bytes[2..]).unwrap();
        assert_eq!((found.id, offset), (segment.id, 66));
        assert!(pool.locate(b"elsewhere").is_none());
        assert_ne!(pool.lease(10).unwrap().segment.id, segment.id);
        drop(bytes);
        assert!(pool.state.lock().leased.is_empty());
    }

    #[test]
    fn a_segment_cannot_be_made_smaller_by_the_other_side() {
        let lease = Pool::new(u64::MAX).lease(10).unwrap();
        let theirs = lease.segment.to_introduce().unwrap();
        let theirs = theirs.try_clone().unwrap();
        assert!(rustix::fs::ftruncate(&theirs, 0).is_err());
        let theirs = Segment::from_fd(7, theirs).unwrap();
        assert!(theirs.to_introduce().is_none());
        assert!(theirs.write(5, b"hello"));
        lease.segment.set_introduced();
        assert!(lease.segment.to_introduce().is_none());
        assert_eq!(&shared(&lease.segment.map)[5..10], b"hello");
        let unsealed = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap();
        assert!(Segment::from_fd(8, unsealed).is_err());
    }
}

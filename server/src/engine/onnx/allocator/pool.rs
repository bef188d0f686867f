//! Blocks of memory: small ones from the heap, large ones mapped and, once free, kept on shelves
//! for the next run.

use std::ptr::{self, NonNull};
use std::sync::Once;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::demand;
use super::shelves::{Shelved, Shelves};
use super::size_class;

/// What every block's address is a multiple of: a cache line, and what the widest vector
/// instructions ask for.
pub(super) const ALIGNMENT: usize = 64;
/// Mapped blocks begin at one of so many cache lines of their first page. Were it the same line
/// for all, equal offsets into several tensors would fight for the same place in the cache.
const COLOURS: usize = 8;
/// Kernels may read a little past the end of a tensor, as ONNX Runtime's allocator lets them.
const OVERRUN: usize = 64;
/// What a mapping is longer than the block in it at the most: where the block begins, and the
/// overrun.
const MAPPED_EXTRA: usize = ALIGNMENT * COLOURS + OVERRUN;
/// Bytes of a huge page, and of any other.
const HUGE: usize = 2 << 20;
const PAGE: usize = 4096;
/// Marks a header, so that a stray pointer is noticed.
const LIVE: u32 = 0x0D0E_A110;
const FREED: u32 = 0x0D0E_F4EE;

/// What the allocator holds, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocatorStats {
    /// In use by sessions, runs and outputs that were not yet sent.
    pub live_bytes: u64,
    /// Free, and kept for the next run.
    pub cached_bytes: u64,
    /// The most that was in use whenever the mapped part of it reached a new height.
    pub peak_bytes: u64,
}

/// Stands right before a block's bytes.
#[repr(C)]
pub(super) struct Header {
    /// Where the heap's piece or the mapping begins.
    base: *mut u8,
    /// How long it is.
    length: usize,
    owner: u64,
    mark: u32,
    home: u32,
}

const HEADER: usize = size_of::<Header>();
/// Header and alignment, on top of what was asked of the heap, whose pieces are aligned to 16.
const HEAP_EXTRA: usize = HEADER + ALIGNMENT - 16 + OVERRUN;

/// Where a block goes when it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Home {
    Heap,
    /// Back to the system.
    System,
    Shelf(usize),
}

impl Home {
    const HEAP: u32 = u32::MAX;
    const SYSTEM: u32 = u32::MAX - 1;

    const fn encode(self) -> u32 {
        match self {
            Self::Heap => Self::HEAP,
            Self::System => Self::SYSTEM,
            Self::Shelf(class) => class as u32,
        }
    }

    const fn decode(number: u32) -> Self {
        match number {
            Self::HEAP => Self::Heap,
            Self::SYSTEM => Self::System,
            class => Self::Shelf(class as usize),
        }
    }
}

/// Memory for sessions. Nothing here panics: it is called from C++.
#[derive(Debug)]
pub(super) struct Pool {
    shelves: Shelves,
    heap: HeapBytes,
    mapped: AtomicU64,
    highest_mapped: AtomicU64,
    peak: AtomicU64,
    colour: AtomicU64,
    keeper: Once,
}

impl Pool {
    pub(super) const fn new() -> Self {
        Self {
            shelves: Shelves::new(),
            heap: HeapBytes::new(),
            mapped: AtomicU64::new(0),
            highest_mapped: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            colour: AtomicU64::new(0),
            keeper: Once::new(),
        }
    }

    pub(super) fn set_cache_limit(&self, bytes: u64) {
        self.shelves.set_limit(bytes);
    }

    /// A block for a while: of a run, or an output. Null for nothing and when there is no memory.
    pub(super) fn allocate(&self, size: usize, owner: u64) -> *mut u8 {
        if size == 0 {
            return ptr::null_mut();
        }
        if size < size_class::SMALLEST {
            return self.heap_block(size, owner);
        }
        let Some(class) = size.checked_add(MAPPED_EXTRA).and_then(size_class::of) else {
            return ptr::null_mut();
        };
        if let Some((block, class)) = self.shelves.take(class) {
            self.count_mapped(size_class::bytes(class));
            demand::taken(class);
            // SAFETY: a shelved block is a live mapping with its header, and now ours alone.
            #[expect(unsafe_code, reason = "writes the header of a block of raw memory")]
            unsafe {
                let header = header_of(block);
                (*header).owner = owner;
                (*header).mark = LIVE;
            }
            return block.as_ptr();
        }
        let home = Home::Shelf(class);
        let length = size_class::bytes(class);
        demand::taken(class);
        self.mapped_block(length, home, owner)
            .or_else(|| {
                // The system has none: what is free here may help.
                (self.release(|_| true) > 0)
                    .then(|| self.mapped_block(length, home, owner))
                    .flatten()
            })
            .map_or_else(|| self.heap_block(size, owner), NonNull::as_ptr)
    }

    /// Puts blocks of so many bytes, header included, on their shelf until there are `count`, with
    /// all of their pages, but no more than `most` bytes of them and none for which others would
    /// have to go. Returns how many bytes it took.
    pub(super) fn stock(&self, (bytes, count): (usize, usize), most: u64) -> u64 {
        let Some(class) = size_class::of(bytes) else {
            return 0;
        };
        let length = size_class::bytes(class);
        let mut stocked = 0;
        for _ in self.shelves.count(class)..count {
            if stocked + length as u64 > most || !self.shelves.has_room(length as u64) {
                break;
            }
            let Some(block) = self.mapped_block(length, Home::Shelf(class), 0) else {
                break;
            };
            if length >= HUGE {
                populate(block);
            }
            // SAFETY: it came from here just now.
            #[expect(unsafe_code, reason = "gives a block back")]
            unsafe {
                self.free(block.as_ptr());
            }
            stocked += length as u64;
        }
        stocked
    }

    /// A block for the life of a session, such as weights: it goes back to the system at once
    /// when it is freed.
    pub(super) fn reserve(&self, size: usize) -> *mut u8 {
        if size < size_class::SMALLEST {
            return self.allocate(size, 0);
        }
        size.checked_add(MAPPED_EXTRA)
            .filter(|&length| length <= isize::MAX as usize)
            .and_then(|length| self.mapped_block(length, Home::System, 0))
            .map_or_else(|| self.allocate(size, 0), NonNull::as_ptr)
    }

    /// Takes a block back.
    ///
    /// # Safety
    /// `block` is null or came from this pool and is freed once; nothing uses it any more.
    #[expect(unsafe_code, reason = "reads the header of a block of raw memory")]
    pub(super) unsafe fn free(&self, block: *mut u8) {
        let Some(block) = NonNull::new(block) else {
            return;
        };
        let header = header_of(block);
        // SAFETY: promised by the caller: the header stands before the block.
        let (base, length, owner, home) = unsafe {
            if (*header).mark != LIVE {
                tracing::error!("memory that is not in use was freed; it is left alone");
                return;
            }
            (*header).mark = FREED;
            let home = Home::decode((*header).home);
            ((*header).base, (*header).length, (*header).owner, home)
        };
        match home {
            Home::Heap => {
                self.heap.subtract(length);
                // SAFETY: `base` came from `malloc`.
                unsafe { libc::free(base.cast()) }
            }
            Home::System => {
                self.mapped.fetch_sub(length as u64, Ordering::Relaxed);
                unmap(base, length);
            }
            Home::Shelf(class) => {
                self.mapped.fetch_sub(length as u64, Ordering::Relaxed);
                demand::returned(class);
                if let Err(block) = self.shelves.put(class, block, owner) {
                    drop_shelved(block);
                }
            }
        }
    }

    /// Gives back the free blocks that `is_wanted` names, and says how many bytes went.
    pub(super) fn release(&self, is_wanted: impl Fn(&Shelved) -> bool) -> u64 {
        self.shelves.remove(is_wanted)
    }

    pub(super) fn stats(&self) -> AllocatorStats {
        let live_bytes = self.live();
        AllocatorStats {
            live_bytes,
            cached_bytes: self.shelves.bytes(),
            // Not noted with every block, but never less than what somebody was told.
            peak_bytes: self
                .peak
                .fetch_max(live_bytes, Ordering::Relaxed)
                .max(live_bytes),
        }
    }

    /// Starts the thread that lets free blocks age: one step each `tick`, and out after
    /// `idle_ticks` of them. It sleeps while nothing is kept.
    pub(super) fn keep(&'static self, tick: Duration, idle_ticks: u32) {
        self.keeper.call_once(|| {
            let started = std::thread::Builder::new()
                .name("memory-keeper".into())
                .spawn(move || {
                    loop {
                        self.shelves.wait_until_used();
                        self.shelves.wait(tick);
                        self.age(idle_ticks);
                    }
                });
            if let Err(error) = started {
                tracing::warn!(%error, "free memory of sessions is kept until it is asked for");
            }
        });
    }

    /// One step of time: blocks that lay for more than `idle_ticks` of them go.
    pub(super) fn age(&self, idle_ticks: u32) -> u64 {
        let now = self.shelves.advance();
        self.release(|block| now.wrapping_sub(block.tick) > idle_ticks)
    }

    fn live(&self) -> u64 {
        self.mapped
            .load(Ordering::Relaxed)
            .saturating_add(self.heap.total())
    }

    #[expect(unsafe_code, reason = "writes the header of a block of raw memory")]
    fn heap_block(&self, size: usize, owner: u64) -> *mut u8 {
        let Some(length) = size
            .checked_add(HEAP_EXTRA)
            .filter(|&length| length <= isize::MAX as usize)
        else {
            return ptr::null_mut();
        };
        // SAFETY: any length may be asked for.
        let base: *mut u8 = unsafe { libc::malloc(length) }.cast();
        if base.is_null() {
            return base;
        }
        let offset = (base.addr() + HEADER).next_multiple_of(ALIGNMENT) - base.addr();
        // SAFETY: `base` is aligned to 16, so `offset` is at most HEADER + ALIGNMENT - 16 and
        // `offset + size` within the piece; the header's 32 bytes lie before it, aligned to 16.
        unsafe {
            let block = base.add(offset);
            header_of(NonNull::new_unchecked(block)).write(Header {
                base,
                length,
                owner,
                mark: LIVE,
                home: Home::Heap.encode(),
            });
            self.heap.add(length);
            block
        }
    }

    #[expect(unsafe_code, reason = "maps memory and writes a block's header")]
    fn mapped_block(&self, length: usize, home: Home, owner: u64) -> Option<NonNull<u8>> {
        let base = match home {
            Home::Shelf(_) => map_huge(length),
            _ => map(length),
        }?;
        let colour = self.colour.fetch_add(1, Ordering::Relaxed) as usize % COLOURS;
        // SAFETY: the mapping is longer than MAPPED_EXTRA, within which the block begins.
        let block = unsafe {
            let block = NonNull::new(base.add(ALIGNMENT * (1 + colour)))?;
            header_of(block).write(Header {
                base,
                length,
                owner,
                mark: LIVE,
                home: home.encode(),
            });
            block
        };
        // What has huge pages comes in as quickly by itself.
        if home == Home::System || length < HUGE {
            populate(block);
        }
        self.count_mapped(length);
        Some(block)
    }

    fn count_mapped(&self, length: usize) {
        let length = length as u64;
        let now = self.mapped.fetch_add(length, Ordering::Relaxed) + length;
        // New heights are rare, and only then are the heap's counters added up.
        if now > self.highest_mapped.load(Ordering::Relaxed) {
            self.highest_mapped.fetch_max(now, Ordering::Relaxed);
            self.peak
                .fetch_max(now + self.heap.total(), Ordering::Relaxed);
        }
    }
}

/// Unmaps a block that was not to be kept.
#[expect(unsafe_code, reason = "reads the header of a block of raw memory")]
pub(super) fn drop_shelved(block: NonNull<u8>) {
    let header = header_of(block);
    // SAFETY: a shelved block has its header, and nobody else has the block.
    let (base, length) = unsafe { ((*header).base, (*header).length) };
    unmap(base, length);
}

#[expect(unsafe_code, reason = "a block's header stands right before it")]
fn header_of(block: NonNull<u8>) -> *mut Header {
    // SAFETY: every block of a pool begins at least a header into its mapping or piece.
    unsafe { block.as_ptr().sub(HEADER) }.cast()
}

/// Brings all pages of a fresh block in at once: it is going to be filled with a weight or by a run,
/// and one call costs less than a fault for each page.
#[expect(unsafe_code, reason = "reads a block's header and asks for its pages")]
fn populate(block: NonNull<u8>) {
    // SAFETY: a fresh block has its header, and is a mapping of its own.
    unsafe {
        let header = header_of(block);
        // A wish: kernels before 5.14 do not know it, and pages come as they are touched.
        let _ = rustix::mm::madvise(
            (*header).base.cast(),
            (*header).length,
            Advice::LinuxPopulateWrite,
        );
    }
}

/// Fresh memory.
#[expect(unsafe_code, reason = "maps raw memory")]
fn map(length: usize) -> Option<*mut u8> {
    let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a mapping at an address of the system's choosing touches no other memory.
    unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), length, access, kind) }
        .ok()
        .map(<*mut _>::cast)
}

/// Fresh memory, of huge pages where it is large enough and the system has them: a model that woke
/// pays for its buffers with one fault where it would have 512.
///
/// # Why not for weights
/// Where memory is fragmented the system moves other pages out of the way first. That is soon done
/// for the buffers of a run; for hundreds of megabytes it took longer than the rest of the load.
#[expect(unsafe_code, reason = "maps and unmaps raw memory")]
fn map_huge(length: usize) -> Option<*mut u8> {
    if length < HUGE {
        return map(length);
    }
    let used = length.checked_next_multiple_of(PAGE)?;
    let start = map(used.checked_add(HUGE)?)?;
    let before = start.addr().next_multiple_of(HUGE) - start.addr();
    // SAFETY: both ends lie within the mapping, which nobody else knows of yet.
    let base = unsafe {
        let base = start.add(before);
        if before > 0 {
            unmap(start, before);
        }
        unmap(base.add(used), HUGE - before);
        base
    };
    // A wish: without huge pages the memory is as good.
    // SAFETY: the range is the mapping's own, and how its pages are made changes no byte of it.
    let _ = unsafe { rustix::mm::madvise(base.cast(), used, Advice::LinuxHugepage) };
    Some(base)
}

#[expect(unsafe_code, reason = "unmaps raw memory")]
fn unmap(base: *mut u8, length: usize) {
    // SAFETY: the mapping was made with this length and is given up by its last user.
    if let Err(error) = unsafe { rustix::mm::munmap(base.cast(), length) } {
        tracing::error!(%error, length, "memory could not be given back");
    }
}

/// Bytes from the heap, counted by several counters so that cores do not fight for one.
#[derive(Debug)]
struct HeapBytes([Counter; Self::COUNTERS]);

#[derive(Debug)]
#[repr(align(128))]
struct Counter(AtomicI64);

impl HeapBytes {
    const COUNTERS: usize = 16;

    const fn new() -> Self {
        Self([const { Counter(AtomicI64::new(0)) }; Self::COUNTERS])
    }

    fn add(&self, bytes: usize) {
        self.mine().fetch_add(bytes as i64, Ordering::Relaxed);
    }

    /// One thread's counter falls below zero when it frees what another one allocated.
    fn subtract(&self, bytes: usize) {
        self.mine().fetch_sub(bytes as i64, Ordering::Relaxed);
    }

    fn total(&self) -> u64 {
        let counters = self
            .0
            .iter()
            .map(|counter| counter.0.load(Ordering::Relaxed));
        counters.fold(0i64, i64::wrapping_add).max(0) as u64
    }

    fn mine(&self) -> &AtomicI64 {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        thread_local! {
            static MINE: std::cell::Cell<usize> = const { std::cell::Cell::new(usize::MAX) };
        }
        let mut mine = MINE.get();
        if mine == usize::MAX {
            mine = NEXT.fetch_add(1, Ordering::Relaxed) as usize % Self::COUNTERS;
            MINE.set(mine);
        }
        &self.0[mine % Self::COUNTERS].0
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.release(|_| true);
    }
}

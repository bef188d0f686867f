//! Free blocks, one shelf for each size, each under a lock of its own. What was freed last is
//! taken first: its pages are still in the processor's cache.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;

use super::pool::drop_shelved;
use super::size_class;

/// The keeper looks after this even if nobody woke it.
const LONGEST_SLEEP: Duration = Duration::from_secs(600);

/// A free block.
#[derive(Debug)]
pub(super) struct Shelved {
    block: NonNull<u8>,
    /// Who used it last.
    pub(super) owner: u64,
    /// When it was freed.
    pub(super) tick: u32,
}

#[expect(unsafe_code, reason = "a free block is a pointer")]
// SAFETY: a shelved block is memory that belongs to the shelf alone.
unsafe impl Send for Shelved {}

#[derive(Debug)]
pub(super) struct Shelves {
    shelves: [Mutex<Vec<Shelved>>; size_class::COUNT],
    bytes: AtomicU64,
    limit: AtomicU64,
    tick: AtomicU32,
    /// Where to look for a block to give up when all is full.
    hand: AtomicUsize,
    keeper_sleeps: AtomicBool,
    keeper: Mutex<()>,
    used: Condvar,
}

impl Shelves {
    pub(super) const fn new() -> Self {
        Self {
            shelves: [const { Mutex::new(Vec::new()) }; size_class::COUNT],
            bytes: AtomicU64::new(0),
            limit: AtomicU64::new(0),
            tick: AtomicU32::new(0),
            hand: AtomicUsize::new(0),
            keeper_sleeps: AtomicBool::new(false),
            keeper: Mutex::new(()),
            used: Condvar::new(),
        }
    }

    pub(super) fn set_limit(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// A block of this class, or of the next larger one.
    pub(super) fn take(&self, class: usize) -> Option<(NonNull<u8>, usize)> {
        let wanted = self.shelves.iter().enumerate().skip(class).take(2);
        for (class, shelf) in wanted {
            let taken = shelf.lock().pop();
            if let Some(taken) = taken {
                self.bytes
                    .fetch_sub(size_class::bytes(class) as u64, Ordering::Relaxed);
                return Some((taken.block, class));
            }
        }
        None
    }

    /// Whether so many bytes more can be kept.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        self.bytes().saturating_add(bytes) <= self.limit.load(Ordering::Relaxed)
    }

    /// How many blocks of this class are free.
    pub(super) fn count(&self, class: usize) -> usize {
        self.shelves
            .get(class)
            .map_or(0, |shelf| shelf.lock().len())
    }

    /// Keeps a free block, or hands it back when there is no room for it.
    pub(super) fn put(
        &self,
        class: usize,
        block: NonNull<u8>,
        owner: u64,
    ) -> Result<(), NonNull<u8>> {
        let length = size_class::bytes(class) as u64;
        let Some(shelf) = self.shelves.get(class) else {
            return Err(block);
        };
        let limit = self.limit.load(Ordering::Relaxed);
        let full = self.bytes.fetch_add(length, Ordering::SeqCst) + length > limit;
        if full && (length > limit || !self.make_room(limit)) {
            self.bytes.fetch_sub(length, Ordering::Relaxed);
            return Err(block);
        }
        let shelved = Shelved {
            block,
            owner,
            tick: self.tick.load(Ordering::Relaxed),
        };
        let mut shelf = shelf.lock();
        if shelf.try_reserve(1).is_err() {
            drop(shelf);
            self.bytes.fetch_sub(length, Ordering::Relaxed);
            return Err(block);
        }
        shelf.push(shelved);
        drop(shelf);
        if self.keeper_sleeps.load(Ordering::SeqCst) {
            drop(self.keeper.lock());
            self.used.notify_all();
        }
        Ok(())
    }

    /// Gives up old blocks, shelf after shelf, until no more than `limit` is kept.
    fn make_room(&self, limit: u64) -> bool {
        // Twice round, since one block of a shelf may not be enough.
        for _ in 0..2 * size_class::COUNT {
            if self.bytes() <= limit {
                return true;
            }
            let class = self.hand.fetch_add(1, Ordering::Relaxed) % size_class::COUNT;
            // A shelf that is in use just now is not the one to take from.
            let Some(mut shelf) = self.shelves[class].try_lock() else {
                continue;
            };
            if shelf.is_empty() {
                continue;
            }
            let oldest = shelf.remove(0);
            drop(shelf);
            self.bytes
                .fetch_sub(size_class::bytes(class) as u64, Ordering::Relaxed);
            drop_shelved(oldest.block);
        }
        self.bytes() <= limit
    }

    /// Gives up the blocks that `is_wanted` names, and says how many bytes they were.
    pub(super) fn remove(&self, is_wanted: impl Fn(&Shelved) -> bool) -> u64 {
        let mut removed = 0;
        for (class, shelf) in self.shelves.iter().enumerate() {
            // Unmapping takes its time, so it is done without the lock; and nothing is allocated,
            // since this is what is tried when memory has run out.
            loop {
                let wanted: SmallVec<[Shelved; 32]> = shelf
                    .lock()
                    .extract_if(.., |block| is_wanted(block))
                    .take(32)
                    .collect();
                if wanted.is_empty() {
                    break;
                }
                let bytes = size_class::bytes(class) as u64 * wanted.len() as u64;
                self.bytes.fetch_sub(bytes, Ordering::Relaxed);
                removed += bytes;
                for block in wanted {
                    drop_shelved(block.block);
                }
            }
        }
        removed
    }

    /// One step of time; returns the new one.
    pub(super) fn advance(&self) -> u32 {
        self.tick.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    /// Returns when something lies on a shelf.
    pub(super) fn wait_until_used(&self) {
        let mut keeper = self.keeper.lock();
        self.keeper_sleeps.store(true, Ordering::SeqCst);
        while self.bytes.load(Ordering::SeqCst) == 0 {
            self.used.wait_for(&mut keeper, LONGEST_SLEEP);
        }
        self.keeper_sleeps.store(false, Ordering::SeqCst);
    }

    /// Lets `time` pass.
    pub(super) fn wait(&self, time: Duration) {
        let mut keeper = self.keeper.lock();
        self.used.wait_for(&mut keeper, time);
    }
}

//! Counts what a thread allocates, so that a target can hold memory against the size of its input.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, counting. A program that does not install it counts nothing, and every
/// bound holds.
#[derive(Debug)]
pub struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // While a thread ends its counters are gone, and nobody asks for them.
    let _ = LIVE.try_with(|live| {
        let now = live.get().wrapping_add(bytes);
        live.set(now);
        PEAK.with(|peak| peak.set(peak.get().max(now)));
    });
}

#[expect(unsafe_code, reason = "allocators are")]
// SAFETY: every call is the system allocator's with the same arguments; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller keeps `GlobalAlloc`'s contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(layout.size().cast_signed().wrapping_neg());
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size.cast_signed().wrapping_sub(layout.size().cast_signed()));
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, size) }
    }
}

/// Runs `work`, which may have at most `bytes` more allocated at any time than before it.
#[track_caller]
pub(super) fn within<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    let before = LIVE.get();
    PEAK.set(before);
    let result = work();
    let peak = PEAK.get() - before;
    assert!(
        peak <= bytes.cast_signed(),
        "{peak} bytes were allocated at once, at most {bytes} are in proportion"
    );
    result
}

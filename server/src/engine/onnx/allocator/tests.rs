use std::collections::VecDeque;
use std::sync::Mutex;

use super::pool::ALIGNMENT;
use super::*;

const MIB: u64 = 1 << 20;

fn pool(limit: u64) -> Pool {
    let pool = Pool::new();
    pool.set_cache_limit(limit);
    pool
}

/// A block with its size and the byte it is full of.
struct Filled {
    block: *mut u8,
    size: usize,
    byte: u8,
}

// SAFETY: a block belongs to whoever holds this.
#[expect(unsafe_code, reason = "a block is passed between threads")]
unsafe impl Send for Filled {}

impl Filled {
    #[expect(unsafe_code, reason = "fills raw memory")]
    fn new(pool: &Pool, size: usize, byte: u8) -> Self {
        let block = if byte.is_multiple_of(5) {
            pool.reserve(size)
        } else {
            pool.allocate(size, u64::from(byte))
        };
        assert!(!block.is_null(), "{size}");
        assert!(block.addr().is_multiple_of(ALIGNMENT), "{size}");
        // SAFETY: the block has that many bytes.
        unsafe { block.write_bytes(byte, size) };
        Self { block, size, byte }
    }

    #[expect(unsafe_code, reason = "reads and frees raw memory")]
    fn free(self, pool: &Pool) {
        // SAFETY: the block has that many bytes, all written, and is freed once.
        unsafe {
            let bytes = std::slice::from_raw_parts(self.block, self.size);
            assert!(bytes.iter().all(|&byte| byte == self.byte));
            pool.free(self.block);
        }
    }
}

/// Numbers that look random (xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

#[test]
fn blocks_of_many_threads_never_overlap() {
    let pool = pool(4 * MIB);
    // Blocks are also freed by threads that did not allocate them, as outputs are.
    let exchange = Mutex::new(VecDeque::new());
    std::thread::scope(|scope| {
        for seed in 1..=8u64 {
            let (pool, exchange) = (&pool, &exchange);
            scope.spawn(move || {
                let mut numbers = Numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
                let mut held = Vec::new();
                for step in 0..1500 {
                    match numbers.below(10) {
                        0..=4 => {
                            let bits = numbers.below(20);
                            let size = 1 + numbers.below(1 << bits) as usize;
                            held.push(Filled::new(pool, size, numbers.below(256) as u8));
                        }
                        5..=6 if !held.is_empty() => {
                            let at = numbers.below(held.len() as u64) as usize;
                            held.swap_remove(at).free(pool);
                        }
                        7 => exchange.lock().unwrap().extend(held.pop()),
                        8 => {
                            let other = exchange.lock().unwrap().pop_front();
                            if let Some(other) = other {
                                other.free(pool);
                            }
                        }
                        _ if step % 50 == 0 => {
                            pool.release(|block| block.owner % 2 == 0);
                        }
                        _ => {
                            pool.age(2);
                        }
                    }
                    assert!(pool.stats().cached_bytes <= 5 * MIB);
                }
                held.into_iter().for_each(|filled| filled.free(pool));
            });
        }
    });
    for filled in exchange.into_inner().unwrap() {
        filled.free(&pool);
    }
    let stats = pool.stats();
    assert_eq!(stats.live_bytes, 0, "everything was freed");
    assert!(stats.cached_bytes <= 4 * MIB && stats.peak_bytes > 0);
    assert_eq!(pool.release(|_| true), stats.cached_bytes);
    assert_eq!(pool.stats().cached_bytes, 0);
}

#[test]
fn every_size_is_aligned_and_whole() {
    let pool = pool(MIB);
    for size in (1..300).chain([4095, 4096, 65_535, 65_536, 65_537, 1 << 20, (1 << 20) + 1]) {
        Filled::new(&pool, size, 1).free(&pool);
        Filled::new(&pool, size, 5).free(&pool);
    }
    assert_eq!(pool.stats().live_bytes, 0);
}

#[test]
fn nothing_is_no_block_and_too_much_is_none() {
    let pool = pool(MIB);
    for size in [0, usize::MAX, usize::MAX - 63, isize::MAX as usize, 1 << 50] {
        assert!(pool.allocate(size, 1).is_null(), "{size}");
        assert!(pool.reserve(size).is_null(), "{size}");
    }
    // SAFETY: null may be freed.
    #[expect(unsafe_code, reason = "frees nothing")]
    unsafe {
        pool.free(ptr::null_mut());
    }
    assert_eq!(pool.stats(), AllocatorStats::default());
}

#[test]
fn what_was_freed_last_is_used_next() {
    let pool = pool(16 * MIB);
    let first = Filled::new(&pool, 1 << 20, 1);
    let address = first.block.addr();
    first.free(&pool);
    let cached = pool.stats().cached_bytes;
    assert!((MIB..MIB * 9 / 8 + 8192).contains(&cached), "{cached}");
    let smaller = Filled::new(&pool, (1 << 20) - 1000, 2);
    assert_eq!(smaller.block.addr(), address);
    assert_eq!(pool.stats().cached_bytes, 0);
    let much_smaller = Filled::new(&pool, 1 << 19, 3);
    smaller.free(&pool);
    let fresh = Filled::new(&pool, 1 << 19, 3);
    assert_ne!(fresh.block.addr(), address, "half of it would lie idle");
    fresh.free(&pool);
    much_smaller.free(&pool);
}

#[test]
fn no_more_is_kept_than_allowed_and_the_newest_stays() {
    let pool = pool(4 * MIB);
    let blocks: Vec<_> = (0..10).map(|n| Filled::new(&pool, 1 << 20, n)).collect();
    let reserved = 2;
    for block in blocks {
        block.free(&pool);
    }
    let stats = pool.stats();
    assert_eq!(stats.live_bytes, 0);
    assert!((2 * MIB..=4 * MIB).contains(&stats.cached_bytes));
    assert!(stats.peak_bytes >= (10 - reserved) * MIB);
    Filled::new(&pool, 8 << 20, 1).free(&pool);
    assert!(pool.stats().cached_bytes <= 4 * MIB, "too large to keep");
}

#[test]
fn idle_blocks_go_and_used_ones_stay() {
    let pool = pool(64 * MIB);
    let idle = Filled::new(&pool, 1 << 20, 1);
    let used = Filled::new(&pool, 1 << 22, 2);
    idle.free(&pool);
    used.free(&pool);
    for _ in 0..3 {
        pool.age(3);
        Filled::new(&pool, 1 << 22, 2).free(&pool);
    }
    let gone = pool.age(3);
    assert!((MIB..2 * MIB).contains(&gone), "{gone}");
    assert!(pool.stats().cached_bytes > 4 * MIB);
}

#[test]
fn an_owner_that_leaves_takes_its_free_blocks_along() {
    let pool = pool(64 * MIB);
    Filled::new(&pool, 1 << 20, 1).free(&pool);
    Filled::new(&pool, 1 << 22, 2).free(&pool);
    let gone = pool.release(|block| block.owner == 1);
    assert!((MIB..2 * MIB).contains(&gone), "{gone}");
    assert!(pool.stats().cached_bytes > 4 * MIB);
}

#[test]
fn what_a_run_had_at_once_is_ready_for_the_next() {
    let pool = pool(64 * MIB);
    let watched = Watched::start();
    let small = Filled::new(&pool, 1000, 1);
    for _ in 0..3 {
        let one = Filled::new(&pool, 1 << 20, 1);
        let other = Filled::new(&pool, 1 << 20, 2);
        let large = Filled::new(&pool, 5 << 20, 3);
        for block in [one, other, large] {
            block.free(&pool);
        }
    }
    let buffers = watched.finish();
    small.free(&pool);
    let counts: Vec<usize> = buffers.0.iter().map(|&(_, count)| count).collect();
    assert_eq!(counts, [1, 2], "{buffers:?}");

    let kept = pool.stats().cached_bytes;
    pool.release(|_| true);
    let stock = || {
        let each = buffers.0.iter();
        each.map(|&wanted| pool.stock(wanted, u64::MAX))
    };
    assert_eq!(stock().sum::<u64>(), kept);
    assert_eq!(pool.stats().cached_bytes, kept);
    assert_eq!(pool.stats().live_bytes, 0);
    assert_eq!(stock().sum::<u64>(), 0, "they are there");
    assert_eq!(pool.stock((1 << 20, 9), MIB - 1), 0, "more is not allowed");
    assert_eq!(pool.stock((60 << 20, 1), u64::MAX), 0, "others would go");
    let taken = [1 << 20, 1 << 20, 5 << 20].map(|size| Filled::new(&pool, size, 4));
    assert_eq!(pool.stats().cached_bytes, 0, "the run found all of them");
    for block in taken {
        block.free(&pool);
    }
}

#[test]
fn a_thread_that_is_not_watched_counts_nothing() {
    let pool = pool(16 * MIB);
    drop(Watched::start());
    Filled::new(&pool, 1 << 20, 1).free(&pool);
    let watched = Watched::start();
    std::thread::scope(|scope| {
        scope.spawn(|| Filled::new(&pool, 3 << 20, 1).free(&pool));
    });
    assert_eq!(watched.finish(), RunBuffers::default());
}

#[test]
fn reserved_blocks_are_not_kept() {
    let pool = pool(64 * MIB);
    let reserved = Filled::new(&pool, 1 << 20, 5);
    assert!(pool.stats().live_bytes >= MIB);
    reserved.free(&pool);
    assert_eq!(pool.stats().cached_bytes, 0);
    assert_eq!(pool.stats().live_bytes, 0);
}

#[test]
fn freeing_twice_is_noticed_while_the_block_is_kept() {
    let pool = pool(64 * MIB);
    let block = pool.allocate(1 << 20, 1);
    // SAFETY: the block is on a shelf after the first call, so its header is still there.
    #[expect(unsafe_code, reason = "frees a block twice on purpose")]
    unsafe {
        pool.free(block);
        let once = pool.stats();
        pool.free(block);
        assert_eq!(pool.stats(), once);
    }
}

#[test]
fn owners_nest() {
    let (outer, inner) = (Owner::new(), Owner::new());
    assert_ne!(outer, inner);
    let before = OWNER.get();
    let entered = outer.enter();
    {
        let _inside = inner.enter();
        assert_eq!(OWNER.get(), inner.0);
    }
    assert_eq!(OWNER.get(), outer.0);
    drop(entered);
    assert_eq!(OWNER.get(), before);
}

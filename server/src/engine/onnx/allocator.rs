//! The one allocator of every session: buffers of a run, outputs and weights come from it.
//!
//! ONNX Runtime would give each session an arena of its own, which grows by doubling and keeps
//! what it has for the session's life. Here sessions share what is free, memory is counted, and
//! what nobody used for a while goes back to the system.

mod demand;
mod pool;
mod shelves;
mod size_class;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::ffi::c_void;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::time::Duration;

use ort::sys;

pub(super) use self::demand::Watched;
use self::pool::Pool;
use super::environment::missing;
use super::status::check;
use crate::engine::{EngineError, RunBuffers};
use crate::memory::MemoryLimit;

pub use self::pool::AllocatorStats;

/// How often free blocks grow older by one.
const TICK: Duration = Duration::from_secs(1);
/// Ticks after which a block that nobody took is given back. A run that comes less often than
/// this pays for fresh pages, some milliseconds for each ten megabytes.
const IDLE_TICKS: u32 = 10;

static POOL: Pool = Pool::new();
/// ONNX Runtime's own allocator.
static THEIRS: AtomicPtr<sys::OrtAllocator> = AtomicPtr::new(ptr::null_mut());

/// What the sessions' allocator holds.
pub fn stats() -> AllocatorStats {
    POOL.stats()
}

/// Gives every free block back to the system, those of busy sessions too: for when memory is
/// short. Returns how many bytes went.
pub fn release() -> u64 {
    POOL.release(|_| true)
}

/// The most that is made for a run that is yet to come: it may turn out to be a smaller one.
const MOST_STOCKED: u64 = 256 << 20;

/// Makes blocks for a run to find, those that are missing, and returns how many bytes they are.
pub(super) fn stock(buffers: &RunBuffers) -> u64 {
    let wanted = buffers.0.iter();
    wanted.fold(0, |made, &wanted| {
        made + POOL.stock(wanted, MOST_STOCKED.saturating_sub(made))
    })
}

/// How much may be kept free unless the user says otherwise: a quarter of the memory there is.
///
/// What lies here longer than some seconds goes back, and all of it when memory is short, so the
/// bound is only there for the moment: large enough for the buffers of every model that is busy,
/// since a run that finds none waits for fresh pages.
pub fn default_cache_bytes() -> u64 {
    const UNKNOWN: u64 = 256 << 20;
    MemoryLimit::detect().map_or(UNKNOWN, |limit| (limit.bytes / 4).max(UNKNOWN / 4))
}

/// Who a block is allocated for, so that what it leaves behind can be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner(u64);

thread_local! {
    static OWNER: Cell<u64> = const { Cell::new(0) };
}

impl Owner {
    /// An owner unlike all others.
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// What this thread allocates from now on is this owner's, until the guard is dropped.
    pub(super) fn enter(self) -> Entered {
        Entered {
            before: OWNER.replace(self.0),
        }
    }

    /// Gives back the free blocks that this owner used last.
    pub(super) fn leave(self) {
        POOL.release(|block| block.owner == self.0);
    }
}

/// See [`Owner::enter`].
#[derive(Debug)]
pub(super) struct Entered {
    before: u64,
}

impl Drop for Entered {
    fn drop(&mut self) {
        OWNER.set(self.before);
    }
}

/// What ONNX Runtime is given: its own structure first, so that a pointer to one is a pointer to
/// the other.
#[repr(C)]
struct Registered {
    allocator: sys::OrtAllocator,
    info: NonNull<sys::OrtMemoryInfo>,
}

#[expect(unsafe_code, reason = "holds a pointer of the C API")]
// SAFETY: the structure is never changed after it was made, and the memory info is only read.
unsafe impl Send for Registered {}
#[expect(unsafe_code, reason = "holds a pointer of the C API")]
// SAFETY: as for `Send`.
unsafe impl Sync for Registered {}

/// Registers the allocator with the environment; sessions use it that set
/// `session.use_env_allocators`. At most `cache_bytes` are kept free for the next run; `theirs`
/// is ONNX Runtime's default allocator.
#[expect(unsafe_code, reason = "registers callbacks with the C API")]
pub(super) fn register(
    api: &'static sys::OrtApi,
    env: NonNull<sys::OrtEnv>,
    theirs: NonNull<sys::OrtAllocator>,
    cache_bytes: u64,
) -> Result<(), EngineError> {
    static REGISTERED: OnceLock<Registered> = OnceLock::new();
    let registered = match REGISTERED.get() {
        Some(registered) => registered,
        None => {
            let mut info = ptr::null_mut();
            // The name and the type are what ONNX Runtime asks of a foreign allocator: "arena" is
            // for its own, and the device is what sessions look it up by.
            // SAFETY: `info` is a place for one pointer.
            check(api, unsafe {
                (api.CreateCpuMemoryInfo)(
                    sys::OrtAllocatorType::OrtDeviceAllocator,
                    sys::OrtMemType::OrtMemTypeDefault,
                    &mut info,
                )
            })?;
            let info = NonNull::new(info).ok_or_else(|| missing("memory description"))?;
            // SAFETY: the types differ in what may be thrown through them only, and the callers
            // of both are C++, which catches it.
            let (alloc, reserve) = unsafe {
                (
                    mem::transmute::<ThrowingAlloc, Alloc>(alloc),
                    mem::transmute::<ThrowingReserve, Reserve>(reserve),
                )
            };
            REGISTERED.get_or_init(|| Registered {
                allocator: sys::OrtAllocator {
                    version: sys::ORT_API_VERSION,
                    Alloc: Some(alloc),
                    Free: Some(free),
                    Info: Some(describe),
                    Reserve: Some(reserve),
                    GetStats: None,
                    AllocOnStream: None,
                    Shrink: None,
                },
                info,
            })
        }
    };
    THEIRS.store(theirs.as_ptr(), Ordering::Release);
    POOL.set_cache_limit(cache_bytes);
    // SAFETY: the environment is alive and `registered` lives for ever. ONNX Runtime takes the
    // pointer as mutable, but only calls through it.
    check(api, unsafe {
        (api.RegisterAllocator)(
            env.as_ptr(),
            ptr::from_ref(&registered.allocator).cast_mut(),
        )
    })?;
    POOL.keep(TICK, IDLE_TICKS);
    Ok(())
}

type Alloc = unsafe extern "system" fn(*mut sys::OrtAllocator, usize) -> *mut c_void;
type Reserve = unsafe extern "system" fn(*const sys::OrtAllocator, usize) -> *mut c_void;

/// As [`Alloc`], for a function that may throw.
type ThrowingAlloc = unsafe extern "C-unwind" fn(*mut sys::OrtAllocator, usize) -> *mut c_void;
/// As [`Reserve`], for a function that may throw.
type ThrowingReserve = unsafe extern "C-unwind" fn(*const sys::OrtAllocator, usize) -> *mut c_void;

// Rust never unwinds out of these: the pool neither panics nor calls anything that does.

#[expect(unsafe_code, reason = "a callback of the C API")]
unsafe extern "C-unwind" fn alloc(_this: *mut sys::OrtAllocator, size: usize) -> *mut c_void {
    let block = POOL.allocate(size, OWNER.get());
    if block.is_null() && size > 0 {
        return refuse();
    }
    block.cast()
}

#[expect(unsafe_code, reason = "a callback of the C API")]
unsafe extern "C-unwind" fn reserve(_this: *const sys::OrtAllocator, size: usize) -> *mut c_void {
    let block = POOL.reserve(size);
    if block.is_null() && size > 0 {
        return refuse();
    }
    block.cast()
}

/// Lets ONNX Runtime refuse in its own way.
///
/// # Why
/// ONNX Runtime 1.31 writes to what an allocator returns without looking: null would end the
/// process, where a tensor that is too large should only end its run. Its own allocator throws,
/// and its kernels are made for that. So its own allocator is asked for more than there can be,
/// and the exception passes through the callback, which holds nothing, back into ONNX Runtime.
#[expect(unsafe_code, reason = "calls a function of the C API")]
extern "C-unwind" fn refuse() -> *mut c_void {
    let theirs = THEIRS.load(Ordering::Acquire);
    // SAFETY: null or ONNX Runtime's default allocator, which lives as long as the process. Its
    // function has this signature and may throw: the declared type, which says that it does not,
    // would abort.
    unsafe {
        let Some(alloc) = theirs.as_ref().and_then(|theirs| theirs.Alloc) else {
            return ptr::null_mut();
        };
        let alloc = mem::transmute::<Alloc, ThrowingAlloc>(alloc);
        alloc(theirs, isize::MAX as usize)
    }
}

#[expect(unsafe_code, reason = "a callback of the C API")]
unsafe extern "system" fn free(_this: *mut sys::OrtAllocator, block: *mut c_void) {
    // SAFETY: ONNX Runtime frees what it was given here, once.
    unsafe { POOL.free(block.cast()) }
}

#[expect(unsafe_code, reason = "a callback of the C API")]
unsafe extern "system" fn describe(this: *const sys::OrtAllocator) -> *const sys::OrtMemoryInfo {
    // SAFETY: `this` is the pointer that was registered: the first field of a `Registered`.
    unsafe { (*this.cast::<Registered>()).info.as_ptr() }
}

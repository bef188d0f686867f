//! Threads of ONNX Runtime's pools, started by us: a session may be built at low priority, and
//! its threads must not inherit that.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

use ort::sys;
use parking_lot::Mutex;

use super::rest;
use super::status::check;
use crate::engine::EngineError;
use crate::priority;

/// ONNX Runtime's own threads have the system's usual stack; kernels may count on it.
const STACK_BYTES: usize = 8 << 20;

/// A thread to be, with where to send its handle.
struct Order {
    work: Work,
    /// ONNX Runtime does not end its looking for work when a run ends.
    rests: bool,
    handle: SyncSender<Option<JoinHandle<()>>>,
}

/// ONNX Runtime's loop for a thread of a pool.
struct Work {
    run: sys::OrtThreadWorkerFn,
    parameter: *mut c_void,
}

#[expect(unsafe_code, reason = "holds a pointer for the thread it is made for")]
// SAFETY: ONNX Runtime hands the parameter over for the new thread to use.
unsafe impl Send for Work {}

/// The thread that starts the others. It is started with the environment, at the priority of
/// whoever answers requests; a thread begins with the priority of the one that started it.
static STARTER: Mutex<Option<Sender<Order>>> = Mutex::new(None);

/// Makes the pools of these threading options start their threads here.
#[expect(unsafe_code, reason = "sets callbacks of the C API")]
pub(super) fn for_shared_pools(
    api: &'static sys::OrtApi,
    options: *mut sys::OrtThreadingOptions,
) -> Result<(), EngineError> {
    start_starter()?;
    // SAFETY: the options are alive and the functions live for ever.
    unsafe {
        check(
            api,
            (api.SetGlobalCustomCreateThreadFn)(options, Some(create_shared)),
        )?;
        check(api, (api.SetGlobalCustomJoinThreadFn)(options, Some(join)))
    }
}

/// Makes the pools of a session with threads of its own start them here.
#[expect(unsafe_code, reason = "sets callbacks of the C API")]
pub(super) fn for_session(
    api: &'static sys::OrtApi,
    options: *mut sys::OrtSessionOptions,
) -> Result<(), EngineError> {
    start_starter()?;
    // SAFETY: the options are alive and the functions live for ever.
    unsafe {
        check(
            api,
            (api.SessionOptionsSetCustomCreateThreadFn)(options, Some(create_own)),
        )?;
        check(
            api,
            (api.SessionOptionsSetCustomJoinThreadFn)(options, Some(join)),
        )
    }
}

fn start_starter() -> Result<(), EngineError> {
    let mut starter = STARTER.lock();
    if starter.is_some() {
        return Ok(());
    }
    let (orders, received) = channel::<Order>();
    std::thread::Builder::new()
        .name("onnx-starter".into())
        .spawn(move || {
            for order in received {
                let started = start(order.work, order.rests);
                // Whoever ordered waits for the handle.
                drop(order.handle.send(started));
            }
        })
        .map_err(|error| EngineError::Failed(format!("cannot start a thread: {error}")))?;
    *starter = Some(orders);
    Ok(())
}

fn start(work: Work, rests: bool) -> Option<JoinHandle<()>> {
    std::thread::Builder::new()
        .name("onnx-pool".into())
        .stack_size(STACK_BYTES)
        .spawn(move || {
            priority::take_turns_of(priority::LONG_TURN);
            let _resting = rests.then(rest::when_idle);
            work.run();
        })
        .inspect_err(|error| tracing::error!(%error, "cannot start a thread of a pool"))
        .ok()
}

impl Work {
    #[expect(unsafe_code, reason = "runs a function of the C API")]
    fn run(self) {
        // SAFETY: ONNX Runtime gave both for a new thread to call once.
        unsafe { (self.run)(self.parameter) }
    }
}

/// Starts a thread of a pool that sessions share.
#[expect(unsafe_code, reason = "a callback of the C API")]
unsafe extern "C" fn create_shared(
    _options: *mut c_void,
    run: sys::OrtThreadWorkerFn,
    parameter: *mut c_void,
) -> sys::OrtCustomThreadHandle {
    create(Work { run, parameter }, true)
}

/// Starts a thread of one session's pool.
#[expect(unsafe_code, reason = "a callback of the C API")]
unsafe extern "C" fn create_own(
    _options: *mut c_void,
    run: sys::OrtThreadWorkerFn,
    parameter: *mut c_void,
) -> sys::OrtCustomThreadHandle {
    create(Work { run, parameter }, false)
}

/// Starts a thread; null makes ONNX Runtime fail the session with an error.
fn create(work: Work, rests: bool) -> sys::OrtCustomThreadHandle {
    // A panic must not unwind into C++.
    let started = catch_unwind(AssertUnwindSafe(|| {
        let (handle, started) = sync_channel(1);
        let orders = STARTER.lock().clone()?;
        let order = Order {
            work,
            rests,
            handle,
        };
        orders.send(order).ok()?;
        // The starter answers every order, or ends and closes the channel.
        started.recv().ok().flatten()
    }));
    match started {
        Ok(Some(thread)) => Box::into_raw(Box::new(thread)).cast_const().cast(),
        _ => ptr::null(),
    }
}

/// Waits for a thread's end, which ONNX Runtime has asked it for.
#[expect(unsafe_code, reason = "a callback of the C API")]
unsafe extern "C" fn join(handle: sys::OrtCustomThreadHandle) {
    if handle.is_null() {
        return;
    }
    let thread = handle.cast_mut().cast::<JoinHandle<()>>();
    // SAFETY: `create` made it of a box, and it is joined once.
    let thread = unsafe { Box::from_raw(thread) };
    // One that rests does not see that it is to end.
    let _working = rest::at_work();
    drop(thread.join());
}

//! How the process begins and ends.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// ONNX Runtime's own switch, read when its environment is made.
const TELEMETRY_OFF: &str = "ORT_DISABLE_TELEMETRY";

/// Keeps ONNX Runtime from making a device id in the user's cache and from reporting to its
/// vendor: the switch of its C API comes too late for that. Must be called before the process has
/// a second thread. Who has set the variable is left their choice.
#[expect(
    unsafe_code,
    reason = "the library reads this from the environment only"
)]
pub fn keep_engine_quiet() {
    if std::env::var_os(TELEMETRY_OFF).is_none() {
        // SAFETY: no other thread exists that could read the environment meanwhile.
        unsafe { std::env::set_var(TELEMETRY_OFF, "1") }
    }
}

/// Lets the process have as many file descriptors as it may ask for: the limit that it is started
/// with is often 1024 for the sake of old programs.
pub fn use_all_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!(%error, "the limit of file descriptors stays as it is");
    }
}

/// Ends the process at once, without running destructors of libraries that other threads may
/// still be inside of.
#[expect(
    unsafe_code,
    reason = "the standard library offers no exit without destructors"
)]
pub fn exit_now(code: u8) -> ! {
    // SAFETY: `_exit` takes a plain number and does not return; output is unbuffered or was
    // flushed by whoever wrote it.
    unsafe { libc::_exit(i32::from(code)) }
}

/// Closes every file but the first three: what the process was started with is all it has.
#[expect(unsafe_code, reason = "closes files that nothing here owns")]
pub fn close_other_files() {
    // SAFETY: called before the process has opened anything itself, so no owner of a descriptor
    // beyond the first three exists in it.
    unsafe {
        libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, 0u32);
    }
}

/// Leaves these signals to others of the process group or the service.
#[expect(unsafe_code, reason = "the standard library sets no signal handlers")]
pub fn ignore_signals(signals: &[i32]) {
    for &signal in signals {
        // SAFETY: ignoring a signal runs no code.
        unsafe {
            libc::signal(signal, libc::SIG_IGN);
        }
    }
}

/// Has these signals end the process at once: the standard library looks at some of them first.
#[expect(unsafe_code, reason = "the standard library sets no signal handlers")]
pub fn die_of(signals: &[i32]) {
    for &signal in signals {
        // SAFETY: the default action runs no code of the process.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
        }
    }
}

/// Ends the process as a wild pointer does.
#[cfg(debug_assertions)]
#[expect(unsafe_code, reason = "crashes for a test")]
pub(crate) fn crash() {
    // SAFETY: raising a signal in this process touches no memory.
    unsafe {
        libc::raise(libc::SIGSEGV);
    }
}

//! How the process begins and ends.

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

//! What prepared models depend on beside the model itself.

use std::ffi::CStr;

use super::environment::Environment;
use crate::engine::EngineIdentity;

pub(super) fn identity(environment: &Environment) -> EngineIdentity {
    EngineIdentity {
        engine: format!("onnxruntime {} {}", environment.version, build(environment)),
        provider: "cpu".to_owned(),
        cpu: cpu(),
    }
}

/// Branch, commit and flags that the library was built from.
#[expect(unsafe_code, reason = "reads a string of the C API")]
fn build(environment: &Environment) -> String {
    // SAFETY: the string is a constant of the library.
    let text = unsafe {
        let text = (environment.api.GetBuildInfoString)();
        if text.is_null() {
            return String::new();
        }
        CStr::from_ptr(text).to_string_lossy()
    };
    text.trim_start_matches("ORT Build Info:").trim().to_owned()
}

/// The instruction sets by which ONNX Runtime chooses layouts and kernels.
#[cfg(target_arch = "x86_64")]
fn cpu() -> String {
    let mut found = vec!["x86_64"];
    macro_rules! look_for {
        ($($feature:tt)*) => {
            $(if std::arch::is_x86_feature_detected!($feature) {
                found.push($feature);
            })*
        };
    }
    look_for!("sse4.1" "avx" "f16c" "fma" "avx2" "avx512f" "avx512bw" "avx512dq" "avx512vl"
        "avx512vnni" "avx512bf16" "avxvnni");
    found.join(" ")
}

/// The instruction sets by which ONNX Runtime chooses layouts and kernels.
#[cfg(target_arch = "aarch64")]
fn cpu() -> String {
    let mut found = vec!["aarch64"];
    macro_rules! look_for {
        ($($feature:tt)*) => {
            $(if std::arch::is_aarch64_feature_detected!($feature) {
                found.push($feature);
            })*
        };
    }
    look_for!("neon" "fp16" "dotprod" "i8mm" "bf16" "sve" "sve2");
    found.join(" ")
}

/// The instruction sets by which ONNX Runtime chooses layouts and kernels.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn cpu() -> String {
    std::env::consts::ARCH.to_owned()
}

//! ONNX Runtime's statuses as errors, without what a client must not see.

use std::ffi::CStr;

use ort::sys;

use crate::engine::EngineError;

/// Directories whose names start a path on a machine. Node names of exported graphs start with a
/// slash too (`/encoder/layer.0/MatMul`) and must stay readable.
const ROOTS: &[&str] = &[
    "onnxruntime_src",
    "build",
    "dev",
    "etc",
    "home",
    "lib",
    "lib64",
    "mnt",
    "opt",
    "private",
    "proc",
    "root",
    "run",
    "srv",
    "sys",
    "tmp",
    "usr",
    "var",
];

/// The longest message passed on; a graph's own names can make them arbitrarily long.
const LONGEST_MESSAGE: usize = 4096;

/// Turns a status into a result and frees it.
pub(super) fn check(api: &sys::OrtApi, status: sys::OrtStatusPtr) -> Result<(), EngineError> {
    if status.0.is_null() {
        return Ok(());
    }
    Err(EngineError::Failed(take_message(api, status)))
}

#[cold]
#[expect(unsafe_code, reason = "reads and frees a status of the C API")]
fn take_message(api: &sys::OrtApi, status: sys::OrtStatusPtr) -> String {
    // SAFETY: a non-null status comes from a call that failed and is owned here; its message is a
    // C string that lives as long as the status, which is freed once and not used after.
    unsafe {
        let text = (api.GetErrorMessage)(status.0);
        let message = if text.is_null() {
            String::from("ONNX Runtime failed without a message")
        } else {
            clean(&CStr::from_ptr(text).to_string_lossy())
        };
        (api.ReleaseStatus)(status.0);
        message
    }
}

/// The message on one line, bounded, with absolute paths cut to their last component.
pub(super) fn clean(message: &str) -> String {
    let mut out = String::with_capacity(message.len().min(LONGEST_MESSAGE));
    let mut rest = message.trim();
    let mut previous = ' ';
    while let Some(next) = rest.chars().next() {
        if out.len() >= LONGEST_MESSAGE {
            out.push('…');
            break;
        }
        if next == '/'
            && !is_path_char(previous)
            && let Some(length) = absolute_path(rest)
        {
            let path = &rest[..length];
            let name = path.rsplit('/').find(|part| !part.is_empty());
            out.push_str(name.unwrap_or_default());
            previous = 'x';
            rest = &rest[length..];
            continue;
        }
        match next {
            '\n' | '\r' | '\t' => {
                if !out.ends_with(' ') {
                    out.push(' ');
                }
            }
            other if other.is_control() => out.extend(other.escape_default()),
            other => out.push(other),
        }
        previous = next;
        rest = &rest[next.len_utf8()..];
    }
    out
}

fn is_path_char(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '/' | '.' | '_' | '-' | '+' | '~' | '@' | '%')
}

/// The length of the path at the start of `text`, if one of the machine's roots begins it.
fn absolute_path(text: &str) -> Option<usize> {
    let length = text.find(|c| !is_path_char(c)).unwrap_or(text.len());
    let root = text[1..length].split('/').next()?;
    ROOTS.contains(&root).then_some(length)
}

#[cfg(test)]
mod tests {
    use super::clean;

    #[test]
    fn paths_of_the_machine_are_cut_and_node_names_stay() {
        assert_eq!(
            clean(
                "Name:'/encoder/layer.0/MatMul' Status Message: /onnxruntime_src/onnxruntime/core/x.cc:541 Foo(\"/tmp/a/b.bin\")\n"
            ),
            "Name:'/encoder/layer.0/MatMul' Status Message: x.cc:541 Foo(\"b.bin\")"
        );
        assert_eq!(clean("a/tmp/b 1/2"), "a/tmp/b 1/2");
    }

    #[test]
    fn messages_are_one_bounded_line() {
        assert_eq!(clean("a\r\n\tb\u{1b}[1m"), "a b\\u{1b}[1m");
        assert!(clean(&"é".repeat(9000)).len() <= super::LONGEST_MESSAGE + 4);
    }
}

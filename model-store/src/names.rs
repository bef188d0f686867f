//! What may be called a model, a file or a version: the one place that decides it.

/// The longest name, in bytes: also the longest file name Linux takes.
pub const MAX_NAME_BYTES: usize = 255;
/// The longest relative path, in bytes.
pub const MAX_PATH_BYTES: usize = 4095;
/// The most folders and files a relative path may name.
pub const MAX_PATH_DEPTH: usize = 32;

/// Why a name or path is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    #[error("it is empty")]
    Empty,
    #[error("it has {bytes} bytes, at most {limit} are allowed")]
    TooLong { bytes: usize, limit: usize },
    #[error("it contains a path separator ('/' or '\\')")]
    Separator,
    #[error("it contains the control character U+{:04X}", *.0 as u32)]
    Control(char),
    #[error("'.' and '..' are not names")]
    Dots,
    #[error("it starts with '.', which is kept for hidden files")]
    Hidden,
    #[error("it is not valid UTF-8")]
    NotUtf8,
    #[error("it is an absolute path")]
    Absolute,
    #[error("it contains '..'")]
    Parent,
    #[error("it has {depth} parts, at most {MAX_PATH_DEPTH} are allowed")]
    TooDeep { depth: usize },
}

/// A checked path without its `.` parts.
pub(crate) fn plain(path: &str) -> String {
    let parts: Vec<&str> = path.split('/').filter(|&part| part != ".").collect();
    parts.join("/")
}

/// Checks the name of a model, a configuration or a single file.
pub fn check_name(name: &str) -> Result<(), NameError> {
    if name.is_empty() {
        return Err(NameError::Empty);
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(NameError::TooLong {
            bytes: name.len(),
            limit: MAX_NAME_BYTES,
        });
    }
    if name.contains(['/', '\\']) {
        return Err(NameError::Separator);
    }
    if let Some(control) = name.chars().find(|&c| misleads(c)) {
        return Err(NameError::Control(control));
    }
    if name == "." || name == ".." {
        return Err(NameError::Dots);
    }
    if name.starts_with('.') {
        return Err(NameError::Hidden);
    }
    Ok(())
}

/// Checks a path below a model's folder: names joined by single slashes.
pub fn check_relative_path(path: &str) -> Result<(), NameError> {
    if path.is_empty() {
        return Err(NameError::Empty);
    }
    if path.len() > MAX_PATH_BYTES {
        return Err(NameError::TooLong {
            bytes: path.len(),
            limit: MAX_PATH_BYTES,
        });
    }
    if path.starts_with('/') {
        return Err(NameError::Absolute);
    }
    let depth = path.split('/').count();
    if depth > MAX_PATH_DEPTH {
        return Err(NameError::TooDeep { depth });
    }
    for part in path.split('/') {
        if part == ".." {
            return Err(NameError::Parent);
        }
        check_name(part)?;
    }
    Ok(())
}

/// The version a folder's name stands for: digits without a leading zero, none for any other name.
///
/// As in Triton, `0` is a version, and none is larger than a signed 64-bit number can tell.
pub fn check_version_folder(name: &str) -> Option<u64> {
    let canonical = name == "0" || !name.starts_with('0');
    if !canonical || name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    name.parse()
        .ok()
        .filter(|&version: &u64| version <= i64::MAX as u64)
}

/// Characters that would let a name forge or reorder a line of log.
fn misleads(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_names_pass() {
        for name in [
            "resnet50",
            "a",
            "模型",
            "with space",
            "v1.2-rc+3",
            "a..b",
            &"x".repeat(255),
        ] {
            assert_eq!(check_name(name), Ok(()), "{name}");
        }
    }

    #[test]
    fn names_that_could_leave_a_folder_or_forge_a_log_line_are_refused() {
        let long = "x".repeat(256);
        for (name, error) in [
            ("", NameError::Empty),
            (".", NameError::Dots),
            ("..", NameError::Dots),
            ("../secret", NameError::Separator),
            ("/etc/passwd", NameError::Separator),
            ("a/b", NameError::Separator),
            ("a\\..\\b", NameError::Separator),
            (".git", NameError::Hidden),
            ("a\0b", NameError::Control('\0')),
            ("a\r\nb", NameError::Control('\r')),
            ("a\u{1b}[2J", NameError::Control('\u{1b}')),
            ("a\u{202e}b", NameError::Control('\u{202e}')),
            (
                &long,
                NameError::TooLong {
                    bytes: 256,
                    limit: 255,
                },
            ),
        ] {
            assert_eq!(check_name(name), Err(error), "{name:?}");
        }
    }

    #[test]
    fn relative_paths_stay_below_their_folder() {
        for path in ["labels.txt", "warmup/a.bin", "1/model.onnx/model.onnx"] {
            assert_eq!(check_relative_path(path), Ok(()), "{path}");
        }
        let deep = vec!["a"; 33].join("/");
        let long = vec!["a".repeat(250); 17].join("/");
        for (path, error) in [
            ("", NameError::Empty),
            ("/a", NameError::Absolute),
            ("a/../b", NameError::Parent),
            ("..", NameError::Parent),
            ("a//b", NameError::Empty),
            ("a/", NameError::Empty),
            ("./a", NameError::Dots),
            ("a\\b", NameError::Separator),
            ("a/.ssh/id", NameError::Hidden),
            (&deep, NameError::TooDeep { depth: 33 }),
            (
                &long,
                NameError::TooLong {
                    bytes: 4266,
                    limit: 4095,
                },
            ),
        ] {
            assert_eq!(check_relative_path(path), Err(error), "{path:?}");
        }
    }

    #[test]
    fn version_folders_are_plain_numbers() {
        assert_eq!(check_version_folder("1"), Some(1));
        assert_eq!(check_version_folder("0"), Some(0));
        assert_eq!(
            check_version_folder("9223372036854775807"),
            Some(i64::MAX as u64)
        );
        for name in [
            "",
            "01",
            "00",
            "-1",
            "+1",
            " 1",
            "1a",
            "1.0",
            "x",
            "9223372036854775808",
            "٣",
        ] {
            assert_eq!(check_version_folder(name), None, "{name:?}");
        }
    }
}

//! References to data outside the model file: checked before anything is opened.

use crate::graph::ExternalData;
use crate::names::{MAX_PATH_BYTES, MAX_PATH_DEPTH, NameError, check_name};

/// Why a reference to data outside the model file is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExternalError {
    #[error("it names no location")]
    NoLocation,
    #[error("its location is empty")]
    EmptyLocation,
    #[error("its location {0} is an absolute path")]
    Absolute(String),
    #[error("its location {0} leaves the model's folder with '..'")]
    Parent(String),
    #[error("its location {0} contains a backslash")]
    Backslash(String),
    #[error("its location {0} starts with a drive letter")]
    DriveLetter(String),
    #[error("its location {0} is a mark by which the engine addresses its own memory")]
    MemoryMark(String),
    #[error("its location {location} is not a usable path: {cause}")]
    Path { location: String, cause: NameError },
    #[error("its {key} is given more than once")]
    Repeated { key: &'static str },
    #[error("its {key} {value} is not a whole number from 0 to 9223372036854775807")]
    NotANumber { key: &'static str, value: String },
    #[error("its offset {offset} and length {length} together exceed 64 bits")]
    Overflow { offset: u64, length: u64 },
    #[error("its length is {given} bytes, its shape and type need {needed}")]
    Length { given: u64, needed: u64 },
}

/// A reference as its entries are read one by one.
#[derive(Debug, Default)]
pub(crate) struct ExternalEntries {
    location: Option<String>,
    offset: Option<u64>,
    length: Option<u64>,
}

impl ExternalEntries {
    pub(crate) fn push(&mut self, key: &[u8], value: &[u8]) -> Result<(), ExternalError> {
        match key {
            b"location" => {
                let location = check_location(value)?;
                once(&mut self.location, location, "location")
            }
            b"offset" => once(&mut self.offset, number("offset", value)?, "offset"),
            b"length" => once(&mut self.length, number("length", value)?, "length"),
            // Checksums and the engine's own notes on packing: nothing is opened by them.
            _ => Ok(()),
        }
    }

    /// Whether it names a safetensors file and no place in it: the tensor's name tells the place.
    pub(crate) fn names_a_tensor(&self) -> bool {
        let location = self.location.as_deref().unwrap_or_default();
        location.ends_with(".safetensors") && self.offset.is_none() && self.length.is_none()
    }

    /// The reference, given how many bytes the tensor's shape and type need, where that is known.
    pub(crate) fn finish(self, needed: Option<u64>) -> Result<ExternalData, ExternalError> {
        let location = self.location.ok_or(ExternalError::NoLocation)?;
        let offset = self.offset.unwrap_or(0);
        // Zero stands for "not given" in the engine.
        let given = self.length.filter(|&length| length > 0);
        if let (Some(given), Some(needed)) = (given, needed)
            && given != needed
        {
            return Err(ExternalError::Length { given, needed });
        }
        let length = given.or(needed);
        if let Some(length) = length
            && offset
                .checked_add(length)
                .is_none_or(|end| end > i64::MAX as u64)
        {
            return Err(ExternalError::Overflow { offset, length });
        }
        Ok(ExternalData {
            location,
            offset,
            length,
        })
    }
}

fn once<T>(slot: &mut Option<T>, value: T, key: &'static str) -> Result<(), ExternalError> {
    // Readers differ in which of two entries they believe, so only one is allowed.
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(ExternalError::Repeated { key }),
    }
}

fn number(key: &'static str, value: &[u8]) -> Result<u64, ExternalError> {
    std::str::from_utf8(value)
        .ok()
        .filter(|text| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()))
        .and_then(|text| text.parse().ok())
        .filter(|&number: &u64| number <= i64::MAX as u64)
        .ok_or_else(|| ExternalError::NotANumber {
            key,
            value: shown(value),
        })
}

fn check_location(value: &[u8]) -> Result<String, ExternalError> {
    let path = |cause| ExternalError::Path {
        location: shown(value),
        cause,
    };
    let text = std::str::from_utf8(value).map_err(|_| path(NameError::NotUtf8))?;
    if text.is_empty() {
        return Err(ExternalError::EmptyLocation);
    }
    if text.starts_with("*/_ORT_") || text.contains("_ORT_MEM_ADDR_") {
        return Err(ExternalError::MemoryMark(shown(value)));
    }
    if text.contains('\\') {
        return Err(ExternalError::Backslash(shown(value)));
    }
    if text.starts_with('/') {
        return Err(ExternalError::Absolute(shown(value)));
    }
    if value.len() >= 2 && value[0].is_ascii_alphabetic() && value[1] == b':' {
        return Err(ExternalError::DriveLetter(shown(value)));
    }
    if text.split('/').any(|part| part == "..") {
        return Err(ExternalError::Parent(shown(value)));
    }
    if text.len() > MAX_PATH_BYTES {
        return Err(path(NameError::TooLong {
            bytes: text.len(),
            limit: MAX_PATH_BYTES,
        }));
    }
    let depth = text.split('/').count();
    if depth > MAX_PATH_DEPTH {
        return Err(path(NameError::TooDeep { depth }));
    }
    let mut parts = text.split('/').filter(|&part| part != ".").peekable();
    if parts.peek().is_none() {
        return Err(path(NameError::Dots));
    }
    parts.try_for_each(check_name).map_err(path)?;
    Ok(text.to_owned())
}

/// A string from a file, quoted and cut so that it can stand in a message or a log line.
pub(crate) fn shown(bytes: &[u8]) -> String {
    const LONGEST: usize = 120;
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(4 * LONGEST)]);
    let mut quoted: String = text
        .chars()
        .take(LONGEST)
        .flat_map(char::escape_debug)
        .collect();
    if text.chars().nth(LONGEST).is_some() || bytes.len() > 4 * LONGEST {
        quoted.push('…');
    }
    format!("'{quoted}'")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn location(text: &str) -> Result<String, ExternalError> {
        check_location(text.as_bytes())
    }

    #[test]
    fn locations_that_stay_in_the_folder_pass() {
        for text in [
            "weights.bin",
            "data/layer.0",
            "./weights.bin",
            "ab:c",
            "model.onnx.data",
        ] {
            assert_eq!(location(text), Ok(text.to_owned()));
        }
    }

    #[test]
    fn locations_that_leave_it_are_refused() {
        use ExternalError as E;
        let quoted = |text: &str| format!("'{text}'");
        assert_eq!(location(""), Err(E::EmptyLocation));
        assert_eq!(location("../secret"), Err(E::Parent(quoted("../secret"))));
        assert_eq!(location("a/../../b"), Err(E::Parent(quoted("a/../../b"))));
        assert_eq!(
            location("/etc/passwd"),
            Err(E::Absolute(quoted("/etc/passwd")))
        );
        assert!(matches!(location("..\\secret"), Err(E::Backslash(_))));
        assert_eq!(
            location("c:secret"),
            Err(E::DriveLetter(quoted("c:secret")))
        );
        assert!(matches!(
            location("*/_ORT_MEM_ADDR_/*"),
            Err(E::MemoryMark(_))
        ));
        assert!(matches!(location("*/_ORT_OTHER_/*"), Err(E::MemoryMark(_))));
        assert!(matches!(location("."), Err(E::Path { .. })));
        assert!(matches!(location("a\0b"), Err(E::Path { .. })));
        assert!(matches!(location(".ssh/id"), Err(E::Path { .. })));
        assert!(matches!(check_location(b"\xff"), Err(E::Path { .. })));
    }

    #[test]
    fn numbers_are_whole_and_fit() {
        for text in ["", "-1", "+1", " 1", "0x10", "1e3", "9223372036854775808"] {
            assert!(number("offset", text.as_bytes()).is_err(), "{text}");
        }
        assert_eq!(number("offset", b"4096"), Ok(4096));
        let mut entries = ExternalEntries::default();
        entries.push(b"location", b"w").unwrap();
        entries.push(b"offset", b"9223372036854775807").unwrap();
        entries.push(b"length", b"1").unwrap();
        assert!(matches!(
            entries.finish(None),
            Err(ExternalError::Overflow { .. })
        ));
    }
}

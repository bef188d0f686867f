//! The bodies of repository requests.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::json::Reader;
use crate::error::ServeError;
use crate::service::LoadOverrides;

/// The longest path a `file:` parameter may name.
const MAX_PATH: usize = 255;
/// Files that one load request may bring.
const MAX_FILES: usize = 4096;

/// Reads `{"ready": true}`, which may be absent.
pub(super) fn read_index(body: &[u8]) -> Result<bool, ServeError> {
    let mut ready = false;
    members(body, |reader, key| match key {
        "ready" => {
            ready = reader.boolean("'ready'")?;
            Ok(())
        }
        _ => reader.skip(),
    })?;
    Ok(ready)
}

/// Reads a load request's `config` and `file:<version>/<path>` parameters.
pub(super) fn read_load(body: &[u8]) -> Result<LoadOverrides, ServeError> {
    let mut config = None;
    let mut files = BTreeMap::new();
    parameters(body, |reader, key| {
        if let Some(path) = key.strip_prefix("file:") {
            check_path(path)?;
            if files.len() == MAX_FILES {
                return Err(ServeError::invalid(format!(
                    "the load request brings more than {MAX_FILES} files"
                )));
            }
            let encoded = reader.string(&format!("a base64 string for '{key}'"))?;
            let content = decode_base64(encoded.as_bytes()).ok_or_else(|| {
                ServeError::invalid(format!("parameter '{key}' is not valid base64"))
            })?;
            if files
                .insert(path.to_owned(), Bytes::from(content))
                .is_some()
            {
                return Err(ServeError::invalid(format!("'{key}' is given twice")));
            }
            return Ok(());
        }
        if key != "config" {
            let shown: String = key.chars().take(100).collect();
            return Err(ServeError::invalid(format!(
                "unknown load parameter '{}': expected 'config' or 'file:<version>/<path>'",
                shown.escape_debug()
            )));
        }
        let text = reader.string("a string for 'config'")?.into_owned();
        if config.replace(text).is_some() {
            return Err(ServeError::invalid("'config' is given twice"));
        }
        Ok(())
    })?;
    Ok(LoadOverrides { config, files })
}

/// Checks an unload request: `unload_dependents` changes nothing where no model depends on another.
pub(super) fn read_unload(body: &[u8]) -> Result<(), ServeError> {
    parameters(body, |reader, key| match key {
        "unload_dependents" => reader.boolean("'unload_dependents'").map(drop),
        _ => reader.skip(),
    })
}

fn parameters(
    body: &[u8],
    mut parameter: impl FnMut(&mut Reader<'_>, &str) -> Result<(), ServeError>,
) -> Result<(), ServeError> {
    members(body, |reader, key| match key {
        "parameters" if !reader.null() => reader.object("'parameters'", &mut parameter),
        "parameters" => Ok(()),
        _ => reader.skip(),
    })
}

/// Reads the members of the object that `body` is, if it is not empty.
fn members(
    body: &[u8],
    member: impl FnMut(&mut Reader<'_>, &str) -> Result<(), ServeError>,
) -> Result<(), ServeError> {
    let mut reader = Reader::new(body)?;
    if reader.peek().is_none() {
        return Ok(());
    }
    reader.object("the request", member)?;
    reader.finish()
}

fn check_path(path: &str) -> Result<(), ServeError> {
    let plain = |part: &str| {
        !matches!(part, "" | "." | "..")
            && !part.contains(|c: char| c == '\\' || c == ':' || c.is_control())
    };
    if path.len() > MAX_PATH || !path.split('/').all(plain) {
        let shown: String = path.chars().take(100).collect();
        return Err(ServeError::invalid(format!(
            "parameter 'file:{}' does not name a file below the model's folder: expected \
             '<version>/<path>' of at most {MAX_PATH} bytes",
            shown.escape_debug()
        )));
    }
    Ok(())
}

/// Decodes standard base64, padded or not; line breaks are passed over.
fn decode_base64(encoded: &[u8]) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(encoded.len() / 4 * 3 + 3);
    let mut bits = 0u32;
    let mut digits = 0;
    let mut padding = 0;
    for &byte in encoded {
        let digit = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            b'\r' | b'\n' => continue,
            b'=' => {
                padding += 1;
                continue;
            }
            _ => return None,
        };
        if padding > 0 {
            return None;
        }
        bits = bits << 6 | u32::from(digit);
        digits += 1;
        if digits == 4 {
            decoded.extend_from_slice(&bits.to_be_bytes()[1..]);
            (bits, digits) = (0, 0);
        }
    }
    let expected_padding = match digits {
        0 => 0,
        2 => {
            decoded.push((bits >> 4) as u8);
            2
        }
        3 => {
            decoded.extend_from_slice(&((bits >> 2) as u16).to_be_bytes());
            1
        }
        _ => return None,
    };
    (padding == 0 || padding == expected_padding).then_some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_takes_an_optional_flag() {
        for (body, ready) in [
            ("", false),
            ("{}", false),
            ("{\"ready\":true}", true),
            (" {\"ready\" : false, \"x\": [1]} ", false),
        ] {
            assert_eq!(read_index(body.as_bytes()).unwrap(), ready, "{body}");
        }
        for body in ["[]", "{\"ready\":1}", "{\"ready\":true} x", "nope"] {
            assert!(read_index(body.as_bytes()).is_err(), "{body}");
        }
        let deep = format!("{{\"x\":{}", "[".repeat(250_000));
        let error = read_index(deep.as_bytes()).unwrap_err();
        assert!(error.message().contains("deeper than 100"));
    }

    #[test]
    fn load_reads_config_and_files() {
        let body = r#"{"parameters":{"config":"{\"name\":\"m\"}","file:1/model.onnx":"aGVsbG8="}}"#;
        let overrides = read_load(body.as_bytes()).unwrap();
        assert_eq!(overrides.config.as_deref(), Some("{\"name\":\"m\"}"));
        assert_eq!(overrides.files["1/model.onnx"], "hello");
        assert!(read_load(b"").unwrap().config.is_none());
        assert!(read_load(b"{\"parameters\":null}").is_ok());
    }

    #[test]
    fn load_refuses_what_is_no_override() {
        let long = format!("{{\"parameters\":{{\"file:{}\":\"\"}}}}", "a".repeat(256));
        for body in [
            r#"{"parameters":{"file:../x":"aGk="}}"#,
            r#"{"parameters":{"file:/etc/passwd":"aGk="}}"#,
            r#"{"parameters":{"file:1//x":"aGk="}}"#,
            r#"{"parameters":{"file:":"aGk="}}"#,
            r#"{"parameters":{"file:1/x":"a*"}}"#,
            r#"{"parameters":{"file:1/x":"aGk=","file:1/x":"aGk="}}"#,
            r#"{"parameters":{"config":{}}}"#,
            r#"{"parameters":{"config":"a","config":"b"}}"#,
            r#"{"parameters":{"other":"x"}}"#,
            long.as_str(),
        ] {
            assert!(read_load(body.as_bytes()).is_err(), "{body}");
        }
    }

    #[test]
    fn unload_takes_tritonclients_body() {
        assert!(read_unload(br#"{"parameters":{"unload_dependents":false}}"#).is_ok());
        assert!(read_unload(b"").is_ok());
        assert!(read_unload(br#"{"parameters":{"unload_dependents":3}}"#).is_err());
    }

    #[test]
    fn base64_is_decoded_exactly() {
        for (encoded, decoded) in [
            ("", ""),
            ("Zg==", "f"),
            ("Zg", "f"),
            ("Zm8=", "fo"),
            ("Zm9v", "foo"),
            ("Zm9v\r\nYmFy", "foobar"),
        ] {
            let found = decode_base64(encoded.as_bytes());
            assert_eq!(found.as_deref(), Some(decoded.as_bytes()), "{encoded}");
        }
        for encoded in ["Z", "Zg=", "Zg===", "Zm9v=", "Zg==Zg==", "Z-_="] {
            assert_eq!(decode_base64(encoded.as_bytes()), None, "{encoded}");
        }
    }
}

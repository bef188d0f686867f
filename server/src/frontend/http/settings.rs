//! Log and trace settings, and shared memory: the bodies of requests, and the documents that
//! answer them.

use serde_json::{Map, Value as Json, json};

use super::json::Reader;
use crate::error::ServeError;
use crate::log_settings::Value;
use crate::shared_memory::{RegionSlice, RegionStatus};
use crate::trace_settings::Change;

/// Settings that one request may name.
const MAX_SETTINGS: usize = 64;
/// Values that one setting may have.
const MAX_VALUES: usize = 16;

/// Reads the object of a log settings request.
pub(super) fn read_log(body: &[u8]) -> Result<Vec<(String, Value)>, ServeError> {
    let mut changes = Vec::new();
    settings(body, |reader, key| {
        let value = match reader.peek() {
            Some(b't' | b'f') => Value::Flag(reader.boolean("a log setting")?),
            Some(b'"') => Value::Text(reader.string("a log setting")?.into_owned()),
            _ if reader.null() => return Ok(()),
            _ => Value::Number(reader.integer("a log setting")?),
        };
        changes.push((key.to_owned(), value));
        Ok(())
    })?;
    Ok(changes)
}

/// Reads the object of a trace settings request; a setting that is `null` is cleared.
pub(super) fn read_trace(body: &[u8]) -> Result<Vec<Change>, ServeError> {
    let mut changes = Vec::new();
    settings(body, |reader, key| {
        let value = match reader.peek() {
            _ if reader.null() => None,
            Some(b'[') => {
                let mut values = Vec::new();
                reader.array("a trace setting", |reader, index| {
                    if index == MAX_VALUES {
                        return Err(ServeError::invalid(format!(
                            "a trace setting has more than {MAX_VALUES} values"
                        )));
                    }
                    values.push(text(reader)?);
                    Ok(())
                })?;
                Some(values)
            }
            _ => Some(vec![text(reader)?]),
        };
        changes.push((key.to_owned(), value));
        Ok(())
    })?;
    Ok(changes)
}

/// A string, or a number as it is written.
fn text(reader: &mut Reader<'_>) -> Result<String, ServeError> {
    match reader.peek() {
        Some(b'"') => Ok(reader.string("a trace setting")?.into_owned()),
        _ => Ok(reader.number("a string or a number")?.to_owned()),
    }
}

/// Reads a register request for the region `name`; returns its key.
pub(super) fn read_register(
    body: &[u8],
    name: String,
) -> Result<(String, RegionSlice), ServeError> {
    let (mut key, mut offset, mut byte_size) = (None, 0, None);
    settings(body, |reader, field| {
        match field {
            "key" => key = Some(reader.string("a string for 'key'")?.into_owned()),
            "offset" => offset = reader.integer("'offset'")?,
            "byte_size" => byte_size = Some(reader.integer("'byte_size'")?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let missing = |field: &str| {
        ServeError::invalid(format!("the request to register a region has no '{field}'"))
    };
    let slice = RegionSlice {
        region: name,
        offset,
        byte_size: byte_size.ok_or_else(|| missing("byte_size"))?,
    };
    Ok((key.ok_or_else(|| missing("key"))?, slice))
}

fn settings(
    body: &[u8],
    mut setting: impl FnMut(&mut Reader<'_>, &str) -> Result<(), ServeError>,
) -> Result<(), ServeError> {
    let mut reader = Reader::new(body)?;
    if reader.peek().is_none() {
        return Ok(());
    }
    let mut count = 0;
    reader.object("the request", |reader, key| {
        count += 1;
        if count > MAX_SETTINGS {
            return Err(ServeError::invalid(format!(
                "the request has more than {MAX_SETTINGS} members"
            )));
        }
        setting(reader, key)
    })?;
    reader.finish()
}

pub(super) fn log_document(settings: Vec<(&'static str, Value)>) -> Vec<u8> {
    let members = settings.into_iter().map(|(name, value)| {
        let value = match value {
            Value::Flag(flag) => json!(flag),
            Value::Number(number) => json!(number),
            Value::Text(text) => json!(text),
        };
        (name.to_owned(), value)
    });
    document(members)
}

pub(super) fn trace_document(settings: Vec<(&'static str, Vec<String>)>) -> Vec<u8> {
    let members = settings.into_iter().map(|(name, values)| {
        let value = match (name, values.as_slice()) {
            // The only one of which there may be several.
            ("trace_level", _) => json!(values),
            (_, [value]) => json!(value),
            _ => json!(values),
        };
        (name.to_owned(), value)
    });
    document(members)
}

fn document(members: impl Iterator<Item = (String, Json)>) -> Vec<u8> {
    let members: Map<String, Json> = members.collect();
    Json::Object(members).to_string().into_bytes()
}

pub(super) fn regions_document(regions: &[RegionStatus]) -> Vec<u8> {
    let regions = regions.iter().map(|region| {
        json!({
            "name": region.name,
            "key": region.key,
            "offset": region.offset,
            "byte_size": region.byte_size,
        })
    });
    Json::Array(regions.collect()).to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_in_every_form_that_clients_send() {
        let body =
            br#"{"log_info":false,"log_verbose_level":2,"log_format":"default","log_error":null}"#;
        let read = read_log(body).unwrap();
        assert_eq!(
            read,
            [
                ("log_info".to_owned(), Value::Flag(false)),
                ("log_verbose_level".to_owned(), Value::Number(2)),
                ("log_format".to_owned(), Value::Text("default".to_owned())),
            ]
        );
        let body = br#"{"trace_level":["TIMESTAMPS","TENSORS"],"trace_rate":"5","trace_count":-1,"log_frequency":null}"#;
        let read = read_trace(body).unwrap();
        let values = |values: &[&str]| Some(values.iter().map(|v| (*v).to_owned()).collect());
        assert_eq!(
            read,
            [
                ("trace_level".to_owned(), values(&["TIMESTAMPS", "TENSORS"])),
                ("trace_rate".to_owned(), values(&["5"])),
                ("trace_count".to_owned(), values(&["-1"])),
                ("log_frequency".to_owned(), None),
            ]
        );
        assert!(read_log(b"").unwrap().is_empty());
        assert!(read_log(br#"{"log_info":[]}"#).is_err());
        assert!(read_trace(br#"{"trace_level":{}}"#).is_err());
        let many = format!("{{\"a\":[{}1]}}", "1,".repeat(100));
        assert!(read_trace(many.as_bytes()).is_err());
    }

    #[test]
    fn a_region_needs_key_and_size() {
        let read = read_register(br#"{"key":"/k","byte_size":8}"#, "r".to_owned()).unwrap();
        assert_eq!(
            (read.0.as_str(), read.1.offset, read.1.byte_size),
            ("/k", 0, 8)
        );
        for body in [
            "{}",
            r#"{"key":"/k"}"#,
            r#"{"byte_size":8}"#,
            r#"{"key":"/k","byte_size":-8}"#,
            r#"{"key":"/k","byte_size":8,"offset":99999999999999999999}"#,
        ] {
            assert!(
                read_register(body.as_bytes(), "r".to_owned()).is_err(),
                "{body}"
            );
        }
    }
}

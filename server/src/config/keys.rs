//! Which settings a configuration file may have, asked of the code that reads it.
//!
//! Serde tells a deserializer the names of a struct's fields before it reads any. So a deserializer
//! that has nothing to give finds them all: it offers one field at a time, empty, and notes what
//! the field's own code asks for.

use std::cell::RefCell;
use std::fmt;

use serde::de::value::StrDeserializer;
use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::forward_to_deserialize_any;

/// Every setting that `T` reads, as `section.key`, in the order of the code.
pub(crate) fn settings_of<T: for<'de> Deserialize<'de>>() -> Vec<String> {
    let mut settings = Vec::new();
    descend::<T>(&[], &mut settings);
    settings
}

fn descend<T: for<'de> Deserialize<'de>>(path: &[&'static str], settings: &mut Vec<String>) {
    let found = RefCell::new(None);
    // The outcome does not matter: nothing was given.
    let _ = T::deserialize(Probe {
        path,
        found: &found,
    });
    match found.into_inner() {
        Some(fields) => {
            for field in fields {
                let below = [path, &[field]].concat();
                descend::<T>(&below, settings);
            }
        }
        None => settings.push(path.join(".")),
    }
}

/// Follows one path of fields and notes the fields of what is at its end.
#[derive(Clone, Copy)]
struct Probe<'a> {
    path: &'a [&'static str],
    found: &'a RefCell<Option<&'static [&'static str]>>,
}

#[derive(Debug)]
struct Nothing;

impl fmt::Display for Nothing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("there is no value here")
    }
}

impl std::error::Error for Nothing {}

impl de::Error for Nothing {
    fn custom<T: fmt::Display>(_: T) -> Self {
        Self
    }
}

impl<'de> Deserializer<'de> for Probe<'_> {
    type Error = Nothing;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Nothing> {
        Err(Nothing)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Nothing> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Nothing> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Nothing> {
        visitor.visit_seq(One(Some(self)))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Nothing> {
        match self.path {
            [] => {
                *self.found.borrow_mut() = Some(fields);
                Err(Nothing)
            }
            [_, ..] => visitor.visit_map(One(Some(self))),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct tuple tuple_struct map enum identifier ignored_any
    }
}

/// A list of one element, or a map of one field: the next of the path.
struct One<'a>(Option<Probe<'a>>);

impl<'de> SeqAccess<'de> for One<'_> {
    type Error = Nothing;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Nothing> {
        self.0
            .take()
            .map(|probe| seed.deserialize(probe))
            .transpose()
    }
}

impl<'de> MapAccess<'de> for One<'_> {
    type Error = Nothing;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Nothing> {
        let Some([field, ..]) = self.0.map(|probe| probe.path) else {
            return Ok(None);
        };
        seed.deserialize(StrDeserializer::new(field)).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Nothing> {
        let probe = self.0.take().ok_or(Nothing)?;
        seed.deserialize(Probe {
            path: &probe.path[1..],
            ..probe
        })
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Default, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct File {
        name: Option<String>,
        inner: Inner,
        many: Vec<Inner>,
    }

    #[derive(Default, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Inner {
        size: Option<u64>,
        #[serde(rename = "by-another-name")]
        renamed: Vec<String>,
    }

    #[test]
    fn every_field_of_every_section_is_found() {
        assert_eq!(
            settings_of::<File>(),
            [
                "name",
                "inner.size",
                "inner.by-another-name",
                "many.size",
                "many.by-another-name"
            ]
        );
    }
}

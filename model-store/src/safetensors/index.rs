//! `model.safetensors.index.json`: which of several files holds which tensor.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor};

use super::bind::{Contents, WeightsError};
use crate::names::check_relative_path;
use crate::onnx::shown;

/// The largest index.
pub(crate) const MAX_INDEX_BYTES: u64 = 1 << 20;
/// The most files one index or one graph may name.
pub(crate) const MAX_SHARDS: usize = 1_000;

/// An index, its files already checked to lie beside it or below.
#[derive(Debug)]
pub(crate) struct Index {
    /// File by tensor; files relative to the graph's folder.
    map: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Raw {
    #[serde(deserialize_with = "each_once")]
    weight_map: BTreeMap<String, String>,
}

impl Index {
    /// Reads an index that lies at `location` relative to the graph's folder.
    pub(crate) fn parse(location: &str, bytes: &[u8]) -> Result<Self, WeightsError> {
        let file = || shown(location.as_bytes());
        let raw: Raw = serde_json::from_slice(bytes).map_err(|cause| WeightsError::Index {
            file: file(),
            cause,
        })?;
        let folder = location.rsplit_once('/').map(|(folder, _)| folder);
        let mut map = BTreeMap::new();
        for (tensor, place) in raw.weight_map {
            if !place.ends_with(".safetensors") || check_relative_path(&place).is_err() {
                return Err(WeightsError::Place {
                    file: file(),
                    tensor: shown(tensor.as_bytes()),
                    place: shown(place.as_bytes()),
                });
            }
            let place = match folder {
                Some(folder) => format!("{folder}/{place}"),
                None => place,
            };
            map.insert(tensor, place);
        }
        let index = Self { map };
        if index.files().len() > MAX_SHARDS {
            return Err(WeightsError::TooManyFiles {
                file: file(),
                limit: MAX_SHARDS,
            });
        }
        Ok(index)
    }

    /// The files it names, each once.
    pub(crate) fn files(&self) -> Vec<&str> {
        let mut files: Vec<&str> = self.map.values().map(String::as_str).collect();
        files.sort_unstable();
        files.dedup();
        files
    }

    /// Fails when a tensor is not in the file where the index says it is.
    pub(crate) fn check(&self, contents: &[Contents]) -> Result<(), WeightsError> {
        for (tensor, place) in &self.map {
            let file = contents.iter().find(|file| file.location == *place);
            if !file.is_some_and(|file| file.holds(tensor)) {
                return Err(WeightsError::Missing {
                    tensor: shown(tensor.as_bytes()),
                    file: shown(place.as_bytes()),
                });
            }
        }
        Ok(())
    }
}

fn each_once<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, String>, D::Error> {
    struct Once;

    impl<'de> Visitor<'de> for Once {
        type Value = BTreeMap<String, String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("file names by names of tensors")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut entries = BTreeMap::new();
            while let Some((tensor, place)) = map.next_entry::<String, String>()? {
                if entries.contains_key(&tensor) {
                    let tensor = shown(tensor.as_bytes());
                    return Err(de::Error::custom(format_args!("{tensor} is given twice")));
                }
                entries.insert(tensor, place);
            }
            Ok(entries)
        }
    }

    deserializer.deserialize_map(Once)
}

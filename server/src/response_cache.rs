//! Answers that are given again to equal requests, without the model (Triton's response cache).
//!
//! A key is a digest of everything an answer follows from: the unit, which is another one after
//! each reload, the inputs and the outputs that were asked for. Neither a queue nor the model's
//! lifecycle learns of a hit: a model may sleep while its answers are given.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use blake3::Hasher;
use bytes::Bytes;
use dormouse_core::id::{ByteSize, ModelId};
use dormouse_model_store::spec::ModelSpec;
use dormouse_proto::inference::model_config::SchedulingChoice;
use moka::sync::Cache;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::request::{InferRequest, InferResponse, Tensor};
use crate::unit::Unit;

/// What an entry takes beside its tensors' bytes.
const ENTRY_OVERHEAD: u64 = 256;
const TENSOR_OVERHEAD: u64 = 128;

/// Answers of all models, bounded in bytes.
#[derive(Debug)]
pub struct ResponseCache {
    capacity: u64,
    entries: Cache<[u8; 32], Arc<Entry>>,
    /// The unit of each model version whose answers are kept.
    units: Mutex<HashMap<ModelId, u64>>,
}

#[derive(Debug)]
struct Entry {
    unit: u64,
    outputs: Vec<(Arc<str>, Tensor)>,
    bytes: u64,
}

/// What a look-up came to.
#[derive(Debug)]
pub enum Found {
    Answer(InferResponse),
    /// What the answer is to be kept under.
    Nothing(Missing),
}

/// A request whose answer is not there.
#[derive(Debug)]
pub struct Missing {
    key: [u8; 32],
    unit: u64,
    looked: Duration,
}

impl ResponseCache {
    pub fn new(size: ByteSize) -> Self {
        let entries = Cache::builder()
            .weigher(|_: &[u8; 32], entry: &Arc<Entry>| {
                u32::try_from(entry.bytes).unwrap_or(u32::MAX)
            })
            .max_capacity(size.0)
            .support_invalidation_closures()
            .build();
        Self {
            capacity: size.0,
            entries,
            units: Mutex::default(),
        }
    }

    /// Whether answers of this model may be kept: it asks for it, and each depends on its own
    /// request alone.
    pub fn serves(&self, spec: &ModelSpec) -> bool {
        spec.config.response_cache.is_some_and(|cache| cache.enable)
            && !spec.decoupled
            && !matches!(
                spec.config.scheduling_choice,
                Some(SchedulingChoice::SequenceBatching(_))
            )
    }

    /// Looks for the answer to a request and counts what was found.
    pub fn look_up(&self, unit: &Unit, request: &InferRequest) -> Found {
        let started = Instant::now();
        let key = key(unit.serial(), request);
        let Some(entry) = self.entries.get(&key) else {
            return Found::Nothing(Missing {
                key,
                unit: unit.serial(),
                looked: started.elapsed(),
            });
        };
        let response = InferResponse {
            model_name: Arc::clone(&unit.id().name),
            model_version: unit.id().version.0,
            id: request.id.clone(),
            outputs: entry.outputs.clone(),
            cold_start: None,
            placed: None,
        };
        unit.count_cache_hit(request.received, started.elapsed());
        Found::Answer(response)
    }

    /// Keeps the answer of `unit` to a request that was looked up, and counts the miss.
    pub fn keep(&self, unit: &Unit, missing: Missing, response: &InferResponse) {
        let started = Instant::now();
        // A unit that took the place of the one that was asked has keys of its own.
        if unit.serial() == missing.unit && self.is_latest(unit) {
            self.insert(missing.key, missing.unit, response);
        }
        unit.count_cache_miss(missing.looked + started.elapsed());
    }

    fn insert(&self, key: [u8; 32], unit: u64, response: &InferResponse) {
        let sizes = response.outputs.iter();
        let sizes = sizes.map(|(_, tensor)| tensor.data.len() as u64 + TENSOR_OVERHEAD);
        let bytes = sizes.fold(ENTRY_OVERHEAD, u64::saturating_add);
        if bytes > self.capacity || u32::try_from(bytes).is_err() {
            return;
        }
        // Copied: the answer's bytes may be a few rows of a large batch, which would stay whole.
        let copy = |tensor: &Tensor| Tensor {
            datatype: tensor.datatype,
            shape: tensor.shape.clone(),
            data: Bytes::copy_from_slice(&tensor.data),
        };
        let outputs = response.outputs.iter();
        let entry = Entry {
            unit,
            outputs: outputs
                .map(|(name, tensor)| (Arc::clone(name), copy(tensor)))
                .collect(),
            bytes,
        };
        self.entries.insert(key, Arc::new(entry));
        // Evicts now: left to itself the cache may exceed its size by many large answers.
        self.entries.run_pending_tasks();
    }

    /// Whether no later unit of the same model version was seen; drops the answers of earlier ones.
    fn is_latest(&self, unit: &Unit) -> bool {
        let mut units = self.units.lock();
        let known = units.entry(unit.id().clone()).or_insert(unit.serial());
        let before = *known;
        if unit.serial() <= before {
            return unit.serial() == before;
        }
        *known = unit.serial();
        drop(units);
        self.drop_unit(before);
        true
    }

    /// Drops the answers of a model that was unloaded.
    pub fn forget(&self, model: &str) {
        let mut gone = Vec::new();
        self.units.lock().retain(|id, unit| {
            let is_it = &*id.name == model;
            if is_it {
                gone.push(*unit);
            }
            !is_it
        });
        for unit in gone {
            self.drop_unit(unit);
        }
    }

    fn drop_unit(&self, unit: u64) {
        let dropped = self
            .entries
            .invalidate_entries_if(move |_, entry| entry.unit == unit);
        if let Err(error) = dropped {
            tracing::warn!(%error, "answers of a model that is gone stay until others take their place");
        }
        self.entries.run_pending_tasks();
    }

    /// The bytes of all answers kept.
    pub fn used(&self) -> u64 {
        self.entries.run_pending_tasks();
        self.entries.weighted_size()
    }
}

/// Everything an answer follows from, each part led by its length so that no two requests run
/// into each other.
fn key(unit: u64, request: &InferRequest) -> [u8; 32] {
    let mut hasher = Hasher::new();
    let number = |hasher: &mut Hasher, number: u64| {
        hasher.update(&number.to_le_bytes());
    };
    number(&mut hasher, unit);
    number(&mut hasher, request.outputs.len() as u64);
    for &output in &request.outputs {
        number(&mut hasher, output as u64);
    }
    for input in &request.inputs {
        let Some(tensor) = input else {
            number(&mut hasher, u64::MAX);
            continue;
        };
        number(&mut hasher, tensor.shape.len() as u64);
        for &dim in &tensor.shape {
            number(&mut hasher, dim as u64);
        }
        number(&mut hasher, tensor.data.len() as u64);
        hasher.update(&tensor.data);
    }
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use dormouse_core::datatype::DataType;
    use dormouse_core::shape::Shape;
    use dormouse_core::time::Timestamp;

    use super::*;

    fn request(data: &'static [u8], outputs: &[usize]) -> InferRequest {
        InferRequest {
            id: String::new(),
            inputs: vec![
                Some(Tensor {
                    datatype: DataType::Uint8,
                    shape: Shape::from_slice(&[1, data.len() as i64]),
                    data: Bytes::from_static(data),
                }),
                None,
            ],
            outputs: outputs.to_vec(),
            rows: 1,
            priority: 0,
            deadline: None,
            received: Timestamp::default(),
            sequence: None,
            span: None,
            held: None,
        }
    }

    fn response(bytes: usize) -> InferResponse {
        let tensor = Tensor {
            datatype: DataType::Uint8,
            shape: Shape::from_slice(&[bytes as i64]),
            data: vec![7; bytes].into(),
        };
        InferResponse {
            model_name: "m".into(),
            model_version: 1,
            id: String::new(),
            outputs: vec![("y".into(), tensor)],
            cold_start: None,
            placed: None,
        }
    }

    #[test]
    fn keys_differ_by_unit_inputs_and_outputs() {
        let keys = [
            key(1, &request(b"ab", &[0, 1])),
            key(2, &request(b"ab", &[0, 1])),
            key(1, &request(b"ac", &[0, 1])),
            key(1, &request(b"ab", &[1, 0])),
            key(1, &request(b"ab", &[0])),
            key(1, &request(b"a", &[0, 1])),
        ];
        for (index, one) in keys.iter().enumerate() {
            assert!(!keys[index + 1..].contains(one), "{index}");
        }
        let mut same = request(b"ab", &[0, 1]);
        same.id = "another".to_owned();
        same.priority = 3;
        assert_eq!(key(1, &same), keys[0]);
    }

    #[test]
    fn the_bytes_kept_stay_within_the_size() {
        let cache = ResponseCache::new(ByteSize(100_000));
        for index in 0..1_000u64 {
            let mut name = [0; 32];
            name[..8].copy_from_slice(&index.to_le_bytes());
            cache.insert(name, 1, &response(10_000));
            assert!(cache.used() <= 100_000, "{}", cache.used());
        }
        assert!(cache.used() > 50_000, "{}", cache.used());
        cache.insert([9; 32], 1, &response(200_000));
        assert!(cache.entries.get(&[9; 32]).is_none());
    }

    #[test]
    fn answers_of_a_unit_that_is_gone_are_dropped() {
        let cache = ResponseCache::new(ByteSize(100_000));
        cache.insert([1; 32], 1, &response(100));
        cache.insert([2; 32], 2, &response(100));
        cache.drop_unit(1);
        assert!(cache.entries.get(&[1; 32]).is_none());
        assert!(cache.entries.get(&[2; 32]).is_some());
    }
}

//! What was measured and noted about a prepared model; the one part of an entry that changes.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// What was measured and noted when a model was prepared, or later.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PreparedFacts {
    /// Names under which the model is served, with their versions.
    pub models: Vec<String>,
    /// The size of the source's files.
    pub source_bytes: u64,
    /// A run's time follows from the shapes of its inputs, not from their values.
    pub is_steady: bool,
    /// Weights of which a run reads some rows only, such as tables of embeddings.
    pub by_rows: Vec<String>,
    /// What preparing took.
    pub prepare_us: Option<u64>,
    /// What loading from the source took.
    pub source_load_us: Option<u64>,
    /// What loading from the store took.
    pub prepared_load_us: Option<u64>,
    pub packing: Option<PackingVerdict>,
    /// Seconds since 1970; set when the entry is committed.
    pub created: u64,
}

impl PreparedFacts {
    pub fn created_at(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH
            .checked_add(Duration::from_secs(self.created))
            .unwrap_or(SystemTime::UNIX_EPOCH)
    }
}

/// Whether packed weights are worth their memory for a model, by measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackingVerdict {
    pub unpacked_run_us: u64,
    pub packed_run_us: u64,
    pub packed_private_bytes: u64,
    pub pays: bool,
}

//! What serves a model's versions, and the files that it was made from.

use std::sync::Arc;

use dormouse_core::lifecycle::Stage;
use dormouse_core::time::Timestamp;
use dormouse_model_store::repository::{FileStamp, Fingerprint};
use dormouse_model_store::spec::ModelSpec;

use crate::error::ServeError;
use crate::registry::source::version_files;
use crate::stats::VersionStatistics;
use crate::unit::Unit;

/// A model's configuration and the units that serve its versions.
#[derive(Debug)]
pub struct Generation {
    pub spec: Arc<ModelSpec>,
    /// Oldest version first; never empty.
    pub(super) units: Vec<Arc<Unit>>,
    pub(super) stamp: Stamp,
}

/// The state of a model's files when they were read.
#[derive(Clone, Debug, PartialEq, Hash)]
pub(in crate::registry) struct Stamp {
    /// Every version folder, served or not.
    pub(super) present: Vec<u64>,
    /// Configuration and files of each version served.
    pub(super) served: Vec<(u64, Fingerprint)>,
}

impl Stamp {
    /// The files in a version's folder.
    pub(super) fn files_of(&self, version: u64) -> Vec<FileStamp> {
        let files = self.of(version).map(|fingerprint| &fingerprint.files[..]);
        version_files(files.unwrap_or_default(), version)
            .cloned()
            .collect()
    }

    pub(super) fn of(&self, version: u64) -> Option<&Fingerprint> {
        self.served
            .iter()
            .find(|(served, _)| *served == version)
            .map(|(_, fingerprint)| fingerprint)
    }
}

impl Generation {
    /// The unit of a version, "" for the newest.
    pub fn unit(&self, version: &str) -> Result<&Arc<Unit>, ServeError> {
        if version.is_empty() {
            return Ok(self
                .units
                .last()
                .expect("a generation has at least one unit"));
        }
        let number: u64 = version.parse().map_err(|_| {
            ServeError::invalid(format!(
                "'{}' is not a version of model '{}': versions are whole numbers",
                version.escape_default(),
                self.spec.name
            ))
        })?;
        self.units
            .iter()
            .find(|unit| unit.id().version.0 == number)
            .ok_or_else(|| {
                ServeError::not_found(format!(
                    "model '{}' has no version {number}: served are {:?}",
                    self.spec.name,
                    self.versions()
                ))
            })
    }

    /// What serves each version, oldest first.
    pub fn units(&self) -> &[Arc<Unit>] {
        &self.units
    }

    pub fn versions(&self) -> Vec<u64> {
        self.units.iter().map(|unit| unit.id().version.0).collect()
    }

    pub(in crate::registry) fn stamp(&self) -> &Stamp {
        &self.stamp
    }

    /// Counters of one version, or of all with "".
    pub fn statistics(&self, version: &str) -> Result<Vec<VersionStatistics>, ServeError> {
        let units = match version {
            "" => self.units.iter().collect(),
            _ => vec![self.unit(version)?],
        };
        let version = |unit: &Arc<Unit>| VersionStatistics {
            cold_starts: unit.counters().cold_starts(),
            ..unit.counters().snapshot(unit.id())
        };
        Ok(units.into_iter().map(version).collect())
    }

    /// Counters of all versions, without their cold starts.
    pub(in crate::registry) fn counts(&self) -> Vec<VersionStatistics> {
        let units = self.units.iter();
        let counts = units.map(|unit| unit.counters().snapshot(unit.id()));
        counts.collect()
    }

    /// Whether any version holds a session, if only until it is closed.
    pub(in crate::registry) fn is_warm(&self) -> bool {
        let holds = |stage| matches!(stage, Stage::Warm | Stage::Parked | Stage::Closing);
        self.units.iter().any(|unit| holds(unit.stage()))
    }

    pub(super) fn is_awake(&self) -> bool {
        self.units
            .iter()
            .any(|unit| matches!(unit.stage(), Stage::Warm | Stage::Parked | Stage::Loading))
    }

    /// Whether a version failed to load and must not be tried again yet.
    pub(super) fn has_failed(&self, now: Timestamp) -> bool {
        self.units
            .iter()
            .any(|unit| matches!(unit.stage(), Stage::Failed { retry_at } if now < retry_at))
    }

    pub(super) async fn retire(&self) {
        futures_util::future::join_all(self.units.iter().map(|unit| unit.retire())).await;
    }
}

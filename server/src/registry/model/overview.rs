//! A model's lines of the overview.

use std::sync::Arc;
use std::time::Duration;

use dormouse_core::id::ModelId;
use dormouse_core::lifecycle::Stage;
use dormouse_core::time::Timestamp;

use super::Model;
use crate::overview::{CountersOverview, VersionOverview};
use crate::residency::Residency;
use crate::service::{IndexEntry, IndexState};
use crate::unit::Unit;

/// Where a model stands in the list: what does something first, then what was ever asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::registry) enum Rank {
    Awake,
    Known,
    Unknown,
}

impl Model {
    pub(in crate::registry) fn rank(&self) -> Rank {
        match self.current() {
            Some(generation) if generation.is_awake() || generation.is_warm() => Rank::Awake,
            Some(_) => Rank::Known,
            None if self.has_problem() => Rank::Known,
            None => Rank::Unknown,
        }
    }

    /// Adds what its versions have done to what all have.
    pub(in crate::registry) fn add_totals(&self, totals: &mut CountersOverview) {
        let counters = self.counters.lock();
        for (version, counters) in counters.iter() {
            let id = ModelId::new(Arc::clone(&self.name), *version);
            totals.add(&CountersOverview::of(counters, &id));
        }
    }

    pub(in crate::registry) fn overview(
        &self,
        residency: &Residency,
        now: Timestamp,
    ) -> Vec<VersionOverview> {
        let generation = self.current();
        let unit_of = |entry: &IndexEntry| {
            let generation = generation.as_ref()?;
            let version = Some(&entry.version).filter(|version| !version.is_empty())?;
            generation.unit(version).ok()
        };
        let lines = self.index().into_iter().map(|entry| match unit_of(&entry) {
            Some(unit) => of_unit(entry, unit, residency, now),
            None => {
                let stage = stage_without_unit(&entry);
                VersionOverview::of(entry, stage)
            }
        });
        lines.collect()
    }
}

fn stage_without_unit(entry: &IndexEntry) -> &'static str {
    match entry.state {
        IndexState::Ready => "asleep",
        IndexState::Loading => "waking",
        IndexState::Unloading => "closing",
        IndexState::Unavailable if matches!(&*entry.reason, "" | "unloaded") => "unloaded",
        IndexState::Unavailable => "failed",
    }
}

fn of_unit(
    entry: IndexEntry,
    unit: &Unit,
    residency: &Residency,
    now: Timestamp,
) -> VersionOverview {
    let stage = match unit.stage() {
        Stage::Cold => "asleep",
        Stage::Loading => "waking",
        Stage::Warm => "awake",
        Stage::Parked => "parked",
        Stage::Closing | Stage::Retired => "closing",
        Stage::Failed { .. } => "failed",
    };
    let counters = unit.counters();
    VersionOverview {
        memory_bytes: residency.held_by(unit.serial()),
        queued: unit.queued() as u64,
        in_flight: counters.traffic.load(Duration::ZERO, now).in_flight,
        counters: Some(CountersOverview::of(counters, unit.id())),
        ..VersionOverview::of(entry, stage)
    }
}

//! How busy a model is.

use std::time::Duration;

use dormouse_core::time::Timestamp;

use super::Model;
use crate::activity::Load;
use crate::error::ServeError;

impl Model {
    /// The load of one version, or of all with "". A model nobody asked for yet has none.
    pub(in crate::registry) fn load_of(
        &self,
        version: &str,
        window: Duration,
        now: Timestamp,
    ) -> Result<Load, ServeError> {
        let generation = self.current();
        let wanted = match (version, &generation) {
            ("", _) => None,
            (_, Some(generation)) => Some(generation.unit(version)?.id().version.0),
            (_, None) => return Ok(Load::default()),
        };
        let is_wanted = |version: u64| wanted.is_none_or(|wanted| wanted == version);
        // The counters outlive generations, so requests of one that is being replaced are seen.
        let counters = self.counters.lock();
        let load = counters
            .iter()
            .filter(|(version, _)| is_wanted(**version))
            .map(|(_, counters)| counters.traffic.load(window, now))
            .fold(Load::default(), Load::and);
        drop(counters);
        let queued = generation.map_or(0, |generation| {
            let units = generation.units.iter();
            units
                .filter(|unit| is_wanted(unit.id().version.0))
                .map(|unit| unit.queued() as u64)
                .sum()
        });
        Ok(Load { queued, ..load })
    }
}

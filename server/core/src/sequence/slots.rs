//! The places that sequences are given: rows of lanes, or any of so many.

use super::SequenceKey;

/// Where a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Row { lane: u32, row: u32 },
    Anywhere,
}

#[derive(Debug)]
pub(super) enum Slots {
    Rows { lanes: Vec<Lane>, rows: u32 },
    Count { used: u32, limit: u32 },
}

#[derive(Debug, Default)]
pub(super) struct Lane {
    /// Grown as far as it was ever needed and cut back from its end.
    rows: Vec<Option<SequenceKey>>,
    running: bool,
}

impl Lane {
    fn lowest_free(&self) -> u32 {
        let free = self.rows.iter().position(Option::is_none);
        // There are never more rows than fit 32 bits.
        free.unwrap_or(self.rows.len()) as u32
    }
}

impl Slots {
    pub(super) fn rows(lanes: u32, rows: u32) -> Self {
        let lanes = (0..lanes).map(|_| Lane::default()).collect();
        Self::Rows { lanes, rows }
    }

    pub(super) fn count(limit: u32) -> Self {
        Self::Count { used: 0, limit }
    }

    /// Gives a sequence the lowest free row of any lane, so that batches stay short.
    pub(super) fn take(&mut self, key: SequenceKey) -> Option<Place> {
        match self {
            Self::Rows { lanes, rows } => {
                let free = (0..).zip(lanes.iter());
                let free = free.map(|(lane, each)| (each.lowest_free(), lane));
                let (row, lane): (u32, u32) = free.min().filter(|(row, _)| row < rows)?;
                let taken = &mut lanes[lane as usize].rows;
                match taken.get_mut(row as usize) {
                    Some(place) => *place = Some(key),
                    None => taken.push(Some(key)),
                }
                Some(Place::Row { lane, row })
            }
            Self::Count { used, limit } => {
                if used == limit {
                    return None;
                }
                *used += 1;
                Some(Place::Anywhere)
            }
        }
    }

    pub(super) fn give_back(&mut self, place: Place) {
        match (self, place) {
            (Self::Rows { lanes, .. }, Place::Row { lane, row }) => {
                let rows = &mut lanes[lane as usize].rows;
                rows[row as usize] = None;
                while rows.last() == Some(&None) {
                    rows.pop();
                }
            }
            (Self::Count { used, .. }, Place::Anywhere) => *used -= 1,
            _ => debug_assert!(false, "a place goes back where it came from"),
        }
    }

    pub(super) fn set_running(&mut self, lane: u32, running: bool) {
        if let Self::Rows { lanes, .. } = self {
            lanes[lane as usize].running = running;
        }
    }

    /// The rows of each lane that runs nothing.
    pub(super) fn resting_lanes(&self) -> impl Iterator<Item = (u32, &[Option<SequenceKey>])> {
        let lanes = match self {
            Self::Rows { lanes, .. } => lanes.as_slice(),
            Self::Count { .. } => &[],
        };
        let numbered = (0..).zip(lanes).filter(|(_, lane)| !lane.running);
        numbered.map(|(number, lane)| (number, lane.rows.as_slice()))
    }
}

#[cfg(test)]
impl Slots {
    /// How many places are taken, of how many.
    pub(super) fn used(&self) -> (usize, usize) {
        match self {
            Self::Rows { lanes, rows } => {
                let used = lanes.iter().flat_map(|lane| &lane.rows).flatten().count();
                (used, lanes.len() * *rows as usize)
            }
            Self::Count { used, limit } => (*used as usize, *limit as usize),
        }
    }
}

//! A prepared model as it is found in the store.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::entry::EntryFolder;
use super::facts::PreparedFacts;
use super::key::EntryKey;
use super::manifest::Weight;
use super::pack::Pack;

/// A prepared model: its graph in memory, its weights mapped. While it is held, nobody clears it
/// out of the store.
#[derive(Debug)]
pub struct PreparedModel {
    pub key: EntryKey,
    /// Read and compared with its digest.
    pub graph: Bytes,
    /// Every range lies within its pack and fits type and shape.
    pub weights: Vec<Weight>,
    pub packs: Vec<Arc<Pack>>,
    /// As they were when the model was looked up.
    pub facts: PreparedFacts,
    pub(super) folder: Arc<EntryFolder>,
}

impl Drop for PreparedModel {
    fn drop(&mut self) {
        // It was in use until now, however long ago it was looked up.
        self.folder.touch();
    }
}

impl PreparedModel {
    /// A weight's bytes.
    pub fn bytes(&self, weight: &Weight) -> &[u8] {
        self.packs[weight.pack]
            .bytes(weight.range())
            .expect("ranges were checked when the model was found")
    }

    /// The bytes of all weights.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.iter().map(|weight| weight.len).sum()
    }

    /// The parts of its packs that every run of this model reads, neighbours joined: what to
    /// populate.
    pub fn spans(&self) -> Vec<(usize, Range<u64>)> {
        self.joined(64 << 10, |weight| !self.is_by_rows(weight))
    }

    /// The parts of which runs read some rows only.
    pub fn table_spans(&self) -> Vec<(usize, Range<u64>)> {
        self.joined(0, |weight| self.is_by_rows(weight))
    }

    /// Tells the system how the packs will be read. They are mapped to be read as a whole.
    pub(super) fn advise(&self) {
        if self.packs.iter().any(|pack| pack.has_tables()) {
            // Of another model, which may read by rows what this one reads as a whole.
            for (pack, span) in self.spans() {
                self.packs[pack].expect_all(span);
            }
        }
        if !self.facts.by_rows.is_empty() {
            for (pack, span) in self.table_spans() {
                self.packs[pack].expect_rows(span);
            }
        }
    }

    /// The weights of which runs read some rows only.
    pub fn tables(&self) -> impl Iterator<Item = Table> {
        let tables = self.weights.iter().filter(|weight| self.is_by_rows(weight));
        tables.filter_map(|weight| {
            let rows = u64::try_from(*weight.dims.first()?).ok()?;
            let row_bytes = weight.len.checked_div(rows)?;
            Some(Table {
                pack: weight.pack,
                offset: weight.offset,
                rows,
                row_bytes,
            })
        })
    }

    /// Equal bytes are stored once: a weight that is read as a whole may lie where a table does.
    fn is_by_rows(&self, weight: &Weight) -> bool {
        let is_named = |weight: &Weight| self.facts.by_rows.contains(&weight.name);
        let range = weight.range();
        let overlaps = |other: &Weight| {
            let beside = other.range();
            other.pack == weight.pack && beside.start < range.end && range.start < beside.end
        };
        let mut others = self.weights.iter();
        is_named(weight) && !others.any(|other| overlaps(other) && !is_named(other))
    }

    /// Ranges of weights, those joined that lie no more than `gap` apart.
    fn joined(&self, gap: u64, which: impl Fn(&Weight) -> bool) -> Vec<(usize, Range<u64>)> {
        let mut ranges: Vec<(usize, Range<u64>)> = self
            .weights
            .iter()
            .filter(|weight| which(weight))
            .map(|weight| (weight.pack, weight.range()))
            .collect();
        ranges.sort_unstable_by_key(|(pack, range)| (*pack, range.start));
        let mut spans: Vec<(usize, Range<u64>)> = Vec::new();
        for (pack, range) in ranges {
            match spans.last_mut() {
                Some((last, span)) if *last == pack && range.start <= span.end + gap => {
                    span.end = span.end.max(range.end);
                }
                _ => spans.push((pack, range)),
            }
        }
        spans
    }
}

/// A weight of which runs read some rows only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table {
    pub pack: usize,
    pub offset: u64,
    pub rows: u64,
    pub row_bytes: u64,
}

impl Table {
    /// Where in its pack a row lies; none when there is no such row.
    pub fn row(&self, index: u64) -> Option<Range<u64>> {
        let start = self.offset + (index < self.rows).then(|| index * self.row_bytes)?;
        Some(start..start + self.row_bytes)
    }
}

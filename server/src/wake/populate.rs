//! In which order a prepared model's weights are brought in: first the rows of its tables that the
//! waiting request asks for, then what every run reads, then the rest of the tables.
//!
//! Of a table of embeddings a request reads a row for each of its tokens, and the table may be most
//! of the model. From a cold disk those few rows would wait behind all that is read ahead of them;
//! so they are asked for first.

use std::collections::BTreeSet;
use std::io;

use dormouse_core::datatype::DataType;
use dormouse_model_store::store::{PreparedModel, Table};

use crate::request::Tensor;

/// How much of a map is brought in at a time: a huge page, so that several threads share the work
/// evenly and in the order of its use. With more at a time the kernel's own reading ahead gets in
/// the way of itself: 8 MiB took twice as long.
const CHUNK: u64 = 2 << 20;

/// What rows are read in.
const PAGE: u64 = 4096;

/// So much of each table comes with the rows that are asked for: positions count from zero, and no
/// request names them.
const FIRST_ROWS: u64 = 256 << 10;

/// Of a longer input no more than this is looked at: by then the whole table comes as quickly.
pub(crate) const MOST_ROWS: usize = 2048;

/// Nor of a table with longer rows.
const LONGEST_ROW: u64 = 64 << 10;

/// A part of a pack that is brought in at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pack: usize,
    from: u64,
    pub(super) length: u64,
    /// It is waited for, and mapped; else the disk is only asked for it.
    waits: bool,
}

impl Part {
    pub(super) fn bring_in(&self, prepared: &PreparedModel) -> io::Result<()> {
        let pack = &prepared.packs[self.pack];
        if self.waits {
            return pack.populate(self.from, self.length);
        }
        if let Err(error) = pack.fetch(self.from, self.length) {
            tracing::debug!(%error, "rows could not be asked for ahead of their use");
        }
        Ok(())
    }
}

/// All of a model in the order of its use; `asked` are inputs of its first run.
pub(super) fn parts(prepared: &PreparedModel, asked: &[Tensor]) -> Vec<Part> {
    let mut parts = Vec::new();
    for table in prepared.tables() {
        let first = table.offset..table.offset + FIRST_ROWS.min(table.rows * table.row_bytes);
        let pages = asked.iter().flat_map(|input| pages_of_rows(&table, input));
        let pages: BTreeSet<u64> = pages
            .filter(|page| !first.contains(&(page * PAGE)))
            .collect();
        parts.push(Part {
            pack: table.pack,
            from: first.start,
            length: first.end - first.start,
            waits: false,
        });
        parts.extend(pages.into_iter().map(|page| Part {
            pack: table.pack,
            from: page * PAGE,
            length: PAGE,
            waits: false,
        }));
    }
    let spans = prepared.spans().into_iter().map(|span| (span, true));
    let tables = prepared.table_spans().into_iter().map(|span| (span, false));
    for ((pack, span), waits) in spans.chain(tables) {
        let mut from = span.start;
        while from < span.end {
            // Up to the next multiple: two threads must not want the same huge page.
            let length = (CHUNK - from % CHUNK).min(span.end - from);
            parts.push(Part {
                pack,
                from,
                length,
                waits,
            });
            from += length;
        }
    }
    parts
}

/// The pages of the rows that an input names, if all of its numbers are rows of the table.
fn pages_of_rows(table: &Table, input: &Tensor) -> Vec<u64> {
    if table.row_bytes > LONGEST_ROW {
        return Vec::new();
    }
    let rows = match input.datatype {
        DataType::Int64 => numbers(&input.data, |bytes| i64::from_le_bytes(*bytes)),
        DataType::Int32 => numbers(&input.data, |bytes| i32::from_le_bytes(*bytes).into()),
        _ => None,
    };
    let rows = rows.unwrap_or_default().into_iter();
    let ranges: Option<Vec<_>> = rows.map(|row| table.row(row)).collect();
    let ranges = ranges.unwrap_or_default().into_iter();
    ranges
        .flat_map(|range| range.start / PAGE..range.end.div_ceil(PAGE))
        .collect()
}

/// Each once; none when one of them is negative.
fn numbers<const N: usize>(data: &[u8], number: impl Fn(&[u8; N]) -> i64) -> Option<BTreeSet<u64>> {
    let elements = data.as_chunks::<N>().0.iter().take(MOST_ROWS);
    elements
        .map(|bytes| u64::try_from(number(bytes)).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: Table = Table {
        pack: 0,
        offset: 8192,
        rows: 100,
        row_bytes: 3000,
    };

    fn input(datatype: DataType, data: Vec<u8>) -> Tensor {
        Tensor {
            datatype,
            shape: [1].into_iter().collect(),
            data: data.into(),
        }
    }

    fn pages(numbers: &[i64]) -> Vec<u64> {
        let wide = numbers.iter().flat_map(|number| number.to_le_bytes());
        let found = pages_of_rows(&TABLE, &input(DataType::Int64, wide.collect()));
        let narrow = numbers
            .iter()
            .flat_map(|number| (*number as i32).to_le_bytes());
        let narrow = input(DataType::Int32, narrow.collect());
        assert_eq!(pages_of_rows(&TABLE, &narrow), found);
        found
    }

    #[test]
    fn rows_that_an_input_names_are_pages() {
        assert_eq!(pages(&[0]), [2]);
        assert_eq!(pages(&[1]), [2, 3]);
        assert_eq!(pages(&[99, 0, 99, 0]), [2, 74, 75]);
    }

    #[test]
    fn an_input_that_names_no_rows_is_left_alone() {
        assert_eq!(pages(&[0, 100]), [0; 0]);
        assert_eq!(pages(&[0, -1]), [0; 0]);
        let floats = input(DataType::Fp32, vec![0; 400]);
        assert_eq!(pages_of_rows(&TABLE, &floats), [0; 0]);
        let long_rows = Table {
            row_bytes: 100 << 20,
            ..TABLE
        };
        let zero = input(DataType::Int64, vec![0; 8]);
        assert_eq!(pages_of_rows(&long_rows, &zero), [0; 0]);
        let cut = input(DataType::Int64, vec![0; 12]);
        assert_eq!(pages_of_rows(&TABLE, &cut), [2]);
    }
}

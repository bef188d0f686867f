//! Calls per function and minute, and the single calls that are drawn from them.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, ensure};
use dormouse_core::time::Timestamp;
use flate2::read::GzDecoder;

const BUNDLED: &[u8] = include_bytes!("../../traces/azure2019_500fn_8h_invocations.csv.gz");
/// Columns before the counts: owner, application, function, trigger.
const NAMES: usize = 4;
const MAX_BYTES: u64 = 256 << 20;
const MAX_CALLS: u64 = 100_000_000;
const MINUTE: u64 = 60_000_000_000;

/// Calls per function and minute.
#[derive(Debug)]
pub(crate) struct Trace {
    pub(crate) minutes: usize,
    /// Per function one count per minute.
    pub(crate) functions: Vec<Vec<u32>>,
}

/// Where in its minute a call comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Arrivals {
    /// Anywhere, evenly
    Spread,
    /// At its start, so that results can be held against those of minute buckets
    Start,
}

/// One call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Call {
    pub(crate) at: Timestamp,
    pub(crate) function: u32,
}

impl Trace {
    /// The trace that comes with the program.
    pub(crate) fn bundled() -> anyhow::Result<Self> {
        Self::parse(BUNDLED).context("the bundled trace")
    }

    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        let bytes =
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&bytes).with_context(|| format!("cannot use {}", path.display()))
    }

    fn parse(bytes: &[u8]) -> anyhow::Result<Self> {
        let mut text = String::new();
        let gzip = bytes.starts_with(&[0x1f, 0x8b]);
        let size = match gzip {
            true => GzDecoder::new(bytes)
                .take(MAX_BYTES + 1)
                .read_to_string(&mut text),
            false => bytes.take(MAX_BYTES + 1).read_to_string(&mut text),
        };
        ensure!(size? as u64 <= MAX_BYTES, "more than {MAX_BYTES} bytes");
        let mut lines = text.lines();
        let header = lines.next().context("it is empty")?;
        let minutes = header.split(',').count().saturating_sub(NAMES);
        ensure!(minutes > 0, "the header names no minutes");
        let mut calls: u64 = 0;
        let mut functions = Vec::new();
        for (line, row) in (2..).zip(lines) {
            let counts: Vec<u32> = row
                .split(',')
                .skip(NAMES)
                .map(str::parse)
                .collect::<Result<_, _>>()
                .with_context(|| format!("line {line} has a count that is no number"))?;
            ensure!(
                counts.len() == minutes,
                "line {line} has {} counts, the header {minutes}",
                counts.len()
            );
            calls += counts.iter().map(|&count| u64::from(count)).sum::<u64>();
            ensure!(calls <= MAX_CALLS, "more than {MAX_CALLS} calls");
            functions.push(counts);
        }
        Ok(Self { minutes, functions })
    }

    /// Keeps the first functions and minutes.
    pub(crate) fn cut(&mut self, functions: usize, minutes: usize) {
        self.functions.truncate(functions);
        self.minutes = self.minutes.min(minutes);
        for counts in &mut self.functions {
            counts.truncate(self.minutes);
        }
    }

    pub(crate) fn end(&self) -> Timestamp {
        Timestamp::from_nanos(self.minutes as u64 * MINUTE)
    }

    /// Every call in order of time; the same seed gives the same calls.
    pub(crate) fn calls(&self, arrivals: Arrivals, seed: u64) -> Vec<Call> {
        let mut dice = Dice(seed);
        let total: u64 = self.functions.iter().flatten().map(|&n| u64::from(n)).sum();
        let mut calls = Vec::with_capacity(usize::try_from(total).unwrap_or(0));
        for minute in 0..self.minutes {
            let start = minute as u64 * MINUTE;
            let from = calls.len();
            for (function, counts) in (0..).zip(&self.functions) {
                calls.extend((0..counts[minute]).map(|_| {
                    let offset = match arrivals {
                        Arrivals::Spread => dice.below(MINUTE),
                        Arrivals::Start => 0,
                    };
                    Call {
                        at: Timestamp::from_nanos(start + offset),
                        function,
                    }
                }));
            }
            calls[from..].sort_unstable();
        }
        calls
    }
}

/// A small generator of even pseudo-random numbers (SplitMix64).
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        // The high half of the product is even enough for bounds far below 2^64.
        ((u128::from(mixed) * u128::from(bound)) >> 64) as u64
    }
}

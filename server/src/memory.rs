//! The process's memory as the operating system sees it: how much there may be, how much is used,
//! and giving back what is not.

mod heap;
mod limit;
mod pressure;
mod returned;
#[cfg(test)]
mod tests;

pub use self::heap::release_memory;
pub use self::limit::{LimitSource, MemoryLimit};
pub use self::pressure::{Pressure, PressureGauge, Wall};
pub use self::returned::{Balance, Move, Moves, Unreturned};

use std::path::Path;

/// The process's resident set, none where `/proc` does not tell.
pub fn resident_bytes() -> Option<u64> {
    let [resident, _] = resident_and_file_pages()?;
    resident.checked_mul(page_size()?)
}

/// What of the resident set has no file behind it: heap, stacks, the engine's buffers.
pub fn anonymous_bytes() -> Option<u64> {
    let [resident, files] = resident_and_file_pages()?;
    resident.saturating_sub(files).checked_mul(page_size()?)
}

fn resident_and_file_pages() -> Option<[u64; 2]> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let mut pages = statm.split_ascii_whitespace().skip(1);
    let mut next = || pages.next()?.parse().ok();
    Some([next()?, next()?])
}

/// What only this process holds: memory that comes back when it is freed, unlike mapped files
/// that others use or the page cache keeps. Walks the page tables, so not for a hot path.
pub fn private_bytes() -> Option<u64> {
    Footprint::read().map(|footprint| footprint.private_bytes)
}

/// The process's share of its memory: pages that n processes map count as one nth. Walks the page
/// tables, so not for a hot path.
pub fn pss_bytes() -> Option<u64> {
    Footprint::read().map(|footprint| footprint.pss_bytes)
}

/// Where the process's resident memory lies, in one reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    pub resident_bytes: u64,
    pub pss_bytes: u64,
    /// Pages no other process maps, clean ones of files included.
    pub private_bytes: u64,
    /// Pages without a file behind them: heap, stacks, the engine's buffers.
    pub anonymous_bytes: u64,
}

impl Footprint {
    /// Reads the kernel's summary, none where it does not give one.
    pub fn read() -> Option<Self> {
        Self::parse(&std::fs::read_to_string("/proc/self/smaps_rollup").ok()?)
    }

    fn parse(rollup: &str) -> Option<Self> {
        let field = |name| kibibytes(rollup, name);
        Some(Self {
            resident_bytes: field("Rss:")?,
            pss_bytes: field("Pss:")?,
            private_bytes: field("Private_Clean:")?.checked_add(field("Private_Dirty:")?)?,
            anonymous_bytes: field("Anonymous:")?,
        })
    }
}

/// The value of a line `Name:   123 kB` in bytes.
fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    let number = rest.split_ascii_whitespace().next()?;
    number.parse::<u64>().ok()?.checked_mul(1024)
}

/// Reads a file that holds one number.
fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[expect(unsafe_code, reason = "libc's sysconf has no safe binding here")]
fn page_size() -> Option<u64> {
    // SAFETY: `sysconf` reads a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).ok().filter(|&size| size > 0)
}

//! Instruction counts on record, and how new ones compare with them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};

/// How far a count may be from the recorded one, in percent.
pub const TOLERANCE: f64 = 3.0;

/// What else than our code decides how many instructions it takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Toolchain {
    pub rustc: String,
    pub architecture: String,
    /// Allocating and copying are part of every path.
    pub libc: String,
    /// The C library copies with what the processor has.
    pub vectors: String,
}

impl Toolchain {
    /// The one that this program was built with, on this machine.
    pub fn current() -> anyhow::Result<Self> {
        let output = Command::new("getconf")
            .arg("GNU_LIBC_VERSION")
            .output()
            .context("cannot run getconf")?;
        let libc = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        ensure!(!libc.is_empty(), "getconf does not tell GNU_LIBC_VERSION");
        Ok(Self {
            rustc: env!("RUSTC_VERSION").to_owned(),
            architecture: std::env::consts::ARCH.to_owned(),
            libc,
            vectors: vectors().to_owned(),
        })
    }

    /// What is not as it was when the record was made, in words.
    pub fn differences(&self, recorded: &Self) -> Vec<String> {
        let pairs = [
            ("rustc", &self.rustc, &recorded.rustc),
            ("architecture", &self.architecture, &recorded.architecture),
            ("C library", &self.libc, &recorded.libc),
            ("vectors", &self.vectors, &recorded.vectors),
        ];
        let other = pairs.iter().filter(|(_, now, recorded)| now != recorded);
        other
            .map(|(what, now, recorded)| format!("{what}: {now} here, {recorded} on record"))
            .collect()
    }
}

/// As far as valgrind knows them: it hides AVX-512.
#[cfg(target_arch = "x86_64")]
fn vectors() -> &'static str {
    match std::arch::is_x86_feature_detected!("avx2") {
        true => "avx2",
        false => "sse",
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn vectors() -> &'static str {
    ""
}

/// Instructions per step, by workload.
pub type Counts = BTreeMap<String, u64>;

/// `counts.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    pub toolchain: Toolchain,
    pub instructions: Counts,
}

impl Record {
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text)
            .with_context(|| format!("{} is not a record of counts", path.display()))
    }

    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

/// A count beside the recorded one.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    pub name: String,
    pub now: Option<u64>,
    pub recorded: Option<u64>,
}

impl Compared {
    /// In percent of what is recorded; none when one of both is missing.
    pub fn difference(&self) -> Option<f64> {
        let (now, recorded) = (self.now? as f64, self.recorded? as f64);
        Some((now - recorded) / recorded.max(1.0) * 100.0)
    }

    /// Fewer instructions count too: what is not recorded can be lost again unseen.
    pub fn is_within(&self) -> bool {
        self.difference()
            .is_some_and(|percent| percent.abs() <= TOLERANCE)
    }
}

/// Every workload that was counted or is on record.
pub fn compare(now: &Counts, recorded: &Counts) -> Vec<Compared> {
    let names: BTreeSet<&String> = now.keys().chain(recorded.keys()).collect();
    let compared = names.into_iter().map(|name| Compared {
        name: name.clone(),
        now: now.get(name).copied(),
        recorded: recorded.get(name).copied(),
    });
    compared.collect()
}

/// That nothing is judged and why, if the counts were made with another toolchain than the record:
/// a run that passes for this reason must not look like one whose counts were right.
pub fn unjudged(compared: &[Compared], now: &Toolchain, recorded: &Toolchain) -> Option<String> {
    let differences = now.differences(recorded);
    if differences.is_empty() {
        return None;
    }
    let frame = "!".repeat(80);
    let outside = compared.iter().filter(|one| !one.is_within()).count();
    Some(format!(
        "{frame}\n!! NOTHING WAS JUDGED: counts of another toolchain cannot be held against the \
         record.\n!!   {}\n!! {outside} of {} counts differ by more than {TOLERANCE} %, and none of \
         them fails.\n!! To have them judged here: cargo counts --record\n{frame}",
        differences.join("\n!!   "),
        compared.len()
    ))
}

/// Fails when a count is not what is on record, if both were made with the same toolchain.
pub fn judge(compared: &[Compared], now: &Toolchain, recorded: &Toolchain) -> anyhow::Result<()> {
    let outside: Vec<&str> = compared
        .iter()
        .filter(|compared| !compared.is_within())
        .map(|compared| compared.name.as_str())
        .collect();
    if outside.is_empty() || now != recorded {
        return Ok(());
    }
    bail!(
        "{} of {} counts differ by more than {TOLERANCE} % from benches/counts.json, or only one \
         side has them: {}. If that is meant, record the new ones: \
         cargo counts --record",
        outside.len(),
        compared.len(),
        outside.join("; ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn toolchain(rustc: &str) -> Toolchain {
        Toolchain {
            rustc: rustc.to_owned(),
            architecture: "x86_64".to_owned(),
            libc: "glibc 2.36".to_owned(),
            vectors: "avx2".to_owned(),
        }
    }

    fn counts(pairs: &[(&str, u64)]) -> Counts {
        let pairs = pairs.iter();
        pairs
            .map(|(name, count)| ((*name).to_owned(), *count))
            .collect()
    }

    fn judged(now: &[(&str, u64)], recorded: &[(&str, u64)]) -> Result<(), String> {
        let compared = compare(&counts(now), &counts(recorded));
        judge(&compared, &toolchain("1.95.0"), &toolchain("1.95.0"))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn three_percent_either_way_are_tolerated_and_more_is_named() {
        assert_eq!(judged(&[("a", 1030)], &[("a", 1000)]), Ok(()));
        assert_eq!(judged(&[("a", 970)], &[("a", 1000)]), Ok(()));
        for now in [1031, 969] {
            let error = judged(&[("a", now), ("b", 5)], &[("a", 1000), ("b", 5)]).unwrap_err();
            assert!(error.starts_with("1 of 2 counts"), "{error}");
            assert!(error.contains(": a. "), "{error}");
            assert!(error.contains("--record"), "{error}");
        }
    }

    #[test]
    fn a_workload_that_only_one_side_has_is_named() {
        assert!(judged(&[("a", 1), ("new", 2)], &[("a", 1)]).is_err());
        assert!(judged(&[("a", 1)], &[("a", 1), ("gone", 2)]).is_err());
    }

    #[test]
    fn counts_of_another_toolchain_are_shown_but_not_held_against_anybody() {
        let compared = compare(&counts(&[("a", 2000)]), &counts(&[("a", 1000)]));
        assert_eq!(compared[0].difference(), Some(100.0));
        assert!(judge(&compared, &toolchain("1.96.0"), &toolchain("1.95.0")).is_ok());
        let words = unjudged(&compared, &toolchain("1.96.0"), &toolchain("1.95.0")).unwrap();
        assert!(words.contains("NOTHING WAS JUDGED"), "{words}");
        assert!(
            words.contains("rustc: 1.96.0 here, 1.95.0 on record"),
            "{words}"
        );
        assert!(words.contains("1 of 1 counts differ") && !words.contains("vectors"));
        assert_eq!(
            unjudged(&compared, &toolchain("1.95.0"), &toolchain("1.95.0")),
            None
        );
        assert!(judge(&compared, &toolchain("1.95.0"), &toolchain("1.95.0")).is_err());
    }
}

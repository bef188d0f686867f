//! Where a run takes place, and what a server's process uses.

use std::collections::HashMap;
use std::fs;

use anyhow::{Context, Result};

use super::outcome::{Machine, Tool};
use crate::process;

/// A process and everything it started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ProcessSample {
    pub(crate) user_seconds: f64,
    pub(crate) system_seconds: f64,
    pub(crate) resident_bytes: u64,
}

/// What is known of one process.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stat {
    parent: u32,
    user_ticks: u64,
    system_ticks: u64,
    resident_pages: u64,
}

impl Machine {
    /// This machine.
    pub(crate) fn here() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let cpu = read("/proc/cpuinfo")
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
            .map(|(_, name)| name.trim().to_owned())
            .unwrap_or_default();
        let memory_kib: u64 = read("/proc/meminfo")
            .lines()
            .find_map(|line| line.strip_prefix("MemTotal:"))
            .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse().ok())
            .unwrap_or(0);
        Self {
            cpu,
            cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            memory_bytes: memory_kib.saturating_mul(1024),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        }
    }
}

impl Tool {
    /// This program, as it was called.
    pub(crate) fn this() -> Self {
        Self {
            name: "dormouse-load".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            optimised: !cfg!(debug_assertions),
            // Where the program lies is nobody's business who reads the figures.
            command_line: std::iter::once("dormouse-load".to_owned())
                .chain(
                    std::env::args_os()
                        .skip(1)
                        .map(|arg| arg.to_string_lossy().into_owned()),
                )
                .collect(),
            commit: commit(),
            onnxruntime: crate::plain::version(),
        }
    }
}

/// The commit of the repository that this program was built in, where git tells.
fn commit() -> Option<String> {
    let output = std::process::Command::new("git")
        .args([
            "-C",
            env!("CARGO_MANIFEST_DIR"),
            "describe",
            "--always",
            "--abbrev=12",
            "--dirty",
            "--exclude=*",
        ])
        .stderr(std::process::Stdio::null())
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let words = String::from_utf8(output.stdout).ok()?;
    Some(words.trim().to_owned()).filter(|words| !words.is_empty())
}

impl ProcessSample {
    /// What a process and its descendants have used so far and hold now.
    pub(crate) fn of(pid: u32) -> Result<Self> {
        let mut all = HashMap::new();
        for entry in fs::read_dir("/proc").context("cannot list processes")? {
            let name = entry?.file_name();
            let Some(found) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            // One that ended meanwhile is not there any more.
            if let Ok(text) = fs::read_to_string(format!("/proc/{found}/stat"))
                && let Some(stat) = Stat::parse(&text)
            {
                all.insert(found, stat);
            }
        }
        anyhow::ensure!(all.contains_key(&pid), "there is no process {pid}");
        let ticks = process::ticks_per_second() as f64;
        let page = process::page_size();
        let mut sample = Self::default();
        for (&found, stat) in &all {
            if found == pid || descends(&all, found, pid) {
                sample.user_seconds += stat.user_ticks as f64 / ticks;
                sample.system_seconds += stat.system_ticks as f64 / ticks;
                sample.resident_bytes += stat.resident_pages.saturating_mul(page);
            }
        }
        Ok(sample)
    }
}

impl Stat {
    fn parse(text: &str) -> Option<Self> {
        // The second field is the program's name in parentheses and may hold anything.
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        Some(Self {
            parent: u32::try_from(number(1)?).ok()?,
            user_ticks: number(11)?,
            system_ticks: number(12)?,
            resident_pages: number(21)?,
        })
    }
}

fn descends(all: &HashMap<u32, Stat>, mut process: u32, ancestor: u32) -> bool {
    // Bounded, since ids may be given anew while they are read.
    for _ in 0..64 {
        match all.get(&process) {
            Some(stat) if stat.parent == ancestor => return true,
            Some(stat) => process = stat.parent,
            None => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_is_read_whatever_the_program_is_called() {
        let text = "42 (a) b) S 7 42 42 0 -1 4194560 1 0 0 0 15 6 0 0 20 0 4 0 100 2048 321 18446744073709551615";
        let stat = Stat::parse(text).unwrap();
        let wanted = Stat {
            parent: 7,
            user_ticks: 15,
            system_ticks: 6,
            resident_pages: 321,
        };
        assert_eq!(stat, wanted);
        assert_eq!(Stat::parse("42 (a"), None);
    }

    #[test]
    fn children_count_for_their_parents() {
        let alone = ProcessSample::of(std::process::id()).unwrap();
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let of_child = ProcessSample::of(child.id());
        let together = ProcessSample::of(std::process::id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(of_child.unwrap().resident_bytes > 0);
        assert!(together.unwrap().resident_bytes > 0 && alone.resident_bytes > 0);
        assert!(ProcessSample::of(u32::MAX).is_err());
        assert!(Machine::here().memory_bytes > 0);
    }
}

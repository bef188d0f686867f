//! How short memory is just now.

use std::path::{Path, PathBuf};

use super::limit::{ControlGroup, LimitSource, UsageFiles};
use super::{MemoryLimit, kibibytes, number};

/// One reading of how short memory is. What the kernel does not tell is none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    /// The limit the other numbers are to be held against.
    pub limit_bytes: Option<u64>,
    /// What is used of the limit, without page cache that can be dropped at once.
    pub used_bytes: Option<u64>,
    /// How near the control group is to where the kernel kills, if it has such a limit.
    pub wall: Option<Wall>,
    /// What the whole machine can still give.
    pub available_bytes: Option<u64>,
    /// Share of the last ten seconds in which something waited for memory, from 0 to 1.
    pub stalled: Option<f64>,
}

/// A control group's limit past which the kernel kills somebody in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wall {
    pub limit_bytes: u64,
    /// What the kernel cannot take back before it kills: page cache, in use or not, goes first.
    pub kept_bytes: u64,
}

impl Pressure {
    /// What can still be taken before the kernel acts: of the limit and of the machine.
    pub fn headroom_bytes(&self) -> Option<u64> {
        let of_limit = self
            .limit_bytes
            .zip(self.used_bytes)
            .map(|(limit, used)| limit.saturating_sub(used));
        match (of_limit, self.available_bytes) {
            (Some(limit), Some(host)) => Some(limit.min(host)),
            (limit, host) => limit.or(host),
        }
    }

    /// Whether requests must be refused before the kernel kills: a twentieth of what the control
    /// group may have is left. Neither what others leave of the machine nor a limit past which the
    /// kernel only stalls says anything of that.
    pub fn is_critical(&self) -> bool {
        self.wall.is_some_and(|wall| {
            let left = wall.limit_bytes.saturating_sub(wall.kept_bytes);
            left < wall.limit_bytes / 20
        })
    }

    /// Whether to give memory back out of turn: a sixteenth of the limit is left, or less than a
    /// quarter and a tenth of the time was spent waiting for memory. With more left, who waits
    /// does so for pages of files that are being read, and models that leave would not help.
    pub fn is_high(&self) -> bool {
        let left = self.headroom_bytes().zip(self.limit_bytes);
        let less_than = |part| left.is_some_and(|(left, limit)| left < limit / part);
        let stalls = self.stalled.is_some_and(|share| share > 0.1);
        less_than(16) || (stalls && (left.is_none() || less_than(4)))
    }
}

/// Takes readings; a handful of small files each, some tens of microseconds.
#[derive(Clone, Debug)]
pub struct PressureGauge {
    limit: Option<MemoryLimit>,
    group: Option<UsageFiles>,
    /// The group that is killed in, and its limit.
    wall: Option<(u64, UsageFiles)>,
    meminfo: PathBuf,
    host_stall: PathBuf,
}

impl PressureGauge {
    /// Finds the files of this process's control group once.
    pub fn new() -> Self {
        Self::in_root(Path::new("/"))
    }

    /// As [`PressureGauge::new`] with `proc` and `sys` below `root`.
    pub fn in_root(root: &Path) -> Self {
        let group = ControlGroup::find(root);
        Self {
            limit: MemoryLimit::detect_in(root),
            wall: group.as_ref().and_then(ControlGroup::wall),
            group: group.map(|group| group.usage_files()),
            meminfo: root.join("proc/meminfo"),
            host_stall: root.join("proc/pressure/memory"),
        }
    }

    /// The limit that readings are held against.
    pub fn limit(&self) -> Option<&MemoryLimit> {
        self.limit.as_ref()
    }

    /// Reads how things stand.
    pub fn sample(&self) -> Pressure {
        let meminfo = std::fs::read_to_string(&self.meminfo).unwrap_or_default();
        let available_bytes = kibibytes(&meminfo, "MemAvailable:");
        let of_host = || kibibytes(&meminfo, "MemTotal:")?.checked_sub(available_bytes?);
        let used_bytes = match self.limit.as_ref().map(|limit| &limit.source) {
            Some(LimitSource::ControlGroup(_)) => {
                let group = self.group.as_ref();
                group.and_then(|group| group_use(group, group.droppable))
            }
            Some(LimitSource::Host) => of_host(),
            None => None,
        };
        let stalled = self
            .group
            .as_ref()
            .and_then(|group| stalled(&group.stall))
            .or_else(|| stalled(&self.host_stall));
        let wall = self.wall.as_ref().and_then(|(limit_bytes, group)| {
            Some(Wall {
                limit_bytes: *limit_bytes,
                kept_bytes: group_use(group, group.reclaimable)?,
            })
        });
        Pressure {
            limit_bytes: self.limit.as_ref().map(|limit| limit.bytes),
            used_bytes,
            wall,
            available_bytes,
            stalled,
        }
    }
}

impl Default for PressureGauge {
    fn default() -> Self {
        Self::new()
    }
}

/// What a group uses beside these lines of its statistics.
fn group_use(files: &UsageFiles, beside: &[&str]) -> Option<u64> {
    let current = number(&files.current)?;
    let stat = std::fs::read_to_string(&files.stat).unwrap_or_default();
    let values = stat.lines().filter_map(|line| {
        let (name, value) = line.split_once(' ')?;
        let is_beside = beside.contains(&name);
        is_beside.then(|| value.trim().parse::<u64>().ok())?
    });
    Some(current.saturating_sub(values.fold(0, u64::saturating_add)))
}

/// `some avg10=1.50 avg60=...`: the share in percent.
fn stalled(path: &Path) -> Option<f64> {
    let text = std::fs::read_to_string(path).ok()?;
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let percent = some
        .split_ascii_whitespace()
        .find_map(|part| part.strip_prefix("avg10="))?
        .parse::<f64>()
        .ok()?;
    (percent.is_finite() && percent >= 0.0).then_some(percent / 100.0)
}

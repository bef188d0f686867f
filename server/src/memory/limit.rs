//! How much memory the process may use, by its control group or the machine.

use std::fmt;
use std::path::{Path, PathBuf};

use super::{kibibytes, number};

/// Of ten bytes of the limit, how many models may take.
///
/// The rest is for what no model's reservation covers: the server and ONNX Runtime themselves
/// (50 to 100 MB), requests and answers in flight, the heap's fragmentation, and room for the
/// kernel to keep page cache, which counts against a control group and without which every wake
/// reads the disk. Less than a fifth makes the kernel reclaim the weights that are being loaded.
const BUDGET_TENTHS: u64 = 8;

/// See [`MemoryLimit::most_in_flight`].
const LEAST_IN_FLIGHT: u64 = 128 << 20;

/// The most memory the process can have before the kernel acts, and who says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    pub bytes: u64,
    pub source: LimitSource,
}

/// Where a limit comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LimitSource {
    /// A file of a control group: past `memory.max` (`memory.limit_in_bytes`) the kernel kills,
    /// past `memory.high` it stalls.
    ControlGroup(PathBuf),
    /// The machine's memory.
    Host,
}

impl fmt::Display for LimitSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ControlGroup(file) => write!(f, "{}", file.display()),
            Self::Host => f.write_str("the machine's memory"),
        }
    }
}

impl MemoryLimit {
    /// The least of what the control groups of this process and the machine allow; none where
    /// neither tells.
    pub fn detect() -> Option<Self> {
        Self::detect_in(Path::new("/"))
    }

    /// As [`MemoryLimit::detect`] with `proc` and `sys` below `root`.
    pub fn detect_in(root: &Path) -> Option<Self> {
        let host = std::fs::read_to_string(root.join("proc/meminfo"))
            .ok()
            .and_then(|text| kibibytes(&text, "MemTotal:"))
            .filter(|&bytes| bytes > 0)
            .map(|bytes| Self {
                bytes,
                source: LimitSource::Host,
            });
        let group = ControlGroup::find(root).and_then(|group| group.limit());
        match (group, host) {
            // A group without a limit of its own says a number beyond any machine.
            (Some(group), Some(host)) => Some(if group.bytes < host.bytes {
                group
            } else {
                host
            }),
            (group, host) => group.or(host),
        }
    }

    /// What requests may hold together at most, whatever is configured: a quarter of the limit, but
    /// enough for one or two of the largest that are usually allowed.
    pub fn most_in_flight(&self) -> u64 {
        (self.bytes / 4).max(LEAST_IN_FLIGHT)
    }

    /// What models may use together unless the user says otherwise: four fifths of the limit.
    pub fn default_budget(&self) -> u64 {
        self.bytes / 10 * BUDGET_TENTHS
    }
}

/// The control group that counts this process's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ControlGroup {
    /// The folder of the group the process is in.
    folder: PathBuf,
    /// Where the hierarchy begins; groups above cannot be seen.
    top: PathBuf,
    version: Version,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl ControlGroup {
    /// The group named by `proc/self/cgroup`, or the hierarchy's top where a container shows its
    /// own group there.
    pub(super) fn find(root: &Path) -> Option<Self> {
        let membership = std::fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
        let path_of = |wanted: &dyn Fn(&str, &str) -> bool| {
            membership.lines().find_map(|line| {
                let (id, rest) = line.split_once(':')?;
                let (controllers, path) = rest.split_once(':')?;
                wanted(id, controllers).then_some(path)
            })
        };
        // On a machine with both, the older hierarchy has the memory controller if it names it.
        let one = path_of(&|_, controllers| controllers.split(',').any(|name| name == "memory"));
        if let Some(path) = one {
            let top = root.join("sys/fs/cgroup/memory");
            return Self::at(top, path, Version::One);
        }
        let two = path_of(&|id, controllers| id == "0" && controllers.is_empty())?;
        Self::at(root.join("sys/fs/cgroup"), two, Version::Two)
    }

    fn at(top: PathBuf, path: &str, version: Version) -> Option<Self> {
        // The path comes from the kernel, but `/../..` is what it says of a group outside the
        // process's namespace: then only the top can be read.
        let is_plain = !path.split('/').any(|part| part == "..");
        let inside = top.join(path.trim_start_matches('/'));
        let folder = if is_plain && inside.is_dir() {
            inside
        } else if top.is_dir() {
            top.clone()
        } else {
            return None;
        };
        Some(Self {
            folder,
            top,
            version,
        })
    }

    /// The least limit of the group and of those around it.
    fn limit(&self) -> Option<MemoryLimit> {
        match self.version {
            Version::One => self.least_of(&["memory.limit_in_bytes"]),
            Version::Two => self.least_of(&["memory.max", "memory.high"]),
        }
    }

    /// The least limit past which the kernel kills, with the files of the group that has it.
    pub(super) fn wall(&self) -> Option<(u64, UsageFiles)> {
        let limit = match self.version {
            Version::One => self.least_of(&["memory.limit_in_bytes"]),
            Version::Two => self.least_of(&["memory.max"]),
        }?;
        let files = self.usage_files_in(&self.folder_of(&limit));
        Some((limit.bytes, files))
    }

    fn least_of(&self, files: &[&str]) -> Option<MemoryLimit> {
        let mut least: Option<MemoryLimit> = None;
        for folder in self.upwards() {
            for file in files {
                let file = folder.join(file);
                // "max" is not a number: no limit here.
                let Some(bytes) = number(&file) else {
                    continue;
                };
                if least.as_ref().is_none_or(|least| bytes < least.bytes) {
                    least = Some(MemoryLimit {
                        bytes,
                        source: LimitSource::ControlGroup(file),
                    });
                }
            }
        }
        least
    }

    fn upwards(&self) -> impl Iterator<Item = &Path> {
        self.folder
            .ancestors()
            .take_while(|folder| folder.starts_with(&self.top))
    }

    /// The group that has this limit.
    fn folder_of(&self, limit: &MemoryLimit) -> PathBuf {
        match &limit.source {
            LimitSource::ControlGroup(file) => file.parent().unwrap_or(&self.folder).to_owned(),
            LimitSource::Host => self.folder.clone(),
        }
    }

    /// Files to read the use of the group from whose limit is the least.
    pub(super) fn usage_files(&self) -> UsageFiles {
        let narrowest = self.limit().map(|limit| self.folder_of(&limit));
        self.usage_files_in(narrowest.as_deref().unwrap_or(&self.folder))
    }

    fn usage_files_in(&self, folder: &Path) -> UsageFiles {
        let (current, droppable, reclaimable): (_, &[_], &[_]) = match self.version {
            Version::One => (
                "memory.usage_in_bytes",
                &["total_inactive_file"],
                &["total_inactive_file", "total_active_file"],
            ),
            Version::Two => (
                "memory.current",
                &["inactive_file"],
                &["inactive_file", "active_file", "slab_reclaimable"],
            ),
        };
        UsageFiles {
            current: folder.join(current),
            stat: folder.join("memory.stat"),
            droppable,
            reclaimable,
            stall: folder.join("memory.pressure"),
        }
    }
}

/// See [`ControlGroup::usage_files`].
#[derive(Clone, Debug)]
pub(super) struct UsageFiles {
    pub(super) current: PathBuf,
    pub(super) stat: PathBuf,
    /// The line in `stat` with page cache that nobody misses.
    pub(super) droppable: &'static [&'static str],
    /// The lines in `stat` with all that the kernel takes back before it kills.
    pub(super) reclaimable: &'static [&'static str],
    pub(super) stall: PathBuf,
}

//! What tells whether a file is still the one that was seen, without reading it.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// The longest that clocks of file systems stand still.
const TICK: Duration = Duration::from_secs(2);

/// A file's state: whoever changes its content changes this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stamp {
    pub(super) size: u64,
    device: u64,
    inode: u64,
    /// Seconds and nanoseconds of the last change of content.
    modified: (i64, i64),
    /// And of anything about the file; nobody can set it back.
    changed: (i64, i64),
}

impl Stamp {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self {
            size: metadata.len(),
            device: metadata.dev(),
            inode: metadata.ino(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Which file it is: device and inode.
    pub(super) fn file(&self) -> (u64, u64) {
        (self.device, self.inode)
    }

    /// Whether this is another file of the same size and time, which copies of folders keep; images keep
    /// whole seconds of it.
    pub(super) fn is_copy_of(&self, other: &Self) -> bool {
        self.file() != other.file()
            && self.size == other.size
            && self.modified.0 == other.modified.0
    }

    /// Whether the last change is so long ago that the next one must have another time: clocks of
    /// file systems tick in milliseconds to seconds.
    pub(super) fn is_settled(&self, now: SystemTime) -> bool {
        let settled = |(seconds, nanoseconds): (i64, i64)| {
            let Ok(seconds) = u64::try_from(seconds) else {
                return true;
            };
            let since = Duration::new(seconds, nanoseconds.clamp(0, 999_999_999) as u32);
            now.duration_since(SystemTime::UNIX_EPOCH)
                .is_ok_and(|now| now > since.saturating_add(TICK))
        };
        settled(self.modified) && settled(self.changed)
    }

    /// How long until that is so; nothing as well where it will not be soon, as with times that
    /// are in the future.
    pub(super) fn settles_in(&self, now: SystemTime) -> Duration {
        let now = now.duration_since(SystemTime::UNIX_EPOCH);
        let now = now.unwrap_or_default();
        let left = |(seconds, nanoseconds): (i64, i64)| {
            let since = Duration::new(
                u64::try_from(seconds).unwrap_or(0),
                nanoseconds.clamp(0, 999_999_999) as u32,
            );
            // A little more, so that it has passed by then.
            let settled = since.saturating_add(TICK + Duration::from_millis(1));
            let left = settled.saturating_sub(now);
            if left > 2 * TICK {
                Duration::ZERO
            } else {
                left
            }
        };
        left(self.modified).max(left(self.changed))
    }
}

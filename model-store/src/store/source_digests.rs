//! Digests of source files, so that a model that is known is looked up without reading it again.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use moka::sync::Cache;
use serde::{Deserialize, Serialize};

use super::digest::Digest;
use super::error::{At, StoreError};
use super::packs::{names, remove_file, replace};
use super::record;
use super::stamp::Stamp;

/// How many are kept in memory.
const IN_MEMORY: u64 = 20_000;
/// How many are kept on the disk; the oldest go.
const ON_DISK: usize = 50_000;
const LIMIT: u64 = 16 << 10;

/// Remembers the digests of source files by path, device, inode, size and times, in memory and in
/// the store.
#[derive(Debug)]
pub struct DigestCache {
    dir: PathBuf,
    /// None in a store that is only read.
    tmp: Option<PathBuf>,
    /// By [`name`].
    known: Cache<Digest, (Stamp, Digest)>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Source {
    stamp: Stamp,
    digest: Digest,
}

impl DigestCache {
    pub(super) fn new(dir: PathBuf, tmp: Option<PathBuf>) -> Self {
        Self {
            dir,
            tmp,
            known: Cache::new(IN_MEMORY),
        }
    }

    /// The digest of an open file; `path` names it from one time to the next. A file that is known
    /// is not read.
    pub fn digest(&self, path: &Path, file: &File) -> Result<Digest, StoreError> {
        self.digest_at(path, file, SystemTime::now())
    }

    /// How long until a file counts as unchanged since it was last written, so that its digest is
    /// remembered.
    pub fn settles_in(file: &File) -> Duration {
        let metadata = file.metadata();
        metadata.map_or(Duration::ZERO, |metadata| {
            Stamp::of(&metadata).settles_in(SystemTime::now())
        })
    }

    /// Whether a file counted as unchanged since it was last written at that time.
    pub(crate) fn is_settled(file: &File, now: SystemTime) -> bool {
        let metadata = file.metadata();
        metadata.is_ok_and(|metadata| Stamp::of(&metadata).is_settled(now))
    }

    /// The digest of an open file, if it is known without reading the file.
    pub fn known(&self, path: &Path, file: &File) -> Option<Digest> {
        let stamp = Stamp::of(&file.metadata().ok()?);
        self.lookup(&name(path, &stamp), &stamp)
    }

    fn digest_at(&self, path: &Path, file: &File, now: SystemTime) -> Result<Digest, StoreError> {
        let stamp = Stamp::of(&file.metadata().at(path)?);
        let name = name(path, &stamp);
        if let Some(digest) = self.lookup(&name, &stamp) {
            return Ok(digest);
        }
        let digest = Digest::of_file(file, stamp.size, &|_| {}).at(path)?;
        if Stamp::of(&file.metadata().at(path)?) != stamp {
            return Err(StoreError::Changed {
                path: path.to_owned(),
            });
        }
        // A file changed just now could change again without its times telling.
        if stamp.is_settled(now) {
            self.known.insert(name, (stamp, digest));
            self.remember(&name, Source { stamp, digest });
        }
        Ok(digest)
    }

    fn lookup(&self, name: &Digest, stamp: &Stamp) -> Option<Digest> {
        if let Some((known, digest)) = self.known.get(name) {
            return (known == *stamp).then_some(digest);
        }
        let source: Source = record::read(&self.path(name), LIMIT).ok()?;
        self.known.insert(*name, (source.stamp, source.digest));
        (source.stamp == *stamp).then_some(source.digest)
    }

    fn remember(&self, name: &Digest, source: Source) {
        let Some(tmp) = &self.tmp else { return };
        // Lost, it costs another reading of the file.
        if let Err(error) = replace(tmp, &self.path(name), &record::encode(&source)) {
            tracing::debug!(%error, "a source's digest could not be kept");
        }
    }

    fn path(&self, name: &Digest) -> PathBuf {
        self.dir.join(name.to_string())
    }

    /// Removes the oldest when there are too many.
    pub(super) fn prune(&self) -> Result<(), StoreError> {
        self.prune_to(ON_DISK)
    }

    fn prune_to(&self, most: usize) -> Result<(), StoreError> {
        let names = names(&self.dir).at(&self.dir)?;
        let excess = names.len().saturating_sub(most);
        if excess == 0 {
            return Ok(());
        }
        let mut aged: Vec<(SystemTime, PathBuf)> = Vec::with_capacity(names.len());
        for name in names {
            let path = self.dir.join(name);
            if let Ok(modified) = path.symlink_metadata().and_then(|found| found.modified()) {
                aged.push((modified, path));
            }
        }
        aged.sort_unstable();
        for (_, path) in aged.into_iter().take(excess) {
            remove_file(&path).at(&path)?;
        }
        Ok(())
    }
}

/// What a file is remembered under. Paths are within a repository, and several of them may have a
/// model of the same name: the file itself tells them apart.
fn name(path: &Path, stamp: &Stamp) -> Digest {
    let (device, inode) = stamp.file();
    let path = path.as_os_str().as_bytes();
    Digest::of(&[path, &device.to_le_bytes(), &inode.to_le_bytes()].concat())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    struct Bench {
        folder: tempfile::TempDir,
        file: PathBuf,
    }

    impl Bench {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join("model.onnx");
            fs::write(&file, b"first").unwrap();
            fs::create_dir(folder.path().join("sources")).unwrap();
            Self { folder, file }
        }

        /// As a new process has it.
        fn cache(&self) -> DigestCache {
            let dir = self.folder.path().join("sources");
            DigestCache::new(dir, Some(self.folder.path().to_owned()))
        }

        fn digest(&self, cache: &DigestCache, later: Duration) -> Digest {
            let file = File::open(&self.file).unwrap();
            let now = SystemTime::now() + later;
            cache.digest_at(&self.file, &file, now).unwrap()
        }

        /// What the cache says without reading the file.
        fn known(&self, cache: &DigestCache) -> Option<Digest> {
            let stamp = Stamp::of(&self.file.metadata().unwrap());
            cache.lookup(&name(&self.file, &stamp), &stamp)
        }
    }

    const LONG: Duration = Duration::from_secs(10);

    #[test]
    fn a_known_file_is_not_read_again_by_this_process_or_the_next() {
        let bench = Bench::new();
        let cache = bench.cache();
        assert_eq!(bench.digest(&cache, LONG), Digest::of(b"first"));
        assert_eq!(bench.known(&cache), Some(Digest::of(b"first")));
        assert_eq!(bench.known(&bench.cache()), Some(Digest::of(b"first")));
    }

    #[test]
    fn a_file_settles_when_its_digest_would_be_remembered() {
        let bench = Bench::new();
        let stamp = Stamp::of(&bench.file.metadata().unwrap());
        let now = SystemTime::now();
        let left = stamp.settles_in(now);
        assert!(!left.is_zero() && !stamp.is_settled(now));
        assert!(stamp.is_settled(now + left));
        assert_eq!(stamp.settles_in(now + left), Duration::ZERO);
        let file = File::options().write(true).open(&bench.file).unwrap();
        file.set_modified(now + 100 * LONG).unwrap();
        let stamp = Stamp::of(&file.metadata().unwrap());
        assert!(stamp.settles_in(now + LONG).is_zero(), "it never will");
    }

    #[test]
    fn a_changed_file_is_read_again_though_its_size_and_time_are_the_same() {
        let bench = Bench::new();
        let cache = bench.cache();
        bench.digest(&cache, LONG);
        let modified = bench.file.metadata().unwrap().modified().unwrap();
        fs::write(&bench.file, b"other").unwrap();
        let file = File::options().write(true).open(&bench.file).unwrap();
        file.set_modified(modified).unwrap();
        assert_eq!(bench.digest(&cache, LONG), Digest::of(b"other"));
        assert_eq!(bench.digest(&bench.cache(), LONG), Digest::of(b"other"));
    }

    #[test]
    fn a_file_changed_just_now_is_not_remembered() {
        let bench = Bench::new();
        let cache = bench.cache();
        assert_eq!(bench.digest(&cache, Duration::ZERO), Digest::of(b"first"));
        assert_eq!(bench.known(&cache), None);
        assert_eq!(bench.known(&bench.cache()), None);
    }

    #[test]
    fn files_of_one_name_in_several_repositories_are_remembered_side_by_side() {
        let (bench, other) = (Bench::new(), Bench::new());
        fs::write(&other.file, b"second").unwrap();
        let cache = bench.cache();
        let digest = |file: &Path| {
            let now = SystemTime::now() + LONG;
            let open = File::open(file).unwrap();
            cache.digest_at(Path::new("model/1/model.onnx"), &open, now)
        };
        digest(&bench.file).unwrap();
        digest(&other.file).unwrap();
        for (file, content) in [(&bench.file, "first"), (&other.file, "second")] {
            let open = File::open(file).unwrap();
            let known = bench.cache().known(Path::new("model/1/model.onnx"), &open);
            assert_eq!(known, Some(Digest::of(content.as_bytes())));
        }
    }

    #[test]
    fn a_damaged_record_is_made_again() {
        let bench = Bench::new();
        bench.digest(&bench.cache(), LONG);
        let record = fs::read_dir(bench.folder.path().join("sources")).unwrap();
        let path = record.into_iter().next().unwrap().unwrap().path();
        let mut bytes = fs::read(&path).unwrap();
        bytes[80] ^= 1;
        fs::write(&path, bytes).unwrap();
        let cache = bench.cache();
        assert_eq!(bench.known(&cache), None);
        assert_eq!(bench.digest(&cache, LONG), Digest::of(b"first"));
        assert_eq!(bench.known(&bench.cache()), Some(Digest::of(b"first")));
    }

    #[test]
    fn no_more_than_the_limit_are_kept() {
        let bench = Bench::new();
        let cache = bench.cache();
        let dir = bench.folder.path().join("sources");
        for age in 0..5_u64 {
            let file = File::create(dir.join(age.to_string())).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(age))
                .unwrap();
        }
        cache.prune_to(2).unwrap();
        let mut left = names(&dir).unwrap();
        left.sort();
        assert_eq!(left, ["0", "1"]);
    }
}

//! BLAKE3 of content: of bytes, and of files by several threads.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root,
};

/// What one thread takes at a time; a power of two, so that it is a whole branch of BLAKE3's tree.
const SEGMENT: u64 = 8 << 20;
const READ: usize = 1 << 20;
const MAX_THREADS: usize = 8;

/// The BLAKE3 digest of some content.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of bytes in memory.
    pub fn of(bytes: &[u8]) -> Self {
        Self(blake3::hash(bytes).into())
    }

    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    pub(crate) fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The digest of a file's first `len` bytes, read by several threads; `progress` hears how
    /// many bytes were done since it was last called.
    pub(super) fn of_file(
        file: &File,
        len: u64,
        progress: &(dyn Fn(u64) + Sync),
    ) -> io::Result<Self> {
        of_file_in_segments(file, len, SEGMENT, progress)
    }
}

fn of_file_in_segments(
    file: &File,
    len: u64,
    segment: u64,
    progress: &(dyn Fn(u64) + Sync),
) -> io::Result<Digest> {
    if len <= segment {
        let mut hasher = blake3::Hasher::new();
        update_from(&mut hasher, file, 0..len, progress)?;
        return Ok(Digest(hasher.finalize().into()));
    }
    let segments = usize::try_from(len.div_ceil(segment)).map_err(io::Error::other)?;
    let threads = thread::available_parallelism()
        .map_or(1, usize::from)
        .min(MAX_THREADS)
        .min(segments);
    let next = AtomicUsize::new(0);
    let work = || -> io::Result<Vec<(usize, ChainingValue)>> {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= segments {
                return Ok(done);
            }
            let from = index as u64 * segment;
            let mut hasher = blake3::Hasher::new();
            hasher.set_input_offset(from);
            let range = from..len.min(from + segment);
            if let Err(error) = update_from(&mut hasher, file, range, progress) {
                // The others need not go on.
                next.store(segments, Ordering::Relaxed);
                return Err(error);
            }
            done.push((index, hasher.finalize_non_root()));
        }
    };
    let mut leaves: Vec<(usize, ChainingValue)> = Vec::with_capacity(segments);
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        leaves.extend(work()?);
        for other in others {
            leaves.extend(other.join().expect("hashing does not panic")?);
        }
        io::Result::Ok(())
    })?;
    leaves.sort_unstable_by_key(|(index, _)| *index);
    let leaves: Vec<ChainingValue> = leaves.into_iter().map(|(_, value)| value).collect();
    let left = left_subtree_len(len);
    let (a, b) = leaves.split_at((left / segment) as usize);
    let root = merge_subtrees_root(
        &branch(a, left, segment),
        &branch(b, len - left, segment),
        Mode::Hash,
    );
    Ok(Digest(root.into()))
}

/// The value of the tree over these segments, `len` bytes in all.
fn branch(leaves: &[ChainingValue], len: u64, segment: u64) -> ChainingValue {
    if let [leaf] = leaves {
        return *leaf;
    }
    let left = left_subtree_len(len);
    let (a, b) = leaves.split_at((left / segment) as usize);
    merge_subtrees_non_root(
        &branch(a, left, segment),
        &branch(b, len - left, segment),
        Mode::Hash,
    )
}

/// Reads instead of mapping: a bad sector is an error here and would be a signal there.
fn update_from(
    hasher: &mut blake3::Hasher,
    file: &File,
    range: std::ops::Range<u64>,
    progress: &(dyn Fn(u64) + Sync),
) -> io::Result<()> {
    let mut at = range.start;
    let most = usize::try_from(range.end - range.start).map_or(READ, |len| len.min(READ));
    let mut buffer = vec![0; most];
    while at < range.end {
        let want = (range.end - at).min(READ as u64) as usize;
        file.read_exact_at(&mut buffer[..want], at)?;
        hasher.update(&buffer[..want]);
        at += want as u64;
        progress(want as u64);
    }
    Ok(())
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Text that is not a digest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a digest: expected 64 lowercase hexadecimal digits")]
pub struct InvalidDigest;

impl FromStr for Digest {
    type Err = InvalidDigest;

    fn from_str(text: &str) -> Result<Self, InvalidDigest> {
        // One spelling only: digests are file names.
        if text.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(InvalidDigest);
        }
        let hash = blake3::Hash::from_hex(text).map_err(|_| InvalidDigest)?;
        Ok(Self(hash.into()))
    }
}

impl serde::Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn a_file_hashed_in_segments_has_the_digest_of_its_bytes() {
        let bytes: Vec<u8> = (0..200_000_u32).map(|n| (n * 31 % 251) as u8).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        for segment in [1024, 4096, 65_536] {
            let near = |n: u64| [n - 1, n, n + 1];
            let lengths = [0, 1, 1023, 1024, 1025, 5000, 199_999, 200_000];
            for len in lengths
                .into_iter()
                .chain(near(segment))
                .chain(near(2 * segment))
                .chain(near(3 * segment))
            {
                let len = len.min(200_000);
                let heard = AtomicU64::new(0);
                let progress = |bytes| {
                    heard.fetch_add(bytes, Ordering::Relaxed);
                };
                let found = of_file_in_segments(&file, len, segment, &progress).unwrap();
                assert_eq!(
                    found,
                    Digest::of(&bytes[..len as usize]),
                    "{len} by {segment}"
                );
                assert_eq!(heard.into_inner(), len);
            }
        }
    }

    #[test]
    fn a_file_that_is_too_short_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        let error = of_file_in_segments(&file, 5000, 1024, &|_| {}).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_digest_has_one_spelling() {
        let digest = Digest::of(b"dormouse");
        assert_eq!(digest.to_string().parse(), Ok(digest));
        assert_eq!(
            digest.to_string().to_uppercase().parse::<Digest>(),
            Err(InvalidDigest)
        );
        assert_eq!("abc".parse::<Digest>(), Err(InvalidDigest));
    }
}

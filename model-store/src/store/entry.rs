//! One entry of the store: a folder with a graph, a manifest and facts.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::digest::Digest;
use super::facts::PreparedFacts;
use super::key::EntryKey;
use super::lock::is_at;
use super::manifest::{Manifest, tensor_bytes};
use super::packs::Packs;
use super::prepared::PreparedModel;
use super::record::{self, Unreadable};
use super::stamp::Stamp;

pub(super) const MANIFEST: &str = "manifest.json";
pub(super) const GRAPH: &str = "graph.onnx";
pub(super) const FACTS: &str = "facts.json";
const MANIFEST_LIMIT: u64 = 64 << 20;
const FACTS_LIMIT: u64 = 1 << 20;
/// How often it is noted that an entry was used.
const USE_INTERVAL: Duration = Duration::from_secs(60);

/// An entry's folder, held open: by this it is known even after its name leads elsewhere. Its
/// modification time is when it was last used.
#[derive(Debug)]
pub(super) struct EntryFolder {
    pub(super) path: PathBuf,
    pub(super) file: File,
}

impl EntryFolder {
    pub(super) fn open(path: PathBuf) -> io::Result<Option<Self>> {
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_DIRECTORY)
            .open(&path);
        match opened {
            Ok(file) => Ok(Some(Self { path, file })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Keeps the entry from being cleared up for as long as the folder is held; false when that
    /// has begun.
    fn hold(&self) -> io::Result<bool> {
        match self.file.try_lock_shared() {
            Ok(()) => self.is_current(),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Whether the entry's name still leads to this folder.
    pub(super) fn is_current(&self) -> io::Result<bool> {
        is_at(&self.file, &self.path)
    }

    pub(super) fn last_used(&self) -> io::Result<SystemTime> {
        self.file.metadata()?.modified()
    }

    /// Notes that the entry is in use, at most once a minute.
    pub(super) fn touch(&self) {
        let now = SystemTime::now();
        let recent = self.last_used().is_ok_and(|last| {
            now.duration_since(last)
                .is_ok_and(|since| since < USE_INTERVAL)
        });
        if !recent {
            // A store that is only read keeps no such times.
            let _ = self.file.set_modified(now);
        }
    }

    pub(super) fn manifest(&self) -> Result<Manifest, Unreadable> {
        record::read(&self.path.join(MANIFEST), MANIFEST_LIMIT).map_err(|why| of(MANIFEST, why))
    }

    pub(super) fn facts(&self) -> Result<PreparedFacts, Unreadable> {
        record::read(&self.path.join(FACTS), FACTS_LIMIT).map_err(|why| of(FACTS, why))
    }

    /// What manifest and facts look like now.
    pub(super) fn stamps(&self) -> Result<[Stamp; 2], Unreadable> {
        let stamp = |name: &str| {
            let metadata = self.path.join(name).symlink_metadata();
            match metadata {
                Ok(metadata) => Ok(Stamp::of(&metadata)),
                Err(error) => Err(of(name, error.into())),
            }
        };
        Ok([stamp(MANIFEST)?, stamp(FACTS)?])
    }

    pub(super) fn bytes_on_disk(&self) -> u64 {
        [MANIFEST, GRAPH, FACTS]
            .iter()
            .filter_map(|name| self.path.join(name).symlink_metadata().ok())
            .map(|metadata| metadata.len())
            .sum()
    }
}

/// Why an entry cannot be used.
#[derive(Debug)]
pub(super) enum Broken {
    Entry(String),
    /// The pack, what its file looked like, and what is wrong.
    Pack(Digest, Option<Stamp>, String),
    Io(io::Error),
}

impl From<Unreadable> for Broken {
    fn from(why: Unreadable) -> Self {
        match why {
            Unreadable::Damaged(reason) => Self::Entry(reason),
            Unreadable::Io(error) => Self::Io(error),
        }
    }
}

/// Reads an entry whole and maps its packs; none when it is being cleared up.
pub(super) fn load(
    folder: &Arc<EntryFolder>,
    key: EntryKey,
    packs: &Packs,
) -> Result<Option<Arc<PreparedModel>>, Broken> {
    if !folder.hold().map_err(Broken::Io)? {
        return Ok(None);
    }
    let model = read(folder, key, packs)?;
    folder.touch();
    Ok(Some(Arc::new(model)))
}

fn read(folder: &Arc<EntryFolder>, key: EntryKey, packs: &Packs) -> Result<PreparedModel, Broken> {
    let manifest = folder.manifest()?;
    check_weights(&manifest).map_err(Broken::Entry)?;
    let graph = read_graph(folder, &manifest)?;
    let facts = folder.facts()?;
    let mut opened = Vec::with_capacity(manifest.packs.len());
    for part in &manifest.packs {
        let before = packs.stamp(&part.digest);
        match packs.open(&part.digest, Some(part.bytes)) {
            Ok(pack) => opened.push(pack),
            Err(Unreadable::Damaged(reason)) => {
                return Err(Broken::Pack(part.digest, before, reason));
            }
            Err(Unreadable::Io(error)) => return Err(Broken::Io(error)),
        }
    }
    let model = PreparedModel {
        key,
        graph: graph.into(),
        weights: manifest.weights,
        packs: opened,
        facts,
        folder: folder.clone(),
    };
    model.advise();
    Ok(model)
}

pub(super) fn read_graph(folder: &EntryFolder, manifest: &Manifest) -> Result<Vec<u8>, Unreadable> {
    let path = folder.path.join(GRAPH);
    let graph = record::read_bytes(&path, manifest.graph.bytes).map_err(|why| of(GRAPH, why))?;
    if Digest::of(&graph) != manifest.graph.digest {
        let reason = "does not have the digest its manifest says";
        return Err(of(GRAPH, Unreadable::damaged(reason)));
    }
    Ok(graph)
}

/// Makes ranges, types and shapes facts.
pub(super) fn check_weights(manifest: &Manifest) -> Result<(), String> {
    for weight in &manifest.weights {
        let wrong = |what: &str| format!("weight '{}' {what}", weight.name);
        let pack = manifest
            .packs
            .get(weight.pack)
            .ok_or_else(|| wrong("is in no pack"))?;
        if weight
            .offset
            .checked_add(weight.len)
            .is_none_or(|end| end > pack.bytes)
        {
            return Err(wrong("lies outside its pack"));
        }
        let bytes = tensor_bytes(weight.element_type, &weight.dims).map_err(|why| wrong(&why))?;
        if bytes.is_some_and(|bytes| bytes != weight.len) {
            return Err(wrong("has not the size of its shape"));
        }
    }
    Ok(())
}

fn of(name: &str, why: Unreadable) -> Unreadable {
    match why {
        Unreadable::Damaged(reason) => Unreadable::Damaged(format!("{name} {reason}")),
        io => io,
    }
}

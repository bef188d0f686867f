//! Where the units of a repository's models get their bytes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use dormouse_model_store::repository::{
    FileIdentity, FileStamp, GraphFile, ModelDir, RemoteFile, RepositoryError, WholeFacts,
};
use dormouse_model_store::store::{Digest, DigestCache};

use crate::engine::{GraphBytes, ModelBytes};
use crate::error::ServeError;
use crate::preparation::SourceDigests;
use crate::remote::RemoteRepository;
use crate::timeline::{LoadStage, TimelineRecorder};
use crate::unit::{Source, SourceModel};

/// A warm-up file larger than this is a mistake.
const MAX_WARMUP_FILE: u64 = 1 << 30;

/// A unit's bytes, read from its folder in the repository.
#[derive(Debug)]
pub(super) struct RepositorySource {
    /// What fetches the files if they are elsewhere.
    pub(super) remote: Option<Arc<RemoteRepository>>,
    pub(super) dir: Arc<ModelDir>,
    pub(super) version: u64,
    pub(super) filename: String,
    /// The safetensors file that the configuration names.
    pub(super) weights: Option<String>,
    /// The version's files as they were when their model was read.
    pub(super) files: Vec<FileStamp>,
    /// What a load reads; known once it was looked for.
    pub(super) reads: OnceLock<Reads>,
    /// Of the graph, if it was found to be a file that the engine can read itself.
    pub(super) whole: Option<WholeFacts>,
}

/// What a load reads of a version's folder.
#[derive(Debug)]
pub(super) struct Reads {
    /// Its files, as the graph calls them.
    locations: Vec<String>,
    bytes: u64,
}

impl Reads {
    /// What a load of a graph reads that is one file.
    pub(super) fn only(whole: &WholeFacts) -> Self {
        Self {
            locations: vec![whole.location.clone()],
            bytes: whole.identity.size,
        }
    }
}

impl RepositorySource {
    fn open(&self) -> Result<GraphFile, ServeError> {
        self.dir
            .open_graph(self.version, &self.filename)
            .map(|graph| graph.with_weights(self.weights.as_deref()))
            .map_err(|error| self.unreadable(&error))
    }

    fn unreadable(&self, error: &dyn std::fmt::Display) -> ServeError {
        ServeError::unavailable(format!("version {} cannot be read: {error}", self.version))
    }

    /// The files that a load reads. Whoever changes one of them gets a unit of its own, so they
    /// are looked for once.
    fn locations(&self, graph: &GraphFile) -> Result<&[String], RepositoryError> {
        if let Some(reads) = self.reads.get() {
            return Ok(&reads.locations);
        }
        let manifest = graph.examine()?.manifest;
        let reads = Reads {
            bytes: manifest.plan().bytes_read,
            locations: manifest
                .files
                .into_iter()
                .map(|file| file.location)
                .collect(),
        };
        Ok(&self.reads.get_or_init(|| reads).locations)
    }

    /// Whether the files are those that the unit was made for, and this graph among them: two
    /// states that take turns would pass for one that never changed.
    fn is_current_with(&self, graph: &FileIdentity) -> bool {
        let path = format!("{}/{}", self.version, self.filename);
        let listed = self.files.iter().find(|file| file.path == path);
        listed.is_none_or(|file| file.is(graph)) && self.is_current()
    }

    /// Calls `digest` with the name and the file of each of the files that a load reads.
    fn each_digest(
        &self,
        mut digest: impl FnMut(&Path, &std::fs::File) -> Result<Option<Digest>, ServeError>,
    ) -> Result<Option<SourceDigests>, ServeError> {
        // What serves is changed by a reload or the next wake, not by what is found in the store.
        if !self.is_current() {
            return Err(self.unreadable(&"its files were changed since they were looked at"));
        }
        let graph = self.open()?;
        let mut digests = Vec::new();
        let locations = self.locations(&graph);
        for location in locations.map_err(|error| self.unreadable(&error))? {
            let opened = graph.open_listed(location);
            let opened = opened.map_err(|error| self.unreadable(&error))?;
            let Some(file) = opened.as_file() else {
                return Ok(None);
            };
            match digest(Path::new(opened.path()), file)? {
                None => return Ok(None),
                Some(digest) => digests.push((location.clone(), digest)),
            }
        }
        Ok(Some(digests))
    }
}

impl Source for RepositorySource {
    fn is_remote(&self) -> bool {
        self.remote.is_some()
    }

    fn fetch(&self, recorder: &TimelineRecorder) -> Result<(), ServeError> {
        let (Some(remote), Some(files)) = (&self.remote, self.dir.remote_files()) else {
            return Ok(());
        };
        let name = self.dir.name();
        // What describing the model for this load has brought.
        if let Some(span) = remote.take_fetched(name) {
            recorder.preceded_by(LoadStage::Fetch, span.start, span.end, span.bytes);
        }
        if remote.has_all(in_version(files, self.version).map(|(_, file)| file)) {
            return Ok(());
        }
        let stage = recorder.stage(LoadStage::Fetch);
        let graph = self.open()?;
        let locations = self.locations(&graph);
        for location in locations.map_err(|error| self.unreadable(&error))? {
            let opened = graph.open_listed(location);
            opened.map_err(|error| self.unreadable(&error))?;
        }
        if let Some(span) = remote.take_fetched(name) {
            stage.bytes(span.bytes);
        }
        Ok(())
    }

    fn read(&self) -> Result<SourceModel, ServeError> {
        let graph = self.open()?;
        let identity = graph.identity();
        let whole = graph.load_from_file(self.whole.as_ref());
        if let Some(whole) = whole.map_err(|error| self.unreadable(&error))? {
            return Ok(SourceModel {
                bytes: ModelBytes {
                    graph: GraphBytes::File(whole.file),
                    external: Vec::new(),
                },
                size: self.size(),
                operators: whole.operators,
                files: vec![identity],
                is_current: self.is_current_with(&identity),
                file: Some(graph),
            });
        }
        let loaded = graph.load().map_err(|error| self.unreadable(&error))?;
        Ok(SourceModel {
            size: loaded.bytes,
            bytes: ModelBytes::in_memory(loaded.graph, loaded.external),
            operators: loaded.summary.operators,
            files: loaded.files,
            is_current: self.is_current_with(&identity),
            file: None,
        })
    }

    fn size(&self) -> u64 {
        if let Some(reads) = self.reads.get() {
            return reads.bytes;
        }
        // Until the graph was looked at, everything in its folder may belong to it.
        let sizes = self.files.iter().map(|file| file.size);
        sizes.fold(0, u64::saturating_add)
    }

    fn is_current(&self) -> bool {
        let found = self.dir.latest();
        let found = found.and_then(|dir| dir.fingerprint(None, self.version));
        found.is_ok_and(|found| version_files(&found.files, self.version).eq(&self.files))
    }

    fn known_digests(&self, known: &DigestCache) -> Result<Option<SourceDigests>, ServeError> {
        self.each_digest(|path, file| Ok(known.known(path, file)))
    }

    fn digests(
        &self,
        known: &DigestCache,
        read: Option<&[FileIdentity]>,
    ) -> Result<SourceDigests, ServeError> {
        let digests = self.each_digest(|path, file| {
            // Two states that take turns would pass for one that never changed.
            let metadata = file.metadata().map_err(|error| self.unreadable(&error))?;
            let identity = FileIdentity::of(&metadata);
            if read.is_some_and(|read| !read.contains(&identity)) {
                return Err(self.unreadable(&"its files were changed while they were read"));
            }
            let digest = known.digest(path, file);
            digest.map(Some).map_err(|error| self.unreadable(&error))
        })?;
        digests.ok_or_else(|| {
            ServeError::unsupported("a model that was handed over in memory has no files to digest")
        })
    }

    fn settles_in(&self) -> Duration {
        let mut longest = Duration::ZERO;
        // What cannot be looked at is told by whoever reads it.
        let _ = self.each_digest(|_, file| {
            longest = longest.max(DigestCache::settles_in(file));
            Ok(Some(Digest::of(&[])))
        });
        longest
    }

    fn initial_state_file(&self, name: &str) -> Result<Vec<u8>, ServeError> {
        self.dir
            .read_file(&format!("initial_state/{name}"), MAX_WARMUP_FILE)
            .map_err(|error| {
                ServeError::unavailable(format!(
                    "initial state file '{name}' cannot be read: {error}"
                ))
            })
    }

    fn warmup_file(&self, name: &str) -> Result<Vec<u8>, ServeError> {
        self.dir
            .read_file(&format!("warmup/{name}"), MAX_WARMUP_FILE)
            .map_err(|error| {
                ServeError::unavailable(format!("warm-up file '{name}' cannot be read: {error}"))
            })
    }
}

/// Those of a fingerprint's files that are in the version's folder, and not its configuration.
pub(super) fn version_files(files: &[FileStamp], version: u64) -> impl Iterator<Item = &FileStamp> {
    let folder = format!("{version}/");
    let files = files.iter();
    files.filter(move |file| file.path.starts_with(&folder))
}

/// The files in a version's folder.
pub(super) fn in_version(
    files: &BTreeMap<String, RemoteFile>,
    version: u64,
) -> impl Iterator<Item = (&String, &RemoteFile)> {
    let folder = format!("{version}/");
    let below = files.range(folder.clone()..);
    below.take_while(move |(path, _)| path.starts_with(&folder))
}

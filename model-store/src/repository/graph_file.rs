//! A version's graph and the files it refers to: checked, then read once.

use std::collections::BTreeMap;
use std::fs::File;
use std::time::SystemTime;

use super::RepositoryError;
use super::folder::{FileIdentity, Folder, OpenFile};
use super::weights::{self, Bound};
use crate::graph::{ExternalData, GraphSummary, OperatorFacts};
use crate::manifest::{FileRole, Manifest, Parts};
use crate::names::plain;
use crate::onnx::{GraphError, MAX_FILE_BYTES, ReadAt, Walked, summarize, walk};
use crate::store::DigestCache;

/// A graph's file, open.
#[derive(Debug)]
pub struct GraphFile {
    folder: Folder,
    name: String,
    file: OpenFile,
    weights: Option<String>,
}

/// A graph and the data it refers to, in memory.
#[derive(Debug)]
pub struct LoadedGraph {
    /// The file's bytes; where tensors of safetensors files are its weights, changed so that it
    /// refers to them as to any other data outside of it.
    pub graph: Vec<u8>,
    /// Whole files by the location the graph gives them, in order of location.
    pub external: Vec<(String, Vec<u8>)>,
    /// All of it together.
    pub bytes: u64,
    /// Which files were read, or led to those that were.
    pub files: Vec<FileIdentity>,
    /// What these very bytes say about themselves.
    pub summary: GraphSummary,
}

/// All that is known about a version before it is loaded.
#[derive(Debug)]
pub struct Examined {
    pub summary: GraphSummary,
    pub manifest: Manifest,
}

/// A graph that lies in one file with all of its weights.
#[derive(Debug)]
pub struct WholeFile {
    pub file: File,
    pub operators: OperatorFacts,
}

/// What is known of a file that is all there is of a graph, as long as it stays that file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WholeFacts {
    /// What a manifest calls the file.
    pub location: String,
    pub identity: FileIdentity,
    pub operators: OperatorFacts,
}

/// Files smaller than this are read into memory.
const WORTH_NOT_COPYING: u64 = 256 << 10;

impl GraphFile {
    pub(super) fn open(folder: Folder, name: &str) -> Result<Self, RepositoryError> {
        let file = folder.file(name)?;
        Ok(Self {
            folder,
            name: name.to_owned(),
            file,
            weights: None,
        })
    }

    /// Takes weights from a safetensors file (or the index of several) beside the graph. Without
    /// this, what the graph refers to is found all the same, and a `model.safetensors` all of
    /// whose tensors are inputs of the graph is used.
    pub fn with_weights(mut self, location: Option<&str>) -> Self {
        self.weights = location.map(str::to_owned);
        self
    }

    /// The file's path relative to the repository.
    pub fn path(&self) -> &str {
        &self.file.path
    }

    /// Which file the graph is.
    pub fn identity(&self) -> FileIdentity {
        self.file.identity
    }

    /// Reads what the graph says about itself; its weights stay unread.
    pub fn summary(&self) -> Result<GraphSummary, RepositoryError> {
        Ok(self.describe()?.0)
    }

    /// As [`GraphFile::summary`], with what [`GraphFile::load_from_file`] would look for again. A
    /// file that was written just now may be written once more without its times telling, so of
    /// that nothing is remembered.
    pub fn describe(&self) -> Result<(GraphSummary, Option<WholeFacts>), RepositoryError> {
        self.describe_at(SystemTime::now())
    }

    pub(super) fn describe_at(
        &self,
        now: SystemTime,
    ) -> Result<(GraphSummary, Option<WholeFacts>), RepositoryError> {
        let on_disk = self.file.as_file();
        let is_settled = on_disk.is_some_and(|file| DigestCache::is_settled(file, now));
        let (walked, bound) = self.walk()?;
        let summary = walked.finish();
        let is_whole = bound.rewrite.is_empty() && summary.external.is_empty();
        let facts = WholeFacts {
            location: self.name.clone(),
            identity: self.file.identity,
            operators: summary.operators,
        };
        Ok((summary, (is_settled && is_whole).then_some(facts)))
    }

    /// Reads what the graph says about itself and lists its files and tensors; weights stay unread.
    pub fn examine(&self) -> Result<Examined, RepositoryError> {
        let (walked, bound) = self.walk()?;
        let opened = self.open_data(&walked.summary.external, bound.files)?;
        let mut parts = Parts::new(&self.name, &self.file);
        for (location, role, file) in &opened {
            parts.add(location, *role, file);
        }
        let manifest = parts.build(&walked, &bound.rewrite);
        Ok(Examined {
            summary: walked.finish(),
            manifest,
        })
    }

    /// The graph for whoever reads the file itself: only where the file is all there is, and large
    /// enough that a copy of it in memory would cost something. What is told of it holds as long
    /// as [`OpenFile::unchanged`] says so. A file that is `known` is not looked through again.
    pub fn load_from_file(
        &self,
        known: Option<&WholeFacts>,
    ) -> Result<Option<WholeFile>, RepositoryError> {
        let size = self.file.identity.size;
        let Some(file) = self.file.as_file().filter(|_| size >= WORTH_NOT_COPYING) else {
            return Ok(None);
        };
        if size > MAX_FILE_BYTES {
            return Err(self.refused(GraphError::FileTooLarge { bytes: size }));
        }
        let known = known.filter(|known| known.identity == self.file.identity);
        let operators = match known {
            Some(known) => known.operators,
            None => {
                let (walked, bound) = self.walk()?;
                let summary = walked.finish();
                if !bound.rewrite.is_empty() || !summary.external.is_empty() {
                    return Ok(None);
                }
                summary.operators
            }
        };
        let file = file.try_clone().map_err(|cause| self.file.failed(cause))?;
        Ok(Some(WholeFile { file, operators }))
    }

    /// Fails when the graph's file is no longer what it was when it was opened.
    pub fn unchanged(&self) -> Result<(), RepositoryError> {
        self.file.unchanged()
    }

    /// Reads the graph and every file it refers to.
    pub fn load(&self) -> Result<LoadedGraph, RepositoryError> {
        let size = self.file.identity.size;
        if size > MAX_FILE_BYTES {
            return Err(self.refused(GraphError::FileTooLarge { bytes: size }));
        }
        let mut graph = self.file.read()?;
        // From the bytes the engine will get, not from a file that may be another by now.
        let mut walked = walk(&graph.as_slice()).map_err(|cause| self.refused(cause))?;
        let bound = self.bind(&mut walked)?;
        let summary = if bound.rewrite.is_empty() {
            walked.finish()
        } else {
            let warnings = walked.summary.warnings;
            let rewritten = bound.rewrite.apply(&graph.as_slice());
            graph = rewritten.map_err(|cause| self.refused(cause))?;
            let summary = summarize(&graph.as_slice()).map_err(|cause| self.refused(cause))?;
            GraphSummary {
                warnings,
                ..summary
            }
        };
        let mut bytes = size;
        let mut external = Vec::new();
        let opened = self.open_data(&summary.external, bound.files)?;
        for (location, role, file) in &opened {
            if role.is_data() {
                bytes = bytes.saturating_add(file.identity.size);
                external.push((location.clone(), file.read()?));
            }
        }
        // A model replaced in the meantime could be half old and half new.
        self.still_there(&self.name, &self.file)?;
        for (location, _, file) in &opened {
            self.still_there(&plain(location), file)?;
        }
        let opened = opened.iter().map(|(_, _, file)| file.identity);
        Ok(LoadedGraph {
            graph,
            external,
            bytes,
            files: std::iter::once(self.file.identity).chain(opened).collect(),
            summary,
        })
    }

    /// Opens a file of the manifest of this graph, to compute its digest or read from it.
    pub fn open_listed(&self, location: &str) -> Result<OpenFile, RepositoryError> {
        match plain(location) {
            location if location == self.name => self.folder.file(&location),
            location => self.folder.data_file(&location),
        }
    }

    fn walk(&self) -> Result<(Walked, Bound), RepositoryError> {
        let walked = walk(&self.file);
        // A file that changed under the reader explains any error better than the error does.
        self.file.unchanged()?;
        let mut walked = walked.map_err(|cause| self.refused(cause))?;
        let bound = self.bind(&mut walked)?;
        Ok((walked, bound))
    }

    fn bind(&self, walked: &mut Walked) -> Result<Bound, RepositoryError> {
        weights::bind(&self.folder, &self.file, self.weights.as_deref(), walked)
    }

    /// Opens what the graph refers to, in order of location, and what else was bound; files that
    /// are open already stay the same.
    fn open_data(
        &self,
        references: &[ExternalData],
        bound: Vec<weights::BoundFile>,
    ) -> Result<Vec<(String, FileRole, OpenFile)>, RepositoryError> {
        let mut bound: BTreeMap<String, weights::BoundFile> = bound
            .into_iter()
            .map(|file| (file.location.clone(), file))
            .collect();
        let mut opened = Vec::new();
        for (location, references) in by_location(references) {
            let (role, file) = match bound.remove(&plain(&location)) {
                Some(known) => (known.role, known.file),
                None => (
                    FileRole::ExternalData,
                    self.folder.data_file(&plain(&location))?,
                ),
            };
            check_references(&file, &references)?;
            opened.push((location, role, file));
        }
        // What remains led to the files but is no data itself.
        let others = bound.into_values();
        opened.extend(others.map(|file| (file.location, file.role, file.file)));
        Ok(opened)
    }

    fn still_there(&self, name: &str, file: &OpenFile) -> Result<(), RepositoryError> {
        let now = self.folder.file(name)?;
        match now.identity == file.identity {
            true => Ok(()),
            false => Err(file.changed()),
        }
    }

    fn refused(&self, cause: GraphError) -> RepositoryError {
        RepositoryError::Graph {
            path: self.file.path.clone(),
            cause,
        }
    }
}

fn check_references(file: &OpenFile, references: &[&ExternalData]) -> Result<(), RepositoryError> {
    let size = file.size();
    for reference in references {
        let end = match reference.length {
            Some(length) => reference.offset.checked_add(length),
            None => Some(reference.offset),
        };
        if end.is_none_or(|end| end > size) {
            return Err(RepositoryError::ExternalDataTooShort {
                path: file.path.clone(),
                size,
                offset: reference.offset,
                end: end.unwrap_or(u64::MAX),
            });
        }
    }
    Ok(())
}

fn by_location(external: &[ExternalData]) -> BTreeMap<String, Vec<&ExternalData>> {
    let mut files: BTreeMap<String, Vec<&ExternalData>> = BTreeMap::new();
    for reference in external {
        files
            .entry(reference.location.clone())
            .or_default()
            .push(reference);
    }
    files
}

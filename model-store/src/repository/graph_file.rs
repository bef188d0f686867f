//! A version's graph and the files it refers to: checked, then read once.

use std::collections::BTreeMap;

use super::RepositoryError;
use super::folder::{Folder, OpenFile};
use crate::graph::{ExternalData, GraphSummary};
use crate::onnx::{GraphError, MAX_FILE_BYTES, summarize};

/// A graph's file, open.
#[derive(Debug)]
pub struct GraphFile {
    folder: Folder,
    name: String,
    file: OpenFile,
}

/// A graph and the data it refers to, in memory.
#[derive(Debug)]
pub struct LoadedGraph {
    pub graph: Vec<u8>,
    /// Whole files by the location the graph gives them, in order of location.
    pub external: Vec<(String, Vec<u8>)>,
    /// All of it together.
    pub bytes: u64,
    /// What these very bytes say about themselves.
    pub summary: GraphSummary,
}

impl GraphFile {
    pub(super) fn open(folder: Folder, name: &str) -> Result<Self, RepositoryError> {
        let file = folder.file(name)?;
        Ok(Self {
            folder,
            name: name.to_owned(),
            file,
        })
    }

    /// The file's path relative to the repository.
    pub fn path(&self) -> &str {
        &self.file.path
    }

    /// Reads what the graph says about itself; its weights stay unread.
    pub fn summary(&self) -> Result<GraphSummary, RepositoryError> {
        let summary = summarize(&self.file);
        // A file that changed under the reader explains any error better than the error does.
        self.file.unchanged()?;
        summary.map_err(|cause| self.refused(cause))
    }

    /// The bytes that [`GraphFile::load`] would read, with every check but that of their content.
    pub fn load_bytes(&self) -> Result<u64, RepositoryError> {
        let summary = self.summary()?;
        let mut bytes = self.file.identity.size;
        for (location, references) in by_location(&summary.external) {
            let size = self.open_external(&location, &references)?.identity.size;
            bytes = bytes.saturating_add(size);
        }
        Ok(bytes)
    }

    /// Reads the graph and every file it refers to.
    pub fn load(&self) -> Result<LoadedGraph, RepositoryError> {
        let size = self.file.identity.size;
        if size > MAX_FILE_BYTES {
            return Err(self.refused(GraphError::FileTooLarge { bytes: size }));
        }
        let graph = self.file.read()?;
        // From the bytes the engine will get, not from a file that may be another by now.
        let summary = summarize(&graph.as_slice()).map_err(|cause| self.refused(cause))?;
        let mut bytes = size;
        let mut external = Vec::new();
        let mut opened = Vec::new();
        for (location, references) in by_location(&summary.external) {
            let file = self.open_external(&location, &references)?;
            bytes = bytes.saturating_add(file.identity.size);
            external.push((location.clone(), file.read()?));
            opened.push((location, file));
        }
        // A model replaced in the meantime could be half old and half new.
        self.still_there(&self.name, &self.file)?;
        for (location, file) in &opened {
            self.still_there(&plain(location), file)?;
        }
        Ok(LoadedGraph {
            graph,
            external,
            bytes,
            summary,
        })
    }

    fn open_external(
        &self,
        location: &str,
        references: &[&ExternalData],
    ) -> Result<OpenFile, RepositoryError> {
        let file = self.folder.file(&plain(location))?;
        if file.links != 1 {
            return Err(RepositoryError::HardLinked {
                links: file.links,
                path: file.path,
            });
        }
        let size = file.identity.size;
        for reference in references {
            let end = match reference.length {
                Some(length) => reference.offset.checked_add(length),
                None => Some(reference.offset),
            };
            if end.is_none_or(|end| end > size) {
                return Err(RepositoryError::ExternalDataTooShort {
                    path: file.path,
                    size,
                    offset: reference.offset,
                    end: end.unwrap_or(u64::MAX),
                });
            }
        }
        Ok(file)
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

/// A checked location without its `.` parts.
fn plain(location: &str) -> String {
    let parts: Vec<&str> = location.split('/').filter(|&part| part != ".").collect();
    parts.join("/")
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

//! Weights in safetensors files beside a graph: which files count, and what they change.

use super::RepositoryError;
use super::folder::{EntryKind, Folder, OpenFile};
use crate::manifest::FileRole;
use crate::names::{check_relative_path, plain};
use crate::onnx::{Rewrite, SiteData, Walked, shown};
use crate::safetensors::bind::{self, Contents, WeightsError};
use crate::safetensors::index::{Index, MAX_INDEX_BYTES, MAX_SHARDS};
use crate::safetensors::read_header;

/// What is looked at when a configuration names nothing.
const USUAL: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];
const FILE: &str = ".safetensors";
const INDEX: &str = ".safetensors.index.json";

/// A file that was opened to bind weights, still open.
#[derive(Debug)]
pub(super) struct BoundFile {
    /// Relative to the graph's folder.
    pub(super) location: String,
    pub(super) role: FileRole,
    pub(super) file: OpenFile,
}

/// A graph's weights that lie in safetensors files.
#[derive(Debug, Default)]
pub(super) struct Bound {
    /// Those with tensors that are used, and the index that led to them.
    pub(super) files: Vec<BoundFile>,
    /// What turns them into data that the graph refers to.
    pub(super) rewrite: Rewrite,
}

/// Finds the weights that a graph's configuration (`named`), its references or its inputs ask for,
/// and changes what was found in the file accordingly.
pub(super) fn bind(
    folder: &Folder,
    graph: &OpenFile,
    named: Option<&str>,
    walked: &mut Walked,
) -> Result<Bound, RepositoryError> {
    let refused = |cause| RepositoryError::Weights {
        path: graph.path.clone(),
        cause,
    };
    let mut open = Opened {
        folder,
        graph,
        files: Vec::new(),
        contents: Vec::new(),
        index: None,
    };
    let mut rewrite = Rewrite::default();
    let referred = referred_files(walked);
    if referred.len() > MAX_SHARDS {
        return Err(refused(WeightsError::TooManyFiles {
            file: shown(graph.path.as_bytes()),
            limit: MAX_SHARDS,
        }));
    }
    for location in referred {
        open.open(&location)?;
    }
    bind::resolve_references(walked, &mut open.contents, &mut rewrite).map_err(refused)?;
    if let Some(name) = named {
        open.choose(name)?;
    } else if let Some(name) = usual(folder, walked) {
        let known = open.contents.len();
        let objection = match open.choose(name) {
            Ok(()) => bind::objection(walked, &open.contents),
            // What may be gone the next moment must not decide what the model's inputs are.
            Err(error @ (RepositoryError::Io { .. } | RepositoryError::Changed { .. })) => {
                return Err(error);
            }
            // Nobody asked for the file, so that its faults must not stop the model.
            Err(error) => Some(error.to_string()),
        };
        if let Some(objection) = objection {
            open.forget_choice(known);
            walked.summary.warnings.push(format!(
                "{} beside the graph is not used: {objection}; the parameter 'dormouse.weights' \
                 can say that it is meant",
                shown(name.as_bytes())
            ));
        }
    }
    bind::give_inputs(walked, &mut open.contents, &mut rewrite).map_err(refused)?;
    if let Some(name) = named {
        bind::something_used(&open.contents, name).map_err(refused)?;
    }
    walked
        .summary
        .warnings
        .extend(bind::leftovers(&open.contents));
    Ok(Bound {
        files: open.used_files(),
        rewrite,
    })
}

/// Safetensors files that the graph refers to without a place in them.
fn referred_files(walked: &Walked) -> Vec<String> {
    let mut files: Vec<String> = walked
        .tensors
        .iter()
        .filter_map(|site| match site.data {
            SiteData::ByName(index) => Some(plain(&walked.summary.external[index].location)),
            _ => None,
        })
        .collect();
    files.sort_unstable();
    files.dedup();
    files
}

/// The file of the usual name, if there is one that could hold inputs of the graph.
fn usual(folder: &Folder, walked: &Walked) -> Option<&'static str> {
    let is_file = |name: &&str| matches!(folder.kind(name), Ok(Some(EntryKind::File)));
    let looks = !walked.summary.inputs.is_empty();
    USUAL.into_iter().filter(|_| looks).find(is_file)
}

/// Safetensors files opened so far.
struct Opened<'a> {
    folder: &'a Folder,
    graph: &'a OpenFile,
    /// One for each of `contents`.
    files: Vec<BoundFile>,
    contents: Vec<Contents>,
    index: Option<BoundFile>,
}

impl Opened<'_> {
    /// Reads a file's header, unless that is done; returns its index.
    fn open(&mut self, location: &str) -> Result<usize, RepositoryError> {
        let known = self
            .contents
            .iter()
            .position(|file| file.location == location);
        if let Some(at) = known {
            return Ok(at);
        }
        let file = self.folder.data_file(location)?;
        let header = read_header(&file);
        file.unchanged()?;
        let tensors = header.map_err(|cause| RepositoryError::Safetensors {
            path: file.path.clone(),
            cause,
        })?;
        self.contents
            .push(Contents::new(location.to_owned(), tensors));
        self.files.push(BoundFile {
            location: location.to_owned(),
            role: FileRole::Safetensors,
            file,
        });
        Ok(self.contents.len() - 1)
    }

    /// Takes a file, or the files of an index, as those whose tensors may be inputs.
    fn choose(&mut self, name: &str) -> Result<(), RepositoryError> {
        let file = || shown(name.as_bytes());
        if let Err(cause) = check_relative_path(name) {
            return Err(self.refused(WeightsError::Path {
                file: file(),
                cause,
            }));
        }
        if !(name.ends_with(FILE) || name.ends_with(INDEX)) {
            return Err(self.refused(WeightsError::NotSafetensors { file: file() }));
        }
        if name.ends_with(FILE) {
            let at = self.open(name)?;
            self.contents[at].chosen = true;
            return Ok(());
        }
        let file = self.folder.data_file(name)?;
        if file.identity.size > MAX_INDEX_BYTES {
            return Err(RepositoryError::TooLarge {
                size: file.identity.size,
                path: file.path,
                limit: MAX_INDEX_BYTES,
            });
        }
        let bytes = file.read()?;
        let index = Index::parse(name, &bytes).map_err(|cause| self.refused(cause))?;
        for shard in index.files() {
            let at = self.open(shard)?;
            self.contents[at].chosen = true;
        }
        let checked =
            bind::no_name_twice(&self.contents).and_then(|()| index.check(&self.contents));
        checked.map_err(|cause| self.refused(cause))?;
        self.index = Some(BoundFile {
            location: name.to_owned(),
            role: FileRole::SafetensorsIndex,
            file,
        });
        Ok(())
    }

    /// Takes a choice back; the first `known` files were there before it.
    fn forget_choice(&mut self, known: usize) {
        self.files.truncate(known);
        self.contents.truncate(known);
        self.contents
            .iter_mut()
            .for_each(|file| file.chosen = false);
        self.index = None;
    }

    fn used_files(self) -> Vec<BoundFile> {
        let files = self.files.into_iter().zip(self.contents);
        let used = files.filter(|(_, contents)| contents.is_used());
        self.index
            .into_iter()
            .chain(used.map(|(file, _)| file))
            .collect()
    }

    fn refused(&self, cause: WeightsError) -> RepositoryError {
        RepositoryError::Weights {
            path: self.graph.path.clone(),
            cause,
        }
    }
}

#[cfg(test)]
mod tests;

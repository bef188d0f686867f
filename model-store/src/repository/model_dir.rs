//! One model's folder.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;

use super::fingerprint::{self, Fingerprint};
use super::folder::{EntryKind, Folder, MemoryFile};
use super::graph_file::GraphFile;
use super::remote::{self, RemoteFile, RemoteFolder};
use super::tree::Tree;
use super::{Dir, RepositoryError};
use crate::names::{check_name, check_relative_path, check_version_folder};

/// The largest configuration file.
pub const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// The graph inside a folder that stands in for the model file.
const GRAPH_IN_FOLDER: &str = "model.onnx";

/// A model's folder, held open.
#[derive(Clone, Debug)]
pub struct ModelDir {
    name: Arc<str>,
    folder: Folder,
}

impl ModelDir {
    pub(super) fn on_disk(name: &str, dir: Dir) -> Self {
        Self {
            name: Arc::from(name),
            folder: Folder::Disk(Arc::new(dir)),
        }
    }

    /// A model whose files are given in memory, by their paths relative to the model's folder.
    pub fn in_memory(name: &str, files: BTreeMap<String, Bytes>) -> Result<Self, RepositoryError> {
        check(name, "model name", check_name(name))?;
        for path in files.keys() {
            check(path, "path", check_relative_path(path))?;
        }
        let name: Arc<str> = Arc::from(name);
        let files = files.into_iter();
        let files = files.map(|(path, bytes)| (path, MemoryFile::new(bytes)));
        Ok(Self {
            name: name.clone(),
            folder: Folder::Memory(Tree::new(name, Arc::new(files.collect()))),
        })
    }

    pub(super) fn elsewhere(name: Arc<str>, folder: RemoteFolder) -> Self {
        Self {
            name,
            folder: Folder::Elsewhere(folder),
        }
    }

    /// The folder as it is now: one on disk always is, of one that is elsewhere the last listing
    /// tells.
    pub fn latest(&self) -> Result<Self, RepositoryError> {
        match &self.folder {
            Folder::Elsewhere(folder) => remote::model_dir(&folder.remote, &self.name),
            Folder::Disk(_) | Folder::Memory(_) => Ok(self.clone()),
        }
    }

    /// The files as their server tells of them, by their paths relative to this folder; none for
    /// a folder on this machine.
    pub fn remote_files(&self) -> Option<&BTreeMap<String, RemoteFile>> {
        match &self.folder {
            Folder::Elsewhere(folder) => Some(&folder.tree.files),
            Folder::Disk(_) | Folder::Memory(_) => None,
        }
    }

    /// The model's name.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// The versions there are folders for, sorted.
    pub fn versions(&self) -> Result<Vec<u64>, RepositoryError> {
        let mut versions: Vec<u64> = self
            .folder
            .entries()?
            .into_iter()
            .filter(|entry| entry.kind == EntryKind::Folder)
            .filter_map(|entry| check_version_folder(&entry.name))
            .collect();
        versions.sort_unstable();
        Ok(versions)
    }

    /// The configuration: `configs/<config_name>.pbtxt` if that is asked for and there, else
    /// `config.pbtxt`, else none.
    pub fn config_text(
        &self,
        config_name: Option<&str>,
    ) -> Result<Option<String>, RepositoryError> {
        let Some(path) = self.config_path(config_name)? else {
            return Ok(None);
        };
        let bytes = self.read_file(&path, MAX_CONFIG_BYTES)?;
        String::from_utf8(bytes)
            .map(Some)
            .map_err(|error| RepositoryError::NotUtf8 {
                path: self.folder.join(&path),
                offset: error.utf8_error().valid_up_to(),
            })
    }

    /// Reads a regular file of at most `limit` bytes.
    pub fn read_file(&self, relative: &str, limit: u64) -> Result<Vec<u8>, RepositoryError> {
        check(relative, "path", check_relative_path(relative))?;
        let file = self.folder.file(relative)?;
        if file.identity.size > limit {
            return Err(RepositoryError::TooLarge {
                path: file.path,
                size: file.identity.size,
                limit,
            });
        }
        file.read()
    }

    /// Opens a version's graph: a file, or a folder of that name with `model.onnx` in it.
    pub fn open_graph(
        &self,
        version: u64,
        model_filename: &str,
    ) -> Result<GraphFile, RepositoryError> {
        check(
            model_filename,
            "model file name",
            check_relative_path(model_filename),
        )?;
        let mut folder = self.folder.folder(&version.to_string())?;
        let mut file = model_filename;
        // Data outside the model file is looked for beside it.
        if let Some((parent, name)) = model_filename.rsplit_once('/') {
            folder = folder.folder(parent)?;
            file = name;
        }
        if folder.kind(file)? == Some(EntryKind::Folder) {
            folder = folder.folder(file)?;
            file = GRAPH_IN_FOLDER;
        }
        GraphFile::open(folder, file)
    }

    /// What tells one state of a version (its folder and the configuration) from another.
    pub fn fingerprint(
        &self,
        config_name: Option<&str>,
        version: u64,
    ) -> Result<Fingerprint, RepositoryError> {
        let config = self.config_path(config_name)?;
        fingerprint::of(&self.folder, config, &version.to_string())
    }

    fn config_path(&self, config_name: Option<&str>) -> Result<Option<String>, RepositoryError> {
        let named = match config_name {
            Some(name) => {
                let file = format!("{name}.pbtxt");
                check(name, "configuration name", check_name(&file))?;
                Some(format!("configs/{file}"))
            }
            None => None,
        };
        for path in named.into_iter().chain([String::from("config.pbtxt")]) {
            match self.folder.kind(&path) {
                Ok(None) | Err(RepositoryError::NotAFolder { .. }) => {}
                Ok(Some(_)) => return Ok(Some(path)),
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }
}

fn check(
    name: &str,
    what: &'static str,
    result: Result<(), crate::names::NameError>,
) -> Result<(), RepositoryError> {
    result.map_err(|cause| RepositoryError::Name {
        what,
        name: name.to_owned(),
        cause,
    })
}

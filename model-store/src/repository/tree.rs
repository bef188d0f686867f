//! Files known by their paths alone: what folders there are follows from them.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::folder::{Entry, EntryKind};

/// The files of a model whose paths start with `prefix`, which is empty or ends with a slash.
#[derive(Debug)]
pub(super) struct Tree<T> {
    pub(super) model: Arc<str>,
    pub(super) files: Arc<BTreeMap<String, T>>,
    pub(super) prefix: String,
}

impl<T> Clone for Tree<T> {
    fn clone(&self) -> Self {
        Self {
            model: Arc::clone(&self.model),
            files: Arc::clone(&self.files),
            prefix: self.prefix.clone(),
        }
    }
}

impl<T> Tree<T> {
    /// All of a model's files.
    pub(super) fn new(model: Arc<str>, files: Arc<BTreeMap<String, T>>) -> Self {
        Self {
            model,
            files,
            prefix: String::new(),
        }
    }

    pub(super) fn get(&self, relative: &str) -> Option<&T> {
        self.files.get(&format!("{}{relative}", self.prefix))
    }

    pub(super) fn kind(&self, relative: &str) -> Option<EntryKind> {
        match self.get(relative) {
            Some(_) => Some(EntryKind::File),
            None => self.below(relative).next().map(|_| EntryKind::Folder),
        }
    }

    /// The folder at a path, whether or not there is one.
    pub(super) fn folder(&self, relative: &str) -> Self {
        Self {
            prefix: format!("{}{relative}/", self.prefix),
            ..self.clone()
        }
    }

    pub(super) fn entries(&self) -> Vec<Entry> {
        let mut entries: Vec<Entry> = Vec::new();
        for path in self.below("") {
            let (name, kind) = match path.split_once('/') {
                Some((name, _)) => (name, EntryKind::Folder),
                None => (path, EntryKind::File),
            };
            if entries.last().is_none_or(|last| last.name != name) {
                entries.push(Entry {
                    name: name.to_owned(),
                    kind,
                    utf8: true,
                });
            }
        }
        entries
    }

    /// A path below this folder as messages show it.
    pub(super) fn join(&self, relative: &str) -> String {
        format!("{}/{}{relative}", self.model, self.prefix)
    }

    fn below<'a>(&'a self, relative: &'a str) -> impl Iterator<Item = &'a str> {
        let prefix = match relative {
            "" => self.prefix.clone(),
            relative => format!("{}{relative}/", self.prefix),
        };
        let found = self.files.range(prefix.clone()..);
        found.map_while(move |(path, _)| path.strip_prefix(&prefix))
    }
}

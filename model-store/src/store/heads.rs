//! What entries are to the store as a whole, read once: to add a model or to clear one, the
//! manifests of a thousand others need not be read again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use super::digest::Digest;
use super::entry::{EntryFolder, check_weights};
use super::facts::PreparedFacts;
use super::key::EntryKey;
use super::record::Unreadable;
use super::stamp::Stamp;

/// An entry as far as its place in the store matters.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) graph_bytes: u64,
    pub(super) packs: Vec<Used>,
    pub(super) facts: PreparedFacts,
}

/// A pack that an entry uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Used {
    pub(super) digest: Digest,
    pub(super) bytes: u64,
    /// Of these, what the entry's weights take.
    pub(super) used_bytes: u64,
}

/// The heads that this process has read, each as long as its files are those it was read from.
#[derive(Debug, Default)]
pub(super) struct Heads {
    known: Mutex<HashMap<EntryKey, Known>>,
}

#[derive(Debug)]
struct Known {
    /// What manifest and facts looked like.
    stamps: [Stamp; 2],
    head: Arc<Head>,
}

impl Heads {
    /// The head of an entry; files that changed a moment before `now` are read again next time,
    /// as they may change once more without telling.
    pub(super) fn of(
        &self,
        key: &EntryKey,
        folder: &EntryFolder,
        now: SystemTime,
    ) -> Result<Arc<Head>, Unreadable> {
        // Before they are read: what replaces them meanwhile looks different next time.
        let stamps = folder.stamps()?;
        if let Some(known) = self.lock().get(key)
            && known.stamps == stamps
        {
            return Ok(Arc::clone(&known.head));
        }
        let head = Arc::new(Head::read(folder)?);
        if stamps.iter().all(|stamp| stamp.is_settled(now)) {
            let head = Arc::clone(&head);
            self.lock().insert(*key, Known { stamps, head });
        }
        Ok(head)
    }

    /// Forgets all but these, which are in order.
    pub(super) fn keep(&self, keys: &[EntryKey]) {
        self.lock().retain(|key, _| keys.binary_search(key).is_ok());
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<EntryKey, Known>> {
        // What is in it is whole at every step.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Head {
    fn read(folder: &EntryFolder) -> Result<Self, Unreadable> {
        let manifest = folder.manifest()?;
        check_weights(&manifest).map_err(Unreadable::Damaged)?;
        let used = manifest.packs.iter().map(|part| Used {
            digest: part.digest,
            bytes: part.bytes,
            used_bytes: 0,
        });
        let mut packs: Vec<Used> = used.collect();
        for weight in &manifest.weights {
            let used = &mut packs[weight.pack].used_bytes;
            *used = used.saturating_add(weight.len);
        }
        Ok(Self {
            graph_bytes: manifest.graph.bytes,
            packs,
            facts: folder.facts()?,
        })
    }
}

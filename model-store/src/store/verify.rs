//! Comparing everything in the store with its digest.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Store;
use super::digest::Digest;
use super::entry::{EntryFolder, check_weights, read_graph};
use super::error::{At, StoreError};
use super::record::Unreadable;

/// What [`Store::verify`] found.
#[derive(Clone, Debug, Default)]
pub struct VerifyReport {
    pub entries: usize,
    pub packs: usize,
    pub bytes: u64,
    pub damaged: Vec<Damage>,
}

/// Something that is not what was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    pub path: PathBuf,
    pub reason: String,
    /// The names it was served under, as far as they can be read.
    pub models: Vec<String>,
}

impl Store {
    /// Compares everything with its digest; with `repair`, what is damaged is removed. `progress`
    /// hears how many bytes are done and how many there are.
    pub fn verify(
        &self,
        repair: bool,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<VerifyReport, StoreError> {
        if repair {
            self.writable()?;
        }
        let mut report = VerifyReport::default();
        let total = self.bytes_on_disk()?;
        let done = AtomicU64::new(0);
        let advance = |bytes: u64| {
            let before = done.fetch_add(bytes, Ordering::Relaxed);
            progress(before.saturating_add(bytes).min(total), total);
        };
        let damaged = self.verify_packs(repair, &advance, &mut report)?;
        self.verify_entries(repair, &damaged, &mut report)?;
        report.bytes = done.into_inner();
        progress(total, total);
        Ok(report)
    }

    fn verify_packs(
        &self,
        repair: bool,
        advance: &(dyn Fn(u64) + Sync),
        report: &mut VerifyReport,
    ) -> Result<HashMap<Digest, String>, StoreError> {
        let mut damaged = HashMap::new();
        let dir = self.packs_dir();
        for digest in self.packs().digests().at(&dir)? {
            let path = self.packs().path(&digest);
            let before = self.packs().stamp(&digest);
            match self.packs().verify(&digest, advance) {
                Ok(()) => report.packs += 1,
                // Cleared while we looked.
                Err(_) if self.packs().stamp(&digest).is_none() => {}
                Err(Unreadable::Damaged(reason)) => {
                    report.packs += 1;
                    if repair {
                        self.drop_pack(&digest, before.as_ref())?;
                    }
                    report.damaged.push(Damage {
                        path,
                        reason: reason.clone(),
                        models: Vec::new(),
                    });
                    damaged.insert(digest, reason);
                }
                Err(Unreadable::Io(error)) => return Err(StoreError::io(&path, error)),
            }
        }
        Ok(damaged)
    }

    fn verify_entries(
        &self,
        repair: bool,
        damaged: &HashMap<Digest, String>,
        report: &mut VerifyReport,
    ) -> Result<(), StoreError> {
        for key in self.keys()? {
            let path = self.entry_path(&key);
            let Some(folder) = EntryFolder::open(path.clone()).at(&path)? else {
                continue;
            };
            match self.check_entry(&folder, damaged) {
                Ok(()) => report.entries += 1,
                Err(_) if !folder.is_current().at(&path)? => {}
                Err(Unreadable::Damaged(reason)) => {
                    report.entries += 1;
                    let models = folder.facts().map_or(Vec::new(), |facts| facts.models);
                    if repair {
                        self.drop_entry(&folder, &key)?;
                    }
                    report.damaged.push(Damage {
                        path,
                        reason,
                        models,
                    });
                }
                Err(Unreadable::Io(error)) => return Err(StoreError::io(&path, error)),
            }
        }
        Ok(())
    }

    fn check_entry(
        &self,
        folder: &EntryFolder,
        damaged: &HashMap<Digest, String>,
    ) -> Result<(), Unreadable> {
        let manifest = folder.manifest()?;
        check_weights(&manifest).map_err(Unreadable::Damaged)?;
        read_graph(folder, &manifest)?;
        folder.facts()?;
        for part in &manifest.packs {
            if let Some(reason) = damaged.get(&part.digest) {
                return Err(Unreadable::damaged(reason));
            }
            let reason = match self.packs().stamp(&part.digest) {
                None => format!("pack {} is missing", part.digest),
                Some(stamp) if stamp.size != part.bytes => {
                    format!(
                        "pack {} has {} bytes instead of {}",
                        part.digest, stamp.size, part.bytes
                    )
                }
                Some(_) => continue,
            };
            return Err(Unreadable::Damaged(reason));
        }
        Ok(())
    }
}

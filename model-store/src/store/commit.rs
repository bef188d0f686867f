//! Making a draft part of the store: what it shares is found, the rest written, then renamed.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use super::digest::Digest;
use super::draft::{Draft, NewTensor, PreparedContent, TensorData, remove_tree};
use super::entry::{FACTS, GRAPH, MANIFEST};
use super::error::{At, StoreError};
use super::manifest::{GraphPart, Manifest, PackPart, Weight, tensor_bytes};
use super::pack::Pack;
use super::packs::{Indexed, replace};
use super::record::{self, sync_dir};
use super::stamp::Stamp;
use super::steps::{Step, step};

/// Smaller tensors are not worth looking for.
const SHARED_FROM: u64 = 4096;
/// From this size on a tensor has pages of its own.
const PAGE: u64 = 4096;
/// What kernels want of smaller ones.
const ALIGNMENT: u64 = 64;
/// Zeros after the last tensor: kernels that read whole vectors may look a little past their data,
/// which must not lead out of the map.
const TAIL: u64 = 64;
const CHUNK: usize = 1 << 20;
const BLOCK: usize = 2 << 20;
/// Names within the draft's folder, until they get their own.
const PACK: &str = "pack.bin";
const ENTRY: &str = "entry";

pub(super) fn commit(draft: &Draft, content: PreparedContent<'_>) -> Result<(), StoreError> {
    let store = &draft.store;
    let sources = Sources::open(draft.scratch(), &content.tensors)?;
    let mut plan = Plan::new(draft, &content.tensors, &sources)?;
    let max = store.config().max_bytes;
    let graph_bytes = content.graph.len() as u64;
    // Before anything is written.
    let least = plan.kept_bytes().saturating_add(graph_bytes);
    if least > max {
        return Err(StoreError::TooLarge { needed: least, max });
    }

    let pack_file = draft.folder().join(PACK);
    let own = plan.write_own(&pack_file, &content.tensors, &sources)?;
    let entry = draft.folder().join(ENTRY);
    let written = write_entry(&entry, content, &plan)?;

    step(Step::Lock).at(&entry)?;
    let _lock = store.lock()?;
    let index = Indexed::encode(&plan.index);
    let new = plan.own_bytes + index.len() as u64 + written;
    let needed = new.saturating_add(plan.shared_bytes());
    if needed > max {
        return Err(StoreError::TooLarge { needed, max });
    }
    let in_use = store.make_room(max - new)?;
    if in_use > max - new {
        return Err(StoreError::Full {
            needed: new,
            max,
            in_use,
        });
    }
    place(draft, own.as_ref(), &index).inspect_err(|_| undo(draft, own.as_ref()))
}

/// Gives pack and entry their names, in this order; on the disk when this returns.
fn place(draft: &Draft, own: Option<&Digest>, index: &[u8]) -> Result<(), StoreError> {
    let store = &draft.store;
    if let Some(own) = own {
        place_pack(draft, own, index)?;
    }
    let place = store.entry_path(&draft.key);
    step(Step::RenameEntry).at(&place)?;
    // A damaged one that could not be dropped.
    remove_tree(&place).at(&place)?;
    fs::rename(draft.folder().join(ENTRY), &place).at(&place)?;
    step(Step::SyncEntries).at(&place)?;
    let entries = store.entries_dir();
    sync_dir(&entries).at(&entries)
}

/// Takes back what a failed commit has placed already.
fn undo(draft: &Draft, own: Option<&Digest>) {
    let store = &draft.store;
    if let Err(error) = store.remove_entry(&draft.key) {
        tracing::warn!(key = %draft.key, %error, "a failed commit could not be taken back");
    } else if let Some(own) = own
        // Still in the draft, it was not placed: one in the store is another entry's.
        && !draft.folder().join(PACK).exists()
        && let Err(error) = store.packs().remove_unused(own)
    {
        tracing::warn!(pack = %own, %error, "a failed commit left its pack behind");
    }
}

/// Gives the new pack its name, unless the store has the same one.
fn place_pack(draft: &Draft, digest: &Digest, index: &[u8]) -> Result<(), StoreError> {
    let packs = draft.store.packs();
    if packs.open(digest, None).is_ok() {
        return Ok(());
    }
    let path = packs.path(digest);
    // A pack is never without its index, so that its tensors are found.
    let index_path = packs.index_path(digest);
    step(Step::WriteIndex).at(&index_path)?;
    replace(&draft.store.tmp_dir(), &index_path, index).at(&index_path)?;
    step(Step::RenamePack).at(&path)?;
    fs::rename(draft.folder().join(PACK), &path).at(&path)?;
    // An entry on the disk must not refer to a pack that is not.
    let dir = draft.store.packs_dir();
    sync_dir(&dir).at(&dir)?;
    step(Step::SealPack).at(&path)?;
    let stamp = Stamp::of(&path.symlink_metadata().at(&path)?);
    packs.seal(digest, &stamp);
    Ok(())
}

fn write_entry(
    folder: &Path,
    content: PreparedContent<'_>,
    plan: &Plan,
) -> Result<u64, StoreError> {
    step(Step::WriteEntry).at(folder)?;
    fs::create_dir(folder).at(folder)?;
    let manifest = Manifest {
        graph: GraphPart {
            digest: Digest::of(&content.graph),
            bytes: content.graph.len() as u64,
        },
        packs: plan.packs.clone(),
        weights: plan.weights.clone(),
    };
    let mut facts = content.facts;
    facts.created = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let manifest = record::encode(&manifest);
    let facts = record::encode(&facts);
    let mut written = 0;
    for (name, bytes) in [
        (GRAPH, &content.graph),
        (MANIFEST, &manifest),
        (FACTS, &facts),
    ] {
        let path = folder.join(name);
        record::write_new(&path, bytes).at(&path)?;
        written += bytes.len() as u64;
    }
    step(Step::SyncEntry).at(folder)?;
    sync_dir(folder).at(folder)?;
    Ok(written)
}

/// Where each tensor goes.
struct Plan {
    weights: Vec<Weight>,
    packs: Vec<PackPart>,
    /// Those that other entries brought; held so that they stay.
    shared: Vec<Arc<Pack>>,
    /// Tensors to write, with their places.
    own: Vec<(usize, u64)>,
    own_bytes: u64,
    index: Vec<Indexed>,
}

impl Plan {
    fn new(
        draft: &Draft,
        tensors: &[NewTensor<'_>],
        sources: &Sources<'_>,
    ) -> Result<Self, StoreError> {
        let digests = digests(tensors, sources)?;
        let shared = Shared::find(draft, &digests)?;
        let mut plan = Self {
            weights: Vec::with_capacity(tensors.len()),
            packs: Vec::new(),
            shared: shared.packs,
            own: Vec::new(),
            own_bytes: 0,
            index: Vec::new(),
        };
        let places = plan.place_own(tensors, &digests, &shared.places)?;
        // Our own pack comes first; its digest is known once it is written.
        let first = usize::from(plan.own_bytes > 0);
        if first == 1 {
            plan.packs.push(PackPart {
                digest: Digest::of(&[]),
                bytes: plan.own_bytes,
            });
        }
        plan.packs.extend(plan.shared.iter().map(|pack| PackPart {
            digest: pack.digest(),
            bytes: pack.len(),
        }));
        for (tensor, place) in tensors.iter().zip(places) {
            let (pack, offset) = match place {
                Place::Own(offset) => (0, offset),
                Place::Shared(pack, offset) => (first + pack, offset),
            };
            plan.weights.push(Weight {
                name: tensor.name.clone(),
                element_type: tensor.element_type,
                dims: tensor.dims.clone(),
                pack,
                offset,
                len: tensor.data.len(),
            });
        }
        Ok(plan)
    }

    /// Lays out what no pack holds yet: small tensors first, the others on pages of their own.
    fn place_own(
        &mut self,
        tensors: &[NewTensor<'_>],
        digests: &[Option<Digest>],
        shared: &HashMap<Digest, (usize, u64)>,
    ) -> Result<Vec<Place>, StoreError> {
        let mut placed: HashMap<Digest, u64> = HashMap::new();
        let mut places = vec![Place::Own(0); tensors.len()];
        let (small, large): (Vec<usize>, Vec<usize>) =
            (0..tensors.len()).partition(|index| tensors[*index].data.len() < PAGE);
        for index in small.into_iter().chain(large) {
            let tensor = &tensors[index];
            let len = tensor.data.len();
            if let Some(digest) = &digests[index] {
                if let Some((pack, offset)) = shared.get(digest) {
                    places[index] = Place::Shared(*pack, *offset);
                    continue;
                }
                if let Some(offset) = placed.get(digest) {
                    places[index] = Place::Own(*offset);
                    continue;
                }
            }
            let alignment = if len < PAGE { ALIGNMENT } else { PAGE };
            let place = self
                .own_bytes
                .checked_next_multiple_of(alignment)
                .and_then(|offset| Some((offset, offset.checked_add(len)?)));
            let Some((offset, end)) = place else {
                return Err(refused(tensor, "all tensors together are too large"));
            };
            self.own_bytes = end;
            self.own.push((index, offset));
            places[index] = Place::Own(offset);
            if let Some(digest) = digests[index] {
                placed.insert(digest, offset);
                self.index.push(Indexed {
                    digest,
                    offset,
                    len,
                });
            }
        }
        if !self.own.is_empty() {
            self.own_bytes = self.own_bytes.saturating_add(TAIL);
        }
        Ok(places)
    }

    /// The packs of others that stay as long as this entry does.
    fn shared_bytes(&self) -> u64 {
        self.shared.iter().map(|pack| pack.len()).sum()
    }

    fn kept_bytes(&self) -> u64 {
        self.own_bytes.saturating_add(self.shared_bytes())
    }

    /// Writes the pack of our own, if there is something to write, and returns its digest.
    fn write_own(
        &mut self,
        path: &Path,
        tensors: &[NewTensor<'_>],
        sources: &Sources<'_>,
    ) -> Result<Option<Digest>, StoreError> {
        if self.own.is_empty() {
            return Ok(None);
        }
        step(Step::WritePack).at(path)?;
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .at(path)?;
        reserve(&file, self.own_bytes).at(path)?;
        let mut writer = PackWriter {
            file: &file,
            block: Vec::with_capacity(BLOCK),
            hasher: blake3::Hasher::new(),
            written: 0,
        };
        for (index, offset) in &self.own {
            step(Step::WriteTensor).at(path)?;
            writer.pad_to(*offset).at(path)?;
            sources.read(&tensors[*index], |chunk| writer.write(chunk).at(path))?;
        }
        writer.pad_to(self.own_bytes).at(path)?;
        let digest = writer.finish().at(path)?;
        step(Step::SyncPack).at(path)?;
        file.set_permissions(Permissions::from_mode(0o444))
            .at(path)?;
        file.sync_all().at(path)?;
        self.packs[0].digest = digest;
        Ok(Some(digest))
    }
}

#[derive(Clone, Copy, Debug)]
enum Place {
    Own(u64),
    /// Which of the shared packs, and where.
    Shared(usize, u64),
}

/// Takes the space first: a full disk is told before hundreds of megabytes are written.
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, bytes) {
        Ok(()) | Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Writes a pack in blocks of the size of a huge page, each at a multiple of its size: so they lie
/// in the page cache, from where a map of them costs next to nothing. In smaller pieces it took
/// thirty times as long.
struct PackWriter<'a> {
    file: &'a File,
    block: Vec<u8>,
    hasher: blake3::Hasher,
    written: u64,
}

impl PackWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hasher.update(bytes);
        self.written += bytes.len() as u64;
        let mut rest = bytes;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(BLOCK - self.block.len()));
            self.block.extend_from_slice(now);
            if self.block.len() == BLOCK {
                self.file.write_all(&self.block)?;
                self.block.clear();
            }
            rest = later;
        }
        Ok(())
    }

    fn pad_to(&mut self, offset: u64) -> io::Result<()> {
        const ZEROS: [u8; PAGE as usize] = [0; PAGE as usize];
        let gap = offset - self.written;
        self.write(&ZEROS[..gap as usize])
    }

    fn finish(mut self) -> io::Result<Digest> {
        self.file.write_all(&self.block)?;
        Ok(Digest::from_bytes(self.hasher.finalize().into()))
    }
}

/// The digests of tensors that are worth sharing.
fn digests(
    tensors: &[NewTensor<'_>],
    sources: &Sources<'_>,
) -> Result<Vec<Option<Digest>>, StoreError> {
    let digest = |tensor: &NewTensor<'_>| {
        if tensor.data.len() < SHARED_FROM {
            return Ok(None);
        }
        let mut hasher = blake3::Hasher::new();
        sources.read(tensor, |chunk| {
            hasher.update(chunk);
            Ok(())
        })?;
        Ok(Some(Digest::from_bytes(hasher.finalize().into())))
    };
    tensors.iter().map(digest).collect()
}

/// Tensors that packs of the store hold already.
struct Shared {
    packs: Vec<Arc<Pack>>,
    /// Which of the packs, and where in it.
    places: HashMap<Digest, (usize, u64)>,
}

impl Shared {
    fn find(draft: &Draft, digests: &[Option<Digest>]) -> Result<Self, StoreError> {
        let wanted: HashSet<Digest> = digests.iter().flatten().copied().collect();
        let mut shared = Self {
            packs: Vec::new(),
            places: HashMap::new(),
        };
        if wanted.is_empty() {
            return Ok(shared);
        }
        let packs = draft.store.packs();
        let dir = draft.store.packs_dir();
        let holders = packs.holders(|digest| wanted.contains(digest)).at(&dir)?;
        let mut unusable: HashSet<Digest> = HashSet::new();
        for (holder, tensor) in holders {
            if shared.places.contains_key(&tensor.digest) || unusable.contains(&holder) {
                continue;
            }
            let known = shared.packs.iter().position(|pack| pack.digest() == holder);
            let pack = match known {
                Some(known) => shared.packs[known].clone(),
                None => match packs.open(&holder, None) {
                    Ok(pack) => pack,
                    // Whoever looks its entries up deals with it.
                    Err(_) => {
                        unusable.insert(holder);
                        continue;
                    }
                },
            };
            // The index only said where to look.
            let range = tensor.offset..tensor.offset.saturating_add(tensor.len);
            let Some(bytes) = pack.bytes(range) else {
                continue;
            };
            if Digest::of(bytes) != tensor.digest {
                continue;
            }
            let position = known.unwrap_or(shared.packs.len());
            if known.is_none() {
                shared.packs.push(pack);
            }
            shared
                .places
                .insert(tensor.digest, (position, tensor.offset));
        }
        Ok(shared)
    }
}

/// The bytes of the tensors, wherever they are.
struct Sources<'a> {
    scratch: &'a Path,
    files: HashMap<PathBuf, File>,
}

impl<'a> Sources<'a> {
    /// Opens what the tensors refer to and makes their sizes facts.
    fn open(scratch: &'a Path, tensors: &[NewTensor<'_>]) -> Result<Self, StoreError> {
        let mut files: HashMap<PathBuf, File> = HashMap::new();
        let mut names = HashSet::new();
        for tensor in tensors {
            if !names.insert(tensor.name.as_str()) {
                return Err(refused(tensor, "there is another one of that name"));
            }
            let len = tensor.data.len();
            if len == 0 {
                return Err(refused(tensor, "it has no bytes"));
            }
            let bytes = tensor_bytes(tensor.element_type, &tensor.dims)
                .map_err(|reason| refused(tensor, &reason))?;
            if let Some(bytes) = bytes.filter(|bytes| *bytes != len) {
                let reason = format!("its shape takes {bytes} bytes and it has {len}");
                return Err(refused(tensor, &reason));
            }
            let TensorData::Scratch { file, offset, .. } = &tensor.data else {
                continue;
            };
            if !files.contains_key(file) {
                let plain = |part| matches!(part, Component::Normal(_));
                if !file.components().all(plain) {
                    return Err(refused(tensor, "its file is not in the scratch folder"));
                }
                let path = scratch.join(file);
                files.insert(file.clone(), record::open(&path).at(&path)?);
            }
            let path = scratch.join(file);
            let size = files[file].metadata().at(&path)?.len();
            if offset.checked_add(len).is_none_or(|end| end > size) {
                let reason =
                    format!("its file has {size} bytes, it begins at {offset} and has {len}");
                return Err(refused(tensor, &reason));
            }
        }
        Ok(Self { scratch, files })
    }

    fn read(
        &self,
        tensor: &NewTensor<'_>,
        mut each: impl FnMut(&[u8]) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        match &tensor.data {
            TensorData::Memory(bytes) => bytes.chunks(CHUNK).try_for_each(each),
            TensorData::Scratch { file, offset, len } => {
                let path = self.scratch.join(file);
                let file = &self.files[file];
                let mut buffer = vec![0; CHUNK.min(usize::try_from(*len).unwrap_or(CHUNK))];
                let mut done = 0;
                while done < *len {
                    let want = (len - done).min(CHUNK as u64) as usize;
                    file.read_exact_at(&mut buffer[..want], offset + done)
                        .at(&path)?;
                    each(&buffer[..want])?;
                    done += want as u64;
                }
                Ok(())
            }
        }
    }
}

impl TensorData<'_> {
    fn len(&self) -> u64 {
        match self {
            Self::Memory(bytes) => bytes.len() as u64,
            Self::Scratch { len, .. } => *len,
        }
    }
}

fn refused(tensor: &NewTensor<'_>, reason: &str) -> StoreError {
    StoreError::Tensor {
        tensor: tensor.name.clone(),
        reason: reason.to_owned(),
    }
}

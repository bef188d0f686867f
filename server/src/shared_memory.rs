//! System shared memory that clients register and refer to in place of tensors in messages.
//!
//! # Why regions are not mapped
//!
//! A region is a file of its client, who may cut it short at any moment; touching a map of it then
//! kills the process with SIGBUS, and whatever is read twice may be two different things. So the
//! server keeps the descriptor only: inputs are read by `pread` into memory of its own, where they
//! are checked and stay as they are, and outputs are written by `pwrite`. A file that was cut short
//! is an ordinary error of one request. That costs one copy at memory speed, as much as receiving
//! the tensor in a message, without the message's other copies.

mod region;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use dormouse_core::code::ErrorCode;
use dormouse_core::id::ByteSize;
use parking_lot::Mutex;

use self::region::{Region, open_key};
use crate::error::ServeError;

/// Where POSIX shared memory lives on Linux.
const ROOT: &str = "/dev/shm";

/// The longest name of a region or key, in bytes.
const MAX_NAME: usize = 255;

/// Keys with this beginning may be the server's own.
const RESERVED: &str = "dormouse";

/// How much shared memory clients may register.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedMemoryLimits {
    pub max_regions: usize,
    /// Of all regions together.
    pub max_bytes: ByteSize,
    /// What keys begin with, without their leading slash; none: any key will do.
    pub key_prefixes: Vec<String>,
}

impl Default for SharedMemoryLimits {
    fn default() -> Self {
        Self {
            max_regions: 256,
            max_bytes: ByteSize::gib(4),
            key_prefixes: Vec::new(),
        }
    }
}

impl SharedMemoryLimits {
    fn permit_key(&self, key: &str) -> bool {
        let mut prefixes = self.key_prefixes.iter();
        self.key_prefixes.is_empty() || prefixes.any(|prefix| key.starts_with(prefix))
    }
}

/// A part of a region, as requests name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionSlice {
    pub region: String,
    /// From the beginning of the region.
    pub offset: u64,
    pub byte_size: u64,
}

/// A registered region, as the status call tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionStatus {
    pub name: String,
    pub key: String,
    pub offset: u64,
    pub byte_size: u64,
}

/// Who asks, where clients are asked who they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// How it made itself known, and as whom.
    pub identity: (&'static str, Arc<str>),
    /// Has the scope that all clients' regions are open to.
    pub manages: bool,
}

/// The regions that clients registered. Not allowed unless the operator says so.
#[derive(Debug)]
pub struct SharedMemory {
    root: PathBuf,
    limits: Option<SharedMemoryLimits>,
    regions: Mutex<BTreeMap<String, Arc<Region>>>,
}

impl Default for SharedMemory {
    fn default() -> Self {
        Self::new(None)
    }
}

impl SharedMemory {
    /// Without limits nothing is allowed.
    pub fn new(limits: Option<SharedMemoryLimits>) -> Self {
        Self {
            root: ROOT.into(),
            limits,
            regions: Mutex::default(),
        }
    }

    pub fn is_allowed(&self) -> bool {
        self.limits.is_some()
    }

    /// What a caller may do with regions; none where nobody is asked who they are, and where all
    /// may do everything.
    pub fn of<'a>(&'a self, caller: Option<&'a Caller>) -> Regions<'a> {
        Regions {
            memory: self,
            caller,
        }
    }

    fn limits(&self) -> Result<&SharedMemoryLimits, ServeError> {
        self.limits.as_ref().ok_or_else(|| {
            ServeError::unsupported(
                "shared memory is not allowed by this server: start it with --allow-client-shm",
            )
        })
    }
}

/// The regions as one caller has them: those of others do not exist for it.
#[derive(Clone, Copy, Debug)]
pub struct Regions<'a> {
    memory: &'a SharedMemory,
    caller: Option<&'a Caller>,
}

impl Regions<'_> {
    fn may_use(&self, region: &Region) -> bool {
        match (&region.owner, self.caller) {
            (Some(owner), Some(caller)) => caller.manages || *owner == caller.identity,
            (None, _) | (_, None) => true,
        }
    }

    /// Registers `region.byte_size` bytes of the object `key`, from `region.offset` in it, under
    /// the name `region.region`.
    pub fn register(&self, key: &str, region: RegionSlice) -> Result<(), ServeError> {
        let limits = self.memory.limits()?;
        let RegionSlice {
            region: name,
            offset,
            byte_size,
        } = region;
        check_name("region name", &name)?;
        // `shm_open` wants a leading slash and ignores it.
        let file_name = key.strip_prefix('/').unwrap_or(key);
        check_name("key", file_name)?;
        if file_name.starts_with(RESERVED) {
            return Err(ServeError::invalid(format!(
                "cannot register shared memory region '{name}': keys that start with '{RESERVED}' are kept for the server"
            )));
        }
        // Before it is looked for: who may not have it is not told whether it is there.
        if !limits.permit_key(file_name) {
            return Err(ServeError::invalid(format!(
                "cannot register shared memory region '{name}': its key begins with none of the permitted prefixes (shared_memory.key_prefixes)"
            )));
        }
        if byte_size == 0 {
            return Err(ServeError::invalid(format!(
                "cannot register shared memory region '{name}': its byte_size is 0"
            )));
        }
        // Opened before the lock is taken: it may have to wait for the file system.
        let opened = open_key(&self.memory.root, file_name, &name)?;
        let region = Region {
            key: key.to_owned(),
            offset,
            byte_size,
            opened,
            owner: self.caller.map(|caller| caller.identity.clone()),
        };
        region.check_bounds(&name, 0, byte_size)?;
        let mut regions = self.memory.regions.lock();
        if regions.contains_key(&name) {
            return Err(ServeError::invalid(format!(
                "shared memory region '{name}' is registered already"
            )));
        }
        if regions.len() >= limits.max_regions {
            return Err(overloaded(format!(
                "cannot register shared memory region '{name}': {} regions are registered, which is the limit (shared_memory.max_regions)",
                regions.len()
            )));
        }
        let used: u64 = regions.values().map(|region| region.byte_size).sum();
        if used.saturating_add(byte_size) > limits.max_bytes.0 {
            return Err(overloaded(format!(
                "cannot register shared memory region '{name}' of {}: {} are registered and the limit is {} (shared_memory.max_bytes)",
                ByteSize(byte_size),
                ByteSize(used),
                limits.max_bytes
            )));
        }
        regions.insert(name, Arc::new(region));
        Ok(())
    }

    /// Forgets a region, or all with "". Requests that use it keep what they have. As in Triton, a
    /// region that is not registered is no error; nor is another's, which stays.
    pub fn unregister(&self, name: &str) -> Result<(), ServeError> {
        self.memory.limits()?;
        let mut regions = self.memory.regions.lock();
        regions.retain(|known, region| {
            let is_meant = name.is_empty() || known == name;
            !is_meant || !self.may_use(region)
        });
        Ok(())
    }

    /// A region, or all with "", sorted by name.
    pub fn status(&self, name: &str) -> Result<Vec<RegionStatus>, ServeError> {
        self.memory.limits()?;
        let regions = self.memory.regions.lock();
        let wanted = regions
            .iter()
            .filter(|(known, region)| (name.is_empty() || *known == name) && self.may_use(region));
        let found: Vec<_> = wanted
            .map(|(name, region)| RegionStatus {
                name: name.clone(),
                key: region.key.clone(),
                offset: region.offset,
                byte_size: region.byte_size,
            })
            .collect();
        match found.is_empty() && !name.is_empty() {
            true => Err(unknown(name)),
            false => Ok(found),
        }
    }

    /// The region of a slice, which lies within it.
    pub fn resolve(&self, slice: &RegionSlice) -> Result<ResolvedSlice, ServeError> {
        self.memory.limits()?;
        let region = self.memory.regions.lock().get(&slice.region).cloned();
        let region = region.filter(|region| self.may_use(region));
        let region = region.ok_or_else(|| unknown(&slice.region))?;
        region.check_bounds(&slice.region, slice.offset, slice.byte_size)?;
        Ok(ResolvedSlice {
            region,
            slice: slice.clone(),
        })
    }
}

/// A slice with its region, which stays open however soon it is unregistered.
#[derive(Clone, Debug)]
pub struct ResolvedSlice {
    region: Arc<Region>,
    slice: RegionSlice,
}

impl ResolvedSlice {
    pub fn slice(&self) -> &RegionSlice {
        &self.slice
    }

    /// Copies the slice out of its region.
    pub fn read(&self) -> Result<Vec<u8>, ServeError> {
        let RegionSlice {
            region,
            offset,
            byte_size,
        } = &self.slice;
        self.region.read(region, *offset, *byte_size)
    }

    /// Copies `data` to the beginning of the slice; returns the part that it took.
    pub fn write(&self, output: &str, data: &[u8]) -> Result<RegionSlice, ServeError> {
        let length = data.len() as u64;
        if length > self.slice.byte_size {
            return Err(ServeError::invalid(format!(
                "shared memory size specified with the request for output '{output}' ({} bytes) should be at least {length} bytes to hold the results",
                self.slice.byte_size
            )));
        }
        self.region
            .write(&self.slice.region, self.slice.offset, data)?;
        Ok(RegionSlice {
            byte_size: length,
            ..self.slice.clone()
        })
    }
}

/// What whoever registers a GPU's memory is told.
pub fn no_cuda(name: &str) -> ServeError {
    ServeError::invalid(format!(
        "failed to register CUDA shared memory region: '{}', GPUs not supported",
        shown(name)
    ))
}

/// What whoever asks for a region of a GPU's memory is told.
pub fn no_cuda_region(name: &str) -> ServeError {
    ServeError::not_found(format!(
        "unable to find cuda shared memory region: '{}'",
        shown(name)
    ))
}

fn unknown(name: &str) -> ServeError {
    ServeError::not_found(format!(
        "unable to find system shared memory region: '{}'",
        shown(name)
    ))
}

/// A name from the wire as errors show it.
fn shown(name: &str) -> String {
    let cut: String = name.chars().take(64).collect();
    cut.escape_debug().to_string()
}

fn overloaded(message: String) -> ServeError {
    ServeError::new(ErrorCode::Overloaded, message)
}

fn check_name(what: &str, name: &str) -> Result<(), ServeError> {
    let why = if name.is_empty() {
        "it is empty"
    } else if name.len() > MAX_NAME {
        "it is longer than 255 bytes"
    } else if name == "." || name == ".." {
        "it names a directory"
    } else if name.contains(['/', '\\']) {
        "it has a slash or a backslash"
    } else if name.contains(|c: char| c.is_control()) {
        "it has a control character"
    } else {
        return Ok(());
    };
    Err(ServeError::invalid(format!(
        "'{}' cannot be the {what} of a shared memory region: {why}",
        shown(name)
    )))
}

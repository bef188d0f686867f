//! Packed copies of weights, shared by the sessions of a family.

use std::collections::HashMap;
use std::ptr::{self, NonNull};
use std::sync::{Arc, LazyLock, Weak};

use ort::sys;
use parking_lot::Mutex;

use super::environment::{Environment, missing};
use super::status::check;
use crate::engine::EngineError;

/// Families that have a session; the last one to close frees the copies.
static FAMILIES: LazyLock<Mutex<HashMap<[u8; 32], Weak<PackedWeights>>>> =
    LazyLock::new(Mutex::default);

/// Where the sessions of a family put the packed copies they make and find those of the others.
pub(super) struct PackedWeights {
    environment: &'static Environment,
    container: NonNull<sys::OrtPrepackedWeightsContainer>,
}

#[expect(unsafe_code, reason = "a container holds a pointer of the C API")]
// SAFETY: a container is bound to no thread, and ONNX Runtime locks it while a session is built.
unsafe impl Send for PackedWeights {}
#[expect(unsafe_code, reason = "a container holds a pointer of the C API")]
// SAFETY: as for `Send`.
unsafe impl Sync for PackedWeights {}

impl PackedWeights {
    /// The container of a family, created if no session of it is open.
    pub(super) fn of(
        environment: &'static Environment,
        family: [u8; 32],
    ) -> Result<Arc<Self>, EngineError> {
        let mut families = FAMILIES.lock();
        if let Some(packed) = families.get(&family).and_then(Weak::upgrade) {
            return Ok(packed);
        }
        let packed = Arc::new(Self::new(environment)?);
        families.retain(|_, packed| packed.strong_count() > 0);
        families.insert(family, Arc::downgrade(&packed));
        Ok(packed)
    }

    #[expect(unsafe_code, reason = "creates an object of the C API")]
    fn new(environment: &'static Environment) -> Result<Self, EngineError> {
        let mut container = ptr::null_mut();
        // SAFETY: `container` is a place for one pointer.
        check(environment.api, unsafe {
            (environment.api.CreatePrepackedWeightsContainer)(&mut container)
        })?;
        Ok(Self {
            environment,
            container: NonNull::new(container)
                .ok_or_else(|| missing("container for packed weights"))?,
        })
    }

    pub(super) fn as_ptr(&self) -> *mut sys::OrtPrepackedWeightsContainer {
        self.container.as_ptr()
    }
}

impl Drop for PackedWeights {
    #[expect(unsafe_code, reason = "frees an object of the C API")]
    fn drop(&mut self) {
        // SAFETY: owned, released once, after every session that was given it.
        unsafe { (self.environment.api.ReleasePrepackedWeightsContainer)(self.container.as_ptr()) }
    }
}

#[cfg(test)]
pub(super) fn open_families() -> usize {
    FAMILIES
        .lock()
        .values()
        .filter(|packed| packed.strong_count() > 0)
        .count()
}

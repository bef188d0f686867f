//! Where a commit can be interrupted; tests do so at every one of them.

use std::io;

/// What a commit is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    WritePack,
    WriteTensor,
    SyncPack,
    WriteEntry,
    SyncEntry,
    Lock,
    WriteIndex,
    RenamePack,
    SealPack,
    RenameEntry,
    SyncEntries,
}

#[cfg(test)]
impl Step {
    pub(super) const ALL: [Self; 11] = [
        Self::WritePack,
        Self::WriteTensor,
        Self::SyncPack,
        Self::WriteEntry,
        Self::SyncEntry,
        Self::Lock,
        Self::WriteIndex,
        Self::RenamePack,
        Self::SealPack,
        Self::RenameEntry,
        Self::SyncEntries,
    ];
}

#[cfg(not(test))]
#[expect(clippy::unnecessary_wraps, reason = "tests make it fail")]
pub(super) fn step(_step: Step) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
pub(super) use faults::{Fault, crashing, step, with_fault};

#[cfg(test)]
mod faults {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(in super::super) enum Fault {
        /// The disk is full.
        NoSpace,
        /// The process ends without a chance to clear up.
        Crash,
    }

    thread_local! {
        static FAULT: Cell<Option<(Step, Fault)>> = const { Cell::new(None) };
        static CRASHING: Cell<bool> = const { Cell::new(false) };
    }

    pub(in super::super) fn crashing() -> bool {
        CRASHING.get()
    }

    pub(in super::super) fn step(step: Step) -> io::Result<()> {
        match FAULT.get() {
            Some((at, Fault::NoSpace)) if at == step => Err(io::ErrorKind::StorageFull.into()),
            Some((at, Fault::Crash)) if at == step => {
                CRASHING.set(true);
                std::panic::resume_unwind(Box::new("crash"))
            }
            _ => Ok(()),
        }
    }

    /// Runs something in this thread with a fault; none when it crashed.
    pub(in super::super) fn with_fault<T>(
        at: Step,
        fault: Fault,
        run: impl FnOnce() -> T,
    ) -> Option<T> {
        FAULT.set(Some((at, fault)));
        let result = catch_unwind(AssertUnwindSafe(run));
        FAULT.set(None);
        CRASHING.set(false);
        result.ok()
    }
}

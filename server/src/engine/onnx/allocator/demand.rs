//! How many blocks of each size a run has at once.

use std::cell::Cell;

use super::size_class;
use crate::engine::RunBuffers;

// Neither has a destructor: C++ may free blocks on a thread that is about to end.
thread_local! {
    static WATCHING: Cell<bool> = const { Cell::new(false) };
    static DEMAND: [Cell<Demand>; size_class::COUNT] =
        const { [const { Cell::new(Demand { live: 0, peak: 0 }) }; size_class::COUNT] };
}

/// Blocks of one class that this thread has taken and not given back, and the most of them that
/// there were.
#[derive(Clone, Copy, Default)]
struct Demand {
    live: u32,
    peak: u32,
}

/// Counts what this thread allocates until it is asked for the result, or dropped.
#[derive(Debug)]
pub(in crate::engine::onnx) struct Watched(());

impl Watched {
    pub(in crate::engine::onnx) fn start() -> Self {
        DEMAND.with(|classes| {
            for class in classes {
                class.set(Demand::default());
            }
        });
        WATCHING.set(true);
        Self(())
    }

    /// The blocks that were there at the same time, the largest first.
    pub(in crate::engine::onnx) fn finish(self) -> RunBuffers {
        DEMAND.with(|classes| {
            let peaks = classes.iter().enumerate().rev();
            let peaks = peaks.map(|(class, demand)| (size_class::bytes(class), demand.get().peak));
            let wanted = peaks.filter(|&(_, peak)| peak > 0);
            RunBuffers(wanted.map(|(bytes, peak)| (bytes, peak as usize)).collect())
        })
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        WATCHING.set(false);
    }
}

/// A block of this class was taken by this thread.
pub(super) fn taken(class: usize) {
    change(class, |demand| {
        let live = demand.live.saturating_add(1);
        Demand {
            live,
            peak: demand.peak.max(live),
        }
    });
}

/// A block of this class was given back by this thread.
pub(super) fn returned(class: usize) {
    change(class, |demand| Demand {
        live: demand.live.saturating_sub(1),
        ..demand
    });
}

fn change(class: usize, change: impl FnOnce(Demand) -> Demand) {
    if !WATCHING.get() {
        return;
    }
    DEMAND.with(|classes| {
        if let Some(class) = classes.get(class) {
            class.set(change(class.get()));
        }
    });
}

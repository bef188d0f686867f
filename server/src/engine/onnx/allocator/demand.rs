//! How many blocks of each size a run has at once.

use std::cell::Cell;

use super::size_class;
use crate::engine::RunBuffers;

thread_local! {
    static WATCHING: Cell<Option<Box<Demand>>> = const { Cell::new(None) };
}

/// Blocks that this thread has taken and not given back, and the most of them that there were.
struct Demand {
    live: [u32; size_class::COUNT],
    peak: [u32; size_class::COUNT],
}

/// Counts what this thread allocates until it is asked for the result, or dropped.
#[derive(Debug)]
pub(in crate::engine::onnx) struct Watched(());

impl Watched {
    pub(in crate::engine::onnx) fn start() -> Self {
        WATCHING.set(Some(Box::new(Demand {
            live: [0; size_class::COUNT],
            peak: [0; size_class::COUNT],
        })));
        Self(())
    }

    /// The blocks that were there at the same time, the largest first.
    pub(in crate::engine::onnx) fn finish(self) -> RunBuffers {
        let Some(demand) = WATCHING.take() else {
            return RunBuffers::default();
        };
        let peaks = demand.peak.iter().enumerate().rev();
        let wanted = peaks.filter(|(_, count)| **count > 0);
        RunBuffers(
            wanted
                .map(|(class, &count)| (size_class::bytes(class), count as usize))
                .collect(),
        )
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        WATCHING.set(None);
    }
}

/// A block of this class was taken by this thread.
pub(super) fn taken(class: usize) {
    with(class, |live, peak| {
        *live += 1;
        *peak = (*peak).max(*live);
    });
}

/// A block of this class was given back by this thread.
pub(super) fn returned(class: usize) {
    with(class, |live, _| *live = live.saturating_sub(1));
}

fn with(class: usize, change: impl FnOnce(&mut u32, &mut u32)) {
    let Some(mut demand) = WATCHING.take() else {
        return;
    };
    if let (Some(live), Some(peak)) = (demand.live.get_mut(class), demand.peak.get_mut(class)) {
        change(live, peak);
    }
    WATCHING.set(Some(demand));
}

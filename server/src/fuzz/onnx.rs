//! What is read of an ONNX file before the engine sees it, held against what is read of it later.

use std::io;

use dormouse_model_store::config::{ConfigDefaults, ResolveInput, resolve};
use dormouse_model_store::onnx::{MAX_DIMENSIONS, MAX_SIGNATURE, ReadAt, summarize};

use super::allocations::within;
use super::assert_presentable;
use crate::engine::onnx::pieces;

/// A node of two bytes is some hundred in memory, and lists grow by doubling.
const TIMES_THE_FILE: usize = 1024;
const ASIDE: usize = 1 << 20;

pub(super) fn preflight(data: &[u8]) -> bool {
    let bound = data.len() * TIMES_THE_FILE + ASIDE;
    let read = within(bound, || summarize(&data));
    // However the bytes come, they say the same.
    let slowly = summarize(&Slow(data));
    let summary = match (read, slowly) {
        (Ok(summary), Ok(slowly)) => {
            assert_eq!(summary, slowly);
            summary
        }
        (Err(error), Err(slowly)) => {
            let message = error.to_string();
            assert_eq!(message, slowly.to_string());
            assert_presentable(&message);
            assert!(!message.contains(char::is_control), "{message:?}");
            return false;
        }
        (read, slowly) => panic!("{read:?} at once, {slowly:?} piece by piece"),
    };
    let inputs = summary.inputs.iter().chain(&summary.optional_inputs);
    assert!(inputs.clone().count() as u64 <= MAX_SIGNATURE);
    assert!(summary.outputs.len() as u64 <= MAX_SIGNATURE);
    for tensor in inputs.clone().chain(&summary.outputs) {
        let dims = tensor.dims.as_deref().unwrap_or_default();
        assert!(dims.len() as u64 <= MAX_DIMENSIONS && dims.iter().all(|&dim| dim >= -1));
    }
    for data in &summary.external {
        assert!(stays_beside(&data.location), "{data:?}");
        let end = data.offset.checked_add(data.length.unwrap_or(0));
        assert!(end.is_some(), "{data:?}");
    }

    // The engine's side must find nothing that was not checked before.
    let mut declared = pieces::input_names(data).expect("what passed is well-formed");
    let mut names: Vec<String> = inputs.map(|tensor| tensor.name.clone()).collect();
    declared.sort_unstable();
    names.sort_unstable();
    assert_eq!(declared, names);
    for location in pieces::locations(data).expect("what passed is well-formed") {
        let is_known = summary
            .external
            .iter()
            .any(|data| data.location == location);
        assert!(is_known, "the engine would read {location:?}, unchecked");
    }

    let resolved = resolve(ResolveInput {
        name: "fuzzed".into(),
        config: Default::default(),
        graph: &summary,
        defaults: &ConfigDefaults::default(),
    });
    if let Ok(spec) = resolved {
        assert!(spec.inputs.len() <= summary.inputs.len() + summary.optional_inputs.len());
    }
    true
}

fn stays_beside(location: &str) -> bool {
    !location.is_empty()
        && !location.starts_with('/')
        && !location.contains(['\\', '\0'])
        && location.split('/').all(|part| part != "..")
}

/// A source that gives a few bytes at a time.
struct Slow<'a>(&'a [u8]);

impl ReadAt for Slow<'_> {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let some = buffer.len().min(1 + offset as usize % 7);
        self.0.read_at(&mut buffer[..some], offset)
    }
}

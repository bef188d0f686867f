//! Weights outside the graph that ONNX Runtime would look for on the disk.
//!
//! Files given in memory reach only the initializers of the main graph, and those only after
//! shapes were inferred. A tensor inside a subgraph or an attribute would be read from the working
//! directory instead, and a small one that holds a shape would be missed, so their bytes are put
//! into the graph here; and a tensor whose file was not given is refused.

use std::borrow::Cow;

use bytes::Bytes;

use super::model_proto::{LARGEST, Place, Rewrite, TensorHead, is_ort_format, rewrite, with_data};
use crate::engine::EngineError;

/// Initializers up to this size are put into the graph: some of them are shapes.
const SMALL: usize = 4096;

/// Of an element of any kind.
const WIDEST: usize = 16;

/// A graph that says of nothing outside the files given with it.
pub(super) struct Settled<'a> {
    pub(super) graph: Cow<'a, [u8]>,
    /// All that is outside can be read where it lies: files may have numbers at any place.
    pub(super) is_aligned: bool,
}

/// The graph with every tensor that ONNX Runtime could not find among `files` settled: unchanged
/// unless something small or inside a subgraph lives outside.
pub(super) fn settle<'a>(
    graph: &'a [u8],
    files: &[(String, Bytes)],
) -> Result<Settled<'a>, EngineError> {
    let mut settle = Settle {
        files,
        is_aligned: true,
    };
    let settled = match is_ort_format(graph) {
        true => None,
        false => rewrite(graph, &mut settle).map_err(EngineError::Failed)?,
    };
    let graph = match settled {
        None => Cow::Borrowed(graph),
        Some(graph) if graph.len() > LARGEST => {
            return Err(EngineError::Failed(format!(
                "the graph has {} bytes with the external data put into it, {LARGEST} at most can be loaded",
                graph.len()
            )));
        }
        Some(graph) => Cow::Owned(graph),
    };
    Ok(Settled {
        graph,
        is_aligned: settle.is_aligned,
    })
}

struct Settle<'f> {
    files: &'f [(String, Bytes)],
    is_aligned: bool,
}

impl Rewrite for Settle<'_> {
    fn tensor(&mut self, place: Place, bytes: &[u8]) -> Result<Option<Vec<u8>>, String> {
        let tensor = TensorHead::read(bytes)?;
        if !tensor.external {
            return Ok(None);
        }
        let name = &tensor.name;
        let location = tensor
            .location
            .as_deref()
            .ok_or_else(|| format!("tensor '{name}' is external and names no file"))?;
        let Some((_, file)) = self.files.iter().find(|(given, _)| given == location) else {
            return Err(format!(
                "tensor '{name}' is kept in '{location}', which is not among the model's files"
            ));
        };
        let start = tensor.offset.unwrap_or(0);
        let length = match tensor.length.or_else(|| tensor.byte_count()) {
            Some(length) => length,
            None => (file.len() as u64).saturating_sub(start),
        };
        let data = start
            .checked_add(length)
            .and_then(|end| file.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?))
            .ok_or_else(|| {
                format!(
                    "tensor '{name}' needs {length} bytes from byte {start} of '{location}', which has {}",
                    file.len()
                )
            })?;
        // ONNX Runtime finds the bytes of the main graph's initializers among the files.
        if place == Place::Main && data.len() > SMALL {
            let width = tensor.width().unwrap_or(WIDEST);
            self.is_aligned &= data.as_ptr().addr().is_multiple_of(width);
            return Ok(None);
        }
        with_data(bytes, data).map(Some)
    }
}

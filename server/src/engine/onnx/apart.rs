//! A model that is one file, as a graph and its weights beside it.
//!
//! ONNX Runtime parses a file with its weights into memory and copies them from there to where they
//! are used. Both take longer than all else that a first load does.

use std::io;

use bytes::Bytes;
use dormouse_model_store::onnx::TakenApart;
use memmap2::MmapMut;

use crate::engine::{EngineError, GraphBytes, ModelBytes};

/// What the graph calls its weights.
const LOCATION: &str = "weights";

/// With less than this, looking the file through takes as long as parsing it.
const WORTHWHILE: u64 = 4 << 20;

/// Does `open` with a model whose weights are read to where a session can use them, if it is in one file
/// that they are most of; if that fails, and not for good, with the model as it is.
pub(super) fn opened<T, E: std::fmt::Display>(
    model: &ModelBytes,
    is_final: impl FnOnce(&E) -> bool,
    mut open: impl FnMut(&ModelBytes) -> Result<T, E>,
) -> Result<T, E> {
    match taken_apart(model) {
        Ok(None) => {}
        Ok(Some(apart)) => match open(&apart) {
            Ok(opened) => return Ok(opened),
            Err(error) if is_final(&error) => return Err(error),
            // Some of its operators may have to know a weight while the graph is read.
            Err(error) => {
                tracing::debug!(%error, "a model is opened once more, with its weights inside")
            }
        },
        Err(error) => tracing::debug!(%error, "a model's weights are left inside"),
    }
    open(model)
}

/// None for a model in another form, and for one of which too little would be taken out.
fn taken_apart(model: &ModelBytes) -> Result<Option<ModelBytes>, EngineError> {
    let GraphBytes::File(file) = &model.graph else {
        return Ok(None);
    };
    let failed = |error| EngineError::Failed(format!("its weights cannot be read: {error}"));
    let size = file.metadata().map_err(failed)?.len();
    if size < WORTHWHILE {
        return Ok(None);
    }
    let worthwhile = (size / 2).max(WORTHWHILE);
    // What is wrong with a file the engine says best; and it knows more formats.
    let Ok(Some(apart)) = TakenApart::of(file, LOCATION, worthwhile) else {
        return Ok(None);
    };
    let size = usize::try_from(apart.size()).map_err(|error| failed(io::Error::other(error)))?;
    let mut weights = MmapMut::map_anon(size).map_err(failed)?;
    apart.read(file, &mut weights).map_err(failed)?;
    Ok(Some(ModelBytes {
        graph: GraphBytes::Memory(apart.graph),
        external: vec![(LOCATION.to_owned(), Bytes::from_owner(weights))],
    }))
}

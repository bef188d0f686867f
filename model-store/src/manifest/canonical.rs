//! Digests of tensors over their bytes as they are in memory, whatever form the file gives them.

use super::digest::hash_range;
use super::{Digests, Manifest, ManifestTensor, TensorPlace};
use crate::onnx::{GraphError, TypedData, typed_data};
use crate::repository::{GraphFile, OpenFile, RepositoryError};
use crate::store::Digest;

impl Manifest {
    /// Fills in the digest of every file.
    pub fn digest_files(
        &mut self,
        graph: &GraphFile,
        digests: &dyn Digests,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), RepositoryError> {
        for file in &mut self.files {
            let open = graph.open_listed(&file.location)?;
            if open.identity() != file.identity {
                return Err(open.changed());
            }
            file.digest = Some(digests.digest(&open, progress)?);
        }
        Ok(())
    }

    /// Fills in the digest of every tensor, so that equal ones are known whatever file they are in.
    pub fn digest_tensors(
        &mut self,
        graph: &GraphFile,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), RepositoryError> {
        let mut opened = Vec::with_capacity(self.files.len());
        for file in &self.files {
            let open = graph.open_listed(&file.location)?;
            if open.identity() != file.identity {
                return Err(open.changed());
            }
            opened.push(open);
        }
        for tensor in &mut self.tensors {
            tensor.digest = Some(digest(tensor, &opened, progress)?);
        }
        opened.iter().try_for_each(OpenFile::unchanged)
    }
}

fn digest(
    tensor: &ManifestTensor,
    files: &[OpenFile],
    progress: &mut dyn FnMut(u64),
) -> Result<Digest, RepositoryError> {
    let mut hasher = blake3::Hasher::new();
    match tensor.place {
        TensorPlace::Inline { offset, length } => {
            hash_range(&files[0], (offset, length), &mut hasher, progress)?;
        }
        TensorPlace::External {
            file,
            offset,
            length,
        }
        | TensorPlace::Safetensors {
            file,
            offset,
            length,
        } => {
            hash_range(&files[file], (offset, length), &mut hasher, progress)?;
        }
        TensorPlace::Encoded { offset, length } => {
            let refused = |cause: GraphError| RepositoryError::Graph {
                path: files[0].path().to_owned(),
                cause,
            };
            let data = TypedData {
                element: tensor.element.0,
                offset,
                length,
            };
            typed_data(&files[0], &data, &mut |bytes| {
                hasher.update(bytes);
            })
            .map_err(refused)?;
            progress(length);
        }
    }
    Ok(Digest::from_bytes(hasher.finalize().into()))
}

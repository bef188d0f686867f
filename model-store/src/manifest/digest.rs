//! Digests of files, and of tensors over their bytes as they are in memory, whatever form the file
//! gives them; computed when somebody asks.

use super::{Manifest, ManifestTensor, TensorPlace};
use crate::onnx::{GraphError, ReadAt, TypedData, typed_data};
use crate::repository::{GraphFile, OpenFile, RepositoryError};
use crate::store::Digest;

/// How much is read at a time; progress is told as often.
const CHUNK: usize = 1 << 20;

impl Manifest {
    /// Fills in the digest of every file; `progress` is told of bytes read.
    pub fn digest_files(
        &mut self,
        graph: &GraphFile,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), RepositoryError> {
        for file in &mut self.files {
            let open = graph.open_listed(&file.location)?;
            if open.identity() != file.identity {
                return Err(open.changed());
            }
            file.digest = Some(hash_file(&open, progress)?);
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

/// Reads a file from its beginning to its end and tells its digest.
fn hash_file(file: &OpenFile, progress: &mut dyn FnMut(u64)) -> Result<Digest, RepositoryError> {
    let mut hasher = blake3::Hasher::new();
    hash_range(file, (0, file.size()), &mut hasher, progress)?;
    file.unchanged()?;
    Ok(Digest::from_bytes(hasher.finalize().into()))
}

/// Feeds `length` bytes from `offset` to a hasher.
fn hash_range(
    file: &OpenFile,
    (offset, length): (u64, u64),
    hasher: &mut blake3::Hasher,
    progress: &mut dyn FnMut(u64),
) -> Result<(), RepositoryError> {
    let mut buffer = vec![0; CHUNK.min(usize::try_from(length).unwrap_or(CHUNK))];
    let mut done = 0;
    while done < length {
        let wanted = usize::try_from(length - done).map_or(CHUNK, |left| left.min(CHUNK));
        let count = match file.read_at(&mut buffer[..wanted], offset + done) {
            Ok(0) => return Err(file.changed()),
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(cause) => return Err(file.failed(cause)),
        };
        hasher.update(&buffer[..count]);
        done += count as u64;
        progress(count as u64);
    }
    Ok(())
}

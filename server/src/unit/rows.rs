//! Puts the rows of several requests into one batch, and deals the rows of its outputs out.

use bytes::Bytes;
use dormouse_core::datatype::DataType;
use dormouse_model_store::spec::TensorSpec;
use smallvec::SmallVec;

use crate::engine::{EngineError, gather};
use crate::request::{InferRequest, Tensor};

/// One tensor per input that the batch has; `indices` are the session's for the model's inputs.
#[doc(hidden)]
pub fn gather_inputs(
    indices: &[usize],
    requests: &[&InferRequest],
    rows: u32,
) -> SmallVec<[(usize, Tensor); 4]> {
    gather_with(indices, requests, rows, gather)
}

pub(super) fn gather_with(
    indices: &[usize],
    requests: &[&InferRequest],
    rows: u32,
    gather: impl Fn(&[Bytes]) -> Bytes,
) -> SmallVec<[(usize, Tensor); 4]> {
    let mut gathered = SmallVec::new();
    for (input, &index) in indices.iter().enumerate() {
        let Some(first) = requests[0].inputs[input].as_ref() else {
            continue;
        };
        if let [_] = requests {
            gathered.push((index, first.clone()));
            continue;
        }
        let pieces: SmallVec<[Bytes; 8]> = requests
            .iter()
            .filter_map(|request| request.inputs[input].as_ref())
            .map(|tensor| tensor.data.clone())
            .collect();
        let mut shape = first.shape.clone();
        shape[0] = i64::from(rows);
        gathered.push((
            index,
            Tensor {
                datatype: first.datatype,
                shape,
                data: gather(&pieces),
            },
        ));
    }
    gathered
}

/// The outputs that any request of the batch asks for, in the model's order.
pub(super) fn wanted_outputs(requests: &[&InferRequest], outputs: usize) -> SmallVec<[usize; 4]> {
    (0..outputs)
        .filter(|output| {
            requests
                .iter()
                .any(|request| request.outputs.contains(output))
        })
        .collect()
}

/// Deals the rows of a batch's outputs out to its requests.
#[doc(hidden)]
pub fn split_outputs(
    outputs: &[Option<Tensor>],
    requests: &[&InferRequest],
    rows: u32,
    specs: &[TensorSpec],
) -> Result<Vec<Vec<Tensor>>, EngineError> {
    let mut results: Vec<Vec<Tensor>> = Vec::with_capacity(requests.len());
    let mut splitters: SmallVec<[Option<Splitter>; 4]> = SmallVec::new();
    for (tensor, spec) in outputs.iter().zip(specs) {
        splitters.push(match tensor {
            None => None,
            Some(tensor) => Some(Splitter::new(tensor, rows).ok_or_else(|| {
                EngineError::Failed(format!(
                    "output '{}' has shape {:?} for a batch of {rows} rows: its first dimension must be the batch",
                    spec.name, tensor.shape
                ))
            })?),
        });
    }
    for request in requests {
        let mut pieces: SmallVec<[Option<Tensor>; 4]> = splitters
            .iter_mut()
            .map(|splitter| {
                splitter
                    .as_mut()
                    .map(|splitter| splitter.next(request.rows))
            })
            .collect();
        let wanted = request.outputs.iter();
        results.push(wanted.map(|&output| taken(&mut pieces[output])).collect());
    }
    Ok(results)
}

/// Takes an output that a request asked for. Requests name each output once.
pub(super) fn taken(output: &mut Option<Tensor>) -> Tensor {
    output.take().expect("every wanted output was computed")
}

/// Hands out consecutive rows of an output without copying them.
pub(super) struct Splitter<'a> {
    tensor: &'a Tensor,
    offset: usize,
    row_bytes: usize,
    /// Elements per row of a BYTES tensor, whose rows differ in length.
    row_elements: usize,
}

impl<'a> Splitter<'a> {
    pub(super) fn new(tensor: &'a Tensor, rows: u32) -> Option<Self> {
        let (&first, rest) = tensor.shape.split_first()?;
        if first != i64::from(rows) {
            return None;
        }
        let row_elements = usize::try_from(dormouse_core::shape::element_count(rest)?).ok()?;
        Some(Self {
            tensor,
            offset: 0,
            row_bytes: tensor.data.len() / rows as usize,
            row_elements,
        })
    }

    pub(super) fn next(&mut self, rows: u32) -> Tensor {
        let length = match self.tensor.datatype {
            DataType::Bytes => bytes_length(
                &self.tensor.data[self.offset..],
                self.row_elements.saturating_mul(rows as usize),
            ),
            _ => self.row_bytes * rows as usize,
        };
        let data = self.tensor.data.slice(self.offset..self.offset + length);
        self.offset += length;
        let mut shape = self.tensor.shape.clone();
        shape[0] = i64::from(rows);
        Tensor {
            datatype: self.tensor.datatype,
            shape,
            data,
        }
    }
}

/// The bytes that the first `elements` elements of an encoded BYTES tensor take.
fn bytes_length(data: &[u8], elements: usize) -> usize {
    let mut offset = 0;
    for _ in 0..elements {
        let Some(length) = data.get(offset..offset + 4) else {
            break;
        };
        let length = u32::from_le_bytes(length.try_into().expect("four bytes were taken"));
        offset += 4 + length as usize;
    }
    offset.min(data.len())
}

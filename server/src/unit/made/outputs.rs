//! From what the graph gave to the answers, and to what sequences keep.

use dormouse_core::shape::{Shape, element_count};
use smallvec::SmallVec;

use super::inputs::Gathering;
use super::{MadePlaces, Part, PartResult};
use crate::engine::EngineError;
use crate::request::Tensor;
use crate::unit::Unit;
use crate::unit::open::OpenSession;
use crate::unit::rows::Splitter;

/// Which of the session's outputs a run is asked for.
pub(super) struct Wanted {
    pub(super) indices: SmallVec<[usize; 4]>,
    /// For each output of the model, its place in `indices` if a request asks for it.
    outputs: Vec<Option<usize>>,
    /// For each state, its place in `indices`.
    states: Vec<usize>,
}

impl Wanted {
    pub(super) fn of(open: &OpenSession, places: &MadePlaces, parts: &[Part<'_>]) -> Self {
        let mut indices: SmallVec<[usize; 4]> = SmallVec::new();
        // A state may be an output as well.
        let mut place = |index: usize| {
            let known = indices.iter().position(|known| *known == index);
            known.unwrap_or_else(|| {
                indices.push(index);
                indices.len() - 1
            })
        };
        let is_wanted = |output: usize| {
            let mut parts = parts.iter();
            parts.any(|part| part.request.outputs.contains(&output))
        };
        let outputs = open.outputs.iter().enumerate();
        let outputs = outputs
            .map(|(output, &index)| is_wanted(output).then(|| place(index)))
            .collect();
        let states = places.state_outputs.iter().map(|&index| place(index));
        let states = states.collect();
        Self {
            outputs,
            states,
            indices,
        }
    }
}

impl Unit {
    /// Gives each request its outputs, and its sequence the new states.
    pub(super) fn deal_out(
        &self,
        gathering: &Gathering<'_>,
        wanted: &Wanted,
        ran: Vec<Tensor>,
    ) -> Result<Vec<PartResult>, EngineError> {
        let mut results: Vec<PartResult> = Vec::with_capacity(gathering.parts.len());
        results.resize_with(gathering.parts.len(), || PartResult {
            outputs: Vec::new(),
            states: Vec::new(),
        });
        let ragged = self.spec.ragged.as_ref();
        let mut dealt: Vec<Vec<Option<Tensor>>> = Vec::new();
        for (output, place) in wanted.outputs.iter().enumerate() {
            let Some(place) = *place else {
                dealt.push(Vec::new());
                continue;
            };
            let spec = &self.spec.outputs[output];
            let tensor = ran[place].clone();
            let source = ragged.and_then(|ragged| ragged.scattered.get(output).copied().flatten());
            let pieces = match source {
                Some(source) => self.scattered(gathering, (output, source), &tensor)?,
                None => split(gathering, &spec.name, self.reshape_output(spec, tensor)?)?,
            };
            dealt.push(pieces.into_iter().map(Some).collect());
        }
        for (index, (part, result)) in gathering.parts.iter().zip(&mut results).enumerate() {
            let asked = part.request.outputs.iter();
            let outputs = asked.map(|&output| dealt[output][index].take());
            let outputs = outputs.map(|tensor| tensor.expect("every wanted output was computed"));
            result.outputs = outputs.collect();
        }
        let sequence = self.spec.sequence.as_ref();
        let states = sequence.map_or(&[][..], |sequence| &sequence.states);
        for (spec, &place) in states.iter().zip(&wanted.states) {
            let pieces = split(gathering, &spec.output, ran[place].clone())?;
            for (result, piece) in results.iter_mut().zip(pieces) {
                result.states.push(piece);
            }
        }
        Ok(results)
    }

    /// Takes an output apart by the shapes of an input.
    fn scattered(
        &self,
        gathering: &Gathering<'_>,
        (output, source): (usize, usize),
        tensor: &Tensor,
    ) -> Result<Vec<Tensor>, EngineError> {
        let spec = &self.spec.outputs[output];
        let failed = || {
            EngineError::Failed(format!(
                "output '{}' of shape {:?} cannot be dealt out by the shapes of input '{}'",
                spec.name, tensor.shape, self.spec.inputs[source].name
            ))
        };
        let batch = usize::from(self.spec.max_batch_size > 0);
        let open = std::iter::repeat_n(-1, batch);
        let dims: Shape = open.chain(spec.dims.iter().copied()).collect();
        let size = spec.datatype.element_size().ok_or_else(failed)?;
        let mut offset = 0usize;
        let mut pieces = Vec::with_capacity(gathering.parts.len());
        for (slot, of_input) in gathering.slots.iter().zip(gathering.shapes(source)) {
            let mut shape = dims.clone();
            for (place, dim) in shape.iter_mut().enumerate() {
                if *dim == -1 {
                    *dim = *of_input.get(place).ok_or_else(failed)?;
                }
            }
            let bytes = element_count(&shape)
                .and_then(|count| usize::try_from(count).ok())
                .and_then(|count| count.checked_mul(size));
            let end = bytes
                .and_then(|bytes| offset.checked_add(bytes))
                .filter(|&end| end <= tensor.data.len())
                .ok_or_else(failed)?;
            if slot.is_some() {
                pieces.push(Tensor {
                    datatype: tensor.datatype,
                    shape,
                    data: tensor.data.slice(offset..end),
                });
            }
            offset = end;
        }
        match offset == tensor.data.len() {
            true => Ok(pieces),
            false => Err(failed()),
        }
    }
}

/// Takes a tensor apart by rows.
fn split(
    gathering: &Gathering<'_>,
    name: &str,
    tensor: Tensor,
) -> Result<Vec<Tensor>, EngineError> {
    // A request that has the run to itself gets what the graph gave.
    if let [_] = gathering.slots[..] {
        return Ok(vec![tensor]);
    }
    let mut splitter = Splitter::new(&tensor, gathering.rows).ok_or_else(|| {
        EngineError::Failed(format!(
            "output '{name}' has shape {:?} for a batch of {} rows: its first dimension must be \
             the batch",
            tensor.shape, gathering.rows
        ))
    })?;
    let mut pieces = Vec::with_capacity(gathering.parts.len());
    for slot in &gathering.slots {
        match slot {
            Some(part) => pieces.push(splitter.next(gathering.parts[*part].request.rows)),
            None => drop(splitter.next(1)),
        }
    }
    Ok(pieces)
}

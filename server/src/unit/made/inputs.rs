//! From the requests of a run to what the graph is given.

use bytes::Bytes;
use dormouse_core::datatype::DataType;
use dormouse_core::sequence::SequenceId;
use dormouse_core::shape::{Shape, element_count};
use dormouse_model_store::spec::{
    BatchInputKind, BatchInputSpec, ControlKind, ControlSpec, Marks, ModelSpec,
};
use smallvec::SmallVec;

use super::{MadePlaces, Part};
use crate::engine::{EngineError, gather};
use crate::request::Tensor;

/// The requests of a run and the empty rows between them.
pub(super) struct Gathering<'a> {
    pub(super) spec: &'a ModelSpec,
    pub(super) parts: &'a [Part<'a>],
    /// In the order of the batch; none for a row that no sequence has a request for.
    pub(super) slots: Vec<Option<usize>>,
    /// Rows of the whole batch.
    pub(super) rows: u32,
    initial: &'a [Tensor],
}

impl<'a> Gathering<'a> {
    pub(super) fn new(spec: &'a ModelSpec, parts: &'a [Part<'a>], initial: &'a [Tensor]) -> Self {
        let mut slots = Vec::with_capacity(parts.len());
        for (index, part) in parts.iter().enumerate() {
            if let Some(row) = part.row {
                // Parts come in the order of their rows.
                slots.resize((row as usize).max(slots.len()), None);
            }
            slots.push(Some(index));
        }
        let rows_of = |slot: &Option<usize>| slot.map_or(1, |part| parts[part].request.rows);
        let rows = slots.iter().map(rows_of).fold(0, u32::saturating_add);
        Self {
            spec,
            parts,
            slots,
            rows,
            initial,
        }
    }

    /// The requests in order, none for an empty row.
    fn each(&self) -> impl Iterator<Item = Option<&Part<'a>>> {
        self.slots
            .iter()
            .map(|slot| slot.map(|part| &self.parts[part]))
    }

    /// The input of each request in order; an empty row has the shape of the first one's.
    pub(super) fn shapes(&self, input: usize) -> impl Iterator<Item = &Shape> {
        let first = self.parts[0].request.inputs[input].as_ref();
        self.each().filter_map(move |part| {
            let of_part = part.map(|part| part.request.inputs[input].as_ref());
            of_part.unwrap_or(first).map(|tensor| &tensor.shape)
        })
    }

    pub(super) fn inputs(
        &self,
        indices: &[usize],
        places: &MadePlaces,
    ) -> Result<Vec<(usize, Tensor)>, EngineError> {
        let mut inputs = Vec::new();
        for (input, &index) in indices.iter().enumerate() {
            if let Some(tensor) = self.given(input) {
                inputs.push((index, tensor));
            }
        }
        if let Some(ragged) = &self.spec.ragged {
            for (batch_input, &index) in ragged.batch_inputs.iter().zip(&places.batch_inputs) {
                inputs.push((index, self.batch_input(batch_input)?));
            }
        }
        if let Some(sequence) = &self.spec.sequence {
            for (control, &index) in sequence.controls.iter().zip(&places.controls) {
                inputs.push((index, self.control(control)));
            }
            for (state, &index) in places.state_inputs.iter().enumerate() {
                inputs.push((index, self.state(state)));
            }
        }
        Ok(inputs)
    }

    /// An input that the requests give; none where an optional one is left out.
    fn given(&self, input: usize) -> Option<Tensor> {
        let first = self.parts[0].request.inputs[input].as_ref()?;
        let mut empty = None;
        let pieces: SmallVec<[Bytes; 8]> = self
            .each()
            .map(|part| match part {
                Some(part) => {
                    let tensor = part.request.inputs[input].as_ref();
                    tensor.map(|tensor| tensor.data.clone()).unwrap_or_default()
                }
                None => empty.get_or_insert_with(|| zeros(first)).clone(),
            })
            .collect();
        let is_ragged = |ragged: &[bool]| ragged.get(input).copied().unwrap_or(false);
        let ragged = self.spec.ragged.as_ref();
        let shape = if ragged.is_some_and(|ragged| is_ragged(&ragged.inputs)) {
            let counts = self.shapes(input).filter_map(|shape| element_count(shape));
            let total: u64 = counts.sum();
            // The elements are there, so they fit.
            Shape::from_slice(&[i64::try_from(total).unwrap_or(i64::MAX)])
        } else {
            self.stacked(first)
        };
        Some(Tensor {
            datatype: first.datatype,
            shape,
            data: gather(&pieces),
        })
    }

    /// A request's shape with the rows of the whole batch.
    fn stacked(&self, first: &Tensor) -> Shape {
        let mut shape = first.shape.clone();
        if self.spec.max_batch_size > 0
            && let Some(rows) = shape.first_mut()
        {
            *rows = i64::from(self.rows);
        }
        shape
    }

    fn control(&self, control: &ControlSpec) -> Tensor {
        let mut data = Vec::new();
        for part in self.each() {
            let step = part
                .and_then(|part| part.request.sequence.as_ref())
                .map(|sequence| &sequence.step);
            let mark = |marks: &Marks, yes: bool, data: &mut Vec<u8>| {
                data.extend_from_slice(if yes { &marks.yes } else { &marks.no });
            };
            match &control.kind {
                ControlKind::Start(marks) => {
                    mark(marks, step.is_some_and(|step| step.start), &mut data);
                }
                ControlKind::End(marks) => {
                    mark(marks, step.is_some_and(|step| step.end), &mut data);
                }
                ControlKind::Ready(marks) => mark(marks, step.is_some(), &mut data),
                ControlKind::CorrelationId => {
                    put_id(step.map(|step| &step.id), control.datatype, &mut data);
                }
            }
        }
        let batch = (self.spec.max_batch_size > 0).then_some(i64::from(self.rows));
        Tensor {
            datatype: control.datatype,
            shape: batch.into_iter().chain([1]).collect(),
            data: data.into(),
        }
    }

    fn state(&self, state: usize) -> Tensor {
        let of_part = |part: &Part<'a>| part.states_or(self.initial)[state].clone();
        let first = of_part(&self.parts[0]);
        let mut empty = None;
        let pieces: SmallVec<[Bytes; 8]> = self
            .each()
            .map(|part| match part {
                Some(part) => of_part(part).data,
                None => empty.get_or_insert_with(|| zeros(&first)).clone(),
            })
            .collect();
        Tensor {
            datatype: first.datatype,
            shape: self.stacked(&first),
            data: gather(&pieces),
        }
    }

    fn batch_input(&self, spec: &BatchInputSpec) -> Result<Tensor, EngineError> {
        let shapes = || self.shapes(spec.source);
        let count = |shape: &Shape| {
            element_count(shape)
                .and_then(|count| i64::try_from(count).ok())
                .unwrap_or(i64::MAX)
        };
        let counts = || shapes().map(count);
        let accumulated = || {
            counts().scan(0i64, |sum, count| {
                *sum = sum.saturating_add(count);
                Some(*sum)
            })
        };
        let mut numbers: Vec<i64> = Vec::new();
        let mut width = None;
        match spec.kind {
            BatchInputKind::ElementCount => numbers.extend(counts()),
            BatchInputKind::AccumulatedElementCount => numbers.extend(accumulated()),
            BatchInputKind::AccumulatedElementCountWithZero => {
                numbers.extend([0].into_iter().chain(accumulated()));
            }
            BatchInputKind::MaxElementCountAsShape => {
                let longest = counts().max().unwrap_or(0);
                let longest = usize::try_from(longest).unwrap_or(0);
                numbers.resize(longest, 0);
            }
            BatchInputKind::ItemShape | BatchInputKind::ItemShapeFlatten => {
                let batch = usize::from(self.spec.max_batch_size > 0);
                for shape in shapes() {
                    let rows = if batch == 1 { shape[0] } else { 1 };
                    let dims = &shape[batch..];
                    if spec.kind == BatchInputKind::ItemShape {
                        width = Some(dims.len());
                    }
                    for _ in 0..rows {
                        numbers.extend_from_slice(dims);
                    }
                }
            }
        }
        let length = numbers.len();
        let shape: Shape = match width {
            None => [length as i64].into_iter().collect(),
            Some(width) => [(length / width.max(1)) as i64, width as i64]
                .into_iter()
                .collect(),
        };
        let mut data = Vec::with_capacity(length * 4);
        for number in numbers {
            match spec.datatype {
                DataType::Fp32 => data.extend_from_slice(&(number as f32).to_le_bytes()),
                _ => {
                    let number = i32::try_from(number).map_err(|_| {
                        EngineError::Failed(format!(
                            "batch input '{}' would hold {number}, which INT32 cannot",
                            spec.name
                        ))
                    })?;
                    data.extend_from_slice(&number.to_le_bytes());
                }
            }
        }
        Ok(Tensor {
            datatype: spec.datatype,
            shape,
            data: data.into(),
        })
    }
}

/// What an empty row holds in place of a tensor: zeros, or empty strings.
fn zeros(like: &Tensor) -> Bytes {
    let length = match like.datatype {
        DataType::Bytes => {
            let elements = element_count(&like.shape).unwrap_or(0);
            usize::try_from(elements).unwrap_or(0).saturating_mul(4)
        }
        _ => like.data.len(),
    };
    vec![0; length].into()
}

/// A sequence's id as the graph is told it; zero or nothing for an empty row.
fn put_id(id: Option<&SequenceId>, datatype: DataType, data: &mut Vec<u8>) {
    let number = match id {
        Some(SequenceId::Number(number)) => *number,
        Some(SequenceId::Text(_)) | None => 0,
    };
    match datatype {
        DataType::Bytes => {
            let text = id.map(ToString::to_string).unwrap_or_default();
            // Ids of more than 128 bytes were refused.
            data.extend_from_slice(&(text.len() as u32).to_le_bytes());
            data.extend_from_slice(text.as_bytes());
        }
        // As in Triton, the low bytes of a number that is too large.
        DataType::Uint32 | DataType::Int32 => {
            data.extend_from_slice(&number.to_le_bytes()[..4]);
        }
        _ => data.extend_from_slice(&number.to_le_bytes()),
    }
}

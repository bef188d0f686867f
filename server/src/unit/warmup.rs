//! Runs that a model's configuration asks for before its first request.

use dormouse_core::datatype::DataType;
use dormouse_core::sequence::{SequenceId, Step};
use dormouse_core::shape::{Shape, element_count};
use dormouse_core::time::Timestamp;
use dormouse_model_store::spec::{TensorSpec, WarmupData, WarmupInput, WarmupSpec};

use super::Unit;
use super::open::OpenSession;
use crate::error::ServeError;
use crate::request::{InferRequest, SequenceStep, Tensor};
use crate::sample;

impl Unit {
    pub(super) fn warm_up(
        &self,
        open: &OpenSession,
        warmup: &WarmupSpec,
    ) -> Result<(), ServeError> {
        let failed = |cause: &dyn std::fmt::Display| {
            ServeError::unavailable(format!(
                "warm-up '{}' of model {} failed: {cause}",
                warmup.name, self.id
            ))
        };
        let mut inputs = Vec::new();
        for (spec, &index) in self.spec.inputs.iter().zip(&open.inputs) {
            let Some(input) = warmup.inputs.iter().find(|input| *input.name == *spec.name) else {
                continue;
            };
            inputs.push((index, self.warmup_tensor(spec, input, warmup)?));
        }
        if open.made.is_some() {
            return self.warm_up_made(open, warmup);
        }
        for _ in 0..warmup.count.max(1) {
            let stop = open.session.stop_handle().map_err(|error| failed(&error))?;
            open.session
                .run(&inputs, &open.outputs, &stop)
                .map_err(|error| failed(&error))?;
        }
        Ok(())
    }

    /// Warms up a graph that needs more than requests give it.
    fn warm_up_made(&self, open: &OpenSession, warmup: &WarmupSpec) -> Result<(), ServeError> {
        // A sequence's requests have one row.
        let rows = match self.spec.sequence {
            Some(_) => 1,
            None => warmup.rows,
        };
        let warmup = &WarmupSpec {
            rows,
            ..warmup.clone()
        };
        let inputs = self.spec.inputs.iter().map(|spec| {
            let input = warmup.inputs.iter().find(|input| *input.name == *spec.name);
            input
                .map(|input| self.warmup_tensor(spec, input, warmup))
                .transpose()
        });
        let step = Step {
            id: SequenceId::Number(1),
            start: true,
            end: true,
        };
        let request = InferRequest {
            id: String::new(),
            inputs: inputs.collect::<Result<_, _>>()?,
            outputs: (0..self.spec.outputs.len()).collect(),
            rows,
            priority: 0,
            deadline: None,
            received: Timestamp::ZERO,
            span: None,
            held: None,
            sequence: self
                .spec
                .sequence
                .as_ref()
                .map(|_| Box::new(SequenceStep { step, turn: None })),
        };
        for _ in 0..warmup.count.max(1) {
            self.try_out(open, &request).map_err(|error| {
                ServeError::unavailable(format!(
                    "warm-up '{}' of model {} failed: {error}",
                    warmup.name, self.id
                ))
            })?;
        }
        Ok(())
    }

    fn warmup_tensor(
        &self,
        spec: &TensorSpec,
        input: &WarmupInput,
        warmup: &WarmupSpec,
    ) -> Result<Tensor, ServeError> {
        let batch = (self.spec.max_batch_size > 0).then_some(i64::from(warmup.rows));
        let dims = spec.reshape.as_ref().unwrap_or(&input.dims);
        let shape: Shape = batch.into_iter().chain(dims.iter().copied()).collect();
        let too_large = || {
            ServeError::unavailable(format!(
                "warm-up '{}' of model {}: input '{}' is too large",
                warmup.name, self.id, input.name
            ))
        };
        let data = match (&input.data, input.datatype) {
            (WarmupData::File(name), _) => {
                let row = self.source.warmup_file(name)?;
                let rows = usize::try_from(batch.unwrap_or(1)).ok();
                let rows = rows.filter(|rows| {
                    let size = row.len().checked_mul(*rows);
                    size.is_some_and(|size| size as u64 <= sample::MAX_BYTES)
                });
                row.repeat(rows.ok_or_else(too_large)?)
            }
            // An empty string is four zero bytes of length.
            (_, DataType::Bytes) => vec![
                0;
                element_count(&shape)
                    .and_then(|count| count.checked_mul(4))
                    .filter(|&bytes| bytes <= sample::MAX_BYTES)
                    .and_then(|bytes| usize::try_from(bytes).ok())
                    .ok_or_else(too_large)?
            ],
            (WarmupData::Zero, datatype) => {
                vec![0; sample::size(datatype, &shape).ok_or_else(too_large)?]
            }
            (WarmupData::Random, datatype) => sample::values(
                datatype,
                sample::size(datatype, &shape).ok_or_else(too_large)?,
            ),
        };
        Ok(Tensor {
            datatype: input.datatype,
            shape,
            data: data.into(),
        })
    }
}

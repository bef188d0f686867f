//! Runs of graphs with inputs that no request gives: controls and states of sequences, and what a
//! ragged batch is described by.

mod inputs;
mod outputs;
#[cfg(test)]
mod tests;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use dormouse_core::sequence::{FinishedSteps, Outcome, SequenceKey};
use dormouse_core::shape::{Shape, element_count};
use dormouse_model_store::spec::ModelSpec;
use smallvec::SmallVec;

use self::inputs::Gathering;
use super::Unit;
use super::open::OpenSession;
use super::queue::Steps;
use super::run::{Finished, Run};
use crate::activity::Hold;
use crate::engine::{EngineError, Session, SessionTensor, StopHandle};
use crate::error::ServeError;
use crate::host::InFlightBytes;
use crate::request::{InferRequest, Tensor};
use crate::stats::RunDurations;

/// The session's indices of the tensors that the server makes and keeps.
#[derive(Debug)]
pub(super) struct MadePlaces {
    controls: Vec<usize>,
    state_inputs: Vec<usize>,
    state_outputs: Vec<usize>,
    batch_inputs: Vec<usize>,
    /// Runs whose requests have equal shapes may still differ in what the graph is given.
    pub(super) shapes_vary: bool,
}

/// What is kept of a sequence between its requests.
#[derive(Debug)]
pub(super) struct Kept {
    states: Vec<Tensor>,
    _bytes: InFlightBytes,
    /// The server is not idle while a sequence may go on.
    _hold: Hold,
}

/// A request in a run.
pub(super) struct Part<'a> {
    pub(super) request: &'a InferRequest,
    /// Its row, in a run of steps.
    row: Option<u32>,
    /// What its sequence left.
    states: &'a [Tensor],
}

/// What a run gives one of its requests.
pub(super) struct PartResult {
    pub(super) outputs: Vec<Tensor>,
    states: Vec<Tensor>,
}

/// What became of a run's requests.
#[derive(Default)]
struct Computed {
    results: Vec<Result<PartResult, EngineError>>,
    took: RunDurations,
    executions: SmallVec<[(u32, RunDurations); 1]>,
}

impl Computed {
    fn failed(parts: &[Part<'_>], error: &EngineError) -> Self {
        Self {
            results: parts.iter().map(|_| Err(error.clone())).collect(),
            ..Self::default()
        }
    }
}

impl MadePlaces {
    /// Finds the made tensors in the session; none when the model has no such.
    pub(super) fn find(
        spec: &ModelSpec,
        session: &dyn Session,
    ) -> Result<Option<Box<Self>>, ServeError> {
        if spec.sequence.is_none() && spec.ragged.is_none() {
            return Ok(None);
        }
        let inputs = || session.inputs().iter().chain(session.optional_inputs());
        let place = |name: &str, found: Option<usize>| {
            found.ok_or_else(|| {
                ServeError::unavailable(format!(
                    "the configuration of model '{}' names '{name}', which the graph does not have",
                    spec.name
                ))
            })
        };
        let is = |name: &str| {
            let name = name.to_owned();
            move |tensor: &SessionTensor| tensor.name == name
        };
        let input = |name: &str| place(name, inputs().position(is(name)));
        let output = |name: &str| place(name, session.outputs().iter().position(is(name)));
        let mut places = Self {
            controls: Vec::new(),
            state_inputs: Vec::new(),
            state_outputs: Vec::new(),
            batch_inputs: Vec::new(),
            shapes_vary: spec.ragged.is_some(),
        };
        if let Some(sequence) = &spec.sequence {
            for control in &sequence.controls {
                places.controls.push(input(&control.name)?);
            }
            for state in &sequence.states {
                places.state_inputs.push(input(&state.input)?);
                places.state_outputs.push(output(&state.output)?);
                places.shapes_vary |= state.dims.contains(&-1);
            }
        }
        if let Some(ragged) = &spec.ragged {
            for batch_input in &ragged.batch_inputs {
                places.batch_inputs.push(input(&batch_input.name)?);
            }
        }
        Ok(Some(Box::new(places)))
    }
}

impl Unit {
    /// Reads what the first request of a sequence is given.
    pub(super) fn read_initial_states(&self) -> Result<(), ServeError> {
        let Some(sequence) = &self.spec.sequence else {
            return Ok(());
        };
        let states = sequence.states.iter().map(|state| {
            let batch = (self.spec.max_batch_size > 0).then_some(1);
            let dims = state.initial.dims.iter().copied();
            let shape: Shape = batch.into_iter().chain(dims).collect();
            let wrong = |what: String| {
                ServeError::unavailable(format!(
                    "the initial state of '{}' of model {} cannot be used: {what}",
                    state.input, self.id
                ))
            };
            let count = element_count(&shape).ok_or_else(|| wrong("it is too large".into()))?;
            // An empty string is four zero bytes of length.
            let size = state.datatype.element_size().unwrap_or(4) as u64;
            let bytes = count.checked_mul(size);
            let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
            let bytes = bytes.ok_or_else(|| wrong("it is too large".into()))?;
            let data = match &state.initial.file {
                None => vec![0; bytes],
                Some(file) => {
                    let mut data = self.source.initial_state_file(file)?;
                    if state.datatype.element_size().is_some() {
                        if data.len() < bytes {
                            return Err(wrong(format!(
                                "expected {bytes} bytes, but the data provided from '{file}' only \
                                 has {} bytes",
                                data.len()
                            )));
                        }
                        data.truncate(bytes);
                    }
                    data
                }
            };
            Ok(Tensor {
                datatype: state.datatype,
                shape,
                data: data.into(),
            })
        });
        let states: Arc<[Tensor]> = states.collect::<Result<_, _>>()?;
        *self.initial_states.lock() = states;
        Ok(())
    }

    /// Runs a batch of a graph with made inputs. Also says what becomes of its sequences.
    pub(super) fn compute_made(&self, run: &mut Run) -> (Finished, Option<FinishedSteps<Kept>>) {
        let steps = run.steps.take();
        let parts = self.parts(run, steps.as_deref());
        let mut computed = match &run.stop {
            Ok(stop) => self.compute_or_divide(&run.session, &parts, stop),
            Err(error) => Computed::failed(&parts, error),
        };
        drop(parts);
        let finished_steps = steps.map(|steps| self.outcomes(run, *steps, &mut computed.results));
        let results = computed.results.into_iter();
        let finished = Finished {
            results: results
                .map(|result| result.map(|result| result.outputs))
                .collect(),
            took: computed.took,
            executions: computed.executions,
            ended: self.host.clock.now(),
        };
        (finished, finished_steps)
    }

    /// Runs requests together; when they fail as a whole or cannot meet, each on its own.
    fn compute_or_divide(
        &self,
        open: &OpenSession,
        parts: &[Part<'_>],
        stop: &StopHandle,
    ) -> Computed {
        if self.states_agree(parts) {
            match self.compute_parts(open, parts, stop) {
                Ok((results, took)) => {
                    let rows = parts.iter().map(|part| part.request.rows).sum();
                    return Computed {
                        results: results.into_iter().map(Ok).collect(),
                        took,
                        executions: SmallVec::from_iter([(rows, took)]),
                    };
                }
                Err(error) if parts.len() == 1 || matches!(error, EngineError::Terminated) => {
                    return Computed::failed(parts, &error);
                }
                Err(error) => {
                    tracing::warn!(model = %self.id, %error, requests = parts.len(), "a batch failed; running its requests one by one");
                }
            }
        }
        let mut computed = Computed::default();
        for part in parts {
            let deadline = part.request.deadline;
            if deadline.is_some_and(|deadline| deadline <= self.host.clock.now()) {
                computed.results.push(Err(EngineError::Terminated));
                continue;
            }
            let alone = Part {
                row: part.row.map(|_| 0),
                ..*part
            };
            let result = self.compute_parts(open, &[alone], stop);
            computed.results.push(result.map(|(mut results, took)| {
                computed.took = took;
                computed.executions.push((part.request.rows, took));
                results.pop().expect("one request has one result")
            }));
        }
        computed
    }

    fn parts<'a>(&self, run: &'a Run, steps: Option<&'a Steps>) -> Vec<Part<'a>> {
        let entries = run.entries.iter().enumerate();
        let parts = entries.map(|(index, (_, pending, _))| {
            let step = steps.map(|steps| &steps.steps[index]);
            let kept = step.and_then(|step| step.state.as_ref());
            Part {
                request: &pending.request,
                row: step.map(|step| step.row),
                states: kept.map_or(&[], |kept| &kept.states),
            }
        });
        parts.collect()
    }

    /// States of different shapes cannot be rows of one tensor.
    fn states_agree(&self, parts: &[Part<'_>]) -> bool {
        let initial = self.initial_states.lock().clone();
        let shapes = |part: &Part<'_>| -> SmallVec<[Shape; 2]> {
            let states = part.states_or(&initial);
            states.iter().map(|state| state.shape.clone()).collect()
        };
        let Some((first, rest)) = parts.split_first() else {
            return true;
        };
        rest.is_empty() || {
            let expected = shapes(first);
            rest.iter().all(|part| shapes(part) == expected)
        }
    }

    /// What each sequence goes on from.
    fn outcomes(
        &self,
        run: &Run,
        steps: Steps,
        results: &mut [Result<PartResult, EngineError>],
    ) -> FinishedSteps<Kept> {
        // A step alone in its batch has the tensor to itself, unless that is in memory shared
        // with a worker, or there are empty rows before it.
        let shares = results.len() > 1
            || run.session.session.is_remote()
            || steps.steps.iter().any(|step| step.row > 0);
        let entries = run.entries.iter().zip(results);
        let outcome = |before: Option<Kept>,
                       ((_, pending, _), result): (
            &(_, super::Pending, _),
            &mut Result<PartResult, _>,
        )| {
            match result {
                Ok(result) => {
                    let states = std::mem::take(&mut result.states).into_iter();
                    // Not as a slice of what the whole batch gave, which would stay with it.
                    let states = states.map(|state| match shares {
                        true => state.detached(),
                        false => state,
                    });
                    Outcome::GoesOn(Some(self.kept(states.collect())))
                }
                Err(EngineError::Terminated) => Outcome::Broken,
                Err(EngineError::Failed(_) | EngineError::Lost(_)) => {
                    let sequence = pending.request.sequence.as_ref();
                    let starts = sequence.is_some_and(|sequence| sequence.step.start);
                    Outcome::GoesOn(before.filter(|_| !starts))
                }
            }
        };
        let outcomes = steps.steps.into_iter().zip(entries);
        let outcomes: Vec<(SequenceKey, Outcome<Kept>)> = outcomes
            .map(|(step, entry)| (step.key, outcome(step.state, entry)))
            .collect();
        FinishedSteps {
            outcomes,
            lane: steps.lane,
        }
    }

    fn kept(&self, states: Vec<Tensor>) -> Kept {
        let bytes = states.iter().map(|state| state.data.len() as u64).sum();
        Kept {
            states,
            _bytes: self.host.in_flight.hold(bytes),
            _hold: self.host.activity.hold(),
        }
    }

    fn compute_parts(
        &self,
        open: &OpenSession,
        parts: &[Part<'_>],
        stop: &StopHandle,
    ) -> Result<(Vec<PartResult>, RunDurations), EngineError> {
        let places = open.made.as_ref().expect("the model has made tensors");
        // All of it, not the engine alone: a run that never ends keeps its slot for ever.
        catch_unwind(AssertUnwindSafe(|| {
            self.compute_parts_unguarded(open, places, parts, stop)
        }))
        .unwrap_or_else(|_| Err(EngineError::Failed("the engine panicked".into())))
    }

    fn compute_parts_unguarded(
        &self,
        open: &OpenSession,
        places: &MadePlaces,
        parts: &[Part<'_>],
        stop: &StopHandle,
    ) -> Result<(Vec<PartResult>, RunDurations), EngineError> {
        let clock = &self.host.clock;
        let start = clock.now();
        let initial = self.initial_states.lock().clone();
        let gathering = Gathering::new(&self.spec, parts, &initial);
        let inputs = gathering.inputs(&open.inputs, places)?;
        let gathered = clock.now();
        let wanted = outputs::Wanted::of(open, places, parts);
        let ran = open.session.run(&inputs, &wanted.indices, stop)?;
        drop(inputs);
        let inferred = clock.now();
        let results = self.deal_out(&gathering, &wanted, ran)?;
        let took = RunDurations {
            compute_input: gathered - start,
            compute_infer: inferred - gathered,
            compute_output: clock.now() - inferred,
        };
        Ok((results, took))
    }

    /// Runs one request as if nobody had called before it, for a warm-up.
    pub(super) fn try_out(
        &self,
        open: &OpenSession,
        request: &InferRequest,
    ) -> Result<(), EngineError> {
        let part = Part {
            request,
            row: request.sequence.as_ref().map(|_| 0),
            states: &[],
        };
        let stop = open.session.stop_handle()?;
        self.compute_parts(open, &[part], &stop).map(drop)
    }
}

impl<'a> Part<'a> {
    fn starts(&self) -> bool {
        let sequence = self.request.sequence.as_ref();
        sequence.is_some_and(|sequence| sequence.step.start)
    }

    /// What the sequence left, or what every sequence begins with.
    fn states_or<'b>(&self, initial: &'b [Tensor]) -> &'b [Tensor]
    where
        'a: 'b,
    {
        match self.starts() || self.states.len() != initial.len() {
            true => initial,
            false => self.states,
        }
    }
}

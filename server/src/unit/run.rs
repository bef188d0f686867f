//! Runs a batch and answers each of its requests.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::batch::EntryId;
use dormouse_core::lifecycle::Stage;
use dormouse_core::sequence::FinishedSteps;
use dormouse_core::shape::Shape;
use dormouse_core::time::Timestamp;
use dormouse_model_store::spec::TensorSpec;
use smallvec::SmallVec;

use super::effects::{Answer, Effects, Failure, Place, release_in_order};
use super::made::Kept;
use super::open::OpenSession;
use super::queue::{Steps, Taken};
use super::rows::{gather_with, split_outputs, taken, wanted_outputs};
use super::{KnownRun, Pending, RunInfo, RunShapes, SHORT_RUN, State, Unit};
use crate::engine::{EngineError, StopHandle, gather_for};
use crate::error::ServeError;
use crate::metrics::{FailureReason, Phase};
use crate::priority::{LONG_TURN, take_turns_of};
use crate::request::{InferRequest, InferResponse, Tensor};
use crate::spans::Ran;
use crate::stats::RunDurations;
use crate::timeline::{ColdRequest, ColdStart, TimelineRecorder};

/// A batch that has left the queue and holds a run slot.
pub(super) struct Run {
    id: u64,
    /// As they left the queue, with the time they came into it.
    pub(super) entries: Vec<(EntryId, Pending, Timestamp)>,
    rows: u32,
    /// What the requests are to their sequences.
    pub(super) steps: Option<Box<Steps>>,
    pub(super) session: Arc<OpenSession>,
    pub(super) stop: Result<StopHandle, EngineError>,
    /// Of the load that requests of the run waited for.
    timeline: Option<TimelineRecorder>,
    is_short: bool,
}

/// A finished run's outputs, one list per request, and how long it took.
pub(super) struct Finished {
    pub(super) results: Vec<Result<Vec<Tensor>, EngineError>>,
    pub(super) took: RunDurations,
    pub(super) executions: SmallVec<[(u32, RunDurations); 1]>,
    pub(super) ended: Timestamp,
}

impl Unit {
    /// Makes a run of a batch and enters it into the state.
    pub(super) fn prepare_run(&self, state: &mut State, taken: Taken, now: Timestamp) -> Run {
        let Taken { batch, steps } = taken;
        let session = Arc::clone(
            state
                .session
                .as_ref()
                .expect("batches are taken only while there is a session"),
        );
        let id = state.runs_issued;
        state.runs_issued += 1;
        let stop = session.session.stop_handle();
        state.runs.push(RunInfo {
            id,
            started: now,
            members: batch.entries.iter().map(|(entry, ..)| *entry).collect(),
            stop: stop.as_ref().ok().cloned(),
            alone: batch.alone,
        });
        state.at_once.started(now);
        state.lifecycle.run_started(now);
        self.metrics().pending.decrement(batch.entries.len());
        let is_cold = batch.entries.iter().any(|(_, pending, _)| pending.cold);
        let first = &batch.entries[0].1.request;
        let is_short = state.latest.as_ref().is_some_and(|latest| {
            latest.took[size_class(batch.rows)] < SHORT_RUN && self.has_shapes(first, latest)
        });
        Run {
            id,
            rows: batch.rows,
            entries: batch.entries,
            steps,
            session,
            stop,
            timeline: is_cold.then(|| state.timeline.clone()).flatten(),
            is_short,
        }
    }

    /// Runs a batch here, if it is short and that is allowed, or on a thread for blocking work.
    pub(super) fn start_run(&self, run: Run, place: Place) {
        if place == Place::HereIfShort && run.is_short {
            if let Some(next) = self.execute(run) {
                self.start_run(next, Place::Elsewhere);
            }
        } else {
            let unit = self.arc();
            self.host.runtime.spawn_blocking(move || {
                // As those of the pool do, one of which may be computing for somebody else.
                take_turns_of(LONG_TURN);
                // Under load the next batch waits already: another thread would have to be woken
                // for it, and be given a core.
                let mut next = Some(run);
                while let Some(run) = next {
                    next = unit.execute(run);
                }
            });
        }
    }

    /// Runs a batch and answers its requests. What can be run next is given to the caller.
    fn execute(&self, mut run: Run) -> Option<Run> {
        let clock = &self.host.clock;
        let started = clock.now();
        let (finished, finished_steps) = self.compute(&mut run, started);
        let ended = finished.ended;
        let Run {
            id,
            entries,
            rows,
            session,
            stop,
            timeline,
            ..
        } = run;
        let requests = entries.len();
        let made = session.made.as_ref();
        let is_steady = session.is_steady && !made.is_some_and(|made| made.shapes_vary);
        let load = timeline.as_ref().map(|recorder| {
            recorder.first_run(started, ended);
            Arc::new(recorder.timeline())
        });
        // Given up before the end of the run is known: whoever closes the session then holds the
        // last of it, and has freed its memory when it says so.
        drop((session, stop));

        let mut effects = Effects::default();
        for (rows, took) in &finished.executions {
            self.counters.executed(*rows, took);
            self.metrics().executions.increment(1);
            self.metrics().inferences.increment(u64::from(*rows));
            self.metrics().batch_rows.record(u64::from(*rows));
        }
        let mut lost = None;
        let mut state = self.state.lock();
        // Not when requests had to be run one by one: the time is then not that of one batch.
        if matches!(finished.executions[..], [(executed, _)] if executed == rows) {
            let took = ended - started;
            match &load {
                // Not a usual run: it read in what had been dropped.
                Some(load) if load.kind == ColdStart::Parked => {
                    state.profile.record_resume(rows, took);
                }
                _ => state.profile.record_run(rows, took),
            }
            if is_steady {
                self.note_run(&mut state.latest, &entries[0].1.request, (rows, took));
            }
        }
        if let Some(steps) = finished_steps {
            state.batcher.finish(steps, ended);
        }
        for ((_, pending, _), result) in entries.into_iter().zip(finished.results) {
            match result {
                Ok(tensors) if !pending.reply.is_closed() => {
                    let queued = started - pending.enqueued;
                    if pending.request.deadline.is_some() {
                        state.profile.waited_with_success();
                    }
                    self.succeeded(ended - pending.request.received, queued, &finished.took);
                    if let Some(span) = &pending.request.span {
                        let woken = load.as_ref().filter(|_| pending.cold);
                        span.ran(Ran {
                            version: self.id.version.0,
                            rows: pending.request.rows,
                            batch_rows: rows,
                            queued,
                            took: finished.took,
                            woken: woken.map(|load| {
                                let span = timeline.as_ref().and_then(TimelineRecorder::span);
                                (load.kind.label(), span)
                            }),
                        });
                    }
                    let mut response = self.response(&pending, tensors);
                    response.cold_start = load.as_ref().filter(|_| pending.cold).map(|load| {
                        let total = ended - pending.request.received;
                        self.host.metrics.cold_start(load.kind.label(), total);
                        Box::new(ColdRequest {
                            load: Arc::clone(load),
                            waited: started - pending.request.received,
                            run: ended - started,
                            total,
                        })
                    });
                    let answer = Answer {
                        reply: pending.reply,
                        result: Ok(response),
                    };
                    release_in_order(&mut state, &mut effects, pending.sequence, answer);
                }
                Ok(_) => {
                    // Nobody is there to read it; what counts is that it was given up.
                    let reason = abandoned_reason(&pending.request, ended);
                    self.fail(
                        &mut state,
                        &mut effects,
                        pending,
                        Failure {
                            error: self.deadline_exceeded(),
                            reason,
                        },
                    );
                }
                Err(error) => {
                    let reason = match error {
                        EngineError::Terminated => abandoned_reason(&pending.request, ended),
                        EngineError::Failed(_) | EngineError::Lost(_) => FailureReason::Backend,
                    };
                    let error = match error {
                        EngineError::Lost(worker) => {
                            let error = self.died_under(&worker);
                            lost = Some(worker);
                            error
                        }
                        // Only a run that nobody waits for is stopped, or one past its deadline.
                        EngineError::Terminated => self.deadline_exceeded(),
                        EngineError::Failed(_) => {
                            ServeError::internal(format!("model {} failed: {error}", self.id))
                        }
                    };
                    self.fail(&mut state, &mut effects, pending, Failure { error, reason });
                }
            }
        }
        state.runs.retain(|run| run.id != id);
        state.waking_since = None;
        self.count_at_once(&mut state, (rows, requests), ended);
        state.lifecycle.run_finished(ended);
        if let Some(lost) = lost {
            // Before another batch is given to a session that is gone.
            self.session_lost(&mut state, &mut effects, &lost, ended);
        }
        if state.learns {
            state.keep_alive.finished(ended);
        }
        effects.prepare |= std::mem::take(&mut state.prepare_next);
        state.upgrade.ran();
        if state.lifecycle.stage() == Stage::Warm {
            effects.upgrade = state.upgrade.poll();
        }
        self.release_slot();
        self.pump(&mut state, &mut effects, ended);
        let queued = state.batcher.held();
        let action = state.lifecycle.poll(ended, queued);
        self.act(&mut state, action, &mut effects, ended);
        drop(state);
        let next = (!effects.runs.is_empty()).then(|| effects.runs.remove(0));
        self.perform(effects, Place::Elsewhere);
        next
    }

    /// Tells the trial of runs side by side of one that ended.
    fn count_at_once(&self, state: &mut State, (rows, requests): (u32, usize), ended: Timestamp) {
        let had_others = requests > 1 || state.batcher.queued() > 0;
        if let Some(verdict) = state.at_once.finished(rows, had_others, ended) {
            self.metrics().runs_at_once.set(verdict.at_once as f64);
            tracing::debug!(
                model = %self.id,
                at_once = verdict.at_once,
                gain = verdict.gain,
                "tried how many runs at once answer most"
            );
        }
    }

    /// Runs the batch; when it fails as a whole, each request on its own, so that a poisoned one
    /// fails alone.
    fn compute(
        &self,
        run: &mut Run,
        started: Timestamp,
    ) -> (Finished, Option<FinishedSteps<Kept>>) {
        match run.session.made {
            None => (self.compute_given(run, started), None),
            Some(_) => self.compute_made(run),
        }
    }

    fn compute_given(&self, run: &Run, started: Timestamp) -> Finished {
        let requests: SmallVec<[&InferRequest; 1]> = run
            .entries
            .iter()
            .map(|(_, pending, _)| &pending.request)
            .collect();
        let stop = match &run.stop {
            Ok(stop) => stop,
            Err(error) => return self.failed_run(&requests, error),
        };
        match self.compute_together(&run.session, &requests, stop, started) {
            Ok((results, took)) => Finished {
                results: results.into_iter().map(Ok).collect(),
                took,
                executions: SmallVec::from_iter([(run.rows, took)]),
                ended: started + took.total(),
            },
            // Neither what nobody waits for nor what killed a process is tried a second time.
            Err(error)
                if requests.len() == 1
                    || matches!(error, EngineError::Terminated | EngineError::Lost(_)) =>
            {
                self.failed_run(&requests, &error)
            }
            Err(error) => {
                tracing::warn!(model = %self.id, %error, requests = requests.len(), "a batch failed; running its requests one by one");
                self.compute_one_by_one(run, &requests, stop)
            }
        }
    }

    /// Nobody gets a result.
    fn failed_run(&self, requests: &[&InferRequest], error: &EngineError) -> Finished {
        Finished {
            results: requests.iter().map(|_| Err(error.clone())).collect(),
            took: RunDurations::default(),
            executions: SmallVec::new(),
            ended: self.host.clock.now(),
        }
    }

    fn compute_one_by_one(
        &self,
        run: &Run,
        requests: &[&InferRequest],
        stop: &StopHandle,
    ) -> Finished {
        let mut finished = Finished {
            results: Vec::new(),
            took: RunDurations::default(),
            executions: SmallVec::new(),
            ended: Timestamp::ZERO,
        };
        for (request, (_, pending, _)) in requests.iter().zip(&run.entries) {
            let now = self.host.clock.now();
            let late = request.deadline.is_some_and(|deadline| deadline <= now);
            if late || pending.reply.is_closed() {
                finished.results.push(Err(EngineError::Terminated));
                continue;
            }
            let result = self.compute_together(&run.session, &[request], stop, now);
            finished.results.push(result.map(|(mut results, took)| {
                finished.took = took;
                finished.executions.push((request.rows, took));
                results.pop().expect("one request has one result")
            }));
        }
        finished.ended = self.host.clock.now();
        finished
    }

    fn compute_together(
        &self,
        open: &OpenSession,
        requests: &[&InferRequest],
        stop: &StopHandle,
        start: Timestamp,
    ) -> Result<(Vec<Vec<Tensor>>, RunDurations), EngineError> {
        // All of it, not the engine alone: a run that never ends keeps its slot for ever.
        catch_unwind(AssertUnwindSafe(|| {
            self.compute_unguarded(open, requests, stop, start)
        }))
        .unwrap_or_else(|_| Err(EngineError::Failed("the engine panicked".into())))
    }

    fn compute_unguarded(
        &self,
        open: &OpenSession,
        requests: &[&InferRequest],
        stop: &StopHandle,
        start: Timestamp,
    ) -> Result<(Vec<Vec<Tensor>>, RunDurations), EngineError> {
        let clock = &self.host.clock;
        let rows = requests.iter().map(|request| request.rows).sum();
        let inputs = gather_with(&open.inputs, requests, rows, |pieces| {
            gather_for(&*open.session, pieces)
        });
        let gathered = match requests {
            // There was nothing to gather: its inputs are the run's.
            [_] => start,
            _ => clock.now(),
        };
        let wanted = wanted_outputs(requests, self.spec.outputs.len());
        let indices: SmallVec<[usize; 4]> =
            wanted.iter().map(|&output| open.outputs[output]).collect();
        let ran = open.session.run(&inputs, &indices, stop)?;
        drop(inputs);
        let inferred = clock.now();
        let mut outputs: SmallVec<[Option<Tensor>; 4]> =
            SmallVec::from_elem(None, self.spec.outputs.len());
        for (&output, tensor) in wanted.iter().zip(ran) {
            outputs[output] = Some(self.reshape_output(&self.spec.outputs[output], tensor)?);
        }
        let results = if let [only] = requests {
            vec![
                only.outputs
                    .iter()
                    .map(|&output| taken(&mut outputs[output]))
                    .collect(),
            ]
        } else {
            split_outputs(&outputs, requests, rows, &self.spec.outputs)?
        };
        let took = RunDurations {
            compute_input: gathered - start,
            compute_infer: inferred - gathered,
            compute_output: clock.now() - inferred,
        };
        Ok((results, took))
    }

    /// Gives an output the shape its configuration promises, when that differs from the graph's.
    pub(super) fn reshape_output(
        &self,
        spec: &TensorSpec,
        mut tensor: Tensor,
    ) -> Result<Tensor, EngineError> {
        let Some(reshape) = &spec.reshape else {
            return Ok(tensor);
        };
        let batch = usize::from(self.spec.max_batch_size > 0);
        let produced = tensor.shape.get(batch..).unwrap_or_default();
        let mut open_dims = produced
            .iter()
            .zip(reshape)
            .filter(|&(_, &configured)| configured == -1)
            .map(|(&dim, _)| dim);
        let mut shape: Shape = tensor.shape.iter().take(batch).copied().collect();
        for &dim in &spec.dims {
            let dim = if dim == -1 {
                open_dims.next()
            } else {
                Some(dim)
            };
            shape.push(dim.ok_or_else(|| {
                EngineError::Failed(format!(
                    "output '{}' cannot be reshaped as its configuration says",
                    spec.name
                ))
            })?);
        }
        if dormouse_core::shape::element_count(&shape)
            != dormouse_core::shape::element_count(&tensor.shape)
        {
            return Err(EngineError::Failed(format!(
                "output '{}' has shape {:?}, which does not fit the configured shape {:?}",
                spec.name, tensor.shape, shape
            )));
        }
        tensor.shape = shape;
        Ok(tensor)
    }

    /// Remembers how long a run of so many rows took, under its shapes.
    fn note_run(
        &self,
        latest: &mut Option<KnownRun>,
        first: &InferRequest,
        (rows, took): (u32, Duration),
    ) {
        let known = match latest {
            Some(known) if self.has_shapes(first, known) => known,
            _ => latest.insert(KnownRun {
                shapes: self.run_shapes(first),
                took: [Duration::MAX; 32],
            }),
        };
        let class = &mut known.took[size_class(rows)];
        *class = took.min(*class);
    }

    /// The shapes of a run's inputs, given the first of its requests.
    fn run_shapes(&self, first: &InferRequest) -> RunShapes {
        let shape_of = |tensor: &Tensor| self.without_rows(tensor).iter().copied().collect();
        let inputs = first.inputs.iter();
        inputs.map(|input| input.as_ref().map(shape_of)).collect()
    }

    /// Whether a run has the shapes of an earlier one.
    fn has_shapes(&self, first: &InferRequest, known: &KnownRun) -> bool {
        let same = |(input, shape): (&Option<Tensor>, &Option<Shape>)| match (input, shape) {
            (Some(input), Some(shape)) => self.without_rows(input) == shape.as_slice(),
            (None, None) => true,
            _ => false,
        };
        first.inputs.iter().zip(&known.shapes).all(same)
    }

    fn without_rows<'a>(&self, tensor: &'a Tensor) -> &'a [i64] {
        let batch = usize::from(self.spec.max_batch_size > 0);
        tensor.shape.get(batch..).unwrap_or_default()
    }

    fn succeeded(&self, total: Duration, queued: Duration, took: &RunDurations) {
        self.counters.succeeded(total, queued, took);
        let metrics = self.metrics();
        metrics.success.increment(1);
        metrics.phase(Phase::Request, total);
        metrics.phase(Phase::Queue, queued);
        metrics.phase(Phase::ComputeInput, took.compute_input);
        metrics.phase(Phase::ComputeInfer, took.compute_infer);
        metrics.phase(Phase::ComputeOutput, took.compute_output);
    }

    fn response(&self, pending: &Pending, tensors: Vec<Tensor>) -> InferResponse {
        let names = pending
            .request
            .outputs
            .iter()
            .map(|&output| Arc::clone(&self.spec.outputs[output].name));
        InferResponse {
            model_name: Arc::clone(&self.id.name),
            model_version: self.id.version.0,
            id: pending.request.id.clone(),
            outputs: names.zip(tensors).collect(),
            cold_start: None,
            placed: None,
        }
    }
}

/// Runs of up to 1, 2, 4, … rows.
fn size_class(rows: u32) -> usize {
    rows.max(1).next_power_of_two().ilog2() as usize
}

/// Whether a request was given up because its time was over or because its caller left.
fn abandoned_reason(request: &InferRequest, now: Timestamp) -> FailureReason {
    match request.deadline {
        Some(deadline) if deadline <= now => FailureReason::Rejected,
        _ => FailureReason::Canceled,
    }
}

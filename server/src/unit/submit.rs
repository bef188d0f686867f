//! A request on its way into the queue: wakes the model, is admitted or refused.

use std::time::Duration;

use bytes::Bytes;
use dormouse_core::admission::{self, Outlook};
use dormouse_core::batch::{EntryId, Waiting};
use dormouse_core::code::ErrorCode;
use dormouse_core::datatype::DataType;
use dormouse_core::lifecycle::{Demand, Stage};
use dormouse_core::order::Sequencer;
use dormouse_core::time::Timestamp;
use tokio::sync::oneshot;

use super::effects::{Effects, Place};
use super::load::QUICK;
use super::queue::NotAccepted;
use super::{NotAnswered, Pending, Reply, State, Ticket, Unit};
use crate::error::ServeError;
use crate::limits::Limit;
use crate::metrics::FailureReason;
use crate::priority::courtesy;
use crate::request::{InferRequest, Tensor};
use crate::spans::RequestSpan;
use crate::wake::populate::MOST_ROWS;

/// So many requests may be taken in while a model wakes without anybody noticing.
const STORM: usize = 16;
/// For so long after a model was called its storm is put off at most: others' requests may be next on
/// the same thread.
const COURTESY: Duration = Duration::from_millis(50);

impl Unit {
    pub(super) fn submit(&self, request: InferRequest) -> Result<Ticket<'_>, NotAnswered> {
        let now = self.host.clock.now();
        let received = request.received;
        let mut effects = Effects::default();
        let mut state = self.state.lock();
        if let Some(sequence) = &request.sequence
            && !sequence.step.start
            && !state.lifecycle.is_retiring()
            && !state.batcher.knows(&sequence.step.id)
        {
            // Not worth waking the model for.
            let error = self.not_started(&request);
            drop(state);
            return Err(self.refused(error, received, FailureReason::Rejected));
        }
        let was_parked = state.lifecycle.stage() == Stage::Parked;
        let demand = state.lifecycle.demand(now);
        self.note_arrival(&mut state, now);
        let cold = match demand {
            Demand::Run if was_parked => {
                state.load_for = request.span.as_ref().map(RequestSpan::context);
                self.unpark(&mut state, &mut effects);
                true
            }
            Demand::Run => false,
            Demand::Wait => true,
            Demand::StartLoad => {
                state.load_for = request.span.as_ref().map(RequestSpan::context);
                state.load_asked = numbers_asked(&request);
                self.begin_load(&mut state, &mut effects, now);
                true
            }
            Demand::Refuse { retry_at } => {
                let error = self.load_refusal(&state, retry_at, now);
                drop(state);
                return Err(self.refused(error, received, FailureReason::Backend));
            }
            Demand::Retired => return Err(NotAnswered::Retired(Box::new(request))),
        };
        let queued = self.enqueue(&mut state, request, cold, now);
        if queued.is_ok() {
            self.pump(&mut state, &mut effects, now);
        }
        self.set_alarm(&mut state, &mut effects);
        let only_waits = queued.is_ok() && effects.start_load.is_none() && effects.runs.is_empty();
        let gives_way = only_waits && self.is_stormed(&state, now);
        drop(state);
        // Also when the request itself was refused: a load may have been decided.
        self.perform(effects, Place::HereIfShort);
        if gives_way {
            courtesy::give_way();
        }
        match queued {
            Ok((entry, receiver)) => Ok(Ticket {
                unit: self,
                entry,
                receiver,
                answered: false,
            }),
            Err(error) => Err(self.refused(error, received, FailureReason::Rejected)),
        }
    }

    /// Whether taking in those who wait for the model would hold its first answer up. A load that is
    /// not quick takes longer than any storm.
    fn is_stormed(&self, state: &State, now: Timestamp) -> bool {
        let is_quick = || {
            state
                .profile
                .expected_load()
                .is_some_and(|load| load < QUICK)
        };
        state
            .waking_since
            .is_some_and(|since| now - since < COURTESY)
            && state.batcher.queued() > STORM
            && is_quick()
    }

    fn enqueue(
        &self,
        state: &mut State,
        mut request: InferRequest,
        cold: bool,
        now: Timestamp,
    ) -> Result<(EntryId, oneshot::Receiver<Reply>), ServeError> {
        let outlook = Outlook {
            queued_rows: state.batcher.queued_rows(),
            running: state.runs.len(),
            concurrency: state.at_once.limit(),
            // Where each request runs alone, the others are taken to be of this one's size.
            max_rows: match self.spec.runs_rows_together {
                true => self.spec.max_batch_size,
                false => request.rows.max(1),
            },
            running_since: state.runs.first().map(|run| run.started),
            load_remaining: state.load_started.map(|started| {
                let expected = state.profile.expected_load().unwrap_or_default();
                expected.saturating_sub(now - started)
            }),
        };
        admission::admit(
            &outlook,
            &state.profile,
            request.rows,
            request.deadline,
            now,
        )
        .map_err(|refusal| {
            let why = match refusal.expected_wait {
                Duration::ZERO => "it has passed".to_owned(),
                wait => format!("about {wait:?} of work is ahead of this request"),
            };
            ServeError::new(
                ErrorCode::DeadlineExceeded,
                format!("model {} cannot answer before the deadline: {why}", self.id),
            )
            .retry_after(refusal.retry_after)
        })?;
        let bytes = request
            .inputs
            .iter()
            .flatten()
            .map(|tensor| tensor.data.len() as u64)
            .sum();
        let held = request.held.take();
        request.held = Some(self.host.in_flight.reserve_beside(held, bytes)?);
        let (reply, receiver) = oneshot::channel();
        let priority = request.priority;
        let deadline = request.deadline;
        let sequence = state.order.as_mut().map(Sequencer::issue);
        // Whatever comes of it, the next request of its stream may follow now.
        let turn = request
            .sequence
            .as_mut()
            .and_then(|sequence| sequence.turn.take());
        let pending = Pending {
            request,
            reply,
            enqueued: now,
            sequence,
            batchable: self.spec.runs_rows_together,
            ragged: self.spec.ragged.clone(),
            cold,
        };
        let pushed = state.batcher.push(
            Waiting {
                item: pending,
                priority,
                deadline,
                timeout: None,
            },
            now,
        );
        drop(turn);
        match pushed {
            Ok(entry) => {
                self.metrics().pending.increment(1);
                if cold {
                    self.metrics().cold_requests.increment(1);
                }
                Ok((entry, receiver))
            }
            Err(NotAccepted::NotStarted { item }) => {
                self.skip_in_order(state, item.sequence);
                Err(self.not_started(&item.request))
            }
            Err(NotAccepted::QueueFull { item, limit }) => {
                self.skip_in_order(state, item.sequence);
                Err(Limit::Queue
                    .overload(format!(
                        "the queue of model {} is full: {limit} requests wait already",
                        self.id
                    ))
                    .retry_after(
                        state
                            .profile
                            .expected_run(1)
                            .unwrap_or(Duration::from_millis(100)),
                    ))
            }
            Err(NotAccepted::Expired { item }) => {
                self.skip_in_order(state, item.sequence);
                Err(self.deadline_exceeded())
            }
        }
    }

    fn not_started(&self, request: &InferRequest) -> ServeError {
        let id = request.sequence.as_ref();
        let id = id.map(|sequence| sequence.step.id.to_string());
        ServeError::invalid(format!(
            "inference request for sequence {} to model '{}' must specify the START flag on the \
             first request of the sequence",
            id.unwrap_or_default(),
            self.id.name
        ))
    }
}

/// The beginnings of the inputs that may name rows of a table, in memory of their own.
fn numbers_asked(request: &InferRequest) -> Vec<Tensor> {
    const MOST_BYTES: usize = MOST_ROWS * size_of::<i64>();
    let is_number = |input: &&Tensor| matches!(input.datatype, DataType::Int32 | DataType::Int64);
    let beginning = |input: &Tensor| Tensor {
        datatype: input.datatype,
        shape: input.shape.clone(),
        data: Bytes::copy_from_slice(&input.data[..input.data.len().min(MOST_BYTES)]),
    };
    let inputs = request.inputs.iter().flatten();
    inputs.filter(is_number).map(beginning).collect()
}

//! The waiting requests of a unit: in one queue, or in their sequences.

use std::time::Duration;

use dormouse_core::batch::{Batch, Batcher, EntryId, Expired, Refused, Waiting};
use dormouse_core::id::ModelId;
use dormouse_core::sequence::{
    FinishedSteps, NotQueued, SequenceBatcher, SequenceId, SequencePolicy, SlotStrategy, TakenStep,
};
use dormouse_core::time::Timestamp;
use dormouse_model_store::spec::{ModelSpec, RaggedSpec, SequenceSpec, SequenceStrategy};

use super::made::Kept;
use super::{Pending, policy};
use crate::host::Host;
use crate::metrics::SequenceMeter;

/// Where requests wait.
#[derive(Debug)]
pub(super) enum Queue {
    Plain(Batcher<Pending>),
    Sequences(Box<Sequences>),
}

/// Requests in their sequences, and who is told how many there are.
#[derive(Debug)]
pub(super) struct Sequences {
    batcher: SequenceBatcher<Pending, Kept>,
    meter: SequenceMeter,
}

impl Sequences {
    /// Does something that may begin or end sequences.
    fn change<T>(&mut self, change: impl FnOnce(&mut SequenceBatcher<Pending, Kept>) -> T) -> T {
        let changed = change(&mut self.batcher);
        self.meter.tell(self.batcher.counts());
        changed
    }
}

/// A batch on its way to a run.
pub(super) struct Taken {
    pub(super) batch: Batch<Pending>,
    pub(super) steps: Option<Box<Steps>>,
}

/// What a batch's requests are to their sequences.
#[derive(Debug)]
pub(super) struct Steps {
    pub(super) steps: Vec<TakenStep<Kept>>,
    pub(super) lane: Option<u32>,
}

/// Why a request did not get into the queue.
pub(super) enum NotAccepted {
    QueueFull { item: Box<Pending>, limit: usize },
    Expired { item: Box<Pending> },
    NotStarted { item: Box<Pending> },
}

impl From<Refused<Pending>> for NotAccepted {
    fn from(refused: Refused<Pending>) -> Self {
        match refused {
            Refused::QueueFull { item, limit } => {
                let item = Box::new(item);
                Self::QueueFull { item, limit }
            }
            Refused::Expired { item } => Self::Expired {
                item: Box::new(item),
            },
        }
    }
}

impl From<NotQueued<Pending>> for NotAccepted {
    fn from(refused: NotQueued<Pending>) -> Self {
        match refused {
            NotQueued::QueueFull { item, limit } => {
                let item = Box::new(item);
                Self::QueueFull { item, limit }
            }
            NotQueued::Expired { item } => Self::Expired {
                item: Box::new(item),
            },
            NotQueued::NotStarted { item } => Self::NotStarted {
                item: Box::new(item),
            },
        }
    }
}

impl Queue {
    pub(super) fn new(id: &ModelId, spec: &ModelSpec, host: &Host) -> Self {
        let max_queue = host.defaults.max_queue;
        match &spec.sequence {
            None => Self::Plain(Batcher::new(policy::batch_policy(spec, max_queue))),
            Some(sequence) => {
                let policy = sequence_policy(spec, sequence, max_queue);
                Self::Sequences(Box::new(Sequences {
                    batcher: SequenceBatcher::new(policy),
                    meter: SequenceMeter::new(host.metrics.clone(), id.clone()),
                }))
            }
        }
    }

    /// Whether a request that starts no sequence would find its own.
    pub(super) fn knows(&self, id: &SequenceId) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Sequences(sequences) => sequences.batcher.knows(id),
        }
    }

    pub(super) fn push(
        &mut self,
        waiting: Waiting<Pending>,
        now: Timestamp,
    ) -> Result<EntryId, NotAccepted> {
        let sequences = match self {
            Self::Plain(batcher) => return batcher.push(waiting, now).map_err(Into::into),
            Self::Sequences(sequences) => sequences,
        };
        let Some(sequence) = &waiting.item.request.sequence else {
            let item = Box::new(waiting.item);
            return Err(NotAccepted::NotStarted { item });
        };
        let step = sequence.step.clone();
        sequences.change(|batcher| batcher.push(waiting, step, now).map_err(Into::into))
    }

    /// The first of those who waited for the load runs alone; steps of sequences have their own
    /// places in a batch.
    pub(super) fn start_alone(&mut self, now: Timestamp) {
        if let Self::Plain(batcher) = self {
            batcher.start_alone(now);
        }
    }

    pub(super) fn cancel(&mut self, entry: EntryId, now: Timestamp) -> Option<Pending> {
        match self {
            Self::Plain(batcher) => batcher.cancel(entry),
            Self::Sequences(sequences) => sequences.change(|batcher| batcher.cancel(entry, now)),
        }
    }

    pub(super) fn expire(&mut self, now: Timestamp) -> Vec<Expired<Pending>> {
        match self {
            Self::Plain(batcher) => batcher.expire(now),
            Self::Sequences(sequences) => sequences.change(|batcher| batcher.expire(now)),
        }
    }

    pub(super) fn take_batch(
        &mut self,
        now: Timestamp,
        expected_run: impl Fn(u32) -> Option<Duration>,
    ) -> Option<Taken> {
        match self {
            Self::Plain(batcher) => {
                let batch = batcher.take_batch(now, expected_run)?;
                Some(Taken { batch, steps: None })
            }
            Self::Sequences(sequences) => {
                let taken = sequences.batcher.take(now)?;
                let steps = Steps {
                    steps: taken.steps,
                    lane: taken.lane,
                };
                Some(Taken {
                    batch: taken.batch,
                    steps: Some(Box::new(steps)),
                })
            }
        }
    }

    /// The run of a batch of steps has ended.
    pub(super) fn finish(&mut self, finished: FinishedSteps<Kept>, now: Timestamp) {
        match self {
            Self::Plain(_) => debug_assert!(false, "a plain queue has no steps"),
            Self::Sequences(sequences) => sequences.change(|batcher| batcher.finish(finished, now)),
        }
    }

    /// No more requests will come.
    pub(super) fn retire(&mut self) {
        if let Self::Sequences(sequences) = self {
            sequences.change(SequenceBatcher::retire);
        }
    }

    pub(super) fn wake_at(
        &self,
        expected_run: impl Fn(u32) -> Option<Duration>,
    ) -> Option<Timestamp> {
        match self {
            Self::Plain(batcher) => batcher.wake_at(expected_run),
            Self::Sequences(sequences) => sequences.batcher.wake_at(),
        }
    }

    pub(super) fn expires_at(&self) -> Option<Timestamp> {
        match self {
            Self::Plain(batcher) => batcher.expires_at(),
            Self::Sequences(sequences) => sequences.batcher.expires_at(),
        }
    }

    pub(super) fn flush(&mut self, now: Timestamp) -> Vec<Pending> {
        match self {
            Self::Plain(batcher) => batcher.flush(),
            Self::Sequences(sequences) => sequences.change(|batcher| batcher.flush(now)),
        }
    }

    /// Requests that wait.
    pub(super) fn queued(&self) -> usize {
        match self {
            Self::Plain(batcher) => batcher.queued(),
            Self::Sequences(sequences) => sequences.batcher.queued(),
        }
    }

    /// What the session is kept for: requests that wait, and sequences that may go on.
    pub(super) fn held(&self) -> usize {
        match self {
            Self::Plain(batcher) => batcher.queued(),
            Self::Sequences(sequences) => sequences.batcher.queued() + sequences.batcher.open(),
        }
    }

    pub(super) fn queued_rows(&self) -> u64 {
        match self {
            Self::Plain(batcher) => batcher.queued_rows(),
            Self::Sequences(sequences) => sequences.batcher.queued() as u64,
        }
    }
}

impl Pending {
    /// It is a step of a sequence, and not the first one.
    pub(super) fn continues_sequence(&self) -> bool {
        let sequence = self.request.sequence.as_ref();
        sequence.is_some_and(|sequence| !sequence.step.start)
    }

    pub(super) fn joins_ragged(&self, first: &Self, ragged: &RaggedSpec) -> bool {
        let inputs = self.request.inputs.iter().zip(&first.request.inputs);
        inputs
            .zip(&ragged.inputs)
            .all(|(pair, is_ragged)| match pair {
                (Some(mine), Some(theirs)) => {
                    *is_ragged || mine.shape.get(1..) == theirs.shape.get(1..)
                }
                (None, None) => true,
                _ => false,
            })
    }
}

/// Whether answers leave in the order in which the requests came.
pub(super) fn preserves_order(spec: &ModelSpec) -> bool {
    let batching = spec.batching.as_ref();
    let strategy = spec.sequence.as_ref().map(|sequence| &sequence.strategy);
    batching.is_some_and(|batching| batching.preserve_ordering)
        || matches!(
            strategy,
            Some(SequenceStrategy::Oldest {
                preserve_ordering: true,
                ..
            })
        )
}

/// The rules by which a model's sequences are served.
fn sequence_policy(spec: &ModelSpec, sequence: &SequenceSpec, max_queued: usize) -> SequencePolicy {
    let lanes = spec.concurrency;
    let rows = spec.max_batch_size.max(1);
    let together = spec.runs_rows_together;
    let strategy = match &sequence.strategy {
        SequenceStrategy::Direct {
            max_delay,
            min_utilization,
        } if together => SlotStrategy::Direct {
            max_delay: *max_delay,
            // A part of the rows, rounded up, is never more than all of them.
            enough_rows: (f64::from(*min_utilization) * f64::from(rows)).ceil() as u32,
        },
        // Rows that may not meet have no places to keep.
        SequenceStrategy::Direct { .. } => SlotStrategy::Oldest {
            candidates: rows.saturating_mul(lanes),
            preferred_rows: Vec::new(),
            max_delay: Duration::ZERO,
        },
        SequenceStrategy::Oldest {
            candidates,
            preferred_rows,
            max_delay,
            ..
        } => SlotStrategy::Oldest {
            candidates: candidates.saturating_mul(lanes),
            preferred_rows: match together {
                true => preferred_rows.clone(),
                false => Vec::new(),
            },
            max_delay: match together {
                true => *max_delay,
                false => Duration::ZERO,
            },
        },
    };
    SequencePolicy {
        strategy,
        max_rows: if together { rows } else { 1 },
        lanes,
        max_idle: sequence.max_idle,
        max_queued,
    }
}

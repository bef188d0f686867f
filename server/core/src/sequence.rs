//! Which sequence gets which slot, which of their steps run together, and when a sequence is over.
//!
//! A sequence is a row of requests that share an id: its steps run one after another, never two at
//! a time, and the server may keep something for it from one step to the next (`S`). The semantics
//! are those of Triton's sequence batcher, direct and oldest. Added to that: a step that is given
//! up before it ran ends its sequence, since whatever came after it would start from the wrong
//! state. What a step computes is not known here.

#[cfg(test)]
mod laws;
mod slots;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use self::slots::{Place, Slots};
use crate::batch::{Batch, BatchItem, EntryId, Expired, ExpiryCause, Waiting};
use crate::time::Timestamp;

/// What clients call a sequence.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SequenceId {
    /// Never zero, which stands for no sequence.
    Number(u64),
    /// Never empty, which stands for no sequence.
    Text(Arc<str>),
}

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Text(text) => text.fmt(f),
        }
    }
}

/// A request's place in its sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The sequence it belongs to.
    pub id: SequenceId,
    /// It is the first of its sequence.
    pub start: bool,
    /// It is the last of its sequence.
    pub end: bool,
}

/// How steps of different sequences come together in a run.
#[derive(Clone, Debug, PartialEq)]
pub enum SlotStrategy {
    /// Each sequence keeps one row of one lane's batches; rows of sequences that have no step to
    /// run are left empty.
    Direct {
        /// How long the oldest step waits for steps in other rows.
        max_delay: Duration,
        /// Steps that are enough to stop waiting; zero waits for none.
        enough_rows: u32,
    },
    /// Steps are batched as they come, from so many sequences at a time.
    Oldest {
        /// Sequences that may be under way at once.
        candidates: u32,
        /// Batch sizes that are sent as soon as they are reached.
        preferred_rows: Vec<u32>,
        /// How long the oldest step waits for others to join.
        max_delay: Duration,
    },
}

/// The rules of one model's sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct SequencePolicy {
    /// How their steps come together.
    pub strategy: SlotStrategy,
    /// Steps of the largest batch, at least one.
    pub max_rows: u32,
    /// Runs that may be under way at once, at least one.
    pub lanes: u32,
    /// A sequence without a step for so long is over.
    pub max_idle: Duration,
    /// Steps that may wait; zero sets no limit.
    pub max_queued: usize,
}

/// Names a sequence while the server knows it; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceKey(u64);

/// Why a step was not accepted.
#[derive(Debug)]
pub enum NotQueued<T> {
    /// As many steps wait as may.
    QueueFull { item: T, limit: usize },
    /// Its deadline has passed already.
    Expired { item: T },
    /// It starts no sequence and its sequence is not known.
    NotStarted { item: T },
}

/// Steps to run together.
#[derive(Debug)]
pub struct StepBatch<T, S> {
    /// The steps in the order of their rows; `rows` counts the empty ones as well.
    pub batch: Batch<T>,
    /// Of the same length as the batch's entries.
    pub steps: Vec<TakenStep<S>>,
    /// To be given back with the outcomes.
    pub lane: Option<u32>,
}

/// What a step brings to its run.
#[derive(Debug)]
pub struct TakenStep<S> {
    /// The sequence.
    pub key: SequenceKey,
    /// The row of the batch.
    pub row: u32,
    /// What the last step left, none before the first one.
    pub state: Option<S>,
}

/// A finished run, for [`SequenceBatcher::finish`].
#[derive(Debug)]
pub struct FinishedSteps<S> {
    /// What became of each sequence.
    pub outcomes: Vec<(SequenceKey, Outcome<S>)>,
    /// The batch's.
    pub lane: Option<u32>,
}

/// What a step left of its sequence.
#[derive(Debug)]
pub enum Outcome<S> {
    /// It goes on from here.
    GoesOn(Option<S>),
    /// The step was given up while it ran: the sequence is over.
    Broken,
}

/// The sequences of one model and their waiting steps.
pub struct SequenceBatcher<T, S> {
    policy: SequencePolicy,
    sequences: HashMap<SequenceKey, Sequence<T, S>>,
    by_id: HashMap<SequenceId, SequenceKey>,
    /// Sequences without a slot, first come first.
    backlog: VecDeque<SequenceKey>,
    slots: Slots,
    /// Sequences whose next step may run, first come first; only with [`SlotStrategy::Oldest`].
    ready: VecDeque<SequenceKey>,
    /// The sequence of each waiting step.
    entries: HashMap<u64, SequenceKey>,
    deadlines: BTreeSet<(Timestamp, u64)>,
    /// When each sequence that has nothing to do is over.
    idle: BTreeSet<(Timestamp, SequenceKey)>,
    /// Steps to be answered by the next `expire`.
    given_up: Vec<Expired<T>>,
    given_up_at: Option<Timestamp>,
    sequences_issued: u64,
    entries_issued: u64,
    /// No sequence waits for another step.
    retiring: bool,
    /// Sequences that ended because they were idle for too long.
    expired: u64,
}

/// How many sequences there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceCounts {
    /// Sequences that are not over, those without a slot among them.
    pub open: usize,
    /// Sequences that wait for a slot.
    pub waiting: usize,
    /// Sequences that ended so far because no step came for too long.
    pub expired: u64,
}

struct Sequence<T, S> {
    id: SequenceId,
    place: Option<Place>,
    queue: VecDeque<Queued<T>>,
    /// A step is under way.
    running: bool,
    /// Its last step has been queued, or it was given up: its id may be used again.
    ended: bool,
    state: Option<S>,
    idle_at: Option<Timestamp>,
}

struct Queued<T> {
    entry: u64,
    item: T,
    enqueued: Timestamp,
    deadline: Option<Timestamp>,
}

impl<T: BatchItem, S> SequenceBatcher<T, S> {
    /// Knows no sequence.
    pub fn new(mut policy: SequencePolicy) -> Self {
        policy.max_rows = policy.max_rows.max(1);
        policy.lanes = policy.lanes.max(1);
        let max_rows = policy.max_rows;
        let slots = match &mut policy.strategy {
            SlotStrategy::Direct { enough_rows, .. } => {
                *enough_rows = (*enough_rows).min(max_rows);
                Slots::rows(policy.lanes, max_rows)
            }
            SlotStrategy::Oldest {
                candidates,
                preferred_rows,
                ..
            } => {
                preferred_rows.retain(|rows| (1..=max_rows).contains(rows));
                preferred_rows.sort_unstable();
                Slots::count((*candidates).max(1))
            }
        };
        Self {
            policy,
            sequences: HashMap::new(),
            by_id: HashMap::new(),
            backlog: VecDeque::new(),
            slots,
            ready: VecDeque::new(),
            entries: HashMap::new(),
            deadlines: BTreeSet::new(),
            idle: BTreeSet::new(),
            given_up: Vec::new(),
            given_up_at: None,
            sequences_issued: 0,
            entries_issued: 0,
            retiring: false,
            expired: 0,
        }
    }

    /// Whether a step that starts nothing would find its sequence.
    pub fn knows(&self, id: &SequenceId) -> bool {
        self.by_id.contains_key(id)
    }

    /// Accepts a step, or gives it back with the reason. A step that starts a sequence of an id
    /// that is in use goes on in the place of that one.
    pub fn push(
        &mut self,
        waiting: Waiting<T>,
        step: Step,
        now: Timestamp,
    ) -> Result<EntryId, NotQueued<T>> {
        let Waiting { item, deadline, .. } = waiting;
        let known = self.by_id.get(&step.id).copied();
        if known.is_none() && !step.start {
            return Err(NotQueued::NotStarted { item });
        }
        if deadline.is_some_and(|deadline| deadline <= now) {
            return Err(NotQueued::Expired { item });
        }
        let limit = self.policy.max_queued;
        if limit != 0 && self.entries.len() >= limit {
            return Err(NotQueued::QueueFull { item, limit });
        }
        let key = known.unwrap_or_else(|| self.begin(step.id.clone()));
        let entry = self.entries_issued;
        self.entries_issued += 1;
        self.entries.insert(entry, key);
        self.deadlines.extend(deadline.map(|at| (at, entry)));
        let sequence = self.sequences.get_mut(&key).expect("was found or begun");
        if let Some(at) = sequence.idle_at.take() {
            self.idle.remove(&(at, key));
        }
        sequence.queue.push_back(Queued {
            entry,
            item,
            enqueued: now,
            deadline,
        });
        let is_next = sequence.queue.len() == 1 && !sequence.running;
        if step.end {
            sequence.ended = true;
            self.by_id.remove(&step.id);
        }
        if is_next && sequence.place.is_some() {
            self.make_ready(key);
        }
        Ok(EntryId::of_step(entry))
    }

    /// Takes a step out, for instance because its client has gone. That ends its sequence: what
    /// else waits in it is handed out by the next `expire`.
    pub fn cancel(&mut self, id: EntryId, now: Timestamp) -> Option<T> {
        let entry = id.step()?;
        let &key = self.entries.get(&entry)?;
        let sequence = self.sequences.get_mut(&key)?;
        let position = sequence
            .queue
            .iter()
            .position(|queued| queued.entry == entry)?;
        let queued = sequence.queue.remove(position)?;
        self.forget_entry(&queued);
        self.break_up(key, now);
        Some(queued.item)
    }

    /// Ends sequences that were idle for too long, or had a step that was not taken before its
    /// deadline, and takes out what waits in them.
    pub fn expire(&mut self, now: Timestamp) -> Vec<Expired<T>> {
        while let Some(&(at, entry)) = self.deadlines.first()
            && at <= now
        {
            let key = self.entries[&entry];
            let sequence = self.sequences.get_mut(&key).expect("has a waiting step");
            let late = |queued: &Queued<T>| queued.entry == entry;
            let position = sequence.queue.iter().position(late);
            let queued = position.and_then(|position| sequence.queue.remove(position));
            let queued = queued.expect("a step with a deadline waits in its sequence");
            self.forget_entry(&queued);
            self.give_up(queued, ExpiryCause::Deadline, now);
            self.break_up(key, now);
        }
        while let Some(&(at, key)) = self.idle.first()
            && at <= now
        {
            self.expired += 1;
            self.close(key);
        }
        self.given_up_at = None;
        std::mem::take(&mut self.given_up)
    }

    /// Takes the next batch of steps if one is due.
    pub fn take(&mut self, now: Timestamp) -> Option<StepBatch<T, S>> {
        let plan = self.plan(Some(now))?;
        if plan.due > now {
            return None;
        }
        let mut entries = Vec::with_capacity(plan.steps.len());
        let mut steps = Vec::with_capacity(plan.steps.len());
        let rows = plan.steps.last().map_or(0, |(row, _)| row + 1);
        for &(row, key) in &plan.steps {
            let sequence = self.sequences.get_mut(&key).expect("planned");
            let queued = sequence.queue.pop_front().expect("planned");
            sequence.running = true;
            steps.push(TakenStep {
                key,
                row,
                state: sequence.state.take(),
            });
            self.forget_entry(&queued);
            let id = EntryId::of_step(queued.entry);
            entries.push((id, queued.item, queued.enqueued));
        }
        match plan.lane {
            Some(lane) => self.slots.set_running(lane, true),
            None => drop(self.ready.drain(..plan.steps.len())),
        }
        Some(StepBatch {
            batch: Batch {
                entries,
                rows,
                alone: false,
            },
            steps,
            lane: plan.lane,
        })
    }

    /// A batch that was taken has run.
    pub fn finish(&mut self, finished: FinishedSteps<S>, now: Timestamp) {
        if let Some(lane) = finished.lane {
            self.slots.set_running(lane, false);
        }
        for (key, outcome) in finished.outcomes {
            let Some(sequence) = self.sequences.get_mut(&key) else {
                debug_assert!(false, "a running sequence stays known");
                continue;
            };
            sequence.running = false;
            let broken = matches!(outcome, Outcome::Broken);
            if let Outcome::GoesOn(state) = outcome {
                sequence.state = state;
            }
            if broken {
                self.break_up(key, now);
            } else if !sequence.queue.is_empty() {
                self.make_ready(key);
            } else if sequence.ended || self.retiring {
                self.close(key);
            } else {
                let at = now + self.policy.max_idle;
                sequence.idle_at = Some(at);
                self.idle.insert((at, key));
            }
        }
    }

    /// Ends every sequence that has nothing to do now, and each other one as soon as that is so:
    /// no more steps will come.
    pub fn retire(&mut self) {
        self.retiring = true;
        while let Some(&(_, key)) = self.idle.first() {
            self.close(key);
        }
    }

    /// Takes out every waiting step and ends every sequence.
    pub fn flush(&mut self, now: Timestamp) -> Vec<T> {
        let mut keys: Vec<SequenceKey> = self.sequences.keys().copied().collect();
        keys.sort_unstable();
        for key in keys {
            self.break_up(key, now);
        }
        self.given_up_at = None;
        let given_up = std::mem::take(&mut self.given_up);
        given_up.into_iter().map(|expired| expired.item).collect()
    }

    /// When `take` or `expire` next has something to give; in the past when it has now.
    pub fn wake_at(&self) -> Option<Timestamp> {
        let due = self.plan(None).map(|plan| plan.due);
        [due, self.expires_at()].into_iter().flatten().min()
    }

    /// When a step runs out of patience or a sequence has been idle for too long.
    pub fn expires_at(&self) -> Option<Timestamp> {
        let deadline = self.deadlines.first().map(|(at, _)| *at);
        let idle = self.idle.first().map(|(at, _)| *at);
        [self.given_up_at, deadline, idle]
            .into_iter()
            .flatten()
            .min()
    }

    /// Accepted steps that have not left yet.
    pub fn queued(&self) -> usize {
        self.entries.len() + self.given_up.len()
    }

    /// Sequences that are not over.
    pub fn open(&self) -> usize {
        self.sequences.len()
    }

    /// How many sequences there are and were.
    pub fn counts(&self) -> SequenceCounts {
        SequenceCounts {
            open: self.sequences.len(),
            waiting: self.backlog.len(),
            expired: self.expired,
        }
    }

    fn begin(&mut self, id: SequenceId) -> SequenceKey {
        let key = SequenceKey(self.sequences_issued);
        self.sequences_issued += 1;
        let place = self.slots.take(key);
        if place.is_none() {
            self.backlog.push_back(key);
        }
        self.by_id.insert(id.clone(), key);
        self.sequences.insert(
            key,
            Sequence {
                id,
                place,
                queue: VecDeque::new(),
                running: false,
                ended: false,
                state: None,
                idle_at: None,
            },
        );
        key
    }

    fn make_ready(&mut self, key: SequenceKey) {
        if matches!(self.policy.strategy, SlotStrategy::Oldest { .. }) {
            self.ready.push_back(key);
        }
    }

    fn forget_entry(&mut self, queued: &Queued<T>) {
        self.entries.remove(&queued.entry);
        if let Some(at) = queued.deadline {
            self.deadlines.remove(&(at, queued.entry));
        }
    }

    fn give_up(&mut self, queued: Queued<T>, cause: ExpiryCause, now: Timestamp) {
        self.given_up_at.get_or_insert(now);
        self.given_up.push(Expired {
            waited: now.since(queued.enqueued),
            item: queued.item,
            cause,
        });
    }

    /// Ends a sequence with whatever waits in it, once its step under way has come back.
    fn break_up(&mut self, key: SequenceKey, now: Timestamp) {
        let Some(sequence) = self.sequences.get_mut(&key) else {
            return;
        };
        sequence.ended = true;
        let queue = std::mem::take(&mut sequence.queue);
        let running = sequence.running;
        if self.by_id.get(&sequence.id) == Some(&key) {
            self.by_id.remove(&sequence.id);
        }
        for queued in queue {
            self.forget_entry(&queued);
            self.give_up(queued, ExpiryCause::SequenceOver, now);
        }
        self.ready.retain(|ready| *ready != key);
        if !running {
            self.close(key);
        }
    }

    /// Forgets a sequence without waiting steps and gives its slot to the backlog.
    fn close(&mut self, key: SequenceKey) {
        let Some(sequence) = self.sequences.remove(&key) else {
            return;
        };
        debug_assert!(sequence.queue.is_empty() && !sequence.running);
        if let Some(at) = sequence.idle_at {
            self.idle.remove(&(at, key));
        }
        if self.by_id.get(&sequence.id) == Some(&key) {
            self.by_id.remove(&sequence.id);
        }
        let Some(place) = sequence.place else {
            self.backlog.retain(|waiting| *waiting != key);
            return;
        };
        self.slots.give_back(place);
        if let Some(next) = self.backlog.pop_front() {
            let place = self.slots.take(next);
            let sequence = self.sequences.get_mut(&next).expect("waits in the backlog");
            sequence.place = place;
            self.make_ready(next);
        }
    }

    /// The batch that leaves next and when. Without `now` the steps may be those of an earlier
    /// moment, the time is right in any case.
    fn plan(&self, now: Option<Timestamp>) -> Option<Plan> {
        match &self.policy.strategy {
            SlotStrategy::Direct {
                max_delay,
                enough_rows,
            } => self.plan_direct(*max_delay, *enough_rows),
            SlotStrategy::Oldest {
                preferred_rows,
                max_delay,
                ..
            } => self.plan_oldest(now, preferred_rows, *max_delay),
        }
    }

    fn head(&self, key: SequenceKey) -> Option<&Queued<T>> {
        self.sequences.get(&key)?.queue.front()
    }

    /// Of the lanes that could run, the one whose batch is due first.
    fn plan_direct(&self, max_delay: Duration, enough_rows: u32) -> Option<Plan> {
        let of_lane = |(lane, rows): (u32, &[Option<SequenceKey>])| {
            let mut waits = Waits::default();
            let mut ready = Vec::new();
            for (row, key) in (0..).zip(rows) {
                if let Some((key, head)) = key.and_then(|key| Some((key, self.head(key)?))) {
                    waits.add(head);
                    ready.push((row, key, head));
                }
            }
            // The oldest decides: a row that always has a step must not keep others waiting.
            let heads = ready.iter().map(|(.., head)| *head);
            let first = heads.min_by_key(|head| (head.enqueued, head.entry))?;
            // A step of another shape waits for the next run, in the same row.
            let joins =
                |head: &Queued<T>| head.entry == first.entry || head.item.can_join(&first.item);
            let fitting = ready.iter().filter(|(.., head)| joins(head));
            let steps = fitting.map(|&(row, key, _)| (row, key)).collect();
            let ready = u32::try_from(ready.len()).unwrap_or(u32::MAX);
            let oldest = waits.oldest?;
            let at_once = max_delay.is_zero() || enough_rows == 0 || ready >= enough_rows;
            let due = match at_once {
                true => oldest,
                false => waits.due(max_delay),
            };
            let lane = Some(lane);
            Some(Plan { steps, due, lane })
        };
        let plans = self.slots.resting_lanes().filter_map(of_lane);
        plans.min_by_key(|plan| plan.due)
    }

    fn plan_oldest(
        &self,
        now: Option<Timestamp>,
        preferred: &[u32],
        max_delay: Duration,
    ) -> Option<Plan> {
        let max_rows = self.policy.max_rows as usize;
        let first = self.head(*self.ready.front()?)?;
        let mut waits = Waits::default();
        let mut count = 0;
        let mut closed = false;
        for &key in self.ready.iter().take(max_rows) {
            let head = self.head(key).expect("a ready sequence has a step");
            if count > 0 && !head.item.can_join(&first.item) {
                closed = true;
                break;
            }
            waits.add(head);
            count += 1;
        }
        let oldest = waits.oldest?;
        let of = |count: usize, due| Plan {
            steps: (0..).zip(self.ready.iter().copied().take(count)).collect(),
            due,
            lane: None,
        };
        if count >= max_rows || closed || max_delay.is_zero() && preferred.is_empty() {
            return Some(of(count, oldest));
        }
        let waited = !max_delay.is_zero() && now.is_some_and(|now| now >= oldest + max_delay);
        let reached = preferred
            .iter()
            .rev()
            .map(|&rows| rows as usize)
            .find(|&rows| rows <= count);
        match reached {
            Some(rows) if !waited => Some(of(rows, oldest)),
            _ if max_delay.is_zero() => Some(of(count, oldest)),
            _ => Some(of(count, waits.due(max_delay))),
        }
    }
}

impl<T, S> fmt::Debug for SequenceBatcher<T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SequenceBatcher")
            .field("policy", &self.policy)
            .field("sequences", &self.sequences.len())
            .field("backlog", &self.backlog.len())
            .field("queued", &self.entries.len())
            .finish()
    }
}

struct Plan {
    /// Rows and sequences.
    steps: Vec<(u32, SequenceKey)>,
    due: Timestamp,
    lane: Option<u32>,
}

/// How long the steps of a batch may be kept waiting for company.
#[derive(Default)]
struct Waits {
    oldest: Option<Timestamp>,
    /// The earliest moment at which half of the time to a deadline has passed.
    half_time: Option<Timestamp>,
}

impl Waits {
    fn add<T>(&mut self, queued: &Queued<T>) {
        let earliest = |known: &mut Option<Timestamp>, at| {
            *known = Some(known.map_or(at, |known: Timestamp| known.min(at)));
        };
        earliest(&mut self.oldest, queued.enqueued);
        if let Some(deadline) = queued.deadline {
            let half = queued.enqueued + (deadline - queued.enqueued) / 2;
            earliest(&mut self.half_time, half);
        }
    }

    fn due(&self, max_delay: Duration) -> Timestamp {
        let by_delay = self.oldest.unwrap_or(Timestamp::ZERO) + max_delay;
        self.half_time.map_or(by_delay, |at| at.min(by_delay))
    }
}

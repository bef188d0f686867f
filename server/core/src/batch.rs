//! When a batch closes and what goes into it.
//!
//! The semantics are those of Triton's dynamic batcher: strict priority between levels, first
//! come first served inside a level, preferred sizes, a bounded delay, queue policies per level.
//! Added to that: a batch closes early when a deadline in it is near or when waiting for others
//! was in vain lately, and nothing is taken after its deadline. What an item is, and who answers
//! it, is not known here.

#[cfg(test)]
mod laws;
mod queue;
#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Duration;

use self::queue::{Node, Queue};
use crate::time::Timestamp;

/// How late a driver's timer may fire: a batch that a limit forces out leaves this much earlier.
const WAKE_SLACK: Duration = Duration::from_millis(1);

/// How far behind late requests one is looked for that is not late.
const LOOK_AHEAD: usize = 64;

/// Something that can share a run with others of its kind.
pub trait BatchItem {
    /// Rows it adds to a batch.
    fn rows(&self) -> u32;

    /// Whether it can run in the same batch as `first`: equal shapes but for the batch dimension.
    fn can_join(&self, first: &Self) -> bool;
}

/// What happens to a request that has waited longer than its queue timeout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TimeoutAction {
    /// It is refused.
    #[default]
    Reject,
    /// It yields to all requests of its level that have not timed out.
    Delay,
}

/// The rules of one priority level's queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueuePolicy {
    /// What a passed queue timeout leads to.
    pub timeout_action: TimeoutAction,
    /// The queue timeout of a request that brings none; `None` or zero: it may wait for ever.
    pub default_timeout: Option<Duration>,
    /// Whether a request's own timeout may shorten the default.
    pub allow_timeout_override: bool,
    /// Requests that may wait in this level; zero sets no limit.
    pub max_queue_size: usize,
}

/// The rules of one model's batcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchPolicy {
    /// Rows of the largest batch, at least one.
    pub max_rows: u32,
    /// Batch sizes that are sent as soon as they are reached.
    pub preferred_rows: Vec<u32>,
    /// How long the oldest request waits for others to join, at the most.
    pub max_delay: Duration,
    /// The queues; index 0 is level 1, the most important.
    pub levels: Vec<QueuePolicy>,
    /// The level of a request that names none or one that does not exist; counts from 1.
    pub default_level: u32,
}

/// An item and the limits of its patience.
#[derive(Clone, Debug)]
pub struct Waiting<T> {
    /// The item itself.
    pub item: T,
    /// Its priority level from 1; zero or an unknown level means the default level.
    pub priority: u64,
    /// When its answer is of no more use.
    pub deadline: Option<Timestamp>,
    /// Its own queue timeout, used if the level allows it and only if shorter; zero means none.
    pub timeout: Option<Duration>,
}

/// Names an accepted item until it leaves; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EntryId {
    slot: u32,
    sequence: u64,
}

impl EntryId {
    /// The slot of what waits in a sequence and in no queue.
    const IN_SEQUENCE: u32 = u32::MAX;

    /// Names a step of a sequence.
    pub(crate) fn of_step(number: u64) -> Self {
        Self {
            slot: Self::IN_SEQUENCE,
            sequence: number,
        }
    }

    /// The number of a step of a sequence.
    pub(crate) fn step(self) -> Option<u64> {
        (self.slot == Self::IN_SEQUENCE).then_some(self.sequence)
    }
}

/// Why an item was not accepted.
#[derive(Debug)]
pub enum Refused<T> {
    /// Its level holds as many requests as it may.
    QueueFull { item: T, limit: usize },
    /// Its deadline has passed already.
    Expired { item: T },
}

/// Which limit of a request's patience passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpiryCause {
    /// The request's deadline: it has passed, or no run would end before it any more.
    Deadline,
    /// The queue timeout of its level, or its own shorter one.
    QueueTimeout,
    /// Another step of its sequence was given up: the sequence is over.
    SequenceOver,
}

/// An item that waited too long.
#[derive(Debug)]
pub struct Expired<T> {
    /// The item itself.
    pub item: T,
    /// Which limit passed.
    pub cause: ExpiryCause,
    /// How long it waited.
    pub waited: Duration,
}

/// Items to run together.
#[derive(Debug)]
pub struct Batch<T> {
    /// The items in the order they are to run, with the time each was accepted.
    pub entries: Vec<(EntryId, T, Timestamp)>,
    /// Sum of the items' rows.
    pub rows: u32,
    /// Whether nothing else is to run beside it.
    pub alone: bool,
}

/// The waiting requests of one model.
#[derive(Clone)]
pub struct Batcher<T> {
    policy: BatchPolicy,
    queue: Queue<T>,
    /// Whether the next batch is its first request alone.
    starts_alone: bool,
    company: Company,
}

/// The batch at the head of the queue: how many entries, how many rows, and when it may leave.
struct Plan {
    entries: usize,
    rows: u32,
    due: Timestamp,
}

impl<T: BatchItem> Batcher<T> {
    /// An empty batcher. A policy without levels gets one without limits.
    pub fn new(mut policy: BatchPolicy) -> Self {
        policy.max_rows = policy.max_rows.max(1);
        let max_rows = policy.max_rows;
        policy
            .preferred_rows
            .retain(|&rows| (1..=max_rows).contains(&rows));
        policy.preferred_rows.sort_unstable();
        policy.preferred_rows.dedup();
        if policy.levels.is_empty() {
            policy.levels.push(QueuePolicy::default());
        }
        let queue = Queue::new(policy.levels.len());
        Self {
            policy,
            queue,
            starts_alone: false,
            company: Company::default(),
        }
    }

    /// Accepts an item, or gives it back with the reason.
    pub fn push(&mut self, waiting: Waiting<T>, now: Timestamp) -> Result<EntryId, Refused<T>> {
        let Waiting {
            item,
            priority,
            deadline,
            timeout,
        } = waiting;
        if deadline.is_some_and(|deadline| deadline <= now) {
            return Err(Refused::Expired { item });
        }
        self.advance(now);
        let level = self.level(priority);
        let policy = &self.policy.levels[level];
        let limit = policy.max_queue_size;
        if limit != 0 && self.queue.level_len(level) >= limit {
            return Err(Refused::QueueFull { item, limit });
        }
        let timeout_at = policy.timeout(timeout).map(|timeout| now + timeout);
        Ok(self
            .queue
            .push(level, Node::new(item, now, deadline, timeout_at)))
    }

    /// The model is ready for those who waited for it: the first of them runs alone and at once.
    ///
    /// Where a run of many rows takes many times as long, nobody would have an answer before all
    /// of a full batch have theirs; and runs side by side share the processors. Not where the
    /// first still waits for company: those left over would wait again.
    pub fn start_alone(&mut self, now: Timestamp) {
        let delay = self.policy.max_delay;
        let mut waiting = self.queue.in_order();
        let first = waiting.next();
        let waited = first.is_some_and(|first| first.enqueued + delay <= now);
        let others = waiting.next().is_some();
        // A full batch is preferred by everyone.
        let preferred = &self.policy.preferred_rows;
        let prefers = preferred.iter().any(|&rows| rows < self.policy.max_rows);
        self.starts_alone = others && waited && !prefers;
    }

    /// Takes an item out, for instance because its client has gone.
    pub fn cancel(&mut self, id: EntryId) -> Option<T> {
        self.queue.remove(id).map(|node| node.item)
    }

    /// Takes out everything whose deadline, or rejecting queue timeout, has passed.
    pub fn expire(&mut self, now: Timestamp) -> Vec<Expired<T>> {
        self.advance(now);
        let mut expired = Vec::new();
        while let Some((node, cause)) = self.queue.pop_expired() {
            expired.push(Expired {
                cause,
                waited: now.since(node.enqueued),
                item: node.item,
            });
        }
        expired
    }

    /// Takes the next batch if one is due.
    ///
    /// `expected_run` estimates how long a batch of so many rows runs, rather too long than too
    /// short: [`cautious_run`](crate::profile::ServiceProfile::cautious_run) wastes the fewest runs. Requests at the head that
    /// cannot finish before their deadline expire now if a later one can: otherwise a server that
    /// has fallen behind would go on running what nobody waits for. When none can, the first is
    /// taken all the same, since the estimate may be wrong and only runs correct it. Whatever
    /// expires here is handed out by the next `expire`.
    pub fn take_batch(
        &mut self,
        now: Timestamp,
        expected_run: impl Fn(u32) -> Option<Duration>,
    ) -> Option<Batch<T>> {
        self.advance(now);
        let mut plan = self.plan(Some(now), &expected_run)?;
        if plan.due > now {
            return None;
        }
        let late = self.late_ahead(&plan, now, &expected_run);
        if late > 0 {
            self.queue.expire_first(late);
            // The rest goes now, as it would have gone in company: the model has fallen behind.
            plan = self.plan(Some(now), &expected_run)?;
        }
        let alone = std::mem::take(&mut self.starts_alone);
        if !alone && plan.rows < self.policy.max_rows && !self.policy.max_delay.is_zero() {
            let first = self.queue.in_order().next();
            let waited = first.is_some_and(|first| first.enqueued + self.policy.max_delay <= now);
            self.company.left(plan.entries, waited);
        }
        let mut entries = Vec::with_capacity(plan.entries);
        for _ in 0..plan.entries {
            let (id, node) = self.queue.pop_first().expect("planned entries are queued");
            entries.push((id, node.item, node.enqueued));
        }
        Some(Batch {
            entries,
            rows: plan.rows,
            alone,
        })
    }

    /// When `take_batch` or `expire` next has something to give; in the past when it has now.
    pub fn wake_at(&self, expected_run: impl Fn(u32) -> Option<Duration>) -> Option<Timestamp> {
        let due = self.plan(None, expected_run).map(|plan| plan.due);
        earliest(due, self.expires_at())
    }

    /// When a request next runs out of patience: all that matters while no batch can be run.
    pub fn expires_at(&self) -> Option<Timestamp> {
        earliest(self.queue.expired_since(), self.queue.next_timer())
    }

    /// Takes out everything, for instance because the model could not be loaded.
    pub fn flush(&mut self) -> Vec<T> {
        self.starts_alone = false;
        self.queue.drain()
    }

    /// Accepted items that have not left yet.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// The sum of their rows.
    pub fn queued_rows(&self) -> u64 {
        self.queue.rows()
    }

    fn level(&self, priority: u64) -> usize {
        let count = self.policy.levels.len();
        match usize::try_from(priority) {
            Ok(level) if (1..=count).contains(&level) => level - 1,
            _ => (self.policy.default_level as usize).clamp(1, count) - 1,
        }
    }

    /// Applies the timers that have passed: expired entries leave the order, delayed ones yield.
    fn advance(&mut self, now: Timestamp) {
        let levels = &self.policy.levels;
        let delays = |level: usize| levels[level].timeout_action == TimeoutAction::Delay;
        while self.queue.apply_timer(now, delays) {}
    }

    /// How many entries at the head are too late, if one behind them is not.
    ///
    /// With more waiting than fits the batch, others take their places and the run is as long as
    /// planned; otherwise only those count that would be too late even alone.
    fn late_ahead(
        &self,
        plan: &Plan,
        now: Timestamp,
        expected_run: impl Fn(u32) -> Option<Duration>,
    ) -> usize {
        let backlog = self.queue.in_service() > plan.entries;
        let late = |node: &Node<T>| {
            let rows = if backlog { plan.rows } else { node.rows };
            let run = || expected_run(rows).unwrap_or_default();
            node.deadline.is_some_and(|deadline| now + run() > deadline)
        };
        let mut nodes = self.queue.in_order().take(LOOK_AHEAD);
        nodes.position(|node| !late(node)).unwrap_or(0)
    }

    /// The batch at the head of the queue. Without `now` the count may be that of an earlier
    /// moment, the due time is right in any case.
    fn plan(
        &self,
        now: Option<Timestamp>,
        expected_run: impl Fn(u32) -> Option<Duration>,
    ) -> Option<Plan> {
        let max_rows = self.policy.max_rows;
        let preferred = &self.policy.preferred_rows;
        let mut nodes = self.queue.in_order();
        let first = nodes.next()?;
        let at_once = first.enqueued;
        let mut entries = 1;
        let mut rows = first.rows;
        let mut limits = Limits::default();
        limits.add(first, self.rejects(first));
        let mut best = preferred.binary_search(&rows).is_ok().then_some((1, rows));
        let mut closed = rows >= max_rows || self.starts_alone;
        while !closed && let Some(node) = nodes.next() {
            let sum = rows.saturating_add(node.rows);
            // Counting entries too bounds a batch of items without rows.
            let fits = sum <= max_rows && entries < max_rows as usize;
            if !fits || !node.item.can_join(&first.item) {
                closed = true;
                break;
            }
            entries += 1;
            rows = sum;
            limits.add(node, self.rejects(node));
            if preferred.binary_search(&rows).is_ok() {
                best = Some((entries, rows));
            }
            closed = rows >= max_rows;
        }
        let whole = |due| Plan { entries, rows, due };
        if rows >= max_rows {
            return Some(whole(at_once));
        }
        let delay = match self.company.is_in_vain() {
            true => Duration::ZERO,
            false => self.policy.max_delay,
        };
        let delayed_enough = !delay.is_zero()
            && now.is_some_and(|now| limits.oldest.is_some_and(|oldest| now >= oldest + delay));
        if let Some((entries, rows)) = best
            && !delayed_enough
        {
            return Some(Plan {
                entries,
                rows,
                due: at_once,
            });
        }
        let past_preferred = preferred.last().is_some_and(|&largest| rows >= largest);
        if closed || past_preferred || delay.is_zero() {
            return Some(whole(at_once));
        }
        let due = limits.due(delay, expected_run(rows));
        Some(whole(due.unwrap_or(at_once)))
    }

    fn rejects(&self, node: &Node<T>) -> bool {
        self.policy.levels[node.level()].timeout_action == TimeoutAction::Reject
    }
}

/// Whether requests that wait for others do so in vain, as those of a single caller do: the next
/// one comes when this one is answered.
#[derive(Clone, Copy, Debug, Default)]
struct Company {
    /// Requests in a row that nobody joined.
    in_vain: u32,
    /// Requests that left at once since.
    at_once: u32,
}

impl Company {
    /// So many in a row, and the next one does not wait,
    const PATIENCE: u32 = 8;
    /// until so many have left at once and another one tries.
    const AGAIN: u32 = 64;

    fn is_in_vain(self) -> bool {
        self.in_vain >= Self::PATIENCE
    }

    /// A batch left that was not full.
    fn left(&mut self, entries: usize, waited: bool) {
        if entries > 1 {
            *self = Self::default();
        } else if self.is_in_vain() {
            self.at_once += 1;
            if self.at_once >= Self::AGAIN {
                self.in_vain = Self::PATIENCE - 1;
                self.at_once = 0;
            }
        } else if waited {
            self.in_vain += 1;
        }
    }
}

impl QueuePolicy {
    /// The queue timeout of a request that brings `own`.
    fn timeout(&self, own: Option<Duration>) -> Option<Duration> {
        let set = |timeout: &Duration| !timeout.is_zero();
        let default = self.default_timeout.filter(set);
        let own = own.filter(|own| set(own) && self.allow_timeout_override);
        earliest(default, own)
    }
}

impl<T> fmt::Debug for Batcher<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batcher")
            .field("policy", &self.policy)
            .field("queued", &self.queue.len())
            .field("queued_rows", &self.queue.rows())
            .finish()
    }
}

/// What forces a batch out that would rather wait for company.
#[derive(Default)]
struct Limits {
    oldest: Option<Timestamp>,
    /// The earliest deadline.
    deadline: Option<Timestamp>,
    /// The earliest moment at which half of the time to a deadline has passed.
    half_time: Option<Timestamp>,
    /// The earliest queue timeout that would reject.
    timeout: Option<Timestamp>,
}

impl Limits {
    fn add<T>(&mut self, node: &Node<T>, rejects: bool) {
        self.oldest = earliest(self.oldest, Some(node.enqueued));
        if let Some(deadline) = node.deadline {
            let half = node.enqueued + (deadline - node.enqueued) / 2;
            self.deadline = earliest(self.deadline, Some(deadline));
            self.half_time = earliest(self.half_time, Some(half));
        }
        if rejects {
            self.timeout = earliest(self.timeout, node.timeout_at);
        }
    }

    fn due(&self, delay: Duration, expected_run: Option<Duration>) -> Option<Timestamp> {
        let by_delay = self.oldest.map(|oldest| oldest + delay);
        // A run of unknown length is given half of the time there is.
        let by_deadline = match (self.deadline, expected_run) {
            (Some(deadline), Some(run)) => {
                let ahead = run.saturating_add(run / 8).saturating_add(WAKE_SLACK);
                Some(before(deadline, ahead))
            }
            _ => self.half_time,
        };
        // Waiting for company must not be what gets a request rejected.
        let by_timeout = self.timeout.map(|at| before(at, WAKE_SLACK));
        earliest(by_delay, earliest(by_deadline, by_timeout))
    }
}

fn earliest<V: Ord>(a: Option<V>, b: Option<V>) -> Option<V> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

fn before(at: Timestamp, ahead: Duration) -> Timestamp {
    let ahead = u64::try_from(ahead.as_nanos()).unwrap_or(u64::MAX);
    Timestamp::from_nanos(at.as_nanos().saturating_sub(ahead))
}

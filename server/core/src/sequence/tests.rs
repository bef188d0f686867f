//! Timelines of a few sequences.

use super::*;

/// Steps of equal shape may share a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) name: u32,
    pub(super) shape: u8,
}

impl BatchItem for Item {
    fn rows(&self) -> u32 {
        1
    }

    fn can_join(&self, first: &Self) -> bool {
        self.shape == first.shape
    }
}

pub(super) fn at(millis: u64) -> Timestamp {
    Timestamp::ZERO + ms(millis)
}

pub(super) fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn item(name: u32) -> Item {
    Item { name, shape: 0 }
}

fn waiting(item: Item, deadline: Option<Timestamp>) -> Waiting<Item> {
    Waiting {
        item,
        priority: 0,
        deadline,
        timeout: None,
    }
}

fn step(id: u64, start: bool, end: bool) -> Step {
    Step {
        id: SequenceId::Number(id),
        start,
        end,
    }
}

const START: (bool, bool) = (true, false);
const NEXT: (bool, bool) = (false, false);
const END: (bool, bool) = (false, true);

struct World {
    batcher: SequenceBatcher<Item, u32>,
    now: Timestamp,
}

impl World {
    fn new(strategy: SlotStrategy, max_rows: u32, lanes: u32) -> Self {
        let policy = SequencePolicy {
            strategy,
            max_rows,
            lanes,
            max_idle: ms(1000),
            max_queued: 100,
        };
        Self {
            batcher: SequenceBatcher::new(policy),
            now: at(1),
        }
    }

    fn push(&mut self, name: u32, id: u64, (start, end): (bool, bool)) -> EntryId {
        let waiting = waiting(item(name), None);
        let pushed = self.batcher.push(waiting, step(id, start, end), self.now);
        pushed.expect("accepted")
    }

    fn take(&mut self) -> Option<StepBatch<Item, u32>> {
        self.batcher.take(self.now)
    }

    /// Ends a run; each sequence's state is the name of its step.
    fn finish(&mut self, batch: StepBatch<Item, u32>) {
        let names = batch.batch.entries.iter().map(|(_, item, _)| item.name);
        let outcomes = batch.steps.iter().zip(names);
        let finished = FinishedSteps {
            outcomes: outcomes
                .map(|(step, name)| (step.key, Outcome::GoesOn(Some(name))))
                .collect(),
            lane: batch.lane,
        };
        self.batcher.finish(finished, self.now);
    }
}

/// `name@row` of each step, and the number of rows.
fn shown(batch: &StepBatch<Item, u32>) -> String {
    let steps = batch.batch.entries.iter().zip(&batch.steps);
    let steps: Vec<_> = steps
        .map(|((_, item, _), step)| format!("{}@{}", item.name, step.row))
        .collect();
    format!("{} of {}", steps.join(" "), batch.batch.rows)
}

fn direct() -> SlotStrategy {
    SlotStrategy::Direct {
        max_delay: Duration::ZERO,
        enough_rows: 0,
    }
}

fn oldest(candidates: u32) -> SlotStrategy {
    SlotStrategy::Oldest {
        candidates,
        preferred_rows: Vec::new(),
        max_delay: Duration::ZERO,
    }
}

#[test]
fn a_sequence_keeps_its_row_and_idle_rows_are_left_empty() {
    let mut world = World::new(direct(), 4, 1);
    for id in 1..=3 {
        world.push(id as u32, id, START);
    }
    let batch = world.take().unwrap();
    assert_eq!(shown(&batch), "1@0 2@1 3@2 of 3");
    world.push(13, 3, NEXT);
    assert!(world.take().is_none(), "the lane is running");
    world.finish(batch);
    let batch = world.take().unwrap();
    assert_eq!(shown(&batch), "13@2 of 3");
    assert_eq!(batch.steps[0].state, Some(3));
    world.finish(batch);
    world.push(11, 1, END);
    let batch = world.take().unwrap();
    world.finish(batch);
    world.push(4, 4, START);
    assert_eq!(shown(&world.take().unwrap()), "4@0 of 1");
}

#[test]
fn sequences_are_spread_over_the_lanes() {
    let mut world = World::new(direct(), 2, 2);
    for id in 1..=4 {
        world.push(id as u32, id, START);
    }
    assert_eq!(shown(&world.take().unwrap()), "1@0 3@1 of 2");
    assert_eq!(shown(&world.take().unwrap()), "2@0 4@1 of 2");
    assert!(world.take().is_none());
}

#[test]
fn a_direct_batch_waits_until_enough_rows_are_ready() {
    let strategy = SlotStrategy::Direct {
        max_delay: ms(10),
        enough_rows: 2,
    };
    let mut world = World::new(strategy, 4, 1);
    world.push(1, 1, START);
    assert_eq!(world.batcher.wake_at(), Some(at(11)));
    assert!(world.take().is_none());
    world.push(2, 2, START);
    assert_eq!(shown(&world.take().unwrap()), "1@0 2@1 of 2");
}

#[test]
fn steps_of_another_shape_wait_in_their_row() {
    let mut world = World::new(direct(), 4, 1);
    world.push(1, 1, START);
    let other = Item { name: 2, shape: 1 };
    let pushed = world
        .batcher
        .push(waiting(other, None), step(2, true, false), world.now);
    pushed.unwrap();
    world.push(3, 3, START);
    let batch = world.take().unwrap();
    assert_eq!(shown(&batch), "1@0 3@2 of 3");
    world.finish(batch);
    assert_eq!(shown(&world.take().unwrap()), "2@1 of 2");
}

#[test]
fn a_row_that_always_has_a_step_does_not_keep_other_shapes_waiting() {
    let mut world = World::new(direct(), 4, 1);
    world.push(1, 1, START);
    let batch = world.take().unwrap();
    let other = Item { name: 2, shape: 1 };
    let pushed = world
        .batcher
        .push(waiting(other, None), step(2, true, false), world.now);
    pushed.unwrap();
    world.now = at(2);
    world.push(3, 1, NEXT);
    world.finish(batch);
    assert_eq!(shown(&world.take().unwrap()), "2@1 of 2");
}

#[test]
fn oldest_runs_one_step_of_each_sequence_at_a_time() {
    let mut world = World::new(oldest(8), 4, 2);
    world.push(1, 1, START);
    world.push(2, 1, NEXT);
    world.push(3, 2, START);
    let batch = world.take().unwrap();
    assert_eq!(shown(&batch), "1@0 3@1 of 2");
    assert!(world.take().is_none());
    world.finish(batch);
    let batch = world.take().unwrap();
    assert_eq!(shown(&batch), "2@0 of 1");
    assert_eq!(batch.steps[0].state, Some(1));
}

#[test]
fn oldest_sends_preferred_sizes_at_once_and_others_after_the_delay() {
    let strategy = SlotStrategy::Oldest {
        candidates: 8,
        preferred_rows: vec![2],
        max_delay: ms(10),
    };
    let mut world = World::new(strategy, 4, 1);
    world.push(1, 1, START);
    assert!(world.take().is_none());
    assert_eq!(world.batcher.wake_at(), Some(at(11)));
    world.push(2, 2, START);
    world.push(3, 3, START);
    assert_eq!(shown(&world.take().unwrap()), "1@0 2@1 of 2");
    assert!(world.take().is_none());
    world.now = at(11);
    assert_eq!(shown(&world.take().unwrap()), "3@0 of 1");
}

#[test]
fn a_sequence_without_a_slot_waits_in_the_backlog() {
    let mut world = World::new(oldest(1), 1, 1);
    world.push(1, 1, START);
    world.push(2, 2, START);
    world.push(3, 2, END);
    let batch = world.take().unwrap();
    world.finish(batch);
    assert!(world.take().is_none(), "the first may still have steps");
    world.push(4, 1, END);
    let batch = world.take().unwrap();
    world.finish(batch);
    for name in ["2@0 of 1", "3@0 of 1"] {
        let batch = world.take().unwrap();
        assert_eq!(shown(&batch), name);
        world.finish(batch);
    }
    assert_eq!(world.batcher.open(), 0);
}

#[test]
fn an_idle_sequence_is_over_and_its_slot_goes_to_the_backlog() {
    let mut world = World::new(oldest(1), 1, 1);
    world.push(1, 1, START);
    let batch = world.take().unwrap();
    world.finish(batch);
    world.push(2, 2, START);
    let counts = |open, waiting, expired| SequenceCounts {
        open,
        waiting,
        expired,
    };
    assert_eq!(world.batcher.counts(), counts(2, 1, 0));
    assert_eq!(world.batcher.wake_at(), Some(at(1001)));
    world.now = at(1001);
    assert!(world.batcher.expire(world.now).is_empty());
    assert_eq!(world.batcher.counts(), counts(1, 0, 1));
    assert_eq!(shown(&world.take().unwrap()), "2@0 of 1");
    assert!(!world.batcher.knows(&SequenceId::Number(1)));
    let late = waiting(item(3), None);
    let refused = world.batcher.push(late, step(1, false, false), world.now);
    assert!(matches!(refused, Err(NotQueued::NotStarted { .. })));
}

#[test]
fn a_new_start_takes_over_an_id_that_is_in_use() {
    let mut world = World::new(oldest(1), 1, 1);
    world.push(1, 1, START);
    world.push(2, 1, START);
    assert_eq!(world.batcher.open(), 1);
    // After its end was queued an id stands for another sequence.
    world.push(3, 1, END);
    world.push(4, 1, START);
    assert_eq!(world.batcher.open(), 2);
}

#[test]
fn a_step_past_its_deadline_ends_its_sequence() {
    let mut world = World::new(oldest(1), 1, 1);
    world.push(1, 1, START);
    let batch = world.take().unwrap();
    let pushed = world.batcher.push(
        waiting(item(2), Some(at(5))),
        step(1, false, false),
        world.now,
    );
    pushed.unwrap();
    world.push(3, 1, NEXT);
    world.now = at(5);
    let expired = world.batcher.expire(world.now);
    let causes: Vec<_> = expired.iter().map(|e| (e.item.name, e.cause)).collect();
    let expected = [(2, ExpiryCause::Deadline), (3, ExpiryCause::SequenceOver)];
    assert_eq!(causes, expected);
    assert!(!world.batcher.knows(&SequenceId::Number(1)));
    assert_eq!(world.batcher.open(), 1, "its first step is still running");
    world.finish(batch);
    assert_eq!(world.batcher.open(), 0);
}

#[test]
fn a_cancelled_step_ends_its_sequence() {
    let mut world = World::new(direct(), 2, 1);
    let first = world.push(1, 1, START);
    world.push(2, 1, NEXT);
    assert_eq!(world.batcher.cancel(first, world.now), Some(item(1)));
    assert_eq!(world.batcher.cancel(first, world.now), None);
    assert_eq!(world.batcher.wake_at(), Some(world.now));
    let expired = world.batcher.expire(world.now);
    assert_eq!(expired.len(), 1);
    assert_eq!(expired[0].cause, ExpiryCause::SequenceOver);
    assert_eq!((world.batcher.open(), world.batcher.queued()), (0, 0));
}

#[test]
fn a_retired_model_keeps_no_sequence_that_has_nothing_to_do() {
    let mut world = World::new(oldest(4), 4, 1);
    world.push(1, 1, START);
    let batch = world.take().unwrap();
    world.finish(batch);
    world.push(2, 2, START);
    world.batcher.retire();
    assert_eq!(world.batcher.open(), 1);
    let batch = world.take().unwrap();
    world.finish(batch);
    assert_eq!(world.batcher.open(), 0);
}

//! What holds for every policy and every sequence of events.

use std::collections::HashMap;

use proptest::prelude::*;

use super::tests::{Item, at, ms};
use super::*;

#[derive(Clone, Debug)]
enum Event {
    Push {
        id: u64,
        start: bool,
        end: bool,
        shape: u8,
        deadline: Option<u64>,
    },
    Cancel(prop::sample::Index),
    Take,
    Finish {
        index: prop::sample::Index,
        broken: bool,
    },
    Expire,
    Pass(u64),
    Flush,
}

/// What is known of an accepted step.
#[derive(Clone, Copy, Debug)]
struct Accepted {
    entry: EntryId,
    key_id: u64,
    starts: bool,
    deadline: Option<Timestamp>,
}

struct World {
    batcher: SequenceBatcher<Item, Vec<u32>>,
    now: Timestamp,
    waiting: HashMap<u32, Accepted>,
    running: Vec<StepBatch<Item, Vec<u32>>>,
    pushed: u32,
}

impl World {
    fn step(&mut self, event: Event) {
        match event {
            Event::Push {
                id,
                start,
                end,
                shape,
                deadline,
            } => {
                let item = Item {
                    name: self.pushed,
                    shape,
                };
                self.pushed += 1;
                let deadline = deadline.map(|after| self.now + ms(after));
                let known = self.batcher.knows(&SequenceId::Number(id));
                let step = Step {
                    id: SequenceId::Number(id),
                    start,
                    end,
                };
                let waiting = Waiting {
                    item,
                    priority: 0,
                    deadline,
                    timeout: None,
                };
                match self.batcher.push(waiting, step, self.now) {
                    Ok(entry) => {
                        assert!(start || known);
                        let accepted = Accepted {
                            entry,
                            key_id: id,
                            starts: start,
                            deadline,
                        };
                        self.waiting.insert(item.name, accepted);
                    }
                    Err(NotQueued::NotStarted { .. }) => assert!(!start && !known),
                    Err(NotQueued::Expired { .. }) => {
                        assert!(deadline.is_some_and(|at| at <= self.now));
                    }
                    Err(NotQueued::QueueFull { limit, .. }) => {
                        assert_eq!(limit, self.batcher.policy.max_queued);
                        assert!(self.batcher.entries.len() >= limit);
                    }
                }
            }
            Event::Cancel(index) if !self.waiting.is_empty() => {
                let mut names: Vec<u32> = self.waiting.keys().copied().collect();
                names.sort_unstable();
                let name = *index.get(&names);
                let entry = self.waiting[&name].entry;
                // One that was given up already is handed out by `expire`.
                if let Some(item) = self.batcher.cancel(entry, self.now) {
                    assert_eq!(item.name, name);
                    self.waiting.remove(&name);
                }
            }
            Event::Cancel(_) => {}
            Event::Take => {
                self.take();
            }
            Event::Finish { index, broken } if !self.running.is_empty() => {
                let index = index.index(self.running.len());
                self.finish(index, broken);
            }
            Event::Finish { .. } => {}
            Event::Expire => self.expire(),
            Event::Pass(after) => self.now = self.now + ms(after),
            Event::Flush => {
                for item in self.batcher.flush(self.now) {
                    self.waiting.remove(&item.name).expect("leaves once");
                }
                assert!(self.waiting.is_empty());
                assert!(self.batcher.by_id.is_empty());
            }
        }
        self.check();
    }

    fn take(&mut self) -> bool {
        // As the driver does.
        self.expire();
        let running = self.running.len();
        if running >= self.batcher.policy.lanes as usize {
            return false;
        }
        let Some(taken) = self.batcher.take(self.now) else {
            return false;
        };
        let first = taken.batch.entries[0].1;
        assert!(taken.batch.rows <= self.batcher.policy.max_rows);
        let mut rows: Vec<u32> = taken.steps.iter().map(|step| step.row).collect();
        assert_eq!(rows.last(), Some(&(taken.batch.rows - 1)));
        rows.dedup();
        assert_eq!(rows.len(), taken.batch.entries.len());
        assert!(rows.is_sorted());
        for ((entry, item, _), step) in taken.batch.entries.iter().zip(&taken.steps) {
            assert_eq!(item.shape, first.shape);
            let accepted = self.waiting.remove(&item.name).expect("leaves once");
            assert_eq!(accepted.entry, *entry);
            assert!(accepted.deadline.is_none_or(|at| at > self.now));
            // Steps of a sequence run in order, from what the one before left.
            let so_far = step.state.as_deref().unwrap_or_default();
            assert!(so_far.iter().all(|&earlier| earlier < item.name));
            assert!(accepted.starts || !so_far.is_empty());
            let busy = self.running.iter().flat_map(|run| &run.steps);
            assert!(busy.into_iter().all(|other| other.key != step.key));
            let earlier = self.waiting.iter().filter(|(_, other)| {
                other.key_id == accepted.key_id
                    && self.batcher.entries_of(other.entry) == Some(step.key)
            });
            assert!(earlier.into_iter().all(|(&name, _)| name > item.name));
        }
        self.running.push(taken);
        true
    }

    fn finish(&mut self, index: usize, broken: bool) {
        let run = self.running.swap_remove(index);
        let names: Vec<u32> = run
            .batch
            .entries
            .iter()
            .map(|(_, item, _)| item.name)
            .collect();
        let outcomes = run.steps.into_iter().zip(names).map(|(step, name)| {
            let mut state = step.state.unwrap_or_default();
            state.push(name);
            let outcome = match broken {
                true => Outcome::Broken,
                false => Outcome::GoesOn(Some(state)),
            };
            (step.key, outcome)
        });
        let finished = FinishedSteps {
            outcomes: outcomes.collect(),
            lane: run.lane,
        };
        self.batcher.finish(finished, self.now);
    }

    fn expire(&mut self) {
        for expired in self.batcher.expire(self.now) {
            let accepted = self
                .waiting
                .remove(&expired.item.name)
                .expect("leaves once");
            match expired.cause {
                ExpiryCause::Deadline => {
                    assert!(accepted.deadline.is_some_and(|at| at <= self.now));
                }
                ExpiryCause::SequenceOver => {}
                ExpiryCause::QueueTimeout => unreachable!("sequences have no queue timeout"),
            }
        }
        let late = |accepted: &&Accepted| accepted.deadline.is_some_and(|at| at <= self.now);
        assert_eq!(self.waiting.values().filter(late).count(), 0);
    }

    fn check(&self) {
        let batcher = &self.batcher;
        assert_eq!(batcher.queued(), self.waiting.len());
        let (placed, limit) = batcher.slots.used();
        assert!(placed <= limit);
        assert!(
            batcher.backlog.is_empty() || placed == limit,
            "no slot is left unused"
        );
        assert_eq!(batcher.open(), placed + batcher.backlog.len());
        for (key, sequence) in &batcher.sequences {
            let idle = sequence.queue.is_empty() && !sequence.running;
            assert_eq!(sequence.idle_at.is_some(), idle, "what is idle has an end");
            assert_eq!(
                batcher.by_id.get(&sequence.id) == Some(key),
                !sequence.ended
            );
        }
        // Nothing is due a moment before it is due.
        if let Some(wake_at) = batcher.wake_at() {
            let early = wake_at > self.now;
            assert!(
                !early
                    || batcher
                        .plan(Some(self.now))
                        .is_none_or(|plan| plan.due > self.now)
            );
        } else {
            assert!(batcher.open() == 0 || !self.running.is_empty());
        }
    }

    /// A driver that only sleeps until `wake_at` gets everything out, and no sequence stays.
    fn settle(&mut self) {
        let mut turns = 0;
        loop {
            while !self.running.is_empty() {
                self.finish(0, false);
            }
            self.expire();
            while self.take() {}
            self.check();
            if self.running.is_empty() {
                let Some(wake_at) = self.batcher.wake_at() else {
                    break;
                };
                self.now = self.now.max(wake_at);
            }
            turns += 1;
            assert!(turns <= 10 * (self.pushed as usize + 10));
        }
        assert!(self.waiting.is_empty());
        assert_eq!(self.batcher.open(), 0);
        assert!(self.batcher.by_id.is_empty() && self.batcher.entries.is_empty());
    }
}

impl<T, S> SequenceBatcher<T, S> {
    fn entries_of(&self, entry: EntryId) -> Option<SequenceKey> {
        self.entries.get(&entry.step()?).copied()
    }
}

fn policies() -> impl Strategy<Value = SequencePolicy> {
    let direct = (0u64..10, 0u32..5).prop_map(|(delay, enough_rows)| SlotStrategy::Direct {
        max_delay: ms(delay),
        enough_rows,
    });
    let oldest = (1u32..5, prop::collection::vec(0u32..5, 0..3), 0u64..10).prop_map(
        |(candidates, preferred_rows, delay)| SlotStrategy::Oldest {
            candidates,
            preferred_rows,
            max_delay: ms(delay),
        },
    );
    (
        prop_oneof![direct, oldest],
        1u32..4,
        1u32..3,
        1u64..40,
        prop_oneof![Just(0usize), 3usize..20],
    )
        .prop_map(
            |(strategy, max_rows, lanes, idle, max_queued)| SequencePolicy {
                strategy,
                max_rows,
                lanes,
                max_idle: ms(idle),
                max_queued,
            },
        )
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let push = (
        1u64..6,
        prop::bool::weighted(0.3),
        prop::bool::weighted(0.2),
        prop_oneof![5 => Just(0u8), 1 => Just(1u8)],
        prop::option::weighted(0.2, 0u64..30),
    )
        .prop_map(|(id, start, end, shape, deadline)| Event::Push {
            id,
            start,
            end,
            shape,
            deadline,
        });
    let finish = (any::<prop::sample::Index>(), prop::bool::weighted(0.1))
        .prop_map(|(index, broken)| Event::Finish { index, broken });
    let event = prop_oneof![
        12 => push,
        1 => any::<prop::sample::Index>().prop_map(Event::Cancel),
        6 => Just(Event::Take),
        5 => finish,
        2 => Just(Event::Expire),
        4 => (0u64..15).prop_map(Event::Pass),
        1 => prop::bool::weighted(0.1).prop_map(|flush| match flush {
            true => Event::Flush,
            false => Event::Take,
        }),
    ];
    prop::collection::vec(event, 0..120)
}

proptest! {
    #[test]
    fn steps_run_in_order_one_at_a_time_and_every_sequence_ends(
        policy in policies(),
        events in events(),
    ) {
        let mut world = World {
            batcher: SequenceBatcher::new(policy),
            now: at(1),
            waiting: HashMap::new(),
            running: Vec::new(),
            pushed: 0,
        };
        for event in events {
            world.step(event);
        }
        world.settle();
    }
}

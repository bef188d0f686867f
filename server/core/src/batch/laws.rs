//! What holds for every policy and every sequence of events.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::tests::{Item, at, millis};
use super::*;

#[derive(Clone, Debug)]
enum Step {
    Push {
        rows: u32,
        shape: u8,
        priority: u64,
        deadline: Option<u64>,
        timeout: Option<u64>,
    },
    Cancel(prop::sample::Index),
    Expire,
    Take,
    Pass(u64),
    Flush,
}

/// What is known of an accepted item.
#[derive(Clone, Debug)]
struct Accepted {
    id: EntryId,
    item: Item,
    level: usize,
    deadline: Option<Timestamp>,
    timeout_at: Option<Timestamp>,
}

struct World {
    batcher: Batcher<Item>,
    now: Timestamp,
    run: Option<Duration>,
    inside: HashMap<u32, Accepted>,
    /// Too late to be run, not collected yet.
    given_up: HashSet<u32>,
    pushed: u32,
}

impl World {
    fn step(&mut self, step: Step) {
        match step {
            Step::Push {
                rows,
                shape,
                priority,
                deadline,
                timeout,
            } => {
                let item = Item {
                    name: self.pushed,
                    rows,
                    shape,
                };
                self.pushed += 1;
                self.push(Waiting {
                    item,
                    priority,
                    deadline: deadline.map(|after| self.now + millis(after)),
                    timeout: timeout.map(millis),
                });
            }
            Step::Cancel(index) if !self.inside.is_empty() => {
                let mut inside: Vec<u32> = self.inside.keys().copied().collect();
                inside.sort_unstable();
                let accepted = self.leave(*index.get(&inside));
                assert_eq!(self.batcher.cancel(accepted.id), Some(accepted.item));
                assert_eq!(self.batcher.cancel(accepted.id), None);
            }
            Step::Cancel(_) => {}
            Step::Expire => self.expire(),
            Step::Take => {
                self.take();
            }
            Step::Pass(after) => self.now = self.now + millis(after),
            Step::Flush => {
                for item in self.batcher.flush() {
                    self.leave(item.name);
                }
                assert!(self.inside.is_empty());
            }
        }
        self.check();
    }

    fn push(&mut self, waiting: Waiting<Item>) {
        let Waiting {
            item,
            priority,
            deadline,
            timeout,
        } = waiting.clone();
        let level = self.batcher.level(priority);
        let policy = self.batcher.policy.levels[level].clone();
        match self.batcher.push(waiting, self.now) {
            Ok(id) => {
                let timeout_at = policy.timeout(timeout).map(|timeout| self.now + timeout);
                let accepted = Accepted {
                    id,
                    item,
                    level,
                    deadline,
                    timeout_at,
                };
                self.inside.insert(item.name, accepted);
            }
            Err(Refused::QueueFull { limit, .. }) => {
                let waiting = self
                    .inside
                    .values()
                    .filter(|other| other.level == level)
                    .count();
                assert_eq!(limit, policy.max_queue_size);
                assert!(limit > 0 && waiting >= limit);
            }
            Err(Refused::Expired { .. }) => assert!(deadline.is_some_and(|at| at <= self.now)),
        }
    }

    fn leave(&mut self, name: u32) -> Accepted {
        self.inside.remove(&name).expect("leaves once")
    }

    fn expire(&mut self) {
        let expired = self.batcher.expire(self.now);
        for Expired { item, cause, .. } in expired {
            let late = self.run.unwrap_or_default();
            let accepted = self.leave(item.name);
            match cause {
                ExpiryCause::Deadline => {
                    assert!(accepted.deadline.is_some_and(|at| at <= self.now + late));
                }
                ExpiryCause::QueueTimeout => {
                    let policy = &self.batcher.policy.levels[accepted.level];
                    assert_eq!(policy.timeout_action, TimeoutAction::Reject);
                    assert!(accepted.timeout_at.is_some_and(|at| at <= self.now));
                }
                ExpiryCause::SequenceOver => unreachable!("there are no sequences here"),
            }
        }
        let left = self.inside.values();
        assert!(left.filter(|other| self.has_expired(other)).count() == 0);
        assert!(
            self.given_up
                .iter()
                .all(|name| !self.inside.contains_key(name))
        );
    }

    fn take(&mut self) -> usize {
        let run = self.run;
        let order = self.order();
        let Some(batch) = self.batcher.take_batch(self.now, |_| run) else {
            return 0;
        };
        let max_rows = self.batcher.policy.max_rows;
        assert!(batch.rows <= max_rows || batch.entries.len() == 1);
        let first = batch.entries[0].1;
        // A run of consecutive entries; only those before it that are late were passed over.
        let start = order
            .iter()
            .position(|&name| name == first.name)
            .expect("was in order");
        let taken: Vec<u32> = batch.entries.iter().map(|(_, item, _)| item.name).collect();
        assert_eq!(order[start..start + taken.len()], taken);
        for name in &order[..start] {
            let passed_over = &self.inside[name];
            let finish = self.now + run.unwrap_or_default();
            assert!(passed_over.deadline.is_some_and(|at| at < finish));
            self.given_up.insert(*name);
        }
        for (id, item, enqueued) in &batch.entries {
            assert_eq!(item.shape, first.shape);
            assert!(*enqueued <= self.now);
            let accepted = self.leave(item.name);
            assert_eq!(accepted.id, *id);
            assert!(!self.has_expired(&accepted));
        }
        batch.entries.len()
    }

    fn has_expired(&self, accepted: &Accepted) -> bool {
        let rejects =
            self.batcher.policy.levels[accepted.level].timeout_action == TimeoutAction::Reject;
        let past = |at: Option<Timestamp>| at.is_some_and(|at| at <= self.now);
        past(accepted.deadline) || (rejects && past(accepted.timeout_at))
    }

    /// The order of service, computed the simple way.
    fn order(&self) -> Vec<u32> {
        let in_service = self
            .inside
            .values()
            .filter(|other| !self.has_expired(other) && !self.given_up.contains(&other.item.name));
        let mut order: Vec<_> = in_service
            .map(|accepted| {
                let delayed_at = accepted.timeout_at.filter(|&at| at <= self.now);
                (accepted.level, delayed_at, accepted.item.name)
            })
            .collect();
        order.sort_unstable();
        order.into_iter().map(|(_, _, name)| name).collect()
    }

    fn check(&self) {
        assert_eq!(self.batcher.queued(), self.inside.len());
        let rows = self
            .inside
            .values()
            .map(|other| u64::from(other.item.rows))
            .sum::<u64>();
        assert_eq!(self.batcher.queued_rows(), rows);
        let run = self.run;
        let wake_at = self.batcher.wake_at(|_| run);
        assert_eq!(wake_at.is_some(), !self.inside.is_empty());
        // A nanosecond before it is due there is nothing to take.
        if let Some(wake_at) = wake_at
            && wake_at > self.now
        {
            let early = Timestamp::from_nanos(wake_at.as_nanos() - 1).max(self.now);
            let mut batcher = self.batcher.clone();
            assert!(batcher.take_batch(early, |_| run).is_none());
            assert!(batcher.expire(early).is_empty());
        }
    }

    /// A driver that only sleeps until `wake_at` gets everything out.
    fn settle(&mut self) {
        let mut fruitless = 0;
        while let Some(wake_at) = {
            let run = self.run;
            self.batcher.wake_at(|_| run)
        } {
            self.now = self.now.max(wake_at);
            let before = self.inside.len();
            self.expire();
            while self.take() > 0 {}
            self.expire();
            self.check();
            // Only a delay, which an entry has once, may be all that a wake-up was for.
            fruitless += usize::from(self.inside.len() == before);
            assert!(fruitless <= self.pushed as usize);
        }
        assert!(self.inside.is_empty());
    }
}

fn policies() -> impl Strategy<Value = BatchPolicy> {
    let level = (
        any::<bool>(),
        prop::option::of(0u64..30),
        any::<bool>(),
        0usize..6,
    )
        .prop_map(
            |(delay, timeout, allow_timeout_override, size)| QueuePolicy {
                timeout_action: match delay {
                    true => TimeoutAction::Delay,
                    false => TimeoutAction::Reject,
                },
                default_timeout: timeout.map(millis),
                allow_timeout_override,
                // Rarely full.
                max_queue_size: size * 3,
            },
        );
    (
        1u32..9,
        prop::collection::vec(0u32..10, 0..3),
        prop_oneof![Just(0), 1u64..20],
        prop::collection::vec(level, 1..4),
        0u32..5,
    )
        .prop_map(
            |(max_rows, preferred_rows, max_delay, levels, default_level)| BatchPolicy {
                max_rows,
                preferred_rows,
                max_delay: millis(max_delay),
                levels,
                default_level,
            },
        )
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let push = (
        0u32..5,
        prop_oneof![5 => Just(0u8), 1 => Just(1u8)],
        0u64..5,
        prop::option::of(0u64..40),
        prop::option::of(0u64..20),
    )
        .prop_map(|(rows, shape, priority, deadline, timeout)| Step::Push {
            rows,
            shape,
            priority,
            deadline,
            timeout,
        });
    let step = prop_oneof![
        12 => push,
        2 => any::<prop::sample::Index>().prop_map(Step::Cancel),
        2 => Just(Step::Expire),
        3 => Just(Step::Take),
        6 => (0u64..8).prop_map(Step::Pass),
        1 => prop::bool::weighted(0.1).prop_map(|flush| match flush {
            true => Step::Flush,
            false => Step::Take,
        }),
    ];
    prop::collection::vec(step, 0..80)
}

proptest! {
    #[test]
    fn every_accepted_entry_leaves_once_in_order_and_in_time(
        policy in policies(),
        run in prop::option::of(0u64..15),
        steps in steps(),
    ) {
        let mut world = World {
            batcher: Batcher::new(policy),
            now: at(1),
            run: run.map(millis),
            inside: HashMap::new(),
            given_up: HashSet::new(),
            pushed: 0,
        };
        for step in steps {
            world.step(step);
        }
        world.settle();
    }
}

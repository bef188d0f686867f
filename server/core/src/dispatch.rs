//! Which model runs next when there are more batches than the machine should run at once.
//!
//! Slots are handed to models, not to batches: the model takes its batch when it has the slot, so
//! a batch goes on filling while it waits. Waiting models take turns, one slot each.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// A bounded number of runs over all models.
#[derive(Clone, Debug)]
pub struct RunSlots<K> {
    capacity: usize,
    used: usize,
    /// How often one was taken that was free.
    taken: u64,
    /// Waiting keys in turn; a place whose ticket is not the key's own any more is void.
    ring: VecDeque<(K, u64)>,
    tickets: HashMap<K, u64>,
    next_ticket: u64,
}

impl<K: Clone + Eq + Hash> RunSlots<K> {
    /// Slots for `capacity` runs at once, at least one.
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity.max(1),
            used: 0,
            taken: 0,
            ring: VecDeque::new(),
            tickets: HashMap::new(),
            next_ticket: 0,
        }
    }

    /// Takes a slot that is free and that nobody waits for.
    pub fn try_acquire_free(&mut self) -> bool {
        let is_free = self.used < self.capacity && self.tickets.is_empty();
        if is_free {
            self.used += 1;
            self.taken += 1;
        }
        is_free
    }

    /// Takes a slot; when there is none the key is queued, once however often it asks.
    pub fn try_acquire(&mut self, key: &K) -> bool {
        if self.try_acquire_free() {
            return true;
        }
        if !self.tickets.contains_key(key) {
            let ticket = self.next_ticket;
            self.next_ticket += 1;
            self.tickets.insert(key.clone(), ticket);
            self.ring.push_back((key.clone(), ticket));
        }
        false
    }

    /// Gives a slot back; the key returned, if any, holds it from now on.
    ///
    /// A key that has nothing to run any more releases the slot again.
    pub fn release(&mut self) -> Option<K> {
        debug_assert!(self.used > 0, "a slot released that nobody held");
        while let Some((key, ticket)) = self.ring.pop_front() {
            if self.tickets.get(&key) == Some(&ticket) {
                self.tickets.remove(&key);
                return Some(key);
            }
        }
        self.used = self.used.saturating_sub(1);
        None
    }

    /// Takes a key off the queue, for instance because its requests were cancelled.
    pub fn withdraw(&mut self, key: &K) -> bool {
        let waited = self.tickets.remove(key).is_some();
        if self.ring.len() > 2 * self.tickets.len() + 16 {
            let tickets = &self.tickets;
            self.ring
                .retain(|(key, ticket)| tickets.get(key) == Some(ticket));
        }
        waited
    }

    /// How often a free slot was taken. None is in use all the time between two moments when none
    /// is, and this has not changed.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Slots in use.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Keys that wait for a slot.
    pub fn waiting(&self) -> usize {
        self.tickets.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn flooded_model_takes_turns_with_the_others() {
        let mut slots = RunSlots::new(1);
        assert!(slots.try_acquire(&"flooded"));
        let mut served = Vec::new();
        for _ in 0..3 {
            // It always has another batch and asks again and again.
            for key in ["flooded", "flooded", "a", "flooded", "b"] {
                assert!(!slots.try_acquire(&key));
            }
            served.extend(slots.release());
        }
        assert_eq!(served, ["flooded", "a", "b"]);
    }

    #[test]
    fn slot_nobody_waits_for_is_free_again() {
        let mut slots = RunSlots::new(2);
        assert!(slots.try_acquire(&'a') && slots.try_acquire(&'a'));
        assert!(!slots.try_acquire(&'b'));
        assert!(slots.withdraw(&'b'));
        assert!(!slots.withdraw(&'b'));
        assert_eq!(slots.release(), None);
        assert_eq!((slots.used(), slots.waiting()), (1, 0));
        assert!(slots.try_acquire(&'b'));
    }

    #[test]
    fn key_that_withdrew_and_came_again_waits_at_the_end() {
        let mut slots = RunSlots::new(1);
        assert!(slots.try_acquire(&'x'));
        for key in ['a', 'b'] {
            assert!(!slots.try_acquire(&key));
        }
        slots.withdraw(&'a');
        assert!(!slots.try_acquire(&'a'));
        assert_eq!(slots.release(), Some('b'));
        assert_eq!(slots.release(), Some('a'));
        assert_eq!(slots.release(), None);
    }

    #[test]
    fn endless_withdrawals_do_not_fill_the_ring() {
        let mut slots = RunSlots::new(1);
        assert!(slots.try_acquire(&0));
        for _ in 0..10_000 {
            assert!(!slots.try_acquire(&1));
            slots.withdraw(&1);
        }
        assert!(slots.ring.len() < 100);
    }

    proptest! {
        #[test]
        fn slots_are_bounded_never_lost_and_nobody_is_overtaken_twice(
            capacity in 0usize..4,
            steps in prop::collection::vec((0u8..4, 0u8..5), 0..200),
        ) {
            let mut slots = RunSlots::new(capacity);
            let capacity = capacity.max(1);
            let mut held = 0;
            let mut waiting = BTreeSet::new();
            // How often each other key got a slot since this one began to wait.
            let mut overtaken: BTreeMap<(u8, u8), u32> = BTreeMap::new();
            for (step, key) in steps {
                match step {
                    0 | 1 => {
                        if slots.try_acquire(&key) {
                            assert!(waiting.is_empty());
                            held += 1;
                        } else {
                            assert_eq!(held, capacity);
                            waiting.insert(key);
                        }
                    }
                    2 if held > 0 => match slots.release() {
                        Some(key) => {
                            assert!(waiting.remove(&key));
                            overtaken.retain(|(waiter, _), _| *waiter != key);
                            for &waiter in &waiting {
                                let times = overtaken.entry((waiter, key)).or_default();
                                *times += 1;
                                assert!(*times <= 1);
                            }
                        }
                        None => {
                            assert!(waiting.is_empty());
                            held -= 1;
                        }
                    },
                    3 => {
                        assert_eq!(slots.withdraw(&key), waiting.remove(&key));
                        overtaken.retain(|(waiter, _), _| *waiter != key);
                    }
                    _ => {}
                }
                assert_eq!((slots.used(), slots.waiting()), (held, waiting.len()));
                assert!(held <= capacity);
            }
        }
    }
}

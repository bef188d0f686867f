//! Answers in the order of their requests, for models that promise it.

use std::collections::VecDeque;

/// Holds finished work back until everything issued before it has finished.
#[derive(Clone, Debug)]
pub struct Sequencer<T> {
    /// One per number issued and not released, from `released` on.
    window: VecDeque<Held<T>>,
    released: u64,
}

#[derive(Clone, Debug)]
enum Held<T> {
    Unfinished,
    Finished(T),
    Skipped,
}

impl<T> Default for Sequencer<T> {
    fn default() -> Self {
        Self {
            window: VecDeque::new(),
            released: 0,
        }
    }
}

impl<T> Sequencer<T> {
    /// A sequencer that has issued nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// The next number; it must be completed or skipped for later ones to be released.
    pub fn issue(&mut self) -> u64 {
        self.window.push_back(Held::Unfinished);
        self.released + self.window.len() as u64 - 1
    }

    /// Finishes `sequence` and returns what may go out now, in order.
    ///
    /// A number that was never issued or is finished already changes nothing.
    pub fn complete(&mut self, sequence: u64, value: T) -> Vec<T> {
        self.settle(sequence, Held::Finished(value))
    }

    /// Gives `sequence` up, so that it holds nobody back, and returns what may go out now.
    pub fn skip(&mut self, sequence: u64) -> Vec<T> {
        self.settle(sequence, Held::Skipped)
    }

    /// Numbers issued and not yet released.
    pub fn outstanding(&self) -> usize {
        self.window.len()
    }

    fn settle(&mut self, sequence: u64, outcome: Held<T>) -> Vec<T> {
        let held = sequence
            .checked_sub(self.released)
            .and_then(|index| usize::try_from(index).ok())
            .and_then(|index| self.window.get_mut(index));
        match held {
            Some(held @ Held::Unfinished) => *held = outcome,
            _ => return Vec::new(),
        }
        let mut out = Vec::new();
        while let Some(held) = self.window.pop_front() {
            match held {
                Held::Unfinished => {
                    self.window.push_front(held);
                    break;
                }
                Held::Finished(value) => out.push(value),
                Held::Skipped => {}
            }
            self.released += 1;
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn answers_are_held_back_until_all_before_them_are_in() {
        let mut sequencer = Sequencer::new();
        let numbers: Vec<u64> = (0..4).map(|_| sequencer.issue()).collect();
        assert_eq!(numbers, [0, 1, 2, 3]);
        assert_eq!(sequencer.complete(2, 'c'), []);
        assert_eq!(sequencer.complete(0, 'a'), ['a']);
        assert_eq!(sequencer.skip(1), ['c']);
        assert_eq!(sequencer.outstanding(), 1);
        assert_eq!(sequencer.complete(3, 'd'), ['d']);
    }

    #[test]
    fn numbers_never_issued_or_finished_before_change_nothing() {
        let mut sequencer = Sequencer::new();
        assert_eq!(sequencer.complete(0, 'x'), []);
        assert_eq!(sequencer.issue(), 0);
        assert_eq!(sequencer.issue(), 1);
        assert_eq!(sequencer.complete(1, 'b'), []);
        assert_eq!(sequencer.complete(1, 'x'), []);
        assert_eq!(sequencer.skip(u64::MAX), []);
        assert_eq!(sequencer.complete(0, 'a'), ['a', 'b']);
        assert_eq!(sequencer.skip(0), []);
        assert_eq!(sequencer.outstanding(), 0);
    }

    proptest! {
        #[test]
        fn everything_completed_goes_out_once_and_in_order(
            finishing in Just((0..40u64).collect::<Vec<_>>()).prop_shuffle(),
            skipped in prop::collection::hash_set(0..40u64, 0..10),
        ) {
            let mut sequencer = Sequencer::new();
            for expected in 0..40 {
                assert_eq!(sequencer.issue(), expected);
            }
            let mut out = Vec::new();
            for number in finishing {
                out.extend(match skipped.contains(&number) {
                    true => sequencer.skip(number),
                    false => sequencer.complete(number, number),
                });
            }
            let expected: Vec<u64> = (0..40).filter(|number| !skipped.contains(number)).collect();
            assert_eq!(out, expected);
            assert_eq!(sequencer.outstanding(), 0);
        }
    }
}

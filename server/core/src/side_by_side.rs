//! How many runs of a model are under way at once, where nobody said how many.
//!
//! All runs share the threads of one pool. Two runs of a graph that keeps every thread busy by
//! itself wait for each other at every operator, and both together answer less than one after the
//! other would; two of a graph that is not parallel answer twice as much. Which it is cannot be
//! told from the graph, so it is tried: under enough load, a while side by side, a while one at a
//! time, and side by side again, so that a machine that changes its speed meanwhile favours none.

#[cfg(test)]
mod tests;

use std::mem;
use std::time::Duration;

use crate::time::Timestamp;

/// A window is not judged before runs took so long in it,
const MIN_BUSY: Duration = Duration::from_millis(200);
/// and before there were so many.
const MIN_RUNS: u32 = 8;
/// Side by side must answer so many times as much to be worth the longer runs.
const WORTH_IT: f64 = 1.03;
/// How long a verdict stands before it is tried again: at first, and at last when it stays the same.
const FIRST_HOLD: Duration = Duration::from_secs(30);
const LONGEST_HOLD: Duration = Duration::from_secs(600);
/// It stands so many times as long as the trial took, at the least.
const TRIALS_APART: u32 = 20;

/// What a trial found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Verdict {
    /// Runs that may be under way at once from now on.
    pub at_once: usize,
    /// How many times as much was answered side by side as one at a time.
    pub gain: f64,
}

/// Decides how many runs may be under way at once.
#[derive(Clone, Debug)]
pub struct SideBySide {
    most: usize,
    stage: Stage,
    running: usize,
    /// Runs under way that were started in an earlier window.
    left_over: usize,
    last: Timestamp,
    window: Window,
    together: Rate,
    apart: Rate,
    hold: Duration,
    last_verdict: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Somebody said how many.
    Fixed,
    /// Side by side, until there is enough to judge.
    Together,
    Apart,
    TogetherAgain,
    Settled {
        at_once: usize,
        until: Timestamp,
    },
}

#[derive(Clone, Copy, Debug, Default)]
struct Window {
    rate: Rate,
    runs: u32,
    /// Runs for which the number mattered: that began beside another, or could have.
    contended: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    rows: u64,
    /// Time with a run under way.
    busy: Duration,
}

impl Rate {
    fn add(&mut self, other: Self) {
        self.rows += other.rows;
        self.busy += other.busy;
    }

    fn per_second(self) -> f64 {
        self.rows as f64 / self.busy.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

impl SideBySide {
    /// As many as somebody said.
    pub fn fixed(at_once: usize) -> Self {
        Self::with(at_once, Stage::Fixed)
    }

    /// At most so many, or one at a time where that answers as much.
    pub fn learning(most: usize) -> Self {
        match most {
            0 | 1 => Self::fixed(most),
            _ => Self::with(most, Stage::Together),
        }
    }

    fn with(most: usize, stage: Stage) -> Self {
        Self {
            most: most.max(1),
            stage,
            running: 0,
            left_over: 0,
            last: Timestamp::ZERO,
            window: Window::default(),
            together: Rate::default(),
            apart: Rate::default(),
            hold: FIRST_HOLD,
            last_verdict: None,
        }
    }

    /// How many runs may be under way at once now.
    pub fn limit(&self) -> usize {
        match self.stage {
            Stage::Fixed | Stage::Together | Stage::TogetherAgain => self.most,
            Stage::Apart => 1,
            Stage::Settled { at_once, .. } => at_once,
        }
    }

    /// A run began.
    pub fn started(&mut self, now: Timestamp) {
        self.pass_time(now);
        let beside = self.running > 0;
        self.running += 1;
        let together = matches!(self.stage, Stage::Together | Stage::TogetherAgain);
        if together && beside {
            self.window.contended += 1;
        }
    }

    /// A run of so many rows ended; there were others for it to share the model with, in its batch
    /// or behind it, or there were none.
    pub fn finished(&mut self, rows: u32, had_others: bool, now: Timestamp) -> Option<Verdict> {
        self.pass_time(now);
        self.running = self.running.saturating_sub(1);
        match self.stage {
            Stage::Fixed => return None,
            Stage::Settled { until, .. } => {
                if now >= until {
                    self.enter(Stage::Together);
                }
                return None;
            }
            _ if self.left_over > 0 => {
                self.left_over -= 1;
                return None;
            }
            Stage::Apart if had_others => self.window.contended += 1,
            _ => {}
        }
        self.window.runs += 1;
        self.window.rate.rows += u64::from(rows);
        // As long as both windows side by side together.
        let windows = if self.stage == Stage::Apart { 2 } else { 1 };
        let long_enough =
            self.window.rate.busy >= MIN_BUSY * windows && self.window.runs >= MIN_RUNS * windows;
        long_enough.then(|| self.next_stage(now)).flatten()
    }

    fn next_stage(&mut self, now: Timestamp) -> Option<Verdict> {
        if self.window.contended < self.window.runs / 2 {
            // There was not enough to do for the number to matter.
            self.give_up(now);
            return None;
        }
        let rate = self.window.rate;
        match self.stage {
            Stage::Together => {
                self.together.add(rate);
                self.enter(Stage::Apart);
                None
            }
            Stage::Apart => {
                self.apart.add(rate);
                self.enter(Stage::TogetherAgain);
                None
            }
            Stage::TogetherAgain => {
                self.together.add(rate);
                Some(self.settle(now))
            }
            Stage::Fixed | Stage::Settled { .. } => None,
        }
    }

    /// The model's session is another one: what was measured of the last one says nothing.
    pub fn restart(&mut self) {
        if !matches!(self.stage, Stage::Fixed | Stage::Settled { .. }) {
            self.together = Rate::default();
            self.apart = Rate::default();
            self.enter(Stage::Together);
        }
    }

    /// The last verdict stands for another while, if there was one.
    fn give_up(&mut self, now: Timestamp) {
        self.restart();
        if let Some(at_once) = self.last_verdict {
            let until = now + self.hold;
            self.enter(Stage::Settled { at_once, until });
        }
    }

    fn settle(&mut self, now: Timestamp) -> Verdict {
        let trial = self.together.busy + self.apart.busy;
        let together = mem::take(&mut self.together).per_second();
        let apart = mem::take(&mut self.apart).per_second();
        let gain = together / apart;
        let at_once = if gain > WORTH_IT { self.most } else { 1 };
        self.hold = match self.last_verdict.replace(at_once) {
            Some(last) if last == at_once => (self.hold * 2).min(LONGEST_HOLD),
            _ => FIRST_HOLD,
        };
        let until = now + self.hold.max(trial * TRIALS_APART);
        self.enter(Stage::Settled { at_once, until });
        Verdict { at_once, gain }
    }

    fn enter(&mut self, stage: Stage) {
        self.stage = stage;
        self.window = Window::default();
        self.left_over = self.running;
    }

    fn pass_time(&mut self, now: Timestamp) {
        if self.running > 0 && self.left_over == 0 {
            self.window.rate.busy += now - self.last;
        }
        // Ends of runs may be told in another order than they came.
        self.last = self.last.max(now);
    }
}

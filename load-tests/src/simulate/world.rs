//! Models in virtual time, driven by the server's own decisions.
//!
//! A call finds its model warm, wakes it from parked, joins its load or starts one; every call
//! runs at once for a given time beside all others. Loads take a given time; parking and closing
//! take none. Events of one moment are taken in the order: ends of runs, ends of loads, calls,
//! timers.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use dormouse_core::budget::{Holding, HoldingState, MemoryBudget, Reservation};
use dormouse_core::keep_alive::{KeepAlive, KeepAlivePolicy};
use dormouse_core::lifecycle::{Action, Demand, How, IdlePlan, Lifecycle, LifecyclePolicy, Stage};
use dormouse_core::time::Timestamp;

use super::trace::Call;

/// What models are made of, and how many fit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    pub(crate) load: Duration,
    pub(crate) run: Duration,
    /// What the first call of a parked model waits longer.
    pub(crate) unpark: Duration,
    pub(crate) model_bytes: u64,
    pub(crate) parked_bytes: u64,
    /// Memory for the models, if it is bounded.
    pub(crate) limit: Option<u64>,
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Outcome {
    pub(crate) calls: u64,
    /// Calls that started a load.
    pub(crate) cold_starts: u64,
    /// Further calls that waited for a load under way.
    pub(crate) joined_loads: u64,
    /// Calls that found their model parked.
    pub(crate) parked_wakes: u64,
    /// Time that models were warm and unused, summed over the models.
    pub(crate) idle_model_hours: f64,
    /// Time that models were parked, summed over the models.
    pub(crate) parked_model_hours: f64,
    pub(crate) prewarms: u64,
    pub(crate) prewarms_wasted: u64,
    /// Models that were parked for want of memory.
    pub(crate) evicted_parked: u64,
    /// Models that were closed for want of memory.
    pub(crate) evicted_closed: u64,
    /// Loads that had to wait because everything held was in use.
    pub(crate) memory_waits: u64,
    /// The most that was held after a call, in bytes; only known with a bounded memory.
    pub(crate) peak_bytes: u64,
}

/// How a model's time is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Nothing,
    Busy,
    Idle,
    Parked,
}

struct Model {
    lifecycle: Lifecycle,
    keep_alive: KeepAlive,
    queued: usize,
    running: usize,
    /// The timer that will ring next.
    timer: Option<Timestamp>,
    counted_as: Use,
    since: Timestamp,
}

impl Model {
    fn now_used_as(&self) -> Use {
        match self.lifecycle.stage() {
            Stage::Warm if self.running > 0 => Use::Busy,
            Stage::Warm => Use::Idle,
            Stage::Parked => Use::Parked,
            Stage::Loading => Use::Busy,
            _ => Use::Nothing,
        }
    }
}

/// Models and the events that are yet to come.
pub(crate) struct World {
    machine: Machine,
    models: Vec<Model>,
    budget: Option<MemoryBudget<u32>>,
    // Loads and runs all take the same time: what started first ends first.
    run_ends: VecDeque<(Timestamp, u32)>,
    load_ends: VecDeque<(Timestamp, u32)>,
    timers: BinaryHeap<Reverse<(Timestamp, u32)>>,
    waits_for_memory: VecDeque<u32>,
    outcome: Outcome,
}

impl World {
    pub(crate) fn new(models: usize, policy: KeepAlivePolicy, machine: Machine) -> Self {
        let model = || Model {
            lifecycle: Lifecycle::new(LifecyclePolicy {
                plan: IdlePlan::default(),
                retry_backoff: Duration::from_secs(1),
                retry_backoff_max: Duration::from_secs(60),
            }),
            keep_alive: KeepAlive::new(policy),
            queued: 0,
            running: 0,
            timer: None,
            counted_as: Use::Nothing,
            since: Timestamp::ZERO,
        };
        Self {
            machine,
            models: (0..models).map(|_| model()).collect(),
            budget: machine.limit.map(MemoryBudget::new),
            run_ends: VecDeque::new(),
            load_ends: VecDeque::new(),
            timers: BinaryHeap::new(),
            waits_for_memory: VecDeque::new(),
            outcome: Outcome::default(),
        }
    }

    /// Lets all calls come and time pass until `end`.
    pub(crate) fn replay(mut self, calls: &[Call], end: Timestamp) -> Outcome {
        for call in calls {
            self.advance(call.at, false);
            self.call(call.function, call.at);
        }
        self.advance(end, true);
        for index in 0..self.models.len() {
            let model = &mut self.models[index];
            model.now_counts_as(Use::Nothing, end, &mut self.outcome);
            let prewarms = model.lifecycle.prewarms();
            self.outcome.prewarms += u64::from(prewarms.started);
            self.outcome.prewarms_wasted += u64::from(prewarms.wasted);
        }
        self.outcome
    }

    /// Takes every event before `until`; at `until` only the ends of what runs and loads, and
    /// timers too when they are asked for.
    fn advance(&mut self, until: Timestamp, timers_too: bool) {
        loop {
            let run = self.run_ends.front().map(|&(at, _)| at);
            let load = self.load_ends.front().map(|&(at, _)| at);
            let timer = self.timers.peek().map(|Reverse((at, _))| *at);
            let timer = timer.filter(|&at| at < until || timers_too);
            let Some(next) = [run, load, timer].into_iter().flatten().min() else {
                return;
            };
            if next > until {
                return;
            }
            if run == Some(next) {
                if let Some((at, model)) = self.run_ends.pop_front() {
                    self.run_ended(model, at);
                }
            } else if load == Some(next) {
                if let Some((at, model)) = self.load_ends.pop_front() {
                    self.load_ended(model, at);
                }
            } else if let Some(Reverse((at, model))) = self.timers.pop() {
                self.timer_rang(model, at);
            }
        }
    }

    fn call(&mut self, index: u32, now: Timestamp) {
        let model = &mut self.models[index as usize];
        self.outcome.calls += 1;
        model.keep_alive.arrived(now);
        model.lifecycle.set_plan(model.keep_alive.plan());
        let was_parked = model.lifecycle.stage() == Stage::Parked;
        match model.lifecycle.demand(now) {
            Demand::Run => {
                self.outcome.parked_wakes += u64::from(was_parked);
                self.start_run(index, now);
            }
            Demand::Wait => {
                self.outcome.joined_loads += 1;
                model.queued += 1;
            }
            Demand::StartLoad => {
                self.outcome.cold_starts += 1;
                model.queued += 1;
                self.start_load(index, now);
            }
            Demand::Refuse { .. } | Demand::Retired => {
                unreachable!("simulated loads do not fail and models do not retire")
            }
        }
        self.settle(index, now);
        if was_parked {
            self.relieve(now);
        }
        if let Some(budget) = &self.budget {
            self.outcome.peak_bytes = self.outcome.peak_bytes.max(budget.held());
        }
    }

    fn run_ended(&mut self, index: u32, now: Timestamp) {
        let model = &mut self.models[index as usize];
        model.running -= 1;
        model.lifecycle.run_finished(now);
        model.keep_alive.finished(now);
        if model.running == 0 {
            self.poll(index, now);
            self.retry_waiting(now);
        }
    }

    fn load_ended(&mut self, index: u32, now: Timestamp) {
        let model = &mut self.models[index as usize];
        let action = model.lifecycle.loaded(now);
        debug_assert_eq!(action, None, "no model retires");
        for _ in 0..std::mem::take(&mut model.queued) {
            self.start_run(index, now);
        }
        self.poll(index, now);
    }

    fn timer_rang(&mut self, index: u32, now: Timestamp) {
        let model = &mut self.models[index as usize];
        // An earlier one was set after this one, and has rung.
        if model.timer != Some(now) {
            return;
        }
        model.timer = None;
        self.poll(index, now);
    }

    fn poll(&mut self, index: u32, now: Timestamp) {
        let model = &mut self.models[index as usize];
        let action = model.lifecycle.poll(now, model.queued);
        let gives_back = action.is_some();
        self.perform(index, action, now);
        self.settle(index, now);
        if gives_back {
            self.retry_waiting(now);
        }
    }

    fn start_run(&mut self, index: u32, now: Timestamp) {
        let model = &mut self.models[index as usize];
        model.running += 1;
        model.lifecycle.run_started(now);
        self.run_ends.push_back((now + self.machine.run, index));
    }

    fn perform(&mut self, index: u32, action: Option<Action>, now: Timestamp) {
        let model = &mut self.models[index as usize];
        match action {
            None => {}
            Some(Action::StartLoad) if model.lifecycle.is_anticipating() => {
                let bytes = self.machine.model_bytes;
                let budget = self.budget.as_mut();
                if budget.is_none_or(|budget| budget.try_reserve(&index, bytes, now)) {
                    self.load_ends.push_back((now + self.machine.load, index));
                } else {
                    model.lifecycle.load_abandoned(model.queued);
                }
            }
            Some(Action::StartLoad) => self.start_load(index, now),
            Some(Action::Park) => model.lifecycle.parked(),
            Some(Action::CloseSession) => {
                let action = model.lifecycle.closed(now, model.queued);
                debug_assert_eq!(action, None, "nobody comes while nothing takes time");
                if let Some(budget) = &mut self.budget {
                    budget.release(&index);
                }
            }
        }
    }

    fn start_load(&mut self, index: u32, now: Timestamp) {
        if self.reserve(index, now) {
            self.load_ends.push_back((now + self.machine.load, index));
        } else {
            self.outcome.memory_waits += 1;
            self.waits_for_memory.push_back(index);
        }
    }

    /// Gets memory for a load, at the cost of whom the budget names.
    fn reserve(&mut self, index: u32, now: Timestamp) -> bool {
        loop {
            let Some(budget) = &mut self.budget else {
                return true;
            };
            match budget.reserve(&index, self.machine.model_bytes, now) {
                Reservation::Granted => return true,
                Reservation::Evict(plan) => self.evict(plan, now),
                Reservation::Wait => return false,
                Reservation::Refused { .. } => unreachable!("the limit was checked for one model"),
            }
        }
    }

    fn relieve(&mut self, now: Timestamp) {
        if let Some(budget) = &mut self.budget {
            let plan = budget.relief();
            self.evict(plan, now);
        }
    }

    fn evict(&mut self, plan: Vec<(u32, How)>, now: Timestamp) {
        for (victim, how) in plan {
            let model = &mut self.models[victim as usize];
            let action = model.lifecycle.evict(now, model.queued, how);
            match action {
                Some(Action::Park) => self.outcome.evicted_parked += 1,
                Some(_) => self.outcome.evicted_closed += 1,
                None => unreachable!("the budget knows who is idle"),
            }
            self.perform(victim, action, now);
            self.settle(victim, now);
        }
    }

    fn retry_waiting(&mut self, now: Timestamp) {
        while let Some(&index) = self.waits_for_memory.front() {
            if !self.reserve(index, now) {
                return;
            }
            self.waits_for_memory.pop_front();
            self.load_ends.push_back((now + self.machine.load, index));
        }
    }

    /// Counts the model's time, tells the budget, and sets the next timer.
    fn settle(&mut self, index: u32, now: Timestamp) {
        let model = &mut self.models[index as usize];
        let used_as = model.now_used_as();
        if used_as != model.counted_as {
            model.now_counts_as(used_as, now, &mut self.outcome);
            if let Some(budget) = &mut self.budget {
                report(budget, index, used_as, &self.machine, now);
            }
        }
        if let Some(at) = model.lifecycle.wake_at()
            && model.timer.is_none_or(|set| at < set)
        {
            model.timer = Some(at);
            self.timers.push(Reverse((at, index)));
        }
    }
}

impl Model {
    fn now_counts_as(&mut self, used_as: Use, now: Timestamp, outcome: &mut Outcome) {
        let hours = (now - self.since).as_secs_f64() / 3600.0;
        match self.counted_as {
            Use::Idle => outcome.idle_model_hours += hours,
            Use::Parked => outcome.parked_model_hours += hours,
            Use::Busy | Use::Nothing => {}
        }
        self.counted_as = used_as;
        self.since = now;
    }
}

fn report(
    budget: &mut MemoryBudget<u32>,
    index: u32,
    used_as: Use,
    machine: &Machine,
    now: Timestamp,
) {
    // A model that loads holds what it reserved, or nothing yet.
    if budget.holding(&index).is_none() {
        return;
    }
    let (state, bytes) = match used_as {
        Use::Nothing => return,
        Use::Busy => (HoldingState::Busy, machine.model_bytes),
        Use::Idle => (HoldingState::Idle, machine.model_bytes),
        Use::Parked => (HoldingState::Parked, machine.parked_bytes),
    };
    budget.update(
        index,
        Holding {
            bytes,
            parkable_bytes: bytes.saturating_sub(machine.parked_bytes),
            resume_from_parked: machine.unpark,
            resume_from_cold: machine.load,
            state,
            last_used: now,
        },
    );
}

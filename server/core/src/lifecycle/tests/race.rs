//! The last unload against the first request, under many schedules.
//!
//! A unit as the server has it: a lifecycle and a queue under one short lock, and effects that
//! are carried out on threads of their own after the lock is released. Requests come while
//! another thread lets time pass, polls, and takes the model's memory away. Every request must be
//! answered exactly once; a lost one leaves its thread waiting, which fails the schedule.
//!
//! `DORMOUSE_SCHEDULES` sets the number of schedules of each kind.

use std::collections::VecDeque;

use shuttle::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use shuttle::sync::mpsc::{Sender, channel};
use shuttle::sync::{Arc, Mutex};
use shuttle::{rand::Rng, thread};

use super::*;

/// Parks after one tick, closes after two, comes back after four for one.
const PLAN: IdlePlan = IdlePlan {
    park_after: Some(Duration::from_millis(1)),
    close_after: Some(Duration::from_millis(2)),
    prewarm: Some(Prewarm {
        at: Duration::from_millis(4),
        hold: Duration::from_millis(1),
    }),
};
const CONCURRENCY: usize = 2;
const REQUESTS: usize = 3;
const TICKS: usize = 5;

#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Done,
    LoadFailed,
}

#[derive(Default)]
struct Session {
    closed: AtomicBool,
    users: AtomicUsize,
}

impl Session {
    /// Uses the session across a switch of threads.
    fn occupy(&self) {
        self.users.fetch_add(1, Ordering::SeqCst);
        assert!(!self.closed.load(Ordering::SeqCst), "used after its close");
        thread::yield_now();
        assert!(!self.closed.load(Ordering::SeqCst), "closed while in use");
        self.users.fetch_sub(1, Ordering::SeqCst);
    }

    fn close(&self) {
        assert_eq!(self.users.load(Ordering::SeqCst), 0, "closed while in use");
        assert!(!self.closed.swap(true, Ordering::SeqCst), "closed twice");
    }
}

struct State {
    lifecycle: Lifecycle,
    now: Timestamp,
    queue: VecDeque<Sender<Answer>>,
    session: Option<Arc<Session>>,
    running: usize,
    loads: usize,
}

/// What is done once the lock is released.
#[derive(Default)]
struct Effects {
    answers: Vec<(Sender<Answer>, Answer)>,
    load: bool,
    park: Option<Arc<Session>>,
    close: Option<Arc<Session>>,
    runs: Vec<(Arc<Session>, Sender<Answer>)>,
}

struct Unit {
    state: Mutex<State>,
    threads: Mutex<Vec<thread::JoinHandle<()>>>,
    loads_may_fail: bool,
}

impl Unit {
    fn new(loads_may_fail: bool) -> Arc<Self> {
        let lifecycle = Lifecycle::new(LifecyclePolicy {
            plan: PLAN,
            retry_backoff: Duration::from_millis(1),
            retry_backoff_max: Duration::from_millis(2),
        });
        Arc::new(Self {
            state: Mutex::new(State {
                lifecycle,
                now: at(1),
                queue: VecDeque::new(),
                session: None,
                running: 0,
                loads: 0,
            }),
            threads: Mutex::new(Vec::new()),
            loads_may_fail,
        })
    }

    /// Changes the state under the lock and carries out what follows after it.
    fn step<T>(self: &Arc<Self>, change: impl FnOnce(&mut State, &mut Effects) -> T) -> T {
        let mut effects = Effects::default();
        let mut state = self.state.lock().unwrap();
        let result = change(&mut state, &mut effects);
        drop(state);
        self.perform(effects);
        result
    }

    /// Queues a request; `false` when the unit has retired and another one is to be asked.
    fn submit(self: &Arc<Self>, reply: &Sender<Answer>) -> bool {
        self.step(|state, effects| {
            match state.lifecycle.demand(state.now) {
                Demand::Run | Demand::Wait => {}
                Demand::StartLoad => effects.load = true,
                Demand::Refuse { .. } => {
                    effects.answers.push((reply.clone(), Answer::LoadFailed));
                    return true;
                }
                Demand::Retired => return false,
            }
            state.queue.push_back(reply.clone());
            state.pump(effects);
            true
        })
    }

    fn tick(self: &Arc<Self>, evict: Option<How>) {
        self.step(|state, effects| {
            state.now = state.now + Duration::from_millis(1);
            let (now, queued) = (state.now, state.queue.len());
            let action = match evict {
                Some(how) => state.lifecycle.evict(now, queued, how),
                None => state.lifecycle.poll(now, queued),
            };
            state.act(action, effects);
        });
    }

    fn retire(self: &Arc<Self>) {
        self.step(|state, effects| {
            let action = state.lifecycle.retire(state.now, state.queue.len());
            state.act(action, effects);
        });
    }

    fn perform(self: &Arc<Self>, effects: Effects) {
        for (reply, answer) in effects.answers {
            reply.send(answer).unwrap();
        }
        if effects.load {
            self.spawn(Self::load);
        }
        if let Some(session) = effects.park {
            self.spawn(move |unit| {
                session.occupy();
                unit.step(|state, effects| {
                    state.lifecycle.parked();
                    state.poll(effects);
                });
            });
        }
        if let Some(session) = effects.close {
            self.spawn(move |unit| {
                session.close();
                unit.step(|state, effects| {
                    let action = state.lifecycle.closed(state.now, state.queue.len());
                    state.act(action, effects);
                });
            });
        }
        for (session, reply) in effects.runs {
            self.spawn(move |unit| {
                session.occupy();
                drop(session);
                unit.step(|state, effects| {
                    state.running -= 1;
                    state.lifecycle.run_finished(state.now);
                    effects.answers.push((reply, Answer::Done));
                    state.pump(effects);
                    state.poll(effects);
                });
            });
        }
    }

    fn load(self: &Arc<Self>) {
        thread::yield_now();
        let fails = self.loads_may_fail && shuttle::rand::thread_rng().gen_bool(0.25);
        // A load that only pre-warms may find no memory.
        let abandons = self.loads_may_fail && shuttle::rand::thread_rng().gen_bool(0.25);
        self.step(|state, effects| {
            if abandons && state.lifecycle.is_anticipating() {
                let action = state.lifecycle.load_abandoned(state.queue.len());
                state.act(action, effects);
            } else if fails {
                state.lifecycle.load_failed(state.now);
                let waiting = state.queue.drain(..);
                effects
                    .answers
                    .extend(waiting.map(|reply| (reply, Answer::LoadFailed)));
            } else {
                assert!(state.session.is_none(), "loaded twice");
                state.session = Some(Arc::default());
                state.loads += 1;
                let action = state.lifecycle.loaded(state.now);
                state.pump(effects);
                state.act(action, effects);
                state.poll(effects);
            }
        });
    }

    fn spawn(self: &Arc<Self>, job: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let unit = Arc::clone(self);
        let handle = thread::spawn(move || job(&unit));
        self.threads.lock().unwrap().push(handle);
    }

    /// Waits for everything under way, then lets time pass until the model has gone to sleep.
    fn settle(self: &Arc<Self>) {
        for _ in 0..20 {
            loop {
                let next = self.threads.lock().unwrap().pop();
                let Some(handle) = next else { break };
                handle.join().unwrap();
            }
            self.tick(None);
        }
        let state = self.state.lock().unwrap();
        assert!(state.queue.is_empty() && state.running == 0);
        assert!(state.session.is_none(), "the session was left behind");
        match state.lifecycle.stage() {
            Stage::Cold | Stage::Failed { .. } => assert!(!state.lifecycle.is_retiring()),
            Stage::Retired => assert!(state.lifecycle.is_retiring()),
            stage => panic!("left {stage:?}"),
        }
    }
}

impl State {
    fn pump(&mut self, effects: &mut Effects) {
        while self.running < CONCURRENCY
            && let Some(session) = &self.session
            && let Some(reply) = self.queue.pop_front()
        {
            self.lifecycle.run_started(self.now);
            self.running += 1;
            effects.runs.push((Arc::clone(session), reply));
        }
    }

    fn poll(&mut self, effects: &mut Effects) {
        let action = self.lifecycle.poll(self.now, self.queue.len());
        self.act(action, effects);
    }

    fn act(&mut self, action: Option<Action>, effects: &mut Effects) {
        match action {
            None => {}
            Some(Action::StartLoad) => {
                assert!(self.session.is_none(), "loads beside a session");
                effects.load = true;
            }
            Some(Action::Park) => effects.park.clone_from(&self.session),
            Some(Action::CloseSession) => {
                assert!(self.queue.is_empty() && self.running == 0);
                effects.close = self.session.take();
                assert!(effects.close.is_some(), "closes without a session");
            }
        }
    }
}

/// Asks the units in turn until one takes the request, and waits for its one answer.
fn request(units: &[Arc<Unit>]) -> Answer {
    let (reply, answers) = channel();
    let taken = units.iter().any(|unit| unit.submit(&reply));
    assert!(taken, "no unit serves the model");
    drop(reply);
    let answer = answers.recv().expect("the request was dropped");
    assert!(answers.recv().is_err(), "the request was answered twice");
    answer
}

/// One schedule: requests against time, pressure and, if asked for, a successor.
fn unload_against_request(loads_may_fail: bool, replace: bool) {
    let unit = Unit::new(loads_may_fail);
    let mut units = vec![Arc::clone(&unit)];
    if replace {
        units.push(Unit::new(false));
    }
    let mut threads = Vec::new();
    for _ in 0..REQUESTS {
        let units = units.clone();
        threads.push(thread::spawn(move || {
            let answer = request(&units);
            assert!(loads_may_fail || answer == Answer::Done);
        }));
    }
    let passing = Arc::clone(&unit);
    threads.push(thread::spawn(move || {
        for _ in 0..TICKS {
            let evict = match shuttle::rand::thread_rng().gen_range(0..6) {
                0 => Some(How::Park),
                1 => Some(How::Close),
                _ => None,
            };
            passing.tick(evict);
        }
    }));
    if replace {
        let replaced = Arc::clone(&unit);
        threads.push(thread::spawn(move || replaced.retire()));
    }
    for thread in threads {
        thread.join().unwrap();
    }
    for unit in &units {
        unit.settle();
    }
}

fn schedules(default: usize) -> usize {
    let set = std::env::var("DORMOUSE_SCHEDULES").ok();
    set.map_or(default, |count| count.parse().expect("a number"))
}

#[test]
fn every_request_is_answered_once_whatever_unloads_beside_it() {
    shuttle::check_random(|| unload_against_request(false, false), schedules(600));
    shuttle::check_pct(|| unload_against_request(false, false), schedules(600), 3);
}

#[test]
fn every_request_is_answered_once_when_loads_fail_or_are_abandoned() {
    shuttle::check_random(|| unload_against_request(true, false), schedules(600));
    shuttle::check_pct(|| unload_against_request(true, false), schedules(600), 3);
}

#[test]
fn every_request_finds_the_model_or_its_successor() {
    shuttle::check_random(|| unload_against_request(false, true), schedules(600));
    shuttle::check_pct(|| unload_against_request(false, true), schedules(600), 3);
}

//! Who holds how much of the memory budget at run time: asks before a load allocates, and has
//! idle models go when somebody else needs what they hold.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use dormouse_core::budget::{Holding, MemoryBudget, Reservation, Usage};
use dormouse_core::code::ErrorCode;
use dormouse_core::id::ByteSize;
use dormouse_core::lifecycle::How;
use parking_lot::{Condvar, Mutex};
use tokio::time::Instant;

use crate::clock::Clock;
use crate::error::ServeError;
use crate::unit::Unit;

/// How often somebody who waits for memory looks again: runs end without telling.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// How long a load waits for memory that busy models hold.
const PATIENCE: Duration = Duration::from_secs(30);

/// The memory budget and who shares it.
#[derive(Debug)]
pub struct Residency {
    clock: Clock,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    budget: MemoryBudget<u64>,
    residents: HashMap<u64, Weak<Unit>>,
    evictions: Evictions,
    /// Keys given to [`Borrowed`] so far; they count down from the end.
    borrowed: u64,
}

/// Memory that belongs to no model, given back on drop.
#[derive(Debug)]
pub struct Borrowed {
    residency: Arc<Residency>,
    key: u64,
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        self.residency.release(self.key);
    }
}

/// Models that had to go for others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evictions {
    pub parked: u64,
    pub closed: u64,
}

impl Residency {
    /// A budget of `limit` bytes.
    pub fn new(limit: u64, clock: Clock) -> Self {
        Self {
            clock,
            state: Mutex::new(State {
                budget: MemoryBudget::new(limit),
                residents: HashMap::new(),
                evictions: Evictions::default(),
                borrowed: 0,
            }),
            changed: Condvar::new(),
        }
    }

    /// Where the budget has gone. Looks at every resident model.
    pub fn usage(&self) -> Usage {
        self.refresh();
        self.state.lock().budget.usage()
    }

    pub fn evictions(&self) -> Evictions {
        self.state.lock().evictions
    }

    /// Takes `bytes` for a load, evicting idle models if need be. Blocks while busy models hold
    /// what is needed; not for threads of the runtime.
    pub fn reserve(&self, unit: &Arc<Unit>, bytes: u64) -> Result<(), ServeError> {
        if self.try_reserve(unit, bytes) {
            return Ok(());
        }
        let key = unit.serial();
        let until = Instant::now() + PATIENCE;
        loop {
            self.refresh();
            let now = self.clock.now();
            let answer = {
                let mut state = self.state.lock();
                let answer = state.budget.reserve(&key, bytes, now);
                if answer == Reservation::Granted {
                    state.residents.insert(key, Arc::downgrade(unit));
                }
                answer
            };
            match answer {
                Reservation::Granted => return Ok(()),
                Reservation::Evict(victims) => self.evict(&victims, false),
                Reservation::Wait => {}
                Reservation::Refused { needed, usage } => {
                    return Err(ServeError::unavailable(format!(
                        "model {} needs {} of memory, more than the memory budget of {} (--memory-budget)",
                        unit.id(),
                        ByteSize(needed),
                        ByteSize(usage.limit)
                    )));
                }
            }
            let mut state = self.state.lock();
            if Instant::now() >= until {
                state.budget.withdraw(&key);
                let usage = state.budget.usage();
                return Err(ServeError::new(
                    ErrorCode::Overloaded,
                    format!(
                        "model {} needs {} of memory, and of the memory budget of {} (--memory-budget) {} are held by models that are in use",
                        unit.id(),
                        ByteSize(bytes),
                        ByteSize(usage.limit),
                        ByteSize(usage.busy)
                    ),
                )
                .retry_after(Duration::from_secs(1)));
            }
            self.changed.wait_for(&mut state, LOOK_AGAIN);
        }
    }

    /// Takes `bytes` if they are free, and disturbs nobody.
    pub fn try_reserve(&self, unit: &Arc<Unit>, bytes: u64) -> bool {
        let now = self.clock.now();
        let mut state = self.state.lock();
        let granted = state.budget.try_reserve(&unit.serial(), bytes, now);
        if granted {
            state.residents.insert(unit.serial(), Arc::downgrade(unit));
        }
        granted
    }

    /// Takes `bytes` for work that belongs to no model, if they are free, until the guard is
    /// dropped.
    pub fn borrow(self: &Arc<Self>, bytes: u64) -> Option<Borrowed> {
        let now = self.clock.now();
        let mut state = self.state.lock();
        let key = u64::MAX - state.borrowed;
        let granted = state.budget.try_reserve(&key, bytes, now);
        granted.then(|| {
            state.borrowed += 1;
            Borrowed {
                residency: Arc::clone(self),
                key,
            }
        })
    }

    /// Notes what a model holds now.
    pub fn update(&self, unit: &Arc<Unit>, holding: Holding) {
        let mut state = self.state.lock();
        state.residents.insert(unit.serial(), Arc::downgrade(unit));
        state.budget.update(unit.serial(), holding);
        self.changed.notify_all();
    }

    /// Notes that a model holds nothing any more.
    pub fn release(&self, serial: u64) {
        let mut state = self.state.lock();
        state.residents.remove(&serial);
        state.budget.release(&serial);
        self.changed.notify_all();
    }

    /// Has idle models go until what all hold fits the budget again.
    pub fn relieve(&self) {
        let usage = self.state.lock().budget.usage();
        if usage.held <= usage.limit {
            return;
        }
        self.refresh();
        let victims = self.state.lock().budget.relief();
        self.evict(&victims, false);
    }

    /// Has idle models give up `bytes`, or as much as they hold: the machine runs out of memory
    /// whatever the budget says. Returns how many models have to go.
    pub fn free_up(&self, bytes: u64) -> usize {
        self.refresh();
        let victims = self.state.lock().budget.free_up(bytes);
        self.evict(&victims, true);
        victims.len()
    }

    /// Asks every resident model what it holds and whether it is in use. Done only when somebody
    /// needs to know: a lock that every run of every model takes would be one too many.
    fn refresh(&self) {
        let residents: Vec<(u64, Weak<Unit>)> = {
            let state = self.state.lock();
            let residents = state.residents.iter();
            residents
                .map(|(serial, unit)| (*serial, Weak::clone(unit)))
                .collect()
        };
        for (serial, unit) in residents {
            match unit.upgrade() {
                None => self.release(serial),
                // By the unit itself, under its lock: told later, it could be told of a model that
                // has closed meanwhile and would hold for ever what it gave back.
                Some(unit) => unit.tell_holding(),
            }
        }
    }

    fn evict(&self, victims: &[(u64, How)], scarce: bool) {
        for &(serial, how) in victims {
            let unit = self
                .state
                .lock()
                .residents
                .get(&serial)
                .and_then(Weak::upgrade);
            let went = unit.is_some_and(|unit| unit.evict(how, scarce));
            if went {
                let evictions = &mut self.state.lock().evictions;
                match how {
                    How::Park => evictions.parked += 1,
                    How::Close => evictions.closed += 1,
                }
            }
        }
    }
}

//! Who holds how much of the memory budget at run time: asks before a load allocates, and has
//! idle models go when somebody else needs what they hold.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use dormouse_core::budget::{Holding, MemoryBudget, Reservation, SharedParts, SharedUse, Usage};
use dormouse_core::code::ErrorCode;
use dormouse_core::id::{ByteSize, ModelId};
use dormouse_core::lifecycle::How;
use dormouse_model_store::store::Digest;
use parking_lot::Mutex;
use tokio::sync::Notify;
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
    changed: Notify,
}

#[derive(Debug)]
struct State {
    budget: MemoryBudget<u64>,
    residents: HashMap<u64, Weak<Unit>>,
    /// Packs that are mapped, each resident once.
    packs: SharedParts<Digest, u64>,
    /// What residents last told.
    told: HashMap<u64, Held>,
    evictions: Evictions,
    /// Keys given to [`Borrowed`] so far; they count down from the end.
    borrowed: u64,
}

/// What a model holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Without the packs.
    pub own: Holding,
    /// The packs it reads, which others may read as well.
    pub shared: Vec<SharedUse<Digest>>,
    /// Parking gives them up.
    pub shared_is_parkable: bool,
}

impl State {
    /// What a model is charged with: its own, and its part of what it shares.
    fn charged(&self, serial: u64, held: &Held) -> Holding {
        let shared = self.packs.charge(serial);
        let parkable = if held.shared_is_parkable { shared } else { 0 };
        Holding {
            bytes: held.own.bytes.saturating_add(shared),
            parkable_bytes: held.own.parkable_bytes.saturating_add(parkable),
            ..held.own
        }
    }

    /// Notes who reads which packs from now on, and what that makes of everybody's part.
    fn share(&mut self, serial: u64, uses: &[SharedUse<Digest>]) {
        for other in self.packs.set(serial, uses) {
            if let Some(held) = self.told.get(&other) {
                let charged = self.charged(other, held);
                self.budget
                    .resize(&other, charged.bytes, charged.parkable_bytes);
            }
        }
    }
}

/// For whose sake models have to go.
#[derive(Clone, Copy, Debug)]
enum Cause<'a> {
    /// A model that is to be loaded.
    Load(&'a ModelId),
    /// All that are awake: they hold more than the budget.
    Budget,
    /// The machine, which is short of memory.
    Machine,
}

impl fmt::Display for Cause<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Load(id) => write!(f, "room for model {id}"),
            Self::Budget => f.write_str("more is held than the memory budget"),
            Self::Machine => f.write_str("the machine is short of memory"),
        }
    }
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
                packs: SharedParts::default(),
                told: HashMap::new(),
                evictions: Evictions::default(),
                borrowed: 0,
            }),
            changed: Notify::new(),
        }
    }

    /// Where the budget has gone. Looks at every resident model.
    pub fn usage(&self) -> Usage {
        self.refresh();
        self.state.lock().budget.usage()
    }

    /// What the model of this number holds, as last told.
    pub fn held_by(&self, serial: u64) -> u64 {
        let state = self.state.lock();
        state.budget.holding(&serial).map_or(0, |held| held.bytes)
    }

    pub fn evictions(&self) -> Evictions {
        self.state.lock().evictions
    }

    /// Takes `bytes` for a load, evicting idle models if need be; waits for a while where busy
    /// models hold what is needed.
    pub async fn reserve(&self, unit: &Arc<Unit>, bytes: u64) -> Result<(), ServeError> {
        let key = unit.serial();
        let until = Instant::now() + PATIENCE;
        loop {
            let changed = self.changed.notified();
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
                Reservation::Evict(victims) => self.evict(&victims, Cause::Load(unit.id())),
                Reservation::Wait => {}
                Reservation::Refused { needed, usage } => {
                    return Err(ServeError::new(
                        ErrorCode::NeverFits,
                        format!(
                            "model {} needs {} of memory, more than the memory budget of {} (--memory-budget)",
                            unit.id(),
                            ByteSize(needed),
                            ByteSize(usage.limit)
                        ),
                    ));
                }
            }
            if Instant::now() >= until {
                let mut state = self.state.lock();
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
            // Too early is as good as too late: it is asked again.
            let _ = tokio::time::timeout(LOOK_AGAIN, changed).await;
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

    /// Whether so many bytes would fit if nothing else were held.
    pub fn could_ever_hold(&self, bytes: u64) -> bool {
        bytes <= self.state.lock().budget.usage().limit
    }

    /// Whether so many bytes could be borrowed now.
    pub fn could_lend(&self, bytes: u64) -> bool {
        self.state.lock().budget.has_free(bytes)
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

    /// The bytes that a load brings in when it reads these packs: none of those that others read.
    pub fn needed(&self, uses: &[SharedUse<Digest>]) -> u64 {
        self.state.lock().packs.needed(uses)
    }

    /// Notes what a model holds now.
    pub fn update(&self, unit: &Arc<Unit>, held: Held) {
        let serial = unit.serial();
        let mut state = self.state.lock();
        state.residents.insert(serial, Arc::downgrade(unit));
        state.share(serial, &held.shared);
        let holding = state.charged(serial, &held);
        state.told.insert(serial, held);
        let before = state.budget.holding(&serial);
        let same = before
            .is_some_and(|before| (before.bytes, before.state) == (holding.bytes, holding.state));
        state.budget.update(serial, holding);
        // Whoever waits asks everybody: told of what it knows, it would ask again without end.
        if !same {
            self.changed.notify_waiters();
        }
    }

    /// Notes that a model holds nothing any more.
    pub fn release(&self, serial: u64) {
        let mut state = self.state.lock();
        state.residents.remove(&serial);
        state.told.remove(&serial);
        state.share(serial, &[]);
        state.budget.release(&serial);
        self.changed.notify_waiters();
    }

    /// Has idle models go until what all hold fits the budget again.
    pub fn relieve(&self) {
        let usage = self.state.lock().budget.usage();
        if usage.held <= usage.limit {
            return;
        }
        self.refresh();
        let victims = self.state.lock().budget.relief();
        self.evict(&victims, Cause::Budget);
    }

    /// Has idle models give up `bytes`, or as much as they hold: the machine runs out of memory
    /// whatever the budget says. Returns how many models have to go.
    pub fn free_up(&self, bytes: u64) -> usize {
        self.refresh();
        let victims = self.state.lock().budget.free_up(bytes);
        self.evict(&victims, Cause::Machine);
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

    fn evict(&self, victims: &[(u64, How)], cause: Cause<'_>) {
        for &(serial, how) in victims {
            let unit = self
                .state
                .lock()
                .residents
                .get(&serial)
                .and_then(Weak::upgrade);
            let scarce = matches!(cause, Cause::Machine);
            let went = unit.filter(|unit| unit.evict(how, scarce));
            if let Some(unit) = went {
                let id = unit.id();
                let how_far = match how {
                    How::Park => "parked",
                    How::Close => "closed",
                };
                tracing::info!(model = %id.name, version = id.version.0, how = how_far, %cause, "evicted");
                let evictions = &mut self.state.lock().evictions;
                match how {
                    How::Park => evictions.parked += 1,
                    How::Close => evictions.closed += 1,
                }
            }
        }
    }
}

//! Who may hold how much memory, and who has to go when somebody else needs it.
//!
//! A load reserves before it allocates. What is granted never lifts the sum of all holdings above
//! the limit; only an [`MemoryBudget::update`] that reports more than was reserved can, and
//! [`MemoryBudget::relief`] says how to get back. Whether an eviction happens is the driver's
//! business, and that of [`crate::lifecycle`]: it performs a plan, reports by `update` or
//! `release` what became of each, and asks again.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::lifecycle::How;
use crate::time::Timestamp;

mod eviction;
mod shared;

pub use shared::{SharedParts, SharedUse};

/// What one model holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Everything it holds now.
    pub bytes: u64,
    /// The part that parking gives back; nothing when it is parked or cannot be.
    pub parkable_bytes: u64,
    /// What the next call waits longer when the model is parked.
    pub resume_from_parked: Duration,
    /// What the next call waits longer when the model is closed.
    pub resume_from_cold: Duration,
    pub state: HoldingState,
    pub last_used: Timestamp,
}

/// Whether a holding can be given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldingState {
    /// Loads, runs or has a queue: not to be touched.
    Busy,
    /// Warm and unused.
    Idle,
    /// Parked and unused.
    Parked,
    /// On its way out: all of it comes back without anybody's doing.
    Leaving,
}

/// The answer to somebody who wants to allocate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reservation<K> {
    /// The bytes are the caller's.
    Granted,
    /// The bytes can be had by evicting these; ask again as each has gone or refused to go.
    Evict(Vec<(K, How)>),
    /// Everything idle would not do, but what is busy or on its way out may; ask again when
    /// something changes, until the deadline.
    Wait,
    /// More than the limit: it will never fit.
    Refused { needed: u64, usage: Usage },
}

/// Where the budget has gone, for messages and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub limit: u64,
    /// The sum of all holdings.
    pub held: u64,
    /// Held by models that load, run or have a queue.
    pub busy: u64,
    /// Held by models that are warm and unused.
    pub idle: u64,
    /// Held by parked models.
    pub parked: u64,
    /// Held by models on their way out.
    pub leaving: u64,
}

#[derive(Clone, Debug)]
struct Entry {
    holding: Holding,
    /// An eviction that was asked for and not reported on yet.
    evicting: Option<How>,
}

/// Evictions were asked for on behalf of this reservation: what they free is meant for it.
#[derive(Clone, Debug)]
struct Claim<K> {
    key: K,
    bytes: u64,
}

/// The memory of one device, shared by the models that `K` names.
#[derive(Clone, Debug)]
pub struct MemoryBudget<K> {
    limit: u64,
    held: u64,
    entries: BTreeMap<K, Entry>,
    /// Oldest first.
    claims: Vec<Claim<K>>,
}

impl<K: Ord + Clone> MemoryBudget<K> {
    /// A budget of `limit` bytes, all of them free.
    pub fn new(limit: u64) -> Self {
        Self {
            limit,
            held: 0,
            entries: BTreeMap::new(),
            claims: Vec::new(),
        }
    }

    /// The sum of all holdings.
    pub fn held(&self) -> u64 {
        self.held
    }

    /// What `key` holds.
    pub fn holding(&self, key: &K) -> Option<&Holding> {
        self.entries.get(key).map(|entry| &entry.holding)
    }

    /// Where the budget has gone.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage {
            limit: self.limit,
            held: self.held,
            ..Usage::default()
        };
        for entry in self.entries.values() {
            let bytes = entry.holding.bytes;
            match entry.holding.state {
                HoldingState::Busy => usage.busy += bytes,
                HoldingState::Idle => usage.idle += bytes,
                HoldingState::Parked => usage.parked += bytes,
                HoldingState::Leaving => usage.leaving += bytes,
            }
        }
        usage
    }

    /// Asks for `bytes` more than `key` holds; a key that held nothing is busy once granted.
    ///
    /// A caller that stops asking before it was granted says so by [`MemoryBudget::withdraw`].
    pub fn reserve(&mut self, key: &K, bytes: u64, now: Timestamp) -> Reservation<K> {
        let own = self.holding(key).map_or(0, |holding| holding.bytes);
        let needed = own.saturating_add(bytes);
        if needed > self.limit {
            self.withdraw(key);
            return Reservation::Refused {
                needed,
                usage: self.usage(),
            };
        }
        let ahead = self.claimed_before(key);
        if self.grant(key, bytes, ahead, now) {
            self.withdraw(key);
            return Reservation::Granted;
        }
        // What is already on its way out need not be asked for again.
        let wanted = u128::from(self.held) + u128::from(ahead) + u128::from(bytes);
        let missing = wanted
            .saturating_sub(u128::from(self.limit))
            .saturating_sub(u128::from(self.departing()));
        let missing = u64::try_from(missing).unwrap_or(u64::MAX);
        if missing == 0 {
            self.claim(key, bytes);
            return Reservation::Wait;
        }
        match self.plan(missing, Some(key)) {
            Some(plan) => {
                for (victim, how) in &plan {
                    if let Some(entry) = self.entries.get_mut(victim) {
                        entry.evicting = Some(*how);
                    }
                }
                self.claim(key, bytes);
                Reservation::Evict(plan)
            }
            None => {
                // Others may take what fits them while this one waits for what runs.
                self.withdraw(key);
                Reservation::Wait
            }
        }
    }

    /// Takes `bytes` more for `key` if they are free, and disturbs nobody: for loads ahead of a
    /// call and for packed sessions.
    pub fn try_reserve(&mut self, key: &K, bytes: u64, now: Timestamp) -> bool {
        let ahead = self.claimed_before(key);
        self.grant(key, bytes, ahead, now)
    }

    /// Whether so many bytes are free that nobody waits for.
    pub fn has_free(&self, bytes: u64) -> bool {
        let claimed = self.claims.iter().map(|claim| claim.bytes);
        let ahead = claimed.fold(0, u64::saturating_add);
        self.fits(bytes, ahead)
    }

    /// Gives up a reservation that was not granted.
    pub fn withdraw(&mut self, key: &K) {
        self.claims.retain(|claim| claim.key != *key);
    }

    /// Reports what `key` holds now.
    pub fn update(&mut self, key: K, holding: Holding) {
        let entry = Entry {
            holding,
            evicting: None,
        };
        self.held = self.held.saturating_add(holding.bytes);
        if let Some(before) = self.entries.insert(key, entry) {
            self.held = self.held.saturating_sub(before.holding.bytes);
        }
    }

    /// Reports that others made what `key` holds more or less, and it did nothing itself.
    pub fn resize(&mut self, key: &K, bytes: u64, parkable_bytes: u64) {
        if let Some(entry) = self.entries.get_mut(key) {
            self.held = self.held.saturating_sub(entry.holding.bytes);
            self.held = self.held.saturating_add(bytes);
            entry.holding.bytes = bytes;
            entry.holding.parkable_bytes = parkable_bytes;
        }
    }

    /// Reports that `key` holds nothing any more and wants nothing.
    pub fn release(&mut self, key: &K) {
        self.withdraw(key);
        if let Some(entry) = self.entries.remove(key) {
            self.held = self.held.saturating_sub(entry.holding.bytes);
        }
    }

    /// What to evict so that the holdings fit the limit again; empty when they do, or when
    /// nothing idle is left.
    pub fn relief(&mut self) -> Vec<(K, How)> {
        let missing = self
            .held
            .saturating_sub(self.limit)
            .saturating_sub(self.departing());
        self.free_up(missing)
    }

    /// What to evict to free `bytes` more, or as many as are idle: for pressure from outside.
    pub fn free_up(&mut self, bytes: u64) -> Vec<(K, How)> {
        if bytes == 0 {
            return Vec::new();
        }
        let plan = self.plan(bytes, None);
        let plan = plan.unwrap_or_else(|| self.everything_idle());
        for (victim, how) in &plan {
            if let Some(entry) = self.entries.get_mut(victim) {
                entry.evicting = Some(*how);
            }
        }
        plan
    }

    fn grant(&mut self, key: &K, bytes: u64, ahead: u64, now: Timestamp) -> bool {
        if !self.fits(bytes, ahead) {
            return false;
        }
        self.held += bytes;
        let entry = self.entries.entry(key.clone()).or_insert(Entry {
            holding: Holding {
                bytes: 0,
                parkable_bytes: 0,
                resume_from_parked: Duration::ZERO,
                resume_from_cold: Duration::ZERO,
                state: HoldingState::Busy,
                last_used: now,
            },
            evicting: None,
        });
        entry.holding.bytes += bytes;
        true
    }

    fn fits(&self, bytes: u64, ahead: u64) -> bool {
        self.held
            .checked_add(ahead)
            .and_then(|sum| sum.checked_add(bytes))
            .is_some_and(|sum| sum <= self.limit)
    }

    /// Bytes that evictions free for those who asked before `key` did.
    fn claimed_before(&self, key: &K) -> u64 {
        self.claims
            .iter()
            .take_while(|claim| claim.key != *key)
            .fold(0, |sum, claim| sum.saturating_add(claim.bytes))
    }

    fn claim(&mut self, key: &K, bytes: u64) {
        match self.claims.iter_mut().find(|claim| claim.key == *key) {
            Some(claim) => claim.bytes = bytes,
            None => self.claims.push(Claim {
                key: key.clone(),
                bytes,
            }),
        }
    }

    /// Bytes that will come back without further doing.
    fn departing(&self) -> u64 {
        let bytes = self.entries.values().map(|entry| {
            let holding = &entry.holding;
            match (holding.state, entry.evicting) {
                (HoldingState::Leaving, _) | (_, Some(How::Close)) => holding.bytes,
                (_, Some(How::Park)) => holding.parkable_bytes.min(holding.bytes),
                (_, None) => 0,
            }
        });
        bytes.fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests;

//! What every model at run time shares: clock, engine, timers, run slots, budgets.

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use dormouse_core::dispatch::RunSlots;
use dormouse_core::id::ByteSize;
use dormouse_model_store::spec::KeepAliveSpec;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::activity::Activity;
use crate::alarm::Alarm;
use crate::clock::Clock;
use crate::engine::Engine;
use crate::error::ServeError;
use crate::events::Events;
use crate::isolation::Isolation;
use crate::limits::Limit;
use crate::metrics::Metrics;
use crate::spans::Tracer;
use crate::unit::Unit;
use crate::wake::Wake;

/// The limits and delays that hold for every model unless it says otherwise.
#[derive(Clone, Debug)]
pub struct UnitDefaults {
    pub keep_alive: KeepAliveSpec,
    /// None: an idle model is not parked on its way to sleep.
    pub park_after: Option<Duration>,
    /// Requests that may wait for one model.
    pub max_queue: usize,
    /// How long a failed load is not tried again, at first and at most.
    pub retry_backoff: Duration,
    pub retry_backoff_max: Duration,
    /// Attempts after the first before a load counts as failed.
    pub load_retries: u32,
}

/// Shared by every [`Unit`].
#[derive(Debug)]
pub struct Host {
    pub clock: Clock,
    pub engine: Arc<dyn Engine>,
    pub alarm: Alarm,
    pub metrics: Metrics,
    /// Runs under way over all models; bounds the threads that execute them.
    pub slots: Mutex<RunSlots<UnitKey>>,
    /// Loads under way over all models.
    pub loads: Arc<Semaphore>,
    pub in_flight: Arc<InFlight>,
    pub activity: Arc<Activity>,
    pub events: Events,
    /// None when nothing is recorded.
    pub tracer: Option<Tracer>,
    pub wake: Wake,
    pub isolation: Arc<Isolation>,
    pub runtime: tokio::runtime::Handle,
    pub defaults: UnitDefaults,
}

/// A unit as a key: two keys are equal when they are the same unit.
#[derive(Clone, Debug)]
pub struct UnitKey(pub Arc<Unit>);

impl PartialEq for UnitKey {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for UnitKey {}

impl Hash for UnitKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.0).hash(state);
    }
}

/// The bytes of all requests that are queued or running, bounded.
#[derive(Debug)]
pub struct InFlight {
    limit: u64,
    used: AtomicU64,
    /// The process is about to run out of memory: nothing more is taken on.
    is_short: AtomicBool,
}

/// A request's share of [`InFlight`], given back on drop.
#[derive(Debug)]
pub struct InFlightBytes {
    budget: Arc<InFlight>,
    bytes: u64,
}

impl InFlight {
    pub fn new(limit: ByteSize) -> Arc<Self> {
        Arc::new(Self {
            limit: limit.0,
            used: AtomicU64::new(0),
            is_short: AtomicBool::new(false),
        })
    }

    /// Says whether the process is about to run out of memory.
    pub fn set_short(&self, is_short: bool) {
        self.is_short.store(is_short, Ordering::Relaxed);
    }

    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Result<InFlightBytes, ServeError> {
        if self.is_short.load(Ordering::Relaxed) {
            return Err(out_of_memory());
        }
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        // The reservation exists from here on, so that the refusal below gives it back.
        let reserved = InFlightBytes {
            budget: Arc::clone(self),
            bytes,
        };
        if before.saturating_add(bytes) > self.limit {
            return Err(self.exceeded(before, bytes));
        }
        Ok(reserved)
    }

    #[cold]
    fn exceeded(&self, before: u64, bytes: u64) -> ServeError {
        Limit::BytesInFlight
            .overload(format!(
                "requests of {} are being served already; {} more would exceed the limit of {} (max_request_bytes_in_flight)",
                ByteSize(before),
                ByteSize(bytes),
                ByteSize(self.limit)
            ))
            .retry_after(Duration::from_secs(1))
    }
}

impl InFlight {
    /// Counts bytes that are there already, whatever the limit: the next requests are measured
    /// against it.
    pub fn hold(self: &Arc<Self>, bytes: u64) -> InFlightBytes {
        self.used.fetch_add(bytes, Ordering::Relaxed);
        InFlightBytes {
            budget: Arc::clone(self),
            bytes,
        }
    }
}

#[cold]
fn out_of_memory() -> ServeError {
    Limit::Memory
        .overload("the server is about to run out of memory")
        .retry_after(Duration::from_secs(1))
}

/// The bytes of one request that is still being received. Small ones are not worth counting.
#[derive(Debug, Default)]
pub struct Receiving {
    budget: Option<Arc<InFlight>>,
    held: Option<InFlightBytes>,
}

impl Receiving {
    /// Below this nothing is counted.
    const SMALL: u64 = 256 << 10;
    /// What is counted at a time.
    const STEP: u64 = 1 << 20;

    pub fn new(budget: Option<&Arc<InFlight>>) -> Self {
        Self {
            budget: budget.cloned(),
            held: None,
        }
    }

    /// Counts `bytes`, instead of those counted before, or refuses them.
    #[inline]
    pub fn hold(&mut self, bytes: usize) -> Result<(), ServeError> {
        let bytes = bytes as u64;
        match &self.held {
            None if bytes <= Self::SMALL => Ok(()),
            Some(held) if bytes <= held.bytes && bytes > Self::SMALL => Ok(()),
            _ => self.change(bytes),
        }
    }

    #[cold]
    fn change(&mut self, bytes: u64) -> Result<(), ServeError> {
        let Some(budget) = &self.budget else {
            return Ok(());
        };
        // What was held is given back first, and is part of what is asked for.
        self.held = None;
        if bytes > Self::SMALL {
            self.held = Some(budget.reserve(bytes.next_multiple_of(Self::STEP))?);
        }
        Ok(())
    }
}

impl Drop for InFlightBytes {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use dormouse_core::code::ErrorCode;

    use super::*;

    #[test]
    fn what_is_received_counts_once_it_is_large_and_until_it_is_there() {
        let budget = InFlight::new(ByteSize::mib(4));
        let mut receiving = Receiving::new(Some(&budget));
        receiving.hold(200 << 10).unwrap();
        assert_eq!(budget.used(), 0);
        receiving.hold(300 << 10).unwrap();
        assert_eq!(budget.used(), 1 << 20);
        receiving.hold((3 << 20) + 1).unwrap();
        assert_eq!(budget.used(), 4 << 20);
        let mut other = Receiving::new(Some(&budget));
        let error = other.hold(1 << 20).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Overloaded);
        receiving.hold(0).unwrap();
        assert_eq!(budget.used(), 0);
        other.hold(1 << 20).unwrap();
        drop(other);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn nothing_is_taken_on_while_memory_is_almost_used_up() {
        let budget = InFlight::new(ByteSize::mib(4));
        budget.set_short(true);
        let before = Limit::Memory.refusals();
        let error = budget.reserve(1).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Overloaded);
        assert!(error.retry_hint().is_some());
        assert!(Limit::Memory.refusals() > before);
        budget.set_short(false);
        budget.reserve(1).unwrap();
    }
}

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

/// The bytes of all requests that arrive, wait or run, bounded.
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
    /// What has not more than this counts from when it is queued: until then it is not worth it.
    const SMALL: u64 = 32 << 10;

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
        self.reserve_beside(None, bytes)
    }

    /// Counts a request of this many bytes. `held` is what counts of it already and becomes part
    /// of that.
    #[inline]
    pub fn reserve_beside(
        self: &Arc<Self>,
        held: Option<InFlightBytes>,
        bytes: u64,
    ) -> Result<InFlightBytes, ServeError> {
        if self.is_short.load(Ordering::Relaxed) {
            return Err(out_of_memory());
        }
        let mut held = held.unwrap_or_else(|| InFlightBytes {
            budget: Arc::clone(self),
            bytes: 0,
        });
        held.resize(bytes)?;
        Ok(held)
    }

    /// Counts a request that has come and is not queued yet.
    #[inline]
    pub fn reserve_arrived(
        self: &Arc<Self>,
        bytes: usize,
    ) -> Result<Option<InFlightBytes>, ServeError> {
        match bytes as u64 {
            ..=Self::SMALL => Ok(None),
            bytes => self.reserve(bytes).map(Some),
        }
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

    /// What no waiting helps against.
    #[cold]
    fn never_fits(&self, bytes: u64) -> ServeError {
        Limit::BytesInFlight.error(format!(
            "a request of {} can never be served: the limit for all of them is {} (max_request_bytes_in_flight)",
            ByteSize(bytes),
            ByteSize(self.limit)
        ))
    }

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

impl InFlightBytes {
    /// Counts so many bytes from now on. If there is no room for more, it stays as it was.
    #[inline]
    fn resize(&mut self, bytes: u64) -> Result<(), ServeError> {
        let budget = &self.budget;
        let Some(more) = bytes.checked_sub(self.bytes) else {
            budget.used.fetch_sub(self.bytes - bytes, Ordering::Relaxed);
            self.bytes = bytes;
            return Ok(());
        };
        let before = budget.used.fetch_add(more, Ordering::Relaxed);
        if before.saturating_add(more) > budget.limit {
            budget.used.fetch_sub(more, Ordering::Relaxed);
            return Err(match bytes > budget.limit {
                true => budget.never_fits(bytes),
                false => budget.exceeded(before, more),
            });
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Both as one.
    pub fn and(mut self, mut other: Self) -> Self {
        // Nothing is left for `other` to give back.
        self.bytes += std::mem::take(&mut other.bytes);
        self
    }
}

impl Clone for InFlightBytes {
    /// A copy of a request takes as much again.
    fn clone(&self) -> Self {
        self.budget.hold(self.bytes)
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
    /// What is counted at a time.
    const STEP: u64 = 64 << 10;

    pub fn new(budget: Option<&Arc<InFlight>>) -> Self {
        Self {
            budget: budget.cloned(),
            held: None,
        }
    }

    /// Counts `bytes`, instead of those counted before, or refuses them. `announced` is how many
    /// there will be, as far as is known: it is refused early if that can never fit.
    #[inline]
    pub fn hold(&mut self, bytes: usize, announced: u64) -> Result<(), ServeError> {
        let bytes = bytes as u64;
        match &self.held {
            None if bytes <= InFlight::SMALL => Ok(()),
            Some(held) if bytes <= held.bytes && bytes > InFlight::SMALL => Ok(()),
            _ => self.change(bytes, announced),
        }
    }

    #[cold]
    fn change(&mut self, bytes: u64, announced: u64) -> Result<(), ServeError> {
        let Some(budget) = &self.budget else {
            return Ok(());
        };
        let held = self.held.take();
        if announced > budget.limit {
            return Err(budget.never_fits(announced));
        }
        if bytes > InFlight::SMALL {
            // Rounded up, though not to what would never fit.
            let rounded = bytes.next_multiple_of(Self::STEP);
            let bytes = rounded.min(budget.limit.max(bytes));
            self.held = Some(budget.reserve_beside(held, bytes)?);
        }
        Ok(())
    }

    /// What counts now that all has come.
    pub fn received(self) -> Option<InFlightBytes> {
        self.held
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
    fn what_is_received_counts_once_it_is_large_and_until_it_is_let_go() {
        let budget = InFlight::new(ByteSize::mib(4));
        let mut receiving = Receiving::new(Some(&budget));
        receiving.hold(32 << 10, 0).unwrap();
        assert_eq!(budget.used(), 0);
        receiving.hold(300 << 10, 0).unwrap();
        assert_eq!(budget.used(), 320 << 10);
        receiving.hold((4 << 20) - 1, 0).unwrap();
        assert_eq!(budget.used(), 4 << 20);
        let mut other = Receiving::new(Some(&budget));
        let error = other.hold(1 << 20, 0).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Overloaded);
        receiving.hold(0, 0).unwrap();
        assert_eq!(budget.used(), 0);
        other.hold(1 << 20, 0).unwrap();
        let received = other.received();
        assert_eq!(budget.used(), 1 << 20);
        drop(received);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn what_a_request_holds_becomes_part_of_what_it_asks_for() {
        let budget = InFlight::new(ByteSize(1000));
        let held = budget.reserve(600).unwrap();
        let held = budget.reserve_beside(Some(held), 900).unwrap();
        assert_eq!(budget.used(), 900);
        let held = budget.reserve_beside(Some(held), 500).unwrap();
        assert_eq!(budget.used(), 500);
        let held = held.and(budget.reserve(100).unwrap());
        assert_eq!(budget.used(), 600);
        let copy = held.clone();
        assert_eq!(budget.used(), 1200);
        drop(held);
        assert_eq!(budget.used(), 600);
        budget.reserve_beside(Some(copy), 1001).unwrap_err();
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn what_can_never_fit_is_not_told_to_come_again() {
        let budget = InFlight::new(ByteSize::mib(1));
        let _others = budget.reserve(1000).unwrap();
        let fits_later = budget.reserve(1 << 20).unwrap_err();
        assert_eq!(fits_later.code(), ErrorCode::Overloaded);
        assert!(fits_later.retry_hint().is_some());
        let before = Limit::BytesInFlight.refusals();
        let mut receiving = Receiving::new(Some(&budget));
        let never = [
            budget.reserve((1 << 20) + 1).unwrap_err(),
            receiving.hold((1 << 20) + 1, 0).unwrap_err(),
            // It is known before all of it has come.
            receiving.hold(100_000, 2 << 20).unwrap_err(),
        ];
        for error in never {
            assert_eq!(error.code(), ErrorCode::InvalidRequest);
            assert_eq!(error.retry_hint(), None);
        }
        assert!(Limit::BytesInFlight.refusals() >= before + 3);
        assert_eq!(budget.used(), 1000);
        // Counting in steps makes nothing too large.
        let budget = InFlight::new(ByteSize(100_000));
        receiving = Receiving::new(Some(&budget));
        receiving.hold(99_000, 99_000).unwrap();
        assert_eq!(budget.used(), 100_000);
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

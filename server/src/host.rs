//! What every model at run time shares: clock, engine, timers, run slots, budgets.

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dormouse_core::code::ErrorCode;
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
        })
    }

    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Result<InFlightBytes, ServeError> {
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        // The reservation exists from here on, so that the refusal below gives it back.
        let reserved = InFlightBytes {
            budget: Arc::clone(self),
            bytes,
        };
        if before.saturating_add(bytes) > self.limit {
            return Err(ServeError::new(
                ErrorCode::Overloaded,
                format!(
                    "requests of {} are being served already; {} more would exceed the limit of {} (max_request_bytes_in_flight)",
                    ByteSize(before),
                    ByteSize(bytes),
                    ByteSize(self.limit)
                ),
            )
            .retry_after(Duration::from_secs(1)));
        }
        Ok(reserved)
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

impl Drop for InFlightBytes {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

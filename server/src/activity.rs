//! Who is being served, and since when nobody is: a few relaxed counters on the way of a request.
//!
//! Only requests to models and calls that manage them count. Health probes, statistics and metrics
//! scrapes do not: a watched server may sleep.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use dormouse_core::time::Timestamp;
use tokio::sync::Notify;

use crate::clock::Clock;

/// Width and number of the slices of time in which requests are counted for a rate.
const SLICE: Duration = Duration::from_secs(4);
const SLICES: usize = 17;
/// The longest time over which a rate can be told.
pub const LONGEST_WINDOW: Duration = Duration::from_secs(64);

/// Requests of one model version, or of the whole server.
#[derive(Debug, Default)]
pub struct Traffic {
    begun: AtomicU64,
    ended: AtomicU64,
    /// Nanoseconds on the server's clock, plus one; 0 for never.
    last: AtomicU64,
    /// The number of the slice in the upper half, the requests begun in it in the lower.
    slices: [AtomicU64; SLICES],
}

/// What [`Traffic`] tells at one moment; adds up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Requests that were begun and are not answered.
    pub in_flight: u64,
    /// Those of them that are not being run.
    pub queued: u64,
    /// When a request last came or was answered.
    pub last: Option<Timestamp>,
    /// Requests per second.
    pub rate: f64,
}

impl Load {
    /// Whether somebody is served, or was less than `idle_after` ago.
    pub fn is_active(&self, idle_after: Duration, now: Timestamp) -> bool {
        self.in_flight > 0 || self.last.is_some_and(|last| now - last < idle_after)
    }

    /// The two together.
    pub fn and(self, other: Self) -> Self {
        Self {
            in_flight: self.in_flight + other.in_flight,
            queued: self.queued + other.queued,
            last: self.last.max(other.last),
            rate: self.rate + other.rate,
        }
    }
}

impl Traffic {
    fn begin(&self, now: Timestamp) {
        self.begun.fetch_add(1, Ordering::SeqCst);
        self.touch(now);
        let number = slice(now);
        let slot = &self.slices[number as usize % SLICES];
        let mut seen = slot.load(Ordering::Relaxed);
        loop {
            let next = match seen >> 32 == number {
                true => seen + 1,
                false => number << 32 | 1,
            };
            match slot.compare_exchange_weak(seen, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return,
                Err(changed) => seen = changed,
            }
        }
    }

    fn end(&self, now: Timestamp) {
        self.touch(now);
        // After the time: who sees nothing in flight also sees when that began.
        self.ended.fetch_add(1, Ordering::Release);
    }

    fn touch(&self, now: Timestamp) {
        self.last.fetch_max(now.as_nanos() + 1, Ordering::SeqCst);
    }

    /// The load now, its rate taken over `window`; who queues is known elsewhere.
    pub fn load(&self, window: Duration, now: Timestamp) -> Load {
        // In this order: a request that ends in between is seen as in flight, never as negative.
        let ended = self.ended.load(Ordering::Acquire);
        let begun = self.begun.load(Ordering::SeqCst);
        let last = self.last.load(Ordering::SeqCst);
        Load {
            in_flight: begun.saturating_sub(ended),
            queued: 0,
            last: last.checked_sub(1).map(Timestamp::from_nanos),
            rate: self.rate(window, now),
        }
    }

    /// Over whole slices that are past: the one under way would make it jump.
    fn rate(&self, window: Duration, now: Timestamp) -> f64 {
        let slices = (window.as_nanos() / SLICE.as_nanos()).clamp(1, SLICES as u128 - 1) as u64;
        let current = slice(now);
        let wanted = current.saturating_sub(slices)..current;
        let count: u64 = self
            .slices
            .iter()
            .map(|slot| slot.load(Ordering::Relaxed))
            .filter(|seen| wanted.contains(&(seen >> 32)))
            .map(|seen| seen & u64::from(u32::MAX))
            .sum();
        count as f64 / (SLICE.as_secs_f64() * slices as f64)
    }
}

fn slice(now: Timestamp) -> u64 {
    now.as_nanos() / SLICE.as_nanos() as u64
}

/// The server's traffic, and whatever else keeps it from being idle.
#[derive(Debug)]
pub struct Activity {
    clock: Clock,
    traffic: Traffic,
    /// Loads, open streams and other work that must not be cut short.
    holds: AtomicUsize,
    /// Those who wait for a request; nobody is told of requests unless somebody does.
    watchers: AtomicUsize,
    began: Notify,
}

impl Activity {
    pub fn new(clock: Clock) -> Arc<Self> {
        let activity = Self {
            clock,
            traffic: Traffic::default(),
            holds: AtomicUsize::new(0),
            watchers: AtomicUsize::new(0),
            began: Notify::new(),
        };
        activity.touch();
        Arc::new(activity)
    }

    /// A request reached the server; it is under way until the guard is dropped.
    pub fn begin(&self, now: Timestamp) -> UnderWay<'_> {
        self.traffic.begin(now);
        self.tell_watchers();
        UnderWay {
            activity: self,
            model: None,
        }
    }

    /// Somebody used the server without running a model.
    pub fn touch(&self) {
        self.traffic.touch(self.clock.now());
        self.tell_watchers();
    }

    /// Keeps the server from being idle until the guard is dropped.
    pub fn hold(self: &Arc<Self>) -> Hold {
        self.holds.fetch_add(1, Ordering::SeqCst);
        self.tell_watchers();
        Hold {
            activity: Arc::clone(self),
        }
    }

    /// The whole server's load, its rate taken over `window`.
    pub fn load(&self, window: Duration) -> Load {
        self.traffic.load(window, self.clock.now())
    }

    /// Since when nothing is under way; none while something is.
    pub fn quiet_since(&self) -> Option<Timestamp> {
        let load = self.load(SLICE);
        let quiet = load.in_flight == 0 && self.holds.load(Ordering::SeqCst) == 0;
        // Read anew: a hold that ended just now has left its time before it left.
        quiet.then(|| self.load(SLICE).last.unwrap_or(Timestamp::ZERO))
    }

    /// Resolves once nothing was under way and nothing came for `patience`, with that moment's
    /// quiet time.
    pub async fn idle_for(&self, patience: Duration) -> Duration {
        // Timers tick in milliseconds; a shorter wait would spin.
        let patience = patience.max(Duration::from_millis(1));
        loop {
            let now = self.clock.now();
            let earliest = match self.quiet_since() {
                Some(since) if now - since >= patience => return now - since,
                Some(since) => since + patience,
                None => now + patience,
            };
            tokio::time::sleep_until(self.clock.instant(earliest)).await;
        }
    }

    /// Resolves when `is_so` holds; asked at once and whenever somebody begins something.
    pub async fn until(&self, mut is_so: impl FnMut() -> bool) {
        let _watching = Watching::new(self);
        loop {
            let began = self.began.notified();
            if is_so() {
                return;
            }
            began.await;
            if is_so() {
                return;
            }
            // Others are busy: not woken for each of their requests.
            tokio::time::sleep(WATCH_INTERVAL).await;
        }
    }

    fn tell_watchers(&self) {
        // In one order with the counters above and the watcher's registration: who begins sees the
        // watcher, or the watcher sees what was begun.
        if self.watchers.load(Ordering::SeqCst) > 0 {
            self.began.notify_waiters();
        }
    }
}

/// How soon a watcher that was woken for nothing looks again.
const WATCH_INTERVAL: Duration = Duration::from_millis(10);

/// A request that is counted as in flight until it is dropped.
#[derive(Debug)]
pub struct UnderWay<'a> {
    activity: &'a Activity,
    model: Option<&'a Traffic>,
}

impl<'a> UnderWay<'a> {
    /// The request goes to a model with this traffic.
    pub fn goes_to(mut self, traffic: &'a Traffic, now: Timestamp) -> Self {
        traffic.begin(now);
        self.activity.tell_watchers();
        self.model = Some(traffic);
        self
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let now = self.activity.clock.now();
        if let Some(model) = self.model {
            model.end(now);
        }
        self.activity.traffic.end(now);
    }
}

/// Something that keeps the server from being idle until it is dropped.
#[derive(Debug)]
pub struct Hold {
    activity: Arc<Activity>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.activity.touch();
        self.activity.holds.fetch_sub(1, Ordering::Release);
    }
}

struct Watching<'a>(&'a Activity);

impl<'a> Watching<'a> {
    fn new(activity: &'a Activity) -> Self {
        activity.watchers.fetch_add(1, Ordering::SeqCst);
        Self(activity)
    }
}

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        self.0.watchers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests;

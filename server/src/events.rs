//! What happened to models and to the server, for whoever wants to hear of it.
//!
//! Publishing never waits: a subscriber that is too slow loses the oldest events and is told how
//! many. Without subscribers nothing is made at all.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use dormouse_core::id::ModelId;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};

/// Events kept for a subscriber that is busy.
const KEPT: usize = 1024;

/// Something that happened.
#[derive(Clone, Debug)]
pub struct Event {
    /// Unique within this process, growing.
    pub sequence: u64,
    pub at: SystemTime,
    /// The model version it happened to; none for the server itself.
    pub model: Option<ModelId>,
    pub kind: EventKind,
}

/// What can happen.
#[derive(Clone, Debug, PartialEq)]
pub enum EventKind {
    /// The model got a session and can answer.
    Woke {
        took: Duration,
        /// Bytes brought in for it.
        bytes: u64,
    },
    /// The model keeps its session but gave its weights back.
    Parked { returned_bytes: u64 },
    /// The model gave everything back.
    Slept { returned_bytes: u64 },
    /// The model could not be loaded, or its process died; it is tried again after `retry_in`,
    /// [`Duration::MAX`] for never.
    Failed { error: String, retry_in: Duration },
    /// Nobody has asked the server for anything for a while.
    Idle { idle_for: Duration },
    /// Somebody asks again.
    Active,
}

impl EventKind {
    /// Its name in configuration and in messages.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Woke { .. } => "woke",
            Self::Parked { .. } => "parked",
            Self::Slept { .. } => "slept",
            Self::Failed { .. } => "failed",
            Self::Idle { .. } => "idle",
            Self::Active => "active",
        }
    }

    /// Every name there is.
    pub const NAMES: [&'static str; 6] = ["woke", "parked", "slept", "failed", "idle", "active"];
}

/// Where events come together.
#[derive(Debug)]
pub struct Events {
    sender: broadcast::Sender<Arc<Event>>,
    published: AtomicU64,
    lost: Arc<AtomicU64>,
}

impl Default for Events {
    fn default() -> Self {
        Self::keeping(KEPT)
    }
}

impl Events {
    fn keeping(kept: usize) -> Self {
        Self {
            sender: broadcast::Sender::new(kept),
            published: AtomicU64::new(0),
            lost: Arc::default(),
        }
    }

    /// Tells every subscriber of a model's change; `kind` is only called when there is one.
    pub fn publish(&self, model: &ModelId, kind: impl FnOnce() -> EventKind) {
        if self.sender.receiver_count() > 0 {
            self.send(Some(model.clone()), kind());
        }
    }

    /// Tells every subscriber of a change of the server itself.
    pub fn publish_server(&self, kind: EventKind) {
        if self.sender.receiver_count() > 0 {
            self.send(None, kind);
        }
    }

    fn send(&self, model: Option<ModelId>, kind: EventKind) {
        let event = Event {
            sequence: self.published.fetch_add(1, Ordering::Relaxed) + 1,
            at: SystemTime::now(),
            model,
            kind,
        };
        // The last subscriber may have gone meanwhile.
        let _ = self.sender.send(Arc::new(event));
    }

    /// Hears of everything that happens from now on.
    pub fn subscribe(&self) -> Subscription {
        Subscription {
            receiver: self.sender.subscribe(),
            lost: Arc::clone(&self.lost),
        }
    }

    /// Events that slow subscribers never saw.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

/// A subscriber's end.
#[derive(Debug)]
pub struct Subscription {
    receiver: broadcast::Receiver<Arc<Event>>,
    lost: Arc<AtomicU64>,
}

impl Subscription {
    /// The next event; none when the hub is gone.
    pub async fn next(&mut self) -> Option<Arc<Event>> {
        loop {
            match self.receiver.recv().await {
                Ok(event) => return Some(event),
                Err(RecvError::Lagged(missed)) => self.count_lost(missed),
                Err(RecvError::Closed) => return None,
            }
        }
    }

    /// An event that is there already.
    pub fn try_next(&mut self) -> Option<Arc<Event>> {
        loop {
            match self.receiver.try_recv() {
                Ok(event) => return Some(event),
                Err(TryRecvError::Lagged(missed)) => self.count_lost(missed),
                Err(TryRecvError::Empty | TryRecvError::Closed) => return None,
            }
        }
    }

    fn count_lost(&self, missed: u64) {
        self.lost.fetch_add(missed, Ordering::Relaxed);
        tracing::warn!(missed, "a subscriber of lifecycle events was too slow");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slept(returned_bytes: u64) -> EventKind {
        EventKind::Slept { returned_bytes }
    }

    #[test]
    fn without_subscribers_no_event_is_made() {
        let events = Events::default();
        events.publish(&ModelId::new("m", 1), || panic!("made for nobody"));
        drop(events.subscribe());
        events.publish(&ModelId::new("m", 1), || panic!("made for nobody"));
    }

    #[tokio::test]
    async fn every_subscriber_hears_of_everything_in_order() {
        let events = Events::default();
        let mut subscribers = [events.subscribe(), events.subscribe()];
        let model = ModelId::new("m", 1);
        for bytes in 0..10 {
            events.publish(&model, || slept(bytes));
        }
        events.publish_server(EventKind::Active);
        for subscriber in &mut subscribers {
            for bytes in 0..10 {
                let event = subscriber.next().await.unwrap();
                assert_eq!(event.kind, slept(bytes));
                assert_eq!(event.model.as_ref(), Some(&model));
                assert_eq!(event.sequence, bytes + 1);
            }
            assert!(subscriber.try_next().unwrap().model.is_none());
            assert!(subscriber.try_next().is_none());
        }
        assert_eq!(events.lost(), 0);
    }

    #[tokio::test]
    async fn a_slow_subscriber_loses_the_oldest_and_they_are_counted() {
        let events = Events::keeping(4);
        let mut slow = events.subscribe();
        for bytes in 0..10 {
            events.publish(&ModelId::new("m", 1), || slept(bytes));
        }
        for bytes in 6..10 {
            assert_eq!(slow.next().await.unwrap().kind, slept(bytes));
        }
        assert_eq!(events.lost(), 6);
        drop(events);
        assert!(slow.next().await.is_none());
    }
}

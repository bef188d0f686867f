//! Tells others what happens to models and to the server, by HTTP.
//!
//! Each hook has a task of its own with a bounded queue: a receiver that is slow or gone delays
//! nobody else. Deliveries of one hook are made one after the other, in the order of the events.

mod client;
mod message;

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use http::StatusCode;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub(crate) use self::client::Client;
use self::message::{Message, Sender};
use crate::config::WebhookConfig;
use crate::events::{Event, Subscription};
use crate::host::Host;
use crate::metrics::{Metrics, WebhookResult};

/// Messages that wait for one hook; the oldest makes room for a further one.
const MAX_WAITING: usize = 1000;
/// The longest wait between two attempts.
const LONGEST_DELAY: Duration = Duration::from_secs(60);

/// Why a hook cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WebhookError {
    #[error("ca_file {}: {why}", path.display())]
    CaFile { path: PathBuf, why: String },
    #[error("'{0}' is no name that a certificate could be for")]
    HostName(String),
}

/// The tasks of all hooks.
#[derive(Debug)]
pub struct Webhooks {
    tasks: JoinSet<()>,
    stop: CancellationToken,
    /// Messages not delivered yet, over all hooks.
    waiting: Arc<AtomicUsize>,
}

impl Webhooks {
    /// Starts a task for each hook; from now on they hear of every event.
    pub fn spawn(
        configs: &[WebhookConfig],
        server: &str,
        host: &Arc<Host>,
    ) -> Result<Self, WebhookError> {
        let mut hooks = Self {
            tasks: JoinSet::new(),
            stop: CancellationToken::new(),
            waiting: Arc::default(),
        };
        let sender = Sender::new(server.to_owned());
        for config in configs {
            let hook = Hook {
                client: Client::new(config)?,
                config: config.clone(),
                metrics: host.metrics.clone(),
            };
            let queue = Queue {
                wanted: config.events.clone(),
                sender: sender.clone(),
                messages: VecDeque::new(),
                waiting: Arc::clone(&hooks.waiting),
                metrics: host.metrics.clone(),
            };
            let events = host.events.subscribe();
            hooks
                .tasks
                .spawn(run(hook, queue, events, hooks.stop.clone()));
        }
        Ok(hooks)
    }

    /// Delivers what is waiting, for `patience` at the longest, and ends the tasks.
    pub async fn flush(mut self, patience: Duration) {
        self.stop.cancel();
        let done = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(patience, done).await.is_err() {
            let undelivered = self.waiting.load(Ordering::Relaxed);
            tracing::warn!(undelivered, "webhook messages were given up at the end");
        }
    }
}

/// Messages on their way to one hook.
#[derive(Debug)]
struct Queue {
    wanted: Vec<&'static str>,
    sender: Sender,
    messages: VecDeque<Message>,
    waiting: Arc<AtomicUsize>,
    metrics: Metrics,
}

impl Queue {
    fn push(&mut self, event: &Event) {
        if !self.wanted.contains(&event.kind.name()) {
            return;
        }
        if self.messages.len() >= MAX_WAITING {
            self.pop();
            self.metrics.webhook(WebhookResult::Dropped);
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let message = Message::new(&self.sender, event);
        self.messages.push_back(message);
    }

    fn pop(&mut self) -> Option<Message> {
        let message = self.messages.pop_front()?;
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        Some(message)
    }
}

/// Delivers events until `stop`, and then what is left.
async fn run(hook: Hook, mut queue: Queue, mut events: Subscription, stop: CancellationToken) {
    loop {
        let Some(message) = queue.pop() else {
            let event = tokio::select! {
                biased;
                event = events.next() => event,
                () = stop.cancelled() => events.try_next(),
            };
            match event {
                Some(event) => queue.push(&event),
                None => return,
            }
            continue;
        };
        let waiting = Arc::clone(&queue.waiting);
        waiting.fetch_add(1, Ordering::Relaxed);
        let mut delivery = pin!(hook.deliver(&message));
        loop {
            tokio::select! {
                biased;
                () = &mut delivery => break,
                Some(event) = events.next() => queue.push(&event),
            }
        }
        waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Where messages go, and how stubbornly.
struct Hook {
    client: Client,
    config: WebhookConfig,
    metrics: Metrics,
}

impl Hook {
    /// Tries until the message is taken, refused, or the attempts are used up.
    async fn deliver(&self, message: &Message) {
        let config = &self.config;
        let mut attempt = 0;
        let result = loop {
            let (why, wanted_delay) = match self.attempt(message).await {
                Attempt::Taken => break WebhookResult::Delivered,
                Attempt::Refused(why) => {
                    tracing::warn!(hook = %config.endpoint, event = message.kind, id = message.id, why, "webhook message was refused");
                    break WebhookResult::Refused;
                }
                Attempt::Failed { why, retry_after } => (why, retry_after),
            };
            if attempt == config.retries {
                tracing::warn!(hook = %config.endpoint, event = message.kind, id = message.id, why, attempts = attempt + 1, "webhook message was given up");
                break WebhookResult::GivenUp;
            }
            let delay = delay(config.retry_delay, attempt).max(wanted_delay.unwrap_or_default());
            let delay = delay.min(LONGEST_DELAY);
            tracing::debug!(hook = %config.endpoint, event = message.kind, id = message.id, why, retry_in = ?delay, "webhook attempt failed");
            attempt += 1;
            tokio::time::sleep(delay).await;
        };
        self.metrics.webhook(result);
    }

    async fn attempt(&self, message: &Message) -> Attempt {
        let config = &self.config;
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let timestamp = since_epoch.map_or(0, |time| time.as_secs());
        let request = message.request(&config.endpoint, config.secret.as_ref(), timestamp);
        let reply = match tokio::time::timeout(config.timeout, self.client.post(request)).await {
            Ok(Ok(reply)) => reply,
            Ok(Err(error)) => return Attempt::failed(error.to_string()),
            Err(_) => return Attempt::failed(format!("no answer within {:?}", config.timeout)),
        };
        let status = reply.status;
        let is_patient = matches!(
            status,
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS
        );
        if status.is_success() {
            Attempt::Taken
        } else if status.is_redirection() {
            Attempt::Refused(format!("{status}: redirects are not followed"))
        } else if status.is_client_error() && !is_patient {
            Attempt::Refused(status.to_string())
        } else {
            Attempt::Failed {
                why: status.to_string(),
                retry_after: reply.retry_after,
            }
        }
    }
}

/// How one attempt ended.
#[derive(Debug)]
enum Attempt {
    Taken,
    /// Trying again would not help.
    Refused(String),
    Failed {
        why: String,
        retry_after: Option<Duration>,
    },
}

impl Attempt {
    fn failed(why: String) -> Self {
        Self::Failed {
            why,
            retry_after: None,
        }
    }
}

/// The wait after attempt number `attempt`, from 0: doubles each time, half of it left to chance
/// so that receivers who come back are not met by everybody at once.
fn delay(first: Duration, attempt: u32) -> Duration {
    let full = first
        .saturating_mul(1 << attempt.min(16))
        .min(LONGEST_DELAY);
    let chance = RandomState::new().hash_one(attempt) as f64 / u64::MAX as f64;
    full.mul_f64(0.5 + chance / 2.0)
}

#[cfg(test)]
mod tests;

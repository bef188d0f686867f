//! What one client may have under way at once, and how often it may have models loaded.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use dormouse_core::id::ByteSize;
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::time::Instant;

use super::counters::Counters;
use super::refusal::Refusal;
use super::{Client, ClientKind};
use crate::config::file::from_text;

/// Clients that are remembered at once; those with nothing under way are forgotten first.
const MAX_CLIENTS: usize = 8192;
const MINUTE: Duration = Duration::from_secs(60);
/// What a request may take on a stream beyond what it counts as: several may come in one piece,
/// and none of them may be refused for what the next one brings.
const FRAMING: u64 = 64 << 10;
/// When a client that has too much under way may try again: whatever it has may end any time.
const SHORTLY: Duration = Duration::from_secs(1);

/// Bounds on one client. None: unbounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuotaLimits {
    /// Requests under way at once.
    pub concurrency: Option<usize>,
    /// Bytes of the bodies of these.
    pub bytes_in_flight: Option<ByteSize>,
    /// Calls that load a model.
    pub loads_per_minute: Option<u32>,
}

/// The same, as files have it.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QuotaSection {
    pub concurrency: Option<usize>,
    #[serde(deserialize_with = "from_text")]
    pub bytes_in_flight: Option<ByteSize>,
    pub loads_per_minute: Option<u32>,
}

impl QuotaSection {
    /// These limits, and `others` where there are none.
    pub(crate) fn over(self, others: QuotaLimits) -> QuotaLimits {
        QuotaLimits {
            concurrency: self.concurrency.or(others.concurrency),
            bytes_in_flight: self.bytes_in_flight.or(others.bytes_in_flight),
            loads_per_minute: self.loads_per_minute.or(others.loads_per_minute),
        }
    }
}

impl QuotaLimits {
    pub(super) fn is_unbounded(&self) -> bool {
        *self == Self::default()
    }
}

/// Which of the bounds was met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quota {
    Concurrency,
    Bytes,
    Loads,
}

impl Quota {
    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::Concurrency => "concurrency",
            Self::Bytes => "bytes_in_flight",
            Self::Loads => "loads_per_minute",
        }
    }
}

/// Whom a quota belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Named(ClientKind, Arc<str>),
    /// An IPv6 network of the usual size is one client: it has addresses without number.
    Address(IpAddr),
    /// Whoever came when too many were remembered.
    Rest,
}

/// The quotas of everybody who was seen lately.
#[derive(Debug)]
pub(super) struct Quotas {
    defaults: QuotaLimits,
    clients: Mutex<HashMap<Key, Arc<Account>>>,
    counters: Counters,
}

/// What one client has under way.
#[derive(Debug)]
pub(super) struct Account {
    limits: QuotaLimits,
    /// In metrics; everybody without a name in the file of credentials shares one.
    label: Arc<str>,
    running: AtomicUsize,
    bytes: AtomicU64,
    /// Of requests on streams that are not complete yet, and so not among these.
    arriving: AtomicU64,
    /// When models were loaded, during the last minute.
    loads: Mutex<VecDeque<Instant>>,
    counters: Counters,
}

impl Quotas {
    pub(super) fn new(defaults: QuotaLimits, counters: Counters) -> Self {
        Self {
            defaults,
            clients: Mutex::default(),
            counters,
        }
    }

    pub(super) fn defaults(&self) -> QuotaLimits {
        self.defaults
    }

    /// The account of a client, or of the address when there is none. None when unbounded.
    pub(super) fn account(&self, client: Option<&Client>, ip: IpAddr) -> Option<Arc<Account>> {
        let limits = client.map_or(self.defaults, |client| client.quota);
        if limits.is_unbounded() {
            return None;
        }
        let (key, label): (_, Arc<str>) = match client {
            Some(client) => {
                let label = match client.kind {
                    ClientKind::Jwt => "jwt".into(),
                    ClientKind::Token | ClientKind::Certificate => Arc::clone(&client.name),
                    ClientKind::Unlisted => "certificate".into(),
                };
                (Key::Named(client.kind, Arc::clone(&client.name)), label)
            }
            None => (Key::Address(network(ip)), "address".into()),
        };
        let mut clients = self.clients.lock();
        if let Some(account) = clients.get(&key)
            && account.limits == limits
        {
            return Some(Arc::clone(account));
        }
        if clients.len() >= MAX_CLIENTS {
            clients.retain(|_, account| account.is_in_use());
        }
        // Those in the file of credentials are few, and others must not push them out of what is
        // theirs.
        let is_listed = matches!(
            key,
            Key::Named(ClientKind::Token | ClientKind::Certificate, _)
        );
        let key = if clients.len() >= MAX_CLIENTS && !is_listed {
            Key::Rest
        } else {
            key
        };
        let fresh = || {
            Arc::new(Account {
                limits,
                label,
                running: AtomicUsize::new(0),
                bytes: AtomicU64::new(0),
                arriving: AtomicU64::new(0),
                loads: Mutex::default(),
                counters: self.counters.clone(),
            })
        };
        if key == Key::Rest {
            return Some(Arc::clone(clients.entry(key).or_insert_with(fresh)));
        }
        let account = fresh();
        clients.insert(key, Arc::clone(&account));
        Some(account)
    }
}

fn network(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => ip,
        IpAddr::V6(ip) => {
            let bits = ip.to_bits() >> 64 << 64;
            IpAddr::V6(bits.into())
        }
    }
}

impl Account {
    fn is_in_use(self: &Arc<Self>) -> bool {
        let has_loaded = |at: &Instant| at.elapsed() < MINUTE;
        Arc::strong_count(self) > 1 || self.loads.lock().back().is_some_and(has_loaded)
    }

    /// Counts one more request as under way until the permit is dropped.
    pub(super) fn enter(self: &Arc<Self>) -> Result<Permit, Refusal> {
        let before = self.running.fetch_add(1, Ordering::Relaxed);
        // Exists from here on, so that a refusal gives back what was taken.
        let permit = Permit {
            account: Arc::clone(self),
            bytes: AtomicU64::new(0),
            exceeded: AtomicBool::new(false),
        };
        match self.limits.concurrency {
            Some(limit) if before >= limit => Err(self.refuse(
                Quota::Concurrency,
                format!("this client has {limit} requests under way, which is its quota"),
                SHORTLY,
            )),
            _ => Ok(permit),
        }
    }

    /// Counts one load, unless the last minute saw too many.
    pub(super) fn load(&self) -> Result<(), Refusal> {
        let Some(limit) = self.limits.loads_per_minute else {
            return Ok(());
        };
        let now = Instant::now();
        let mut loads = self.loads.lock();
        while loads.front().is_some_and(|at| now - *at >= MINUTE) {
            loads.pop_front();
        }
        if loads.len() < limit as usize {
            loads.push_back(now);
            return Ok(());
        }
        let wait = loads.front().map_or(MINUTE, |at| MINUTE - (now - *at));
        drop(loads);
        Err(self.refuse(
            Quota::Loads,
            format!("this client's quota is {limit} loads per minute"),
            wait,
        ))
    }

    fn too_many_bytes(&self, limit: ByteSize) -> Refusal {
        self.refuse(
            Quota::Bytes,
            format!("this client's requests under way may hold {limit}, which is its quota"),
            SHORTLY,
        )
    }

    fn refuse(&self, quota: Quota, message: String, wait: Duration) -> Refusal {
        self.counters.over_quota(quota, &self.label);
        Refusal::exhausted(message, wait)
    }
}

/// A request under way, with the bytes it brought; gives both back on drop.
#[derive(Debug)]
pub(super) struct Permit {
    account: Arc<Account>,
    bytes: AtomicU64,
    exceeded: AtomicBool,
}

impl Permit {
    /// Counts bytes of the request's body; false when they are more than the client may have.
    pub(super) fn receive(&self, bytes: u64) -> bool {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let before = self.account.bytes.fetch_add(bytes, Ordering::Relaxed);
        let fits = match self.account.limits.bytes_in_flight {
            Some(limit) => before.saturating_add(bytes) <= limit.0,
            None => true,
        };
        if !fits {
            self.exceeded.store(true, Ordering::Relaxed);
        }
        fits
    }

    /// Why the request must not be answered, if it brought too much.
    pub(super) fn refusal(&self) -> Option<Refusal> {
        let limit = self.account.limits.bytes_in_flight?;
        let exceeded = self.exceeded.load(Ordering::Relaxed);
        exceeded.then(|| self.account.too_many_bytes(limit))
    }
}

/// What came on a stream and is no request yet; given back on drop.
///
/// Counted apart from requests: one of these that is too much is refused without harm to the
/// stream, which ends when it is the parts of requests that are.
#[derive(Debug)]
pub(super) struct Arriving {
    account: Arc<Account>,
    bytes: AtomicU64,
}

impl Arriving {
    pub(super) fn new(account: Arc<Account>) -> Self {
        Self {
            account,
            bytes: AtomicU64::new(0),
        }
    }

    /// Counts bytes of the stream; fails when the client has too many of that kind.
    pub(super) fn receive(&self, bytes: u64) -> Result<(), Refusal> {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let before = self.account.arriving.fetch_add(bytes, Ordering::Relaxed);
        match self.account.limits.bytes_in_flight {
            // What frames it does not count.
            Some(limit) if before.saturating_add(bytes) > limit.0.saturating_add(FRAMING) => {
                Err(self.account.too_many_bytes(limit))
            }
            _ => Ok(()),
        }
    }

    /// They are a request by now, which counts for itself.
    pub(super) fn taken_up(&self) {
        let bytes = self.bytes.swap(0, Ordering::Relaxed);
        self.account.arriving.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.taken_up();
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let bytes = *self.bytes.get_mut();
        self.account.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.account.running.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;

    fn quotas(limits: QuotaLimits) -> (Quotas, Metrics) {
        let metrics = Metrics::new().unwrap();
        (Quotas::new(limits, Counters::new(&metrics)), metrics)
    }

    const HOME: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    #[test]
    fn an_unbounded_client_has_no_account() {
        let (quotas, _) = quotas(QuotaLimits::default());
        assert!(quotas.account(None, HOME).is_none());
    }

    #[test]
    fn requests_and_bytes_are_given_back() {
        let (quotas, metrics) = quotas(QuotaLimits {
            concurrency: Some(2),
            bytes_in_flight: Some(ByteSize(100)),
            loads_per_minute: None,
        });
        let account = quotas.account(None, HOME).unwrap();
        let other = quotas.account(None, [10, 0, 0, 1].into()).unwrap();
        let first = account.enter().unwrap();
        let second = account.enter().unwrap();
        assert!(account.enter().is_err());
        assert!(other.enter().is_ok());
        assert!(first.receive(60) && first.receive(40));
        assert!(!second.receive(1));
        assert!(second.refusal().is_some() && first.refusal().is_none());
        drop((first, second));
        let third = quotas.account(None, HOME).unwrap().enter().unwrap();
        assert!(third.receive(100));
        let text = metrics.render();
        for quota in ["concurrency", "bytes_in_flight"] {
            let line =
                format!("dormouse_quota_refusals_total{{quota=\"{quota}\",client=\"address\"}} 1");
            assert!(text.contains(&line), "{text}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn loads_are_counted_over_a_minute() {
        let (quotas, _metrics) = quotas(QuotaLimits {
            loads_per_minute: Some(2),
            ..QuotaLimits::default()
        });
        let account = quotas.account(None, HOME).unwrap();
        account.load().unwrap();
        tokio::time::advance(Duration::from_secs(20)).await;
        account.load().unwrap();
        let refused = account.load().unwrap_err();
        assert_eq!(refused.retry_after(), Some(Duration::from_secs(40)));
        tokio::time::advance(Duration::from_secs(40)).await;
        account.load().unwrap();
        assert!(account.load().is_err());
    }

    #[test]
    fn who_is_idle_is_forgotten_and_who_is_not_is_kept() {
        let (quotas, _metrics) = quotas(QuotaLimits {
            concurrency: Some(1),
            ..QuotaLimits::default()
        });
        let busy = quotas.account(None, HOME).unwrap();
        let permit = busy.enter().unwrap();
        for client in 0..MAX_CLIENTS as u32 * 2 {
            quotas.account(None, std::net::Ipv4Addr::from_bits(client).into());
        }
        assert!(quotas.clients.lock().len() <= MAX_CLIENTS + 1);
        assert!(quotas.account(None, HOME).unwrap().enter().is_err());
        drop(permit);
    }

    #[test]
    fn who_is_listed_keeps_a_quota_of_their_own_in_a_crowd() {
        let (quotas, _metrics) = quotas(QuotaLimits {
            concurrency: Some(1),
            ..QuotaLimits::default()
        });
        let crowd: Vec<_> = (0..=MAX_CLIENTS as u32)
            .map(|client| quotas.account(None, std::net::Ipv4Addr::from_bits(client).into()))
            .collect();
        let rest = crowd.last().unwrap().clone().unwrap();
        let busy = rest.enter().unwrap();
        let client = |kind| Client {
            kind,
            name: "team-a".into(),
            scopes: Default::default(),
            quota: QuotaLimits {
                concurrency: Some(2),
                ..QuotaLimits::default()
            },
        };
        let listed = quotas
            .account(Some(&client(ClientKind::Token)), HOME)
            .unwrap();
        let held = (listed.enter().unwrap(), listed.enter().unwrap());
        let other = quotas.account(Some(&client(ClientKind::Jwt)), HOME);
        assert!(other.unwrap().enter().is_err());
        drop((busy, held));
    }

    #[test]
    fn a_network_of_ipv6_is_one_client() {
        let one: IpAddr = "2001:db8:1:2:3::4".parse().unwrap();
        let two: IpAddr = "2001:db8:1:2:ffff::9".parse().unwrap();
        assert_eq!(network(one), network(two));
        assert_ne!(network(one), network("2001:db8:1:3::".parse().unwrap()));
    }
}

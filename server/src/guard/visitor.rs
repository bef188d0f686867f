//! A connection's way in, and a request's.

use std::fmt;
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use http::{HeaderMap, HeaderName, Method, Request, Response, Uri, header};
use tokio::net::TcpStream;

use super::body::{Counted, Held, Meter};
use super::certificate::Certificate;
use super::counters::Denial;
use super::need::Need;
use super::quota::{Account, Arriving, Permit};
use super::{Client, Guard, Listener, Needs, Refusal, Transport, is_loopback};
use crate::shared_memory::Caller;

/// The entrance of one listener.
#[derive(Clone, Default)]
pub struct Door(Option<Arc<Entrance>>);

struct Entrance {
    guard: Arc<Guard>,
    listener: Listener,
    needs: Needs,
    is_encrypted: bool,
}

impl Entrance {
    /// Browsers speak no gRPC, and what they ask for elsewhere is looked at more closely.
    fn meets_browser<B>(&self, request: &Request<B>) -> bool {
        self.listener != Listener::Grpc && is_browser(request.headers())
    }
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let listener = self.0.as_ref().map(|entrance| entrance.listener);
        f.debug_tuple("Door").field(&listener).finish()
    }
}

impl Door {
    pub(super) fn new(guard: Arc<Guard>, listener: Listener, needs: Needs) -> Self {
        let is_encrypted = guard.tls.as_ref().is_some_and(|tls| match listener {
            Listener::Http => tls.config().http,
            Listener::Grpc => tls.config().grpc,
            Listener::Metrics => tls.config().metrics,
            Listener::Management => tls.config().management,
        });
        Self(Some(Arc::new(Entrance {
            guard,
            listener,
            needs,
            is_encrypted,
        })))
    }

    /// Sets up TLS where it is used, within a deadline. None when the client failed to.
    pub(crate) async fn enter(&self, stream: TcpStream) -> Option<(Transport, Visitor)> {
        let Some(entrance) = &self.0 else {
            return Some((Transport::Plain(stream), Visitor::anybody()));
        };
        let ip = stream.peer_addr().ok()?.ip();
        let guard = &entrance.guard;
        let (transport, names) = match &guard.tls {
            Some(tls) if entrance.is_encrypted => {
                let is_grpc = entrance.listener == Listener::Grpc;
                let stream = match tls.accept(stream, is_grpc).await {
                    Ok(stream) => stream,
                    Err(error) => {
                        guard.counters.handshake_failed();
                        tracing::debug!(listener = ?entrance.listener, %error, "no TLS");
                        return None;
                    }
                };
                let shown = stream.get_ref().1.peer_certificates();
                let names = shown
                    .and_then(|chain| Certificate::parse(chain.first()?))
                    .map(|certificate| certificate.names.into());
                (Transport::Encrypted(Box::new(stream)), names)
            }
            _ => (Transport::Plain(stream), None),
        };
        let visitor = Visitor::new(Arc::clone(entrance), ip, names);
        Some((transport, visitor))
    }
}

#[cfg(test)]
impl Door {
    /// Somebody at `ip`, with the names of a certificate that was checked.
    pub(super) fn visitor(&self, ip: IpAddr, names: Option<&[&str]>) -> Visitor {
        let entrance = self.0.as_ref().expect("a door of a guard");
        let names = names.map(|names| names.iter().map(|name| name.to_string()).collect());
        Visitor::new(Arc::clone(entrance), ip, names)
    }
}

/// Whoever is at the other end of a connection.
#[derive(Clone)]
pub(crate) struct Visitor {
    entrance: Option<Arc<Entrance>>,
    ip: IpAddr,
    /// Of the certificate that was shown and checked.
    names: Option<Arc<[String]>>,
    /// Nothing that a request could ask for would be denied, whatever it asks for.
    is_free: bool,
}

impl fmt::Debug for Visitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Visitor").field("ip", &self.ip).finish()
    }
}

impl Visitor {
    /// Somebody who is asked nothing.
    fn anybody() -> Self {
        Self {
            entrance: None,
            ip: Ipv4Addr::LOCALHOST.into(),
            names: None,
            is_free: true,
        }
    }

    fn new(entrance: Arc<Entrance>, ip: IpAddr, names: Option<Arc<[String]>>) -> Self {
        let guard = &entrance.guard;
        let is_free = !guard.config.authenticates()
            && !guard.has_quotas
            && guard.config.management.is_none()
            && (guard.config.remote_management || is_loopback(ip));
        Self {
            is_free,
            entrance: Some(entrance),
            ip,
            names,
        }
    }

    /// Lets a request in, or says why not.
    #[inline]
    pub(crate) fn admit<B>(&self, request: &Request<B>) -> Result<Pass, Refusal> {
        match &self.entrance {
            Some(entrance) if !self.is_free || entrance.meets_browser(request) => {
                self.examine(entrance, request.method(), request.uri(), request.headers())
            }
            _ => Ok(Pass::default()),
        }
    }

    /// Whether a refusal of this request must be one of gRPC's, on a listener of both protocols.
    pub(crate) fn speaks_grpc<B>(&self, request: &Request<B>) -> bool {
        let has_both = |entrance: &Arc<Entrance>| entrance.listener == Listener::Management;
        self.entrance.as_ref().is_some_and(has_both) && is_grpc(request.headers())
    }

    #[inline(never)]
    fn examine(
        &self,
        entrance: &Entrance,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<Pass, Refusal> {
        let guard = &*entrance.guard;
        let config = &guard.config;
        let need = (entrance.needs)(method, uri.path());
        if need == Need::Page || (need == Need::Probe && !config.guard_probes) {
            return Ok(Pass::default());
        }
        let authenticates = config.authenticates();
        let client = match authenticates {
            true => guard
                .identify(headers, self.names.as_deref())
                .map_err(|refusal| guard.deny(Denial::Invalid, refusal))?,
            false => None,
        };
        match &client {
            Some(client) if !need.is_met_by(client.scopes) => {
                let refusal = Refusal::forbidden(format!(
                    "'{}' lacks the scope for this: {}",
                    client.name.escape_debug(),
                    need.describe()
                ));
                return Err(guard.deny(Denial::Scope, refusal));
            }
            None if authenticates => {
                return Err(guard.deny(Denial::Missing, Refusal::no_credential()));
            }
            _ => {}
        }
        self.check_place(entrance, need)?;
        // A browser sends certificates by itself, but never a token that it was not given.
        if need.reaches_beyond_models()
            && !headers.contains_key(header::AUTHORIZATION)
            && acts_for_another_site(headers, uri, entrance.is_encrypted)
        {
            let refusal =
                Refusal::forbidden("management and shared memory are not for pages of other sites");
            return Err(guard.deny(Denial::CrossOrigin, refusal));
        }
        let pass = self.take(guard, need, client.as_deref())?;
        Ok(Pass {
            caller: client.filter(|_| need.is_inference()).map(|client| Caller {
                identity: (client.kind.label(), Arc::clone(&client.name)),
                manages: Need::Management.is_met_by(client.scopes),
            }),
            ..pass
        })
    }

    /// Whether this is the place for what is asked.
    fn check_place(&self, entrance: &Entrance, need: Need) -> Result<(), Refusal> {
        let guard = &entrance.guard;
        let has_own_listener = guard.config.management.is_some();
        let is_there = entrance.listener == Listener::Management;
        let why = if need.is_management() && has_own_listener && !is_there {
            "management is served on a listener of its own (--management-port)"
        } else if is_there && need.is_inference() {
            "this listener is for management only"
        } else if need.is_management()
            && !guard.config.authenticates()
            && !guard.config.remote_management
            && !is_loopback(self.ip)
        {
            "management is served to this machine only, since nobody is asked who they are \
             (--allow-remote-management)"
        } else {
            return Ok(());
        };
        Err(guard.deny(Denial::Management, Refusal::forbidden(why)))
    }

    fn take(&self, guard: &Guard, need: Need, client: Option<&Client>) -> Result<Pass, Refusal> {
        if !guard.has_quotas || !need.is_counted() {
            return Ok(Pass::default());
        }
        let Some(account) = guard.quotas.account(client, self.ip) else {
            return Ok(Pass::default());
        };
        if need == Need::InferenceStream {
            return Ok(Pass {
                stream: Some(StreamQuota::new(account)),
                ..Pass::default()
            });
        }
        let permit = account.enter()?;
        if need == Need::Load {
            // Last: what is refused for something else is no load.
            account.load()?;
        }
        Ok(Pass {
            permit: Some(Arc::new(permit)),
            ..Pass::default()
        })
    }
}

/// A request that was let in.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pass {
    permit: Option<Arc<Permit>>,
    stream: Option<StreamQuota>,
    /// Who it is, for what belongs to one client only.
    caller: Option<Caller>,
}

impl Pass {
    /// Has the request answered by `answer`, counting what it brings and how long it takes.
    pub(crate) async fn accompany<B, A, F>(
        self,
        request: Request<B>,
        answer: impl FnOnce(Request<Counted<B>>) -> F,
    ) -> Result<Response<A>, Refusal>
    where
        F: Future<Output = Response<A>>,
        A: From<Accompanied<A>>,
    {
        let meter = match (&self.permit, &self.stream) {
            (Some(permit), _) => Meter::Request(Arc::clone(permit)),
            (None, Some(stream)) => Meter::Stream(Arc::clone(&stream.arriving)),
            (None, None) => Meter::Nobody,
        };
        let mut request = request.map(|body| Counted::new(body, meter));
        if let Some(stream) = self.stream {
            request.extensions_mut().insert(stream);
        }
        if let Some(caller) = self.caller {
            request.extensions_mut().insert(caller);
        }
        let response = answer(request).await;
        let Some(permit) = self.permit else {
            return Ok(response);
        };
        if let Some(refusal) = permit.refusal() {
            return Err(refusal);
        }
        Ok(response.map(|body| {
            A::from(Accompanied(Held {
                body,
                _permit: permit,
            }))
        }))
    }
}

/// A body with the permit of its request.
pub(crate) struct Accompanied<B>(Held<B>);

impl From<Accompanied<axum::body::Body>> for axum::body::Body {
    fn from(body: Accompanied<Self>) -> Self {
        Self::new(body.0)
    }
}

impl From<Accompanied<tonic::body::Body>> for tonic::body::Body {
    fn from(body: Accompanied<Self>) -> Self {
        Self::new(body.0)
    }
}

/// The quota that each request of a stream counts against.
#[derive(Clone, Debug)]
pub(crate) struct StreamQuota {
    account: Arc<Account>,
    /// Of the next request.
    arriving: Arc<Arriving>,
}

impl StreamQuota {
    pub(super) fn new(account: Arc<Account>) -> Self {
        Self {
            arriving: Arc::new(Arriving::new(Arc::clone(&account))),
            account,
        }
    }

    /// Counts one request of this many bytes until the permit is dropped.
    pub(crate) fn enter(&self, bytes: usize) -> Result<StreamPermit, Refusal> {
        self.arriving.taken_up();
        let permit = self.account.enter()?;
        permit.receive(bytes as u64);
        match permit.refusal() {
            Some(refusal) => Err(refusal),
            None => Ok(StreamPermit(permit)),
        }
    }
}

#[cfg(test)]
impl StreamQuota {
    /// Bytes of the stream come.
    pub(crate) fn receive(&self, bytes: usize) -> Result<(), Refusal> {
        self.arriving.receive(bytes as u64)
    }

    /// Of a client who may have so many bytes under way.
    pub(crate) fn of_bytes(bytes: u64) -> Self {
        let limits = super::QuotaLimits {
            bytes_in_flight: Some(dormouse_core::id::ByteSize(bytes)),
            ..super::QuotaLimits::default()
        };
        let metrics = crate::metrics::Metrics::new().expect("metrics need nothing");
        let counters = super::counters::Counters::new(&metrics);
        let quotas = super::quota::Quotas::new(limits, counters);
        let account = quotas.account(None, Ipv4Addr::LOCALHOST.into());
        Self::new(account.expect("there is a limit"))
    }
}

/// A stream's request under way.
#[derive(Debug)]
pub(crate) struct StreamPermit(#[expect(dead_code, reason = "gives back on drop")] Permit);

/// Whether a request is a call of gRPC.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

fn is_browser(headers: &HeaderMap) -> bool {
    headers.contains_key(header::ORIGIN) || headers.contains_key(&SEC_FETCH_SITE)
}

/// Where a browser says for whom it acts.
static SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Whether a browser sends this for a page that is not ours, or may not be.
fn acts_for_another_site(headers: &HeaderMap, uri: &Uri, is_encrypted: bool) -> bool {
    if !is_browser(headers) {
        return false;
    }
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    if matches!(text("sec-fetch-site"), Some(site) if site != "same-origin" && site != "none") {
        return true;
    }
    // Over HTTP/2 it is part of the address.
    let authority = || uri.authority().map(http::uri::Authority::as_str);
    let Some(host) = text("host").or_else(authority) else {
        return true;
    };
    let origin = text("origin");
    if let Some(origin) = origin
        && origin.split_once("://").map(|(_, rest)| rest) != Some(host)
    {
        return true;
    }
    // The browser has seen a certificate for this name.
    if is_encrypted {
        return false;
    }
    // A name that others can make point to this machine proves nothing.
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    let name = name.trim_start_matches('[').trim_end_matches(']');
    !(name == "localhost" || name.parse::<IpAddr>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_other_sites_are_noticed() {
        for (headers, other) in [
            (&[][..], false),
            (&[("host", "evil.example:8000")], false),
            (
                &[
                    ("host", "127.0.0.1:8000"),
                    ("origin", "http://127.0.0.1:8000"),
                ],
                false,
            ),
            (
                &[
                    ("host", "localhost:8000"),
                    ("origin", "http://localhost:8000"),
                    ("sec-fetch-site", "same-origin"),
                ],
                false,
            ),
            (
                &[("host", "[::1]:8000"), ("origin", "http://[::1]:8000")],
                false,
            ),
            (
                &[
                    ("host", "127.0.0.1:8000"),
                    ("origin", "https://evil.example"),
                ],
                true,
            ),
            (&[("host", "127.0.0.1:8000"), ("origin", "null")], true),
            (
                &[("host", "127.0.0.1:8000"), ("sec-fetch-site", "cross-site")],
                true,
            ),
            (
                &[
                    ("host", "evil.example:8000"),
                    ("origin", "http://evil.example:8000"),
                ],
                true,
            ),
            (&[("origin", "http://127.0.0.1")], true),
        ] {
            let map: HeaderMap = headers
                .iter()
                .map(|(name, value)| {
                    let name = http::HeaderName::from_static(name);
                    (name, http::HeaderValue::from_static(value))
                })
                .collect();
            let uri = Uri::from_static("/v2");
            let found = acts_for_another_site(&map, &uri, false);
            assert_eq!(found, other, "{headers:?}");
        }
    }

    #[test]
    fn our_own_page_is_known_by_its_certificate_and_over_http2() {
        let own = |host: Option<&'static str>, origin, uri, is_encrypted| {
            let mut headers = HeaderMap::new();
            headers.insert("origin", http::HeaderValue::from_static(origin));
            if let Some(host) = host {
                headers.insert("host", http::HeaderValue::from_static(host));
            }
            !acts_for_another_site(&headers, &Uri::from_static(uri), is_encrypted)
        };
        let (here, at) = ("https://models.example:8000", "models.example:8000");
        assert!(own(Some(at), here, "/v2", true));
        assert!(!own(Some(at), here, "/v2", false));
        assert!(own(None, here, "https://models.example:8000/v2", true));
        assert!(own(
            None,
            "http://127.0.0.1:1",
            "http://127.0.0.1:1/v2",
            false
        ));
        assert!(!own(
            None,
            "https://evil.example",
            "https://127.0.0.1:1/v2",
            true
        ));
        assert!(!own(None, here, "/v2", true));
    }
}

//! Who may do what: the one layer that every request of every port passes first.
//!
//! A listener has a [`Door`], a connection a visitor, a request a pass or a refusal. What
//! is not known to be allowed is denied. The guard knows what routes need, not what they do.

mod body;
mod certificate;
mod counters;
mod credentials;
mod der;
mod jwt;
pub mod need;
mod quota;
mod refusal;
mod tls;
mod visitor;
mod watch;

use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use arc_swap::ArcSwap;
use http::{HeaderMap, Method, header};
use parking_lot::Mutex;

use self::counters::{Counters, Denial};
use self::credentials::Credentials;
pub use self::jwt::JwtConfig;
use self::jwt::Verifier;
pub use self::need::{Need, Scope, Scopes};
use self::quota::Quotas;
pub use self::quota::{QuotaLimits, QuotaSection};
pub(crate) use self::refusal::Refusal;
use self::tls::Tls;
pub(crate) use self::tls::Transport;
pub use self::tls::{ClientAuth, TlsConfig};
pub use self::visitor::Door;
pub(crate) use self::visitor::{StreamPermit, StreamQuota, is_grpc};
use self::watch::Watched;
use crate::config::{ListenConfig, Secret};
use crate::metrics::Metrics;

/// Certificates, tokens and keys are small.
const MAX_FILE: u64 = 1 << 20;

/// How a server is protected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuardConfig {
    pub tls: Option<TlsConfig>,
    /// The file of tokens and of clients known by certificate.
    pub tokens: Option<PathBuf>,
    pub jwt: Option<JwtConfig>,
    /// What clients may do whose certificate is good and not listed in the file.
    pub certificate_scopes: Scopes,
    /// Liveness and readiness need a credential, too.
    pub guard_probes: bool,
    /// Serve other machines without asking who they are.
    pub allow_unauthenticated: bool,
    /// Let other machines manage models without asking who they are.
    pub remote_management: bool,
    /// Management, and only here.
    pub management: Option<ListenConfig>,
    pub quotas: QuotaLimits,
}

impl GuardConfig {
    /// Whether anybody is asked who they are.
    pub fn authenticates(&self) -> bool {
        self.tokens.is_some() || self.jwt.is_some() || self.requires_certificates()
    }

    fn requires_certificates(&self) -> bool {
        let tls = self.tls.as_ref();
        tls.is_some_and(|tls| tls.client_ca.is_some())
    }

    /// Where listeners are that nobody gave an address: this machine, unless it is safe, or
    /// wanted, to listen everywhere.
    pub fn default_address(&self) -> &'static str {
        match self.authenticates() || self.allow_unauthenticated {
            true => "0.0.0.0",
            false => "127.0.0.1",
        }
    }

    /// Whether it is right to listen at `address`.
    pub fn check_exposure(&self, address: SocketAddr) -> Result<(), GuardError> {
        let is_home = address.ip().to_canonical().is_loopback();
        if is_home || self.authenticates() || self.allow_unauthenticated {
            return Ok(());
        }
        Err(GuardError::Exposed(address))
    }
}

/// Why a server cannot be protected as it is configured to be.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    #[error("cannot read the {what} in {}", path.display())]
    Read {
        what: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("the {what} in {} cannot be used: {why}", path.display())]
    File {
        what: &'static str,
        path: PathBuf,
        why: String,
    },
    #[error(
        "{0} can be reached by other machines and nobody would be asked who they are: configure \
         --auth-tokens, --auth-jwt-keys or --tls-client-ca, listen on 127.0.0.1, or say \
         --allow-unauthenticated"
    )]
    Exposed(SocketAddr),
}

/// Reads a file whose content must never be shown.
fn read_small_file(what: &'static str, path: &Path) -> Result<Secret, GuardError> {
    let cannot = |source| GuardError::Read {
        what,
        path: path.to_owned(),
        source,
    };
    let file = std::fs::File::open(path).map_err(cannot)?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1)
        .read_to_end(&mut bytes)
        .map_err(cannot)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(GuardError::File {
            what,
            path: path.to_owned(),
            why: "it is larger than 1 MiB".to_owned(),
        });
    }
    Ok(Secret::new(bytes))
}

/// How a client made itself known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ClientKind {
    Token,
    Jwt,
    /// By a certificate that the file of credentials lists.
    Certificate,
    /// By one that it does not.
    Unlisted,
}

impl ClientKind {
    /// Tells clients of one name apart.
    fn label(self) -> &'static str {
        match self {
            Self::Token => "token",
            Self::Jwt => "jwt",
            Self::Certificate => "certificate",
            Self::Unlisted => "unlisted certificate",
        }
    }
}

/// Somebody who made themselves known.
#[derive(Debug)]
struct Client {
    kind: ClientKind,
    name: Arc<str>,
    scopes: Scopes,
    quota: QuotaLimits,
}

/// Which listener a request came through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listener {
    Http,
    Grpc,
    Metrics,
    Management,
}

/// The guard of a server.
#[derive(Debug)]
pub struct Guard {
    config: GuardConfig,
    tls: Option<Tls>,
    credentials: Option<ArcSwap<Credentials>>,
    jwt: Option<ArcSwap<Verifier>>,
    quotas: Quotas,
    /// Clients with a quota of their own may come though there is none for everybody.
    has_quotas: bool,
    counters: Counters,
    /// As they looked before they were read.
    watched: Mutex<Vec<Watched>>,
}

impl Guard {
    /// Reads certificates, tokens and keys.
    pub fn open(config: GuardConfig, metrics: &Metrics) -> Result<Arc<Self>, GuardError> {
        let watched = watch::watched(&config);
        let mut counters = Counters::new(metrics);
        let tls = config.tls.as_ref().map(Tls::open).transpose()?;
        if let Some(tls) = &tls {
            counters = counters.with_certificate();
            counters.certificate_expires(unix_seconds(tls.expires()));
        }
        for files in &watched {
            counters.follows(files.what());
        }
        let quotas = config.quotas;
        let credentials = match &config.tokens {
            Some(path) => Some(ArcSwap::from_pointee(Credentials::read(path, quotas)?)),
            None => None,
        };
        let jwt = match &config.jwt {
            Some(jwt) => Some(ArcSwap::from_pointee(Verifier::read(jwt, quotas)?)),
            None => None,
        };
        if config.authenticates() {
            tracing::info!(
                credentials = credentials.as_ref().map_or(0, |known| known.load().len()),
                jwt_keys = jwt.as_ref().map_or(0, |jwt| jwt.load().len()),
                client_certificates = config.requires_certificates(),
                "clients are asked who they are"
            );
        }
        Ok(Arc::new(Self {
            has_quotas: credentials.is_some() || !quotas.is_unbounded(),
            quotas: Quotas::new(quotas, counters.clone()),
            config,
            tls,
            credentials,
            jwt,
            counters,
            watched: Mutex::new(watched),
        }))
    }

    /// The entrance of a listener whose routes need what `needs` says.
    pub fn door(self: &Arc<Self>, listener: Listener, needs: Needs) -> Door {
        Door::new(Arc::clone(self), listener, needs)
    }

    /// Who sends these headers; none when they do not say. `names` are those of a certificate
    /// that was checked.
    fn identify(
        &self,
        headers: &HeaderMap,
        names: Option<&[String]>,
    ) -> Result<Option<Arc<Client>>, Refusal> {
        if let Some(token) = bearer(headers)? {
            return self.identify_token(token).map(Some);
        }
        let Some(names) = names else {
            return Ok(None);
        };
        let known = self.credentials.as_ref().map(ArcSwap::load);
        let listed = known.as_ref().and_then(|known| known.by_certificate(names));
        Ok(Some(match listed {
            Some(client) => Arc::clone(client),
            None => Arc::new(Client {
                kind: ClientKind::Unlisted,
                name: names.first().map_or("", String::as_str).into(),
                scopes: self.config.certificate_scopes,
                quota: self.quotas.defaults(),
            }),
        }))
    }

    fn identify_token(&self, token: &str) -> Result<Arc<Client>, Refusal> {
        if let Some(credentials) = &self.credentials
            && let Some(client) = credentials.load().by_token(token.as_bytes())
        {
            return Ok(Arc::clone(client));
        }
        match &self.jwt {
            Some(jwt) if Verifier::looks_like_one(token) => jwt
                .load()
                .verify(token, unix_seconds(SystemTime::now()))
                .map_err(|why| Refusal::invalid_credential(format!("the token is refused: {why}"))),
            _ => Err(Refusal::invalid_credential("the token is not known")),
        }
    }

    fn deny(&self, denial: Denial, refusal: Refusal) -> Refusal {
        self.counters.denied(denial);
        tracing::debug!(?denial, message = refusal.message(), "request turned away");
        refusal
    }
}

/// What routes of a listener need, by method and path.
pub type Needs = fn(&Method, &str) -> Need;

fn unix_seconds(at: SystemTime) -> f64 {
    let since = at.duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

/// The token of an `Authorization: Bearer` header.
fn bearer(headers: &HeaderMap) -> Result<Option<&str>, Refusal> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    if values.next().is_some() {
        return Err(Refusal::invalid_credential(
            "more than one authorization header",
        ));
    }
    let value = value.to_str().unwrap_or_default();
    let (scheme, token) = value.split_once(' ').unwrap_or((value, ""));
    let token = token.trim_ascii();
    if !scheme.eq_ignore_ascii_case("bearer") || token.is_empty() {
        return Err(Refusal::invalid_credential(
            "the authorization header is not 'Bearer TOKEN'",
        ));
    }
    Ok(Some(token))
}

fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

#[cfg(test)]
mod tests;

//! The `[[webhooks]]` of a configuration file: raw, and checked.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::Uri;
use http::uri::{PathAndQuery, Scheme};
use serde::Deserialize;

use super::file::{Span, from_text};
use super::{ConfigError, invalid};
use crate::events::EventKind;

const SETTING: &str = "webhooks";
const DEFAULT_EVENTS: [&str; 4] = ["woke", "slept", "failed", "idle"];
const MAX_HOOKS: usize = 32;
const MAX_RETRIES: u32 = 20;
const MAX_SECRET: usize = 4 << 10;

/// One `[[webhooks]]` table.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WebhookSection {
    pub url: String,
    pub events: Option<Vec<String>>,
    pub secret_env: Option<String>,
    pub secret_file: Option<PathBuf>,
    #[serde(deserialize_with = "from_text")]
    pub timeout: Option<Span>,
    pub retries: Option<u32>,
    #[serde(deserialize_with = "from_text")]
    pub retry_delay: Option<Span>,
    pub ca_file: Option<PathBuf>,
}

/// Somebody to tell what happens to models and to the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookConfig {
    pub endpoint: Endpoint,
    /// Names of events, as [`EventKind::name`] gives them.
    pub events: Vec<&'static str>,
    /// Signs what is sent.
    pub secret: Option<Secret>,
    /// For one attempt, from connecting to the answer's status.
    pub timeout: Duration,
    /// Attempts after the first.
    pub retries: u32,
    /// The wait before the first of them; doubles with each.
    pub retry_delay: Duration,
    /// Certificates to trust instead of the public ones.
    pub ca_file: Option<PathBuf>,
}

/// Where a webhook goes. Shown without its path, which may carry a token.
#[derive(Clone, PartialEq, Eq)]
pub struct Endpoint {
    pub is_https: bool,
    pub host: String,
    pub port: u16,
    pub path: PathAndQuery,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_https { "https" } else { "http" };
        write!(f, "{scheme}://{}:{}", self.host, self.port)
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Bytes that are never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Checks every hook, and reads its secret.
pub(super) fn resolve(sections: Vec<WebhookSection>) -> Result<Vec<WebhookConfig>, ConfigError> {
    if sections.len() > MAX_HOOKS {
        return Err(invalid(
            SETTING,
            format!("at most {MAX_HOOKS} are possible"),
        ));
    }
    let numbered = sections.into_iter().enumerate();
    numbered
        .map(|(index, section)| {
            resolve_one(section)
                .map_err(|why| invalid(SETTING, format!("number {}: {why}", index + 1)))
        })
        .collect()
}

fn resolve_one(section: WebhookSection) -> Result<WebhookConfig, String> {
    let endpoint = endpoint(&section.url)?;
    let wanted = section
        .events
        .unwrap_or_else(|| DEFAULT_EVENTS.map(str::to_owned).to_vec());
    if wanted.is_empty() {
        return Err("events is empty: nothing would ever be sent".to_owned());
    }
    let events = wanted
        .iter()
        .map(|name| {
            let known = EventKind::NAMES.into_iter().find(|known| known == name);
            known.ok_or_else(|| {
                format!(
                    "events: unknown event '{}': known are {}",
                    name.escape_debug(),
                    EventKind::NAMES.join(", ")
                )
            })
        })
        .collect::<Result<Vec<_>, _>>()?;
    let secret = match (&section.secret_env, &section.secret_file) {
        (None, None) => None,
        (Some(name), None) => Some(secret_from_env(name)?),
        (None, Some(path)) => Some(secret_from_file(path)?),
        (Some(_), Some(_)) => {
            return Err("secret_env and secret_file exclude each other".to_owned());
        }
    };
    let timeout = section
        .timeout
        .map_or(Duration::from_secs(5), |span| span.0);
    if timeout.is_zero() || timeout > Duration::from_secs(300) {
        return Err("timeout: expected up to 5m, and more than 0".to_owned());
    }
    let retries = section.retries.unwrap_or(5);
    if retries > MAX_RETRIES {
        return Err(format!("retries: expected at most {MAX_RETRIES}"));
    }
    let retry_delay = section
        .retry_delay
        .map_or(Duration::from_secs(1), |span| span.0);
    if retry_delay > Duration::from_secs(60) {
        return Err("retry_delay: expected at most 60s".to_owned());
    }
    if section.ca_file.is_some() && !endpoint.is_https {
        return Err("ca_file: only an https:// address has a certificate to check".to_owned());
    }
    Ok(WebhookConfig {
        endpoint,
        events,
        secret,
        timeout,
        retries,
        retry_delay,
        ca_file: section.ca_file,
    })
}

/// The message never shows the address: it may carry a token.
pub(super) fn endpoint(url: &str) -> Result<Endpoint, String> {
    if url.is_empty() {
        return Err("url is missing".to_owned());
    }
    let uri: Uri = url.parse().map_err(|error| format!("url: {error}"))?;
    let is_https = match uri.scheme() {
        Some(scheme) if *scheme == Scheme::HTTPS => true,
        Some(scheme) if *scheme == Scheme::HTTP => false,
        _ => return Err("url: expected http:// or https://".to_owned()),
    };
    let authority = uri.authority().ok_or("url: a host is missing")?;
    if authority.as_str().contains('@') {
        return Err("url: a user name or password does not belong in it".to_owned());
    }
    if authority.host().is_empty() {
        return Err("url: a host is missing".to_owned());
    }
    let path = uri.path_and_query().cloned();
    Ok(Endpoint {
        is_https,
        host: authority.host().to_owned(),
        port: authority
            .port_u16()
            .unwrap_or(if is_https { 443 } else { 80 }),
        path: path.unwrap_or_else(|| PathAndQuery::from_static("/")),
    })
}

fn secret_from_env(name: &str) -> Result<Secret, String> {
    let value = std::env::var(name).map_err(|_| {
        format!(
            "secret_env: the environment has no text under the name '{}'",
            name.escape_debug()
        )
    })?;
    checked_secret("secret_env", value.into_bytes())
}

fn secret_from_file(path: &Path) -> Result<Secret, String> {
    let cannot = |error: std::io::Error| format!("secret_file {}: {error}", path.display());
    let length = std::fs::metadata(path).map_err(cannot)?.len();
    if length > MAX_SECRET as u64 {
        return Err(format!(
            "secret_file {}: more than {MAX_SECRET} bytes",
            path.display()
        ));
    }
    let mut bytes = std::fs::read(path).map_err(cannot)?;
    // Editors and `echo` end files with a line break that is no part of the secret.
    while bytes
        .last()
        .is_some_and(|byte| matches!(byte, b'\n' | b'\r'))
    {
        bytes.pop();
    }
    checked_secret("secret_file", bytes)
}

fn checked_secret(setting: &str, bytes: Vec<u8>) -> Result<Secret, String> {
    match bytes.len() {
        0 => Err(format!("{setting}: the secret is empty")),
        1..=MAX_SECRET => Ok(Secret(bytes)),
        _ => Err(format!("{setting}: more than {MAX_SECRET} bytes")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hook(toml: &str) -> Result<WebhookConfig, String> {
        let section = toml::from_str(toml).map_err(|error| error.to_string())?;
        resolve_one(section)
    }

    #[test]
    fn a_hook_needs_only_its_url() {
        let hook = hook(r#"url = "https://example.org/in?token=t0ps3cret""#).unwrap();
        assert_eq!(hook.endpoint.port, 443);
        assert_eq!(hook.events, DEFAULT_EVENTS);
        assert_eq!(hook.retries, 5);
        let shown = format!("{hook:?}");
        assert!(!shown.contains("t0ps3cret"), "{shown}");
    }

    #[test]
    fn a_secret_comes_from_a_file_and_is_never_shown() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "t0ps3cret\n").unwrap();
        let toml = format!(
            "url = 'http://a:81/x'\nsecret_file = '{}'",
            file.path().display()
        );
        let hook = hook(&toml).unwrap();
        assert_eq!(hook.secret.as_ref().unwrap().expose(), b"t0ps3cret");
        let shown = format!("{hook:?}");
        assert!(!shown.contains("t0ps3cret"), "{shown}");
    }

    #[test]
    fn wrong_hooks_are_refused_and_say_why() {
        for (toml, expected) in [
            ("", "url is missing"),
            ("url = 'ftp://a/'", "expected http:// or https://"),
            ("url = '/path'", "expected http:// or https://"),
            ("url = 'http://u:p@a/'", "user name or password"),
            ("url = 'http://a/'\nevents = []", "events is empty"),
            (
                "url = 'http://a/'\nevents = ['woken']",
                "unknown event 'woken': known are woke",
            ),
            (
                "url = 'http://a/'\nsecret_env = 'DORMOUSE_NO_SUCH'",
                "no text under the name",
            ),
            (
                "url = 'http://a/'\nsecret_file = '/no/such'",
                "secret_file /no/such",
            ),
            (
                "url = 'http://a/'\nsecret_env = 'A'\nsecret_file = 'b'",
                "exclude each other",
            ),
            ("url = 'http://a/'\ntimeout = '0s'", "timeout"),
            ("url = 'http://a/'\nretries = 21", "retries"),
            ("url = 'http://a/'\nca_file = 'x'", "ca_file"),
            ("url = 'http://a/'\nuri = 'x'", "unknown field"),
        ] {
            let refused = hook(toml).unwrap_err();
            assert!(refused.contains(expected), "{toml}: {refused}");
        }
    }
}

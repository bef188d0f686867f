//! The server that is driven: where it is and how it is spoken to.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

/// A server of the v2 protocol.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Target {
    /// `grpc://HOST:PORT` or `http://HOST:PORT`; `grpcs://` or `https://` over TLS.
    pub(crate) url: String,
    /// Instead of what the URL's scheme says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) protocol: Option<Protocol>,
    /// How tensors travel over HTTP.
    #[serde(default)]
    pub(crate) data: DataForm,
    /// May be a machine other than this one.
    #[serde(default)]
    pub(crate) allow_remote: bool,
    /// Process whose CPU time and memory are told, with its descendants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pid: Option<u32>,
    /// Sent with every request, as metadata over gRPC.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) headers: BTreeMap<String, String>,
    /// Sent with every request, and written nowhere.
    #[serde(skip)]
    pub(crate) token: Option<Token>,
    /// Authorities (PEM) to trust instead of the public ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tls_ca: Option<PathBuf>,
}

/// A token, never shown.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Token(String);

impl Token {
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl FromStr for Token {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// What a server speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Protocol {
    Grpc,
    Http,
}

/// How tensors travel over HTTP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DataForm {
    /// Binary where the server's metadata names the extension, else JSON
    #[default]
    Auto,
    /// Behind the JSON, as the binary tensor extension has it
    Binary,
    /// Within the JSON
    Json,
}

impl Target {
    /// A server on this machine, all else as usual.
    pub(crate) fn at(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            protocol: None,
            data: DataForm::Auto,
            allow_remote: false,
            pid: None,
            headers: BTreeMap::new(),
            token: None,
            tls_ca: None,
        }
    }

    /// What it speaks.
    pub(crate) fn spoken(&self) -> Result<Protocol> {
        let scheme = self.url.split_once("://").map(|(scheme, _)| scheme);
        match (self.protocol, scheme) {
            (Some(protocol), _) => Ok(protocol),
            (None, Some("grpc" | "grpcs")) => Ok(Protocol::Grpc),
            (None, Some("http" | "https")) => Ok(Protocol::Http),
            _ => anyhow::bail!(
                "'{}' must begin with grpc://, grpcs://, http:// or https://, or the protocol must be given",
                self.url
            ),
        }
    }

    /// Whether the URL says so.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.url.starts_with("grpcs://") || self.url.starts_with("https://")
    }

    /// `HOST:PORT`.
    pub(crate) fn authority(&self) -> Result<&str> {
        let rest = self
            .url
            .split_once("://")
            .map_or(&*self.url, |(_, rest)| rest);
        let authority = rest.split('/').next().unwrap_or_default();
        ensure!(
            authority.rsplit_once(':').is_some_and(|(host, port)| {
                !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port != 0)
            }),
            "'{}' needs a host and a port",
            self.url
        );
        Ok(authority)
    }

    /// Refuses other machines unless they are allowed.
    pub(crate) async fn check_place(&self) -> Result<()> {
        let authority = self.authority()?;
        let addresses: Vec<_> = tokio::net::lookup_host(authority)
            .await
            .with_context(|| format!("cannot find '{authority}'"))?
            .collect();
        ensure!(
            self.allow_remote || addresses.iter().all(|address| address.ip().is_loopback()),
            "'{}' is another machine: load is only sent there with --allow-remote",
            self.url
        );
        Ok(())
    }
}

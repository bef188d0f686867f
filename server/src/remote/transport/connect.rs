//! Makes connections: looks the host up, leaves out addresses that must not be reached, speaks TLS.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::remote::error::{ErrorKind, RemoteError};

/// Addresses beside link-local ones where clouds answer anybody with secrets.
const METADATA: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
];

/// Which addresses may be connected to.
#[derive(Clone, Debug)]
pub(in crate::remote) enum Addresses {
    /// Whatever the storage library asks for: credentials may come from the machine's metadata.
    Any,
    /// None where a cloud tells secrets, other than these.
    Public { listed: Vec<IpAddr> },
}

impl Addresses {
    fn allow(&self, address: IpAddr) -> bool {
        let Self::Public { listed } = self else {
            return true;
        };
        let address = address.to_canonical();
        if listed.contains(&address) {
            return true;
        }
        let is_local = match address {
            IpAddr::V4(v4) => v4.is_link_local() || v4.is_unspecified() || v4.is_multicast(),
            IpAddr::V6(v6) => {
                v6.is_unicast_link_local() || v6.is_unspecified() || v6.is_multicast()
            }
        };
        !is_local && !METADATA.contains(&address)
    }
}

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the certificates in {}: {why}", path.display())]
pub(in crate::remote) struct TlsError {
    path: PathBuf,
    why: String,
}

/// The usual authorities, and those of a file.
pub(in crate::remote) fn tls_config(ca_file: Option<&Path>) -> Result<Arc<ClientConfig>, TlsError> {
    let mut roots = RootCertStore::empty();
    roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    if let Some(path) = ca_file {
        let unusable = |why: String| TlsError {
            path: path.to_owned(),
            why,
        };
        let certificates =
            CertificateDer::pem_file_iter(path).map_err(|error| unusable(error.to_string()))?;
        let mut count = 0;
        for certificate in certificates {
            let certificate = certificate.map_err(|error| unusable(error.to_string()))?;
            let added = roots.add(certificate);
            added.map_err(|error| unusable(error.to_string()))?;
            count += 1;
        }
        if count == 0 {
            return Err(unusable("no certificate in it".to_owned()));
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider supports TLS 1.2 and 1.3")
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config))
}

/// Connects to the host of an address.
#[derive(Clone)]
pub(super) struct Connect {
    tls: TlsConnector,
    addresses: Addresses,
    patience: Duration,
}

impl std::fmt::Debug for Connect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connect").finish_non_exhaustive()
    }
}

impl Connect {
    pub(super) fn new(tls: Arc<ClientConfig>, addresses: Addresses, patience: Duration) -> Self {
        Self {
            tls: TlsConnector::from(tls),
            addresses,
            patience,
        }
    }

    async fn connect(self, uri: Uri) -> Result<Stream, RemoteError> {
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
        let is_tls = uri.scheme_str() != Some("http");
        let port = uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
        let unreachable = |what: &str, cause: &dyn std::fmt::Display| {
            RemoteError::new(
                ErrorKind::Unreachable,
                format!("{host}:{port} cannot be reached: {what}: {cause}"),
            )
        };
        let work = async {
            let found = tokio::net::lookup_host((host, port)).await;
            let found = found.map_err(|error| unreachable("its name is not known", &error))?;
            let (allowed, refused): (Vec<SocketAddr>, Vec<SocketAddr>) =
                found.partition(|address| self.addresses.allow(address.ip()));
            if let ([], [refused, ..]) = (&allowed[..], &refused[..]) {
                return Err(RemoteError::new(
                    ErrorKind::Refused,
                    format!(
                        "{host} is {}, an address of this machine's surroundings that a web \
                         repository may not reach",
                        refused.ip()
                    ),
                ));
            }
            let stream = TcpStream::connect(&allowed[..]).await;
            let stream = stream.map_err(|error| unreachable("no connection", &error))?;
            // A refusal costs time, not correctness.
            let _ = stream.set_nodelay(true);
            if !is_tls {
                return Ok(Stream::Plain(TokioIo::new(stream)));
            }
            let name = ServerName::try_from(host.to_owned())
                .map_err(|error| unreachable("not a host", &error))?;
            let stream = self.tls.connect(name, stream).await;
            let stream = stream.map_err(|error| unreachable("no secure connection", &error))?;
            Ok(Stream::Tls(Box::new(TokioIo::new(stream))))
        };
        match tokio::time::timeout(self.patience, work).await {
            Ok(connected) => connected,
            Err(_) => Err(unreachable(
                "no connection",
                &format!("not within {:?}", self.patience),
            )),
        }
    }
}

impl tower::Service<Uri> for Connect {
    type Response = Stream;
    type Error = RemoteError;
    type Future = Pin<Box<dyn Future<Output = Result<Stream, RemoteError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), RemoteError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(self.clone().connect(uri))
    }
}

/// A connection, with or without TLS.
pub(super) enum Stream {
    Plain(TokioIo<TcpStream>),
    Tls(Box<TokioIo<TlsStream<TcpStream>>>),
}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Read for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_read(context, buffer),
        }
    }
}

impl Write for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_tell_secrets_are_not_reached_unless_listed() {
        let public = Addresses::Public { listed: Vec::new() };
        for address in [
            "169.254.169.254",
            "::ffff:169.254.169.254",
            "fe80::1",
            "fd00:ec2::254",
            "100.100.100.200",
            "0.0.0.0",
        ] {
            assert!(!public.allow(address.parse().unwrap()), "{address}");
        }
        for address in ["127.0.0.1", "10.1.2.3", "93.184.216.34", "2001:db8::1"] {
            assert!(public.allow(address.parse().unwrap()), "{address}");
        }
        let listed = Addresses::Public {
            listed: vec!["169.254.169.254".parse().unwrap()],
        };
        assert!(listed.allow("169.254.169.254".parse().unwrap()));
        assert!(!listed.allow("169.254.170.2".parse().unwrap()));
    }
}

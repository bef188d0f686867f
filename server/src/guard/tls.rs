//! TLS: certificates from files, replaced while serving, and the handshake with its deadline.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::certificate::Certificate;
use super::{GuardError, read_small_file};

/// How long a client may take to set up TLS.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);

/// Whether clients must show a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClientAuth {
    /// The connection ends without one.
    #[default]
    Required,
    /// Who has none needs another credential.
    Optional,
}

/// Where certificates are, and which listeners use them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsConfig {
    /// The server's certificate with those between it and its authority, as PEM.
    pub cert: PathBuf,
    /// Its private key, as PEM.
    pub key: PathBuf,
    /// Authorities of clients' certificates, as PEM.
    pub client_ca: Option<PathBuf>,
    pub client_auth: ClientAuth,
    pub http: bool,
    pub grpc: bool,
    pub metrics: bool,
    pub management: bool,
}

/// The certificates in use.
#[derive(Debug)]
pub(super) struct Tls {
    config: TlsConfig,
    current: ArcSwap<Loaded>,
}

/// What one reading of the files gave.
#[derive(Debug)]
struct Loaded {
    http: Arc<ServerConfig>,
    grpc: Arc<ServerConfig>,
    expires: SystemTime,
}

impl Tls {
    pub(super) fn open(config: &TlsConfig) -> Result<Self, GuardError> {
        let loaded = Loaded::read(config)?;
        if loaded.expires <= SystemTime::now() {
            tracing::warn!(cert = %config.cert.display(), "the certificate has expired");
        }
        Ok(Self {
            config: config.clone(),
            current: ArcSwap::from_pointee(loaded),
        })
    }

    pub(super) fn config(&self) -> &TlsConfig {
        &self.config
    }

    /// When the certificate in use ends.
    pub(super) fn expires(&self) -> SystemTime {
        self.current.load().expires
    }

    /// Reads the files again; new connections get what is in them. What cannot be used changes
    /// nothing.
    pub(super) fn reload(&self) -> Result<(), GuardError> {
        let loaded = Loaded::read(&self.config)?;
        if loaded.expires <= SystemTime::now() && loaded.expires < self.expires() {
            return Err(wrong(&self.config.cert, "the new certificate has expired"));
        }
        self.current.store(Arc::new(loaded));
        Ok(())
    }

    /// Sets up TLS on a connection, as the server of gRPC or of HTTP.
    pub(super) async fn accept(
        &self,
        stream: TcpStream,
        is_grpc: bool,
    ) -> io::Result<TlsStream<TcpStream>> {
        let current = self.current.load_full();
        let config = if is_grpc {
            &current.grpc
        } else {
            &current.http
        };
        let handshake = TlsAcceptor::from(Arc::clone(config)).accept(stream);
        tokio::time::timeout(HANDSHAKE_PATIENCE, handshake)
            .await
            .unwrap_or_else(|_| {
                Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the client did not set up TLS in time",
                ))
            })
    }
}

impl Loaded {
    fn read(config: &TlsConfig) -> Result<Self, GuardError> {
        let chain = certificates("certificate", &config.cert)?;
        let facts = chain.first().and_then(|first| Certificate::parse(first));
        let facts = facts.ok_or_else(|| wrong(&config.cert, "its first certificate is broken"))?;
        let text = read_small_file("private key", &config.key)?;
        let key = PrivateKeyDer::from_pem_slice(text.expose()).map_err(|_| GuardError::File {
            what: "private key",
            path: config.key.clone(),
            why: "it holds no private key as PEM".to_owned(),
        })?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong(&config.cert, error.to_string()))?;
        let builder = match &config.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for authority in certificates("client authorities", path)? {
                    roots
                        .add(authority)
                        .map_err(|error| wrong(path, error.to_string()))?;
                }
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                let verifier = match config.client_auth {
                    ClientAuth::Required => verifier,
                    ClientAuth::Optional => verifier.allow_unauthenticated(),
                };
                let verifier = verifier
                    .build()
                    .map_err(|error| wrong(path, error.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut http = builder
            .with_single_cert(chain, key)
            .map_err(|error| wrong(&config.cert, format!("with its key: {error}")))?;
        http.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let mut grpc = http.clone();
        grpc.alpn_protocols.truncate(1);
        Ok(Self {
            http: Arc::new(http),
            grpc: Arc::new(grpc),
            expires: facts.expires,
        })
    }
}

fn certificates(
    what: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, GuardError> {
    let text = read_small_file(what, path)?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.expose()).collect();
    match read {
        Ok(chain) if !chain.is_empty() => Ok(chain),
        _ => Err(GuardError::File {
            what,
            path: path.to_owned(),
            why: "it holds no certificate as PEM".to_owned(),
        }),
    }
}

fn wrong(path: &Path, why: impl Into<String>) -> GuardError {
    GuardError::File {
        what: "certificate",
        path: path.to_owned(),
        why: why.into(),
    }
}

/// A connection, encrypted or not.
#[derive(Debug)]
pub(crate) enum Transport {
    Plain(TcpStream),
    Encrypted(Box<TlsStream<TcpStream>>),
}

impl AsyncRead for Transport {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Encrypted(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Transport {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Encrypted(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Self::Encrypted(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Encrypted(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Encrypted(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Encrypted(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

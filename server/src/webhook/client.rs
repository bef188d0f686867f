//! One POST over a connection of its own: deliveries are rare, and a kept connection goes stale.

use std::io;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::Full;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::WebhookError;
use crate::config::{Endpoint, WebhookConfig};

/// Bytes of an answer's head; its body is not read.
const MAX_ANSWER: usize = 16 << 10;

/// Reaches one endpoint.
#[derive(Clone)]
pub(crate) struct Client {
    endpoint: Endpoint,
    tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
}

/// What the other side said.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    /// How long it wants to be left alone.
    pub(crate) retry_after: Option<Duration>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum PostError {
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    #[error("no secure connection: {0}")]
    Tls(io::Error),
    #[error("the request failed: {0}")]
    Http(#[from] hyper::Error),
}

impl Client {
    pub(crate) fn new(config: &WebhookConfig) -> Result<Self, WebhookError> {
        Self::reaching(config.endpoint.clone(), config.ca_file.as_deref())
    }

    /// A client of `endpoint`, trusted by the certificates in `ca_file` or by the public ones.
    pub(crate) fn reaching(
        endpoint: Endpoint,
        ca_file: Option<&Path>,
    ) -> Result<Self, WebhookError> {
        let tls = match endpoint.is_https {
            true => {
                let host = endpoint.host.trim_matches(['[', ']']).to_owned();
                let name = ServerName::try_from(host)
                    .map_err(|_| WebhookError::HostName(endpoint.host.clone()))?;
                Some((tls_config(ca_file)?, name))
            }
            false => None,
        };
        Ok(Self { endpoint, tls })
    }

    /// Sends a request and waits for the answer's head. Redirects are answers like any other.
    pub(crate) async fn post(&self, request: Request<Full<Bytes>>) -> Result<Reply, PostError> {
        let host = self.endpoint.host.trim_matches(['[', ']']);
        let stream = TcpStream::connect((host, self.endpoint.port))
            .await
            .map_err(PostError::Connect)?;
        match &self.tls {
            None => exchange(stream, request).await,
            Some((config, name)) => {
                let connector = TlsConnector::from(Arc::clone(config));
                let stream = connector.connect(name.clone(), stream).await;
                exchange(stream.map_err(PostError::Tls)?, request).await
            }
        }
    }
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> Result<Reply, PostError> {
    let (mut sender, connection) = http1::Builder::new()
        .max_buf_size(MAX_ANSWER)
        .handshake(TokioIo::new(stream))
        .await?;
    let mut connection = pin!(connection);
    let mut answer = pin!(sender.send_request(request));
    let answer = tokio::select! {
        biased;
        answer = &mut answer => answer,
        // Whatever ended the connection, the request knows more about it.
        _ = &mut connection => answer.await,
    }?;
    let seconds = answer.headers().get(header::RETRY_AFTER);
    let seconds = seconds.and_then(|value| value.to_str().ok()?.parse().ok());
    Ok(Reply {
        status: answer.status(),
        retry_after: seconds.map(Duration::from_secs),
    })
}

fn tls_config(ca_file: Option<&Path>) -> Result<Arc<ClientConfig>, WebhookError> {
    let mut roots = RootCertStore::empty();
    match ca_file {
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(path) => {
            let unusable = |why: String| WebhookError::CaFile {
                path: path.to_owned(),
                why,
            };
            let certificates =
                CertificateDer::pem_file_iter(path).map_err(|error| unusable(error.to_string()))?;
            for certificate in certificates {
                let certificate = certificate.map_err(|error| unusable(error.to_string()))?;
                let added = roots.add(certificate);
                added.map_err(|error| unusable(error.to_string()))?;
            }
            if roots.is_empty() {
                return Err(unusable("no certificate in it".to_owned()));
            }
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

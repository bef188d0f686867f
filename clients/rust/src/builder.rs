//! Settings of a client.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tonic::codec::CompressionEncoding;
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue, MetadataMap};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use crate::client::{Client, Settings};
use crate::error::ClientError;
use crate::pb::grpc_inference_service_client::GrpcInferenceServiceClient;
use crate::retry::RetryPolicy;

/// HTTP/2 windows that keep a tensor of megabytes from stopping for every 64 KiB.
const STREAM_WINDOW: u32 = 8 << 20;
const CONNECTION_WINDOW: u32 = 32 << 20;
/// Answers of megabytes come in frames of this size instead of 16 KiB, each of which a server writes by
/// itself: four callers of a model that answers 3 MB each get an eighth more answers.
const FRAME: u32 = 256 << 10;

/// Settings of a [`Client`]; made by [`Client::builder`].
///
/// ```no_run
/// use std::time::Duration;
/// use dormouse_client::Client;
///
/// # async fn example() -> Result<(), dormouse_client::ClientError> {
/// let client = Client::builder("http://127.0.0.1:8001")
///     .connect_timeout(Duration::from_secs(1))
///     .default_deadline(Duration::from_secs(10))
///     .metadata("authorization", "Bearer 1234")
///     .gzip()
///     .connect()
///     .await?;
/// # drop(client);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ClientBuilder {
    url: String,
    connect_timeout: Duration,
    deadline: Option<Duration>,
    max_message_size: usize,
    retry: RetryPolicy,
    gzip: bool,
    metadata: Vec<(String, Hidden)>,
    token: Option<Hidden>,
    ca: Option<Vec<u8>>,
    identity: Option<(Vec<u8>, Hidden)>,
}

/// A value that may be a secret, and is not shown.
#[derive(Clone)]
struct Hidden(String);

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

impl ClientBuilder {
    pub(crate) fn new(url: String) -> Self {
        Self {
            url,
            connect_timeout: Duration::from_secs(5),
            deadline: Some(Duration::from_secs(300)),
            max_message_size: i32::MAX as usize,
            retry: RetryPolicy::default(),
            gzip: false,
            metadata: Vec::new(),
            token: None,
            ca: None,
            identity: None,
        }
    }

    /// How long making a connection may take; 5 s unless set.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How long a call without a deadline of its own may take, retries included; 5 min unless set.
    pub fn default_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Lets calls without a deadline of their own wait for ever.
    pub fn no_default_deadline(mut self) -> Self {
        self.deadline = None;
        self
    }

    /// The largest message that is sent or accepted; 2 GiB - 1 unless set, the protocol's limit.
    pub fn max_message_size(mut self, bytes: usize) -> Self {
        self.max_message_size = bytes;
        self
    }

    /// When refused calls are tried again.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    /// Compresses requests with gzip and accepts compressed answers.
    pub fn gzip(mut self) -> Self {
        self.gzip = true;
        self
    }

    /// Sends this metadata with every call.
    pub fn metadata(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.metadata.push((key.into(), Hidden(value.into())));
        self
    }

    /// Sends this bearer token with every call.
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(Hidden(token.into()));
        self
    }

    /// Speaks TLS and trusts the authorities in this PEM instead of the public ones.
    pub fn tls_ca(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.ca = Some(pem.into());
        self
    }

    /// Shows this certificate (PEM) with its private key (PEM) to servers that ask for one.
    pub fn tls_identity(mut self, certificate: impl Into<Vec<u8>>, key: impl Into<String>) -> Self {
        self.identity = Some((certificate.into(), Hidden(key.into())));
        self
    }

    /// Connects; fails when nobody answers within the connect timeout.
    pub async fn connect(self) -> Result<Client, ClientError> {
        let (endpoint, url) = self.endpoint()?;
        let channel = endpoint
            .connect()
            .await
            .map_err(|error| ClientError::Connect {
                url: url.clone(),
                source: error.into(),
            })?;
        self.client(channel, url)
    }

    /// Makes a client that connects with its first call. Must be called within a tokio runtime.
    pub fn connect_lazy(self) -> Result<Client, ClientError> {
        let (endpoint, url) = self.endpoint()?;
        self.client(endpoint.connect_lazy(), url)
    }

    fn endpoint(&self) -> Result<(Endpoint, String), ClientError> {
        let invalid = |reason: String| ClientError::Setting {
            setting: "address",
            value: self.url.clone(),
            reason,
        };
        let wants_tls = self.ca.is_some() || self.identity.is_some();
        let (is_encrypted, rest) = match self.url.split_once("://") {
            None => (wants_tls, self.url.as_str()),
            Some(("http" | "grpc", _)) if wants_tls => {
                let reason = "certificates were given for it, and only https:// uses them";
                return Err(invalid(reason.to_owned()));
            }
            Some(("http" | "grpc", rest)) => (false, rest),
            Some(("https" | "grpcs", rest)) => (true, rest),
            Some((scheme, _)) => {
                let reason = format!("{scheme:?} is not spoken here, only http:// and https://");
                return Err(invalid(reason));
            }
        };
        let scheme = if is_encrypted { "https" } else { "http" };
        let url = format!("{scheme}://{rest}");
        let endpoint = Endpoint::from_shared(url.clone())
            .map_err(|error| invalid(format!("{error}; expected http://HOST:PORT")))?
            .connect_timeout(self.connect_timeout)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_frame_size(FRAME)
            // Not HTTP/2 pings: gRPC servers hang up on clients that ping through a long silence.
            .tcp_keepalive(Some(Duration::from_secs(60)));
        if !is_encrypted {
            return Ok((endpoint, url));
        }
        let tls = match &self.ca {
            Some(pem) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)),
            None => ClientTlsConfig::new().with_webpki_roots(),
        };
        let tls = match &self.identity {
            Some((certificate, key)) => tls.identity(Identity::from_pem(certificate, &key.0)),
            None => tls,
        };
        let endpoint = endpoint
            .tls_config(tls)
            .map_err(|error| ClientError::Connect {
                url: url.clone(),
                source: error.into(),
            })?;
        Ok((endpoint, url))
    }

    fn client(self, channel: Channel, url: String) -> Result<Client, ClientError> {
        let mut metadata = MetadataMap::new();
        for (key, value) in &self.metadata {
            let invalid = |setting, value: &String, reason| ClientError::Setting {
                setting,
                value: value.clone(),
                reason,
            };
            let name = AsciiMetadataKey::from_bytes(key.as_bytes())
                .map_err(|error| invalid("metadata key", key, error.to_string()))?;
            let mut value = AsciiMetadataValue::try_from(value.0.as_str())
                .map_err(|error| invalid("metadata value of", key, error.to_string()))?;
            value.set_sensitive(true);
            metadata.append(name, value);
        }
        if let Some(Hidden(token)) = &self.token {
            let value = format!("Bearer {token}");
            let mut value =
                AsciiMetadataValue::try_from(value).map_err(|error| ClientError::Setting {
                    setting: "token",
                    value: "…".to_owned(),
                    reason: error.to_string(),
                })?;
            value.set_sensitive(true);
            metadata.insert("authorization", value);
        }
        let mut stub = GrpcInferenceServiceClient::new(channel)
            .max_decoding_message_size(self.max_message_size)
            .max_encoding_message_size(self.max_message_size);
        if self.gzip {
            stub = stub
                .send_compressed(CompressionEncoding::Gzip)
                .accept_compressed(CompressionEncoding::Gzip);
        }
        Ok(Client {
            stub,
            settings: Arc::new(Settings {
                url,
                deadline: self.deadline,
                retry: self.retry,
                metadata,
                max_message_size: self.max_message_size,
            }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(url: &str) -> Result<String, String> {
        let builder = ClientBuilder::new(url.to_owned());
        let endpoint = builder.endpoint().map_err(|error| error.to_string())?;
        Ok(endpoint.1)
    }

    #[test]
    fn a_bare_address_is_enough() {
        for url in [
            "localhost:8001",
            "http://localhost:8001",
            "grpc://localhost:8001",
        ] {
            assert_eq!(resolved(url).as_deref(), Ok("http://localhost:8001"));
        }
    }

    #[test]
    fn https_is_spoken_where_it_is_asked_for() {
        for url in ["https://localhost:8001", "grpcs://localhost:8001"] {
            assert_eq!(resolved(url).as_deref(), Ok("https://localhost:8001"));
        }
        let builder = ClientBuilder::new("http://localhost:8001".to_owned()).tls_ca("");
        let error = builder.endpoint().unwrap_err().to_string();
        assert!(error.contains("only https:// uses them"), "{error}");
    }

    #[test]
    fn secrets_are_not_shown() {
        let builder = Client::builder("localhost:1")
            .metadata("x-key", "t0ps3cret")
            .token("t0ps3cret")
            .tls_identity("", "t0ps3cret");
        let shown = format!("{builder:?}");
        assert!(!shown.contains("t0ps3cret"), "{shown}");
    }

    #[tokio::test]
    async fn a_client_does_not_show_its_token() {
        let builder = Client::builder("localhost:1").token("t0ps3cret");
        let client = builder.connect_lazy().unwrap();
        assert!(!format!("{client:?}").contains("t0ps3cret"));
        let builder = Client::builder("localhost:1").token("t0ps3cret\n");
        let error = builder.connect_lazy().unwrap_err().to_string();
        assert!(error.starts_with("invalid token") && !error.contains("t0ps3cret"));
    }

    #[test]
    fn what_is_no_address_is_named() {
        let error = resolved("ftp://localhost:8001").unwrap_err();
        assert!(error.contains("\"ftp\" is not spoken here"), "{error}");
        let error = resolved("http://").unwrap_err();
        assert!(error.contains("expected http://HOST:PORT"), "{error}");
    }

    #[tokio::test]
    async fn metadata_is_checked_before_connecting() {
        let builder = Client::builder("localhost:1").metadata("bad key", "x");
        let error = builder.connect_lazy().unwrap_err().to_string();
        assert!(
            error.starts_with("invalid metadata key \"bad key\""),
            "{error}"
        );
    }
}

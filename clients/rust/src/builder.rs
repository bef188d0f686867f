//! Settings of a client.

use std::sync::Arc;
use std::time::Duration;

use tonic::codec::CompressionEncoding;
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue, MetadataMap};
use tonic::transport::{Channel, Endpoint};

use crate::client::{Client, Settings};
use crate::error::ClientError;
use crate::pb::grpc_inference_service_client::GrpcInferenceServiceClient;
use crate::retry::RetryPolicy;

/// HTTP/2 windows that keep a tensor of megabytes from stopping for every 64 KiB.
const STREAM_WINDOW: u32 = 8 << 20;
const CONNECTION_WINDOW: u32 = 32 << 20;

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
    metadata: Vec<(String, String)>,
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
        self.metadata.push((key.into(), value.into()));
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
        let url = match self.url.split_once("://") {
            None => format!("http://{}", self.url),
            Some(("http", _)) => self.url.clone(),
            Some(("grpc", rest)) => format!("http://{rest}"),
            Some((scheme, _)) => {
                let reason =
                    format!("{scheme:?} is not spoken here, only http:// (plain-text gRPC)");
                return Err(invalid(reason));
            }
        };
        let endpoint = Endpoint::from_shared(url.clone())
            .map_err(|error| invalid(format!("{error}; expected http://HOST:PORT")))?
            .connect_timeout(self.connect_timeout)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            // Not HTTP/2 pings: gRPC servers hang up on clients that ping through a long silence.
            .tcp_keepalive(Some(Duration::from_secs(60)));
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
            let value = AsciiMetadataValue::try_from(value.as_str())
                .map_err(|error| invalid("metadata value", value, error.to_string()))?;
            metadata.append(name, value);
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
    fn what_is_no_address_is_named() {
        let error = resolved("https://localhost:8001").unwrap_err();
        assert!(error.contains("\"https\" is not spoken here"), "{error}");
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

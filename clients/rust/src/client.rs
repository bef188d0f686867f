//! The client: one method per call of the protocol.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use crate::builder::ClientBuilder;
use crate::error::ClientError;
use crate::infer::{InferRequest, InferResponse};
use crate::pb::grpc_inference_service_client::GrpcInferenceServiceClient;
use crate::retry::{self, RetryPolicy};

/// A year: longer ones cannot be told to a server, and would overflow the clock.
pub(crate) const LONGEST_DEADLINE: Duration = Duration::from_secs(365 * 24 * 60 * 60);

pub(crate) type Stub = GrpcInferenceServiceClient<Channel>;

/// A connection to a server. Cheap to clone; clones share the connection, which is made again
/// when it breaks.
///
/// ```no_run
/// use dormouse_client::Client;
///
/// # async fn example() -> Result<(), dormouse_client::ClientError> {
/// let client = Client::connect("http://127.0.0.1:8001").await?;
/// let server = client.server_metadata().await?;
/// println!("{} {}", server.name, server.version);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Client {
    pub(crate) stub: Stub,
    pub(crate) settings: Arc<Settings>,
}

/// What every call of a client has in common.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) url: String,
    pub(crate) deadline: Option<Duration>,
    pub(crate) retry: RetryPolicy,
    pub(crate) metadata: MetadataMap,
    pub(crate) max_message_size: usize,
}

impl Client {
    /// Connects with the default settings.
    pub async fn connect(url: impl Into<String>) -> Result<Self, ClientError> {
        Self::builder(url).connect().await
    }

    /// Starts from the default settings. The address is `http://HOST:PORT`.
    pub fn builder(url: impl Into<String>) -> ClientBuilder {
        ClientBuilder::new(url.into())
    }

    /// The address of the server.
    pub fn url(&self) -> &str {
        &self.settings.url
    }

    /// Runs a model once, waking it if it sleeps. Dropping the future cancels the request.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use dormouse_client::{Client, InferRequest, Tensor};
    ///
    /// # async fn example(client: Client) -> Result<(), dormouse_client::ClientError> {
    /// let request = InferRequest::new("add")
    ///     .input("a", Tensor::from_slice([2], &[1i64, 2])?)
    ///     .input("b", Tensor::from_slice([2], &[3i64, 4])?)
    ///     .deadline(Duration::from_millis(200));
    /// let sum = client.infer(request).await?.output("sum")?.to_vec::<i64>()?;
    /// # drop(sum);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn infer(&self, request: InferRequest) -> Result<InferResponse, ClientError> {
        self.settings.check_size(request.message())?;
        let options = CallOptions {
            deadline: request.call_deadline().or(self.settings.deadline),
            retry: if request.is_in_sequence() {
                RetryPolicy::NEVER
            } else {
                self.settings.retry
            },
        };
        let response = self
            .call(
                options,
                request.into_message(),
                |mut stub, request| async move { stub.model_infer(request).await },
            )
            .await?;
        InferResponse::from_call(response)
    }

    /// Sends a call with the client's deadline and retries.
    pub(crate) async fn simple_call<M, R, F>(
        &self,
        message: M,
        send: impl Fn(Stub, Request<M>) -> F,
    ) -> Result<R, ClientError>
    where
        M: Clone,
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let options = CallOptions {
            deadline: self.settings.deadline,
            retry: self.settings.retry,
        };
        let response = self.call(options, message, send).await?;
        Ok(response.into_inner())
    }

    async fn call<M, R, F>(
        &self,
        options: CallOptions,
        message: M,
        send: impl Fn(Stub, Request<M>) -> F,
    ) -> Result<Response<R>, ClientError>
    where
        M: Clone,
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let Some(limit) = options.deadline else {
            return self.attempts(options, None, message, send).await;
        };
        let limit = limit.min(LONGEST_DEADLINE);
        let ends = Instant::now() + limit;
        match tokio::time::timeout_at(ends, self.attempts(options, Some(ends), message, send)).await
        {
            Ok(result) => result,
            Err(_) => Err(ClientError::Deadline {
                after: limit,
                message: String::new(),
            }),
        }
    }

    async fn attempts<M, R, F>(
        &self,
        options: CallOptions,
        ends: Option<Instant>,
        message: M,
        send: impl Fn(Stub, Request<M>) -> F,
    ) -> Result<Response<R>, ClientError>
    where
        M: Clone,
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let mut attempt = 1;
        loop {
            let mut request = Request::new(message.clone());
            *request.metadata_mut() = self.settings.metadata.clone();
            if let Some(ends) = ends {
                // The server is told what is left, not what the call began with.
                request.set_timeout(ends.saturating_duration_since(Instant::now()));
            }
            let status = match send(self.stub.clone(), request).await {
                Ok(response) => return Ok(response),
                Err(status) => status,
            };
            let random = retry::random_fraction();
            let wait = options.retry.wait_after(attempt, &status, random);
            match wait {
                Some(wait) if ends.is_none_or(|ends| Instant::now() + wait < ends) => {
                    tokio::time::sleep(wait).await;
                    attempt += 1;
                }
                _ => return Err(self.settings.failure(status, options.deadline)),
            }
        }
    }
}

/// How one call is made.
#[derive(Clone, Copy, Debug)]
struct CallOptions {
    deadline: Option<Duration>,
    retry: RetryPolicy,
}

impl Settings {
    /// Says so before sending: on the wire an oversized message only looks like a broken stream.
    pub(crate) fn check_size(&self, message: &impl prost::Message) -> Result<(), ClientError> {
        let (bytes, limit) = (message.encoded_len(), self.max_message_size);
        if bytes > limit {
            return Err(ClientError::TooLarge { bytes, limit });
        }
        Ok(())
    }

    /// What a status means to the caller.
    pub(crate) fn failure(&self, status: Status, deadline: Option<Duration>) -> ClientError {
        if caused_by::<tonic::ConnectError>(&status) {
            return ClientError::Connect {
                url: self.url.clone(),
                source: innermost(&status).into(),
            };
        }
        let expired_here = caused_by::<tonic::TimeoutExpired>(&status);
        match deadline {
            Some(after) if expired_here || status.code() == Code::DeadlineExceeded => {
                ClientError::Deadline {
                    after,
                    message: if expired_here {
                        String::new()
                    } else {
                        status.message().to_owned()
                    },
                }
            }
            _ => ClientError::Status {
                code: status.code(),
                retry_after: retry::retry_after(&status),
                message: match status.message() {
                    "" => "the server gave no reason".to_owned(),
                    message => message.to_owned(),
                },
            },
        }
    }
}

fn caused_by<E: Error + 'static>(status: &Status) -> bool {
    causes(status).any(|error| error.is::<E>())
}

/// The words of the operating system, below the transport's layers.
fn innermost(status: &Status) -> String {
    causes(status)
        .last()
        .map_or_else(|| status.message().to_owned(), ToString::to_string)
}

fn causes(status: &Status) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(status.source(), |&error| error.source())
}

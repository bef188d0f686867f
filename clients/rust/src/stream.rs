//! Many requests and responses over one call.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::client::{Client, LONGEST_DEADLINE, Settings};
use crate::error::ClientError;
use crate::infer::{InferRequest, InferResponse};
use crate::pb;

type Responses = Streaming<pb::ModelStreamInferResponse>;

/// Settings of a stream.
///
/// ```
/// use std::time::Duration;
/// use dormouse_client::StreamOptions;
///
/// let options = StreamOptions { deadline: Some(Duration::from_secs(60)), ..Default::default() };
/// assert_eq!(options.unsent_requests, 16);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct StreamOptions {
    /// The time the whole stream has; none unless set.
    pub deadline: Option<Duration>,
    /// How many requests may wait to be sent before [`InferSender::send`] waits; at least 1.
    pub unsent_requests: usize,
}

impl Default for StreamOptions {
    fn default() -> Self {
        Self {
            deadline: None,
            unsent_requests: 16,
        }
    }
}

/// An open stream: requests go in, responses come out, in an order of the server's choice.
///
/// Deadlines of single requests do not apply here, nor do retries. Dropping it cancels what is
/// under way.
///
/// ```no_run
/// use dormouse_client::{Client, ClientError, InferRequest, Tensor};
///
/// # async fn example(client: Client) -> Result<(), ClientError> {
/// let mut stream = client.stream();
/// for id in 0..3 {
///     let input = Tensor::from_slice([1], &[id as f32])?;
///     stream.send(InferRequest::new("double").id(id.to_string()).input("x", input)).await?;
/// }
/// stream.finish();
/// while let Some(response) = stream.next().await {
///     match response {
///         Ok(response) => println!("{}: {:?}", response.id(), response.output("y")?),
///         Err(ClientError::Request { id, message }) => eprintln!("{id}: {message}"),
///         Err(error) => return Err(error),
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct InferStream {
    sender: Option<InferSender>,
    receiver: InferReceiver,
}

/// The half of a stream that requests go into. Clones send on the same stream; it is finished
/// when the last one is dropped.
#[derive(Clone, Debug)]
pub struct InferSender {
    requests: mpsc::Sender<pb::ModelInferRequest>,
    settings: Arc<Settings>,
}

/// The half of a stream that responses come out of. Dropping it cancels what is under way.
#[derive(Debug)]
pub struct InferReceiver {
    state: State,
    settings: Arc<Settings>,
    deadline: Option<Duration>,
}

#[derive(Debug)]
enum State {
    Opening(JoinHandle<Result<Response<Responses>, Status>>),
    Open(Box<Responses>),
    Ended,
}

impl Client {
    /// Opens a stream without a deadline. Must be called within a tokio runtime.
    ///
    /// Returns at once: some servers say nothing before the first response, so a stream that
    /// cannot be opened tells so when it is read.
    pub fn stream(&self) -> InferStream {
        self.stream_with(StreamOptions::default())
    }

    /// Opens a stream. Must be called within a tokio runtime.
    pub fn stream_with(&self, options: StreamOptions) -> InferStream {
        let (requests, unsent) = mpsc::channel(options.unsent_requests.max(1));
        let mut request = Request::new(ReceiverStream::new(unsent));
        *request.metadata_mut() = self.settings.metadata.clone();
        if let Some(deadline) = options.deadline {
            request.set_timeout(deadline.min(LONGEST_DEADLINE));
        }
        let mut stub = self.stub.clone();
        let opening = tokio::spawn(async move { stub.model_stream_infer(request).await });
        InferStream {
            sender: Some(InferSender {
                requests,
                settings: self.settings.clone(),
            }),
            receiver: InferReceiver {
                state: State::Opening(opening),
                settings: self.settings.clone(),
                deadline: options.deadline,
            },
        }
    }
}

impl InferStream {
    /// Sends a request, waiting while too many are unsent.
    pub async fn send(&self, request: InferRequest) -> Result<(), ClientError> {
        match &self.sender {
            Some(sender) => sender.send(request).await,
            None => Err(ClientError::StreamClosed),
        }
    }

    /// Says that no more requests follow; responses still come.
    pub fn finish(&mut self) {
        self.sender = None;
    }

    /// The next response, none at the end. After [`ClientError::Request`] and
    /// [`ClientError::Tensor`] the stream goes on, after any other error it has ended.
    pub async fn next(&mut self) -> Option<Result<InferResponse, ClientError>> {
        self.receiver.next().await
    }

    /// Takes the stream apart, to send and receive in different tasks. There is no sender after
    /// [`InferStream::finish`].
    pub fn split(self) -> (Option<InferSender>, InferReceiver) {
        (self.sender, self.receiver)
    }
}

impl InferSender {
    /// Sends a request, waiting while too many are unsent.
    pub async fn send(&self, request: InferRequest) -> Result<(), ClientError> {
        self.settings.check_size(request.message())?;
        let sent = self.requests.send(request.into_message());
        sent.await.map_err(|_| ClientError::StreamClosed)
    }
}

impl InferReceiver {
    /// The next response, none at the end; see [`InferStream::next`].
    pub async fn next(&mut self) -> Option<Result<InferResponse, ClientError>> {
        if let State::Opening(opening) = &mut self.state {
            let opened = opening.await;
            match opened {
                Ok(Ok(responses)) => self.state = State::Open(Box::new(responses.into_inner())),
                Ok(Err(status)) => return self.ended_by(status),
                // The task neither panics nor is stopped while this half exists.
                Err(error) => return self.ended_by(Status::internal(error.to_string())),
            }
        }
        let State::Open(responses) = &mut self.state else {
            return None;
        };
        match responses.next().await {
            Some(Ok(message)) => Some(answer(message)),
            Some(Err(status)) => self.ended_by(status),
            None => {
                self.state = State::Ended;
                None
            }
        }
    }

    fn ended_by<T>(&mut self, status: Status) -> Option<Result<T, ClientError>> {
        self.state = State::Ended;
        Some(Err(self.settings.failure(status, self.deadline)))
    }
}

impl Drop for InferReceiver {
    fn drop(&mut self) {
        if let State::Opening(opening) = &self.state {
            opening.abort();
        }
    }
}

fn answer(message: pb::ModelStreamInferResponse) -> Result<InferResponse, ClientError> {
    if !message.error_message.is_empty() {
        return Err(ClientError::Request {
            id: message
                .infer_response
                .map(|inner| inner.id)
                .unwrap_or_default(),
            message: message.error_message,
        });
    }
    let response = message.infer_response.ok_or_else(|| {
        ClientError::Protocol("a stream response with neither answer nor error".to_owned())
    });
    InferResponse::from_message(response?)
}

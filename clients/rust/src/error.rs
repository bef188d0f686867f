//! Why a call got no answer.

use std::time::Duration;

use tonic::Code;

use crate::datatype::DataType;

/// Why a call got no answer.
///
/// ```no_run
/// use dormouse_client::{Client, ClientError, Code};
///
/// # async fn example(client: Client) -> Result<(), ClientError> {
/// match client.load("bert").await {
///     Ok(()) => {}
///     Err(ClientError::Connect { url, .. }) => eprintln!("nobody listens at {url}"),
///     Err(error) if error.code() == Some(Code::NotFound) => eprintln!("no such model"),
///     Err(error) => return Err(error),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The address, a metadata key or another setting of the client cannot be used.
    #[error("invalid {setting} {value:?}: {reason}")]
    Setting {
        /// What was set.
        setting: &'static str,
        /// What it was set to.
        value: String,
        /// Why it cannot be used.
        reason: String,
    },
    /// No connection to the server could be made.
    #[error("cannot connect to {url}")]
    Connect {
        /// The address that was tried.
        url: String,
        /// What the transport says.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The server answered with an error, or the connection broke.
    #[error("{message} ({code:?})")]
    Status {
        /// The gRPC code.
        code: Code,
        /// The server's words.
        message: String,
        /// When the server says that trying again makes sense.
        retry_after: Option<Duration>,
    },
    /// The deadline of the call passed, or the server said that it cannot be met.
    #[error("no answer within the deadline of {after:?}{}{message}", if message.is_empty() { "" } else { ": " })]
    Deadline {
        /// The time the call had.
        after: Duration,
        /// The server's words, empty when the deadline passed here.
        message: String,
    },
    /// One request of a stream failed; the stream goes on.
    #[error("request {id:?} of the stream failed: {message}")]
    Request {
        /// The request's id, empty when the server did not tell.
        id: String,
        /// The server's words.
        message: String,
    },
    /// The request is larger than the client may send.
    #[error("the request takes {bytes} bytes, more than the {limit} allowed")]
    TooLarge {
        /// The size of the message.
        bytes: usize,
        /// The largest that may be sent.
        limit: usize,
    },
    /// The server closed the stream, so nothing more can be sent on it.
    #[error("the stream is closed")]
    StreamClosed,
    /// A tensor is not what was expected, or cannot be built from what was given.
    #[error("tensor {name:?}: {source}")]
    Tensor {
        /// The tensor's name.
        name: String,
        /// What is wrong with it.
        source: TensorError,
    },
    /// A tensor that has no name yet is wrong.
    #[error(transparent)]
    Value(#[from] TensorError),
    /// The response has no output of that name.
    #[error("the response has no output {name:?}; it has {}", list(available))]
    NoOutput {
        /// The name that was asked for.
        name: String,
        /// The outputs that are there.
        available: Vec<String>,
    },
    /// The server's answer breaks the protocol.
    #[error("the server's answer breaks the protocol: {0}")]
    Protocol(String),
}

impl ClientError {
    /// The gRPC code, for errors that have one.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Status { code, .. } => Some(*code),
            Self::Deadline { .. } => Some(Code::DeadlineExceeded),
            Self::Connect { .. } => Some(Code::Unavailable),
            _ => None,
        }
    }

    /// When the server says that trying again makes sense.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    }
}

/// What is wrong with a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The name of the element type is none of the protocol's.
    #[error("unknown element type {name:?}")]
    UnknownDataType {
        /// The name that came.
        name: String,
    },
    /// A dimension is negative, or there are more elements than a tensor can have.
    #[error(
        "shape {shape:?} is not that of a tensor: dimensions must be at least 0 and their product must fit"
    )]
    Shape {
        /// The shape that came.
        shape: Vec<i64>,
    },
    /// The shape asks for another number of elements.
    #[error("shape {shape:?} has {expected} elements, {actual} were given")]
    ElementCount {
        /// The tensor's shape.
        shape: Vec<i64>,
        /// How many elements that is.
        expected: usize,
        /// How many there are.
        actual: usize,
    },
    /// The shape and the element type ask for another number of bytes.
    #[error("{datatype} {shape:?} takes {expected} bytes, {actual} were given")]
    ByteCount {
        /// The element type.
        datatype: DataType,
        /// The tensor's shape.
        shape: Vec<i64>,
        /// How many bytes that is.
        expected: usize,
        /// How many there are.
        actual: usize,
    },
    /// An element of a BYTES tensor says that it is longer than the data.
    #[error("element {index} of the BYTES data reaches beyond its end")]
    Truncated {
        /// Which element.
        index: usize,
    },
    /// An element of a BYTES tensor has more bytes than its length field can tell.
    #[error("element {index} has {length} bytes, more than a BYTES element can have")]
    ElementTooLong {
        /// Which element.
        index: usize,
        /// Its length.
        length: usize,
    },
    /// The elements were asked for as another type.
    #[error("holds {actual}, not {expected}")]
    WrongType {
        /// What was asked for.
        expected: DataType,
        /// What the tensor holds.
        actual: DataType,
    },
    /// An element of a BYTES tensor is not text.
    #[error("element {index} is not UTF-8")]
    NotText {
        /// Which element.
        index: usize,
    },
    /// A typed value does not fit the element type.
    #[error("element {index} ({value}) does not fit {datatype}")]
    OutOfRange {
        /// Which element.
        index: usize,
        /// The value.
        value: i64,
        /// The element type.
        datatype: DataType,
    },
    /// The element type can only be sent as raw bytes.
    #[error("{datatype} has no typed contents; it must be sent as raw bytes")]
    NoTypedContents {
        /// The element type.
        datatype: DataType,
    },
}

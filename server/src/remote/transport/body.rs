//! An answer's body: never waits longer than it may for its next piece, and never grows longer.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use object_store::client::{HttpError, HttpErrorKind};
use tokio::time::{Instant, Sleep};

use crate::remote::error::{ErrorKind, RemoteError, printable};

#[derive(Debug)]
pub(super) struct TimedBody {
    body: Incoming,
    patience: Duration,
    deadline: Pin<Box<Sleep>>,
    left: u64,
}

impl TimedBody {
    pub(super) fn new(body: Incoming, patience: Duration, most: u64) -> Self {
        Self {
            body,
            patience,
            deadline: Box::pin(tokio::time::sleep(patience)),
            left: most,
        }
    }
}

impl Body for TimedBody {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let this = &mut *self;
        let failed = |kind, message: String| {
            let error = RemoteError::new(kind, message);
            Poll::Ready(Some(Err(HttpError::new(HttpErrorKind::Interrupted, error))))
        };
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(context) {
            let deadline = Instant::now() + this.patience;
            this.deadline.as_mut().reset(deadline);
            return match frame {
                None => Poll::Ready(None),
                Some(Ok(frame)) => {
                    let length = frame.data_ref().map_or(0, Bytes::len) as u64;
                    let Some(left) = this.left.checked_sub(length) else {
                        return failed(
                            ErrorKind::Malformed,
                            "an answer is longer than what was asked for".to_owned(),
                        );
                    };
                    this.left = left;
                    Poll::Ready(Some(Ok(frame)))
                }
                Some(Err(error)) => failed(
                    ErrorKind::Interrupted,
                    format!("the connection broke: {}", printable(&error.to_string())),
                ),
            };
        }
        ready!(this.deadline.as_mut().poll(context));
        failed(
            ErrorKind::Interrupted,
            format!("nothing came for {:?}", this.patience),
        )
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

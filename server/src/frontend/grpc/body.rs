//! Bodies that do not wait for ever.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use http_body::{Body, Frame, SizeHint};
use tokio::time::Sleep;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::Status;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A request body that fails when its client sends nothing for a while.
#[derive(Debug)]
pub(super) struct Steady<B> {
    body: B,
    patience: Duration,
    /// Only there while we wait.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<B> Steady<B> {
    pub(super) fn new(body: B, patience: Duration) -> Self {
        Self {
            body,
            patience,
            waiting: None,
        }
    }
}

impl<B> Body for Steady<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            this.waiting = None;
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let patience = this.patience;
        let waiting = this
            .waiting
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        waiting.as_mut().poll(cx).map(|()| {
            let status = Status::deadline_exceeded(format!(
                "the rest of the request did not come: nothing received for {} s",
                patience.as_secs_f32()
            ));
            Some(Err(status.into()))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A response body of a call that may last for ever: ends as unavailable when the server stops.
pub(super) struct Stoppable {
    /// None once it has ended.
    body: Option<tonic::body::Body>,
    stop: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Stoppable {
    pub(super) fn new(body: tonic::body::Body, shutdown: &CancellationToken) -> Self {
        Self {
            body: Some(body),
            stop: Box::pin(shutdown.clone().cancelled_owned()),
        }
    }
}

impl Body for Stoppable {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let Some(body) = &mut this.body else {
            return Poll::Ready(None);
        };
        if let ready @ Poll::Ready(_) = Pin::new(body).poll_frame(cx) {
            return ready;
        }
        this.stop.as_mut().poll(cx).map(|()| {
            this.body = None;
            let mut trailers = HeaderMap::with_capacity(2);
            trailers.insert("grpc-status", (tonic::Code::Unavailable as i32).into());
            trailers.insert(
                "grpc-message",
                HeaderValue::from_static("the server is shutting down"),
            );
            Some(Ok(Frame::trailers(trailers)))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }
}

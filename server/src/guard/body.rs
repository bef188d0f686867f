//! Bodies of requests that a quota counts, and answers that hold its permit to their end.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::quota::Permit;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A request's body, counted where there is a permit.
#[derive(Debug)]
pub(crate) struct Counted<B> {
    body: B,
    permit: Option<Arc<Permit>>,
}

impl<B> Counted<B> {
    pub(super) fn new(body: B, permit: Option<Arc<Permit>>) -> Self {
        Self { body, permit }
    }
}

/// Told to whoever reads the body; its client gets the guard's own words.
#[derive(Debug, thiserror::Error)]
#[error("the client has too many bytes under way")]
struct TooMuch;

impl<B> Body for Counted<B>
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
        let frame = Pin::new(&mut this.body).poll_frame(cx);
        if let Some(permit) = &this.permit
            && let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(data) = frame.data_ref()
            && !permit.receive(data.len() as u64)
        {
            return Poll::Ready(Some(Err(TooMuch.into())));
        }
        frame.map(|frame| frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An answer that counts as under way until it was sent.
#[derive(Debug)]
pub(super) struct Held<B> {
    pub(super) body: B,
    pub(super) _permit: Arc<Permit>,
}

impl<B: Body + Unpin> Body for Held<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

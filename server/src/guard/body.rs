//! Bodies of requests that a quota counts, and answers that hold its permit to their end.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::quota::{Arriving, Permit};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A request's body, counted where somebody wants to know.
#[derive(Debug)]
pub(crate) struct Counted<B> {
    body: B,
    meter: Meter,
}

/// Who counts the bytes of a body.
#[derive(Clone, Debug, Default)]
pub(super) enum Meter {
    #[default]
    Nobody,
    /// All of them belong to one request.
    Request(Arc<Permit>),
    /// They become requests, one after the other.
    Stream(Arc<Arriving>),
}

impl Meter {
    fn receive(&self, bytes: u64) -> Result<(), BoxError> {
        match self {
            Self::Request(permit) if !permit.receive(bytes) => Err(TooMuch.into()),
            Self::Stream(arriving) => arriving
                .receive(bytes)
                // Nobody replaces what a stream says of its own end.
                .map_err(|refusal| refusal.status().into()),
            Self::Nobody | Self::Request(_) => Ok(()),
        }
    }
}

impl<B> Counted<B> {
    pub(super) fn new(body: B, meter: Meter) -> Self {
        Self { body, meter }
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
        if !matches!(this.meter, Meter::Nobody)
            && let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(data) = frame.data_ref()
            && let Err(error) = this.meter.receive(data.len() as u64)
        {
            return Poll::Ready(Some(Err(error)));
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

//! Bodies that do not wait for ever.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use http_body::{Body, Frame, SizeHint};
use tokio::time::Sleep;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::Status;

use crate::frontend::status::to_status;
use crate::host::{InFlight, Receiving};
use crate::limits::Limit;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Bytes that count as progress: fewer than these within the time limit is a stalled client.
const PROGRESS: usize = 32 << 10;
/// What is before each message: whether it is compressed, and its length.
const PREFIX: usize = 5;

/// A request body that fails when its client stops, or trickles, in the middle of a message, and
/// whose messages count as bytes in flight while they arrive.
#[derive(Debug)]
pub(super) struct Steady<B> {
    body: B,
    patience: Duration,
    waits: Waits,
    message: Message,
    /// Received since `waiting` began.
    progress: usize,
    /// Only there while we wait.
    waiting: Option<Pin<Box<Sleep>>>,
    receiving: Receiving,
    /// The most that there was of the one message.
    most_held: usize,
}

/// Whether a client may take its time between messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waits {
    /// One message is expected, now.
    OneNow,
    /// Messages are small and may come at any time, but not much later.
    Steadily,
    /// A message may begin whenever the client likes.
    Forever,
}

/// How much of a message has come.
#[derive(Debug, Default)]
struct Message {
    prefix: [u8; PREFIX],
    /// Of the prefix and then of the message itself.
    received: usize,
}

impl Message {
    /// Bytes of a message that are there while others are missing.
    fn held(&self) -> usize {
        self.received.saturating_sub(PREFIX)
    }

    fn is_begun(&self) -> bool {
        self.received > 0
    }

    /// How long it says that it is, once it does.
    fn announced(&self) -> u64 {
        let [_, length @ ..] = self.prefix;
        match self.received {
            ..PREFIX => 0,
            _ => u32::from_be_bytes(length).into(),
        }
    }

    /// Takes note of more bytes: of this message and of those that follow it.
    fn receive(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.received < PREFIX {
                let length = bytes.len().min(PREFIX - self.received);
                let (prefix, rest) = bytes.split_at(length);
                self.prefix[self.received..][..length].copy_from_slice(prefix);
                self.received += length;
                bytes = rest;
                if self.received < PREFIX {
                    return;
                }
            }
            let [_, length @ ..] = self.prefix;
            let whole = u32::from_be_bytes(length) as usize + PREFIX;
            let length = bytes.len().min(whole - self.received);
            bytes = &bytes[length..];
            self.received += length;
            if self.received == whole {
                self.received = 0;
            }
        }
    }
}

impl<B> Steady<B> {
    pub(super) fn new(body: B, patience: Duration, waits: Waits) -> Self {
        Self {
            body,
            patience,
            waits,
            message: Message::default(),
            progress: 0,
            waiting: None,
            receiving: Receiving::default(),
            most_held: 0,
        }
    }

    /// The same, its messages counted while they arrive.
    pub(super) fn counted(self, in_flight: Option<&Arc<InFlight>>) -> Self {
        Self {
            receiving: Receiving::new(in_flight),
            ..self
        }
    }

    fn received(&mut self, data: &[u8]) -> Result<(), Status> {
        self.message.receive(data);
        self.progress += data.len();
        if self.progress >= PROGRESS || self.waits == Waits::Steadily || !self.message.is_begun() {
            self.progress = 0;
            self.waiting = None;
        }
        let mut held = self.message.held();
        if self.waits == Waits::OneNow {
            // There is no other, so that what has come of it is there until all is.
            held = held.max(self.most_held);
            self.most_held = held;
        }
        let held = self.receiving.hold(held, self.message.announced());
        held.map_err(|error| to_status(&error))
    }

    #[cold]
    fn stalled(&self) -> Status {
        Limit::BodyTime.refuse();
        Status::deadline_exceeded(format!(
            "the rest of the request did not come: fewer than {PROGRESS} bytes received for {} s",
            self.patience.as_secs_f32()
        ))
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
            if let Some(Ok(frame)) = &frame
                && let Some(data) = frame.data_ref()
                && let Err(status) = this.received(data)
            {
                return Poll::Ready(Some(Err(status.into())));
            }
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        if this.waits == Waits::Forever && !this.message.is_begun() {
            return Poll::Pending;
        }
        let patience = this.patience;
        let waiting = this
            .waiting
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        match waiting.as_mut().poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => Poll::Ready(Some(Err(this.stalled().into()))),
        }
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

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use dormouse_core::id::ByteSize;
    use futures_util::stream::{self, StreamExt};
    use http_body_util::{BodyExt, StreamBody};
    use tokio::time::Instant;

    use super::*;

    /// Bytes of a message of `length`, in frames of at most `pieces`.
    fn message(length: u32, pieces: usize) -> Vec<Vec<u8>> {
        let mut bytes = vec![0];
        bytes.extend(length.to_be_bytes());
        bytes.resize(PREFIX + length as usize, 7);
        bytes.chunks(pieces).map(<[u8]>::to_vec).collect()
    }

    /// Sends a frame each `pause`, then nothing more.
    fn sent(
        frames: Vec<Vec<u8>>,
        pause: Duration,
    ) -> impl Body<Data = Bytes, Error = Infallible> + Unpin {
        let frames = stream::iter(frames).then(move |frame| async move {
            tokio::time::sleep(pause).await;
            Ok(Frame::data(Bytes::from(frame)))
        });
        StreamBody::new(Box::pin(frames.chain(stream::pending())))
    }

    /// Reads until the body fails; the bytes that came before, and why it did.
    async fn failure<B>(mut body: Steady<B>) -> (usize, Status)
    where
        B: Body<Data = Bytes, Error = Infallible> + Unpin,
    {
        let mut read = 0;
        loop {
            match body.frame().await.expect("it does not end") {
                Ok(frame) => read += frame.data_ref().map_or(0, Bytes::len),
                Err(error) => return (read, *error.downcast().unwrap()),
            }
        }
    }

    const PATIENCE: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn a_message_that_trickles_is_given_up_like_one_that_stops() {
        for pause in [Duration::from_secs(1), PATIENCE * 2] {
            let started = Instant::now();
            let before = Limit::BodyTime.refusals();
            let body = sent(message(100_000, 100), pause);
            let (_, status) = failure(Steady::new(body, PATIENCE, Waits::OneNow)).await;
            assert_eq!(status.code(), tonic::Code::DeadlineExceeded);
            assert_eq!(started.elapsed().as_secs(), 30);
            assert!(Limit::BodyTime.refusals() > before);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_that_gets_on_may_take_long() {
        // 10 KiB each second, for 100 seconds.
        let body = sent(message(1_024_000, 10_240), Duration::from_secs(1));
        let (read, _) = failure(Steady::new(body, PATIENCE, Waits::OneNow)).await;
        assert_eq!(read, 1_024_000 + PREFIX);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_may_pause_between_messages_and_not_within_one() {
        let mut frames = message(20, 1000);
        frames.extend(message(70_000, 40_000));
        frames.extend(message(50, 1000));
        let day = Duration::from_secs(86_400);
        // Whole messages, an hour apart.
        let body = sent(
            vec![message(20, 1000).concat(); 5],
            Duration::from_secs(3600),
        );
        let mut body = Steady::new(body, PATIENCE, Waits::Forever);
        for _ in 0..5 {
            body.frame().await.unwrap().unwrap();
        }
        assert!(tokio::time::timeout(day, body.frame()).await.is_err());
        // An hour in the middle of the second message.
        let body = sent(frames, Duration::from_secs(3600));
        let (read, status) = failure(Steady::new(body, PATIENCE, Waits::Forever)).await;
        assert_eq!(read, 25 + 40_000);
        assert_eq!(status.code(), tonic::Code::DeadlineExceeded);
    }

    #[tokio::test]
    async fn a_message_on_its_way_counts_as_bytes_in_flight_until_it_is_there() {
        let in_flight = InFlight::new(ByteSize::mib(3));
        let _others = in_flight.reserve(1 << 19).unwrap();
        let mut frames = message(2 << 20, 1 << 20);
        frames.extend(message(3 << 20, 1 << 20));
        let body = sent(frames, Duration::ZERO);
        let body = Steady::new(body, PATIENCE, Waits::Forever).counted(Some(&in_flight));
        let before = Limit::BytesInFlight.refusals();
        let (read, status) = failure(body).await;
        assert_eq!(status.code(), tonic::Code::Unavailable, "{status}");
        assert!(read >= 2 << 20, "{read}");
        assert_eq!(in_flight.used(), 1 << 19);
        assert!(Limit::BytesInFlight.refusals() > before);
    }

    #[tokio::test]
    async fn the_only_message_of_a_call_counts_until_it_is_taken_over() {
        let in_flight = InFlight::new(ByteSize::mib(3));
        let body = sent(message(1 << 20, 1 << 18), Duration::ZERO);
        let body = Steady::new(body, PATIENCE, Waits::OneNow);
        let mut body = body.counted(Some(&in_flight));
        let mut read = 0;
        while read < PREFIX + (1 << 20) {
            let frame = body.frame().await.unwrap().unwrap();
            read += frame.data_ref().map_or(0, Bytes::len);
        }
        assert!(in_flight.used() > 3 << 18, "{}", in_flight.used());
        drop(body);
        assert_eq!(in_flight.used(), 0);
    }

    #[tokio::test]
    async fn a_message_that_never_fits_is_refused_before_it_has_come() {
        let in_flight = InFlight::new(ByteSize::mib(3));
        let _others = in_flight.reserve(3 << 20).unwrap();
        let body = sent(message(4 << 20, 1 << 18), Duration::ZERO);
        let body = Steady::new(body, PATIENCE, Waits::OneNow);
        let (read, status) = failure(body.counted(Some(&in_flight))).await;
        assert_eq!(read, 0);
        assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
    }
}

//! A connection that gives up on clients which begin a request and do not go on.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::coop::has_budget_remaining;
use tokio::time::{Instant, Sleep};

use super::frames::Frames;
use crate::limits::Limit;

/// How long, and how much, of what a client still sends is dropped unread after the last answer.
/// Closing at once would reset the connection, and the client might lose the answer.
const LINGER_TIME: Duration = Duration::from_secs(5);
const LINGER_BYTES: usize = 256 << 20;

/// How an HTTP/2 connection begins.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The requests of one connection whose headers are complete.
#[derive(Clone, Debug, Default)]
pub(in crate::frontend) struct Requests {
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    begun: AtomicU64,
    ended: AtomicU64,
    speak_http2: AtomicBool,
    streams_opened: AtomicU64,
    streams_closed: AtomicU64,
    ran_out: AtomicBool,
}

/// A request that is being answered until this is dropped.
#[derive(Debug)]
pub(super) struct UnderWay {
    counts: Arc<Counts>,
}

impl Requests {
    /// Whether they come over HTTP/2, as far as is known yet.
    pub(super) fn speak_http2(&self) -> bool {
        self.counts.speak_http2.load(Ordering::Relaxed)
    }

    /// Counts that their client had no time left; once, however many clocks were watching it.
    pub(super) fn run_out(&self, limit: Limit) {
        if !self.counts.ran_out.swap(true, Ordering::Relaxed) {
            limit.refuse();
        }
    }

    fn begin_http2(&self) {
        self.counts.speak_http2.store(true, Ordering::Relaxed);
    }

    /// Counts requests over HTTP/2. They are open until their answers are sent to the end.
    pub(in crate::frontend) fn open_streams(&self, count: usize) {
        let opened = &self.counts.streams_opened;
        opened.fetch_add(count as u64, Ordering::Relaxed);
    }

    pub(in crate::frontend) fn close_stream(&self) {
        self.counts.streams_closed.fetch_add(1, Ordering::Relaxed);
    }

    pub(in crate::frontend) fn streams_opened(&self) -> u64 {
        self.counts.streams_opened.load(Ordering::Relaxed)
    }

    pub(super) fn streams_open(&self) -> u64 {
        let closed = self.counts.streams_closed.load(Ordering::Relaxed);
        self.streams_opened().saturating_sub(closed)
    }

    pub(super) fn begin(&self) -> UnderWay {
        self.counts.begun.fetch_add(1, Ordering::Relaxed);
        UnderWay {
            counts: self.counts.clone(),
        }
    }

    pub(super) fn begun(&self) -> u64 {
        self.counts.begun.load(Ordering::Relaxed)
    }

    pub(super) fn under_way(&self) -> u64 {
        let ended = self.counts.ended.load(Ordering::Relaxed);
        self.begun().saturating_sub(ended)
    }

    fn any_under_way(&self) -> bool {
        self.begun() != self.counts.ended.load(Ordering::Relaxed)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.counts.ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// Fails reads once the client had its time: to say a first word, and from the first byte of a
/// request's header to its last.
///
/// Between two requests it lets HTTP/2 connections be: those are told to go away, which is not for
/// who sees bytes only.
#[derive(Debug)]
pub(in crate::frontend) struct Guard<S> {
    stream: S,
    requests: Requests,
    header_timeout: Duration,
    /// Set while a header (or the first byte) is awaited.
    deadline: Option<Pin<Box<Sleep>>>,
    /// Requests begun when reads were last asked for: one more, and the awaited header has come.
    /// HTTP/2's frames tell by themselves where a header ends.
    begun: u64,
    protocol: Protocol,
    /// Set when the last answer is out and the client still sends.
    linger: Option<Linger>,
}

#[derive(Debug)]
struct Linger {
    until: Pin<Box<Sleep>>,
    bytes_left: usize,
}

#[derive(Clone, Copy, Debug)]
enum Protocol {
    /// This many bytes agree with HTTP/2's preface so far.
    Unknown(usize),
    Http1,
    Http2(Frames),
}

impl<S> Guard<S> {
    /// For a connection that was made at `connected`.
    pub(in crate::frontend) fn new(
        stream: S,
        requests: Requests,
        connected: Instant,
        header_timeout: Duration,
    ) -> Self {
        let deadline = tokio::time::sleep_until(connected + header_timeout);
        Self {
            stream,
            requests,
            header_timeout,
            deadline: Some(Box::pin(deadline)),
            begun: 0,
            protocol: Protocol::Unknown(0),
            linger: None,
        }
    }

    fn saw(&mut self, mut bytes: &[u8]) {
        if let Protocol::Unknown(matched) = self.protocol {
            let rest = &PREFACE[matched..];
            let length = rest.len().min(bytes.len());
            self.protocol = if rest[..length] != bytes[..length] {
                Protocol::Http1
            } else if length == rest.len() {
                self.requests.begin_http2();
                self.deadline = None;
                bytes = &bytes[length..];
                Protocol::Http2(Frames::default())
            } else {
                Protocol::Unknown(matched + length)
            };
        }
        let awaits_header = match &mut self.protocol {
            Protocol::Http2(frames) => {
                let followed = frames.follow(bytes);
                if followed.headers_ended || !followed.within_headers {
                    self.deadline = None;
                }
                followed.within_headers
            }
            Protocol::Http1 => !self.requests.any_under_way(),
            Protocol::Unknown(_) => false,
        };
        if awaits_header && self.deadline.is_none() {
            self.deadline = Some(Box::pin(tokio::time::sleep(self.header_timeout)));
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Guard<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let begun = self.requests.begun();
        if begun != self.begun && !matches!(self.protocol, Protocol::Http2(_)) {
            self.begun = begun;
            self.deadline = None;
        }
        let before = buffer.filled().len();
        let result = Pin::new(&mut self.stream).poll_read(context, buffer);
        match result {
            Poll::Ready(Ok(())) => {
                let bytes = &buffer.filled()[before..];
                if !bytes.is_empty() {
                    self.saw(bytes);
                }
                result
            }
            Poll::Ready(Err(_)) => result,
            Poll::Pending => {
                if let Some(deadline) = &mut self.deadline
                    && deadline.as_mut().poll(context).is_ready()
                {
                    self.requests.run_out(Limit::HeaderTime);
                    return Poll::Ready(Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        "the client did not complete its request header in time",
                    )));
                }
                Poll::Pending
            }
        }
    }
}

impl<S: AsyncRead + Unpin> Guard<S> {
    /// Drops what the client still sends: until it ends or pauses before anything came, or until
    /// it had its time.
    fn poll_linger(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let mut scratch = [0; 16 << 10];
        loop {
            let mut buffer = ReadBuf::new(&mut scratch);
            let read = Pin::new(&mut self.stream).poll_read(context, &mut buffer);
            match (read, &mut self.linger) {
                (Poll::Ready(Ok(())), linger) if !buffer.filled().is_empty() => {
                    let linger = linger.get_or_insert_with(|| Linger {
                        until: Box::pin(tokio::time::sleep(LINGER_TIME)),
                        bytes_left: LINGER_BYTES,
                    });
                    let left = linger.bytes_left.checked_sub(buffer.filled().len());
                    let Some(left) = left else {
                        return Poll::Ready(());
                    };
                    linger.bytes_left = left;
                }
                (Poll::Ready(_), _) => return Poll::Ready(()),
                (Poll::Pending, Some(linger)) => return linger.until.as_mut().poll(context),
                // Not the client's pause but this task's: it has had its turn.
                (Poll::Pending, None) if !has_budget_remaining() => return Poll::Pending,
                (Poll::Pending, None) => return Poll::Ready(()),
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Guard<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.linger.is_none() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(context))?;
            // There, streams are reset and the connection is told to go away.
            if matches!(self.protocol, Protocol::Http2(_)) {
                return Poll::Ready(Ok(()));
            }
        }
        self.poll_linger(context).map(Ok)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }
}

//! Request bodies, read within limits: bytes before and after decompression, chunks, and time
//! without progress. Whatever was read is freed before an error is answered.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::time::Instant;

use super::HttpLimits;
use super::answer::Failure;
use super::coding::{Coding, DecodeError, Decoder};
use crate::host::{InFlight, InFlightBytes, Receiving};
use crate::limits::Limit;

/// Bytes that count as progress: fewer than these within the time limit is a stalled client.
const PROGRESS: usize = 32 << 10;
/// How long, and how much, of a refused body is read and dropped, so that a client which is still
/// sending gets to read the answer and keeps its connection. The client's own chunks are bounded as
/// well: a flood of tiny ones costs far more to take apart than its bytes tell. What comes later
/// is dropped as it is, and the connection with it.
const DRAIN_TIME: Duration = Duration::from_secs(10);
const DRAIN_BYTES: u64 = 4 << 30;
const DRAIN_CHUNKS: u64 = 4_096;
/// Memory allocators align to this at least.
const ALIGNMENT: usize = 16;

/// What the headers say about a body.
#[derive(Clone, Copy, Debug)]
pub(super) struct BodyHead {
    coding: Coding,
    /// `Content-Length`, of the body as it is sent.
    length: Option<u64>,
    /// The client waits for leave to send.
    expects_leave: bool,
}

impl BodyHead {
    pub(super) fn read(headers: &HeaderMap, size_hint: Option<u64>) -> Result<Self, Failure> {
        let coding = match headers.get(header::CONTENT_ENCODING) {
            None => Coding::Identity,
            Some(value) => Coding::from_content_encoding(value.as_bytes()).ok_or_else(|| {
                Failure::new(
                    StatusCode::NOT_IMPLEMENTED,
                    format!(
                        "content-encoding '{}' is not supported: expected gzip, deflate or \
                         identity",
                        value.as_bytes().escape_ascii()
                    ),
                )
            })?,
        };
        Ok(Self {
            coding,
            length: size_hint,
            expects_leave: headers.contains_key(header::EXPECT),
        })
    }
}

/// What a body may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room<'a> {
    limits: &'a HttpLimits,
    /// Bodies on their way count like requests that wait.
    in_flight: Option<&'a Arc<InFlight>>,
}

impl<'a> Room<'a> {
    pub(super) fn new(limits: &'a HttpLimits, in_flight: &'a Arc<InFlight>) -> Self {
        Self {
            limits,
            in_flight: Some(in_flight),
        }
    }
}

/// A body, and what counts as in flight of it as long as this is kept.
#[derive(Debug, Default)]
pub(super) struct Received {
    pub(super) bytes: Bytes,
    pub(super) held: Option<InFlightBytes>,
}

/// Reads a whole body. `offset` bytes into it stands what should be aligned for any element type.
pub(super) async fn read<B>(
    mut body: B,
    head: BodyHead,
    offset: usize,
    room: Room<'_>,
) -> Result<Received, Failure>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    let failure = match collect(&mut body, head, offset, room).await {
        Ok(received) => return Ok(received),
        Err(failure) => failure,
    };
    if failure.status != StatusCode::REQUEST_TIMEOUT && !head.expects_leave {
        drain(body, head.length.is_none()).await;
    }
    Err(failure)
}

async fn collect<B>(
    body: &mut B,
    head: BodyHead,
    offset: usize,
    room: Room<'_>,
) -> Result<Received, Failure>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    let limits = room.limits;
    let mut receiving = Receiving::new(room.in_flight);
    let limit = limits.max_input_size;
    if head.length.is_some_and(|length| length > limit) {
        return Err(too_large(limit));
    }
    // What is compressed says how long it is and not how long it will be.
    let announced = head.length.filter(|_| head.coding == Coding::Identity);
    let announced = announced.unwrap_or_default();
    let max_chunks = limits.max_chunks();
    let padding = offset.wrapping_neg() % ALIGNMENT;
    let mut decoder = Decoder::new(head.coding, limit, padding);
    let mut chunks = 0u64;
    let mut sent = 0u64;
    let mut progress = 0;
    let mut deadline = Instant::now() + limits.body_progress_timeout;
    loop {
        let Ok(frame) = tokio::time::timeout_at(deadline, body.frame()).await else {
            Limit::BodyTime.refuse();
            return Err(Failure::new(
                StatusCode::REQUEST_TIMEOUT,
                format!(
                    "the request body made no progress within {} seconds: {sent} bytes had come",
                    limits.body_progress_timeout.as_secs_f64()
                ),
            ));
        };
        let chunk = match frame {
            None => break,
            Some(Ok(frame)) => match frame.into_data() {
                Ok(chunk) => chunk,
                // Trailers say nothing here.
                Err(_) => continue,
            },
            Some(Err(error)) => {
                return Err(Failure::bad_request(format!(
                    "the request body broke off after {sent} bytes: {error}"
                )));
            }
        };
        // With a length given, pieces are the network's doing and not the client's.
        chunks += u64::from(head.length.is_none());
        if chunks > max_chunks {
            Limit::Chunks.refuse();
            return Err(Failure::bad_request(format!(
                "the request body has more than {max_chunks} chunks (limits.max_chunks)"
            )));
        }
        sent += chunk.len() as u64;
        if sent > limit {
            return Err(too_large(limit));
        }
        decoder
            .push(&chunk)
            .map_err(|error| decoding(error, limit))?;
        receiving.hold(decoder.held(), announced)?;
        progress += chunk.len();
        if progress >= PROGRESS {
            progress = 0;
            deadline = Instant::now() + limits.body_progress_timeout;
        }
    }
    if sent == 0 {
        // Nothing was sent, so nothing was compressed, whatever the header says.
        return Ok(Received::default());
    }
    let bytes = decoder.finish().map_err(|error| decoding(error, limit))?;
    receiving.hold(bytes.len(), announced)?;
    Ok(Received {
        bytes: Bytes::from(bytes).slice(padding..),
        held: receiving.received(),
    })
}

fn decoding(error: DecodeError, limit: u64) -> Failure {
    match error {
        DecodeError::TooLarge => {
            Limit::DecompressedSize.refuse();
            larger(limit)
        }
        DecodeError::Damaged(message) => Failure::bad_request(message),
    }
}

fn too_large(limit: u64) -> Failure {
    Limit::BodySize.refuse();
    larger(limit)
}

fn larger(limit: u64) -> Failure {
    Failure::bad_request(format!(
        "the request body is larger than the limit of {limit} bytes, which \
         --http-max-input-size sets"
    ))
}

/// Reads on and keeps nothing, until the end or a limit.
async fn drain<B>(mut body: B, is_chunked: bool)
where
    B: Body<Data = Bytes> + Unpin,
{
    let until_end = async {
        let (mut dropped, mut chunks) = (0, 0);
        while let Some(Ok(frame)) = body.frame().await {
            dropped += frame.data_ref().map_or(0, |chunk| chunk.len() as u64);
            chunks += u64::from(is_chunked);
            if dropped > DRAIN_BYTES || chunks >= DRAIN_CHUNKS {
                break;
            }
        }
    };
    // Out of time is as good as done: the connection is closed after the answer.
    let _ = tokio::time::timeout(DRAIN_TIME, until_end).await;
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use dormouse_core::id::ByteSize;
    use futures_util::stream::{self, StreamExt};
    use http_body::Frame;
    use http_body_util::{Full, StreamBody};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::super::coding::compress;
    use super::*;
    use crate::frontend::listen::{ListenOptions, serve};

    /// Nothing else is being received.
    fn alone(limits: &HttpLimits) -> Room<'_> {
        Room {
            limits,
            in_flight: None,
        }
    }

    fn limits(max_input_size: u64) -> HttpLimits {
        HttpLimits {
            max_input_size,
            ..HttpLimits::default()
        }
    }

    fn head(coding: &str, length: Option<u64>) -> BodyHead {
        let mut headers = HeaderMap::new();
        headers.insert("content-encoding", coding.parse().unwrap());
        BodyHead::read(&headers, length).unwrap()
    }

    fn chunked(
        chunks: impl Iterator<Item = Vec<u8>>,
    ) -> impl Body<Data = Bytes, Error = Infallible> + Unpin {
        StreamBody::new(stream::iter(
            chunks.map(|chunk| Ok(Frame::data(Bytes::from(chunk)))),
        ))
    }

    #[tokio::test]
    async fn a_body_of_the_limit_passes_and_one_more_byte_does_not() {
        let plain = vec![9u8; 100_000];
        for coding in ["identity", "gzip", "deflate"] {
            let sent = compress(
                Coding::from_content_encoding(coding.as_bytes()).unwrap(),
                [Bytes::from(plain.clone())].iter(),
            );
            let length = sent.len() as u64;
            for declared in [None, Some(length)] {
                let body = Full::new(Bytes::from(sent.clone()));
                let read_back =
                    read(body, head(coding, declared), 0, alone(&limits(100_000))).await;
                assert_eq!(read_back.unwrap().bytes, plain);
                let body = Full::new(Bytes::from(sent.clone()));
                let failure = read(body, head(coding, declared), 0, alone(&limits(99_999)))
                    .await
                    .unwrap_err();
                assert_eq!(failure.status, 400);
                assert!(failure.message.contains("--http-max-input-size"));
            }
        }
    }

    #[tokio::test]
    async fn a_flood_of_chunks_is_refused() {
        let ones = |count: usize| chunked(std::iter::repeat_n(vec![1u8], count));
        let read_back = read(
            ones(65_536),
            head("identity", None),
            0,
            alone(&HttpLimits::default()),
        )
        .await;
        assert_eq!(read_back.unwrap().bytes.len(), 65_536);
        for count in [65_537, 1_000_000] {
            let failure = read(
                ones(count),
                head("identity", None),
                0,
                alone(&HttpLimits::default()),
            )
            .await
            .unwrap_err();
            assert_eq!(failure.status, 400);
            assert!(failure.message.contains("65536 chunks"));
        }
        // The same bytes under a declared length are what a slow network delivers.
        let declared = head("identity", Some(70_000));
        let read_back = read(ones(70_000), declared, 0, alone(&HttpLimits::default())).await;
        assert_eq!(read_back.unwrap().bytes.len(), 70_000);
    }

    #[tokio::test]
    async fn a_body_counts_as_bytes_in_flight_until_it_is_let_go() {
        let limits = HttpLimits::default();
        let in_flight = InFlight::new(ByteSize(600 << 10));
        let body = || Full::new(Bytes::from(vec![9u8; 500_000]));
        let room = || Room::new(&limits, &in_flight);
        let received = read(body(), head("identity", None), 0, room()).await;
        let received = received.unwrap();
        assert_eq!(in_flight.used(), 512 << 10);
        let refused = read(body(), head("identity", None), 0, room()).await;
        assert_eq!(refused.unwrap_err().status, 503);
        drop(received);
        assert_eq!(in_flight.used(), 0);
        read(body(), head("identity", None), 0, room())
            .await
            .unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_stalled_body_times_out() {
        let start = Instant::now();
        let body = StreamBody::new(Box::pin(
            stream::iter([Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"{")))])
                .chain(stream::pending()),
        ));
        let failure = read(
            body,
            head("identity", None),
            0,
            alone(&HttpLimits::default()),
        )
        .await
        .unwrap_err();
        assert_eq!(failure.status, 408);
        assert_eq!(start.elapsed().as_secs(), 30);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_trickles_times_out_too() {
        let drops = stream::unfold((), |()| async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Some((
                Ok::<_, Infallible>(Frame::data(Bytes::from_static(b" "))),
                (),
            ))
        });
        let body = StreamBody::new(Box::pin(drops));
        let failure = read(
            body,
            head("identity", None),
            0,
            alone(&HttpLimits::default()),
        )
        .await
        .unwrap_err();
        assert_eq!(failure.status, 408);
    }

    #[tokio::test]
    async fn the_binary_tail_is_aligned() {
        for offset in [0, 1, 97, 4096] {
            let body = Full::new(Bytes::from(vec![3u8; 10_000]));
            let bytes = read(
                body,
                head("identity", None),
                offset,
                alone(&HttpLimits::default()),
            )
            .await
            .unwrap()
            .bytes;
            assert_eq!(bytes.len(), 10_000);
            assert_eq!(bytes[offset..].as_ptr() as usize % 8, 0);
        }
    }

    /// Sends `request` to a server that answers with the length of the body it read.
    async fn exchange(request: Vec<u8>, limits: HttpLimits) -> String {
        let router =
            axum::Router::new().fallback(async move |request: http::Request<axum::body::Body>| {
                let (parts, body) = request.into_parts();
                let head = BodyHead::read(&parts.headers, body.size_hint().exact())?;
                let received = read(body, head, 0, alone(&limits)).await?;
                Ok::<_, Failure>(received.bytes.len().to_string())
            });
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let options = ListenOptions::new("test");
        let server = tokio::spawn(serve(listener, router, options, std::future::pending()));
        let (mut answer, mut sending) = TcpStream::connect(address).await.unwrap().into_split();
        let sender = tokio::spawn(async move {
            // The server may close before everything was sent.
            let _ = sending.write_all(&request).await;
            sending
        });
        let mut text = String::new();
        answer.read_to_string(&mut text).await.unwrap();
        sender.await.unwrap();
        server.abort();
        text
    }

    fn post(headers: &str, body: &[u8]) -> Vec<u8> {
        let head = format!("POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n\r\n");
        [head.as_bytes(), body].concat()
    }

    #[tokio::test]
    async fn a_flood_of_chunks_over_a_socket_gets_its_answer() {
        // Some that are read to their end, and one that is not.
        for count in [100_000, 1_000_000] {
            let flood = [b"1\r\nx\r\n".repeat(count), b"0\r\n\r\n".to_vec()].concat();
            let request = post("transfer-encoding: chunked", &flood);
            let answer = exchange(request, HttpLimits::default()).await;
            assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
            assert!(answer.contains("65536 chunks"), "{answer}");
        }
    }

    #[tokio::test]
    async fn the_limit_is_exact_over_a_socket() {
        for (size, status) in [(1 << 20, 200), ((1 << 20) + 1, 400)] {
            let plain = vec![b' '; size];
            let chunked = [format!("{size:x}\r\n").as_bytes(), &plain, b"\r\n0\r\n\r\n"].concat();
            let zipped = compress(Coding::Gzip, [Bytes::from(plain.clone())].iter());
            for request in [
                post(&format!("content-length: {size}"), &plain),
                post("transfer-encoding: chunked", &chunked),
                post(
                    &format!("content-encoding: gzip\r\ncontent-length: {}", zipped.len()),
                    &zipped,
                ),
            ] {
                let answer = exchange(request, limits(1 << 20)).await;
                assert!(
                    answer.starts_with(&format!("HTTP/1.1 {status}")),
                    "{answer}"
                );
            }
        }
    }

    #[test]
    fn unknown_codings_are_refused() {
        let mut headers = HeaderMap::new();
        headers.insert("content-encoding", "br".parse().unwrap());
        assert_eq!(BodyHead::read(&headers, None).unwrap_err().status, 501);
    }
}

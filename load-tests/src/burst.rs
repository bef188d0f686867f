//! Many gRPC calls at the same moment. Their bytes are made before it, so that sending them takes
//! next to nothing of the processors that the server under them shares with us: usually clients are
//! on machines of their own.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bytes::{Buf, BytesMut};
use dormouse_proto::inference as pb;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::frames::{
    self, ACKNOWLEDGED, DATA, END_HEADERS, END_STREAM, FRAME_HEAD, GO_AWAY, HEADERS, PING, RESET,
    SETTINGS, WINDOW_UPDATE,
};
use crate::models::BenchModel;

/// Requests per connection; HTTP/2 servers allow about a hundred at a time.
const PER_CONNECTION: usize = 50;
/// What a connection may take in without asking again.
const WINDOW: u32 = 1 << 30;
/// The largest frame that every server takes.
const FRAME_BYTES: usize = 16 << 10;
/// How long a server may take to answer the last of them.
const PATIENCE: Duration = Duration::from_secs(280);

/// Connections with calls that are ready to be sent.
#[derive(Debug)]
pub(crate) struct Burst {
    connections: Vec<Connection>,
}

/// When a call was answered, counted from the first byte of all; or why not.
pub(crate) type Outcome = Result<Duration, String>;

#[derive(Debug)]
struct Connection {
    socket: TcpStream,
    /// What came and has not been looked at.
    received: BytesMut,
    calls: usize,
    bytes: Vec<u8>,
}

impl Burst {
    /// Connects to `address` for so many calls of a model.
    pub(crate) async fn connect(address: &str, model: &BenchModel, calls: usize) -> Result<Self> {
        let message = frames::grpc_message(&request(model))?;
        let mut head = frames::head(address, "ModelInfer");
        let timeout = format!("{}S", PATIENCE.as_secs());
        frames::field(&mut head, "grpc-timeout", timeout.as_bytes());
        frames::field(&mut head, "te", b"trailers");
        let mut connections = Vec::new();
        let mut left = calls;
        while left > 0 {
            let calls = left.min(PER_CONNECTION);
            left -= calls;
            let mut bytes = Vec::new();
            for call in 0..calls {
                let stream = 2 * call as u32 + 1;
                frames::frame(&mut bytes, (HEADERS, END_HEADERS), stream, &head);
                let mut pieces = message.chunks(FRAME_BYTES).peekable();
                while let Some(piece) = pieces.next() {
                    let flags = if pieces.peek().is_none() {
                        END_STREAM
                    } else {
                        0
                    };
                    frames::frame(&mut bytes, (DATA, flags), stream, piece);
                }
            }
            connections.push(Connection::open(address, calls, bytes).await?);
        }
        Ok(Self { connections })
    }

    /// Sends everything and waits for every answer.
    pub(crate) async fn release(self) -> Result<Vec<Outcome>> {
        let started = Instant::now();
        let mut waiting = JoinSet::new();
        for mut connection in self.connections {
            connection.socket.write_all(&connection.bytes).await?;
            waiting.spawn(async move {
                let mut answers = Vec::new();
                let calls = connection.calls;
                let read = connection.read(started, &mut answers);
                let why = match tokio::time::timeout(PATIENCE, read).await {
                    Ok(Ok(())) => "the connection was closed".to_owned(),
                    Ok(Err(error)) => format!("{error:#}"),
                    Err(_) => "no answer in time".to_owned(),
                };
                answers.resize(calls, Err(why));
                answers
            });
        }
        let mut outcomes = Vec::new();
        while let Some(answers) = waiting.join_next().await {
            outcomes.extend(answers?);
        }
        Ok(outcomes)
    }
}

impl Connection {
    /// Connects and learns that the server takes all of `bytes` at once.
    async fn open(address: &str, calls: usize, bytes: Vec<u8>) -> Result<Self> {
        let mut socket = TcpStream::connect(address).await?;
        socket.set_nodelay(true)?;
        let mut greeting = frames::PREFACE.to_vec();
        // The largest window for each stream (setting 4), and for all of them together.
        let mut settings = vec![0, 4];
        settings.extend(WINDOW.to_be_bytes());
        frames::frame(&mut greeting, (SETTINGS, 0), 0, &settings);
        frames::frame(&mut greeting, (SETTINGS, ACKNOWLEDGED), 0, &[]);
        frames::frame(&mut greeting, (WINDOW_UPDATE, 0), 0, &WINDOW.to_be_bytes());
        socket.write_all(&greeting).await?;
        let mut connection = Self {
            socket,
            received: BytesMut::new(),
            calls,
            bytes,
        };
        let mut window = 65_535;
        while window < connection.bytes.len() as u64 {
            let frame = connection.next().await?;
            let frame = frame.context("the server hung up before the first request")?;
            if frame.kind == WINDOW_UPDATE && frame.stream == 0 {
                let mut payload = &frame.payload[..];
                ensure!(payload.len() >= 4, "a window without a size");
                window += u64::from(payload.get_u32());
            }
        }
        Ok(connection)
    }

    /// Collects answers until there is one for each call, or the connection is closed.
    async fn read(&mut self, started: Instant, answers: &mut Vec<Outcome>) -> Result<()> {
        let mut bytes_of = vec![0; self.calls];
        while answers.len() < self.calls {
            let Some(frame) = self.next().await? else {
                return Ok(());
            };
            let call = (frame.stream / 2) as usize;
            let ends = frame.flags & END_STREAM != 0;
            match frame.kind {
                PING if frame.flags & ACKNOWLEDGED == 0 => {
                    let mut pong = Vec::new();
                    frames::frame(&mut pong, (PING, ACKNOWLEDGED), 0, &frame.payload);
                    self.socket.write_all(&pong).await?;
                }
                GO_AWAY => return Ok(()),
                RESET => answers.push(Err("the call was reset".to_owned())),
                DATA => bytes_of[call] += frame.payload.len(),
                // Errors come without a message.
                HEADERS if ends && bytes_of[call] == 0 => {
                    answers.push(Err("the server answered with an error".to_owned()));
                }
                HEADERS if ends => answers.push(Ok(started.elapsed())),
                _ => {}
            }
        }
        Ok(())
    }

    /// The next frame; none when the server hung up.
    async fn next(&mut self) -> Result<Option<Frame>> {
        loop {
            if let Some(frame) = Frame::take(&mut self.received) {
                return Ok(Some(frame));
            }
            self.received.reserve(FRAME_BYTES);
            if self.socket.read_buf(&mut self.received).await? == 0 {
                return Ok(None);
            }
        }
    }
}

#[derive(Debug)]
struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
    payload: BytesMut,
}

impl Frame {
    fn take(received: &mut BytesMut) -> Option<Self> {
        let head: [u8; FRAME_HEAD] = *received.first_chunk()?;
        let [a, b, c, kind, flags, stream @ ..] = head;
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        if received.len() < FRAME_HEAD + length {
            return None;
        }
        received.advance(FRAME_HEAD);
        Some(Self {
            kind,
            flags,
            stream: u32::from_be_bytes(stream) & 0x7fff_ffff,
            payload: received.split_to(length),
        })
    }
}

fn request(model: &BenchModel) -> pb::ModelInferRequest {
    let inputs = model.inputs.iter();
    pb::ModelInferRequest {
        model_name: model.name.clone(),
        inputs: inputs
            .clone()
            .map(|(name, tensor)| pb::model_infer_request::InferInputTensor {
                name: name.clone(),
                datatype: tensor.datatype().name().to_owned(),
                shape: tensor.shape().to_vec(),
                ..Default::default()
            })
            .collect(),
        raw_input_contents: inputs.map(|(_, tensor)| tensor.data().clone()).collect(),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_taken_when_they_are_whole() {
        let mut sent = Vec::new();
        frames::frame(&mut sent, (DATA, END_STREAM), 5, b"abc");
        frames::frame(&mut sent, (PING, 0), 0, &[7; 8]);
        let mut received = BytesMut::new();
        let mut taken = Vec::new();
        for byte in sent {
            received.extend([byte]);
            taken.extend(Frame::take(&mut received));
        }
        let taken: Vec<_> = taken
            .iter()
            .map(|frame| (frame.kind, frame.flags, frame.stream, frame.payload.len()))
            .collect();
        assert_eq!(taken, [(DATA, END_STREAM, 5, 3), (PING, 0, 0, 8)]);
        assert!(received.is_empty());
    }
}

//! HTTP/2 frames that cost their sender nothing: streams reset as soon as they are opened, headers
//! that never end, data frames without data.

use std::time::Duration;

use anyhow::Result;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::{HostileArgs, Shown, TIMES, guests};
use crate::bars::Bar;
use crate::victim::Victim;

const MODEL: &str = "mlp";
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Frames sent at a time.
const BATCH: u32 = 500;
/// How long a connection may live that is being flooded with.
const PATIENCE: Duration = Duration::from_secs(20);

const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
const RESET: u8 = 3;
pub(super) const SETTINGS: u8 = 4;
const CONTINUATION: u8 = 9;
pub(super) const END_STREAM: u8 = 1;
pub(super) const END_HEADERS: u8 = 4;

#[derive(Clone, Copy, Debug)]
enum Flood {
    Resets,
    Continuations,
    EmptyData,
}

impl Flood {
    const ALL: [(Self, &'static str); 3] = [
        (Self::Resets, "rapid resets"),
        (Self::Continuations, "continuations"),
        (Self::EmptyData, "empty data"),
    ];

    /// What a connection is opened with.
    fn opening(self, head: &[u8]) -> Vec<u8> {
        let mut bytes = PREFACE.to_vec();
        frame(&mut bytes, (SETTINGS, 0), 0, &[]);
        match self {
            Self::Resets => {}
            Self::Continuations => frame(&mut bytes, (HEADERS, END_STREAM), 1, head),
            Self::EmptyData => frame(&mut bytes, (HEADERS, END_HEADERS), 1, head),
        }
        bytes
    }

    /// The next frames, from the number of those before.
    fn batch(self, head: &[u8], sent: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        for index in sent..sent + BATCH {
            match self {
                Self::Resets => {
                    let stream = 2 * index + 1;
                    frame(
                        &mut bytes,
                        (HEADERS, END_HEADERS | END_STREAM),
                        stream,
                        head,
                    );
                    frame(&mut bytes, (RESET, 0), stream, &8u32.to_be_bytes());
                }
                Self::Continuations => {
                    // A header that is not kept in any table.
                    let mut field = vec![0x00, 8];
                    field.extend(format!("x{index:07x}").bytes());
                    field.push(100);
                    field.extend([b'y'; 100]);
                    frame(&mut bytes, (CONTINUATION, 0), 1, &field);
                }
                Self::EmptyData => frame(&mut bytes, (DATA, 0), 1, &[]),
            }
        }
        bytes
    }
}

/// What was sent in all.
#[derive(Clone, Copy, Debug, Default)]
struct Sent {
    frames: u64,
    connections: u64,
    /// Of these, how many the server has closed.
    closed: u64,
}

pub(super) async fn run(args: &HostileArgs) -> Result<Shown> {
    let mut shown = Shown::new("frames");
    let victim = Victim::start(&args.server, &["--keep-alive=forever"], None).await?;
    let (grpc, http) = guests(&victim, MODEL)?;
    let (before, http_before) = (grpc.usual().await?, http.usual().await?);
    let resident = victim.resident()?;
    let (grpc, http) = (grpc.stay(), http.stay());
    let mut closed = 0;
    for (port, address) in [
        ("gRPC", victim.grpc_address()),
        ("HTTP", victim.http_address()?),
    ] {
        for (flood, name) in Flood::ALL {
            let wanted = match flood {
                Flood::Resets => 10 * args.frames,
                _ => args.frames,
            };
            let sent = send(address, flood, wanted).await?;
            closed += sent.closed;
            let Sent {
                frames,
                connections,
                ..
            } = sent;
            shown.bar(Bar::new(
                format!("{name} over {port}: connections closed"),
                format!("all of {connections}, which {frames} frames took"),
                sent.closed.to_string(),
                sent.closed == connections,
            ));
        }
    }
    shown.compared("a gRPC client", &before, grpc.finish().await?, TIMES);
    shown.compared("an HTTP client", &http_before, http.finish().await?, TIMES);
    shown.grown("all of them", resident, victim.resident()?, 16.0);
    let counted = victim
        .metric("dormouse_limit_refusals_total", &["limit=\"http2_floods\""])
        .await?;
    shown.bar(Bar::equal(
        "connections counted as http2_floods",
        closed,
        counted as u64,
    ));
    Ok(shown)
}

/// Sends so many frames, on a new connection whenever one was closed.
async fn send(address: &str, flood: Flood, wanted: u64) -> Result<Sent> {
    let head = head(address);
    let started = Instant::now();
    let mut sent = Sent::default();
    while sent.frames < wanted && started.elapsed() < PATIENCE {
        let mut socket = TcpStream::connect(address).await?;
        let (mut reader, mut writer) = socket.split();
        sent.connections += 1;
        let before = sent.frames;
        let writing = async {
            if writer.write_all(&flood.opening(&head)).await.is_err() {
                return;
            }
            let mut index = 0;
            while sent.frames < wanted {
                let batch = flood.batch(&head, index);
                if writer.write_all(&batch).await.is_err() {
                    return;
                }
                index += BATCH;
                sent.frames += u64::from(BATCH);
            }
            // Everything is sent: what the server makes of it is to be seen.
            std::future::pending().await
        };
        let reading = async {
            let mut scrap = [0; 16 << 10];
            while matches!(reader.read(&mut scrap).await, Ok(count) if count > 0) {}
        };
        let over = async {
            tokio::select! {
                () = writing => {}
                () = reading => {}
            }
        };
        let is_closed = tokio::time::timeout(PATIENCE, over).await.is_ok();
        sent.closed += u64::from(is_closed);
        // Nothing may count as sent for ever.
        sent.frames = sent.frames.max(before + 1);
    }
    Ok(sent)
}

/// A request's headers, none of them in a table that both sides would have to keep.
pub(super) fn head(authority: &str) -> Vec<u8> {
    // POST and http, which every table has.
    let mut block = vec![0x83, 0x86];
    let path = "/inference.GRPCInferenceService/ServerLive";
    for (name, value) in [(4, path), (1, authority), (31, "application/grpc")] {
        literal(&mut block, name, value);
    }
    block
}

/// A value for a name of the static table; both are shorter than 127.
fn literal(block: &mut Vec<u8>, name: u8, value: &str) {
    match name < 15 {
        true => block.push(name),
        false => block.extend([15, name - 15]),
    }
    block.push(value.len() as u8);
    block.extend(value.bytes());
}

pub(super) fn frame(bytes: &mut Vec<u8>, (kind, flags): (u8, u8), stream: u32, payload: &[u8]) {
    let [_, length @ ..] = (payload.len() as u32).to_be_bytes();
    bytes.extend(length);
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
}

//! HTTP/2 frames that cost their sender nothing: streams reset as soon as they are opened, headers
//! that never end, data frames without data.

use std::time::Duration;

use anyhow::Result;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::{HostileArgs, Shown, TIMES, guests};
use crate::bars::Bar;
use crate::frames::{
    CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, RESET, SETTINGS, field, frame,
    head,
};
use crate::victim::Victim;

const MODEL: &str = "mlp";
/// Frames sent at a time.
const BATCH: u32 = 500;
/// How long a connection may live that is being flooded with.
const PATIENCE: Duration = Duration::from_secs(20);

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
                    let mut block = Vec::new();
                    field(&mut block, &format!("x{index:07x}"), &[b'y'; 100]);
                    frame(&mut bytes, (CONTINUATION, 0), 1, &block);
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
    let head = head(address, "ServerLive");
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

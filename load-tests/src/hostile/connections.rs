//! Connections that are opened and left alone, left in the middle of a word, or kept without use.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;
use bytes::Bytes;
use http_body_util::Empty;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{HostileArgs, Shown, TIMES, greets, guests, until_hung_up};
use crate::bars::Bar;
use crate::frames;
use crate::victim::Victim;

const MODEL: &str = "mlp";
/// Until when all of them must be closed.
const WITHIN: Duration = Duration::from_secs(15);

/// How far a connection goes before it is left alone.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Silent,
    HalfAWord,
    HalfAPreface,
    /// Whole first words of HTTP/2, and nothing else.
    Greeting,
    HalfAHeader,
    /// Keeps everything that HTTP/2 asks of a client who asks nothing.
    Pings,
}

impl Kind {
    const ALL: [Self; 6] = [
        Self::Silent,
        Self::HalfAWord,
        Self::HalfAPreface,
        Self::Greeting,
        Self::HalfAHeader,
        Self::Pings,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Silent => "silent connections",
            Self::HalfAWord => "half HTTP/1 headers",
            Self::HalfAPreface => "half HTTP/2 prefaces",
            Self::Greeting => "HTTP/2 prefaces with nothing after them",
            Self::HalfAHeader => "half HTTP/2 headers",
            Self::Pings => "connections that only answer pings",
        }
    }

    /// Stays until the server hangs up, and tells after how long.
    async fn stay(self, address: &str) -> Result<Option<Duration>> {
        let mut greeting = frames::PREFACE.to_vec();
        frames::frame(&mut greeting, (frames::SETTINGS, 0), 0, &[]);
        let words = match self {
            Self::Silent => Vec::new(),
            Self::HalfAWord => b"POST /v2/mod".to_vec(),
            Self::HalfAPreface => b"PRI * HTTP".to_vec(),
            Self::Greeting => greeting,
            Self::HalfAHeader => {
                let head = frames::head(address, "ServerLive");
                let flags = frames::END_HEADERS | frames::END_STREAM;
                frames::frame(&mut greeting, (frames::HEADERS, flags), 1, &head);
                greeting.truncate(greeting.len() - head.len() / 2);
                greeting
            }
            Self::Pings => return only_pings(address).await,
        };
        until_hung_up(address, &words, b"", 2 * WITHIN).await
    }
}

/// Does nothing but what keeps an HTTP/2 connection alive.
async fn only_pings(address: &str) -> Result<Option<Duration>> {
    let socket = TcpStream::connect(address).await?;
    let started = Instant::now();
    let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(socket));
    let (_sender, connection) = handshake.await?;
    let connection: http2::Connection<_, Empty<Bytes>, _> = connection;
    let ended = tokio::time::timeout(2 * WITHIN, connection).await;
    Ok(ended.is_ok().then(|| started.elapsed()))
}

pub(super) async fn run(args: &HostileArgs) -> Result<Shown> {
    let mut shown = Shown::new("connections");
    let victim = Victim::start(&args.server, &["--keep-alive=forever"], None).await?;
    let (grpc, http) = guests(&victim, MODEL)?;
    let (before, http_before) = (grpc.usual().await?, http.usual().await?);
    let (grpc, http) = (grpc.stay(), http.stay());
    // Existing clients are there before the flood.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let (http_address, grpc_address) = (victim.http_address()?, victim.grpc_address());
    let mut flood = JoinSet::new();
    let mut timed = 0;
    for index in 0..args.connections {
        // Every kind comes to both ports.
        let kind = Kind::ALL[index / 2 % Kind::ALL.len()];
        let address = match index % 2 {
            0 => http_address,
            _ => grpc_address,
        };
        // Who speaks HTTP/1 to gRPC's port is told so at once.
        let is_told = matches!(kind, Kind::HalfAWord) && address == grpc_address;
        timed += u64::from(!is_told);
        let address = address.to_owned();
        flood.spawn(async move { (kind, kind.stay(&address).await) });
    }
    let over = AtomicBool::new(false);
    let newcomers = async {
        let (mut served, mut all) = (0u64, 0u64);
        while !over.load(Ordering::Relaxed) {
            all += 1;
            served += u64::from(greets(http_address).await);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        (served, all)
    };
    let flooding = async {
        let mut closed = Kind::ALL.map(|_| Vec::new());
        while let Some(one) = flood.join_next().await {
            let (kind, after) = one?;
            closed[kind as usize].push(after?);
        }
        over.store(true, Ordering::Relaxed);
        anyhow::Ok(closed)
    };
    let ((served, all), closed) = tokio::join!(newcomers, flooding);
    shown.compared("a gRPC client", &before, grpc.finish().await?, TIMES);
    shown.compared("an HTTP client", &http_before, http.finish().await?, TIMES);
    shown.bar(Bar::equal("new clients served meanwhile", all, served));
    for (kind, closed) in Kind::ALL.into_iter().zip(closed?) {
        shown.closed(kind.name(), &closed, WITHIN, true);
    }
    shown.counted(&victim, "header_time", timed).await?;
    Ok(shown)
}

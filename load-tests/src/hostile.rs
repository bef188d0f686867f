//! What a server's other clients see while some behave badly. Every attack has a server process of
//! its own, is real and ends by itself.

mod bombs;
mod churn;
mod connections;
mod descriptors;
mod flood;
mod frames;
mod idle;
mod large;
mod slow;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::bars::Bar;
use crate::drive::outcome::Outcome;
use crate::record::{Findings, ReportArgs, Started};
use crate::samples::Samples;
use crate::table::{Titled, number};
use crate::victim::{Guest, ServerChoice, Victim};

/// What a server has for the headers of a request, or for the first bytes of a connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// How much later than its time-out a connection may be closed.
const SLACK: Duration = Duration::from_secs(3);

/// Milliseconds that a guest's requests may be sent late at p99 without spoiling its latencies.
const MOST_LATE: f64 = 20.0;

/// How many times the usual p99 a guest may see while others misbehave.
const TIMES: f64 = 2.0;
/// Answers that a guest's usual p99 must be read from before others are compared with it.
const ENOUGH: u64 = 90;
/// Milliseconds by which a guest's requests may be sent late at p99 for a comparison by ratio.
const LITTLE_LATE: f64 = 1.0;

/// Mistreats servers in several ways and tells what their other clients saw.
#[derive(Args, Debug)]
pub(crate) struct HostileArgs {
    /// Attacks to run; all of them unless named
    #[arg(value_enum)]
    attacks: Vec<Attack>,
    /// How long a model is flooded
    #[arg(long, default_value = "20s", value_parser = humantime::parse_duration)]
    duration: Duration,
    /// Connections of a flood, and ten times the slow clients of each kind
    #[arg(long, default_value_t = 800)]
    connections: usize,
    /// How long slow clients go on at most
    #[arg(long, default_value = "45s", value_parser = humantime::parse_duration)]
    wait: Duration,
    /// File descriptors of the server that runs out of them
    #[arg(long, default_value_t = 256)]
    descriptors: u32,
    /// Bombs and floods of chunks that are sent
    #[arg(long, default_value_t = 100)]
    repeats: u64,
    /// HTTP/2 frames of a flood; ten times as many of resets
    #[arg(long, default_value_t = 100_000)]
    frames: u64,
    /// Loads and unloads of each of 32 clients, for two minutes at most
    #[arg(long, default_value_t = 1024)]
    churn: u64,
    #[command(flatten)]
    server: ServerChoice,
    #[command(flatten)]
    report: ReportArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Attack {
    /// One model is asked far more than fits, another one now and then
    Flood,
    /// Headers and bodies byte by byte, answers that nobody reads
    Slow,
    /// Connections that are opened and left alone
    Connections,
    /// More connections than the process has file descriptors
    Descriptors,
    /// 1 GiB in 1 MiB of gzip, 1,000,000 chunks of one byte
    Bombs,
    /// HTTP/2 streams reset at once, headers without end, empty data
    Frames,
    /// One model loaded and unloaded by 32 clients at once
    Churn,
    /// A tensor of 1.9 GiB, and one that is too large
    Large,
    /// No attack: memory and threads of a server that nobody asks
    Idle,
}

/// What one attack showed.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Shown {
    attack: String,
    #[serde(skip)]
    bars: Vec<Bar>,
    /// What clients saw, by who they are.
    clients: Vec<(String, Outcome)>,
    /// Seconds until connections were closed; those that stayed open are not in it.
    closed_after_seconds: Vec<f64>,
}

pub(crate) async fn run(args: HostileArgs) -> Result<()> {
    ensure!(
        (20..=5000).contains(&args.connections) && (64..=4096).contains(&args.descriptors),
        "--connections from 20 to 5000 and --descriptors from 64 to 4096"
    );
    ensure!(
        args.duration >= Duration::from_millis(500) && args.duration <= Duration::from_secs(3600),
        "--duration from 500ms to 1h"
    );
    ensure!(
        (1..=10_000).contains(&args.repeats) && (1..=100_000).contains(&args.churn),
        "--repeats from 1 to 10000 and --churn from 1 to 100000"
    );
    ensure!(
        (1000..=50_000_000).contains(&args.frames),
        "--frames from 1000 to 50000000"
    );
    ensure!(args.wait <= Duration::from_secs(600), "--wait up to 10m");
    let started = Started::now();
    let attacks = match &args.attacks[..] {
        [] => Attack::value_variants(),
        named => named,
    };
    let mut shown = Vec::new();
    for attack in attacks {
        shown.push(match attack {
            Attack::Flood => flood::run(&args).await.context("flood")?,
            Attack::Slow => slow::run(&args).await.context("slow")?,
            Attack::Connections => connections::run(&args).await.context("connections")?,
            Attack::Descriptors => descriptors::run(&args).await.context("descriptors")?,
            Attack::Bombs => bombs::run(&args).await.context("bombs")?,
            Attack::Frames => frames::run(&args).await.context("frames")?,
            Attack::Churn => churn::run(&args).await.context("churn")?,
            Attack::Large => large::run(&args).await.context("large")?,
            Attack::Idle => idle::run(&args).await.context("idle")?,
        });
    }
    let bars = shown
        .iter_mut()
        .flat_map(|shown| std::mem::take(&mut shown.bars))
        .collect();
    started.record(shown).with_bars(bars).publish(&args.report)
}

impl Findings for Vec<Shown> {
    fn about(&self) -> String {
        let attacks: Vec<&str> = self.iter().map(|shown| &*shown.attack).collect();
        format!(
            "What a server's well-behaved clients see while others behave badly, a server process \
             for each attack: {}.",
            attacks.join(", ")
        )
    }

    fn tables(&self) -> Vec<Titled> {
        let mut rows = Vec::new();
        for shown in self {
            for (name, outcome) in &shown.clients {
                let Some(step) = outcome.steps.first() else {
                    continue;
                };
                rows.push(vec![
                    shown.attack.clone(),
                    name.clone(),
                    step.all.sent.to_string(),
                    step.all.answered.to_string(),
                    number(step.all.latency.p50),
                    number(step.all.latency.p99),
                    number(step.all.latency.max),
                ]);
            }
        }
        let header = [
            "attack", "client", "sent", "answered", "p50 ms", "p99 ms", "max ms",
        ];
        let clients = Titled::new("What the other clients saw", &header, rows);
        let closed = self
            .iter()
            .filter(|shown| !shown.closed_after_seconds.is_empty());
        let rows: Vec<_> = closed
            .map(|shown| {
                let seconds = Samples(shown.closed_after_seconds.clone());
                vec![
                    shown.attack.clone(),
                    seconds.0.len().to_string(),
                    seconds.cell(),
                ]
            })
            .collect();
        let header = ["attack", "closed", "after, s"];
        let closed = Titled::new("Connections that the server closed", &header, rows);
        let tables = [clients, closed].into_iter();
        tables.filter(|table| !table.rows.is_empty()).collect()
    }
}

impl Shown {
    fn new(attack: &'static str) -> Self {
        Self {
            attack: attack.to_owned(),
            ..Self::default()
        }
    }

    fn bar(&mut self, mut bar: Bar) {
        bar.name = format!("{}: {}", self.attack, bar.name);
        self.bars.push(bar);
    }

    /// The bars of a client that did nothing wrong. `usual` is what it saw before.
    fn client(&mut self, name: &str, usual: &Outcome, seen: Outcome) {
        let Some(figures) = seen.steps.first().map(|step| &step.all) else {
            return;
        };
        let errors = figures.failed() + figures.wrong;
        let answered = figures.answered;
        let not_sent = figures.not_sent;
        let (p99, late) = (figures.latency.p99, figures.late.p99);
        self.bar(Bar::new(
            format!("errors of {name}"),
            "0, some answers",
            match not_sent {
                0 => format!("{errors}, {answered} answers"),
                _ => format!("{errors}, {answered} answers, {not_sent} not sent"),
            },
            errors == 0 && answered > 0,
        ));
        let before = usual.steps.first().map_or(0.0, |step| step.all.latency.p99);
        let most = (10.0 * before).max(50.0);
        let bar = Bar::at_most(format!("p99 of {name}"), most, p99, " ms");
        self.bar(match late > MOST_LATE {
            // The machine is too busy for its own clock: nothing can be said of the server.
            true => Bar {
                found: format!("{}, sent late by {late:.1} ms", bar.found),
                ..bar.unjudged()
            },
            false => bar,
        });
        self.clients.push((name.to_owned(), seen));
    }

    /// As [`Shown::client`], and the bar of how many times the usual p99 is allowed.
    fn compared(&mut self, name: &str, usual: &Outcome, seen: Outcome, times: f64) {
        let figures = |outcome: &Outcome| {
            let step = outcome.steps.first();
            step.map(|step| {
                let all = &step.all;
                (all.latency.p99, all.late.p99, all.answered)
            })
        };
        let before_and_now = figures(usual).zip(figures(&seen));
        self.client(name, usual, seen);
        let Some(((before, before_late, answered), (now, late, _))) = before_and_now else {
            return;
        };
        let ratio = now / before;
        let late = late.max(before_late);
        let bar = Bar::new(
            format!("p99 of {name}, times the usual"),
            format!("at most {times:.1}"),
            format!("{ratio:.2} ({now:.2} ms to {before:.2} ms), sent late by {late:.2} ms"),
            ratio <= times,
        );
        // Clients that are late themselves tell of the machine, not of the server.
        let judged = late <= LITTLE_LATE && answered >= ENOUGH;
        self.bar(if judged { bar } else { bar.unjudged() });
    }

    /// The bar of connections that had to be closed.
    fn closed(&mut self, name: &str, closed: &[Option<Duration>], within: Duration, judged: bool) {
        let in_time = closed
            .iter()
            .filter(|closed| closed.is_some_and(|after| after <= within))
            .count();
        let slowest = closed.iter().flatten().max();
        let bar = Bar::new(
            format!("{name} closed within {within:?}"),
            closed.len().to_string(),
            match slowest {
                Some(slowest) => {
                    format!("{in_time}, the last after {:.1} s", slowest.as_secs_f64())
                }
                None => in_time.to_string(),
            },
            in_time == closed.len(),
        );
        self.bar(if judged { bar } else { bar.unjudged() });
        let seconds = closed.iter().flatten().map(Duration::as_secs_f64);
        self.closed_after_seconds.extend(seconds);
    }
}

/// Guests over gRPC and HTTP who ask often enough for a p99 of their own.
fn guests(victim: &Victim, model: &'static str) -> Result<(Guest, Guest)> {
    let often = |target| Guest {
        rate: 50.0,
        ..Guest::new(target, model)
    };
    Ok((often(victim.grpc()), often(victim.http()?)))
}

/// Says some words, then a byte of `drip` every second, until the server hangs up; none when it
/// had not when the time was over.
async fn until_hung_up(
    address: &str,
    words: &[u8],
    drip: &'static [u8],
    wait: Duration,
) -> Result<Option<Duration>> {
    let mut socket = TcpStream::connect(address).await?;
    let started = Instant::now();
    socket.write_all(words).await?;
    let (mut reader, mut writer) = socket.split();
    let hung_up = async {
        let mut scrap = [0; 1024];
        // An answer may come before the end.
        while matches!(reader.read(&mut scrap).await, Ok(count) if count > 0) {}
    };
    let dripping = async {
        let mut seconds = tokio::time::interval(Duration::from_secs(1));
        let mut bytes = drip.iter().cycle();
        loop {
            seconds.tick().await;
            if let Some(byte) = bytes.next()
                && writer.write_all(&[*byte]).await.is_err()
            {
                return;
            }
        }
    };
    let over = async {
        tokio::select! {
            () = hung_up => {}
            () = dripping, if !drip.is_empty() => {}
        }
    };
    let ended = tokio::time::timeout(wait, over).await;
    Ok(ended.is_ok().then(|| started.elapsed()))
}

/// Whether a new connection is answered in time.
async fn greets(address: &str) -> bool {
    let asking = async {
        let mut socket = TcpStream::connect(address).await?;
        let request =
            format!("GET /v2/health/live HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        socket.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer).await?;
        std::io::Result::Ok(answer.starts_with(b"HTTP/1.1 200"))
    };
    let answered = tokio::time::timeout(Duration::from_secs(5), asking).await;
    matches!(answered, Ok(Ok(true)))
}

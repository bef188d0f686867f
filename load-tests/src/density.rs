//! What further concurrency, further versions and parked models cost in memory.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::bars::Bar;
use crate::models::{self, BenchModel};
use crate::outside::{Outside, STAYS_WARM, prepare_store, store_note};
use crate::pages::ProcessMemory;
use crate::plain::{self, PlainRuntime};
use crate::record::{Findings, ReportArgs, Started};
use crate::samples::{Samples, megabytes, mib, times};
use crate::table::Titled;

const VERSIONS: usize = 8;
/// Loads until one passes in which nothing is packed.
const MOST_LOADS: usize = 4;
/// Below this, what runs need counts for more than weights do.
const LARGE: u64 = 256 << 20;
/// How many times the memory of one instance eight instances or versions may hold.
const MOST_OF_ONE: f64 = 1.15;
/// Megabytes of its own that a parked model may hold.
const MOST_PARKED: f64 = 20.0;
/// What rows are called.
const INSTANCES: &str = "instances";
const UNSHARED: &str = "instances, no sharing";
const INDEPENDENT: &str = "independent sessions";
const OF_VERSIONS: &str = "versions";

/// Memory of one server with 1, 2, 4 and 8-way concurrency, and with 8 versions of equal weights.
///
/// Beside it the same number of independent ONNX Runtime sessions in one process, and what a
/// parked model still holds. Models are prepared ahead of time. Memory is the proportional set
/// size, the largest of several looks while every instance has a request running, before or after
/// weights are packed but not meanwhile; of the repetitions, the median. Takes about 12 minutes and
/// 20 GB of memory.
#[derive(Args, Debug)]
pub(crate) struct DensityArgs {
    /// Model to load
    #[arg(long, default_value = "bert-base")]
    model: String,
    /// Instances to measure
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8")]
    instances: Vec<usize>,
    /// Seconds of load for each measurement
    #[arg(long, default_value_t = 8)]
    seconds: u64,
    /// Measurements of each kind, in turns
    #[arg(long, default_value_t = 3)]
    repetitions: usize,
    /// Leave out the independent sessions
    #[arg(long)]
    no_plain: bool,
    /// Measure with sharing switched off as well, and with it the store
    #[arg(long)]
    ablation: bool,
    #[command(flatten)]
    report: ReportArgs,
}

/// One configuration under load.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct DensityRow {
    what: String,
    count: usize,
    /// The medians of the repetitions.
    memory: ProcessMemory,
    requests_per_second: f64,
    /// Each repetition's.
    proportional_mib: Samples,
    resident_mib: Samples,
    private_mib: Samples,
    rates: Samples,
    /// What the server says that it woke from.
    woke_from: BTreeSet<String>,
    /// Whether the server had packed the weights in any repetition.
    packed: bool,
    /// Whether it went on packing whatever was waited for.
    still_packing: bool,
}

impl DensityRow {
    /// `1 instance`, `8 versions`.
    fn name(&self) -> String {
        match self.count {
            1 => {
                let one = self.what.replacen("instances", "instance", 1);
                format!("1 {}", one.replacen("sessions", "session", 1))
            }
            count => format!("{count} {}", self.what),
        }
    }
}

/// What one repetition showed.
#[derive(Debug, Default)]
struct Seen {
    memory: ProcessMemory,
    rate: f64,
    woke_from: BTreeSet<String>,
    packed: bool,
    still_packing: bool,
}

/// The medians of the repetitions.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct ParkedMemory {
    before: ProcessMemory,
    warm: ProcessMemory,
    parked: Option<ProcessMemory>,
    /// Each repetition's: what it holds of its own beyond the server before its first load.
    private_growth_mib: Samples,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct DensityFigures {
    model: String,
    store: String,
    rows: Vec<DensityRow>,
    parked: ParkedMemory,
}

pub(crate) async fn run(args: DensityArgs) -> Result<()> {
    ensure!(
        args.instances.iter().all(|count| (1..=64).contains(count))
            && args.seconds <= 600
            && (1..=100).contains(&args.repetitions),
        "1 to 64 instances, at most 600 seconds, 1 to 100 repetitions"
    );
    let started = Started::now();
    let scratch = models::scratch()?;
    let store = scratch.path().join("store");
    let model = models::prepare(&[&args.model])?.remove(0);
    let repository = |name: &str| scratch.path().join(name);
    // All of them before the first is prepared: another link changes a file for all.
    let single = repository("single");
    model.lay_out(&single, &model.name, "")?;
    let mut loads = Vec::new();
    for &count in &args.instances {
        let folder = repository(&format!("instances-{count}"));
        let group = format!("instance_group {{ kind: KIND_CPU count: {count} }}\n");
        model.lay_out(&folder, &model.name, &group)?;
        loads.push((INSTANCES, folder, vec![String::new(); count]));
    }
    let folder = repository("versions");
    model.lay_out_versions(&folder, VERSIONS)?;
    let versions = (1..=VERSIONS).map(|version| version.to_string());
    loads.push((OF_VERSIONS, folder, versions.collect()));
    let mut entries = prepare_store(&single, &store).await?;
    for (_, folder, _) in &loads {
        entries = prepare_store(folder, &store).await?;
    }

    let time = Duration::from_secs(args.seconds);
    let mut figures = DensityFigures {
        store: store_note(entries, 1),
        model: model.name.clone(),
        ..DensityFigures::default()
    };
    let mut parked = Vec::new();
    for repetition in 1..=args.repetitions {
        for (what, folder, versions) in &loads {
            let load = Load {
                repository: folder,
                store: &store,
                model: &model,
                versions,
                time,
            };
            let count = versions.len();
            eprintln!("{repetition} of {}: {count} {what}", args.repetitions);
            figures.add((*what, count), load.measure(&[]).await?);
            if *what != INSTANCES {
                continue;
            }
            if args.ablation {
                let seen = load.measure(&["--sharing=false"]).await?;
                figures.add((UNSHARED, count), seen);
            }
            if !args.no_plain {
                let seen = independent(&model, count, time)?;
                figures.add((INDEPENDENT, count), seen);
            }
        }
        parked.push(park(&single, &store, &model).await?);
    }
    figures.parked = ParkedMemory::of(&parked);
    started.record(figures).publish(&args.report)
}

impl DensityFigures {
    /// Adds what one repetition showed to its row.
    fn add(&mut self, (what, count): (&str, usize), seen: Seen) {
        let same = |row: &DensityRow| row.what == what && row.count == count;
        let place = self.rows.iter().position(same).unwrap_or_else(|| {
            self.rows.push(DensityRow {
                what: what.to_owned(),
                count,
                ..DensityRow::default()
            });
            self.rows.len() - 1
        });
        let row = &mut self.rows[place];
        row.proportional_mib.push(mib(seen.memory.proportional));
        row.resident_mib.push(mib(seen.memory.resident));
        row.private_mib.push(mib(seen.memory.private));
        row.rates.push(seen.rate);
        row.woke_from.extend(seen.woke_from);
        row.packed |= seen.packed;
        row.still_packing |= seen.still_packing;
        row.memory = ProcessMemory {
            resident: bytes(&row.resident_mib),
            proportional: bytes(&row.proportional_mib),
            private: bytes(&row.private_mib),
        };
        row.requests_per_second = row.rates.median().unwrap_or_default();
    }

    /// How many times the memory of one that of several is.
    fn of_one(&self, row: &DensityRow) -> Option<f64> {
        let one = |what: &str| {
            let mut rows = self.rows.iter();
            rows.find(|row| row.count == 1 && row.what == what)
        };
        let one = one(&row.what).or_else(|| one(INSTANCES))?;
        // Packed copies of one are nothing to hold several without any against.
        let one = match one.packed && !row.packed {
            true => self.parked.warm.proportional,
            false => one.memory.proportional,
        };
        (one > 0).then(|| row.memory.proportional as f64 / one as f64)
    }
}

/// The median of sizes in MiB.
fn bytes(samples: &Samples) -> u64 {
    (samples.median().unwrap_or_default() * f64::from(1 << 20)).round() as u64
}

/// A server to be loaded with one request at a time per entry of `versions`.
struct Load<'a> {
    repository: &'a Path,
    store: &'a Path,
    model: &'a BenchModel,
    versions: &'a [String],
    time: Duration,
}

impl Load<'_> {
    /// Starts a server and wakes every version; tells what these woke from.
    async fn start(&self, flags: &[&str]) -> Result<(Outside, BTreeSet<String>)> {
        let server = Outside::start(self.repository, self.store, flags).await?;
        let mut woke_from = BTreeSet::new();
        for version in self.versions {
            let request = self.model.request(&self.model.name);
            let answer = server.client.infer(request.version(version)).await?;
            woke_from.extend(answer.timing().map(|cold| cold.kind.clone()));
        }
        server.quiet().await?;
        Ok((server, woke_from))
    }

    async fn measure(&self, flags: &[&str]) -> Result<Seen> {
        let all = [&STAYS_WARM, flags].concat();
        let (mut server, mut woke_from) = self.start(&all).await?;
        if flags.is_empty() && woke_from.contains("source") {
            // A file that changed meanwhile was loaded as it is, and has been prepared since.
            drop(server);
            models::settled().await;
            (server, woke_from) = self.start(&all).await?;
        }
        let packed = async || server.metric("dormouse_packed_sessions_total", &[]).await;
        let mut seen = Seen::default();
        // While a packed session takes the place of another there are both, at one time or another:
        // what is compared is what is held before, or after.
        for _ in 0..MOST_LOADS {
            let before = packed().await?;
            (seen.memory, seen.rate) = self.drive(&server).await?;
            server.quiet().await?;
            let after = packed().await?;
            seen.packed = after > 0.0;
            seen.still_packing = after > before;
            if !seen.still_packing {
                break;
            }
        }
        seen.woke_from = woke_from;
        Ok(seen)
    }

    /// The most that is held under load, and answers per second.
    async fn drive(&self, server: &Outside) -> Result<(ProcessMemory, f64)> {
        let mut clients = JoinSet::new();
        let started = Instant::now();
        for version in self.versions {
            let client = server.connect().await?;
            let request = self.model.request(&self.model.name).version(version);
            let time = self.time;
            clients.spawn(async move {
                let mut answers = 0u32;
                while started.elapsed() < time {
                    client.infer(request.clone()).await?;
                    answers += 1;
                }
                anyhow::Ok(answers)
            });
        }
        let mut memory = ProcessMemory::default();
        let mut answers = 0;
        let mut looks = tokio::time::interval(Duration::from_millis(250));
        loop {
            tokio::select! {
                _ = looks.tick() => {
                    let now = server.memory()?;
                    if now.proportional > memory.proportional {
                        memory = now;
                    }
                }
                ended = clients.join_next() => match ended {
                    Some(client) => answers += client??,
                    None => break,
                },
            }
        }
        Ok((memory, f64::from(answers) / started.elapsed().as_secs_f64()))
    }
}

/// What a model holds before its first load, warm, and parked.
#[derive(Clone, Copy, Debug)]
struct Park {
    before: ProcessMemory,
    warm: ProcessMemory,
    parked: Option<ProcessMemory>,
}

async fn park(repository: &Path, store: &Path, model: &BenchModel) -> Result<Park> {
    let flags = ["--keep-alive=forever", "--park-after=3s"];
    let server = Outside::start(repository, store, &flags).await?;
    server.quiet().await?;
    let before = server.memory()?;
    server.client.infer(model.request(&model.name)).await?;
    let warm = server.memory()?;
    let started = Instant::now();
    let mut parked = None;
    while parked.is_none() && started.elapsed() < Duration::from_secs(20) {
        tokio::time::sleep(Duration::from_millis(100)).await;
        if server.metric("dormouse_parks_total", &[]).await? > 0.0 {
            server.quiet().await?;
            parked = Some(server.memory()?);
        }
    }
    Ok(Park {
        before,
        warm,
        parked,
    })
}

impl ParkedMemory {
    fn of(seen: &[Park]) -> Self {
        let median = |all: Vec<ProcessMemory>| {
            let of = |part: fn(&ProcessMemory) -> u64| {
                bytes(&Samples(all.iter().map(|one| mib(part(one))).collect()))
            };
            ProcessMemory {
                resident: of(|one| one.resident),
                proportional: of(|one| one.proportional),
                private: of(|one| one.private),
            }
        };
        let parked: Vec<_> = seen.iter().filter_map(|one| one.parked).collect();
        let grown = seen.iter().filter_map(|one| {
            let parked = one.parked?;
            Some(mib(parked.private) - mib(one.before.private))
        });
        Self {
            before: median(seen.iter().map(|one| one.before).collect()),
            warm: median(seen.iter().map(|one| one.warm).collect()),
            private_growth_mib: Samples(grown.collect()),
            parked: (!parked.is_empty()).then(|| median(parked)),
        }
    }

    /// What a parked model holds of its own.
    fn growth(&self) -> Option<f64> {
        let of_medians = || {
            let parked = self.parked?;
            Some(mib(parked.private) - mib(self.before.private))
        };
        self.private_growth_mib.median().or_else(of_medians)
    }
}

/// Independent sessions in a process of their own, which tells about itself.
fn independent(model: &BenchModel, count: usize, time: Duration) -> Result<Seen> {
    let mut child = Command::new(std::env::current_exe()?)
        .arg("plain-sessions")
        .arg(format!("--model={}", model.name))
        .arg(format!("--count={count}"))
        .arg(format!("--seconds={}", time.as_secs()))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout = child.stdout.take().context("its output was asked for")?;
    let mut line = String::new();
    let read = BufReader::new(stdout).read_line(&mut line);
    let status = child.wait()?;
    read?;
    ensure!(status.success(), "the plain sessions ended with {status}");
    let (memory, rate) = serde_json::from_str(&line)?;
    Ok(Seen {
        memory,
        rate,
        ..Seen::default()
    })
}

/// Independent sessions of one model, each run in a loop by a thread of its own.
#[derive(Args, Debug)]
pub(crate) struct PlainSessionsArgs {
    #[arg(long)]
    model: String,
    #[arg(long)]
    count: usize,
    #[arg(long)]
    seconds: u64,
}

/// Prints memory and requests per second as JSON.
pub(crate) fn run_plain_sessions(args: &PlainSessionsArgs) -> Result<()> {
    let model = models::prepare(&[&args.model])?.remove(0);
    let runtime = PlainRuntime::load(&plain::library()?)?;
    let file: PathBuf = model.file();
    let mut sessions = Vec::new();
    for _ in 0..args.count {
        let session = runtime.open(&file)?;
        session.run(&model.inputs, |_| {})?;
        sessions.push(Arc::new(session));
    }
    let time = Duration::from_secs(args.seconds);
    let started = Instant::now();
    let own = std::process::id();
    let runs = std::thread::scope(|scope| {
        let threads: Vec<_> = sessions
            .iter()
            .map(|session| {
                let model = &model;
                scope.spawn(move || {
                    let mut runs = 0u32;
                    while started.elapsed() < time {
                        session.run(&model.inputs, |_| {})?;
                        runs += 1;
                    }
                    anyhow::Ok(runs)
                })
            })
            .collect();
        let mut runs = 0;
        for thread in threads {
            runs += thread
                .join()
                .map_err(|_| anyhow::anyhow!("a session panicked"))??;
        }
        anyhow::Ok(runs)
    })?;
    let rate = f64::from(runs) / started.elapsed().as_secs_f64();
    let memory = ProcessMemory::of(own)?;
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, &(memory, rate))?;
    writeln!(out)?;
    Ok(())
}

impl Findings for DensityFigures {
    fn about(&self) -> String {
        format!(
            "What a server's process holds while all instances or versions of {} run at once, beside \
             as many independent ONNX Runtime sessions in one process; {}. Ratios are those of the \
             medians.",
            self.model, self.store
        )
    }

    fn tables(&self) -> Vec<Titled> {
        // Older files have one value each.
        let cell = |samples: &Samples, single: f64| match samples.0.is_empty() {
            true => Samples(vec![single]).cell(),
            false => samples.cell(),
        };
        let rows = self.rows.iter().map(|row| {
            let words = row.woke_from.iter().map(String::as_str);
            let mut state: Vec<&str> = words.collect();
            state.extend(row.packed.then_some("packed since"));
            state.extend(row.still_packing.then_some("while it packed"));
            vec![
                row.name(),
                cell(&row.proportional_mib, mib(row.memory.proportional)),
                times(self.of_one(row)),
                cell(&row.resident_mib, mib(row.memory.resident)),
                cell(&row.private_mib, mib(row.memory.private)),
                cell(&row.rates, row.requests_per_second),
                match state.is_empty() {
                    true => "–".to_owned(),
                    false => state.join(", "),
                },
            ]
        });
        let parked = &self.parked;
        let stage = |name: &str, memory: Option<ProcessMemory>| {
            let part = |part: fn(&ProcessMemory) -> u64| {
                crate::table::maybe(memory.as_ref().map(|memory| mib(part(memory))))
            };
            vec![
                name.to_owned(),
                part(|one| one.proportional),
                part(|one| one.private),
            ]
        };
        vec![
            Titled::new(
                "Under load; MiB",
                &[
                    "what",
                    "PSS",
                    "PSS/one",
                    "RSS",
                    "private dirty",
                    "answers/s",
                    "woke from",
                ],
                rows.collect(),
            ),
            Titled::new(
                "One model that is parked; MiB",
                &["stage", "PSS", "private dirty"],
                vec![
                    stage("before its first load", Some(parked.before)),
                    stage("warm", Some(parked.warm)),
                    stage("parked", parked.parked),
                ],
            ),
        ]
    }

    fn bars(&self) -> Vec<Bar> {
        let mut bars = Vec::new();
        for what in [INSTANCES, OF_VERSIONS] {
            let mut rows = self.rows.iter();
            let row = rows.find(|row| row.what == what && row.count == VERSIONS);
            let ratio = row.and_then(|row| self.of_one(row));
            let name = format!("PSS of {VERSIONS} {what}/one");
            let bar = Bar::most(name, MOST_OF_ONE, ratio, "×");
            let is_large = row.is_some_and(|row| row.memory.proportional >= LARGE);
            bars.push(if is_large { bar } else { bar.unjudged() });
        }
        let grown = self.parked.growth().map(megabytes);
        let name = "private memory of a parked model";
        bars.push(Bar::most(name, MOST_PARKED, grown, " MB"));
        bars
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_are_held_against_one_of_their_kind() {
        let mut figures = DensityFigures::default();
        let seen = |mib: u64| Seen {
            memory: ProcessMemory {
                proportional: mib << 20,
                ..ProcessMemory::default()
            },
            ..Seen::default()
        };
        for (what, count, sizes) in [
            (INSTANCES, 1, [1000, 3000, 1100]),
            (INSTANCES, 8, [1210, 1220, 5000]),
            (INDEPENDENT, 1, [200, 200, 200]),
            (INDEPENDENT, 8, [1600, 1600, 1600]),
            (OF_VERSIONS, 8, [1320, 1320, 1320]),
        ] {
            for size in sizes {
                figures.add((what, count), seen(size));
            }
        }
        let ratios = figures.rows.iter().map(|row| times(figures.of_one(row)));
        let ratios: Vec<String> = ratios.collect();
        assert_eq!(ratios, ["1.00×", "1.11×", "1.00×", "8.00×", "1.20×"]);
        let bars = figures.bars();
        let verdicts: Vec<&str> = bars.iter().map(Bar::verdict).collect();
        assert_eq!(verdicts, ["met", "MISSED", "not judged"]);
        // One that was packed holds more, and what it held before is what counts for who was not.
        figures.rows[0].packed = true;
        figures.parked.warm.proportional = 660 << 20;
        let versions = figures.rows.last().unwrap();
        assert_eq!(times(figures.of_one(versions)), "2.00×");
    }
}

//! What further concurrency, further versions and parked models cost in memory.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::models::{self, BenchModel};
use crate::outside::{Outside, STAYS_WARM, prepare_store, store_note};
use crate::pages::ProcessMemory;
use crate::plain::{self, PlainRuntime};
use crate::samples::mib;
use crate::table;

const VERSIONS: usize = 8;

/// Memory of one server with 1, 2, 4 and 8-way concurrency, and with 8 versions of equal weights.
///
/// Beside it the same number of independent ONNX Runtime sessions in one process, and what a
/// parked model still holds. Memory is the proportional set size, the largest of several looks
/// while every instance has a request running. Takes about 5 minutes and 20 GB of memory.
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
    /// Leave out the independent sessions
    #[arg(long)]
    no_plain: bool,
    /// Measure with sharing switched off as well
    #[arg(long)]
    ablation: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// One configuration under load.
#[derive(Debug, Serialize)]
struct DensityRow {
    what: String,
    count: usize,
    memory: ProcessMemory,
    requests_per_second: f64,
}

#[derive(Debug, Serialize)]
struct ParkedMemory {
    before: ProcessMemory,
    warm: ProcessMemory,
    parked: Option<ProcessMemory>,
}

#[derive(Debug, Serialize)]
struct DensityFigures {
    model: String,
    store: String,
    rows: Vec<DensityRow>,
    parked: ParkedMemory,
}

pub(crate) async fn run(args: DensityArgs) -> Result<()> {
    ensure!(
        args.instances.iter().all(|count| (1..=64).contains(count)) && args.seconds <= 600,
        "1 to 64 instances, at most 600 seconds"
    );
    let scratch = models::scratch()?;
    let store = scratch.path().join("store");
    let model = models::prepare(&[&args.model])?.remove(0);
    let repository = |name: &str| scratch.path().join(name);
    let single = repository("single");
    model.lay_out(&single, &model.name, "")?;
    let entries = prepare_store(&single, &store).await?;
    let time = Duration::from_secs(args.seconds);

    let mut rows = Vec::new();
    for &count in &args.instances {
        let folder = repository(&format!("instances-{count}"));
        let group = format!("instance_group {{ kind: KIND_CPU count: {count} }}\n");
        model.lay_out(&folder, &model.name, &group)?;
        let targets = vec![String::new(); count];
        let load = Load {
            repository: &folder,
            store: &store,
            model: &model,
            versions: &targets,
            time,
        };
        rows.push(load.measure("instances", &[]).await?);
        if args.ablation {
            let off = load.measure("instances, no sharing", &["--sharing=false"]);
            rows.push(off.await?);
        }
        if !args.no_plain {
            rows.push(independent(&model, count, time)?);
        }
    }
    let folder = repository("versions");
    model.lay_out_versions(&folder, VERSIONS)?;
    let versions: Vec<String> = (1..=VERSIONS).map(|version| version.to_string()).collect();
    let load = Load {
        repository: &folder,
        store: &store,
        model: &model,
        versions: &versions,
        time,
    };
    prepare_store(&folder, &store).await?;
    rows.push(load.measure("versions", &[]).await?);
    let figures = DensityFigures {
        store: store_note(entries, 1),
        rows,
        parked: parked(&single, &store, &model).await?,
        model: model.name,
    };
    report(&figures, args.json)
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
    async fn measure(&self, what: &str, flags: &[&str]) -> Result<DensityRow> {
        // Linking and copying change the files: until then they are not looked up in the store.
        models::settled().await;
        let flags = [&STAYS_WARM, flags].concat();
        let server = Outside::start(self.repository, self.store, &flags).await?;
        for version in self.versions {
            let request = self.model.request(&self.model.name);
            server.client.infer(request.version(version)).await?;
        }
        server.quiet().await?;
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
        Ok(DensityRow {
            what: what.to_owned(),
            count: self.versions.len(),
            memory,
            requests_per_second: f64::from(answers) / started.elapsed().as_secs_f64(),
        })
    }
}

/// What a model holds before its first load, warm, and parked.
async fn parked(repository: &Path, store: &Path, model: &BenchModel) -> Result<ParkedMemory> {
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
    Ok(ParkedMemory {
        before,
        warm,
        parked,
    })
}

/// Independent sessions in a process of their own, which tells about itself.
fn independent(model: &BenchModel, count: usize, time: Duration) -> Result<DensityRow> {
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
    let (memory, requests_per_second) = serde_json::from_str(&line)?;
    Ok(DensityRow {
        what: "independent sessions".to_owned(),
        count,
        memory,
        requests_per_second,
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
        session.run(&model, |_, _| {})?;
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
                        session.run(model, |_, _| {})?;
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

fn report(figures: &DensityFigures, json: bool) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, figures)?;
        writeln!(out)?;
        return Ok(());
    }
    writeln!(
        out,
        "Memory of {} under load, MiB; {}",
        figures.model, figures.store
    )?;
    drop(out);
    let one = |what: &str| {
        let rows = figures.rows.iter();
        let mut of_one = rows.filter(|row| row.count == 1 && row.what == what);
        of_one.next().map(|row| row.memory.proportional)
    };
    let rows = figures.rows.iter().map(|row| {
        let base = one(&row.what).or_else(|| one("instances"));
        vec![
            row.what.clone(),
            row.count.to_string(),
            format!("{:.1}", mib(row.memory.proportional)),
            format!("{:.1}", mib(row.memory.resident)),
            format!("{:.1}", mib(row.memory.private)),
            base.map_or_else(
                || "–".to_owned(),
                |base| format!("{:.2}", row.memory.proportional as f64 / base as f64),
            ),
            format!("{:.1}", row.requests_per_second),
        ]
    });
    table::print(
        &[
            "what",
            "count",
            "PSS",
            "RSS",
            "private dirty",
            "PSS/one",
            "requests/s",
        ],
        &rows.collect::<Vec<_>>(),
    )?;
    let parked = &figures.parked;
    let cells = |memory: Option<ProcessMemory>| match memory {
        Some(memory) => format!(
            "{:.1} / {:.1}",
            mib(memory.proportional),
            mib(memory.private)
        ),
        None => "–".to_owned(),
    };
    let private = parked.parked.map_or_else(
        || "–".to_owned(),
        |parked_now| {
            let held = parked_now.private.saturating_sub(parked.before.private);
            format!("{:.1}", mib(held))
        },
    );
    table::print(
        &[
            "PSS / private before",
            "warm",
            "parked",
            "private of the parked model",
        ],
        &[vec![
            cells(Some(parked.before)),
            cells(Some(parked.warm)),
            cells(parked.parked),
            private,
        ]],
    )?;
    Ok(())
}

//! One model's measurements, each a fresh server or a fresh session, in turns.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use dormouse_client::{Client, InferResponse};
use tokio::time::Instant;

use super::{ABLATIONS, STAGED_EXIT, WakeArgs, WakeFigures};
use crate::bare::BareServer;
use crate::live::{Live, LiveOptions, quiet};
use crate::models::{self, BenchModel};
use crate::pages;
use crate::plain::{self, PlainRuntime, PlainSession};

/// Straight to zero after each answer.
const TO_ZERO: [&str; 2] = ["--keep-alive=1ms", "--staged-exit=false"];
/// Parked after each answer, never closed.
const TO_PARKED: [&str; 2] = ["--keep-alive=forever", "--park-after=1ms"];
const STAYS_WARM: [&str; 2] = ["--keep-alive=forever", "--park-after=never"];
/// Warm runs per repetition, of which the middle one counts.
const WARM_RUNS: usize = 3;

/// Callers at once where throughput is compared.
pub(super) const CALLERS: usize = 4;

/// Turns of each side within a repetition of the steady-state comparison: what slows the machine
/// down for a while then meets both.
const TURNS: usize = 3;

/// Between two turns. Threads of a plain session look for work for some 45 ms after its last run, and
/// would take a processor from whoever is measured next.
const PAUSE: Duration = Duration::from_millis(100);

/// How long a background preparation is waited for; some models have none.
const PREPARATION: Duration = Duration::from_secs(90);

/// What one model is measured with.
pub(super) struct Bench {
    model: BenchModel,
    options: LiveOptions,
    runtime: PlainRuntime,
    scratch: PathBuf,
}

impl Bench {
    /// Lays out a repository of this one model.
    pub(super) async fn set_up(model: &BenchModel, scratch: &Path) -> Result<Self> {
        let repository = scratch.join("repository");
        model.lay_out(&repository, &model.name, "")?;
        models::settled().await;
        let library = plain::library()?;
        let options = LiveOptions {
            repository,
            library: library.clone(),
            store: scratch.join("store"),
            flags: Vec::new(),
        };
        Ok(Self {
            model: model.clone(),
            options,
            runtime: PlainRuntime::load(&library)?,
            scratch: scratch.to_owned(),
        })
    }

    pub(super) async fn measure(&self, args: &WakeArgs) -> Result<WakeFigures> {
        let mut figures = WakeFigures {
            model: self.model.name.clone(),
            file_bytes: self.model.size()?,
            ..WakeFigures::default()
        };
        pages::warm(&self.model.file())?;
        figures.prepared = self.prepare_store().await?;
        if !figures.prepared {
            let note = "the store stayed empty: wakes are from the source file";
            figures.notes.push(note.to_owned());
        }
        let repetitions = if args.quick {
            args.repetitions.min(2)
        } else {
            args.repetitions
        };
        for repetition in 0..repetitions {
            self.plain_and_floor(&mut figures).await?;
            self.wake(&mut figures).await?;
            self.parked(&mut figures).await?;
            self.first_ever(&mut figures, repetition).await?;
            if !args.no_cold {
                self.cold(&mut figures).await?;
            }
            if args.ablation {
                self.ablations(&mut figures).await?;
            }
        }
        let seconds = Duration::from_secs(args.steady_seconds);
        self.steady(&mut figures, seconds, repetitions).await?;
        Ok(figures)
    }

    /// Has the store prepared by a server as users have it; tells whether that happened.
    async fn prepare_store(&self) -> Result<bool> {
        let live = Live::start(&self.options.with(&STAYS_WARM)).await?;
        live.infer(self.request()).await?;
        let started = Instant::now();
        let found = loop {
            let files = pages::files_below(&self.options.store)?;
            let has_manifest = files.iter().any(|file| file.ends_with("manifest.json"));
            // A preparation writes to the store long before it is finished.
            let patience = if files.is_empty() { 10 } else { 180 };
            if has_manifest || started.elapsed() > Duration::from_secs(patience) {
                break has_manifest;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        // Writing is over when the process has nothing left to do.
        quiet().await?;
        live.stop().await;
        Ok(found)
    }

    async fn plain_and_floor(&self, figures: &mut WakeFigures) -> Result<()> {
        quiet().await?;
        let plain = self.open_plain().await?;
        figures.plain.push_millis(plain.open + plain.first);
        figures.plain_open.push_millis(plain.open);
        figures.plain_warm.push_millis(plain.warm);
        drop(plain.session);
        let file = self.model.file();
        let touched = blocking(move || {
            let started = Instant::now();
            pages::touch(&file)?;
            Ok(started.elapsed())
        })
        .await?;
        figures.touch.push_millis(touched);
        figures.floor.push_millis(touched + plain.warm);
        Ok(())
    }

    /// Opens the file with default options and runs it.
    async fn open_plain(&self) -> Result<Plain> {
        let (runtime, model) = (self.runtime, self.model.clone());
        let plain = blocking(move || {
            // As the server does between two models: nobody starts on memory of the last one.
            dormouse_server::memory::release_memory();
            let started = Instant::now();
            let session = runtime.open(&model.file())?;
            let open = started.elapsed();
            session.run(&model.inputs, |_| {})?;
            let first = started.elapsed() - open;
            let mut runs = Vec::new();
            for _ in 0..WARM_RUNS {
                let started = Instant::now();
                session.run(&model.inputs, |_| {})?;
                runs.push(started.elapsed());
            }
            runs.sort_unstable();
            Ok(Plain {
                session,
                open,
                first,
                warm: runs[WARM_RUNS / 2],
            })
        });
        plain.await
    }

    async fn wake(&self, figures: &mut WakeFigures) -> Result<()> {
        let (took, response) = self.wake_from_zero(&self.options.with(&TO_ZERO)).await?;
        figures.wake.push_millis(took);
        if let Some(cold_start) = response.timing() {
            figures.wake_load.push_millis(cold_start.total);
        }
        let difference = self.difference(response).await?;
        figures.largest_difference = figures.largest_difference.max(difference);
        Ok(())
    }

    /// One answer of a model at zero that has been awake before in the same server.
    async fn wake_from_zero(&self, options: &LiveOptions) -> Result<(Duration, InferResponse)> {
        let live = Live::start(options).await?;
        live.infer(self.request()).await?;
        live.asleep().await?;
        quiet().await?;
        let answer = live.infer(self.request()).await?;
        live.asleep().await?;
        live.stop().await;
        Ok(answer)
    }

    async fn parked(&self, figures: &mut WakeFigures) -> Result<()> {
        let live = Live::start(&self.options.with(&TO_PARKED)).await?;
        live.infer(self.request()).await?;
        if !parks(&live).await {
            live.stop().await;
            let note = "the model was not parked";
            if !figures.notes.iter().any(|known| known == note) {
                figures.notes.push(note.to_owned());
            }
            return Ok(());
        }
        quiet().await?;
        let (took, _) = live.infer(self.request()).await?;
        figures.parked.push_millis(took);
        live.stop().await;
        // What it is compared with: the same session while it is warm.
        let live = Live::start(&self.options.with(&STAYS_WARM)).await?;
        live.infer(self.request()).await?;
        quiet().await?;
        let mut runs = Vec::new();
        for _ in 0..WARM_RUNS {
            runs.push(live.infer(self.request()).await?.0);
        }
        runs.sort_unstable();
        figures.parked_warm.push_millis(runs[WARM_RUNS / 2]);
        live.stop().await;
        Ok(())
    }

    async fn first_ever(&self, figures: &mut WakeFigures, repetition: usize) -> Result<()> {
        let store = self.scratch.join(format!("empty-store-{repetition}"));
        let live = Live::start(&self.options.over_store(&store).with(&STAYS_WARM)).await?;
        quiet().await?;
        let (took, response) = live.infer(self.request()).await?;
        figures.first_ever.push_millis(took);
        if let Some(cold_start) = response.timing() {
            figures.first_ever_load.push_millis(cold_start.total);
        }
        // What it goes on to do in the background would be in the way of the next measurement.
        let started = Instant::now();
        while prepared(&live) < 1.0 && started.elapsed() < PREPARATION {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        quiet().await?;
        live.stop().await;
        if store.exists() {
            std::fs::remove_dir_all(&store)
                .with_context(|| format!("cannot remove {}", store.display()))?;
        }
        Ok(())
    }

    async fn cold(&self, figures: &mut WakeFigures) -> Result<()> {
        if let Err(error) = self.evict() {
            let note = format!("no measurement with a cold page cache: {error}");
            if !figures.notes.contains(&note) {
                figures.notes.push(note);
            }
            return Ok(());
        }
        quiet().await?;
        let plain = self.open_plain().await?;
        figures.plain_cold.push_millis(plain.open + plain.first);
        drop(plain.session);
        let files = pages::files_below(&self.options.store)?;
        let disk = blocking(move || {
            let started = Instant::now();
            pages::read(&files)?;
            Ok(started.elapsed())
        });
        figures.disk.push_millis(disk.await?);
        let live = Live::start(&self.options.with(&TO_ZERO)).await?;
        live.infer(self.request()).await?;
        live.asleep().await?;
        quiet().await?;
        self.evict()?;
        let (took, _) = live.infer(self.request()).await?;
        figures.wake_cold.push_millis(took);
        live.asleep().await?;
        live.stop().await;
        pages::warm(&self.model.file())?;
        for file in pages::files_below(&self.options.store)? {
            pages::warm(&file)?;
        }
        Ok(())
    }

    /// Drops the model's file and the store's from the page cache.
    fn evict(&self) -> Result<()> {
        pages::evict(&self.model.file())?;
        for file in pages::files_below(&self.options.store)? {
            pages::evict(&file)?;
        }
        Ok(())
    }

    async fn ablations(&self, figures: &mut WakeFigures) -> Result<()> {
        for (name, flag) in ABLATIONS {
            let options = self.options.with(&TO_ZERO).with(&[flag]);
            let (took, _) = self.wake_from_zero(&options).await?;
            let without = figures.without.entry(name.to_owned()).or_default();
            without.push_millis(took);
        }
        // Memory is given back at the same moment as by parking.
        let (took, _) = self.wake_from_zero(&self.options.with(&TO_ZERO)).await?;
        let without = figures.without.entry(STAGED_EXIT.to_owned()).or_default();
        without.push_millis(took);
        Ok(())
    }

    /// Answers per second of a server that stays warm, of a plain session without any server and of the
    /// same one behind the least of a gRPC server, by one caller and by several.
    async fn steady(
        &self,
        figures: &mut WakeFigures,
        seconds: Duration,
        repetitions: usize,
    ) -> Result<()> {
        let live = Live::start(&self.options.with(&STAYS_WARM)).await?;
        let session = Arc::new(self.open_plain().await?.session);
        let behind = Arc::clone(&session);
        let bare = BareServer::start(move |request| behind.answer(request)).await?;
        let bare = (bare.client().await?, bare);
        // Calls for an upgrade, and gives it the time to happen where packing pays.
        let started = Instant::now();
        while started.elapsed() < seconds * 5 {
            live.infer(self.request()).await?;
            figures.packed = live.metric("dormouse_packed_sessions_total") > 0.0;
            if figures.packed && started.elapsed() >= seconds {
                break;
            }
        }
        let time = seconds / TURNS as u32;
        quiet().await?;
        for _ in 0..repetitions * TURNS {
            let plain = self.plain_rate(&session, 1, time).await?;
            figures.steady_plain.push(plain);
            tokio::time::sleep(PAUSE).await;
            let served = self.served_rate(live.client(), 1, time).await?;
            figures.steady.push(served);
            tokio::time::sleep(PAUSE).await;
            let served = self.served_rate(&bare.0, 1, time).await?;
            figures.steady_bare.push(served);
            tokio::time::sleep(PAUSE).await;
            let plain = self.plain_rate(&session, CALLERS, time).await?;
            figures.throughput_plain.push(plain);
            tokio::time::sleep(PAUSE).await;
            let served = self.served_rate(live.client(), CALLERS, time).await?;
            figures.throughput.push(served);
            tokio::time::sleep(PAUSE).await;
            let served = self.served_rate(&bare.0, CALLERS, time).await?;
            figures.throughput_bare.push(served);
            tokio::time::sleep(PAUSE).await;
        }
        live.stop().await;
        Ok(())
    }

    /// Runs of one session per second, by so many threads at once.
    async fn plain_rate(
        &self,
        session: &Arc<PlainSession>,
        callers: usize,
        time: Duration,
    ) -> Result<f64> {
        let (session, model) = (Arc::clone(session), self.model.clone());
        blocking(move || {
            let started = Instant::now();
            let call = || {
                let mut runs = 0u32;
                while runs == 0 || started.elapsed() < time {
                    session.run(&model.inputs, |_| {})?;
                    runs += 1;
                }
                anyhow::Ok(runs)
            };
            let runs = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..callers).map(|_| scope.spawn(call)).collect();
                let ended = threads.into_iter().map(|thread| {
                    let panicked = |_| anyhow::anyhow!("a session panicked");
                    thread.join().map_err(panicked)?
                });
                ended.sum::<Result<u32>>()
            })?;
            Ok(f64::from(runs) / started.elapsed().as_secs_f64())
        })
        .await
    }

    /// Answers of a server per second, to so many callers at once.
    async fn served_rate(&self, client: &Client, callers: usize, time: Duration) -> Result<f64> {
        let started = Instant::now();
        let call = async || {
            let mut answers = 0u32;
            while answers == 0 || started.elapsed() < time {
                client.infer(self.request()).await?;
                answers += 1;
            }
            anyhow::Ok(answers)
        };
        let calls = futures_util::future::join_all((0..callers).map(|_| call()));
        let answers = calls.await.into_iter().sum::<Result<u32>>()?;
        Ok(f64::from(answers) / started.elapsed().as_secs_f64())
    }

    /// The largest difference between an answer and a plain session's outputs.
    async fn difference(&self, response: InferResponse) -> Result<f64> {
        let (runtime, model) = (self.runtime, self.model.clone());
        blocking(move || {
            let session = runtime.open(&model.file())?;
            let mut answers = Vec::new();
            for (name, tensor) in response.outputs() {
                if let Ok(values) = tensor.to_vec::<f32>() {
                    answers.push((name.to_owned(), values));
                }
            }
            let mut largest = 0f64;
            session.run(&model.inputs, |output| {
                let values = output.values;
                let answer = answers.iter().find(|(name, _)| name == output.name);
                let Some((_, answer)) = answer.filter(|(_, answer)| answer.len() == values.len())
                else {
                    largest = f64::INFINITY;
                    return;
                };
                for (one, other) in answer.iter().zip(values) {
                    largest = largest.max(f64::from((one - other).abs()));
                }
            })?;
            Ok(largest)
        })
        .await
    }

    fn request(&self) -> dormouse_client::InferRequest {
        self.model.request(&self.model.name)
    }
}

/// A plain session and how long its parts took.
struct Plain {
    session: PlainSession,
    open: Duration,
    first: Duration,
    warm: Duration,
}

/// Waits until the server has parked its model; no after two seconds without.
async fn parks(live: &Live) -> bool {
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(2) {
        if live.metric("dormouse_parks_total") > 0.0 {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    false
}

/// Preparations that came to an end, good or bad.
fn prepared(live: &Live) -> f64 {
    live.metric("dormouse_preparations_total") + live.metric("dormouse_preparation_failures_total")
}

/// Runs the engine's work where blocking is allowed.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .context("the measurement panicked")?
}

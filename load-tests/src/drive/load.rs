//! One step of a run: requests are sent, recorded and watched.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use dormouse_client::ColdStart;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::check::Reference;
use super::connect::{Answer, Connected, Failure};
use super::dice::Dice;
use super::inputs::{self, ReadyRequest};
use super::machine::ProcessSample;
use super::outcome::ColdStartSeen;
use super::progress::Progress;
use super::recorder::{End, Recorder, Seen};
use super::scenario::{Cancel, Order, Scenario};

/// What requests under way get when the run is stopped.
pub(crate) const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// A server and what it is asked, for all steps of a run.
#[derive(Debug)]
pub(crate) struct Load {
    pub(crate) server: Connected,
    pub(crate) models: Vec<AskedModel>,
    /// Sums of the weights up to each model.
    weights: Vec<f64>,
    pub(crate) timeout: Duration,
    pub(crate) seed: u64,
}

/// A model and its requests.
#[derive(Debug)]
pub(crate) struct AskedModel {
    pub(crate) name: String,
    requests: Vec<ReadyRequest>,
    order: Order,
    next_request: AtomicUsize,
    cancel: Option<Cancel>,
}

/// A step under way.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) load: Arc<Load>,
    recorder: Mutex<Recorder>,
    pub(crate) stopping: AtomicBool,
    /// Told when nothing more is sent or awaited.
    pub(crate) finished: Notify,
    next_slot: AtomicUsize,
}

impl Load {
    /// Draws or reads the requests of every model.
    pub(crate) async fn prepare(scenario: &Scenario, server: Connected) -> Result<Self> {
        let mut models = Vec::with_capacity(scenario.models.len());
        let mut weights = Vec::with_capacity(scenario.models.len());
        let mut sum = 0.0;
        for (index, model) in scenario.models.iter().enumerate() {
            let mut dice = Dice::new(scenario.seed, index as u64);
            models.push(AskedModel {
                name: model.name.clone(),
                requests: inputs::requests(model, &server, &mut dice).await?,
                order: model.order,
                next_request: AtomicUsize::new(0),
                cancel: model.cancel.clone(),
            });
            sum += model.weight;
            weights.push(sum);
        }
        Ok(Self {
            server,
            models,
            weights,
            timeout: scenario.timeout,
            seed: scenario.seed,
        })
    }

    /// A model, as often as its weight says.
    pub(crate) fn draw(&self, dice: &mut Dice) -> usize {
        let sum = self.weights.last().copied().unwrap_or(0.0);
        let point = dice.fraction() * sum;
        let found = self.weights.partition_point(|&weight| weight <= point);
        found.min(self.models.len().saturating_sub(1))
    }
}

impl AskedModel {
    /// The next request. What is asked is also what the answer is to be judged by: draw it once.
    pub(crate) fn next_request(&self, dice: &mut Dice) -> &ReadyRequest {
        let count = self.requests.len();
        let index = match self.order {
            Order::Random => dice.index(count),
            Order::Sequential => self.next_request.fetch_add(1, Ordering::Relaxed) % count,
        };
        &self.requests[index]
    }
}

impl Running {
    pub(crate) fn new(load: Arc<Load>, recorder: Recorder) -> Arc<Self> {
        Arc::new(Self {
            load,
            recorder: Mutex::new(recorder),
            stopping: AtomicBool::new(false),
            finished: Notify::new(),
            next_slot: AtomicUsize::new(0),
        })
    }

    pub(crate) fn recorder(&self) -> MutexGuard<'_, Recorder> {
        self.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The recorder, once nobody records any more.
    pub(crate) fn into_recorder(self: Arc<Self>) -> Result<Recorder> {
        let running = Arc::into_inner(self).context("requests are still under way")?;
        Ok(running
            .recorder
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Sends one request and records how it ended.
    pub(crate) async fn one(&self, model: usize, due: Instant, dice: &mut Dice) {
        let asked = &self.load.models[model];
        let request = asked.next_request(dice);
        let give_up = asked.cancel.as_ref().and_then(|cancel| {
            let chosen = dice.fraction() < cancel.fraction;
            chosen.then(|| cancel.after.mul_f64(dice.fraction()))
        });
        let slot = self.next_slot.fetch_add(1, Ordering::Relaxed);
        let sent = Instant::now();
        let answer = self.ask(request, slot, give_up).await;
        let ended = Instant::now();
        let end = match answer {
            None => End::Cancelled,
            Some(Err(failure)) => End::Failed(failure),
            Some(Ok(answer)) => judged(request, &answer),
        };
        let seen = Seen {
            model,
            due,
            sent,
            ended,
            end,
        };
        self.recorder().record(seen);
    }

    /// The answer; none when the client gave up on it.
    async fn ask(
        &self,
        request: &ReadyRequest,
        slot: usize,
        give_up: Option<Duration>,
    ) -> Option<Result<Answer, Failure>> {
        let timeout = self.load.timeout;
        let limit = give_up.map_or(timeout, |give_up| give_up.min(timeout));
        let asking = self.load.server.infer(&request.prepared, slot);
        match tokio::time::timeout(limit, asking).await {
            Ok(answer) => Some(answer),
            Err(_) if give_up.is_some_and(|give_up| give_up <= timeout) => None,
            Err(_) => Some(Err(timed_out(timeout))),
        }
    }

    /// Watches the step from its start to its end: windows, the server's process, the wish to
    /// stop. Tells how the process stood when the measured time ended.
    pub(crate) async fn watch(
        &self,
        pid: Option<u32>,
        window: Duration,
        progress: &Progress,
    ) -> Result<Option<ProcessSample>> {
        let (from, to) = {
            let recorder = self.recorder();
            (recorder.from(), recorder.to())
        };
        let mut ended_early = self.sleep_until(from, progress).await;
        let first = sample(pid).await?;
        self.recorder().begin(first);
        let mut last = first;
        let mut next = from;
        while !ended_early && next < to {
            next = to.min(next + window);
            ended_early = self.sleep_until(next, progress).await;
            last = sample(pid).await?;
            let now = Instant::now();
            if ended_early {
                self.recorder().cut(now);
            }
            let glance = self.recorder().close_window(now, last)?;
            progress.show(now.saturating_duration_since(from), glance);
        }
        self.stopping.store(true, Ordering::Relaxed);
        Ok(last)
    }

    /// Whether the step ended, or is to end, before `moment`.
    async fn sleep_until(&self, moment: Instant, progress: &Progress) -> bool {
        tokio::select! {
            () = tokio::time::sleep_until(moment) => false,
            () = progress.stopped() => true,
            () = self.finished.notified() => true,
        }
    }
}

/// Waits for `driving`, but not for long once the run is to stop.
pub(crate) async fn until_stopped(progress: &Progress, driving: impl Future<Output = ()>) {
    let stopped = async {
        progress.stopped().await;
        tokio::time::sleep(LAST_ANSWERS).await;
    };
    tokio::select! {
        () = driving => {}
        () = stopped => {}
    }
}

/// Whether an answer is right, and what it says of a cold start.
pub(crate) fn judged(request: &ReadyRequest, answer: &Answer) -> End {
    if !matches!(request.reference, Reference::Nothing) {
        let complaint = match answer.outputs() {
            Ok(outputs) => request.reference.complaint(&outputs),
            Err(error) => Some(format!("{error:#}")),
        };
        if let Some(words) = complaint {
            return End::Wrong(words);
        }
    }
    End::Answered {
        cold: answer.cold().map(|cold| Box::new(told(cold))),
    }
}

/// What the server says of a cold start; the rest is the recorder's.
pub(crate) fn told(cold: &ColdStart) -> ColdStartSeen {
    ColdStartSeen {
        woke: Some(cold.total.as_secs_f64() * 1e3),
        kind: cold.kind.clone(),
        ..ColdStartSeen::default()
    }
}

pub(crate) fn timed_out(after: Duration) -> Failure {
    Failure::new("timeout", format!("no answer within {after:?}"))
}

async fn sample(pid: Option<u32>) -> Result<Option<ProcessSample>> {
    let Some(pid) = pid else {
        return Ok(None);
    };
    let sample = tokio::task::spawn_blocking(move || ProcessSample::of(pid)).await?;
    sample.map(Some)
}

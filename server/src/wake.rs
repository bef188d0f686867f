//! What waking and falling asleep share over all models: the prepared store, the memory budget,
//! the threads that work in the background, and which mechanisms are switched on.

pub(crate) mod populate;

use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dormouse_core::id::ByteSize;
use dormouse_model_store::store::{PreparedModel, Store, StoreConfig};
use tokio_util::sync::CancellationToken;

use crate::cli::store::default_folder;
use crate::clock::Clock;
use crate::config::{MemoryBudgetSetting, WakeConfig};
use crate::engine::{Engine, RunBuffers};
use crate::host::Host;
use crate::memory::{MemoryLimit, Moves, PressureGauge};
use crate::preparation::Preparation;
use crate::priority::Background;
use crate::request::Tensor;
use crate::residency::Residency;
use crate::timeline::{LoadStage, TimelineRecorder};

/// Threads that bring weights in. They mostly wait for the disk, so one core has two as well; more
/// bring no more out of it.
const POPULATORS: std::ops::RangeInclusive<usize> = 2..=4;

/// When memory is short, this part of all there may be is asked for at a time.
const RELIEF: u64 = 16;

/// Shared by every unit.
#[derive(Debug)]
pub struct Wake {
    /// None: models are loaded from their files only.
    pub preparation: Option<Arc<Preparation>>,
    pub residency: Arc<Residency>,
    pub switches: Switches,
    /// What changes how much memory the process has.
    pub moves: Arc<Moves>,
    /// Builds sessions.
    pub loaders: Background,
    /// Builds those that are known to take a moment only, and does not give way.
    pub quick_loaders: Background,
    /// Brings weights in.
    pub populators: Background,
    /// Prepares models and packs weights, one at a time.
    pub preparers: Background,
}

/// Mechanisms that can be switched off to see what they are worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switches {
    /// Models are prepared after their first load.
    pub prepare: bool,
    /// Weights are brought in while the session is built.
    pub overlap: bool,
    /// One session and one copy of the weights serve every run.
    pub sharing: bool,
    /// An idle model is parked before it is closed.
    pub staging: bool,
}

impl Wake {
    /// Opens the store and sizes the budget. A store that cannot be opened is done without.
    pub fn new(
        config: &WakeConfig,
        load_threads: usize,
        engine: &Arc<dyn Engine>,
        clock: Clock,
    ) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        Self {
            preparation: open_store(config)
                .map(|store| Arc::new(Preparation::new(store, Arc::clone(engine)))),
            residency: Arc::new(Residency::new(budget(config.memory_budget), clock)),
            switches: Switches {
                prepare: config.prepare,
                overlap: config.overlap,
                sharing: config.sharing,
                staging: config.staging,
            },
            moves: Arc::default(),
            loaders: Background::new("load", load_threads),
            quick_loaders: Background::with_niceness("load", load_threads, 0),
            populators: Background::new(
                "populate",
                cores.clamp(*POPULATORS.start(), *POPULATORS.end()),
            ),
            preparers: Background::new("prepare", 1),
        }
    }

    /// Brings a prepared model's weights in, on several threads; returns when all of them are
    /// there. Nothing depends on it: what is missing comes when it is first read.
    pub fn populate(&self, prepared: &Arc<PreparedModel>, recorder: &TimelineRecorder) {
        for job in self.start_populating(prepared, &[], recorder) {
            // A job that failed leaves its part to the runs.
            let _ = job.wait();
        }
    }

    /// Begins to have the buffers ready that the first run will ask for. Nothing depends on it.
    pub fn start_buffers(
        &self,
        engine: &Arc<dyn Engine>,
        buffers: Arc<RunBuffers>,
        recorder: &TimelineRecorder,
    ) {
        if buffers.0.is_empty() {
            return;
        }
        let (engine, recorder) = (Arc::clone(engine), recorder.clone());
        let moves = Arc::clone(&self.moves);
        let job = self.populators.spawn(move || {
            let _move = moves.begin();
            let stage = recorder.stage(LoadStage::Buffers);
            stage.bytes(engine.ready_buffers(&buffers));
        });
        if let Err(error) = job {
            tracing::debug!(%error, "buffers are not made ahead of their use");
        }
    }

    /// Begins to bring a prepared model's weights in and returns at once. `asked` are inputs that
    /// its first run will have.
    pub fn start_populating(
        &self,
        prepared: &Arc<PreparedModel>,
        asked: &[Tensor],
        recorder: &TimelineRecorder,
    ) -> Vec<crate::priority::Job<()>> {
        let parts = Arc::new(populate::parts(prepared, asked));
        let threads = self.populators.jobs_at_once().min(parts.len());
        let next = Arc::new(AtomicU64::new(0));
        let mut jobs = Vec::new();
        for _ in 0..threads {
            let (parts, next) = (Arc::clone(&parts), Arc::clone(&next));
            let (prepared, recorder) = (Arc::clone(prepared), recorder.clone());
            let job = self.populators.spawn(move || {
                let stage = recorder.stage(LoadStage::Populate);
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed) as usize;
                    let Some(part) = parts.get(index) else {
                        return;
                    };
                    if let Err(error) = part.bring_in(&prepared) {
                        tracing::debug!(%error, "weights could not be brought in ahead of their use");
                        return;
                    }
                    stage.bytes(part.length);
                }
            });
            match job {
                Ok(job) => jobs.push(job),
                Err(error) => {
                    tracing::debug!(%error, "weights are not brought in ahead of their use");
                    break;
                }
            }
        }
        jobs
    }
}

/// How often it is looked at how short memory is, and how often while it is short.
const LOOK: Duration = Duration::from_secs(1);
const LOOK_CLOSER: Duration = Duration::from_millis(250);

/// Tells of the memory that models hold, and has idle ones go when the machine runs out of it
/// whatever the budget says.
pub async fn watch_memory(host: &Host, stop: CancellationToken) {
    let gauge = PressureGauge::new();
    let mut was_critical = false;
    let mut pause = Duration::ZERO;
    loop {
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = stop.cancelled() => return,
        }
        let residency = &host.wake.residency;
        host.metrics
            .memory(&residency.usage(), residency.evictions());
        // A parked model that was called has its weights back without having asked.
        residency.relieve();
        let pressure = gauge.sample();
        let is_critical = pressure.is_critical();
        host.in_flight.set_short(is_critical);
        if is_critical != was_critical {
            was_critical = is_critical;
            let headroom = pressure.headroom_bytes().map(ByteSize);
            match is_critical {
                true => tracing::warn!(?headroom, "memory is almost used up: refusing requests"),
                false => tracing::info!(?headroom, "memory is there again: taking requests"),
            }
        }
        pause = LOOK;
        if !pressure.is_high() {
            continue;
        }
        pause = LOOK_CLOSER;
        // Unmapping takes a while; this thread has requests to serve.
        let engine = Arc::clone(&host.engine);
        let _ = tokio::task::spawn_blocking(move || engine.release_memory()).await;
        let wanted = pressure.limit_bytes.unwrap_or(0) / RELIEF;
        let evicted = residency.free_up(wanted);
        if evicted > 0 {
            tracing::warn!(evicted, headroom = ?pressure.headroom_bytes().map(ByteSize), "memory is short: idle models give theirs up");
        }
    }
}

/// The store that a configuration names, none when it is switched off or cannot be used.
fn open_store(config: &WakeConfig) -> Option<Arc<Store>> {
    if !config.use_store {
        return None;
    }
    let Some(dir) = config.store.clone().or_else(|| default_folder().ok()) else {
        tracing::warn!(
            "no cache directory is known, so models are not prepared: set --store, DORMOUSE_CACHE_DIR or HOME"
        );
        return None;
    };
    let opened = Store::open(StoreConfig {
        dir: dir.clone(),
        max_bytes: config.store_max_size.0,
    });
    match opened {
        Ok(store) => {
            if store.is_read_only() {
                tracing::warn!(dir = %dir.display(), "the prepared store cannot be written: models that are not in it are loaded from their files each time");
            }
            Some(store)
        }
        Err(error) => {
            tracing::warn!(dir = %dir.display(), %error, "the prepared store cannot be used; models are loaded from their files");
            None
        }
    }
}

fn budget(setting: MemoryBudgetSetting) -> u64 {
    let bytes = match setting {
        MemoryBudgetSetting::Unlimited => return u64::MAX,
        MemoryBudgetSetting::Bytes(bytes) => bytes.0,
        MemoryBudgetSetting::Auto => match MemoryLimit::detect() {
            None => {
                tracing::warn!(
                    "how much memory there is cannot be found out: models may use any amount (--memory-budget)"
                );
                return u64::MAX;
            }
            Some(limit) => limit.default_budget(),
        },
    };
    tracing::info!(budget = %ByteSize(bytes), "memory budget of models");
    bytes
}

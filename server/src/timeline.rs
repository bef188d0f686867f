//! What cold starts spent their time on: stages that may overlap, what they moved, who paid.

mod header;
mod recorder;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

pub use self::recorder::{StageGuard, TimelineRecorder};

/// What a cold start spends time on. The labels are part of what clients and dashboards read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum LoadStage {
    /// Waiting for a place among the loads under way and for memory to be granted.
    Queue,
    /// Fetching files of a remote repository.
    Fetch,
    /// Attempts that failed before the one that did not.
    FailedAttempt,
    /// Finding what the prepared store has of the model, and mapping it.
    LookUp,
    /// Reading the model's own files.
    Read,
    /// Bringing mapped weights in ahead of their use.
    Populate,
    /// Having the buffers ready that the first run asks for.
    Buffers,
    /// Creating what the engine shares among all models.
    Environment,
    /// Loading a model that is new in a process that is thrown away.
    Trial,
    /// Building the session.
    Session,
    /// Running the configured warm-ups.
    Warmup,
    /// The first run that a request waited for.
    FirstRun,
    /// Building the packed session that replaces the first one.
    Pack,
}

impl LoadStage {
    pub const ALL: [Self; 13] = [
        Self::Queue,
        Self::Fetch,
        Self::FailedAttempt,
        Self::LookUp,
        Self::Read,
        Self::Populate,
        Self::Buffers,
        Self::Environment,
        Self::Trial,
        Self::Session,
        Self::Warmup,
        Self::FirstRun,
        Self::Pack,
    ];

    /// A word that is a token of HTTP and a good value of a metric's label.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Fetch => "fetch",
            Self::FailedAttempt => "failed-attempt",
            Self::LookUp => "look-up",
            Self::Read => "read",
            Self::Populate => "populate",
            Self::Buffers => "buffers",
            Self::Environment => "environment",
            Self::Trial => "trial",
            Self::Session => "session",
            Self::Warmup => "warmup",
            Self::FirstRun => "first-run",
            Self::Pack => "pack",
        }
    }
}

/// What a model was woken from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ColdStart {
    /// The files of its repository, as on its first load ever.
    #[default]
    FromSource,
    /// The prepared store.
    Prepared,
    /// A session that was kept without its weights.
    Parked,
}

impl ColdStart {
    /// A token of HTTP, as the labels of stages are.
    pub const fn label(self) -> &'static str {
        match self {
            Self::FromSource => "source",
            Self::Prepared => "prepared",
            Self::Parked => "parked",
        }
    }
}

/// One stage of a cold start, on one of the lanes that ran side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageSpan {
    pub stage: LoadStage,
    /// Two spans on one lane never overlap.
    pub lane: u32,
    /// From the start of the cold start.
    pub start: Duration,
    /// So far, if it is still running.
    pub duration: Duration,
    /// Bytes moved in this stage, 0 when that says nothing.
    pub bytes: u64,
    pub running: bool,
}

impl StageSpan {
    fn end(&self) -> Duration {
        self.start + self.duration
    }
}

/// The stages of one cold start, in the order they started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadTimeline {
    pub kind: ColdStart,
    /// No request waited for it: it was loaded by hand, at the start of the server or ahead of an
    /// expected request.
    pub ahead: bool,
    pub started: SystemTime,
    /// Until the model could run. Stages in the background may end later.
    pub total: Duration,
    pub stages: Vec<StageSpan>,
}

impl Default for LoadTimeline {
    fn default() -> Self {
        Self {
            kind: ColdStart::default(),
            ahead: false,
            started: SystemTime::UNIX_EPOCH,
            total: Duration::ZERO,
            stages: Vec::new(),
        }
    }
}

impl LoadTimeline {
    /// Bytes moved by all stages.
    pub fn bytes(&self) -> u64 {
        let bytes = self.stages.iter().map(|span| span.bytes);
        bytes.fold(0, u64::saturating_add)
    }

    /// The time that doing stages side by side saved: what each of them took, without the time
    /// that passed. A stage on several lanes took as long as at least one of them was in it, and
    /// packing saves nothing: nobody waits for it.
    pub fn overlap(&self) -> Duration {
        let waited = |span: &&StageSpan| span.stage != LoadStage::Pack;
        let each = LoadStage::ALL.into_iter().map(|stage| {
            let spans = self.stages.iter().filter(waited);
            covered(spans.filter(|span| span.stage == stage))
        });
        let sum = each.fold(Duration::ZERO, Duration::saturating_add);
        sum.saturating_sub(covered(self.stages.iter().filter(waited)))
    }

    /// What loading itself took: without waiting for a place to do it in.
    pub fn loading(&self) -> Duration {
        let waited = self.stages.iter();
        let waited = waited.filter(|span| span.stage == LoadStage::Queue);
        self.total.saturating_sub(covered(waited))
    }
}

/// The time during which at least one of the stages ran.
fn covered<'a>(stages: impl IntoIterator<Item = &'a StageSpan>) -> Duration {
    let mut spans: Vec<_> = stages.into_iter().map(|s| (s.start, s.end())).collect();
    spans.sort_unstable();
    let mut sum = Duration::ZERO;
    let mut reached = Duration::ZERO;
    for (start, end) in spans {
        sum += end.saturating_sub(start.max(reached));
        reached = reached.max(end);
    }
    sum
}

/// What a request that found its model asleep spent its time on.
#[derive(Clone, Debug, Default)]
pub struct ColdRequest {
    pub load: Arc<LoadTimeline>,
    /// From its arrival to the start of its run.
    pub waited: Duration,
    pub run: Duration,
    /// From its arrival to its answer.
    pub total: Duration,
}

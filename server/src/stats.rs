//! Counters per model version, exact to the unit: every request that reached a model is counted
//! once, as a success or as a failure.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dormouse_core::id::ModelId;
use parking_lot::Mutex;

use crate::activity::Traffic;
use crate::timeline::{LoadTimeline, TimelineRecorder};

/// Cold starts that are remembered of one model version.
const COLD_STARTS: usize = 16;

/// How often something happened and how long it took together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DurationCount {
    pub count: u64,
    pub nanos: u64,
}

impl DurationCount {
    fn add(&mut self, took: Duration) {
        self.count += 1;
        self.nanos += took.as_nanos() as u64;
    }
}

/// Triton's `InferStatistics`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InferStatistics {
    pub success: DurationCount,
    pub fail: DurationCount,
    pub queue: DurationCount,
    pub compute_input: DurationCount,
    pub compute_infer: DurationCount,
    pub compute_output: DurationCount,
    pub cache_hit: DurationCount,
    pub cache_miss: DurationCount,
}

/// Executions of one batch size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchStatistics {
    pub batch_size: u64,
    pub compute_input: DurationCount,
    pub compute_infer: DurationCount,
    pub compute_output: DurationCount,
}

/// What a model version has done since the server started.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VersionStatistics {
    pub name: Arc<str>,
    pub version: u64,
    /// Milliseconds since the epoch of the last inference, 0 for never.
    pub last_inference_ms: u64,
    /// Rows inferred.
    pub inference_count: u64,
    /// Runs of the graph.
    pub execution_count: u64,
    pub inference: InferStatistics,
    pub batches: Vec<BatchStatistics>,
    /// The latest cold starts, the oldest first; none where many models are asked for at once.
    pub cold_starts: Vec<LoadTimeline>,
}

/// How long the parts of one run took.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunDurations {
    pub compute_input: Duration,
    pub compute_infer: Duration,
    pub compute_output: Duration,
}

impl RunDurations {
    /// All parts together.
    pub fn total(&self) -> Duration {
        self.compute_input + self.compute_infer + self.compute_output
    }
}

/// The live counters of a model version. They outlive sessions and reloads.
#[derive(Debug, Default)]
pub struct VersionCounters {
    pub traffic: Traffic,
    counters: Mutex<Counters>,
    /// All there were, also those that are no longer remembered.
    cold_start_count: AtomicU64,
    /// Recorders, not what they told when the model woke: stages in the background go on.
    cold_starts: Mutex<VecDeque<TimelineRecorder>>,
}

#[derive(Debug, Default)]
struct Counters {
    last_inference_ms: u64,
    inference_count: u64,
    execution_count: u64,
    inference: InferStatistics,
    batches: BTreeMap<u64, BatchStatistics>,
}

impl VersionCounters {
    /// Counts one run of `rows` rows that answered.
    pub fn executed(&self, rows: u32, took: &RunDurations) {
        let mut counters = self.counters.lock();
        counters.execution_count += 1;
        counters.inference_count += u64::from(rows);
        counters.last_inference_ms = epoch_millis();
        let batch = counters.batches.entry(u64::from(rows)).or_default();
        batch.batch_size = u64::from(rows);
        batch.compute_input.add(took.compute_input);
        batch.compute_infer.add(took.compute_infer);
        batch.compute_output.add(took.compute_output);
    }

    /// Counts one answered request.
    pub fn succeeded(&self, total: Duration, queued: Duration, took: &RunDurations) {
        let inference = &mut self.counters.lock().inference;
        inference.success.add(total);
        inference.queue.add(queued);
        inference.compute_input.add(took.compute_input);
        inference.compute_infer.add(took.compute_infer);
        inference.compute_output.add(took.compute_output);
    }

    /// Counts one request that the response cache answered after looking for `took`.
    pub fn cache_hit(&self, total: Duration, took: Duration) {
        let inference = &mut self.counters.lock().inference;
        inference.success.add(total);
        // As in Triton, a hit has waited, if for no time at all.
        inference.queue.add(Duration::ZERO);
        inference.cache_hit.add(took);
    }

    /// Counts one request whose answer was not in the response cache.
    pub fn cache_miss(&self, took: Duration) {
        self.counters.lock().inference.cache_miss.add(took);
    }

    /// Counts one request that got an error.
    pub fn failed(&self, total: Duration) {
        self.counters.lock().inference.fail.add(total);
    }

    /// Remembers a cold start, in place of the oldest.
    pub fn woke(&self, recorder: TimelineRecorder) {
        let mut cold_starts = self.cold_starts.lock();
        if cold_starts.len() == COLD_STARTS {
            cold_starts.pop_front();
        }
        cold_starts.push_back(recorder);
        self.cold_start_count.fetch_add(1, Ordering::Relaxed);
    }

    /// How often the model woke.
    pub fn cold_start_count(&self) -> u64 {
        self.cold_start_count.load(Ordering::Relaxed)
    }

    /// The latest cold starts, the oldest first.
    pub fn cold_starts(&self) -> Vec<LoadTimeline> {
        let cold_starts = self.cold_starts.lock();
        cold_starts.iter().map(TimelineRecorder::timeline).collect()
    }

    pub fn snapshot(&self, id: &ModelId) -> VersionStatistics {
        let counters = self.counters.lock();
        VersionStatistics {
            name: Arc::clone(&id.name),
            version: id.version.0,
            last_inference_ms: counters.last_inference_ms,
            inference_count: counters.inference_count,
            execution_count: counters.execution_count,
            inference: counters.inference,
            batches: counters.batches.values().copied().collect(),
            cold_starts: Vec::new(),
        }
    }
}

fn epoch_millis() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

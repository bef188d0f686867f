//! Records stages from any number of threads, also after the model can run already.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use dormouse_core::id::ModelId;
use dormouse_core::time::Timestamp;
use parking_lot::Mutex;
use tracing::Span;
use tracing::field::Empty;

use super::{ColdStart, LoadStage, LoadTimeline, StageSpan};
use crate::clock::Clock;
use crate::metrics::Metrics;
use crate::spans::{LoadSpan, SpanContext};

/// Spans kept of one cold start; later ones are added to the last of their stage.
const MAX_SPANS: usize = 64;

/// What ended so long before a cold start began does not belong to it.
const SAME_START: Duration = Duration::from_secs(1);

/// The timeline of a cold start while it is made. Clones record into the same one.
#[derive(Clone, Debug)]
pub struct TimelineRecorder {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    clock: Clock,
    metrics: Metrics,
    ran: AtomicBool,
    /// Present when it is recorded for others.
    span: OnceLock<LoadSpan>,
    record: Mutex<Record>,
}

#[derive(Debug)]
struct Record {
    started: Timestamp,
    started_at: SystemTime,
    kind: ColdStart,
    ahead: bool,
    /// When the model could run.
    finished: Option<Timestamp>,
    /// Where the present attempt began.
    attempt: Timestamp,
    entries: Vec<Entry>,
    /// Closed when the model can run; those of stages that go on keep it open for themselves.
    span: Span,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    stage: LoadStage,
    lane: u32,
    start: Timestamp,
    /// None while it runs.
    end: Option<Timestamp>,
    bytes: u64,
}

impl Entry {
    /// Whether they have a moment in common; one that still runs may have any.
    fn meets(&self, start: Timestamp, end: Option<Timestamp>) -> bool {
        self.end.is_none_or(|mine| mine > start) && end.is_none_or(|end| end > self.start)
    }
}

/// A stage under way; it ends when this is dropped.
#[derive(Debug)]
pub struct StageGuard {
    shared: Arc<Shared>,
    stage: LoadStage,
    start: Timestamp,
    /// None when there were too many spans already.
    entry: Option<usize>,
    bytes: AtomicU64,
    span: Span,
}

impl TimelineRecorder {
    /// A cold start that begins now.
    pub fn start(clock: Clock, metrics: &Metrics, model: &ModelId) -> Self {
        let started = clock.now();
        let span = tracing::info_span!(
            "load",
            model = %model.name,
            version = model.version.0,
            kind = Empty,
            bytes = Empty,
            overlap_seconds = Empty,
        );
        Self {
            shared: Arc::new(Shared {
                clock,
                metrics: metrics.clone(),
                ran: AtomicBool::new(false),
                span: OnceLock::new(),
                record: Mutex::new(Record {
                    started,
                    started_at: SystemTime::now(),
                    kind: ColdStart::default(),
                    ahead: false,
                    finished: None,
                    attempt: started,
                    entries: Vec::new(),
                    span,
                }),
            }),
        }
    }

    /// Has the cold start told to others as a span, if there is one.
    pub fn trace(&self, span: Option<LoadSpan>) {
        if let Some(span) = span {
            // Asked for once, before any stage.
            let _ = self.shared.span.set(span);
        }
    }

    /// The span of it.
    pub fn span(&self) -> Option<SpanContext> {
        self.shared.span.get().map(LoadSpan::context)
    }

    /// The load came to nothing.
    pub fn failed(&self, error: &dyn std::fmt::Display) {
        if let Some(span) = self.shared.span.get() {
            let record = self.shared.record.lock();
            let (kind, entries) = (record.kind.label(), record.entries.clone());
            let during = (record.started, self.shared.clock.now());
            drop(record);
            self.shared.tell_stages(span, &entries);
            span.ended(during, kind, Some(error.to_string()));
        }
    }

    /// Says what the model is woken from, once that is known.
    pub fn set_kind(&self, kind: ColdStart) {
        self.shared.record.lock().kind = kind;
    }

    /// Begins a stage; it lasts until the guard is dropped.
    pub fn stage(&self, stage: LoadStage) -> StageGuard {
        let start = self.shared.clock.now();
        let mut record = self.shared.record.lock();
        let span = tracing::info_span!(
            parent: &record.span,
            "stage",
            otel.name = stage.label(),
            stage = stage.label(),
            bytes = Empty,
        );
        let entry = record.add(stage, start, None);
        drop(record);
        StageGuard {
            shared: Arc::clone(&self.shared),
            stage,
            start,
            entry,
            bytes: AtomicU64::new(0),
            span,
        }
    }

    /// Does something as a stage.
    pub fn during<T>(&self, stage: LoadStage, work: impl FnOnce() -> T) -> T {
        let _stage = self.stage(stage);
        work()
    }

    /// Tells of a stage that took place before, for the same request: the cold start began there.
    pub fn preceded_by(&self, stage: LoadStage, start: Timestamp, end: Timestamp, bytes: u64) {
        let mut record = self.shared.record.lock();
        if record.started.since(end) > SAME_START {
            return;
        }
        let earlier = record.started.since(start);
        record.started = record.started.min(start);
        record.started_at = record
            .started_at
            .checked_sub(earlier)
            .unwrap_or(record.started_at);
        if let Some(index) = record.add(stage, start, Some(end)) {
            record.entries[index].bytes = bytes;
        }
    }

    /// Gathers what an attempt recorded into one stage: another attempt begins.
    pub fn attempt_failed(&self) {
        let now = self.shared.clock.now();
        let mut record = self.shared.record.lock();
        let attempt = record.attempt;
        // What still runs has a guard that knows its place.
        while let Some(last) = record.entries.last()
            && last.start >= attempt
            && last.end.is_some()
            && last.stage != LoadStage::Queue
            && last.stage != LoadStage::FailedAttempt
        {
            record.entries.pop();
        }
        let started = record.entries.iter().filter_map(|entry| entry.end).max();
        let start = started.map_or(attempt, |ended| ended.max(attempt));
        record.add(LoadStage::FailedAttempt, start, Some(now));
        record.attempt = now;
    }

    /// The model can run now. Stages that still run are told of as far as they got.
    pub fn finish(&self, ahead: bool) -> LoadTimeline {
        let now = self.shared.clock.now();
        let mut record = self.shared.record.lock();
        record.finished = Some(now);
        record.ahead = ahead;
        let timeline = self.shared.timeline(&record, now);
        let span = std::mem::replace(&mut record.span, Span::none());
        let ended = record.entries.clone();
        let started = record.started;
        drop(record);
        span.record("kind", timeline.kind.label());
        span.record("bytes", timeline.bytes());
        span.record("overlap_seconds", timeline.overlap().as_secs_f64());
        let metrics = &self.shared.metrics;
        metrics.load_overlap(timeline.overlap());
        if let Some(span) = self.shared.span.get() {
            self.shared.tell_stages(span, &ended);
            span.ended((started, now), timeline.kind.label(), None);
        }
        for entry in ended {
            if let Some(end) = entry.end {
                metrics.load_stage(entry.stage.label(), end - entry.start, entry.bytes);
            }
        }
        timeline
    }

    /// Tells of the first run that a request waited for; later ones change nothing.
    pub fn first_run(&self, start: Timestamp, end: Timestamp) {
        if self.shared.ran.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut record = self.shared.record.lock();
        record.add(LoadStage::FirstRun, start, Some(end));
        drop(record);
        let label = LoadStage::FirstRun.label();
        if let Some(span) = self.shared.span.get() {
            span.stage(label, (start, end), 0);
        }
        self.shared.metrics.load_stage(label, end - start, 0);
    }

    /// What is known by now.
    pub fn timeline(&self) -> LoadTimeline {
        let now = self.shared.clock.now();
        self.shared.timeline(&self.shared.record.lock(), now)
    }
}

impl Record {
    /// Enters a span on the first lane that is free all the while.
    fn add(&mut self, stage: LoadStage, start: Timestamp, end: Option<Timestamp>) -> Option<usize> {
        if self.entries.len() >= MAX_SPANS {
            return None;
        }
        let meeting = self.entries.iter().filter(|entry| entry.meets(start, end));
        let taken: Vec<u32> = meeting.map(|entry| entry.lane).collect();
        let lane = (0..).find(|lane| !taken.contains(lane));
        self.entries.push(Entry {
            stage,
            lane: lane.expect("there are more lanes than spans"),
            start,
            end,
            bytes: 0,
        });
        Some(self.entries.len() - 1)
    }

    /// The entry of a guard, or the one that stands for all that came too late.
    fn entry(&mut self, guard: &StageGuard) -> Option<&mut Entry> {
        match guard.entry {
            Some(index) => self.entries.get_mut(index),
            None => {
                let mut entries = self.entries.iter_mut().rev();
                entries.find(|entry| entry.stage == guard.stage)
            }
        }
    }
}

impl Shared {
    /// Tells of the stages that have ended; the others are told of when they do.
    fn tell_stages(&self, span: &LoadSpan, entries: &[Entry]) {
        for entry in entries {
            if let Some(end) = entry.end {
                span.stage(entry.stage.label(), (entry.start, end), entry.bytes);
            }
        }
    }

    fn timeline(&self, record: &Record, now: Timestamp) -> LoadTimeline {
        let span = |entry: &Entry| StageSpan {
            stage: entry.stage,
            lane: entry.lane,
            start: entry.start - record.started,
            duration: entry.end.unwrap_or(now) - entry.start,
            bytes: entry.bytes,
            running: entry.end.is_none(),
        };
        let mut stages: Vec<StageSpan> = record.entries.iter().map(span).collect();
        stages.sort_by_key(|span| span.start);
        LoadTimeline {
            kind: record.kind,
            ahead: record.ahead,
            started: record.started_at,
            total: record.finished.unwrap_or(now) - record.started,
            stages,
        }
    }
}

impl StageGuard {
    /// Adds bytes that this stage moved.
    pub fn bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let mut record = self.shared.record.lock();
        if let Some(entry) = record.entry(self) {
            entry.bytes = entry.bytes.saturating_add(bytes);
        }
    }
}

impl Drop for StageGuard {
    fn drop(&mut self) {
        let now = self.shared.clock.now();
        let mut record = self.shared.record.lock();
        let finished = record.finished.is_some();
        // Merged into another's entry that still runs, only the bytes count.
        if let Some(entry) = record.entry(self)
            && (self.entry.is_some() || entry.end.is_some())
        {
            entry.end = entry.end.max(Some(now));
        }
        drop(record);
        let bytes = self.bytes.load(Ordering::Relaxed);
        if bytes > 0 {
            self.span.record("bytes", bytes);
        }
        if finished {
            let metrics = &self.shared.metrics;
            metrics.load_stage(self.stage.label(), now - self.start, bytes);
            if let Some(span) = self.shared.span.get() {
                span.stage(self.stage.label(), (self.start, now), bytes);
            }
        }
    }
}

//! Counts and distributions of one step, and their course over time.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use hdrhistogram::serialization::{Serializer, V2Serializer};
use tokio::time::Instant;

use super::connect::Failure;
use super::machine::ProcessSample;
use super::outcome::{ColdStartSeen, Figures, Interval, Latencies, ProcessUse, Step, Window};

/// Cold starts of a step that are told one by one.
const MOST_COLD: usize = 1000;
/// Wrong answers of a step that are told in words.
const MOST_MISMATCHES: usize = 10;
/// Kinds of errors that are counted apart; a server that invents more gets them together.
const MOST_KINDS: usize = 64;
const OTHER: &str = "other";
/// Three digits of every time.
const DIGITS: u8 = 3;
/// Longer times than a week count as one, in nanoseconds.
const LONGEST: u64 = 7 * 24 * 3600 * 1_000_000_000;

/// One request, as its client saw it.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) model: usize,
    pub(crate) due: Instant,
    pub(crate) sent: Instant,
    pub(crate) ended: Instant,
    pub(crate) end: End,
}

/// How a request ended.
#[derive(Debug)]
pub(crate) enum End {
    Answered { cold: Option<Box<ColdStartSeen>> },
    Wrong(String),
    Failed(Failure),
    Cancelled,
}

/// Nanoseconds.
type Times = Histogram<u64>;

/// What is known of one model, or of all.
#[derive(Debug, Default)]
struct Tally {
    sent: u64,
    answered: u64,
    wrong: u64,
    cancelled: u64,
    not_sent: u64,
    cold: u64,
    /// Answers within the measured time, whenever they were asked for.
    within: u64,
    errors: BTreeMap<String, u64>,
    /// Made with the first time that goes in: with many models most of them stay small.
    latency: Option<Times>,
    service: Option<Times>,
    late: Option<Times>,
    error_latency: Option<Times>,
}

/// Watches one step.
#[derive(Debug)]
pub(crate) struct Recorder {
    names: Vec<String>,
    /// The measured time.
    from: Instant,
    to: Instant,
    /// When the run started, which intervals count from.
    run_start: Instant,
    all: Tally,
    models: Vec<Tally>,
    warmup_requests: u64,
    /// Requests that ended within the measured time.
    ended_within: u64,
    window: Tally,
    window_models: Vec<Option<Times>>,
    window_start: Instant,
    windows: Vec<Window>,
    intervals: Vec<Interval>,
    cold: Vec<ColdStartSeen>,
    mismatches: Vec<String>,
    error_examples: BTreeMap<String, String>,
    usage: Usage,
}

/// The server process over time.
#[derive(Debug, Default)]
struct Usage {
    first: Option<ProcessSample>,
    last: Option<ProcessSample>,
    largest: u64,
}

/// What a progress bar says.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Glance {
    pub(crate) per_second: f64,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) errors: u64,
    pub(crate) cold: u64,
}

impl Recorder {
    /// Measures from `from` to `to`; what is due before is warm-up.
    pub(crate) fn new(names: Vec<String>, run_start: Instant, from: Instant, to: Instant) -> Self {
        let models = names.len();
        Self {
            names,
            from,
            to,
            run_start,
            all: Tally::default(),
            models: (0..models).map(|_| Tally::default()).collect(),
            warmup_requests: 0,
            ended_within: 0,
            window: Tally::default(),
            window_models: vec![None; models],
            window_start: from,
            windows: Vec::new(),
            intervals: Vec::new(),
            cold: Vec::new(),
            mismatches: Vec::new(),
            error_examples: BTreeMap::new(),
            usage: Usage::default(),
        }
    }

    /// Takes in one request.
    pub(crate) fn record(&mut self, seen: Seen) {
        let Seen { model, ended, .. } = seen;
        if ended >= self.from && ended <= self.to {
            self.ended_within += 1;
            if matches!(seen.end, End::Answered { .. }) {
                self.all.within += 1;
                self.models[model].within += 1;
            }
        }
        if seen.due < self.from {
            self.warmup_requests += 1;
            return;
        }
        for tally in [&mut self.all, &mut self.models[model], &mut self.window] {
            tally.record(&seen);
        }
        match seen.end {
            End::Answered { cold } => {
                let took = nanos(ended.duration_since(seen.due));
                put(&mut self.window_models[model], took);
                if let Some(mut cold) = cold
                    && self.cold.len() < MOST_COLD
                {
                    cold.model.clone_from(&self.names[model]);
                    cold.at_seconds = ended.duration_since(self.from).as_secs_f64();
                    cold.latency = millis(took);
                    self.cold.push(*cold);
                }
            }
            End::Wrong(words) => {
                if self.mismatches.len() < MOST_MISMATCHES {
                    let name = &self.names[model];
                    self.mismatches.push(format!("model '{name}': {words}"));
                }
            }
            End::Failed(failure) => {
                let examples = &mut self.error_examples;
                if examples.len() < MOST_KINDS || examples.contains_key(&failure.kind) {
                    examples.entry(failure.kind).or_insert(failure.message);
                }
            }
            End::Cancelled => {}
        }
    }

    /// Takes in a request that was due while too many others were under way.
    pub(crate) fn not_sent(&mut self, model: usize, due: Instant) {
        if due < self.from {
            return;
        }
        for tally in [&mut self.all, &mut self.models[model], &mut self.window] {
            tally.not_sent += 1;
        }
    }

    /// The measured time begins: what the process has used until now is not the step's.
    pub(crate) fn begin(&mut self, process: Option<ProcessSample>) {
        self.usage = Usage {
            first: process,
            last: process,
            largest: process.map_or(0, |sample| sample.resident_bytes),
        };
    }

    /// Ends a window and tells of it.
    pub(crate) fn close_window(
        &mut self,
        now: Instant,
        process: Option<ProcessSample>,
    ) -> Result<Glance> {
        let tally = std::mem::take(&mut self.window);
        let start = self.window_start;
        let length = now.saturating_duration_since(start);
        self.window_start = now;
        for (name, slot) in self.names.iter().zip(&mut self.window_models) {
            if let Some(found) = slot.take() {
                self.intervals.push(Interval {
                    model: name.clone(),
                    start: start.saturating_duration_since(self.run_start),
                    length,
                    histogram: serialised(&found)?,
                });
            }
        }
        let ended = tally.ended();
        let used = match (self.usage.last, process) {
            (Some(before), Some(now)) => Some(used(before, now, ended, now.resident_bytes)),
            _ => None,
        };
        if let Some(process) = process {
            self.usage.last = Some(process);
            self.usage.largest = self.usage.largest.max(process.resident_bytes);
        }
        let latency = latencies(tally.latency.as_ref());
        let seconds = length.as_secs_f64();
        let glance = Glance {
            per_second: tally.answered as f64 / seconds.max(1e-9),
            p50: latency.p50,
            p99: latency.p99,
            errors: tally.errors.values().sum::<u64>() + tally.not_sent,
            cold: tally.cold,
        };
        self.windows.push(Window {
            start_seconds: start.saturating_duration_since(self.from).as_secs_f64(),
            seconds,
            sent: tally.sent,
            answered: tally.answered,
            wrong: tally.wrong,
            cancelled: tally.cancelled,
            not_sent: tally.not_sent,
            errors: tally.errors,
            cold: tally.cold,
            latency,
            process: used,
        });
        Ok(glance)
    }

    /// The measured time ended earlier than planned.
    pub(crate) fn cut(&mut self, now: Instant) {
        self.to = self.to.min(now).max(self.from);
    }

    /// When the measured time begins.
    pub(crate) fn from(&self) -> Instant {
        self.from
    }

    /// When the measured time ends.
    pub(crate) fn to(&self) -> Instant {
        self.to
    }

    /// Everything that was seen. `process` is how the server's process stood when the measured
    /// time ended.
    pub(crate) fn finish(
        mut self,
        now: Instant,
        process: Option<ProcessSample>,
    ) -> Result<(Step, Vec<Interval>)> {
        if self.window.ended() + self.window.not_sent > 0 {
            // What was answered after the last window, while requests under way were waited for.
            self.close_window(now, None)?;
        }
        let seconds = self.to.saturating_duration_since(self.from).as_secs_f64();
        let process = match (self.usage.first, process) {
            (Some(first), Some(last)) => Some(used(
                first,
                last,
                self.ended_within,
                self.usage.largest.max(last.resident_bytes),
            )),
            _ => None,
        };
        let models = self.names.into_iter().zip(self.models);
        let step = Step {
            seconds,
            warmup_requests: self.warmup_requests,
            all: self.all.figures(seconds),
            models: models
                .map(|(name, tally)| (name, tally.figures(seconds)))
                .collect(),
            windows: self.windows,
            cold: self.cold,
            mismatches: self.mismatches,
            error_examples: self.error_examples,
            process,
            ..Step::default()
        };
        Ok((step, self.intervals))
    }
}

impl Tally {
    fn record(&mut self, seen: &Seen) {
        self.sent += 1;
        let latency = nanos(seen.ended.saturating_duration_since(seen.due));
        let late = nanos(seen.sent.saturating_duration_since(seen.due));
        put(&mut self.late, late);
        match &seen.end {
            End::Answered { cold } => {
                self.answered += 1;
                self.cold += u64::from(cold.is_some());
                let service = nanos(seen.ended.saturating_duration_since(seen.sent));
                put(&mut self.latency, latency);
                put(&mut self.service, service);
            }
            End::Wrong(_) => self.wrong += 1,
            End::Cancelled => self.cancelled += 1,
            End::Failed(failure) => {
                let known = self.errors.contains_key(&failure.kind);
                let kind = match known || self.errors.len() < MOST_KINDS {
                    true => &failure.kind,
                    false => OTHER,
                };
                *self.errors.entry(kind.to_owned()).or_default() += 1;
                put(&mut self.error_latency, latency);
            }
        }
    }

    fn ended(&self) -> u64 {
        self.sent
    }

    fn figures(self, seconds: f64) -> Figures {
        Figures {
            throughput: if seconds > 0.0 {
                self.within as f64 / seconds
            } else {
                0.0
            },
            latency: latencies(self.latency.as_ref()),
            service: latencies(self.service.as_ref()),
            late: latencies(self.late.as_ref()),
            error_latency: latencies(self.error_latency.as_ref()),
            sent: self.sent,
            answered: self.answered,
            wrong: self.wrong,
            cancelled: self.cancelled,
            not_sent: self.not_sent,
            errors: self.errors,
            cold: self.cold,
        }
    }
}

/// Adds a time; the histogram grows to hold it.
fn put(slot: &mut Option<Times>, nanos: u64) {
    let times = slot.get_or_insert_with(|| Times::new(DIGITS).expect("three digits are allowed"));
    if times.record(nanos.min(LONGEST)).is_err() {
        times.saturating_record(nanos);
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn millis(nanos: u64) -> f64 {
    nanos as f64 / 1e6
}

fn latencies(times: Option<&Times>) -> Latencies {
    let Some(times) = times.filter(|times| !times.is_empty()) else {
        return Latencies::default();
    };
    let at = |quantile| millis(times.value_at_quantile(quantile).min(times.max()));
    Latencies {
        count: times.len(),
        min: millis(times.min()),
        mean: times.mean() / 1e6,
        p50: at(0.5),
        p90: at(0.9),
        p95: at(0.95),
        p99: at(0.99),
        p999: at(0.999),
        max: millis(times.max()),
    }
}

fn serialised(times: &Times) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    V2Serializer::new()
        .serialize(times, &mut bytes)
        .context("cannot serialise a histogram")?;
    Ok(bytes)
}

fn used(from: ProcessSample, to: ProcessSample, requests: u64, largest: u64) -> ProcessUse {
    let user_seconds = to.user_seconds - from.user_seconds;
    let system_seconds = to.system_seconds - from.system_seconds;
    ProcessUse {
        user_seconds,
        system_seconds,
        micros_per_request: match requests {
            0 => 0.0,
            requests => (user_seconds + system_seconds) * 1e6 / requests as f64,
        },
        resident_bytes: to.resident_bytes,
        largest_resident_bytes: largest,
    }
}

#[cfg(test)]
mod tests;

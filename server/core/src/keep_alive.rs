//! How long a model that nobody calls is worth keeping, and when it will be wanted again.
//!
//! The adaptive policy is the hybrid histogram of "Serverless in the Wild" (Shahrad et al.,
//! USENIX ATC 2020): per model a histogram of its idle times, the head of which says when the
//! next call may come at the earliest and the tail how long one is worth waiting for; a standard
//! answer while the histogram is not representative.
//!
//! What parking changes: a parked model holds a fiftieth of a warm one and answers almost as
//! fast. So a model is parked soon, the tail says when it is closed, and pre-warming is left to
//! models whose next call is so far away that even a parked session is not worth its memory.

mod histogram;

use std::time::Duration;

use crate::lifecycle::{IdlePlan, Prewarm};
use crate::time::Timestamp;
use histogram::{IdleHistogram, RANGE};

/// The idle time that so many percent are shorter than is the earliest to expect a call at.
const HEAD_PERCENT: u32 = 5;
/// The idle time that so many percent are shorter than is the longest worth waiting.
const TAIL_PERCENT: u32 = 99;
/// Head and tail are moved apart by this fraction of themselves.
const MARGIN_PERCENT: u32 = 10;
/// Idle times below which a histogram says nothing.
const MIN_OBSERVATIONS: u16 = 5;
/// Variation of the bins' counts from which a histogram is a habit.
///
/// Memoryless arrivals give 1.0 in these bins (two in the paper's even ones would admit them as
/// well); what is spread more evenly over three orders of magnitude is no habit.
const MIN_VARIATION: f64 = 0.9;
/// A model is parked after so many of its usual pauses.
const PARK_PAUSES: f64 = 4.0;
/// Weight of a new pause in the moving mean.
const PAUSE_GAIN: f64 = 1.0 / 8.0;

/// How long models are kept without use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepAlivePolicy {
    /// The same times for ever; `None` skips the stage.
    Fixed {
        /// Time without use after which a model is parked.
        park_after: Option<Duration>,
        /// Time without use after which a session is closed.
        close_after: Option<Duration>,
    },
    /// Times learnt from the calls.
    Adaptive(AdaptivePolicy),
    /// Closes as soon as the model is idle.
    Off,
}

/// The bounds within which times are learnt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptivePolicy {
    /// When to park; `None` where a model cannot be parked.
    pub park: Option<ParkWindow>,
    /// The least time that a session is kept; shorter pauses are no idle times.
    pub min_keep: Duration,
    /// How long a session is kept while too little is known.
    pub fallback: Duration,
    /// The shortest head for which a model is closed at once and loaded ahead of the next call;
    /// `None` never does.
    pub prewarm_from: Option<Duration>,
}

/// Bounds of the time after which a model is parked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParkWindow {
    /// The least time that a model stays warm.
    pub floor: Duration,
    /// The longest; a model whose usual pause is longer is parked after the floor.
    pub ceiling: Duration,
}

impl Default for AdaptivePolicy {
    fn default() -> Self {
        Self {
            park: Some(ParkWindow {
                floor: Duration::from_secs(10),
                ceiling: Duration::from_secs(30),
            }),
            min_keep: Duration::from_secs(60),
            fallback: Duration::from_secs(60 * 60),
            prewarm_from: Some(Duration::from_secs(30 * 60)),
        }
    }
}

impl AdaptivePolicy {
    /// For models that cannot be parked: waiting costs all their memory, so that they are kept
    /// for less and closed ahead of shorter pauses.
    pub fn without_parking() -> Self {
        Self {
            park: None,
            fallback: Duration::from_secs(20 * 60),
            prewarm_from: Some(Duration::from_secs(2 * 60)),
            ..Self::default()
        }
    }
}

/// What one model's calls say about the next.
#[derive(Clone, Debug)]
pub struct KeepAlive {
    policy: KeepAlivePolicy,
    last: Option<Timestamp>,
    /// Present once two calls were seen under an adaptive policy.
    learnt: Option<Box<Learnt>>,
}

#[derive(Clone, Debug)]
struct Learnt {
    idle: IdleHistogram,
    /// Moving mean of the pauses in seconds, none counted longer than the park ceiling.
    pause: f64,
    /// Close and pre-warm times that follow from `idle`.
    window: Window,
}

#[derive(Clone, Copy, Debug)]
struct Window {
    close_after: Duration,
    prewarm: Option<Prewarm>,
}

impl KeepAlive {
    /// A model that was never called.
    pub fn new(policy: KeepAlivePolicy) -> Self {
        Self {
            policy,
            last: None,
            learnt: None,
        }
    }

    /// A request came.
    pub fn arrived(&mut self, now: Timestamp) {
        let last = self.last.replace(now);
        let (KeepAlivePolicy::Adaptive(policy), Some(last)) = (&self.policy, last) else {
            return;
        };
        let pause = now - last;
        let learnt = self.learnt.get_or_insert_with(|| {
            let idle = IdleHistogram::default();
            Box::new(Learnt {
                window: idle.window(policy),
                idle,
                pause: pause.as_secs_f64(),
            })
        });
        if let Some(park) = policy.park {
            let pause = pause.min(park.ceiling.saturating_mul(2)).as_secs_f64();
            learnt.pause += PAUSE_GAIN * (pause - learnt.pause);
        }
        // The many short pauses of a busy model would hide its few long ones.
        if pause >= policy.min_keep {
            learnt.idle.record(pause);
            learnt.window = learnt.idle.window(policy);
        }
    }

    /// A run ended: the model is idle from here on.
    pub fn finished(&mut self, now: Timestamp) {
        self.last = self.last.max(Some(now));
    }

    /// What is to become of the model if no call comes.
    pub fn plan(&self) -> IdlePlan {
        match &self.policy {
            KeepAlivePolicy::Fixed {
                park_after,
                close_after,
            } => IdlePlan {
                park_after: *park_after,
                close_after: *close_after,
                prewarm: None,
            },
            KeepAlivePolicy::Off => IdlePlan::close_after(Some(Duration::ZERO)),
            KeepAlivePolicy::Adaptive(policy) => self.adaptive_plan(policy),
        }
    }

    fn adaptive_plan(&self, policy: &AdaptivePolicy) -> IdlePlan {
        let (window, pause) = match &self.learnt {
            Some(learnt) => (learnt.window, Some(learnt.pause)),
            None => (Window::unknown(policy), None),
        };
        let park_after = policy.park.map(|park| park.after(pause));
        IdlePlan {
            // A stage that closing overtakes is none.
            park_after: park_after.filter(|&after| after < window.close_after),
            close_after: Some(window.close_after),
            prewarm: window.prewarm,
        }
    }
}

impl ParkWindow {
    /// Long enough to sit out usual pauses where these are short, else as soon as may be.
    fn after(&self, pause: Option<f64>) -> Duration {
        match pause {
            Some(pause) if pause <= self.ceiling.as_secs_f64() => {
                let pauses = Duration::try_from_secs_f64(PARK_PAUSES * pause);
                let pauses = pauses.unwrap_or(self.ceiling);
                pauses.min(self.ceiling).max(self.floor)
            }
            _ => self.floor,
        }
    }
}

impl Window {
    fn unknown(policy: &AdaptivePolicy) -> Self {
        Self {
            close_after: policy.fallback.max(policy.min_keep),
            prewarm: None,
        }
    }
}

impl IdleHistogram {
    fn window(&self, policy: &AdaptivePolicy) -> Window {
        let is_habit = self.count() >= MIN_OBSERVATIONS
            && self.out_of_bounds() <= self.count()
            && self.variation() >= MIN_VARIATION;
        let ends = self
            .percentile(HEAD_PERCENT)
            .zip(self.percentile(TAIL_PERCENT));
        let (Some(((head, _), (_, tail))), true) = (ends, is_habit) else {
            return Window::unknown(policy);
        };
        let head = head * (100 - MARGIN_PERCENT) / 100;
        let tail = (tail * (100 + MARGIN_PERCENT) / 100).min(RANGE);
        match policy.prewarm_from {
            Some(from) if head >= from && head > policy.min_keep => Window {
                close_after: policy.min_keep,
                prewarm: Some(Prewarm {
                    at: head,
                    hold: tail.saturating_sub(head),
                }),
            },
            _ => Window {
                close_after: tail.max(policy.min_keep),
                prewarm: None,
            },
        }
    }
}

#[cfg(test)]
mod tests;

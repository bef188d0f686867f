//! How often a model has killed the process it runs in, and what follows from it: start again at
//! once, start again after a pause, or never without being asked.

use std::collections::VecDeque;
use std::time::Duration;

use crate::time::Timestamp;

/// When a model that kills its process is started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeathPolicy {
    /// So many deaths within `window` put the model into quarantine; 0 never does.
    pub limit: u32,
    /// How long a death is remembered.
    pub window: Duration,
    /// Pause after the second death within the window; doubles with every further one. The first
    /// has none: most are accidents.
    pub backoff: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
}

impl Default for DeathPolicy {
    fn default() -> Self {
        Self {
            limit: 3,
            window: Duration::from_secs(600),
            backoff: Duration::from_secs(1),
            backoff_max: Duration::from_secs(60),
        }
    }
}

/// What becomes of a model after a death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may be started again from then on.
    RestartAt(Timestamp),
    /// It died so many times within the window: nothing starts it but an explicit request.
    Quarantine { deaths: u32 },
}

/// The deaths of one model version.
#[derive(Clone, Debug)]
pub struct Deaths {
    policy: DeathPolicy,
    recent: VecDeque<Timestamp>,
}

impl Deaths {
    /// Bounds what is kept where no limit does: the pause has long stopped growing by then.
    const MOST: usize = 64;

    pub fn new(policy: DeathPolicy) -> Self {
        Self {
            policy,
            recent: VecDeque::new(),
        }
    }

    /// Notes a death.
    pub fn died(&mut self, now: Timestamp) -> Verdict {
        while self
            .recent
            .front()
            .is_some_and(|&death| now - death > self.policy.window)
        {
            self.recent.pop_front();
        }
        self.recent.push_back(now);
        if self.recent.len() > Self::MOST {
            self.recent.pop_front();
        }
        let deaths = u32::try_from(self.recent.len()).unwrap_or(u32::MAX);
        if self.policy.limit > 0 && deaths >= self.policy.limit {
            return Verdict::Quarantine { deaths };
        }
        Verdict::RestartAt(match deaths.checked_sub(2) {
            None => now,
            Some(doublings) => {
                let factor = 1 << doublings.min(31);
                now + self
                    .policy
                    .backoff
                    .saturating_mul(factor)
                    .min(self.policy.backoff_max)
            }
        })
    }

    /// Forgets every death: somebody who knows better wants the model.
    pub fn pardon(&mut self) {
        self.recent.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn at(seconds: u64) -> Timestamp {
        Timestamp::ZERO + SECOND * u32::try_from(seconds).unwrap()
    }

    fn policy(limit: u32) -> DeathPolicy {
        DeathPolicy {
            limit,
            window: SECOND * 100,
            backoff: SECOND,
            backoff_max: SECOND * 5,
        }
    }

    #[test]
    fn the_first_death_has_no_pause_and_further_ones_a_growing_one() {
        let mut deaths = Deaths::new(policy(0));
        let pauses = [0, 1, 2, 4, 5, 5];
        for (death, pause) in pauses.into_iter().enumerate() {
            let now = at(10 + death as u64);
            let restart = now + SECOND * pause;
            assert_eq!(deaths.died(now), Verdict::RestartAt(restart), "{death}");
        }
    }

    #[test]
    fn deaths_close_together_lead_to_quarantine() {
        let mut deaths = Deaths::new(policy(3));
        assert_eq!(deaths.died(at(1)), Verdict::RestartAt(at(1)));
        assert_eq!(deaths.died(at(2)), Verdict::RestartAt(at(3)));
        assert_eq!(deaths.died(at(3)), Verdict::Quarantine { deaths: 3 });
    }

    #[test]
    fn deaths_far_apart_are_accidents() {
        let mut deaths = Deaths::new(policy(3));
        for hour in 1..50 {
            let now = at(hour * 3600);
            assert_eq!(deaths.died(now), Verdict::RestartAt(now));
        }
    }

    #[test]
    fn a_pardoned_model_starts_from_nothing() {
        let mut deaths = Deaths::new(policy(2));
        deaths.died(at(1));
        assert_eq!(deaths.died(at(1)), Verdict::Quarantine { deaths: 2 });
        deaths.pardon();
        assert_eq!(deaths.died(at(2)), Verdict::RestartAt(at(2)));
    }
}

//! Whether a thread that takes requests may go ahead of all that computes.

use std::time::Duration;

use crate::time::Timestamp;

/// How much of a processor going ahead may cost those that compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UrgencyPolicy {
    /// A thread may use one part in so many of the time that passes.
    pub share: u32,
    /// What it may use at once after it was idle.
    pub burst: Duration,
}

/// What one thread may still use before it has to stand in line.
///
/// A request takes such a thread microseconds, and it should not wait for a processor longer than
/// that. But a flood of requests, or one of many megabytes, takes as much as it gets, and answers
/// come from those that compute.
#[derive(Clone, Copy, Debug)]
pub struct Urgency {
    policy: UrgencyPolicy,
    /// Nanoseconds.
    credit: i64,
    as_of: Timestamp,
    is_spent: bool,
}

impl Urgency {
    /// A thread that has been idle until now.
    pub const fn new(policy: UrgencyPolicy, now: Timestamp) -> Self {
        Self {
            policy,
            credit: nanos(policy.burst),
            as_of: now,
            is_spent: false,
        }
    }

    /// The thread has used so much processor time since it was looked at before. Tells whether it
    /// may go ahead; once it used too much, not before half of a burst has come together again.
    ///
    /// Who goes ahead and uses more than it has owes that, up to a burst: looks may come late.
    pub fn used(&mut self, processor_time: Duration, now: Timestamp) -> bool {
        let burst = nanos(self.policy.burst);
        let earned = now.since(self.as_of) / self.policy.share.max(1);
        self.as_of = self.as_of.max(now);
        let credit = self.credit.saturating_add(nanos(earned)).min(burst);
        let least = match self.is_spent {
            false => -burst,
            // What it uses in line is its own, but it does not earn meanwhile.
            true => self.credit.min(0),
        };
        self.credit = credit.saturating_sub(nanos(processor_time)).max(least);
        self.is_spent = match self.is_spent {
            false => self.credit <= 0,
            true => self.credit < burst / 2,
        };
        !self.is_spent
    }
}

const fn nanos(duration: Duration) -> i64 {
    let nanos = duration.as_nanos();
    if nanos > i64::MAX as u128 {
        return i64::MAX;
    }
    nanos as i64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const POLICY: UrgencyPolicy = UrgencyPolicy {
        share: 4,
        burst: Duration::from_millis(10),
    };

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn who_uses_little_goes_ahead_for_ever() {
        let mut urgency = Urgency::new(POLICY, Timestamp::ZERO);
        let mut now = Timestamp::ZERO;
        for _ in 0..10_000 {
            now = now + millis(10);
            assert!(urgency.used(millis(2), now));
        }
    }

    #[test]
    fn who_uses_a_whole_processor_stands_in_line_until_it_has_been_idle() {
        let mut urgency = Urgency::new(POLICY, Timestamp::ZERO);
        let mut now = Timestamp::ZERO;
        let mut looks = 0;
        loop {
            now = now + millis(4);
            looks += 1;
            if !urgency.used(millis(4), now) {
                break;
            }
        }
        assert_eq!(looks, 3, "ten milliseconds, and a quarter of eight more");
        for _ in 0..100 {
            now = now + millis(4);
            assert!(!urgency.used(millis(4), now));
        }
        assert!(!urgency.used(Duration::ZERO, now + millis(19)));
        assert!(urgency.used(Duration::ZERO, now + millis(20)));
    }

    #[test]
    fn clocks_that_go_back_earn_nothing() {
        let mut urgency = Urgency::new(POLICY, Timestamp::ZERO + millis(100));
        assert!(!urgency.used(millis(20), Timestamp::ZERO + millis(50)));
        assert!(!urgency.used(Duration::ZERO, Timestamp::ZERO + millis(100)));
    }

    proptest! {
        /// Where looks come before more than a burst was used, what is used ahead of others stays
        /// below two bursts and the share.
        #[test]
        fn nobody_uses_more_than_two_bursts_and_its_share(
            looks in prop::collection::vec((0u64..20, 0u64..=10), 1..200),
        ) {
            let mut urgency = Urgency::new(POLICY, Timestamp::ZERO);
            let (mut now, mut ahead, mut used) = (Timestamp::ZERO, true, Duration::ZERO);
            for (passes, uses) in looks {
                let uses = uses.min(passes);
                now = now + millis(passes);
                if ahead {
                    used += millis(uses);
                }
                ahead = urgency.used(millis(uses), now);
                prop_assert!(used <= POLICY.burst * 2 + now.since(Timestamp::ZERO) / POLICY.share);
            }
        }
    }
}

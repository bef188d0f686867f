//! Which idle models give up their memory: those that free most per millisecond of resume cost.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use super::{Entry, HoldingState, MemoryBudget};
use crate::lifecycle::How;
use crate::time::Timestamp;

/// One step down that a model could take.
#[derive(Clone, Debug)]
struct Step<'a, K> {
    key: &'a K,
    how: How,
    /// What this step frees beyond the one before it.
    frees: u64,
    /// What this step adds to the next call beyond the one before it.
    costs: Duration,
    last_used: Timestamp,
}

impl<K> Step<'_, K> {
    /// Compares bytes per time without dividing; what costs nothing comes first.
    fn rank(&self, other: &Self) -> std::cmp::Ordering {
        let mine = u128::from(self.frees) * nanos(other.costs);
        let theirs = u128::from(other.frees) * nanos(self.costs);
        theirs.cmp(&mine)
    }
}

impl<K: Ord + Clone> MemoryBudget<K> {
    /// The evictions that free at least `missing` bytes; `None` when all of them would not.
    pub(super) fn plan(&self, missing: u64, except: Option<&K>) -> Option<Vec<(K, How)>> {
        let mut steps: Vec<Step<'_, K>> = self
            .entries
            .iter()
            .filter(|(key, _)| except != Some(*key))
            .flat_map(|(key, entry)| steps_of(key, entry))
            .collect();
        let available = steps
            .iter()
            .fold(0, |sum: u64, step| sum.saturating_add(step.frees));
        if available < missing {
            return None;
        }
        // A model's parking never ranks after its closing: the key keeps the steps in order.
        steps.sort_by(|a, b| {
            a.rank(b)
                .then(a.last_used.cmp(&b.last_used))
                .then(a.key.cmp(b.key))
                .then(a.how.cmp(&b.how))
        });
        let mut freed: u64 = 0;
        let mut taken = Vec::new();
        for step in steps {
            if freed >= missing {
                break;
            }
            freed = freed.saturating_add(step.frees);
            taken.push(step);
        }
        // The last steps may have made earlier ones needless. A parking stays where the closing
        // of the same model does: the dearest are looked at first, so the closing has gone by
        // then if it can.
        let mut needed: BTreeMap<&K, How> = BTreeMap::new();
        let mut order = Vec::new();
        for (place, step) in taken.iter().enumerate().rev() {
            let closes = needed.contains_key(step.key);
            if !closes && freed - step.frees >= missing {
                freed -= step.frees;
                continue;
            }
            let how = needed.entry(step.key).or_insert(step.how);
            *how = (*how).max(step.how);
            order.push((place, step.key));
        }
        order.sort_unstable_by_key(|&(place, _)| Reverse(place));
        let mut plan = Vec::with_capacity(needed.len());
        while let Some((_, key)) = order.pop() {
            if let Some(how) = needed.remove(key) {
                plan.push((key.clone(), how));
            }
        }
        Some(plan)
    }

    /// The deepest eviction of everything that may be evicted.
    pub(super) fn everything_idle(&self) -> Vec<(K, How)> {
        self.entries
            .iter()
            .filter(|(key, entry)| steps_of(key, entry).next().is_some())
            .map(|(key, _)| (key.clone(), How::Close))
            .collect()
    }
}

/// No more than 64 bits, so that a product with bytes is exact.
fn nanos(duration: Duration) -> u128 {
    duration.as_nanos().min(u128::from(u64::MAX))
}

/// The steps that a holding can still take, the nearest first.
fn steps_of<'a, K>(key: &'a K, entry: &Entry) -> impl Iterator<Item = Step<'a, K>> + use<'a, K> {
    let holding = entry.holding;
    let parkable = match (holding.state, entry.evicting) {
        (HoldingState::Idle, None) => holding.parkable_bytes.min(holding.bytes),
        _ => 0,
    };
    let may_close = matches!(holding.state, HoldingState::Idle | HoldingState::Parked)
        && entry.evicting.is_none();
    let step = |how, frees, costs| Step {
        key,
        how,
        frees,
        costs,
        last_used: holding.last_used,
    };
    let to_close = holding.resume_from_cold.max(holding.resume_from_parked);
    let park = step(How::Park, parkable, holding.resume_from_parked);
    let mut close = step(
        How::Close,
        holding.bytes - parkable,
        to_close.saturating_sub(holding.resume_from_parked),
    );
    if parkable == 0 {
        close.costs = holding.resume_from_cold;
    }
    // Where closing frees more per millisecond than parking does, parking is only a detour.
    let direct = step(How::Close, holding.bytes, to_close);
    let is_detour = parkable > 0 && direct.rank(&park).is_lt();
    let (first, second) = match is_detour {
        true => (None, direct),
        false => ((parkable > 0).then_some(park), close),
    };
    first
        .into_iter()
        .chain(Some(second))
        .filter(move |step| may_close && step.frees > 0)
}

//! Memory that several models read at the same time and that is there once: each is charged a
//! part of it, and all parts together are what is there.

use std::collections::{BTreeMap, BTreeSet};

/// What a model reads of something that others may read as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedUse<P> {
    /// What it is: equal things are resident once.
    pub part: P,
    /// All of it.
    pub size: u64,
    /// What the model reads of it.
    pub used: u64,
}

#[derive(Clone, Debug)]
struct Users<K> {
    size: u64,
    used: BTreeMap<K, u64>,
}

impl<K> Users<K> {
    /// What is resident at most: users may read the same bytes or others.
    fn resident(&self) -> u128 {
        self.sum().min(u128::from(self.size))
    }

    fn sum(&self) -> u128 {
        self.used.values().map(|&used| u128::from(used)).sum()
    }
}

/// Who reads what.
#[derive(Clone, Debug)]
pub struct SharedParts<P, K> {
    parts: BTreeMap<P, Users<K>>,
    uses: BTreeMap<K, Vec<P>>,
}

impl<P, K> Default for SharedParts<P, K> {
    fn default() -> Self {
        Self {
            parts: BTreeMap::new(),
            uses: BTreeMap::new(),
        }
    }
}

impl<P: Ord + Copy, K: Ord + Copy> SharedParts<P, K> {
    /// The bytes that come to be resident when one more model reads these.
    pub fn needed(&self, uses: &[SharedUse<P>]) -> u64 {
        let more = uses
            .iter()
            .map(|wanted| match self.parts.get(&wanted.part) {
                None => wanted.used.min(wanted.size),
                Some(users) => {
                    let after = users.sum() + u128::from(wanted.used);
                    let after = after.min(u128::from(users.size));
                    u64::try_from(after - users.resident()).unwrap_or(u64::MAX)
                }
            });
        more.fold(0, u64::saturating_add)
    }

    /// Notes what `key` reads from now on; returns whoever else is charged differently by that.
    pub fn set(&mut self, key: K, uses: &[SharedUse<P>]) -> BTreeSet<K> {
        let mut others = BTreeSet::new();
        let before = self.uses.remove(&key).unwrap_or_default();
        let unchanged = before.len() == uses.len()
            && uses.iter().all(|wanted| {
                let users = self.parts.get(&wanted.part);
                users.is_some_and(|users| users.used.get(&key) == Some(&wanted.used))
            });
        if unchanged {
            if !before.is_empty() {
                self.uses.insert(key, before);
            }
            return others;
        }
        for part in before {
            if let Some(users) = self.parts.get_mut(&part) {
                users.used.remove(&key);
                others.extend(users.used.keys());
                if users.used.is_empty() {
                    self.parts.remove(&part);
                }
            }
        }
        for wanted in uses {
            let users = self.parts.entry(wanted.part).or_insert_with(|| Users {
                size: wanted.size,
                used: BTreeMap::new(),
            });
            others.extend(users.used.keys());
            users.used.insert(key, wanted.used);
        }
        if !uses.is_empty() {
            let parts = uses.iter().map(|wanted| wanted.part);
            self.uses.insert(key, parts.collect());
        }
        others.remove(&key);
        others
    }

    /// What `key` is charged: of everything it reads as much as it is of all use.
    pub fn charge(&self, key: K) -> u64 {
        let parts = self.uses.get(&key).into_iter().flatten();
        let charges = parts.filter_map(|part| {
            let users = self.parts.get(part)?;
            let used = u128::from(*users.used.get(&key)?);
            let charge = (users.resident() * used).div_ceil(users.sum().max(1));
            u64::try_from(charge).ok()
        });
        charges.fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(part: char, size: u64) -> SharedUse<char> {
        SharedUse {
            part,
            size,
            used: size,
        }
    }

    #[test]
    fn what_all_read_is_charged_once_in_all() {
        let mut parts = SharedParts::default();
        for key in 0..8_u64 {
            assert_eq!(
                parts.needed(&[whole('a', 800)]),
                if key == 0 { 800 } else { 0 }
            );
            let others = parts.set(key, &[whole('a', 800)]);
            assert_eq!(others.len() as u64, key);
        }
        assert_eq!((0..8).map(|key| parts.charge(key)).sum::<u64>(), 800);
        assert!(parts.set(3, &[whole('a', 800)]).is_empty());
        assert_eq!(parts.set(3, &[]).len(), 7);
        assert_eq!(parts.charge(3), 0);
        for key in (0..8).filter(|key| *key != 3) {
            parts.set(key, &[]);
        }
        assert_eq!(parts.needed(&[whole('a', 800)]), 800);
    }

    #[test]
    fn parts_of_a_whole_add_up_to_no_more_than_it() {
        let mut parts = SharedParts::default();
        let half = SharedUse {
            used: 400,
            ..whole('a', 800)
        };
        parts.set(1, &[half]);
        assert_eq!((parts.charge(1), parts.needed(&[half])), (400, 400));
        parts.set(2, &[half, whole('b', 100)]);
        assert_eq!((parts.charge(1), parts.charge(2)), (400, 500));
        assert_eq!(parts.needed(&[whole('a', 800)]), 0);
        parts.set(3, &[whole('a', 800)]);
        assert_eq!(
            (parts.charge(1), parts.charge(2), parts.charge(3)),
            (200, 300, 400)
        );
    }
}

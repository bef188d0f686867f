use expect_test::{Expect, expect};

use super::*;

/// `name` tells items apart, `shape` those that cannot join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) name: u32,
    pub(super) rows: u32,
    pub(super) shape: u8,
}

impl BatchItem for Item {
    fn rows(&self) -> u32 {
        self.rows
    }

    fn can_join(&self, first: &Self) -> bool {
        self.shape == first.shape
    }
}

pub(super) fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(super) fn at(millis: u64) -> Timestamp {
    Timestamp::from_nanos(millis * 1_000_000)
}

fn policy(max_rows: u32, preferred_rows: &[u32], max_delay: u64) -> BatchPolicy {
    BatchPolicy {
        max_rows,
        preferred_rows: preferred_rows.to_vec(),
        max_delay: millis(max_delay),
        levels: vec![QueuePolicy::default()],
        default_level: 1,
    }
}

fn plain(name: u32, rows: u32) -> Waiting<Item> {
    Waiting {
        item: Item {
            name,
            rows,
            shape: 0,
        },
        priority: 0,
        deadline: None,
        timeout: None,
    }
}

fn unknown(_: u32) -> Option<Duration> {
    None
}

fn names(batch: Option<Batch<Item>>) -> Vec<u32> {
    batch.map_or(Vec::new(), |batch| {
        let rows: u32 = batch.entries.iter().map(|(_, item, _)| item.rows).sum();
        assert_eq!(rows, batch.rows);
        batch.entries.iter().map(|(_, item, _)| item.name).collect()
    })
}

/// Pushes items of the given rows a millisecond apart, then takes what is due at each moment.
fn check(policy: BatchPolicy, rows: &[u32], moments: &[u64], expected: Expect) {
    let mut batcher = Batcher::new(policy);
    for (name, &rows) in (0..).zip(rows) {
        batcher
            .push(plain(name, rows), at(u64::from(name)))
            .unwrap();
    }
    let mut shown = String::new();
    for &moment in moments {
        let wake = batcher.wake_at(unknown).map(|at| at.as_nanos() / 1_000_000);
        shown += &format!("{moment} (woken {wake:?}):");
        while let Some(batch) = batcher.take_batch(at(moment), unknown) {
            shown += &format!(" {:?}", names(Some(batch)));
        }
        shown += "\n";
    }
    expected.assert_eq(&shown);
}

#[test]
fn without_delay_or_preference_whatever_waits_goes_at_once() {
    check(
        policy(4, &[], 0),
        &[1, 1, 1, 1, 1, 1],
        &[5],
        expect![[r#"
            5 (woken Some(0)): [0, 1, 2, 3] [4, 5]
        "#]],
    );
    check(
        policy(1, &[], 0),
        &[1, 1],
        &[1],
        expect![[r#"
            1 (woken Some(0)): [0] [1]
        "#]],
    );
}

#[test]
fn batch_waits_for_company_until_the_oldest_has_waited_its_delay() {
    check(
        policy(8, &[], 10),
        &[1, 1],
        &[9, 10],
        expect![[r#"
            9 (woken Some(10)):
            10 (woken Some(10)): [0, 1]
        "#]],
    );
}

#[test]
fn full_batch_goes_at_once() {
    check(
        policy(4, &[], 100),
        &[2, 2, 2],
        &[3, 102],
        expect![[r#"
            3 (woken Some(0)): [0, 1]
            102 (woken Some(102)): [2]
        "#]],
    );
    // The next one would not fit.
    check(
        policy(4, &[], 100),
        &[3, 2],
        &[3],
        expect![[r#"
            3 (woken Some(0)): [0]
        "#]],
    );
}

#[test]
fn largest_reachable_preferred_size_goes_at_once() {
    check(
        policy(8, &[2, 4], 100),
        &[1, 1, 1, 1, 1],
        &[5, 103, 104],
        expect![[r#"
            5 (woken Some(0)): [0, 1, 2, 3]
            103 (woken Some(104)):
            104 (woken Some(104)): [4]
        "#]],
    );
    // No prefix has a preferred size and none can any more.
    check(
        policy(8, &[4], 100),
        &[3, 3],
        &[2],
        expect![[r#"
            2 (woken Some(0)): [0, 1]
        "#]],
    );
    // The delay has passed: all that fits, not only what is preferred.
    check(
        policy(8, &[4], 100),
        &[1, 1, 1, 1, 1],
        &[100],
        expect![[r#"
            100 (woken Some(0)): [0, 1, 2, 3, 4]
        "#]],
    );
}

#[test]
fn unequal_items_are_never_mixed_and_close_the_batch_before_them() {
    let mut batcher = Batcher::new(policy(8, &[], 100));
    for (name, shape) in [(0, 1), (1, 1), (2, 2), (3, 1)] {
        let mut waiting = plain(name, 1);
        waiting.item.shape = shape;
        batcher.push(waiting, at(0)).unwrap();
    }
    assert_eq!(names(batcher.take_batch(at(0), unknown)), [0, 1]);
    assert_eq!(names(batcher.take_batch(at(0), unknown)), [2]);
    assert_eq!(names(batcher.take_batch(at(0), unknown)), [0; 0]);
    assert_eq!(batcher.wake_at(unknown), Some(at(100)));
}

#[test]
fn important_levels_go_first_and_unknown_ones_are_the_default() {
    let mut batcher = Batcher::new(BatchPolicy {
        levels: vec![QueuePolicy::default(); 3],
        default_level: 2,
        ..policy(1, &[], 0)
    });
    for (name, priority) in [
        (0, 3),
        (1, 0),
        (2, 1),
        (3, 99),
        (4, u64::MAX),
        (5, 1),
        (6, 2),
    ] {
        let waiting = Waiting {
            priority,
            ..plain(name, 1)
        };
        batcher.push(waiting, at(0)).unwrap();
    }
    let order: Vec<u32> = (0..7)
        .flat_map(|_| names(batcher.take_batch(at(0), unknown)))
        .collect();
    assert_eq!(order, [2, 5, 1, 3, 4, 6, 0]);
}

#[test]
fn full_level_refuses_and_says_how_many_it_holds() {
    let level = QueuePolicy {
        max_queue_size: 2,
        ..QueuePolicy::default()
    };
    let mut batcher = Batcher::new(BatchPolicy {
        levels: vec![level, QueuePolicy::default()],
        ..policy(1, &[], 0)
    });
    let first = batcher.push(plain(0, 1), at(0)).unwrap();
    batcher.push(plain(1, 1), at(0)).unwrap();
    match batcher.push(plain(2, 1), at(0)) {
        Err(Refused::QueueFull { item, limit: 2 }) => assert_eq!(item.name, 2),
        other => panic!("{other:?}"),
    }
    let other_level = Waiting {
        priority: 2,
        ..plain(3, 1)
    };
    batcher.push(other_level, at(0)).unwrap();
    assert_eq!(batcher.cancel(first).map(|item| item.name), Some(0));
    assert_eq!(batcher.cancel(first), None);
    batcher.push(plain(4, 1), at(0)).unwrap();
    assert_eq!(batcher.cancel(first), None);
}

#[test]
fn rejecting_timeout_expires_and_delaying_timeout_yields() {
    let level = |timeout_action| QueuePolicy {
        timeout_action,
        default_timeout: Some(millis(10)),
        allow_timeout_override: true,
        max_queue_size: 0,
    };
    for action in [TimeoutAction::Reject, TimeoutAction::Delay] {
        let mut batcher = Batcher::new(BatchPolicy {
            levels: vec![level(action)],
            ..policy(1, &[], 0)
        });
        batcher.push(plain(0, 1), at(0)).unwrap();
        // Its own timeout may only shorten.
        for (name, own) in [(1, 5), (2, 500), (3, 0)] {
            let waiting = Waiting {
                timeout: Some(millis(own)),
                ..plain(name, 1)
            };
            batcher.push(waiting, at(u64::from(name))).unwrap();
        }
        assert_eq!(batcher.expires_at(), Some(at(6)));
        let expired = |batcher: &mut Batcher<Item>, moment| {
            let expired = batcher.expire(at(moment)).into_iter();
            expired
                .map(|expired| {
                    assert_eq!(expired.cause, ExpiryCause::QueueTimeout);
                    (expired.item.name, expired.waited)
                })
                .collect::<Vec<_>>()
        };
        if action == TimeoutAction::Reject {
            assert_eq!(expired(&mut batcher, 6), [(1, millis(5))]);
            // Found when the batch is taken, it still leaves through `expire`.
            assert_eq!(names(batcher.take_batch(at(10), unknown)), [2]);
            assert_eq!(batcher.queued(), 2);
            assert_eq!(batcher.expires_at(), Some(at(0)));
            assert_eq!(
                expired(&mut batcher, 13),
                [(0, millis(13)), (3, millis(10))]
            );
        } else {
            assert_eq!(expired(&mut batcher, 11), []);
            batcher.push(plain(4, 1), at(11)).unwrap();
            let order: Vec<u32> = (0..5)
                .flat_map(|_| names(batcher.take_batch(at(11), unknown)))
                .collect();
            assert_eq!(order, [2, 3, 4, 1, 0]);
        }
        assert_eq!((batcher.queued(), batcher.queued_rows()), (0, 0));
        assert_eq!(batcher.wake_at(unknown), None);
    }
}

#[test]
fn nothing_is_accepted_or_taken_after_its_deadline() {
    let mut batcher = Batcher::new(policy(4, &[], 0));
    let with_deadline = |name, deadline| Waiting {
        deadline: Some(at(deadline)),
        ..plain(name, 1)
    };
    assert!(matches!(
        batcher.push(with_deadline(0, 5), at(5)),
        Err(Refused::Expired { .. })
    ));
    batcher.push(with_deadline(1, 8), at(5)).unwrap();
    batcher.push(with_deadline(2, 9), at(5)).unwrap();
    assert_eq!(names(batcher.take_batch(at(8), unknown)), [2]);
    let expired = batcher.expire(at(8));
    assert_eq!(expired.len(), 1);
    assert_eq!(
        (expired[0].item.name, expired[0].cause),
        (1, ExpiryCause::Deadline)
    );
}

#[test]
fn batch_closes_early_when_a_deadline_is_near() {
    let mut batcher = Batcher::new(policy(4, &[], 100));
    batcher.push(plain(0, 1), at(0)).unwrap();
    let waiting = Waiting {
        deadline: Some(at(51)),
        ..plain(1, 1)
    };
    batcher.push(waiting, at(1)).unwrap();
    // 51 less a run of 16, an eighth of it, and a tick of the timer.
    let known = |_| Some(millis(16));
    assert_eq!(batcher.wake_at(known), Some(at(32)));
    assert_eq!(names(batcher.take_batch(at(31), known)), [0; 0]);
    // Unknown runs are given half of the time.
    assert_eq!(batcher.wake_at(unknown), Some(at(26)));
    assert_eq!(names(batcher.take_batch(at(32), known)), [0, 1]);
}

#[test]
fn batch_closes_before_waiting_for_company_gets_a_request_rejected() {
    let level = QueuePolicy {
        default_timeout: Some(millis(20)),
        ..QueuePolicy::default()
    };
    let mut batcher = Batcher::new(BatchPolicy {
        levels: vec![level],
        ..policy(4, &[], 100)
    });
    batcher.push(plain(0, 1), at(0)).unwrap();
    assert_eq!(batcher.wake_at(unknown), Some(at(19)));
    assert_eq!(names(batcher.take_batch(at(19), unknown)), [0]);
}

#[test]
fn late_requests_make_room_for_one_that_can_be_answered() {
    let run = |_| Some(millis(10));
    let mut batcher = Batcher::new(policy(1, &[], 0));
    for (name, deadline) in [(0, 12), (1, 13), (2, 30)] {
        let waiting = Waiting {
            deadline: Some(at(deadline)),
            ..plain(name, 1)
        };
        batcher.push(waiting, at(0)).unwrap();
    }
    assert_eq!(names(batcher.take_batch(at(5), run)), [2]);
    assert_eq!(batcher.expire(at(5)).len(), 2);
    // With nobody to make room for, a late one is tried: the estimate may be wrong.
    let waiting = Waiting {
        deadline: Some(at(12)),
        ..plain(3, 1)
    };
    batcher.push(waiting, at(5)).unwrap();
    assert_eq!(names(batcher.take_batch(at(5), run)), [3]);
}

#[test]
fn item_larger_than_a_batch_goes_alone() {
    let mut batcher = Batcher::new(policy(4, &[], 100));
    batcher.push(plain(0, 1), at(0)).unwrap();
    batcher.push(plain(1, 9), at(0)).unwrap();
    batcher.push(plain(2, 0), at(0)).unwrap();
    assert_eq!(names(batcher.take_batch(at(0), unknown)), [0]);
    assert_eq!(names(batcher.take_batch(at(0), unknown)), [1]);
}

#[test]
fn policy_out_of_range_is_brought_into_range() {
    let mut batcher = Batcher::new(BatchPolicy {
        levels: Vec::new(),
        default_level: 7,
        ..policy(0, &[0, 9], 0)
    });
    batcher.push(plain(0, 1), at(0)).unwrap();
    assert_eq!(names(batcher.take_batch(at(0), unknown)), [0]);
}

#[test]
fn a_burst_leaves_no_memory_behind() {
    let mut batcher = Batcher::new(policy(1, &[], 0));
    let ids: Vec<EntryId> = (0..10_000)
        .map(|name| {
            let waiting = Waiting {
                deadline: Some(at(1_000_000)),
                ..plain(name, 1)
            };
            batcher.push(waiting, at(0)).unwrap()
        })
        .collect();
    for id in ids.iter().rev() {
        assert!(batcher.cancel(*id).is_some());
    }
    assert_eq!(batcher.queue.capacity(), 0);
    assert!(ids.iter().all(|&id| batcher.cancel(id).is_none()));
    let fresh = batcher.push(plain(0, 1), at(0)).unwrap();
    assert!(!ids.contains(&fresh));
}

#[test]
fn first_of_those_who_waited_for_a_load_runs_alone_and_the_rest_together() {
    for (delay, preferred) in [(0, &[][..]), (100, &[]), (0, &[8])] {
        let mut batcher = Batcher::new(policy(8, preferred, delay));
        for name in 0..5 {
            batcher.push(plain(name, 1), at(0)).unwrap();
        }
        batcher.start_alone(at(100));
        assert_eq!(names(batcher.take_batch(at(100), unknown)), [0]);
        assert_eq!(names(batcher.take_batch(at(100), unknown)), [1, 2, 3, 4]);
    }
}

#[test]
fn who_still_waits_for_company_does_not_go_ahead_of_it() {
    let mut batcher = Batcher::new(policy(2, &[], 100));
    for name in 0..4 {
        batcher.push(plain(name, 1), at(0)).unwrap();
    }
    batcher.start_alone(at(99));
    assert_eq!(names(batcher.take_batch(at(99), unknown)), [0, 1]);
    assert_eq!(names(batcher.take_batch(at(99), unknown)), [2, 3]);

    let mut batcher = Batcher::new(policy(8, &[4], 100));
    for name in 0..4 {
        batcher.push(plain(name, 1), at(0)).unwrap();
    }
    batcher.start_alone(at(200));
    assert_eq!(names(batcher.take_batch(at(200), unknown)), [0, 1, 2, 3]);
}

#[test]
fn who_is_always_alone_stops_waiting_for_company_until_somebody_comes() {
    let mut batcher = Batcher::new(policy(8, &[], 10));
    // Requests a second apart, and how long each waits.
    let mut second = 0;
    let mut waits = |batcher: &mut Batcher<Item>, others: u32| {
        second += 1;
        let came = at(second * 1000);
        for name in 0..=others {
            batcher.push(plain(name, 1), came).unwrap();
        }
        let due = batcher.wake_at(unknown).unwrap();
        let batch = batcher.take_batch(due, unknown);
        assert_eq!(names(batch).len() as u32, 1 + others);
        (due - came).as_millis()
    };
    let alone: Vec<_> = (0..10).map(|_| waits(&mut batcher, 0)).collect();
    assert_eq!(alone, [10, 10, 10, 10, 10, 10, 10, 10, 0, 0]);
    // Now and then one tries again.
    let tries: Vec<_> = (0..130).map(|_| waits(&mut batcher, 0)).collect();
    assert_eq!(tries.iter().filter(|&&wait| wait == 10).count(), 2);
    // Two at once are company, and from then on it is waited for.
    assert_eq!(waits(&mut batcher, 1), 0);
    assert_eq!(waits(&mut batcher, 0), 10);
}

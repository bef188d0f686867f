//! The bound, and what goes when it is reached.

use super::*;

const MODEL: usize = 100_000;

fn fill(bench: &Bench, store: &Arc<Store>, names: &[&str]) {
    for (index, name) in names.iter().enumerate() {
        drop(commit(store, &key(name), &[bytes(index as u8, MODEL)]).unwrap());
        bench.age(&key(name), 1000 - 100 * index as u64);
    }
}

fn left(store: &Store) -> Vec<EntryKey> {
    let mut keys: Vec<_> = store.list().unwrap().iter().map(|info| info.key).collect();
    keys.sort();
    keys
}

fn keys(names: &[&str]) -> Vec<EntryKey> {
    let mut keys: Vec<_> = names.iter().map(|name| key(name)).collect();
    keys.sort();
    keys
}

#[test]
fn what_was_used_longest_ago_goes_first() {
    let bench = Bench::new();
    let store = bench.open();
    fill(&bench, &store, &["a", "b", "c", "d"]);
    let listed: Vec<EntryKey> = store.list().unwrap().iter().map(|it| it.key).collect();
    assert_eq!(listed, ["d", "c", "b", "a"].map(key));
    // Looking it up is using it.
    drop(store.find(&key("a")).unwrap().unwrap());
    let before = store.bytes_on_disk().unwrap();
    let report = store.gc(2 * MODEL as u64 + 20_000).unwrap();
    let removed: Vec<EntryKey> = report.removed.iter().map(|(key, _)| *key).collect();
    assert_eq!(removed, ["b", "c"].map(key));
    assert_eq!(report.removed[0].1, [format!("model {}", key("b").short())]);
    assert_eq!(report.packs_removed, 2);
    assert_eq!(report.kept_bytes, store.bytes_on_disk().unwrap());
    assert_eq!(report.freed_bytes, before - report.kept_bytes);
    assert_eq!(left(&store), keys(&["a", "d"]));
    bench.assert_tidy();
}

#[test]
fn an_entry_is_read_again_only_when_its_files_have_changed() {
    let bench = Bench::new();
    let store = bench.open();
    let key = key("a");
    drop(commit(&store, &key, &[bytes(1, MODEL)]).unwrap());
    let folder = EntryFolder::open(bench.entry(&key)).unwrap().unwrap();
    let (now, later) = (
        SystemTime::now(),
        SystemTime::now() + Duration::from_secs(3600),
    );
    let heads = Heads::default();
    let of = |at| heads.of(&key, &folder, at).unwrap();
    // Written a moment ago, it could be written again at the same moment.
    assert!(!Arc::ptr_eq(&of(now), &of(now)));
    let first = of(later);
    assert!(Arc::ptr_eq(&first, &of(later)));
    assert_eq!(first.packs[0].used_bytes, MODEL as u64);

    // By whatever process.
    bench
        .open()
        .update_facts(&key, |facts| facts.source_bytes = 7)
        .unwrap();
    let second = of(later);
    assert_eq!(second.facts.source_bytes, 7);
    assert!(Arc::ptr_eq(&second, &of(later)));

    fs::write(bench.entry(&key).join("manifest.json"), b"other").unwrap();
    let damaged = heads.of(&key, &folder, later);
    assert!(matches!(damaged, Err(Unreadable::Damaged(_))));
}

#[test]
fn only_entries_that_are_there_are_remembered() {
    let bench = Bench::new();
    let store = bench.open();
    drop(commit(&store, &key("a"), &[bytes(1, MODEL)]).unwrap());
    let folder = EntryFolder::open(bench.entry(&key("a"))).unwrap().unwrap();
    let later = SystemTime::now() + Duration::from_secs(3600);
    let of = || store.heads.of(&key("a"), &folder, later).unwrap();
    let first = of();
    store.list().unwrap();
    assert!(Arc::ptr_eq(&first, &of()));
    bench.age(&key("a"), 500);
    bench.open().gc(0).unwrap();
    assert!(store.list().unwrap().is_empty());
    assert_eq!(Arc::strong_count(&first), 1);
}

#[test]
fn what_was_used_just_now_or_is_held_by_anyone_stays() {
    let bench = Bench::new();
    let (store, other) = (bench.open(), bench.open());
    fill(&bench, &store, &["a", "b", "c"]);
    let held = other.find(&key("a")).unwrap().unwrap();
    bench.age(&key("a"), 5000);
    drop(other.find(&key("b")).unwrap());
    store.gc(0).unwrap();
    assert_eq!(left(&store), keys(&["a", "b"]));
    // It was in use until it was dropped.
    drop(held);
    store.gc(0).unwrap();
    assert_eq!(left(&store), keys(&["a", "b"]));
    bench.age(&key("a"), 61);
    store.gc(0).unwrap();
    assert_eq!(left(&store), keys(&["b"]));
}

#[test]
fn a_shared_pack_stays_as_long_as_one_uses_it() {
    let bench = Bench::new();
    let store = bench.open();
    let shared = bytes(1, MODEL);
    let a = commit(&store, &key("a"), std::slice::from_ref(&shared)).unwrap();
    let pack = bench.pack(&a.packs[0].digest());
    drop(a);
    let b = [shared, bytes(2, 5000)];
    drop(commit(&store, &key("b"), &b).unwrap());
    bench.age(&key("a"), 500);
    store.gc(0).unwrap();
    assert_eq!(left(&store), keys(&["b"]));
    assert_holds(&store.find(&key("b")).unwrap().unwrap(), &b);
    bench.age(&key("b"), 500);
    store.gc(0).unwrap();
    assert!(!pack.exists());
    assert_eq!(store.bytes_on_disk().unwrap(), 0);
    assert_eq!(bench.count("packs"), 0);
}

#[test]
fn a_commit_makes_room_for_itself() {
    let bench = Bench::new();
    let max = 3 * MODEL as u64 + 30_000;
    let store = bench.open_with(max);
    fill(&bench, &store, &["a", "b", "c"]);
    commit(&store, &key("d"), &[bytes(9, MODEL)]).unwrap();
    assert_eq!(left(&store), keys(&["b", "c", "d"]));
    assert!(store.bytes_on_disk().unwrap() <= max);
    bench.assert_tidy();
}

#[test]
fn a_model_larger_than_the_store_is_refused_with_both_numbers() {
    let bench = Bench::new();
    let store = bench.open_with(MODEL as u64 + 5000);
    fill(&bench, &store, &["a"]);
    let error = commit(&store, &key("b"), &[bytes(9, 2 * MODEL)]).unwrap_err();
    let StoreError::TooLarge { needed, max } = error else {
        panic!("{error}");
    };
    assert!(needed >= 2 * MODEL as u64);
    assert_eq!(max, MODEL as u64 + 5000);
    // Nothing had to go for that.
    assert_eq!(left(&store), keys(&["a"]));
}

#[test]
fn a_store_full_of_models_in_use_takes_no_other() {
    let bench = Bench::new();
    let store = bench.open_with(2 * MODEL as u64);
    let held = commit(&store, &key("a"), &[bytes(1, MODEL)]).unwrap();
    bench.age(&key("a"), 500);
    let error = commit(&store, &key("b"), &[bytes(2, MODEL)]).unwrap_err();
    assert!(matches!(error, StoreError::Full { .. }), "{error}");
    assert_eq!(left(&store), keys(&["a"]));
    drop(held);
    bench.age(&key("a"), 500);
    commit(&store, &key("b"), &[bytes(2, MODEL)]).unwrap();
    assert_eq!(left(&store), keys(&["b"]));
    bench.assert_tidy();
}

#[test]
fn a_pack_that_a_draft_is_about_to_share_stays() {
    let bench = Bench::new();
    let store = bench.open();
    fill(&bench, &store, &["a"]);
    let found = store.find(&key("a")).unwrap().unwrap();
    let pack = found.packs[0].clone();
    drop(found);
    bench.age(&key("a"), 500);
    bench.open().gc(0).unwrap();
    assert_eq!(left(&store), []);
    assert!(bench.pack(&pack.digest()).exists());
    let model = commit(&store, &key("b"), &[bytes(0, MODEL)]).unwrap();
    assert!(Arc::ptr_eq(&model.packs[0], &pack));
    bench.assert_tidy();
}

#[test]
fn looking_up_while_others_clear_gives_all_or_nothing() {
    let bench = Bench::new();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let tensors = [bytes(1, 20_000), bytes(2, 30_000)];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let store = bench.open();
            for _ in 0..40 {
                match store.begin(&key("a")).unwrap() {
                    Begun::Draft(draft) => {
                        let content = PreparedContent {
                            graph: b"graph".to_vec(),
                            tensors: vec![tensor("t0", &tensors[0]), tensor("t1", &tensors[1])],
                            facts: PreparedFacts::default(),
                        };
                        // The other may clear it before it is looked up.
                        match draft.commit(content) {
                            Ok(_) | Err(StoreError::Gone { .. }) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                    Begun::Exists(_) | Begun::Busy => {}
                }
                let folder = File::open(bench.entry(&key("a")));
                if let Ok(folder) = folder {
                    let long_ago = SystemTime::now() - Duration::from_secs(500);
                    folder.set_modified(long_ago).unwrap();
                }
                bench.open().gc(0).unwrap();
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        for _ in 0..2 {
            scope.spawn(|| {
                let store = bench.open();
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    if let Some(model) = store.find(&key("a")).unwrap() {
                        assert_holds(&model, &tensors);
                    }
                }
            });
        }
    });
    bench.assert_tidy();
}

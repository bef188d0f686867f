//! A commit that ends at any point: by a full disk, or with its process.

use super::packs::names;
use super::steps::{Fault, Step, with_fault};
use super::*;

#[test]
fn a_full_disk_at_any_step_leaves_the_store_as_it_was() {
    for step in Step::ALL {
        let bench = Bench::new();
        let store = bench.open();
        let old = [bytes(1, 50_000)];
        commit(&store, &key("old"), &old).unwrap();
        let new = [bytes(2, 50_000), bytes(1, 50_000), bytes(3, 100)];
        let failed = with_fault(step, Fault::NoSpace, || commit(&store, &key("new"), &new))
            .expect("no crash");
        let error = failed.unwrap_err();
        assert!(
            matches!(error, StoreError::NoSpace { .. }),
            "{step:?}: {error}"
        );
        let found = store.find(&key("old")).unwrap().unwrap();
        assert_holds(&found, &old);
        assert!(store.find(&key("new")).unwrap().is_none());
        let packs = names(&bench.root().join("packs")).unwrap();
        let packs = packs.iter().filter(|name| name.ends_with(".bin"));
        assert_eq!(packs.count(), 1, "{step:?}");
        assert_holds(&commit(&store, &key("new"), &new).unwrap(), &new);
        bench.assert_tidy();
    }
}

#[test]
fn a_crash_at_any_step_leaves_all_or_nothing() {
    for step in Step::ALL {
        let bench = Bench::new();
        let store = bench.open();
        let old = [bytes(1, 50_000)];
        commit(&store, &key("old"), &old).unwrap();
        let new = [bytes(2, 50_000), bytes(1, 50_000), bytes(3, 100)];
        let crashed = with_fault(step, Fault::Crash, || commit(&store, &key("new"), &new));
        assert!(crashed.is_none(), "{step:?}");
        assert_eq!(bench.count("drafts"), 2, "{step:?}");
        drop(store);

        let store = bench.open();
        assert_eq!(bench.count("drafts"), 0, "{step:?}");
        assert_holds(&store.find(&key("old")).unwrap().unwrap(), &old);
        if let Some(found) = store.find(&key("new")).unwrap() {
            assert_eq!(step, Step::SyncEntries);
            assert_holds(&found, &new);
        } else {
            assert_holds(&commit(&store, &key("new"), &new).unwrap(), &new);
        }
        store.gc(1 << 30).unwrap();
        // A pack that got its name before the crash is shared by the second attempt.
        let packs = if [Step::SealPack, Step::RenameEntry].contains(&step) {
            3
        } else {
            2
        };
        assert_eq!(bench.count("packs"), 3 * packs, "{step:?}");
        bench.assert_tidy();
    }
}

#[test]
fn the_pack_of_a_crashed_commit_is_cleared() {
    for step in [Step::RenamePack, Step::SealPack, Step::RenameEntry] {
        let bench = Bench::new();
        let store = bench.open();
        with_fault(step, Fault::Crash, || {
            commit(&store, &key("a"), &[bytes(2, 50_000)])
        });
        store.gc(1 << 30).unwrap();
        assert_eq!(bench.count("packs"), 0, "{step:?}");
        assert_eq!(store.bytes_on_disk().unwrap(), 0);
    }
}

#[test]
fn a_draft_in_work_is_not_swept() {
    let bench = Bench::new();
    let store = bench.open();
    let draft = draft(&store, &key("a"));
    fs::write(draft.scratch().join("file"), b"x").unwrap();
    bench.open().gc(0).unwrap();
    assert!(draft.scratch().join("file").exists());
}

#[test]
fn a_removal_that_was_interrupted_is_finished() {
    let bench = Bench::new();
    let store = bench.open();
    commit(&store, &key("a"), &[bytes(2, 50_000)]).unwrap();
    // The manifest goes first.
    fs::remove_file(bench.entry(&key("a")).join("manifest.json")).unwrap();
    store.gc(1 << 30).unwrap();
    assert!(!bench.entry(&key("a")).exists());
    assert_eq!(bench.count("packs"), 0);
}

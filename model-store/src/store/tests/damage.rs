//! Whatever happens to its files: the store drops what is not right, and prepares it again.

use super::*;

/// Two models that share a pack.
fn two_models(bench: &Bench) -> (Arc<Store>, Digest) {
    let store = bench.open();
    let shared = bytes(1, 50_000);
    let model = commit(&store, &key("a"), &[shared.clone(), bytes(2, 100)]).unwrap();
    commit(&store, &key("b"), &[shared, bytes(3, 5000)]).unwrap();
    commit(&store, &key("other"), &[bytes(9, 5000)]).unwrap();
    (store, model.packs[0].digest())
}

/// After the damage no process serves `lost`, everything else is there, and it can be made again.
fn assert_healed(bench: &Bench, lost: &[&str]) {
    let store = bench.open();
    for name in lost {
        assert!(store.find(&key(name)).unwrap().is_none(), "{name}");
    }
    for name in ["a", "b", "other"] {
        if !lost.contains(&name) {
            assert!(store.find(&key(name)).unwrap().is_some(), "{name}");
        }
    }
    for name in lost {
        let again = [bytes(1, 50_000), bytes(2, 100)];
        let model = commit(&store, &key(name), &again).unwrap();
        assert_holds(&model, &again);
    }
    bench.assert_tidy();
}

#[test]
fn a_flipped_bit_in_a_pack_drops_it_and_all_who_use_it() {
    let bench = Bench::new();
    let (store, digest) = two_models(&bench);
    flip(&bench.pack(&digest), 30_000);
    // The same process, whose seal and slot know the file as it was.
    assert!(store.find(&key("a")).unwrap().is_none());
    assert!(!bench.entry(&key("b")).exists());
    assert!(!bench.pack(&digest).exists());
    assert_healed(&bench, &["a", "b"]);
}

#[test]
fn a_pack_damaged_under_a_model_in_use_is_not_given_to_the_next() {
    let bench = Bench::new();
    let (store, digest) = two_models(&bench);
    let held = store.find(&key("a")).unwrap().unwrap();
    flip(&bench.pack(&digest), 30_000);
    assert!(store.find(&key("a")).unwrap().is_none());
    assert!(store.find(&key("b")).unwrap().is_none());
    drop(held);
    assert_healed(&bench, &["a", "b"]);
}

#[test]
fn a_truncated_pack_is_dropped() {
    let bench = Bench::new();
    let (_, digest) = two_models(&bench);
    let bytes = fs::read(bench.pack(&digest)).unwrap();
    fs::remove_file(bench.pack(&digest)).unwrap();
    fs::write(bench.pack(&digest), &bytes[..bytes.len() / 2]).unwrap();
    assert!(bench.open().find(&key("a")).unwrap().is_none());
    assert_healed(&bench, &["a", "b"]);
}

#[test]
fn an_empty_pack_is_dropped() {
    let bench = Bench::new();
    let (_, digest) = two_models(&bench);
    fs::remove_file(bench.pack(&digest)).unwrap();
    fs::write(bench.pack(&digest), b"").unwrap();
    assert_healed(&bench, &["a", "b"]);
}

#[test]
fn a_missing_pack_drops_all_who_use_it() {
    let bench = Bench::new();
    let (store, digest) = two_models(&bench);
    fs::remove_file(bench.pack(&digest)).unwrap();
    assert!(store.find(&key("b")).unwrap().is_none());
    assert!(!bench.entry(&key("a")).exists());
    assert_healed(&bench, &["a", "b"]);
}

#[test]
fn a_pack_replaced_by_a_folder_or_link_is_dropped() {
    for link in [false, true] {
        let bench = Bench::new();
        let (_, digest) = two_models(&bench);
        let path = bench.pack(&digest);
        let moved = bench.folder.path().join("moved");
        fs::rename(&path, &moved).unwrap();
        if link {
            std::os::unix::fs::symlink(&moved, &path).unwrap();
        } else {
            fs::create_dir(&path).unwrap();
        }
        assert_healed(&bench, &["a", "b"]);
    }
}

#[test]
fn a_wrong_or_missing_seal_has_the_pack_checked_and_sealed_again() {
    let bench = Bench::new();
    let (store, digest) = two_models(&bench);
    let seal = store.packs().seal_path(&digest);
    let good = fs::read(&seal).unwrap();
    fs::remove_file(&seal).unwrap();
    assert!(bench.open().find(&key("a")).unwrap().is_some());
    assert_eq!(fs::read(&seal).unwrap(), good);
    flip(&seal, 80);
    assert!(bench.open().find(&key("a")).unwrap().is_some());
    assert_eq!(fs::read(&seal).unwrap(), good);
    assert_healed(&bench, &[]);
}

#[test]
fn a_copied_store_is_checked_and_sealed_anew() {
    let bench = Bench::new();
    let (_, digest) = two_models(&bench);
    let (path, copy) = (bench.pack(&digest), bench.folder.path().join("copy"));
    fs::copy(&path, &copy).unwrap();
    fs::rename(&copy, &path).unwrap();
    assert_healed(&bench, &[]);
}

#[test]
fn a_damaged_entry_is_dropped_alone() {
    for name in ["manifest.json", "graph.onnx", "facts.json"] {
        let damages: [fn(&Path); 4] = [
            |path| flip(path, 5),
            |path| flip(path, fs::read(path).unwrap().len() - 2),
            |path| {
                let bytes = fs::read(path).unwrap();
                fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
            },
            |path| fs::remove_file(path).unwrap(),
        ];
        for damage in damages {
            let bench = Bench::new();
            let (store, digest) = two_models(&bench);
            damage(&bench.entry(&key("a")).join(name));
            assert!(store.find(&key("a")).unwrap().is_none());
            assert!(!bench.entry(&key("a")).exists());
            assert!(bench.pack(&digest).exists());
            assert_healed(&bench, &["a"]);
        }
    }
}

#[test]
fn a_file_in_place_of_an_entry_is_removed() {
    let bench = Bench::new();
    two_models(&bench);
    let entry = bench.entry(&key("a"));
    fs::remove_dir_all(&entry).unwrap();
    fs::write(&entry, b"x").unwrap();
    assert_healed(&bench, &["a"]);
}

#[test]
fn a_manifest_that_points_outside_its_pack_is_damaged() {
    let bench = Bench::new();
    let (store, _) = two_models(&bench);
    let path = bench.entry(&key("a")).join("manifest.json");
    let good: manifest::Manifest = record::read(&path, 1 << 20).unwrap();
    let wrongs: [fn(&mut manifest::Manifest); 4] = [
        |manifest| manifest.weights[0].offset = u64::MAX - 10,
        |manifest| manifest.weights[0].offset += 4096,
        |manifest| manifest.weights[0].pack = 7,
        |manifest| manifest.weights[0].dims = vec![1 << 40],
    ];
    for wrong in wrongs {
        let mut manifest: manifest::Manifest =
            serde_json::from_slice(&serde_json::to_vec(&good).unwrap()).unwrap();
        wrong(&mut manifest);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, record::encode(&manifest)).unwrap();
        assert!(store.find(&key("a")).unwrap().is_none());
        assert!(!path.exists());
    }
}

#[test]
fn verify_tells_and_repairs_what_a_seal_hides() {
    let bench = Bench::new();
    let (store, digest) = two_models(&bench);
    let path = bench.pack(&digest);
    // Decay of the disk leaves no trace in the file's times: as if sealed like this.
    flip(&path, 30_000);
    store
        .packs()
        .seal(&digest, &stamp::Stamp::of(&path.metadata().unwrap()));
    flip(&bench.entry(&key("other")).join("graph.onnx"), 1);
    let told = std::sync::Mutex::new(Vec::new());
    let progress = |done, total| told.lock().unwrap().push((done, total));
    let report = store.verify(false, &progress).unwrap();
    let mut damaged: Vec<PathBuf> = report.damaged.into_iter().map(|it| it.path).collect();
    let mut expected = vec![path.clone()];
    expected.extend(["a", "b", "other"].map(|name| bench.entry(&key(name))));
    damaged.sort();
    expected.sort();
    assert_eq!(damaged, expected);
    assert_eq!((report.entries, report.packs), (3, 3));
    let told = told.into_inner().unwrap();
    let (done, total) = *told.last().unwrap();
    assert_eq!(done, total);
    assert!(path.exists());

    store.verify(true, &|_, _| {}).unwrap();
    assert!(!path.exists());
    assert_healed(&bench, &["a", "b", "other"]);
}

#[test]
fn a_repaired_entry_prepared_again_meanwhile_is_not_dropped() {
    let bench = Bench::new();
    let (store, _) = two_models(&bench);
    let seen = EntryFolder::open(bench.entry(&key("a"))).unwrap().unwrap();
    fs::remove_dir_all(bench.entry(&key("a"))).unwrap();
    commit(&bench.open(), &key("a"), &[bytes(1, 50_000)]).unwrap();
    store.drop_entry(&seen, &key("a")).unwrap();
    assert!(store.find(&key("a")).unwrap().is_some());
}

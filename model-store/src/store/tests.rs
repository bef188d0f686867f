//! The store over real folders.

mod clearing;
mod crashes;
mod damage;
mod processes;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::*;

/// A folder for stores.
struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn dir(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    /// As another process would have it.
    fn open(&self) -> Arc<Store> {
        self.open_with(1 << 30)
    }

    fn open_with(&self, max_bytes: u64) -> Arc<Store> {
        Store::open(StoreConfig {
            dir: self.dir(),
            max_bytes,
        })
        .unwrap()
    }

    fn root(&self) -> PathBuf {
        self.dir().join("v1")
    }

    fn entry(&self, key: &EntryKey) -> PathBuf {
        self.root().join("entries").join(key.to_string())
    }

    fn pack(&self, digest: &Digest) -> PathBuf {
        self.root().join("packs").join(format!("{digest}.bin"))
    }

    /// Makes an entry look as if it was last used so long ago.
    fn age(&self, key: &EntryKey, seconds: u64) {
        let folder = File::open(self.entry(key)).unwrap();
        let then = SystemTime::now() - Duration::from_secs(seconds);
        folder.set_modified(then).unwrap();
    }

    fn count(&self, folder: &str) -> usize {
        fs::read_dir(self.root().join(folder)).unwrap().count()
    }

    /// No half of anything: what is there is whole, and nothing else is.
    fn assert_tidy(&self) {
        let store = self.open();
        let report = store.verify(false, &|_, _| {}).unwrap();
        assert_eq!(report.damaged, []);
        assert_eq!((self.count("drafts"), self.count("tmp")), (0, 0));
    }
}

fn key(name: &str) -> EntryKey {
    KeyParts {
        engine: name.to_owned(),
        ..KeyParts::default()
    }
    .key()
}

/// Bytes that are like no other tensor's.
fn bytes(seed: u8, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut reader = blake3::Hasher::new().update(&[seed]).finalize_xof();
    reader.fill(&mut bytes);
    bytes
}

fn tensor<'a>(name: &str, bytes: &'a [u8]) -> NewTensor<'a> {
    NewTensor {
        name: name.to_owned(),
        element_type: 2,
        dims: vec![bytes.len() as i64],
        data: TensorData::Memory(bytes),
    }
}

fn draft(store: &Arc<Store>, key: &EntryKey) -> Draft {
    match store.begin(key).unwrap() {
        Begun::Draft(draft) => draft,
        other => panic!("{other:?}"),
    }
}

/// Commits a model of these tensors, each named by its place.
fn commit(
    store: &Arc<Store>,
    key: &EntryKey,
    tensors: &[Vec<u8>],
) -> Result<Arc<PreparedModel>, StoreError> {
    let tensors = tensors.iter().enumerate();
    draft(store, key).commit(PreparedContent {
        graph: format!("graph of {key}").into_bytes(),
        tensors: tensors
            .map(|(index, bytes)| tensor(&format!("t{index}"), bytes))
            .collect(),
        facts: PreparedFacts {
            models: vec![format!("model {}", key.short())],
            ..PreparedFacts::default()
        },
    })
}

fn assert_holds(model: &PreparedModel, tensors: &[Vec<u8>]) {
    assert_eq!(model.weights.len(), tensors.len());
    for (weight, tensor) in model.weights.iter().zip(tensors) {
        assert_eq!(model.bytes(weight), tensor, "{}", weight.name);
    }
}

#[test]
fn what_was_committed_is_found() {
    let bench = Bench::new();
    let store = bench.open();
    let draft = draft(&store, &key("a"));
    let weights = bytes(1, 30_000);
    fs::create_dir(draft.scratch().join("sub")).unwrap();
    fs::write(draft.scratch().join("sub/weights.bin"), &weights).unwrap();
    let verdict = PackingVerdict {
        unpacked_run_us: 90,
        packed_run_us: 70,
        packed_private_bytes: 1 << 20,
        pays: true,
    };
    let small = bytes(2, 12);
    let content = PreparedContent {
        graph: b"graph".to_vec(),
        tensors: vec![
            NewTensor {
                name: "large".to_owned(),
                element_type: 1,
                dims: vec![50, 100],
                data: TensorData::Scratch {
                    file: "sub/weights.bin".into(),
                    offset: 5_000,
                    len: 20_000,
                },
            },
            NewTensor {
                name: "small".to_owned(),
                element_type: 6,
                dims: vec![3],
                data: TensorData::Memory(&small),
            },
            tensor("page", &weights[..4096]),
        ],
        facts: PreparedFacts {
            models: vec!["bert".to_owned()],
            source_bytes: 20_012,
            packing: Some(verdict),
            ..PreparedFacts::default()
        },
    };
    let committed = draft.commit(content).unwrap();
    let other_process = bench.open();
    for model in [committed, other_process.find(&key("a")).unwrap().unwrap()] {
        assert_eq!(&model.graph[..], b"graph");
        assert_eq!(model.facts.packing, Some(verdict));
        assert_eq!(model.facts.models, ["bert"]);
        assert!(model.facts.created_at() > SystemTime::now() - Duration::from_secs(3600));
        let [large, small_one, page] = &model.weights[..] else {
            panic!("{:?}", model.weights);
        };
        assert_eq!(model.bytes(large), &weights[5_000..25_000]);
        assert_eq!(model.bytes(small_one), small);
        assert_eq!(model.bytes(page), &weights[..4096]);
        assert_eq!((large.element_type, &large.dims[..]), (1, &[50, 100][..]));
        assert_eq!((large.offset % 4096, page.offset % 4096), (0, 0));
        assert_eq!(small_one.offset % 64, 0);
        assert_eq!(model.weight_bytes(), 24_108);
        assert_eq!(model.spans(), [(0, 0..28_672)]);
    }
    assert!(store.find(&key("b")).unwrap().is_none());
    bench.assert_tidy();
}

#[test]
fn weights_that_are_read_by_rows_are_not_part_of_what_every_run_reads() {
    let bench = Bench::new();
    let store = bench.open();
    let (dense, table) = (bytes(1, 8192), bytes(2, 200_000));
    let rows = NewTensor {
        dims: vec![100, 2000],
        ..tensor("table", &table)
    };
    let content = PreparedContent {
        graph: b"graph".to_vec(),
        tensors: vec![tensor("dense", &dense), rows],
        facts: PreparedFacts {
            by_rows: vec!["table".to_owned(), "gone".to_owned()],
            ..PreparedFacts::default()
        },
    };
    let model = draft(&store, &key("a")).commit(content).unwrap();
    let [dense_weight, table_weight] = &model.weights[..] else {
        panic!("{:?}", model.weights);
    };
    assert_eq!(model.spans(), [(0, dense_weight.range())]);
    assert_eq!(model.table_spans(), [(0, table_weight.range())]);
    let tables: Vec<Table> = model.tables().collect();
    let [found] = tables[..] else {
        panic!("{tables:?}");
    };
    assert_eq!((found.rows, found.row_bytes), (100, 2000));
    let last = found.row(99).unwrap();
    assert_eq!(model.packs[0].bytes(last), Some(&table[198_000..]));
    assert_eq!(found.row(100), None);
    assert_eq!(model.bytes(table_weight), table);

    // The same bytes under another name, read as a whole.
    let content = PreparedContent {
        graph: b"graph".to_vec(),
        tensors: vec![tensor("head", &table), tensor("table", &table)],
        facts: PreparedFacts {
            by_rows: vec!["table".to_owned()],
            ..PreparedFacts::default()
        },
    };
    let model = draft(&store, &key("b")).commit(content).unwrap();
    assert_eq!(model.table_spans(), []);
    assert_eq!(model.spans(), [(0, model.weights[0].range())]);
}

#[test]
fn a_model_without_tensors_has_no_pack() {
    let bench = Bench::new();
    let model = commit(&bench.open(), &key("a"), &[]).unwrap();
    assert!(model.packs.is_empty());
    assert_eq!(bench.count("packs"), 0);
}

#[test]
fn equal_tensors_are_stored_and_mapped_once() {
    let bench = Bench::new();
    let store = bench.open();
    let (one, two, three) = (bytes(1, 50_000), bytes(2, 70_000), bytes(3, 40_000));
    let a = [one.clone(), two.clone(), one.clone()];
    let b = [three.clone(), two.clone(), one.clone()];
    let model_a = commit(&store, &key("a"), &a).unwrap();
    let model_b = commit(&store, &key("b"), &b).unwrap();
    assert_holds(&model_a, &a);
    assert_holds(&model_b, &b);
    assert_eq!(model_a.weights[0].range(), model_a.weights[2].range());
    // The second's own pack holds only what the first lacks.
    assert_eq!(model_b.packs[0].len(), 40_000 + 64);
    assert!(Arc::ptr_eq(&model_b.packs[1], &model_a.packs[0]));

    // And one that has nothing of its own.
    let c = [two, three];
    let model_c = commit(&store, &key("c"), &c).unwrap();
    assert_holds(&model_c, &c);
    assert_eq!(model_c.packs.len(), 2);
    assert_eq!(bench.count("packs"), 2 * 3);

    let list = store.list().unwrap();
    let info = |name: &str| list.iter().find(|info| info.key == key(name)).unwrap();
    assert_eq!(info("c").own_bytes, 0);
    assert_eq!(info("c").shared_bytes, 110_000);
    bench.assert_tidy();
}

#[test]
fn an_index_that_lies_shares_nothing() {
    let bench = Bench::new();
    let store = bench.open();
    let (one, two) = (bytes(1, 50_000), bytes(2, 50_000));
    let model = commit(&store, &key("a"), std::slice::from_ref(&one)).unwrap();
    let index = packs::Indexed::encode(&[
        packs::Indexed {
            digest: Digest::of(&two),
            offset: 0,
            len: 50_000,
        },
        packs::Indexed {
            digest: Digest::of(&two),
            offset: u64::MAX,
            len: 50_000,
        },
    ]);
    let digest = model.packs[0].digest();
    fs::write(store.packs().index_path(&digest), index).unwrap();
    let model = commit(&store, &key("b"), std::slice::from_ref(&two)).unwrap();
    assert_holds(&model, &[two]);
}

#[test]
fn a_pack_is_mapped_once_in_a_process() {
    let bench = Bench::new();
    let store = bench.open();
    let first = commit(&store, &key("a"), &[bytes(1, 9000)]).unwrap();
    let second = store.find(&key("a")).unwrap().unwrap();
    assert!(Arc::ptr_eq(&first.packs[0], &second.packs[0]));
}

#[test]
fn tensors_that_make_no_sense_are_refused() {
    let bench = Bench::new();
    let store = bench.open();
    let data = bytes(1, 16);
    let scratch = |file: &str, offset, len| TensorData::Scratch {
        file: file.into(),
        offset,
        len,
    };
    let good = tensor("good", &data);
    let cases = [
        vec![good.clone(), good.clone()],
        vec![tensor("empty", &[])],
        vec![NewTensor {
            dims: vec![17],
            ..good.clone()
        }],
        vec![NewTensor {
            dims: vec![-16],
            ..good.clone()
        }],
        vec![NewTensor {
            data: scratch("../../../x", 0, 16),
            ..good.clone()
        }],
        vec![NewTensor {
            data: scratch("/etc/hostname", 0, 16),
            ..good.clone()
        }],
        vec![NewTensor {
            data: scratch("file", 8, 16),
            ..good.clone()
        }],
        vec![NewTensor {
            data: scratch("file", u64::MAX, 16),
            ..good.clone()
        }],
    ];
    for tensors in cases {
        let draft = draft(&store, &key("a"));
        fs::write(draft.scratch().join("file"), &data).unwrap();
        let content = PreparedContent {
            graph: Vec::new(),
            tensors,
            facts: PreparedFacts::default(),
        };
        let error = draft.commit(content).unwrap_err();
        assert!(matches!(error, StoreError::Tensor { .. }), "{error}");
    }
    assert_eq!(bench.count("entries"), 0);
    bench.assert_tidy();
}

#[test]
fn a_model_is_prepared_by_one_at_a_time() {
    let bench = Bench::new();
    let (store, other) = (bench.open(), bench.open());
    let first = draft(&store, &key("a"));
    assert!(matches!(store.begin(&key("a")).unwrap(), Begun::Busy));
    assert!(matches!(other.begin(&key("a")).unwrap(), Begun::Busy));
    // Another model is another matter.
    drop(draft(&other, &key("b")));
    let scratch = first.scratch().to_owned();
    fs::write(scratch.join("file"), b"x").unwrap();
    drop(first);
    assert!(!scratch.exists());
    commit(&other, &key("a"), &[bytes(1, 5000)]).unwrap();
    assert!(matches!(store.begin(&key("a")).unwrap(), Begun::Exists(_)));
    bench.assert_tidy();
}

#[test]
fn of_many_threads_one_prepares() {
    let bench = Bench::new();
    let ready = std::sync::Barrier::new(8);
    let committed = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let store = bench.open();
                    ready.wait();
                    let Begun::Draft(draft) = store.begin(&key("a")).unwrap() else {
                        return 0;
                    };
                    let data = bytes(1, 50_000);
                    let content = PreparedContent {
                        graph: b"graph".to_vec(),
                        tensors: vec![tensor("t", &data)],
                        facts: PreparedFacts::default(),
                    };
                    draft.commit(content).unwrap();
                    1
                })
            })
            .collect();
        let counts = threads.into_iter().map(|thread| thread.join().unwrap());
        counts.sum::<usize>()
    });
    assert_eq!(committed, 1);
    bench.assert_tidy();
}

#[test]
fn a_model_that_is_of_no_use_is_dropped_and_counted() {
    let bench = Bench::new();
    let (store, other) = (bench.open(), bench.open());
    commit(&store, &key("a"), &[]).unwrap();
    let found = store.find(&key("a")).unwrap().unwrap();
    store.discard(&found, &"no session can be built");
    assert!(store.find(&key("a")).unwrap().is_none());
    assert!(other.find(&key("a")).unwrap().is_none());
    assert_eq!((store.dropped(), other.dropped()), (1, 0));
    // Another one of that name is not what was found.
    commit(&store, &key("a"), &[]).unwrap();
    store.discard(&found, &"no session can be built");
    assert!(store.find(&key("a")).unwrap().is_some());
    drop(found);
    bench.assert_tidy();
}

#[test]
fn facts_change_in_one_step_for_everyone() {
    let bench = Bench::new();
    let (store, other) = (bench.open(), bench.open());
    commit(&store, &key("a"), &[]).unwrap();
    let change = |facts: &mut PreparedFacts| facts.prepared_load_us = Some(7);
    store.update_facts(&key("a"), change).unwrap();
    let found = other.find(&key("a")).unwrap().unwrap();
    assert_eq!(found.facts.prepared_load_us, Some(7));
    assert_eq!(found.facts.models.len(), 1);
    let error = store.update_facts(&key("b"), change).unwrap_err();
    assert!(matches!(error, StoreError::Gone { .. }), "{error}");
    bench.assert_tidy();
}

#[test]
fn a_store_that_cannot_be_written_is_read() {
    let bench = Bench::new();
    let tensors = [bytes(1, 50_000)];
    commit(&bench.open(), &key("a"), &tensors).unwrap();
    // As in an image: no seal fits the copied file.
    for entry in fs::read_dir(bench.root().join("packs")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|name| name == "seal") {
            fs::remove_file(path).unwrap();
        }
    }
    let config = StoreConfig {
        dir: bench.dir(),
        max_bytes: 1 << 30,
    };
    let store = Store::open_as(config, Access::ReadOnly).unwrap();
    assert!(store.is_read_only());
    for _ in 0..2 {
        let model = store.find(&key("a")).unwrap().unwrap();
        assert_holds(&model, &tensors);
    }
    assert_eq!(bench.count("packs"), 2);
    for refused in [
        store.begin(&key("b")).map(drop).unwrap_err(),
        store.gc(0).map(drop).unwrap_err(),
        store.verify(true, &|_, _| {}).map(drop).unwrap_err(),
        store.update_facts(&key("a"), |_| {}).map(drop).unwrap_err(),
    ] {
        assert!(matches!(refused, StoreError::ReadOnly { .. }), "{refused}");
    }
    assert_eq!(store.verify(false, &|_, _| {}).unwrap().damaged, []);
    assert_eq!(store.list().unwrap().len(), 1);
    // Damage is not served, though it cannot be removed.
    fs::write(bench.entry(&key("a")).join("graph.onnx"), b"bad").unwrap();
    assert!(store.find(&key("a")).unwrap().is_none());
}

#[test]
fn a_folder_others_may_write_to_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let bench = Bench::new();
    drop(bench.open());
    fs::set_permissions(bench.root(), fs::Permissions::from_mode(0o770)).unwrap();
    let config = StoreConfig {
        dir: bench.dir(),
        max_bytes: 1,
    };
    let error = Store::open(config).unwrap_err();
    assert!(matches!(error, StoreError::Exposed { .. }), "{error}");
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 0x10;
    // Packs are read-only; their owner can change that.
    let mut permissions = fs::metadata(path).unwrap().permissions();
    #[expect(clippy::permissions_set_readonly_false, reason = "a file of this test")]
    permissions.set_readonly(false);
    fs::set_permissions(path, permissions).unwrap();
    fs::write(path, bytes).unwrap();
}

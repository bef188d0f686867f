use std::fs::{self, File};

use dormouse_model_store::store::{
    Begun, EntryKey, KeyParts, NewTensor, PreparedContent, PreparedFacts, TensorData,
};
use expect_test::{Expect, expect};

use super::*;
use crate::cli::output::OutputFormat;

const TABLE: Screen = Screen {
    unicode: true,
    colour: false,
    format: OutputFormat::Table,
    terminal: false,
    width: None,
};

struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn store(&self) -> Arc<Store> {
        Store::open(StoreConfig {
            dir: self.folder.path().to_owned(),
            max_bytes: 1 << 30,
        })
        .unwrap()
    }

    fn path(&self, key: &EntryKey) -> PathBuf {
        let entries = self.folder.path().join("v1/entries");
        entries.join(key.to_string())
    }

    /// Prepares a model with a tensor of its own and one that all have, last used so long ago.
    fn prepare(&self, name: &str, packing: Option<PackingVerdict>, age: u64) -> EntryKey {
        let key = KeyParts {
            engine: name.to_owned(),
            ..KeyParts::default()
        }
        .key();
        let Begun::Draft(draft) = self.store().begin(&key).unwrap() else {
            panic!("{name} is there");
        };
        let own = name.repeat(3000).into_bytes();
        let tensor = |name: &str, data: &'static [u8]| NewTensor {
            name: name.to_owned(),
            element_type: 2,
            dims: vec![data.len() as i64],
            data: TensorData::Memory(data),
        };
        let content = PreparedContent {
            graph: b"graph".to_vec(),
            tensors: vec![tensor("own", own.leak()), tensor("shared", &[7; 100 << 10])],
            facts: PreparedFacts {
                models: vec![format!("{name}/1")],
                packing,
                ..PreparedFacts::default()
            },
        };
        drop(draft.commit(content).unwrap());
        let then = SystemTime::now() - Duration::from_secs(age);
        File::open(self.path(&key))
            .unwrap()
            .set_modified(then)
            .unwrap();
        key
    }

    fn check(&self, text: &str, expected: &Expect) {
        let dir = self.folder.path().display().to_string();
        expected.assert_eq(&text.replace(&dir, "DIR"));
    }
}

#[test]
fn prepared_models_are_listed() {
    let bench = Bench::new();
    let verdict = PackingVerdict {
        unpacked_run_us: 88_000,
        packed_run_us: 70_000,
        packed_private_bytes: 1 << 20,
        pays: true,
    };
    bench.prepare("bert", Some(verdict), 7200);
    bench.prepare("tiny", None, 90);
    let store = bench.store();
    let reply = list(Some(&store), bench.folder.path(), &TABLE).unwrap();
    let (table, total) = reply.text.split_at(reply.text.find("2 prepared").unwrap());
    assert!(total.ends_with(&format!(" in {}\n", bench.folder.path().display())));
    bench.check(
        table,
        &expect![[r#"
            MODEL  VERSION  KEY           GRAPH  OWN       SHARED     LAST USED  PACKING
            tiny   1        17b00f3e7e89  5 B    11.8 KiB  100.0 KiB  1 min ago  -
            bert   1        66137254e651  5 B    0 B       111.7 KiB  2 h ago    pays (88.0 ms to 70.0 ms)
        "#]],
    );
    let json = Screen {
        format: OutputFormat::Json,
        ..TABLE
    };
    let reply = list(Some(&store), bench.folder.path(), &json).unwrap();
    let value: Value = serde_json::from_str(&reply.text).unwrap();
    assert_eq!(value["entries"][1]["models"][0], "bert/1");
    assert_eq!(value["entries"][1]["packing"]["pays"], true);
    assert_eq!(value["bytes"], store.bytes_on_disk().unwrap());
}

#[test]
fn a_store_that_is_not_there_is_empty_and_stays_away() {
    let bench = Bench::new();
    let dir = bench.folder.path().join("none");
    let arguments = StoreArgs {
        store: Some(dir.clone()),
        format: FormatArgs {
            format: Some(OutputFormat::Table),
            json: false,
        },
    };
    let refused = execute(&StoreCommand::Verify(VerifyArgs {
        repair: false,
        store: arguments.clone(),
    }));
    let refused = refused.unwrap_err().to_string();
    assert!(refused.ends_with("none is not a store: nothing was ever prepared there"));
    let reply = execute(&StoreCommand::Ls(LsArgs { store: arguments })).unwrap();
    bench.check(
        &reply.text,
        &expect![[r#"
        nothing is prepared in DIR/none
    "#]],
    );
    assert!(!dir.exists());
}

#[test]
fn damage_is_told_and_removed_when_asked() {
    let bench = Bench::new();
    let key = bench.prepare("bert", None, 0);
    bench.prepare("tiny", None, 0);
    fs::write(bench.path(&key).join("graph.onnx"), b"garbl").unwrap();
    let store = bench.store();
    let reply = verify(&store, false, &TABLE).unwrap();
    assert!(!reply.good);
    bench.check(&reply.text, &expect![[r#"
        damaged: DIR/v1/entries/66137254e651c17bb6ac587e59f47d54b58c72a3b263761501cf8a7cdf5e061b (bert/1): graph.onnx does not have the digest its manifest says
        2 prepared models and 2 packs checked, 123.8 KiB
        1 damaged: --repair removes them
    "#]]);
    let reply = verify(&store, true, &TABLE).unwrap();
    assert!(reply.good);
    let reply = verify(&store, false, &TABLE).unwrap();
    assert!(reply.good);
    bench.check(
        &reply.text,
        &expect![[r#"
            1 prepared model and 2 packs checked, 123.8 KiB
            all is well
        "#]],
    );
}

#[test]
fn clearing_up_says_what_went_and_what_could_not() {
    let bench = Bench::new();
    bench.prepare("bert", None, 7200);
    bench.prepare("tiny", None, 90);
    let store = bench.store();
    let total = store.bytes_on_disk().unwrap();
    let reply = gc(Some(&store), ByteSize(total - 1), &TABLE).unwrap();
    let lines: Vec<&str> = reply.text.lines().collect();
    assert_eq!(lines[0], "removed: 66137254e651 bert/1");
    assert!(lines[1].contains(" freed, ") && lines[1].ends_with(" kept"));
    assert_eq!(lines.len(), 2);
    let tiny = store.list().unwrap()[0].key;
    let held = store.find(&tiny).unwrap().unwrap();
    let reply = gc(Some(&store), ByteSize(0), &TABLE).unwrap();
    let lines: Vec<&str> = reply.text.lines().collect();
    assert!(lines[0].starts_with("0 B freed, "), "{lines:?}");
    assert_eq!(
        lines[1],
        "that is more than 0 B: the rest is in use or was used within the last minute"
    );
    drop(held);
}

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;

use super::*;
use crate::graph::OperatorFacts;
use crate::onnx::writer::*;

const CONFIG: &str = "max_batch_size: 4";

/// A repository with model `m`, beside a file that is none of its business.
struct Fixture {
    outer: TempDir,
    repository: Repository,
}

impl Fixture {
    fn new() -> Self {
        let outer = tempfile::tempdir().unwrap();
        fs::create_dir_all(outer.path().join("models/m/1")).unwrap();
        fs::write(outer.path().join("secret"), [7u8; 64]).unwrap();
        fs::write(outer.path().join("models/m/config.pbtxt"), CONFIG).unwrap();
        let repository = Repository::open(outer.path().join("models")).unwrap();
        Self { outer, repository }
    }

    fn path(&self, relative: &str) -> PathBuf {
        self.outer.path().join("models").join(relative)
    }

    fn write(&self, relative: &str, bytes: impl AsRef<[u8]>) -> &Self {
        let path = self.path(relative);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
        self
    }

    fn link(&self, target: &str, relative: &str) -> &Self {
        symlink(target, self.path(relative)).unwrap();
        self
    }

    fn model(&self) -> ModelDir {
        self.repository.model("m").unwrap()
    }

    fn load(&self) -> Result<LoadedGraph, RepositoryError> {
        self.model().open_graph(1, "model.onnx")?.load()
    }

    /// The error, checked to tell nothing of where the repository is.
    fn refusal<T: std::fmt::Debug>(&self, result: Result<T, RepositoryError>) -> String {
        let text = result.unwrap_err().to_string();
        let host = self.outer.path().to_str().unwrap();
        assert!(!text.contains(host), "{text}");
        text
    }
}

fn plain_model() -> Vec<u8> {
    model(Message::new().message(11, value("x", FLOAT, &[-1]))).0
}

fn external_model(entries: &[(&str, &str)]) -> Vec<u8> {
    model(Message::new().message(5, external("W", &[4], entries))).0
}

#[test]
fn models_are_listed_by_name() {
    let fixture = Fixture::new();
    for folder in ["b", "a", ".git", "lost+found", "bad\\name", "new\nline"] {
        fs::create_dir(fixture.path(folder)).unwrap();
    }
    fixture
        .write("README.md", "")
        .link("b", "alias")
        .link("../../", "out")
        .link("gone", "dead");
    let listing = fixture.repository.list().unwrap();
    assert_eq!(listing.models, ["a", "alias", "b", "m"]);
    assert_eq!(
        listing.refused,
        [
            ("bad\\name".to_owned(), NameError::Separator),
            ("new\nline".to_owned(), NameError::Control('\n')),
        ]
    );
}

#[test]
fn no_name_leads_out_of_the_repository() {
    let fixture = Fixture::new();
    for name in [
        "",
        ".",
        "..",
        "../secret",
        "../../etc/passwd",
        "/etc/passwd",
        "m/../../secret",
        "..\\secret",
        "m/1",
        "m\0",
        ".hidden",
    ] {
        let error = fixture.repository.model(name).unwrap_err();
        assert!(
            matches!(error, RepositoryError::Name { .. }),
            "{name:?}: {error}"
        );
        let model = fixture.model();
        if name != "m/1" {
            assert!(model.read_file(name, 100).is_err(), "{name:?}");
            assert!(model.open_graph(1, name).is_err(), "{name:?}");
        }
        assert!(model.config_text(Some(name)).is_err() || name.is_empty() || name.starts_with('.'));
    }
    let error = fixture.repository.model("absent").unwrap_err();
    assert_eq!(error.to_string(), "model 'absent' is not in the repository");
    fixture.write("file", "");
    let error = fixture.repository.model("file").unwrap_err();
    assert!(matches!(error, RepositoryError::ModelNotFound { .. }));
}

#[test]
fn links_inside_the_repository_work() {
    let fixture = Fixture::new();
    // As Kubernetes mounts a volume.
    fixture
        .write(
            "m/1/..2024/model.onnx",
            external_model(&[("location", "w.bin")]),
        )
        .write("m/1/..2024/w.bin", [0; 16])
        .link("..2024", "m/1/..data")
        .link("..data/model.onnx", "m/1/model.onnx")
        .link("..data/w.bin", "m/1/w.bin");
    assert_eq!(fixture.load().unwrap().external.len(), 1);
    // A version shared by two models, and by two names.
    fs::create_dir(fixture.path("n")).unwrap();
    fixture.link("../m/1", "n/1").link("m", "alias");
    for name in ["n", "alias"] {
        let model = fixture.repository.model(name).unwrap();
        assert_eq!(model.versions().unwrap(), [1]);
        model.open_graph(1, "model.onnx").unwrap().load().unwrap();
    }
}

#[test]
fn links_out_of_the_repository_are_refused() {
    let fixture = Fixture::new();
    fixture
        .link("../..", "out")
        .link("../../secret", "m/labels.txt");
    fixture
        .link("../../../secret", "m/1/model.onnx")
        .link("/etc", "etc");
    let out = fixture.repository.model("out").unwrap_err().to_string();
    assert_eq!(out, "'out' is a link that leads out of the repository");
    assert!(matches!(
        fixture.repository.model("etc"),
        Err(RepositoryError::LeadsOut { .. })
    ));
    let labels = fixture.refusal(fixture.model().read_file("labels.txt", 1_000));
    assert_eq!(
        labels,
        "'m/labels.txt' is a link that leads out of the repository"
    );
    let graph = fixture.refusal(fixture.model().open_graph(1, "model.onnx"));
    assert_eq!(
        graph,
        "'m/1/model.onnx' is a link that leads out of the repository"
    );
    fixture.link("/proc/self/root", "proc");
    assert!(fixture.repository.model("proc").is_err());
    fs::remove_file(fixture.path("m/config.pbtxt")).unwrap();
    fixture.link("../../secret", "m/config.pbtxt");
    let config = fixture.refusal(fixture.model().config_text(None));
    assert!(config.contains("leads out"), "{config}");
}

#[test]
fn versions_are_numeric_folders_in_order() {
    let fixture = Fixture::new();
    for folder in ["10", "2", "03", "v4", "configs", "-1", "0"] {
        fs::create_dir(fixture.path(&format!("m/{folder}"))).unwrap();
    }
    fixture.write("m/7", "a file");
    assert_eq!(fixture.model().versions().unwrap(), [0, 1, 2, 10]);
}

#[test]
fn the_named_configuration_comes_first() {
    let fixture = Fixture::new();
    fixture.write("m/configs/gpu.pbtxt", "platform: \"x\"");
    let model = fixture.model();
    assert_eq!(model.config_text(None).unwrap().as_deref(), Some(CONFIG));
    let named = model.config_text(Some("gpu")).unwrap();
    assert_eq!(named.as_deref(), Some("platform: \"x\""));
    assert_eq!(
        model.config_text(Some("other")).unwrap().as_deref(),
        Some(CONFIG)
    );
    fs::remove_file(fixture.path("m/config.pbtxt")).unwrap();
    assert_eq!(model.config_text(None).unwrap(), None);
}

#[test]
fn configurations_are_bounded_and_text() {
    let fixture = Fixture::new();
    fixture.write("m/config.pbtxt", vec![b' '; 1 << 20]);
    assert!(fixture.model().config_text(None).is_ok());
    fixture.write("m/config.pbtxt", vec![b' '; (1 << 20) + 1]);
    let error = fixture.refusal(fixture.model().config_text(None));
    assert_eq!(
        error,
        "'m/config.pbtxt' has 1048577 bytes, at most 1048576 are allowed"
    );
    fixture.write("m/config.pbtxt", b"name: \"\xff\"");
    let error = fixture.refusal(fixture.model().config_text(None));
    assert_eq!(error, "'m/config.pbtxt' is not valid UTF-8 at byte 7");
}

#[test]
fn only_regular_files_are_read() {
    let fixture = Fixture::new();
    mknodat(CWD, fixture.path("m/pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    fs::create_dir(fixture.path("m/folder")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(fixture.path("m/socket")).unwrap();
    let read = |name: &str| fixture.refusal(fixture.model().read_file(name, 100));
    assert_eq!(read("pipe"), "'m/pipe' is a pipe, not a regular file");
    assert_eq!(read("folder"), "'m/folder' is a folder, not a regular file");
    assert_eq!(
        read("socket"),
        "'m/socket' is a socket or device, not a regular file"
    );
    assert_eq!(read("absent"), "'m/absent' does not exist");
    let null = rustix::fs::makedev(1, 3);
    let device = mknodat(
        CWD,
        fixture.path("m/device"),
        FileType::CharacterDevice,
        Mode::RUSR,
        null,
    );
    // Only the superuser may make one.
    if device.is_ok() {
        assert!(
            read("device").contains("not a regular file") || read("device").contains("ermission")
        );
    }
    let pipe = fixture.refusal(fixture.model().open_graph(1, "../pipe"));
    assert!(pipe.contains("'..'"), "{pipe}");
    mknodat(
        CWD,
        fixture.path("m/1/w.bin"),
        FileType::Fifo,
        Mode::RUSR,
        0,
    )
    .unwrap();
    fixture.write("m/1/model.onnx", external_model(&[("location", "w.bin")]));
    assert_eq!(
        fixture.refusal(fixture.load()),
        "'m/1/w.bin' is a pipe, not a regular file"
    );
}

#[test]
fn a_graph_is_a_file_or_a_folder_of_that_name() {
    let fixture = Fixture::new();
    fixture.write("m/1/model.onnx", plain_model());
    fixture.write(
        "m/2/model.onnx/model.onnx",
        external_model(&[("location", "./d/w.bin")]),
    );
    fixture.write("m/2/model.onnx/d/w.bin", [0; 16]);
    let model = fixture.model();
    let file = model.open_graph(1, "model.onnx").unwrap();
    assert_eq!(file.path(), "m/1/model.onnx");
    assert_eq!(file.summary().unwrap().inputs[0].name, "x");
    let folder = model.open_graph(2, "model.onnx").unwrap();
    assert_eq!(folder.path(), "m/2/model.onnx/model.onnx");
    let loaded = folder.load().unwrap();
    assert_eq!(loaded.external, [("./d/w.bin".to_owned(), vec![0; 16])]);
    assert_eq!(loaded.bytes, loaded.graph.len() as u64 + 16);
    let absent = fixture.refusal(model.open_graph(3, "model.onnx"));
    assert_eq!(absent, "'m/3' does not exist");
    let absent = fixture.refusal(model.open_graph(1, "other.onnx"));
    assert_eq!(absent, "'m/1/other.onnx' does not exist");
}

#[test]
fn a_file_that_is_known_to_be_whole_is_not_looked_through_again() {
    let fixture = Fixture::new();
    let weights = tensor("W", FLOAT, &[1 << 17]).bytes(9, vec![0; 4 << 17]);
    let graph = model(Message::new().message(5, weights)).0;
    fixture.write("m/1/model.onnx", &graph);
    let open = fixture.model().open_graph(1, "model.onnx").unwrap();
    let now = open.identity().modified_ns.try_into().unwrap();
    let now = SystemTime::UNIX_EPOCH + Duration::from_nanos(now);
    let (summary, facts) = open.describe_at(now).unwrap();
    assert_eq!(facts, None, "it was written just now");
    let found = open.load_from_file(None).unwrap().unwrap();
    assert_eq!(found.operators, summary.operators);
    let facts = open.describe_at(now + Duration::from_secs(60)).unwrap().1;
    let facts = facts.unwrap();
    assert_eq!(facts.operators, summary.operators);
    let known = WholeFacts {
        operators: OperatorFacts {
            is_steady: !summary.operators.is_steady,
            ..summary.operators
        },
        ..facts
    };
    let found = open.load_from_file(Some(&known)).unwrap().unwrap();
    assert_eq!(found.operators, known.operators, "what was known is told");
    let other = WholeFacts {
        identity: FileIdentity {
            changed_ns: known.identity.changed_ns + 1,
            ..known.identity
        },
        ..known.clone()
    };
    let found = open.load_from_file(Some(&other)).unwrap().unwrap();
    assert_eq!(found.operators, summary.operators, "of another file");
}

#[test]
fn a_whole_file_is_called_as_its_manifest_calls_it() {
    let fixture = Fixture::new();
    for path in [
        "m/1/model.onnx",
        "m/2/sub/net.onnx",
        "m/3/net.onnx/model.onnx",
    ] {
        fixture.write(path, plain_model());
    }
    fixture.write("m/4/model.onnx", external_model(&[("location", "w.bin")]));
    fixture.write("m/4/w.bin", [0; 16]);
    let later = SystemTime::now() + Duration::from_secs(60);
    let names = ["model.onnx", "sub/net.onnx", "net.onnx", "model.onnx"];
    for (version, name) in (1..).zip(names) {
        let open = fixture.model().open_graph(version, name).unwrap();
        let facts = open.describe_at(later).unwrap().1;
        let files = open.examine().unwrap().manifest.files;
        match facts {
            Some(facts) => {
                assert_eq!(facts.location, files[0].location);
                let listed = open.open_listed(&facts.location).unwrap();
                assert_eq!(listed.path(), open.path());
            }
            None => assert_eq!(files.len(), 2, "{name}"),
        }
    }
}

#[test]
fn malicious_external_data_is_refused_before_it_is_read() {
    let fixture = Fixture::new();
    fixture.link("../../../secret", "m/1/link.bin");
    fs::hard_link(
        fixture.outer.path().join("secret"),
        fixture.path("m/1/hard.bin"),
    )
    .unwrap();
    fixture.write("m/1/short.bin", [0; 64]);
    let refusal = |model: Vec<u8>| {
        fixture.write("m/1/model.onnx", model);
        let graph = fixture.model().open_graph(1, "model.onnx").unwrap();
        assert!(graph.examine().is_err());
        fixture.refusal(graph.load())
    };
    let at = |location: &str| refusal(external_model(&[("location", location)]));
    assert!(at("../../../secret").contains("leaves the model's folder"));
    assert!(at("/etc/passwd").contains("absolute"));
    assert!(at("link.bin").contains("leads out of the repository"));
    assert!(at("hard.bin").contains("2 hard links"));
    assert!(at("*/_ORT_MEM_ADDR_/*").contains("own memory"));
    let beyond = refusal(external_model(&[
        ("location", "short.bin"),
        ("offset", "56"),
    ]));
    assert_eq!(
        beyond,
        "'m/1/short.bin' has 64 bytes, the model refers to byte 56 to 72 of it"
    );
    let secret = || external("W", &[4], &[("location", "../../../secret")]);
    let subgraph = graph_attribute("body", Message::new().message(5, secret()));
    let subgraph = Message::new().message(1, node("y = Loop(x)", vec![subgraph]));
    assert!(refusal(model(subgraph).0).contains("leaves the model's folder"));
    let constant = node("y = Constant()", vec![tensor_attribute("value", secret())]);
    let function = Message::new().bytes(1, "f").message(7, constant);
    let function = model(Message::new()).message(25, function);
    assert!(refusal(function.0).contains("leaves the model's folder"));
    assert_eq!(
        fs::read(fixture.outer.path().join("secret")).unwrap(),
        [7; 64]
    );
}

#[test]
fn a_file_that_changes_while_it_is_read_is_refused() {
    let fixture = Fixture::new();
    fixture.write("m/1/model.onnx", plain_model());
    let graph = fixture.model().open_graph(1, "model.onnx").unwrap();
    let file = fs::File::options()
        .write(true)
        .open(fixture.path("m/1/model.onnx"))
        .unwrap();
    file.write_at(b"\0", plain_model().len() as u64).unwrap();
    let changed = "'m/1/model.onnx' changed while it was read";
    assert_eq!(fixture.refusal(graph.load()), changed);
    assert_eq!(fixture.refusal(graph.summary()), changed);
    file.set_len(3).unwrap();
    assert_eq!(fixture.refusal(graph.load()), changed);
    // Replaced by another file: what is open is whole, but no longer the model.
    fixture.write("m/1/model.onnx", plain_model());
    let graph = fixture.model().open_graph(1, "model.onnx").unwrap();
    fixture.write("m/1/new", plain_model());
    fs::rename(fixture.path("m/1/new"), fixture.path("m/1/model.onnx")).unwrap();
    assert_eq!(fixture.refusal(graph.load()), changed);
}

#[test]
fn large_files_are_read_whole_by_two_streams() {
    let fixture = Fixture::new();
    let elements: usize = 17 << 20;
    let mut weights = vec![0; elements * 4];
    for (index, part) in weights.chunks_mut(4093).enumerate() {
        part.fill(index as u8);
    }
    let tensor = external("W", &[elements as i64], &[("location", "w.bin")]);
    fixture.write("m/1/w.bin", &weights);
    fixture.write("m/1/model.onnx", model(Message::new().message(5, tensor)).0);
    assert!(fixture.load().unwrap().external[0].1 == weights);
}

#[test]
fn a_file_larger_than_memory_is_an_error_and_not_the_end() {
    let fixture = Fixture::new();
    let tensor = external("W", &[4], &[("location", "w.bin")]);
    fixture.write("m/1/model.onnx", model(Message::new().message(5, tensor)).0);
    let file = fs::File::create(fixture.path("m/1/w.bin")).unwrap();
    // As large as the file system lets a sparse file be.
    if file.set_len(15 << 40).is_ok() {
        let error = fixture.load();
        assert!(
            matches!(error, Err(RepositoryError::OutOfMemory { .. })),
            "{error:?}"
        );
    }
}

#[test]
fn a_fingerprint_changes_with_any_file_it_covers() {
    let fixture = Fixture::new();
    fixture
        .write("m/1/model.onnx", plain_model())
        .write("m/1/data/w.bin", [0; 4]);
    fixture.write("m/2/model.onnx", plain_model());
    let print = || fixture.model().fingerprint(None, 1).unwrap();
    let before = print();
    let paths: Vec<&str> = before.files.iter().map(|file| file.path.as_str()).collect();
    assert_eq!(paths, ["1/data/w.bin", "1/model.onnx", "config.pbtxt"]);
    assert_eq!(before, print());
    fixture.write("m/2/model.onnx", "other version");
    assert_eq!(before, print());
    fixture.write("m/1/data/w.bin", [0; 5]);
    let longer = print();
    assert_ne!(before, longer);
    fixture.write("m/1/extra", "");
    assert_ne!(longer, print());
    let with_extra = print();
    fixture.write("m/new.pbtxt", CONFIG);
    fs::rename(fixture.path("m/new.pbtxt"), fixture.path("m/config.pbtxt")).unwrap();
    assert_ne!(with_extra, print());
    fixture
        .link(".", "m/1/circle")
        .link("/etc/passwd", "m/1/out");
    print();
}

#[test]
fn a_model_in_memory_behaves_as_one_on_disk() {
    let files = |weights: &[u8]| {
        BTreeMap::from([
            (
                "config.pbtxt".to_owned(),
                Bytes::from_static(CONFIG.as_bytes()),
            ),
            (
                "1/model.onnx".to_owned(),
                Bytes::from(external_model(&[("location", "w.bin")])),
            ),
            ("1/w.bin".to_owned(), Bytes::copy_from_slice(weights)),
            (
                "12/model.onnx/model.onnx".to_owned(),
                Bytes::from(plain_model()),
            ),
        ])
    };
    let model = ModelDir::in_memory("m", files(&[1; 16])).unwrap();
    assert_eq!(model.versions().unwrap(), [1, 12]);
    assert_eq!(
        model.config_text(Some("none")).unwrap().as_deref(),
        Some(CONFIG)
    );
    let loaded = model.open_graph(1, "model.onnx").unwrap().load().unwrap();
    assert_eq!(loaded.external, [("w.bin".to_owned(), vec![1; 16])]);
    let folder = model.open_graph(12, "model.onnx").unwrap();
    assert_eq!(folder.summary().unwrap().inputs.len(), 1);
    let other = ModelDir::in_memory("m", files(&[2; 16])).unwrap();
    let print = |model: &ModelDir| model.fingerprint(None, 1).unwrap();
    assert_ne!(print(&model), print(&other));
    let same = ModelDir::in_memory("m", files(&[1; 16])).unwrap();
    assert_eq!(print(&model), print(&same));
    let short = ModelDir::in_memory("m", files(&[1; 8])).unwrap();
    let error = short
        .open_graph(1, "model.onnx")
        .unwrap()
        .load()
        .unwrap_err();
    assert!(
        error.to_string().contains("'m/1/w.bin' has 8 bytes"),
        "{error}"
    );
    for path in [
        "../1/model.onnx",
        "/1/model.onnx",
        "1\\model.onnx",
        "1//model.onnx",
    ] {
        let files = BTreeMap::from([(path.to_owned(), Bytes::new())]);
        assert!(ModelDir::in_memory("m", files).is_err(), "{path}");
    }
}

#[test]
fn a_repository_of_ten_thousand_models_is_listed_without_looking_into_them() {
    // Ten thousand folders take a disk half a minute to remove.
    let outer = tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap();
    for index in 0..10_000 {
        fs::create_dir(outer.path().join(format!("model-{index:05}"))).unwrap();
    }
    let repository = Repository::open(outer.path()).unwrap();
    let listing = repository.list().unwrap();
    assert_eq!(listing.models.len(), 10_000);
    assert_eq!(listing.models[9_999], "model-09999");
}

#[test]
fn a_repository_that_is_not_there_says_so_without_its_path() {
    let outer = tempfile::tempdir().unwrap();
    let error = Repository::open(outer.path().join("absent")).unwrap_err();
    assert!(!error.to_string().contains(outer.path().to_str().unwrap()));
    assert!(error.to_string().contains("No such file"), "{error}");
}

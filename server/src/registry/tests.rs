//! Listings and looks at the repository; nothing is loaded here.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::lifecycle::Stage;
use dormouse_model_store::config::ConfigDefaults;
use dormouse_model_store::spec::KeepAliveSpec;

use super::model::Model;
use super::{Registry, RegistryConfig};
use crate::config::ControlMode;
use crate::unit::tests::fake::{Bench, until};

fn add_model(repository: &Path, name: &str) {
    let graph = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/models/identity_int32.onnx");
    fs::create_dir_all(repository.join(name).join("1")).unwrap();
    fs::copy(graph, repository.join(name).join("1/model.onnx")).unwrap();
}

fn open(bench: &Bench, repository: &Path, control: ControlMode) -> Arc<Registry> {
    let config = RegistryConfig {
        repositories: vec![repository.to_owned()],
        remote: crate::config::RemoteConfig::default(),
        tolerates_unreachable: false,
        control,
        config_name: None,
        defaults: ConfigDefaults {
            auto_complete: true,
            default_max_batch_size: 4,
            intra_op_threads: None,
            inter_op_threads: None,
            response_cache: false,
        },
        max_override_bytes: dormouse_core::id::ByteSize::mib(1),
    };
    Registry::open(config, Arc::clone(&bench.host)).unwrap()
}

#[tokio::test]
async fn unknown_name_is_answered_shortly_however_long_it_is() {
    let bench = Bench::new();
    let folder = tempfile::tempdir().unwrap();
    add_model(folder.path(), "resnet");
    let registry = open(&bench, folder.path(), ControlMode::OnDemand);
    let near = registry.unknown("resnt");
    assert!(near.message().contains("did you mean 'resnet'"), "{near}");
    let long = registry.unknown(&"\u{7}resnet".repeat(1 << 20));
    assert!(long.message().len() < 2_000, "{}", long.message().len());
    assert!(!long.message().contains('\u{7}'));
}

#[tokio::test]
async fn listings_at_the_same_time_agree_on_a_new_model() {
    let bench = Bench::new();
    let folder = tempfile::tempdir().unwrap();
    let registry = open(&bench, folder.path(), ControlMode::Explicit);
    for round in 0..20 {
        let name = format!("new{round}");
        add_model(folder.path(), &name);
        let found: Vec<Arc<Model>> = std::thread::scope(|scope| {
            let list = || {
                registry.rescan().unwrap();
                registry.model(&name).unwrap()
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(list)).collect();
            let joined = threads.into_iter().map(|thread| thread.join().unwrap());
            joined.collect()
        });
        assert!(found.iter().all(|model| Arc::ptr_eq(model, &found[0])));
    }
}

#[tokio::test]
async fn model_in_use_outlives_its_folder_unless_the_repository_is_followed() {
    let poll = ControlMode::Poll {
        interval: Duration::from_secs(3600),
    };
    for (control, stays) in [(ControlMode::OnDemand, true), (poll, false)] {
        let bench = Bench::new();
        let folder = tempfile::tempdir().unwrap();
        for name in ["used", "unused"] {
            add_model(folder.path(), name);
        }
        let registry = open(&bench, folder.path(), control);
        registry.generation("used").await.unwrap();
        for name in ["used", "unused"] {
            fs::remove_dir_all(folder.path().join(name)).unwrap();
        }
        registry.rescan().unwrap();
        assert_eq!(registry.model("used").is_ok(), stays);
        assert!(registry.model("unused").is_err());
    }
}

#[tokio::test]
async fn files_that_were_tried_are_left_alone_until_they_change_again() {
    let bench = Bench::new();
    let folder = tempfile::tempdir().unwrap();
    for name in ["used", "unused"] {
        add_model(folder.path(), name);
    }
    let poll = ControlMode::Poll {
        interval: Duration::from_secs(3600),
    };
    let registry = open(&bench, folder.path(), poll);
    registry.generation("used").await.unwrap();
    let changed = || -> Vec<String> {
        let changed = registry.changed_models().into_iter();
        changed.map(|(model, _)| model.name().to_string()).collect()
    };
    assert!(changed().is_empty());
    let config = folder.path().join("used/config.pbtxt");
    fs::write(&config, "max_batch_size: what").unwrap();
    assert_eq!(changed(), ["used"]);
    assert!(changed().is_empty());
    fs::write(&config, "max_batch_size: 2 # again").unwrap();
    assert_eq!(changed(), ["used"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn model_on_its_way_to_sleep_is_looked_at_like_a_sleeper() {
    let bench = Bench::with(|defaults| defaults.keep_alive = KeepAliveSpec::For(Duration::ZERO));
    let folder = tempfile::tempdir().unwrap();
    add_model(folder.path(), "model");
    let registry = open(&bench, folder.path(), ControlMode::OnDemand);
    let first = registry.unit_of_sleeper("model", "").await.unwrap();
    bench.engine.closes.close();
    first.ensure_loaded().await.unwrap();
    until(|| first.stage() == Stage::Closing).await;
    assert!(registry.awake_unit("model", "").unwrap().is_none());
    let unchanged = registry.unit_of_sleeper("model", "").await.unwrap();
    assert!(Arc::ptr_eq(&unchanged, &first));
    let version = |number: &str| folder.path().join("model").join(number);
    fs::create_dir(version("2")).unwrap();
    fs::copy(
        version("1").join("model.onnx"),
        version("2").join("model.onnx"),
    )
    .unwrap();
    let newest = registry.unit_of_sleeper("model", "").await.unwrap();
    assert_eq!(newest.id().version.0, 2);
    bench.engine.closes.open();
    until(|| bench.engine.open_sessions() == 0).await;
}

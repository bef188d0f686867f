//! Servers killed where they stand, and disks that are full: the store is whole afterwards, and
//! models are served meanwhile.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dormouse_model_store::store::{Store, StoreConfig};
use serde_json::Value;

use crate::generated::{Generated, TestStore, parameters, preparations, settled};
use crate::race::Numbers;
use crate::repository::TestRepository;
use crate::server::{TestServer, eventually};
use crate::wake::wakes_from;

/// Two at a time over one store.
const SERVERS: usize = 2;

/// `DORMOUSE_KILL_ROUNDS` makes it more of them.
fn rounds() -> Result<usize> {
    match std::env::var("DORMOUSE_KILL_ROUNDS") {
        Ok(rounds) => Ok(rounds.parse::<usize>()?.max(1)),
        Err(_) => Ok(100),
    }
}
/// 2 MiB of weights.
const MODEL: Generated = Generated::new(256, 8);

fn open(store: &TestStore) -> Result<std::sync::Arc<Store>> {
    Ok(Store::open(StoreConfig {
        dir: store.path().to_owned(),
        max_bytes: StoreConfig::DEFAULT_MAX_BYTES,
    })?)
}

/// Starts a server, has it wake a known model and load and prepare a new one, and kills it after
/// a while.
async fn killed_after(
    repository: &TestRepository,
    store: &TestStore,
    pause: Duration,
) -> Result<()> {
    let server = TestServer::over(repository)
        .arg(store.flag())
        .spawn()
        .await?;
    let client = server.grpc().await?;
    let call = |name: &'static str| {
        let client = client.clone();
        tokio::spawn(async move {
            let request = MODEL.request(name, 1.0);
            let _ = client.clone().model_infer(request.0).await;
        })
    };
    let calls = [call("known"), call("new")];
    tokio::time::sleep(pause).await;
    server.kill().await?;
    for call in calls {
        call.abort();
    }
    Ok(())
}

#[tokio::test]
async fn a_server_killed_at_any_moment_leaves_a_store_that_is_whole() -> Result<()> {
    let store = TestStore::new()?;
    let repositories = [TestRepository::new()?, TestRepository::new()?];
    let known = |index: usize| MODEL.weights(index);
    for (index, repository) in repositories.iter().enumerate() {
        known(index).add(repository, "known", "")?;
    }
    settled().await;
    // How long takes what is to be interrupted.
    let mut usual = Duration::ZERO;
    for (index, repository) in repositories.iter().enumerate() {
        let server = TestServer::over(repository)
            .arg(store.flag())
            .start()
            .await?;
        let client = server.grpc().await?;
        let began = tokio::time::Instant::now();
        known(index).ask(&client, "known").await?;
        eventually("it is prepared", || async {
            Ok(preparations(&server).await? == 1.0)
        })
        .await?;
        usual = usual.max(began.elapsed());
        server.kill().await?;
    }

    let mut numbers = Numbers(27);
    let mut committed = store.command("ls").await?.1["entries"]
        .as_array()
        .map_or(0, Vec::len);
    let rounds = rounds()?;
    for round in 0..rounds {
        let mut kills = Vec::new();
        for (index, repository) in repositories.iter().enumerate() {
            let bias = 2 + round * SERVERS + index;
            MODEL.weights(bias).add(repository, "new", "")?;
            let pause = usual.mul_f64(numbers.below(1000) as f64 / 1000.0);
            kills.push(killed_after(repository, &store, pause));
        }
        futures_util::future::try_join_all(kills).await?;
        // Whoever opens the store clears what the dead left behind, and finds all the rest whole.
        let opened = open(&store)?;
        let report = opened.verify(false, &|_, _| {})?;
        ensure!(report.damaged.is_empty(), "{round}: {:?}", report.damaged);
        for folder in ["drafts", "tmp"] {
            let left = store.files(folder)?;
            ensure!(left.is_empty(), "{round}: left in {folder}: {left:?}");
        }
        let entries = opened.list()?.len();
        ensure!(entries >= committed, "{round}: prepared models were lost");
        committed = entries;
    }
    let (good, report) = store.command("verify").await?;
    ensure!(good, "{report}");
    for (index, repository) in repositories.iter().enumerate() {
        let mut server = TestServer::over(repository)
            .arg(store.flag())
            .start()
            .await?;
        let client = server.grpc().await?;
        let kind = known(index).ask(&client, "known").await?;
        ensure!(kind.as_deref() == Some("prepared"), "{kind:?}");
        let last = MODEL.weights(2 + (rounds - 1) * SERVERS + index);
        last.ask(&client, "new").await?;
        server.assert_healthy().await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_server_that_ends_gives_up_what_it_prepares_and_leaves_no_draft() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    // 64 MiB: long enough to be interrupted.
    let model = Generated::new(1024, 16);
    model.add(&repository, "model", "")?;
    let mut numbers = Numbers(3);
    for _ in 0..4 {
        let mut server = TestServer::over(&repository)
            .arg(store.flag())
            .start()
            .await?;
        model.ask(&server.grpc().await?, "model").await?;
        tokio::time::sleep(Duration::from_millis(numbers.below(300))).await;
        server.terminate()?;
        let status = server.exited().await?;
        ensure!(status.success(), "{status}\n{}", server.log.tail());
        let cut_off = server.log.lines().join("\n").contains("cut off");
        let left = store.files("drafts")?;
        ensure!(cut_off || left.is_empty(), "left: {left:?}");
    }
    let (good, report) = store.command("verify").await?;
    ensure!(good, "{report}");
    Ok(())
}

/// Whether the store's folder is as empty as it was before anything was prepared.
fn nothing_left(root: &Path) -> Result<()> {
    for folder in ["entries", "packs", "drafts", "tmp"] {
        let left: Vec<PathBuf> = fs::read_dir(root.join("v1").join(folder))?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<Result<_, _>>()?;
        ensure!(left.is_empty(), "left in {folder}: {left:?}");
    }
    Ok(())
}

fn told_of(records: &[Value], part: &str) -> Option<()> {
    let told = records.iter().any(|record| {
        let message = record["message"].as_str().unwrap_or_default();
        record["level"] == "WARN" && message.contains(part)
    });
    told.then_some(())
}

/// Serves a model whose preparation does not fit, again and again.
async fn serves_on(server: &mut TestServer, model: Generated, store: &Path) -> Result<()> {
    let client = server.grpc().await?;
    for failures in 1..4 {
        wakes_from(&client, "model", model, "source").await?;
        eventually("the preparation fails", || async {
            let failed = server.metric("dormouse_preparation_failures_total", &[]);
            Ok(failed.await? >= f64::from(failures))
        })
        .await?;
    }
    let line = server
        .log
        .wait_for(|records| told_of(records, "not prepared"));
    crate::server::patiently("the log tells of it", line).await??;
    // The next attempt may be under way; what it leaves is looked at between two of them.
    eventually("nothing is left of the attempts", || async {
        Ok(nothing_left(store).is_ok())
    })
    .await?;
    ensure!(preparations(server).await? == 0.0);
    server.assert_healthy().await
}

#[tokio::test]
async fn a_full_disk_under_the_store_leaves_models_served_from_their_files() -> Result<()> {
    let mount = "mount -t tmpfs -o size=3m tmpfs \"$0\" && exec \"$@\"";
    let store = TestStore::new()?;
    let path = store.path().to_str().context("a path that is text")?;
    let under = ["unshare", "-rm", "sh", "-c", mount, path];
    let probe = std::process::Command::new(under[0])
        .args(&under[1..])
        .arg("true")
        .output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        eprintln!("this user may not mount a small file system: not tested");
        return Ok(());
    }
    let repository = TestRepository::new()?;
    // 8 MiB, where there is room for 3; and one that fits.
    let large = MODEL.weights(1).outside();
    let large = Generated {
        layers: 32,
        ..large
    };
    let brief = parameters(&[("keep_alive", "30ms")]);
    large.add(&repository, "model", &brief)?;
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .under(under)
        .start()
        .await?;
    let seen = PathBuf::from(format!("/proc/{}/root{path}", server.pid()));
    serves_on(&mut server, large, &seen).await?;
    // What fits is prepared on the same disk all the same.
    let small = Generated::new(256, 2);
    small.add(&repository, "small", &brief)?;
    drop(server);
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .under(under)
        .start()
        .await?;
    let client = server.grpc().await?;
    wakes_from(&client, "small", small, "prepared").await?;
    large.ask(&client, "model").await?;
    server.assert_healthy().await
}

#[tokio::test]
async fn a_limit_on_the_size_of_files_leaves_models_served_from_their_files() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let brief = parameters(&[("keep_alive", "30ms")]);
    MODEL.add(&repository, "model", &brief)?;
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .under(["prlimit", "--fsize=1048576", "--core=0"])
        .start()
        .await?;
    serves_on(&mut server, MODEL, store.path()).await
}

#[tokio::test]
async fn a_store_with_no_room_left_by_its_own_limit_leaves_models_served() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let brief = parameters(&[("keep_alive", "30ms")]);
    MODEL.add(&repository, "model", &brief)?;
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .arg("--store-max-size=1MiB")
        .start()
        .await?;
    serves_on(&mut server, MODEL, store.path()).await
}

//! Files of the store that are not what was written: the answer is right all the same.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::generated::{Generated, TestStore, parameters, preparations, settled};
use crate::race::Numbers;
use crate::repository::TestRepository;
use crate::server::{TestServer, eventually, patiently};
use crate::wake::wakes_from;

/// 512 KiB of weights in a pack.
const MODEL: Generated = Generated::new(256, 2);

/// A way to damage a file.
#[derive(Clone, Copy, Debug)]
enum Damage {
    Flip { at: u64, bit: u32 },
    Cut { to: u64 },
    Grow,
    Empty,
    Remove,
    Folder,
    Link,
}

impl Damage {
    /// Ways to damage a file of this size.
    fn of(size: u64, numbers: &mut Numbers) -> Vec<Self> {
        let mut ways = vec![
            Self::Grow,
            Self::Empty,
            Self::Remove,
            Self::Folder,
            Self::Link,
        ];
        for at in [
            0,
            size / 2,
            size - 1,
            numbers.below(size),
            numbers.below(size),
        ] {
            let bit = numbers.below(8) as u32;
            ways.push(Self::Flip { at, bit });
        }
        for to in [1, size / 2, size - 1] {
            ways.push(Self::Cut { to });
        }
        ways
    }

    fn apply(self, path: &Path, bytes: &[u8]) -> Result<()> {
        let mut bytes = bytes.to_vec();
        match self {
            Self::Flip { at, bit } => bytes[at as usize] ^= 1 << bit,
            Self::Cut { to } => bytes.truncate(to as usize),
            Self::Grow => bytes.push(b'\n'),
            Self::Empty => bytes.clear(),
            Self::Remove => return Ok(fs::remove_file(path)?),
            Self::Folder => {
                fs::remove_file(path)?;
                return Ok(fs::create_dir(path)?);
            }
            Self::Link => {
                fs::remove_file(path)?;
                return Ok(std::os::unix::fs::symlink("/dev/zero", path)?);
            }
        }
        put(path, &bytes)
    }
}

/// Writes a file anew; one in the store may not be writable.
fn put(path: &Path, bytes: &[u8]) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path)?,
        Ok(_) => fs::remove_file(path)?,
        Err(_) => {}
    }
    fs::create_dir_all(path.parent().context("a folder")?)?;
    fs::write(path, bytes).with_context(|| path.display().to_string())
}

/// Every file of the store that matters, with its content.
fn pristine(store: &TestStore) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut files = Vec::new();
    for folder in ["entries", "packs", "sources"] {
        for path in store.files(folder)? {
            let bytes = fs::read(&path)?;
            files.push((path, bytes));
        }
    }
    Ok(files)
}

fn kind_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match name.split_once('.') {
        Some((stem, kind)) if stem.len() == 64 => kind.to_owned(),
        Some(_) => name.into_owned(),
        None => "source".to_owned(),
    }
}

#[tokio::test]
async fn every_damage_to_every_file_of_the_store_leaves_the_answer_right() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let config = parameters(&[("keep_alive", "off")]);
    let other = MODEL.weights(1);
    MODEL.add(&repository, "model", &config)?;
    other.add(&repository, "other", &config)?;
    settled().await;
    let server = TestServer::over(&repository)
        .arg(store.flag())
        .start()
        .await?;
    let client = server.grpc().await?;
    MODEL.ask(&client, "model").await?;
    eventually("it is prepared", || async {
        Ok(preparations(&server).await? == 1.0)
    })
    .await?;
    wakes_from(&client, "model", MODEL, "prepared").await?;
    server.kill().await?;
    let pristine = pristine(&store)?;
    let mut kinds: Vec<String> = pristine.iter().map(|(path, _)| kind_of(path)).collect();
    kinds.sort();
    let expected = [
        "bin",
        "facts.json",
        "graph.onnx",
        "index",
        "manifest.json",
        "seal",
        "source",
    ];
    ensure!(kinds == expected, "{kinds:?}");

    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .arg("--background-preparation=false")
        .start()
        .await?;
    let client = server.grpc().await?;
    let mut numbers = Numbers(3);
    let mut from_source = 0;
    for (path, bytes) in &pristine {
        for damage in Damage::of(bytes.len() as u64, &mut numbers) {
            for (path, bytes) in &pristine {
                put(path, bytes)?;
            }
            damage.apply(path, bytes)?;
            let kind = MODEL.ask(&client, "model").await;
            let kind = kind.with_context(|| format!("{damage:?} of {}", path.display()))?;
            // The server is at zero again before its files are put back.
            eventually("it sleeps", || async {
                let label = [r#"model="model""#];
                let loads = server.metric("dormouse_loads_total", &label).await?;
                Ok(server.metric("dormouse_sleeps_total", &label).await? == loads)
            })
            .await?;
            if kind.as_deref() == Some("source") {
                from_source += 1;
            } else {
                // Nothing of the model itself is in these.
                let harmless = ["seal", "index", "source"].contains(&&*kind_of(path));
                ensure!(harmless, "{damage:?} of {} went unnoticed", path.display());
            }
        }
        other.ask(&client, "other").await?;
    }
    ensure!(from_source >= 4 * 10, "only {from_source} were noticed");
    server.assert_healthy().await
}

#[tokio::test]
async fn what_is_damaged_is_dropped_and_prepared_again() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let config = parameters(&[("keep_alive", "20ms")]);
    MODEL.add(&repository, "model", &config)?;
    settled().await;
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .start()
        .await?;
    let client = server.grpc().await?;
    MODEL.ask(&client, "model").await?;
    let mut prepared = 0.0;
    for kind in ["bin", "graph.onnx", "manifest.json", "facts.json"] {
        prepared += 1.0;
        eventually("it is prepared", || async {
            Ok(preparations(&server).await? == prepared)
        })
        .await?;
        wakes_from(&client, "model", MODEL, "prepared").await?;
        eventually("it sleeps", || async {
            let loads = server.metric("dormouse_loads_total", &[]).await?;
            Ok(server.metric("dormouse_sleeps_total", &[]).await? == loads)
        })
        .await?;
        let files = pristine(&store)?;
        let file = files.iter().find(|(path, _)| kind_of(path) == kind);
        let (path, bytes) = file.with_context(|| format!("no {kind}"))?;
        let middle = Damage::Flip {
            at: bytes.len() as u64 / 2,
            bit: 3,
        };
        middle.apply(path, bytes)?;
        let (good, report) = store.command("verify").await?;
        ensure!(!good, "{kind}: {report}");
        let from = MODEL.ask(&client, "model").await?;
        ensure!(from.as_deref() == Some("source"), "{kind}: {from:?}");
    }
    eventually("it is prepared", || async {
        Ok(preparations(&server).await? == prepared + 1.0)
    })
    .await?;
    let (good, report) = store.command("verify").await?;
    ensure!(good, "{report}");
    let dropped = server.metric("dormouse_prepared_dropped_total", &[]);
    ensure!(dropped.await? == 4.0, "not every drop was counted");
    server.assert_healthy().await
}

#[tokio::test]
async fn a_store_that_cannot_be_written_is_told_of_once_and_read() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    MODEL.add(&repository, "model", "")?;
    MODEL.weights(1).add(&repository, "other", "")?;
    settled().await;
    let first = TestServer::over(&repository)
        .arg(store.flag())
        .start()
        .await?;
    MODEL.ask(&first.grpc().await?, "model").await?;
    eventually("it is prepared", || async {
        Ok(preparations(&first).await? == 1.0)
    })
    .await?;
    first.kill().await?;
    let mount = "mount --bind \"$0\" \"$0\" && mount -o remount,bind,ro \"$0\" && exec \"$@\"";
    let path = store.path().to_str().context("a path that is text")?;
    let under = ["unshare", "-rm", "sh", "-c", mount, path];
    let probe = std::process::Command::new(under[0])
        .args(&under[1..])
        .arg("true")
        .output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        eprintln!("this user may not mount: not tested");
        return Ok(());
    }
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .under(under)
        .start()
        .await?;
    let client = server.grpc().await?;
    let kind = MODEL.ask(&client, "model").await?;
    ensure!(kind.as_deref() == Some("prepared"), "{kind:?}");
    let kind = MODEL.weights(1).ask(&client, "other").await?;
    ensure!(kind.as_deref() == Some("source"), "{kind:?}");
    let told = |records: &[Value]| {
        let told = records.iter().filter(|record| {
            let message = record["message"].as_str().unwrap_or_default();
            record["level"] == "WARN" && message.contains("the prepared store cannot be written")
        });
        Some(told.count()).filter(|&times| times > 0)
    };
    let times = patiently("the log tells of it", server.log.wait_for(told)).await??;
    ensure!(times == 1, "{}", server.log.tail());
    server.assert_healthy().await
}

/// A model of many files, of which one is damaged.
#[tokio::test]
async fn a_damaged_source_is_refused_by_name_and_harms_nobody_else() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let model = Generated::new(64, 2).outside();
    let config = "max_batch_size: 4";
    model.add(&repository, "good", config)?;
    let mut numbers = Numbers(5);
    let mut broken = Vec::new();
    for (file, bytes) in [("model.onnx", model.graph()), ("weights.bin", model.data())] {
        let mut ways = Damage::of(bytes.len() as u64, &mut numbers);
        for _ in 0..20 {
            let at = numbers.below(bytes.len() as u64);
            let bit = numbers.below(8) as u32;
            ways.push(Damage::Flip { at, bit });
            ways.push(Damage::Cut { to: at });
        }
        for damage in ways {
            let name = format!("broken{}", broken.len());
            model.add(&repository, &name, config)?;
            let path = repository.model_dir(&name).join("1").join(file);
            damage.apply(&path, &bytes)?;
            broken.push((name, file, damage));
        }
    }
    ensure!(broken.len() >= 100, "{} variants", broken.len());
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .arg("--strict-readiness=false")
        .start()
        .await?;
    let client = server.grpc().await?;
    let before = server.rss()?;
    let mut refused = 0;
    for (index, (name, file, damage)) in broken.iter().enumerate() {
        let answer = client.clone().model_infer(model.request(name, 1.0).0).await;
        match (answer, damage) {
            // Another number is as good as the one that was there; a longer file has what it had.
            (Ok(_), Damage::Flip { .. } | Damage::Grow) => {}
            (Ok(_), _) => anyhow::bail!("{damage:?} of {file} was answered"),
            (Err(status), _) => {
                refused += 1;
                let told = status.message();
                // A flipped name or shape is told of as such.
                let by_name = told.contains(file) || matches!(damage, Damage::Flip { .. });
                ensure!(told.contains(name.as_str()), "{damage:?}: {told}");
                ensure!(by_name, "{damage:?} of {file}: {told}");
            }
        }
        if index % 16 == 0 {
            model.ask(&client, "good").await?;
        }
    }
    ensure!(refused > 50, "{refused} of {} refused", broken.len());
    model.ask(&client, "good").await?;
    let grown = server.rss()?.saturating_sub(before);
    ensure!(grown < 256 << 20, "{grown} bytes more than before");
    server.assert_healthy().await
}

//! Source files replaced under a server: answers stay until a reload or the next wake, and are of
//! one state of the files, never of two.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dormouse_proto::inference as pb;
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::deadlines::{ENDLESS, ONE_AT_A_TIME};
use crate::generated::{Generated, TestStore, parameters, preparations, settled};
use crate::race::Numbers;
use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, eventually};
use crate::wake::wakes_from;
use crate::wire::{self, output};

const OLD: Generated = Generated::new(256, 2).outside();
const NEW: Generated = OLD.weights(5).bias(3);
/// 8 MiB in one file.
const WHOLE: Generated = Generated::new(512, 8);

/// Puts new files beside the old ones and renames them over these.
fn rename_over(folder: &Path, model: Generated) -> Result<()> {
    let staged = tempfile::tempdir_in(folder.parent().context("a folder")?)?;
    model.write(staged.path())?;
    for file in ["weights.bin", "model.onnx"] {
        fs::rename(staged.path().join(file), folder.join(file))?;
    }
    Ok(())
}

/// Writes into the very files that are there.
fn overwrite(folder: &Path, model: Generated) -> Result<()> {
    fs::write(folder.join("weights.bin"), model.data())?;
    Ok(fs::write(folder.join("model.onnx"), model.graph())?)
}

fn truncate(folder: &Path) -> Result<()> {
    for file in ["weights.bin", "model.onnx"] {
        File::options()
            .write(true)
            .open(folder.join(file))?
            .set_len(0)?;
    }
    Ok(())
}

#[tokio::test]
async fn answers_do_not_change_while_files_do_until_a_reload() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let kept = parameters(&[("keep_alive", "1h"), ("park_after", "never")]);
    let parked = parameters(&[("keep_alive", "1h"), ("park_after", "10ms")]);
    // One reads its own copy, one the store's map, one comes and goes between the two.
    let models = [("private", &kept), ("mapped", &kept), ("parked", &parked)];
    for (name, config) in models {
        OLD.add(&repository, name, config)?;
    }
    // Large enough for the engine to read its file itself.
    WHOLE.add(&repository, "whole", &kept)?;
    settled().await;
    let first = TestServer::over(&repository)
        .arg(store.flag())
        .start()
        .await?;
    let client = first.grpc().await?;
    OLD.ask(&client, "mapped").await?;
    eventually("it is prepared", || async {
        Ok(preparations(&first).await? == 1.0)
    })
    .await?;
    first.kill().await?;
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .arg("--background-preparation=false")
        .arg("--model-control-mode=explicit")
        .arg("--load-model=*")
        .start()
        .await?;
    let client = server.grpc().await?;
    for (name, _) in models {
        OLD.ask(&client, name).await?;
    }
    WHOLE.ask(&client, "whole").await?;
    let whole = repository.model_dir("whole").join("1/model.onnx");
    let folders = models.map(|(name, _)| repository.model_dir(name).join("1"));
    for change in 0..4 {
        for folder in &folders {
            match change {
                0 => rename_over(folder, NEW)?,
                1 => overwrite(folder, OLD.weights(9))?,
                2 => truncate(folder)?,
                _ => fs::remove_dir_all(folder)?,
            }
        }
        match change {
            0 => fs::write(&whole, WHOLE.weights(9).graph())?,
            1 => File::options().write(true).open(&whole)?.set_len(0)?,
            _ => {}
        }
        for _ in 0..10 {
            for (name, _) in models {
                let answer = OLD.ask(&client, name).await;
                answer.with_context(|| format!("after change {change}"))?;
            }
            WHOLE.ask(&client, "whole").await?;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    // What is not there cannot be reloaded, and what serves goes on.
    let load = async |name: &str| {
        let request = pb::RepositoryModelLoadRequest {
            model_name: name.to_owned(),
            ..Default::default()
        };
        client.clone().repository_model_load(request).await
    };
    for (name, _) in models {
        ensure!(load(name).await.is_err(), "{name} was loaded from nothing");
        OLD.ask(&client, name).await?;
    }
    for ((name, _), folder) in models.iter().zip(&folders) {
        NEW.write(folder)?;
        load(name).await?;
        NEW.ask(&client, name).await?;
    }
    server.assert_healthy().await
}

#[tokio::test]
async fn a_parked_model_stays_what_it_was_though_its_new_files_are_prepared() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let config = parameters(&[("keep_alive", "1h"), ("park_after", "300ms")]);
    OLD.add(&repository, "model", &config)?;
    settled().await;
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .start()
        .await?;
    let client = server.grpc().await?;
    OLD.ask(&client, "model").await?;
    eventually("it is prepared", || async {
        Ok(preparations(&server).await? == 1.0)
    })
    .await?;
    // Another process prepares the new files under the same name before this one is parked.
    rename_over(&repository.model_dir("model").join("1"), NEW)?;
    settled().await;
    let other = TestServer::over(&repository)
        .arg(store.flag())
        .start()
        .await?;
    NEW.ask(&other.grpc().await?, "model").await?;
    eventually("the new files are prepared", || async {
        Ok(preparations(&other).await? == 1.0)
    })
    .await?;
    for _ in 0..5 {
        OLD.ask(&client, "model").await?;
        tokio::time::sleep(Duration::from_millis(400)).await;
    }
    OLD.ask(&client, "model").await?;
    server.assert_healthy().await
}

/// Waits until the server's one model sleeps.
async fn sleeps(server: &TestServer) -> Result<()> {
    eventually("the model sleeps", || async {
        let loads = server.metric("dormouse_loads_total", &[]).await?;
        Ok(server.metric("dormouse_sleeps_total", &[]).await? == loads)
    })
    .await
}

#[tokio::test]
async fn the_next_wake_takes_up_new_files_whole() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let config = parameters(&[("keep_alive", "5ms")]);
    OLD.add(&repository, "model", &config)?;
    let spare = repository.path().join("model/spare");
    NEW.write(&spare)?;
    settled().await;
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .start()
        .await?;
    let client = server.grpc().await?;
    OLD.ask(&client, "model").await?;
    // Callers all the while: each answer is of the old files or of the new ones.
    let stop = Arc::new(AtomicBool::new(false));
    // How much longer they leave it alone: where calls take long, too many meet for it to sleep.
    let rest = Arc::new(AtomicU64::new(0));
    let seen = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let (old, new) = (OLD.answer(1.0), NEW.answer(1.0));
    let traffic: Vec<_> = (0..4)
        .map(|caller| {
            let (client, stop) = (client.clone(), Arc::clone(&stop));
            let (rest, seen) = (Arc::clone(&rest), Arc::clone(&seen));
            let (old, new) = (old.clone(), new.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let answer = client
                        .clone()
                        .model_infer(OLD.request("model", 1.0).0)
                        .await?
                        .into_inner();
                    let found = output::<f32>(&answer, "Y", &[1, OLD.size as i64])?;
                    let known = [&old, &new].iter().position(|known| **known == found);
                    let known = known.with_context(|| format!("half: {:?}…", &found[..4]))?;
                    seen[known].fetch_add(1, Ordering::Relaxed);
                    let rest = rest.load(Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_millis(7 + 3 * caller + rest)).await;
                }
                anyhow::Ok(())
            })
        })
        .collect();
    let folder = repository.model_dir("model").join("1");
    let mut exchanges = 0;
    eventually("both were seen", || {
        exchanges += 1;
        let pause = 30 + rest.load(Ordering::Relaxed) * 2;
        if exchanges > 30 {
            rest.fetch_add(10, Ordering::Relaxed);
        }
        let exchanged = renameat_with(CWD, &folder, CWD, &spare, RenameFlags::EXCHANGE);
        let both = seen.iter().all(|seen| seen.load(Ordering::Relaxed) > 0);
        async move {
            exchanged?;
            tokio::time::sleep(Duration::from_millis(pause)).await;
            Ok(both && exchanges >= 30 && exchanges % 2 == 0)
        }
    })
    .await
    .with_context(|| format!("{seen:?}"))?;
    stop.store(true, Ordering::Relaxed);
    for caller in traffic {
        let ended = caller.await?;
        ended.with_context(|| format!("log:\n{}", server.log.tail()))?;
    }
    // An even number of exchanges: the old ones again, and from now on only they.
    sleeps(&server).await?;
    OLD.ask(&client, "model").await?;
    // Files changed between two sleeps in any other way are taken up as well.
    for (round, model) in [NEW, OLD, NEW.bias(2)].into_iter().enumerate() {
        sleeps(&server).await?;
        match round % 2 {
            0 => rename_over(&folder, model)?,
            _ => overwrite(&folder, model)?,
        }
        let answer = model.ask(&client, "model").await;
        answer.with_context(|| format!("change {round}"))?;
    }
    settled().await;
    wakes_from(&client, "model", NEW.bias(2), "prepared").await?;
    let (good, report) = store.command("verify").await?;
    ensure!(good, "{report}");
    server.assert_healthy().await
}

/// Where something on this machine's disks is told, if anywhere.
fn host_path(message: &str) -> Option<&str> {
    let begins = |at: &usize| {
        let before = message[..*at].chars().next_back();
        let after = message[at + 1..].chars().next();
        before.is_none_or(|before| !before.is_alphanumeric() && !"._-/\\".contains(before))
            && after.is_some_and(char::is_alphanumeric)
    };
    let places = message.match_indices('/').map(|(at, _)| at);
    places
        .into_iter()
        .find(begins)
        .map(|at| &message[at..message.len().min(at + 40)])
}

#[tokio::test]
async fn failures_do_not_tell_clients_where_things_are() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let files = [
        "corrupt",
        "custom_op",
        "empty",
        "external",
        "external_length",
        "external_parent",
        "beside_references",
    ];
    for file in files {
        repository.add(file, Model::new(file))?;
    }
    OLD.add(&repository, "cut", "")?;
    truncate(&repository.model_dir("cut").join("1"))?;
    WHOLE.add(&repository, "cut_whole", "")?;
    let whole = repository.model_dir("cut_whole").join("1/model.onnx");
    File::options().write(true).open(whole)?.set_len(4 << 20)?;
    OLD.add(&repository, "config", "max_batch_size: many")?;
    OLD.add(&repository, "outputs", "output { name: \"Z\" }")?;
    fs::create_dir_all(repository.model_dir("gone").join("1"))?;
    let mut names: Vec<&str> = files.to_vec();
    names.extend(["cut", "cut_whole", "config", "outputs", "gone"]);
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .arg("--strict-readiness=false")
        .start()
        .await?;
    let client = server.grpc().await?;
    for name in names {
        let answer = client.clone().model_infer(OLD.request(name, 1.0).0).await;
        let status = answer.err().with_context(|| format!("{name} answered"))?;
        let told = host_path(status.message());
        ensure!(told.is_none(), "{name}: {told:?} in {status:?}");
        let path = format!("/v2/models/{name}/infer");
        let answer = server.post(&path, br#"{"inputs": []}"#).await?;
        ensure!(answer.status != 200, "{name} answered");
        let text = answer.text();
        ensure!(host_path(&text).is_none(), "{name}: {text}");
    }
    let index = server.post("/v2/repository/index", b"").await?.text();
    ensure!(host_path(&index).is_none(), "{index}");
    server.assert_healthy().await
}

#[tokio::test]
async fn files_changed_while_a_load_waits_for_memory_are_taken_up_whole() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    repository.add("slow", Model::new("slow").config(ONE_AT_A_TIME))?;
    OLD.add(&repository, "model", "")?;
    // Each fits alone.
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .arg("--background-preparation=false")
        .arg("--memory-budget=20MiB")
        .start()
        .await?;
    let client = server.grpc().await?;
    let busy = tokio::spawn({
        let client = client.clone();
        async move { wire::infer(&client, wire::slow("slow", ENDLESS)).await }
    });
    let in_use = [r#"state="busy""#];
    eventually("memory is in use", || async {
        let held = server.metric("dormouse_models_memory_bytes", &in_use);
        Ok(held.await? > 0.0)
    })
    .await?;
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { NEW.ask(&client, "model").await }
    });
    let called = [r#"model="model""#];
    eventually("the other waits for it", || async {
        let pending = server.metric("nv_inference_pending_request_count", &called);
        Ok(pending.await? == 1.0)
    })
    .await?;
    ensure!(!busy.is_finished(), "nothing was waited for");
    rename_over(&repository.model_dir("model").join("1"), NEW)?;
    repository.write_config("model", "max_batch_size: 4")?;
    // Its run is stopped, and its memory is free.
    busy.abort();
    waiting.await??;
    let statistics = wire::statistics(&client, "model").await?;
    let counts = statistics.inference_stats.context("no statistics")?;
    ensure!(counts.success.is_some_and(|success| success.count == 1));
    ensure!(counts.fail.is_none_or(|fail| fail.count == 0));
    server.assert_healthy().await
}

#[tokio::test]
async fn files_changed_in_the_midst_of_a_load_are_refused_or_answered_whole() -> Result<()> {
    const MODELS: usize = 12;
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let other = WHOLE.weights(4).bias(2);
    let model = |index: usize| match index % 2 {
        0 => (WHOLE, other),
        _ => (WHOLE.outside(), other.outside()),
    };
    for index in 0..MODELS {
        model(index).0.add(&repository, &format!("m{index}"), "")?;
    }
    OLD.add(&repository, "good", "")?;
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .start()
        .await?;
    let client = server.grpc().await?;
    OLD.ask(&client, "good").await?;
    let mut numbers = Numbers(11);
    let mut seen = [0; 3];
    for index in 0..MODELS {
        let name = format!("m{index}");
        let (old, new) = model(index);
        let folder = repository.model_dir(&name).join("1");
        let call = {
            let client = client.clone();
            let request = old.request(&name, 1.0).0;
            tokio::spawn(async move { client.clone().model_infer(request).await })
        };
        tokio::time::sleep(Duration::from_millis(numbers.below(25))).await;
        tokio::task::spawn_blocking(move || overwrite_any(&folder, new)).await??;
        match call.await? {
            Ok(answer) => {
                let found = output::<f32>(&answer.into_inner(), "Y", &[1, old.size as i64])?;
                match () {
                    () if found == old.answer(1.0) => seen[0] += 1,
                    () if found == new.answer(1.0) => seen[1] += 1,
                    () => anyhow::bail!("half: {:?}…", &found[..4]),
                }
            }
            Err(status) => {
                seen[2] += 1;
                let told = status.message();
                let named = told.contains("model.onnx") || told.contains("weights.bin");
                ensure!(named, "{told}");
            }
        }
        OLD.ask(&client, "good").await?;
    }
    println!("old, new, refused: {seen:?}");
    server.assert_healthy().await
}

/// As [`overwrite`], of a model with or without a file of weights.
fn overwrite_any(folder: &Path, model: Generated) -> Result<()> {
    if model.outside {
        return overwrite(folder, model);
    }
    Ok(fs::write(folder.join("model.onnx"), model.graph())?)
}

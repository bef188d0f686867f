//! Stores that the server cannot write to, as in an image, are used as they are.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use anyhow::{Result, ensure};

use crate::generated::{TestStore, preparations, settled};
use crate::repository::TestRepository;
use crate::server::{ServerBuilder, TestServer, dormouse, eventually};
use crate::wake::{SMALL, briefly, wakes_from};

/// Root may write anywhere, so the server is somebody else then.
fn reader() -> Result<Option<u32>> {
    const NOBODY: u32 = 65534;
    let is_root = fs::metadata("/proc/self")?.uid() == 0;
    Ok(is_root.then_some(NOBODY))
}

fn by_reader(builder: ServerBuilder) -> Result<ServerBuilder> {
    Ok(match reader()? {
        Some(user) => builder.under(["setpriv", &format!("--reuid={user}"), "--clear-groups"]),
        None => builder,
    })
}

/// Gives a folder and all in it to a user and takes away the right to write to it.
fn seal(path: &Path, user: Option<u32>) -> Result<()> {
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            seal(&entry?.path(), user)?;
        }
    }
    if user.is_some() {
        chown(path, user, None)?;
    }
    let mode = if path.is_dir() { 0o555 } else { 0o444 };
    Ok(fs::set_permissions(path, Permissions::from_mode(mode))?)
}

/// So that it can be removed by whoever is not root.
fn unseal(store: &Path) -> Result<()> {
    for folder in ["", "entries", "packs", "sources", "drafts", "tmp"] {
        fs::set_permissions(store.join(folder), Permissions::from_mode(0o755))?;
    }
    for entry in fs::read_dir(store.join("entries"))? {
        fs::set_permissions(entry?.path(), Permissions::from_mode(0o755))?;
    }
    Ok(())
}

#[tokio::test]
async fn a_store_that_cannot_be_written_to_is_used_as_it_is() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let other = SMALL.weights(1);
    SMALL.add(&repository, "known", &briefly())?;
    other.add(&repository, "unknown", &briefly())?;
    settled().await;
    let server = TestServer::over(&repository)
        .arg(store.flag())
        .start()
        .await?;
    SMALL.ask(&server.grpc().await?, "known").await?;
    eventually("it is prepared", || async {
        Ok(preparations(&server).await? == 1.0)
    })
    .await?;
    server.kill().await?;

    let before = store.files("")?;
    seal(&store.path().join("v1"), reader()?)?;
    fs::set_permissions(store.path(), Permissions::from_mode(0o755))?;
    fs::set_permissions(repository.path(), Permissions::from_mode(0o755))?;
    let builder = TestServer::over(&repository).arg(store.flag());
    let mut server = by_reader(builder)?.start().await?;
    let client = server.grpc().await?;
    for _ in 0..2 {
        wakes_from(&client, "known", SMALL, "prepared").await?;
        wakes_from(&client, "unknown", other, "source").await?;
    }
    ensure!(preparations(&server).await? == 0.0);
    let failed = server.metric("dormouse_preparation_failures_total", &[]);
    ensure!(failed.await? == 0.0, "tried to prepare");
    ensure!(store.files("")? == before, "the store was written to");
    server.assert_healthy().await?;
    drop(server);
    unseal(&store.path().join("v1"))
}

/// A folder as an image has it: other files of the same content and times.
fn copied(from: &Path, to: &Path) -> Result<()> {
    let status = std::process::Command::new("cp")
        .args(["-a", "--"])
        .args([from, to])
        .status()?;
    ensure!(status.success(), "cp: {status}");
    Ok(())
}

#[tokio::test]
async fn models_wake_from_a_store_that_was_copied_with_them() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    for name in ["known", "replaced"] {
        SMALL.add(&repository, name, &briefly())?;
    }
    settled().await;
    let mut prepare = tokio::process::Command::from(dormouse());
    prepare.args(["prepare", "--model-repository"]);
    let output = prepare.arg(repository.path()).arg(store.flag()).output();
    let output = output.await?;
    ensure!(output.status.success(), "{output:?}");

    let copies = tempfile::tempdir()?;
    let (models, prepared) = (copies.path().join("models"), copies.path().join("store"));
    copied(repository.path(), &models)?;
    copied(store.path(), &prepared)?;
    // Of the same name, size and, to the second, time.
    let file = models.join("replaced/1/model.onnx");
    let modified = fs::metadata(&file)?.modified()?;
    let other = SMALL.weights(1);
    let others = TestRepository::new()?;
    other.add(&others, "replaced", &briefly())?;
    fs::copy(others.path().join("replaced/1/model.onnx"), &file)?;
    fs::File::options()
        .write(true)
        .open(&file)?
        .set_modified(modified)?;
    settled().await;
    seal(&prepared.join("v1"), reader()?)?;
    for folder in [copies.path(), &models, &prepared] {
        fs::set_permissions(folder, Permissions::from_mode(0o755))?;
    }
    let builder = TestServer::at(&models).arg(format!("--store={}", prepared.display()));
    let mut server = by_reader(builder)?.start().await?;
    let client = server.grpc().await?;
    let first = SMALL.ask(&client, "known").await?;
    ensure!(first.as_deref() == Some("prepared"), "{first:?}");
    let first = other.ask(&client, "replaced").await?;
    ensure!(first.as_deref() == Some("source"), "{first:?}");
    server.assert_healthy().await?;
    drop(server);
    unseal(&prepared.join("v1"))
}

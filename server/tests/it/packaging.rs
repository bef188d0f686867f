//! The packages, built as a user builds them but for the profile: the same bytes twice, installed
//! into folders of their own, and run from there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::python::succeed;
use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, dormouse, engine_installed, target_dir};
use crate::wire;

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/packaging")
}

fn build(out: &Path, kind: &str) -> Result<Vec<PathBuf>> {
    let mut command = Command::new("python3");
    command
        .arg(packaging().join("build"))
        .arg(kind)
        .args([
            "--fast",
            "--server",
            env!("CARGO_BIN_EXE_dormouse"),
            "--out",
        ])
        .arg(out)
        .env("DORMOUSE_CACHE_DIR", target_dir().join("dormouse-cache"))
        .env("PYTHONDONTWRITEBYTECODE", "1");
    let output = succeed(&mut command, "the package could not be built")?;
    let said = String::from_utf8(output.stdout)?;
    Ok(said.lines().map(PathBuf::from).collect())
}

fn scratch() -> Result<TempDir> {
    let prefix = "dormouse-package-";
    Ok(tempfile::Builder::new().prefix(prefix).tempdir()?)
}

/// Whether a tool that is not everywhere is here.
fn has(program: &str, test: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        eprintln!("skipped: {test}: no {program} here");
    }
    found
}

fn says(command: &mut Command) -> Result<String> {
    let output = succeed(command, "what is installed does not run")?;
    Ok(String::from_utf8(output.stdout)?)
}

#[tokio::test]
async fn the_debian_package_installs_and_runs() -> Result<()> {
    if !has("dpkg-deb", "the_debian_package_installs_and_runs") {
        return Ok(());
    }
    engine_installed().await?;
    let folder = scratch()?;
    let built = build(folder.path(), "deb")?;
    let [package] = &built[..] else {
        anyhow::bail!("one package, not {built:?}");
    };
    let root = folder.path().join("root");
    succeed(
        Command::new("dpkg-deb").arg("-x").arg(package).arg(&root),
        "dpkg does not understand the package",
    )?;
    let control = folder.path().join("control");
    succeed(
        Command::new("dpkg-deb")
            .arg("-e")
            .arg(package)
            .arg(&control),
        "dpkg does not understand the package",
    )?;
    succeed(
        Command::new("md5sum")
            .args(["--check", "--quiet"])
            .arg(control.join("md5sums"))
            .current_dir(&root),
        "the package's sums are wrong",
    )?;
    for script in ["postinst", "prerm", "postrm"] {
        let mut check = Command::new("sh");
        check.arg("-n").arg(control.join(script));
        succeed(&mut check, "a maintainer script is wrong")?;
    }
    let program = root.join("usr/bin/dormouse");
    let version = says(Command::new(&program).arg("--version"))?;
    ensure!(version.trim() == concat!("dormouse ", env!("CARGO_PKG_VERSION")));
    // It finds the engine that came with it, not one of this machine's.
    let engine = says(Command::new(&program).args(["runtime", "path"]))?;
    let own = fs::canonicalize(root.join("usr/lib/dormouse"))?;
    ensure!(
        engine.trim().starts_with(&*own.to_string_lossy()),
        "{engine}"
    );
    let config = root.join("etc/dormouse/dormouse.toml");
    says(Command::new(&program).args(["config", "check"]).arg(config))?;
    let page = root.join("usr/share/man/man1/dormouse-serve.1.gz");
    ensure!(page.is_file(), "no {}", page.display());
    check_units(&root)?;
    check_user(&root)
}

#[tokio::test]
async fn the_tarball_serves_from_wherever_it_is_unpacked() -> Result<()> {
    engine_installed().await?;
    let folder = scratch()?;
    let built = build(&folder.path().join("first"), "tarball")?;
    let again = build(&folder.path().join("second"), "tarball")?;
    let ([archive], [other]) = (&built[..], &again[..]) else {
        anyhow::bail!("one archive, not {built:?} {again:?}");
    };
    ensure!(fs::read(archive)? == fs::read(other)?, "it differs");
    let anywhere = folder.path().join("any where");
    fs::create_dir(&anywhere)?;
    let mut unpack = Command::new("tar");
    unpack.arg("-xzf").arg(archive).arg("-C").arg(&anywhere);
    succeed(&mut unpack, "the tarball cannot be unpacked")?;
    let name = archive.file_name().context("a name")?.to_string_lossy();
    let stem = name.strip_suffix(".tar.gz").context("another name")?;
    let root = anywhere.join(stem);
    for file in [
        "share/dormouse/server.toml",
        "share/dormouse/systemd/dormouse.service",
        "share/dormouse/systemd/dormouse.socket",
        "share/man/man1/dormouse-serve.1.gz",
    ] {
        ensure!(root.join(file).is_file(), "no {file} in the tarball");
    }
    let program = root.join("bin/dormouse");
    let config = root.join("share/dormouse/server.toml");
    says(Command::new(&program).args(["config", "check"]).arg(config))?;
    let engine = says(Command::new(&program).args(["runtime", "path"]))?;
    let own = fs::canonicalize(&root)?;
    ensure!(
        engine.trim().starts_with(&*own.to_string_lossy()),
        "{engine}"
    );
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let script = format!(
        "shift && exec env DORMOUSE_CACHE_DIR='{}' '{}' \"$@\"",
        folder.path().join("cache").display(),
        program.display()
    );
    let mut server = TestServer::over(&repository)
        .under(["sh", "-c", &script, "sh"])
        .start()
        .await?;
    let running = fs::read_link(format!("/proc/{}/exe", server.pid()))?;
    ensure!(running == fs::canonicalize(&program)?, "{running:?}");
    let client = server.grpc().await?;
    wire::infer(&client, wire::add_sub("simple", 2, 1)).await?;
    server.assert_healthy().await
}

/// The units as the package has them, but for where the program is.
fn check_units(root: &Path) -> Result<()> {
    if !has("systemd-analyze", "the units of the Debian package") {
        return Ok(());
    }
    let folder = scratch()?;
    for unit in ["dormouse.socket", "dormouse.service"] {
        let text = fs::read_to_string(root.join("usr/lib/systemd/system").join(unit))?;
        let program = root.join("usr/bin/dormouse").display().to_string();
        fs::write(
            folder.path().join(unit),
            text.replace("/usr/bin/dormouse", &program),
        )?;
    }
    let unit = folder.path().join("dormouse.service");
    let output = Command::new("systemd-analyze")
        .arg("verify")
        .arg(&unit)
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        !said.lines().any(|line| line.contains("dormouse")),
        "{said}"
    );
    // Older ones cannot judge a file.
    let output = Command::new("systemd-analyze")
        .args(["security", "--offline=yes", "--threshold=25", "--no-pager"])
        .arg(&unit)
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if said.contains("Overall exposure level") {
        ensure!(
            output.status.success(),
            "the service is too exposed:\n{said}"
        );
    }
    Ok(())
}

fn check_user(root: &Path) -> Result<()> {
    if !has("systemd-sysusers", "the user of the Debian package") {
        return Ok(());
    }
    let mut make = Command::new("systemd-sysusers");
    make.arg(format!("--root={}", root.display()))
        .arg("dormouse.conf");
    succeed(&mut make, "the user cannot be made")?;
    let users = fs::read_to_string(root.join("etc/passwd"))?;
    ensure!(users.contains("dormouse:"), "{users}");
    Ok(())
}

#[tokio::test]
async fn the_images_files_are_the_same_twice_and_serve_on_their_own() -> Result<()> {
    engine_installed().await?;
    let folder = scratch()?;
    let first = build(&folder.path().join("first"), "image")?;
    let second = build(&folder.path().join("second"), "image")?;
    ensure!(
        first.len() == 2 && second.len() == 2,
        "{first:?} {second:?}"
    );
    for (one, other) in first.iter().zip(&second) {
        ensure!(
            fs::read(one)? == fs::read(other)?,
            "{} differs",
            one.display()
        );
    }
    check_archive(&first[1])?;
    let root = folder.path().join("root");
    fs::create_dir(&root)?;
    succeed(
        Command::new("tar")
            .arg("-xf")
            .arg(&first[0])
            .arg("-C")
            .arg(&root),
        "the files cannot be unpacked",
    )?;
    serve_in(&root).await
}

/// The image's index leads to its manifest, and that to a configuration without root.
fn check_archive(archive: &Path) -> Result<()> {
    let read = |member: &str| -> Result<serde_json::Value> {
        let mut tar = Command::new("tar");
        tar.arg("-xOf").arg(archive).arg(format!("./{member}"));
        Ok(serde_json::from_slice(
            &succeed(&mut tar, "not in the image")?.stdout,
        )?)
    };
    let blob = |described: &serde_json::Value| -> Result<serde_json::Value> {
        let digest = described["digest"].as_str().context("a digest")?;
        read(&format!("blobs/{}", digest.replace(':', "/")))
    };
    let index = read("index.json")?;
    let manifest = blob(&index["manifests"][0])?;
    let config = blob(&manifest["config"])?;
    ensure!(config["config"]["User"] == "1000:1000", "{config}");
    ensure!(
        config["config"]["Healthcheck"]["Test"][1] == "/usr/bin/dormouse",
        "{config}"
    );
    Ok(())
}

/// Runs the server with nothing but these files around it, as an engine would, if this machine
/// lets us.
async fn serve_in(root: &Path) -> Result<()> {
    let allowed = |arguments: &[&str]| {
        let output = Command::new("unshare").args(arguments).arg("true").output();
        output.is_ok_and(|output| output.status.success())
    };
    let (enter, user) = if allowed(&["--mount"]) {
        (vec!["unshare", "--mount"], "--userspec=1000:1000")
    } else if allowed(&["--map-root-user", "--mount", "--pid", "--fork"]) {
        // Its processes are seen through a process table of their own, which only its first may mount.
        (
            vec!["unshare", "--map-root-user", "--mount"],
            "--userspec=0:0",
        )
    } else {
        eprintln!("skipped: serving from the image's files: namespaces are not allowed here");
        return Ok(());
    };
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let inside = root.join(repository.path().strip_prefix("/")?);
    fs::create_dir_all(inside.parent().context("a folder")?)?;
    let mut copy = Command::new("cp");
    copy.arg("-r").arg(repository.path()).arg(&inside);
    succeed(&mut copy, "the models cannot be put there")?;
    let mut open = Command::new("chmod");
    open.arg("-R").arg("a+rX").arg(&inside);
    succeed(&mut open, "the models cannot be made readable")?;
    let script = format!(
        "mount --rbind /proc '{root}/proc' && shift && \
         exec env -i PATH=\"$PATH\" DORMOUSE_CACHE_DIR=/var/cache/dormouse chroot {user} '{root}' /usr/bin/dormouse \"$@\"",
        root = root.display()
    );
    let under = enter.into_iter().chain(["sh", "-c", &script, "sh"]);
    let mut server = TestServer::over(&repository).under(under).start().await?;
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid()))?;
    if user.ends_with("1000") {
        ensure!(
            status.contains("\nUid:\t1000\t1000"),
            "it runs as another user: {status}"
        );
    }
    let mut call = dormouse();
    call.args(["infer", "simple", "--fill", "zeros", "--url"]);
    call.arg(format!("http://{}", server.grpc));
    let call = move || succeed(&mut call, "the server in the image's files does not answer");
    let answer = String::from_utf8(tokio::task::spawn_blocking(call).await??.stdout)?;
    ensure!(answer.contains("OUTPUT1"), "{answer}");
    server.assert_healthy().await?;
    server.terminate()?;
    ensure!(server.exited().await?.success(), "{}", server.log.tail());
    Ok(())
}

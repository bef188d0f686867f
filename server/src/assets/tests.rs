use std::ffi::OsString;
use std::io::Write;

use super::*;

const MEMBERS: &[(&str, &str)] = &[("pkg/data/one.bin", "one.bin"), ("pkg/LICENSE", "LICENSE")];

fn asset() -> WheelAsset {
    WheelAsset {
        package: "pkg",
        version: "1.0",
        wheels: &[],
        members: MEMBERS,
    }
}

fn wheel(folder: &Path, members: &[(&str, &[u8])]) -> PathBuf {
    let path = folder.join("pkg-1.0-py3-none-any.whl");
    let mut archive = zip::ZipWriter::new(File::create(&path).unwrap());
    for (name, data) in members {
        archive
            .start_file(*name, zip::write::SimpleFileOptions::default())
            .unwrap();
        archive.write_all(data).unwrap();
    }
    archive.finish().unwrap();
    path
}

#[test]
fn only_the_named_members_are_unpacked() {
    let folder = tempfile::tempdir().unwrap();
    let path = wheel(
        folder.path(),
        &[
            ("pkg/data/one.bin", b"weights"),
            ("pkg/LICENSE", b"free"),
            ("../outside", b"no"),
        ],
    );
    let target = folder.path().join("out");
    unpack::unpack(&asset(), &path, &target).unwrap();
    assert_eq!(fs::read(target.join("one.bin")).unwrap(), b"weights");
    assert_eq!(fs::read_dir(&target).unwrap().count(), 2);
    assert!(asset().is_complete(&target));
    fs::write(target.join("one.bin"), b"").unwrap();
    assert!(!asset().is_complete(&target));
}

#[test]
fn a_wheel_without_a_member_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = wheel(folder.path(), &[("pkg/LICENSE", b"free")]);
    let error = unpack::unpack(&asset(), &path, &folder.path().join("out")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "pkg-1.0-py3-none-any.whl lacks pkg/data/one.bin"
    );
}

#[test]
fn a_file_that_is_no_archive_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.whl");
    fs::write(&path, b"<html>not found</html>").unwrap();
    let error = unpack::unpack(&asset(), &path, &folder.path().join("out")).unwrap_err();
    assert_eq!(error.to_string(), "x.whl cannot be unpacked");
}

#[test]
fn another_digest_is_refused_with_both() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.whl");
    fs::write(&path, b"abc").unwrap();
    let wheel = Wheel {
        target: None,
        platform: "any",
        sha256: "00",
        bytes: 3,
    };
    let error = unpack::verify(&wheel, &path).unwrap_err().to_string();
    assert!(
        error.contains("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
        "{error}"
    );
}

#[test]
fn the_cache_is_where_the_environment_says() {
    let with = |pairs: &[(&str, &str)]| {
        cache_folder_from(|name| {
            let (_, value) = pairs.iter().find(|(key, _)| *key == name)?;
            Some(OsString::from(value))
        })
    };
    let home = ("HOME", "/home/me");
    assert_eq!(with(&[]), None);
    assert_eq!(with(&[home]), Some("/home/me/.cache/dormouse".into()));
    let xdg = ("XDG_CACHE_HOME", "/x");
    assert_eq!(with(&[home, xdg]), Some("/x/dormouse".into()));
    assert_eq!(
        with(&[home, ("XDG_CACHE_HOME", "relative")]),
        Some("/home/me/.cache/dormouse".into())
    );
    let own = ("DORMOUSE_CACHE_DIR", "/d");
    assert_eq!(with(&[home, xdg, own]), Some("/d".into()));
}

#[test]
fn a_second_installer_waits_for_the_first() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lock");
    let held = lock(&path, &Quiet).unwrap();
    let waiting = std::thread::spawn({
        let path = path.clone();
        move || lock(&path, &Quiet).map(drop)
    });
    assert!(matches!(
        File::create(&path).unwrap().try_lock(),
        Err(TryLockError::WouldBlock)
    ));
    drop(held);
    waiting.join().unwrap().unwrap();
}

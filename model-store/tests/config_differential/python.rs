//! A Python environment under the workspace's target folder, made once and shared by every test
//! that needs these packages.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The interpreter of an environment that holds exactly these packages.
///
/// Panics with what to install when Python or its package installer is missing: a comparison that
/// silently does not run would look like one that passed.
pub(crate) fn interpreter(name: &str, packages: &[&str]) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .parent()
        .expect("the folder for tests' files is inside the target folder");
    let root = target.join("python");
    fs::create_dir_all(&root).expect("the target folder can be written");
    // Tests run in parallel, in one process and in several.
    let lock = File::create(root.join(format!("{name}.lock"))).expect("a lock file can be made");
    lock.lock().expect("a lock file can be locked");

    let folder = root.join(name);
    let python = folder.join("bin/python");
    let wanted = packages.join("\n");
    let stamp = folder.join("installed.txt");
    // Written last: an environment that was left half made is made again.
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return python;
    }
    if folder.exists() {
        fs::remove_dir_all(&folder).expect("an unfinished environment can be removed");
    }
    run(
        Command::new("python3").args(["-m", "venv"]).arg(&folder),
        "python3 with its venv module is needed (on Debian: python3-venv)",
    );
    run(
        Command::new(&python)
            .args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
            ])
            .args(packages),
        "pip must be able to install the packages",
    );
    fs::write(&stamp, wanted).expect("the environment can be written");
    python
}

fn run(command: &mut Command, needed: &str) {
    match command.output() {
        Err(error) => panic!("{needed}; {command:?} could not be started: {error}"),
        Ok(output) if !output.status.success() => panic!(
            "{needed}; {command:?} failed with {}:\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        ),
        Ok(_) => {}
    }
}

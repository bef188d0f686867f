//! Counts instructions: the program runs itself under callgrind, which counts inside `measured`.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::hot_paths::{Step, Workload};

/// Steps before counting: caches of ours fill up, lists reach their size.
const WARM_UP: u64 = 100;
/// Steps that are counted; what happens every few steps evens out.
const STEPS: u64 = 100;

/// Runs a workload's steps; meant to be run under callgrind.
pub fn run(workload: Workload) {
    let mut step = (workload.prepare)();
    for _ in 0..WARM_UP {
        step();
    }
    measured(&mut step);
}

/// Callgrind counts while the thread is in here, so nothing else may be done.
#[inline(never)]
fn measured(step: &mut Step) {
    for _ in 0..STEPS {
        step();
    }
}

/// The instructions that one step of a workload takes.
pub fn count(workload: Workload) -> anyhow::Result<u64> {
    let folder = tempfile::tempdir().context("no folder for callgrind's file")?;
    let file = folder.path().join("callgrind.out");
    let mut valgrind = Command::new("valgrind");
    valgrind
        .args(["--tool=callgrind", "--collect-atstart=no"])
        .arg("--toggle-collect=*dormouse_benches*valgrind*measured*")
        .arg(format!("--callgrind-out-file={}", file.display()))
        .arg(std::env::current_exe()?)
        .args(["--workload", workload.name])
        .stdin(Stdio::null());
    let output = valgrind
        .output()
        .context("cannot run valgrind; Debian and Ubuntu have it as the package 'valgrind'")?;
    if !output.status.success() {
        bail!(
            "valgrind failed at '{}' ({}):\n{}",
            workload.name,
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let total = total(&file)?;
    // None at all: the function's name was not what callgrind was told.
    if total < STEPS {
        bail!(
            "callgrind counted {total} instructions for '{}'",
            workload.name
        );
    }
    Ok(total / STEPS)
}

fn total(file: &Path) -> anyhow::Result<u64> {
    let text = std::fs::read_to_string(file).context("callgrind wrote no file")?;
    let total = text
        .lines()
        .find_map(|line| line.strip_prefix("totals:"))
        .context("callgrind's file has no totals")?;
    total
        .trim()
        .parse()
        .context("callgrind's totals are no number")
}

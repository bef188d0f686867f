//! Other processes: this test program, started again to do one thing to a store.

use std::process::{Child, Command, Stdio};

use super::*;

const DIR: &str = "DORMOUSE_TEST_STORE";

/// This program, to run the one test that plays the other process.
fn program() -> (PathBuf, [String; 4]) {
    let exe = std::env::current_exe().unwrap();
    let test = "store::tests::processes::the_other_process";
    (
        exe,
        ["--exact", test, "--ignored", "--nocapture"].map(str::to_owned),
    )
}

fn start(bench: &Bench, what: &str) -> Child {
    let (exe, args) = program();
    Command::new(exe)
        .args(args)
        .env(DIR, bench.dir())
        .env("DORMOUSE_TEST_DO", what)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Waits for the other process to say a word.
fn wait_for(child: &mut Child, word: &str) {
    use std::io::{BufRead, BufReader};
    let reader = BufReader::new(child.stdout.as_mut().unwrap());
    for line in reader.lines() {
        if line.unwrap().contains(word) {
            return;
        }
    }
    panic!("the other process never said {word}");
}

#[test]
#[ignore = "a part of the tests in this file"]
fn the_other_process() {
    let Some(dir) = std::env::var_os(DIR) else {
        return;
    };
    let config = StoreConfig {
        dir: dir.into(),
        max_bytes: 1 << 30,
    };
    let store = Store::open(config).unwrap();
    match std::env::var("DORMOUSE_TEST_DO").unwrap().as_str() {
        "draft" => {
            let draft = draft(&store, &key("a"));
            fs::write(draft.scratch().join("file"), b"x").unwrap();
            println!("begun");
            // Until the parent ends this process or lets go.
            std::io::stdin().read_line(&mut String::new()).unwrap();
        }
        "hold" => {
            let model = store.find(&key("a")).unwrap().unwrap();
            println!("held");
            std::io::stdin().read_line(&mut String::new()).unwrap();
            drop(model);
        }
        "commit large" => {
            let error = commit(&store, &key("large"), &[bytes(1, 1 << 20)]).unwrap_err();
            println!("failed: {error}");
        }
        "read" => {
            assert!(store.is_read_only());
            assert!(store.begin(&key("b")).is_err());
            let model = store.find(&key("a")).unwrap().unwrap();
            assert_holds(&model, &[bytes(1, 50_000)]);
            println!("read");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_draft_of_another_process_is_busy_until_that_ends() {
    let bench = Bench::new();
    let store = bench.open();
    let mut child = start(&bench, "draft");
    wait_for(&mut child, "begun");
    assert!(matches!(store.begin(&key("a")).unwrap(), Begun::Busy));
    bench.open().gc(0).unwrap();
    assert_eq!(bench.count("drafts"), 2);
    child.kill().unwrap();
    child.wait().unwrap();
    // Killed, it left its draft behind.
    assert_eq!(bench.count("drafts"), 2);
    let draft = draft(&store, &key("a"));
    assert_eq!(fs::read_dir(draft.scratch()).unwrap().count(), 0);
    drop(draft);
    bench.assert_tidy();
}

#[test]
fn what_another_process_holds_is_not_cleared_until_it_ends() {
    let bench = Bench::new();
    let store = bench.open();
    drop(commit(&store, &key("a"), &[bytes(1, 50_000)]).unwrap());
    let mut child = start(&bench, "hold");
    wait_for(&mut child, "held");
    bench.age(&key("a"), 500);
    assert!(store.gc(0).unwrap().removed.is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
    // A process that another test has forked holds what is open here until it runs its program.
    let mut attempts = (0..100_000).map(|_| store.gc(0).unwrap().removed.len());
    assert_eq!(attempts.find(|&removed| removed > 0), Some(1));
    assert_eq!(bench.count("packs"), 0);
}

/// Prepared by one user, as into an image, and served by another who may only read it.
#[test]
fn a_store_of_another_user_is_read() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;

    let bench = Bench::new();
    drop(commit(&bench.open(), &key("a"), &[bytes(1, 50_000)]).unwrap());
    let mut paths = vec![bench.folder.path().to_owned()];
    while let Some(path) = paths.pop() {
        let mode = if path.is_dir() {
            paths.extend(
                fs::read_dir(&path)
                    .unwrap()
                    .map(|entry| entry.unwrap().path()),
            );
            0o555
        } else {
            0o444
        };
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let (exe, args) = program();
    let mut command = Command::new(exe);
    // Root may write anywhere.
    if rustix::process::geteuid().is_root() {
        command.uid(65_534).gid(65_534);
    }
    let run = command
        .args(args)
        .env(DIR, bench.dir())
        .env("DORMOUSE_TEST_DO", "read")
        .output();
    // So that its owner can remove it.
    let mut paths = vec![bench.folder.path().to_owned()];
    while let Some(path) = paths.pop() {
        if path.is_dir() {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            paths.extend(
                fs::read_dir(&path)
                    .unwrap()
                    .map(|entry| entry.unwrap().path()),
            );
        }
    }
    match run {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(said.contains("\nread\n"), "{said}");
            assert!(output.status.success());
        }
        Err(error) => eprintln!("skipped: another user cannot run this program: {error}"),
    }
}

/// The system's own refusal in the midst of writing, as from a quota or a full disk.
#[test]
fn a_file_that_may_not_grow_ends_a_commit_cleanly() {
    let bench = Bench::new();
    let store = bench.open();
    let old = [bytes(7, 50_000)];
    commit(&store, &key("old"), &old).unwrap();
    let (exe, args) = program();
    let output = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 256; exec \"$@\"", "sh"])
        .arg(exe)
        .args(args)
        .env(DIR, bench.dir())
        .env("DORMOUSE_TEST_DO", "commit large")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("failed: the store cannot use"), "{said}");
    assert!(output.status.success());
    assert_holds(&store.find(&key("old")).unwrap().unwrap(), &old);
    assert_eq!(bench.count("packs"), 3);
    bench.assert_tidy();
}

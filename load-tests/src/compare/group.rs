//! A server in a process group of its own, so that everything it started ends with it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal};
use tokio::time::Instant;

use crate::pages::ProcessMemory;
use crate::process;

/// What a server may take to end by itself.
const PATIENCE: Duration = Duration::from_secs(8);
const ORPHANS_PATIENCE: Duration = Duration::from_millis(500);
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Work of a server that nobody asks anything: timers, and a tick of the clock.
const QUIET_WINDOW: Duration = Duration::from_millis(250);
const QUIET_TIME: Duration = Duration::from_millis(20);
/// How much of a log is told when a server fails.
const LAST_WORDS: usize = 2000;

/// A program to start.
#[derive(Clone, Debug, Default)]
pub(crate) struct Line {
    pub(crate) words: Vec<String>,
    pub(crate) environment: BTreeMap<String, OsString>,
    pub(crate) folder: PathBuf,
}

/// A running server with all its processes. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct Group {
    child: Child,
    pid: Pid,
    log: PathBuf,
    pub(crate) started: Instant,
}

/// What several processes hold together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupMemory {
    pub(crate) processes: usize,
    /// Pages that several of them share are counted for each.
    pub(crate) resident: u64,
    /// Pages that they share are counted once.
    pub(crate) proportional: u64,
}

impl Line {
    pub(crate) fn command(&self) -> Result<Command> {
        let (program, rest) = self.words.split_first().context("a command has words")?;
        let mut command = Command::new(program);
        command
            .args(rest)
            .envs(&self.environment)
            .current_dir(&self.folder)
            .stdin(Stdio::null());
        Ok(command)
    }
}

impl Group {
    /// Starts a program that leads a group; what it says goes to `log`.
    pub(crate) fn start(line: &Line, log: &Path) -> Result<Self> {
        let file = File::create(log)?;
        let mut command = line.command()?;
        command
            .stdout(file.try_clone()?)
            .stderr(file)
            // Not the terminal's: an interrupt is for this program, which then ends the group.
            .process_group(0);
        let started = Instant::now();
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {}", line.words[0]))?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        Ok(Self {
            pid: pid.context("a process has an id")?,
            child,
            log: log.to_owned(),
            started,
        })
    }

    /// The process that leads the group.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// An error when it has ended, with its last words.
    pub(crate) fn check_alive(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("it ended with {status}: {}", self.last_words());
        }
        Ok(())
    }

    /// The end of what it said.
    pub(crate) fn last_words(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let from = text.len().saturating_sub(LAST_WORDS);
        String::from_utf8_lossy(&text[from..]).trim().to_owned()
    }

    /// Its memory now, of all its processes.
    pub(crate) fn memory(&self) -> Result<GroupMemory> {
        let mut sum = GroupMemory::default();
        for member in members(self.child.id())? {
            // One that ended meanwhile holds nothing.
            if let Ok(one) = ProcessMemory::of(member.pid) {
                sum.processes += 1;
                sum.resident += one.resident;
                sum.proportional += one.proportional;
            }
        }
        Ok(sum)
    }

    /// User and system time of all its processes.
    fn cpu_time(&self) -> Result<Duration> {
        let members = members(self.child.id())?;
        // One that ended meanwhile does nothing more.
        let times = members
            .iter()
            .filter_map(|member| process::cpu_time(member.pid).ok());
        Ok(times.sum())
    }

    /// Waits until it has nothing to do, at most for `patience`.
    pub(crate) async fn until_quiet(&self, patience: Duration) -> Result<()> {
        let asked = Instant::now();
        let mut before = self.cpu_time()?;
        while asked.elapsed() < patience {
            tokio::time::sleep(QUIET_WINDOW).await;
            let now = self.cpu_time()?;
            if now.saturating_sub(before) <= QUIET_TIME {
                return Ok(());
            }
            before = now;
        }
        Ok(())
    }

    /// Asks it to end, waits, and ends what is left of it.
    pub(crate) async fn stop(mut self) -> Result<()> {
        let before = members(self.child.id())?;
        // Only the leader is asked: it ends its own processes in order. Fails only when it has
        // ended already.
        let _ = rustix::process::kill_process(self.pid, Signal::TERM);
        let mut until = Instant::now() + PATIENCE;
        let mut led = true;
        while Instant::now() < until && before.iter().any(Member::is_running) {
            if led && self.child.try_wait()?.is_some() {
                // Nobody is left who would end the others.
                led = false;
                until = Instant::now() + ORPHANS_PATIENCE;
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        before.iter().for_each(Member::end);
        self.end();
        let asked = Instant::now();
        while before.iter().any(Member::is_running) {
            if asked.elapsed() > PATIENCE {
                bail!("processes {before:?} do not end");
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Ok(())
    }

    fn end(&mut self) {
        // Children may have left the group; those that are orphans later are found only now.
        let members = members(self.child.id()).unwrap_or_default();
        // Both fail only when they have ended already.
        let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
        members.iter().for_each(Member::end);
        let _ = self.child.wait();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.end();
    }
}

/// Processes of a group that have not ended, and their descendants in other groups.
fn members(leader: u32) -> Result<Vec<Member>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir("/proc").context("cannot list processes")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        if let Some(stat) = Stat::of(pid) {
            all.insert(pid, stat);
        }
    }
    let belongs = |mut pid: u32| {
        // Bounded, since ids may be given anew while they are read.
        for _ in 0..64 {
            match all.get(&pid) {
                _ if pid == leader => return true,
                Some(stat) if stat.group == leader => return true,
                Some(stat) => pid = stat.parent,
                None => return false,
            }
        }
        false
    };
    let alive = all.iter().filter(|(_, stat)| !stat.ended);
    let alive = alive.filter(|(pid, _)| belongs(**pid));
    Ok(alive
        .map(|(&pid, stat)| Member {
            pid,
            started: stat.started,
        })
        .collect())
}

/// A process that cannot be mistaken for a later one with its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Member {
    pid: u32,
    /// In ticks since the system started.
    started: u64,
}

impl Member {
    fn is_running(&self) -> bool {
        Stat::of(self.pid).is_some_and(|stat| !stat.ended && stat.started == self.started)
    }

    fn end(&self) {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        if let (Some(pid), true) = (pid, self.is_running()) {
            // Fails only when it has ended meanwhile.
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }
}

/// What `/proc/PID/stat` says.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    ended: bool,
    parent: u32,
    group: u32,
    started: u64,
}

impl Stat {
    fn of(pid: u32) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        // The second field is the program's name in parentheses and may hold anything.
        let mut fields = text.rsplit_once(')')?.1.split_whitespace();
        Some(Self {
            ended: matches!(fields.next()?, "Z" | "X"),
            parent: fields.next()?.parse().ok()?,
            group: fields.next()?.parse().ok()?,
            started: fields.nth(16)?.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A shell with a child, and the child's id.
    async fn family(script: &str, folder: &Path) -> (Group, Member) {
        let line = Line {
            words: ["sh", "-c", script].map(str::to_owned).to_vec(),
            environment: BTreeMap::new(),
            folder: folder.to_owned(),
        };
        let log = folder.join("log");
        let mut group = Group::start(&line, &log).unwrap();
        loop {
            let said = fs::read_to_string(&log).unwrap();
            if let Some(child) = said.strip_suffix('\n') {
                return (group, member(child.parse().unwrap()));
            }
            group.check_alive().unwrap();
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    fn member(pid: u32) -> Member {
        let started = Stat::of(pid).map_or(0, |stat| stat.started);
        Member { pid, started }
    }

    #[tokio::test]
    async fn children_end_with_their_server() {
        let folder = tempfile::tempdir().unwrap();
        let (group, child) = family("sleep 1000 & echo $!; wait", folder.path()).await;
        assert!(child.is_running());
        assert_eq!(members(group.id()).unwrap().len(), 2);
        let memory = group.memory().unwrap();
        assert_eq!(memory.processes, 2);
        assert!(memory.resident >= memory.proportional);
        group.stop().await.unwrap();
        assert!(!child.is_running());
    }

    #[tokio::test]
    async fn child_that_left_the_group_ends_too() {
        let folder = tempfile::tempdir().unwrap();
        let script = "setsid sh -c 'echo $$; exec sleep 1000' & wait";
        let (group, child) = family(script, folder.path()).await;
        assert!(child.is_running());
        group.stop().await.unwrap();
        assert!(!child.is_running());
    }

    #[tokio::test]
    async fn server_that_ignores_the_request_to_end_is_ended() {
        let folder = tempfile::tempdir().unwrap();
        let script = "trap '' TERM; sleep 1000 & echo $!; wait";
        let (group, child) = family(script, folder.path()).await;
        // Dropping is what an error or an interrupt does.
        drop(group);
        while child.is_running() {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    #[tokio::test]
    async fn server_that_ended_tells_its_last_words() {
        let folder = tempfile::tempdir().unwrap();
        let (mut group, _) = family(
            "echo 1; sleep 0.1; echo no models >&2; exit 3",
            folder.path(),
        )
        .await;
        let error = loop {
            if let Err(error) = group.check_alive() {
                break error.to_string();
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        };
        assert!(
            error.contains("exit status: 3") && error.contains("no models"),
            "{error}"
        );
        group.stop().await.unwrap();
    }

    #[test]
    fn stat_of_a_process_with_an_odd_name_is_read() {
        let stat = "17 (a) (b Z) S 4 17 17 0 -1 0 0 0 0 0 1 2 0 0 20 0 1 0 4711 9";
        let stat = Stat::parse(stat).unwrap();
        assert_eq!(
            stat,
            Stat {
                ended: false,
                parent: 4,
                group: 17,
                started: 4711,
            }
        );
    }
}

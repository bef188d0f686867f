//! Servers as child processes: started on free ports, measured from outside, ended by id.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::pages::ProcessMemory;

/// A server that was started for a measurement. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct ServerProcess {
    child: Child,
    grpc: String,
    http: Option<String>,
    metrics: Option<String>,
    pub(crate) started: Instant,
}

/// How a server is started, other than usual.
#[derive(Clone, Debug, Default)]
pub(crate) struct Launch {
    /// Instead of the `dormouse` that was built together with this program.
    pub(crate) program: Option<PathBuf>,
    /// File descriptors that the process may have.
    pub(crate) descriptors: Option<u32>,
}

impl ServerProcess {
    /// Starts a program that tells its gRPC address in its log, as Dormouse does.
    pub(crate) fn start<S: AsRef<OsStr>>(program: &Path, args: &[S]) -> anyhow::Result<Self> {
        let started = Instant::now();
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let stderr = child
            .stderr
            .take()
            .context("standard error was asked for")?;
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            let mut last = String::new();
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let event: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
                if event["message"] == "listening" {
                    let field = |name: &str| event[name].as_str().unwrap_or_default().to_owned();
                    let _ = sender.send(Ok((field("protocol"), field("address"))));
                }
                last = line;
            }
            let _ = sender.send(Err(last));
        });
        let mut server = Self {
            child,
            grpc: String::new(),
            http: None,
            metrics: None,
            started,
        };
        let with = |flag: &str| args.iter().any(|arg| arg.as_ref() == flag);
        let (with_http, with_metrics) = (with("--http-port=0"), with("--metrics-port=0"));
        while server.grpc.is_empty()
            || (with_http && server.http.is_none())
            || (with_metrics && server.metrics.is_none())
        {
            match receiver.recv_timeout(Duration::from_secs(120)) {
                Ok(Ok((protocol, address))) => match protocol.as_str() {
                    "grpc" => server.grpc = address,
                    "http" => server.http = Some(address),
                    "metrics" => server.metrics = Some(address),
                    _ => {}
                },
                Ok(Err(last)) => bail!("{} ended: {last}", program.display()),
                Err(_) => bail!("{} did not listen within 120 s", program.display()),
            }
        }
        Ok(server)
    }

    /// Starts the `dormouse` that was built together with this program, on free loopback ports.
    pub(crate) fn dormouse(repository: &Path) -> anyhow::Result<Self> {
        Self::dormouse_with(repository, &[])
    }

    /// The `dormouse` that was built together with this program.
    pub(crate) fn binary() -> anyhow::Result<PathBuf> {
        let program = std::env::current_exe()?;
        let mut binary = program.with_file_name("dormouse");
        // Tests lie one folder deeper than programs.
        if let Some(folder) = program.parent().filter(|folder| folder.ends_with("deps")) {
            binary = folder.with_file_name("dormouse");
        }
        ensure!(
            binary.exists(),
            "{} is missing: build it with `cargo build --release -p dormouse-server`",
            binary.display()
        );
        Ok(binary)
    }

    /// As [`ServerProcess::dormouse`] with further flags.
    pub(crate) fn dormouse_with(repository: &Path, flags: &[String]) -> anyhow::Result<Self> {
        Self::launch(&Launch::default(), repository, flags)
    }

    /// As [`ServerProcess::dormouse_with`], started in another way.
    pub(crate) fn launch(
        launch: &Launch,
        repository: &Path,
        flags: &[String],
    ) -> anyhow::Result<Self> {
        let binary = match &launch.program {
            Some(program) => program.clone(),
            None => Self::binary()?,
        };
        let mut args: Vec<&OsStr> = vec![
            "serve".as_ref(),
            "--model-repository".as_ref(),
            repository.as_ref(),
            "--http-port=0".as_ref(),
            "--grpc-port=0".as_ref(),
            "--metrics-port=0".as_ref(),
            "--http-address=127.0.0.1".as_ref(),
            "--grpc-address=127.0.0.1".as_ref(),
            "--metrics-address=127.0.0.1".as_ref(),
            "--log-format=json".as_ref(),
        ];
        args.extend(flags.iter().map(OsStr::new));
        let Some(descriptors) = launch.descriptors else {
            return Self::start(&binary, &args);
        };
        // The shell lowers its own limit and becomes the server.
        let script = format!("ulimit -n {descriptors} && exec \"$0\" \"$@\"");
        let mut line: Vec<&OsStr> = vec!["-c".as_ref(), script.as_ref(), binary.as_ref()];
        line.extend(args);
        Self::start(Path::new("/bin/sh"), &line)
    }

    /// The process's id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where it serves gRPC.
    pub(crate) fn grpc(&self) -> &str {
        &self.grpc
    }

    /// Where it serves HTTP.
    pub(crate) fn http(&self) -> Option<&str> {
        self.http.as_deref()
    }

    /// Where it serves gRPC, as a URL.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.grpc)
    }

    /// Its memory now.
    pub(crate) fn memory(&self) -> anyhow::Result<ProcessMemory> {
        ProcessMemory::of(self.child.id())
    }

    /// Waits until it has nothing to do.
    pub(crate) async fn quiet(&self, patience: Duration) -> anyhow::Result<()> {
        quiet(self.child.id(), patience).await
    }

    /// The text of its metrics page.
    pub(crate) async fn metrics_text(&self) -> anyhow::Result<String> {
        let address = self.metrics.as_deref().context("it serves no metrics")?;
        let fetch = async {
            let mut socket = TcpStream::connect(address).await?;
            let request = format!("GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n");
            socket.write_all(request.as_bytes()).await?;
            let mut answer = Vec::new();
            socket.read_to_end(&mut answer).await?;
            anyhow::Ok(String::from_utf8_lossy(&answer).into_owned())
        };
        tokio::time::timeout(Duration::from_secs(10), fetch)
            .await
            .context("the metrics page did not come within 10 s")?
    }

    /// User and system time used so far.
    pub(crate) fn cpu_time(&self) -> anyhow::Result<Duration> {
        cpu_time(self.child.id())
    }

    /// Resident memory in bytes.
    pub(crate) fn resident(&self) -> anyhow::Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status
            .lines()
            .find(|line| line.starts_with("VmRSS:"))
            .context("no VmRSS")?;
        let kib: u64 = line
            .split_whitespace()
            .nth(1)
            .context("no value")?
            .parse()?;
        Ok(kib * 1024)
    }

    /// Threads of the process.
    pub(crate) fn threads(&self) -> anyhow::Result<usize> {
        Ok(std::fs::read_dir(format!("/proc/{}/task", self.child.id()))?.count())
    }
}

/// User and system time that a process has used so far.
pub(crate) fn cpu_time(pid: u32) -> anyhow::Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the program's name in parentheses and may hold spaces.
    let fields = stat
        .rsplit_once(')')
        .context("unexpected form of /proc/PID/stat")?
        .1;
    let ticks: u64 = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum();
    Ok(Duration::from_millis(ticks * 1000 / ticks_per_second()))
}

/// Waits until a process has nothing to do, so that what is measured next is measured alone.
pub(crate) async fn quiet(pid: u32, patience: Duration) -> anyhow::Result<()> {
    const WINDOW: Duration = Duration::from_millis(60);
    let started = Instant::now();
    let mut before = cpu_time(pid)?;
    while started.elapsed() < patience {
        tokio::time::sleep(WINDOW).await;
        let now = cpu_time(pid)?;
        // The clock ticks in hundredths of a second: one tick may be this loop's own. A thread of
        // low priority may use none and still wait for its turn.
        if now.saturating_sub(before) <= Duration::from_millis(10) && !has_work(pid)? {
            return Ok(());
        }
        before = now;
    }
    bail!("the process was still busy after {patience:?}")
}

/// Whether a thread of the process other than this one runs, or waits for a core or a disk.
fn has_work(pid: u32) -> anyhow::Result<bool> {
    let own = std::fs::read_link("/proc/thread-self")?;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let thread = thread?;
        if own.file_name() == Some(&thread.file_name()) {
            continue;
        }
        // One that ended meanwhile has nothing to do.
        let Ok(stat) = std::fs::read_to_string(thread.path().join("stat")) else {
            continue;
        };
        let state = stat.rsplit_once(") ").map(|(_, rest)| rest.chars().next());
        if matches!(state, Some(Some('R' | 'D'))) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The sum of a metric over the lines of an exposition that carry all of `labels`, each written
/// `key="value"`; none where the metric is not exported.
pub(crate) fn metric(text: &str, name: &str, labels: &[&str]) -> Option<f64> {
    let mut sum = None;
    for line in text.lines() {
        let Some(rest) = line.strip_prefix(name) else {
            continue;
        };
        let (found, value) = match rest.strip_prefix('{') {
            Some(rest) => match rest.rsplit_once("} ") {
                Some(split) => split,
                None => continue,
            },
            None => match rest.strip_prefix(' ') {
                Some(value) => ("", value),
                None => continue,
            },
        };
        if labels.iter().all(|label| found.contains(label)) {
            *sum.get_or_insert(0.0) += value.trim().parse::<f64>().unwrap_or(0.0);
        }
    }
    sum
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ticks of the clock that `/proc` counts processor time in.
pub(crate) fn ticks_per_second() -> u64 {
    system_constant(libc::_SC_CLK_TCK).unwrap_or(100)
}

/// Bytes of a page of memory.
pub(crate) fn page_size() -> u64 {
    system_constant(libc::_SC_PAGESIZE).unwrap_or(4096)
}

#[expect(unsafe_code, reason = "libc's sysconf has no safe binding here")]
fn system_constant(name: libc::c_int) -> Option<u64> {
    // SAFETY: `sysconf` reads a constant of the system.
    let value = unsafe { libc::sysconf(name) };
    u64::try_from(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_summed_over_matching_lines() {
        let text = "# TYPE loads counter\nloads{model=\"a\",version=\"1\"} 2\nloads{model=\"b\"} 3\n\
                    loads_total{model=\"a\"} 9\nwarm 4\n";
        assert_eq!(metric(text, "loads", &[]), Some(5.0));
        assert_eq!(metric(text, "loads", &["model=\"a\""]), Some(2.0));
        assert_eq!(metric(text, "loads", &["model=\"c\""]), None);
        assert_eq!(metric(text, "warm", &[]), Some(4.0));
        assert_eq!(metric(text, "cold", &[]), None);
    }

    #[test]
    fn thread_at_work_is_noticed() {
        let (stop, stopped) = mpsc::channel::<()>();
        let working = std::thread::spawn(move || {
            while stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {
                std::hint::spin_loop();
            }
        });
        let noticed = has_work(std::process::id()).unwrap();
        drop(stop);
        working.join().unwrap();
        assert!(noticed);
        assert!(cpu_time(std::process::id()).is_ok());
    }
}

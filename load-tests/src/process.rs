//! Servers as child processes: started on free ports, measured from outside, ended by id.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tokio::time::Instant;

/// A server that was started for a measurement. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct ServerProcess {
    child: Child,
    grpc: String,
    pub(crate) started: Instant,
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
                if event["message"] == "listening" && event["protocol"] == "grpc" {
                    let _ =
                        sender.send(Ok(event["address"].as_str().unwrap_or_default().to_owned()));
                }
                last = line;
            }
            let _ = sender.send(Err(last));
        });
        let grpc = match receiver.recv_timeout(Duration::from_secs(30)) {
            Ok(Ok(address)) => address,
            Ok(Err(last)) => bail!("{} ended: {last}", program.display()),
            Err(_) => bail!("{} did not listen within 30 s", program.display()),
        };
        Ok(Self {
            child,
            grpc,
            started,
        })
    }

    /// Starts the `dormouse` that was built together with this program, on free loopback ports.
    pub(crate) fn dormouse(repository: &Path) -> anyhow::Result<Self> {
        let binary = std::env::current_exe()?.with_file_name("dormouse");
        ensure!(
            binary.exists(),
            "{} is missing: build it with `cargo build --release -p dormouse-server`",
            binary.display()
        );
        let args: [&OsStr; 9] = [
            "serve".as_ref(),
            "--model-repository".as_ref(),
            repository.as_ref(),
            "--http-port=0".as_ref(),
            "--grpc-port=0".as_ref(),
            "--metrics-port=0".as_ref(),
            "--http-address=127.0.0.1".as_ref(),
            "--grpc-address=127.0.0.1".as_ref(),
            "--log-format=json".as_ref(),
        ];
        Self::start(&binary, &args)
    }

    /// Where it serves gRPC, as a URL.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.grpc)
    }

    /// User and system time used so far.
    pub(crate) fn cpu_time(&self) -> anyhow::Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
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

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[expect(unsafe_code, reason = "libc's sysconf has no safe binding here")]
fn ticks_per_second() -> u64 {
    // SAFETY: `sysconf` reads a constant of the system.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    u64::try_from(ticks).unwrap_or(100)
}

//! Starts workers and watches over them: one thread that sees each of them die, kills those that
//! hang, and tells whoever is concerned.
//!
//! # Why a thread of its own
//! A worker is to die with its server, and the kernel takes "with" to mean the thread that started
//! it. It also inherits that thread's priority, and loads run on threads that have stepped back.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::Instant;

use crate::engine::LostWorker;
use crate::metrics::WorkerMetrics;

/// How often workers that are busy are looked at.
const TICK: Duration = Duration::from_millis(200);
/// How long a worker that was killed is waited for at a time.
const REAPING: Duration = Duration::from_millis(500);
/// A worker that was stopped by a signal is killed when it is found so this many times in a row.
const STOPPED_TICKS: u32 = 2;

/// Why a worker ended though nobody closed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    Signal(i32),
    Exited(i32),
    /// It did not answer in so long.
    Hung(Duration),
    /// Somebody stopped it while it had work to do.
    Stopped,
    /// It said what makes no sense.
    Garbled,
    Unknown,
}

impl Cause {
    /// Every value of the metric's label.
    pub const LABELS: [&'static str; 10] = [
        "killed", "segv", "abort", "bus", "limit", "signal", "exit", "hung", "garbled", "unknown",
    ];

    /// Its value of the metric's label.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Signal(libc::SIGKILL) => "killed",
            Self::Signal(libc::SIGSEGV) => "segv",
            Self::Signal(libc::SIGABRT) => "abort",
            Self::Signal(libc::SIGBUS) => "bus",
            Self::Signal(libc::SIGXCPU) => "limit",
            Self::Signal(_) => "signal",
            Self::Exited(_) => "exit",
            Self::Hung(_) | Self::Stopped => "hung",
            Self::Garbled => "garbled",
            Self::Unknown => "unknown",
        }
    }

    /// Whether the process ended by what it did itself.
    pub const fn is_own_doing(self) -> bool {
        match self {
            Self::Signal(signal) => !matches!(
                signal,
                libc::SIGKILL | libc::SIGTERM | libc::SIGINT | libc::SIGHUP | libc::SIGQUIT
            ),
            Self::Exited(_) | Self::Hung(_) | Self::Garbled => true,
            Self::Stopped | Self::Unknown => false,
        }
    }

    fn of(status: ExitStatus) -> Self {
        match (status.signal(), status.code()) {
            (Some(signal), _) => Self::Signal(signal),
            (None, Some(code)) => Self::Exited(code),
            (None, None) => Self::Unknown,
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal(libc::SIGKILL) => {
                f.write_str("was killed (signal 9): by somebody, or because memory ran out")
            }
            Self::Signal(libc::SIGSEGV) => f.write_str("crashed (SIGSEGV)"),
            Self::Signal(libc::SIGABRT) => f.write_str("aborted (SIGABRT)"),
            Self::Signal(libc::SIGBUS) => f.write_str("crashed (SIGBUS)"),
            Self::Signal(libc::SIGXCPU) => f.write_str("used up its CPU time (SIGXCPU)"),
            Self::Signal(signal) => write!(f, "was ended by signal {signal}"),
            Self::Exited(code) => write!(f, "exited with code {code}"),
            Self::Hung(limit) => write!(f, "did not answer within {limit:?} and was killed"),
            Self::Stopped => f.write_str("was stopped while it had work to do, and was killed"),
            Self::Garbled => f.write_str("gave an answer that makes no sense, and was killed"),
            Self::Unknown => f.write_str("ended for an unknown reason"),
        }
    }
}

/// Who is told of a death that nobody asked for.
pub(super) type OnDeath = Arc<dyn Fn(&LostWorker) + Send + Sync>;

/// What is known of a worker's life, by its owner and by the nursery.
pub(super) struct Vitals {
    pub(super) id: u64,
    pub(super) pid: u32,
    label: String,
    /// Until it is reaped, its number is nobody else's.
    alive: Mutex<bool>,
    /// Why it was killed, where that was our doing.
    sentence: Mutex<Option<Cause>>,
    /// Its owner has done with it.
    dismissed: AtomicBool,
    death: Mutex<Option<LostWorker>>,
    died: Condvar,
    /// Until when each call under way must have been answered.
    calls: Mutex<HashMap<u64, Call>>,
    on_death: OnDeath,
}

#[derive(Clone, Copy, Debug)]
struct Call {
    until: Instant,
    limit: Duration,
}

impl fmt::Debug for Vitals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vitals")
            .field("id", &self.id)
            .field("pid", &self.pid)
            .field("label", &self.label)
            .finish_non_exhaustive()
    }
}

impl Vitals {
    pub(super) fn is_dead(&self) -> bool {
        self.death.lock().is_some()
    }

    /// How it died, if it has.
    pub(super) fn death(&self) -> Option<LostWorker> {
        self.death.lock().clone()
    }

    /// Kills it for this reason, unless it is dead already.
    pub(super) fn kill(&self, cause: Cause) {
        self.sentence.lock().get_or_insert(cause);
        self.signal();
    }

    fn signal(&self) {
        let alive = self.alive.lock();
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        if let (true, Some(pid)) = (*alive, pid) {
            // Gone already is as good.
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// Ends it without calling that a death, and returns when its memory is free.
    pub(super) fn dismiss(&self, patience: Duration) {
        self.dismissed.store(true, Ordering::Release);
        self.signal();
        self.wait_for_death(patience);
    }

    /// How it died, once that is known.
    pub(super) fn wait_for_death(&self, patience: Duration) -> Option<LostWorker> {
        let mut death = self.death.lock();
        let until = Instant::now() + patience;
        while death.is_none() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.died.wait_for(&mut death, left).timed_out() {
                break;
            }
        }
        death.clone()
    }

    /// Notes a call that must be answered within `limit`.
    pub(super) fn begin(&self, call: u64, limit: Duration) {
        let until = Instant::now() + limit;
        self.calls.lock().insert(call, Call { until, limit });
    }

    pub(super) fn end(&self, call: u64) {
        self.calls.lock().remove(&call);
    }

    fn lost(&self, cause: Cause) -> LostWorker {
        LostWorker {
            worker: self.id,
            reason: format!("its worker process {} {cause}", self.pid).into(),
            by_itself: cause.is_own_doing(),
        }
    }
}

#[cfg(test)]
impl Vitals {
    /// Of a worker that never was a process.
    pub(super) fn of_the_dead(id: u64) -> Arc<Self> {
        let vitals = Self {
            id,
            pid: 0,
            label: "model/1".to_owned(),
            alive: Mutex::new(false),
            sentence: Mutex::new(None),
            dismissed: AtomicBool::new(false),
            death: Mutex::new(None),
            died: Condvar::new(),
            calls: Mutex::default(),
            on_death: Arc::new(|_| {}),
        };
        *vitals.death.lock() = Some(vitals.lost(Cause::Unknown));
        Arc::new(vitals)
    }

    /// Whether somebody had it killed.
    pub(super) fn is_sentenced(&self) -> bool {
        self.sentence.lock().is_some()
    }
}

/// A worker to be started.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) label: String,
    /// The worker's end of the first socket.
    pub(super) theirs: OwnedFd,
    /// Ours, to see that the other end is gone.
    pub(super) ours: OwnedFd,
}

struct Job {
    order: Order,
    on_death: OnDeath,
    answer: mpsc::SyncSender<io::Result<Arc<Vitals>>>,
}

/// A worker as its guardian has it.
struct Ward {
    vitals: Arc<Vitals>,
    child: Child,
    ours: OwnedFd,
    stopped_ticks: u32,
    /// Its end was told, but the system has not given it back yet.
    told: bool,
}

/// Starts workers and watches over them.
#[derive(Debug)]
pub(super) struct Nursery {
    program: PathBuf,
    metrics: WorkerMetrics,
    runtime: tokio::runtime::Handle,
    jobs: mpsc::Sender<Job>,
    wake: Arc<OwnedFd>,
    /// Taken by the thread when it starts.
    waiting: Mutex<Option<mpsc::Receiver<Job>>>,
    issued: AtomicU64,
}

impl Nursery {
    /// Nothing runs until the first worker is ordered.
    pub(super) fn new(
        program: PathBuf,
        metrics: WorkerMetrics,
        runtime: tokio::runtime::Handle,
    ) -> io::Result<Arc<Self>> {
        let (jobs, waiting) = mpsc::channel();
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Arc::new(Self {
            program,
            metrics,
            runtime,
            jobs,
            wake: Arc::new(rustix::event::eventfd(0, flags)?),
            waiting: Mutex::new(Some(waiting)),
            issued: AtomicU64::new(1),
        }))
    }

    /// Starts a worker's process.
    pub(super) fn start(
        self: &Arc<Self>,
        order: Order,
        on_death: OnDeath,
    ) -> io::Result<Arc<Vitals>> {
        if let Some(waiting) = self.waiting.lock().take() {
            let nursery = Arc::clone(self);
            std::thread::Builder::new()
                .name("workers".to_owned())
                .spawn(move || nursery.watch(&waiting))?;
        }
        let (answer, answered) = mpsc::sync_channel(1);
        let gone = |_| io::Error::other("nobody starts workers any more");
        let job = Job {
            order,
            on_death,
            answer,
        };
        self.jobs.send(job).map_err(|_| gone(()))?;
        // A full counter is read just the same.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        answered.recv().map_err(|_| gone(()))?
    }

    fn watch(&self, jobs: &mpsc::Receiver<Job>) {
        let mut wards: Vec<Ward> = Vec::new();
        loop {
            self.sleep(&wards);
            while let Ok(job) = jobs.try_recv() {
                let started = self.spawn(job.order, job.on_death);
                let answer = started.map(|ward| {
                    let vitals = Arc::clone(&ward.vitals);
                    wards.push(ward);
                    vitals
                });
                // Whoever asked waits for it.
                let _ = job.answer.send(answer);
            }
            wards.retain_mut(|ward| !self.look_at(ward));
        }
    }

    /// Waits until something may have happened.
    fn sleep(&self, wards: &[Ward]) {
        let mut polled = vec![PollFd::new(&*self.wake, PollFlags::IN)];
        // The end of a connection is told without asking for anything. One that was told already
        // would be told without end.
        let waiting = wards.iter().filter(|ward| !ward.told);
        polled.extend(waiting.map(|ward| PollFd::new(&ward.ours, PollFlags::empty())));
        let tick = Timespec {
            tv_sec: 0,
            tv_nsec: i64::try_from(TICK.as_nanos()).unwrap_or(i64::MAX),
        };
        let timeout = (!wards.is_empty()).then_some(&tick);
        // Interrupted is as good as woken.
        let _ = rustix::event::poll(&mut polled, timeout);
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
    }

    fn spawn(&self, order: Order, on_death: OnDeath) -> io::Result<Ward> {
        let Order {
            label,
            theirs,
            ours,
        } = order;
        let mut child = Command::new(&self.program)
            .arg0("dormouse")
            .args(["worker", "--parent", &std::process::id().to_string()])
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            // Credentials of buckets and the like are none of a model's business.
            .env_clear()
            .envs(std::env::vars_os().filter(|(name, _)| is_for_workers(name)))
            // A terminal's interrupt is for the server, which finishes what it has first.
            .process_group(0)
            .spawn()?;
        let vitals = Arc::new(Vitals {
            id: self.issued.fetch_add(1, Ordering::Relaxed),
            pid: child.id(),
            label,
            alive: Mutex::new(true),
            sentence: Mutex::new(None),
            dismissed: AtomicBool::new(false),
            death: Mutex::new(None),
            died: Condvar::new(),
            calls: Mutex::default(),
            on_death,
        });
        self.metrics.running.increment(1.0);
        if let Some(stderr) = child.stderr.take() {
            let vitals = Arc::clone(&vitals);
            self.runtime.spawn(super::log::follow(
                OwnedFd::from(stderr),
                vitals.label.clone(),
                vitals.pid,
            ));
        }
        Ok(Ward {
            vitals,
            child,
            ours,
            stopped_ticks: 0,
            told: false,
        })
    }

    /// Looks after one worker; true when it is gone.
    fn look_at(&self, ward: &mut Ward) -> bool {
        if ward.told {
            return ward.reaped().is_some();
        }
        if ward.has_hung_up() {
            // It is on its way out, or has closed its end and must go.
            ward.vitals.signal();
            let until = Instant::now() + REAPING;
            let status = loop {
                let status = ward.reaped();
                if status.is_some() || Instant::now() >= until {
                    break status;
                }
                pause();
            };
            self.tell(ward, status);
            return status.is_some();
        }
        ward.check_calls();
        false
    }

    fn tell(&self, ward: &mut Ward, status: Option<ExitStatus>) {
        ward.told = true;
        let vitals = &ward.vitals;
        // Asked first: whoever hears of the death gives the worker up.
        let dismissed = vitals.dismissed.load(Ordering::Acquire);
        let sentence = *vitals.sentence.lock();
        let cause = sentence.unwrap_or_else(|| status.map_or(Cause::Unknown, Cause::of));
        let lost = vitals.lost(cause);
        self.metrics.running.decrement(1.0);
        if !dismissed {
            self.metrics.died(cause);
        }
        *vitals.death.lock() = Some(lost.clone());
        vitals.died.notify_all();
        if dismissed {
            return;
        }
        tracing::error!(model = vitals.label, pid = vitals.pid, %cause, "worker died");
        // With this thread every worker would die, and nobody would notice.
        let told = catch_unwind(AssertUnwindSafe(|| (vitals.on_death)(&lost)));
        if told.is_err() {
            tracing::error!(
                model = vitals.label,
                pid = vitals.pid,
                "a death was not taken in"
            );
        }
    }
}

impl Ward {
    fn reaped(&mut self) -> Option<ExitStatus> {
        let mut alive = self.vitals.alive.lock();
        let status = self.child.try_wait().ok().flatten();
        *alive &= status.is_none();
        status
    }

    fn has_hung_up(&self) -> bool {
        let mut polled = [PollFd::new(&self.ours, PollFlags::empty())];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let ready = rustix::event::poll(&mut polled, Some(&now));
        let [polled] = polled;
        ready.is_ok_and(|ready| ready > 0)
            && polled
                .revents()
                .intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL)
    }

    /// Kills a worker that owes an answer for too long.
    fn check_calls(&mut self) {
        let now = Instant::now();
        let (busy, late) = {
            let calls = self.vitals.calls.lock();
            let late = calls.values().find(|call| call.until <= now);
            (!calls.is_empty(), late.map(|call| call.limit))
        };
        if let Some(limit) = late {
            self.vitals.kill(Cause::Hung(limit));
            return;
        }
        let stopped = busy && is_stopped(self.vitals.pid);
        self.stopped_ticks = if stopped { self.stopped_ticks + 1 } else { 0 };
        if self.stopped_ticks >= STOPPED_TICKS {
            self.vitals.kill(Cause::Stopped);
        }
    }
}

/// Whether a variable of the environment is passed on: what the engine, its libraries and the
/// loader read, and nothing else.
fn is_for_workers(name: &OsStr) -> bool {
    const NAMES: [&str; 5] = ["PATH", "HOME", "TMPDIR", "LANG", "TZ"];
    const BEGINNINGS: [&str; 12] = [
        "LC_",
        "LD_",
        "MALLOC_",
        "GLIBC_",
        "ORT_",
        "ONNXRUNTIME_",
        "OMP_",
        "KMP_",
        "RUST_",
        "LLVM_PROFILE_",
        "ASAN_",
        "DORMOUSE_WORKER_",
    ];
    let name = name.as_encoded_bytes();
    NAMES.iter().any(|known| known.as_bytes() == name)
        || BEGINNINGS
            .iter()
            .any(|beginning| name.starts_with(beginning.as_bytes()))
}

/// Waits a moment for the system to be done with a process that has closed its files.
fn pause() {
    let moment = Timespec {
        tv_sec: 0,
        tv_nsec: 1_000_000,
    };
    // Interrupted is as good.
    let _ = rustix::event::poll(&mut [], Some(&moment));
}

/// Whether a signal has stopped a process. One that is being debugged is not meant.
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which is in parentheses and may hold any of them.
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| rest.starts_with('T'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_get_no_credentials_of_the_environment() {
        for name in ["PATH", "LD_LIBRARY_PATH", "ORT_DISABLE_TELEMETRY", "LC_ALL"] {
            assert!(is_for_workers(name.as_ref()), "{name}");
        }
        for name in [
            "AWS_SECRET_ACCESS_KEY",
            "DORMOUSE_TOKEN",
            "DORMOUSE_AUTH_TOKENS",
            "OTEL_EXPORTER_OTLP_HEADERS",
            "PATHS",
            "HTTPS_PROXY",
        ] {
            assert!(!is_for_workers(name.as_ref()), "{name}");
        }
    }

    #[test]
    fn who_is_killed_has_not_died_by_itself() {
        for (cause, own) in [
            (Cause::Signal(libc::SIGKILL), false),
            (Cause::Signal(libc::SIGTERM), false),
            (Cause::Signal(libc::SIGSEGV), true),
            (Cause::Signal(libc::SIGXCPU), true),
            (Cause::Exited(1), true),
            (Cause::Hung(TICK), true),
            (Cause::Stopped, false),
        ] {
            assert_eq!(cause.is_own_doing(), own, "{cause}");
        }
    }

    #[tokio::test]
    async fn workers_are_still_watched_after_a_death_that_was_not_taken_in() {
        let metrics = crate::metrics::Metrics::new().unwrap();
        let workers = metrics.server().workers.clone();
        // It does not know the flags and ends.
        let nursery = Nursery::new(
            PathBuf::from("/bin/false"),
            workers,
            tokio::runtime::Handle::current(),
        )
        .unwrap();
        let begin = |on_death: OnDeath| {
            let (ours, theirs) = super::super::socket::Socket::pair().unwrap();
            let order = Order {
                label: "model/1".to_owned(),
                theirs: theirs.into_fd(),
                ours: ours.into_fd(),
            };
            nursery.start(order, on_death).unwrap()
        };
        let patience = Duration::from_secs(60);
        let first = begin(Arc::new(|_| panic!("told to")));
        assert!(first.wait_for_death(patience).is_some());
        let second = begin(Arc::new(|_| {}));
        let death = second.wait_for_death(patience).unwrap();
        assert!(death.reason.contains("exited with code 1"), "{death:?}");
    }
}

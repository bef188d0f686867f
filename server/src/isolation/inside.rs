//! The worker's side: a process that loads models and runs them for its server, and has no other
//! purpose, connection or file.

mod fault;
mod lane;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::Weak;
use std::sync::atomic::{AtomicU32, Ordering};

use dormouse_model_store::store::{Digest, Pack};
use parking_lot::Mutex;
use rustix::process::{Pid, Resource, Rlimit, Signal};

use self::fault::Faults;
use super::messages::{Hello, Notice, Reply};
use super::segment::Segment;
use super::socket::{Inbox, Socket};
use crate::engine::onnx::OnnxEngine;
use crate::engine::{Engine, EngineError, Session, StopHandle};
use crate::process;

/// Stops that came before the run they are meant for; more are of runs long over.
const MOST_EARLY_STOPS: usize = 256;

/// Flags of `dormouse worker`, which servers start and nobody else.
#[derive(Clone, Debug, clap::Args)]
pub struct WorkerArgs {
    /// The server's process
    #[arg(long)]
    pub parent: u32,
}

/// What lanes share.
struct Shared {
    engine: Box<dyn Engine>,
    faults: Faults,
    sessions: Mutex<HashMap<u32, Arc<dyn Session>>>,
    issued: AtomicU32,
    segments: Mutex<HashMap<u32, Arc<Segment>>>,
    /// Packs that are mapped, each once.
    packs: Mutex<HashMap<String, Weak<Pack>>>,
    runs: Mutex<Runs>,
}

/// The runs that can be stopped.
#[derive(Default)]
struct Runs {
    under_way: HashMap<u64, StopHandle>,
    /// Stopped before they began.
    early: VecDeque<u64>,
}

/// Serves until the server closes the connection that standard input is. Never returns.
pub fn run(args: &WorkerArgs) -> ! {
    let code = match serve(args) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("the worker ends: {error}");
            1
        }
    };
    // Runs may be under way inside the engine; nobody waits for them.
    process::exit_now(code)
}

fn serve(args: &WorkerArgs) -> io::Result<()> {
    process::close_other_files();
    process::ignore_signals(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP]);
    process::die_of(&[libc::SIGSEGV, libc::SIGBUS]);
    // It ends with its server, however that ends.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let parent = i32::try_from(args.parent).ok().and_then(Pid::from_raw);
    if rustix::process::getppid() != parent {
        return Err(io::Error::other("the server is gone"));
    }
    // The server puts every line into its own log, with a time.
    let _ = tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .without_time()
        .try_init();
    let line = Socket::from(rustix::io::fcntl_dupfd_cloexec(io::stdin().as_fd(), 3)?);
    let mut inbox = Inbox::default();
    if line.receive(&mut inbox)?.is_none() {
        return Ok(());
    }
    let hello = Hello::decode(inbox.message()).map_err(io::Error::other)?;
    lower_limits(&hello)?;
    let engine =
        OnnxEngine::new(hello.engine.clone()).and_then(|engine| engine.prepare().map(|_| engine));
    let reply = match &engine {
        Ok(_) => Reply::Ready,
        Err(error) => Reply::Failed(error.to_string()),
    };
    line.send(reply.encode().bytes(), &[])?;
    let Ok(engine) = engine else {
        return Ok(());
    };
    let shared = Arc::new(Shared {
        engine: Box::new(engine),
        faults: Faults::of(&hello.label),
        sessions: Mutex::default(),
        issued: AtomicU32::new(1),
        segments: Mutex::default(),
        packs: Mutex::default(),
        runs: Mutex::default(),
    });
    while let Some(fds) = line.receive(&mut inbox)? {
        match Notice::decode(inbox.message()).map_err(io::Error::other)? {
            Notice::Lane => {
                let lane = fds
                    .into_iter()
                    .next()
                    .ok_or_else(|| io::Error::other("a lane was announced that did not come"))?;
                shared.clone().open_lane(lane)?;
            }
            Notice::Stop { call } => shared.stop(call),
            Notice::Close { session } => {
                let closed = shared.sessions.lock().remove(&session);
                drop(closed);
            }
        }
    }
    Ok(())
}

/// Core dumps would hold weights and inputs. When memory runs out, this process goes before its
/// server. What a trial may use is bounded.
fn lower_limits(hello: &Hello) -> io::Result<()> {
    let exactly = |most: u64| Rlimit {
        current: Some(most),
        maximum: Some(most),
    };
    rustix::process::setrlimit(Resource::Core, exactly(0))?;
    if let Some(bytes) = hello.most_memory {
        rustix::process::setrlimit(Resource::As, exactly(bytes))?;
    }
    if let Some(seconds) = hello.most_cpu {
        rustix::process::setrlimit(Resource::Cpu, cpu_limit(seconds))?;
    }
    // Where the system has no such file, it has no such preference either.
    let _ = std::fs::write("/proc/self/oom_score_adj", "500");
    Ok(())
}

/// So many seconds of CPU time, then the signal that says so. At the upper limit there is another
/// one, which anybody may have sent.
fn cpu_limit(seconds: u64) -> Rlimit {
    Rlimit {
        current: Some(seconds),
        maximum: Some(seconds.saturating_add(1)),
    }
}

impl Shared {
    fn open_lane(self: Arc<Self>, lane: OwnedFd) -> io::Result<()> {
        // Graphs are walked recursively.
        std::thread::Builder::new()
            .name("lane".to_owned())
            .stack_size(8 << 20)
            .spawn(move || {
                if let Err(error) = lane::serve(&self, &Socket::from(lane)) {
                    // The server knows no more than that no answer comes, so there must be none
                    // on any lane.
                    eprintln!("the worker ends: {error}");
                    process::exit_now(1);
                }
            })?;
        Ok(())
    }

    fn stop(&self, call: u64) {
        let mut runs = self.runs.lock();
        let stop = runs.under_way.get(&call).cloned();
        if stop.is_none() {
            runs.early.push_back(call);
            if runs.early.len() > MOST_EARLY_STOPS {
                runs.early.pop_front();
            }
        }
        drop(runs);
        if let Some(stop) = stop {
            stop.stop();
        }
    }

    /// Enters a run under its number; false when it was stopped already.
    fn begin_run(&self, call: u64, stop: &StopHandle) -> bool {
        let mut runs = self.runs.lock();
        if let Some(place) = runs.early.iter().position(|&early| early == call) {
            runs.early.remove(place);
            return false;
        }
        runs.under_way.insert(call, Arc::clone(stop));
        true
    }

    fn end_run(&self, call: u64) {
        self.runs.lock().under_way.remove(&call);
    }

    fn session(&self, id: u32) -> Result<Arc<dyn Session>, EngineError> {
        let session = self.sessions.lock().get(&id).cloned();
        session.ok_or_else(|| EngineError::Failed(format!("there is no session {id}")))
    }

    fn keep_session(&self, session: Arc<dyn Session>) -> Reply {
        let id = self.issued.fetch_add(1, Ordering::Relaxed);
        let reply = Reply::Opened {
            session: id,
            inputs: session.inputs().to_vec(),
            optional_inputs: session.optional_inputs().to_vec(),
            outputs: session.outputs().to_vec(),
        };
        self.sessions.lock().insert(id, session);
        reply
    }

    fn segment(&self, id: u32) -> Result<Arc<Segment>, EngineError> {
        let segment = self.segments.lock().get(&id).cloned();
        segment.ok_or_else(|| EngineError::Failed(format!("there is no segment {id}")))
    }

    fn add_segment(&self, id: u32, file: OwnedFd) -> io::Result<()> {
        let segment = Arc::new(Segment::from_fd(id, file)?);
        self.segments.lock().insert(id, segment);
        Ok(())
    }

    /// The pack with this digest, mapped if it is not yet.
    fn pack(&self, digest: &str, file: OwnedFd) -> Result<Arc<Pack>, EngineError> {
        let mut packs = self.packs.lock();
        if let Some(pack) = packs.get(digest).and_then(Weak::upgrade) {
            return Ok(pack);
        }
        let failed = |error: &dyn std::fmt::Display| {
            EngineError::Failed(format!("prepared weights cannot be mapped: {error}"))
        };
        let known: Digest = digest.parse().map_err(|error| failed(&error))?;
        let pack = Pack::handed_over(file, known).map_err(|error| failed(&error))?;
        let pack = Arc::new(pack);
        packs.retain(|_, pack| pack.strong_count() > 0);
        packs.insert(digest.to_owned(), Arc::downgrade(&pack));
        Ok(pack)
    }

    fn mapped_packs(&self) -> Vec<Arc<Pack>> {
        let packs = self.packs.lock();
        packs.values().filter_map(Weak::upgrade).collect()
    }

    /// Whether a folder is where the server has its drafts: an absolute path that is there.
    fn is_folder(path: &Path) -> bool {
        path.is_absolute() && path.is_dir()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_cpu_time_is_told_by_its_own_signal() {
        let limit = cpu_limit(7);
        assert_eq!(limit.current, Some(7));
        assert!(limit.maximum > limit.current, "{limit:?}");
    }
}

//! The signals that ask the server to end, and one that must not.

use std::future::Future;
use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Duration, Instant};

/// Signals so close to the first are the same request: who signals a process and its group
/// (`timeout`, some supervisors) reaches it twice.
const SAME_REQUEST: Duration = Duration::from_secs(1);

/// Makes a file that grows beyond the process's limit a failed write, which is what whoever writes
/// expects, and not the end of the process.
pub fn outlive_file_limit() -> io::Result<()> {
    signal(SignalKind::from_raw(libc::SIGXFSZ)).map(drop)
}

/// Resolves at the first SIGTERM or SIGINT; one that comes later ends the process at once.
pub fn requested() -> io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        let first = Instant::now();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                if first.elapsed() >= SAME_REQUEST {
                    break;
                }
            }
            tracing::warn!("second signal: ending without waiting");
            crate::process::exit_now(1);
        });
    })
}

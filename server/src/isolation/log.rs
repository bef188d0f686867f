//! What a worker writes to its standard error, as lines of the server's log.

use std::os::fd::OwnedFd;

use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;

/// A longer line is cut into several.
const MOST_LINE: usize = 4096;

/// Follows a worker's standard error to its end.
pub(super) async fn follow(stderr: OwnedFd, model: String, pid: u32) {
    let mut stderr = match pipe::Receiver::from_owned_fd(stderr) {
        Ok(stderr) => stderr,
        Err(error) => {
            tracing::warn!(model, pid, %error, "a worker's messages cannot be read");
            return;
        }
    };
    let mut pending = Vec::new();
    let mut chunk = [0; MOST_LINE];
    loop {
        let read = stderr.read(&mut chunk).await.unwrap_or(0);
        pending.extend_from_slice(&chunk[..read]);
        while let Some(line) = next_line(&mut pending, read == 0) {
            // It may write what it likes: a line of its own must not look like one of ours.
            let line = line.escape_debug();
            tracing::warn!(model, pid, %line, "worker");
        }
        if read == 0 {
            return;
        }
    }
}

fn next_line(pending: &mut Vec<u8>, ended: bool) -> Option<String> {
    let end = pending.iter().position(|&byte| byte == b'\n');
    let (text, rest) = match end {
        Some(end) => (end, end + 1),
        None if pending.len() >= MOST_LINE || (ended && !pending.is_empty()) => {
            (pending.len(), pending.len())
        }
        None => return None,
    };
    let line = String::from_utf8_lossy(&pending[..text]).into_owned();
    pending.drain(..rest);
    Some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_taken_whole_and_the_last_at_the_end() {
        let mut pending = b"one\ntwo\nthr".to_vec();
        assert_eq!(next_line(&mut pending, false).as_deref(), Some("one"));
        assert_eq!(next_line(&mut pending, false).as_deref(), Some("two"));
        assert_eq!(next_line(&mut pending, false), None);
        assert_eq!(next_line(&mut pending, true).as_deref(), Some("thr"));
        assert_eq!(next_line(&mut pending, true), None);
    }

    #[test]
    fn a_line_without_an_end_is_cut() {
        let mut pending = vec![b'x'; MOST_LINE];
        assert_eq!(next_line(&mut pending, false).unwrap().len(), MOST_LINE);
    }
}

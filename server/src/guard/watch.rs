//! Certificates, tokens and keys that change while the server runs.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::credentials::Credentials;
use super::jwt::Verifier;
use super::{Guard, GuardConfig, GuardError, unix_seconds};

/// How often files are looked at.
const INTERVAL: Duration = Duration::from_secs(2);

/// What a file looked like: another one in its place differs in something of this.
type Look = Option<(u64, u64, u64, i64, i64)>;

fn look(path: &Path) -> Look {
    let of = |file: Metadata| {
        (
            file.dev(),
            file.ino(),
            file.len(),
            file.mtime(),
            file.mtime_nsec(),
        )
    };
    std::fs::metadata(path).ok().map(of)
}

/// Files that are read together.
#[derive(Debug)]
pub(super) struct Watched {
    what: &'static str,
    files: Vec<PathBuf>,
    seen: Vec<Look>,
    /// They are not in use because they could not be read, whatever they hold.
    unread: bool,
    reload: fn(&Guard) -> Result<(), GuardError>,
}

impl Watched {
    /// What they hold, as metrics name it.
    pub(super) fn what(&self) -> &'static str {
        self.what
    }

    fn has_changed(&mut self) -> bool {
        let seen: Vec<Look> = self.files.iter().map(|path| look(path)).collect();
        let before = std::mem::replace(&mut self.seen, seen);
        before != self.seen
    }
}

#[cfg(test)]
impl Watched {
    pub(super) fn replace_reload(&mut self, reload: fn(&Guard) -> Result<(), GuardError>) {
        self.reload = reload;
    }
}

/// The files of a configuration, as they look now.
pub(super) fn watched(config: &GuardConfig) -> Vec<Watched> {
    let mut watched = Vec::new();
    let mut add = |what, files: Vec<&Path>, reload| {
        watched.push(Watched {
            what,
            seen: files.iter().map(|path| look(path)).collect(),
            files: files.into_iter().map(Path::to_owned).collect(),
            unread: false,
            reload,
        });
    };
    if let Some(tls) = &config.tls {
        let mut files = vec![tls.cert.as_path(), &tls.key];
        files.extend(tls.client_ca.as_deref());
        add("certificate", files, Guard::reload_certificates);
    }
    if let Some(path) = &config.tokens {
        add("tokens", vec![path], Guard::reload_tokens);
    }
    if let Some(jwt) = &config.jwt {
        add("jwt_keys", vec![&jwt.keys], Guard::reload_jwt_keys);
    }
    watched
}

impl Guard {
    fn reload_certificates(&self) -> Result<(), GuardError> {
        if let Some(tls) = &self.tls {
            tls.reload()?;
            self.counters
                .certificate_expires(unix_seconds(tls.expires()));
        }
        Ok(())
    }

    fn reload_tokens(&self) -> Result<(), GuardError> {
        if let (Some(path), Some(credentials)) = (&self.config.tokens, &self.credentials) {
            credentials.store(Arc::new(Credentials::read(path, self.config.quotas)?));
        }
        Ok(())
    }

    fn reload_jwt_keys(&self) -> Result<(), GuardError> {
        if let (Some(config), Some(jwt)) = (&self.config.jwt, &self.jwt) {
            jwt.store(Arc::new(Verifier::read(config, self.config.quotas)?));
        }
        Ok(())
    }

    fn reload(&self, watched: &mut Watched) {
        let is_known = std::mem::take(&mut watched.unread);
        let result = (watched.reload)(self);
        // A lack of descriptors passes without a trace in the files. A token that was taken out
        // must not stay good for that.
        watched.unread = matches!(result, Err(GuardError::Read { .. }));
        if is_known && watched.unread {
            return;
        }
        self.counters.reloaded(watched.what, result.is_ok());
        match result {
            Ok(()) => tracing::info!(what = watched.what, "read again"),
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                tracing::error!(what = watched.what, %error, cause, "kept what was there");
            }
        }
    }

    /// Reads those files again that look different.
    pub(super) fn follow_once(&self, watched: &mut [Watched]) {
        for files in watched {
            if files.has_changed() {
                files.unread = false;
                self.reload(files);
            } else if files.unread {
                self.reload(files);
            }
        }
    }

    /// Reads files again when they change, and at SIGHUP, until `stop` is cancelled.
    pub async fn follow_files(self: Arc<Self>, stop: CancellationToken) {
        let mut watched = std::mem::take(&mut *self.watched.lock());
        if watched.is_empty() {
            return;
        }
        // Only who has something to read again takes the signal from who closes a terminal.
        let mut hangups = match signal(SignalKind::hangup()) {
            Ok(hangups) => hangups,
            Err(error) => return tracing::error!(%error, "cannot listen for SIGHUP"),
        };
        let mut ticks = tokio::time::interval(INTERVAL);
        loop {
            let was_asked = tokio::select! {
                () = stop.cancelled() => return,
                _ = hangups.recv() => true,
                _ = ticks.tick() => false,
            };
            let guard = Arc::clone(&self);
            let work = tokio::task::spawn_blocking(move || {
                if was_asked {
                    watched.iter_mut().for_each(|files| files.seen.clear());
                }
                guard.follow_once(&mut watched);
                watched
            });
            match work.await {
                Ok(back) => watched = back,
                Err(error) => {
                    return tracing::error!(%error, "certificates and tokens stay as they are");
                }
            }
        }
    }
}

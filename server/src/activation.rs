//! Sockets that somebody opened before this process was started, and word to whoever started it:
//! systemd's socket activation and its notifications.

use std::env;
use std::ffi::OsString;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::io::FdFlags;

/// The first descriptor that is handed over.
const FIRST: RawFd = 3;
/// How long a supervisor may take to hear us.
const PATIENCE: Duration = Duration::from_secs(1);
const PROTOCOLS: [&str; 3] = ["http", "grpc", "metrics"];

/// Why the sockets that were handed over cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ActivationError {
    #[error("LISTEN_FDS is '{0}': expected a number")]
    Count(String),
    #[error("LISTEN_FDS hands over {0} sockets: expected at most 3 (http, grpc, metrics)")]
    TooMany(usize),
    #[error("LISTEN_FDNAMES has {names} names for {sockets} sockets")]
    NameCount { names: usize, sockets: usize },
    #[error(
        "the socket on descriptor {descriptor} is named '{name}' (LISTEN_FDNAMES): expected http, grpc or metrics"
    )]
    UnknownName { descriptor: RawFd, name: String },
    #[error("two sockets are named '{0}' (LISTEN_FDNAMES)")]
    Twice(&'static str),
    #[error(
        "descriptor {descriptor}, handed over for {protocol}, is not a listening TCP socket: {why}"
    )]
    Unusable {
        descriptor: RawFd,
        protocol: &'static str,
        why: String,
    },
    #[error("a socket was handed over for {0}, which is switched off (--allow-{0})")]
    SwitchedOff(&'static str),
}

/// The listeners that were handed over.
#[derive(Debug, Default)]
pub struct Sockets {
    pub http: Option<TcpListener>,
    pub grpc: Option<TcpListener>,
    pub metrics: Option<TcpListener>,
}

impl Sockets {
    fn of(&mut self, protocol: &str) -> &mut Option<TcpListener> {
        match protocol {
            "http" => &mut self.http,
            "grpc" => &mut self.grpc,
            _ => &mut self.metrics,
        }
    }
}

/// What the environment says about how this process was started.
#[derive(Debug, Default)]
pub struct Activation {
    count: Option<OsString>,
    names: Option<OsString>,
    notify: Option<OsString>,
}

impl Activation {
    /// Takes it out of the environment, where no child of ours shall find it. Must be called
    /// before the process has a second thread.
    #[expect(unsafe_code, reason = "the environment can only be changed that way")]
    pub fn take() -> Self {
        let is_ours = env::var("LISTEN_PID").is_ok_and(|pid| pid == std::process::id().to_string());
        let ours = |name| env::var_os(name).filter(|_| is_ours);
        let activation = Self {
            count: ours("LISTEN_FDS"),
            names: ours("LISTEN_FDNAMES"),
            notify: env::var_os("NOTIFY_SOCKET"),
        };
        for name in [
            "LISTEN_PID",
            "LISTEN_FDS",
            "LISTEN_FDNAMES",
            "NOTIFY_SOCKET",
        ] {
            // SAFETY: no other thread exists that could read the environment meanwhile.
            unsafe { env::remove_var(name) }
        }
        activation
    }

    /// The sockets, checked, and closed for children. Can be called once.
    pub fn sockets(&self) -> Result<Sockets, ActivationError> {
        let Some(count) = &self.count else {
            return Ok(Sockets::default());
        };
        let count = count.to_string_lossy();
        let count: usize = count
            .parse()
            .map_err(|_| ActivationError::Count(count.chars().take(32).collect()))?;
        if count > PROTOCOLS.len() {
            return Err(ActivationError::TooMany(count));
        }
        let names = self.names.as_ref().map(|names| names.to_string_lossy());
        let mut sockets = Sockets::default();
        for (descriptor, protocol) in (FIRST..).zip(protocols(names.as_deref(), count)?) {
            let listener = adopt(descriptor).map_err(|why| ActivationError::Unusable {
                descriptor,
                protocol,
                why,
            })?;
            if sockets.of(protocol).replace(listener).is_some() {
                return Err(ActivationError::Twice(protocol));
            }
        }
        Ok(sockets)
    }

    /// Where to tell how the process is doing.
    pub fn notifier(&self) -> Notifier {
        Notifier {
            address: self.notify.clone(),
        }
    }
}

/// Which socket is for what: by name, or by order when nobody has given them names of ours.
fn protocols(names: Option<&str>, count: usize) -> Result<Vec<&'static str>, ActivationError> {
    let names: Vec<&str> = match names {
        Some(names) if !names.is_empty() => names.split(':').collect(),
        _ => return Ok(PROTOCOLS[..count].to_vec()),
    };
    if names.len() != count {
        return Err(ActivationError::NameCount {
            names: names.len(),
            sockets: count,
        });
    }
    // systemd's own names for sockets that were given none: the unit's, or this.
    let is_given = |name: &&str| !name.ends_with(".socket") && *name != "unknown";
    if !names.iter().any(is_given) {
        return Ok(PROTOCOLS[..count].to_vec());
    }
    let named = (FIRST..).zip(names).map(|(descriptor, name)| {
        let known = PROTOCOLS.into_iter().find(|protocol| *protocol == name);
        known.ok_or_else(|| ActivationError::UnknownName {
            descriptor,
            name: name.chars().take(64).collect(),
        })
    });
    let named: Vec<&'static str> = named.collect::<Result<_, _>>()?;
    let twice = |protocol: &&str| named.iter().filter(|name| *name == protocol).count() > 1;
    match PROTOCOLS.into_iter().find(|protocol| twice(protocol)) {
        Some(protocol) => Err(ActivationError::Twice(protocol)),
        None => Ok(named),
    }
}

/// Makes a listener of a descriptor that was handed over.
#[expect(unsafe_code, reason = "a number is made a descriptor")]
fn adopt(descriptor: RawFd) -> Result<TcpListener, String> {
    // SAFETY: asks for flags of a number, which may be no descriptor at all.
    if unsafe { libc::fcntl(descriptor, libc::F_GETFD) } == -1 {
        return Err(io::Error::last_os_error().to_string());
    }
    // SAFETY: it is open, was handed over to this process, and is taken only here.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    if socket_option(&descriptor, libc::SO_TYPE)? != libc::SOCK_STREAM {
        return Err("it carries no streams".to_owned());
    }
    if !matches!(
        socket_option(&descriptor, libc::SO_DOMAIN)?,
        libc::AF_INET | libc::AF_INET6
    ) {
        return Err("it is of another family than IPv4 and IPv6".to_owned());
    }
    if socket_option(&descriptor, libc::SO_ACCEPTCONN)? == 0 {
        return Err("it does not listen".to_owned());
    }
    rustix::io::fcntl_setfd(&descriptor, FdFlags::CLOEXEC).map_err(|error| error.to_string())?;
    let listener = TcpListener::from(descriptor);
    let prepared = listener.set_nonblocking(true);
    prepared.map_err(|error| error.to_string())?;
    Ok(listener)
}

#[expect(unsafe_code, reason = "the standard library does not ask for these")]
fn socket_option(descriptor: &OwnedFd, option: libc::c_int) -> Result<libc::c_int, String> {
    let mut value: libc::c_int = 0;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: both pointers are to locals of the sizes that are told.
    let result = unsafe {
        libc::getsockopt(
            descriptor.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    match result {
        0 => Ok(value),
        _ => Err(io::Error::last_os_error().to_string()),
    }
}

/// Tells a supervisor how the process is doing; says nothing when there is none.
#[derive(Clone, Debug, Default)]
pub struct Notifier {
    address: Option<OsString>,
}

impl Notifier {
    /// The server answers.
    pub fn ready(&self) {
        self.tell("READY=1");
    }

    /// The server is on its way out.
    pub fn stopping(&self) {
        self.tell("STOPPING=1");
    }

    fn tell(&self, state: &str) {
        let Some(address) = &self.address else {
            return;
        };
        let bytes = address.as_bytes();
        let told = match bytes.strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name),
            None => SocketAddr::from_pathname(address),
        }
        .and_then(|address| {
            let socket = UnixDatagram::unbound()?;
            // It may be busy for a moment, but nobody may hold us up.
            socket.set_write_timeout(Some(PATIENCE))?;
            socket.send_to_addr(state.as_bytes(), &address)
        });
        if let Err(error) = told {
            tracing::warn!(%error, state, "cannot tell the supervisor (NOTIFY_SOCKET)");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_told_by_name_or_by_order() {
        for (names, count, expected) in [
            (None, 0, &[][..]),
            (None, 2, &["http", "grpc"]),
            (Some(""), 1, &["http"]),
            (Some("grpc"), 1, &["grpc"]),
            (Some("metrics:http:grpc"), 3, &["metrics", "http", "grpc"]),
            // What systemd calls the sockets of one unit that gave them no name.
            (
                Some("dormouse.socket:dormouse.socket"),
                2,
                &["http", "grpc"],
            ),
            (Some("unknown:unknown:unknown"), 3, &PROTOCOLS),
        ] {
            assert_eq!(protocols(names, count).unwrap(), expected, "{names:?}");
        }
    }

    #[test]
    fn wrong_names_are_refused() {
        for (names, count, expected) in [
            ("http", 2, "has 1 names for 2 sockets"),
            ("http:web", 2, "descriptor 4 is named 'web'"),
            ("http:http", 2, "two sockets are named 'http'"),
            ("http:dormouse.socket", 2, "named 'dormouse.socket'"),
        ] {
            let refused = protocols(Some(names), count).unwrap_err().to_string();
            assert!(refused.contains(expected), "{names}: {refused}");
        }
    }

    #[test]
    fn wrong_counts_are_refused() {
        let with = |count: &str| Activation {
            count: Some(count.into()),
            ..Activation::default()
        };
        let refused = |count| with(count).sockets().unwrap_err().to_string();
        assert!(refused("three").contains("expected a number"));
        assert!(refused("4").contains("at most 3"));
        assert!(with("0").sockets().unwrap().http.is_none());
    }

    #[test]
    fn only_listening_tcp_sockets_are_adopted() {
        use std::os::fd::IntoRawFd;
        use std::os::unix::net::UnixListener;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let adopted = adopt(listener.into_raw_fd()).unwrap();
        assert_eq!(adopted.local_addr().unwrap(), address);
        let flags = rustix::io::fcntl_getfd(&adopted).unwrap();
        assert!(flags.contains(FdFlags::CLOEXEC));
        let connected = std::net::TcpStream::connect(address).unwrap();
        let why = adopt(connected.into_raw_fd()).unwrap_err();
        assert_eq!(why, "it does not listen");
        let folder = tempfile::tempdir().unwrap();
        let unix = UnixListener::bind(folder.path().join("s")).unwrap();
        assert!(adopt(unix.into_raw_fd()).unwrap_err().contains("family"));
        let file = tempfile::tempfile().unwrap();
        assert!(adopt(file.into_raw_fd()).is_err());
        assert!(adopt(1 << 20).is_err());
    }

    #[test]
    fn a_supervisor_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let supervisor = UnixDatagram::bind(&path).unwrap();
        let notifier = Notifier {
            address: Some(path.into()),
        };
        notifier.ready();
        notifier.stopping();
        let mut said = [0; 64];
        let length = supervisor.recv(&mut said).unwrap();
        assert_eq!(&said[..length], b"READY=1");
        let length = supervisor.recv(&mut said).unwrap();
        assert_eq!(&said[..length], b"STOPPING=1");
        Notifier::default().ready();
    }
}

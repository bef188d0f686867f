//! A pair of connected sockets that carry messages whole, with file descriptors beside them.
//!
//! A message has at most [`MOST_INLINE`] bytes; a longer one is put into a sealed memory file and
//! its descriptor sent in its place, up to [`MOST_BYTES`]. The kernel keeps messages apart.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

use super::segment::Blob;

/// What a message may have without being put into a memory file.
const MOST_INLINE: usize = 32 << 10;
/// What any message may have.
const MOST_BYTES: u64 = 256 << 20;
/// The kernel takes no more descriptors with one message.
pub(super) const MOST_FDS: usize = 253;

const INLINE: u8 = 0;
const IN_BLOB: u8 = 1;

/// One end of a pair.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

/// Where a message is received; used for one after another.
#[derive(Debug)]
pub(super) struct Inbox {
    packet: Vec<u8>,
    len: usize,
    blob: Option<Blob>,
}

impl Default for Inbox {
    fn default() -> Self {
        Self {
            packet: vec![0; MOST_INLINE + 1],
            len: 1,
            blob: None,
        }
    }
}

impl Inbox {
    /// The message that was received last.
    pub(super) fn message(&self) -> &[u8] {
        match &self.blob {
            Some(blob) => blob.bytes(),
            None => &self.packet[1..self.len],
        }
    }
}

impl From<OwnedFd> for Socket {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Socket {
    /// Two ends of one connection; neither is inherited by programs that are started.
    pub(super) fn pair() -> io::Result<(Self, Self)> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((Self(ours), Self(theirs)))
    }

    pub(super) fn into_fd(self) -> OwnedFd {
        self.0
    }

    /// Sends one message. Fails when the other end is gone.
    pub(super) fn send(&self, message: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let flags = SendFlags::NOSIGNAL;
        if message.len() <= MOST_INLINE {
            return self.send_packet(&[&[INLINE], message], fds, flags);
        }
        let blob = Blob::new(message.len(), |room| room.copy_from_slice(message))?;
        let mut with_blob = vec![blob.as_fd()];
        with_blob.extend_from_slice(fds);
        self.send_packet(&[&[IN_BLOB]], &with_blob, flags)
    }

    /// Sends a short message, or fails when that would take waiting.
    pub(super) fn try_send(&self, message: &[u8]) -> io::Result<()> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        self.send_packet(&[&[INLINE], message], &[], flags)
    }

    fn send_packet(
        &self,
        parts: &[&[u8]],
        fds: &[BorrowedFd<'_>],
        flags: SendFlags,
    ) -> io::Result<()> {
        if fds.len() > MOST_FDS {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{} files are too many for one message", fds.len()),
            ));
        }
        let parts: smallvec::SmallVec<[IoSlice<'_>; 2]> =
            parts.iter().map(|part| IoSlice::new(part)).collect();
        let mut space = Vec::new();
        let rights = SendAncillaryMessage::ScmRights(fds);
        if !fds.is_empty() {
            space.resize(rights.size(), MaybeUninit::uninit());
        }
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(rights) {
            return Err(io::Error::other("no room for the files of a message"));
        }
        loop {
            match rustix::net::sendmsg(&self.0, &parts, &mut control, flags) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits for a message and returns the files that came with it; none when the other end is
    /// gone.
    pub(super) fn receive(&self, inbox: &mut Inbox) -> io::Result<Option<Vec<OwnedFd>>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        inbox.blob = None;
        inbox.len = 1;
        let (got, mut fds) = loop {
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut into = [IoSliceMut::new(&mut inbox.packet)];
            let flags = RecvFlags::CMSG_CLOEXEC;
            match rustix::net::recvmsg(&self.0, &mut into, &mut control, flags) {
                Ok(got) => break (got, taken(&mut control)),
                Err(rustix::io::Errno::INTR) => {}
                // A peer that died with unread messages.
                Err(rustix::io::Errno::CONNRESET) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        };
        if got
            .flags
            .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
        {
            return Err(broken("a message is longer than any may be"));
        }
        if got.bytes == 0 {
            return Ok(None);
        }
        match inbox.packet[0] {
            INLINE => inbox.len = got.bytes,
            IN_BLOB if !fds.is_empty() => {
                inbox.blob = Some(Blob::from_fd(fds.remove(0), MOST_BYTES)?);
            }
            _ => return Err(broken("a message of an unknown form")),
        }
        Ok(Some(fds))
    }
}

fn taken(control: &mut RecvAncillaryBuffer<'_>) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    fds
}

pub(super) fn broken(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_their_files_arrive_whole_and_in_order() {
        let (ours, theirs) = Socket::pair().unwrap();
        let long: Vec<u8> = (0..MOST_INLINE * 3).map(|n| (n % 251) as u8).collect();
        let file = tempfile::tempfile().unwrap();
        ours.send(b"short", &[]).unwrap();
        ours.send(&long, &[file.as_fd()]).unwrap();
        let mut inbox = Inbox::default();
        let fds = theirs.receive(&mut inbox).unwrap().unwrap();
        assert_eq!((inbox.message(), fds.len()), (&b"short"[..], 0));
        let fds = theirs.receive(&mut inbox).unwrap().unwrap();
        assert_eq!((inbox.message(), fds.len()), (&long[..], 1));
        drop(ours);
        assert!(theirs.receive(&mut inbox).unwrap().is_none());
    }

    #[test]
    fn a_closed_end_fails_the_sender() {
        let (ours, theirs) = Socket::pair().unwrap();
        drop(theirs);
        assert!(ours.send(b"anybody", &[]).is_err());
    }
}

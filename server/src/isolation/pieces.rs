//! What a server makes of a worker's words, for `fuzz`.

use std::sync::Arc;

use super::messages::{Hello, Notice, Reply, Request};
use super::segment::{Lease, Pool};
use super::session::take_up;
use crate::request::Tensor;

/// Memory that is shared with nobody.
#[derive(Clone, Debug)]
pub(crate) struct Shared(Arc<Pool>);

impl Shared {
    pub(crate) fn new() -> Self {
        Self(Pool::new(1 << 20))
    }

    /// The outputs that a reply tells of, if it tells of any and they are within bounds. The
    /// memory has `bytes` where a worker writes them.
    pub(crate) fn outputs(&self, reply: &[u8], bytes: &[u8]) -> Option<Vec<Tensor>> {
        let Ok(Reply::Ran(mut placed)) = Reply::decode(reply) else {
            return None;
        };
        let room = self.room(bytes);
        // Which segment it is, is up to the pool; any other is refused.
        for output in &mut placed {
            output.segment = output.segment.wrapping_add(room.segment.id);
        }
        let wanted = placed.len();
        take_up(placed, wanted, room).map(|(tensors, _)| tensors)
    }

    fn room(&self, bytes: &[u8]) -> Lease {
        let room = self.0.lease(bytes.len()).expect("there is memory for it");
        assert!(
            room.segment.write(0, bytes),
            "it is as long as was asked for"
        );
        room
    }
}

/// Reads a message of each kind and writes it again; what is read then is the same.
pub(crate) fn is_stable(message: &[u8]) -> bool {
    let mut read = false;
    macro_rules! check {
        ($kind:ty) => {
            if let Ok(message) = <$kind>::decode(message) {
                let again = <$kind>::decode(message.encode().bytes());
                assert_eq!(again.as_ref(), Ok(&message));
                read = true;
            }
        };
    }
    check!(Reply);
    check!(Request);
    check!(Notice);
    if let Ok(hello) = Hello::decode(message) {
        let again = Hello::decode(hello.encode().bytes()).map(|again| format!("{again:?}"));
        assert_eq!(again, Ok(format!("{hello:?}")));
        read = true;
    }
    read
}

//! Whether the memory that a model held came back to the system.

use std::sync::Arc;

use parking_lot::Mutex;

/// What may be missing without a word: the heap keeps some of what is freed, and so does whoever
/// answers meanwhile.
const UNREMARKABLE: u64 = 32 << 20;

/// Work that changes how much memory the process has: loads, preparations and closings. The
/// kernel counts pages for all of them together, so that only who is alone can tell what is its own.
#[derive(Debug, Default)]
pub struct Moves {
    state: Mutex<MovesState>,
}

#[derive(Debug, Default)]
struct MovesState {
    under_way: u64,
    begun: u64,
}

/// One of [`Moves`], until it is dropped.
#[derive(Debug)]
pub struct Move {
    moves: Arc<Moves>,
    number: u64,
    began_alone: bool,
}

impl Moves {
    pub fn begin(self: &Arc<Self>) -> Move {
        let mut state = self.state.lock();
        state.begun += 1;
        state.under_way += 1;
        Move {
            moves: Arc::clone(self),
            number: state.begun,
            began_alone: state.under_way == 1,
        }
    }
}

impl Move {
    /// Whether nothing else has been under way since it began.
    pub fn is_alone(&self) -> bool {
        self.began_alone && self.moves.state.lock().begun == self.number
    }
}

impl Drop for Move {
    fn drop(&mut self) {
        self.moves.state.lock().under_way -= 1;
    }
}

/// What the process has without files behind it, and how much of that sessions hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Balance {
    pub anonymous_bytes: u64,
    pub live_bytes: u64,
}

/// What sessions gave up, and what of it the process still has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreturned {
    pub freed_bytes: u64,
    pub bytes: u64,
}

impl Unreturned {
    pub fn between(before: Balance, after: Balance) -> Self {
        let freed_bytes = before.live_bytes.saturating_sub(after.live_bytes);
        let returned = before.anonymous_bytes.saturating_sub(after.anonymous_bytes);
        Self {
            freed_bytes,
            bytes: freed_bytes.saturating_sub(returned),
        }
    }

    /// Whether it is more than is to be expected: a tenth, and some.
    pub fn is_remarkable(&self) -> bool {
        self.bytes > UNREMARKABLE && self.bytes > self.freed_bytes / 10
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_not_alone_from_beginning_to_end_cannot_tell() {
        let moves: Arc<Moves> = Arc::default();
        let first = moves.begin();
        assert!(first.is_alone());
        let second = moves.begin();
        assert!(!first.is_alone() && !second.is_alone());
        drop(first);
        assert!(!second.is_alone());
        drop(second);
        let third = moves.begin();
        assert!(third.is_alone());
        drop(moves.begin());
        assert!(!third.is_alone(), "another one came and went");
    }

    #[test]
    fn what_was_freed_and_is_still_there_was_not_returned() {
        let balance = |anonymous: u64, live: u64| Balance {
            anonymous_bytes: anonymous << 20,
            live_bytes: live << 20,
        };
        let between = |before, after| {
            let unreturned = Unreturned::between(before, after);
            (unreturned.bytes >> 20, unreturned.is_remarkable())
        };
        assert_eq!(between(balance(500, 400), balance(100, 0)), (0, false));
        assert_eq!(between(balance(500, 400), balance(200, 0)), (100, true));
        assert_eq!(between(balance(500, 400), balance(130, 0)), (30, false));
        // A tenth of much is much.
        assert_eq!(between(balance(5000, 4000), balance(1350, 0)), (350, false));
        // More than sessions had came back: the heap's part.
        assert_eq!(between(balance(500, 400), balance(50, 0)), (0, false));
        assert_eq!(between(balance(500, 400), balance(600, 450)), (0, false));
    }
}

//! The waiting entries: linked lists through one slab, and a heap of timers over it.
//!
//! Every operation but draining is constant or logarithmic in what waits, a cancellation in the
//! middle included, and nothing allocates once the slab has grown to the usual depth.

use super::{BatchItem, EntryId, ExpiryCause};
use crate::time::Timestamp;

const NONE: u32 = u32::MAX;

/// Slots kept when the queue runs empty; what a burst needed beyond that is given back.
const KEPT_SLOTS: usize = 32;

/// One waiting item.
#[derive(Clone, Debug)]
pub(super) struct Node<T> {
    pub(super) item: T,
    pub(super) rows: u32,
    pub(super) enqueued: Timestamp,
    pub(super) deadline: Option<Timestamp>,
    /// When its queue timeout passes, or passed.
    pub(super) timeout_at: Option<Timestamp>,
    level: u32,
    place: Place,
    sequence: u64,
    prev: u32,
    next: u32,
    /// Its position in the heap of timers.
    timer: u32,
}

/// Which of the lists an entry is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    InTime,
    Delayed,
    Expired(ExpiryCause),
}

impl<T: BatchItem> Node<T> {
    pub(super) fn new(
        item: T,
        enqueued: Timestamp,
        deadline: Option<Timestamp>,
        timeout_at: Option<Timestamp>,
    ) -> Self {
        Self {
            rows: item.rows(),
            item,
            enqueued,
            deadline,
            timeout_at,
            level: 0,
            place: Place::InTime,
            sequence: 0,
            prev: NONE,
            next: NONE,
            timer: NONE,
        }
    }
}

impl<T> Node<T> {
    pub(super) fn level(&self) -> usize {
        self.level as usize
    }

    /// The next moment at which time alone changes what becomes of it, and why.
    fn limit(&self) -> Option<(Timestamp, ExpiryCause)> {
        let deadline = self.deadline.map(|at| (at, ExpiryCause::Deadline));
        let timeout = match self.place {
            Place::InTime => self.timeout_at.map(|at| (at, ExpiryCause::QueueTimeout)),
            Place::Delayed => None,
            Place::Expired(_) => return None,
        };
        match (deadline, timeout) {
            (Some(deadline), Some(timeout)) if deadline.0 <= timeout.0 => Some(deadline),
            (deadline, timeout) => timeout.or(deadline),
        }
    }
}

#[derive(Clone, Debug)]
enum Slot<T> {
    Free { next: u32 },
    Used(Node<T>),
}

/// Compared by time, then by age: what passes at the same moment passes in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Timer {
    at: Timestamp,
    sequence: u64,
    slot: u32,
}

#[derive(Clone, Copy, Debug)]
struct List {
    head: u32,
    tail: u32,
    len: usize,
}

impl List {
    const EMPTY: Self = Self {
        head: NONE,
        tail: NONE,
        len: 0,
    };
}

/// Entries in the order they are served, found also by id and by the end of their patience.
#[derive(Clone, Debug)]
pub(super) struct Queue<T> {
    slots: Vec<Slot<T>>,
    free: u32,
    /// Two lists per level, those in time and those delayed; then the list of the expired.
    lists: Vec<List>,
    /// A binary heap, each entry knowing its position in it.
    timers: Vec<Timer>,
    next_sequence: u64,
    len: usize,
    rows: u64,
}

impl<T> Queue<T> {
    pub(super) fn new(levels: usize) -> Self {
        Self {
            slots: Vec::new(),
            free: NONE,
            lists: vec![List::EMPTY; 2 * levels + 1],
            timers: Vec::new(),
            next_sequence: 0,
            len: 0,
            rows: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.slots.capacity() + self.timers.capacity()
    }

    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    /// Entries that have not expired.
    pub(super) fn in_service(&self) -> usize {
        self.len - self.lists[self.expired_list()].len
    }

    /// Entries of a level that have not expired.
    pub(super) fn level_len(&self, level: usize) -> usize {
        self.lists[2 * level].len + self.lists[2 * level + 1].len
    }

    /// Appends an entry to a level.
    pub(super) fn push(&mut self, level: usize, mut node: Node<T>) -> EntryId {
        node.level = u32::try_from(level).expect("levels fit 32 bits");
        node.sequence = self.next_sequence;
        let sequence = node.sequence;
        self.next_sequence += 1;
        self.len += 1;
        self.rows += u64::from(node.rows);
        let limit = node.limit();
        let slot = match self.free {
            NONE => {
                let slot = u32::try_from(self.slots.len()).expect("entries fit 32 bits");
                self.slots.push(Slot::Used(node));
                slot
            }
            slot => {
                let Slot::Free { next } = self.slots[slot as usize] else {
                    unreachable!("the free list holds free slots");
                };
                self.free = next;
                self.slots[slot as usize] = Slot::Used(node);
                slot
            }
        };
        self.link(slot);
        if let Some((at, _)) = limit {
            self.start_timer(slot, at);
        }
        EntryId { slot, sequence }
    }

    /// Takes out the entry of that id, wherever it is.
    pub(super) fn remove(&mut self, id: EntryId) -> Option<Node<T>> {
        match self.slots.get(id.slot as usize) {
            Some(Slot::Used(node)) if node.sequence == id.sequence => Some(self.take(id.slot)),
            _ => None,
        }
    }

    /// Takes out the entry that is served next.
    pub(super) fn pop_first(&mut self) -> Option<(EntryId, Node<T>)> {
        let slot = self.first()?;
        let node = self.take(slot);
        let sequence = node.sequence;
        Some((EntryId { slot, sequence }, node))
    }

    /// Takes out one expired entry, in the order in which they expired.
    pub(super) fn pop_expired(&mut self) -> Option<(Node<T>, ExpiryCause)> {
        let slot = self.lists[self.expired_list()].head;
        if slot == NONE {
            return None;
        }
        let node = self.take(slot);
        let Place::Expired(cause) = node.place else {
            unreachable!("the expired list holds expired entries");
        };
        Some((node, cause))
    }

    /// When the first of the expired entries was accepted, a moment that is surely past.
    pub(super) fn expired_since(&self) -> Option<Timestamp> {
        let slot = self.lists[self.expired_list()].head;
        (slot != NONE).then(|| self.node(slot).enqueued)
    }

    /// Entries that have not expired, in the order they are served.
    pub(super) fn in_order(&self) -> impl Iterator<Item = &Node<T>> {
        let mut slot = self.first();
        std::iter::from_fn(move || {
            let node = self.node(slot?);
            slot = match node.next {
                NONE => self.first_from(self.list_of(node) + 1),
                next => Some(next),
            };
            Some(node)
        })
    }

    /// The moment at which the next timer passes.
    pub(super) fn next_timer(&self) -> Option<Timestamp> {
        self.timers.first().map(|timer| timer.at)
    }

    /// Applies the timer that passed first, if any has.
    ///
    /// `delays` says whether a queue timeout at that level delays instead of expiring.
    pub(super) fn apply_timer(&mut self, now: Timestamp, delays: impl Fn(usize) -> bool) -> bool {
        let Some(&Timer { slot, .. }) = self.timers.first().filter(|timer| timer.at <= now) else {
            return false;
        };
        let node = self.node(slot);
        let (_, cause) = node.limit().expect("an entry with a timer has a limit");
        let place = match cause {
            ExpiryCause::QueueTimeout if delays(node.level()) => Place::Delayed,
            cause => Place::Expired(cause),
        };
        self.relocate(slot, place);
        true
    }

    /// Lets the entries expire that are served next, as many as given.
    pub(super) fn expire_first(&mut self, count: usize) {
        for _ in 0..count {
            let slot = self.first().expect("as many entries are queued");
            self.relocate(slot, Place::Expired(ExpiryCause::Deadline));
        }
    }

    /// Takes out everything: in the order of service, then the expired.
    pub(super) fn drain(&mut self) -> Vec<T> {
        let mut items = Vec::with_capacity(self.len);
        while let Some((_, node)) = self.pop_first() {
            items.push(node.item);
        }
        while let Some((node, _)) = self.pop_expired() {
            items.push(node.item);
        }
        items
    }

    fn node(&self, slot: u32) -> &Node<T> {
        match &self.slots[slot as usize] {
            Slot::Used(node) => node,
            Slot::Free { .. } => unreachable!("links lead to used slots"),
        }
    }

    fn node_mut(&mut self, slot: u32) -> &mut Node<T> {
        match &mut self.slots[slot as usize] {
            Slot::Used(node) => node,
            Slot::Free { .. } => unreachable!("links lead to used slots"),
        }
    }

    fn relocate(&mut self, slot: u32, place: Place) {
        self.unlink(slot);
        self.stop_timer(slot);
        self.node_mut(slot).place = place;
        self.link(slot);
        if let Some((at, _)) = self.node(slot).limit() {
            self.start_timer(slot, at);
        }
    }

    fn take(&mut self, slot: u32) -> Node<T> {
        self.unlink(slot);
        self.stop_timer(slot);
        let free = Slot::Free { next: self.free };
        let Slot::Used(node) = std::mem::replace(&mut self.slots[slot as usize], free) else {
            unreachable!("links lead to used slots");
        };
        self.free = slot;
        self.len -= 1;
        self.rows -= u64::from(node.rows);
        if self.len == 0 && self.slots.len() > KEPT_SLOTS {
            self.slots = Vec::new();
            self.timers = Vec::new();
            self.free = NONE;
        }
        node
    }

    fn first(&self) -> Option<u32> {
        self.first_from(0)
    }

    fn first_from(&self, list: usize) -> Option<u32> {
        let in_service = &self.lists[list..self.expired_list().max(list)];
        let list = in_service.iter().find(|list| list.head != NONE)?;
        Some(list.head)
    }

    fn expired_list(&self) -> usize {
        self.lists.len() - 1
    }

    fn list_of(&self, node: &Node<T>) -> usize {
        match node.place {
            Place::InTime => 2 * node.level(),
            Place::Delayed => 2 * node.level() + 1,
            Place::Expired(_) => self.expired_list(),
        }
    }

    fn link(&mut self, slot: u32) {
        let list = self.list_of(self.node(slot));
        let tail = self.lists[list].tail;
        let node = self.node_mut(slot);
        node.prev = tail;
        node.next = NONE;
        match tail {
            NONE => self.lists[list].head = slot,
            tail => self.node_mut(tail).next = slot,
        }
        self.lists[list].tail = slot;
        self.lists[list].len += 1;
    }

    fn unlink(&mut self, slot: u32) {
        let node = self.node(slot);
        let (list, prev, next) = (self.list_of(node), node.prev, node.next);
        match prev {
            NONE => self.lists[list].head = next,
            prev => self.node_mut(prev).next = next,
        }
        match next {
            NONE => self.lists[list].tail = prev,
            next => self.node_mut(next).prev = prev,
        }
        self.lists[list].len -= 1;
    }

    fn start_timer(&mut self, slot: u32, at: Timestamp) {
        let sequence = self.node(slot).sequence;
        let timer = Timer { at, sequence, slot };
        self.timers.push(timer);
        self.sift_up(self.timers.len() - 1);
    }

    fn stop_timer(&mut self, slot: u32) {
        let position = std::mem::replace(&mut self.node_mut(slot).timer, NONE);
        if position == NONE {
            return;
        }
        let position = position as usize;
        self.timers.swap_remove(position);
        if position < self.timers.len() {
            let position = self.sift_up(position);
            self.sift_down(position);
        }
    }

    fn sift_up(&mut self, mut position: usize) -> usize {
        while position > 0 {
            let parent = (position - 1) / 2;
            if self.timers[parent] <= self.timers[position] {
                break;
            }
            self.timers.swap(parent, position);
            self.note_position(position);
            position = parent;
        }
        self.note_position(position);
        position
    }

    fn sift_down(&mut self, mut position: usize) {
        loop {
            let left = 2 * position + 1;
            let Some(smaller) = (left..self.timers.len().min(left + 2))
                .min_by_key(|&child| self.timers[child])
                .filter(|&child| self.timers[child] < self.timers[position])
            else {
                break;
            };
            self.timers.swap(smaller, position);
            self.note_position(position);
            position = smaller;
        }
        self.note_position(position);
    }

    fn note_position(&mut self, position: usize) {
        let Timer { slot, .. } = self.timers[position];
        // There are never more timers than slots, and slots fit 32 bits.
        self.node_mut(slot).timer = position as u32;
    }
}

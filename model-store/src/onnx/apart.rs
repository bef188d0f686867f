//! Takes the weights out of a model's file, so that they are read once, to where they are used, and
//! whoever builds a session parses nothing but the graph.

use std::fs::File;
use std::io;
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::rewrite::Rewrite;
use super::sites::{SiteData, TensorSite};
use super::wire::{ReadAt, Span};
use super::{GraphError, walk};
use crate::graph::ExternalData;

/// Smaller tensors stay in the graph: some of them are shapes, which are needed while it is read.
const SMALLEST: u64 = 4 << 10;
/// The same for whole numbers, which may be indices as well.
const SMALLEST_INDICES: u64 = 64 << 10;
/// Where tensors begin: kernels read whole lines of the processor's cache.
const ALIGNMENT: u64 = 64;
/// What one thread reads at a time.
const CHUNK: usize = 4 << 20;
/// More threads than this do not read faster.
const MOST_THREADS: usize = 8;

/// A model's graph, and where in its file the weights are that it refers to instead of having them.
#[derive(Debug)]
pub struct TakenApart {
    pub graph: Vec<u8>,
    pieces: Vec<Piece>,
    size: u64,
}

/// One tensor's data.
#[derive(Debug)]
struct Piece {
    /// In the file.
    from: Span,
    /// In what is read of it.
    to: u64,
}

impl TakenApart {
    /// Looks a file through; its weights stay unread. The graph refers to them as to data in a file of
    /// the name `location`. None when fewer bytes than `worthwhile` can be taken out, or when the graph
    /// refers to other files already.
    pub fn of(file: &File, location: &str, worthwhile: u64) -> Result<Option<Self>, GraphError> {
        let unreadable = |cause| GraphError::Read { offset: 0, cause };
        let size = file.metadata().map_err(unreadable)?.len();
        let source = OnDisk { file, size };
        let walked = walk(&source)?;
        let mut rewrite = Rewrite {
            graph: walked.graph.start,
            ..Rewrite::default()
        };
        let mut pieces = Vec::new();
        let mut end = 0u64;
        for site in &walked.tensors {
            let Some(from) = taken_out(site) else {
                continue;
            };
            let to = end.next_multiple_of(ALIGNMENT);
            end = to + from.len();
            let place = ExternalData {
                location: location.to_owned(),
                offset: to,
                length: Some(from.len()),
            };
            rewrite.places.insert(site.message.start, place);
            pieces.push(Piece { from, to });
        }
        if end < worthwhile || !walked.summary.external.is_empty() {
            return Ok(None);
        }
        Ok(Some(Self {
            graph: rewrite.apply(&source)?,
            pieces,
            size: end,
        }))
    }

    /// How many bytes [`TakenApart::read`] fills.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Reads the weights, on several threads. `to` has [`TakenApart::size`] bytes, and what lies between
    /// two weights stays as it is.
    pub fn read(&self, file: &File, to: &mut [u8]) -> io::Result<()> {
        let mut chunks = Vec::new();
        let (mut rest, mut at) = (to, 0u64);
        for piece in &self.pieces {
            let room = std::mem::take(&mut rest);
            let (_, room) = room.split_at_mut((piece.to - at) as usize);
            let (room, after) = room.split_at_mut(piece.from.len() as usize);
            let from = (piece.from.start..).step_by(CHUNK);
            chunks.extend(room.chunks_mut(CHUNK).zip(from));
            (rest, at) = (after, piece.to + piece.from.len());
        }
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let threads = cores.min(MOST_THREADS).min(chunks.len());
        let chunks = Mutex::new(chunks.into_iter());
        let next = || chunks.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || {
            while let Some((room, from)) = next() {
                file.read_exact_at(room, from)?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let others: Vec<_> = (1..threads)
                .filter_map(|_| {
                    let builder = thread::Builder::new().name("read-weights".to_owned());
                    // What it would have read the others do.
                    builder.spawn_scoped(scope, work).ok()
                })
                .collect();
            let own = work();
            for other in others {
                let panicked = |_| Err(io::Error::other("a reading thread panicked"));
                other.join().unwrap_or_else(panicked)?;
            }
            own
        })
    }
}

/// Where a tensor's data is, if it can be taken out of the graph.
fn taken_out(site: &TensorSite) -> Option<Span> {
    let is_initializer = !site.in_subgraph && !site.is_constant && !site.is_sparse;
    // Those whose elements have whole bytes of one kind.
    let is_plain = matches!(site.element, 1..=7 | 10..=13 | 16);
    let smallest = match site.element {
        6 | 7 => SMALLEST_INDICES,
        _ => SMALLEST,
    };
    match site.data {
        SiteData::Inline(span)
            if is_initializer
                && is_plain
                && span.len() > smallest
                && site.bytes == Some(span.len()) =>
        {
            Some(span)
        }
        _ => None,
    }
}

struct OnDisk<'f> {
    file: &'f File,
    size: u64,
}

impl ReadAt for OnDisk<'_> {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buffer, offset)
    }
}

#[cfg(test)]
mod tests;

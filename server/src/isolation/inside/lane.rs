//! One conversation of a worker: a request, its answer, the next.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use dormouse_model_store::spec::SessionSpec;

use super::super::messages::{PackedWeight, Placed, Reply, Request, RunRequest, SourceForm};
use super::super::segment::{Blob, Segment, slice};
use super::super::session::aligned;
use super::super::socket::{Inbox, Socket, broken};
use super::Shared;
use super::fault::Point;
use crate::engine::{
    EngineError, GraphBytes, ModelBytes, OptimizeError, Packing, PreparedBytes, SharedWeight,
};
use crate::memory;
use crate::request::Tensor;

/// How much of a map is brought in at a time, and by how many threads.
const CHUNK: u64 = 2 << 20;
const POPULATORS: u64 = 2;

/// Answers what is asked on a lane until the server closes it. Fails when what is asked makes no
/// sense, or the answer cannot be given.
pub(super) fn serve(shared: &Arc<Shared>, lane: &Socket) -> io::Result<()> {
    let mut inbox = Inbox::default();
    while let Some(fds) = lane.receive(&mut inbox)? {
        let request = Request::decode(inbox.message()).map_err(io::Error::other)?;
        let answered = catch_unwind(AssertUnwindSafe(|| match request {
            Request::Run(run) => ran(shared, run, fds).map(Answer::Ran),
            request => other(shared, request, fds),
        }));
        let answer = answered.unwrap_or_else(|_| failed("the engine panicked"));
        let (reply, blob) = match answer {
            Ok(Answer::Plain(reply)) => (reply, None),
            Ok(Answer::WithBlob(reply, blob)) => (reply, Some(blob)),
            Ok(Answer::Ran(output)) => match output.placed(shared, lane, &mut inbox)? {
                Some(reply) => (reply, None),
                None => return Ok(()),
            },
            Err(EngineError::Terminated) => (Reply::Terminated, None),
            Err(error) => (Reply::Failed(error.to_string()), None),
        };
        let fds: Vec<BorrowedFd<'_>> = blob.iter().map(Blob::as_fd).collect();
        lane.send(reply.encode().bytes(), &fds)?;
    }
    Ok(())
}

enum Answer {
    Plain(Reply),
    WithBlob(Reply, Blob),
    Ran(Output),
}

fn failed<T>(why: impl Into<String>) -> Result<T, EngineError> {
    Err(EngineError::Failed(why.into()))
}

fn other(shared: &Shared, request: Request, fds: Vec<OwnedFd>) -> Result<Answer, EngineError> {
    let engine = &shared.engine;
    let mut fds = fds.into_iter();
    match request {
        Request::Open {
            session,
            effort,
            source,
        } => {
            shared.faults.strike(Point::Open);
            let opened = engine.open(model(&source, fds.next())?, &session, effort)?;
            Ok(Answer::Plain(shared.keep_session(opened)))
        }
        Request::OpenPrepared {
            session,
            packing,
            family,
            packs,
            weights,
            populate,
        } => {
            shared.faults.strike(Point::Open);
            let stored = Stored {
                family,
                packs,
                weights,
                populate,
            };
            let opened = open_prepared(shared, stored, (&session, packing), fds)?;
            Ok(Answer::Plain(opened))
        }
        Request::Optimize {
            session,
            source,
            scratch,
        } => {
            if !Shared::is_folder(&scratch) {
                return failed("the folder for what is prepared is not there");
            }
            shared.faults.strike(Point::Optimize);
            match engine.optimize(model(&source, fds.next())?, &session, &scratch) {
                Ok(optimized) => {
                    let graph = optimized.graph;
                    let blob = Blob::new(graph.len(), |room| room.copy_from_slice(&graph))
                        .map_err(|error| EngineError::Failed(error.to_string()))?;
                    let reply = Reply::Optimized {
                        tensors: optimized.tensors,
                        by_rows: optimized.by_rows,
                        data_file: optimized.data_file,
                    };
                    Ok(Answer::WithBlob(reply, blob))
                }
                Err(OptimizeError::NotPreparable(why)) => {
                    Ok(Answer::Plain(Reply::NotPreparable(why)))
                }
                Err(OptimizeError::Engine(error)) => Err(error),
            }
        }
        Request::Release { session } => {
            shared.session(session)?.release_memory();
            engine.release_memory();
            for pack in shared.mapped_packs() {
                pack.drop_pages();
            }
            memory::release_memory();
            Ok(Answer::Plain(Reply::Done))
        }
        Request::Run(_) | Request::Room { .. } => failed("room was given that nobody asked for"),
    }
}

/// A model as the server handed it over.
fn model(source: &SourceForm, file: Option<OwnedFd>) -> Result<ModelBytes, EngineError> {
    let Some(file) = file else {
        return failed("a model was announced that did not come");
    };
    let (graph, external) = match source {
        SourceForm::File => {
            return Ok(ModelBytes {
                graph: GraphBytes::File(file.into()),
                external: Vec::new(),
            });
        }
        SourceForm::Blob { graph, external } => (*graph, external),
    };
    let blob =
        Blob::from_fd(file, u64::MAX).map_err(|error| EngineError::Failed(error.to_string()))?;
    let mut rest = blob.bytes();
    let mut take = |len: usize| match rest.split_at_checked(len) {
        None => failed("a model is shorter than it was announced"),
        Some((part, after)) => {
            rest = after;
            Ok(part.to_vec())
        }
    };
    let graph = take(graph)?;
    let external = external.iter();
    let external = external.map(|(name, len)| Ok((name.clone(), take(*len)?)));
    Ok(ModelBytes::in_memory(
        graph,
        external.collect::<Result<_, EngineError>>()?,
    ))
}

/// A prepared model as a request describes it.
struct Stored {
    family: Option<[u8; 32]>,
    packs: Vec<String>,
    weights: Vec<PackedWeight>,
    populate: bool,
}

fn open_prepared(
    shared: &Shared,
    stored: Stored,
    (session, packing): (&SessionSpec, Packing),
    mut fds: impl ExactSizeIterator<Item = OwnedFd>,
) -> Result<Reply, EngineError> {
    let Some(graph) = fds.next().filter(|_| fds.len() == stored.packs.len()) else {
        return failed("a prepared model was announced that did not come");
    };
    let graph =
        Blob::from_fd(graph, u64::MAX).map_err(|error| EngineError::Failed(error.to_string()))?;
    let mut packs = Vec::new();
    for (digest, file) in stored.packs.iter().zip(fds) {
        packs.push(shared.pack(digest, file)?);
    }
    if stored.populate {
        for pack in &packs {
            for part in 0..POPULATORS {
                let pack = Arc::clone(pack);
                // What is not brought in ahead of its use comes with it.
                let _ = std::thread::Builder::new().spawn(move || {
                    let mut from = part * CHUNK;
                    while from < pack.len() && pack.populate(from, CHUNK).is_ok() {
                        from += POPULATORS * CHUNK;
                    }
                });
            }
        }
    }
    let mut weights = Vec::new();
    for weight in stored.weights {
        let pack = packs.get(weight.pack);
        let end = weight.offset.checked_add(weight.len);
        let (Some(pack), Some(end)) = (pack, end) else {
            return failed(format!("weight '{}' lies nowhere", weight.name));
        };
        let Some(data) = PreparedBytes::part(pack, weight.offset..end) else {
            return failed(format!("weight '{}' lies outside its pack", weight.name));
        };
        weights.push(SharedWeight {
            name: weight.name,
            element_type: weight.element_type,
            dims: weight.dims,
            data,
        });
    }
    let prepared = PreparedBytes {
        graph: graph.into_bytes(),
        weights,
        family: stored.family,
    };
    let opened = shared.engine.open_prepared(prepared, session, packing)?;
    Ok(shared.keep_session(opened))
}

/// What a run gave, and where it is to go.
struct Output {
    tensors: Vec<Tensor>,
    room: Arc<Segment>,
}

fn ran(shared: &Shared, run: RunRequest, fds: Vec<OwnedFd>) -> Result<Output, EngineError> {
    for (&id, file) in run.new.iter().zip(fds) {
        shared
            .add_segment(id, file)
            .map_err(|error| EngineError::Failed(error.to_string()))?;
    }
    if !run.forgotten.is_empty() {
        let mut segments = shared.segments.lock();
        for id in &run.forgotten {
            segments.remove(id);
        }
    }
    let mut inputs = Vec::with_capacity(run.inputs.len());
    for (index, placed) in run.inputs {
        let segment = shared.segment(placed.segment)?;
        let range = placed.offset..placed.offset.saturating_add(placed.len);
        let Some(data) = slice(&segment, range, ()) else {
            return failed("an input lies outside its segment");
        };
        inputs.push((
            index,
            Tensor {
                datatype: placed.datatype,
                shape: placed.shape,
                data,
            },
        ));
    }
    let session = shared.session(run.session)?;
    let room = shared.segment(run.room)?;
    let stop = session.stop_handle()?;
    if !shared.begin_run(run.call, &stop) {
        return Err(EngineError::Terminated);
    }
    let _ended = EndRun(shared, run.call);
    shared.faults.strike(Point::Run);
    let tensors = session.run(&inputs, &run.outputs, &stop)?;
    Ok(Output { tensors, room })
}

/// Takes a run off the list of those that can be stopped, even if it panics.
struct EndRun<'a>(&'a Shared, u64);

impl Drop for EndRun<'_> {
    fn drop(&mut self) {
        self.0.end_run(self.1);
    }
}

impl Output {
    /// Puts the tensors where the server reads them, and asks for room where it does not suffice.
    /// None when the server has given up.
    fn placed(
        self,
        shared: &Shared,
        lane: &Socket,
        inbox: &mut Inbox,
    ) -> io::Result<Option<Reply>> {
        let Self { tensors, mut room } = self;
        let needed = tensors.iter().map(|tensor| aligned(tensor.data.len()));
        let needed = needed.fold(0, usize::saturating_add);
        if needed > room.len() {
            let reply = Reply::NeedsRoom(needed as u64);
            lane.send(reply.encode().bytes(), &[])?;
            let Some(fds) = lane.receive(inbox)? else {
                return Ok(None);
            };
            let request = Request::decode(inbox.message()).map_err(io::Error::other)?;
            let Request::Room { segment, is_new } = request else {
                return Err(broken("room was asked for and something else given"));
            };
            if is_new {
                let file = fds.into_iter().next();
                let file = file.ok_or_else(|| broken("room was announced that did not come"))?;
                shared.add_segment(segment, file)?;
            }
            room = shared.segment(segment).map_err(io::Error::other)?;
        }
        let mut outputs = Vec::with_capacity(tensors.len());
        let mut offset = 0;
        for tensor in tensors {
            let len = tensor.data.len();
            if !room.write(offset, &tensor.data) {
                return Err(broken("less room was given than was asked for"));
            }
            outputs.push(Placed {
                datatype: tensor.datatype,
                shape: tensor.shape,
                segment: room.id,
                offset,
                len,
            });
            offset += aligned(len);
        }
        Ok(Some(Reply::Ran(outputs)))
    }
}

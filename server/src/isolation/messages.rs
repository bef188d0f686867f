//! What a server and a worker say to each other.

use std::collections::BTreeMap;
use std::path::PathBuf;

use dormouse_core::datatype::DataType;
use dormouse_core::shape::{Shape, element_count};
use dormouse_model_store::spec::{GraphLevel, SessionSpec};

use super::wire::{Reader, WireError, Writer};
use crate::engine::onnx::OnnxOptions;
use crate::engine::{Effort, OptimizedTensor, Packing, SessionTensor};

/// The first message to a worker: what it is to be.
#[derive(Clone, Debug)]
pub(super) struct Hello {
    /// The model it serves, for its own messages.
    pub(super) label: String,
    pub(super) engine: OnnxOptions,
    /// Address space, and seconds of CPU time: only of a trial.
    pub(super) most_memory: Option<u64>,
    pub(super) most_cpu: Option<u64>,
}

/// A tensor in a segment.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Placed {
    pub(super) datatype: DataType,
    pub(super) shape: Shape,
    pub(super) segment: u32,
    pub(super) offset: usize,
    pub(super) len: usize,
}

impl Placed {
    /// Whether it is as long as its type and shape say; strings are at least their lengths.
    pub(super) fn makes_sense(&self) -> bool {
        let Some(elements) = element_count(&self.shape) else {
            return false;
        };
        let length = self.len as u64;
        match self.datatype.element_size() {
            Some(size) => elements.checked_mul(size as u64) == Some(length),
            None => elements.checked_mul(4).is_some_and(|least| least <= length),
        }
    }
}

/// Where a model's bytes are; the file that has them goes with the message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SourceForm {
    /// A file to be read by the engine.
    File,
    /// One blob: the graph, then each of the external files.
    Blob {
        graph: usize,
        external: Vec<(String, usize)>,
    },
}

/// A weight in one of the packs that go with the message, after the graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PackedWeight {
    pub(super) name: String,
    pub(super) element_type: i32,
    pub(super) dims: Vec<i64>,
    pub(super) pack: usize,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// What a worker is asked on a lane; each is answered by one [`Reply`].
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Request {
    Open {
        session: SessionSpec,
        effort: Effort,
        source: SourceForm,
    },
    OpenPrepared {
        session: SessionSpec,
        packing: Packing,
        family: Option<[u8; 32]>,
        /// Digests of the packs.
        packs: Vec<String>,
        weights: Vec<PackedWeight>,
        /// Pages are brought in while the session is built.
        populate: bool,
    },
    Optimize {
        session: SessionSpec,
        source: SourceForm,
        scratch: PathBuf,
    },
    Run(RunRequest),
    /// In answer to [`Reply::NeedsRoom`].
    Room {
        segment: u32,
        is_new: bool,
    },
    /// Gives back what a session keeps for its next run.
    Release {
        session: u32,
    },
}

/// A run. New segments' files go with the message in the order of `new`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RunRequest {
    /// By which it can be stopped.
    pub(super) call: u64,
    pub(super) session: u32,
    pub(super) new: Vec<u32>,
    pub(super) forgotten: Vec<u32>,
    pub(super) inputs: Vec<(usize, Placed)>,
    pub(super) outputs: Vec<usize>,
    /// Where outputs go.
    pub(super) room: u32,
}

/// What a worker answers.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Reply {
    /// The worker is there.
    Ready,
    Done,
    Opened {
        session: u32,
        inputs: Vec<SessionTensor>,
        optional_inputs: Vec<SessionTensor>,
        outputs: Vec<SessionTensor>,
    },
    /// The graph goes with the message.
    Optimized {
        tensors: Vec<OptimizedTensor>,
        by_rows: Vec<String>,
        data_file: Option<PathBuf>,
    },
    Ran(Vec<Placed>),
    /// The outputs need so many bytes; a [`Request::Room`] is to follow.
    NeedsRoom(u64),
    Failed(String),
    NotPreparable(String),
    Terminated,
}

/// What a worker is told on its first socket; nothing is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// A new lane goes with the message.
    Lane,
    Stop {
        call: u64,
    },
    Close {
        session: u32,
    },
}

impl Hello {
    pub(super) fn encode(&self) -> Writer {
        let mut out = Writer::default();
        out.text(MAGIC).text(&self.label);
        let engine = &self.engine;
        out.text(&engine.library.to_string_lossy());
        for threads in [engine.intra_op_threads, engine.inter_op_threads] {
            out.option(threads, |out, threads| {
                out.size(threads);
            });
        }
        out.u8(u8::from(engine.global_thread_pool));
        out.u8(u8::from(engine.allow_spinning));
        for number in [engine.shared_cache_bytes, self.most_memory, self.most_cpu] {
            out.option(number, |out, number| {
                out.u64(number);
            });
        }
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader(bytes);
        if reader.text()? != MAGIC {
            return Err(WireError("it was not started by a server of this version"));
        }
        let label = reader.text()?;
        let library = PathBuf::from(reader.text()?);
        let intra_op_threads = reader.option(Reader::size)?;
        let inter_op_threads = reader.option(Reader::size)?;
        let global_thread_pool = reader.bool()?;
        let allow_spinning = reader.bool()?;
        Ok(Self {
            label,
            engine: OnnxOptions {
                library,
                intra_op_threads,
                inter_op_threads,
                global_thread_pool,
                allow_spinning,
                shared_cache_bytes: reader.option(Reader::u64)?,
            },
            most_memory: reader.option(Reader::u64)?,
            most_cpu: reader.option(Reader::u64)?,
        })
    }
}

const MAGIC: &str = concat!("dormouse worker ", env!("CARGO_PKG_VERSION"));

impl Request {
    pub(super) fn encode(&self) -> Writer {
        let mut out = Writer::of(match self {
            Self::Open { .. } => 0,
            Self::OpenPrepared { .. } => 1,
            Self::Optimize { .. } => 2,
            Self::Run(_) => 3,
            Self::Room { .. } => 4,
            Self::Release { .. } => 5,
        });
        match self {
            Self::Open {
                session,
                effort,
                source,
            } => {
                put_session(&mut out, session);
                out.u8(u8::from(*effort == Effort::Full));
                put_source(&mut out, source);
            }
            Self::OpenPrepared {
                session,
                packing,
                family,
                packs,
                weights,
                populate,
            } => {
                put_session(&mut out, session);
                out.u8(u8::from(*packing == Packing::On));
                out.option(family.as_ref(), |out, family| {
                    for &byte in family {
                        out.u8(byte);
                    }
                });
                out.list(packs, |out, pack| {
                    out.text(pack);
                });
                out.list(weights, |out, weight| {
                    out.text(&weight.name);
                    out.i64(i64::from(weight.element_type));
                    out.dims(&weight.dims).size(weight.pack);
                    out.u64(weight.offset).u64(weight.len);
                });
                out.u8(u8::from(*populate));
            }
            Self::Optimize {
                session,
                source,
                scratch,
            } => {
                put_session(&mut out, session);
                put_source(&mut out, source);
                out.text(&scratch.to_string_lossy());
            }
            Self::Run(run) => {
                out.u64(run.call).u32(run.session);
                for ids in [&run.new, &run.forgotten] {
                    out.list(ids, |out, &id| {
                        out.u32(id);
                    });
                }
                out.list(&run.inputs, |out, (index, placed)| {
                    out.size(*index);
                    put_placed(out, placed);
                });
                out.list(&run.outputs, |out, &index| {
                    out.size(index);
                });
                out.u32(run.room);
            }
            Self::Room { segment, is_new } => {
                out.u32(*segment).u8(u8::from(*is_new));
            }
            Self::Release { session } => {
                out.u32(*session);
            }
        }
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader(bytes);
        Ok(match reader.u8()? {
            0 => Self::Open {
                session: session(&mut reader)?,
                effort: match reader.bool()? {
                    true => Effort::Full,
                    false => Effort::Least,
                },
                source: source(&mut reader)?,
            },
            1 => Self::OpenPrepared {
                session: session(&mut reader)?,
                packing: match reader.bool()? {
                    true => Packing::On,
                    false => Packing::Off,
                },
                family: reader.option(|reader| {
                    let mut family = [0; 32];
                    for byte in &mut family {
                        *byte = reader.u8()?;
                    }
                    Ok(family)
                })?,
                packs: reader.list(Reader::text)?,
                weights: reader.list(|reader| {
                    Ok(PackedWeight {
                        name: reader.text()?,
                        element_type: i32::try_from(reader.i64()?)
                            .map_err(|_| WireError("an element type is unknown"))?,
                        dims: reader.list(Reader::i64)?,
                        pack: reader.size()?,
                        offset: reader.u64()?,
                        len: reader.u64()?,
                    })
                })?,
                populate: reader.bool()?,
            },
            2 => Self::Optimize {
                session: session(&mut reader)?,
                source: source(&mut reader)?,
                scratch: reader.text()?.into(),
            },
            3 => Self::Run(RunRequest {
                call: reader.u64()?,
                session: reader.u32()?,
                new: reader.list(Reader::u32)?,
                forgotten: reader.list(Reader::u32)?,
                inputs: reader.list(|reader| Ok((reader.size()?, placed(reader)?)))?,
                outputs: reader.list(Reader::size)?,
                room: reader.u32()?,
            }),
            4 => Self::Room {
                segment: reader.u32()?,
                is_new: reader.bool()?,
            },
            5 => Self::Release {
                session: reader.u32()?,
            },
            _ => return Err(WireError("a request of an unknown kind")),
        })
    }
}

impl Reply {
    pub(super) fn encode(&self) -> Writer {
        let mut out = Writer::of(match self {
            Self::Ready => 0,
            Self::Done => 1,
            Self::Opened { .. } => 2,
            Self::Optimized { .. } => 3,
            Self::Ran(_) => 4,
            Self::NeedsRoom(_) => 5,
            Self::Failed(_) => 6,
            Self::NotPreparable(_) => 7,
            Self::Terminated => 8,
        });
        match self {
            Self::Ready | Self::Done | Self::Terminated => {}
            Self::Opened {
                session,
                inputs,
                optional_inputs,
                outputs,
            } => {
                out.u32(*session);
                for tensors in [inputs, optional_inputs, outputs] {
                    out.tensors(tensors);
                }
            }
            Self::Optimized {
                tensors,
                by_rows,
                data_file,
            } => {
                out.list(tensors, |out, tensor| {
                    out.text(&tensor.name);
                    out.i64(i64::from(tensor.element_type));
                    out.dims(&tensor.dims);
                    out.u64(tensor.offset).u64(tensor.len);
                });
                out.list(by_rows, |out, name| {
                    out.text(name);
                });
                out.option(data_file.as_ref(), |out, file| {
                    out.text(&file.to_string_lossy());
                });
            }
            Self::Ran(outputs) => {
                out.list(outputs, put_placed);
            }
            Self::NeedsRoom(bytes) => {
                out.u64(*bytes);
            }
            Self::Failed(why) | Self::NotPreparable(why) => {
                out.text(why);
            }
        }
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader(bytes);
        Ok(match reader.u8()? {
            0 => Self::Ready,
            1 => Self::Done,
            2 => Self::Opened {
                session: reader.u32()?,
                inputs: reader.tensors()?,
                optional_inputs: reader.tensors()?,
                outputs: reader.tensors()?,
            },
            3 => Self::Optimized {
                tensors: reader.list(|reader| {
                    Ok(OptimizedTensor {
                        name: reader.text()?,
                        element_type: i32::try_from(reader.i64()?)
                            .map_err(|_| WireError("an element type is unknown"))?,
                        dims: reader.list(Reader::i64)?,
                        offset: reader.u64()?,
                        len: reader.u64()?,
                    })
                })?,
                by_rows: reader.list(Reader::text)?,
                data_file: reader.option(Reader::text)?.map(PathBuf::from),
            },
            4 => Self::Ran(reader.list(placed)?),
            5 => Self::NeedsRoom(reader.u64()?),
            6 => Self::Failed(reader.text()?),
            7 => Self::NotPreparable(reader.text()?),
            8 => Self::Terminated,
            _ => return Err(WireError("a reply of an unknown kind")),
        })
    }
}

impl Notice {
    pub(super) fn encode(&self) -> Writer {
        let mut out = Writer::default();
        match self {
            Self::Lane => out.u8(0),
            Self::Stop { call } => out.u8(1).u64(*call),
            Self::Close { session } => out.u8(2).u32(*session),
        };
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader(bytes);
        Ok(match reader.u8()? {
            0 => Self::Lane,
            1 => Self::Stop {
                call: reader.u64()?,
            },
            2 => Self::Close {
                session: reader.u32()?,
            },
            _ => return Err(WireError("a notice of an unknown kind")),
        })
    }
}

fn put_placed(out: &mut Writer, placed: &Placed) {
    out.datatype(placed.datatype).dims(&placed.shape);
    out.u32(placed.segment).size(placed.offset).size(placed.len);
}

fn placed(reader: &mut Reader<'_>) -> Result<Placed, WireError> {
    Ok(Placed {
        datatype: reader.datatype()?,
        shape: reader.dims()?,
        segment: reader.u32()?,
        offset: reader.size()?,
        len: reader.size()?,
    })
}

fn put_source(out: &mut Writer, source: &SourceForm) {
    match source {
        SourceForm::File => {
            out.u8(0);
        }
        SourceForm::Blob { graph, external } => {
            out.u8(1).size(*graph);
            out.list(external, |out, (name, len)| {
                out.text(name).size(*len);
            });
        }
    }
}

fn source(reader: &mut Reader<'_>) -> Result<SourceForm, WireError> {
    Ok(match reader.u8()? {
        0 => SourceForm::File,
        _ => SourceForm::Blob {
            graph: reader.size()?,
            external: reader.list(|reader| Ok((reader.text()?, reader.size()?)))?,
        },
    })
}

fn put_session(out: &mut Writer, session: &SessionSpec) {
    let SessionSpec {
        intra_op_threads,
        inter_op_threads,
        parallel_execution,
        memory_arena,
        memory_pattern,
        graph_level,
        entries,
        shrinks_arena,
    } = session;
    for threads in [intra_op_threads, inter_op_threads] {
        out.option(*threads, |out, threads| {
            out.u32(threads);
        });
    }
    out.u8(u8::from(*parallel_execution));
    for switch in [memory_arena, memory_pattern] {
        out.option(*switch, |out, on| {
            out.u8(u8::from(on));
        });
    }
    out.u8(match graph_level {
        GraphLevel::Disabled => 0,
        GraphLevel::Basic => 1,
        GraphLevel::Extended => 2,
        GraphLevel::All => 3,
    });
    out.list(entries, |out, (key, value)| {
        out.text(key).text(value);
    });
    out.u8(u8::from(*shrinks_arena));
}

fn session(reader: &mut Reader<'_>) -> Result<SessionSpec, WireError> {
    Ok(SessionSpec {
        intra_op_threads: reader.option(Reader::u32)?,
        inter_op_threads: reader.option(Reader::u32)?,
        parallel_execution: reader.bool()?,
        memory_arena: reader.option(Reader::bool)?,
        memory_pattern: reader.option(Reader::bool)?,
        graph_level: match reader.u8()? {
            0 => GraphLevel::Disabled,
            1 => GraphLevel::Basic,
            2 => GraphLevel::Extended,
            3 => GraphLevel::All,
            _ => return Err(WireError("a level of optimisation is unknown")),
        },
        entries: reader
            .list(|reader| Ok((reader.text()?, reader.text()?)))?
            .into_iter()
            .collect::<BTreeMap<_, _>>(),
        shrinks_arena: reader.bool()?,
    })
}

#[cfg(test)]
mod tests;

//! What a version of a model consists of, known before it is loaded: its files, its tensors, where
//! each lies and what part it plays in memory. Made from the graph's own words, without its weights.

mod build;
mod digest;
mod element;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::repository::FileIdentity;
use crate::store::Digest;

pub(crate) use build::Parts;
pub use element::ElementType;

/// A version's files and tensors and the memory they need.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Every file a load reads, the graph first.
    pub files: Vec<ManifestFile>,
    /// What a run only reads: initializers, and constants of a kilobyte and more.
    pub tensors: Vec<ManifestTensor>,
    /// What a request must give.
    pub inputs: Vec<Port>,
    /// What a request may give.
    pub optional_inputs: Vec<Port>,
    /// What a run writes for its caller.
    pub outputs: Vec<Port>,
    /// Operators, those of subgraphs and functions included.
    pub nodes: u64,
    /// An estimate of what the session itself takes, beside its tensors.
    pub context_bytes: u64,
    /// What is odd about the files, each a sentence.
    pub warnings: Vec<String>,
}

/// What a file is to the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileRole {
    /// The ONNX file.
    Graph,
    /// Data the graph refers to by offset and length.
    ExternalData,
    /// Tensors found by their names.
    Safetensors,
    /// Which of several safetensors files holds which tensor.
    SafetensorsIndex,
}

impl FileRole {
    /// Whether the engine is handed the file beside the graph.
    pub(crate) fn is_data(self) -> bool {
        matches!(self, Self::ExternalData | Self::Safetensors)
    }
}

/// One file that a load reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestFile {
    /// Relative to the repository.
    pub path: String,
    /// Relative to the graph's folder, as the graph refers to it.
    pub location: String,
    pub role: FileRole,
    pub size: u64,
    /// None for a file that was handed over in memory.
    pub identity: Option<FileIdentity>,
    /// None until it was asked for.
    pub digest: Option<Digest>,
}

/// The part something plays in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Taxon {
    /// Never written by a run: one copy serves every run, and it can be dropped and read again.
    ReadOnly,
    /// Comes with a request.
    Input,
    /// Written by a run: outputs and intermediate values.
    Writable,
    /// The session: graph, plans, kernels.
    Context,
}

/// Where a tensor's bytes are; `file` is an index into the manifest's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "in")]
pub enum TensorPlace {
    /// In the graph's file, as they are in memory.
    Inline { offset: u64, length: u64 },
    /// In the graph's file, in protobuf's own encoding; the stretch is that of the whole tensor.
    Encoded { offset: u64, length: u64 },
    /// In a file of data.
    External {
        file: usize,
        offset: u64,
        length: u64,
    },
    /// In a safetensors file; the offset counts from the file's beginning.
    Safetensors {
        file: usize,
        offset: u64,
        length: u64,
    },
}

/// One tensor that comes with the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ManifestTensor {
    /// For a constant, that of the value it gives.
    pub name: String,
    pub element: ElementType,
    pub dims: Vec<i64>,
    /// Bytes in memory; for strings, those in the file.
    pub bytes: u64,
    pub place: TensorPlace,
    /// Belongs to a subgraph or a function, where the engine cannot be handed its value.
    pub in_subgraph: bool,
    /// An attribute of a node instead of an initializer.
    pub is_constant: bool,
    /// The digest of its bytes as they are in memory; none until it was asked for.
    pub digest: Option<Digest>,
}

/// An input or output of the graph.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Port {
    pub name: String,
    /// The v2 name of its element type, or ONNX's name of what v2 cannot carry.
    pub datatype: String,
    /// `-1` where the graph leaves a dimension open; none when it does not tell the rank.
    pub dims: Option<Vec<i64>>,
    /// Bytes of one value, where all dimensions are known.
    pub bytes: Option<u64>,
}

/// One read of a load, in the order in which it is best begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRead {
    /// Index into the manifest's files.
    pub file: usize,
    /// Relative to the repository.
    pub path: String,
    pub offset: u64,
    pub length: u64,
}

/// What of a file decides whether something made from it still fits.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SourceKeyPart {
    pub location: String,
    pub size: u64,
    pub identity: Option<FileIdentity>,
    pub digest: Option<Digest>,
}

/// Everything a load will do and need, complete before any request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadPlan {
    pub read: Vec<FileRead>,
    /// All reads together.
    pub bytes_read: u64,
    pub bytes_read_only: u64,
    pub bytes_context: u64,
    pub source_key_parts: Vec<SourceKeyPart>,
}

/// How much of one kind a manifest holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaxonTotal {
    pub taxon: Taxon,
    /// Tensors known of this kind.
    pub tensors: usize,
    /// None where it follows from shapes of requests.
    pub bytes: Option<u64>,
}

impl Manifest {
    /// What a load reads and needs.
    pub fn plan(&self) -> LoadPlan {
        let reads = self.files.iter().enumerate().map(|(file, known)| FileRead {
            file,
            path: known.path.clone(),
            offset: 0,
            length: known.size,
        });
        let mut read: Vec<FileRead> = reads.collect();
        // The graph says what else there is and is needed first; then what takes longest.
        if let Some(others) = read.get_mut(1..) {
            others.sort_by_key(|read| std::cmp::Reverse(read.length));
        }
        LoadPlan {
            bytes_read: sum(read.iter().map(|read| read.length)),
            read,
            bytes_read_only: self.read_only_bytes(),
            bytes_context: self.context_bytes,
            source_key_parts: self
                .files
                .iter()
                .map(|file| SourceKeyPart {
                    location: file.location.clone(),
                    size: file.size,
                    identity: file.identity,
                    digest: file.digest,
                })
                .collect(),
        }
    }

    /// Bytes of all tensors that come with the model.
    pub fn read_only_bytes(&self) -> u64 {
        sum(self.tensors.iter().map(|tensor| tensor.bytes))
    }

    /// Tensors and bytes by the part they play in memory.
    pub fn totals(&self) -> [TaxonTotal; 4] {
        let ports = |ports: &[Port]| ports.iter().map(|port| port.bytes).sum::<Option<u64>>();
        [
            TaxonTotal {
                taxon: Taxon::ReadOnly,
                tensors: self.tensors.len(),
                bytes: Some(self.read_only_bytes()),
            },
            TaxonTotal {
                taxon: Taxon::Input,
                tensors: self.inputs.len(),
                bytes: ports(&self.inputs),
            },
            TaxonTotal {
                taxon: Taxon::Writable,
                tensors: self.outputs.len(),
                bytes: None,
            },
            TaxonTotal {
                taxon: Taxon::Context,
                tensors: 0,
                bytes: Some(self.context_bytes),
            },
        ]
    }
}

fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

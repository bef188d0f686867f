//! Makes a manifest of what a walk over the graph found and of the files that were opened.

use super::{ElementType, FileRole, Manifest, ManifestFile, ManifestTensor, Port, TensorPlace};
use crate::graph::{ExternalData, GraphTensor, GraphType};
use crate::names::plain;
use crate::onnx::{Rewrite, SiteData, TensorSite, Walked, tensor_bytes};
use crate::repository::OpenFile;

/// A session without operators.
const BASE_BYTES: u64 = 1 << 20;
/// What one operator takes in a session: its node, its kernel, its place in the plan.
const NODE_BYTES: u64 = 4 << 10;
/// How often what the graph says, weights left out, is held in one form or another.
const COPIES_OF_GRAPH: u64 = 4;

/// The files of a manifest as they are found.
pub(crate) struct Parts {
    files: Vec<ManifestFile>,
}

impl Parts {
    pub(crate) fn new(name: &str, graph: &OpenFile) -> Self {
        let mut parts = Self { files: Vec::new() };
        parts.add(name, FileRole::Graph, graph);
        parts
    }

    pub(crate) fn add(&mut self, location: &str, role: FileRole, file: &OpenFile) {
        let path = file.path().to_owned();
        if self.files.iter().all(|known| known.path != path) {
            self.files.push(ManifestFile {
                path,
                location: plain(location),
                role,
                size: crate::onnx::ReadAt::size(file),
                identity: file.identity(),
                digest: None,
            });
        }
    }

    /// The manifest of a graph whose weights are bound; `rewrite` tells which inputs they are.
    pub(crate) fn build(self, walked: &Walked, rewrite: &Rewrite) -> Manifest {
        let summary = &walked.summary;
        let sites = walked.tensors.iter().map(|site| self.tensor(walked, site));
        let added = rewrite.added.iter().map(|tensor| ManifestTensor {
            name: tensor.name.clone(),
            element: ElementType(tensor.element),
            dims: tensor.dims.clone(),
            bytes: tensor.data.length.unwrap_or(0),
            place: self.place(&tensor.data),
            in_subgraph: false,
            is_constant: false,
            digest: None,
        });
        let tensors: Vec<ManifestTensor> = sites.chain(added).collect();
        let inline = tensors.iter().map(|tensor| match tensor.place {
            TensorPlace::Inline { length, .. } | TensorPlace::Encoded { length, .. } => length,
            _ => 0,
        });
        let graph = self.files[0].size.saturating_sub(super::sum(inline));
        Manifest {
            context_bytes: BASE_BYTES
                .saturating_add(walked.node_count.saturating_mul(NODE_BYTES))
                .saturating_add(graph.saturating_mul(COPIES_OF_GRAPH)),
            inputs: summary.inputs.iter().map(port).collect(),
            optional_inputs: summary.optional_inputs.iter().map(port).collect(),
            outputs: summary.outputs.iter().map(port).collect(),
            nodes: walked.node_count,
            warnings: summary.warnings.clone(),
            files: self.files,
            tensors,
        }
    }

    fn tensor(&self, walked: &Walked, site: &TensorSite) -> ManifestTensor {
        let place = match site.data {
            SiteData::Inline(span) => TensorPlace::Inline {
                offset: span.start,
                length: span.len(),
            },
            SiteData::Encoded => TensorPlace::Encoded {
                offset: site.message.start,
                length: site.message.len(),
            },
            SiteData::Outside(index) | SiteData::ByName(index) => {
                self.place(&walked.summary.external[index])
            }
        };
        let stored = match place {
            TensorPlace::Inline { length, .. }
            | TensorPlace::Encoded { length, .. }
            | TensorPlace::External { length, .. }
            | TensorPlace::Safetensors { length, .. } => length,
        };
        ManifestTensor {
            name: walked.nodes.names.text(site.name).to_owned(),
            element: ElementType(site.element),
            dims: site.dims.clone(),
            bytes: site.bytes.unwrap_or(stored),
            place,
            in_subgraph: site.in_subgraph,
            is_constant: site.is_constant,
            digest: None,
        }
    }

    fn place(&self, data: &ExternalData) -> TensorPlace {
        let location = plain(&data.location);
        let known = self.files.iter().position(|file| file.location == location);
        let file = known.unwrap_or_default();
        let rest = self.files[file].size.saturating_sub(data.offset);
        let (offset, length) = (data.offset, data.length.unwrap_or(rest));
        match self.files[file].role {
            FileRole::Safetensors => TensorPlace::Safetensors {
                file,
                offset,
                length,
            },
            _ => TensorPlace::External {
                file,
                offset,
                length,
            },
        }
    }
}

fn port(tensor: &GraphTensor) -> Port {
    let number = (1..=26).find(|&number| crate::onnx::element_type(number) == tensor.kind);
    let dims = tensor.dims.as_ref().map(|dims| dims.to_vec());
    let fixed = dims
        .as_ref()
        .filter(|dims| dims.iter().all(|&dim| dim >= 0));
    let bytes = number
        .zip(fixed)
        .and_then(|(number, dims)| tensor_bytes(number, dims));
    Port {
        name: tensor.name.clone(),
        datatype: match tensor.kind {
            GraphType::Tensor(datatype) => datatype.name().to_owned(),
            GraphType::Other(name) => name.to_owned(),
        },
        dims,
        bytes,
    }
}

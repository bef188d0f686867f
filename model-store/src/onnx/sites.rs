//! Where in a file the things are that a manifest lists and a rewrite changes.

use std::collections::HashSet;

use super::nodes::{Constant, NameId, Nodes};
use super::wire::Span;
use crate::graph::GraphSummary;
use crate::{cost, coupling};

/// A tensor that comes with the model.
#[derive(Debug)]
pub(crate) struct TensorSite {
    pub(crate) name: NameId,
    pub(crate) element: i32,
    pub(crate) dims: Vec<i64>,
    /// Bytes in memory, where type and shape tell.
    pub(crate) bytes: Option<u64>,
    pub(crate) data: SiteData,
    /// The tensor's message.
    pub(crate) message: Span,
    pub(crate) in_subgraph: bool,
    pub(crate) is_constant: bool,
    /// The values or the indices of an initializer that leaves zeros out.
    pub(crate) is_sparse: bool,
}

/// Where a tensor's data is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SiteData {
    /// In the file, as in memory.
    Inline(Span),
    /// In the file, number by number.
    Encoded,
    /// Elsewhere, by the summary's reference of this index.
    Outside(usize),
    /// The same, but the reference names a safetensors file and no place in it.
    ByName(usize),
}

impl SiteData {
    /// How much of the file the data takes, none of it being elsewhere.
    pub(super) fn bytes_inside(self, message: Span) -> u64 {
        match self {
            Self::Inline(span) => span.len(),
            Self::Encoded => message.len(),
            Self::Outside(_) | Self::ByName(_) => 0,
        }
    }
}

/// An input without initializer.
#[derive(Debug)]
pub(crate) struct InputSite {
    pub(crate) name: NameId,
    /// The whole field that declares it.
    pub(crate) field: Span,
}

/// What one walk over a file finds.
#[derive(Debug)]
pub(crate) struct Walked {
    /// Without what the operators tell.
    pub(crate) summary: GraphSummary,
    pub(crate) nodes: Nodes,
    pub(crate) tensors: Vec<TensorSite>,
    /// In the order of the summary's inputs.
    pub(crate) inputs: Vec<InputSite>,
    /// The main graph's message.
    pub(crate) graph: Span,
    pub(crate) node_count: u64,
}

impl Walked {
    /// Makes initializers of some inputs, by their indices and with their ranks.
    pub(crate) fn give_inputs(&mut self, given: &[(usize, usize)]) {
        let indices: HashSet<usize> = given.iter().map(|(at, _)| *at).collect();
        let mut inputs = std::mem::take(&mut self.summary.inputs)
            .into_iter()
            .zip(0..);
        self.summary.inputs = inputs
            .by_ref()
            .filter(|(_, at)| !indices.contains(at))
            .map(|(input, _)| input)
            .collect();
        let names: HashSet<NameId> = given.iter().map(|&(at, _)| self.inputs[at].name).collect();
        let block = &mut self.nodes.main;
        block.inputs.retain(|(name, _)| !names.contains(name));
        for &(at, rank) in given {
            let constant = Constant { rank, values: None };
            block.constants.push((self.inputs[at].name, constant));
        }
    }

    /// Adds to the summary what the operators tell.
    pub(crate) fn finish(mut self) -> GraphSummary {
        self.summary.batch_coupling = coupling::findings(&self.nodes);
        self.summary.operators = cost::facts(&self.nodes);
        self.summary
    }
}

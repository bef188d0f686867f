//! What a graph says about itself, read without the engine and without its weights.

use dormouse_core::datatype::DataType;
use dormouse_core::shape::Shape;

/// The type of a graph's input or output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphType {
    /// A tensor whose elements v2 can carry.
    Tensor(DataType),
    /// Anything else (sequence, map, optional, complex, 8-bit floats …), by its ONNX name.
    Other(&'static str),
}

/// One input or output of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct GraphTensor {
    pub name: String,
    pub kind: GraphType,
    /// `-1` where the graph leaves a dimension open; none when it does not tell the rank.
    pub dims: Option<Shape>,
}

/// Where a tensor kept outside the model file lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExternalData {
    /// Relative to the model file's folder; already checked to stay inside it.
    pub location: String,
    pub offset: u64,
    /// None: to the end of the file.
    pub length: Option<u64>,
}

/// A graph's signature and what else must be known before it is loaded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GraphSummary {
    pub ir_version: i64,
    /// The operator sets it uses: domain (empty for the standard one) and version.
    pub opsets: Vec<(String, i64)>,
    /// Inputs a request must give (graph inputs without initializers).
    pub inputs: Vec<GraphTensor>,
    /// Graph inputs that have an initializer: a request may give them.
    pub optional_inputs: Vec<GraphTensor>,
    pub outputs: Vec<GraphTensor>,
    /// Every reference to data outside the model file.
    pub external: Vec<ExternalData>,
    /// Why rows of a batch influence each other, each a sentence naming node and operator; empty
    /// when no such operator was found.
    pub batch_coupling: Vec<String>,
    /// What is odd about the files beside it, each a sentence.
    pub warnings: Vec<String>,
    pub operators: OperatorFacts,
}

/// What a graph's operators tell of its sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperatorFacts {
    /// The graph's run time follows from the shapes of its inputs, not from their values.
    pub is_steady: bool,
    /// Some are there to be merged with others: until that is done each run takes longer, or rounds in
    /// other places.
    pub is_to_be_merged: bool,
}

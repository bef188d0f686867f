//! A model's operators, as much of them as deciding about batches needs.

use std::collections::HashMap;
use std::sync::Arc;

/// A name of the model, by number; 0 is the empty name.
pub(crate) type NameId = u32;

/// Every name of a model once.
#[derive(Debug)]
pub(crate) struct Names {
    ids: HashMap<Arc<str>, NameId>,
    texts: Vec<Arc<str>>,
}

impl Names {
    pub(crate) fn new() -> Self {
        let empty: Arc<str> = Arc::from("");
        Self {
            ids: HashMap::from([(empty.clone(), 0)]),
            texts: vec![empty],
        }
    }

    pub(crate) fn id(&mut self, text: &str) -> NameId {
        if let Some(&id) = self.ids.get(text) {
            return id;
        }
        // Each name takes at least two bytes of a file of less than 2^31.
        let id = self.texts.len() as NameId;
        let text: Arc<str> = Arc::from(text);
        self.texts.push(text.clone());
        self.ids.insert(text, id);
        id
    }

    pub(crate) fn text(&self, id: NameId) -> &str {
        &self.texts[id as usize]
    }
}

/// The operators of a model.
#[derive(Debug)]
pub(crate) struct Nodes {
    pub(crate) names: Names,
    pub(crate) main: Block,
    pub(crate) functions: Vec<Function>,
    /// Version of the standard operators, 0 when the model does not import them.
    pub(crate) opset: i64,
    /// How many protobuf fields all of it is made of.
    pub(crate) fields: u64,
}

/// A graph or subgraph.
#[derive(Debug, Default)]
pub(crate) struct Block {
    /// With their rank where the graph tells it.
    pub(crate) inputs: Vec<(NameId, Option<usize>)>,
    pub(crate) outputs: Vec<NameId>,
    pub(crate) constants: Vec<(NameId, Constant)>,
    pub(crate) ranks: Vec<(NameId, usize)>,
    pub(crate) nodes: Vec<Node>,
}

/// An operator defined by the model.
#[derive(Debug, Default)]
pub(crate) struct Function {
    pub(crate) name: NameId,
    pub(crate) domain: NameId,
    pub(crate) overload: NameId,
    pub(crate) inputs: Vec<NameId>,
    pub(crate) outputs: Vec<NameId>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) opset: Option<i64>,
}

#[derive(Debug, Default)]
pub(crate) struct Node {
    pub(crate) name: NameId,
    pub(crate) op: NameId,
    pub(crate) domain: NameId,
    pub(crate) overload: NameId,
    pub(crate) inputs: Vec<NameId>,
    pub(crate) outputs: Vec<NameId>,
    pub(crate) attributes: Vec<Attribute>,
}

#[derive(Debug)]
pub(crate) struct Attribute {
    pub(crate) name: NameId,
    pub(crate) value: Value,
}

#[derive(Debug)]
pub(crate) enum Value {
    Int(i64),
    Ints(Vec<i64>),
    Text(Vec<u8>),
    Tensor(Constant),
    Block(Block),
    /// Something no decision here depends on, or a reference to a function's attribute.
    Other,
}

/// A constant tensor: its rank, and its values when they are few whole numbers.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Constant {
    pub(crate) rank: usize,
    pub(crate) values: Option<Vec<i64>>,
}

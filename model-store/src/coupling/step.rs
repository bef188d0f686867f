//! One node together with what is known of its inputs.

use crate::onnx::{Block, Constant, Names, Node, Value};

use super::facts::{Fact, Items};

pub(super) struct Step<'n, 'i> {
    pub(super) node: &'n Node,
    pub(super) names: &'i Names,
    pub(super) op: &'i str,
    pub(super) inputs: Vec<Fact>,
    pub(super) opset: i64,
}

/// What a node does to the rows it is given.
pub(super) struct Outcome {
    /// One per output; the last one holds for all that remain.
    pub(super) facts: Vec<Fact>,
    /// How it couples rows, as the end of a sentence that starts with the node.
    pub(super) coupled: Option<String>,
}

impl Outcome {
    pub(super) fn of(fact: Fact) -> Self {
        Self {
            facts: vec![fact],
            coupled: None,
        }
    }

    pub(super) fn rows(axis: Option<usize>, rank: Option<usize>) -> Self {
        Self::of(Fact::rows(axis, rank))
    }

    /// Where the batch is afterwards is then of no interest.
    pub(super) fn coupled(what: impl Into<String>) -> Self {
        Self {
            facts: vec![Fact::rows(None, None)],
            coupled: Some(what.into()),
        }
    }
}

/// Where the batch is in the first input that carries it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) axis: Option<usize>,
    pub(super) rank: Option<usize>,
}

impl Place {
    /// Whether `axis`, as an operator's attribute gives it, is the one that carries the batch.
    pub(super) fn is_at(self, axis: i64) -> bool {
        let batch = self.axis.unwrap_or(0);
        resolve(axis, self.rank).is_some_and(|axis| axis == batch)
    }

    pub(super) fn kept(self) -> Outcome {
        Outcome::rows(self.axis, self.rank)
    }
}

/// An axis counted from the front; none when it is counted from the end of an unknown rank, or
/// lies outside.
pub(super) fn resolve(axis: i64, rank: Option<usize>) -> Option<usize> {
    let axis = match rank {
        _ if axis >= 0 => axis,
        Some(rank) => axis.checked_add(i64::try_from(rank).ok()?)?,
        None => return None,
    };
    usize::try_from(axis).ok()
}

impl<'n> Step<'n, '_> {
    fn attribute(&self, name: &str) -> Option<&'n Value> {
        self.node
            .attributes
            .iter()
            .find(|attribute| self.names.text(attribute.name) == name)
            .map(|attribute| &attribute.value)
    }

    pub(super) fn int(&self, name: &str) -> Option<i64> {
        match self.attribute(name) {
            Some(Value::Int(int)) => Some(*int),
            _ => None,
        }
    }

    pub(super) fn flag(&self, name: &str) -> bool {
        self.int(name).is_some_and(|int| int != 0)
    }

    pub(super) fn ints(&self, name: &str) -> Option<&'n [i64]> {
        match self.attribute(name) {
            Some(Value::Ints(ints)) => Some(ints),
            _ => None,
        }
    }

    pub(super) fn text(&self, name: &str) -> Option<&'n [u8]> {
        match self.attribute(name) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    pub(super) fn tensor(&self, name: &str) -> Option<&'n Constant> {
        match self.attribute(name) {
            Some(Value::Tensor(constant)) => Some(constant),
            _ => None,
        }
    }

    pub(super) fn block(&self, name: &str) -> Option<&'n Block> {
        match self.attribute(name) {
            Some(Value::Block(block)) => Some(block),
            _ => None,
        }
    }

    /// Whether an optional input is given.
    pub(super) fn has_input(&self, index: usize) -> bool {
        self.node.inputs.get(index).is_some_and(|&name| name != 0)
    }

    pub(super) fn items(&self, index: usize) -> Option<&Items> {
        match self.inputs.get(index) {
            Some(Fact::Fixed { items, .. }) => items.as_ref(),
            _ => None,
        }
    }

    pub(super) fn known_input(&self, index: usize) -> Option<Vec<i64>> {
        self.items(index).and_then(Items::known)
    }

    /// Whole numbers that older operators take as an attribute and newer ones as an input.
    pub(super) fn listed(&self, attribute: &str, input: usize) -> Option<Vec<i64>> {
        match self.ints(attribute) {
            Some(ints) => Some(ints.to_vec()),
            None => self.known_input(input),
        }
    }

    pub(super) fn place(&self, index: usize) -> Option<Place> {
        match self.inputs.get(index) {
            Some(&Fact::Rows { axis, rank }) => Some(Place { axis, rank }),
            _ => None,
        }
    }

    pub(super) fn first_place(&self) -> Option<Place> {
        (0..self.inputs.len()).find_map(|index| self.place(index))
    }
}

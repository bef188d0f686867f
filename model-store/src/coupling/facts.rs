//! What the analysis knows of a value.

use crate::onnx::Constant;

/// One number of a small tensor, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Item {
    Known(i64),
    /// The number of rows, or a multiple of it.
    Batch,
    Unknown,
}

/// The numbers of a small tensor; `open` when more follow that are not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Items {
    pub(super) list: Vec<Item>,
    pub(super) open: bool,
}

impl Items {
    pub(super) fn closed(list: Vec<Item>) -> Self {
        Self { list, open: false }
    }

    pub(super) fn at(&self, index: usize) -> Item {
        self.list.get(index).copied().unwrap_or(Item::Unknown)
    }

    /// All numbers, when every one is known.
    pub(super) fn known(&self) -> Option<Vec<i64>> {
        if self.open {
            return None;
        }
        let known = |item: &Item| match item {
            Item::Known(number) => Some(*number),
            _ => None,
        };
        self.list.iter().map(known).collect()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fact {
    /// The same for every row: weights, constants, what is computed from shapes.
    Fixed {
        rank: Option<usize>,
        items: Option<Items>,
    },
    /// Comes from the inputs, with the batch on `axis`, none where that is not known.
    Rows {
        axis: Option<usize>,
        rank: Option<usize>,
    },
}

impl Fact {
    pub(super) fn fixed(rank: Option<usize>) -> Self {
        Self::Fixed { rank, items: None }
    }

    pub(super) fn rows(axis: Option<usize>, rank: Option<usize>) -> Self {
        // A rule that puts the batch outside the tensor has lost track of it.
        let axis = axis.filter(|&axis| rank.is_none_or(|rank| axis < rank));
        Self::Rows { axis, rank }
    }

    pub(super) fn items(list: Vec<Item>, rank: usize) -> Self {
        Self::Fixed {
            rank: Some(rank),
            items: Some(Items::closed(list)),
        }
    }

    pub(super) fn constant(constant: &Constant) -> Self {
        let known = |values: &Vec<i64>| values.iter().copied().map(Item::Known).collect();
        Self::Fixed {
            rank: Some(constant.rank),
            items: constant
                .values
                .as_ref()
                .filter(|_| constant.rank <= 1)
                .map(|values| Items::closed(known(values))),
        }
    }

    pub(super) fn is_rows(&self) -> bool {
        matches!(self, Self::Rows { .. })
    }

    pub(super) fn rank(&self) -> Option<usize> {
        match self {
            Self::Fixed { rank, .. } | Self::Rows { rank, .. } => *rank,
        }
    }

    pub(super) fn learn_rank(&mut self, known: usize) {
        match self {
            Self::Fixed { rank, .. } => *rank = Some(rank.unwrap_or(known)),
            Self::Rows { axis, rank } if rank.is_none() => {
                *rank = Some(known);
                *axis = axis.filter(|&axis| axis < known);
            }
            Self::Rows { .. } => {}
        }
    }

    /// What holds for a value that may be either.
    pub(super) fn or(&self, other: &Self) -> Self {
        let same_rank = if self.rank() == other.rank() {
            self.rank()
        } else {
            None
        };
        match (self, other) {
            (Self::Fixed { items: a, .. }, Self::Fixed { items: b, .. }) => Self::Fixed {
                rank: same_rank,
                items: a.clone().filter(|_| a == b),
            },
            (Self::Rows { axis: a, .. }, Self::Rows { axis: b, .. }) => Self::Rows {
                axis: a.filter(|_| a == b),
                rank: same_rank,
            },
            (Self::Rows { axis, .. }, _) | (_, Self::Rows { axis, .. }) => Self::Rows {
                axis: *axis,
                rank: same_rank,
            },
        }
    }
}

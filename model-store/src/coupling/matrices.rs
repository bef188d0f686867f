//! Products: what they sum over, and whether they pair rows with rows.

use super::facts::Fact;
use super::step::{Outcome, Step};

const SUMS: &str = "sums over the axis that carries the batch";
const PAIRS: &str = "combines rows of the batch with other rows";

/// How an operand of a product carries the batch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// On the axis the product sums over.
    Summed,
    /// On the matrix axis that remains.
    Remaining,
    /// On a leading axis, counted from the end.
    Leading(usize),
    NotKnown,
}

/// Operands `a` and `b` of a product over the last axis of `a` and the last but one of `b`.
pub(super) fn matmul(step: &Step<'_, '_>, a: usize, b: usize) -> Outcome {
    let nothing = Fact::fixed(None);
    let a = step.inputs.get(a).unwrap_or(&nothing);
    let b = step.inputs.get(b).unwrap_or(&nothing);
    let left = role(a, |from_end, _| match from_end {
        1 => Role::Summed,
        2 => Role::Remaining,
        _ => Role::Leading(from_end),
    });
    let right = role(b, |from_end, rank| match from_end {
        1 if rank > 1 => Role::Remaining,
        1 | 2 => Role::Summed,
        _ => Role::Leading(from_end),
    });
    if [left, right].contains(&Some(Role::Summed)) {
        return Outcome::coupled(SUMS);
    }
    let rank = match (a.rank(), b.rank()) {
        (Some(a), Some(b)) if a > 1 && b > 1 => Some(a.max(b)),
        _ => None,
    };
    match (left, right) {
        (Some(Role::NotKnown), _) | (_, Some(Role::NotKnown)) | (None, None) => {
            Outcome::rows(unaligned_axis(&[a, b]), rank)
        }
        (Some(left), Some(right)) if left != right || left == Role::Remaining => {
            Outcome::coupled(PAIRS)
        }
        (Some(role), _) => Outcome::rows(axis_of(role, 2, rank).or(unaligned_axis(&[a])), rank),
        (_, Some(role)) => Outcome::rows(axis_of(role, 1, rank).or(unaligned_axis(&[b])), rank),
    }
}

fn role(fact: &Fact, by_distance: impl Fn(usize, usize) -> Role) -> Option<Role> {
    match *fact {
        Fact::Fixed { .. } => None,
        Fact::Rows {
            axis: Some(axis),
            rank: Some(rank),
        } => Some(by_distance(rank - axis, rank)),
        Fact::Rows { .. } => Some(Role::NotKnown),
    }
}

fn axis_of(role: Role, remaining_from_end: usize, rank: Option<usize>) -> Option<usize> {
    let from_end = match role {
        Role::Leading(from_end) => from_end,
        _ => remaining_from_end,
    };
    rank?.checked_sub(from_end)
}

/// The axis of the first operand that tells one, taken as it is.
pub(super) fn unaligned_axis(facts: &[&Fact]) -> Option<usize> {
    facts.iter().find_map(|fact| match fact {
        Fact::Rows { axis, .. } => *axis,
        Fact::Fixed { .. } => None,
    })
}

pub(super) fn gemm(step: &Step<'_, '_>) -> Outcome {
    let axis = |index: usize| step.place(index).map(|place| place.axis.unwrap_or(0));
    // Where the operand's axis ends up: 0 and 1 in the product, 2 is summed away.
    let a = axis(0).map(|axis| {
        if (axis == 0) != step.flag("transA") {
            0
        } else {
            2
        }
    });
    let b = axis(1).map(|axis| {
        if (axis == 1) != step.flag("transB") {
            1
        } else {
            2
        }
    });
    match (a, b) {
        (Some(2), _) | (_, Some(2)) => Outcome::coupled(SUMS),
        (Some(_), Some(_)) => Outcome::coupled(PAIRS),
        (Some(axis), None) | (None, Some(axis)) => Outcome::rows(Some(axis), Some(2)),
        (None, None) => Outcome::rows(Some(0), Some(2)),
    }
}

/// Operators that work on each element, shapes lined up from the end.
pub(super) fn elementwise(step: &Step<'_, '_>) -> Outcome {
    let given = step.node.inputs.iter().zip(&step.inputs);
    let facts: Vec<&Fact> = given
        .filter(|(name, _)| **name != 0)
        .map(|(_, fact)| fact)
        .collect();
    let ranks: Option<Vec<usize>> = facts.iter().map(|fact| fact.rank()).collect();
    let rank = ranks.and_then(|ranks| ranks.into_iter().max());
    let mut from_end: Option<usize> = None;
    for fact in &facts {
        if let Fact::Rows {
            axis: Some(axis),
            rank: Some(rank),
        } = **fact
        {
            let this = rank - axis;
            if from_end.is_some_and(|other| other != this) {
                return Outcome::coupled(PAIRS);
            }
            from_end = Some(this);
        }
    }
    let aligned = from_end
        .zip(rank)
        .and_then(|(from_end, rank)| rank.checked_sub(from_end));
    Outcome::rows(aligned.or(unaligned_axis(&facts)), rank)
}

/// `Einsum`, when its equation spells out every axis.
pub(super) fn einsum(step: &Step<'_, '_>) -> Outcome {
    let guess = || Outcome::rows(step.first_place().and_then(|place| place.axis), None);
    let equation = step.text("equation").unwrap_or_default();
    let equation: String = equation
        .iter()
        .map(|&byte| char::from(byte))
        .filter(|c| !c.is_whitespace())
        .collect();
    let Some((terms, result)) = equation.split_once("->") else {
        return guess();
    };
    if equation.contains('.') {
        return guess();
    }
    let mut batch: Option<char> = None;
    for (index, term) in terms.split(',').enumerate() {
        let Some(place) = step.place(index) else {
            continue;
        };
        let Some(letter) = place.axis.and_then(|axis| term.chars().nth(axis)) else {
            return guess();
        };
        if !result.contains(letter) {
            return Outcome::coupled(SUMS);
        }
        if batch.is_some_and(|other| other != letter) {
            return Outcome::coupled(PAIRS);
        }
        batch = Some(letter);
    }
    match batch {
        Some(letter) => Outcome::rows(result.find(letter), Some(result.chars().count())),
        None => guess(),
    }
}

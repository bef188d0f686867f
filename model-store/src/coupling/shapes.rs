//! Values that are the same for every row: followed as far as the shapes of rows depend on them.

use super::facts::{Fact, Item, Items};
use super::step::{Outcome, Place, Step, resolve};

/// Longer lists are not shapes.
const LONGEST: usize = 64;

/// The shape of a value that carries rows.
pub(super) fn shape(step: &Step<'_, '_>) -> Outcome {
    let items = match step.inputs.first() {
        Some(&Fact::Rows {
            axis: Some(axis),
            rank,
        }) => {
            let count = rank.unwrap_or(axis + 1);
            let item = |at| {
                if at == axis {
                    Item::Batch
                } else {
                    Item::Unknown
                }
            };
            Some(Items {
                list: (0..count).map(item).collect(),
                open: rank.is_none(),
            })
        }
        Some(fact) => fact
            .rank()
            .map(|rank| Items::closed(vec![Item::Unknown; rank])),
        None => None,
    };
    let start = step.int("start").unwrap_or(0);
    let items = match step.int("end") {
        None if start == 0 => items,
        end => items.and_then(|items| cut(&items, start, end.unwrap_or(i64::MAX), 1)),
    };
    Outcome::of(Fact::Fixed {
        rank: Some(1),
        items,
    })
}

/// Any operator whose inputs are all the same for every row.
pub(super) fn fixed(step: &Step<'_, '_>) -> Outcome {
    Outcome::of(fixed_fact(step).unwrap_or(Fact::fixed(None)))
}

fn fixed_fact(step: &Step<'_, '_>) -> Option<Fact> {
    let first = step.inputs.first();
    let rank = first.and_then(Fact::rank);
    Some(match step.op {
        "Constant" => constant(step),
        "Size" => match step.items(0).filter(|items| !items.open) {
            Some(items) => Fact::items(vec![Item::Known(items.list.len() as i64)], 0),
            None => Fact::fixed(Some(0)),
        },
        "Range" => range(step).unwrap_or(Fact::fixed(Some(1))),
        "ConstantOfShape" => Fact::fixed(step.items(0).filter(|i| !i.open).map(|i| i.list.len())),
        "Identity" | "Cast" | "CastLike" | "Floor" | "Ceil" | "Relu" | "Sqrt" | "Neg" | "Not" => {
            match first? {
                Fact::Fixed { items, .. } if matches!(step.op, "Identity" | "Cast") => {
                    Fact::Fixed {
                        rank,
                        items: items.clone(),
                    }
                }
                _ => Fact::fixed(rank),
            }
        }
        "Unsqueeze" => Fact::Fixed {
            rank: step
                .listed("axes", 1)
                .and_then(|axes| Some(rank? + axes.len())),
            items: step.items(0).cloned(),
        },
        "Squeeze" => Fact::Fixed {
            rank: match step.listed("axes", 1) {
                Some(axes) => rank?.checked_sub(axes.len()),
                // A list of one number becomes that number.
                None => rank.filter(|&rank| rank <= 1).map(|_| 0),
            },
            items: step.items(0).cloned(),
        },
        "Reshape" => {
            let target = step.items(1).filter(|items| !items.open);
            Fact::Fixed {
                rank: target.map(|target| target.list.len()),
                items: step.items(0).cloned(),
            }
        }
        "Concat" if rank == Some(1) => {
            let mut list = Vec::new();
            let mut open = false;
            for index in 0..step.inputs.len() {
                let items = step.items(index)?;
                list.extend(items.list.iter().copied().filter(|_| !open));
                open |= items.open;
                if list.len() > LONGEST {
                    return Some(Fact::fixed(Some(1)));
                }
            }
            Fact::Fixed {
                rank: Some(1),
                items: Some(Items { list, open }),
            }
        }
        "Gather" => gather(step, rank),
        "Slice" => Fact::Fixed {
            rank,
            items: slice_items(step),
        },
        "Add" | "Sub" | "Mul" | "Div" => arithmetic(step)?,
        "Transpose" | "Softmax" | "Where" | "Equal" | "Less" | "Greater" | "And" | "Or" | "Pow" => {
            Fact::fixed(common_rank(&step.inputs))
        }
        _ => return None,
    })
}

/// The highest rank, when all are known.
pub(super) fn common_rank(inputs: &[Fact]) -> Option<usize> {
    let ranks: Option<Vec<usize>> = inputs.iter().map(Fact::rank).collect();
    ranks?.into_iter().max()
}

fn constant(step: &Step<'_, '_>) -> Fact {
    if let Some(constant) = step.tensor("value").or(step.tensor("sparse_value")) {
        return Fact::constant(constant);
    }
    if let Some(int) = step.int("value_int") {
        return Fact::items(vec![Item::Known(int)], 0);
    }
    match step.ints("value_ints") {
        Some(ints) if ints.len() <= LONGEST => {
            Fact::items(ints.iter().copied().map(Item::Known).collect(), 1)
        }
        _ => Fact::fixed(None),
    }
}

/// Axes are sometimes counted out from one to the last.
fn range(step: &Step<'_, '_>) -> Option<Fact> {
    let number = |index: usize| match step.known_input(index)?.as_slice() {
        &[number] => Some(number),
        _ => None,
    };
    let (start, limit, stride) = (number(0)?, number(1)?, number(2)?);
    let count = limit.checked_sub(start).filter(|_| stride == 1)?;
    let fits = (0..=LONGEST as i64).contains(&count);
    fits.then(|| Fact::items((start..limit).map(Item::Known).collect(), 1))
}

fn gather(step: &Step<'_, '_>, rank: Option<usize>) -> Fact {
    let index_rank = step.inputs.get(1).and_then(Fact::rank);
    let out = match (rank, index_rank) {
        (Some(rank), Some(index)) => (rank + index).checked_sub(1),
        _ => None,
    };
    let picked = step
        .items(0)
        .zip(step.known_input(1))
        .filter(|_| rank == Some(1));
    let items = picked.and_then(|(items, picks)| {
        if items.open && picks.iter().any(|&pick| pick < 0) {
            return None;
        }
        let pick = |pick: i64| Some(items.at(resolve(pick, Some(items.list.len()))?));
        picks.into_iter().map(pick).collect::<Option<Vec<Item>>>()
    });
    Fact::Fixed {
        rank: out,
        items: items.map(Items::closed),
    }
}

fn slice_items(step: &Step<'_, '_>) -> Option<Items> {
    let one = |list: Vec<i64>| (list.len() == 1).then(|| list[0]);
    let start = one(step.listed("starts", 1)?)?;
    let end = one(step.listed("ends", 2)?)?;
    let axis = match step.listed("axes", 3) {
        Some(axes) => one(axes)?,
        None => 0,
    };
    let stride = match step.has_input(4) {
        true => one(step.known_input(4)?)?,
        false => 1,
    };
    let first_axis = axis == 0 || axis == -1;
    let items = step.items(0).filter(|_| first_axis)?;
    cut(items, start, end, stride)
}

fn cut(items: &Items, start: i64, end: i64, stride: i64) -> Option<Items> {
    if stride != 1 || (items.open && (start < 0 || end < 0)) {
        return None;
    }
    let length = items.list.len();
    let clamp = |at: i64| match resolve(at, Some(length)) {
        Some(at) => at.min(length),
        None => 0,
    };
    let (from, to) = (clamp(start), clamp(end));
    let beyond = usize::try_from(end).is_ok_and(|end| end > length);
    Some(Items {
        list: items.list.get(from..to.max(from))?.to_vec(),
        open: items.open && beyond,
    })
}

fn arithmetic(step: &Step<'_, '_>) -> Option<Fact> {
    let rank = common_rank(&step.inputs);
    let (Some(a), Some(b)) = (step.items(0), step.items(1)) else {
        return Some(Fact::fixed(rank));
    };
    if a.open || b.open || a.list.is_empty() || b.list.is_empty() {
        return Some(Fact::fixed(rank));
    }
    let length = a.list.len().max(b.list.len());
    if [a, b]
        .iter()
        .any(|list| list.list.len() != 1 && list.list.len() != length)
    {
        return Some(Fact::fixed(rank));
    }
    let at = |items: &Items, index: usize| items.at(if items.list.len() == 1 { 0 } else { index });
    let list = (0..length).map(|index| compute(step.op, at(a, index), at(b, index)));
    Some(Fact::Fixed {
        rank,
        items: Some(Items::closed(list.collect())),
    })
}

fn compute(op: &str, a: Item, b: Item) -> Item {
    use Item::{Batch, Known, Unknown};
    match (op, a, b) {
        (_, Known(a), Known(b)) => match op {
            "Add" => a.checked_add(b),
            "Sub" => a.checked_sub(b),
            "Mul" => a.checked_mul(b),
            _ => a.checked_div(b),
        }
        .map_or(Unknown, Known),
        ("Mul", Batch, _) | ("Mul", _, Batch) | ("Div", Batch, Known(_)) => Batch,
        _ => Unknown,
    }
}

/// Where the batch is after a `Reshape`.
pub(super) fn reshape(step: &Step<'_, '_>, place: Place) -> Outcome {
    let from_attribute = step
        .ints("shape")
        .map(|shape| Items::closed(shape.iter().copied().map(Item::Known).collect()));
    let target = match from_attribute.as_ref().or(step.items(1)) {
        Some(target) => target,
        // A shape that cannot be followed most often keeps its leading dimension.
        None => return Outcome::rows(place.axis.filter(|&axis| axis == 0), None),
    };
    let rank = (!target.open).then_some(target.list.len());
    let Some(axis) = place.axis else {
        return Outcome::rows(None, rank);
    };
    let batch = target.list.iter().position(|&item| item == Item::Batch);
    if axis > 0 {
        let copied = |item: &Item| *item == Item::Known(0);
        let kept = target.list.len() > axis && target.list[..axis].iter().all(copied);
        return Outcome::rows(if kept { Some(axis) } else { batch }, rank);
    }
    let leading_ones = target
        .list
        .iter()
        .take_while(|&&item| item == Item::Known(1))
        .count();
    let behind_ones = target.list.get(leading_ones);
    match behind_ones {
        // Zero copies the dimension, minus one takes what remains, rows still first.
        Some(Item::Known(0)) if leading_ones == 0 => Outcome::rows(Some(0), rank),
        Some(Item::Known(-1) | Item::Batch) => Outcome::rows(Some(leading_ones), rank),
        Some(Item::Unknown) if leading_ones == 0 => Outcome::rows(Some(0), rank),
        _ if target.open => Outcome::rows(None, rank),
        _ if batch.is_some() => Outcome::rows(None, rank),
        _ => {
            let shape: Vec<String> = target.list.iter().map(show).collect();
            Outcome::coupled(format!(
                "reshapes to [{}], which leaves no first dimension for the batch",
                shape.join(",")
            ))
        }
    }
}

fn show(item: &Item) -> String {
    match item {
        Item::Known(number) => number.to_string(),
        Item::Batch => "batch".to_owned(),
        Item::Unknown => "?".to_owned(),
    }
}

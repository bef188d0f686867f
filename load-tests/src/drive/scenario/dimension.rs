//! Sizes of open dimensions: `4`, `"16..128"` (evenly, both ends included) or `[32, 128]` (one of
//! them).

use std::fmt;

use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::drive::dice::Dice;

/// How large a dimension is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Dimension {
    Fixed(i64),
    /// Both ends included.
    Range(i64, i64),
    Choice(Vec<i64>),
}

impl Dimension {
    /// A size.
    pub(crate) fn draw(&self, dice: &mut Dice) -> i64 {
        match self {
            Self::Fixed(size) => *size,
            Self::Range(from, to) => {
                let span = from.abs_diff(*to).saturating_add(1);
                from.saturating_add_unsigned(dice.below(span))
            }
            Self::Choice(sizes) => sizes[dice.index(sizes.len())],
        }
    }
}

impl Serialize for Dimension {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Fixed(size) => serializer.serialize_i64(*size),
            Self::Range(from, to) => serializer.collect_str(&format_args!("{from}..{to}")),
            Self::Choice(sizes) => sizes.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Dimension {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        input.deserialize_any(Forms)
    }
}

struct Forms;

impl<'de> Visitor<'de> for Forms {
    type Value = Dimension;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a size, a range such as \"16..128\", or a list of sizes")
    }

    fn visit_i64<E: de::Error>(self, size: i64) -> Result<Dimension, E> {
        checked(size).map(Dimension::Fixed)
    }

    fn visit_u64<E: de::Error>(self, size: u64) -> Result<Dimension, E> {
        self.visit_i64(i64::try_from(size).unwrap_or(i64::MAX))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Dimension, E> {
        let ends = text.split_once("..").and_then(|(from, to)| {
            let (from, to) = (from.trim().parse().ok()?, to.trim().parse().ok()?);
            (from <= to).then_some((from, to))
        });
        let Some((from, to)) = ends else {
            return Err(E::custom(format!(
                "{text:?} is not a range of sizes such as \"16..128\""
            )));
        };
        Ok(Dimension::Range(checked(from)?, checked(to)?))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Dimension, A::Error> {
        let mut sizes = Vec::new();
        while let Some(size) = list.next_element()? {
            sizes.push(checked(size)?);
        }
        if sizes.is_empty() {
            return Err(de::Error::custom("a list of sizes has at least one"));
        }
        Ok(Dimension::Choice(sizes))
    }
}

/// A size that a tensor can have.
fn checked<E: de::Error>(size: i64) -> Result<i64, E> {
    if (0..=1 << 32).contains(&size) {
        return Ok(size);
    }
    Err(E::custom(format!("{size} is not a size of a dimension")))
}

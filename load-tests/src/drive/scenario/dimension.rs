//! Sizes of open dimensions: `4`, `"16..128"` (evenly, both ends included), `[32, 128]` (one of
//! them), `{ 32 = 3, 128 = 1 }` (by weight), `{ median = 40, sigma = 0.7, to = 512 }` (log-normal),
//! or the name of a dimension that is drawn once for the whole request.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use anyhow::{Context, bail};
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, IgnoredAny, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::drive::dice::Dice;

/// What a tensor's dimension may be.
const LARGEST: i64 = 1 << 32;

/// How large a dimension is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Dimension {
    Fixed(i64),
    /// Both ends included.
    Range(i64, i64),
    Choice(Vec<i64>),
    /// Sizes with their weights.
    Weighted(Vec<(i64, f64)>),
    LogNormal(LogNormal),
    /// What `dims` says of this name; the same wherever a request names it.
    Named(String),
}

/// Many small sizes and few large ones, as lengths of texts are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LogNormal {
    /// Half of the sizes are smaller.
    median: f64,
    /// Standard deviation of the size's logarithm.
    sigma: f64,
    /// Smaller ones become this.
    #[serde(default = "LogNormal::usual_from")]
    from: i64,
    /// Larger ones become this.
    to: i64,
}

/// Sizes of named dimensions, drawn for one request.
pub(crate) type Drawn<'a> = BTreeMap<&'a str, i64>;

impl LogNormal {
    fn usual_from() -> i64 {
        1
    }

    fn draw(&self, dice: &mut Dice) -> i64 {
        let size = self.median * (self.sigma * dice.normal()).exp();
        (size.round() as i64).clamp(self.from, self.to)
    }

    fn check(&self) -> Result<(), String> {
        let Self { from, to, .. } = *self;
        size(from)?;
        size(to)?;
        if !(self.median > 0.0 && self.median.is_finite()) {
            return Err("median: above 0".to_owned());
        }
        if !(0.0..=10.0).contains(&self.sigma) {
            return Err("sigma: from 0 to 10".to_owned());
        }
        if from > to {
            return Err(format!("from: {from} is larger than to, {to}"));
        }
        Ok(())
    }
}

impl Dimension {
    /// A size. A name that was not drawn is 1, which `ModelLoad::check` rules out.
    pub(crate) fn draw(&self, dice: &mut Dice, named: &Drawn<'_>) -> i64 {
        match self {
            Self::Fixed(size) => *size,
            Self::Range(from, to) => {
                let span = from.abs_diff(*to).saturating_add(1);
                from.saturating_add_unsigned(dice.below(span))
            }
            Self::Choice(sizes) => sizes[dice.index(sizes.len())],
            Self::Weighted(sizes) => {
                let sum: f64 = sizes.iter().map(|(_, weight)| weight).sum();
                let mut point = dice.fraction() * sum;
                let mut drawn = 1;
                for (size, weight) in sizes.iter().filter(|(_, weight)| *weight > 0.0) {
                    drawn = *size;
                    if point < *weight {
                        break;
                    }
                    point -= weight;
                }
                drawn
            }
            Self::LogNormal(sizes) => sizes.draw(dice),
            Self::Named(name) => named.get(name.as_str()).copied().unwrap_or(1),
        }
    }
}

impl Serialize for Dimension {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Fixed(size) => serializer.serialize_i64(*size),
            Self::Range(from, to) => serializer.collect_str(&format_args!("{from}..{to}")),
            Self::Choice(sizes) => sizes.serialize(serializer),
            Self::Weighted(sizes) => {
                let mut map = serializer.serialize_map(Some(sizes.len()))?;
                for (size, weight) in sizes {
                    map.serialize_entry(&size.to_string(), weight)?;
                }
                map.end()
            }
            Self::LogNormal(sizes) => sizes.serialize(serializer),
            Self::Named(name) => serializer.serialize_str(name),
        }
    }
}

impl<'de> Deserialize<'de> for Dimension {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        input.deserialize_any(Forms)
    }
}

/// As on a command line: `16`, `16..128`, `N`, `1,2,4`, or what a scenario has in brackets.
impl FromStr for Dimension {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        #[derive(Deserialize)]
        struct Line {
            size: Dimension,
        }

        let text = text.trim();
        if text.starts_with(['{', '[']) {
            let line: Line = toml::from_str(&format!("size = {text}"))
                .map_err(|error| anyhow::anyhow!("{}", error.message()))?;
            return Ok(line.size);
        }
        if let Ok(size) = text.parse::<i64>() {
            return Ok(Self::Fixed(self::size(size).map_err(anyhow::Error::msg)?));
        }
        if !text.contains(',') {
            return words(text).map_err(anyhow::Error::msg);
        }
        let mut sizes = Vec::new();
        for part in text.split(',') {
            let number = part.trim().parse().ok();
            let number = number.with_context(|| format!("{:?} is not a size", part.trim()))?;
            sizes.push(size(number).map_err(anyhow::Error::msg)?);
        }
        Ok(Self::Choice(sizes))
    }
}

/// The dimensions of an input on a command line: `N,L`, `1,16..128`, `[1, 4],L`.
pub(crate) fn shape(text: &str) -> anyhow::Result<Vec<Dimension>> {
    let mut depth = 0i32;
    let mut parts = vec![String::new()];
    for letter in text.chars() {
        match letter {
            '[' | '{' => depth += 1,
            ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(part) = parts.last_mut() {
            part.push(letter);
        }
    }
    if depth != 0 {
        bail!("brackets in {text:?} are not in pairs");
    }
    parts.iter().map(|part| part.parse()).collect()
}

struct Forms;

impl<'de> Visitor<'de> for Forms {
    type Value = Dimension;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "a size, a range such as \"16..128\", a list of sizes, sizes with their weights, \
             median, sigma and to of a log-normal distribution, or the name of one of dims",
        )
    }

    fn visit_i64<E: de::Error>(self, size: i64) -> Result<Dimension, E> {
        checked(size).map(Dimension::Fixed)
    }

    fn visit_u64<E: de::Error>(self, size: u64) -> Result<Dimension, E> {
        self.visit_i64(i64::try_from(size).unwrap_or(i64::MAX))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Dimension, E> {
        words(text).map_err(E::custom)
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

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Dimension, A::Error> {
        let Some(first) = map.next_key::<String>()? else {
            return Err(de::Error::custom("sizes with their weights: at least one"));
        };
        if first.parse::<i64>().is_err() {
            let map = WithFirst {
                first: Some(first),
                rest: map,
            };
            let sizes = LogNormal::deserialize(MapAccessDeserializer::new(map))?;
            sizes.check().map_err(de::Error::custom)?;
            return Ok(Dimension::LogNormal(sizes));
        }
        let mut sizes = Vec::new();
        let mut next = Some(first);
        while let Some(key) = next {
            let Ok(size) = key.parse() else {
                map.next_value::<IgnoredAny>()?;
                return Err(de::Error::custom(format!("{key:?} is not a size")));
            };
            let weight: f64 = map.next_value()?;
            if !(0.0..=1e9).contains(&weight) {
                return Err(de::Error::custom(format!(
                    "the weight of {size}: from 0 to 1e9"
                )));
            }
            sizes.push((checked(size)?, weight));
            next = map.next_key()?;
        }
        if sizes.iter().all(|(_, weight)| *weight == 0.0) {
            return Err(de::Error::custom("one of the weights must be above 0"));
        }
        // The same draws whatever order a reader keeps keys in.
        sizes.sort_unstable_by_key(|(size, _)| *size);
        Ok(Dimension::Weighted(sizes))
    }
}

/// A map of which the first key was read already.
struct WithFirst<A> {
    first: Option<String>,
    rest: A,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for WithFirst<A> {
    type Error = A::Error;

    fn next_key_seed<K: de::DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        match self.first.take() {
            Some(first) => seed.deserialize(first.into_deserializer()).map(Some),
            None => self.rest.next_key_seed(seed),
        }
    }

    fn next_value_seed<V: de::DeserializeSeed<'de>>(
        &mut self,
        seed: V,
    ) -> Result<V::Value, A::Error> {
        self.rest.next_value_seed(seed)
    }
}

/// A range or a name.
fn words(text: &str) -> Result<Dimension, String> {
    if is_name(text) {
        return Ok(Dimension::Named(text.to_owned()));
    }
    let ends = text.split_once("..").and_then(|(from, to)| {
        let (from, to) = (from.trim().parse().ok()?, to.trim().parse().ok()?);
        (from <= to).then_some((from, to))
    });
    let Some((from, to)) = ends else {
        return Err(format!(
            "{text:?} is not a range of sizes such as \"16..128\", nor a name such as \"L\""
        ));
    };
    Ok(Dimension::Range(size(from)?, size(to)?))
}

/// What a named dimension may be called.
pub(crate) fn is_name(text: &str) -> bool {
    let mut letters = text.chars();
    letters
        .next()
        .is_some_and(|first| first.is_ascii_alphabetic() || first == '_')
        && letters.all(|letter| letter.is_ascii_alphanumeric() || "_-".contains(letter))
}

/// A size that a tensor can have.
fn size(size: i64) -> Result<i64, String> {
    match (0..=LARGEST).contains(&size) {
        true => Ok(size),
        false => Err(format!("{size} is not a size of a dimension")),
    }
}

fn checked<E: de::Error>(number: i64) -> Result<i64, E> {
    size(number).map_err(E::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(text: &str) -> Vec<i64> {
        let dimension: Dimension = text.parse().unwrap();
        let mut dice = Dice::new(1, 0);
        let sizes = (0..4000).map(|_| dimension.draw(&mut dice, &Drawn::new()));
        let mut sizes: Vec<i64> = sizes.collect();
        sizes.sort_unstable();
        sizes
    }

    #[test]
    fn every_form_is_read_and_written() {
        for text in [
            "4",
            "\"16..128\"",
            "[32,128]",
            "{\"32\":3.0,\"128\":0.5}",
            "{\"median\":40.0,\"sigma\":0.7,\"from\":4,\"to\":512}",
            "\"L\"",
        ] {
            let dimension: Dimension = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&dimension).unwrap(), text);
        }
    }

    #[test]
    fn sizes_are_drawn_as_often_as_they_should_be() {
        let sizes = drawn("16..19");
        assert_eq!((sizes[0], sizes[3999]), (16, 19));
        let sizes = drawn("1,8");
        let ones = sizes.partition_point(|&size| size < 8);
        assert!((1800..2200).contains(&ones), "{ones}");
        let sizes = drawn("{ 1 = 3, 2 = 0, 8 = 1 }");
        let ones = sizes.partition_point(|&size| size == 1);
        assert!((2800..3200).contains(&ones), "{ones}");
        assert!(!sizes.contains(&2));
    }

    #[test]
    fn log_normal_sizes_have_their_median_and_tail_and_stay_within_their_ends() {
        let sizes = drawn("{ median = 40, sigma = 0.7, from = 4, to = 200 }");
        assert!((38..=42).contains(&sizes[2000]), "{}", sizes[2000]);
        // A tenth is beyond exp(1.28 sigma) times the median.
        assert!((92..=104).contains(&sizes[3600]), "{}", sizes[3600]);
        assert!(sizes[0] >= 4 && sizes[3999] == 200);
        let sizes = drawn("{ median = 40, sigma = 0, to = 200 }");
        assert_eq!((sizes[0], sizes[3999]), (40, 40));
    }

    #[test]
    fn command_lines_name_shapes_and_sizes() {
        let named = |name: &str| Dimension::Named(name.to_owned());
        assert_eq!(shape("N,L").unwrap(), [named("N"), named("L")]);
        let mixed = shape("[1, 4], 16..32,3").unwrap();
        let wanted = [
            Dimension::Choice(vec![1, 4]),
            Dimension::Range(16, 32),
            Dimension::Fixed(3),
        ];
        assert_eq!(mixed, wanted);
        for (text, words) in [
            ("1,x!", "\"x!\" is not a range"),
            ("[1,2", "not in pairs"),
            ("-4", "not a size"),
            ("", "\"\" is not a range"),
        ] {
            let error = shape(text).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (text, words) in [
            ("1,two", "\"two\" is not a size"),
            ("{ 1 = -1 }", "the weight of 1"),
            ("{ 1 = 0 }", "above 0"),
            ("{ 1 = 1, many = 2 }", "\"many\" is not a size"),
            ("{ }", "at least one"),
            ("{ median = 3, sigma = 1 }", "missing field `to`"),
            ("{ median = 3, sigma = 1, to = 9, at = 1 }", "`at`"),
            ("{ median = 0, sigma = 1, to = 9 }", "median: above 0"),
            ("{ median = 3, sigma = -1, to = 9 }", "sigma: from 0"),
            ("{ median = 3, sigma = 1, from = 10, to = 9 }", "from: 10"),
        ] {
            let error = text.parse::<Dimension>().unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}

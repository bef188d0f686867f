//! Makes inputs of other inputs: some changes know nothing of what they change, some keep its
//! form, so that what lies behind the first check is reached as well.

use std::path::Path;

/// What inputs look like.
#[derive(Clone, Copy, Debug)]
pub(super) enum Form {
    Plain,
    /// Lengths of messages are kept in order.
    Protobuf,
    /// Numbers in it are changed as numbers.
    Text,
    /// Text behind its length of so many bytes, and anything behind that.
    SizedText {
        prefix: usize,
    },
}

const NUMBERS: &[u64] = &[
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    15,
    16,
    31,
    32,
    63,
    64,
    65,
    100,
    127,
    128,
    255,
    256,
    4095,
    4096,
    4097,
    0x7fff,
    0x8000,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_ffff,
];

const WRITTEN_NUMBERS: &[&str] = &[
    "0",
    "1",
    "2",
    "-1",
    "-0",
    "8",
    "16",
    "64",
    "255",
    "256",
    "65536",
    "2147483647",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e400",
    "1.5",
    "-2",
    "1e-400",
    "00",
    "0x10",
    "NaN",
];

/// Deeper messages are changed as bytes.
const DEEPEST: usize = 6;

pub(super) struct Mutator {
    state: u64,
    form: Form,
    dictionary: Vec<Vec<u8>>,
}

impl Mutator {
    pub(super) fn new(seed: u64, form: Form, dictionary: Vec<Vec<u8>>) -> Self {
        Self {
            state: seed,
            form,
            dictionary,
        }
    }

    /// One of the pool, changed in one to eight places.
    pub(super) fn next(&mut self, pool: &[Vec<u8>]) -> Vec<u8> {
        let mut data = self.pick(pool).clone();
        for _ in 0..1 << self.below(4) {
            data = match self.below(8) {
                0 => self.blind(data),
                1 if self.below(4) == 0 => self.spliced(&data, pool),
                _ => self.formed(data),
            };
        }
        data
    }

    fn formed(&mut self, data: Vec<u8>) -> Vec<u8> {
        match self.form {
            Form::Plain => self.blind(data),
            Form::Protobuf => self.message(&data, 0),
            Form::Text => self.text(data),
            Form::SizedText { prefix } => self.sized(data, prefix),
        }
    }

    /// Changes that know nothing of the form.
    fn blind(&mut self, mut data: Vec<u8>) -> Vec<u8> {
        let at = self.below(data.len() + 1);
        let end = (at + 1 + self.below(8)).min(data.len());
        match self.below(9) {
            0 => data.truncate(at),
            1 => drop(data.drain(at..end.max(at))),
            2 => {
                let copy = data[at..end.max(at)].to_vec();
                data.splice(at..at, copy);
            }
            3 => data.insert(at, self.draw() as u8),
            4 => {
                let token = self.token();
                data.splice(at..at, token);
            }
            5 => {
                let token = self.token();
                let end = (at + token.len()).min(data.len());
                data.splice(at..end, token);
            }
            6 if at < data.len() => data[at] ^= 1 << self.below(8),
            7 => {
                let width = 1 << self.below(4);
                let number = *self.pick(NUMBERS);
                let end = (at + width).min(data.len());
                data.splice(at..end, number.to_le_bytes()[..width].to_vec());
            }
            _ if at < data.len() => data[at] = self.draw() as u8,
            _ => {}
        }
        data
    }

    fn spliced(&mut self, data: &[u8], pool: &[Vec<u8>]) -> Vec<u8> {
        let other = self.pick(pool).clone();
        let (end, start) = (self.below(data.len() + 1), self.below(other.len() + 1));
        [&data[..end], &other[start..]].concat()
    }

    /// Changes a number, a word or a line, or anything at all.
    fn text(&mut self, mut data: Vec<u8>) -> Vec<u8> {
        let runs: Vec<_> = runs(&data).collect();
        if runs.is_empty() || self.below(4) == 0 {
            return self.blind(data);
        }
        let (start, end, is_number) = *self.pick(&runs);
        match (self.below(6), is_number) {
            (0, _) => drop(data.drain(start..end)),
            (1, _) => {
                // From here to the end of another word, once more.
                let (_, other, _) = *self.pick(&runs);
                let copy = data[start..other.max(end)].to_vec();
                data.splice(start..start, copy);
            }
            (2, _) => {
                let (from, to, _) = *self.pick(&runs);
                let copy = data[from..to].to_vec();
                data.splice(start..end, copy);
            }
            (3, _) | (_, false) => {
                let token = self.token();
                data.splice(start..end, token);
            }
            _ => {
                let number = self.pick(WRITTEN_NUMBERS).bytes();
                data.splice(start..end, number);
            }
        }
        data
    }

    /// Changes the text or what is behind it, and mostly keeps the length right.
    fn sized(&mut self, data: Vec<u8>, prefix: usize) -> Vec<u8> {
        let mut length = [0; 8];
        let Some(given) = data.get(..prefix) else {
            return self.blind(data);
        };
        length[..prefix].copy_from_slice(given);
        let length = u64::from_le_bytes(length);
        let rest = &data[prefix..];
        let split = usize::try_from(length)
            .unwrap_or(usize::MAX)
            .min(rest.len());
        let (text, tail) = rest.split_at(split);
        let (mut text, mut tail) = (text.to_vec(), tail.to_vec());
        match self.below(8) {
            0 => tail = self.blind(tail),
            _ => text = self.text(text),
        }
        let told = match self.below(16) {
            0 => self.pick(NUMBERS).to_le_bytes(),
            _ => (text.len() as u64).to_le_bytes(),
        };
        [&told[..prefix], &text, &tail].concat()
    }

    /// Changes a field of a message, or of a message in it, whose lengths are right afterwards.
    fn message(&mut self, data: &[u8], depth: usize) -> Vec<u8> {
        let Some(mut fields) = Field::read(data).filter(|fields| !fields.is_empty()) else {
            return match std::str::from_utf8(data).is_ok() && self.below(2) == 0 {
                true => self.text(data.to_vec()),
                false => self.blind(data.to_vec()),
            };
        };
        let at = self.below(fields.len());
        match self.below(12) {
            0 => drop(fields.remove(at)),
            1 => {
                let copy = fields[at].clone();
                fields.insert(self.below(fields.len() + 1), copy);
            }
            2 => {
                let other = self.below(fields.len());
                fields.swap(at, other);
            }
            3 => fields[at].number = 1 + self.below(30) as u64,
            4 => {
                let (number, value) = (1 + self.below(30) as u64, *self.pick(NUMBERS));
                fields.insert(
                    at,
                    Field {
                        number,
                        value: Value::Number(value),
                    },
                );
            }
            5 => {
                let (number, token) = (1 + self.below(30) as u64, self.token());
                fields.insert(
                    at,
                    Field {
                        number,
                        value: Value::Bytes(token),
                    },
                );
            }
            _ => {
                fields[at].value = match &fields[at].value {
                    Value::Number(_) => Value::Number(*self.pick(NUMBERS)),
                    Value::Bytes(bytes) if depth < DEEPEST => {
                        Value::Bytes(self.message(bytes, depth + 1))
                    }
                    Value::Bytes(bytes) => Value::Bytes(self.blind(bytes.clone())),
                    Value::Fixed(kind, bytes) => {
                        let mut bytes = bytes.clone();
                        let at = self.below(bytes.len());
                        bytes[at] = self.draw() as u8;
                        Value::Fixed(*kind, bytes)
                    }
                }
            }
        }
        let mut out = Vec::new();
        fields.iter().for_each(|field| field.write(&mut out));
        out
    }

    fn token(&mut self) -> Vec<u8> {
        match self.dictionary.is_empty() {
            true => vec![self.draw() as u8],
            false => {
                let at = self.below(self.dictionary.len());
                self.dictionary[at].clone()
            }
        }
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    fn below(&mut self, end: usize) -> usize {
        (self.draw() % end.max(1) as u64) as usize
    }

    /// SplitMix64.
    fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Words and numbers of a text: where they begin and end, and whether they are numbers.
fn runs(data: &[u8]) -> impl Iterator<Item = (usize, usize, bool)> {
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || b"_.-".contains(byte);
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at + data[at..].iter().position(is_word)?;
        let length = data[start..]
            .iter()
            .take_while(|byte| is_word(byte))
            .count();
        at = start + length;
        let is_number = matches!(data[start], b'0'..=b'9' | b'-');
        Some((start, at, is_number))
    })
}

/// A field of an encoded message.
#[derive(Clone)]
struct Field {
    number: u64,
    value: Value,
}

#[derive(Clone)]
enum Value {
    Number(u64),
    Bytes(Vec<u8>),
    Fixed(u64, Vec<u8>),
}

impl Field {
    /// The fields of what may be a message.
    fn read(mut data: &[u8]) -> Option<Vec<Self>> {
        fn take<'a>(data: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
            let (taken, rest) = data.split_at_checked(length)?;
            *data = rest;
            Some(taken)
        }
        let mut fields = Vec::new();
        while !data.is_empty() {
            let tag = varint(&mut data)?;
            let value = match tag & 7 {
                0 => Value::Number(varint(&mut data)?),
                1 => Value::Fixed(1, take(&mut data, 8)?.to_vec()),
                2 => {
                    let length = usize::try_from(varint(&mut data)?).ok()?;
                    Value::Bytes(take(&mut data, length)?.to_vec())
                }
                5 => Value::Fixed(5, take(&mut data, 4)?.to_vec()),
                _ => return None,
            };
            let number = tag >> 3;
            fields.push(Self { number, value });
        }
        Some(fields)
    }

    fn write(&self, out: &mut Vec<u8>) {
        let kind = match &self.value {
            Value::Number(_) => 0,
            Value::Bytes(_) => 2,
            Value::Fixed(kind, _) => *kind,
        };
        put_varint(out, self.number << 3 | kind);
        match &self.value {
            Value::Number(number) => put_varint(out, *number),
            Value::Bytes(bytes) => {
                put_varint(out, bytes.len() as u64);
                out.extend_from_slice(bytes);
            }
            Value::Fixed(_, bytes) => out.extend_from_slice(bytes),
        }
    }
}

fn varint(data: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = data.split_first()?;
        *data = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

fn put_varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Reads a dictionary as libFuzzer does: a word in quotes per line, with `\xNN`, `\\` and `\"`.
pub(super) fn dictionary(path: &Path) -> Vec<Vec<u8>> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    let lines = text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| word(line).unwrap_or_else(|| panic!("{path:?}: {line}")))
        .collect()
}

fn word(line: &str) -> Option<Vec<u8>> {
    let quoted = line.strip_prefix('"')?.strip_suffix('"')?;
    let mut bytes = quoted.bytes();
    let mut word = Vec::new();
    while let Some(byte) = bytes.next() {
        word.push(match byte {
            b'\\' => match bytes.next()? {
                b'x' => {
                    let digits = [bytes.next()?, bytes.next()?];
                    u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
                }
                other => other,
            },
            b'"' => return None,
            byte => byte,
        });
    }
    Some(word)
}

//! Random configurations in random spellings, from the schema and a seed.

use dormouse_proto::FILE_DESCRIPTOR_SET;
use prost_reflect::{DescriptorPool, FieldDescriptor, Kind, MessageDescriptor};

/// SplitMix64: small, and the same everywhere for the same seed.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.roll() % bound as u64) as usize
    }

    fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }

    fn pick<'a>(&mut self, choices: &[&'a str]) -> &'a str {
        choices[self.below(choices.len())]
    }
}

/// The descriptor of `inference.ModelConfig`.
pub(crate) fn model_config() -> MessageDescriptor {
    DescriptorPool::decode(FILE_DESCRIPTOR_SET)
        .unwrap()
        .get_message_by_name("inference.ModelConfig")
        .unwrap()
}

/// The tokens of a random valid configuration.
pub(crate) fn tokens(dice: &mut Dice) -> Vec<String> {
    let mut writer = Writer {
        dice,
        tokens: Vec::new(),
        depth: 0,
    };
    writer.fields(&model_config());
    writer.tokens
}

/// Tokens as a text, with whatever may stand between them.
pub(crate) fn spell(dice: &mut Dice, tokens: &[String]) -> String {
    let mut text = String::new();
    for token in tokens {
        text.push_str(token);
        text.push_str(dice.pick(&[
            " ",
            " ",
            "\n",
            "\t ",
            "\r\n",
            " # it's \"a\" { comment\n",
            "\x0b\x0c",
        ]));
    }
    text
}

/// Tokens with one of them lost, doubled or moved.
pub(crate) fn damage(dice: &mut Dice, tokens: &mut Vec<String>) {
    if tokens.is_empty() {
        return;
    }
    let (one, other) = (dice.below(tokens.len()), dice.below(tokens.len()));
    match dice.below(4) {
        0 => drop(tokens.remove(one)),
        1 => tokens.insert(one, tokens[one].clone()),
        2 => tokens.swap(one, other),
        _ => {
            let stray = dice.pick(&[
                ",", ";", ":", "[", "]", "{", "}", "<", ">", "name", "'s'", "7", "-7",
            ]);
            tokens.insert(one, stray.to_owned());
        }
    }
}

struct Writer<'a> {
    dice: &'a mut Dice,
    tokens: Vec<String>,
    depth: usize,
}

impl Writer<'_> {
    fn put(&mut self, token: impl Into<String>) {
        self.tokens.push(token.into());
    }

    fn fields(&mut self, message: &MessageDescriptor) {
        let mut chosen: Vec<FieldDescriptor> = Vec::new();
        for field in message.fields() {
            // Deep messages stay small, or a text would grow without end.
            if !self.dice.chance(2 + self.depth) {
                continue;
            }
            let oneof = field.containing_oneof();
            if oneof.is_none() || !chosen.iter().any(|other| other.containing_oneof() == oneof) {
                chosen.push(field);
            }
        }
        while !chosen.is_empty() {
            let field = chosen.swap_remove(self.dice.below(chosen.len()));
            self.field(&field);
        }
    }

    fn field(&mut self, field: &FieldDescriptor) {
        let times = match field.is_list() || field.is_map() {
            true => 1 + self.dice.below(3),
            false => 1,
        };
        for _ in 0..times {
            self.put(field.name());
            if !matches!(field.kind(), Kind::Message(_)) || self.dice.chance(2) {
                self.put(":");
            }
            if (field.is_list() || field.is_map()) && self.dice.chance(2) {
                self.list(field);
            } else {
                self.value(field);
            }
            if self.dice.chance(3) {
                let separator = self.dice.pick(&[",", ";"]);
                self.put(separator);
            }
        }
    }

    fn list(&mut self, field: &FieldDescriptor) {
        self.put("[");
        for index in 0..self.dice.below(4) {
            if index > 0 {
                self.put(",");
            }
            self.value(field);
        }
        self.put("]");
    }

    fn value(&mut self, field: &FieldDescriptor) {
        let token = match field.kind() {
            Kind::Message(message) => return self.message(&message),
            Kind::String => return self.string(),
            Kind::Bool => self
                .dice
                .pick(&["true", "false", "True", "False", "t", "f", "1", "0"])
                .to_owned(),
            Kind::Enum(descriptor) => {
                let values: Vec<_> = descriptor.values().collect();
                let value = &values[self.dice.below(values.len())];
                match self.dice.below(8) {
                    0 => value.number().to_string(),
                    1 => format!("{:#x}", value.number()),
                    2 => "77".to_owned(),
                    _ => value.name().to_owned(),
                }
            }
            Kind::Float | Kind::Double => self.float(),
            Kind::Int32 => self.integer(31, true),
            Kind::Uint32 => self.integer(32, false),
            Kind::Int64 => self.integer(63, true),
            Kind::Uint64 => self.integer(64, false),
            other => panic!("the schema has no field of kind {other:?}"),
        };
        self.put(token);
    }

    fn message(&mut self, message: &MessageDescriptor) {
        let (open, close) = if self.dice.chance(3) {
            ("<", ">")
        } else {
            ("{", "}")
        };
        self.put(open);
        self.depth += 1;
        self.fields(message);
        self.depth -= 1;
        self.put(close);
    }

    fn integer(&mut self, bits: u32, signed: bool) -> String {
        let shift = 64 - (self.dice.below(bits as usize) as u32 + 1);
        let value = self.dice.roll() >> shift;
        let sign = if signed && value > 0 && self.dice.chance(3) {
            "-"
        } else {
            ""
        };
        let digits = match self.dice.below(6) {
            0 => format!("0x{value:x}"),
            1 => format!("0X{value:X}"),
            _ => value.to_string(),
        };
        format!("{sign}{digits}")
    }

    fn float(&mut self) -> String {
        let number = self.dice.roll() as f64 / 1e15;
        match self.dice.below(8) {
            0 => self
                .dice
                .pick(&[
                    "inf",
                    "-inf",
                    "nan",
                    "infinity",
                    "-Infinity",
                    "INF",
                    "NaN",
                    "0",
                    "-0",
                    "1e300",
                ])
                .to_owned(),
            1 => format!("{}f", self.dice.below(100)),
            2 => format!("{number:.2}F"),
            3 => format!("{number:e}"),
            4 => format!("-{number:.1E}"),
            5 => format!(".{}", self.dice.below(1000)),
            6 => format!("{}.", 1 + self.dice.below(1000)),
            _ => format!("{number}"),
        }
    }

    fn string(&mut self) {
        for _ in 0..1 + self.dice.below(2) {
            let quote = self.dice.pick(&["\"", "'"]);
            let mut text = quote.to_owned();
            for _ in 0..self.dice.below(6) {
                text.push_str(self.dice.pick(&[
                    "a",
                    "Z",
                    " ",
                    "é",
                    "日",
                    "#",
                    "{",
                    "\\n",
                    "\\t",
                    "\\r",
                    "\\a",
                    "\\b",
                    "\\f",
                    "\\v",
                    "\\\\",
                    "\\'",
                    "\\\"",
                    "\\x41",
                    "\\x7",
                    "\\101",
                    "\\0",
                    "\\u00e9",
                    "\\U0001F600",
                    "\\xc3\\xa9",
                    "\t",
                ]));
            }
            text.push_str(quote);
            self.put(text);
        }
    }
}

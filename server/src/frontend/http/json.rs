//! A JSON reader that pulls: the caller says what it expects and gets it, or a sentence that
//! names the place. It never builds a tree and never recurses by what it reads.

use std::borrow::Cow;
use std::str::FromStr;

use crate::error::ServeError;
use crate::limits::{Limit, RequestLimits};

/// A position in a JSON text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'a> {
    text: &'a str,
    at: usize,
    max_depth: u32,
    /// Values that may still come.
    nodes_left: u32,
}

/// A number as it stands in the text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Number<'a> {
    /// Checked against JSON's grammar.
    Finite(&'a str),
    /// `NaN`, `Infinity` or `-Infinity`, bare as Python writes them or as a string.
    Special(f64),
}

/// Why an integer was not accepted.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum NotInteger<'a> {
    OutOfRange(&'a str),
    NotWhole(&'a str),
}

impl<'a> Reader<'a> {
    /// A reader within the usual limits.
    pub(super) fn new(bytes: &'a [u8]) -> Result<Self, ServeError> {
        Self::within(bytes, &RequestLimits::default())
    }

    pub(super) fn within(bytes: &'a [u8], limits: &RequestLimits) -> Result<Self, ServeError> {
        let text = std::str::from_utf8(bytes).map_err(|error| {
            ServeError::invalid(format!(
                "the JSON of the request is not UTF-8 at byte {}; bytes that are no text go into \
                 the binary part",
                error.valid_up_to()
            ))
        })?;
        Ok(Self {
            text,
            at: 0,
            max_depth: limits.json_depth.min(RequestLimits::DEEPEST),
            nodes_left: limits.json_nodes,
        })
    }

    /// The next character that is not white space, which stays unread.
    #[inline]
    pub(super) fn peek(&mut self) -> Option<u8> {
        let bytes = self.text.as_bytes();
        while let Some(&byte) = bytes.get(self.at) {
            if !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                return Some(byte);
            }
            self.at += 1;
        }
        None
    }

    /// Reads `byte` if it comes next.
    #[inline]
    pub(super) fn take(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        if found {
            self.at += 1;
        }
        found
    }

    /// How many bytes are left, white space included.
    pub(super) fn remaining(&self) -> usize {
        self.text.len() - self.at
    }

    /// The error of finding something else than `expected` here.
    pub(super) fn error(&mut self, expected: &str) -> ServeError {
        let found = match self.peek() {
            Some(_) => {
                let rest = &self.text[self.at..];
                let shown = rest.chars().next().unwrap_or(' ').escape_debug();
                format!("found '{shown}'")
            }
            None => "the text ended".to_owned(),
        };
        ServeError::invalid(format!(
            "the request is not valid JSON: expected {expected} at byte {}, {found}",
            self.at
        ))
    }

    /// Requires that nothing but white space follows.
    pub(super) fn finish(&mut self) -> Result<(), ServeError> {
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(self.error("the end of the text")),
        }
    }

    /// Reads an object, giving each member's key to `member`, which must read the value.
    pub(super) fn object(
        &mut self,
        what: &str,
        mut member: impl FnMut(&mut Self, &str) -> Result<(), ServeError>,
    ) -> Result<(), ServeError> {
        if !self.take(b'{') {
            return Err(self.error(&format!("an object for {what}")));
        }
        if self.take(b'}') {
            return Ok(());
        }
        loop {
            let key = self.key()?;
            self.node()?;
            member(self, &key)?;
            if self.take(b',') {
                continue;
            }
            if self.take(b'}') {
                return Ok(());
            }
            return Err(self.error("',' or '}'"));
        }
    }

    /// Reads an array, calling `item` with each item's index; `item` must read the item.
    pub(super) fn array(
        &mut self,
        what: &str,
        mut item: impl FnMut(&mut Self, usize) -> Result<(), ServeError>,
    ) -> Result<(), ServeError> {
        if !self.take(b'[') {
            return Err(self.error(&format!("an array for {what}")));
        }
        if self.take(b']') {
            return Ok(());
        }
        for index in 0.. {
            self.node()?;
            item(self, index)?;
            if self.take(b',') {
                continue;
            }
            if self.take(b']') {
                break;
            }
            return Err(self.error("',' or ']'"));
        }
        Ok(())
    }

    /// Reads `null` if it comes next: an absent value, as some clients write it.
    pub(super) fn null(&mut self) -> bool {
        self.peek() == Some(b'n') && self.literal("null")
    }

    pub(super) fn boolean(&mut self, what: &str) -> Result<bool, ServeError> {
        match self.peek() {
            Some(b't') if self.literal("true") => Ok(true),
            Some(b'f') if self.literal("false") => Ok(false),
            _ => Err(self.error(&format!("true or false for {what}"))),
        }
    }

    /// Reads a whole number that fits `T`.
    pub(super) fn integer<T: FromStr>(&mut self, what: &str) -> Result<T, ServeError> {
        if !matches!(self.peek(), Some(b'-' | b'0'..=b'9')) {
            return Err(self.error(&format!("a whole number for {what}")));
        }
        let token = self.number("a whole number")?;
        parse_integer(token).map_err(|error| {
            ServeError::invalid(match error {
                NotInteger::NotWhole(token) => {
                    format!("{what} is {token}: expected a whole number")
                }
                NotInteger::OutOfRange(token) => format!("{what} is {token}: out of range"),
            })
        })
    }

    /// Reads a number's text, checked against JSON's grammar.
    #[inline]
    pub(super) fn number(&mut self, expected: &str) -> Result<&'a str, ServeError> {
        self.peek();
        let start = self.at;
        match scan_number(&self.text.as_bytes()[start..]) {
            Some(length) => {
                self.at += length;
                Ok(&self.text[start..self.at])
            }
            None => Err(self.error(expected)),
        }
    }

    /// Reads a number or one of the words for what JSON's numbers cannot say.
    pub(super) fn float(&mut self, expected: &str) -> Result<Number<'a>, ServeError> {
        let special = match self.peek() {
            Some(b'N') => self.literal("NaN").then_some(f64::NAN),
            Some(b'I') => self.literal("Infinity").then_some(f64::INFINITY),
            Some(b'-') if self.text[self.at..].starts_with("-I") => {
                self.literal("-Infinity").then_some(f64::NEG_INFINITY)
            }
            Some(b'"') => {
                let place = *self;
                match &*self.string(expected)? {
                    "NaN" => Some(f64::NAN),
                    "Infinity" => Some(f64::INFINITY),
                    "-Infinity" => Some(f64::NEG_INFINITY),
                    _ => {
                        *self = place;
                        None
                    }
                }
            }
            _ => return self.number(expected).map(Number::Finite),
        };
        match special {
            Some(value) => Ok(Number::Special(value)),
            None => Err(self.error(expected)),
        }
    }

    /// Reads a string; borrows it when it has no escapes.
    pub(super) fn string(&mut self, what: &str) -> Result<Cow<'a, str>, ServeError> {
        if !self.take(b'"') {
            return Err(self.error(what));
        }
        let start = self.at;
        self.scan_plain()?;
        let plain = &self.text[start..self.at];
        if self.text.as_bytes()[self.at] == b'"' {
            self.at += 1;
            return Ok(Cow::Borrowed(plain));
        }
        let mut unescaped = plain.to_owned();
        loop {
            // Here stands a quote or a backslash: `scan_plain` stops at nothing else.
            let escape = self.text.as_bytes()[self.at] == b'\\';
            self.at += 1;
            if !escape {
                return Ok(Cow::Owned(unescaped));
            }
            unescaped.push(self.escape()?);
            let start = self.at;
            self.scan_plain()?;
            unescaped.push_str(&self.text[start..self.at]);
        }
    }

    /// How deep arrays and objects may nest.
    pub(super) fn max_depth(&self) -> u32 {
        self.max_depth
    }

    /// Counts a value.
    #[inline]
    fn node(&mut self) -> Result<(), ServeError> {
        match self.nodes_left.checked_sub(1) {
            Some(left) => {
                self.nodes_left = left;
                Ok(())
            }
            None => Err(self.too_many()),
        }
    }

    /// Reads the elements of a tensor and forgets them: they are no values that count.
    pub(super) fn skip_elements(&mut self) -> Result<(), ServeError> {
        let nodes_left = std::mem::replace(&mut self.nodes_left, u32::MAX);
        self.skip()?;
        self.nodes_left = nodes_left;
        Ok(())
    }

    /// Reads any value and forgets it.
    pub(super) fn skip(&mut self) -> Result<(), ServeError> {
        // One bit per open level, set for objects: the deepest that can be set fits.
        let mut objects = 0u128;
        let mut depth = 0u32;
        loop {
            self.node()?;
            match self.peek() {
                Some(open @ (b'{' | b'[')) => {
                    if depth == self.max_depth {
                        return Err(self.too_deep());
                    }
                    self.at += 1;
                    let object = open == b'{';
                    if !self.take(if object { b'}' } else { b']' }) {
                        depth += 1;
                        objects = objects << 1 | u128::from(object);
                        if object {
                            self.key()?;
                        }
                        continue;
                    }
                }
                Some(b'"') => self.skip_string()?,
                Some(b't') if self.literal("true") => {}
                Some(b'f') if self.literal("false") => {}
                Some(b'n') if self.literal("null") => {}
                _ => {
                    self.float("a value")?;
                }
            }
            // After a value: close what ends here, then go on to the next one.
            loop {
                if depth == 0 {
                    return Ok(());
                }
                let object = objects & 1 == 1;
                if self.take(b',') {
                    if object {
                        self.key()?;
                    }
                    break;
                }
                if !self.take(if object { b'}' } else { b']' }) {
                    return Err(self.error(if object { "',' or '}'" } else { "',' or ']'" }));
                }
                depth -= 1;
                objects >>= 1;
            }
        }
    }

    #[cold]
    pub(super) fn too_deep(&self) -> ServeError {
        Limit::JsonDepth.error(format!(
            "the JSON nests deeper than {} levels at byte {} (limits.max_json_depth)",
            self.max_depth, self.at
        ))
    }

    #[cold]
    fn too_many(&self) -> ServeError {
        Limit::JsonNodes.error(format!(
            "the JSON has too many values: the limit was reached at byte {} \
             (limits.max_json_nodes)",
            self.at
        ))
    }

    fn key(&mut self) -> Result<Cow<'a, str>, ServeError> {
        let key = self.string("a key in quotes")?;
        if !self.take(b':') {
            return Err(self.error("':'"));
        }
        Ok(key)
    }

    fn literal(&mut self, word: &str) -> bool {
        let found = self.text[self.at..].starts_with(word);
        if found {
            self.at += word.len();
        }
        found
    }

    /// Advances to the next quote or backslash.
    fn scan_plain(&mut self) -> Result<(), ServeError> {
        let bytes = self.text.as_bytes();
        loop {
            match bytes.get(self.at) {
                Some(b'"' | b'\\') => return Ok(()),
                Some(0..0x20) => {
                    return Err(ServeError::invalid(format!(
                        "the request is not valid JSON: a string has a bare control character at \
                         byte {}",
                        self.at
                    )));
                }
                Some(_) => self.at += 1,
                None => return Err(self.error("the closing quote of a string")),
            }
        }
    }

    fn skip_string(&mut self) -> Result<(), ServeError> {
        self.at += 1;
        loop {
            self.scan_plain()?;
            let escape = self.text.as_bytes()[self.at] == b'\\';
            self.at += 1;
            if !escape {
                return Ok(());
            }
            self.escape()?;
        }
    }

    /// Reads what follows a backslash.
    fn escape(&mut self) -> Result<char, ServeError> {
        let byte = self.text.as_bytes().get(self.at).copied();
        let character = match byte {
            Some(b'"') => '"',
            Some(b'\\') => '\\',
            Some(b'/') => '/',
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => {
                self.at += 1;
                return self.unicode_escape();
            }
            _ => return Err(self.error("an escape after '\\'")),
        };
        self.at += 1;
        Ok(character)
    }

    fn unicode_escape(&mut self) -> Result<char, ServeError> {
        let first = self.hex4()?;
        let code = match first {
            0xd800..0xdc00 if self.text[self.at..].starts_with("\\u") => {
                self.at += 2;
                let second = self.hex4()?;
                if !(0xdc00..0xe000).contains(&second) {
                    return Err(self.error("the second half of a surrogate pair"));
                }
                0x1_0000 + ((first - 0xd800) << 10) + (second - 0xdc00)
            }
            _ => first,
        };
        char::from_u32(code).ok_or_else(|| self.error("a complete surrogate pair"))
    }

    fn hex4(&mut self) -> Result<u32, ServeError> {
        let digits = self.text.as_bytes().get(self.at..self.at + 4);
        let value = digits.and_then(|digits| {
            digits.iter().try_fold(0u32, |value, &digit| {
                Some(value << 4 | char::from(digit).to_digit(16)?)
            })
        });
        match value {
            Some(value) => {
                self.at += 4;
                Ok(value)
            }
            None => Err(self.error("four hexadecimal digits after '\\u'")),
        }
    }
}

/// Reads a number's text as an integer of type `T`.
#[inline]
pub(super) fn parse_integer<T: FromStr>(token: &str) -> Result<T, NotInteger<'_>> {
    match token.parse() {
        Ok(value) => Ok(value),
        Err(_) if token.contains(['.', 'e', 'E']) => Err(NotInteger::NotWhole(token)),
        // Zero has no sign here, but `-0` is a number in JSON.
        Err(_) if token == "-0" => "0".parse().map_err(|_| NotInteger::OutOfRange(token)),
        Err(_) => Err(NotInteger::OutOfRange(token)),
    }
}

/// The length of the JSON number that `bytes` starts with.
#[inline]
fn scan_number(bytes: &[u8]) -> Option<usize> {
    let digits = |from: usize| {
        bytes[from..]
            .iter()
            .take_while(|byte| byte.is_ascii_digit())
            .count()
    };
    let mut at = usize::from(bytes.first() == Some(&b'-'));
    let whole = digits(at);
    if whole == 0 || (whole > 1 && bytes[at] == b'0') {
        return None;
    }
    at += whole;
    if bytes.get(at) == Some(&b'.') {
        let fraction = digits(at + 1);
        if fraction == 0 {
            return None;
        }
        at += 1 + fraction;
    }
    if let Some(b'e' | b'E') = bytes.get(at) {
        at += 1;
        if let Some(b'+' | b'-') = bytes.get(at) {
            at += 1;
        }
        let exponent = digits(at);
        if exponent == 0 {
            return None;
        }
        at += exponent;
    }
    Some(at)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn skip_all(text: &[u8]) -> Result<(), ServeError> {
        let mut reader = Reader::new(text)?;
        reader.skip()?;
        reader.finish()
    }

    #[test]
    fn what_serde_json_accepts_is_skipped_whole() {
        for text in [
            "null",
            " [1, -0.5e+3, \"a\\u00e9\\ud83d\\ude00\", {\"k\": [], \"l\": {}}, true, false] ",
            "{\"a\":{\"b\":[[[]]]}}",
            "0",
            "\"\"",
        ] {
            assert!(skip_all(text.as_bytes()).is_ok(), "{text}");
        }
    }

    #[test]
    fn broken_json_is_refused_with_its_place() {
        for text in [
            "",
            "[",
            "[1",
            "[1,",
            "[1,]",
            "{",
            "{\"a\"",
            "{\"a\":",
            "{\"a\":1,}",
            "{a:1}",
            "01",
            "1.",
            "1e",
            "-",
            "+1",
            ".5",
            "\"",
            "\"\\x\"",
            "\"\\u12\"",
            "\"\\ud800\"",
            "\"\n\"",
            "[1}",
            "nul",
            "1 2",
            "[] x",
            "{]",
            "Nan",
        ] {
            let error = skip_all(text.as_bytes()).expect_err(text);
            assert!(error.message().contains("byte"), "{text}: {error}");
        }
        assert!(Reader::new(b"\xff").is_err());
    }

    #[test]
    fn nesting_is_bounded_without_recursion() {
        let deep = |levels: usize| [vec![b'['; levels], vec![b']'; levels]].concat();
        assert!(skip_all(&deep(100)).is_ok());
        for levels in [101, 100_000, 250_000] {
            let error = skip_all(&deep(levels)).expect_err("too deep");
            assert!(error.message().contains("deeper than 100"), "{error}");
            let objects = "{\"a\":".repeat(levels);
            assert!(skip_all(objects.as_bytes()).is_err());
        }
    }

    #[test]
    fn strings_are_unescaped() {
        let text = br#""a\"\\\/\b\f\n\r\t\u0041\ud83d\ude00z""#;
        let mut reader = Reader::new(text).unwrap();
        let string = reader.string("a string").unwrap();
        assert_eq!(string, "a\"\\/\u{8}\u{c}\n\r\tA\u{1f600}z");
    }

    proptest! {
        #[test]
        fn agrees_with_serde_json_on_what_is_valid(
            text in "[\\[\\]{}:,0-9eE.+\\-\" a\\\\ntrufls]{0,40}"
        ) {
            let reference = serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok();
            prop_assert_eq!(skip_all(text.as_bytes()).is_ok(), reference, "{}", text);
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = skip_all(&bytes);
        }
    }
}

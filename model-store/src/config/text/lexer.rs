//! Splits the text into tokens, with the rules of protobuf's own tokenizer.

use std::fmt;

use super::{Parsed, refuse};

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token<'a> {
    Ident(&'a str),
    /// Decimal, octal (`017`) or hexadecimal (`0x1f`) digits, without a sign.
    Int(&'a str),
    /// A number with a point, an exponent or the suffix `f`; the suffix is not part of it.
    Float(&'a str),
    /// A quoted string's bytes, escapes resolved.
    Text(Vec<u8>),
    Symbol(char),
    End,
}

impl fmt::Display for Token<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Token::Ident(text) | Token::Int(text) | Token::Float(text) => write!(f, "'{text}'"),
            Token::Text(_) => f.write_str("a quoted string"),
            Token::Symbol(symbol) => write!(f, "'{symbol}'"),
            Token::End => f.write_str("the end of the text"),
        }
    }
}

pub(super) struct Lexer<'a> {
    text: &'a str,
    position: usize,
}

impl<'a> Lexer<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, position: 0 }
    }

    /// The next token and where it starts.
    pub(super) fn next(&mut self) -> Parsed<(usize, Token<'a>)> {
        self.skip_blanks();
        let start = self.position;
        let token = match self.peek() {
            None => Token::End,
            Some(b'a'..=b'z' | b'A'..=b'Z' | b'_') => {
                self.skip_while(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
                Token::Ident(&self.text[start..self.position])
            }
            Some(b'0'..=b'9') => self.number()?,
            Some(b'.') if self.peek_at(1).is_some_and(|byte| byte.is_ascii_digit()) => {
                self.number()?
            }
            Some(quote @ (b'"' | b'\'')) => Token::Text(self.string(quote)?),
            Some(_) => {
                let symbol = self.text[start..].chars().next();
                let symbol = symbol.expect("there is a byte, so there is a character");
                if symbol.is_control() {
                    return refuse(start, format!("unexpected control character {symbol:?}"));
                }
                self.position += symbol.len_utf8();
                Token::Symbol(symbol)
            }
        };
        Ok((start, token))
    }

    fn peek(&self) -> Option<u8> {
        self.peek_at(0)
    }

    fn peek_at(&self, ahead: usize) -> Option<u8> {
        self.text.as_bytes().get(self.position + ahead).copied()
    }

    fn skip_while(&mut self, wanted: impl Fn(u8) -> bool) -> usize {
        let start = self.position;
        while self.peek().is_some_and(&wanted) {
            self.position += 1;
        }
        self.position - start
    }

    fn skip_blanks(&mut self) {
        loop {
            self.skip_while(|byte| matches!(byte, b' ' | b'\t' | b'\r' | b'\n' | 0x0b | 0x0c));
            if self.peek() != Some(b'#') {
                return;
            }
            self.skip_while(|byte| byte != b'\n');
        }
    }

    fn number(&mut self) -> Parsed<Token<'a>> {
        let start = self.position;
        let mut end = None;
        let mut float = false;
        match (self.peek(), self.peek_at(1)) {
            (Some(b'0'), Some(b'x' | b'X')) => {
                self.position += 2;
                if self.skip_while(|byte| byte.is_ascii_hexdigit()) == 0 {
                    return refuse(start, "'0x' must be followed by hexadecimal digits");
                }
            }
            (Some(b'0'), Some(b'0'..=b'9')) => {
                self.skip_while(|byte| matches!(byte, b'0'..=b'7'));
                if self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
                    return refuse(
                        start,
                        "a number with a leading zero is octal: digits 0 to 7",
                    );
                }
            }
            _ => {
                self.skip_while(|byte| byte.is_ascii_digit());
                if self.peek() == Some(b'.') {
                    float = true;
                    self.position += 1;
                    self.skip_while(|byte| byte.is_ascii_digit());
                }
                if matches!(self.peek(), Some(b'e' | b'E')) {
                    float = true;
                    self.position += 1;
                    if matches!(self.peek(), Some(b'+' | b'-')) {
                        self.position += 1;
                    }
                    if self.skip_while(|byte| byte.is_ascii_digit()) == 0 {
                        return refuse(start, "an exponent needs digits");
                    }
                }
                if matches!(self.peek(), Some(b'f' | b'F')) {
                    float = true;
                    end = Some(self.position);
                    self.position += 1;
                }
            }
        }
        let text = &self.text[start..end.unwrap_or(self.position)];
        match self.peek() {
            Some(b'a'..=b'z' | b'A'..=b'Z' | b'_' | b'0'..=b'9') => refuse(
                self.position,
                format!("a blank is needed between the number '{text}' and what follows"),
            ),
            Some(b'.') => refuse(start, format!("'{text}.' is not a number")),
            _ if float => Ok(Token::Float(text)),
            _ => Ok(Token::Int(text)),
        }
    }

    fn string(&mut self, quote: u8) -> Parsed<Vec<u8>> {
        let start = self.position;
        self.position += 1;
        let mut bytes = Vec::new();
        loop {
            let run = self.position;
            self.skip_while(|byte| byte != quote && !matches!(byte, b'\\' | b'\n' | 0));
            bytes.extend_from_slice(&self.text.as_bytes()[run..self.position]);
            match self.peek() {
                Some(byte) if byte == quote => {
                    self.position += 1;
                    return Ok(bytes);
                }
                Some(b'\\') => self.escape(&mut bytes)?,
                Some(0) => return refuse(self.position, "a string cannot hold a NUL character"),
                Some(_) | None => {
                    return refuse(start, "the string has no closing quote on its line");
                }
            }
        }
    }

    fn escape(&mut self, bytes: &mut Vec<u8>) -> Parsed<()> {
        let start = self.position;
        let letter = self.peek_at(1);
        self.position += 2;
        let byte = match letter {
            Some(b'n') => b'\n',
            Some(b't') => b'\t',
            Some(b'r') => b'\r',
            Some(b'a') => 0x07,
            Some(b'b') => 0x08,
            Some(b'f') => 0x0c,
            Some(b'v') => 0x0b,
            Some(same @ (b'\\' | b'\'' | b'"' | b'?')) => same,
            Some(b'x' | b'X') => {
                let value = self.digits(16, 2).ok_or("expected hexadecimal digits");
                value.or_else(|message| refuse(start, format!("{message} after '\\x'")))? as u8
            }
            Some(b'0'..=b'7') => {
                self.position -= 1;
                let value = self.digits(8, 3).expect("the first digit was seen");
                match u8::try_from(value) {
                    Ok(byte) => byte,
                    Err(_) => return refuse(start, "an octal escape is at most '\\377'"),
                }
            }
            Some(unicode @ (b'u' | b'U')) => {
                let character = self.unicode(start, unicode)?;
                bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
                return Ok(());
            }
            _ => return refuse(start, "unknown escape sequence in a string"),
        };
        bytes.push(byte);
        Ok(())
    }

    fn unicode(&mut self, start: usize, letter: u8) -> Parsed<char> {
        let width = if letter == b'u' { 4 } else { 8 };
        let mut value = self.exact_hex(start, width)?;
        // Two escapes may spell one character, as UTF-16 does.
        let low_follows = self.peek() == Some(b'\\') && self.peek_at(1) == Some(b'u');
        if width == 4 && (0xd800..0xdc00).contains(&value) && low_follows {
            self.position += 2;
            let low = self.exact_hex(start, 4)?;
            if (0xdc00..0xe000).contains(&low) {
                value = 0x10000 + ((value - 0xd800) << 10) + (low - 0xdc00);
            }
        }
        match char::from_u32(value) {
            Some(character) => Ok(character),
            None => refuse(start, format!("U+{value:04X} is not a character")),
        }
    }

    fn exact_hex(&mut self, start: usize, width: usize) -> Parsed<u32> {
        let from = self.position;
        match self.digits(16, width) {
            Some(value) if self.position - from == width => Ok(value),
            _ => refuse(start, format!("expected {width} hexadecimal digits")),
        }
    }

    fn digits(&mut self, radix: u32, at_most: usize) -> Option<u32> {
        let mut value = None;
        for _ in 0..at_most {
            let Some(digit) = self
                .peek()
                .and_then(|byte| char::from(byte).to_digit(radix))
            else {
                break;
            };
            value = Some(value.unwrap_or(0) * radix + digit);
            self.position += 1;
        }
        value
    }
}

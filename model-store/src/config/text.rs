//! Reads `config.pbtxt`: protobuf's text format, as Triton's own reader takes it.
//!
//! Written over the schema's descriptors rather than as a rewrite in front of another parser,
//! because whether a list may follow its field's name without a colon depends on the field's
//! type, and because every refusal has to point at the user's own line and column.

mod lexer;
mod literal;
#[cfg(test)]
mod tests;

use dormouse_proto::inference as pb;
use prost_reflect::{
    DynamicMessage, FieldDescriptor, Kind, MessageDescriptor, ReflectMessage, Value,
};

use self::lexer::{Lexer, Token};
use super::error::ConfigSyntaxError;
use super::{schema, suggest};

/// No configuration people write comes near this; a mistaken file does.
const MAX_BYTES: usize = 16 << 20;

/// A refusal and where in the text it belongs.
struct Refusal {
    offset: usize,
    message: String,
}

type Parsed<T> = Result<T, Refusal>;

fn refuse<T>(offset: usize, message: impl Into<String>) -> Parsed<T> {
    Err(Refusal {
        offset,
        message: message.into(),
    })
}

/// Reads a configuration written in protobuf's text format.
pub fn parse(text: &str) -> Result<pb::ModelConfig, ConfigSyntaxError> {
    if text.len() > MAX_BYTES {
        return Err(ConfigSyntaxError {
            line: 1,
            column: 1,
            message: format!("{} bytes are too long, at most {MAX_BYTES}", text.len()),
        });
    }
    parse_root(text)
        .map(|message| schema::from_dynamic(&message))
        .map_err(|refusal| locate(text, refusal))
}

fn parse_root(text: &str) -> Parsed<DynamicMessage> {
    if text.starts_with('\u{feff}') {
        return refuse(
            0,
            "the file starts with a byte order mark; save it as UTF-8 without one",
        );
    }
    let mut lexer = Lexer::new(text);
    let (offset, token) = lexer.next()?;
    let mut parser = Parser {
        lexer,
        token,
        offset,
    };
    let mut message = DynamicMessage::new(schema::model_config());
    while parser.token != Token::End {
        parser.field(&mut message)?;
    }
    Ok(message)
}

fn locate(text: &str, refusal: Refusal) -> ConfigSyntaxError {
    let before = &text[..refusal.offset];
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    let count = |n: usize| u32::try_from(n + 1).unwrap_or(u32::MAX);
    let line = count(before.matches('\n').count());
    let column = count(before[line_start..].chars().count());
    ConfigSyntaxError::new((line, column), refusal.message)
}

/// One token of look-ahead over the text.
///
/// Messages nest as deep as the schema does and no deeper: it has no recursive type, and lists do
/// not nest. So the recursion below is bounded by the schema, not by the text.
struct Parser<'a> {
    lexer: Lexer<'a>,
    token: Token<'a>,
    offset: usize,
}

impl<'a> Parser<'a> {
    fn bump(&mut self) -> Parsed<Token<'a>> {
        let (offset, token) = self.lexer.next()?;
        self.offset = offset;
        Ok(std::mem::replace(&mut self.token, token))
    }

    fn take_symbol(&mut self, symbol: char) -> Parsed<bool> {
        let found = self.token == Token::Symbol(symbol);
        if found {
            self.bump()?;
        }
        Ok(found)
    }

    fn unexpected<T>(&self, expected: &str) -> Parsed<T> {
        refuse(
            self.offset,
            format!("expected {expected}, found {}", self.token),
        )
    }

    fn field(&mut self, message: &mut DynamicMessage) -> Parsed<()> {
        let descriptor = message.descriptor();
        let (name_offset, name) = (self.offset, self.field_name(&descriptor)?);
        let Some(field) = descriptor.get_field_by_name(name) else {
            let names: Vec<_> = descriptor.fields().map(|f| f.name().to_owned()).collect();
            let hint = suggest::hint(name, names.iter().map(String::as_str));
            return refuse(
                name_offset,
                format!(
                    "unknown field '{name}' in message '{}'{hint}",
                    descriptor.full_name()
                ),
            );
        };
        refuse_second_member(message, &field, name_offset)?;
        // Only a message (or a list of them) may follow its field's name without a colon.
        if !self.take_symbol(':')? && !matches!(field.kind(), Kind::Message(_)) {
            return self.unexpected(&format!("':' after '{name}'"));
        }
        if (field.is_list() || field.is_map()) && self.take_symbol('[')? {
            self.list(message, &field)?;
        } else {
            self.value_into(message, &field, name_offset)?;
        }
        if !self.take_symbol(',')? {
            self.take_symbol(';')?;
        }
        Ok(())
    }

    fn field_name(&mut self, descriptor: &MessageDescriptor) -> Parsed<&'a str> {
        match self.token {
            Token::Ident(name) => {
                self.bump()?;
                Ok(name)
            }
            Token::Symbol('[') => refuse(
                self.offset,
                format!(
                    "message '{}' has no extensions, and '[' can only start one here",
                    descriptor.full_name()
                ),
            ),
            _ => self.unexpected("a field name"),
        }
    }

    fn list(&mut self, message: &mut DynamicMessage, field: &FieldDescriptor) -> Parsed<()> {
        if self.take_symbol(']')? {
            return Ok(());
        }
        loop {
            self.value_into(message, field, self.offset)?;
            if self.take_symbol(']')? {
                return Ok(());
            }
            if !self.take_symbol(',')? {
                return self.unexpected("',' or ']'");
            }
        }
    }

    fn value_into(
        &mut self,
        message: &mut DynamicMessage,
        field: &FieldDescriptor,
        name_offset: usize,
    ) -> Parsed<()> {
        if field.is_map() {
            let entry = self.message(&field.kind())?;
            let part = |number| {
                entry
                    .get_field_by_number(number)
                    .expect("map entries have a key and a value")
                    .into_owned()
            };
            let key = part(1).into_map_key().expect("the schema's keys are keys");
            message
                .get_field_mut(field)
                .as_map_mut()
                .expect("a map field holds a map")
                .insert(key, part(2));
        } else if field.is_list() {
            let value = self.value(field)?;
            message
                .get_field_mut(field)
                .as_list_mut()
                .expect("a repeated field holds a list")
                .push(value);
        } else {
            let value = self.value(field)?;
            if message.has_field(field) {
                return refuse(
                    name_offset,
                    format!("field '{}' is given more than once", field.name()),
                );
            }
            message.set_field(field, value);
        }
        Ok(())
    }

    fn value(&mut self, field: &FieldDescriptor) -> Parsed<Value> {
        match field.kind() {
            kind @ Kind::Message(_) => Ok(Value::Message(self.message(&kind)?)),
            Kind::String => self.string(field).map(Value::String),
            _ => literal::scalar(self, field),
        }
    }

    fn message(&mut self, kind: &Kind) -> Parsed<DynamicMessage> {
        let end = match self.token {
            Token::Symbol('{') => '}',
            Token::Symbol('<') => '>',
            _ => return self.unexpected("'{' or '<'"),
        };
        self.bump()?;
        let descriptor = kind.as_message().expect("only called for messages");
        let mut message = DynamicMessage::new(descriptor.clone());
        while !self.take_symbol(end)? {
            if !matches!(self.token, Token::Ident(_) | Token::Symbol('[')) {
                return self.unexpected(&format!("a field name or '{end}'"));
            }
            self.field(&mut message)?;
        }
        Ok(message)
    }

    fn string(&mut self, field: &FieldDescriptor) -> Parsed<String> {
        let offset = self.offset;
        let mut bytes = Vec::new();
        let mut pieces = 0;
        while let Token::Text(piece) = &self.token {
            bytes.extend_from_slice(piece);
            pieces += 1;
            self.bump()?;
        }
        if pieces == 0 {
            return self.unexpected(&format!("a quoted string for '{}'", field.name()));
        }
        String::from_utf8(bytes).or_else(|_| {
            refuse(
                offset,
                format!("the value of '{}' is not valid UTF-8", field.name()),
            )
        })
    }
}

/// Refuses a field when another member of its oneof is already there.
fn refuse_second_member(
    message: &DynamicMessage,
    field: &FieldDescriptor,
    offset: usize,
) -> Parsed<()> {
    let Some(oneof) = field.containing_oneof() else {
        return Ok(());
    };
    match oneof
        .fields()
        .find(|other| other != field && message.has_field(other))
    {
        None => Ok(()),
        Some(other) => refuse(
            offset,
            format!(
                "'{}' cannot be given with '{}': they are choices for '{}'",
                field.name(),
                other.name(),
                oneof.name()
            ),
        ),
    }
}

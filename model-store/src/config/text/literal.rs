//! Numbers, booleans and enumerated values.

use prost_reflect::{EnumDescriptor, FieldDescriptor, Kind, Value};

use super::lexer::Token;
use super::{Parsed, Parser, refuse};
use crate::config::suggest;

/// Reads one value of a field that holds neither strings nor messages.
pub(super) fn scalar(parser: &mut Parser<'_>, field: &FieldDescriptor) -> Parsed<Value> {
    match field.kind() {
        Kind::Bool => boolean(parser, field).map(Value::Bool),
        Kind::Enum(descriptor) => enumerated(parser, field, &descriptor).map(Value::EnumNumber),
        Kind::Double => float(parser, field).map(Value::F64),
        // Narrowed as protobuf does: what is too large becomes infinite.
        Kind::Float => float(parser, field).map(|value| Value::F32(value as f32)),
        Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => {
            signed(parser, field, i32::MIN.into(), i32::MAX.into())
                .map(|value| Value::I32(value as i32))
        }
        Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => {
            signed(parser, field, i64::MIN, i64::MAX).map(Value::I64)
        }
        Kind::Uint32 | Kind::Fixed32 => {
            unsigned(parser, field, u32::MAX.into()).map(|value| Value::U32(value as u32))
        }
        Kind::Uint64 | Kind::Fixed64 => unsigned(parser, field, u64::MAX).map(Value::U64),
        Kind::String | Kind::Bytes | Kind::Message(_) => {
            parser.unexpected("a value of another type")
        }
    }
}

/// The value of a literal such as `12`, `014` or `0xC`; none when it does not fit.
fn magnitude(text: &str) -> Option<u64> {
    let hexadecimal = text.strip_prefix("0x").or(text.strip_prefix("0X"));
    match hexadecimal {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None if text.len() > 1 && text.starts_with('0') => u64::from_str_radix(text, 8).ok(),
        None => text.parse().ok(),
    }
}

fn signed(parser: &mut Parser<'_>, field: &FieldDescriptor, min: i64, max: i64) -> Parsed<i64> {
    let offset = parser.offset;
    // The sign is a token of its own: blanks and comments may follow it.
    let negative = parser.take_symbol('-')?;
    let Token::Int(text) = parser.token else {
        return parser.unexpected(&format!("an integer for '{}'", field.name()));
    };
    let value = magnitude(text).map(i128::from);
    let value = value.map(|value| if negative { -value } else { value });
    match value.and_then(|value| i64::try_from(value).ok()) {
        Some(value) if (min..=max).contains(&value) => {
            parser.bump()?;
            Ok(value)
        }
        _ => refuse(
            offset,
            format!(
                "{}{text} is out of range for '{}': {min} to {max}",
                if negative { "-" } else { "" },
                field.name()
            ),
        ),
    }
}

fn unsigned(parser: &mut Parser<'_>, field: &FieldDescriptor, max: u64) -> Parsed<u64> {
    let Token::Int(text) = parser.token else {
        return parser.unexpected(&format!("an integer from 0 for '{}'", field.name()));
    };
    match magnitude(text) {
        Some(value) if value <= max => {
            parser.bump()?;
            Ok(value)
        }
        _ => refuse(
            parser.offset,
            format!("{text} is out of range for '{}': 0 to {max}", field.name()),
        ),
    }
}

fn float(parser: &mut Parser<'_>, field: &FieldDescriptor) -> Parsed<f64> {
    let negative = parser.take_symbol('-')?;
    let value = match parser.token {
        // Octal and hexadecimal are for integers only.
        Token::Int(text) if text == "0" || !text.starts_with('0') => text.parse().ok(),
        Token::Float(text) => text.parse().ok(),
        Token::Ident(name) if ["inf", "infinity"].contains(&&*name.to_ascii_lowercase()) => {
            Some(f64::INFINITY)
        }
        Token::Ident(name) if name.eq_ignore_ascii_case("nan") => Some(f64::NAN),
        _ => None,
    };
    let Some(value) = value else {
        return parser.unexpected(&format!("a decimal number for '{}'", field.name()));
    };
    parser.bump()?;
    Ok(if negative { -value } else { value })
}

fn boolean(parser: &mut Parser<'_>, field: &FieldDescriptor) -> Parsed<bool> {
    let value = match parser.token {
        Token::Ident("true" | "True" | "t") => Some(true),
        Token::Ident("false" | "False" | "f") => Some(false),
        Token::Int(text) => match magnitude(text) {
            Some(0) => Some(false),
            Some(1) => Some(true),
            _ => None,
        },
        _ => None,
    };
    let Some(value) = value else {
        return parser.unexpected(&format!("true or false for '{}'", field.name()));
    };
    parser.bump()?;
    Ok(value)
}

fn enumerated(
    parser: &mut Parser<'_>,
    field: &FieldDescriptor,
    descriptor: &EnumDescriptor,
) -> Parsed<i32> {
    let Token::Ident(name) = parser.token else {
        // A number that has no name is kept: whoever uses it says what is wrong with it.
        let number = signed(parser, field, i32::MIN.into(), i32::MAX.into())?;
        return Ok(number as i32);
    };
    match descriptor.get_value_by_name(name) {
        Some(value) => {
            parser.bump()?;
            Ok(value.number())
        }
        None => {
            let names: Vec<_> = descriptor.values().map(|v| v.name().to_owned()).collect();
            let hint = suggest::hint(name, names.iter().map(String::as_str));
            refuse(
                parser.offset,
                format!(
                    "'{name}' is not a value of '{}' for '{}'{hint}",
                    descriptor.full_name(),
                    field.name()
                ),
            )
        }
    }
}

//! Values as Python prints them: `True`, `None`, `['a', 1.0]`.

use std::fmt::Write;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, Output};

/// Writes what `{{ value }}` puts out.
pub(super) fn write(out: &mut Output<'_>, value: &Value) -> Result<(), Error> {
    let text = if value.is_undefined() {
        String::new()
    } else if let Some(text) = value.as_str() {
        text.to_string()
    } else {
        repr(value)?
    };
    out.write_str(&text).map_err(|error| Error::new(ErrorKind::WriteFailure, error.to_string()))
}

fn repr(value: &Value) -> Result<String, Error> {
    Ok(match value.kind() {
        ValueKind::None => "None".to_string(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.to_string(),
        ValueKind::Number if !value.is_integer() => float(f64::try_from(value.clone())?),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Result<Vec<String>, Error> =
                value.try_iter()?.map(|item| repr(&item)).collect();
            format!("[{}]", items?.join(", "))
        }
        ValueKind::Map => {
            let entry =
                |key: Value| Ok(format!("{}: {}", repr(&key)?, repr(&value.get_item(&key)?)?));
            let entries: Result<Vec<String>, Error> = value.try_iter()?.map(entry).collect();
            format!("{{{}}}", entries?.join(", "))
        }
        _ => value.to_string(),
    })
}

/// Single quotes, unless the text has one and no double quote.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut result = String::from(quote);
    for character in text.chars() {
        match character {
            '\n' => result.push_str("\\n"),
            '\r' => result.push_str("\\r"),
            '\t' => result.push_str("\\t"),
            '\\' => result.push_str("\\\\"),
            c if c == quote => {
                result.push('\\');
                result.push(c);
            }
            c if c.is_control() => {
                let _ = write!(result, "\\x{:02x}", u32::from(c));
            }
            c => result.push(c),
        }
    }
    result.push(quote);
    result
}

/// Python's `repr` of a float: shortest digits, an exponent below 1e-4 and from 1e16 on.
pub(super) fn float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_string();
    }
    if number.is_infinite() {
        return if number > 0.0 { "Infinity" } else { "-Infinity" }.to_string();
    }
    let magnitude = number.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{number:?}")
}

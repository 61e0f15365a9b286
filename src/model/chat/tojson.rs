//! The `tojson` filter as transformers defines it: Python's `json.dumps` with
//! `ensure_ascii=False`, whose spacing ends up in prompts and so must be exact.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::python;

pub(super) fn tojson(value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let indent = match indent {
        None => None,
        Some(indent) if indent.is_none() => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_string(),
            None => " ".repeat(usize::try_from(indent).unwrap_or(0).min(32)),
        }),
    };
    let separators: Option<Value> = options.get("separators")?;
    let (between, colon) = match separators.filter(|separators| !separators.is_none()) {
        Some(separators) => {
            let pair: Vec<String> = separators.try_iter()?.map(|part| part.to_string()).collect();
            let [between, colon] = pair.try_into().map_err(|_| {
                Error::new(ErrorKind::InvalidOperation, "tojson: separators must be a pair")
            })?;
            (between, colon)
        }
        None if indent.is_some() => (",".to_string(), ": ".to_string()),
        None => (", ".to_string(), ": ".to_string()),
    };
    let style = Style {
        indent,
        between,
        colon,
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut text = String::new();
    style.write(&value, 0, &mut text)?;
    Ok(text)
}

struct Style {
    indent: Option<String>,
    between: String,
    colon: String,
    ascii: bool,
    sorted: bool,
}

impl Style {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
            ValueKind::Number => out.push_str(&python::float(f64::try_from(value.clone())?)),
            ValueKind::String => self.write_text(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_group('[', ']', items.len(), depth, out, |index, out| {
                    self.write(&items[index], depth + 1, out)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.write_group('{', '}', keys.len(), depth, out, |index, out| {
                    self.write_text(&key_text(&keys[index])?, out);
                    out.push_str(&self.colon);
                    self.write(&value.get_item(&keys[index])?, depth + 1, out)
                })?;
            }
            other => {
                let reason = format!("tojson: {other} is not JSON serializable");
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
        }
        Ok(())
    }

    fn write_group(
        &self,
        open: char,
        close: char,
        len: usize,
        depth: usize,
        out: &mut String,
        mut item: impl FnMut(usize, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for index in 0..len {
            if index > 0 {
                out.push_str(&self.between);
            }
            self.new_line(depth + 1, out);
            item(index, out)?;
        }
        if len > 0 {
            self.new_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn write_text(&self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// Object keys as Python writes them: numbers, booleans and null become text.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_string()),
        ValueKind::None => Ok("null".to_string()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_string()),
        ValueKind::Number if key.is_integer() => Ok(key.to_string()),
        ValueKind::Number => Ok(python::float(f64::try_from(key.clone())?)),
        other => {
            let reason = format!("tojson: keys must be text, not {other}");
            Err(Error::new(ErrorKind::InvalidOperation, reason))
        }
    }
}

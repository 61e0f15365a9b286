//! Layered settings: flags over environment over file over defaults, every value with its source.
//!
//! A program's settings are one struct tree that serde can write and read. Its default value is
//! the list of all keys; this module knows nothing else about it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

pub mod build;
pub mod serve;
pub mod sidecar;

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    Default,
    File(PathBuf),
    /// Name of the environment variable.
    Env(String),
    /// The flag as typed, for example `--listen`.
    Flag(String),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Env(name) => write!(f, "environment variable {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
        }
    }
}

/// A configuration that cannot be used. Programs exit with [`ConfigError::EXIT_CODE`].
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the configuration file {path}: {reason}")]
    Read { path: String, reason: std::io::Error },
    #[error("{path} is not valid TOML: {reason}")]
    Parse { path: String, reason: String },
    #[error("unknown key `{key}` ({origin}){suggestion}")]
    UnknownKey { key: String, origin: Source, suggestion: Suggestion },
    #[error("{key} = {value} ({origin}): {reason}")]
    Value { key: String, value: String, origin: Source, reason: String },
    #[error("`{flag}` is not KEY=VALUE\nhint: for example --set gate.min_gain=0.01")]
    Assignment { flag: String },
}

impl ConfigError {
    /// `EX_USAGE`: the command line or the configuration is wrong.
    pub const EXIT_CODE: u8 = 64;
}

/// The known key that is nearest to a mistyped one, if any is near.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suggestion(Option<String>);

impl fmt::Display for Suggestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(key) => write!(f, "\nhint: did you mean `{key}`?"),
            None => Ok(()),
        }
    }
}

/// What settings are made of, lowest layer first below the defaults.
#[derive(Debug, Clone, Default)]
pub struct Layers {
    pub file: Option<PathBuf>,
    /// Variables of the environment; those without the prefix are ignored.
    pub env: Vec<(String, String)>,
    /// `DA_` for the sidecar: `learn.epochs` is then `DA_LEARN_EPOCHS`.
    pub env_prefix: &'static str,
    /// Flag as typed, dotted key, value as text.
    pub flags: Vec<(String, String, String)>,
}

/// Settings with the source of each value.
#[derive(Debug, Clone)]
pub struct Loaded<T> {
    pub settings: T,
    /// Every dotted key with its value and source, in order of key.
    pub values: BTreeMap<String, (Value, Source)>,
}

/// Reads all layers.
///
/// # Errors
/// When the file cannot be read or parsed, a key is unknown, or a value has the wrong type. The
/// error names the key, the value and the source.
pub fn load<T: Serialize + DeserializeOwned + Default>(
    layers: &Layers,
) -> Result<Loaded<T>, ConfigError> {
    let defaults = leaves(&default_table::<T>());
    let mut values: BTreeMap<String, (Value, Source)> = defaults
        .iter()
        .map(|(key, value)| (key.clone(), (value.clone(), Source::Default)))
        .collect();
    let mut put = |key: String, value: Value, origin: Source| -> Result<(), ConfigError> {
        let Some(default) = defaults.get(&key) else {
            if defaults.keys().any(|known| known.starts_with(&format!("{key}."))) {
                if value.as_table().is_some_and(Table::is_empty) {
                    return Ok(());
                }
                let reason = "expected a section".to_owned();
                return Err(ConfigError::Value { key, value: value.to_string(), origin, reason });
            }
            let suggestion = nearest(&key, defaults.keys());
            return Err(ConfigError::UnknownKey { key, origin, suggestion });
        };
        let value = coerce(value, default).map_err(|(value, expected)| ConfigError::Value {
            key: key.clone(),
            value: value.to_string(),
            origin: origin.clone(),
            reason: format!("expected {expected}"),
        })?;
        check_alone::<T>(&key, &value, &origin)?;
        values.insert(key, (value, origin));
        Ok(())
    };
    if let Some(path) = &layers.file {
        for (key, value) in leaves(&read_file(path)?) {
            put(key, value, Source::File(path.clone()))?;
        }
    }
    for (key, default) in &defaults {
        let name = env_name(layers.env_prefix, key);
        if let Some((_, text)) = layers.env.iter().rev().find(|(found, _)| *found == name) {
            put(key.clone(), from_text(text, default), Source::Env(name))?;
        }
    }
    for (flag, key, text) in &layers.flags {
        let value = match defaults.get(key) {
            Some(default) => from_text(text, default),
            None => Value::String(text.clone()),
        };
        put(key.clone(), value, Source::Flag(flag.clone()))?;
    }
    let table = nest(values.iter().map(|(key, (value, _))| (key.as_str(), value)));
    let settings = T::deserialize(table).map_err(|error| ConfigError::Value {
        key: "settings".into(),
        value: String::new(),
        origin: Source::Default,
        reason: error.message().to_owned(),
    })?;
    Ok(Loaded { settings, values })
}

/// Splits the argument of a `--set` flag.
///
/// # Errors
/// When it has no `=`.
pub fn assignment(argument: &str) -> Result<(String, String, String), ConfigError> {
    let (key, value) = argument
        .split_once('=')
        .ok_or_else(|| ConfigError::Assignment { flag: argument.to_owned() })?;
    Ok(("--set".into(), key.trim().to_owned(), value.trim().to_owned()))
}

/// Name of the variable that sets a key.
pub fn env_name(prefix: &str, key: &str) -> String {
    format!("{prefix}{}", key.replace('.', "_").to_uppercase())
}

/// All keys of a settings tree in dotted form, with their default values.
pub fn keys<T: Serialize + Default>() -> BTreeMap<String, Value> {
    leaves(&default_table::<T>())
}

impl<T> Loaded<T> {
    /// Error about a value that has the right type but not a usable value.
    pub fn invalid(&self, key: &str, reason: impl Into<String>) -> ConfigError {
        let (value, origin) = match self.values.get(key) {
            Some((value, origin)) => (value.to_string(), origin.clone()),
            None => (String::new(), Source::Default),
        };
        ConfigError::Value { key: key.to_owned(), value, origin, reason: reason.into() }
    }

    /// The effective settings as TOML, each with its source. Values of `secret` keys are hidden.
    pub fn render(&self, secret: &[&str]) -> String {
        let mut text = String::new();
        let mut section = "";
        // Keys without a section must come first in TOML.
        let (top, nested): (Vec<_>, Vec<_>) =
            self.values.iter().partition(|(key, _)| !key.contains('.'));
        for (key, (value, origin)) in top.into_iter().chain(nested) {
            let (table, name) = key.rsplit_once('.').unwrap_or(("", key));
            if table != section {
                text.push_str(&format!("\n[{table}]\n"));
                section = table;
            }
            let hidden = secret.contains(&key.as_str()) && value.as_str() != Some("");
            let shown = if hidden { "\"(hidden)\"".to_owned() } else { value.to_string() };
            text.push_str(&format!("{name} = {shown} # {origin}\n"));
        }
        text
    }
}

fn default_table<T: Serialize + Default>() -> Table {
    Table::try_from(T::default()).expect("settings serialise to a TOML table")
}

fn read_file(path: &Path) -> Result<Table, ConfigError> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path)
        .map_err(|reason| ConfigError::Read { path: name.clone(), reason })?;
    text.parse::<Table>()
        .map_err(|error| ConfigError::Parse { path: name, reason: error.to_string() })
}

/// Dotted keys of everything that is not a table. An empty table is a key of its own, so that a
/// mistyped empty section is noticed.
fn leaves(table: &Table) -> BTreeMap<String, Value> {
    fn walk(prefix: &str, table: &Table, into: &mut BTreeMap<String, Value>) {
        for (name, value) in table {
            let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
            match value {
                Value::Table(inner) if !inner.is_empty() => walk(&key, inner, into),
                other => {
                    into.insert(key, other.clone());
                }
            }
        }
    }
    let mut into = BTreeMap::new();
    walk("", table, &mut into);
    into
}

fn nest<'a>(values: impl Iterator<Item = (&'a str, &'a Value)>) -> Table {
    let mut root = Table::new();
    for (key, value) in values {
        let mut table = &mut root;
        let mut parts = key.split('.').peekable();
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                table.insert(part.to_owned(), value.clone());
                break;
            }
            let inner = table.entry(part).or_insert_with(|| Value::Table(Table::new()));
            match inner {
                Value::Table(inner) => table = inner,
                _ => break,
            }
        }
    }
    root
}

/// Makes a value the type of its default, or returns it with the name of that type.
fn coerce(value: Value, default: &Value) -> Result<Value, (Value, &'static str)> {
    match (&value, default) {
        (Value::Integer(whole), Value::Float(_)) => Ok(Value::Float(*whole as f64)),
        _ if value.same_type(default) => Ok(value),
        _ => Err((value, type_name(default))),
    }
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "text",
        Value::Integer(_) => "a whole number",
        Value::Float(_) => "a number",
        Value::Boolean(_) => "true or false",
        Value::Datetime(_) => "a date",
        Value::Array(_) => "a list",
        Value::Table(_) => "a section",
    }
}

/// Text from a flag or variable as the type of the default; text that does not parse stays text,
/// and the type check reports it.
fn from_text(text: &str, default: &Value) -> Value {
    let parsed = match default {
        Value::Integer(_) => text.parse().ok().map(Value::Integer),
        Value::Float(_) => text.parse().ok().map(Value::Float),
        Value::Boolean(_) => text.parse().ok().map(Value::Boolean),
        Value::Array(_) => Some(Value::Array(
            text.split(',')
                .map(str::trim)
                .filter(|part| !part.is_empty())
                .map(|part| Value::String(part.to_owned()))
                .collect(),
        )),
        _ => None,
    };
    parsed.unwrap_or_else(|| Value::String(text.to_owned()))
}

/// Reads the settings with only this value set, so that an error can name its key: a negative
/// count or an unknown choice passes the type check above.
fn check_alone<T: Serialize + DeserializeOwned + Default>(
    key: &str,
    value: &Value,
    origin: &Source,
) -> Result<(), ConfigError> {
    let mut all = leaves(&default_table::<T>());
    all.insert(key.to_owned(), value.clone());
    match T::deserialize(nest(all.iter().map(|(key, value)| (key.as_str(), value)))) {
        Ok(_) => Ok(()),
        Err(error) => Err(ConfigError::Value {
            key: key.to_owned(),
            value: value.to_string(),
            origin: origin.clone(),
            reason: error.message().lines().next().unwrap_or("not usable").to_owned(),
        }),
    }
}

fn nearest<'a>(key: &str, known: impl Iterator<Item = &'a String>) -> Suggestion {
    let last = |key: &str| key.rsplit('.').next().unwrap_or("").to_owned();
    let scored = known.map(|candidate| {
        let whole = distance(key, candidate);
        // The right name in the wrong section is near as well.
        let same_name = if last(key) == last(candidate) { 1 } else { usize::MAX };
        (whole.min(same_name), candidate)
    });
    let best = scored.min_by_key(|(distance, _)| *distance);
    Suggestion(
        best.filter(|(distance, candidate)| *distance <= 1 + candidate.len() / 4)
            .map(|(_, candidate)| candidate.clone()),
    )
}

/// Levenshtein distance in characters.
fn distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in right.iter().enumerate() {
            let substituted = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[right.len()]
}

#[cfg(test)]
mod tests;

//! Typed access to a request's JSON, with errors that name the field.

use serde_json::{Map, Value};

use super::error::ApiError;

/// A request body that is a JSON object. Null counts as absent everywhere.
#[derive(Debug, Clone)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Self(map)),
            Ok(_) => Err(ApiError::bad_request("the body must be a JSON object")),
            Err(error) => {
                Err(ApiError::bad_request(format!("the body is not valid JSON: {error}")))
            }
        }
    }

    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    pub fn float(&self, name: &str) -> Result<Option<f64>, ApiError> {
        self.typed(name, "a number", Value::as_f64)
    }

    pub fn integer(&self, name: &str) -> Result<Option<i64>, ApiError> {
        // Seeds reach above i64 in some clients; their bits are what counts.
        self.typed(name, "an integer", |value| {
            value.as_i64().or_else(|| value.as_u64().map(|value| value as i64))
        })
    }

    /// An integer that is at least `least`.
    pub fn count(&self, name: &str, least: usize) -> Result<Option<usize>, ApiError> {
        let Some(value) = self.integer(name)? else { return Ok(None) };
        match usize::try_from(value) {
            Ok(value) if value >= least => Ok(Some(value)),
            _ => {
                Err(ApiError::field(name, format!("{name} must be at least {least}, got {value}")))
            }
        }
    }

    pub fn flag(&self, name: &str, default: bool) -> Result<bool, ApiError> {
        Ok(self.typed(name, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    pub fn text(&self, name: &str) -> Result<Option<&str>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(name, "a string", other)),
        }
    }

    /// A string or a list of strings.
    pub fn texts(&self, name: &str) -> Result<Vec<String>, ApiError> {
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(Value::String(text)) => Ok(vec![text.clone()]),
            Some(Value::Array(items)) => items
                .iter()
                .map(|item| match item {
                    Value::String(text) => Ok(text.clone()),
                    other => Err(wrong_type(name, "strings", other)),
                })
                .collect(),
            Some(other) => Err(wrong_type(name, "a string or a list of strings", other)),
        }
    }

    fn typed<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong_type(name, expected, value))
    }
}

/// Reads a list of token ids below `vocab_size`.
pub(super) fn token_ids(
    name: &str,
    value: &Value,
    vocab_size: usize,
) -> Result<Vec<u32>, ApiError> {
    let Value::Array(items) = value else {
        return Err(wrong_type(name, "a list of token ids", value));
    };
    items
        .iter()
        .map(|item| {
            let id = item.as_u64().ok_or_else(|| wrong_type(name, "token ids", item))?;
            u32::try_from(id).ok().filter(|&id| (id as usize) < vocab_size).ok_or_else(|| {
                let message =
                    format!("{name}: token id {id} is outside the vocabulary of {vocab_size}");
                ApiError::field(name, message)
            })
        })
        .collect()
}

fn wrong_type(name: &str, expected: &str, got: &Value) -> ApiError {
    let got = match got {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    ApiError::field(name, format!("{name} must be {expected}, got {got}"))
}

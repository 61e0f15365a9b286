//! Message content as templates expect it: text.

use serde_json::Value;

use super::ChatError;

/// The messages with every list of text parts joined to one text, line by line.
pub(super) fn as_text(messages: &Value) -> Result<Value, ChatError> {
    let Some(list) = messages.as_array() else {
        return Err(ChatError::Messages("expected a list of messages".to_string()));
    };
    let one = |(index, message): (usize, &Value)| {
        let mut message = message.clone();
        let Some(fields) = message.as_object_mut() else {
            return Err(ChatError::Messages(format!("message {index} is not an object")));
        };
        if !fields.get("role").is_some_and(Value::is_string) {
            return Err(ChatError::Messages(format!("message {index} has no role")));
        }
        if let Some(Value::Array(parts)) = fields.get("content") {
            let text = join(index, parts)?;
            fields.insert("content".to_string(), Value::String(text));
        }
        Ok(message)
    };
    list.iter().enumerate().map(one).collect::<Result<Vec<_>, _>>().map(Value::Array)
}

fn join(index: usize, parts: &[Value]) -> Result<String, ChatError> {
    let text = |part: &Value| match part {
        Value::String(text) => Ok(text.clone()),
        part => {
            let kind = part.get("type").and_then(Value::as_str).unwrap_or("unknown");
            match part.get("text").and_then(Value::as_str) {
                Some(text) if kind == "text" => Ok(text.to_string()),
                _ => Err(ChatError::Messages(format!(
                    "message {index} has a part of type {kind:?}; this server takes text only"
                ))),
            }
        }
    };
    Ok(parts.iter().map(text).collect::<Result<Vec<_>, _>>()?.join("\n"))
}

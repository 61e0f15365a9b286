//! Chat templates, rendered as transformers renders them.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, UndefinedBehavior, context};
use serde_json::{Map, Value};

mod functions;
mod messages;
mod python;
mod tojson;

/// What can go wrong with a template.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    #[error("the chat template does not compile: {0}\nhint: replace chat_template of the target")]
    Template(String),
    #[error("the chat template refuses these messages: {0}")]
    Refused(String),
    #[error("the chat template fails on these messages: {0}")]
    Render(String),
    #[error("messages: {0}")]
    Messages(String),
}

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Strings that the template may refer to, by name: `bos_token`, `eos_token` and so on.
    tokens: Map<String, Value>,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Compiles a Jinja template; `bos_token` and `eos_token` are the strings it may refer to.
    ///
    /// # Errors
    /// When the template does not compile.
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, ChatError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|error| ChatError::Template(describe(&error)))?;
        environment.set_syntax(syntax);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, _, value| python::write(out, value));
        environment.add_function("raise_exception", functions::raise_exception);
        environment.add_function("strftime_now", functions::strftime_now);
        environment.add_filter("tojson", tojson::tojson);
        environment
            .add_template_owned(NAME, functions::without_generation_marks(source))
            .map_err(|error| ChatError::Template(describe(&error)))?;
        let template = Self { environment, tokens: Map::new() };
        Ok(template.with_token("bos_token", bos_token).with_token("eos_token", eos_token))
    }

    /// Adds a string that the template may refer to, for example `unk_token`.
    #[must_use]
    pub fn with_token(mut self, name: &str, token: &str) -> Self {
        self.tokens.insert(name.to_string(), Value::String(token.to_string()));
        self
    }

    /// Renders an OpenAI `messages` array; the result is encoded without adding special tokens.
    /// Content given as a list of text parts is joined with line breaks.
    ///
    /// # Errors
    /// When the template raises an exception on these messages, or they have content other than
    /// text.
    pub fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String, ChatError> {
        let messages = messages::as_text(messages)?;
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|error| ChatError::Template(describe(&error)))?;
        let tokens = minijinja::Value::from(Serde(&self.tokens));
        let settings = context! {
            messages => Serde(&messages),
            tools => tools.map(Serde),
            documents => (),
            add_generation_prompt => add_generation_prompt,
            ..tokens
        };
        template.render(settings).map_err(|error| match functions::raised(&error) {
            Some(reason) => ChatError::Refused(reason),
            None if error.kind() == ErrorKind::SyntaxError => ChatError::Template(describe(&error)),
            None => ChatError::Render(describe(&error)),
        })
    }
}

/// The message of an error with the line it happened in, without the template's text.
fn describe(error: &minijinja::Error) -> String {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_string);
    match error.line() {
        Some(line) => format!("{detail} (line {line})"),
        None => detail,
    }
}

#[cfg(test)]
mod tests;

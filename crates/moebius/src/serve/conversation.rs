//! Conversations: messages checked and brought into the form that chat templates read, then rendered and cut into
//! tokens. Nothing in a message makes the server read a file or fetch an address: parts other than text are refused.

use std::sync::Arc;

use engine::formats::Tool;
use engine::template::{self, Chat};
use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;
use super::fields::{Kind, Object, Read};
use super::limits::{MAX_PARTS, MAX_TOOLS};
use super::tools;

/// What a template is rendered with.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    pub messages: Vec<Value>,
    /// Definitions in OpenAI's form.
    pub tools: Vec<Value>,
    /// Further variables of the template.
    pub kwargs: Object,
    /// The beginning of the answer, put behind the prompt.
    pub prefill: Option<String>,
    pub no_generation_prompt: bool,
}

/// A rendered conversation.
pub struct Prompt {
    pub text: String,
    pub tokens: Vec<u32>,
}

/// Checks messages in OpenAI's form.
pub fn messages(list: &[Value]) -> Result<Vec<Value>, ApiError> {
    if list.is_empty() {
        return Err(ApiError::field("messages", "is empty"));
    }
    list.iter().enumerate().map(|(i, message)| message_of(&format!("messages[{i}]"), message)).collect()
}

fn message_of(at: &str, message: &Value) -> Result<Value, ApiError> {
    const ROLES: Kind = Kind::Word(&["system", "developer", "user", "assistant", "tool", "function"]);
    let message = message.as_object().ok_or_else(|| ApiError::field(at, "must be an object"))?;
    let role = message.value("role").ok_or_else(|| ApiError::field(format!("{at}.role"), "is missing"))?;
    ROLES.check(&format!("{at}.role"), role)?;
    // Templates know the older names.
    let role = match role.as_str().unwrap_or_default() {
        "developer" => "system",
        "function" => "tool",
        role => role,
    };
    let mut out = Object::new();
    out.insert("role".into(), role.into());
    let calls = match message.value("tool_calls") {
        Some(calls) if role == "assistant" => tool_calls(&format!("{at}.tool_calls"), calls)?,
        _ => Vec::new(),
    };
    match message.value("content") {
        Some(content) => {
            out.insert("content".into(), text_of(&format!("{at}.content"), content)?.into());
        }
        // An answer may consist of calls or a refusal alone; what it says is then empty, for templates that join it.
        None if role == "assistant" => {
            out.insert("content".into(), message.text("refusal").unwrap_or_default().into());
        }
        None => return Err(ApiError::field(format!("{at}.content"), "is missing")),
    }
    if !calls.is_empty() {
        out.insert("tool_calls".into(), calls.into());
    }
    for name in ["name", "tool_call_id", "reasoning_content"] {
        if let Some(value) = message.value(name) {
            Kind::Text.check(&format!("{at}.{name}"), value)?;
            out.insert(name.into(), value.clone());
        }
    }
    Ok(out.into())
}

/// A message's text: a string, or a list of parts.
pub fn text_of(at: &str, content: &Value) -> Result<String, ApiError> {
    let parts = match content {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        _ => return Err(ApiError::field(at, "must be a string or a list of parts")),
    };
    if parts.len() > MAX_PARTS {
        return Err(ApiError::field(at, format!("has {} parts, at most {MAX_PARTS} are allowed", parts.len())));
    }
    let mut texts = Vec::with_capacity(parts.len());
    for (i, part) in parts.iter().enumerate() {
        let at = format!("{at}[{i}]");
        let part = part.as_object().ok_or_else(|| ApiError::field(&at, "must be an object"))?;
        let kind = part.text("type").ok_or_else(|| ApiError::field(format!("{at}.type"), "must be a string"))?;
        let name = match kind {
            "text" | "input_text" | "output_text" => "text",
            "refusal" => "refusal",
            other => return Err(no_such_part(&at, other)),
        };
        let text = part.text(name).ok_or_else(|| ApiError::field(format!("{at}.{name}"), "must be a string"))?;
        texts.push(text);
    }
    Ok(texts.join("\n"))
}

/// Refuses images and their kin.
pub fn no_such_part(at: &str, kind: &str) -> ApiError {
    let kind: String = kind.chars().take(40).collect();
    ApiError::field(
        format!("{at}.type"),
        format!("is {kind:?}: this model reads text only, and the server opens no files and fetches no addresses"),
    )
}

/// Calls of an earlier answer. Templates want the arguments as an object, clients send them as JSON in a string.
fn tool_calls(at: &str, calls: &Value) -> Result<Vec<Value>, ApiError> {
    Kind::List(&Kind::Object, MAX_TOOLS).check(at, calls)?;
    let calls = calls.as_array().into_iter().flatten().filter_map(Value::as_object).enumerate();
    calls
        .map(|(i, call)| {
            let at = format!("{at}[{i}].function");
            let function = call.object("function").ok_or_else(|| ApiError::field(&at, "must be an object"))?;
            let name =
                function.text("name").ok_or_else(|| ApiError::field(format!("{at}.name"), "must be a string"))?;
            let arguments = match function.value("arguments") {
                None => json!({}),
                Some(Value::String(text)) => arguments(text),
                Some(object @ Value::Object(_)) => object.clone(),
                Some(_) => return Err(ApiError::field(format!("{at}.arguments"), "must be a string of JSON")),
            };
            let id = call.text("id").unwrap_or_default();
            Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}))
        })
        .collect()
}

/// Arguments as templates want them: an object where the text is one, else the text.
pub fn arguments(text: &str) -> Value {
    match serde_json::from_str(text) {
        Ok(object @ Value::Object(_)) => object,
        _ if text.trim().is_empty() => json!({}),
        _ => text.into(),
    }
}

/// Further variables of the template. What the server sets itself cannot be set from outside: it is checked.
pub fn kwargs(body: &Object) -> Result<Object, ApiError> {
    const SET: [&str; 5] = ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"];
    let kwargs = body.object("chat_template_kwargs").cloned().unwrap_or_default();
    match SET.iter().find(|name| kwargs.contains_key(**name)) {
        Some(name) => Err(ApiError::field(format!("chat_template_kwargs.{name}"), "is set by the server")),
        None => Ok(kwargs),
    }
}

impl Conversation {
    /// Makes the last message, which must be the assistant's, the beginning of the answer.
    pub fn continue_last(&mut self) -> Result<(), ApiError> {
        match self.messages.pop() {
            Some(last) if last["role"] == "assistant" && last.get("tool_calls").is_none() => {
                self.prefill = last["content"].as_str().map(String::from);
                Ok(())
            }
            _ => Err(ApiError::field("messages", "must end with the beginning of an answer, from the assistant")),
        }
    }

    /// The names and schemas of its tools.
    pub fn tool_list(&self) -> Vec<Tool> {
        self.tools.iter().filter_map(Tool::from_json).collect()
    }

    /// The prompt: the template's text and its tokens, which the model is to read where `fits` says so.
    pub async fn render(self, app: &Arc<App>, fits: bool) -> Result<Prompt, ApiError> {
        let Some(template) = app.template.clone() else {
            return Err(ApiError::bad("the model has no chat template; /v1/completions takes plain prompts"));
        };
        let shared = app.clone();
        let (format, knows_tools) = (app.format, app.template_knows_tools);
        let text = |message: &Value| message["content"].as_str().map_or(0, str::len);
        let n_bytes = self.messages.iter().map(text).sum();
        app.common
            .heavy(n_bytes, move || {
                let (messages, tools) = match knows_tools {
                    true => (format.history(&self.messages), self.tools),
                    false => (tools::into_text(self.messages, &self.tools), Vec::new()),
                };
                let (messages, tools) = (Value::Array(messages), Value::Array(tools));
                let chat = Chat {
                    tools: tools.as_array().is_some_and(|tools| !tools.is_empty()).then_some(&tools),
                    add_generation_prompt: !self.no_generation_prompt,
                    kwargs: (!self.kwargs.is_empty()).then_some(&self.kwargs),
                    ..Chat::new(&messages)
                };
                let mut text = template.render(&chat).map_err(|error| refusal(&error))?;
                text.push_str(self.prefill.as_deref().unwrap_or_default());
                if fits {
                    shared.check_length(&text)?;
                }
                let tokens = App::encode_prompt(&shared.tokenizer, &text);
                Ok(Prompt { text, tokens })
            })
            .await
    }
}

/// A template that refuses messages speaks to the client; one that is broken would be so for every request, which the
/// server saw at its start.
fn refusal(error: &template::Error) -> ApiError {
    match error {
        template::Error::Raised { message, .. } => {
            ApiError::field("messages", "is not what the model's chat template takes").quoting(format!(": {message}"))
        }
        template::Error::Thread { .. } => ApiError::internal(error.to_string()),
        error => ApiError::field("messages", "cannot be rendered").quoting(format!(": {error}")),
    }
}

//! Conversations: messages checked and brought into the form that chat templates read, then rendered and cut into
//! tokens. Nothing in a message makes the server read a file or fetch an address: images come in the body
//! ([`super::images`]), and where the model sees none, they and their kin are refused.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use engine::formats::Tool;
use engine::images::Pictures;
use engine::template::{self, Chat, ChatTemplate};
use serde_json::{Value, json};

use super::app::{App, TOO_LONG};
use super::body::whole_characters;
use super::error::ApiError;
use super::fields::{Kind, Object, Read};
use super::images::{Images, no_such_part};
use super::limits::{MAX_PARTS, MAX_TOOLS};
use super::tools::{self, Dialects, Offer};

/// The variable for how much the model thinks.
const EFFORT: &str = "reasoning_effort";

/// What a template is rendered with.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    pub messages: Vec<Value>,
    /// Definitions in OpenAI's form.
    pub tools: Vec<Value>,
    /// How calls of some of them are answered.
    pub dialects: Dialects,
    /// What of the request has no effect, for a header.
    pub ignored: Vec<String>,
    /// Further variables of the template.
    pub kwargs: Object,
    /// The beginning of the answer, put behind the prompt.
    pub prefill: Option<String>,
    pub no_generation_prompt: bool,
    /// Whether its oldest turns are left out where the context is full; as the server does when `None`.
    pub trims: Option<bool>,
    /// Images, whose marks are in the messages.
    pub images: Images,
}

/// A rendered conversation.
pub struct Prompt {
    pub text: String,
    pub tokens: Vec<u32>,
    pub pictures: Option<Arc<Pictures>>,
    /// Oldest messages that are not part of it, as the context is full.
    pub n_left_out: usize,
}

/// How long a prompt may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fits {
    /// As long as it likes: the model is not to read it.
    Any,
    /// It leaves this many tokens of the context to its answer, at most a quarter; where turns are not left out for
    /// that, the engine refuses what is too long.
    Answered(usize),
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
        // An answer may consist of calls or a refusal alone, and a tool may say nothing; what it says is then empty, for
        // templates that join it.
        None if role == "assistant" || role == "tool" => {
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

/// Returns a message's text: a string, or a list of parts.
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
        texts.extend(part_text(&at, part)?);
    }
    Ok(texts.join("\n"))
}

/// Returns the text of a part; `None` of what has none, such as a search that a provider's server made.
pub fn part_text(at: &str, part: &Object) -> Result<Option<String>, ApiError> {
    const MEDIA: [&str; 5] = ["image", "audio", "video", "file", "screenshot"];
    let kind = part.text("type").ok_or_else(|| ApiError::field(format!("{at}.type"), "must be a string"))?;
    let text = |name: &str| part.text(name).ok_or_else(|| ApiError::field(format!("{at}.{name}"), "must be a string"));
    Ok(match kind {
        "text" | "input_text" | "output_text" => Some(text("text")?.into()),
        "refusal" => Some(text("refusal")?.into()),
        "document" => {
            let source = part.object("source").ok_or_else(|| ApiError::field(format!("{at}.source"), "is missing"))?;
            let said = match source.text("type") {
                Some("text") => source.text("data").unwrap_or_default().into(),
                Some("content") => text_of(&format!("{at}.source.content"), &source["content"])?,
                _ => return Err(no_such_part(at, kind)),
            };
            Some(part.text("title").map_or(said.clone(), |title| format!("{title}\n{said}")))
        }
        "search_result" => {
            let said = text_of(&format!("{at}.content"), part.get("content").unwrap_or(&Value::Null))?;
            let heads = ["title", "source"].into_iter().filter_map(|name| part.text(name));
            Some(heads.chain([said.as_str()]).collect::<Vec<_>>().join("\n"))
        }
        other if MEDIA.iter().any(|media| other.contains(media)) && part.text("text").is_none() => {
            return Err(no_such_part(at, other));
        }
        _ => part.text("text").map(String::from),
    })
}

/// Calls of an earlier answer. Templates want the arguments as an object, clients send them as JSON in a string.
fn tool_calls(at: &str, calls: &Value) -> Result<Vec<Value>, ApiError> {
    Kind::List(&Kind::Object, MAX_TOOLS).check(at, calls)?;
    let calls = calls.as_array().into_iter().flatten().filter_map(Value::as_object).enumerate();
    calls
        .map(|(i, call)| {
            if let Some(custom) = call.object("custom") {
                return Ok(custom_call(call, custom.text("name"), custom.text("input")));
            }
            let at = format!("{at}[{i}].function");
            let function = call.object("function").ok_or_else(|| ApiError::field(&at, "must be an object"))?;
            let name =
                function.text("name").ok_or_else(|| ApiError::field(format!("{at}.name"), "must be a string"))?;
            let arguments = match function.value("arguments") {
                None => json!({}),
                Some(Value::String(text)) => arguments(text),
                Some(object @ Value::Object(_)) => object.clone(),
                Some(other) => json!({NOT_AN_OBJECT: other}),
            };
            let id = call.text("id").unwrap_or_default();
            Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}))
        })
        .collect()
}

/// Name of what a model wrote in the place of arguments where that was no object: templates go over their pairs.
const NOT_AN_OBJECT: &str = "arguments";

/// Arguments as templates want them: an object.
pub fn arguments(text: &str) -> Value {
    match serde_json::from_slice(&whole_characters(text.as_bytes())) {
        Ok(object @ Value::Object(_)) => object,
        Ok(Value::Null) => json!({}),
        Ok(other) => json!({NOT_AN_OBJECT: other}),
        Err(_) if text.trim().is_empty() => json!({}),
        Err(_) => json!({NOT_AN_OBJECT: text}),
    }
}

/// A call of a custom tool.
pub fn custom_call(call: &Object, name: Option<&str>, input: Option<&str>) -> Value {
    let id = call.text("call_id").or(call.text("id")).unwrap_or_default();
    let arguments = json!({tools::INPUT: input.unwrap_or_default()});
    json!({"id": id, "type": "function", "function": {"name": name.unwrap_or_default(), "arguments": arguments}})
}

/// Joins the system messages at the start: most templates take one.
fn joined(messages: Vec<Value>) -> Vec<Value> {
    let mut out: Vec<Value> = Vec::with_capacity(messages.len());
    for message in messages {
        match out.last_mut().filter(|last| last["role"] == "system" && message["role"] == "system") {
            Some(last) => add_text(last, &message),
            None => out.push(message),
        }
    }
    out
}

/// Appends the text of a message to another one's.
fn add_text(to: &mut Value, from: &Value) {
    let texts = [&*to, from].map(|message| message["content"].as_str().unwrap_or_default());
    to["content"] = texts.join("\n\n").into();
}

fn is_late(i: usize, message: &Value) -> bool {
    i > 0 && message["role"] == "system"
}

/// Returns the messages, in which the user says what system messages within say.
fn late_as_user(messages: &[Value]) -> Vec<Value> {
    let (mut out, mut was_late): (Vec<Value>, bool) = (Vec::new(), false);
    for (i, message) in messages.iter().enumerate() {
        let late = is_late(i, message);
        // Templates want turns to alternate.
        let joins = message["role"] == "user" && was_late || late;
        match out.last_mut().filter(|last| joins && last["role"] == "user") {
            Some(last) => add_text(last, message),
            None if late => out.push(json!({"role": "user", "content": message["content"]})),
            None => out.push(message.clone()),
        }
        was_late = late;
    }
    out
}

/// Returns the messages, in which the user's first one begins with what the system message says.
fn system_as_user(messages: &[Value]) -> Vec<Value> {
    let mut out = messages.to_vec();
    if out.first().is_none_or(|first| first["role"] != "system") {
        return out;
    }
    let mut system = out.remove(0);
    system["role"] = "user".into();
    match out.first_mut().filter(|first| first["role"] == "user") {
        Some(first) => {
            add_text(&mut system, first);
            *first = system;
        }
        None => out.insert(0, system),
    }
    out
}

/// Renders messages, and where the template refuses a system message, or leaves one out, in a form that it takes.
fn rendered(
    messages: Vec<Value>,
    render: impl Fn(Vec<Value>) -> Result<String, template::Error>,
) -> Result<String, template::Error> {
    let has_system = messages.iter().any(|message| message["role"] == "system");
    if !has_system {
        return render(messages);
    }
    let late = messages.iter().enumerate().filter(|(i, message)| is_late(*i, message));
    let late: Vec<String> = late.map(|(_, message)| message["content"].as_str().unwrap_or_default().into()).collect();
    let forms: [fn(&[Value]) -> Vec<Value>; 2] = [late_as_user, |messages| system_as_user(&late_as_user(messages))];
    let says_all = |text: &str| late.iter().all(|late| text.contains(late.trim()));
    let first = render(messages.clone());
    match &first {
        Ok(text) if says_all(text) => return first,
        Ok(_) | Err(template::Error::Raised { .. }) => {}
        Err(_) => return first,
    }
    for form in forms {
        if let Ok(text) = render(form(&messages))
            && says_all(&text)
        {
            return Ok(text);
        }
    }
    first
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
            _ => Err(ApiError::field("messages", "must end with a message of the assistant, to continue it")),
        }
    }

    /// Offers tools.
    pub fn offer(&mut self, offer: Offer) {
        let Offer { list, dialects, ignored } = offer;
        (self.tools, self.dialects) = (list, dialects);
        self.ignored.extend(ignored);
    }

    /// Returns the names and schemas of its tools.
    pub fn tool_list(&self) -> Vec<Tool> {
        self.tools.iter().filter_map(Tool::from_json).collect()
    }

    /// Returns the prompt: the template's text and its tokens. The oldest turns are left out where the server is told
    /// to and they do not fit.
    pub async fn render(mut self, app: &Arc<App>, fits: Fits) -> Result<Prompt, ApiError> {
        let Some(template) = app.template.clone() else {
            if let Some(whole) = app.whole {
                return Err(ApiError::bad(whole.no_text()));
            }
            return Err(ApiError::bad("this model has no chat template; /v1/completions accepts plain prompts"));
        };
        let shared = app.clone();
        let text = |message: &Value| message["content"].as_str().map_or(0, str::len);
        let n_bytes = self.messages.iter().map(text).sum();
        app.common
            .see(self.images.len(), n_bytes, move |left| {
                let tools = match shared.template_knows_tools {
                    true => Value::Array(std::mem::take(&mut self.tools)),
                    false => Value::Null,
                };
                let from = |start| self.render_from(start, &tools, &shared, &template, fits, &left);
                let first = from(0);
                let Fits::Answered(room) = fits else { return first };
                // Images stay with the messages that show them.
                if !self.trims.unwrap_or(shared.common.conversations.trims) || !self.images.is_empty() {
                    return first;
                }
                let context = shared.worker.context();
                let most = context - room.clamp(1, (context / 4).max(1)).min(context);
                let is_short = |prompt: &Result<Prompt, ApiError>| match prompt {
                    Ok(prompt) => prompt.tokens.len() <= most,
                    Err(error) => error.code != Some(TOO_LONG),
                };
                if is_short(&first) {
                    return first;
                }
                // The fewest turns to leave out.
                let starts = later_turns(&self.messages);
                let (mut low, mut high, mut best) = (0, starts.len(), None);
                while low < high {
                    let middle = low.midpoint(high);
                    let prompt = from(starts[middle]);
                    if is_short(&prompt) {
                        (high, best) = (middle, Some(prompt));
                    } else {
                        low = middle + 1;
                    }
                }
                match (best, starts.last()) {
                    (Some(best), _) => best,
                    // The last turn by itself may have a shorter answer.
                    (None, Some(&last)) => from(last),
                    (None, None) => first,
                }
            })
            .await
    }

    /// As [`Conversation::render`], without the messages between the system message and `start`, which is 0 for all.
    fn render_from(
        &self,
        start: usize,
        tools: &Value,
        app: &App,
        template: &ChatTemplate,
        fits: Fits,
        left: &AtomicBool,
    ) -> Result<Prompt, ApiError> {
        let n_system = if start == 0 { 0 } else { n_leading_systems(&self.messages) };
        let messages = match start {
            0 => Cow::Borrowed(&self.messages[..]),
            _ => Cow::Owned([&self.messages[..n_system], &self.messages[start..]].concat()),
        };
        let messages = match app.template_knows_tools {
            true => app.format.history(&messages),
            false => tools::into_text(messages.into_owned(), &self.tools),
        };
        let tools = Some(tools).filter(|tools| tools.as_array().is_some_and(|tools| !tools.is_empty()));
        let render = |messages| {
            let messages = Value::Array(messages);
            let with = |tools: Option<&Value>, kwargs: &Object| {
                template.render(&Chat {
                    tools,
                    add_generation_prompt: !self.no_generation_prompt,
                    kwargs: (!kwargs.is_empty()).then_some(kwargs),
                    ..Chat::new(&messages)
                })
            };
            let rendered = with(tools, &self.kwargs);
            match (&rendered, tools) {
                (Err(template::Error::Raised { .. }), _) if self.kwargs.contains_key(EFFORT) => {
                    // Some templates know other words for it and refuse these, which agents send unasked.
                    let mut kwargs = self.kwargs.clone();
                    kwargs.shift_remove(EFFORT);
                    with(tools, &kwargs).or(rendered)
                }
                (Err(template::Error::Failed { .. }), Some(tools)) => {
                    with(Some(&tools::described(tools)), &self.kwargs).or(rendered)
                }
                _ => rendered,
            }
        };
        let mut text = rendered(joined(messages), render).map_err(|error| refusal(&error))?;
        text.push_str(self.prefill.as_deref().unwrap_or_default());
        let most = if fits == Fits::Any { usize::MAX } else { app.worker.context() };
        if fits != Fits::Any {
            app.check_length(&text)?;
        }
        let (tokens, pictures) = self.images.encode(app, &text, most, left)?;
        let text = self.images.shown(text);
        Ok(Prompt { text, tokens, pictures, n_left_out: start - n_system })
    }
}

/// System messages at the start.
fn n_leading_systems(messages: &[Value]) -> usize {
    messages.iter().take_while(|message| message["role"] == "system").count()
}

/// Returns where the turns after the first begin: a turn is what the user says, with all that follows from it.
fn later_turns(messages: &[Value]) -> Vec<usize> {
    let is_user = |i: &usize| messages[*i]["role"] == "user" && messages[i - 1]["role"] != "user";
    (n_leading_systems(messages) + 1..messages.len()).filter(is_user).collect()
}

/// Returns a template that refuses messages speaks to the client; one that is broken would be so for every request,
/// which the server saw at its start.
fn refusal(error: &template::Error) -> ApiError {
    match error {
        template::Error::Raised { message, .. } => {
            ApiError::field("messages", "are refused by the model's chat template").quoting(format!(": {message}"))
        }
        template::Error::Thread { .. } => ApiError::internal(error.to_string()),
        error => ApiError::field("messages", "cannot be rendered").quoting(format!(": {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn say(role: &str, text: &str) -> Value {
        json!({"role": role, "content": text})
    }

    /// Writes `role:text` lines; raises like templates that take one system message, first, or none.
    fn template(most_systems: usize, drops_late: bool) -> impl Fn(Vec<Value>) -> Result<String, template::Error> {
        move |messages| {
            let mut lines = Vec::new();
            for (i, message) in messages.iter().enumerate() {
                let is_system = message["role"] == "system";
                if is_system && drops_late && i > 0 {
                    continue;
                }
                if is_system && (i > 0 || most_systems == 0) {
                    return Err(template::Error::Raised { message: "no system".into(), line: 1 });
                }
                lines.push(format!("{}:{}", message["role"].as_str().unwrap(), message["content"].as_str().unwrap()));
            }
            Ok(lines.join(" "))
        }
    }

    #[test]
    fn system_messages_take_the_form_that_the_template_takes() {
        let messages = || {
            joined(vec![
                say("system", "a"),
                say("system", "b"),
                say("user", "c"),
                say("assistant", "d"),
                say("system", "LATE"),
                say("user", "f"),
            ])
        };
        for (most, drops, expected) in [
            (1, false, "system:a\n\nb user:c assistant:d user:LATE\n\nf"),
            (1, true, "system:a\n\nb user:c assistant:d user:LATE\n\nf"),
            (0, false, "user:a\n\nb\n\nc assistant:d user:LATE\n\nf"),
        ] {
            assert_eq!(rendered(messages(), template(most, drops)).unwrap(), expected);
        }
        // What a template refuses for other reasons stays refused.
        let refused = rendered(vec![say("user", "x")], |_| {
            Err(template::Error::Raised { message: "roles must alternate".into(), line: 1 })
        });
        assert!(refused.is_err());
        let all = |messages: Vec<Value>| Ok(Value::Array(messages).to_string());
        assert!(rendered(messages(), all).unwrap().contains(r#"{"role":"system","content":"LATE"}"#));
    }

    #[test]
    fn past_arguments_are_objects() {
        for (text, expected) in [
            ("{\"a\": 1}", json!({"a": 1})),
            ("", json!({})),
            ("null", json!({})),
            ("[1]", json!({"arguments": [1]})),
            ("{", json!({"arguments": "{"})),
            (r#"{"a": "\ud83d"}"#, json!({"a": "\u{fffd}"})),
        ] {
            assert_eq!(arguments(text), expected, "{text}");
        }
    }

    #[test]
    fn parts_with_a_text_are_taken_and_media_are_refused() {
        for (part, expected) in [
            (json!({"type": "text", "text": "a"}), Ok(Some("a"))),
            (json!({"type": "document", "source": {"type": "text", "data": "d"}, "title": "t"}), Ok(Some("t\nd"))),
            (
                json!({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "d"}]}}),
                Ok(Some("d")),
            ),
            (json!({"type": "document", "source": {"type": "base64", "data": "eA=="}}), Err(())),
            (
                json!({"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "c"}]}),
                Ok(Some("t\ns\nc")),
            ),
            (json!({"type": "server_tool_use", "name": "web_search", "input": {}}), Ok(None)),
            (json!({"type": "tool_reference", "tool_name": "f"}), Ok(None)),
            (json!({"type": "image_url", "image_url": {"url": "http://x"}}), Err(())),
            (json!({"type": "input_file", "file_id": "1"}), Err(())),
            (json!({"text": "x"}), Err(())),
        ] {
            let text = part_text("p", part.as_object().unwrap()).map_err(drop);
            assert_eq!(text.as_ref().map(Option::as_deref), expected.as_ref().map(|text| *text), "{part}");
        }
    }
}

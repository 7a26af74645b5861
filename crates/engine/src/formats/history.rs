//! Earlier messages in the form that a family's template expects.

use serde_json::{Map, Value};

use super::Format;
use super::parser::new_id;

/// What a template requires of messages with calls, besides the common form.
#[derive(Clone, Copy, Default)]
pub(super) struct Habits {
    /// At most one call per message; its result follows.
    pub one_call: bool,
    /// A message with calls and no content has null content: an empty string would render as a separate message.
    pub null_content: bool,
    /// Ids of calls have nine letters and digits.
    pub short_ids: bool,
    /// Thoughts are in `thinking`; in messages with calls, so is the content.
    pub thinking: bool,
}

/// Habits of most templates, as a value for statics, where `Default` cannot be called.
pub(super) const PLAIN: Habits = Habits { one_call: false, null_content: false, short_ids: false, thinking: false };

impl Format {
    /// Converts messages of the chat completions API to the form that chat templates of this format take: JSON text of
    /// call arguments becomes an object, lists of text parts become strings, a missing content an empty one; several
    /// calls, ids and thoughts are rewritten in the family's form.
    ///
    /// Values that are no objects, or not in the API's form, are left unchanged.
    pub fn history(&self, messages: &[Value]) -> Vec<Value> {
        let habits = self.calls.map_or(PLAIN, |calls| calls.habits);
        let mut out = Vec::with_capacity(messages.len());
        let mut rest: Vec<Value> = messages.iter().rev().map(|m| message(m, habits)).collect();
        while let Some(next) = rest.pop() {
            let n_calls = next["tool_calls"].as_array().map_or(0, Vec::len);
            if habits.one_call && n_calls > 1 {
                split(next, &mut rest, &mut out);
            } else {
                out.push(next);
            }
        }
        out
    }
}

fn message(message: &Value, habits: Habits) -> Value {
    let mut message = message.clone();
    let Some(fields) = message.as_object_mut() else { return message };
    let text = fields.get("content").and_then(parts);
    if let Some(text) = text {
        fields.insert("content".into(), text.into());
    }
    if fields.get("role").is_some_and(|role| role == "assistant") && fields.get("content").is_none_or(Value::is_null) {
        fields.insert("content".into(), "".into());
    }
    if let Some(id) = fields.get("tool_call_id").and_then(Value::as_str).filter(|_| habits.short_ids).map(short) {
        fields.insert("tool_call_id".into(), id.into());
    }
    let mut n_calls = 0;
    for call in fields.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        n_calls += 1;
        if let Some(id) = call["id"].as_str().filter(|_| habits.short_ids).map(short) {
            call["id"] = id.into();
        }
        let arguments = call.get_mut("function").and_then(|f| f.get_mut("arguments"));
        if let Some(arguments) = arguments
            && let Some(object) = arguments.as_str().and_then(object)
        {
            *arguments = object;
        }
    }
    if n_calls > 0 && habits.null_content && fields.get("content").is_some_and(|content| content == "") {
        fields.insert("content".into(), Value::Null);
    }
    if habits.thinking {
        thinking(fields, n_calls > 0);
    }
    message
}

/// Returns the text of a list of text parts; `None` for anything else.
fn parts(content: &Value) -> Option<String> {
    let texts = content.as_array()?.iter().map(|part| part.get("text")?.as_str());
    texts.collect::<Option<Vec<_>>>().map(|texts| texts.join("\n"))
}

/// Returns the object in a JSON text, if it is one.
fn object(text: &str) -> Option<Value> {
    match serde_json::from_str(text) {
        Ok(object @ Value::Object(_)) => Some(object),
        _ => text.trim().is_empty().then(|| Map::new().into()),
    }
}

fn thinking(fields: &mut Map<String, Value>, calls: bool) {
    let thought = fields.remove("reasoning_content").and_then(|t| t.as_str().map(str::to_owned));
    let said = fields.get("content").and_then(Value::as_str).unwrap_or_default().to_owned();
    match thought.filter(|t| !t.is_empty()) {
        Some(thought) if calls && !said.is_empty() => {
            fields.insert("thinking".into(), format!("{thought}\n{said}").into());
            fields.insert("content".into(), "".into());
        }
        Some(thought) => {
            fields.insert("thinking".into(), thought.into());
        }
        None => {}
    }
}

/// Splits a message with several calls into messages with one, each followed by its result. `rest` holds the following
/// messages, last first.
fn split(message: Value, rest: &mut Vec<Value>, out: &mut Vec<Value>) {
    let mut results = Vec::new();
    while let Some(result) = rest.pop_if(|next| next["role"] == "tool") {
        results.push(result);
    }
    let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
    for (i, call) in calls.into_iter().enumerate() {
        let mut one = message.clone();
        if i > 0 {
            // Content and thought are kept once.
            one["content"] = "".into();
            one.as_object_mut().map(|fields| fields.shift_remove("thinking"));
        }
        let id = call["id"].clone();
        one["tool_calls"] = Value::Array(vec![call]);
        out.push(one);
        let at = results.iter().position(|r| r["tool_call_id"] == id).or((!results.is_empty()).then_some(0));
        out.extend(at.map(|at| results.remove(at)));
    }
    out.append(&mut results);
}

/// Returns an id of nine letters and digits: the id itself, or a hash of it.
fn short(id: &str) -> String {
    if id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric()) {
        return id.to_owned();
    }
    let hash = id
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    new_id(hash, 0, true)
}

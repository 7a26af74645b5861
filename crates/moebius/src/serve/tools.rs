//! Tools as clients define and choose them, in the three APIs' words.

use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::{Kind, Object, Read};

/// Whether the model calls tools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// As it likes.
    #[default]
    Auto,
    /// It does not see them.
    None,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// Checks a definition in OpenAI's form; `inner` names the field that holds the function in the client's own form.
pub fn check(at: &str, tool: &Value, inner: &str) -> Result<(), ApiError> {
    let kind = tool["type"].as_str().unwrap_or("function");
    if kind != "function" {
        let kind: String = kind.chars().take(40).collect();
        return Err(ApiError::field(format!("{at}.type"), format!("is {kind:?}: only functions can be called")));
    }
    let function = tool.get("function").and_then(Value::as_object);
    let function = function.ok_or_else(|| ApiError::field(format!("{at}.function"), "must be an object"))?;
    let name = function.text("name").ok_or_else(|| ApiError::field(format!("{at}{inner}.name"), "must be a string"))?;
    if name.is_empty() || name.len() > 256 {
        return Err(ApiError::field(format!("{at}{inner}.name"), "must have 1 to 256 bytes"));
    }
    for (field, kind) in [("description", Kind::Text), ("parameters", Kind::Object), ("strict", Kind::Bool)] {
        if let Some(value) = function.value(field) {
            kind.check(&format!("{at}{inner}.{field}"), value)?;
        }
    }
    Ok(())
}

/// Checks a list of definitions in OpenAI's form.
pub fn definitions(list: &[Value]) -> Result<Vec<Value>, ApiError> {
    list.iter().enumerate().try_for_each(|(i, tool)| check(&format!("tools[{i}]"), tool, ".function"))?;
    Ok(list.to_vec())
}

/// `tool_choice` of chat completions and responses: a word, or an object with the name inside `function` or beside its
/// type.
pub fn openai_choice(choice: Option<&Value>) -> Result<ToolChoice, ApiError> {
    match choice {
        None => Ok(ToolChoice::Auto),
        Some(Value::String(word)) => Ok(match word.as_str() {
            "none" => ToolChoice::None,
            "required" => ToolChoice::Required,
            _ => ToolChoice::Auto,
        }),
        Some(choice) => {
            let name = choice["function"]["name"].as_str().or(choice["name"].as_str());
            let name = name.ok_or_else(|| ApiError::field("tool_choice", "must name a function"))?;
            Ok(ToolChoice::Named(name.into()))
        }
    }
}

/// `tool_choice` of Anthropic.
pub fn anthropic_choice(choice: &Object) -> Result<ToolChoice, ApiError> {
    match choice.text("type") {
        Some("auto") => Ok(ToolChoice::Auto),
        Some("none") => Ok(ToolChoice::None),
        Some("any") => Ok(ToolChoice::Required),
        Some("tool") => match choice.text("name") {
            Some(name) => Ok(ToolChoice::Named(name.into())),
            None => Err(ApiError::field("tool_choice.name", "must be a string")),
        },
        _ => Err(ApiError::field("tool_choice.type", "must be one of auto, any, tool, none")),
    }
}

/// Writes tools, calls and their results into the texts of messages, for templates that know none of them: in the form
/// that the parser of `<tool_call>` reads.
pub fn into_text(messages: Vec<Value>, tools: &[Value]) -> Vec<Value> {
    let mut out: Vec<Value> = messages.into_iter().map(message_into_text).collect();
    if tools.is_empty() {
        return out;
    }
    let list: Vec<String> = tools.iter().map(|tool| tool["function"].to_string()).collect();
    let about = format!(
        "You can call tools. To call one, write:\n<tool_call>\n{{\"name\": \"NAME\", \"arguments\": {{..}}}}\n</tool_call>\n\
         The tools:\n{}",
        list.join("\n")
    );
    match out.first_mut().filter(|first| first["role"] == "system") {
        Some(system) => system["content"] = format!("{}\n\n{about}", text(system)).into(),
        None => out.insert(0, json!({"role": "system", "content": about})),
    }
    out
}

fn text(message: &Value) -> &str {
    message["content"].as_str().unwrap_or_default()
}

fn message_into_text(message: Value) -> Value {
    if message["role"] == "tool" {
        return json!({"role": "user", "content": format!("<tool_response>\n{}\n</tool_response>", text(&message))});
    }
    let Some(calls) = message["tool_calls"].as_array() else { return message };
    let mut said = text(&message).to_string();
    for call in calls {
        let (name, arguments) = (&call["function"]["name"], &call["function"]["arguments"]);
        if !said.is_empty() {
            said.push('\n');
        }
        said.push_str(&format!("<tool_call>\n{{\"name\": {name}, \"arguments\": {arguments}}}\n</tool_call>"));
    }
    json!({"role": "assistant", "content": said})
}

impl ToolChoice {
    /// Whether the tools that a request defines can be chosen so.
    pub fn check(&self, tools: &[Value]) -> Result<(), ApiError> {
        match self {
            ToolChoice::Auto | ToolChoice::None => Ok(()),
            ToolChoice::Required if tools.is_empty() => Err(ApiError::field("tool_choice", "needs `tools`")),
            ToolChoice::Required => Ok(()),
            ToolChoice::Named(name) => {
                if tools.iter().any(|tool| tool["function"]["name"] == name.as_str()) {
                    return Ok(());
                }
                let name: String = name.chars().take(100).collect();
                Err(ApiError::field("tool_choice", format!("names {name:?}, which is not among the tools")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_without_tools_get_them_as_text() {
        let tool = json!({"type": "function", "function": {"name": "f"}});
        let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}});
        let messages = vec![
            json!({"role": "system", "content": "s"}),
            json!({"role": "user", "content": "u"}),
            json!({"role": "assistant", "content": "a", "tool_calls": [call]}),
            json!({"role": "tool", "tool_call_id": "1", "content": "r"}),
        ];
        let out = into_text(messages.clone(), &[tool]);
        assert!(text(&out[0]).starts_with("s\n\nYou can") && text(&out[0]).ends_with("{\"name\":\"f\"}"));
        assert_eq!(text(&out[2]), "a\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\":1}}\n</tool_call>");
        assert_eq!(out[3], json!({"role": "user", "content": "<tool_response>\nr\n</tool_response>"}));
        assert_eq!(into_text(messages[..2].to_vec(), &[]), messages[..2]);
    }

    #[test]
    fn choices_are_read_in_all_words() {
        let named = ToolChoice::Named("f".into());
        let openai = [
            (json!("auto"), ToolChoice::Auto),
            (json!("none"), ToolChoice::None),
            (json!("required"), ToolChoice::Required),
            (json!({"type": "function", "function": {"name": "f"}}), named.clone()),
            (json!({"type": "function", "name": "f"}), named.clone()),
        ];
        for (choice, expected) in openai {
            assert_eq!(openai_choice(Some(&choice)), Ok(expected), "{choice}");
        }
        let anthropic = [
            (json!({"type": "any"}), ToolChoice::Required),
            (json!({"type": "tool", "name": "f"}), named.clone()),
            (json!({"type": "none"}), ToolChoice::None),
        ];
        for (choice, expected) in anthropic {
            assert_eq!(anthropic_choice(choice.as_object().unwrap()), Ok(expected), "{choice}");
        }
        assert!(named.check(&[json!({"function": {"name": "g"}})]).is_err());
        assert!(named.check(&[json!({"function": {"name": "f"}})]).is_ok());
        assert!(ToolChoice::Required.check(&[]).is_err());
    }
}

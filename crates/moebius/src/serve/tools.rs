//! Tools as clients define and choose them, in the three APIs' words.

use serde_json::Value;

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

/// `tool_choice` of chat completions and responses: a word, or an object with the name inside `function` or beside its type.
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
    use serde_json::json;

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

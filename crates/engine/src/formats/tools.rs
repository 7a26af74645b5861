//! A tool as a format sees it: its name and the schema of its arguments.

use serde_json::Value;

/// A tool that a model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// JSON schema of its arguments, an object's; null when nothing is said about them.
    pub parameters: Value,
}

impl Tool {
    /// A tool from its definition as templates take it: `{"type": "function", "function": {"name", "parameters"}}`, or the
    /// inner object alone. None when it has no name.
    pub fn from_json(definition: &Value) -> Option<Tool> {
        let function = definition.get("function").unwrap_or(definition);
        let name = function.get("name")?.as_str()?.to_owned();
        Some(Tool { name, parameters: function.get("parameters").cloned().unwrap_or(Value::Null) })
    }
}

//! A tool as a format sees it: its name and the schema of its arguments.

use serde_json::Value;

use super::parser::Sink;
use super::python;

/// A tool that a model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// JSON schema of its arguments, an object; null when unknown.
    pub parameters: Value,
}

impl Tool {
    /// Parses a tool's definition as templates take it: `{"type": "function", "function": {"name", "parameters"}}`, or
    /// the inner object alone. `None` when it has no name.
    pub fn from_json(definition: &Value) -> Option<Tool> {
        let function = definition.get("function").unwrap_or(definition);
        let name = function.get("name")?.as_str()?.to_owned();
        Some(Tool { name, parameters: function.get("parameters").cloned().unwrap_or(Value::Null) })
    }
}

impl Tool {
    /// Returns whether a call must have this argument.
    pub(super) fn requires(&self, name: &str) -> bool {
        self.parameters["required"].as_array().is_some_and(|required| required.iter().any(|other| other == name))
    }

    /// Returns whether a call may have arguments that its schema does not name.
    pub(super) fn takes_others(&self) -> bool {
        !self.parameters.is_object() || self.parameters["additionalProperties"] == true
    }
}

/// Converts a call's arguments, given one by one as text, to JSON.
pub(super) struct Arguments {
    /// Schemas by name; null when unknown.
    properties: Value,
    n: usize,
}

impl Arguments {
    /// Begins a call of this tool.
    pub fn start(name: &str, tools: &[Tool], sink: &mut Sink) -> Arguments {
        let tool = tools.iter().find(|tool| tool.name == name);
        sink.start(name, None);
        sink.arguments("{");
        Arguments { properties: tool.map(|t| t.parameters["properties"].clone()).unwrap_or_default(), n: 0 }
    }

    /// One argument.
    pub fn text(&mut self, key: &str, text: &str, sink: &mut Sink) {
        let value = typed(text, self.properties.get(key));
        self.json(key, &value, sink);
    }

    /// One argument that is a string, whatever the schema says.
    pub fn string(&mut self, key: &str, text: &str, sink: &mut Sink) {
        self.json(key, &Value::from(text).to_string(), sink);
    }

    /// One argument that is JSON already.
    pub fn json(&mut self, key: &str, value: &str, sink: &mut Sink) {
        let comma = if self.n > 0 { ", " } else { "" };
        sink.arguments(&format!("{comma}{}: {value}", Value::from(key)));
        self.n += 1;
    }

    /// Returns whether no argument has come yet.
    pub fn is_first(&self) -> bool {
        self.n == 0
    }

    /// The call is complete.
    pub fn end(&self, sink: &mut Sink) {
        sink.arguments("}");
        sink.end();
    }
}

/// Converts a text to JSON by the schema's type: itself for a string, else JSON literally, or Python's words for it.
/// Without a schema, numbers, booleans, lists and objects are read as such. A text that fits no type is a string.
fn typed(text: &str, schema: Option<&Value>) -> String {
    let python = match text.trim() {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        other => other,
    };
    let read = |text: &str| serde_json::from_str::<Value>(text).ok();
    // Some templates write lists and dictionaries as Python prints them.
    let collection = read(python).is_none().then(|| python::collection(python)).flatten();
    let said = collection.as_deref().unwrap_or(python);
    let mut types = Vec::new();
    schema.into_iter().for_each(|schema| gather_types(schema, 0, &mut types));
    let fits = |value: &Value| match value {
        Value::String(_) => false,
        _ if types.is_empty() => true,
        Value::Null => types.contains(&"null"),
        _ if types.contains(&"string") => false,
        // A number with more digits than a float parses as a float; the text keeps them.
        Value::Number(_) => types.contains(&"number") || types.contains(&"integer"),
        value => types.contains(&type_of(value)),
    };
    match read(said).filter(fits) {
        Some(_) => said.to_owned(),
        None => Value::from(text).to_string(),
    }
}

/// The types that a schema allows explicitly.
fn gather_types<'a>(schema: &'a Value, depth: usize, types: &mut Vec<&'a str>) {
    match &schema["type"] {
        Value::String(name) => types.push(name),
        Value::Array(names) => types.extend(names.iter().filter_map(Value::as_str)),
        _ => {}
    }
    types.extend(schema["enum"].as_array().into_iter().flatten().chain(schema.get("const")).map(|v| type_of(v)));
    for of in ["anyOf", "oneOf"] {
        let options = schema[of].as_array().into_iter().flatten();
        options.filter(|_| depth < 8).for_each(|option| gather_types(option, depth + 1, types));
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(n) if n.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

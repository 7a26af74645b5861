//! Tools as clients define and choose them, in the three APIs' words. Those that a model cannot call as functions, such
//! as tools that a provider's server runs, are left out and named.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::{Kind, Object, Read};
use super::parts::Call;

/// Calls of an answer that must call, where the client does not say how many it wants, and where it wants several.
const MOST_CALLS: [usize; 2] = [4, 32];

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
    /// Of these, at least one where it is required.
    Allowed { required: bool, names: Vec<String> },
}

/// How a call is answered of a tool that the client does not know as a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI's custom tool: one text instead of arguments.
    Custom,
    /// A function of a namespace: its own name, and that of the namespace.
    Namespaced { name: String, namespace: String },
}

/// Tools of a request, as the model sees them.
#[derive(Clone, Debug, Default)]
pub struct Offer {
    /// Definitions in OpenAI's form.
    pub list: Vec<Value>,
    pub dialects: Dialects,
    /// What is left out, and where it stands.
    pub ignored: Vec<String>,
}

/// Tools that are answered in other words than functions, by the name that the model calls them by.
#[derive(Clone, Debug, Default)]
pub struct Dialects(HashMap<String, Dialect>);

impl Dialects {
    /// Returns how a call of this tool is answered, if not as one of a function.
    pub fn of(&self, name: &str) -> Option<&Dialect> {
        self.0.get(name)
    }

    /// Returns whether it is a custom tool.
    pub fn is_custom(&self, name: &str) -> bool {
        self.of(name) == Some(&Dialect::Custom)
    }
}

/// Name of the one argument of a custom tool.
pub const INPUT: &str = "input";

/// Returns the text that a custom tool is called with.
pub fn custom_input(call: &Call) -> String {
    call.object()[INPUT].as_str().unwrap_or_default().into()
}

impl Offer {
    /// Reads definitions of chat completions and of Ollama.
    pub fn of_chat(list: &[Value]) -> Result<Offer, ApiError> {
        let mut offer = Offer::default();
        for (i, tool) in list.iter().enumerate() {
            let at = format!("tools[{i}]");
            match kind_of(tool).unwrap_or("function") {
                "function" => offer.add(&at, ".function", tool.clone())?,
                "custom" => offer.add_custom(&at, ".custom", &tool["custom"])?,
                other => offer.ignore(&at, other),
            }
        }
        Ok(offer)
    }

    /// Reads definitions of responses, in which the function is next to its type; appends them.
    pub fn add_responses(&mut self, at: &str, list: &[Value]) -> Result<(), ApiError> {
        for (i, tool) in list.iter().enumerate() {
            let at = format!("{at}[{i}]");
            match kind_of(tool) {
                Some("function") | None => self.add(&at, "", flat(tool))?,
                Some("custom") => self.add_custom(&at, "", tool)?,
                Some("namespace") => self.add_namespace(&at, tool)?,
                Some(other) => self.ignore(&at, other),
            }
        }
        Ok(())
    }

    /// Reads definitions of Anthropic's messages.
    pub fn of_anthropic(list: &[Value]) -> Result<Offer, ApiError> {
        let mut offer = Offer::default();
        for (i, tool) in list.iter().enumerate() {
            let at = format!("tools[{i}]");
            match kind_of(tool) {
                Some("custom") | None => {
                    let schema = tool.get("input_schema").filter(|schema| !schema.is_null());
                    let schema = schema.cloned().unwrap_or_else(|| json!({"type": "object"}));
                    let mut function = json!({"name": tool["name"], "parameters": schema});
                    if let Some(about) = tool.get("description").filter(|about| !about.is_null()) {
                        function["description"] = about.clone();
                    }
                    offer.add(&at, "", json!({"type": "function", "function": function}))?;
                }
                Some(other) => offer.ignore(&at, other),
            }
        }
        Ok(offer)
    }

    /// Adds a definition in OpenAI's form; `inner` names the field that holds the function in the client's own form.
    fn add(&mut self, at: &str, inner: &str, tool: Value) -> Result<(), ApiError> {
        check(at, &tool, inner)?;
        self.list.push(tool);
        Ok(())
    }

    fn add_custom(&mut self, at: &str, inner: &str, tool: &Value) -> Result<(), ApiError> {
        let mut about = tool["description"].as_str().unwrap_or_default().to_owned();
        let format = tool.get("format").map(|format| format.get("grammar").unwrap_or(format));
        let mut input = json!({"type": "string"});
        if let Some(definition) = format.and_then(|format| format["definition"].as_str()) {
            let syntax = format.and_then(|format| format["syntax"].as_str()).unwrap_or("following");
            about += &format!("\n\nThe input keeps to this {} grammar:\n{definition}", shown(syntax));
            // An expression holds for the text within a string of JSON too; a grammar would have to be written anew.
            match syntax {
                "regex" => input["pattern"] = format!("^(?:{definition})$").into(),
                _ => self.ignored.push(format!("{at}.format (told to the model, not enforced)")),
            }
        }
        let parameters = json!({"type": "object", "properties": {INPUT: input}, "required": [INPUT],
            "additionalProperties": false});
        let function = json!({"name": tool["name"], "description": about, "parameters": parameters});
        self.add(at, inner, json!({"type": "function", "function": function}))?;
        let name = tool["name"].as_str().unwrap_or_default();
        self.dialects.0.insert(name.to_owned(), Dialect::Custom);
        Ok(())
    }

    /// Adds the functions of a namespace, each under a name that no other tool has.
    fn add_namespace(&mut self, at: &str, tool: &Value) -> Result<(), ApiError> {
        let namespace = tool["name"].as_str().unwrap_or_default();
        for (i, inner) in tool["tools"].as_array().into_iter().flatten().enumerate() {
            let at = format!("{at}.tools[{i}]");
            let name = inner["name"].as_str().unwrap_or_default();
            match kind_of(inner) {
                Some("function") | None => {
                    let mut function = flat(inner);
                    let is_taken = self.list.iter().any(|other| other["function"]["name"] == name);
                    let offered = if is_taken { format!("{namespace}__{name}") } else { name.to_owned() };
                    function["function"]["name"] = offered.as_str().into();
                    self.add(&at, "", function)?;
                    let (name, namespace) = (name.to_owned(), namespace.to_owned());
                    self.dialects.0.insert(offered, Dialect::Namespaced { name, namespace });
                }
                Some(other) => self.ignore(&at, other),
            }
        }
        Ok(())
    }

    fn ignore(&mut self, at: &str, kind: &str) {
        self.ignored.push(format!("{at} ({})", shown(kind)));
    }
}

fn kind_of(tool: &Value) -> Option<&str> {
    tool["type"].as_str()
}

/// Returns a word of a client as a header can hold it.
pub fn shown(word: &str) -> String {
    word.chars().filter(|c| c.is_ascii_alphanumeric() || "_-.".contains(*c)).take(40).collect()
}

/// Returns a definition that has the function next to its type in the form of chat completions.
fn flat(tool: &Value) -> Value {
    let mut function = tool.as_object().cloned().unwrap_or_default();
    function.remove("type");
    json!({"type": "function", "function": function})
}

/// Checks a definition in OpenAI's form; `inner` names the field that holds the function in the client's own form.
fn check(at: &str, tool: &Value, inner: &str) -> Result<(), ApiError> {
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
        Some(choice) if choice["type"] == "allowed_tools" => {
            let allowed = choice.get("allowed_tools").unwrap_or(choice);
            let tools =
                allowed["tools"].as_array().ok_or_else(|| ApiError::field("tool_choice.tools", "is missing"))?;
            let names = tools.iter().filter_map(name_of).map(String::from).collect();
            Ok(ToolChoice::Allowed { required: allowed["mode"] == "required", names })
        }
        Some(choice) => {
            let name = name_of(choice);
            let name = name.ok_or_else(|| ApiError::field("tool_choice", "must name a function"))?;
            Ok(ToolChoice::Named(name.into()))
        }
    }
}

/// Name of a tool that a choice names.
fn name_of(choice: &Value) -> Option<&str> {
    let inner = ["function", "custom"].into_iter().find_map(|kind| choice[kind]["name"].as_str());
    inner.or(choice["name"].as_str())
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

/// Returns definitions with an empty description where there is none, for templates that expect one of each.
pub fn described(tools: &Value) -> Value {
    let mut tools = tools.clone();
    for function in tools.as_array_mut().into_iter().flatten().filter_map(|tool| tool["function"].as_object_mut()) {
        if function.value("description").is_none() {
            function.insert("description".into(), "".into());
        }
    }
    tools
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
            ToolChoice::Auto | ToolChoice::None | ToolChoice::Allowed { required: false, .. } => Ok(()),
            ToolChoice::Allowed { names, .. } => match tools.iter().any(|tool| names.iter().any(|n| is_named(tool, n)))
            {
                true => Ok(()),
                false => Err(ApiError::field("tool_choice", "allows none of the tools")),
            },
            ToolChoice::Required if tools.is_empty() => Err(ApiError::field("tool_choice", "requires `tools`")),
            ToolChoice::Required => Ok(()),
            ToolChoice::Named(name) => {
                if tools.iter().any(|tool| is_named(tool, name)) {
                    return Ok(());
                }
                let name: String = name.chars().take(100).collect();
                Err(ApiError::field("tool_choice", format!("names {name:?}, which is not among the tools")))
            }
        }
    }
}

fn is_named(tool: &Value, name: &str) -> bool {
    tool["function"]["name"] == name
}

impl ToolChoice {
    /// Returns whether a tool may be called.
    pub fn allows(&self, name: &str) -> bool {
        match self {
            ToolChoice::Auto | ToolChoice::Required | ToolChoice::Named(_) => true,
            ToolChoice::None => false,
            ToolChoice::Allowed { names, .. } => names.iter().any(|allowed| allowed == name),
        }
    }

    /// Maximum number of calls of an answer; `parallel`: what the client says of several. A weak model that must call
    /// would go on until its answer is cut off.
    pub fn most_calls(&self, parallel: Option<bool>) -> Option<usize> {
        let [usual, wanted] = MOST_CALLS;
        match (self, parallel) {
            (_, Some(false)) => Some(1),
            (ToolChoice::Auto | ToolChoice::None | ToolChoice::Allowed { required: false, .. }, _) => None,
            (_, Some(true)) => Some(wanted),
            (ToolChoice::Named(_), None) => Some(1),
            (ToolChoice::Required | ToolChoice::Allowed { .. }, None) => Some(usual),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_of_all_kinds_are_offered_or_named() {
        let function = json!({"type": "function", "name": "ask", "parameters": {"type": "object"}});
        let list = [
            function.clone(),
            json!({"type": "custom", "name": "patch", "description": "edits",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}}),
            json!({"type": "namespace", "name": "team", "tools": [function, {"type": "function", "name": "tell"},
                {"type": "mcp"}]}),
            json!({"type": "web_search"}),
            json!({"type": "local_shell\n"}),
        ];
        let mut offer = Offer::default();
        offer.add_responses("tools", &list).unwrap();
        let names: Vec<_> = offer.list.iter().map(|tool| tool["function"]["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["ask", "patch", "team__ask", "tell"]);
        let told = "tools[1].format (told to the model, not enforced)";
        assert_eq!(offer.ignored, [told, "tools[2].tools[2] (mcp)", "tools[3] (web_search)", "tools[4] (local_shell)"]);
        assert!(offer.dialects.is_custom("patch") && offer.dialects.of("ask").is_none());
        let (name, namespace) = ("ask".into(), "team".into());
        assert_eq!(offer.dialects.of("team__ask"), Some(&Dialect::Namespaced { name, namespace }));
        let about = &offer.list[1]["function"];
        assert!(about["description"].as_str().unwrap().contains("this lark grammar:\nstart: /x/"), "{about}");
        let list = [
            json!({"type": "bash_20250124", "name": "bash"}),
            json!({"name": "f"}),
            json!({"type": "custom", "name": "g"}),
        ];
        let offer = Offer::of_anthropic(&list).unwrap();
        assert_eq!((offer.list.len(), &offer.ignored[..]), (2, &["tools[0] (bash_20250124)".to_owned()][..]));
        let chat = [
            json!({"type": "custom", "custom": {"name": "p"}}),
            json!({"function": {"name": "f"}}),
            json!({"type": "x"}),
        ];
        let offer = Offer::of_chat(&chat).unwrap();
        assert_eq!((offer.list.len(), offer.ignored.len(), offer.dialects.is_custom("p")), (2, 1, true));
        assert!(Offer::of_chat(&[json!({"type": "function"})]).is_err());
        let digits = json!({"type": "custom", "custom": {"name": "n",
            "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a|[0-9]+"}}}});
        let offer = Offer::of_chat(&[digits]).unwrap();
        let input = &offer.list[0]["function"]["parameters"]["properties"][INPUT];
        assert_eq!((input["pattern"].as_str(), offer.ignored.len()), (Some("^(?:a|[0-9]+)$"), 0));
    }

    #[test]
    fn calls_are_bounded_where_they_are_required() {
        let named = ToolChoice::Named("f".into());
        for (choice, parallel, most) in [
            (ToolChoice::Auto, None, None),
            (ToolChoice::Auto, Some(false), Some(1)),
            (ToolChoice::Required, None, Some(4)),
            (ToolChoice::Required, Some(true), Some(32)),
            (named, None, Some(1)),
        ] {
            assert_eq!(choice.most_calls(parallel), most, "{choice:?} {parallel:?}");
        }
    }

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
            (json!({"type": "custom", "custom": {"name": "f"}}), named.clone()),
            (
                json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}),
                ToolChoice::Allowed { required: true, names: vec!["f".into()] },
            ),
            (
                json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
                    {"type": "function", "function": {"name": "f"}}]}}),
                ToolChoice::Allowed { required: false, names: vec!["f".into()] },
            ),
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

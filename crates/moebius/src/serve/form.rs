//! The form that a client wants of an answer, in the APIs' words, and the constraint it becomes. A form that cannot be
//! met is refused before any token.

use std::sync::Arc;

use engine::formats::{Ask, Choice, Format, Tool};
use engine::grammar::{self, Constraint, Error, MAX_RULE_WIDTH, Rule};
use serde_json::Value;

use super::app::App;
use super::error::ApiError;
use super::fields::{Field, Kind, Object, Read, field};
use super::tools::ToolChoice;

/// What routes take that let a client choose the form: OpenAI's name, ours, and those of vLLM and llama.cpp, so that a
/// client's own words are never passed over in silence.
pub const FIELDS: &[Field] = &[
    field("response_format", Kind::Object, "type: text, json_object (with a schema or not), json_schema"),
    field("regex", Kind::Text, "the whole answer matches this regular expression"),
    field("grammar", Kind::Text, "the whole answer keeps to this grammar, in llguidance's variant of Lark or in GBNF"),
    field("json_schema", Kind::Object, "llama.cpp's name for the schema of the whole answer"),
    field("guided_json", Kind::Either(&[Kind::Object, Kind::Text]), "vLLM's name for it"),
    field("guided_regex", Kind::Text, "vLLM's name of regex"),
    field("guided_choice", CHOICES, "vLLM: the whole answer is one of these texts"),
    field("guided_grammar", Kind::Text, "vLLM's name of grammar"),
    field("guided_whitespace_pattern", Kind::Text, "not offered"),
    field("structured_outputs", Kind::Object, "vLLM: json, regex, choice, grammar or json_object"),
    field("format", Kind::Either(&[Kind::Text, Kind::Object]), "Ollama: \"json\" or the schema of the whole answer"),
    field("open_objects", Kind::Bool, "objects of a schema may have more than it names; false when absent"),
];

const CHOICES: Kind = Kind::List(&Kind::Text, MAX_RULE_WIDTH);

/// A form and the field that requested it.
#[derive(Clone, Debug, PartialEq)]
pub struct Form {
    pub rule: Rule,
    pub param: &'static str,
}

/// The form that a body requests, if any. Its schema is closed unless the body says otherwise.
pub fn of(body: &Object) -> Result<Option<Form>, ApiError> {
    let mut forms = Vec::new();
    if let Some(format) = body.object("response_format") {
        let wrapped = format.object("json_schema").and_then(|wrapper| wrapper.value("schema"));
        forms.extend(of_format(format, wrapped.or(format.value("schema")), "response_format")?);
    }
    if let Some(format) = body.value("format") {
        forms.extend(of_ollama(format)?);
    }
    let schema = |value: &Value| Ok(Rule::JsonSchema(value.clone()));
    let regex = |value: &Value| Ok(Rule::Regex(value.as_str().unwrap_or_default().into()));
    let plain: [(&'static str, &dyn Fn(&Value) -> Result<Rule, ApiError>); 7] = [
        ("regex", &regex),
        ("grammar", &|value| lark("grammar", value)),
        ("json_schema", &schema),
        ("guided_json", &|value| written_schema("guided_json", value)),
        ("guided_regex", &regex),
        ("guided_choice", &|value| one_of("guided_choice", value)),
        ("guided_grammar", &|value| lark("guided_grammar", value)),
    ];
    for (param, read) in plain {
        if let Some(value) = body.value(param) {
            forms.push(Form { rule: read(value)?, param });
        }
    }
    if body.value("guided_whitespace_pattern").is_some() {
        return Err(ApiError::field("guided_whitespace_pattern", "is not offered: blanks are free, up to a bound"));
    }
    if let Some(outputs) = body.object("structured_outputs") {
        forms.extend(of_vllm(outputs)?);
    }
    // Clients of several versions of vLLM send the same rule under its old name and its new one.
    if let Some(other) = forms.iter().find(|form| form.rule != forms[0].rule) {
        return Err(ApiError::field(other.param, "cannot be had together with another form"));
    }
    Ok(forms.pop().map(|form| form.closed(body)))
}

impl Form {
    /// The same, where objects of its schema have only the properties they name, unless `body` opens them.
    pub fn closed(self, body: &Object) -> Form {
        let rule = match self.rule {
            Rule::JsonSchema(schema) if !open_objects(body) => Rule::JsonSchema(grammar::closed(schema)),
            rule => rule,
        };
        Form { rule, ..self }
    }
}

/// Whether objects may have properties that their schema does not name.
pub fn open_objects(body: &Object) -> bool {
    body.flag("open_objects").unwrap_or(false)
}

/// Ollama's `format`: the word json, or a schema.
pub fn of_ollama(format: &Value) -> Result<Option<Form>, ApiError> {
    let rule = match format {
        Value::String(word) if word == "json" => Rule::JsonObject,
        Value::String(word) if word.is_empty() => return Ok(None),
        Value::Object(_) => Rule::JsonSchema(format.clone()),
        _ => return Err(ApiError::field("format", "must be \"json\" or a JSON schema")),
    };
    Ok(Some(Form { rule, param: "format" }))
}

/// vLLM's `structured_outputs`.
fn of_vllm(outputs: &Object) -> Result<Option<Form>, ApiError> {
    let mut rules = Vec::new();
    for (name, value) in outputs.iter().filter(|(_, value)| !value.is_null()) {
        const KNOWN: [&str; 7] =
            ["json", "regex", "choice", "grammar", "json_object", "structural_tag", "whitespace_pattern"];
        let param = match KNOWN.iter().find(|known| *known == name) {
            Some(known) => format!("structured_outputs.{known}"),
            None => "structured_outputs".into(),
        };
        match (name.as_str(), value) {
            ("json", Value::Object(_) | Value::String(_)) => rules.push(written_schema(&param, value)?),
            ("regex", Value::String(regex)) => rules.push(Rule::Regex(regex.clone())),
            ("choice", _) => rules.push(one_of(&param, value)?),
            ("grammar", Value::String(_)) => rules.push(lark(&param, value)?),
            ("json_object", Value::Bool(wanted)) => rules.extend(wanted.then_some(Rule::JsonObject)),
            // Words about the way there, which is another here.
            ("backend" | "disable_fallback" | "disable_any_whitespace", _) => {}
            ("disable_additional_properties", Value::Bool(_)) => {}
            ("json" | "regex" | "grammar" | "json_object", _) => {
                return Err(ApiError::field(param, "has a value of the wrong kind"));
            }
            _ => {
                let name: String = name.chars().take(40).collect();
                let why = "is not offered: use json, regex, choice, grammar or json_object";
                return Err(ApiError::field(param, why).quoting(format!(" (not {name})")));
            }
        }
    }
    match rules.len() {
        0 | 1 => Ok(rules.pop().map(|rule| Form { rule, param: "structured_outputs" })),
        _ => Err(ApiError::field("structured_outputs", "has more than one form")),
    }
}

/// A schema, or its JSON in a string.
fn written_schema(param: &str, value: &Value) -> Result<Rule, ApiError> {
    match value {
        Value::String(text) => match serde_json::from_str(text) {
            Ok(schema) => Ok(Rule::JsonSchema(schema)),
            Err(error) => Err(ApiError::field(param, format!("is not JSON: {error}"))),
        },
        schema => Ok(Rule::JsonSchema(schema.clone())),
    }
}

/// One of a list of texts.
fn one_of(param: &str, value: &Value) -> Result<Rule, ApiError> {
    CHOICES.check(param, value)?;
    let texts: Vec<String> = value.as_array().into_iter().flatten().filter_map(Value::as_str).map(literal).collect();
    match texts.is_empty() {
        true => Err(ApiError::field(param, "is empty")),
        false => Ok(Rule::Regex(texts.join("|"))),
    }
}

/// A regular expression that matches this text alone.
fn literal(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_ascii_punctuation() {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

/// A grammar in Lark, or in llama.cpp's form.
fn lark(param: &str, value: &Value) -> Result<Rule, ApiError> {
    let text = value.as_str().unwrap_or_default();
    match grammar::is_gbnf(text) {
        true => grammar::from_gbnf(text)
            .map_err(|why| ApiError::field(param, "cannot be read as GBNF").quoting(format!(": {why}"))),
        false => Ok(Rule::Lark(text.into())),
    }
}

/// The form of Anthropic's structured outputs.
pub fn of_anthropic(body: &Object) -> Result<Option<Form>, ApiError> {
    let newer = body.object("output_config").and_then(|config| config.object("format"));
    match newer
        .map(|format| (format, "output_config.format"))
        .or(body.object("output_format").map(|f| (f, "output_format")))
    {
        Some((format, param)) => Ok(of_format(format, format.value("schema"), param)?.map(|form| form.closed(body))),
        None => of(body),
    }
}

/// The form in a format object; `schema` where the API keeps it.
pub fn of_format(format: &Object, schema: Option<&Value>, param: &'static str) -> Result<Option<Form>, ApiError> {
    let rule = match format.text("type") {
        Some("text") => return Ok(None),
        Some("json_object") => schema.map_or(Rule::JsonObject, |schema| Rule::JsonSchema(schema.clone())),
        Some("json_schema") => {
            let schema = schema.ok_or_else(|| ApiError::field(format!("{param}: the schema"), "is missing"))?;
            Rule::JsonSchema(schema.clone())
        }
        _ => return Err(ApiError::field(format!("{param}.type"), "must be one of text, json_object, json_schema")),
    };
    Ok(Some(Form { rule, param }))
}

/// What an answer is held to.
#[derive(Clone, Debug, Default)]
pub struct Held {
    pub form: Option<Form>,
    pub tools: Vec<Tool>,
    pub choice: ToolChoice,
    /// Arguments of tools may have more than their schemas name.
    pub open_objects: bool,
    /// At most one call.
    pub single: bool,
    /// The prompt ends inside a thought.
    pub opened: bool,
}

/// The constraint of an answer, a thought in front of it left free; none where everything is allowed.
pub async fn constraint(app: &Arc<App>, format: Format, held: Held) -> Result<Option<Constraint>, ApiError> {
    if held.form.is_none() && held.tools.is_empty() {
        return Ok(None);
    }
    let shared = app.clone();
    app.common
        .form(move |left| {
            let Held { form, mut tools, choice, open_objects, single, opened } = held;
            for tool in tools.iter_mut().filter(|_| !open_objects) {
                tool.parameters = grammar::closed(tool.parameters.take());
            }
            let (choice, param) = match &choice {
                ToolChoice::Auto | ToolChoice::None => (Choice::Auto, form.as_ref().map_or("tools", |form| form.param)),
                ToolChoice::Required => (Choice::Required, "tools"),
                ToolChoice::Named(name) => (Choice::Named(name), "tools"),
            };
            let ask = Ask { content: form.as_ref().map(|form| &form.rule), tools: &tools, choice, single, opened };
            let grammars = shared.grammars().map_err(|error| refusal(&error, param))?;
            format.constraint(&ask, &shared.tokenizer, &grammars.until(left)).map_err(|error| refusal(&error, param))
        })
        .await
}

/// A rule that cannot be used is the client's; a machinery that cannot be set up is ours.
fn refusal(error: &Error, param: &str) -> ApiError {
    match error {
        Error::Setup(_) | Error::Broken(_) => ApiError::internal(error.to_string()),
        error => {
            let text = error.to_string();
            let why = text.strip_prefix("compile the grammar: ").unwrap_or(&text);
            ApiError::field(param, "cannot be met").quoting(format!(": {why}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn objects_are_closed_unless_the_client_opens_them() {
        let schema = json!({"type": "object", "properties": {"a": {}}});
        let mut shut = schema.clone();
        shut["additionalProperties"] = json!(false);
        for (more, expected) in [(json!(false), shut), (json!(true), schema.clone())] {
            let body = json!({"json_schema": schema, "open_objects": more});
            let form = of(body.as_object().unwrap()).unwrap().unwrap();
            assert_eq!(form.rule, Rule::JsonSchema(expected));
        }
    }

    #[test]
    fn forms_are_read_in_their_words() {
        let schema = json!({"type": "object"});
        let cases = [
            (json!({}), Ok(None)),
            (json!({"response_format": {"type": "text"}}), Ok(None)),
            (json!({"response_format": {"type": "json_object"}}), Ok(Some(Rule::JsonObject))),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}),
                Ok(Some(Rule::JsonSchema(schema.clone()))),
            ),
            (json!({"regex": "[ab]+"}), Ok(Some(Rule::Regex("[ab]+".into())))),
            (json!({"grammar": "start: \"a\""}), Ok(Some(Rule::Lark("start: \"a\"".into())))),
            (json!({"response_format": {"type": "json_schema"}}), Err("response_format: the schema")),
            (json!({"response_format": {"type": "xml"}}), Err("response_format.type")),
            (json!({"response_format": {}}), Err("response_format.type")),
            (json!({"regex": "a", "grammar": "b"}), Err("grammar")),
            (json!({"regex": "a", "response_format": {"type": "json_object"}}), Err("regex")),
            // Names that others have for the same.
            (
                json!({"response_format": {"type": "json_object", "schema": schema}}),
                Ok(Some(Rule::JsonSchema(schema.clone()))),
            ),
            (
                json!({"response_format": {"type": "json_schema", "schema": schema}}),
                Ok(Some(Rule::JsonSchema(schema.clone()))),
            ),
            (json!({"json_schema": schema}), Ok(Some(Rule::JsonSchema(schema.clone())))),
            (json!({"guided_json": schema}), Ok(Some(Rule::JsonSchema(schema.clone())))),
            (json!({"guided_json": schema.to_string()}), Ok(Some(Rule::JsonSchema(schema.clone())))),
            (json!({"guided_json": "{"}), Err("guided_json")),
            (json!({"guided_regex": "a|b"}), Ok(Some(Rule::Regex("a|b".into())))),
            (json!({"guided_choice": ["yes.", "no"]}), Ok(Some(Rule::Regex("yes\\.|no".into())))),
            (json!({"guided_choice": []}), Err("guided_choice")),
            (json!({"guided_grammar": "start: \"a\""}), Ok(Some(Rule::Lark("start: \"a\"".into())))),
            (json!({"guided_grammar": "root ::= \"a\""}), Ok(Some(Rule::Regex("(?:a)".into())))),
            (json!({"grammar": "root ::= b"}), Err("grammar")),
            (json!({"guided_whitespace_pattern": " "}), Err("guided_whitespace_pattern")),
            (json!({"structured_outputs": {"regex": "a"}}), Ok(Some(Rule::Regex("a".into())))),
            (json!({"structured_outputs": {"choice": ["a"]}}), Ok(Some(Rule::Regex("a".into())))),
            (
                json!({"structured_outputs": {"json": schema, "regex": null}}),
                Ok(Some(Rule::JsonSchema(schema.clone()))),
            ),
            (json!({"structured_outputs": {"json_object": true}}), Ok(Some(Rule::JsonObject))),
            (json!({"structured_outputs": {"structural_tag": "x"}}), Err("structured_outputs.structural_tag")),
            (json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}), Err("structured_outputs")),
            (json!({"structured_outputs": {"regex": 5}}), Err("structured_outputs.regex")),
            (json!({"guided_regex": "a", "structured_outputs": {"regex": "a"}}), Ok(Some(Rule::Regex("a".into())))),
            (json!({"guided_regex": "a", "structured_outputs": {"regex": "b"}}), Err("structured_outputs")),
            (json!({"format": "json"}), Ok(Some(Rule::JsonObject))),
            (json!({"format": schema}), Ok(Some(Rule::JsonSchema(schema.clone())))),
            (json!({"format": "yaml"}), Err("format")),
        ];
        for (body, expected) in cases {
            let form =
                of(body.as_object().unwrap()).map(|form| form.map(|form| form.rule)).map_err(|e| e.param.unwrap());
            assert_eq!(form, expected.map_err(String::from), "{body}");
        }
    }
}

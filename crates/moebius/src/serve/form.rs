//! The form that a client wants of an answer, in the APIs' words, and the constraint it becomes. A form that cannot be
//! met is refused before any token.

use std::sync::Arc;

use engine::formats::{Ask, Choice, Format, Tool};
use engine::grammar::{self, Constraint, Error, MAX_RULE_BYTES, MAX_RULE_WIDTH, Rule, Tidy};
use serde_json::Value;

use super::app::App;
use super::error::ApiError;
use super::fields::{Field, Kind, Object, Read, field, unsupported};
use super::tools::{ToolChoice, shown};

/// What routes take that let a client choose the form: OpenAI's name, ours, and those of vLLM and llama.cpp, so that a
/// client's own words are never passed over in silence.
pub const FIELDS: &[Field] = &[
    field("response_format", Kind::Object, "type: text, json_object (optionally with a schema) or json_schema"),
    field("regex", Kind::Text, "regular expression that the whole answer matches"),
    field("grammar", Kind::Text, "grammar of the whole answer, in llguidance's variant of Lark or in GBNF"),
    field("json_schema", Kind::Either(&[Kind::Object, Kind::Text]), "JSON schema of the whole answer (llama.cpp)"),
    field("guided_json", Kind::Either(&[Kind::Object, Kind::Text]), "vLLM's name of json_schema"),
    field("guided_regex", Kind::Text, "vLLM's name of regex"),
    field("guided_choice", CHOICES, "texts of which the whole answer is one (vLLM)"),
    field("guided_grammar", Kind::Text, "vLLM's name of grammar"),
    unsupported("guided_whitespace_pattern", "whitespace is free, up to a bound"),
    field("structured_outputs", Kind::Object, "json, regex, choice, grammar or json_object (vLLM)"),
    field(
        "format",
        Kind::Either(&[Kind::Text, Kind::Object]),
        "\"json\" or the JSON schema of the whole answer (Ollama)",
    ),
    field("open_objects", Kind::Bool, "allow objects to have properties that the schema does not name; default false"),
];

const CHOICES: Kind = Kind::List(&Kind::Text, MAX_RULE_WIDTH);
/// Longest schema that is read out of a string, in bytes: blanks and escapes count here, not in the rule.
const MAX_WRITTEN_BYTES: usize = 4 * MAX_RULE_BYTES;

/// A form and the field that requested it.
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerForm {
    pub rule: Rule,
    pub param: &'static str,
    /// Objects of its schema may have properties that they do not name.
    pub open: bool,
}

/// The form that a body requests, if any. Nothing is compiled or translated here, on a thread of the network.
pub fn of(body: &Object) -> Result<Option<AnswerForm>, ApiError> {
    let mut forms = Vec::new();
    if let Some(format) = body.object("response_format") {
        let wrapped = format.object("json_schema").and_then(|wrapper| wrapper.value("schema"));
        forms.extend(of_format(format, wrapped.or(format.value("schema")), "response_format")?);
    }
    if let Some(format) = body.value("format") {
        forms.extend(of_ollama(format)?);
    }
    let regex = |value: &Value| Ok(Rule::Regex(value.as_str().unwrap_or_default().into()));
    let grammar = |value: &Value| Ok(Rule::grammar(value.as_str().unwrap_or_default().into()));
    let plain: [(&'static str, &dyn Fn(&Value) -> Result<Rule, ApiError>); 7] = [
        ("regex", &regex),
        ("grammar", &grammar),
        ("json_schema", &|value| written_schema("json_schema", value)),
        ("guided_json", &|value| written_schema("guided_json", value)),
        ("guided_regex", &regex),
        ("guided_choice", &|value| one_of("guided_choice", value)),
        ("guided_grammar", &grammar),
    ];
    for (param, read) in plain {
        // An empty text is what clients send for a field that they do not use.
        if let Some(value) = body.value(param).filter(|value| value.as_str() != Some("")) {
            forms.push(AnswerForm::new(read(value)?, param));
        }
    }
    if let Some(outputs) = body.object("structured_outputs") {
        forms.extend(of_vllm(outputs)?);
    }
    // Clients of several versions of vLLM send the same rule under its old name and its new one.
    if let Some(other) = forms.iter().find(|form| form.rule != forms[0].rule) {
        return Err(ApiError::field(other.param, "cannot be combined with another constraint"));
    }
    Ok(forms.pop().map(|form| form.opened_by(body)))
}

impl AnswerForm {
    fn new(rule: Rule, param: &'static str) -> AnswerForm {
        AnswerForm { rule, param, open: false }
    }

    /// The same, where `body` says whether its objects are open.
    pub fn opened_by(self, body: &Object) -> AnswerForm {
        AnswerForm { open: open_objects(body), ..self }
    }

    /// The same, its schema in the words of grammars; what is not enforced is added to `ignored`.
    fn tidied(self, ignored: &mut Vec<String>) -> AnswerForm {
        let Rule::JsonSchema(schema) = self.rule else { return self };
        let tidy = grammar::tidy(schema.clone());
        // What the schema cannot do without is refused by its name where it is compiled.
        let schema = if tidy.unsupported.is_empty() { tidy.schema } else { schema };
        ignored.extend(tidy.ignored.iter().map(|keyword| format!("{} {keyword}", self.param)));
        AnswerForm { rule: Rule::JsonSchema(schema), ..self }
    }

    /// The same, whose objects have only the properties that they name unless it is open.
    fn closed(self) -> AnswerForm {
        let rule = match self.rule {
            Rule::JsonSchema(schema) if !self.open => Rule::JsonSchema(grammar::closed(schema)),
            rule => rule,
        };
        AnswerForm { rule, ..self }
    }
}

/// Whether objects may have properties that their schema does not name.
pub fn open_objects(body: &Object) -> bool {
    body.flag("open_objects").unwrap_or(false)
}

/// Ollama's `format`: the word json, or a schema.
pub fn of_ollama(format: &Value) -> Result<Option<AnswerForm>, ApiError> {
    let rule = match format {
        Value::String(word) if word == "json" => Rule::JsonObject,
        Value::String(word) if word.is_empty() => return Ok(None),
        Value::Object(_) => Rule::JsonSchema(format.clone()),
        _ => return Err(ApiError::field("format", "must be \"json\" or a JSON schema")),
    };
    Ok(Some(AnswerForm::new(rule, "format")))
}

/// vLLM's `structured_outputs`.
fn of_vllm(outputs: &Object) -> Result<Option<AnswerForm>, ApiError> {
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
            ("grammar", Value::String(text)) => rules.push(Rule::grammar(text.clone())),
            ("json_object", Value::Bool(wanted)) => rules.extend(wanted.then_some(Rule::JsonObject)),
            // Words about the way there, which is another here.
            ("backend" | "disable_fallback" | "disable_any_whitespace", _) => {}
            ("disable_additional_properties", Value::Bool(_)) => {}
            ("json" | "regex" | "grammar" | "json_object", _) => {
                return Err(ApiError::field(param, "has a value of the wrong type"));
            }
            _ => {
                let name: String = name.chars().take(40).collect();
                let why = "is unsupported: use json, regex, choice, grammar or json_object";
                return Err(ApiError::field(param, why).quoting(format!(" (not {name})")));
            }
        }
    }
    match rules.len() {
        0 | 1 => Ok(rules.pop().map(|rule| AnswerForm::new(rule, "structured_outputs"))),
        _ => Err(ApiError::field("structured_outputs", "has more than one constraint")),
    }
}

/// A schema, or its JSON in a string.
fn written_schema(param: &str, value: &Value) -> Result<Rule, ApiError> {
    match value {
        Value::String(text) if text.len() > MAX_WRITTEN_BYTES => {
            let why = format!("has {} bytes, at most {MAX_WRITTEN_BYTES} are allowed", text.len());
            Err(ApiError::field(param, why))
        }
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

/// The form of Anthropic's structured outputs.
pub fn of_anthropic(body: &Object) -> Result<Option<AnswerForm>, ApiError> {
    let newer = body.object("output_config").and_then(|config| config.object("format"));
    match newer
        .map(|format| (format, "output_config.format"))
        .or(body.object("output_format").map(|f| (f, "output_format")))
    {
        Some((format, param)) => Ok(of_format(format, format.value("schema"), param)?.map(|form| form.opened_by(body))),
        None => of(body),
    }
}

/// The form in a format object; `schema` where the API keeps it.
pub fn of_format(format: &Object, schema: Option<&Value>, param: &'static str) -> Result<Option<AnswerForm>, ApiError> {
    let rule = match format.text("type") {
        Some("text") => return Ok(None),
        Some("json_object") => schema.map_or(Rule::JsonObject, |schema| Rule::JsonSchema(schema.clone())),
        Some("json_schema") => {
            let schema = schema.ok_or_else(|| ApiError::field(format!("{param}: the schema"), "is missing"))?;
            Rule::JsonSchema(schema.clone())
        }
        _ => return Err(ApiError::field(format!("{param}.type"), "must be one of text, json_object, json_schema")),
    };
    Ok(Some(AnswerForm::new(rule, param)))
}

/// What an answer is held to.
#[derive(Clone, Debug, Default)]
pub struct Constrained {
    pub form: Option<AnswerForm>,
    pub tools: Vec<Tool>,
    pub choice: ToolChoice,
    /// Arguments of tools may have more than their schemas name.
    pub open_objects: bool,
    /// Maximum number of calls.
    pub most_calls: Option<usize>,
    /// The prompt ends inside a thought.
    pub opened: bool,
    /// Maximum number of tokens of a thought.
    pub most_thought: Option<usize>,
}

/// The constraint of an answer, a thought in front of it left free; none where everything is allowed. Returns what of
/// the schemas is not enforced, too.
pub async fn constraint(
    app: &Arc<App>,
    format: Format,
    held: Constrained,
) -> Result<(Option<Constraint>, Vec<String>), ApiError> {
    if held.form.is_none() && held.tools.is_empty() && held.most_thought.is_none() {
        return Ok((None, Vec::new()));
    }
    let shared = app.clone();
    app.common
        .form(move |left| {
            let Constrained { form, mut tools, choice, open_objects, most_calls, opened, most_thought } = held;
            let mut ignored = Vec::new();
            let form = form.map(|form| form.tidied(&mut ignored).closed());
            for tool in &mut tools {
                let Tidy { schema, ignored: later, unsupported } = grammar::tidy(tool.parameters.take());
                let at = format!("tools.{}.parameters", shown(&tool.name));
                ignored.extend(later.iter().chain(&unsupported).map(|keyword| format!("{at} {keyword}")));
                tool.parameters = if open_objects { schema } else { grammar::closed(schema) };
            }
            let param = form.as_ref().map_or("tools", |form| form.param);
            let (choice, param) = match &choice {
                ToolChoice::Auto | ToolChoice::None | ToolChoice::Allowed { required: false, .. } => {
                    (Choice::Auto, param)
                }
                ToolChoice::Required | ToolChoice::Allowed { .. } => (Choice::Required, "tools"),
                ToolChoice::Named(name) => (Choice::Named(name), "tools"),
            };
            let content = form.as_ref().map(|form| &form.rule);
            let ask = Ask { content, tools: &tools, choice, most_calls, opened, most_thought };
            let grammars = shared.grammars().map_err(|error| refusal(&error, param))?;
            let (constraint, loose) = format
                .loose_constraint(&ask, &shared.tokenizer, &grammars.until(left))
                .map_err(|error| refusal(&error, param))?;
            ignored.extend(loose.iter().map(|name| format!("tools.{}.parameters", shown(name))));
            Ok((constraint, ignored))
        })
        .await
}

/// A rule that cannot be used is the client's; a machinery that cannot be set up is ours.
fn refusal(error: &Error, param: &str) -> ApiError {
    match error {
        Error::Setup(_) | Error::Broken(_) => ApiError::internal(error.to_string()),
        error => {
            let text = error.to_string();
            let why = text.strip_prefix("failed to compile the grammar: ").unwrap_or(&text);
            ApiError::field(param, "cannot be satisfied").quoting(format!(": {why}"))
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
            assert_eq!(form.closed().rule, Rule::JsonSchema(expected));
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
            (json!({"guided_grammar": "root ::= \"a\""}), Ok(Some(Rule::Gbnf("root ::= \"a\"".into())))),
            (json!({"guided_json": " ".repeat(MAX_WRITTEN_BYTES + 1)}), Err("guided_json")),
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

//! The form that a client wants of an answer, in the APIs' words, and the constraint it becomes. A form that cannot be
//! met is refused before any token.

use std::sync::Arc;

use engine::formats::{Ask, Choice, Format, Tool};
use engine::grammar::{Constraint, Error, Rule};
use serde_json::Value;

use super::app::App;
use super::error::ApiError;
use super::fields::{Field, Kind, Object, Read, field};
use super::tools::ToolChoice;

/// What routes take that let a client choose the form.
pub const FIELDS: &[Field] = &[
    field("response_format", Kind::Object, "type: text, json_object, or json_schema with json_schema.schema"),
    field("regex", Kind::Text, "the whole answer matches this regular expression"),
    field("grammar", Kind::Text, "the whole answer keeps to this grammar, in llguidance's variant of Lark"),
];

/// A form and the field that requested it.
#[derive(Clone, Debug, PartialEq)]
pub struct Form {
    pub rule: Rule,
    pub param: &'static str,
}

/// The form that a body requests, if any.
pub fn of(body: &Object) -> Result<Option<Form>, ApiError> {
    let mut forms = Vec::new();
    if let Some(format) = body.object("response_format") {
        let schema = format.object("json_schema").and_then(|wrapper| wrapper.value("schema"));
        forms.extend(of_format(format, schema, "response_format")?);
    }
    if let Some(regex) = body.text("regex") {
        forms.push(Form { rule: Rule::Regex(regex.into()), param: "regex" });
    }
    if let Some(grammar) = body.text("grammar") {
        forms.push(Form { rule: Rule::Lark(grammar.into()), param: "grammar" });
    }
    if let [_, second, ..] = forms.as_slice() {
        return Err(ApiError::field(second.param, "cannot be had together with another form"));
    }
    Ok(forms.pop())
}

/// The form of Anthropic's structured outputs.
pub fn of_anthropic(body: &Object) -> Result<Option<Form>, ApiError> {
    let newer = body.object("output_config").and_then(|config| config.object("format"));
    match newer
        .map(|format| (format, "output_config.format"))
        .or(body.object("output_format").map(|f| (f, "output_format")))
    {
        Some((format, param)) => of_format(format, format.value("schema"), param),
        None => of(body),
    }
}

/// The form in a format object; `schema` where the API keeps it.
pub fn of_format(format: &Object, schema: Option<&Value>, param: &'static str) -> Result<Option<Form>, ApiError> {
    let rule = match format.text("type") {
        Some("text") => return Ok(None),
        Some("json_object") => Rule::JsonObject,
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
    app.form(move |left| {
        let Held { form, tools, choice, single, opened } = held;
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
        ];
        for (body, expected) in cases {
            let form =
                of(body.as_object().unwrap()).map(|form| form.map(|form| form.rule)).map_err(|e| e.param.unwrap());
            assert_eq!(form, expected.map_err(String::from), "{body}");
        }
    }
}

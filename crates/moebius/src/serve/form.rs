//! The form that a client wants of an answer, in the APIs' words, and the constraint it becomes. A form that cannot be met
//! is refused before any token.

use std::sync::Arc;

use engine::formats::Format;
use engine::grammar::{Constraint, Error, FreeThought, Lead, Rule};
use serde_json::Value;

use super::app::App;
use super::error::ApiError;
use super::fields::{Field, Kind, Object, Read, field};

/// What routes take that let a client choose the form.
pub const FIELDS: &[Field] = &[
    field("response_format", Kind::Object, "type: text, json_object, or json_schema with json_schema.schema"),
    field("regex", Kind::Text, "the whole answer matches this regular expression"),
    field("grammar", Kind::Text, "the whole answer keeps to this grammar, in llguidance's variant of Lark"),
];

/// A form and the field that asked for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Form {
    pub rule: Rule,
    pub param: &'static str,
}

/// The form that a body asks for, if any.
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

/// What keeps an answer to a form, a thought in front of it left free. `opened`: the prompt ends inside the thought.
pub async fn constraint(app: &Arc<App>, form: Form, format: Format, opened: bool) -> Result<Constraint, ApiError> {
    let Form { rule, param } = form;
    let thought = format.thought();
    let lead = if thought.is_some() { Lead::Blanks } else { Lead::None };
    let shared = app.clone();
    let grammar = app.heavy(move || {
        shared.grammars().and_then(|grammars| grammars.compile(&rule, lead)).map_err(|error| refusal(&error, param))
    });
    let thought = thought.map(|marks| FreeThought { open: marks.open.into(), close: marks.close.into(), opened });
    Ok(Constraint { thought, ..Constraint::new(grammar.await?) })
}

/// A rule that cannot be used is the client's; a machinery that cannot be set up is ours.
fn refusal(error: &Error, param: &str) -> ApiError {
    match error {
        Error::Setup(_) | Error::Broken(_) => ApiError::internal(error.to_string()),
        error => {
            let text = error.to_string();
            let why = text.strip_prefix("compile the grammar: ").unwrap_or(&text);
            ApiError::field(param, format!("cannot be met: {why}"))
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

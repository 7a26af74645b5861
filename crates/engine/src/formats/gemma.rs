//! Calls of Gemma 4: `<|tool_call>call:name{key:value, ..}<tool_call|>`, in a special notation: strings are between
//! `<|"|>` marks without escapes, keys are unquoted.

use std::borrow::Cow;
use std::fmt::Write;

use serde_json::{Value, json};

use super::Calls;
use super::history;
use super::json::{Cursor, Halt};
use super::page::{Notation, Page};
use super::parser::{Reader, Sink, Turn};

const OPEN: &str = "<|tool_call>";
const CLOSE: &str = "<tool_call|>";
const QUOTE: &str = "<|\"|>";
/// Maximum nesting of the arguments.
const MAX_DEPTH: usize = 64;

pub(super) static CALLS: Calls = Calls {
    name: "gemma",
    opens: &[OPEN],
    starts: &[],
    marks: &[CLOSE, QUOTE],
    tokens: &[],
    reader: |_, _| Box::new(Gemma),
    habits: history::PLAIN,
    notation: Notation {
        open: OPEN,
        head: "",
        call: |page, tool| {
            let head = page.say(&format!("call:{}", tool.name));
            let schema = match &tool.parameters {
                Value::Null => Cow::Owned(json!({"type": "object"})),
                schema => Cow::Borrowed(schema),
            };
            format!("{head} {} {}", write_value(page, &schema, 0), page.say(CLOSE))
        },
        next: Some(OPEN),
        close: "",
    },
};

/// Emits a call once it is complete.
struct Gemma;

impl Reader for Gemma {
    fn read(&mut self, text: &str, last: bool, sink: &mut Sink) -> Turn {
        let mut c = Cursor::new(text);
        let mut json = String::new();
        let name = match call(&mut c, &mut json) {
            Ok(name) => name,
            Err(halt) => return Turn::of(Err(halt)),
        };
        match c.blanks().expect(CLOSE) {
            Err(Halt::More) if !last => return Turn::More,
            Err(Halt::Not) => return Turn::Broken,
            _ => {}
        }
        sink.start(name, None);
        sink.arguments(&json);
        sink.end();
        Turn::Done(c.at())
    }
}

fn call<'a>(c: &mut Cursor<'a>, json: &mut String) -> Result<&'a str, Halt> {
    let name = c.blanks().expect("call:")?.until_within("{", &['\n', '<'])?.trim();
    if name.is_empty() {
        return Err(Halt::Not);
    }
    object(c, json, 0)?;
    Ok(name)
}

/// The rest of an object after its brace.
fn object(c: &mut Cursor<'_>, json: &mut String, depth: usize) -> Result<(), Halt> {
    json.push('{');
    if c.blanks().have("}")? {
        json.push('}');
        return Ok(());
    }
    loop {
        let key = match c.blanks().have(QUOTE)? {
            true => c.until(QUOTE)?,
            false => c.bare(&[':', '}', ',', '{', '[', '\n'])?,
        };
        quoted(json, key);
        c.blanks().expect(":")?;
        json.push(':');
        value(c, json, depth + 1)?;
        if c.blanks().have("}")? {
            json.push('}');
            return Ok(());
        }
        c.expect(",")?;
        json.push(',');
    }
}

fn value(c: &mut Cursor<'_>, json: &mut String, depth: usize) -> Result<(), Halt> {
    if depth > MAX_DEPTH {
        return Err(Halt::Not);
    }
    if c.blanks().have(QUOTE)? {
        let text = c.until(QUOTE)?;
        quoted(json, text);
        return Ok(());
    }
    if c.have("{")? {
        return object(c, json, depth);
    }
    if c.have("[")? {
        return list(c, json, depth);
    }
    let bare = c.bare(&[',', '}', ']', '\n'])?;
    match serde_json::from_str::<Value>(bare) {
        Ok(value) if !value.is_string() => {
            let _ = write!(json, "{value}");
        }
        _ => quoted(json, bare),
    }
    Ok(())
}

/// The rest of a list after its bracket.
fn list(c: &mut Cursor<'_>, json: &mut String, depth: usize) -> Result<(), Halt> {
    json.push('[');
    if c.blanks().have("]")? {
        json.push(']');
        return Ok(());
    }
    loop {
        value(c, json, depth + 1)?;
        if c.blanks().have("]")? {
            json.push(']');
            return Ok(());
        }
        c.expect(",")?;
        json.push(',');
    }
}

fn quoted(json: &mut String, text: &str) {
    let _ = write!(json, "{}", Value::from(text));
}

/// Grammar of a value of this schema: its type, its properties in alphabetical order, its items.
fn write_value(page: &mut Page<'_>, schema: &Value, depth: usize) -> String {
    let list = |name: &str| schema[name].as_array().filter(|list| !list.is_empty());
    let constant = schema.get("const").map(|c| vec![c.clone()]);
    if let Some(options) =
        constant.as_ref().or(list("enum")).filter(|o| o.iter().all(|v| !v.is_object() && !v.is_array()))
    {
        let options = options.iter().map(|option| match option.as_str() {
            Some(text) => page.say(&format!("{QUOTE}{text}{QUOTE}")),
            None => page.say(&option.to_string()),
        });
        return format!("({})", options.collect::<Vec<_>>().join(" | "));
    }
    if let Some(options) = list("anyOf").or(list("oneOf")).filter(|_| depth < MAX_DEPTH) {
        let options = options.iter().map(|option| write_value(page, option, depth + 1));
        return format!("({})", options.collect::<Vec<_>>().join(" | "));
    }
    match schema["type"].as_str() {
        Some("string") => format!("{} {}", page.say(QUOTE), page.text_until(QUOTE)),
        Some("integer") => "/-?(0|[1-9][0-9]{0,15})/".into(),
        Some("number") => r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?/".into(),
        Some("boolean") => r#"("true" | "false")"#.into(),
        Some("null") => r#""null""#.into(),
        Some("array") if depth < MAX_DEPTH => {
            let item = write_value(page, &schema["items"], depth + 1);
            let item = page.rule("", &item);
            format!(r#""[" ({item} ("," {item})*)? "]""#)
        }
        Some("object") if depth < MAX_DEPTH => match schema["properties"].as_object() {
            Some(properties) if !properties.is_empty() => write_object(page, properties, &schema["required"], depth),
            _ => write_any(page).1,
        },
        _ => write_any(page).0,
    }
}

/// Grammar of an object with these properties; those not required are optional.
fn write_object(
    page: &mut Page<'_>,
    properties: &serde_json::Map<String, Value>,
    required: &Value,
    depth: usize,
) -> String {
    let mut sorted: Vec<(&String, &Value)> = properties.iter().collect();
    sorted.sort_by_key(|(name, _)| *name);
    // Built from the last property backwards: the rest of an object when no property precedes it, and when one does,
    // with a comma.
    let (mut first, mut further) = (page.rule("", "\"\""), page.rule("", "\"\""));
    for (name, schema) in sorted.into_iter().rev() {
        let value = write_value(page, schema, depth + 1);
        let pair = format!("{} {value}", page.say(&format!("{name}:")));
        let pair = page.rule("", &pair);
        let required = required.as_array().is_some_and(|r| r.iter().any(|r| r == name));
        let or = |without: &str| if required { String::new() } else { format!(" | {without}") };
        let (head, tail) =
            (format!("{pair} {further}{}", or(&first)), format!("\",\" {pair} {further}{}", or(&further)));
        (first, further) = (page.rule("", &head), page.rule("", &tail));
    }
    format!("\"{{\" {first} \"}}\"")
}

/// Rules for any value and for any object.
fn write_any(page: &mut Page<'_>) -> (String, String) {
    let text = format!("{} {}", page.say(QUOTE), page.text_until(QUOTE));
    let text = page.rule("", &text);
    // The next rule is the value itself, which occurs in its lists and objects.
    let value = page.next_rule();
    let pair = format!("NAME \":\" {value}");
    let object = format!("\"{{\" ({pair} (\",\" {pair})*)? \"}}\"");
    let list = format!("\"[\" ({value} (\",\" {value})*)? \"]\"");
    let number = r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?/";
    let value = page.rule("", &format!("{text} | {number} | \"true\" | \"false\" | \"null\" | {list} | {object}"));
    (value, object)
}

//! Calls of Gemma 4: `<|tool_call>call:name{key:value, ..}<tool_call|>`, in a notation of its own: strings stand between
//! `<|"|>` marks without escapes, keys are bare.

use std::fmt::Write;

use super::Calls;
use super::json::{Cursor, Halt};
use super::parser::{Reader, Sink, Turn};

const OPEN: &str = "<|tool_call>";
const CLOSE: &str = "<tool_call|>";
const QUOTE: &str = "<|\"|>";
/// Deepest nesting of the arguments.
const MAX_DEPTH: usize = 64;

pub(super) static CALLS: Calls =
    Calls { name: "gemma", opens: &[OPEN], starts: &[], marks: &[CLOSE, QUOTE], reader: |_, _| Box::new(Gemma) };

/// A call comes when it is whole.
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

/// The rest of an object behind its brace.
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
    match serde_json::from_str::<serde_json::Value>(bare) {
        Ok(value) if !value.is_string() => {
            let _ = write!(json, "{value}");
        }
        _ => quoted(json, bare),
    }
    Ok(())
}

/// The rest of a list behind its bracket.
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
    let _ = write!(json, "{}", serde_json::Value::from(text));
}

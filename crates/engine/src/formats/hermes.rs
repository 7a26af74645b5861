//! Calls as JSON between `<tool_call>` marks: Hermes, Qwen 2.5 and 3, and models trained on their output.
//!
//! `<tool_call>\n{"name": "f", "arguments": {..}}\n</tool_call>`, one pair of marks per call.

use serde_json::Value;

use super::history;
use super::json::{Cursor, Halt, Scan, Scanned};
use super::page::{Notation, Page};
use super::parser::{Reader, Sink, Turn};
use super::{Calls, Tool};

pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";

pub(super) static CALLS: Calls = Calls {
    name: "hermes",
    opens: &[OPEN],
    starts: &[],
    marks: &[CLOSE],
    tokens: &[],
    reader: |_, _| Box::new(Hermes::new()),
    habits: history::PLAIN,
    notation: Notation {
        open: OPEN,
        head: "",
        call: |page, tool| write_object(page, tool, "arguments", "\n", "\n</tool_call>"),
        next: Some("\n<tool_call>"),
        close: "",
    },
};

pub(super) struct Hermes {
    object: JsonCall,
    closing: bool,
}

impl Hermes {
    fn new() -> Hermes {
        Hermes { object: JsonCall::new(), closing: false }
    }
}

impl Reader for Hermes {
    fn read(&mut self, text: &str, last: bool, sink: &mut Sink) -> Turn {
        if !self.closing {
            return match self.object.read(text, sink) {
                Turn::Done(n) => {
                    self.closing = true;
                    Turn::Took(n)
                }
                turn => turn,
            };
        }
        let mut cursor = Cursor::new(text);
        match cursor.blanks().expect(CLOSE) {
            Ok(c) => Turn::Done(c.at()),
            Err(Halt::More) if !last => Turn::More,
            // The call is complete even without its mark.
            Err(Halt::More) => Turn::Done(text.len()),
            Err(Halt::Not) => Turn::Done(0),
        }
    }
}

/// A call as one JSON object: `{"name": .., "arguments": {..}}`; Llama writes `parameters` for `arguments`.
///
/// In the usual order the arguments stream; in any other order the call is emitted when the object is complete.
pub(super) struct JsonCall(Stage);

enum Stage {
    Head,
    /// Inside the arguments.
    Arguments(Scan),
    /// After the arguments, inside the object.
    Tail(Scan),
}

impl JsonCall {
    pub fn new() -> JsonCall {
        JsonCall(Stage::Head)
    }

    /// As [`Reader::read`]; done after the object.
    pub fn read(&mut self, text: &str, sink: &mut Sink) -> Turn {
        match &mut self.0 {
            Stage::Head => match head(text) {
                Ok((name, n)) => {
                    sink.start(&name, None);
                    self.0 = Stage::Arguments(Scan::new());
                    Turn::Took(n)
                }
                Err(Halt::More) => Turn::More,
                Err(Halt::Not) => whole(text, sink),
            },
            Stage::Arguments(scan) => match scan.arguments(text, sink) {
                Turn::Done(n) => {
                    self.0 = Stage::Tail(Scan::behind_value());
                    Turn::Took(n)
                }
                turn => turn,
            },
            Stage::Tail(scan) => match scan.push(text) {
                Scanned::More => Turn::Took(text.len()),
                Scanned::End(n) => {
                    sink.end();
                    Turn::Done(n)
                }
                Scanned::Bad(0) => Turn::Broken,
                Scanned::Bad(n) => Turn::Took(n),
            },
        }
    }
}

/// Returns the name, and where the arguments begin.
fn head(text: &str) -> Result<(String, usize), Halt> {
    let mut c = Cursor::new(text);
    c.blanks().expect("{")?.blanks().expect("\"name\"")?.blanks().expect(":")?;
    let name = c.blanks().string()?;
    c.blanks().expect(",")?.blanks().expect_any(&["\"arguments\"", "\"parameters\""])?.blanks().expect(":")?;
    let at = c.blanks().at();
    c.expect("{")?;
    Ok((name, at))
}

/// Reads a call's object as a whole.
fn whole(text: &str, sink: &mut Sink) -> Turn {
    let start = text.len() - text.trim_start().len();
    match Scan::new().push(&text[start..]) {
        Scanned::More => Turn::More,
        Scanned::Bad(_) => Turn::Broken,
        Scanned::End(n) => {
            let object: Value = serde_json::from_str(&text[start..start + n]).unwrap_or_default();
            match call(&object) {
                Some((name, arguments)) => {
                    let id = object.get("id").and_then(Value::as_str);
                    sink.start(name, id);
                    sink.arguments(&arguments);
                    sink.end();
                    Turn::Done(start + n)
                }
                None => Turn::Broken,
            }
        }
    }
}

/// Grammar of a call as one JSON object.
pub(super) fn write_object(page: &mut Page<'_>, tool: &Tool, arguments: &str, begin: &str, end: &str) -> String {
    let head = format!("{begin}{{\"name\": {}, \"{arguments}\": ", Value::from(tool.name.as_str()));
    format!("{} {} {}", page.say(&head), page.arguments(tool), page.say(&format!("}}{end}")))
}

/// Name and arguments of a call; arguments may be an object or, as in the API, a JSON string. Command R7B says
/// `tool_name` for `name`.
pub(super) fn call(object: &Value) -> Option<(&str, String)> {
    let name = object.get("name").or(object.get("tool_name"))?.as_str()?;
    let arguments = match object.get("arguments").or(object.get("parameters")) {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) => serde_json::from_str::<Value>(text).ok().filter(Value::is_object)?.to_string(),
        Some(value) if value.is_object() => value.to_string(),
        Some(_) => return None,
    };
    Some((name, arguments))
}

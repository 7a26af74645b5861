//! Calls in a list between marks, each a JSON object or written as Python writes a call: `[f(city="Rome", days=2)]`.
//!
//! - LFM2: `<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>`, or objects in the list.
//! - OLMo 3: `<function_calls>`, a call a line, `</function_calls>`.
//! - Nemotron Nano 2: `<TOOLCALL>[{"name": .., "arguments": {..}}]</TOOLCALL>`; Hunyuan: `<tool_calls>`.
//! - Granite 3: `<|tool_call|>[{..}]`; Phi-4-mini: `<|tool_call|>{..}<|/tool_call|>`.
//! - Command R7B: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": .., "parameters": {..}}]<|END_ACTION|>`.
//! - Llama 4: as Llama 3, or a list in Python's notation between `<|python_start|>` and `<|python_end|>`.

use serde_json::{Value, json};

use super::hermes::{self, JsonCall};
use super::history;
use super::json::{Cursor, Halt};
use super::page::{Notation, Page};
use super::parser::{Reader, Sink, Turn};
use super::tools::{Arguments, Tool};
use super::{Calls, llama, python};
use crate::grammar::Rule;

type Make = fn(&str, &[Tool]) -> Box<dyn Reader>;
type Texts = &'static [&'static str];

const fn calls(name: &'static str, opens: Texts, marks: Texts, reader: Make, notation: Notation) -> Calls {
    Calls { name, opens, starts: &[], marks, tokens: &[], reader, notation, habits: history::PLAIN }
}

/// A list of objects between `open` and `close`.
const fn objects(open: &'static str, close: &'static str) -> Notation {
    let call = |page: &mut Page<'_>, tool: &Tool| hermes::write_object(page, tool, "arguments", "", "");
    Notation { open, head: "[", call, next: Some(", "), close }
}

pub(super) static NEMOTRON: Calls = calls(
    "nemotron",
    &["<TOOLCALL>"],
    &["</TOOLCALL>"],
    |_, tools| List::reader("</TOOLCALL>", tools),
    objects("<TOOLCALL>", "]</TOOLCALL>"),
);

pub(super) static HUNYUAN: Calls = calls(
    "hunyuan",
    &["<tool_calls>"],
    &["</tool_calls>"],
    |_, tools| List::reader("</tool_calls>", tools),
    objects("<tool_calls>", "]</tool_calls>"),
);

pub(super) static GRANITE: Calls =
    calls("granite", &["<|tool_call|>"], &[], |_, tools| List::reader("", tools), objects("<|tool_call|>", "]"));

pub(super) static PHI: Calls = calls(
    "phi",
    &["<|tool_call|>"],
    &["<|/tool_call|>"],
    |_, tools| List::reader("<|/tool_call|>", tools),
    Notation {
        open: "<|tool_call|>",
        head: "",
        call: |page, tool| hermes::write_object(page, tool, "arguments", "", "<|/tool_call|>"),
        next: Some("<|tool_call|>"),
        close: "",
    },
);

pub(super) static COMMAND: Calls = calls(
    "command",
    &["<|START_ACTION|>"],
    &["<|END_ACTION|>"],
    |_, tools| List::reader("<|END_ACTION|>", tools),
    Notation {
        open: "<|START_ACTION|>",
        head: "[\n    ",
        call: |page, tool| {
            let name = Value::from(tool.name.as_str());
            let head = page.say(&format!("\", \"tool_name\": {name}, \"parameters\": "));
            let (id, arguments) = (page.say("{\"tool_call_id\": \""), page.arguments(tool));
            format!("{id} /[0-9]{{1,2}}/ {head} {arguments} {}", page.say("}"))
        },
        next: Some(",\n    "),
        close: "\n]<|END_ACTION|>",
    },
);

pub(super) static LFM: Calls = calls(
    "lfm",
    &["<|tool_call_start|>"],
    &["<|tool_call_end|>"],
    |_, tools| List::reader("<|tool_call_end|>", tools),
    Notation {
        open: "<|tool_call_start|>",
        head: "[",
        call: write_call,
        next: Some(", "),
        close: "]<|tool_call_end|>",
    },
);

pub(super) static OLMO: Calls = calls(
    "olmo",
    &["<function_calls>"],
    &["</function_calls>"],
    |_, tools| Box::new(List { by_lines: true, ..List::new("</function_calls>", tools) }),
    Notation { open: "<function_calls>", head: "\n", call: write_call, next: Some("\n"), close: "\n</function_calls>" },
);

pub(super) static LLAMA4: Calls = Calls {
    starts: &["{"],
    habits: llama::HABITS,
    ..calls(
        "llama4",
        &["<|python_start|>"],
        &["<|python_end|>"],
        |_, tools| List::reader("<|python_end|>", tools),
        llama::NOTATION,
    )
};

/// Grammar of a call in Python's notation; values are JSON, which the reader takes as well.
fn write_call(page: &mut Page<'_>, tool: &Tool) -> String {
    let (head, end) = (page.say(&format!("{}(", tool.name)), page.say(")"));
    let comma = page.say(", ");
    let Some(properties) = tool.parameters["properties"].as_object().filter(|p| !p.is_empty()) else {
        if !tool.takes_others() {
            return format!("{head} {end}");
        }
        let one = format!("NAME {} {}", page.say("="), page.part(Rule::JsonSchema(json!({}))));
        return format!("{head} ({one} ({comma} {one})*)? {end}");
    };
    // From the last argument to the first: rules for what may come first, and for what may follow others.
    let nothing = page.rule("", "\"\"");
    let (mut first, mut after) = (nothing.clone(), nothing);
    for (name, schema) in properties.iter().rev() {
        let value = page.part(Rule::JsonSchema(schema.clone()));
        let one = page.rule("", &format!("{} {value}", page.say(&format!("{name}="))));
        let [leads, follows] = match tool.requires(name) {
            true => [format!("{one} {after}"), format!("{comma} {one} {after}")],
            false => [format!("{one} {after} | {first}"), format!("({comma} {one})? {after}")],
        };
        (first, after) = (page.rule("", &leads), page.rule("", &follows));
    }
    format!("{head} {first} {end}")
}

struct List {
    close: &'static str,
    tools: Vec<Tool>,
    /// Calls are in brackets.
    in_brackets: bool,
    /// Without brackets a call may follow another without a comma.
    by_lines: bool,
    stage: Stage,
}

enum Stage {
    /// Before the bracket, if there is one.
    Open,
    /// Before a call.
    Call,
    Object(JsonCall),
    Arguments(Arguments),
    /// After a call.
    Between,
    /// After the bracket.
    Close,
}

impl List {
    fn new(close: &'static str, tools: &[Tool]) -> List {
        List { close, tools: tools.to_vec(), in_brackets: false, by_lines: false, stage: Stage::Open }
    }

    fn reader(close: &'static str, tools: &[Tool]) -> Box<dyn Reader> {
        Box::new(List::new(close, tools))
    }
}

impl Reader for List {
    fn read(&mut self, text: &str, last: bool, sink: &mut Sink) -> Turn {
        let mut c = Cursor::new(text);
        if !matches!(self.stage, Stage::Object(_)) {
            c.blanks();
        }
        let is_end = c.rest().is_empty();
        let next = match &mut self.stage {
            Stage::Open | Stage::Call if is_end => return Turn::More,
            Stage::Open => c.have("[").map(|in_brackets| {
                self.in_brackets = in_brackets;
                Stage::Call
            }),
            Stage::Call if c.rest().starts_with('{') => Ok(Stage::Object(JsonCall::new())),
            Stage::Call => python::name(&mut c).map(|name| Stage::Arguments(Arguments::start(name, &self.tools, sink))),
            Stage::Object(call) => match call.read(text, sink) {
                Turn::Done(n) => {
                    self.stage = Stage::Between;
                    return Turn::Took(n);
                }
                turn => return turn,
            },
            Stage::Arguments(arguments) => match python::argument(&mut c, arguments.is_first()) {
                Ok(Some((key, value))) => {
                    arguments.json(key, &value, sink);
                    return Turn::Took(c.at());
                }
                Ok(None) => {
                    arguments.end(sink);
                    Ok(Stage::Between)
                }
                Err(halt) => Err(halt),
            },
            Stage::Between if is_end => return if last { Turn::Done(text.len()) } else { Turn::More },
            Stage::Between if self.in_brackets => match c.have("]") {
                Ok(true) => Ok(Stage::Close),
                _ => c.expect(",").map(|_| Stage::Call),
            },
            Stage::Between => match (c.have(self.close), c.rest().chars().next()) {
                (Ok(true), _) if !self.close.is_empty() => return Turn::Done(c.at()),
                (Err(_), _) if last => return Turn::Done(text.len()),
                (Err(_), _) => return Turn::More,
                (_, Some(',' | ';')) => c.expect_any(&[",", ";"]).map(|_| Stage::Call),
                (_, Some(next)) if self.by_lines && python::begins_name(next) => Ok(Stage::Call),
                _ => return Turn::Done(0),
            },
            Stage::Close => match c.expect(self.close) {
                Ok(c) => return Turn::Done(c.at()),
                Err(Halt::More) if !last => return Turn::More,
                Err(Halt::More) => return Turn::Done(text.len()),
                Err(Halt::Not) => return Turn::Done(0),
            },
        };
        Turn::of(next.map(|stage| {
            self.stage = stage;
            Turn::Took(c.at())
        }))
    }
}

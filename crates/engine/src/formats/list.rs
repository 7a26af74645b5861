//! Calls in a list between marks, each a JSON object or written as Python writes a call: `[f(city="Rome", days=2)]`.
//!
//! - LFM2: `<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>`, or objects in the list.
//! - OLMo 3: `<function_calls>`, a call a line, `</function_calls>`.
//! - Nemotron Nano 2: `<TOOLCALL>[{"name": .., "arguments": {..}}]</TOOLCALL>`; Hunyuan: `<tool_calls>`.
//! - Granite 3: `<|tool_call|>[{..}]`; Phi-4-mini: `<|tool_call|>{..}<|/tool_call|>`.
//! - Command R7B: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": .., "parameters": {..}}]<|END_ACTION|>`.
//! - Llama 4: as Llama 3, or a list in Python's notation between `<|python_start|>` and `<|python_end|>`.

use std::fmt::Write;

use serde_json::{Value, json};

use super::hermes::{self, JsonCall};
use super::history::{self, Habits};
use super::json::{Cursor, Halt};
use super::page::{Notation, Page};
use super::parser::{Reader, Sink, Turn};
use super::tools::{Arguments, Tool};
use super::{Calls, python};
use crate::grammar::Rule;

/// A list of objects between `open` and `close`.
const fn objects(name: &'static str, marks: [&'static str; 2], open: &'static [&'static str], reader: Make) -> Calls {
    let notation = Notation {
        open: marks[0],
        head: "[",
        call: |page, tool| hermes::write_object(page, tool, "arguments", "", ""),
        next: Some(", "),
        close: marks[1],
    };
    Calls { name, opens: open, starts: &[], marks: &[], tokens: &[], reader, habits: history::PLAIN, notation }
}

type Make = fn(&str, &[Tool]) -> Box<dyn Reader>;

pub(super) static NEMOTRON: Calls = Calls {
    marks: &["</TOOLCALL>"],
    ..objects("nemotron", ["<TOOLCALL>", "]</TOOLCALL>"], &["<TOOLCALL>"], |_, tools| {
        List::reader("</TOOLCALL>", tools)
    })
};

pub(super) static HUNYUAN: Calls = Calls {
    marks: &["</tool_calls>"],
    ..objects("hunyuan", ["<tool_calls>", "]</tool_calls>"], &["<tool_calls>"], |_, tools| {
        List::reader("</tool_calls>", tools)
    })
};

pub(super) static GRANITE: Calls =
    objects("granite", ["<|tool_call|>", "]"], &["<|tool_call|>"], |_, tools| List::reader("", tools));

pub(super) static PHI: Calls = Calls {
    marks: &["<|/tool_call|>"],
    notation: Notation {
        open: "<|tool_call|>",
        head: "",
        call: |page, tool| hermes::write_object(page, tool, "arguments", "", "<|/tool_call|>"),
        next: Some("<|tool_call|>"),
        close: "",
    },
    ..objects("phi", ["", ""], &["<|tool_call|>"], |_, tools| List::reader("<|/tool_call|>", tools))
};

pub(super) static COMMAND: Calls = Calls {
    name: "command",
    opens: &["<|START_ACTION|>"],
    starts: &[],
    marks: &["<|END_ACTION|>"],
    tokens: &[],
    reader: |_, tools| List::reader("<|END_ACTION|>", tools),
    habits: history::PLAIN,
    notation: Notation {
        open: "<|START_ACTION|>",
        head: "[\n    ",
        call: |page, tool| {
            let name = Value::from(tool.name.as_str());
            let (id, head) = (page.say("{\"tool_call_id\": \""), page.say("\", \"tool_name\": "));
            let (name, arguments) = (page.say(&format!("{name}, \"parameters\": ")), page.arguments(tool));
            format!("{id} /[0-9]{{1,2}}/ {head} {name} {arguments} {}", page.say("}"))
        },
        next: Some(",\n    "),
        close: "\n]<|END_ACTION|>",
    },
};

pub(super) static LFM: Calls = Calls {
    name: "lfm",
    opens: &["<|tool_call_start|>"],
    starts: &[],
    marks: &["<|tool_call_end|>"],
    tokens: &[],
    reader: |_, tools| List::reader("<|tool_call_end|>", tools),
    habits: history::PLAIN,
    notation: Notation {
        open: "<|tool_call_start|>",
        head: "[",
        call: write_call,
        next: Some(", "),
        close: "]<|tool_call_end|>",
    },
};

pub(super) static OLMO: Calls = Calls {
    name: "olmo",
    opens: &["<function_calls>"],
    starts: &[],
    marks: &["</function_calls>"],
    tokens: &[],
    reader: |_, tools| Box::new(List { by_lines: true, ..List::new("</function_calls>", tools) }),
    habits: history::PLAIN,
    notation: Notation {
        open: "<function_calls>",
        head: "\n",
        call: write_call,
        next: Some("\n"),
        close: "\n</function_calls>",
    },
};

pub(super) static LLAMA4: Calls = Calls {
    name: "llama4",
    opens: &["<|python_start|>"],
    starts: &["{"],
    marks: &["<|python_end|>"],
    tokens: &[],
    reader: |_, tools| List::reader("<|python_end|>", tools),
    habits: Habits { one_call: true, ..history::PLAIN },
    notation: Notation {
        open: "",
        head: "",
        call: |page, tool| hermes::write_object(page, tool, "parameters", "", ""),
        next: Some("; "),
        close: "",
    },
};

/// Grammar of a call in Python's notation; values are JSON, which the reader takes as well.
fn write_call(page: &mut Page<'_>, tool: &Tool) -> String {
    let (head, end) = (page.say(&format!("{}(", tool.name)), page.say(")"));
    let comma = page.say(", ");
    let Some(properties) = tool.parameters["properties"].as_object().filter(|p| !p.is_empty()) else {
        let is_closed = tool.parameters.is_object() && tool.parameters["additionalProperties"] != true;
        if is_closed {
            return format!("{head} {end}");
        }
        let one = format!("NAME {} {}", page.say("="), page.part(Rule::JsonSchema(json!({}))));
        return format!("{head} ({one} ({comma} {one})*)? {end}");
    };
    let required = |name: &str| tool.parameters["required"].as_array().is_some_and(|r| r.iter().any(|r| r == name));
    // From the last argument to the first: what may follow others, and what may come first.
    let (mut after, mut first) = (String::new(), String::new());
    for (name, schema) in properties.iter().rev() {
        let value = page.part(Rule::JsonSchema(schema.clone()));
        let one = page.rule("", &format!("{} {value}", page.say(&format!("{name}="))));
        let leads = format!("{one} {after}");
        (after, first) = match required(name) {
            true => (format!("{comma} {leads}"), leads),
            false => {
                let mut either = format!("{leads} | ");
                let _ = write!(either, "{}", if first.is_empty() { "\"\"" } else { &first });
                (format!("({comma} {one})? {after}"), either)
            }
        };
        // Named, or each argument would repeat all that follow.
        (after, first) = (page.rule("", &or_nothing(&after)), page.rule("", &or_nothing(&first)));
    }
    format!("{head} {first} {end}")
}

fn or_nothing(body: &str) -> String {
    if body.trim().is_empty() { "\"\"".into() } else { body.into() }
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

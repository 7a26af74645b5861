//! Calls as elements with names in attributes: `<invoke name="f">`, `<parameter name="k">v</parameter>`, several
//! between a pair of marks.
//!
//! - MiniMax M2: `<minimax:tool_call>` around them; a value is a raw string or JSON, depending on the tool's schema.
//! - DeepSeek V3.2: each name after `｜DSML｜`; the attribute `string` says which of the two a value is.

use super::Calls;
use super::history;
use super::json::{Cursor, Halt};
use super::page::{Notation, Page};
use super::parser::{Reader, Sink, Turn};
use super::tools::{Arguments, Tool};

/// The marks of a family.
struct Marks {
    open: &'static str,
    invoke: &'static str,
    invoke_end: &'static str,
    parameter: &'static str,
    parameter_end: &'static str,
    close: &'static str,
    /// Parameters say whether they are strings.
    typed: bool,
}

const MINIMAX_MARKS: Marks = Marks {
    open: "<minimax:tool_call>",
    invoke: "<invoke name=\"",
    invoke_end: "</invoke>",
    parameter: "<parameter name=\"",
    parameter_end: "</parameter>",
    close: "</minimax:tool_call>",
    typed: false,
};

const DSML_MARKS: Marks = Marks {
    open: "<｜DSML｜function_calls>",
    invoke: "<｜DSML｜invoke name=\"",
    invoke_end: "</｜DSML｜invoke>",
    parameter: "<｜DSML｜parameter name=\"",
    parameter_end: "</｜DSML｜parameter>",
    close: "</｜DSML｜function_calls>",
    typed: true,
};

/// What a parameter's name ends with, where it says whether it is a string.
const STRING: &str = "\" string=\"true\">";
const NO_STRING: &str = "\" string=\"false\">";

pub(super) static MINIMAX: Calls = Calls {
    name: "minimax",
    opens: &[MINIMAX_MARKS.open],
    starts: &[],
    marks: &[MINIMAX_MARKS.close],
    tokens: &[],
    reader: |_, tools| Invoke::reader(&MINIMAX_MARKS, tools),
    habits: history::PLAIN,
    notation: Notation {
        open: MINIMAX_MARKS.open,
        head: "\n",
        call: |page, tool| write_call(page, tool, &MINIMAX_MARKS),
        next: Some(""),
        close: MINIMAX_MARKS.close,
    },
};

pub(super) static DSML: Calls = Calls {
    name: "dsml",
    opens: &[DSML_MARKS.open],
    starts: &[],
    marks: &[DSML_MARKS.close],
    tokens: &["｜DSML｜"],
    reader: |_, tools| Invoke::reader(&DSML_MARKS, tools),
    habits: history::PLAIN,
    notation: Notation {
        open: DSML_MARKS.open,
        head: "\n",
        call: |page, tool| write_call(page, tool, &DSML_MARKS),
        next: Some(""),
        close: DSML_MARKS.close,
    },
};

fn write_call(page: &mut Page<'_>, tool: &Tool, marks: &Marks) -> String {
    let arguments = page.one_by_one(tool, |page, name, schema| {
        let is_text = schema["type"].as_str().is_none_or(|kind| kind == "string");
        let after = match (marks.typed, is_text) {
            (false, _) => "\">",
            (true, true) => STRING,
            (true, false) => NO_STRING,
        };
        let (key, after) = (page.say(marks.parameter), page.say(after));
        format!("{key} {name} {after} {}", page.bare(schema, &format!("{}\n", marks.parameter_end)))
    });
    let head = page.say(&format!("{}{}\">\n", marks.invoke, tool.name));
    format!("{head} {arguments} {}", page.say(&format!("{}\n", marks.invoke_end)))
}

struct Invoke {
    marks: &'static Marks,
    tools: Vec<Tool>,
    /// Arguments of the current call.
    arguments: Option<Arguments>,
}

impl Invoke {
    fn reader(marks: &'static Marks, tools: &[Tool]) -> Box<dyn Reader> {
        Box::new(Invoke { marks, tools: tools.to_vec(), arguments: None })
    }
}

impl Reader for Invoke {
    fn read(&mut self, text: &str, last: bool, sink: &mut Sink) -> Turn {
        let marks = self.marks;
        let mut c = Cursor::new(text);
        c.blanks();
        let Some(arguments) = &mut self.arguments else {
            if sink.n_calls() > 0 {
                // Calls that the text's end cuts off between them are complete.
                match c.have(marks.close) {
                    Ok(true) => return Turn::Done(c.at()),
                    Err(_) if last => return Turn::Done(text.len()),
                    Err(_) => return Turn::More,
                    Ok(false) => {}
                }
            }
            return Turn::of(name(&mut c, marks).map(|name| {
                self.arguments = Some(Arguments::start(name, &self.tools, sink));
                Turn::Took(c.at())
            }));
        };
        match parameter(&mut c, marks) {
            Ok(Some((key, value, is_string))) => {
                match is_string {
                    true => arguments.string(key, value, sink),
                    false => arguments.text(key, value, sink),
                }
                Turn::Took(c.at())
            }
            Ok(None) => {
                arguments.end(sink);
                self.arguments = None;
                Turn::Took(c.at())
            }
            Err(halt) => Turn::of(Err(halt)),
        }
    }
}

fn name<'a>(c: &mut Cursor<'a>, marks: &Marks) -> Result<&'a str, Halt> {
    let name = c.expect(marks.invoke)?.until_within("\">", &['<', '\n'])?.trim();
    if name.is_empty() { Err(Halt::Not) } else { Ok(name) }
}

/// Returns a key, its value and whether that is a string, or the end of the call.
fn parameter<'a>(c: &mut Cursor<'a>, marks: &Marks) -> Result<Option<(&'a str, &'a str, bool)>, Halt> {
    if c.have(marks.invoke_end)? {
        return Ok(None);
    }
    let key = c.expect(marks.parameter)?.until_within(">", &['<', '\n'])?;
    let (key, is_string) = match marks.typed {
        true => {
            let without = |text: &str| key.strip_suffix(text.strip_suffix('>')?);
            without(STRING).map(|key| (key, true)).or_else(|| without(NO_STRING).map(|key| (key, false)))
        }
        false => key.strip_suffix('"').map(|key| (key, false)),
    }
    .ok_or(Halt::Not)?;
    Ok(Some((key, c.until(marks.parameter_end)?, is_string)))
}

//! Calls of GLM 4.5 and later: `<tool_call>name`, then pairs `<arg_key>k</arg_key>` and `<arg_value>v</arg_value>`,
//! `</tool_call>`.
//!
//! A value is a raw string or JSON, depending on the tool's schema.

use super::history;
use super::json::{Cursor, Halt};
use super::page::Notation;
use super::parser::{Reader, Sink, Turn};
use super::tools::{Arguments, Tool};
use super::{Calls, hermes};

pub(super) static CALLS: Calls = Calls {
    name: "glm",
    opens: &[hermes::OPEN],
    starts: &[],
    marks: &[hermes::CLOSE, KEY, KEY_END, VALUE, VALUE_END],
    tokens: &[],
    reader: |_, tools| Box::new(Glm { tools: tools.to_vec(), arguments: None }),
    habits: history::PLAIN,
    notation: Notation {
        open: hermes::OPEN,
        head: "",
        call: |page, tool| {
            let arguments = page.one_by_one(tool, |page, name, schema| {
                let (key, value) = (page.say(KEY), page.say("</arg_key>\n<arg_value>"));
                format!("{key} {name} {value} {}", page.bare(schema, "</arg_value>\n"))
            });
            format!("{} {arguments} {}", page.say(&format!("{}\n", tool.name)), page.say(hermes::CLOSE))
        },
        next: Some("\n<tool_call>"),
        close: "",
    },
};

const KEY: &str = "<arg_key>";
const KEY_END: &str = "</arg_key>";
const VALUE: &str = "<arg_value>";
const VALUE_END: &str = "</arg_value>";

struct Glm {
    tools: Vec<Tool>,
    /// Arguments of the current call, once its name is known.
    arguments: Option<Arguments>,
}

impl Reader for Glm {
    fn read(&mut self, text: &str, _: bool, sink: &mut Sink) -> Turn {
        let outcome = match &mut self.arguments {
            None => name(text).map(|(name, n)| {
                self.arguments = Some(Arguments::start(name, &self.tools, sink));
                Turn::Took(n)
            }),
            Some(arguments) => argument(text).map(|(pair, n)| match pair {
                Some((key, value)) => {
                    arguments.text(key, value, sink);
                    Turn::Took(n)
                }
                None => {
                    arguments.end(sink);
                    Turn::Done(n)
                }
            }),
        };
        Turn::of(outcome)
    }
}

/// Returns the name, up to a mark or the end of its line.
fn name(text: &str) -> Result<(&str, usize), Halt> {
    let start = text.len() - text.trim_start().len();
    let len = text[start..].find(['\n', '<']).ok_or(Halt::More)?;
    let name = text[start..start + len].trim_end();
    // A mark must follow the name; otherwise this is no call.
    let mut c = Cursor::new(&text[start + len..]);
    c.blanks().expect_any(&[KEY, hermes::CLOSE])?;
    if name.is_empty() { Err(Halt::Not) } else { Ok((name, start + len)) }
}

/// Returns a key with its value, or the end of the call.
fn argument(text: &str) -> Result<(Option<(&str, &str)>, usize), Halt> {
    let mut c = Cursor::new(text);
    c.blanks();
    if c.have(hermes::CLOSE)? {
        return Ok((None, c.at()));
    }
    let key = c.expect(KEY)?.until(KEY_END)?.trim();
    let value = c.blanks().expect(VALUE)?.until(VALUE_END)?;
    Ok((Some((key, value)), c.at()))
}

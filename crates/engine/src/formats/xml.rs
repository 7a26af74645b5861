//! Calls of Qwen3-Coder, Qwen 3.5 and later, Step, MiMo and Nemotron 3: `<function=name>`, `<parameter=key>` lines, each
//! with its end, in `<tool_call>`. Seed-OSS: in `<seed:tool_call>`, and values within a line.
//!
//! A value is a raw string between its lines, or JSON, depending on the tool's schema. Models sometimes omit the outer
//! marks.

use super::history;
use super::json::{Cursor, Halt};
use super::page::{Notation, Page};
use super::parser::{Reader, Sink, Turn};
use super::tools::{Arguments, Tool};
use super::{Calls, hermes};

pub(super) static CALLS: Calls = Calls {
    name: "qwen-xml",
    opens: &[hermes::OPEN, FUNCTION],
    starts: &[],
    marks: &[hermes::CLOSE],
    tokens: &[],
    reader: |mark, tools| Xml::reader(mark, hermes::CLOSE, tools),
    habits: history::PLAIN,
    notation: Notation {
        open: hermes::OPEN,
        head: "",
        call: |page, tool| write_call(page, tool, "\n", hermes::CLOSE),
        next: Some("\n<tool_call>"),
        close: "",
    },
};

pub(super) static SEED: Calls = Calls {
    name: "seed",
    opens: &[SEED_OPEN, FUNCTION],
    starts: &[],
    marks: &[SEED_CLOSE],
    tokens: &[],
    reader: |mark, tools| Xml::reader(mark, SEED_CLOSE, tools),
    habits: history::PLAIN,
    notation: Notation {
        open: SEED_OPEN,
        head: "",
        call: |page, tool| write_call(page, tool, "", SEED_CLOSE),
        next: Some("\n<seed:tool_call>"),
        close: "",
    },
};

const SEED_OPEN: &str = "<seed:tool_call>";
const SEED_CLOSE: &str = "</seed:tool_call>";
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

struct Xml {
    tools: Vec<Tool>,
    /// Where the call is inside a pair of marks, the second one; else its `<function=` is consumed already.
    close: Option<&'static str>,
    stage: Stage,
}

enum Stage {
    Name,
    Parameters(Arguments),
    /// After the function.
    Close,
}

impl Xml {
    fn reader(mark: &str, close: &'static str, tools: &[Tool]) -> Box<dyn Reader> {
        let close = Some(close).filter(|_| mark != FUNCTION);
        Box::new(Xml { tools: tools.to_vec(), close, stage: Stage::Name })
    }
}

/// Grammar of a call and its closing mark; `around`: between a value and its marks.
fn write_call(page: &mut Page<'_>, tool: &Tool, around: &str, close: &str) -> String {
    let arguments = page.one_by_one(tool, |page, name, schema| {
        let (key, value) = (page.say(PARAMETER), page.say(&format!(">{around}")));
        format!("{key} {name} {value} {}", page.bare(schema, &format!("{around}{PARAMETER_END}\n")))
    });
    let head = page.say(&format!("\n{FUNCTION}{}>\n", tool.name));
    format!("{head} {arguments} {}", page.say(&format!("{FUNCTION_END}\n{close}")))
}

impl Reader for Xml {
    fn read(&mut self, text: &str, last: bool, sink: &mut Sink) -> Turn {
        let mut c = Cursor::new(text);
        let outcome = match &mut self.stage {
            Stage::Name => name(&mut c, self.close.is_none()).map(|name| {
                self.stage = Stage::Parameters(Arguments::start(name, &self.tools, sink));
                Turn::Took(c.at())
            }),
            Stage::Parameters(arguments) => match parameter(&mut c) {
                Ok(Some((key, value))) => {
                    arguments.text(key, value, sink);
                    Ok(Turn::Took(c.at()))
                }
                Ok(None) => {
                    arguments.end(sink);
                    self.stage = Stage::Close;
                    Ok(Turn::Took(c.at()))
                }
                Err(halt) => Err(halt),
            },
            Stage::Close => match c.blanks().expect(self.close.unwrap_or_default()) {
                Ok(_) if self.close.is_none() => return Turn::Done(0),
                Err(Halt::More) if !last => Err(Halt::More),
                Err(Halt::More) => return Turn::Done(text.len()),
                Err(Halt::Not) => return Turn::Done(0),
                Ok(c) => return Turn::Done(c.at()),
            },
        };
        Turn::of(outcome)
    }
}

fn name<'a>(c: &mut Cursor<'a>, named: bool) -> Result<&'a str, Halt> {
    if !named {
        c.blanks().expect(FUNCTION)?;
    }
    let name = c.until_within(">", &['<', '\n'])?.trim();
    if name.is_empty() { Err(Halt::Not) } else { Ok(name) }
}

/// Returns a key with its value, or the end of the function.
fn parameter<'a>(c: &mut Cursor<'a>) -> Result<Option<(&'a str, &'a str)>, Halt> {
    if c.blanks().have(FUNCTION_END)? {
        return Ok(None);
    }
    let key = c.expect(PARAMETER)?.until_within(">", &['<', '\n'])?.trim();
    let value = c.until(PARAMETER_END)?;
    let value = value.strip_prefix('\n').unwrap_or(value);
    Ok(Some((key, value.strip_suffix('\n').unwrap_or(value))))
}

//! Calls of DeepSeek V3, R1 and V3.1, and of Kimi K2: a section of calls, each of a head and a JSON object.
//!
//! - V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name` and the object in a fenced block.
//! - V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{..}`.
//! - Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{..}`; the head is the call's id.

use super::Calls;
use super::history::{self, Habits};
use super::json::{Cursor, Halt, Scan};
use super::page::Notation;
use super::parser::{Reader, Sink, Turn};

/// The marks of a section.
struct Marks {
    begin: &'static str,
    call: &'static str,
    sep: &'static str,
    call_end: &'static str,
    end: &'static str,
    /// Name and id of a call from its head, the text between `call` and `sep`.
    id: bool,
}

const DEEPSEEK: Marks = Marks {
    begin: "<｜tool▁calls▁begin｜>",
    call: "<｜tool▁call▁begin｜>",
    sep: "<｜tool▁sep｜>",
    call_end: "<｜tool▁call▁end｜>",
    end: "<｜tool▁calls▁end｜>",
    id: false,
};

const K2: Marks = Marks {
    begin: "<|tool_calls_section_begin|>",
    call: "<|tool_call_begin|>",
    sep: "<|tool_call_argument_begin|>",
    call_end: "<|tool_call_end|>",
    end: "<|tool_calls_section_end|>",
    id: true,
};

const fn section(name: &'static str, notation: Notation) -> Calls {
    Calls {
        name,
        opens: &[DEEPSEEK.begin],
        starts: &[],
        marks: &[DEEPSEEK.call, DEEPSEEK.sep, DEEPSEEK.call_end, DEEPSEEK.end],
        tokens: &[],
        reader: |_, _| Box::new(Section { marks: &DEEPSEEK, stage: Stage::Between }),
        notation,
        habits: Habits { null_content: true, ..history::PLAIN },
    }
}

pub(super) static V3: Calls = section(
    "deepseek-v3",
    Notation {
        open: DEEPSEEK.begin,
        head: "",
        call: |page, tool| {
            let head = page.say(&format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n", tool.name));
            format!("{head} {} {}", page.arguments(tool), page.say("\n```<｜tool▁call▁end｜>"))
        },
        next: Some("\n"),
        close: DEEPSEEK.end,
    },
);

pub(super) static V3_1: Calls = section(
    "deepseek-v3.1",
    Notation {
        open: DEEPSEEK.begin,
        head: "",
        call: |page, tool| {
            let head = page.say(&format!("<｜tool▁call▁begin｜>{}<｜tool▁sep｜>", tool.name));
            format!("{head} {} {}", page.arguments(tool), page.say(DEEPSEEK.call_end))
        },
        next: Some(""),
        close: DEEPSEEK.end,
    },
);

pub(super) static KIMI: Calls = Calls {
    name: "kimi",
    opens: &[K2.begin],
    starts: &[],
    marks: &[K2.call, K2.sep, K2.call_end, K2.end],
    tokens: &[],
    reader: |_, _| Box::new(Section { marks: &K2, stage: Stage::Between }),
    habits: history::PLAIN,
    notation: Notation {
        open: K2.begin,
        head: "",
        call: |page, tool| {
            let head = page.say(&format!("<|tool_call_begin|>functions.{}:", tool.name));
            let (sep, end) = (page.say(K2.sep), page.say(K2.call_end));
            format!("{head} /[0-9]{{1,3}}/ {sep} {} {end}", page.arguments(tool))
        },
        next: Some(""),
        close: K2.end,
    },
};

struct Section {
    marks: &'static Marks,
    stage: Stage,
}

enum Stage {
    /// Before a call, or the end of the section.
    Between,
    Arguments {
        scan: Scan,
        fenced: bool,
    },
    /// After the arguments.
    Close {
        fenced: bool,
    },
}

impl Reader for Section {
    fn read(&mut self, text: &str, last: bool, sink: &mut Sink) -> Turn {
        let mut c = Cursor::new(text);
        match &mut self.stage {
            Stage::Between => {
                c.blanks();
                // A section cut off by the text's end after a call is complete.
                if c.rest().is_empty() && last && sink.n_calls() > 0 {
                    return Turn::Done(c.at());
                }
                match c.have(self.marks.end) {
                    Ok(true) => return Turn::Done(c.at()),
                    Err(_) if !last => return Turn::More,
                    _ => {}
                }
                Turn::of(head(&mut c, self.marks).map(|head| {
                    sink.start(head.name, head.id);
                    self.stage = Stage::Arguments { scan: Scan::new(), fenced: head.fenced };
                    Turn::Took(c.at())
                }))
            }
            Stage::Arguments { scan, fenced } => match scan.arguments(text, sink) {
                Turn::Done(n) => {
                    self.stage = Stage::Close { fenced: *fenced };
                    Turn::Took(n)
                }
                turn => turn,
            },
            Stage::Close { fenced } => {
                let fenced = *fenced;
                let closed = close(&mut c, self.marks, fenced);
                match closed {
                    Err(Halt::More) if !last => Turn::More,
                    Err(Halt::Not) => Turn::Broken,
                    _ => {
                        sink.end();
                        self.stage = Stage::Between;
                        Turn::Took(c.at())
                    }
                }
            }
        }
    }
}

struct Head<'a> {
    name: &'a str,
    id: Option<&'a str>,
    fenced: bool,
}

fn head<'a>(c: &mut Cursor<'a>, marks: &Marks) -> Result<Head<'a>, Halt> {
    let first = c.expect(marks.call)?.until(marks.sep)?.trim();
    if marks.id {
        // functions.name:0
        let name = first.rsplit_once(':').map_or(first, |(name, _)| name);
        let name = name.strip_prefix("functions.").unwrap_or(name);
        c.blanks();
        return if name.is_empty() { Err(Halt::Not) } else { Ok(Head { name, id: Some(first), fenced: false }) };
    }
    if c.blanks().rest().is_empty() {
        return Err(Halt::More);
    }
    if c.rest().starts_with('{') {
        return Ok(Head { name: first, id: None, fenced: false });
    }
    let name = c.until("\n")?.trim();
    c.blanks().expect("```json")?.blanks();
    Ok(Head { name, id: None, fenced: true })
}

fn close(c: &mut Cursor<'_>, marks: &Marks, fenced: bool) -> Result<(), Halt> {
    if fenced {
        c.blanks().expect("```")?;
    }
    c.blanks().expect(marks.call_end)?;
    Ok(())
}

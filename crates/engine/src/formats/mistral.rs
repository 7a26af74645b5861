//! Calls of Mistral's models after `[TOOL_CALLS]`.
//!
//! - New: `[TOOL_CALLS]name[CALL_ID]id[ARGS]{..}`, the id optional, one mark per call.
//! - Old: `[TOOL_CALLS][{"name": .., "arguments": {..}, "id": ..}, ..]`, one mark for all.

use super::hermes::JsonCall;
use super::history::{self, Habits};
use super::json::{Cursor, Halt, Scan};
use super::page::Notation;
use super::parser::{Reader, Sink, Turn};
use super::{Calls, hermes};

const OPEN: &str = "[TOOL_CALLS]";
const CALL_ID: &str = "[CALL_ID]";
const ARGS: &str = "[ARGS]";

const fn calls(name: &'static str, notation: Notation) -> Calls {
    Calls {
        name,
        opens: &[OPEN],
        starts: &[],
        marks: &[CALL_ID, ARGS],
        tokens: &[],
        reader: |_, _| Box::new(Mistral::Start),
        notation,
        habits: Habits { short_ids: true, ..history::PLAIN },
    }
}

pub(super) static WITH_ID: Calls = calls(
    "mistral-id",
    Notation {
        open: OPEN,
        head: "",
        call: |page, tool| {
            let head = page.say(&format!("{}{CALL_ID}", tool.name));
            format!("{head} /[a-zA-Z0-9]{{9}}/ {} {}", page.say(ARGS), page.arguments(tool))
        },
        next: Some(OPEN),
        close: "",
    },
);

pub(super) static NAMED: Calls = calls(
    "mistral-args",
    Notation {
        open: OPEN,
        head: "",
        call: |page, tool| format!("{} {}", page.say(&format!("{}{ARGS}", tool.name)), page.arguments(tool)),
        next: Some(OPEN),
        close: "",
    },
);

pub(super) static LIST: Calls = calls(
    "mistral",
    Notation {
        open: OPEN,
        head: "[",
        call: |page, tool| hermes::write_object(page, tool, "arguments", "", ""),
        next: Some(", "),
        close: "]",
    },
);

enum Mistral {
    Start,
    Arguments(Scan),
    /// In the list, before a call; `first`: right after the bracket.
    List {
        first: bool,
    },
    InList(JsonCall),
}

impl Reader for Mistral {
    fn read(&mut self, text: &str, last: bool, sink: &mut Sink) -> Turn {
        let mut c = Cursor::new(text);
        match self {
            Mistral::Start => {
                if c.blanks().rest().is_empty() {
                    return Turn::More;
                }
                if c.expect("[").is_ok() {
                    *self = Mistral::List { first: true };
                    return Turn::Took(c.at());
                }
                Turn::of(head(&mut c).map(|(name, id)| {
                    sink.start(name, id);
                    *self = Mistral::Arguments(Scan::new());
                    Turn::Took(c.at())
                }))
            }
            Mistral::Arguments(scan) => {
                let turn = scan.arguments(text, sink);
                if matches!(turn, Turn::Done(_)) {
                    sink.end();
                }
                turn
            }
            Mistral::List { first } => {
                let separated = match c.blanks().expect("]") {
                    Ok(c) if !*first => return Turn::Done(c.at()),
                    Err(Halt::More) if last && !*first => return Turn::Done(c.at()),
                    Ok(_) => Err(Halt::Not),
                    Err(Halt::More) => Err(Halt::More),
                    Err(Halt::Not) if *first => Ok(()),
                    Err(Halt::Not) => c.expect(",").map(|_| ()),
                };
                Turn::of(separated.map(|()| {
                    *self = Mistral::InList(JsonCall::new());
                    Turn::Took(c.at())
                }))
            }
            Mistral::InList(call) => match call.read(text, sink) {
                Turn::Done(n) => {
                    *self = Mistral::List { first: false };
                    Turn::Took(n)
                }
                turn => turn,
            },
        }
    }
}

/// Name and id; the arguments follow.
fn head<'a>(c: &mut Cursor<'a>) -> Result<(&'a str, Option<&'a str>), Halt> {
    let before = c.until_within(ARGS, &['{', '\n'])?;
    let (name, id) = match before.split_once(CALL_ID) {
        Some((name, id)) => (name, Some(id.trim())),
        None => (before, None),
    };
    c.blanks();
    if name.trim().is_empty() { Err(Halt::Not) } else { Ok((name.trim(), id)) }
}

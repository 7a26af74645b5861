//! Calls of Llama 3: the whole answer is one object `{"name": .., "parameters": {..}}`, or several separated by `;`,
//! sometimes after `<|python_tag|>`.

use super::hermes::JsonCall;
use super::history::{self, Habits};
use super::json::{Cursor, Halt};
use super::page::Notation;
use super::parser::{Reader, Sink, Turn};
use super::{Calls, hermes};

const TAG: &str = "<|python_tag|>";

pub(super) static CALLS: Calls = Calls {
    name: "llama",
    opens: &[TAG],
    starts: &["{"],
    marks: &[],
    tokens: &[],
    reader: |_, _| Box::new(Llama { call: JsonCall::new(), between: false }),
    habits: HABITS,
    notation: NOTATION,
};

pub(super) const HABITS: Habits = Habits { one_call: true, ..history::PLAIN };
pub(super) const NOTATION: Notation = Notation {
    open: "",
    head: "",
    call: |page, tool| hermes::write_object(page, tool, "parameters", "", ""),
    next: Some("; "),
    close: "",
};

struct Llama {
    call: JsonCall,
    /// After a call.
    between: bool,
}

impl Reader for Llama {
    fn read(&mut self, text: &str, last: bool, sink: &mut Sink) -> Turn {
        if !self.between {
            return match self.call.read(text, sink) {
                Turn::Done(n) => {
                    self.between = true;
                    Turn::Took(n)
                }
                turn => turn,
            };
        }
        let mut c = Cursor::new(text);
        match c.blanks().expect(";") {
            Ok(_) => {
                (self.call, self.between) = (JsonCall::new(), false);
                Turn::Took(c.at())
            }
            Err(Halt::More) if !last => Turn::More,
            Err(_) => Turn::Done(0),
        }
    }
}

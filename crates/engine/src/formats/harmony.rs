//! The messages of gpt-oss ("harmony"): an answer is a sequence of messages in channels.
//!
//! `<|channel|>analysis<|message|>..<|end|><|start|>assistant<|channel|>final<|message|>..`. Analysis is the thought,
//! final the answer; commentary to `functions.name` is a call, other commentary is content. The prompt ends with
//! `<|start|>assistant`, so the first header continues it.

use super::Calls;
use super::history::{self, Habits};
use super::json::Scan;
use super::page::{Notation, Page};
use super::parser::{Reader, Sink, Turn, until_mark};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const CONSTRAIN: &str = "<|constrain|>";
/// Maximum length of a header, in bytes.
const MAX_HEADER: usize = 300;
const ENDS: [&str; 4] = ["<|end|>", "<|call|>", "<|return|>", START];

pub(super) static CALLS: Calls = Calls {
    name: "harmony",
    opens: &[],
    starts: &[],
    marks: &[START, CHANNEL, MESSAGE, CONSTRAIN, ENDS[0], ENDS[1], ENDS[2]],
    tokens: &[],
    reader: |_, _| Box::new(Harmony::Header { first: true }),
    habits: Habits { one_call: true, thinking: true, ..history::PLAIN },
    notation: Notation {
        open: "<|channel|>commentary to=functions.",
        head: "",
        call: |page, tool| {
            let head = page.say(&format!("{} <|constrain|>json<|message|>", tool.name));
            format!("{head} {}", page.arguments(tool))
        },
        // A call ends the answer.
        next: None,
        close: "",
    },
};

/// The header of the answer itself.
pub(super) const FINAL: &str = "<|channel|>final<|message|>";

/// Grammar of a thought before the other messages.
pub(super) fn write_thought(page: &mut Page<'_>) -> String {
    let head = page.say("<|channel|>analysis<|message|>");
    format!("{head} {}", page.text_until("<|end|><|start|>assistant"))
}

enum Harmony {
    /// Before `<|message|>`.
    Header {
        first: bool,
    },
    Thought,
    Content,
    Arguments(Scan),
    /// After a call's object.
    Called,
    /// Between messages.
    Between,
}

impl Reader for Harmony {
    fn recover(&mut self) -> bool {
        *self = Harmony::Content;
        true
    }

    fn read(&mut self, text: &str, last: bool, sink: &mut Sink) -> Turn {
        match self {
            Harmony::Header { first } => header(text, *first, last).map_or(Turn::More, |(next, n)| {
                *self = match next {
                    Next::Text => {
                        sink.content(&text[..n]);
                        Harmony::Content
                    }
                    Next::Thought => Harmony::Thought,
                    Next::Content => Harmony::Content,
                    Next::Call(name) => {
                        sink.start(name, None);
                        Harmony::Arguments(Scan::new())
                    }
                };
                Turn::Took(n)
            }),
            Harmony::Thought | Harmony::Content => {
                let thought = matches!(self, Harmony::Thought);
                let (shown, end) = until_mark(text, &ENDS, last);
                match thought {
                    true => sink.reasoning(&text[..shown]),
                    false => sink.content(&text[..shown]),
                }
                self.behind(text, shown, end, last)
            }
            Harmony::Arguments(scan) => match scan.arguments(text, sink) {
                Turn::Done(n) => {
                    sink.end();
                    *self = Harmony::Called;
                    Turn::Took(n)
                }
                turn => turn,
            },
            Harmony::Called => {
                let (shown, end) = until_mark(text, &ENDS, last);
                self.behind(text, shown, end, last)
            }
            Harmony::Between => {
                sink.settle();
                let visible = text.trim_start();
                let n = text.len() - visible.len();
                if visible != START && START.starts_with(visible) {
                    return if last { Turn::Done(text.len()) } else { Turn::More };
                }
                *self = Harmony::Header { first: false };
                Turn::Took(n)
            }
        }
    }
}

impl Harmony {
    /// Consumes a piece of a message's text, with the mark that ends it if present.
    fn behind(&mut self, text: &str, shown: usize, end: Option<usize>, last: bool) -> Turn {
        match end {
            Some(n) => {
                *self = Harmony::Between;
                // The next header is read with its mark.
                Turn::Took(if text[shown..n] == *START { shown } else { n })
            }
            None if shown > 0 => Turn::Took(shown),
            None if last => Turn::Done(0),
            None => Turn::More,
        }
    }
}

enum Next<'a> {
    Thought,
    Content,
    Call(&'a str),
    /// No message: the text is content.
    Text,
}

/// Returns what a header announces, and where its message begins. Text that is no header is content. `None` when more
/// text is needed.
fn header(text: &str, first: bool, last: bool) -> Option<(Next<'_>, usize)> {
    let visible = text.trim_start();
    let begins: &[&str] = if first { &[CHANNEL, START, "to="] } else { &[CHANNEL, START] };
    if !begins.iter().any(|b| visible.starts_with(b)) {
        let may_come = begins.iter().any(|b| b.starts_with(visible));
        return (last || !may_come).then_some((Next::Content, 0));
    }
    // After a false header, the search resumes behind its first character.
    let none = text.len() - visible.len() + 1;
    let end = match text.find(MESSAGE) {
        Some(end) if end <= MAX_HEADER => end,
        None if text.len() < MAX_HEADER + MESSAGE.len() => match last && visible.starts_with("<|") {
            // A header that is cut off.
            true => return Some((Next::Content, text.len())),
            false if !last => return None,
            false => return Some((Next::Text, none)),
        },
        _ => return Some((Next::Text, none)),
    };
    let head = &text[..end];
    let to = head.find("to=").map(|at| {
        let rest = &head[at + 3..];
        &rest[..rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len())]
    });
    let channel = head.find(CHANNEL).map_or("", |at| head[at + CHANNEL.len()..].trim_start());
    let next = match to.filter(|to| !to.is_empty()) {
        Some(to) => Next::Call(to.strip_prefix("functions.").unwrap_or(to)),
        None if channel.starts_with("analysis") => Next::Thought,
        None => Next::Content,
    };
    Some((next, end + MESSAGE.len()))
}

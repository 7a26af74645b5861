//! The parser of all formats: searches for marks, splits off thoughts, and holds text back while a mark may be
//! incomplete.

use super::json::{Halt, Scan, Scanned};
use super::{Calls, Event, Format, Thought, Tool};

/// What a parser holds back until it is certain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hold {
    /// A call up to its name; its arguments stream. If they turn out malformed, the call ends as not complete.
    #[default]
    Head,
    /// A whole call. A malformed one is content, without its marks.
    Call,
}

/// Result of a [`Reader`] on a piece of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// This many bytes are consumed; call again with the rest.
    Took(usize),
    /// More text is needed.
    More,
    /// This many bytes are consumed, and the calls end with them.
    Done(usize),
    /// The text is no call.
    Broken,
}

/// Reads calls after their opening mark.
pub(super) trait Reader: Send {
    /// Reads from the front of `text`; `last` when nothing follows it. The result must depend on the text alone, not on
    /// where it is cut.
    fn read(&mut self, text: &str, last: bool, sink: &mut Sink) -> Turn;

    /// Returns whether the reader continues after [`Turn::Broken`].
    fn recover(&mut self) -> bool {
        false
    }
}

impl Turn {
    /// Converts the outcome of an attempt that may have halted.
    pub fn of(outcome: Result<Turn, Halt>) -> Turn {
        match outcome {
            Ok(turn) => turn,
            Err(Halt::More) => Turn::More,
            Err(Halt::Not) => Turn::Broken,
        }
    }
}

impl Scan {
    /// Scans more of a call's arguments, which are this object; done after it.
    pub fn arguments(&mut self, text: &str, sink: &mut Sink) -> Turn {
        let n_blanks = text.len() - text.trim_start().len();
        if !self.has_begun() && n_blanks > 0 {
            return Turn::Took(n_blanks);
        }
        let (n, turn) = match self.push(text) {
            Scanned::More if text.is_empty() => (0, Turn::More),
            Scanned::Bad(0) => (0, Turn::Broken),
            Scanned::More => (text.len(), Turn::Took(text.len())),
            Scanned::Bad(n) => (n, Turn::Took(n)),
            Scanned::End(n) => (n, Turn::Done(n)),
        };
        sink.arguments(&text[..n]);
        turn
    }
}

/// Collects a reader's events.
pub(super) struct Sink {
    events: Vec<Event>,
    hold: Hold,
    /// Events of the current call that are held back.
    held: Vec<Event>,
    /// Whether a call is open.
    open: bool,
    n_calls: usize,
    /// Increases when text is final: it no longer belongs to a call that may turn out malformed.
    n_settled: usize,
    seed: u64,
    short_ids: bool,
    /// The last text was a thought.
    in_thought: bool,
}

impl Sink {
    /// A call begins; `id` where the model gave one.
    pub fn start(&mut self, name: &str, id: Option<&str>) {
        let index = self.n_calls;
        let id = id.map_or_else(|| new_id(self.seed, index, self.short_ids), str::to_owned);
        self.open = true;
        self.in_thought = false;
        self.n_calls += 1;
        self.push(Event::ToolCallStart { index, id, name: name.to_owned() });
    }

    /// More of the call's arguments.
    pub fn arguments(&mut self, json: &str) {
        if !json.is_empty() {
            self.push(Event::ToolCallArguments { index: self.n_calls - 1, json: json.to_owned() });
        }
    }

    /// The call is complete.
    pub fn end(&mut self) {
        self.close(true);
        self.settle();
    }

    fn close(&mut self, complete: bool) {
        self.push(Event::ToolCallEnd { index: self.n_calls - 1, complete });
        self.events.append(&mut self.held);
        self.open = false;
    }

    /// The text read so far is not part of a later call.
    pub fn settle(&mut self) {
        self.n_settled += 1;
    }

    /// Number of calls so far, the open one included.
    pub fn n_calls(&self) -> usize {
        self.n_calls
    }

    pub fn content(&mut self, text: &str) {
        if !text.is_empty() {
            self.in_thought = false;
            self.events.push(Event::Content(text.to_owned()));
            self.settle();
        }
    }

    pub fn reasoning(&mut self, text: &str) {
        if !text.is_empty() {
            self.in_thought = true;
            self.events.push(Event::Reasoning(text.to_owned()));
            self.settle();
        }
    }

    fn push(&mut self, event: Event) {
        match self.hold {
            Hold::Head => self.events.push(event),
            Hold::Call => self.held.push(event),
        }
    }

    /// The open call is malformed. `raw` is its text so far, without marks.
    fn broken(&mut self, raw: &str) {
        match (self.open, self.hold) {
            (true, Hold::Head) => return self.close(false),
            (true, Hold::Call) => {
                self.held.clear();
                self.n_calls -= 1;
                self.open = false;
            }
            (false, _) => {}
        }
        self.content(raw);
    }
}

enum State {
    /// Only blanks so far: a thought may open here.
    Start,
    Thought {
        marks: Thought,
        begun: bool,
    },
    /// In the answer. `fresh`: right after a thought or a call, where blanks are no content. `broken`: after a malformed
    /// call, whose remaining marks are no content.
    Content {
        fresh: bool,
        broken: bool,
    },
    /// In calls, with the text since the last complete one.
    Calls {
        reader: Box<dyn Reader>,
        raw: String,
    },
}

/// Splits an answer's text, given in pieces, into its parts.
///
/// The parts depend on the text alone, not on how it is cut. A text without marks is content, character by character.
/// Blanks between content, thoughts and calls are dropped. A call that the text's end cuts off is not complete; its
/// marks, and a call that is cut off before its arguments, are dropped.
pub struct Parser {
    format: Format,
    tools: Vec<Tool>,
    state: State,
    /// Text that is not parsed yet.
    text: String,
    /// The text was cut off: a mark that it ends in the middle of is no content.
    is_cut: bool,
    sink: Sink,
}

impl Parser {
    /// Returns a parser at the start of an answer.
    ///
    /// `opened`: the prompt ends inside a thought ([`Format::opens_thought`]). Without `tools`, calls are not parsed.
    /// `seed` makes the ids of calls: use a new one for every answer.
    pub fn new(format: Format, tools: &[Tool], opened: bool, hold: Hold, seed: u64) -> Parser {
        let state = match format.thought {
            Some(marks) if opened => State::Thought { marks, begun: false },
            _ => match format.calls.filter(|calls| calls.reads_all()) {
                Some(calls) => State::Calls { reader: (calls.reader)("", tools), raw: String::new() },
                None => State::Start,
            },
        };
        let short_ids = format.calls.is_some_and(|calls| calls.habits.short_ids);
        let (events, held) = (Vec::new(), Vec::new());
        let (open, in_thought) = (false, false);
        let sink = Sink { events, hold, held, open, n_calls: 0, n_settled: 0, seed, short_ids, in_thought };
        Parser { format, tools: tools.to_vec(), state, text: String::new(), is_cut: false, sink }
    }

    /// Takes more text and appends the parts that are certain.
    pub fn push(&mut self, text: &str, events: &mut Vec<Event>) {
        self.text.push_str(text);
        self.run(false);
        events.append(&mut self.sink.events);
    }

    /// Ends the text and appends what was held back.
    pub fn finish(&mut self, events: &mut Vec<Event>) {
        self.run(true);
        events.append(&mut self.sink.events);
    }

    /// As [`Parser::finish`], for a text that a limit cut off.
    pub fn cut(&mut self, events: &mut Vec<Event>) {
        self.is_cut = true;
        self.finish(events);
    }

    /// Number of calls found up to now.
    pub fn n_calls(&self) -> usize {
        self.sink.n_calls
    }

    /// Returns whether the text up to now ends inside a thought. Where messages make up the answer, what is between a
    /// thought and the next text or call counts as part of it.
    pub fn in_thought(&self) -> bool {
        match &self.state {
            State::Thought { .. } => true,
            State::Calls { .. } => self.sink.in_thought && self.format.calls.is_some_and(Calls::reads_all),
            State::Start | State::Content { .. } => false,
        }
    }

    /// Parses a whole text.
    pub fn parse(mut self, text: &str) -> Vec<Event> {
        let mut events = Vec::new();
        self.push(text, &mut events);
        self.finish(&mut events);
        events
    }

    fn run(&mut self, last: bool) {
        let text = std::mem::take(&mut self.text);
        let mut rest = text.as_str();
        let mut n_idle = 0;
        while let Some(n) = self.step(rest, last) {
            n_idle = if n > 0 { 0 } else { n_idle + 1 };
            debug_assert!(n_idle < 8, "the parser turns in a circle before {rest:?}");
            rest = &rest[n..];
        }
        self.text.push_str(rest);
    }

    /// Reads from the front of `text`; returns the bytes consumed, or `None` when it needs more text or none is left.
    fn step(&mut self, text: &str, last: bool) -> Option<usize> {
        match &mut self.state {
            State::Start => self.start(text, last),
            &mut State::Thought { marks, begun: false } => self.thought_start(text, marks, last),
            &mut State::Thought { marks, begun: true } => self.thought(text, marks, last),
            &mut State::Content { fresh: true, broken } => self.content_start(text, broken, last),
            &mut State::Content { fresh: false, broken } => self.content(text, broken, last),
            State::Calls { reader, raw } => {
                let n_settled = self.sink.n_settled;
                match reader.read(text, last, &mut self.sink) {
                    Turn::Took(n) if !text.is_empty() => {
                        raw.push_str(&text[..n]);
                        if n_settled != self.sink.n_settled {
                            raw.clear();
                        }
                        Some(n)
                    }
                    Turn::Took(_) | Turn::More if !last => None,
                    Turn::Done(n) => {
                        self.state = State::Content { fresh: true, broken: false };
                        Some(n)
                    }
                    Turn::Broken => {
                        self.sink.broken(&without_marks(raw, self.format.calls));
                        raw.clear();
                        if !reader.recover() {
                            self.state = State::Content { fresh: false, broken: true };
                        }
                        Some(0)
                    }
                    // The text ends inside a call.
                    Turn::Took(_) | Turn::More => {
                        let starts = self.format.calls.is_some_and(|c| !c.starts.is_empty()) && raw.trim().is_empty();
                        match self.sink.open {
                            true => self.sink.close(false),
                            // What no mark opened may be an answer.
                            false if starts => self.sink.content(&format!("{raw}{text}")),
                            false => {}
                        }
                        self.state = State::Content { fresh: true, broken: false };
                        Some(text.len())
                    }
                }
            }
        }
    }

    /// Opens a thought here, or begins the answer.
    fn start(&mut self, text: &str, last: bool) -> Option<usize> {
        let visible = text.trim_start();
        match self.format.thought {
            Some(marks) if visible.starts_with(marks.open) => {
                self.state = State::Thought { marks, begun: false };
                Some(text.len() - visible.len() + marks.open.len())
            }
            Some(marks) if marks.open.starts_with(visible) && !last => None,
            _ if self.call_starts(visible) => {
                let n = text.len() - visible.len();
                self.open_calls("", text[..n].to_owned());
                Some(n)
            }
            _ if visible.is_empty() && self.may_start_calls() && !last => None,
            _ => {
                self.state = State::Content { fresh: false, broken: false };
                Some(0)
            }
        }
    }

    /// Returns the notation of calls, if there are tools.
    fn call_format(&self) -> Option<&'static Calls> {
        self.format.calls.filter(|_| !self.tools.is_empty())
    }

    /// Returns whether a call may begin an answer without an opening mark.
    fn may_start_calls(&self) -> bool {
        self.call_format().is_some_and(|calls| !calls.starts.is_empty())
    }

    /// Returns whether the answer, which begins with `visible`, begins with a call.
    fn call_starts(&self, visible: &str) -> bool {
        self.call_format().is_some_and(|calls| calls.starts.iter().any(|start| visible.starts_with(start)))
    }

    fn open_calls(&mut self, mark: &str, raw: String) {
        if let Some(calls) = self.format.calls {
            self.state = State::Calls { reader: (calls.reader)(mark, &self.tools), raw };
        }
    }

    /// Drops blanks at the start of a thought, and a second opening mark after the prompt's.
    fn thought_start(&mut self, text: &str, marks: Thought, last: bool) -> Option<usize> {
        let visible = text.trim_start();
        let n_blanks = text.len() - visible.len();
        for mark in [marks.open, marks.label] {
            if mark.starts_with(visible) && visible != mark && !last {
                return None;
            }
            if visible.starts_with(mark) && !mark.is_empty() {
                return Some(n_blanks + mark.len());
            }
        }
        self.state = State::Thought { marks, begun: true };
        Some(n_blanks)
    }

    fn thought(&mut self, text: &str, marks: Thought, last: bool) -> Option<usize> {
        match find(text, &[marks.close]) {
            Found::Mark { at, mark } => {
                self.sink.reasoning(text[..at].trim_end());
                self.state = State::Content { fresh: true, broken: false };
                Some(at + mark.len())
            }
            Found::Held(at) => {
                let shown = self.shown(text, at, last);
                self.sink.reasoning(&text[..shown]);
                (shown > 0).then_some(shown)
            }
        }
    }

    /// Length of a text to show, whose tail from `held` on may begin a mark.
    fn shown(&self, text: &str, held: usize, last: bool) -> usize {
        let is_mark = !last || self.is_cut && held < text.len();
        if is_mark { text[..held].trim_end().len() } else { text.len() }
    }

    /// Right after a thought or a call: drops blanks.
    fn content_start(&mut self, text: &str, broken: bool, last: bool) -> Option<usize> {
        let visible = text.trim_start();
        if visible.is_empty() && !last {
            return None;
        }
        let n = text.len() - visible.len();
        match self.call_starts(visible) && self.sink.n_calls == 0 {
            true => self.open_calls("", text[..n].to_owned()),
            false => self.state = State::Content { fresh: false, broken },
        }
        Some(n)
    }

    fn content(&mut self, text: &str, broken: bool, last: bool) -> Option<usize> {
        let Some(calls) = self.call_format() else {
            self.sink.content(text);
            return (!text.is_empty()).then_some(text.len());
        };
        let marks = if broken { [calls.opens, calls.marks].concat() } else { Vec::new() };
        match find(text, if broken { &marks } else { calls.opens }) {
            Found::Mark { at, mark } => {
                let shown = text[..at].trim_end().len();
                self.sink.content(&text[..shown]);
                match calls.opens.contains(&mark) {
                    true => self.open_calls(mark, text[shown..at + mark.len()].to_owned()),
                    false => self.state = State::Content { fresh: true, broken },
                }
                Some(at + mark.len())
            }
            Found::Held(at) => {
                let shown = self.shown(text, at, last);
                self.sink.content(&text[..shown]);
                (shown > 0).then_some(shown)
            }
        }
    }
}

/// Returns the text of a malformed call without marks; where messages have headers, what follows the header.
fn without_marks(raw: &str, calls: Option<&Calls>) -> String {
    let Some(calls) = calls else { return raw.to_owned() };
    let marks = || calls.opens.iter().chain(calls.marks);
    if calls.reads_all() {
        let ends = marks().filter_map(|mark| raw.rfind(mark).map(|at| at + mark.len()));
        return raw[ends.max().unwrap_or(0)..].to_owned();
    }
    marks().fold(raw.to_owned(), |text, mark| text.replace(mark, ""))
}

/// Result of a search for marks.
enum Found {
    Mark {
        at: usize,
        mark: &'static str,
    },
    /// No mark, but the text from here on may begin one.
    Held(usize),
}

/// Finds the first of these marks: the length of the text before it, and the end of the mark if it was found. A tail of
/// the text that may begin a mark, with the blanks before it, is held back unless `last`.
pub(super) fn until_mark(text: &str, marks: &[&'static str], last: bool) -> (usize, Option<usize>) {
    match find(text, marks) {
        Found::Mark { at, mark } => (at, Some(at + mark.len())),
        Found::Held(_) if last => (text.len(), None),
        Found::Held(at) => (at, None),
    }
}

/// Returns the first mark; at one place the longest.
fn find(text: &str, marks: &[&'static str]) -> Found {
    let found = marks.iter().filter_map(|mark| Some((text.find(mark)?, mark)));
    match found.min_by_key(|(at, mark)| (*at, std::cmp::Reverse(mark.len()))) {
        Some((at, mark)) => Found::Mark { at, mark },
        None => Found::Held(text.len() - held(text, marks)),
    }
}

/// Length of the longest tail of the text that begins a mark.
fn held(text: &str, marks: &[&'static str]) -> usize {
    let ends = |mark: &&'static str| {
        let longest = (mark.len() - 1).min(text.len());
        (1..=longest).rev().find(|&n| text.as_bytes().ends_with(&mark.as_bytes()[..n])).unwrap_or(0)
    };
    marks.iter().map(ends).max().unwrap_or(0)
}

/// Returns a call id unique within this and other answers; `short`: nine letters and digits.
pub(super) fn new_id(seed: u64, index: usize, short: bool) -> String {
    const LETTERS: &[u8; 62] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
    let mut state = seed ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let letter = |_| {
        // splitmix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        LETTERS[((z ^ (z >> 31)) % 62) as usize] as char
    };
    match short {
        true => (0..9).map(letter).collect(),
        false => "call_".chars().chain((0..24).map(letter)).collect(),
    }
}

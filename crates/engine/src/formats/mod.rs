//! Reasoning and tool calls in a model's output: every family marks them differently, and each notation is a
//! [`Format`].
//!
//! The chat template's text selects the format ([`Format::detect`]). Its [`Parser`] takes the text of an answer in
//! pieces of any size and emits [`Event`]s: the thought, the answer, the calls. Text in, structure out: no HTTP, no
//! API's JSON, none of the engine's requests.
//!
//! Many marks are special tokens, which an answer's text omits: a request whose text goes to a parser lists
//! [`Format::shown`] as [`shown`](crate::Request::shown).

mod constrain;
mod deepseek;
mod gemma;
mod glm;
mod harmony;
mod hermes;
mod history;
mod invoke;
mod json;
mod list;
mod llama;
mod mistral;
mod page;
mod parser;
mod python;
mod tools;
mod xml;

#[cfg(test)]
mod constrain_tests;
#[cfg(test)]
mod templates_tests;
#[cfg(test)]
mod tests;

use crate::tokenizer::Tokenizer;

pub use constrain::{Ask, Choice};
pub use parser::{Hold, Parser};
pub use tools::Tool;

use history::Habits;
use page::Notation;
use parser::Reader;

/// A part of an answer. Texts and JSON arrive in pieces, to be concatenated per part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// More of the thought before the answer.
    Reasoning(String),
    /// More of the answer.
    Content(String),
    /// A call begins.
    ToolCallStart {
        /// Which call of this answer, from 0.
        index: usize,
        /// Its id: the model's own where the format has one, else a new one in the form that the model's template
        /// requires.
        id: String,
        /// Name of the tool.
        name: String,
    },
    /// More of a call's arguments, a JSON object.
    ToolCallArguments {
        /// Which call.
        index: usize,
        /// The next characters of the object.
        json: String,
    },
    /// A call has ended.
    ToolCallEnd {
        /// Which call.
        index: usize,
        /// Whether its arguments are a complete JSON object. False when the text broke off, or was malformed where
        /// arguments stream ([`Hold::Head`]).
        complete: bool,
    },
}

/// The marks around a thought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thought {
    /// Opens it; often the prompt ends with it.
    pub open: &'static str,
    /// Follows `open` and is not part of the thought.
    label: &'static str,
    /// Closes it.
    pub close: &'static str,
}

/// The marks of most models that think.
const THINK: Thought = Thought { open: "<think>", label: "", close: "</think>" };
/// Thoughts that are not [`THINK`]: a text that their templates hold, and their marks.
const THOUGHTS: &[(&str, Thought)] = &[
    ("<|channel>thought", Thought { open: "<|channel>", label: "thought", close: "<channel|>" }),
    ("[THINK]", Thought { open: "[THINK]", label: "", close: "[/THINK]" }),
    ("<|START_THINKING|>", Thought { open: "<|START_THINKING|>", label: "", close: "<|END_THINKING|>" }),
    ("<seed:think>", Thought { open: "<seed:think>", label: "", close: "</seed:think>" }),
    (THINK.close, THINK),
];

/// Notation of calls.
struct Calls {
    name: &'static str,
    /// Texts that open calls anywhere in an answer.
    opens: &'static [&'static str],
    /// Texts that open calls only at the start of an answer; they belong to the call.
    starts: &'static [&'static str],
    /// All texts that the reader searches for.
    marks: &'static [&'static str],
    /// Special tokens that are parts of marks.
    tokens: &'static [&'static str],
    /// Makes the reader of what follows one of `opens`, its argument; without `opens` and `starts`, the reader of whole
    /// answers.
    reader: fn(&str, &[Tool]) -> Box<dyn Reader>,
    notation: Notation,
    habits: Habits,
}

impl Calls {
    /// Returns whether calls have no opening mark, so that the reader gets the whole answer.
    fn reads_all(&self) -> bool {
        self.opens.is_empty() && self.starts.is_empty()
    }
}

/// A model's marks of thoughts and calls.
#[derive(Clone, Copy)]
pub struct Format {
    thought: Option<Thought>,
    calls: Option<&'static Calls>,
}

impl std::fmt::Debug for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Format({})", self.name())
    }
}

/// Texts that identify a template's notation of calls; the first row whose texts all occur decides.
const CALLS: &[(&[&str], &Calls)] = &[
    (&["<|channel|>analysis"], &harmony::CALLS),
    (&["<|tool_call>call:"], &gemma::CALLS),
    (&["<|tool_calls_section_begin|>"], &deepseek::KIMI),
    (&["<｜tool▁calls▁begin｜>", "```json"], &deepseek::V3),
    (&["<｜tool▁calls▁begin｜>"], &deepseek::V3_1),
    (&["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"], &mistral::WITH_ID),
    (&["[TOOL_CALLS]", "[ARGS]"], &mistral::NAMED),
    (&["[TOOL_CALLS]"], &mistral::LIST),
    (&["｜DSML｜"], &invoke::DSML),
    (&["<minimax:tool_call>"], &invoke::MINIMAX),
    (&["<seed:tool_call>"], &xml::SEED),
    (&["<|tool_call_start|>"], &list::LFM),
    (&["<|START_ACTION|>"], &list::COMMAND),
    (&["<TOOLCALL>"], &list::NEMOTRON),
    (&["<tool_calls>", "</tool_calls>"], &list::HUNYUAN),
    (&["<|tool_call|>", "<|/tool_call|>"], &list::PHI),
    (&["<|tool_call|>"], &list::GRANITE),
    (&["<function_calls>"], &list::OLMO),
    (&["<arg_key>"], &glm::CALLS),
    (&["<function="], &xml::CALLS),
    (&["<tool_call>"], &hermes::CALLS),
    (&["<|python_tag|>"], &llama::CALLS),
    (&["<|python_start|>"], &list::LLAMA4),
];

impl Format {
    /// Neither thoughts nor calls: all is content.
    pub const PLAIN: Format = Format { thought: None, calls: None };

    /// Returns the format that a chat template uses.
    pub fn detect(template: &str) -> Format {
        let calls =
            CALLS.iter().find(|(texts, _)| texts.iter().all(|text| template.contains(text))).map(|(_, calls)| *calls);
        let thought = THOUGHTS.iter().find(|(text, _)| template.contains(text)).map(|(_, thought)| *thought);
        // When messages make up the whole answer, a thought is one of them.
        let thought = thought.filter(|_| calls.is_none_or(|c| !c.reads_all()));
        Format { thought, calls }
    }

    /// Returns its name: that of its calls, and `+think` when it has thoughts.
    pub fn name(&self) -> String {
        let calls = self.calls.map_or("plain", |c| c.name);
        if self.thought.is_some() { format!("{calls}+think") } else { calls.to_owned() }
    }

    /// Returns whether the model can call tools.
    pub fn has_calls(&self) -> bool {
        self.calls.is_some()
    }

    /// Returns the marks of its thoughts.
    pub fn thought(&self) -> Option<Thought> {
        self.thought
    }

    /// Returns whether a rendered prompt ends inside an open thought, so that the answer begins with it.
    pub fn opens_thought(&self, prompt: &str) -> bool {
        self.thought.is_some_and(|t| prompt.trim_end().ends_with(t.open))
    }

    /// Returns the special tokens of a vocabulary that a parser needs to see.
    pub fn shown(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let marks: Vec<&str> = self.marks().collect();
        let is_mark = |&id: &u32| {
            let name = tokenizer.token_bytes(id).filter(|name| !name.is_empty() && tokenizer.is_special(id));
            name.is_some_and(|name| marks.iter().any(|mark| mark.as_bytes().windows(name.len()).any(|w| w == name)))
        };
        (0..tokenizer.n_vocab() as u32).filter(is_mark).collect()
    }

    /// All texts with a meaning in the format.
    fn marks(&self) -> impl Iterator<Item = &'static str> {
        let thought = self.thought.into_iter().flat_map(|t| [t.open, t.close]);
        thought.chain(self.calls.into_iter().flat_map(|c| c.opens.iter().chain(c.marks).chain(c.tokens).copied()))
    }
}

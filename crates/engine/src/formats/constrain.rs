//! Grammars for answers: tool calls in a format's notation, and the form of the content.

use serde_json::Value;

use super::page::{Notation, Page};
use super::{Calls, Format, Tool, harmony};
use crate::grammar::{Constraint, Error, FreeThought, Grammar, Grammars, Lead, Rule};
use crate::tokenizer::Tokenizer;

/// Whether an answer calls tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice<'a> {
    /// The model decides; a call that it begins follows the format and the tool's schema.
    #[default]
    Auto,
    /// The answer consists of calls.
    Required,
    /// The answer calls this tool.
    Named(&'a str),
}

/// Requirements on an answer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ask<'a> {
    /// Form of its content.
    pub content: Option<&'a Rule>,
    /// Tools it may call.
    pub tools: &'a [Tool],
    /// Whether it calls.
    pub choice: Choice<'a>,
    /// Maximum number of calls.
    pub most_calls: Option<usize>,
    /// The prompt ends inside a thought ([`Format::opens_thought`]).
    pub opened: bool,
    /// Maximum number of tokens of a thought.
    pub most_thought: Option<usize>,
}

impl Format {
    /// Returns the constraint of an answer; `None` where everything is allowed.
    ///
    /// Formats that write arguments without JSON's quotes enforce `enum` and `const` on strings; Gemma's also enforces
    /// types, properties and items elsewhere, but no further keywords.
    ///
    /// # Errors
    /// As [`Grammars::compile`]; [`Error::Rule`] when a required call has no notation in the format, or no such tool.
    pub fn constraint(
        &self,
        ask: &Ask<'_>,
        tokenizer: &Tokenizer,
        with: &Grammars,
    ) -> Result<Option<Constraint>, Error> {
        let named = |tool: &&Tool| !matches!(ask.choice, Choice::Named(name) if name != tool.name);
        let tools: Vec<&Tool> = ask.tools.iter().filter(named).collect();
        let required = ask.choice != Choice::Auto;
        let calls = self.calls.filter(|_| !tools.is_empty());
        let (opened, most_tokens) = (ask.opened, ask.most_thought);
        let marks =
            self.thought.map(|t| FreeThought { open: t.open.into(), close: t.close.into(), opened, most_tokens });
        let bound = |marks: Option<FreeThought>| {
            let thought = marks.filter(|_| most_tokens.is_some())?;
            Some(Constraint { thought: Some(thought), ..Constraint::new(with.free()) })
        };
        let held = |grammar| Constraint { grammar, thought: marks.clone(), triggers: Vec::new() };
        let lead = if marks.is_some() { Lead::Blanks } else { Lead::None };
        let page = Page::new(self, tokenizer);
        match (calls, ask.content) {
            (None, _) if required && self.calls.is_none() => Err(Error::Rule("the model's format has no calls".into())),
            (None, _) if required => Err(Error::Rule("there is no such tool to call".into())),
            (None, None) => Ok(bound(marks)),
            (None, Some(rule)) if !self.reads_all() => with.compile(rule, lead).map(|grammar| Some(held(grammar))),
            // Calls without a mark are free.
            (Some(calls), None) if !required && calls.notation.open.is_empty() => Ok(bound(marks)),
            (Some(calls), None) if !required => {
                let grammar = page.when_called(calls, &tools, ask.most_calls, with)?;
                Ok(Some(Constraint { triggers: vec![calls.notation.open.into()], ..held(grammar) }))
            }
            _ => {
                let content = ask.content.filter(|_| !required);
                page.answer(calls, &tools, ask.most_calls, content, lead, with).map(|grammar| Some(held(grammar)))
            }
        }
    }

    /// As [`Format::constraint`], where arguments of tools whose schemas cannot be compiled are any object. Returns the
    /// names of those tools, too.
    ///
    /// # Errors
    /// As [`Format::constraint`], for other reasons than a tool.
    pub fn loose_constraint(
        &self,
        ask: &Ask<'_>,
        tokenizer: &Tokenizer,
        with: &Grammars,
    ) -> Result<(Option<Constraint>, Vec<String>), Error> {
        let refused = match self.constraint(ask, tokenizer, with) {
            Ok(constraint) => return Ok((constraint, Vec::new())),
            Err(error) => error,
        };
        let alone = Ask { tools: &[], choice: Choice::Auto, ..*ask };
        if ask.tools.is_empty() || matches!(refused, Error::Setup(_) | Error::Broken(_)) {
            return Err(refused);
        }
        self.constraint(&alone, tokenizer, with)?;
        let fails = |tools: &[Tool]| {
            let ask = Ask { content: None, tools, choice: Choice::Required, ..*ask };
            self.constraint(&ask, tokenizer, with).is_err()
        };
        let mut loose = Vec::new();
        faulty(ask.tools, 0, &fails, &mut loose);
        if loose.is_empty() {
            // Each by itself can be compiled, and all together are too large.
            loose = (0..ask.tools.len()).collect();
        }
        let mut tools = ask.tools.to_vec();
        loose.iter().for_each(|&i| tools[i].parameters = Value::Null);
        let constraint = self.constraint(&Ask { tools: &tools, ..*ask }, tokenizer, with)?;
        Ok((constraint, loose.into_iter().map(|i| tools[i].name.clone()).collect()))
    }

    /// Returns whether the parser reads answers as a whole, as messages with headers.
    fn reads_all(&self) -> bool {
        self.calls.is_some_and(Calls::reads_all)
    }
}

/// Appends the indices of the tools that fail, the first of which is `first`, by halves: most do not.
fn faulty(tools: &[Tool], first: usize, fails: &dyn Fn(&[Tool]) -> bool, found: &mut Vec<usize>) {
    if tools.is_empty() || !fails(tools) {
        return;
    }
    if tools.len() == 1 {
        return found.push(first);
    }
    let (left, right) = tools.split_at(tools.len() / 2);
    faulty(left, first, fails, found);
    faulty(right, first + left.len(), fails, found);
}

impl Page<'_> {
    /// Adds a rule for the calls behind the opening mark; returns its name.
    fn calls(&mut self, calls: &Calls, tools: &[&Tool], most: Option<usize>) -> String {
        let Notation { head, call, next, close, .. } = calls.notation;
        let each: Vec<String> = tools.iter().map(|tool| call(self, tool)).collect();
        let one = self.rule("", &each.join(" | "));
        let times = most.map_or("*".into(), |most| format!("{{0,{}}}", most.saturating_sub(1)));
        let more = next.filter(|_| most != Some(1)).map(|next| format!("({} {one}){times}", self.say(next)));
        let body = format!("{} {one} {} {}", self.say(head), more.unwrap_or_default(), self.say(close));
        self.rule("", &body)
    }

    /// Returns the grammar after a trigger.
    fn when_called(
        mut self,
        calls: &Calls,
        tools: &[&Tool],
        most: Option<usize>,
        with: &Grammars,
    ) -> Result<Grammar, Error> {
        let calls = self.calls(calls, tools, most);
        self.compile(&calls, with)
    }

    /// Returns the grammar of a whole answer: calls, or content.
    fn answer(
        mut self,
        calls: Option<&Calls>,
        tools: &[&Tool],
        most: Option<usize>,
        content: Option<&Rule>,
        lead: Lead,
        with: &Grammars,
    ) -> Result<Grammar, Error> {
        let messages = self.format.reads_all();
        let mut options = Vec::new();
        if let Some(calls) = calls {
            let listed = self.calls(calls, tools, most);
            options.push(format!("{} {listed}", self.say(calls.notation.open)));
        }
        if let Some(content) = content {
            let header = if messages { self.say(harmony::FINAL) } else { String::new() };
            let content = self.part(content.clone());
            options.push(format!("{header} {content}"));
        }
        let before = match (messages, lead) {
            (true, _) => format!("({})?", harmony::write_thought(&mut self)),
            (false, Lead::Blanks) => "LEAD?".into(),
            (false, Lead::None) => String::new(),
        };
        let start = format!("{before} ({})", options.join(" | "));
        self.compile(&start, with)
    }

    fn compile(self, start: &str, with: &Grammars) -> Result<Grammar, Error> {
        const TOKENS: &str = "TEXT: /(?s:.*)/\nNAME: /[A-Za-z_][A-Za-z0-9_.-]{0,63}/\nLEAD: /[ \\t\\n\\r]{1,4}/\n";
        with.compile_parts(format!("start: {start}\n{}{TOKENS}", self.rules), &self.parts, !self.has_text)
    }
}
